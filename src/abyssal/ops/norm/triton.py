"""RMS norms of one or two tensors in one launch, the first rounded to e4m3 where a product reads it so."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from abyssal.ops._aot import AotCase
from abyssal.ops._records import e4m3_tiles, early, next_power_of_2, round_like, store_like, to_fp32, wait_before_product
from abyssal.ops.linear.triton import QuantisedInput, scale_strides, store_codes


@triton.jit
def _norm_row(
    x, stride, weight, out, scales, scales_stride, tiles_stride, row, D, eps, WIDTH: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    column = tl.arange(0, WIDTH)
    inside = column < D
    weights = tl.load(weight + column, mask=inside, other=0.0)
    wait_before_product(EARLY)
    values = to_fp32(tl.load(x + row * stride + column, mask=inside, other=0.0))
    scale = tl.rsqrt(tl.sum(values * values) / D + eps)
    values = values * scale * weights
    if TILE is None:
        store_like(out + row * D + column, values, mask=inside)
    else:
        codes, exponent = e4m3_tiles(round_like(values, True), TILE, WIDTH)
        store_codes(codes, exponent, out + row * D, scales + row * scales_stride, tiles_stride, 0, D, TILE, WIDTH)


@triton.jit(do_not_specialize=["scales_stride", "tiles_stride"])
def rms_norm_kernel(
    x, x_stride, x_weight, x_out, x_scales, scales_stride, tiles_stride, DX, y, y_stride, y_weight, y_out, DY, eps,
    WX: tl.constexpr, WY: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (0, r): row r of x, as codes uint8 and scales fp32 [rows, DX / TILE] if TILE is given; program (1, r): row r of y."""
    row = tl.program_id(1).to(tl.int64)
    if tl.program_id(0) == 0:
        _norm_row(x, x_stride, x_weight, x_out, x_scales, scales_stride, tiles_stride, row, DX, eps, WX, TILE, EARLY)
    elif y is not None:
        _norm_row(y, y_stride, y_weight, y_out, None, 0, 0, row, DY, eps, WY, None, EARLY)


def rms_norm(*pairs: tuple[Tensor, Tensor], eps: float, tile: int | None = None) -> tuple[Tensor | QuantisedInput, ...]:
    """As the reference, for one or two pairs of x [T, D_i] and weight fp32 [D_i] with the same T; x is contiguous in D_i.

    Args:
        tile: the first result is rounded to e4m3 in tiles of so many values, as `quantise` does.
    """
    assert 1 <= len(pairs) <= 2 and len({len(x) for x, _ in pairs}) == 1, f"{[tuple(x.shape) for x, _ in pairs]} in one launch"
    assert all(x.stride(1) == 1 and weight.shape == x.shape[1:] for x, weight in pairs)
    (x, x_weight), *rest = pairs
    rows, columns = x.shape
    quantised = None if tile is None else QuantisedInput.empty(rows, (columns,), tile, x.device)
    x_out = torch.empty_like(x, memory_format=torch.contiguous_format) if quantised is None else quantised.codes.view(torch.uint8)
    y, y_weight = rest[0] if rest else (None, None)
    y_out = None if y is None else torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if rows:
        second = 1 if y is None else y.shape[1]
        scales = None if quantised is None else quantised.scales
        rms_norm_kernel[len(pairs), rows](
            x, x.stride(0), x_weight, x_out, scales, *scale_strides(scales), columns,
            y, 0 if y is None else y.stride(0), y_weight, y_out, second, eps,
            WX=next_power_of_2(columns), WY=next_power_of_2(second), TILE=tile,
            num_warps=4, **early(len(pairs) * rows, x),
        )  # fmt: skip
    first = x_out if quantised is None else quantised
    return (first,) if y_out is None else (first, y_out)


def aot_cases() -> list[AotCase]:
    first = {
        "x": "*bf16",
        "x_stride": "i32",
        "x_weight": "*fp32",
        "x_scales": "*fp32",
        "scales_stride": "i32",
        "tiles_stride": "i32",
        "DX": "i32",
        "eps": "fp32",
    }
    second = {"y": "*bf16", "y_stride": "i32", "y_weight": "*fp32", "y_out": "*bf16", "DY": "i32"}
    absent = {"y": None, "y_weight": None, "y_out": None}
    aligned = ("x", "x_stride", "x_weight", "x_out", "x_scales", "DX", "y", "y_stride", "y_weight", "y_out", "DY")
    cases = []
    for two, tile in ((True, 128), (True, 32), (True, None), (False, None)):
        constants = (
            {"WX": 2048, "WY": 512, "TILE": tile, "EARLY": True} | ({} if two else absent) | ({} if tile else {"x_scales": None})
        )
        free = tuple(name for name in aligned if name not in constants)
        signature = first | second | {"x_out": "*u8" if tile else "*bf16"}
        cases.append(AotCase(f"rms_norm{' of two' * two} tile={tile}", rms_norm_kernel, signature, constants, aligned=free))
    return cases
