"""Record layouts: how one cached entry is stored in bytes, and where it lies in a page.

In a page all data rows come first, then all scale rows, then padding up to a multiple of `page_align`. Sizes of records occur in
this file only. Sources: V4 spec 3.7, V4.1 spec 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from abyssal.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Grid:
    """How the leading values of a record are quantised; values after them are stored in the layout's dtype."""

    values: int  # quantised values at the front of an entry
    kind: Literal["e4m3", "e2m1"]  # e2m1: two codes per byte, the even index in the low nibble
    tile: int  # consecutive values that share one scale
    scale: Literal["ue8m0", "e4m3", "fp32"]


@dataclass(frozen=True, slots=True)
class Layout:
    """One record format. Sizes are bytes per entry."""

    name: str
    dim: int  # values per entry
    data_bytes: int
    scale_bytes: int
    page_align: int
    dtype: torch.dtype  # of values outside of the grid
    grid: Grid | None = None

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
        Layout("v4", 512, 576, 8, 576, torch.bfloat16, Grid(448, "e4m3", 64, "ue8m0")),  # 7 scales and a zero byte
        Layout("v41", 512, 512, 16, 512, torch.bfloat16, Grid(512, "e4m3", 32, "ue8m0")),
        Layout("v41_fp4", 512, 256, 32, 256, torch.bfloat16, Grid(512, "e2m1", 16, "e4m3")),
        _plain("index_fp32", 128, torch.float32),
        _plain("index_bf16", 128, torch.bfloat16),
        # 64 keys fill a page without padding; a bucket may add some.
        Layout("index_fp8", 128, 128, 4, 256, torch.bfloat16, Grid(128, "e4m3", 128, "fp32")),
        Layout("index_mxfp4", 128, 64, 4, 256, torch.bfloat16, Grid(128, "e2m1", 32, "ue8m0")),
    )
}

# What one layer of a V3.2-style stack keeps of a token in bf16, for comparison: latent, rotary key, index key (V4 spec 6.2).
V32_TOKEN_BYTES = (512 + 64 + 128) * torch.bfloat16.itemsize


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
    if layout.grid is not None:
        raise ConfigError(f"layout {name!r} stores {layout.dim} values per entry, not {dim}; choose fp32 or bf16")
    return replace(layout, dim=dim, data_bytes=dim * layout.dtype.itemsize)


def state_rows(values: int) -> Layout:
    """Compressor state: fp32 rows of `values`, one per token (projections and scores) or one of running sums."""
    return _plain("state", values, torch.float32)
