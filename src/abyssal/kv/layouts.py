"""Record layouts: how one cached entry is stored in bytes, and where it lies in a page.

In a page all data rows come first, then all scale rows, then padding up to a multiple of `page_align`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from abyssal.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """One record format. Sizes are bytes per entry."""

    name: str
    dim: int  # values per entry
    data_bytes: int
    scale_bytes: int
    page_align: int
    dtype: torch.dtype  # element type of the data row

    @property
    def bytes_per_entry(self) -> int:
        return self.data_bytes + self.scale_bytes

    def page_bytes(self, entries: int) -> int:
        """Bytes of a page of `entries` records, padding included."""
        return -(-entries * self.bytes_per_entry // self.page_align) * self.page_align

    def data_offset(self, slot: int, entries: int) -> int:
        """Byte offset in a page of `entries` records of the data row of record `slot`."""
        return slot * self.data_bytes

    def scale_offset(self, slot: int, entries: int) -> int:
        """Byte offset in a page of `entries` records of the scale row of record `slot`."""
        return entries * self.data_bytes + slot * self.scale_bytes


def _plain(name: str, dim: int, dtype: torch.dtype) -> Layout:
    size = dim * dtype.itemsize
    return Layout(name, dim, data_bytes=size, scale_bytes=0, page_align=dtype.itemsize, dtype=dtype)


_LAYOUTS = {
    layout.name: layout
    for layout in (
        _plain("fp32", 512, torch.float32),
        _plain("bf16", 512, torch.bfloat16),
        _plain("index_fp32", 128, torch.float32),
        _plain("index_bf16", 128, torch.bfloat16),
    )
}


def get(name: str, dim: int | None = None) -> Layout:
    """The layout called `name`, for entries of `dim` values (default: the released models' width).

    Raises:
        ConfigError: the name is unknown, or the layout exists for its own width only.
    """
    if name not in _LAYOUTS:
        raise ConfigError(f"unknown record layout {name!r}; known: {', '.join(_LAYOUTS)}")
    layout = _LAYOUTS[name]
    if dim is None or dim == layout.dim:
        return layout
    if layout.scale_bytes:
        raise ConfigError(f"layout {name!r} stores {layout.dim} values per entry, not {dim}; choose fp32 or bf16")
    return replace(layout, dim=dim, data_bytes=dim * layout.dtype.itemsize)


def state_rows(values: int) -> Layout:
    """Compressor state: one fp32 row of `values` per token (projections and scores)."""
    return _plain("state", values, torch.float32)
