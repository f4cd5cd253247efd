"""Index queries in one launch: RoPE, Hadamard rotation (V4), the keys' grid, head weights (V4 spec 2.10, V4.1 spec 3.6)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from abyssal.kv import layouts
from abyssal.kv.layouts import Grid
from abyssal.ops._aot import AotCase
from abyssal.ops._records import (
    e2m1_codes,
    e2m1_values,
    e4m3_codes,
    hadamard,
    load_rope,
    rotate,
    round_like,
    scale_tiles,
    store_like,
    to_fp32,
)


@dataclass(frozen=True, slots=True)
class IndexQueryConfig:
    """One warp per program; 4 heads of 128 values are 16 values per lane."""

    heads_per_program: int  # of one token


def index_query_config(tokens: int, heads: int) -> IndexQueryConfig:
    return IndexQueryConfig(min(4, heads & -heads))


@triton.jit
def index_query_kernel(
    q, q_stride_t, q_stride_h, head_weights, weights_stride, rope, result, weights,
    HEADS: tl.constexpr, PER_PROGRAM: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, HADAMARD: tl.constexpr, quant: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    token = program // (HEADS // PER_PROGRAM)
    head = program % (HEADS // PER_PROGRAM) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)[:, None]
    column = tl.arange(0, D)[None, :]
    BF16: tl.constexpr = q.dtype.element_ty == tl.bfloat16
    x = to_fp32(tl.load(q + token * q_stride_t + head * q_stride_h + column))
    weight = to_fp32(tl.load(head_weights + token * weights_stride + head)) * (D**-0.5 * HEADS**-0.5)
    cos, sin = load_rope(rope, token, PER_PROGRAM, D, ROPE)
    x = round_like(rotate(x, cos, sin, PER_PROGRAM, D, ROPE), BF16)
    if HADAMARD:
        x = round_like(hadamard(x, PER_PROGRAM, D), BF16)
    here = result + (token * HEADS + head) * D + column
    if quant is None:
        store_like(here, x)
    else:
        scaled, _, scale = scale_tiles(x, quant, PER_PROGRAM, D)
        if quant.kind == "e4m3":  # one tile per head: its scale is positive, so it passes through the relu into the weight
            tl.static_assert(quant.tile == D)
            tl.store(here, e4m3_codes(scaled))
            weight *= scale
        else:
            tiles = tl.reshape(e2m1_values(e2m1_codes(scaled)), (PER_PROGRAM, D // quant.tile, quant.tile)) * scale[:, :, None]
            store_like(here, tl.reshape(tiles, (PER_PROGRAM, D)))
    tl.store(weights + token * HEADS + head, weight)


def index_query(
    q: Tensor,
    head_weights: Tensor,
    rope: Tensor,
    *,
    rotate_query: bool,
    grid: Grid | None,
    config: IndexQueryConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries as the scores read them; arguments as the reference's.

    Args:
        q: bf16 or fp32 [T, Hi, Di], contiguous in Di; kept.

    Returns:
        Queries [T, Hi, Di]: float8_e4m3fn codes for an e4m3 grid, else in q's dtype, values of an e2m1 grid dequantised (exact in
        bf16). Weights fp32 [T, Hi] with constants and e4m3 scales folded in.
    """
    tokens, heads, dim = q.shape
    assert q.stride(2) == 1 and dim & (dim - 1) == 0, f"queries of {dim} values with strides {q.stride()}; use backend=reference"
    assert head_weights.shape == (tokens, heads) and head_weights.stride(1) == 1, f"head weights are {tuple(head_weights.shape)}"
    assert len(rope) == tokens and rope.is_contiguous(), f"rope is {tuple(rope.shape)} for {tokens} tokens"
    codes = grid is not None and grid.kind == "e4m3"
    result = torch.empty(q.shape, dtype=torch.float8_e4m3fn if codes else q.dtype, device=q.device)
    weights = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if tokens == 0:
        return result, weights
    config = config or index_query_config(tokens, heads)
    assert heads % config.heads_per_program == 0, f"{heads} heads are no multiple of {config}"
    index_query_kernel[(tokens * heads // config.heads_per_program,)](
        q, q.stride(0), q.stride(1), head_weights, head_weights.stride(0), torch.view_as_real(rope),
        result.view(torch.uint8) if codes else result, weights, HEADS=heads, PER_PROGRAM=config.heads_per_program, D=dim,
        ROPE=2 * rope.shape[1], HADAMARD=rotate_query, quant=grid, num_warps=1,
    )  # fmt: skip
    return result, weights


def aot_cases() -> list[AotCase]:
    signature = {
        "q": "*bf16", "q_stride_t": "i32", "q_stride_h": "i32", "head_weights": "*bf16", "weights_stride": "i32", "rope": "*fp32",
        "weights": "*fp32",
    }  # fmt: skip
    return [
        AotCase(
            f"index_query {name} h{heads} hadamard={turned} x{per_program}", index_query_kernel,
            signature | {"result": "*u8" if name == "index_fp8" else "*bf16"},
            {
                "HEADS": heads, "PER_PROGRAM": per_program, "D": 128, "ROPE": 64, "HADAMARD": turned,
                "quant": layouts.get(name).grid,
            },
            num_warps=1, aligned=("q", "q_stride_t", "q_stride_h", "rope", "result", "weights"),
        )
        for name in ("index_bf16", "index_fp8", "index_mxfp4")
        for heads, turned in ((64, True), (32, False))
        for per_program in (4, 8)
    ]  # fmt: skip
