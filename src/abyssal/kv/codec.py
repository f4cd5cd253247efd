"""Reference pack and unpack of record layouts. A layout is given by name or as the `Layout` itself."""

from __future__ import annotations

import torch
from torch import Tensor

from abyssal.kv import layouts
from abyssal.kv.layouts import Layout


def _layout(layout: str | Layout, dim: int | None = None) -> Layout:
    return layouts.get(layout, dim) if isinstance(layout, str) else layout


def encode(layout: str | Layout, x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, dim] -> data uint8 [n, data_bytes], scales uint8 [n, scale_bytes]."""
    layout = _layout(layout, x.shape[-1])
    data = x.to(layout.dtype).contiguous().view(torch.uint8)
    return data, data.new_empty(x.shape[0], 0)


def decode(layout: str | Layout, data: Tensor, scales: Tensor) -> Tensor:
    """data uint8 [n, data_bytes], scales uint8 [n, scale_bytes] -> fp32 [n, dim]."""
    dtype = layouts.get(layout).dtype if isinstance(layout, str) else layout.dtype
    return data.contiguous().view(dtype).float()


def pack_pages(layout: str | Layout, x: Tensor) -> Tensor:
    """x [p, entries, dim] -> pages uint8 [p, page_bytes(entries)]; padding is zero."""
    pages, entries, dim = x.shape
    layout = _layout(layout, dim)
    data, scales = encode(layout, x.reshape(-1, dim))
    out = data.new_zeros(pages, layout.page_bytes(entries))
    split = entries * layout.data_bytes
    out[:, :split] = data.view(pages, -1)
    out[:, split : split + entries * layout.scale_bytes] = scales.view(pages, -1)
    return out


def unpack_pages(layout: str | Layout, pages: Tensor, entries: int) -> Tensor:
    """pages uint8 [p, >= page_bytes(entries)] -> fp32 [p, entries, dim]."""
    layout = _layout(layout)
    split = entries * layout.data_bytes
    data = pages[:, :split].reshape(-1, layout.data_bytes)
    scales = pages[:, split : split + entries * layout.scale_bytes].reshape(len(data), layout.scale_bytes)
    return decode(layout, data, scales).view(len(pages), entries, -1)
