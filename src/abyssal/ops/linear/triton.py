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
    wait_before_product,
    zero_behind_loads,
)
from abyssal.ops.linear import LinearWeight, dequantize, e8m0_to_float

COLUMNS = 128  # that a warp takes at a time
PANEL_ROWS = 16
BLOCKS = (32, 64, 128)  # widths of weight blocks and of input tiles
FEW_TOKENS = 16
TILED_TOKENS = 256
MOST_GROUPS = 3  # of a launch
PROGRAMS = 128  # that keep the card busy
MULTIPROCESSORS = 132

Route = Literal["few", "tiled", "library"]


# Weights


@dataclass(frozen=True, slots=True)
class Group:
    """Weights of one input and one format, rows one below the other."""

    data: Tensor  # e4m3 [N, K], see `panels`; bf16 [N, K], fp32 weights bf16 [N, 3 K], zeros from each K on to a multiple of 128
    scale: Tensor | None  # fp32 [ceil(N / block), K / block]
    exponents: Tensor | None  # the same as int16, bytes e8m0
    block: tuple[int, int] | None
    tile: int | None  # values of the input that share a scale; None: the input is not quantised
    out_dtype: torch.dtype
    parts: int  # bf16 weights whose sum the weight is
    rows: tuple[int, ...]  # of each weight
    columns: int  # K


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
            return _plain([high], None, torch.float32)
        middle = (weight - high.float()).bfloat16()
        return _plain([high, middle, (weight - high.float() - middle.float()).bfloat16()], None, torch.float32)
    block, tile = weight.block, weight.quantize_input
    if weight.format == "fp8" and block is not None and tile is not None and _has_kernel(weight.shape, block, tile):
        assert weight.scale is not None
        scale = e8m0_to_float(weight.scale) if weight.scale.dtype == torch.uint8 else weight.scale
        exponents = _exponents(scale)
        if exponents is not None:
            rows, columns = weight.shape
            data = panels(weight.data, tile)
            return Group(data, scale.contiguous(), exponents, block, tile, torch.bfloat16, 1, (rows,), columns)
    return _plain([dequantize(weight, torch.bfloat16)], tile, torch.bfloat16)


def _plain(parts: list[Tensor], tile: int | None, out_dtype: torch.dtype) -> Group:
    rows, columns = parts[0].shape
    data = torch.cat([F.pad(part, (0, -columns % COLUMNS)) for part in parts], 1)
    return Group(data, None, None, None, tile, out_dtype, len(parts), (rows,), columns)


def _has_kernel(shape: tuple[int, ...], block: tuple[int, int], tile: int) -> bool:
    rows, columns = shape
    known = block[0] % PANEL_ROWS == 0 and block[1] == tile and tile in BLOCKS and columns % COLUMNS == 0
    return known and (tile == COLUMNS or rows % PANEL_ROWS == 0)


def _exponents(scale: Tensor) -> Tensor | None:
    """The bytes e8m0 of normal powers of two fp32; None where others are among them."""
    bits = scale.contiguous().view(torch.int32)
    normal = (bits & 0x807FFFFF) == 0
    return (bits >> 23).to(torch.int16) if (normal & (bits != 0)).all() else None


def panels(data: Tensor, width: int) -> Tensor:
    """[N, K] with 16 rows of `width` columns, a product's operand, side by side in memory; full width stays in rows."""
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
    rows = tuple(part.rows[0] for part in group)
    scale, exponents = (
        None if first.scale is None else torch.cat([getattr(part, name) for part in group]) for name in ("scale", "exponents")
    )
    return dataclasses.replace(first, data=torch.cat([part.data for part in group]), scale=scale, exponents=exponents, rows=rows)


# Input


