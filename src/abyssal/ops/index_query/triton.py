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
    e2m1_rounded,
    e4m3_codes,
    early,
    hadamard,
    load_rope,
    power_of_two,
    rotate,
    round_like,
    scale_exponent,
    store_like,
    to_fp32,
    wait_for_inputs,
)


@dataclass(frozen=True, slots=True)
class IndexQueryConfig:
    """4 heads of 128 values per warp are 16 values per lane."""

    heads: int  # of one token, together
    tiles: int = 1  # of so many heads, one after the other
    num_warps: int = 1


def index_query_config(tokens: int, heads: int) -> IndexQueryConfig:
    """4 heads per warp while a program's way is what counts, then more, so that fewer instructions go into addresses.

    From 1,024 tokens on, one program per token keeps memory busy, by loading a tile while it works on the one before.
    """
    per_tile = min(4 if tokens <= 64 else 8, heads & -heads)
    return IndexQueryConfig(per_tile, heads // per_tile if tokens >= 1024 else 1)


@triton.jit
def index_query_kernel(
    q, q_stride_t, q_stride_h, head_weights, weights_stride, rope, result, weights,
    HEADS: tl.constexpr, PER_TILE: tl.constexpr, TILES: tl.constexpr, D: tl.constexpr, HADAMARD: tl.constexpr, quant: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A vector is handled in halves, of which RoPE turns the second; its Hadamard rotation is (a H + b H, a H - b H), H of half the size."""
    HALF: tl.constexpr = D // 2
    SCALE: tl.constexpr = D**-0.5
    BF16: tl.constexpr = q.dtype.element_ty == tl.bfloat16
    program = tl.program_id(0)
    PROGRAMS: tl.constexpr = HEADS // (PER_TILE * TILES)  # of a token
    token = (program // PROGRAMS).to(tl.int64)
    head = program % PROGRAMS * (PER_TILE * TILES) + tl.arange(0, PER_TILE)[:, None]
    column = tl.arange(0, HALF)[None, :]
    there = result + (token * HEADS + head) * D + column
    wait_for_inputs(EARLY)
    cos, sin = load_rope(rope, token, PER_TILE, HALF, HALF)
    for tile in tl.range(TILES, num_stages=STAGES):
        here = q + token * q_stride_t + (head + tile * PER_TILE) * q_stride_h + column
        a, b = tl.load(here), tl.load(here + HALF)
        weight = tl.load(head_weights + token * weights_stride + head + tile * PER_TILE)
        turned = rotate(to_fp32(b), cos, sin, PER_TILE, HALF, HALF)
        if not HADAMARD:
            x, y = to_fp32(a), round_like(turned, BF16)
        else:
            x, y = hadamard(to_fp32(a), HALF), hadamard(round_like(turned, BF16), HALF) * SCALE
            x, y = round_like(tl.fma(x, SCALE, y), BF16), round_like(tl.fma(x, SCALE, -y), BF16)
        folded = to_fp32(weight) * (SCALE * HEADS**-0.5)
        if quant is None:
            store_like(there, x)
            store_like(there + HALF, y)
        elif quant.kind == "e4m3":  # one tile per head: its scale is positive, so it passes through the relu into the weight
            tl.static_assert(quant.tile == D)
            amax = tl.maximum(tl.max(tl.abs(x), 1, keep_dims=True), tl.max(tl.abs(y), 1, keep_dims=True))
            exponent = scale_exponent(amax, "e4m3")
            inverse = power_of_two(-exponent)
            tl.store(there, e4m3_codes(x * inverse))
            tl.store(there + HALF, e4m3_codes(y * inverse))
            folded *= power_of_two(exponent)
        else:
            store_like(there, _on_e2m1(x, quant.tile, PER_TILE, HALF))
            store_like(there + HALF, _on_e2m1(y, quant.tile, PER_TILE, HALF))
        tl.store(weights + token * HEADS + head + tile * PER_TILE, folded)
        there += PER_TILE * D


@triton.jit
def _on_e2m1(x, TILE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """x [ROWS, WIDTH] on the e2m1 grid of tiles with power-of-two scales, dequantised."""
    tiles = tl.reshape(x, (ROWS, WIDTH // TILE, TILE))
    exponent = scale_exponent(tl.max(tl.abs(tiles), 2, keep_dims=True), "e2m1")
    return tl.reshape(e2m1_rounded(tiles * power_of_two(-exponent)) * power_of_two(exponent), (ROWS, WIDTH))


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
    assert q.stride(2) == 1 and dim & (dim - 1) == 0 and dim == 4 * rope.shape[1], (
        f"queries of {dim} values, {2 * rope.shape[1]} of them rotated, with strides {q.stride()}; use backend=reference"
    )
    assert head_weights.shape == (tokens, heads) and head_weights.stride(1) == 1, f"head weights are {tuple(head_weights.shape)}"
    assert len(rope) == tokens and rope.is_contiguous(), f"rope is {tuple(rope.shape)} for {tokens} tokens"
    codes = grid is not None and grid.kind == "e4m3"
    result = torch.empty(q.shape, dtype=torch.float8_e4m3fn if codes else q.dtype, device=q.device)
    weights = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if tokens == 0:
        return result, weights
    config = config or index_query_config(tokens, heads)
    assert heads % (config.heads * config.tiles) == 0, f"{heads} heads are no multiple of {config}"
    programs = tokens * heads // (config.heads * config.tiles)
    index_query_kernel[(programs,)](
        q, q.stride(0), q.stride(1), head_weights, head_weights.stride(0), torch.view_as_real(rope),
        result.view(torch.uint8) if codes else result, weights, HEADS=heads, PER_TILE=config.heads, TILES=config.tiles, D=dim,
        HADAMARD=rotate_query, quant=grid, STAGES=min(3, config.tiles), num_warps=config.num_warps, **early(programs, q),
    )  # fmt: skip
    return result, weights


def aot_cases() -> list[AotCase]:
    signature = {
        "q": "*bf16", "q_stride_t": "i32", "q_stride_h": "i32", "head_weights": "*bf16", "weights_stride": "i32", "rope": "*fp32",
        "weights": "*fp32",
    }  # fmt: skip
    return [
        AotCase(
            f"index_query {name} h{heads} hadamard={turned} x{per_tile} x{tiles}", index_query_kernel,
            signature | {"result": "*u8" if name == "index_fp8" else "*bf16"},
            {
                "HEADS": heads, "PER_TILE": per_tile, "TILES": tiles, "D": 128, "HADAMARD": turned, "quant": layouts.get(name).grid,
                "STAGES": min(3, tiles), "EARLY": tiles == 1,
            },
            num_warps=1, aligned=("q", "q_stride_t", "q_stride_h", "rope", "result", "weights"),
        )
        for name in ("index_bf16", "index_fp8", "index_mxfp4")
        for heads, turned in ((64, True), (32, False))
        for per_tile, tiles in ((4, 1), (8, 1), (8, heads // 8))
    ]  # fmt: skip
