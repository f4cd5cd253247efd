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
    INTERPRETED,
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
    to_bf16,
    to_fp32,
    wait_for_inputs,
)


@dataclass(frozen=True, slots=True)
class IndexQueryConfig:
    """A warp has its own heads: 4 of 128 values are 16 values per lane."""

    heads_per_program: int  # of one token
    num_warps: int
    parts: int = 2  # of a vector; a lane should load 16 bytes of each


def index_query_config(tokens: int, heads: int, rotate_query: bool) -> IndexQueryConfig:
    """Few heads per warp while a warp's way is what counts, then more, so that fewer instructions go into addresses.

    us on an H200: V4 1.34 with 4 heads and 1.54 with 8 in 4 warps at 1 token, 1.94 and 2.08 at 64, where 16 take 1.76, since programs take
    time to start; 512 tokens 5.3 with 16 heads and 6.0 with 32 in 4 parts, 4,096 tokens 33.3 and 30.4. V4.1 18.9 with 16 and 19.2 with 32.
    """
    num_warps = 1 if rotate_query and tokens <= 16 else 4
    per_warp = (4 if tokens <= 1024 else 8) if rotate_query else 2 if tokens <= 64 else 4
    return IndexQueryConfig(min(num_warps * per_warp, heads & -heads), num_warps, 4 if per_warp == 8 else 2)


