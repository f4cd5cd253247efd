"""Pools of records as kernels see them: bytes, with poison wherever nothing was stored."""

from __future__ import annotations

import torch
from torch import Tensor

from abyssal.kv import codec
from abyssal.kv.layouts import Layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = 0xFF
ENTRIES = 4  # per page


def new_pool(layout: Layout, pages: int, entries: int = ENTRIES, padding: int = 16) -> Tensor:
    """uint8 [pages, page bytes + padding], all poison: a bucket's page may be longer than the layout's."""
    stride = -(-layout.page_bytes(entries) // 16) * 16 + padding
    return torch.full((pages, stride), POISON, dtype=torch.uint8, device=DEVICE)


def written(pool: Tensor, layout: Layout, slots: Tensor, rows: Tensor, entries: int = ENTRIES) -> Tensor:
    """`pool` [pages, bytes] with `rows` [n, dim] encoded at `slots`, on the CPU; negative slots are left out."""
    out = pool.cpu().clone()
    if len(rows) == 0:
        return out
    data, scales = codec.encode(layout, rows.cpu())
    for slot, d, s in zip(slots.tolist(), data, scales, strict=True):
        if slot >= 0:
            page, row = divmod(slot, entries)
            out[page, layout.data_offset(row, entries) :][: layout.data_bytes] = d
            out[page, layout.scale_offset(row, entries) :][: layout.scale_bytes] = s
    return out


def bf16_steps(a: Tensor, b: Tensor) -> Tensor:
    """Distance of bf16 values, counted in bf16 values between them; the zeros are one value."""
    assert not (a.isnan() | b.isnan()).any()

    def order(x: Tensor) -> Tensor:
        bits = x.bfloat16().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (order(a) - order(b)).abs()
