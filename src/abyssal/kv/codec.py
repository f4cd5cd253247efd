"""Reference pack and unpack of record layouts. A layout is given by name or as the `Layout` itself.

Scales follow the models' own quantisation (V4 spec 3.2, V4.1 spec 4); decoding accepts any scale byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from abyssal.kv import layouts
from abyssal.kv.layouts import Grid, Layout
from abyssal.ops.linear import E2M1_VALUES, E4M3_AMAX_FLOOR, E4M3_MAX, ceil_log2, e8m0_to_float, exp2, unpack_e2m1

E2M1_MAX = E2M1_VALUES[-1]
E2M1_AMAX_FLOOR = 6 * 2.0**-126
E4M3_SCALE_MIN = 2.0**-9  # least positive e4m3 value


def _layout(layout: str | Layout, dim: int | None = None) -> Layout:
    return layouts.get(layout, dim) if isinstance(layout, str) else layout


def encode(layout: str | Layout, x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, dim] -> data uint8 [n, data_bytes], scales uint8 [n, scale_bytes]."""
    layout = _layout(layout, x.shape[-1])
    if layout.grid is None:
        data = _bytes(x.to(layout.dtype))
        return data, data.new_empty(len(x), 0)
    codes, scales = quantize(layout.grid, x[:, : layout.grid.values].float())
    rest = _bytes(x[:, layout.grid.values :].to(layout.dtype))
    padding = scales.new_zeros(len(x), layout.scale_bytes - scales.shape[1])
    return torch.cat([codes, rest], dim=1), torch.cat([scales, padding], dim=1)


def decode(layout: str | Layout, data: Tensor, scales: Tensor) -> Tensor:
    """data uint8 [n, data_bytes], scales uint8 [n, scale_bytes] -> fp32 [n, dim]."""
    layout = layout if isinstance(layout, Layout) else _layout_of_width(layout, data.shape[1])
    if layout.grid is None:
        return data.contiguous().view(layout.dtype).float()
    split = layout.grid.values if layout.grid.kind == "e4m3" else layout.grid.values // 2
    values = dequantize(layout.grid, data[:, :split], scales)
    return torch.cat([values, data[:, split:].contiguous().view(layout.dtype).float()], dim=1)


def quantize(grid: Grid, x: Tensor) -> tuple[Tensor, Tensor]:
    """x fp32 [n, values] -> codes uint8 [n, values or values / 2], scales uint8 [n, bytes], by the writer's scale rule."""
    tiles = x.unflatten(1, (-1, grid.tile))  # [n, tiles, tile]
    amax = tiles.abs().amax(-1)
    if grid.scale == "e4m3":
        stored = (amax / E2M1_MAX).clamp(E4M3_SCALE_MIN, E4M3_MAX).to(torch.float8_e4m3fn)
        scale = stored.float()
    else:
        floor, top = (E4M3_AMAX_FLOOR, E4M3_MAX) if grid.kind == "e4m3" else (E2M1_AMAX_FLOOR, E2M1_MAX)
        exponent = ceil_log2(amax.clamp(min=floor) / top)
        scale = exp2(exponent)
        stored = scale if grid.scale == "fp32" else (exponent + 127).to(torch.uint8)
    scaled = (tiles / scale.unsqueeze(-1)).flatten(1)
    codes = _bytes(scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)) if grid.kind == "e4m3" else pack_e2m1(scaled)
    return codes, _bytes(stored)


def dequantize(grid: Grid, codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse of `quantize`: fp32 [n, values], exact. Scale bytes beyond the grid's are padding."""
    values = codes.contiguous().view(torch.float8_e4m3fn).float() if grid.kind == "e4m3" else unpack_e2m1(codes)
    tiles = grid.values // grid.tile
    if grid.scale == "ue8m0":
        stored = scales[:, :tiles]
        scale = torch.where(stored == 255, torch.nan, e8m0_to_float(stored))
    else:
        dtype = torch.float32 if grid.scale == "fp32" else torch.float8_e4m3fn
        scale = scales[:, : tiles * dtype.itemsize].contiguous().view(dtype).float()
    return (values.unflatten(1, (tiles, grid.tile)) * scale.unsqueeze(-1)).flatten(1)


def pack_e2m1(x: Tensor) -> Tensor:
    """x fp32 [n, values] -> uint8 [n, values / 2]: nearest code, ties to the even one, clamped, the sign kept (V4 spec 3.1)."""
    a = x.abs()
    code = (a > 0.25).byte() + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5)
    code = code | (x.signbit().byte() << 3)
    return code[:, ::2] | (code[:, 1::2] << 4)


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


def _bytes(x: Tensor) -> Tensor:
    """[n, k] of any type -> uint8 [n, k * itemsize]."""
    return x.reshape(-1).view(torch.uint8).view(len(x), x.shape[1] * x.element_size())  # of no rows too


def _layout_of_width(name: str, data_bytes: int) -> Layout:
    layout = layouts.get(name)
    return layout if layout.grid is not None else layouts.get(name, data_bytes // layout.dtype.itemsize)
