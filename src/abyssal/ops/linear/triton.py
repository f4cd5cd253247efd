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

from abyssal.ops._aot import AotCase
from abyssal.ops._records import INTERPRETED, e4m3_codes, e4m3_values, power_of_two, scale_exponent, store_like, to_bf16, to_fp32
from abyssal.ops.linear import LinearWeight, dequantize, e8m0_to_float

WARPS = 4  # each sums its own quarter of the columns
COLUMNS = 128  # that a warp takes at a time
PANEL_ROWS = 16
STEP = WARPS * COLUMNS
BLOCKS = (32, 64, 128)  # widths of weight blocks and of input tiles
SHARED_BYTES = 96 << 10  # of loads in flight per program: two programs fit a multiprocessor
FEW_TOKENS = 64
MOST_GROUPS = 3  # of a launch
FUSED_TOKENS = 8  # up to here every program quantises the input for itself
ROW_MULTIPLE = 16  # of the library's scaled product
PROGRAMS = 128  # that keep the card busy

Route = Literal["few", "scaled", "library"]


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
    scaled_mm: bool  # the device multiplies e4m3 with scales of 1 x 128 and 128 x 128


def prepare_linear(weights: Sequence[LinearWeight | Tensor]) -> PreparedLinear:
    """Weights [N_i, K] of one input. A `Tensor` is fp32 mathematics whatever its values: its output is fp32 (V4 spec 3.4).

    bf16 values that came as fp32 are kept as bf16. Formats that no kernel reads become bf16, as the reference multiplies them.
    """
    device = weights[0].data.device
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
    scaled_mm = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return PreparedLinear(tuple(map(_joined, groups)), tuple(places), scaled_mm)


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
    """An input as e4m3 codes and the scales of their tiles. Rows past the last token are memory only."""

    codes: Tensor  # e4m3 [rows, K]; in groups [rows, G, K]
    scales: Tensor  # fp32 [G K / tile, rows]
    tokens: int

    @classmethod
    def empty(cls, tokens: int, shape: tuple[int, ...], tile: int, device: torch.device) -> QuantisedInput:
        """Room for codes of `shape` per token, with as many rows as a library product wants."""
        rows = -(-tokens // ROW_MULTIPLE) * ROW_MULTIPLE
        codes = torch.empty(rows, *shape, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty(math.prod(shape[:-1]) * -(-shape[-1] // tile), rows, dtype=torch.float32, device=device)
        return cls(codes, scales, tokens)


@triton.jit(do_not_specialize=["num_rows"])
def quantise_kernel(x, x_stride, out, scales, num_rows, K, TILE: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr):
    """Token t, WIDTH columns per program. CODES: codes uint8 and scales fp32 [K / TILE, num_rows], else the rounded values."""
    token = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    values = to_fp32(tl.load(x + token.to(tl.int64) * x_stride + column, mask=column < K, other=0.0))
    tiles = tl.reshape(values, (WIDTH // TILE, TILE))
    exponent = scale_exponent(tl.max(tl.abs(tiles), 1), "e4m3")
    codes = e4m3_codes(tiles * power_of_two(-exponent)[:, None])
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
        x, x.stride(0), out, scales, len(out), x.shape[1], TILE=tile, WIDTH=WIDTH, CODES=scales is not None, num_warps=1
    )


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


@triton.jit
def _rounded(x):
    """fp32, at most 448 in size -> the nearest e4m3 value as fp16, see `_halves`."""
    if INTERPRETED:
        return e4m3_values(e4m3_codes(x))
    else:
        return x.to(tl.float8e4nv).to(tl.float16)


_width = triton.constexpr_function(width)


@triton.jit
def _product(
    x, x_stride, x_scales, x_scale_stride, data, scale, out, tile, t0, T, N, K, group_rows,
    BN: tl.constexpr, BT: tl.constexpr, WARPS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Rows BN of one weight for BT tokens.

    Tiles are [B, BN, BK] and [B, BK, BT]: warp w multiplies b = w, w + WARPS, ..., the BK-wide parts of its own COLUMNS columns of a
    step. BK is the width over which one pair of scales holds, so that sums over it are scaled as a whole (V4 spec 3.3).
    """
    FP8: tl.constexpr = ROW_BLOCK is not None
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
            inside = (start < K)[:, None]
            if x_scales is None:
                values = to_fp32(values)
                exponent = scale_exponent(tl.max(tl.abs(values), 1), "e4m3")  # [B, BT]
                x_scale = power_of_two(exponent)
                values = _rounded(values * power_of_two(-exponent)[:, None, :])
            else:
                x_tile = group * tl.cdiv(K, TILE) + start // TILE
                x_scale = tl.load(x_scales + x_tile[:, None] * x_scale_stride + t[None, :], mask=inside, other=0.0)
                values = _halves(values)
        if FP8:
            w_block = start // COLUMN_BLOCK
            blocks = tl.cdiv(K, COLUMN_BLOCK)
            if ROW_BLOCK % BN == 0 and ALIGNED:
                w_scale = tl.load(scale + n0 // ROW_BLOCK * blocks + w_block, mask=start < K, other=0.0)
                both = (x_scale * w_scale[:, None])[:, None, :]
            else:
                w_scale = tl.load(scale + (n // ROW_BLOCK)[None, :] * blocks + w_block[:, None], mask=inside, other=0.0)
                both = x_scale[:, None, :] * w_scale[:, :, None]
            part = tl.dot(_halves(w), values) * both
            if SUB == 1:
                acc += part
            else:
                acc += tl.sum(tl.reshape(part, (SUB, WARPS, BN, BT)), 0)
        else:
            if TILE is not None:
                values = to_bf16(values.to(tl.float32) * x_scale[:, None, :])
            acc = tl.dot(w, values, acc)
    rows = n0 + tl.arange(0, BN)
    tokens = t0 + tl.arange(0, BT)
    place = out + tokens.to(tl.int64)[None, :] * N + rows[:, None]
    store_like(place, tl.sum(acc, 0), mask=(rows < N_end)[:, None] & (tokens < T)[None, :])


@triton.jit(do_not_specialize=["T", "token_tiles"])
def few_tokens_kernel(
    x, x_stride, input0, input0_stride, scales0, scales0_stride, T, K, token_tiles, group_rows,
    data0, scale0, out0, N0, tiles0, data1, out1, N1, tiles1, data2, out2, N2,
    BT: tl.constexpr, BN0: tl.constexpr, BN1: tl.constexpr, BN2: tl.constexpr, TILE: tl.constexpr,
    ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr, PARTS0: tl.constexpr, PARTS1: tl.constexpr, PARTS2: tl.constexpr,
    EVEN: tl.constexpr, ALIGNED: tl.constexpr, WARPS: tl.constexpr, COLUMNS: tl.constexpr,
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
    tokens = x.tokens if isinstance(x, QuantisedInput) else len(x)
    assert plain.shape[1] == columns * num_groups, f"input has {plain.shape[1]} columns, the weight {columns}"
    assert plain.stride(1) == 1, f"the values of a row are {plain.stride(1)} apart"
    outs = [torch.empty(tokens, len(group.data), dtype=group.out_dtype, device=plain.device) for group in groups]
    if tokens == 0:
        return outs
    fused = tokens <= FUSED_TOKENS and first.tile == width(first.tile, first.block and first.block[1])
    if quantised is None and first.tile is not None and not fused:
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
        PARTS0=parts[0], PARTS1=parts[1], PARTS2=parts[2], EVEN=columns % STEP == 0, ALIGNED=group_rows % config.rows[0] == 0 or num_groups == 1, WARPS=WARPS, COLUMNS=COLUMNS,
        num_warps=WARPS, num_stages=config.num_stages,
    )  # fmt: skip
    return outs


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


def route(tokens: int, group: Group, scaled_mm: bool, num_groups: int = 1) -> Route:
    """How a product of `tokens` rows is computed.

    few: our kernel, which reads the weights once for up to 32 tokens. scaled: the library's e4m3 product, where the device has it.
    library: the library's bf16 product, FP8 weights dequantised for it: exact, and 3 bytes of traffic per weight.
    """
    if tokens <= FEW_TOKENS:
        return "few"
    rows, columns = len(group.data) // num_groups, group.columns
    if scaled_mm and group.block == (128, 128) and group.tile == 128 and rows % 128 == 0 and columns % (4 * 128) == 0:
        return "scaled"
    if group.block is not None and tokens <= 2 * FEW_TOKENS:
        return "few"
    return "library"


def _scaled(x: QuantisedInput, group: Group, out: Tensor) -> None:
    """x codes [rows, K] times e4m3 [N, K] into out [rows, N]; scales lie as the library wants them, tokens innermost."""
    assert group.scale is not None
    torch._scaled_mm(x.codes, group.data.t(), scale_a=x.scales.t(), scale_b=group.scale.t(), out_dtype=torch.bfloat16, out=out)


def _library(x: Tensor, group: Group) -> Tensor:
    """x bf16 [T, K] -> [T, N] in `group.out_dtype`."""
    if group.tile is not None:
        x = quantised_values(x, group.tile)
    data = group.data if group.block is None else dequantised(group)
    if group.out_dtype == torch.bfloat16:
        return F.linear(x, data)
    return torch.mm(x.repeat(1, group.parts), data.t(), out_dtype=torch.float32)


# Operations


def linear(x: Tensor, prepared: PreparedLinear, *, batch_invariant: bool = False) -> tuple[Tensor, ...]:
    """x bf16 [T, K] times each weight transposed -> [T, N_i] each, bf16, or fp32 for a weight that came as a `Tensor`.

    The outputs may be columns of one tensor. Up to FEW_TOKENS tokens, and with `batch_invariant` for any number, a token's results
    have the same bits whatever other tokens there are: the kernel cuts its sums over K alike for any number.
    """
    routes = ["few" if batch_invariant else route(len(x), group, prepared.scaled_mm) for group in prepared.groups]
    outs: dict[int, Tensor] = {}
    few = [i for i, chosen in enumerate(routes) if chosen == "few"]
    few.sort(key=lambda i: prepared.groups[i].tile is None)
    while few:
        launch = [few[0], *(i for i in few[1:] if prepared.groups[i].tile is None)][:MOST_GROUPS]
        outs |= zip(launch, few_tokens(x, [prepared.groups[i] for i in launch]), strict=True)
        few = [i for i in few if i not in launch]
    for i, group in enumerate(prepared.groups):
        if routes[i] == "scaled":
            assert group.tile is not None
            quantised = quantise(x, group.tile)
            out = torch.empty(len(quantised.codes), len(group.data), dtype=torch.bfloat16, device=x.device)
            _scaled(quantised, group, out)
            outs[i] = out[: len(x)]
        elif routes[i] == "library":
            outs[i] = _library(x, group)
    parts = [outs[i].split(group.rows, dim=1) for i, group in enumerate(prepared.groups)]
    return tuple(parts[group][number] for group, number in prepared.places)


def takes_codes(tokens: int, prepared: PreparedLinear, num_groups: int, *, batch_invariant: bool = False) -> bool:
    """Whether `linear_grouped` of this weight wants its input as codes."""
    (group,) = prepared.groups
    return group.block is not None and (batch_invariant or route(tokens, group, prepared.scaled_mm, num_groups) != "library")


def linear_grouped(
    x: Tensor | QuantisedInput, prepared: PreparedLinear, num_groups: int, *, batch_invariant: bool = False
) -> Tensor:
    """x [T, G, K] times weight [G R, K], group g by its own R rows -> [T, G, R] (V4 spec 2.8).

    Args:
        x: codes where `takes_codes` says so, else bf16 values that are quantised already where the weight wants that.
    """
    (group,) = prepared.groups
    plain = dataclasses.replace(group, tile=None)
    tokens = x.tokens if isinstance(x, QuantisedInput) else len(x)
    chosen = "few" if batch_invariant else route(tokens, group, prepared.scaled_mm, num_groups)
    assert isinstance(x, QuantisedInput) == (group.block is not None and chosen != "library"), f"{type(x).__name__} for {chosen}"
    if chosen == "few":
        source, weight = (x, group) if isinstance(x, QuantisedInput) else (x.flatten(1), plain)
        return few_tokens(source, [weight], num_groups=num_groups)[0].view(tokens, num_groups, -1)
    if isinstance(x, QuantisedInput):
        assert group.scale is not None
        out = torch.empty(len(x.codes), num_groups, len(group.data) // num_groups, dtype=torch.bfloat16, device=x.codes.device)
        weights, w_scales, scales = (part.chunk(num_groups) for part in (group.data, group.scale, x.scales))
        for g in range(num_groups):
            rows = dataclasses.replace(group, data=weights[g], scale=w_scales[g])
            _scaled(QuantisedInput(x.codes[:, g], scales[g], tokens), rows, out[:, g])
        return out[:tokens]
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
            {"TILE": tile, "WIDTH": WIDTH, "CODES": codes} | ({} if codes else {"scales": None}), num_warps=1,
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
    fused = tokens <= FUSED_TOKENS
    sizes = [(rows, 2 if block is None else 1, columns), *[(2048, 2, columns)] * beside]
    config = few_config(tokens, sizes, 2 if fused or block is None else 1)
    heights = (*config.rows, 16, 16)
    signature = {
        "x": "*bf16", "x_stride": "i32", "input0": "*bf16" if fused or block is None else "*fp8e4nv", "input0_stride": "i32",
        "scales0": "*fp32", "scales0_stride": "i32", "T": "i32", "K": "i32", "token_tiles": "i32", "group_rows": "i32",
        "data0": "*bf16" if block is None else "*fp8e4nv", "scale0": "*fp32", "out0": "*bf16", "N0": "i32", "tiles0": "i32",
        "data1": "*bf16", "out1": "*fp32", "N1": "i32", "tiles1": "i32", "data2": "*bf16", "out2": "*bf16", "N2": "i32",
    }  # fmt: skip
    constants: dict[str, object] = {
        "BT": config.tokens, "BN0": heights[0], "BN1": heights[1], "BN2": heights[2], "TILE": block, "ROW_BLOCK": block,
        "COLUMN_BLOCK": block, "PARTS0": parts, "PARTS1": 1, "PARTS2": 1, "EVEN": columns % STEP == 0, "ALIGNED": aligned_groups,
        "WARPS": WARPS, "COLUMNS": COLUMNS,
    }  # fmt: skip
    absent = ["scales0"] if fused or block is None else []
    absent += ["scale0"] if block is None else []
    absent += [f"{name}{i}" for i in (1, 2) if i > beside for name in ("data", "out")]
    free = {*signature} - {*absent, "T", "token_tiles", "tiles0", "tiles1"}
    return AotCase(
        f"few_tokens x{config.tokens} {rows} x {columns} block={block} beside={beside}", few_tokens_kernel, signature,
        constants | dict.fromkeys(absent), num_warps=WARPS, num_stages=config.num_stages, aligned=tuple(sorted(free)),
        spill_reason="a few registers beside the 255 of the widest tiles" if (block, config.rows[0], tokens) == (32, 32, 32) else None,
    )  # fmt: skip