@dataclass(frozen=True, slots=True)
class QuantisedInput:
    """An input as e4m3 codes and the scales of their tiles."""

    codes: Tensor  # e4m3 [T, K]; in groups [T, G, K]
    scales: Tensor  # fp32 [T, G K / tile], in memory as the product with so many tokens reads them fastest
    tile: int

    def __len__(self) -> int:
        return len(self.codes)

    def values(self) -> Tensor:
        """bf16 [T, K], exact."""
        scales = self.scales.repeat_interleave(self.tile, 1)[:, : self.codes.shape[1]]
        return (self.codes.float() * scales).bfloat16()

    @classmethod
    def empty(cls, tokens: int, shape: tuple[int, ...], tile: int, device: torch.device) -> QuantisedInput:
        """Room for codes of `shape` per token."""
        codes = torch.empty(tokens, *shape, dtype=torch.float8_e4m3fn, device=device)
        sizes = tokens, math.prod(shape[:-1]) * -(-shape[-1] // tile)
        if tokens <= FEW_TOKENS:
            return cls(codes, torch.empty(sizes, dtype=torch.float32, device=device), tile)
        return cls(codes, torch.empty(sizes[::-1], dtype=torch.float32, device=device).t(), tile)


Input = Tensor | QuantisedInput


def scale_strides(scales: Tensor | None) -> tuple[int, int]:
    """Of a kernel's argument `scales` fp32 [T, tiles], None where it writes values: from token to token, and from tile to tile."""
    return (0, 0) if scales is None else (scales.stride(0), scales.stride(1))


@triton.jit
def store_codes(codes, exponent, out, scales, tiles_stride, part, columns, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """What `e4m3_tiles` gave for part number `part`, of WIDTH columns, of a token: codes uint8 to its row `out`, and its `scales`."""
    column = part * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + column, tl.reshape(codes, (WIDTH,)), mask=column < columns)
    tile = part * (WIDTH // TILE) + tl.arange(0, WIDTH // TILE)
    tl.store(scales + tile * tiles_stride, power_of_two(exponent), mask=tile * TILE < columns)


@triton.jit(do_not_specialize=["scales_stride", "tiles_stride"])
def quantise_kernel(
    x, x_stride, out, scales, scales_stride, tiles_stride, K, TILE: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Token t, WIDTH columns per program. CODES: codes uint8 and scales fp32 [T, K / TILE], else the rounded values."""
    wait_before_product(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    values = to_fp32(tl.load(x + token * x_stride + column, mask=column < K, other=0.0))
    codes, exponent = e4m3_tiles(values, TILE, WIDTH)
    if CODES:
        store_codes(
            codes, exponent, out + token * K, scales + token * scales_stride, tiles_stride, tl.program_id(1), K, TILE, WIDTH
        )
    else:
        values = e4m3_values(codes) * power_of_two(exponent)[:, None]
        store_like(out + token * K + column, tl.reshape(values, (WIDTH,)), mask=column < K)


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
    tokens, columns = x.shape
    if tokens == 0:
        return
    parts = -(-columns // WIDTH)
    quantise_kernel[tokens, parts](
        x, x.stride(0), out, scales, *scale_strides(scales), columns, TILE=tile, WIDTH=WIDTH, CODES=scales is not None, num_warps=1,
        **early(tokens * parts, x),
    )  # fmt: skip


# A few tokens


@dataclass(frozen=True, slots=True)
class FewConfig:
    """Sizes of one launch. Only `warps` changes a sum: each output is one chain of products per warp, then the sum over the warps."""

    tokens: int  # of a program
    rows: tuple[int, ...]  # of a program, per group
    chunks: tuple[int, ...]  # of 128 columns of a warp whose loads are in flight together, per group
    warps: int  # each sums every so manyth 128 columns
    registers: int | None = None  # of a thread at most
    programs: int = 0  # each multiplies every so manyth tile of rows; 0: one


def few_config(tokens: int, columns: int, groups: Sequence[tuple[int, int | None, int]]) -> FewConfig:
    """As many loads in flight as registers hold: with about 60 KB per multiprocessor a product reads 3.1 TB/s, with 96 KB 4.4 (H200).

    Where a multiprocessor gets one program, that has eight warps, and what registers hold of its weights is on its way before the input is there. The number of
    warps follows from the weights alone, so that a token's bits do not depend on its batch.

    Args:
        columns: K of the input.
        groups: rows of each group, the tile of e4m3 weights, and parts of plain ones.
    """
    per_program = 8 if tokens <= 8 else 16 if tokens <= 16 else 32
    tiles = sum(-(-n // PANEL_ROWS) for n, *_ in groups)
    beside = -(-tiles // MULTIPROCESSORS)  # programs of a multiprocessor
    alone = beside == 1 and columns >= 8 * COLUMNS
    warps = 8 if alone else 4
    rows = tuple(
        8 if alone and 2 * tiles <= MULTIPROCESSORS else 32 if tile == 128 and n >= 256 * PROGRAMS else 16
        for n, tile, _ in groups
    )
    if per_program > 8:
        return FewConfig(per_program, rows, (1,) * len(groups), warps)
    steps = [-(-columns * parts // (warps * COLUMNS)) for *_, parts in groups]
    if len(groups) == 1 and groups[0][1] is not None and beside > 8 and 1 < steps[0] <= 3:
        most = 3 if steps[0] <= 2 else 2
        return FewConfig(8, (16,), (steps[0],), 4, 168 if most == 3 else None, most * MULTIPROCESSORS)
    chunks = tuple(
        _chunks(count, height, tile, beside, alone) for count, height, (_, tile, _) in zip(steps, rows, groups, strict=True)
    )
    return FewConfig(8, rows, chunks, warps, None if beside <= 2 else 168 if beside == 3 else 128)


def _chunks(steps: int, rows: int, tile: int | None, beside: int, alone: bool) -> int:
    """All `steps` if their weights fit into the registers, else as many as fit twice."""
    if tile is None:
        once, twice = (5 if rows == 8 else 2, 2) if alone else (2, 2) if beside <= 2 else (1, 1)
    else:
        once, twice = (5, 3) if alone else (4, 4) if beside <= 2 else (3, 2) if rows == 16 else (2, 1)
    return steps if steps <= once else twice


HALVES_ASM = tl.constexpr("""
{
.reg .b16 low, high; .reg .b32 first, second;
mov.b32 {low, high}, $4;
cvt.rn.f16x2.e4m3x2 first, low; cvt.rn.f16x2.e4m3x2 second, high;
mov.b32 {$0, $1}, first; mov.b32 {$2, $3}, second;
}
""")


@triton.jit
def _four_halves(words):
    """int32 words of four e4m3 codes -> their values fp16, exact; in the interpreter, whose products of fp16 are slow, fp32."""
    if INTERPRETED:
        values = ()
        for k in tl.static_range(4):
            values = values + (e4m3_values(((words >> (8 * k)) & 255).to(tl.uint8)),)
        return values
    else:
        return tl.inline_asm_elementwise(
            HALVES_ASM, "=h,=h,=h,=h,r", [words], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1
        )


# In the tiles below a lane of a tensor-core product has what it has loaded, so that nothing moves: row l / 4 of 8, and, with c = l % 4,
# columns 16 c .. 16 c + 15 of 64 or 8 c .. 8 c + 7 of 32. As a sum over K may be taken in any order, the products number K as these
# columns lie: groups of four of all lanes in turn, as Triton gives a lane four consecutive values of an operand. Dimensions are [rows,
# warps, columns] where values are loaded: where nothing else decides, Triton spreads lanes over the first of them.


@triton.jit
def _fp8_values(words, WARPS: tl.constexpr, WORDS: tl.constexpr):
    """int32 [8, WARPS, WORDS] -> [8, WARPS, 4 lanes, words of a lane, 4]."""
    v = _four_halves(words)
    return tl.reshape(tl.join(tl.join(v[0], v[2]), tl.join(v[1], v[3])), (8, WARPS, 4, WORDS // 4, 4))


@triton.jit
def _fp8_tile(low, high, WARPS: tl.constexpr, WORDS: tl.constexpr):
    """Words of eight rows and of the next eight -> fp16 [WARPS, 16, 4 WORDS]."""
    parts = tl.join(_fp8_values(low, WARPS, WORDS), _fp8_values(high, WARPS, WORDS))  # row, warp, lane, word, value, eight
    return tl.reshape(tl.permute(parts, (1, 5, 0, 3, 2, 4)), (WARPS, 16, 4 * WORDS))


@triton.jit
def _fp8_input(words, WARPS: tl.constexpr, WORDS: tl.constexpr):
    """Words of eight tokens -> fp16 [WARPS, 4 WORDS, 8]."""
    parts = tl.permute(_fp8_values(words, WARPS, WORDS), (1, 0, 3, 2, 4))  # warp, token, word, lane, value
    return tl.permute(tl.reshape(parts, (WARPS, 8, 4 * WORDS)), (0, 2, 1))


@triton.jit
def _plain_tile(low, high, WARPS: tl.constexpr):
    """Values bf16 [8, WARPS, 32] of eight rows and of the next eight -> [WARPS, 16, 32]."""
    parts = tl.reshape(tl.join(low, high), (8, WARPS, 4, 2, 4, 2))  # row, warp, lane, four, value, eight
    return tl.reshape(tl.permute(parts, (1, 5, 0, 3, 2, 4)), (WARPS, 16, 32))


@triton.jit
def _plain_input(x, WARPS: tl.constexpr):
    """bf16 [8, WARPS, 32] of eight tokens -> [WARPS, 32, 8]."""
    parts = tl.reshape(x, (8, WARPS, 4, 2, 4))  # token, warp, lane, four, value
    return tl.permute(tl.reshape(tl.permute(parts, (1, 0, 3, 2, 4)), (WARPS, 8, 32)), (0, 2, 1))


# The scales of a product lie where its sums do if they are a product themselves: of the weight's scale by the input's, powers of two and
# so exact. Block b of 128 columns has its scales in lanes c = b; the operand of the weights holds that of one block, and zeros.


@triton.jit
def _spread(x):
    """[8, WARPS, 4] -> [8, WARPS, 4, 2, 2, 2], of a lane's eight values all but the first zero."""
    x = tl.join(x, tl.zeros_like(x))
    x = tl.join(x, tl.zeros_like(x))
    return tl.join(x, tl.zeros_like(x))


@triton.jit
def _weight_scale(byte, block: tl.constexpr, WARPS: tl.constexpr):
    """e8m0 bytes int32 [8, WARPS, 4], one per block, the same for all rows -> bf16 [WARPS, 16, 32]."""
    bits = tl.where(tl.arange(0, 4)[None, None, :] == block, byte << 7, 0)
    x = _spread(bits.to(tl.uint16).to(tl.bfloat16, bitcast=True))
    parts = tl.reshape(tl.join(x, x), (8, WARPS, 4, 4, 2, 2))  # row, warp, lane, value, half, eight
    return tl.reshape(tl.permute(parts, (1, 5, 0, 4, 2, 3)), (WARPS, 16, 32))


@triton.jit
def _input_scale(scale, WARPS: tl.constexpr):
    """fp32 [8, WARPS, 4], per token and block -> bf16 [WARPS, 32, 8]."""
    parts = tl.reshape(_spread(to_bf16(scale)), (8, WARPS, 4, 4, 2))  # token, warp, lane, value, half
    return tl.permute(tl.reshape(tl.permute(parts, (1, 0, 4, 2, 3)), (WARPS, 8, 32)), (0, 2, 1))


@triton.jit
def _load_weights(
    data, exponents, n0, N_end, first, K, BN: tl.constexpr, TILE: tl.constexpr, ROW_BLOCK: tl.constexpr, FULL: tl.constexpr,
    CHUNKS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Of rows BN from n0 on, eight at a time, each warp's 128 columns from `first` [WARPS] on, and those of the next CHUNKS - 1 rounds.

    Of e4m3 weights also the scales' bytes, of each 16 rows. Codes of columns past the last are not read: they are any, with scale 0.
    """
    FP8: tl.constexpr = TILE is not None
    WORDS: tl.constexpr = 8 if TILE == 32 else 16
    values, scales = (), ()
    for chunk in tl.static_range(CHUNKS):
        column = (first + chunk * (WARPS * 128))[None, :, None]
        inside = column < K
        for eight in tl.static_range(BN // 8):
            row = n0 + eight * 8 + tl.arange(0, 8)
            n = (row if FULL else tl.minimum(row, N_end - 1)).to(tl.int64)[:, None, None]  # past the last row it is done again
            if FP8:
                word = tl.arange(0, WORDS)[None, None, :]
                if TILE == 128:
                    place = n * (K // 4) + column // 4 + word
                else:
                    panel = ((n0 + eight * 8) // 16).to(tl.int64) if FULL else n // 16
                    inner = ((n0 % 16 + eight * 8) % 16 + tl.arange(0, 8))[:, None, None] if FULL else n % 16
                    place = panel * (4 * K) + column * 4 + (inner * (TILE // 4) + word)
                for part in tl.static_range(32 // WORDS):
                    values = values + (tl.load(data + place + part * (16 if TILE == 128 else 4 * TILE), mask=inside),)
                if eight % 2 == 0:
                    lane = tl.arange(0, 4)[None, None, :]
                    block = tl.minimum(n0 + eight * 8, N_end - 1) // ROW_BLOCK * (K // TILE) + column // TILE
                    byte = tl.load(
                        exponents + block + lane + tl.zeros((8, 1, 1), tl.int32), mask=inside & (lane < 128 // TILE), other=0
                    )
                    scales = scales + (byte,)
            else:
                place = n * K + column + tl.arange(0, 32)[None, None, :]
                for part in tl.static_range(4):
                    values = values + (tl.load(data + place + part * 32, mask=inside, other=0.0),)
    return values, scales


@triton.jit
def _load_inputs(
    x, x_stride, x_scales, x_scale_stride, t0, T, first, K, columns, BT: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
    EVEN: tl.constexpr, CHUNKS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """What meets `_load_weights`, of tokens t0 .. t0 + BT, eight at a time; scales and plain values are zero past the last column."""
    WORDS: tl.constexpr = 8 if TILE == 32 else 16
    inputs, scales = (), ()
    for chunk in tl.static_range(CHUNKS):
        column = (first + chunk * (WARPS * 128))[None, :, None]
        inside = column < K
        if PARTS > 1:
            column = column % (K // PARTS)
        for eight in tl.static_range(BT // 8):
            t = tl.minimum(t0 + eight * 8 + tl.arange(0, 8), T - 1)  # past the last token it is done again
            t = t.to(tl.int64)[:, None, None]
            if TILE is not None:
                for part in tl.static_range(32 // WORDS):
                    word = column // 4 + part * WORDS + tl.arange(0, WORDS)[None, None, :]
                    inputs = inputs + (tl.load(x + t * x_stride + word, mask=inside),)
                lane = tl.arange(0, 4)[None, None, :]
                place = x_scales + t * x_scale_stride + column // TILE + lane
                scales = scales + (tl.load(place, mask=inside & (lane < 128 // TILE), other=0.0),)
            else:
                for part in tl.static_range(4):
                    here = column + part * 32 + tl.arange(0, 32)[None, None, :]
                    kept = inside if EVEN else inside & (here < columns)
                    inputs = inputs + (tl.load(x + t * x_stride + here, mask=kept, other=0.0),)
    return inputs, scales


@triton.constexpr_function
def _tiles(rows: int) -> int:
    """Products of 16 rows; of 8 rows the second half is the first again, and dropped."""
    return -(-rows // 16)


@triton.constexpr_function
def _next(rows: int) -> int:
    return 1 if rows > 8 else 0


@triton.jit
def _multiply_fp8(sums, w, w_bytes, x, x_scales, zero, BN, BT, CHUNKS, TILE, WARPS):
    """sums: a tuple of fp32 [WARPS, 16, 8], for each 16 rows one per eight tokens, plus the product of what was loaded, block by block."""
    WORDS: tl.constexpr = 8 if TILE == 32 else 16
    PIECES: tl.constexpr = 32 // WORDS  # of 128 columns
    PER_BLOCK: tl.constexpr = TILE // (4 * WORDS)
    for chunk in tl.static_range(CHUNKS):
        for block in tl.static_range(128 // TILE):
            new = ()
            for tile in tl.static_range(_tiles(BN)):
                w_scale = _weight_scale(w_bytes[chunk * _tiles(BN) + tile].to(tl.int32) + zero, block, WARPS)
                operands = ()
                for part in tl.static_range(PER_BLOCK):
                    low = w[(chunk * (BN // 8) + 2 * tile) * PIECES + block * PER_BLOCK + part]
                    high = w[(chunk * (BN // 8) + 2 * tile + _next(BN)) * PIECES + block * PER_BLOCK + part]
                    operands = operands + (_fp8_tile(low, high, WARPS, WORDS),)
                for eight in tl.static_range(BT // 8):
                    total = tl.zeros((WARPS, 16, 8), tl.float32) + zero
                    for part in tl.static_range(PER_BLOCK):
                        words = x[(chunk * (BT // 8) + eight) * PIECES + block * PER_BLOCK + part]
                        total = tl.dot(operands[part], _fp8_input(words, WARPS, WORDS), total)
                    scale = tl.dot(w_scale, _input_scale(x_scales[chunk * (BT // 8) + eight], WARPS))
                    new = new + (sums[tile * (BT // 8) + eight] + total * scale,)
            sums = new
    return sums


@triton.jit
def _multiply_plain(sums, w, x, zero, BN, BT, CHUNKS, WARPS):
    """As `_multiply_fp8` for bf16."""
    for chunk in tl.static_range(CHUNKS):
        for part in tl.static_range(4):
            new = ()
            for tile in tl.static_range(_tiles(BN)):
                low = w[(chunk * (BN // 8) + 2 * tile) * 4 + part]
                operand = _plain_tile(low, w[(chunk * (BN // 8) + 2 * tile + _next(BN)) * 4 + part], WARPS)
                for eight in tl.static_range(BT // 8):
                    total = sums[tile * (BT // 8) + eight]
                    if chunk == 0 and part == 0:
                        total += zero
                    new = new + (tl.dot(operand, _plain_input(x[(chunk * (BT // 8) + eight) * 4 + part], WARPS), total),)
            sums = new
    return sums


@triton.jit
def _product(
    x, x_stride, x_scales, x_scale_stride, data, exponents, out, tile, t0, T, N, K, columns, group_rows,
    BN: tl.constexpr, BT: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr, ROW_BLOCK: tl.constexpr, PARTS: tl.constexpr,
    EVEN: tl.constexpr, FULL: tl.constexpr, WARPS: tl.constexpr, WHOLE: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Rows BN of one weight for BT tokens: each warp's own columns, then the sum over the warps.

    The loads of the next columns are in flight during a product; WHOLE: they are one step, and with STRIDE the next are those of the tile
    so many further on. Weights do not depend on the kernel before: the first are on their way before the input is there.
    """
    group_tiles = tl.cdiv(group_rows, BN)
    group = tile // group_tiles
    n0 = group * group_rows + tile % group_tiles * BN
    N_end = (group + 1) * group_rows
    if TILE is None:
        x += group * columns
    else:
        x += group * (columns // 4)
        x_scales += group * (columns // TILE)
    first = tl.arange(0, WARPS) * 128
    w, w_bytes = _load_weights(data, exponents, n0, N_end, first, K, BN, TILE, ROW_BLOCK, FULL, CHUNKS, WARPS)
    if not INTERPRETED:
        gdc_wait()
        gdc_launch_dependents()
    if WHOLE:
        inputs, scales = _load_inputs(
            x, x_stride, x_scales, x_scale_stride, t0, T, first, K, columns, BT, TILE, PARTS, EVEN, CHUNKS, WARPS
        )
        if STRIDE:
            for here in range(n0, N, STRIDE * BN):
                ahead = here + STRIDE * BN
                w_next, bytes_next = _load_weights(
                    data, exponents, ahead, N_end, first, tl.where(ahead < N, K, 0), BN, TILE, ROW_BLOCK, FULL, CHUNKS, WARPS
                )
                sums = _multiply(_no_sums(BN, BT, WARPS), w, w_bytes, inputs, scales, BN, BT, CHUNKS, TILE, WARPS)
                _store_sums(sums, out, here, N_end, t0, T, N, BN, BT)
                w, w_bytes = w_next, bytes_next
        else:
            sums = _multiply(_no_sums(BN, BT, WARPS), w, w_bytes, inputs, scales, BN, BT, CHUNKS, TILE, WARPS)
            _store_sums(sums, out, n0, N_end, t0, T, N, BN, BT)
    else:
        sums = _no_sums(BN, BT, WARPS)
        for _ in range(0, K, WARPS * 128 * CHUNKS):
            inputs, scales = _load_inputs(
                x, x_stride, x_scales, x_scale_stride, t0, T, first, K, columns, BT, TILE, PARTS, EVEN, CHUNKS, WARPS
            )
            first += WARPS * 128 * CHUNKS
            w_next, bytes_next = _load_weights(data, exponents, n0, N_end, first, K, BN, TILE, ROW_BLOCK, FULL, CHUNKS, WARPS)
            sums = _multiply(sums, w, w_bytes, inputs, scales, BN, BT, CHUNKS, TILE, WARPS)
            w, w_bytes = w_next, bytes_next
        _store_sums(sums, out, n0, N_end, t0, T, N, BN, BT)


@triton.jit
def _no_sums(BN: tl.constexpr, BT: tl.constexpr, WARPS: tl.constexpr):
    sums = ()
    for _ in tl.static_range(_tiles(BN) * (BT // 8)):
        sums = sums + (tl.zeros((WARPS, 16, 8), tl.float32),)
    return sums


@triton.jit
def _multiply(sums, w, w_bytes, inputs, scales, BN, BT, CHUNKS, TILE, WARPS):
    """`sums` plus the product of what was loaded, which waits for nothing before all loads in front of it are on their way."""
    if TILE is None:
        sums = _multiply_plain(sums, w, inputs, zero_behind_loads(), BN, BT, CHUNKS, WARPS)
    else:
        sums = _multiply_fp8(sums, w, w_bytes, inputs, scales, zero_behind_loads(), BN, BT, CHUNKS, TILE, WARPS)
    return sums


@triton.jit
def _store_sums(sums, out, n0, N_end, t0, T, N, BN: tl.constexpr, BT: tl.constexpr):
    """Rows `n0` .. `n0` + BN, summed over the warps."""
    for tile16 in tl.static_range(_tiles(BN)):
        rows = n0 + tile16 * 16 + tl.arange(0, 16)
        for eight in tl.static_range(BT // 8):
            tokens = t0 + eight * 8 + tl.arange(0, 8)
            place = out + tokens.to(tl.int64)[None, :] * N + rows[:, None]
            kept = (rows < tl.minimum(n0 + BN, N_end))[:, None] & (tokens < T)[None, :]
            store_like(place, tl.sum(sums[tile16 * (BT // 8) + eight], 0), mask=kept)


@triton.jit(do_not_specialize=["T", "token_tiles", "tiles0", "tiles1", "scales0_stride"])
def few_tokens_kernel(
    x, x_stride, input0, input0_stride, scales0, scales0_stride, T, columns, token_tiles, group_rows,
    data0, exponents0, out0, N0, K0, tiles0, data1, out1, N1, K1, tiles1, data2, out2, N2, K2,
    BT: tl.constexpr, BN0: tl.constexpr, BN1: tl.constexpr, BN2: tl.constexpr, CHUNKS0: tl.constexpr, CHUNKS1: tl.constexpr,
    CHUNKS2: tl.constexpr, TILE: tl.constexpr, ROW_BLOCK: tl.constexpr, PARTS0: tl.constexpr, PARTS1: tl.constexpr,
    PARTS2: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, WARPS: tl.constexpr, WHOLE0: tl.constexpr, WHOLE1: tl.constexpr,
    WHOLE2: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Up to three groups of weights of one input; only the first may have scales, or an input of its own: quantised, or rounded.

    The token tiles of the same rows run side by side, so that the weights come from memory once.
    """
    t0 = tl.program_id(0) % token_tiles * BT
    tile = tl.program_id(0) // token_tiles
    if tile < tiles0:
        _product(
            input0, input0_stride, scales0, scales0_stride, data0, exponents0, out0, tile, t0, T, N0, K0, columns, group_rows,
            BN0, BT, CHUNKS0, TILE, ROW_BLOCK, PARTS0, EVEN, FULL, WARPS, WHOLE0, STRIDE,
        )  # fmt: skip
    elif data1 is not None:
        if tile < tiles0 + tiles1:
            _product(
                x, x_stride, None, 0, data1, None, out1, tile - tiles0, t0, T, N1, K1, columns, N1,
                BN1, BT, CHUNKS1, None, None, PARTS1, EVEN, FULL, WARPS, WHOLE1, 0,
            )  # fmt: skip
        elif data2 is not None:
            _product(
                x, x_stride, None, 0, data2, None, out2, tile - tiles0 - tiles1, t0, T, N2, K2, columns, N2,
                BN2, BT, CHUNKS2, None, None, PARTS2, EVEN, FULL, WARPS, WHOLE2, 0,
            )  # fmt: skip


def _is_whole(columns: int, warps: int, chunks: int) -> bool:
    """Whether several chunks of each warp are all columns of a weight, so that a loop would load in vain."""
    return chunks > 1 and columns <= warps * chunks * COLUMNS


def few_tokens(x: Input, groups: Sequence[Group], *, num_groups: int = 1, config: FewConfig | None = None) -> list[Tensor]:
    """One launch: x [T, G K] -> [T, N] per group of weights. Groups after the first are plain and take the input as it is.

    Args:
        num_groups: G: the rows of the weight are G groups of N / G, the columns of x G groups of K (V4 spec 2.8).
    """
    first, columns = groups[0], groups[0].columns
    assert len(groups) <= MOST_GROUPS and all(group.tile is None and group.columns == columns for group in groups[1:])
    plain = x.codes.flatten(1) if isinstance(x, QuantisedInput) and len(groups) == 1 else _values(x, None)
    tokens = len(plain)
    assert plain.shape[1] == columns * num_groups, f"input has {plain.shape[1]} columns, the weight {columns}"
    assert plain.stride(1) == 1, f"the values of a row are {plain.stride(1)} apart"
    outs = [torch.empty(tokens, len(group.data), dtype=group.out_dtype, device=plain.device) for group in groups]
    if tokens == 0:
        return outs
    quantised = _codes(x, first.tile) if first.block is not None and first.tile is not None else None
    source = _values(x, first.tile) if quantised is None else quantised.codes.flatten(1).view(torch.int32)
    scales = None if quantised is None else quantised.scales.contiguous()
    config = config or few_config(
        tokens, columns, [(len(group.data), group.block and group.tile, group.parts) for group in groups]
    )
    group_rows = len(first.data) // num_groups
    assert num_groups == 1 or group_rows % 16 == 0, f"groups of {group_rows} rows, not of a multiple of 16"
    tiles = [-(-len(group.data) // rows) for group, rows in zip(groups, config.rows, strict=True)]
    tiles[0] = num_groups * -(-group_rows // config.rows[0])
    token_tiles = -(-tokens // config.tokens)
    absent = (None, None, 0, 0, 0)
    more = [(group.data, out, *group.data.shape, n) for group, out, n in zip(groups[1:], outs[1:], tiles[1:], strict=True)]
    (data1, out1, rows1, columns1, tiles1), (data2, out2, rows2, columns2, _) = [*more, absent, absent][:2]
    rows, chunks, parts = ((*config.rows, 16, 16), (*config.chunks, 1, 1), (*(group.parts for group in groups), 1, 1))
    wholes = [_is_whole(group.data.shape[1], config.warps, n) for group, n in zip(groups, config.chunks, strict=True)]
    assert not config.programs or wholes == [True], f"{config}: programs of several tiles keep all of one weight's input"
    wholes += [False, False]
    stride = config.programs if num_groups == token_tiles == 1 else 0
    programs = min(sum(tiles), stride or sum(tiles)) * token_tiles
    heights = (group_rows, *(len(group.data) for group in groups[1:]))
    few_tokens_kernel[(programs,)](
        plain, plain.stride(0), source, source.stride(0), scales, 0 if scales is None else scales.stride(0),
        tokens, columns, token_tiles, group_rows,
        first.data if first.block is None else first.data.view(torch.int32), first.exponents, outs[0], *first.data.shape, tiles[0],
        data1, out1, rows1, columns1, tiles1, data2, out2, rows2, columns2,
        BT=config.tokens, BN0=rows[0], BN1=rows[1], BN2=rows[2], CHUNKS0=chunks[0], CHUNKS1=chunks[1], CHUNKS2=chunks[2],
        TILE=None if first.block is None else first.tile, ROW_BLOCK=first.block and first.block[0],
        PARTS0=parts[0], PARTS1=parts[1], PARTS2=parts[2], EVEN=columns % COLUMNS == 0,
        FULL=all(n % height == 0 for n, height in zip(heights, config.rows, strict=True)),
        WHOLE0=wholes[0], WHOLE1=wholes[1], WHOLE2=wholes[2], STRIDE=stride,
        WARPS=config.warps, num_warps=config.warps, num_stages=1, maxnreg=config.registers, launch_pdl=starts_early(programs, plain),
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
PART_COLUMNS = 512  # of a part of K, at least


def tiled_config(tokens: int, rows: int, columns: int) -> TiledConfig:
    """As many parts of K as keep the card busy."""
    per_program = 32 if tokens <= 32 else 64
    programs = -(-rows // TILE_ROWS) * -(-tokens // per_program)
    splits = max(1, min(PROGRAMS // programs, columns // PART_COLUMNS))
    part = -(-columns // (splits * COLUMNS)) * COLUMNS
    return TiledConfig(per_program, -(-columns // part), part)


@triton.jit
def _halves(codes):
    """e4m3 -> fp16, exact; in the interpreter, whose products of fp16 are slow, fp32."""
    if INTERPRETED:
        return e4m3_values(codes.to(tl.uint8, bitcast=True))
    else:
        return codes.to(tl.float16)


@triton.jit(do_not_specialize=["T", "x_tile_stride"])
def tiled_kernel(
    x, x_stride, x_scales, x_scale_stride, x_tile_stride, data, scale, out, T, N, K, group_rows, split_columns,
    BN: tl.constexpr, BT: tl.constexpr, COLUMNS: tl.constexpr, BK: tl.constexpr, ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (n, t, s): BN rows of an FP8 weight for BT tokens over part s of K, into out [S, T, N]; a row tile lies in one group."""
    n0 = tl.program_id(0) * BN
    group = n0 // group_rows
    n = tl.minimum(n0 + tl.arange(0, BN), N - 1).to(tl.int64)
    t0 = tl.program_id(1) * BT
    t = tl.minimum(t0 + tl.arange(0, BT), T - 1).to(tl.int64)
    k = tl.arange(0, BK)
    x_pointer = x + group * K + t[None, :] * x_stride + k[:, None]
    if BK == COLUMNS:
        w_pointer = data + n[:, None] * K + k[None, :]
    else:
        w_pointer = data + (n // 16 * (16 * K) + n % 16 * BK)[:, None] + k[None, :]
    STRIDE: tl.constexpr = 1 if BK == COLUMNS else 16  # of a column of the weight, where a panel's rows lie side by side
    first = tl.program_id(2) * split_columns
    w_scales = scale + (n0 // ROW_BLOCK if ROW_BLOCK % BN == 0 else n // ROW_BLOCK) * (K // BK)
    x_scales += group * (K // BK) * x_tile_stride + t * x_scale_stride
    x_scale = tl.load(x_scales + first // BK * x_tile_stride)
    w_scale = tl.load(w_scales + first // BK)
    acc = tl.zeros((BN, BT), tl.float32)
    for k0 in range(first, tl.minimum(first + split_columns, K), COLUMNS):
        for part in tl.static_range(COLUMNS // BK):
            here = k0 + part * BK
            w = tl.load(w_pointer + here * STRIDE)
            codes = tl.load(x_pointer + here)
            later = tl.minimum(here + BK, K - BK)  # scales are loaded one product ahead
            x_ahead = tl.load(x_scales + later // BK * x_tile_stride)
            w_ahead = tl.load(w_scales + later // BK)
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
    tiled_kernel[-(-rows // TILE_ROWS), -(-tokens // config.tokens), config.splits](
        codes, codes.stride(0), x.scales, *x.scales.stride(), group.data, group.scale, parts, tokens, rows, columns, group_rows,
        config.columns, BN=TILE_ROWS, BT=config.tokens, COLUMNS=COLUMNS, BK=group.tile, ROW_BLOCK=group.block[0],
        num_warps=8, num_stages=config.num_stages,
    )  # fmt: skip
    if config.splits > 1:
        sum_kernel[(-(-out.numel() // 1024),)](parts, out, out.numel(), SPLITS=config.splits, WIDTH=1024, num_warps=4)
    return out


# Many tokens


@triton.jit
def dequantise_kernel(
    data, scale, out, N, K, BK: tl.constexpr, ROW_BLOCK: tl.constexpr, BN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """e4m3 weights times their scales -> bf16 [N, K]: BN rows and COLUMNS columns per program."""
    n = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (n < N) & (column < K)
    if BK == COLUMNS:
        place = n * K + column
    else:
        place = n // 16 * (16 * K) + column // BK * (16 * BK) + n % 16 * BK + column % BK
    codes = tl.load(data + place, mask=inside, other=0.0)
    s = tl.load(scale + n // ROW_BLOCK * (K // BK) + column // BK, mask=inside, other=0.0)
    tl.store(out + n * K + column, to_bf16(_halves(codes).to(tl.float32) * s), mask=inside)


def dequantised(group: Group) -> Tensor:
    """The weights of an FP8 group, bf16 [N, K] (V4 spec 4.1)."""
    assert group.scale is not None and group.block is not None
    rows, columns = group.data.shape
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=group.data.device)
    dequantise_kernel[-(-rows // PANEL_ROWS), -(-columns // COLUMNS)](
        group.data, group.scale, out, rows, columns, BK=group.tile, ROW_BLOCK=group.block[0],
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
    one_group = num_groups == 1 or len(group.data) // num_groups % TILE_ROWS == 0
    return "tiled" if one_group and (group.block[0] % TILE_ROWS == 0 or TILE_ROWS % group.block[0] == 0) else "few"


def _library(x: Input, group: Group) -> Tensor:
    """x [T, K] -> [T, N] in `group.out_dtype`."""
    data = group.data if group.block is None else dequantised(group)
    values = _padded(_values(x, group.tile), group)
    if group.out_dtype == torch.bfloat16:
        return F.linear(values, data)
    repeated = values if group.parts == 1 else values.repeat(1, group.parts)
    return torch.mm(repeated, data.t(), out_dtype=torch.float32)


def _padded(x: Tensor, group: Group) -> Tensor:
    """x [.., K], with zeros for the columns that only fill a weight up; where there are none x itself, which `F.pad` would copy."""
    missing = group.data.shape[1] // group.parts - group.columns
    return F.pad(x, (0, missing)) if missing else x


def _codes(x: Input, tile: int) -> QuantisedInput:
    """Codes for a weight whose input is quantised in tiles of `tile`."""
    if isinstance(x, QuantisedInput):
        return x if x.tile == tile else quantise(x.values(), tile)
    return quantise(x, tile)


def _values(x: Input, tile: int | None) -> Tensor:
    """bf16 values for a weight whose input is rounded in tiles of `tile`. What other tiles have rounded is taken as it is for None."""
    values = x if isinstance(x, Tensor) else x.values()
    if tile is None or (not isinstance(x, Tensor) and x.tile == tile):
        return values
    return quantised_values(values, tile)


# Operations


def linear(x: Input, prepared: PreparedLinear, *, batch_invariant: bool = False) -> tuple[Tensor, ...]:
    """x bf16 [T, K], or rounded, times each weight transposed -> [T, N_i] each, bf16, or fp32 for a weight that came as a `Tensor`.

    The outputs may be columns of one tensor. Up to FEW_TOKENS tokens, and with `batch_invariant` for any number, a token's results
    have the same bits whatever other tokens there are: the kernel cuts its sums over K alike for any number.
    """
    tokens, outs, few = len(x), dict[int, Tensor](), []
    for i, group in enumerate(prepared.groups):
        chosen = "few" if batch_invariant else route(tokens, group)
        if chosen == "few":
            few.append(i)
        elif chosen == "tiled":
            assert group.tile is not None
            outs[i] = tiled(_codes(x, group.tile), group)
        else:
            outs[i] = _library(x, group)
    few.sort(key=lambda i: prepared.groups[i].tile is None)
    while few:
        launch = [few[0], *(i for i in few[1:] if prepared.groups[i].tile is None)][:MOST_GROUPS]
        outs |= zip(launch, few_tokens(x, [prepared.groups[i] for i in launch]), strict=True)
        few = [i for i in few if i not in launch]
    parts = [_split(outs[i], group.rows) for i, group in enumerate(prepared.groups)]
    return tuple(parts[group][number] for group, number in prepared.places)


def _split(out: Tensor, rows: tuple[int, ...]) -> Sequence[Tensor]:
    """out [T, N] -> [T, N_i] of each weight; `Tensor.split` takes 3 us even for one."""
    return (out,) if len(rows) == 1 else torch.split_with_sizes(out, rows, 1)


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
    codes = isinstance(x, QuantisedInput)
    tokens = len(x)
    assert codes == takes_codes(tokens, prepared, num_groups, batch_invariant=batch_invariant), (
        f"{type(x).__name__} of {tokens} tokens"
    )
    if batch_invariant or route(tokens, group, num_groups) == "few":
        plain = group if isinstance(x, QuantisedInput) else dataclasses.replace(group, tile=None)
        source = x if isinstance(x, QuantisedInput) else x.flatten(1)
        return few_tokens(source, [plain], num_groups=num_groups)[0].view(tokens, num_groups, -1)
    if isinstance(x, QuantisedInput):
        return tiled(x, group, num_groups=num_groups).view(tokens, num_groups, -1)
    matrix = (group.data if group.block is None else dequantised(group)).view(num_groups, -1, group.data.shape[1])
    out = torch.empty(tokens, num_groups, matrix.shape[1], dtype=x.dtype, device=x.device)
    torch.bmm(_padded(x, group).transpose(0, 1), matrix.transpose(1, 2), out=out.transpose(0, 1))
    return out


def aot_cases() -> list[AotCase]:
    """Every format and size of tiles of the few-token kernel, as V4-Flash and V4.1-Flash launch it, and the helpers of many tokens."""
    cases = [
        AotCase(
            f"quantise tile={tile} codes={codes}", quantise_kernel,
            {"x": "*bf16", "x_stride": "i32", "out": "*u8" if codes else "*bf16", "scales": "*fp32", "scales_stride": "i32", "tiles_stride": "i32", "K": "i32"},
            {"TILE": tile, "WIDTH": WIDTH, "CODES": codes, "EARLY": True} | ({} if codes else {"scales": None}), num_warps=1,
            aligned=("x", "x_stride", "out", "K"),
        )
        for tile, codes in ((128, True), (32, False))
    ] + [
        AotCase(
            f"dequantise block={block}", dequantise_kernel,
            {"data": "*fp8e4nv", "scale": "*fp32", "out": "*bf16", "N": "i32", "K": "i32"},
            {"BK": block, "ROW_BLOCK": block, "BN": PANEL_ROWS, "COLUMNS": COLUMNS},
            aligned=("data", "scale", "out", "N", "K"),
        )
        for block in (128, 32)
    ]  # fmt: skip
    cases += [
        AotCase(
            f"tiled x{tokens} block={block} {'parts' if split else 'whole'}", tiled_kernel,
            {
                "x": "*fp8e4nv", "x_stride": "i32", "x_scales": "*fp32", "x_scale_stride": "i32", "x_tile_stride": "i32", "data": "*fp8e4nv", "scale": "*fp32",
                "out": "*fp32" if split else "*bf16", "T": "i32", "N": "i32", "K": "i32", "group_rows": "i32", "split_columns": "i32",
            },
            {"BN": TILE_ROWS, "BT": tokens, "COLUMNS": COLUMNS, "BK": block, "ROW_BLOCK": block}, num_warps=8,
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
    cases += [
        _few_case(1, *sizes)
        for sizes in ((8192, 4096, 128), (8192, 4096, 32), (4096, 8192, 128), (5120, 8192, 32), (384, 5120, None))
    ]
    cases += [_few_case(1, 1536, 4096, 128, beside=beside) for beside in (1, 2)]
    cases += [_few_case(16, 32768, 1024, 128), _few_case(16, 32768, 1280, 32)]
    return [*cases, _few_case(1, 192, 128, None, parts=3), _few_case(32, 24, 128, 128)]


def _few_case(tokens: int, rows: int, columns: int, block: int | None, *, beside: int = 0, parts: int = 1) -> AotCase:
    config = few_config(tokens, columns, [(rows, block, parts), *[(2048, None, 1)] * beside])
    heights, chunks = (*config.rows, 16, 16), (*config.chunks, 1, 1)
    signature = {
        "x": "*bf16", "x_stride": "i32", "input0": "*bf16" if block is None else "*i32", "input0_stride": "i32", "scales0": "*fp32", "scales0_stride": "i32", "T": "i32", "columns": "i32", "token_tiles": "i32",
        "group_rows": "i32", "data0": "*bf16" if block is None else "*i32", "exponents0": "*i16", "out0": "*bf16", "N0": "i32", "K0": "i32",
        "tiles0": "i32", "data1": "*bf16", "out1": "*fp32", "N1": "i32", "K1": "i32", "tiles1": "i32", "data2": "*bf16", "out2": "*bf16",
        "N2": "i32", "K2": "i32",
    }  # fmt: skip
    constants: dict[str, object] = {
        "BT": config.tokens, "BN0": heights[0], "BN1": heights[1], "BN2": heights[2], "CHUNKS0": chunks[0], "CHUNKS1": chunks[1],
        "CHUNKS2": chunks[2], "TILE": block, "ROW_BLOCK": block, "PARTS0": parts, "PARTS1": 1, "PARTS2": 1, "EVEN": columns % COLUMNS == 0,
        "FULL": rows % heights[0] == 0, "WARPS": config.warps, "WHOLE0": _is_whole(columns * parts, config.warps, chunks[0]),
        "WHOLE1": _is_whole(columns, config.warps, chunks[1]), "WHOLE2": _is_whole(columns, config.warps, chunks[2]), "STRIDE": config.programs,
    }  # fmt: skip
    absent = ["exponents0", "scales0"] if block is None else []
    absent += [f"{name}{i}" for i in (1, 2) if i > beside for name in ("data", "out")]
    free = {*signature} - {*absent, "T", "token_tiles", "tiles0", "tiles1", "scales0_stride"}
    return AotCase(
        f"few_tokens x{config.tokens} {rows} x {columns} block={block} beside={beside}", few_tokens_kernel, signature,
        constants | dict.fromkeys(absent), num_warps=config.warps, num_stages=1, max_registers=config.registers, aligned=tuple(sorted(free)),
    )  # fmt: skip