@triton.jit
def index_query_kernel(
    q, q_stride_t, q_stride_h, head_weights, weights_stride, rope, result, weights,
    HEADS: tl.constexpr, PER_PROGRAM: tl.constexpr, D: tl.constexpr, HADAMARD: tl.constexpr, quant: tl.constexpr,
    PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A vector is handled in parts, of which RoPE turns those of its second half. The last butterflies of its Hadamard rotation lie
    between them.
    """
    WIDTH: tl.constexpr = D // PARTS
    SCALE: tl.constexpr = D**-0.5
    BF16: tl.constexpr = q.dtype.element_ty == tl.bfloat16
    program = tl.program_id(0)
    token = (program // (HEADS // PER_PROGRAM)).to(tl.int64)
    head = program % (HEADS // PER_PROGRAM) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    here = q + token * q_stride_t + head * q_stride_h + column
    wait_for_inputs(EARLY)
    raw = ()
    for i in tl.static_range(PARTS):
        raw += (tl.load(here + i * WIDTH),)
    weight = to_fp32(tl.load(head_weights + token * weights_stride + head)) * (SCALE * HEADS**-0.5)
    parts = ()
    for i in tl.static_range(PARTS):
        x = to_fp32(raw[i])
        if i >= PARTS // 2:
            cos, sin = load_rope(rope, token * (PARTS // 2) + (i - PARTS // 2), PER_PROGRAM, WIDTH, WIDTH)
            x = round_like(rotate(x, cos, sin, PER_PROGRAM, WIDTH, WIDTH), BF16)
        if HADAMARD:
            x = hadamard(x, WIDTH)
        parts += (x,)
    if HADAMARD:
        tl.static_assert(PARTS == 2 or PARTS == 4)
        if PARTS == 4:
            parts = parts[0] + parts[1], parts[0] - parts[1], parts[2] + parts[3], parts[2] - parts[3]
        turned = ()
        for sign in tl.static_range(1, -2, -2):
            for i in tl.static_range(PARTS // 2):
                turned += (tl.fma(parts[i], SCALE, parts[PARTS // 2 + i] * (SCALE * sign)),)
        parts = turned
    there = result + (token * HEADS + head) * D + column
    if quant is None:
        for i in tl.static_range(PARTS):
            store_like(there + i * WIDTH, round_like(parts[i], BF16))
    elif quant.kind == "e4m3":  # one tile per head: its scale is positive, so it passes through the relu into the weight
        tl.static_assert(quant.tile == D)
        rounded = ()
        for i in tl.static_range(PARTS):
            rounded += (to_bf16(parts[i]) if BF16 else parts[i],)
        most = rounded[0]
        for i in tl.static_range(1, PARTS):
            most = _larger(most, rounded[i])
        exponent = scale_exponent(tl.max(tl.abs(to_fp32(most)), 1, keep_dims=True), "e4m3")
        inverse = power_of_two(-exponent)
        for i in tl.static_range(PARTS):
            tl.store(there + i * WIDTH, _scaled_codes(rounded[i], inverse))
        weight *= power_of_two(exponent)
    else:
        for i in tl.static_range(PARTS):
            store_like(there + i * WIDTH, _on_e2m1(round_like(parts[i], BF16), quant.tile, PER_PROGRAM, WIDTH))
    tl.store(weights + token * HEADS + head, weight)


@triton.jit
def _larger(x, y):
    """Of each two values the larger size, with any sign; bf16 two at a time."""
    if INTERPRETED or x.dtype != tl.bfloat16:
        return tl.maximum(tl.abs(to_fp32(x)), tl.abs(to_fp32(y)))
    else:
        return tl.inline_asm_elementwise(
            "max.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.bfloat16, is_pure=True, pack=2
        )  # fmt: skip


@triton.jit
def _scaled_codes(x, scale):
    """x times powers of two [ROWS, 1] as e4m3 codes; bf16 two at a time."""
    if INTERPRETED or x.dtype != tl.bfloat16:
        return e4m3_codes(to_fp32(x) * scale)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c, d; .reg .b16 p, q; mul.rn.bf16x2 a, $1, $3; mul.rn.bf16x2 b, $2, $4; "
            "shl.b32 c, a, 16; and.b32 d, a, 0xffff0000; cvt.rn.satfinite.e4m3x2.f32 p, d, c; "
            "shl.b32 c, b, 16; and.b32 d, b, 0xffff0000; cvt.rn.satfinite.e4m3x2.f32 q, d, c; mov.b32 $0, {p, q}; }",
            "=r,r,r,r,r", [x, tl.broadcast_to(scale, x.shape).to(tl.bfloat16)], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip


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
    config = config or index_query_config(tokens, heads, rotate_query)
    assert heads % config.heads_per_program == 0, f"{heads} heads are no multiple of {config}"
    programs = tokens * heads // config.heads_per_program
    index_query_kernel[(programs,)](
        q, q.stride(0), q.stride(1), head_weights, head_weights.stride(0), torch.view_as_real(rope),
        result.view(torch.uint8) if codes else result, weights, HEADS=heads, PER_PROGRAM=config.heads_per_program, D=dim,
        HADAMARD=rotate_query, quant=grid, PARTS=config.parts, num_warps=config.num_warps, **early(programs, q),
    )  # fmt: skip
    return result, weights


def aot_cases() -> list[AotCase]:
    signature = {
        "q": "*bf16", "q_stride_t": "i32", "q_stride_h": "i32", "head_weights": "*bf16", "weights_stride": "i32", "rope": "*fp32",
        "weights": "*fp32",
    }  # fmt: skip
    return [
        AotCase(
            f"index_query {name} h{heads} hadamard={turned} x{config.heads_per_program}", index_query_kernel,
            signature | {"result": "*u8" if name == "index_fp8" else "*bf16"},
            {
                "HEADS": heads, "PER_PROGRAM": config.heads_per_program, "D": 128, "HADAMARD": turned,
                "quant": layouts.get(name).grid, "PARTS": config.parts, "EARLY": True,
            },
            num_warps=config.num_warps, aligned=("q", "q_stride_t", "q_stride_h", "rope", "result", "weights"),
        )
        for name in ("index_bf16", "index_fp8", "index_mxfp4")
        for heads, turned in ((64, True), (32, False))
        for config in dict.fromkeys(index_query_config(tokens, heads, turned) for tokens in (1, 64, 4096))
    ]  # fmt: skip
