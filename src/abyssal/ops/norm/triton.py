"""RMS norms of one or two tensors in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from abyssal.ops._aot import AotCase
from abyssal.ops._records import store_like, to_fp32


@triton.jit
def _norm_row(x, stride, weight, out, row, D, eps, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    values = to_fp32(tl.load(x + row * stride + column, mask=column < D, other=0.0))
    scale = tl.rsqrt(tl.sum(values * values) / D + eps)
    store_like(out + row * D + column, values * scale * tl.load(weight + column, mask=column < D, other=0.0), mask=column < D)


@triton.jit
def rms_norm_kernel(x, x_stride, x_weight, x_out, DX, y, y_stride, y_weight, y_out, DY, eps, WX: tl.constexpr, WY: tl.constexpr):
    """Program (0, r): row r of x; program (1, r): row r of y."""
    row = tl.program_id(1).to(tl.int64)
    if tl.program_id(0) == 0:
        _norm_row(x, x_stride, x_weight, x_out, row, DX, eps, WX)
    elif y is not None:
        _norm_row(y, y_stride, y_weight, y_out, row, DY, eps, WY)


def rms_norm(*pairs: tuple[Tensor, Tensor], eps: float) -> tuple[Tensor, ...]:
    """As the reference, for one or two pairs of x [T, D_i] and weight fp32 [D_i] with the same T; x is contiguous in D_i."""
    assert 1 <= len(pairs) <= 2 and len({len(x) for x, _ in pairs}) == 1, f"{[tuple(x.shape) for x, _ in pairs]} in one launch"
    assert all(x.stride(1) == 1 and weight.shape == x.shape[1:] for x, weight in pairs)
    outs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x, _ in pairs)
    if len(outs[0]) == 0:
        return outs
    (x, x_weight), (y, y_weight) = pairs if len(pairs) == 2 else (pairs[0], (None, None))
    assert x is not None
    rows, columns = x.shape
    second = 1 if y is None else y.shape[1]
    rms_norm_kernel[len(pairs), rows](
        x, x.stride(0), x_weight, outs[0], columns, y, 0 if y is None else y.stride(0), y_weight, None if y is None else outs[1],
        second, eps, WX=triton.next_power_of_2(columns), WY=triton.next_power_of_2(second), num_warps=4,
    )  # fmt: skip
    return outs


def aot_cases() -> list[AotCase]:
    first = {"x": "*bf16", "x_stride": "i32", "x_weight": "*fp32", "x_out": "*bf16", "DX": "i32", "eps": "fp32"}
    second = {"y": "*bf16", "y_stride": "i32", "y_weight": "*fp32", "y_out": "*bf16", "DY": "i32"}
    absent = {"y": None, "y_weight": None, "y_out": None}
    aligned = ("x", "x_stride", "x_weight", "x_out", "DX", "y", "y_stride", "y_weight", "y_out", "DY")
    return [
        AotCase(
            "rms_norm" + " of two" * two, rms_norm_kernel, first | second, {"WX": 2048, "WY": 512} | ({} if two else absent),
            aligned=tuple(name for name in aligned if two or name not in absent),
        )
        for two in (True, False)
    ]  # fmt: skip
