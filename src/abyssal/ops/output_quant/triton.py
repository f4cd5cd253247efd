"""Inverse RoPE of the attention output and its e4m3 quantisation in one pass (V4 spec 2.8, 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from abyssal.kv.layouts import Grid
from abyssal.ops._aot import AotCase
from abyssal.ops._records import (
    e4m3_codes,
    e4m3_values,
    early,
    load_rope,
    rotate,
    round_like,
    scale_tiles,
    store_like,
    to_fp32,
    wait_before_product,
)
from abyssal.ops.linear.triton import QuantisedInput, scale_strides


@dataclass(frozen=True, slots=True)
class OutputQuantConfig:
    """A program takes one head of several tokens, whose scales lie one after another."""

    tokens_per_program: int
    num_warps: int


def output_quant_config(tokens: int) -> OutputQuantConfig:
    """97 to 99 % of the copy bandwidth at 4,096 tokens (H200). Up to 64 tokens fewer programs, since each takes 1.2 ns to start."""
    return OutputQuantConfig(1, 1) if tokens <= 8 else OutputQuantConfig(8, 4) if tokens <= 64 else OutputQuantConfig(4, 4)


@triton.jit(do_not_specialize=["scales_stride", "tiles_stride", "tokens"])
def output_quant_kernel(
    out, out_stride_t, out_stride_h, rope, result, scales, scales_stride, tiles_stride, tokens,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, quant: tl.constexpr, CODES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """CODES: e4m3 codes to `result` uint8 [T, H, D] and scales fp32 [T, H D / tile]; else values in result's type."""
    head = tl.program_id(0) % HEADS
    last = tl.program_id(0) // HEADS * TOKENS + tl.arange(0, TOKENS)[:, None]
    token = tl.minimum(last, tokens - 1).to(tl.int64)  # beyond the last token it is done again
    column = tl.arange(0, D)[None, :]
    wait_before_product(EARLY)
    x = to_fp32(tl.load(out + token * out_stride_t + head * out_stride_h + column))
    cos, sin = load_rope(rope, token, TOKENS, D, ROPE)
    x = rotate(x, cos, -sin, TOKENS, D, ROPE)
    row = token * HEADS + head
    if quant is None:
        store_like(result + row * D + column, x)
    else:
        scaled, _, scale = scale_tiles(round_like(x, True), quant, TOKENS, D)
        codes = e4m3_codes(scaled)
        if CODES:
            tl.store(result + row * D + column, codes)
            tile = head * (D // quant.tile) + tl.arange(0, D // quant.tile)[None, :]
            tl.store(scales + token * scales_stride + tile.to(tl.int64) * tiles_stride, scale)
        else:
            tiles = tl.reshape(e4m3_values(codes), (TOKENS, D // quant.tile, quant.tile)) * scale[:, :, None]
            store_like(result + row * D + column, tl.reshape(tiles, (TOKENS, D)))


def output_quant(
    out: Tensor, rope: Tensor, tile: int | None, dtype: torch.dtype, *, config: OutputQuantConfig | None = None
) -> Tensor:
    """As the reference: [T, H, D] in `dtype`, quantised values already dequantised; for products that read plain values.

    Args:
        out: bf16 or fp32 [T, H, D], contiguous in D.
    """
    result = torch.empty(out.shape, dtype=dtype, device=out.device)
    grid = Grid(out.shape[2], "e4m3", tile, "ue8m0") if tile is not None and dtype == torch.bfloat16 else None
    _launch(out, rope, grid, result, None, config)
    return result


def output_quant_e4m3(
    out: Tensor, rope: Tensor, tile: int, groups: int, *, config: OutputQuantConfig | None = None
) -> QuantisedInput:
    """As a grouped FP8 product reads it: codes [T, G, K], K = H D / G consecutive values of a token, and their scales."""
    tokens, heads, dim = out.shape
    assert heads % groups == 0, f"{heads} heads do not divide into {groups} groups"
    quantised = QuantisedInput.empty(tokens, (groups, heads * dim // groups), tile, out.device)
    _launch(out, rope, Grid(dim, "e4m3", tile, "ue8m0"), quantised.codes.view(torch.uint8), quantised.scales, config)
    return quantised


def _launch(
    out: Tensor, rope: Tensor, grid: Grid | None, result: Tensor, scales: Tensor | None, config: OutputQuantConfig | None
) -> None:
    tokens, heads, dim = out.shape
    assert out.stride(2) == 1 and dim & (dim - 1) == 0, (
        f"heads of {dim} values with strides {out.stride()}; use backend=reference"
    )
    assert len(rope) == tokens and rope.is_contiguous(), f"rope is {tuple(rope.shape)} for {tokens} tokens"
    if tokens == 0:
        return
    config = config or output_quant_config(tokens)
    programs = -(-tokens // config.tokens_per_program) * heads
    output_quant_kernel[(programs,)](
        out, out.stride(0), out.stride(1), torch.view_as_real(rope), result, scales, *scale_strides(scales), tokens,
        HEADS=heads, TOKENS=config.tokens_per_program, D=dim, ROPE=2 * rope.shape[1], quant=grid, CODES=scales is not None,
        num_warps=config.num_warps, **early(programs, out),
    )  # fmt: skip


def aot_cases() -> list[AotCase]:
    signature = {
        "out": "*bf16",
        "out_stride_t": "i32",
        "out_stride_h": "i32",
        "rope": "*fp32",
        "scales": "*fp32",
        "scales_stride": "i32",
        "tiles_stride": "i32",
        "tokens": "i32",
    }
    return [
        AotCase(
            f"output_quant h{heads} tile={tile} codes={codes} x{config.tokens_per_program}", output_quant_kernel,
            signature | {"result": "*u8" if codes else "*bf16"},
            {
                "HEADS": heads, "TOKENS": config.tokens_per_program, "D": 512, "ROPE": 64, "CODES": codes, "EARLY": True,
                "quant": None if tile is None else Grid(512, "e4m3", tile, "ue8m0"),
            },
            num_warps=config.num_warps, aligned=("out", "out_stride_t", "out_stride_h", "rope", "scales", "result"),
        )
        for heads, tile, codes in ((64, 128, True), (128, 128, True), (64, 32, True), (64, 128, False), (64, None, False))
        for config in map(output_quant_config, (1, 64, 512))
    ]  # fmt: skip
