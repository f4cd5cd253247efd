"""Dense products on the GPU: for a few tokens one launch that reads the weights once, for many the library's tensor-core products.

The operands of every product are those of the reference: e4m3 codes with the scales of their tiles, or bf16 values; sums are fp32.
A stored fp32 weight is the sum of three bf16 weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from abyssal.ops._aot import AotCase
from abyssal.ops._records import (
    INTERPRETED,
    e4m3_tiles,
    e4m3_values,
    early,
    power_of_two,
    starts_early,
    store_like,
    to_bf16,
    to_fp32,
    wait_for_inputs,
)
from abyssal.ops.linear import LinearWeight, dequantize, e8m0_to_float

WARPS = 4  # each sums its own quarter of the columns
COLUMNS = 128  # that a warp takes at a time
PANEL_ROWS = 16
STEP = WARPS * COLUMNS
BLOCKS = (32, 64, 128)  # widths of weight blocks and of input tiles
SHARED_BYTES = 96 << 10  # of loads in flight per program: two programs fit a multiprocessor
FEW_TOKENS = 16
TILED_TOKENS = 256
MOST_GROUPS = 3  # of a launch
PROGRAMS = 128  # that keep the card busy

Route = Literal["few", "tiled", "library"]


# Weights


@dataclass(frozen=True, slots=True)
class Group:
    """Weights of one input and one format, rows one below the other."""

    data: Tensor  # e4m3 or bf16 [N, K], see `panels`; fp32 weights: bf16 [N, 3 K]
    scale: Tensor | None  # fp32 [ceil(N / block), ceil(K / block)]
    block: tuple[int, int] | None
    tile: int | None  # values of the input that share a scale; None: the input is not quantised
    out_dtype: torch.dtype
    parts: int  # bf16 weights whose sum the weight is
    rows: tuple[int, ...]  # of each weight

    @property
    def columns(self) -> int:
        return self.data.shape[1] // self.parts


@dataclass(frozen=True, slots=True)
class PreparedLinear:
    """Several weights of one input, as the kernels take them."""

    groups: tuple[Group, ...]
    places: tuple[tuple[int, int], ...]  # of each weight: its group, and its number there


def prepare_linear(weights: Sequence[LinearWeight | Tensor]) -> PreparedLinear:
    """Weights [N_i, K] of one input. A `Tensor` is fp32 mathematics whatever its values: its output is fp32 (V4 spec 3.4).

    bf16 values that came as fp32 are kept as bf16. Formats that no kernel reads become bf16, as the reference multiplies them.
    """
    pieces = [_piece(weight) for weight in weights]
    groups: list[list[Group]] = []
    places = []
    for piece in pieces:
        fitting = [i for i, group in enumerate(groups) if _joins(group, piece)]
        if not fitting:
            groups.append([])
        index = fitting[0] if fitting else len(groups) - 1
        places.append((index, len(groups[index])))
        groups[index].append(piece)
    return PreparedLinear(tuple(map(_joined, groups)), tuple(places))


def _piece(weight: LinearWeight | Tensor) -> Group:
    if isinstance(weight, Tensor):
        high = weight.bfloat16()
        if torch.equal(high.float(), weight):
            return Group(high, None, None, None, torch.float32, 1, (len(weight),))
        middle = (weight - high.float()).bfloat16()
        low = (weight - high.float() - middle.float()).bfloat16()
        return Group(torch.cat((high, middle, low), 1), None, None, None, torch.float32, 3, (len(weight),))
    block, tile = weight.block, weight.quantize_input
    rows = (weight.shape[0],)
    if weight.format == "fp8" and block is not None and tile is not None and _has_kernel(weight.shape, block, tile):
        assert weight.scale is not None
        scale = e8m0_to_float(weight.scale) if weight.scale.dtype == torch.uint8 else weight.scale
        data = panels(weight.data, width(tile, block[1]))
        return Group(data, scale.contiguous(), block, tile, torch.bfloat16, 1, rows)
    return Group(dequantize(weight, torch.bfloat16), None, None, tile, torch.bfloat16, 1, rows)


def _has_kernel(shape: tuple[int, ...], block: tuple[int, int], tile: int) -> bool:
    rows, columns = shape
    known = block[0] % PANEL_ROWS == 0 and block[1] in BLOCKS and tile in BLOCKS
    return known and (width(tile, block[1]) == COLUMNS or (rows % PANEL_ROWS == 0 and columns % width(tile, block[1]) == 0))


def width(tile: int | None, block: int | None) -> int:
    """Columns, at most COLUMNS, over which neither the input's scale nor the weight's changes."""
    return min(COLUMNS, tile or COLUMNS, block or COLUMNS)


def panels(data: Tensor, width: int) -> Tensor:
    """[N, K] with the 16 rows of `width` columns that a warp loads together side by side in memory; full width stays in rows."""
    if width == COLUMNS:
        return data
    rows, columns = data.shape
    return data.view(rows // PANEL_ROWS, PANEL_ROWS, columns // width, width).transpose(1, 2).contiguous().view(rows, columns)


def _joins(group: list[Group], piece: Group) -> bool:
    """Whether `piece` fits below the weights of `group`: one format, and no block of scales over the seam."""
    last = group[-1]
    same = (last.block, last.tile, last.out_dtype, last.parts) == (piece.block, piece.tile, piece.out_dtype, piece.parts)
    return same and (last.block is None or all(part.rows[0] % last.block[0] == 0 for part in group))


def _joined(group: list[Group]) -> Group:
    first = group[0]
    if len(group) == 1:
        return first
    scale = None if first.scale is None else torch.cat([part.scale for part in group if part.scale is not None])
    rows = tuple(part.rows[0] for part in group)
    data = torch.cat([part.data for part in group])
    return Group(data, scale, first.block, first.tile, first.out_dtype, first.parts, rows)


# Input


@dataclass(frozen=True, slots=True)
class QuantisedInput:
    """An input as e4m3 codes and the scales of their tiles."""

    codes: Tensor  # e4m3 [T, K]; in groups [T, G, K]
    scales: Tensor  # fp32 [G K / tile, T]
    tile: int

    def __len__(self) -> int:
        return len(self.codes)

    def values(self) -> Tensor:
        """bf16 [T, K], exact."""
        scales = self.scales.t().repeat_interleave(self.tile, 1)[:, : self.codes.shape[1]]
        return (self.codes.float() * scales).bfloat16()

    @classmethod
    def empty(cls, tokens: int, shape: tuple[int, ...], tile: int, device: torch.device) -> QuantisedInput:
        """Room for codes of `shape` per token."""
        codes = torch.empty(tokens, *shape, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty(math.prod(shape[:-1]) * -(-shape[-1] // tile), tokens, dtype=torch.float32, device=device)
        return cls(codes, scales, tile)


@triton.jit(do_not_specialize=["num_rows"])
def quantise_kernel(
    x, x_stride, out, scales, num_rows, K, TILE: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Token t, WIDTH columns per program. CODES: codes uint8 and scales fp32 [K / TILE, num_rows], else the rounded values."""
    wait_for_inputs(EARLY)
    token = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    values = to_fp32(tl.load(x + token.to(tl.int64) * x_stride + column, mask=column < K, other=0.0))
    codes, exponent = e4m3_tiles(values, TILE, WIDTH)
    place = out + token.to(tl.int64) * K + column
    if CODES:
        tl.store(place, tl.reshape(codes, (WIDTH,)), mask=column < K)
        tile = tl.program_id(1) * (WIDTH // TILE) + tl.arange(0, WIDTH // TILE)
        tl.store(scales + tile * num_rows + token, power_of_two(exponent), mask=tile * TILE < K)
    else:
        values = e4m3_values(codes) * power_of_two(exponent)[:, None]
        store_like(place, tl.reshape(values, (WIDTH,)), mask=column < K)


WIDTH = 512  # columns of a program of one warp, as in `output_quant`: 16 values per lane


def quantise(x: Tensor, tile: int) -> QuantisedInput:
    """x bf16 [T, K] -> its codes and scales (V4 spec 3.2)."""
    quantised = QuantisedInput.empty(len(x), (x.shape[1],), tile, x.device)
    _launch_quantise(x, quantised.codes.view(torch.uint8), quantised.scales, tile)
    return quantised


def quantised_values(x: Tensor, tile: int) -> Tensor:
    """x bf16 [T, K] rounded to its tiles' e4m3 grid, bf16: `quantize_e4m3_tiles` in one launch."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_quantise(x, out, None, tile)
    return out


def _launch_quantise(x: Tensor, out: Tensor, scales: Tensor | None, tile: int) -> None:
    assert x.stride(1) == 1, f"the values of a row are {x.stride(1)} apart"
    if len(x) == 0:
        return
    quantise_kernel[len(x), triton.cdiv(x.shape[1], WIDTH)](
        x, x.stride(0), out, scales, len(out), x.shape[1], TILE=tile, WIDTH=WIDTH, CODES=scales is not None,
        num_warps=1, **early(len(x) * triton.cdiv(x.shape[1], WIDTH), x),
    )  # fmt: skip


# A few tokens


@dataclass(frozen=True, slots=True)
class FewConfig:
    """Sizes of one launch. None changes a sum: each output is one chain of products per warp, then the sum over the warps."""

    tokens: int  # of a program
    rows: tuple[int, ...]  # of a program, per group
    num_stages: int


def rows_per_program(rows: int) -> int:
    """16 rows, or 32 where that still gives every multiprocessor a program."""
    return 32 if rows >= 32 * PROGRAMS else 16


def few_config(tokens: int, groups: Sequence[tuple[int, int, int]], input_bytes: int) -> FewConfig:
    """
    Args:
        groups: rows, bytes of a value, and columns of each group.
        input_bytes: of a value of the input.
    """
    per_program = 8 if tokens <= 8 else 16 if tokens <= 16 else 32
    rows = tuple(rows_per_program(n) for n, _, _ in groups)
    stage = max(STEP * (r * size + per_program * input_bytes) for r, (_, size, _) in zip(rows, groups, strict=True))
    steps = max(-(-k // STEP) for _, _, k in groups)
    return FewConfig(per_program, rows, 1 + max(1, min(6, steps, SHARED_BYTES // stage)))


@triton.jit
def _halves(codes):
    """e4m3 -> fp16, exact; in the interpreter, whose products of fp16 are slow, fp32."""
    if INTERPRETED:
        return e4m3_values(codes.to(tl.uint8, bitcast=True))
    else:
        return codes.to(tl.float16)


_width = triton.constexpr_function(width)


@triton.jit
def _scales(
    start, x_scales, x_scale_stride, x_tile, t, scale, n0, n, K, TILE: tl.constexpr, ROW_BLOCK: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr, UNIFORM: tl.constexpr,
):  # fmt: skip
    """Scales of the products of the columns from `start` [B]: of the input alone for plain weights [B, 1, BT], else of both."""
    inside = (start < K)[:, None]
    x_scale = tl.load(x_scales + (x_tile + start // TILE)[:, None] * x_scale_stride + t[None, :], mask=inside, other=0.0)
    both = x_scale[:, None, :]
    if ROW_BLOCK is not None:
        block = start // COLUMN_BLOCK
        if UNIFORM:
            row = n0 // ROW_BLOCK * tl.cdiv(K, COLUMN_BLOCK)
            both *= tl.load(scale + row + block, mask=start < K, other=0.0)[:, None, None]
        else:
            row = n // ROW_BLOCK * tl.cdiv(K, COLUMN_BLOCK)
            both *= tl.load(scale + row[None, :] + block[:, None], mask=inside, other=0.0)[:, :, None]
    return both


@triton.jit
def _product(
    x, x_stride, x_scales, x_scale_stride, data, scale, out, tile, t0, T, N, K, group_rows,
    BN: tl.constexpr, BT: tl.constexpr, WARPS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Rows BN of one weight for BT tokens.

    Tiles are [B, BN, BK] and [B, BK, BT]: warp w multiplies b = w, w + WARPS, ..., the BK-wide parts of its own COLUMNS columns of a
    step. BK is the width over which one pair of scales holds, so that sums over it are scaled as a whole (V4 spec 3.3). Scales are
    loaded one step ahead: a warp has nothing else to do while it waits for them.
    """
    FP8: tl.constexpr = ROW_BLOCK is not None
    UNIFORM: tl.constexpr = ALIGNED and _divides(BN, ROW_BLOCK)
    BK: tl.constexpr = _width(TILE, COLUMN_BLOCK)
    SUB: tl.constexpr = COLUMNS // BK
    B: tl.constexpr = WARPS * SUB
    b = tl.arange(0, B)
    first = b % WARPS * COLUMNS + b // WARPS * BK  # [B], a part's column within the step
    k = tl.arange(0, BK)
    group_tiles = tl.cdiv(group_rows, BN)
    group = tile // group_tiles
    n0 = group * group_rows + tile % group_tiles * BN
    N_end = (group + 1) * group_rows
    n = tl.minimum(n0 + tl.arange(0, BN), N_end - 1).to(tl.int64)  # rows and tokens past the last repeat it
    t = tl.minimum(t0 + tl.arange(0, BT), T - 1).to(tl.int64)
    x += group * K
    acc = tl.zeros((WARPS if FP8 else B, BN, BT), tl.float32)
    if not INTERPRETED:
        gdc_wait()
    if TILE is not None:
        x_tile = group * tl.cdiv(K, TILE)
        both = _scales(first, x_scales, x_scale_stride, x_tile, t, scale, n0, n, K, TILE, ROW_BLOCK, COLUMN_BLOCK, UNIFORM)
    for k0 in range(0, K * PARTS, WARPS * COLUMNS):
        start = k0 + first
        w_column = start[:, None, None] + k[None, None, :]
        x_column = start[:, None, None] + k[None, :, None]
        if BK == COLUMNS or not FP8:
            w_pointer = data + n[None, :, None] * (K * PARTS) + w_column
        else:
            panel = n // 16 * (16 * K) + n % 16 * BK
            w_pointer = data + panel[None, :, None] + start[:, None, None] * 16 + k[None, None, :]
        x_pointer = x + t[None, None, :] * x_stride + (x_column if PARTS == 1 else x_column % K)
        if EVEN:
            w = tl.load(w_pointer)
            values = tl.load(x_pointer)
        else:
            w = tl.load(w_pointer, mask=w_column < K * PARTS, other=0.0)
            values = tl.load(x_pointer, mask=x_column < K * PARTS, other=0.0)
        if TILE is not None:
            later = start + WARPS * COLUMNS
            ahead = _scales(later, x_scales, x_scale_stride, x_tile, t, scale, n0, n, K, TILE, ROW_BLOCK, COLUMN_BLOCK, UNIFORM)
            values = _halves(values)
        if FP8:
            part = tl.dot(_halves(w), values) * both
            if SUB == 1:
                acc += part
            else:
                acc += tl.sum(tl.reshape(part, (SUB, WARPS, BN, BT)), 0)
        else:
            if TILE is not None:
                values = to_bf16(values.to(tl.float32) * both)
            acc = tl.dot(w, values, acc)
        if TILE is not None:
            both = ahead
    rows = n0 + tl.arange(0, BN)
    tokens = t0 + tl.arange(0, BT)
    place = out + tokens.to(tl.int64)[None, :] * N + rows[:, None]
    store_like(place, tl.sum(acc, 0), mask=(rows < N_end)[:, None] & (tokens < T)[None, :])


@triton.constexpr_function
def _divides(part: int, whole: int | None) -> bool:
    return whole is not None and whole % part == 0


@triton.jit(do_not_specialize=["T", "token_tiles", "scales0_stride"])
def few_tokens_kernel(
    x, x_stride, input0, input0_stride, scales0, scales0_stride, T, K, token_tiles, group_rows,
    data0, scale0, out0, N0, tiles0, data1, out1, N1, tiles1, data2, out2, N2,
    BT: tl.constexpr, BN0: tl.constexpr, BN1: tl.constexpr, BN2: tl.constexpr, TILE: tl.constexpr,
    ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr, PARTS0: tl.constexpr, PARTS1: tl.constexpr, PARTS2: tl.constexpr,
    EVEN: tl.constexpr, ALIGNED: tl.constexpr, WARPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Up to three groups of weights of one input; only the first may have scales, or a quantised input, `input0`.

    The token tiles of the same rows run side by side, so that the weights come from memory once.
    """
    t0 = tl.program_id(0) % token_tiles * BT
    tile = tl.program_id(0) // token_tiles
    if tile < tiles0:
        _product(
            input0, input0_stride, scales0, scales0_stride, data0, scale0, out0, tile, t0, T, N0, K, group_rows,
            BN0, BT, WARPS, COLUMNS, TILE, ROW_BLOCK, COLUMN_BLOCK, PARTS0, EVEN, ALIGNED,
        )  # fmt: skip
    elif data1 is not None:
        if tile < tiles0 + tiles1:
            _product(
                x, x_stride, None, 0, data1, None, out1, tile - tiles0, t0, T, N1, K, N1,
                BN1, BT, WARPS, COLUMNS, None, None, None, PARTS1, EVEN, False,
            )  # fmt: skip
        elif data2 is not None:
            _product(
                x, x_stride, None, 0, data2, None, out2, tile - tiles0 - tiles1, t0, T, N2, K, N2,
                BN2, BT, WARPS, COLUMNS, None, None, None, PARTS2, EVEN, False,
            )  # fmt: skip
    if not INTERPRETED:
        gdc_launch_dependents()  # not before, or what follows would take the place of programs that have not begun


def few_tokens(
    x: Tensor | QuantisedInput, groups: Sequence[Group], *, num_groups: int = 1, config: FewConfig | None = None
) -> list[Tensor]:
    """One launch: x bf16 [T, K] or, for a single group, quantised -> [T, N] per group. Groups after the first are plain.

    Args:
        num_groups: G: the rows of the weight are G groups of N / G, the columns of x G groups of K (V4 spec 2.8).
    """
    first, columns = groups[0], groups[0].columns
    assert len(groups) <= MOST_GROUPS and all(group.tile is None and group.columns == columns for group in groups[1:])
    quantised = x if isinstance(x, QuantisedInput) else None
    plain = x.codes.flatten(1) if isinstance(x, QuantisedInput) else x
    tokens = len(plain)
    assert plain.shape[1] == columns * num_groups, f"input has {plain.shape[1]} columns, the weight {columns}"
    assert plain.stride(1) == 1, f"the values of a row are {plain.stride(1)} apart"
    outs = [torch.empty(tokens, len(group.data), dtype=group.out_dtype, device=plain.device) for group in groups]
    if tokens == 0:
        return outs
    if quantised is None and first.tile is not None:
        quantised = quantise(plain, first.tile)
    source = plain if quantised is None else quantised.codes.flatten(1)
    sizes = [(len(group.data), group.data.itemsize, group.data.shape[1]) for group in groups]
    config = config or few_config(tokens, sizes, source.itemsize if len(groups) == 1 else plain.itemsize)
    group_rows = len(first.data) // num_groups
    tiles = [triton.cdiv(len(group.data), rows) for group, rows in zip(groups, config.rows, strict=True)]
    tiles[0] = num_groups * triton.cdiv(group_rows, config.rows[0])
    token_tiles = triton.cdiv(tokens, config.tokens)
    absent = (None, None, 0, 0)
    more = [(g.data, out, len(g.data), n) for g, out, n in zip(groups[1:], outs[1:], tiles[1:], strict=True)]
    (data1, out1, rows1, tiles1), (data2, out2, rows2, _) = [*more, absent, absent][:2]
    rows, parts = (*config.rows, 16, 16), (*(group.parts for group in groups), 1, 1)
    scales = None if quantised is None else quantised.scales
    few_tokens_kernel[(sum(tiles) * token_tiles,)](
        plain, plain.stride(0), source, source.stride(0), scales, 0 if scales is None else scales.stride(0),
        tokens, columns, token_tiles, group_rows,
        first.data, first.scale, outs[0], len(first.data), tiles[0], data1, out1, rows1, tiles1, data2, out2, rows2,
        BT=config.tokens, BN0=rows[0], BN1=rows[1], BN2=rows[2], TILE=first.tile,
        ROW_BLOCK=first.block and first.block[0], COLUMN_BLOCK=first.block and first.block[1],
        PARTS0=parts[0], PARTS1=parts[1], PARTS2=parts[2], EVEN=columns % STEP == 0,
        ALIGNED=group_rows % config.rows[0] == 0 or num_groups == 1,
        WARPS=WARPS, COLUMNS=COLUMNS, num_warps=WARPS, num_stages=config.num_stages, launch_pdl=starts_early(sum(tiles) * token_tiles, plain),
    )  # fmt: skip
    return outs


# More tokens


@dataclass(frozen=True, slots=True)
class TiledConfig:
    tokens: int  # of a program
    splits: int  # of K, whose sums another launch adds
    columns: int  # of a split
    num_stages: int = 4


TILE_ROWS = 128  # of a program


def tiled_config(tokens: int, rows: int, columns: int) -> TiledConfig:
    """As many parts of K, 512 columns or more, as keep the card busy."""
    per_program = 32 if tokens <= 32 else 64
    programs = -(-rows // TILE_ROWS) * -(-tokens // per_program)
    splits = max(1, min(PROGRAMS // programs, columns // STEP))
    part = -(-columns // (splits * COLUMNS)) * COLUMNS
    return TiledConfig(per_program, -(-columns // part), part)


@triton.jit(do_not_specialize=["T", "x_scale_stride"])
def tiled_kernel(
    x, x_stride, x_scales, x_scale_stride, data, scale, out, T, N, K, group_rows, split_columns,
    BN: tl.constexpr, BT: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, ROW_BLOCK: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (n, t, s): BN rows of an FP8 weight for BT tokens over part s of K, into out [S, T, N]; a row tile lies in one group."""
    BK: tl.constexpr = _width(TILE, COLUMN_BLOCK)
    n0 = tl.program_id(0) * BN
    group = n0 // group_rows
    n = tl.minimum(n0 + tl.arange(0, BN), N - 1).to(tl.int64)
    t0 = tl.program_id(1) * BT
    t = tl.minimum(t0 + tl.arange(0, BT), T - 1).to(tl.int64)
    k = tl.arange(0, BK)
    x_pointer = x + group * K + t[None, :] * x_stride + k[:, None]
    x_tile = group * (K // TILE)
    if BK == COLUMNS:
        w_pointer = data + n[:, None] * K + k[None, :]
    else:
        w_pointer = data + (n // 16 * (16 * K) + n % 16 * BK)[:, None] + k[None, :]
    STRIDE: tl.constexpr = 1 if BK == COLUMNS else 16  # of a column of the weight, where a panel's rows lie side by side
    first = tl.program_id(2) * split_columns
    w_scales = scale + (n0 // ROW_BLOCK if ROW_BLOCK % BN == 0 else n // ROW_BLOCK) * (K // COLUMN_BLOCK)
    x_scales += x_tile * x_scale_stride + t
    x_scale = tl.load(x_scales + first // TILE * x_scale_stride)
    w_scale = tl.load(w_scales + first // COLUMN_BLOCK)
    acc = tl.zeros((BN, BT), tl.float32)
    for k0 in range(first, tl.minimum(first + split_columns, K), COLUMNS):
        for part in tl.static_range(COLUMNS // BK):
            here = k0 + part * BK
            w = tl.load(w_pointer + here * STRIDE)
            codes = tl.load(x_pointer + here)
            later = tl.minimum(here + BK, K - BK)  # scales are loaded one product ahead
            x_ahead = tl.load(x_scales + later // TILE * x_scale_stride)
            w_ahead = tl.load(w_scales + later // COLUMN_BLOCK)
            product = tl.dot(_halves(w), _halves(codes))
            if ROW_BLOCK % BN == 0:
                acc += product * (x_scale * w_scale)[None, :]
            else:
                acc += product * (x_scale[None, :] * w_scale[:, None])
            x_scale, w_scale = x_ahead, w_ahead
    rows = n0 + tl.arange(0, BN)
    tokens = t0 + tl.arange(0, BT)
    place = out + (tl.program_id(2).to(tl.int64) * T + tokens)[None, :] * N + rows[:, None]
    store_like(place, acc, mask=(rows < N)[:, None] & (tokens < T)[None, :])


@triton.jit(do_not_specialize=["count"])
def sum_kernel(parts, out, count, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    """Sums over parts fp32 [SPLITS, count], the first first, to bf16."""
    place = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = place < count
    total = tl.zeros((WIDTH,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * count.to(tl.int64) + place, mask=inside, other=0.0)
    tl.store(out + place, to_bf16(total), mask=inside)


def tiled(x: QuantisedInput, group: Group, *, num_groups: int = 1, config: TiledConfig | None = None) -> Tensor:
    """x times the weights of an FP8 group -> bf16 [T, N]. One launch, or two where K is split; arguments as of `few_tokens`."""
    codes, (rows, columns) = x.codes.flatten(1), group.data.shape
    tokens, group_rows = len(codes), rows // num_groups
    assert group.block is not None and codes.shape[1] == columns * num_groups, (
        f"input {tuple(codes.shape)}, weight {rows} x {columns}"
    )
    out = torch.empty(tokens, rows, dtype=torch.bfloat16, device=codes.device)
    if tokens == 0:
        return out
    config = config or tiled_config(tokens, rows, columns)
    parts = out if config.splits == 1 else torch.empty(config.splits, tokens, rows, dtype=torch.float32, device=codes.device)
    tiled_kernel[triton.cdiv(rows, TILE_ROWS), triton.cdiv(tokens, config.tokens), config.splits](
        codes, codes.stride(0), x.scales, x.scales.stride(0), group.data, group.scale, parts, tokens, rows, columns, group_rows,
        config.columns, BN=TILE_ROWS, BT=config.tokens, COLUMNS=COLUMNS, TILE=group.tile, ROW_BLOCK=group.block[0], COLUMN_BLOCK=group.block[1],
        num_warps=8, num_stages=config.num_stages,
    )  # fmt: skip
    if config.splits > 1:
        sum_kernel[triton.cdiv(out.numel(), 1024),](parts, out, out.numel(), SPLITS=config.splits, WIDTH=1024, num_warps=4)
    return out


# Many tokens


@triton.jit
def dequantise_kernel(
    data, scale, out, N, K, TILE: tl.constexpr, ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr, BN: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """e4m3 weights times their scales -> bf16 [N, K]: BN rows and COLUMNS columns per program."""
    BK: tl.constexpr = _width(TILE, COLUMN_BLOCK)
    n = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (n < N) & (column < K)
    if BK == COLUMNS:
        place = n * K + column
    else:
        place = n // 16 * (16 * K) + column // BK * (16 * BK) + n % 16 * BK + column % BK
    codes = tl.load(data + place, mask=inside, other=0.0)
    s = tl.load(scale + n // ROW_BLOCK * tl.cdiv(K, COLUMN_BLOCK) + column // COLUMN_BLOCK, mask=inside, other=0.0)
    tl.store(out + n * K + column, to_bf16(_halves(codes).to(tl.float32) * s), mask=inside)


def dequantised(group: Group) -> Tensor:
    """The weights of an FP8 group, bf16 [N, K] (V4 spec 4.1)."""
    assert group.scale is not None and group.block is not None
    rows, columns = group.data.shape
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=group.data.device)
    dequantise_kernel[triton.cdiv(rows, PANEL_ROWS), triton.cdiv(columns, COLUMNS)](
        group.data, group.scale, out, rows, columns, TILE=group.tile, ROW_BLOCK=group.block[0], COLUMN_BLOCK=group.block[1],
        BN=PANEL_ROWS, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


def route(tokens: int, group: Group, num_groups: int = 1) -> Route:
    """How a product of `tokens` rows is computed.

    few: the kernel that reads the weights once for up to 32 tokens. tiled: tiles of 128 rows by up to 64 tokens. library: the library's
    bf16 product, FP8 weights dequantised for it at 3 bytes of traffic per weight. All multiply the same values with fp32 sums; the
    library's e4m3 product would be faster, but adds in 14 bits.
    """
    if tokens <= FEW_TOKENS:
        return "few"
    if group.block is None or tokens > TILED_TOKENS:
        return "library"
    whole = group.columns % COLUMNS == 0
    one_group = num_groups == 1 or len(group.data) // num_groups % TILE_ROWS == 0
    return "tiled" if whole and one_group and (group.block[0] % TILE_ROWS == 0 or TILE_ROWS % group.block[0] == 0) else "few"


def _library(x: Tensor, group: Group) -> Tensor:
    """x bf16 [T, K] -> [T, N] in `group.out_dtype`."""
    if group.tile is not None:
        x = quantised_values(x, group.tile)
    data = group.data if group.block is None else dequantised(group)
    if group.out_dtype == torch.bfloat16:
        return F.linear(x, data)
    return torch.mm(x.repeat(1, group.parts), data.t(), out_dtype=torch.float32)


# Operations


def linear(x: Tensor | QuantisedInput, prepared: PreparedLinear, *, batch_invariant: bool = False) -> tuple[Tensor, ...]:
    """x bf16 [T, K], or its codes, times each weight transposed -> [T, N_i] each, bf16, or fp32 for a weight that came as a `Tensor`.

    The outputs may be columns of one tensor. Up to FEW_TOKENS tokens, and with `batch_invariant` for any number, a token's results
    have the same bits whatever other tokens there are: the kernel cuts its sums over K alike for any number.
    """
    routes = ["few" if batch_invariant else route(len(x), group) for group in prepared.groups]
    outs: dict[int, Tensor] = {}
    few = [i for i, chosen in enumerate(routes) if chosen == "few"]
    few.sort(key=lambda i: prepared.groups[i].tile is None)
    while few:
        launch = [few[0], *(i for i in few[1:] if prepared.groups[i].tile is None)][:MOST_GROUPS]
        source = _as_taken(x, prepared.groups[few[0]].tile) if len(launch) == 1 else _as_taken(x, None)
        outs |= zip(launch, few_tokens(source, [prepared.groups[i] for i in launch]), strict=True)
        few = [i for i in few if i not in launch]
    for i, group in enumerate(prepared.groups):
        if routes[i] == "tiled":
            source = _as_taken(x, group.tile)
            assert group.tile is not None
            outs[i] = tiled(source if isinstance(source, QuantisedInput) else quantise(source, group.tile), group)
        elif routes[i] == "library":
            outs[i] = _library(x.values() if isinstance(x, QuantisedInput) else x, group)
    parts = [outs[i].split(group.rows, dim=1) for i, group in enumerate(prepared.groups)]
    return tuple(parts[group][number] for group, number in prepared.places)


def _as_taken(x: Tensor | QuantisedInput, tile: int | None) -> Tensor | QuantisedInput:
    """Codes stay what they are only for a weight with their tile; the values of other codes are on their grid already."""
    return x.values() if isinstance(x, QuantisedInput) and x.tile != tile else x


def takes_codes(tokens: int, prepared: PreparedLinear, num_groups: int = 1, *, batch_invariant: bool = False) -> bool:
    """Whether a product with this weight wants its input as codes."""
    (group,) = prepared.groups
    return group.block is not None and (batch_invariant or route(tokens, group, num_groups) != "library")


def linear_grouped(
    x: Tensor | QuantisedInput, prepared: PreparedLinear, num_groups: int, *, batch_invariant: bool = False
) -> Tensor:
    """x [T, G, K] times weight [G R, K], group g by its own R rows -> [T, G, R] (V4 spec 2.8).

    Args:
        x: codes where `takes_codes` says so, else bf16 values that are quantised already where the weight wants that.
    """
    (group,) = prepared.groups
    plain = dataclasses.replace(group, tile=None)
    codes = isinstance(x, QuantisedInput)
    tokens = len(x.codes if isinstance(x, QuantisedInput) else x)
    assert codes == takes_codes(tokens, prepared, num_groups, batch_invariant=batch_invariant), (
        f"{type(x).__name__} of {tokens} tokens"
    )
    chosen = "few" if batch_invariant else route(tokens, group, num_groups)
    if chosen == "few":
        source, weight = (x, group) if isinstance(x, QuantisedInput) else (x.flatten(1), plain)
        return few_tokens(source, [weight], num_groups=num_groups)[0].view(tokens, num_groups, -1)
    if isinstance(x, QuantisedInput):
        return tiled(x, group, num_groups=num_groups).view(tokens, num_groups, -1)
    matrix = (group.data if group.block is None else dequantised(group)).view(num_groups, -1, group.columns)
    out = torch.empty(tokens, num_groups, matrix.shape[1], dtype=x.dtype, device=x.device)
    torch.bmm(x.transpose(0, 1), matrix.transpose(1, 2), out=out.transpose(0, 1))
    return out


def aot_cases() -> list[AotCase]:
    """Every format and size of tiles of the few-token kernel, as V4-Flash and V4.1-Flash launch it, and the helpers of many tokens."""
    cases = [
        AotCase(
            f"quantise tile={tile} codes={codes}", quantise_kernel,
            {"x": "*bf16", "x_stride": "i32", "out": "*u8" if codes else "*bf16", "scales": "*fp32", "num_rows": "i32", "K": "i32"},
            {"TILE": tile, "WIDTH": WIDTH, "CODES": codes, "EARLY": True} | ({} if codes else {"scales": None}), num_warps=1,
            aligned=("x", "x_stride", "out", "K"),
        )
        for tile, codes in ((128, True), (32, False))
    ] + [
        AotCase(
            f"dequantise block={block}", dequantise_kernel,
            {"data": "*fp8e4nv", "scale": "*fp32", "out": "*bf16", "N": "i32", "K": "i32"},
            {"TILE": block, "ROW_BLOCK": block, "COLUMN_BLOCK": block, "BN": PANEL_ROWS, "COLUMNS": COLUMNS},
            aligned=("data", "scale", "out", "N", "K"),
        )
        for block in (128, 32)
    ]  # fmt: skip
    cases += [
        AotCase(
            f"tiled x{tokens} block={block} {'parts' if split else 'whole'}", tiled_kernel,
            {
                "x": "*fp8e4nv", "x_stride": "i32", "x_scales": "*fp32", "x_scale_stride": "i32", "data": "*fp8e4nv", "scale": "*fp32",
                "out": "*fp32" if split else "*bf16", "T": "i32", "N": "i32", "K": "i32", "group_rows": "i32", "split_columns": "i32",
            },
            {"BN": TILE_ROWS, "BT": tokens, "COLUMNS": COLUMNS, "TILE": block, "ROW_BLOCK": block, "COLUMN_BLOCK": block}, num_warps=8,
            num_stages=TiledConfig(tokens, 1, 512).num_stages, spill_reason="Blackwell: 14 registers of the widest tile" if tokens == 64 else None,
            aligned=("x", "x_stride", "x_scales", "data", "scale", "out", "N", "K", "group_rows", "split_columns"),
        )
        for tokens in (32, 64)
        for block, split in ((128, True), (32, False))
    ]  # fmt: skip
    sums = {"parts": "*fp32", "out": "*bf16", "count": "i32"}
    cases.append(AotCase("sum of parts", sum_kernel, sums, {"SPLITS": 4, "WIDTH": 1024}, aligned=("parts", "out")))
    released = [
        (1536, 4096, 128),
        (32768, 1024, 128),
        (1792, 5120, 32),
        (32768, 1280, 32),
        (2048, 4096, None),
        (129280, 4096, None),
    ]
    cases += [_few_case(tokens, *sizes) for tokens in (1, 32) for sizes in released]
    cases += [_few_case(1, 1536, 4096, 128, beside=beside) for beside in (1, 2)]
    cases += [_few_case(16, 32768, 1024, 128), _few_case(16, 32768, 1280, 32)]
    return [*cases, _few_case(1, 192, 64, None, parts=3), _few_case(32, 24, 64, 128, aligned_groups=False)]


def _few_case(
    tokens: int, rows: int, columns: int, block: int | None, *, beside: int = 0, parts: int = 1, aligned_groups: bool = True
) -> AotCase:
    sizes = [(rows, 2 if block is None else 1, columns), *[(2048, 2, columns)] * beside]
    config = few_config(tokens, sizes, 2 if block is None else 1)
    heights = (*config.rows, 16, 16)
    signature = {
        "x": "*bf16", "x_stride": "i32", "input0": "*bf16" if block is None else "*fp8e4nv", "input0_stride": "i32",
        "scales0": "*fp32", "scales0_stride": "i32", "T": "i32", "K": "i32", "token_tiles": "i32", "group_rows": "i32",
        "data0": "*bf16" if block is None else "*fp8e4nv", "scale0": "*fp32", "out0": "*bf16", "N0": "i32", "tiles0": "i32",
        "data1": "*bf16", "out1": "*fp32", "N1": "i32", "tiles1": "i32", "data2": "*bf16", "out2": "*bf16", "N2": "i32",
    }  # fmt: skip
    constants: dict[str, object] = {
        "BT": config.tokens, "BN0": heights[0], "BN1": heights[1], "BN2": heights[2], "TILE": block, "ROW_BLOCK": block,
        "COLUMN_BLOCK": block, "PARTS0": parts, "PARTS1": 1, "PARTS2": 1, "EVEN": columns % STEP == 0, "ALIGNED": aligned_groups,
        "WARPS": WARPS, "COLUMNS": COLUMNS,
    }  # fmt: skip
    absent = ["scales0"] if block is None else []
    absent += ["scale0"] if block is None else []
    absent += [f"{name}{i}" for i in (1, 2) if i > beside for name in ("data", "out")]
    free = {*signature} - {*absent, "T", "token_tiles", "scales0_stride", "tiles0", "tiles1"}
    return AotCase(
        f"few_tokens x{config.tokens} {rows} x {columns} block={block} beside={beside}", few_tokens_kernel, signature,
        constants | dict.fromkeys(absent), num_warps=WARPS, num_stages=config.num_stages, aligned=tuple(sorted(free)),
    )  # fmt: skip
