"""The expert layer in launches of a fixed grid: choice, plan, gate and up with SwiGLU, down, sum (V4 spec 2.11, 3.3, V4.1 spec 3.7).

The router's logits and the shared expert are products of `ops/linear`.

Weights stay as the checkpoint stores them and become bf16 in registers, where a code times its power-of-two scale is exact. The codes'
bits are placed as a bf16 exponent and mantissa, so that one product per two values removes the bias and applies the scale.

Few tokens: every warp reads rows of weights straight into the registers that its tensor-core products take as operand. A lane reads 16
consecutive bytes of a row, one group of 32 FP4 values; as a sum over K may be taken in any order, the products number K as these bytes
lie in the lanes. Activations are stored in the order in which the unpacked values leave (`place`). Many tokens: tiles go through shared
memory.

A token's sum over K has one order within each of the two kernels, and number of warps that share it, whatever else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from abyssal.kv.layouts import Grid
from abyssal.ops._aot import BLACKWELL, HOPPER, AotCase
from abyssal.ops._records import (
    INTERPRETED,
    e2m1_values,
    e4m3_codes,
    e4m3_tiles,
    e4m3_values,
    early,
    next_power_of_2,
    power_of_two,
    round_like,
    scale_tiles,
    store_like,
    to_bf16,
    to_fp32,
    wait_before_product,
    wait_for_inputs,
)
from abyssal.ops._streams import forked
from abyssal.ops.linear import LinearWeight, dequantize
from abyssal.ops.linear.triton import (
    PreparedLinear,
    QuantisedInput,
    linear,
    prepare_linear,
    scale_strides,
    store_codes,
    takes_codes,
)
from abyssal.ops.moe import ExpertLayer

CHUNK = tl.constexpr(128)  # values along K per step: one word of four scales per row
# Scales enter as 2^(byte - 127 - 32): with the bias of the placed bits they stay within bf16 up to 2^33. Sums are multiplied by 2^32.

PLANLESS_CHOICES = 16  # so few rarely share an expert
AT_ONCE = (1584, 1920)  # programs of two warps for which an H200 has registers: with two chunks in flight, and, about, with one
SUM_FLOOR = tl.constexpr(1e-20)  # scores may all underflow to 0


# Weights


@dataclass(frozen=True, slots=True)
class KernelWeight:
    """Stacked matrices [E, N, K] as the kernels read them: N and K padded with zeros to multiples of 128."""

    data: Tensor  # fp4: uint8 [E, N, K / 2]; fp8: uint8 [E, N, K]; plain: bf16 [E, N, K]
    scale: Tensor | None  # int32 [E, N, K / 128]: four e8m0 bytes, one per 32 values of a row; None for plain
    format: str
    tile: int | None  # of the input's e4m3 grid
    rows: int  # N without padding, of one half for w13
    columns: int  # K without padding

    @property
    def words(self) -> Tensor:
        """int32 [E, N, ..], as loads take it."""
        return self.data.view(torch.int32)

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, rows, width = self.data.shape
        return experts, rows, width * (2 if self.format == "fp4" else 1)


def prepare_weight(weight: LinearWeight, halves: int = 1) -> KernelWeight:
    """`weight` [E, N, K], or [N, K] for one; its rows are `halves` matrices, each padded on its own.

    Released sizes need no padding and keep their data. Scales that are no powers of two, and FP8 blocks of other sizes than multiples
    of 32, are applied once, here, as `dequantize` does.
    """
    scale = None if weight.scale is None else _scale_bytes(weight)
    if scale is None:
        plain = dequantize(weight, torch.bfloat16) if weight.format != "plain" else weight.data.bfloat16()
        weight = LinearWeight(plain, None, "plain", None, weight.quantize_input)
    data = weight.data.view(torch.uint8) if weight.format == "fp8" else weight.data
    if data.dim() == 2:
        data, scale = data[None], None if scale is None else scale[None]
    rows, columns = weight.shape[-2] // halves, weight.shape[-1]
    if scale is not None:
        scale = _padded(scale, halves, rows, -(-columns // 128) * 4).view(torch.int32)
    data = _padded(data, halves, rows, data.shape[2] * (-(-columns // 128) * 128) // columns)
    return KernelWeight(data, scale, weight.format, weight.quantize_input, rows, columns)


def _padded(data: Tensor, halves: int, rows: int, width: int) -> Tensor:
    """[E, halves rows, w] -> [E, halves ceil(rows / 128) 128, width], contiguous; zeros are added."""
    if rows % 128 == 0 and data.shape[2] == width:
        return data.contiguous()
    parts = data.unflatten(1, (halves, rows))
    return F.pad(parts, (0, width - data.shape[2], 0, -rows % 128)).flatten(1, 2).contiguous()


def _scale_bytes(weight: LinearWeight) -> Tensor | None:
    """uint8 [.., N, ceil(K / 32)], one e8m0 byte per row and 32 columns; None where scales are no such numbers."""
    assert weight.scale is not None and weight.block is not None
    scale, (height, width) = weight.scale, weight.block
    rows, columns = weight.shape[-2:]
    if scale.dtype != torch.uint8:
        bits = scale.float().view(torch.int32)
        if ((bits & 0x807FFFFF) != 0).any() or (bits == 0).any():
            return None
        scale = (bits >> 23).to(torch.uint8)
    if width % 32:
        return None
    scale = scale.repeat_interleave(height, -2)[..., :rows, :] if height > 1 else scale
    return scale.repeat_interleave(width // 32, -1)[..., : -(-columns // 32)] if width > 32 else scale


@dataclass(frozen=True, slots=True)
class KernelExperts:
    """`ExpertLayer` as the kernels read it."""

    gate: PreparedLinear
    bias: Tensor | None  # fp32 [E]
    tid2eid: Tensor | None  # int32 [V, k]
    w13: KernelWeight
    w2: KernelWeight
    shared_in: PreparedLinear  # w1 and w3
    shared_out: PreparedLinear
    arrivals: Tensor  # int32 [PLANLESS_CHOICES, tiles of w2's input], zero between launches
    num_experts: int
    k: int
    scale: float
    temperature: float
    limit: float
    products: Products | None = None  # of many tokens, where they are not this module's


def prepare_experts(layer: ExpertLayer) -> KernelExperts:
    """The weights of an expert layer; FP4 and FP8 data of released sizes is shared, not copied."""
    w2 = prepare_weight(layer.w2)
    tiles = 1 if w2.tile is None else w2.shape[2] // w2.tile
    return KernelExperts(
        prepare_linear([layer.gate]),
        layer.bias,
        None if layer.tid2eid is None else layer.tid2eid.int(),
        prepare_weight(layer.w13, 2),
        w2,
        prepare_linear([layer.shared_w1, layer.shared_w3]),
        prepare_linear([layer.shared_w2]),
        torch.zeros(PLANLESS_CHOICES, tiles, dtype=torch.int32, device=w2.data.device),
        layer.gate.shape[0],
        layer.k,
        layer.scale,
        layer.temperature,
        layer.limit,
    )


# Launch configs


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """Of one of the two products over experts."""

    block_tokens: int  # of one expert per program
    block_rows: int  # rows of weights per program
    chunks: int  # of 128 along K whose loads are in flight together; through shared memory: pipeline stages
    warps: int  # 1: straight into registers
    split: int = 1  # straight into registers, FP4: warps that share a program's columns


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Launch config of a layer; both products share the blocks of tokens."""

    up: ProductConfig
    down: ProductConfig

    @classmethod
    def of(cls, block_tokens: int, block_rows: int, chunks: int, warps: int, split: int = 1) -> MoeConfig:
        """Both products alike."""
        product = ProductConfig(block_tokens, block_rows, chunks, warps, split)
        return cls(product, product)

    @property
    def steps(self) -> bool:
        """Whether inputs lie as the tensor core numbers K, see `place`."""
        return self.up.warps > 1


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Launch config of the products of `gluon.py`."""

    block_tokens: int
    stages: int  # of 256 columns in shared memory

    @classmethod
    def of(cls, block_tokens: int) -> TileConfig:
        """With as many stages as shared memory holds."""
        return cls(block_tokens, STAGES[block_tokens])

    @property
    def steps(self) -> bool:
        return True


STAGES = {16: 5, 32: 4, 64: 3, 128: 2}  # by the tokens of a block: as many as shared memory holds


def moe_config(choices: int, experts: int, batch_invariant: bool = False, tiles: bool = False) -> MoeConfig | TileConfig:
    """By the mean number of tokens per expert. Only the kernel decides the bits of a token, so invariance means the one for few tokens.

    Measured on an H200 with 256 experts: blocks of 8 tokens, 32 rows of weights per program reach 84 % of the memory's roof at 32 and 64
    tokens, 16 rows by two warps are better at 1; from 128 tokens on blocks of 16 through shared memory, at 4,096 blocks of 128.

    Args:
        tiles: products are those of `gluon.py`, which are faster from 128 tokens on (988 us in place of 1,269), at 2,048 1.5 times. Blocks of
            64 are 12 % faster than of 128 at a mean of 64, and 19 % slower at 96.
    """
    mean = choices / experts
    if mean <= 2 or batch_invariant:
        few = choices <= PLANLESS_CHOICES
        return MoeConfig.of(8, 16 if few else 32, 2, 1, 2 if few and not batch_invariant else 1)
    if tiles:
        return TileConfig.of(16 if mean <= 12 else 32 if mean <= 24 else 64 if mean <= 72 else 128)
    if mean <= 16:
        return MoeConfig.of(16, 128, 3, 4)
    return MoeConfig.of(64, 128, 3, 4) if mean <= 56 else MoeConfig.of(128, 128, 3, 8)


def num_blocks(choices: int, experts: int, block_tokens: int) -> int:
    """The most blocks of tokens that any routing can fill."""
    return min(choices, (choices + experts * (block_tokens - 1)) // block_tokens)


# Order of activations


@triton.jit
def place(k, FORMAT: tl.constexpr, STEPS: tl.constexpr):
    """Where column k of the input lies, so that it meets the weights that `_values` unpacks.

    A 32-bit word of FP4 holds columns 0..7 and leaves as two planes of pairs, (0, 4), (1, 5) and (2, 6), (3, 7); one of FP8 as (0, 2),
    (1, 3). A tile is 16 words of a row, four per lane. In STEPS order a tile lies as the tensor core numbers K, else as lanes hold it.
    """
    if FORMAT == "plain":
        c = k >> 3 & 3
        pair = k >> 1 & 3
        return (k & ~31) | (pair << 3 | c << 1 | (k & 1) if STEPS else k & 31)
    else:
        if FORMAT == "fp4":
            rest = (k & ~127) | (k << 5 & 64)
            word = k >> 3
            pair = k & 1
            value = k >> 2 & 1
        else:
            rest = k & ~63
            word = k >> 2
            pair = k & 1
            value = k >> 1 & 1
        c = word >> 2 & 3
        half = word >> 1 & 1
        if STEPS:
            return rest | half << 5 | (word & 1) << 4 | pair << 3 | c << 1 | value
        else:
            return rest | c << 4 | half << 3 | (word & 1) << 2 | pair << 1 | value


@triton.jit
def rounded(x, TILE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, quant: tl.constexpr):
    """x fp32 [ROWS, WIDTH] on the e4m3 grid with a scale per tile, dequantised (V4 spec 3.2)."""
    if quant is None:
        return x
    else:
        scaled, _, scale = scale_tiles(x, quant, ROWS, WIDTH)
        tiles = tl.reshape(e4m3_values(e4m3_codes(scaled)), (ROWS, WIDTH // TILE, TILE)) * scale[:, :, None]
        return tl.reshape(tiles, (ROWS, WIDTH))


# Weights as operands


@triton.constexpr_function
def padded_count(count: int) -> int:
    return triton.next_power_of_2(count)


@triton.constexpr_function
def row_words(columns: int, format: str) -> int:
    """32-bit words of a row of weights."""
    return columns // {"fp4": 8, "fp8": 4, "plain": 2}[format]


FP4_ASM = tl.constexpr("""
{
.reg .b32 m, s, o;
shl.b32 m, $8, 6; and.b32 m, m, 0x01C001C0; shl.b32 s, $8, 12; lop3.b32 m, s, 0x80008000, m, 0xEA;
mul.rn.bf16x2 o, m, $9; mov.b32 {$0, $1}, o;
shl.b32 m, $8, 2; and.b32 m, m, 0x01C001C0; shl.b32 s, $8, 8; lop3.b32 m, s, 0x80008000, m, 0xEA;
mul.rn.bf16x2 o, m, $9; mov.b32 {$2, $3}, o;
shr.b32 m, $8, 2; and.b32 m, m, 0x01C001C0; shl.b32 s, $8, 4; lop3.b32 m, s, 0x80008000, m, 0xEA;
mul.rn.bf16x2 o, m, $9; mov.b32 {$4, $5}, o;
shr.b32 m, $8, 6; and.b32 m, m, 0x01C001C0; lop3.b32 m, $8, 0x80008000, m, 0xEA;
mul.rn.bf16x2 o, m, $9; mov.b32 {$6, $7}, o;
}
""")
FP8_ASM = tl.constexpr("""
{
.reg .b32 m, s, o;
shl.b32 m, $4, 4; and.b32 m, m, 0x07F007F0; shl.b32 s, $4, 8; lop3.b32 m, s, 0x80008000, m, 0xEA;
mul.rn.bf16x2 o, m, $5; mov.b32 {$0, $1}, o;
shr.b32 m, $4, 4; and.b32 m, m, 0x07F007F0; lop3.b32 m, $4, 0x80008000, m, 0xEA;
mul.rn.bf16x2 o, m, $5; mov.b32 {$2, $3}, o;
}
""")
FP4_BITS = tl.constexpr(126)  # the placed bits of a code are its value times 2^-126
FP8_BITS = tl.constexpr(120)


@triton.jit
def _scale_pairs(word, shift, BITS: tl.constexpr):
    """The byte at bit `shift` of a word of e8m0 scales -> int32, two equal bf16 2^(byte - 127 - 32 + BITS)."""
    return ((word >> shift) & 0xFF) * 0x00800080 + (BITS - 32) * 0x00800080


@triton.jit
def _unpack_fp4(words, pairs):
    """int32 words and scale pairs -> the eight values bf16 of each word, as pairs (0, 4), (1, 5), (2, 6), (3, 7)."""
    if INTERPRETED:
        scale = power_of_two(((pairs & 0x7FFF) >> 7) - 127 - FP4_BITS)
        values = ()
        for k in tl.static_range(8):
            values = values + (to_bf16(e2m1_values((words >> ((k % 2) * 16 + k // 2 * 4)) & 15) * scale),)
        return values
    else:
        return tl.inline_asm_elementwise(
            FP4_ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, pairs],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _unpack_fp8(words, pairs):
    """int32 words and scale pairs -> the four values bf16 of each word, as pairs (0, 2), (1, 3)."""
    if INTERPRETED:
        scale = power_of_two(((pairs & 0x7FFF) >> 7) - 127 - FP8_BITS)
        values = ()
        for k in tl.static_range(4):
            values = values + (to_bf16(e4m3_values(((words >> ((k % 2) * 16 + k // 2 * 8)) & 255).to(tl.uint8)) * scale),)
        return values
    else:
        return tl.inline_asm_elementwise(
            FP8_ASM, "=h,=h,=h,=h,r,r", [words, pairs], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True,
            pack=1,
        )  # fmt: skip


@triton.jit
def _unpack_plain(words):
    """int32 words -> their two bf16 values."""
    low = (words & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return low, (words >> 16 & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _tile(a, b, c, d, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Values (a, b), (c, d) of words [ROWS, 16] -> bf16 [ROWS, 64].

    Nothing moves: a lane's four words are the operand's values for this lane once rows, of which a warp holds eight at a time, are
    numbered so that a warp's next eight follow, and K is numbered (half, word, pair, lane, value), with one warp (half, pair, lane,
    word, value), as Triton gives the two kinds of tensor-core product two or four consecutive values per lane.
    """
    both = tl.join(tl.join(a, c), tl.join(b, d))  # [ROWS, 16, pair, value]
    bits = tl.reshape(
        both, (ROWS // (16 * WARPS), 2, WARPS, 8, 4, 2, 2, 2, 2)
    )  # [.., half of 16 rows, warp, row, lane, half, word, ..]
    if WARPS == 1:
        return tl.reshape(tl.permute(bits, (0, 2, 1, 3, 5, 7, 4, 6, 8)), (ROWS, 64))
    else:
        return tl.reshape(tl.permute(bits, (0, 2, 1, 3, 5, 6, 7, 4, 8)), (ROWS, 64))


@triton.jit
def _plain_tile(a, b, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Values (a, b) of words [ROWS, 16] -> bf16 [ROWS, 32], K numbered (word, lane, value)."""
    bits = tl.reshape(tl.join(a, b), (ROWS // (16 * WARPS), 2, WARPS, 8, 4, 4, 2))
    return tl.reshape(tl.permute(bits, (0, 2, 1, 3, 5, 4, 6)), (ROWS, 32))


@triton.jit
def _operand_row(index, WARPS: tl.constexpr):
    """Row `index` of a tile in memory -> its row in `_tile`."""
    return index // (16 * WARPS) * (16 * WARPS) + index // 8 % WARPS * 16 + index // (8 * WARPS) % 2 * 8 + index % 8


@triton.jit
def _scales(word, part: tl.constexpr, ROWS: tl.constexpr, FORMAT: tl.constexpr):
    """Scale words [ROWS] of 128 columns -> pairs [ROWS, 16] of part `part` of them."""
    lane = tl.arange(0, 4)[None, :]
    if FORMAT == "fp4":
        pairs = _scale_pairs(word[:, None], 8 * lane, FP4_BITS)
    else:
        pairs = _scale_pairs(word[:, None], 8 * (2 * part + lane // 2), FP8_BITS)
    return tl.reshape(tl.broadcast_to(pairs[:, :, None], (ROWS, 4, 4)), (ROWS, 16))


# Products of few tokens: operands straight from memory


@triton.jit
def _input_tile(x, live, TOKENS: tl.constexpr):
    """x: pointers [TOKENS, 1] to 64 values in the order of lanes -> [64, TOKENS] as `_tile` numbers K."""
    k = tl.arange(0, 32)[None, :]
    low = tl.load(x + (k // 8 * 16 + k % 8), mask=live, other=0.0)
    high = tl.load(x + (k // 8 * 16 + k % 8 + 8), mask=live, other=0.0)
    both = tl.join(tl.reshape(low, (TOKENS, 4, 2, 2, 2)), tl.reshape(high, (TOKENS, 4, 2, 2, 2)))  # lane, word, pair, value, half
    return tl.trans(tl.reshape(tl.permute(both, (0, 5, 3, 1, 2, 4)), (TOKENS, 64)))


@triton.jit
def _plain_input_tile(x, live, TOKENS: tl.constexpr):
    """x: pointers [TOKENS, 32] -> [32, TOKENS] as `_plain_tile` numbers K."""
    raw = tl.reshape(tl.load(x, mask=live, other=0.0), (TOKENS, 4, 4, 2))
    return tl.trans(tl.reshape(tl.permute(raw, (0, 2, 1, 3)), (TOKENS, 32)))


@triton.jit
def _load_weights(w, s, row, gap, at, K, TILES, CHUNKS, FORMAT):
    """Words and scale words of CHUNKS steps of 128 columns, from step `at`; tile t has the rows `row` + t `gap` of the matrix at w."""
    WORDS: tl.constexpr = row_words(K, FORMAT)
    PARTS: tl.constexpr = 1 if FORMAT == "fp4" else 2 if FORMAT == "fp8" else 4
    column = tl.arange(0, 16)[None, :] + at * (16 * PARTS)
    data, scales = (), ()
    for chunk in tl.static_range(CHUNKS):
        for tile in tl.static_range(TILES):
            for part in tl.static_range(PARTS):
                data = data + (tl.load(w + (row + tile * gap)[:, None] * WORDS + column + (chunk * PARTS + part) * 16),)
            if FORMAT != "plain":
                scales = scales + (tl.load(s + (row + tile * gap) * (K // 128) + at + chunk),)
    return data, scales


@triton.jit
def _multiply(sums, data, scales, x, live, TILES, CHUNKS, FORMAT, TOKENS):
    """sums: a tuple of fp32 [16, TOKENS], one per tile, plus what `_load_weights` gave times the input at pointers x [TOKENS, 1]."""
    PARTS: tl.constexpr = 1 if FORMAT == "fp4" else 2 if FORMAT == "fp8" else 4
    for chunk in tl.static_range(CHUNKS):
        inputs = ()
        for part in tl.static_range(4 if FORMAT == "plain" else 2):
            if FORMAT == "plain":
                inputs = inputs + (_plain_input_tile(x + (chunk * 128 + part * 32) + tl.arange(0, 32)[None, :], live, TOKENS),)
            else:
                inputs = inputs + (_input_tile(x + (chunk * 128 + part * 64), live, TOKENS),)
        new = ()
        for tile in tl.static_range(TILES):
            acc = sums[tile]
            for part in tl.static_range(PARTS):
                words = data[(chunk * TILES + tile) * PARTS + part]
                if FORMAT == "plain":
                    a, b = _unpack_plain(words)
                    acc = tl.dot(_plain_tile(a, b, 16, 1), inputs[part], acc)
                else:
                    pairs = _scales(scales[chunk * TILES + tile], part, 16, FORMAT)
                    if FORMAT == "fp4":
                        v = _unpack_fp4(words, pairs)
                        acc = tl.dot(_tile(v[0], v[1], v[2], v[3], 16, 1), inputs[0], acc)
                        acc = tl.dot(_tile(v[4], v[5], v[6], v[7], 16, 1), inputs[1], acc)
                    else:
                        v = _unpack_fp8(words, pairs)
                        acc = tl.dot(_tile(v[0], v[1], v[2], v[3], 16, 1), inputs[part], acc)
            new = new + (acc,)
        sums = new
    return sums


@triton.jit
def _zeros(TILES, TOKENS):
    sums = ()
    for _ in tl.static_range(TILES):
        sums = sums + (tl.zeros((16, TOKENS), tl.float32),)
    return sums


@triton.jit
def _wait_for_parts(done, PARTS: tl.constexpr):
    """Wait until a block's input is there in all its PARTS, as `done` counts them; where that is None, for the kernel before.

    This cannot hang: a program runs only once all of the kernel before have begun, whose parts wait for nothing, so what is waited for
    comes however many multiprocessors these programs hold. The kernel before counts by a release behind its stores, which this acquires.
    `moe_plan` has set the counters to 0, and that kernel waited for it: what an earlier launch left, even one that failed, is not seen.
    """
    if done is None:
        gdc_wait()
    else:
        ready = 0
        while ready < PARTS:
            ready = tl.inline_asm_elementwise(
                "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [done], dtype=tl.int32, is_pure=False, pack=1
            )


@triton.jit
def _products(w, s, row, gap, x, live, K, TILES, CHUNKS, FORMAT, TOKENS, WAIT, done, PARTS):
    """Products of the input's rows with TILES times 16 rows of weights, those of tile t are `row` + t `gap` of the matrix at w.

    Returns a tuple of fp32 [16, TOKENS]. The loads of the next step run ahead; with WAIT the first do not wait for the input.
    """
    STEPS: tl.constexpr = K // 128 // CHUNKS
    sums = _zeros(TILES, TOKENS)
    data, scales = _load_weights(w, s, row, gap, 0, K, TILES, CHUNKS, FORMAT)
    if WAIT:
        _wait_for_parts(done, PARTS)
    for step in range(STEPS):
        ahead = tl.minimum(step + 1, STEPS - 1) * CHUNKS
        later, later_scales = _load_weights(w, s, row, gap, ahead, K, TILES, CHUNKS, FORMAT)
        sums = _multiply(sums, data, scales, x + step * (CHUNKS * 128), live, TILES, CHUNKS, FORMAT, TOKENS)
        data, scales = later, later_scales
    return sums


# The same where programs are few: several warps share the columns, as one warp's arithmetic does not keep up with the memory. Dimensions
# are [rows, warps, columns] where values are loaded, for then Triton spreads lanes over rows.


@triton.jit
def _load_split(w, s, row, gap, half, first, K, TILES, CHUNKS, SPLIT):
    """As `_load_weights` for FP4: words of 8 rows and of the 8 that lie `half` further on, and a scale byte for each lane."""
    word = tl.arange(0, 16)[None, None, :]
    lane = tl.arange(0, 4)[None, None, :]
    data, scales = (), ()
    for chunk in tl.static_range(CHUNKS):
        step = (first + chunk * SPLIT)[None, :, None]
        inside = step < K // 128
        for tile in tl.static_range(TILES):
            for eight in tl.static_range(2):
                n = (row + (tile * gap + eight * half))[:, None, None]
                data = data + (tl.load(w + n * (K // 8) + step * 16 + word, mask=inside),)
                scales = scales + (tl.load(s + n * (K // 32) + step * 4 + lane, mask=inside, other=0),)
    return data, scales


@triton.jit
def _split_values(words, byte, SPLIT: tl.constexpr):
    """int32 [8, SPLIT, 16] and bytes uint8 [8, SPLIT, 4] -> bf16 [8, SPLIT, 16, 2, 2, 2], in the order in which the values leave."""
    pairs = tl.reshape(
        tl.broadcast_to(_scale_pairs(byte.to(tl.int32), 0, FP4_BITS)[:, :, :, None], (8, SPLIT, 4, 4)), (8, SPLIT, 16)
    )
    v = _unpack_fp4(words, pairs)
    return tl.join(tl.join(tl.join(v[0], v[4]), tl.join(v[2], v[6])), tl.join(tl.join(v[1], v[5]), tl.join(v[3], v[7])))


@triton.jit
def _split_tile(low, high, low_byte, high_byte, SPLIT: tl.constexpr):
    """bf16 [SPLIT, 16, 128]; K is numbered (word, plane, lane, value), as Triton gives a lane four consecutive values."""
    both = tl.join(_split_values(low, low_byte, SPLIT), _split_values(high, high_byte, SPLIT))
    parts = tl.reshape(both, (8, SPLIT, 4, 8, 4, 2))  # row, warp, lane, word and plane, value, eight
    return tl.reshape(tl.permute(parts, (1, 5, 0, 3, 2, 4)), (SPLIT, 16, 128))


@triton.jit
def _split_input(x, live, SPLIT: tl.constexpr):
    """x: pointers [8, SPLIT, 1] to 128 values in the order of lanes -> [SPLIT, 128, 8] as `_split_tile` numbers K."""
    k = tl.arange(0, 32)[None, None, :]
    place = x + (k // 8 * 16 + k % 8)
    planes = ()
    for part in tl.static_range(4):  # plane, half of a lane's words
        raw = tl.load(place + (part // 2 * 64 + part % 2 * 8), mask=live, other=0.0)
        planes = planes + (tl.reshape(raw, (8, SPLIT, 4, 2, 4)),)
    both = tl.join(tl.join(planes[0], planes[2]), tl.join(planes[1], planes[3]))  # token, warp, lane, word, value, plane, half
    return tl.permute(tl.reshape(tl.permute(both, (1, 0, 6, 3, 5, 2, 4)), (SPLIT, 8, 128)), (0, 2, 1))


@triton.jit
def _split_products(w, s, first_row, gap, half, x, live, K, TILES, CHUNKS, SPLIT, WAIT, done, PARTS):
    """As `_products` for FP4 and 8 tokens, by SPLIT warps: each adds up every SPLIT-th 128 columns, and then all are added up."""
    row = first_row + tl.arange(0, 8)
    s = s.to(tl.pointer_type(tl.uint8), bitcast=True)  # a word has the scales of 128 columns
    first = tl.arange(0, SPLIT)
    sums = ()
    for _ in tl.static_range(TILES):
        sums = sums + (tl.zeros((SPLIT, 16, 8), tl.float32),)
    data, scales = _load_split(w, s, row, gap, half, first, K, TILES, CHUNKS, SPLIT)
    if WAIT:
        _wait_for_parts(done, PARTS)
    for _ in range(0, K // 128, SPLIT * CHUNKS):
        inputs = ()
        for chunk in tl.static_range(CHUNKS):
            step = (first + chunk * SPLIT)[None, :, None]
            inputs = inputs + (_split_input(x[:, :, None] + step * 128, live[:, :, None] & (step < K // 128), SPLIT),)
        first += SPLIT * CHUNKS
        later, later_scales = _load_split(w, s, row, gap, half, first, K, TILES, CHUNKS, SPLIT)
        for chunk in tl.static_range(CHUNKS):
            new = ()
            for tile in tl.static_range(TILES):
                operand = _split_tile(
                    data[2 * (chunk * TILES + tile)],
                    data[2 * (chunk * TILES + tile) + 1],
                    scales[2 * (chunk * TILES + tile)],
                    scales[2 * (chunk * TILES + tile) + 1],
                    SPLIT,
                )
                new = new + (tl.dot(operand, inputs[chunk], sums[tile]),)
            sums = new
        data, scales = later, later_scales
    totals = ()
    for tile in tl.static_range(TILES):
        totals = totals + (tl.sum(sums[tile], 0),)
    return totals


# Products of many tokens: through shared memory


@triton.jit
def _product(
    w, s, x, live, K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, FORMAT: tl.constexpr, STAGES: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """w: pointers [ROWS, 1], s: [ROWS], x: [TOKENS, 1], in the order of steps -> fp32 [ROWS, TOKENS]."""
    word = tl.arange(0, 16)[None, :]
    column = tl.arange(0, 32 if FORMAT == "plain" else 64)[None, :]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for step in tl.range(K // 128, num_stages=STAGES):
        sums = tl.zeros((ROWS, TOKENS), tl.float32)
        if FORMAT == "fp4":
            first = tl.trans(tl.load(x + step * 128 + column, mask=live, other=0.0))
            second = tl.trans(tl.load(x + step * 128 + 64 + column, mask=live, other=0.0))
            v = _unpack_fp4(tl.load(w + step * 16 + word), _scales(tl.load(s + step), 0, ROWS, FORMAT))
            sums = tl.dot(_tile(v[0], v[1], v[2], v[3], ROWS, WARPS), first, sums)
            sums = tl.dot(_tile(v[4], v[5], v[6], v[7], ROWS, WARPS), second, sums)
        elif FORMAT == "fp8":
            scale = tl.load(s + step)
            for part in tl.static_range(2):
                here = tl.trans(tl.load(x + step * 128 + part * 64 + column, mask=live, other=0.0))
                v = _unpack_fp8(tl.load(w + step * 32 + part * 16 + word), _scales(scale, part, ROWS, FORMAT))
                sums = tl.dot(_tile(v[0], v[1], v[2], v[3], ROWS, WARPS), here, sums)
        else:
            for part in tl.static_range(4):
                here = tl.trans(tl.load(x + step * 128 + part * 32 + column, mask=live, other=0.0))
                a, b = _unpack_plain(tl.load(w + step * 64 + part * 16 + word))
                sums = tl.dot(_plain_tile(a, b, ROWS, WARPS), here, sums)
        # Apart from the products: Triton lets a product whose sums only the next one takes run on while its operand's registers are
        # written anew.
        acc += sums
    return acc


# Kernels


@triton.jit
def _softplus(z):
    """ln(1 + e^z), z where it is over 20: max(z, 0) + 2 atanh(u / (2 + u)) with u = e^-|z|, relative error of a few fp32 steps."""
    u = tl.exp(-tl.abs(z))
    a = u / (2.0 + u)
    b = a * a
    series = 1.0 / 17
    for n in tl.static_range(7, -1, -1):
        series = series * b + 1.0 / (2 * n + 1)
    return tl.where(z > 20.0, z, tl.maximum(z, 0.0) + 2.0 * a * series)


@triton.jit
def moe_route(
    logits, logits_stride, bias, tid2eid, token_ids, x, experts, weights, inputs, scale, temperature,
    E: tl.constexpr, EP: tl.constexpr, CHOICES: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, WIDTH: tl.constexpr, quant: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr, STEPS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (t, 0): experts int32 [T, k] and weights fp32 [T, k] of token t; program (t, 1 + p): WIDTH values, number p, of its input.

    A token id below 0 marks a row that only fills up the batch: its experts are -1. One warp each: nothing waits for other warps.
    """
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) > 0:
        wait_for_inputs(EARLY)
        _store_input(x, inputs, token, tl.program_id(1) - 1, D, DP, WIDTH, quant, TILE, FORMAT, STEPS)
    else:
        expert = tl.arange(0, EP)
        identity = tl.load(token_ids + token)
        taken = tl.arange(0, padded_count(CHOICES))
        kept = taken < CHOICES
        if bias is None:
            chosen = tl.load(tid2eid + tl.maximum(identity, 0).to(tl.int64) * CHOICES + taken, mask=kept, other=-1)
        else:
            offset = tl.load(bias + expert, mask=expert < E, other=0.0)
        wait_for_inputs(EARLY)
        z = tl.load(logits + token * logits_stride + expert, mask=expert < E, other=0.0) / temperature
        scores = tl.sqrt_rn(_softplus(z))
        if bias is not None:
            bits = (scores + offset).to(tl.int32, bitcast=True)
            order = tl.where(expert < E, bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x80000000)  # as integers they compare like fp32
            chosen = tl.full(taken.shape, -1, tl.int32)
            for j in tl.static_range(CHOICES):
                best = tl.min(tl.where(order == tl.max(order, 0), expert, EP), 0)
                order = tl.where(expert == best, -0x80000000, order)
                chosen = tl.where(taken == j, best, chosen)
        values = tl.sum(tl.where(chosen[:, None] == expert[None, :], scores[None, :], 0.0), 1)
        tl.store(experts + token * CHOICES + taken, tl.where(identity < 0, -1, chosen), mask=kept)
        tl.store(weights + token * CHOICES + taken, values / (tl.sum(values, 0) + SUM_FLOOR) * scale, mask=kept)


@triton.jit
def _store_input(
    x, inputs, token, part, D: tl.constexpr, DP: tl.constexpr, WIDTH: tl.constexpr, quant: tl.constexpr, TILE: tl.constexpr,
    FORMAT: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    k = part * WIDTH + tl.arange(0, WIDTH)[None, :]
    raw = to_fp32(tl.load(x + token * D + k, mask=k < D, other=0.0))
    tl.store(inputs + token * DP + place(k, FORMAT, STEPS), to_bf16(rounded(raw, TILE, 1, WIDTH, quant)), mask=k < DP)


@triton.jit
def moe_input(
    x, inputs, D: tl.constexpr, DP: tl.constexpr, WIDTH: tl.constexpr, quant: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """The input of experts that another rank chose: x [T, D] -> bf16 [T, DP] on the products' grid and in their order."""
    _store_input(x, inputs, tl.program_id(0).to(tl.int64), tl.program_id(1), D, DP, WIDTH, quant, TILE, FORMAT, STEPS)


@triton.jit(do_not_specialize=["scales_stride", "tiles_stride"])
def moe_swiglu(
    gate, up, gate_stride, up_stride, out, scales, scales_stride, tiles_stride, limit,
    I: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The shared expert's hidden values [T, I] from bf16 w1 x and w3 x: bf16, or with TILE codes uint8 and scales fp32 [T, I / TILE]."""
    wait_before_product(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    kept = column < I
    g = to_fp32(tl.load(gate + token * gate_stride + column, mask=kept, other=0.0))
    u = to_fp32(tl.load(up + token * up_stride + column, mask=kept, other=0.0))
    hidden = _swiglu(g, u, limit)
    if TILE is None:
        tl.store(out + token * I + column, to_bf16(hidden), mask=kept)
    else:
        codes, exponent = e4m3_tiles(round_like(hidden, True), TILE, WIDTH)
        store_codes(
            codes, exponent, out + token * I, scales + token * scales_stride, tiles_stride, tl.program_id(1), I, TILE, WIDTH
        )


@triton.jit(do_not_specialize=["choices", "blocks"])
def moe_plan(
    experts, order, plan, arrivals, choices, blocks, first,
    E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, ARRIVALS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sort the choices by expert, stable, and cut each expert's into blocks; program e writes those of expert e.

    order int32 [choices]: sorted place -> choice, token * k + j. plan int32 [3, blocks]: expert, first place, end; expert -1 for blocks
    that the routing leaves empty, which the last program writes. Experts outside `first` .. `first` + E are left out. arrivals int32
    [blocks, ARRIVALS] becomes 0.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(0)
    lane = tl.arange(0, SPAN)
    bins = tl.arange(0, EP)
    counts = tl.zeros((EP,), tl.int32)
    for start in range(0, choices, SPAN):
        ids = tl.load(experts + start + lane, mask=start + lane < choices, other=-1) - first
        inside = (ids >= 0) & (ids < E)
        counts += tl.histogram(tl.where(inside, ids, 0), EP, mask=inside)
    before = tl.sum(tl.where(bins < expert, counts, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    filled = (counts + BLOCK - 1) // BLOCK
    block = tl.sum(tl.where(bins < expert, filled, 0), 0)
    if expert == E:
        for start in range(block, blocks, SPAN):
            tl.store(plan + start + lane, -1, mask=start + lane < blocks)
    else:
        place_in = before
        for start in range(0, choices, SPAN):
            ids = tl.load(experts + start + lane, mask=start + lane < choices, other=-1) - first
            mine = (ids == expert).to(tl.int32)
            tl.store(order + place_in + tl.cumsum(mine, 0) - 1, start + lane, mask=mine != 0)
            place_in += tl.sum(mine, 0)
        mine = (count + BLOCK - 1) // BLOCK
        for start in range(0, mine, SPAN):
            index = start + lane
            tl.store(plan + block + index, expert, mask=index < mine)
            tl.store(plan + blocks + block + index, before + index * BLOCK, mask=index < mine)
            end = tl.minimum(before + (index + 1) * BLOCK, before + count)
            tl.store(plan + 2 * blocks + block + index, end, mask=index < mine)
        for start in range(0, mine * ARRIVALS, SPAN):
            tl.store(arrivals + block * ARRIVALS + start + lane, 0, mask=start + lane < mine * ARRIVALS)


@triton.jit
def _swiglu(gate, up, limit):
    """silu(min(gate, limit)) clamp(up, -limit, limit) of fp32 values (V4 spec 2.11)."""
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    return gate / (1.0 + tl.exp(-gate)) * tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _hidden(sums, weight, limit, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """sums [2 ROWS, TOKENS], in every 16 rows 8 of the gate and 8 of up -> bf16 [ROWS, TOKENS] (V4 spec 2.11, 3.5)."""
    pairs = tl.permute(tl.reshape(sums, (ROWS // 8, 2, 8, TOKENS)), (0, 2, 3, 1))
    gate, up = tl.split(tl.reshape(pairs, (ROWS, TOKENS, 2)))
    return to_bf16(_swiglu(round_like(gate, True), round_like(up, True), limit) * weight)


@triton.jit
def _block(plan, order, blocks, first, E: tl.constexpr):
    """Expert, first place and end of the block of this program, expert -1: none. Without a plan every choice is a block."""
    block = tl.program_id(1)
    expert = tl.load(plan + block)
    if order is None:
        expert -= first
        return tl.where((expert >= 0) & (expert < E), expert, -1), block, block + 1
    else:
        return expert, tl.load(plan + blocks + block), tl.load(plan + 2 * blocks + block)


@triton.jit(do_not_specialize=["blocks"])
def moe_up(
    inputs, w, s, plan, order, weights, hidden, arrivals, blocks, limit, first_expert,
    E: tl.constexpr, K: tl.constexpr, I: tl.constexpr, CHOICES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    WARPS: tl.constexpr, SPLIT: tl.constexpr, FORMAT: tl.constexpr, OUT: tl.constexpr, quant: tl.constexpr, TILE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """hidden bf16 [places, I] = silu(w1 x) (w3 x) weight, on the grid and in the order of the second product's input.

    Where a tile of that grid spans several programs, the last of them to arrive rounds it and sets its counter back to 0. With a plan one
    more counter of a block counts what is done. `order` None: `plan` holds the choices' experts.
    """
    if EARLY:
        gdc_wait()
        if order is not None:
            gdc_launch_dependents()
    block = tl.program_id(1)
    expert, start, end = _block(plan, order, blocks, first_expert, E)
    if expert < 0:
        return
    first = tl.program_id(0) * (ROWS // 2)
    places = start + tl.arange(0, TOKENS)
    kept = places < end
    choice = tl.where(kept, places, 0) if order is None else tl.load(order + places, mask=kept, other=0)
    weight = tl.load(weights + choice, mask=kept, other=0.0)[None, :]
    x = inputs + (choice // CHOICES).to(tl.int64)[:, None] * K
    WORDS: tl.constexpr = row_words(K, FORMAT)
    w += expert.to(tl.int64) * (2 * I * WORDS)
    if FORMAT != "plain":
        s += expert.to(tl.int64) * (2 * I * (K // 128))
    BIAS: tl.constexpr = 1.0 if FORMAT == "plain" else 2.0**32
    to_hidden = hidden + places.to(tl.int64)[None, :] * I
    if WARPS == 1:
        if SPLIT > 1:
            sums = _split_products(w, s, first, 8, I, x, kept[:, None], K, ROWS // 16, CHUNKS, SPLIT, False, None, 0)
        else:
            row = tl.arange(0, 16)
            row = first + row % 8 + row // 8 * I
            sums = _products(w, s, row, 8, x, kept[:, None], K, ROWS // 16, CHUNKS, FORMAT, TOKENS, False, None, 0)
        for tile in tl.static_range(ROWS // 16):
            value = _hidden(sums[tile] * BIAS, weight, limit, 8, TOKENS)
            column = first + tile * 8 + tl.arange(0, 8)[:, None]
            tl.store(to_hidden + place(column, OUT, WARPS > 1), value, mask=kept[None, :])
    else:
        row = _operand_row(tl.arange(0, ROWS), WARPS)
        row = first + row // 16 * 8 + row % 8 + row // 8 % 2 * I
        scales = s if FORMAT == "plain" else s + row * (K // 128)
        acc = _product(w + row[:, None] * WORDS, scales, x, kept[:, None], K, ROWS, TOKENS, FORMAT, CHUNKS, WARPS)
        value = _hidden(acc * BIAS, weight, limit, ROWS // 2, TOKENS)
        column = first + tl.arange(0, ROWS // 2)[:, None]
        tl.store(to_hidden + place(column, OUT, WARPS > 1), value, mask=kept[None, :])
    if EARLY and order is None:
        gdc_launch_dependents()  # not before: the first loads of `moe_down` would hold these up
    SPAN: tl.constexpr = max(TILE, ROWS // 2)
    TILES: tl.constexpr = 0 if SPAN == ROWS // 2 else I // SPAN  # that several programs share
    counters = arrivals + block * (TILES if order is None else TILES + 1)
    ready = True
    if quant is not None:
        tl.debug_barrier()
        if TILES > 0:
            ready = tl.atomic_add(counters + first // SPAN, 1, sem="release") == SPAN // (ROWS // 2) - 1
        if ready:
            if TILES > 0:
                tl.atomic_xchg(counters + first // SPAN, 0, sem="acquire")  # only here, as it empties the L1
                tl.debug_barrier()
            span = first // SPAN * SPAN + tl.arange(0, SPAN)[None, :]
            here = hidden + places.to(tl.int64)[:, None] * I + place(span, OUT, WARPS > 1)
            raw = to_fp32(tl.load(here, mask=kept[:, None], other=0.0))
            tl.store(here, to_bf16(rounded(raw, TILE, TOKENS, SPAN, quant)), mask=kept[:, None])
    if order is not None:  # noqa: SIM102 decided when compiled
        if ready:
            tl.debug_barrier()
            tl.atomic_add(counters + TILES, 1, sem="release")


@triton.jit(do_not_specialize=["blocks"])
def moe_down(
    hidden, w, s, plan, order, outputs, arrivals, blocks, first_expert,
    E: tl.constexpr, ARRIVALS: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, WARPS: tl.constexpr,
    SPLIT: tl.constexpr, FORMAT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """outputs bf16 [choices, N] = w2 hidden. What `moe_plan` wrote is there since `moe_up` began; only `hidden` has to be waited for.

    With a plan a program waits for its own block: the last of ARRIVALS counters counts to PARTS. Blocks that begin early in `moe_up` are
    done early, so this runs while that ends. Programs of blocks without an expert, which no one counts, wait for all of `moe_up`; it has
    ended when this has, as no program does anything behind its count.
    """
    if EARLY:
        gdc_launch_dependents()
    expert, start, end = _block(plan, order, blocks, first_expert, E)
    if expert < 0:
        if EARLY:
            gdc_wait()
        return
    done = None
    if order is not None:
        done = arrivals + (tl.program_id(1) * ARRIVALS + ARRIVALS - 1)
    first = tl.program_id(0) * ROWS
    places = start + tl.arange(0, TOKENS)
    kept = places < end
    choice = tl.where(kept, places, 0) if order is None else tl.load(order + places, mask=kept, other=0)
    x = hidden + places.to(tl.int64)[:, None] * K
    WORDS: tl.constexpr = row_words(K, FORMAT)
    w += expert.to(tl.int64) * (N * WORDS)
    if FORMAT != "plain":
        s += expert.to(tl.int64) * (N * (K // 128))
    BIAS: tl.constexpr = 1.0 if FORMAT == "plain" else 2.0**32
    to_output = outputs + choice.to(tl.int64)[None, :] * N + first
    if WARPS == 1:
        if SPLIT > 1:
            sums = _split_products(w, s, first, 16, 8, x, kept[:, None], K, ROWS // 16, CHUNKS, SPLIT, EARLY, done, PARTS)
        else:
            row = first + tl.arange(0, 16)
            sums = _products(w, s, row, 16, x, kept[:, None], K, ROWS // 16, CHUNKS, FORMAT, TOKENS, EARLY, done, PARTS)
        for tile in tl.static_range(ROWS // 16):
            value = to_bf16(sums[tile] * BIAS)
            tl.store(to_output + tile * 16 + tl.arange(0, 16)[:, None], value, mask=kept[None, :])
    else:
        if EARLY:
            _wait_for_parts(done, PARTS)
        row = first + _operand_row(tl.arange(0, ROWS), WARPS)
        scales = s if FORMAT == "plain" else s + row * (K // 128)
        acc = _product(w + row[:, None] * WORDS, scales, x, kept[:, None], K, ROWS, TOKENS, FORMAT, CHUNKS, WARPS)
        tl.store(to_output + tl.arange(0, ROWS)[:, None], to_bf16(acc * BIAS), mask=kept[None, :])


@triton.jit
def moe_sum(
    outputs, experts, shared, token_ids, out, first,
    E: tl.constexpr, N: tl.constexpr, D: tl.constexpr, CHOICES: tl.constexpr, WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out bf16 or fp32 [T, D]: the outputs of a token's choices in their order, then the shared expert's if given, in fp32."""
    wait_for_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    kept = column < D
    total = tl.zeros((WIDTH,), tl.float32)
    for j in tl.static_range(CHOICES):
        expert = tl.load(experts + token * CHOICES + j) - first
        width = tl.where((expert >= 0) & (expert < E), D, 0)
        total += to_fp32(tl.load(outputs + (token * CHOICES + j) * N + column, mask=column < width, other=0.0))
    if shared is not None:
        width = tl.where(tl.load(token_ids + token) >= 0, D, 0)
        total += to_fp32(tl.load(shared + token * D + column, mask=column < width, other=0.0))
    store_like(out + token * D + column, total, mask=kept)


# Wrappers


@dataclass(frozen=True, slots=True)
class Choice:
    """Where the tokens of a step go."""

    experts: Tensor  # int32 [T, k]; -1: none
    weights: Tensor  # fp32 [T, k]
    inputs: Tensor  # bf16 [T, DP], as `w13` takes them


def moe(
    x: Tensor,
    token_ids: Tensor,
    experts: KernelExperts,
    *,
    batch_invariant: bool = False,
    beside: torch.cuda.Stream | None = None,
    config: MoeConfig | TileConfig | None = None,
) -> Tensor:
    """`abyssal.ops.moe.expert_layer` for bf16: x [T, D], token_ids int [T] -> bf16 [T, D].

    A token id below 0 marks a row that only fills up the batch: it touches no expert and gives zeros.

    Args:
        batch_invariant: a token's bits do not depend on the other tokens.
        beside: a stream on which the shared expert runs beside the router and the routed ones.

    Raises:
        TypeError, ValueError: x or token_ids are not of these kinds.
    """
    _check(x, token_ids, experts)
    if len(x) == 0:
        return torch.empty_like(x)
    config = config or moe_config(len(x) * experts.k, experts.w13.shape[0], batch_invariant, experts.products is not None)
    # A few choices take as long as the shared expert, which then begins with the router. With a plan it begins behind it, or it still holds
    # multiprocessors when `moe_up` begins: 2 (V4) to 3 % (V4.1) of a step of 8 tokens.
    routes_first = beside is not None and len(x) * experts.k > PLANLESS_CHOICES
    choice = route(x, token_ids, experts, config, batch_invariant) if routes_first else None
    with forked(beside) as join:
        shared = shared_expert(x, experts, batch_invariant)
    routed = routed_experts(choice or route(x, token_ids, experts, config, batch_invariant), experts, config)
    join()
    return moe_total(routed, shared, token_ids, x.shape[1], early=x.is_cuda and beside is None)  # a join follows two kernels


def _check(x: Tensor, token_ids: Tensor, experts: KernelExperts) -> None:
    if x.dtype != torch.bfloat16:
        raise TypeError(f"x is {x.dtype}: this kernel takes torch.bfloat16; use the reference backend")
    if x.dim() != 2 or x.shape[1] != experts.w13.columns or not x.is_contiguous():
        raise ValueError(f"x is {tuple(x.shape)} with strides {x.stride()}, expected a contiguous [T, {experts.w13.columns}]")
    if token_ids.shape != x.shape[:1] or token_ids.dtype not in (torch.int32, torch.int64) or not token_ids.is_contiguous():
        raise ValueError(f"token_ids is {token_ids.dtype} {tuple(token_ids.shape)}, expected int [{len(x)}]")


def route(
    x: Tensor, token_ids: Tensor, experts: KernelExperts, config: MoeConfig | TileConfig, batch_invariant: bool = False
) -> Choice:
    """Choose experts, and round the input to the grid of the experts' first product."""
    tokens, dim = x.shape
    (logits,) = linear(x, experts.gate, batch_invariant=batch_invariant)
    chosen = torch.empty(tokens, experts.k, dtype=torch.int32, device=x.device)
    weights = torch.empty(tokens, experts.k, dtype=torch.float32, device=x.device)
    inputs = torch.empty(tokens, experts.w13.shape[2], dtype=torch.bfloat16, device=x.device)
    constants = _input_constants(dim, experts.w13, config.steps)
    programs = tokens, 1 + constants["DP"] // constants["WIDTH"]
    moe_route[programs](
        logits, logits.stride(0), experts.bias, experts.tid2eid, token_ids, x, chosen, weights, inputs, experts.scale,
        experts.temperature, E=experts.num_experts, EP=next_power_of_2(experts.num_experts), CHOICES=experts.k,
        **constants, num_warps=1, **early(math.prod(programs), x),
    )  # fmt: skip
    return Choice(chosen, weights, inputs)


def _input_constants(dim: int, weight: KernelWeight, steps: bool) -> dict[str, Any]:
    columns = weight.shape[2]
    quant = None if weight.tile is None else Grid(columns, "e4m3", weight.tile, "ue8m0")
    return {
        "D": dim, "DP": columns, "WIDTH": min(512, columns & -columns), "quant": quant, "TILE": weight.tile or 1,
        "FORMAT": weight.format, "STEPS": steps,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Blocks:
    """The choices by expert, cut into blocks: what `moe_plan` writes."""

    plan: Tensor  # int32 [3, count]
    order: Tensor  # int32 [choices]
    count: int


Products = Callable[["Choice", "KernelExperts", Blocks, TileConfig], Tensor]


@dataclass(frozen=True, slots=True)
class Routed:
    outputs: Tensor  # bf16 [T k, N]; rows of choices outside this rank's experts are not written
    experts: Tensor  # int32 [T, k]
    first: int
    count: int


def routed_experts(choice: Choice, experts: KernelExperts, config: MoeConfig | TileConfig, *, first: int = 0) -> Routed:
    """The outputs of all choices: three launches, or two for a few choices, which need no plan.

    Args:
        first: the number of the first expert of `experts`, where a rank holds some of them; choices of others are left out.
    """
    choices = choice.experts.numel()
    count, _, columns = experts.w13.shape
    _, rows, inner = experts.w2.shape
    _, up_rows, _ = experts.w13.shape
    if isinstance(config, TileConfig):
        assert experts.products is not None, f"{config}: these experts have no such products"
        blocks, _ = _blocks(choice, count, first, config.block_tokens, 1)
        return Routed(experts.products(choice, experts, blocks, config), choice.experts, first, count)
    up = _fitting(config.up, columns, experts.w13.format, up_rows // config.up.block_rows * choices)
    down = _fitting(config.down, inner, experts.w2.format, rows // config.down.block_rows * choices)
    assert (up.block_tokens, up.warps) == (down.block_tokens, down.warps), f"{config}: the products share their blocks of tokens"
    device, early = choice.inputs.device, choice.inputs.is_cuda
    tile = experts.w2.tile
    parts = inner // max(tile or 1, up.block_rows // 2)  # of a block's hidden values, as they become known
    arrivals = 1 if tile is None or tile <= up.block_rows // 2 else parts + 1
    if choices <= PLANLESS_CHOICES:
        blocks, plan, order, counters = choices, choice.experts, None, experts.arrivals
    else:
        sorted_, counters = _blocks(choice, count, first, up.block_tokens, arrivals)
        blocks, plan, order = sorted_.count, sorted_.plan, sorted_.order
    hidden = torch.empty(choices, inner, dtype=torch.bfloat16, device=device)
    outputs = torch.empty(choices, rows, dtype=torch.bfloat16, device=device)
    quant = None if tile is None else Grid(inner, "e4m3", tile, "ue8m0")
    moe_up[(up_rows // up.block_rows, blocks)](
        choice.inputs, experts.w13.words, experts.w13.scale, plan, order, choice.weights, hidden, counters, blocks, experts.limit, first,
        E=count, K=columns, I=inner, CHOICES=choice.experts.shape[1], TOKENS=up.block_tokens, ROWS=up.block_rows, CHUNKS=up.chunks,
        WARPS=up.warps, SPLIT=up.split, FORMAT=experts.w13.format, OUT=experts.w2.format, quant=quant, TILE=tile or 1, EARLY=early,
        num_warps=up.warps * up.split, num_stages=1, launch_pdl=early,
    )  # fmt: skip
    moe_down[(rows // down.block_rows, blocks)](
        hidden, experts.w2.words, experts.w2.scale, plan, order, outputs, None if order is None else counters, blocks, first, E=count,
        ARRIVALS=arrivals, PARTS=parts, K=inner, N=rows, TOKENS=down.block_tokens, ROWS=down.block_rows, CHUNKS=down.chunks,
        WARPS=down.warps, SPLIT=down.split, FORMAT=experts.w2.format, EARLY=early, num_warps=down.warps * down.split, num_stages=1, launch_pdl=early,
    )  # fmt: skip
    return Routed(outputs, choice.experts, first, count)


def _blocks(choice: Choice, experts: int, first: int, block_tokens: int, arrivals: int) -> tuple[Blocks, Tensor]:
    """The choices of experts `first` .. in blocks of so many, and int32 [blocks, arrivals] of zeros."""
    device, early = choice.experts.device, choice.experts.is_cuda
    choices = choice.experts.numel()
    count = num_blocks(choices, experts, block_tokens)
    counters = torch.empty(count, arrivals, dtype=torch.int32, device=device)
    order = torch.empty(choices, dtype=torch.int32, device=device)
    plan = torch.empty(3, count, dtype=torch.int32, device=device)
    span = min(4096, max(128, next_power_of_2(choices)))
    moe_plan[(experts + 1,)](
        choice.experts, order, plan, counters, choices, count, first, E=experts, EP=next_power_of_2(experts),
        BLOCK=block_tokens, SPAN=span, ARRIVALS=arrivals, EARLY=early, num_warps=4 if span <= 1024 else 8, launch_pdl=early,
    )  # fmt: skip
    return Blocks(plan, order, count), counters


def shared_expert(x: Tensor, experts: KernelExperts, batch_invariant: bool = False) -> Tensor:
    """The shared expert of all tokens: bf16 [T, D]."""
    gate, up = linear(x, experts.shared_in, batch_invariant=batch_invariant)
    tokens, inner = gate.shape
    hidden: Tensor | QuantisedInput = torch.empty(tokens, inner, dtype=torch.bfloat16, device=x.device)
    tile, out, scales, width = None, hidden, None, min(1024, next_power_of_2(inner))
    if takes_codes(tokens, experts.shared_out, batch_invariant=batch_invariant):
        tile = experts.shared_out.groups[0].tile
        assert tile is not None
        hidden = QuantisedInput.empty(tokens, (inner,), tile, x.device)
        out, scales, width = hidden.codes.view(torch.uint8), hidden.scales, max(tile, width)
    programs = tokens, -(-inner // width)
    moe_swiglu[programs](
        gate, up, gate.stride(0), up.stride(0), out, scales, *scale_strides(scales), experts.limit, I=inner, WIDTH=width, TILE=tile,
        num_warps=4, **early(math.prod(programs), x),
    )  # fmt: skip
    return linear(hidden, experts.shared_out, batch_invariant=batch_invariant)[0]


def moe_total(routed: Routed, shared: Tensor | None, token_ids: Tensor | None, dim: int, early: bool) -> Tensor:
    """bf16 [T, D]: the sum of the chosen experts' outputs and the shared expert's; without that one fp32 [T, D], a part of the sum.

    Args:
        early: may start before the kernel before it ends, which is the last on which it depends.
    """
    tokens, k = routed.experts.shape
    dtype = torch.float32 if shared is None else torch.bfloat16
    out = torch.empty(tokens, dim, dtype=dtype, device=routed.outputs.device)
    width = min(1024, next_power_of_2(dim))
    moe_sum[(tokens, -(-dim // width))](
        routed.outputs, routed.experts, shared, token_ids, out, routed.first, E=routed.count, N=routed.outputs.shape[1], D=dim,
        CHOICES=k, WIDTH=width, EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return out


def choices_of(x: Tensor, token_ids: Tensor, experts: KernelExperts, *, batch_invariant: bool = False) -> tuple[Tensor, Tensor]:
    """`abyssal.ops.moe.route` for bf16: x [T, D], token_ids int [T] -> experts int32 [T, k], weights fp32 [T, k]."""
    _check(x, token_ids, experts)
    if len(x) == 0:
        empty = torch.empty(0, experts.k, dtype=torch.int32, device=x.device)
        return empty, empty.float()
    config = moe_config(len(x) * experts.k, experts.num_experts, batch_invariant)
    choice = route(x, token_ids, experts, config, batch_invariant)
    return choice.experts, choice.weights


def part_of_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: KernelExperts,
    first: int,
    *,
    config: MoeConfig | TileConfig | None = None,
) -> Tensor:
    """`abyssal.ops.moe.moe` for bf16: x [T, D], chosen int32 [T, k], weights fp32 [T, k] -> fp32 [T, D], of the experts that are here."""
    tokens, dim = x.shape
    if tokens == 0:
        return torch.empty(0, dim, dtype=torch.float32, device=x.device)
    here = experts.w13.shape[0]
    config = config or moe_config(tokens * experts.k * here // experts.num_experts, here, tiles=experts.products is not None)
    return moe_total(_routed_here(x, chosen, weights, experts, first, config), None, None, dim, early=x.is_cuda)


def outputs_of_choices(x: Tensor, chosen: Tensor, weights: Tensor, experts: KernelExperts, first: int) -> Tensor:
    """`abyssal.ops.moe.choice_outputs` for bf16, a token's bits as in `moe` with `batch_invariant`, whichever rank has the experts."""
    tokens, dim = x.shape
    if tokens == 0:
        return x.new_empty(0, experts.k, dim)
    config = moe_config(tokens * experts.k, experts.num_experts, batch_invariant=True)
    routed = _routed_here(x, chosen, weights, experts, first, config)
    here = (chosen >= first) & (chosen < first + routed.count)
    return torch.where(here.unsqueeze(2), routed.outputs.view(tokens, experts.k, -1)[..., :dim], 0.0)


def sum_of_choices(outputs: Tensor, chosen: Tensor, shared: Tensor, token_ids: Tensor, experts: KernelExperts) -> Tensor:
    """`abyssal.ops.moe.choice_sum` for bf16, in the order of `moe`: outputs [T, k, D], chosen int32 [T, k], shared [T, D] -> [T, D]."""
    if len(shared) == 0:
        return torch.empty_like(shared)
    routed = Routed(outputs.flatten(0, 1), chosen, 0, experts.num_experts)
    return moe_total(routed, shared, token_ids, shared.shape[1], early=False)


def _routed_here(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: KernelExperts, first: int, config: MoeConfig | TileConfig
) -> Routed:
    inputs = torch.empty(len(x), experts.w13.shape[2], dtype=torch.bfloat16, device=x.device)
    constants = _input_constants(x.shape[1], experts.w13, config.steps)
    moe_input[len(x), constants["DP"] // constants["WIDTH"]](x, inputs, **constants, num_warps=1)
    return routed_experts(Choice(chosen, weights, inputs), experts, config, first=first)


def shared_part(x: Tensor, experts: KernelExperts, *, batch_invariant: bool = False) -> Tensor:
    """`abyssal.ops.moe.shared_expert` for bf16: x [T, D] -> bf16 [T, D]."""
    return shared_expert(x, experts, batch_invariant) if len(x) else torch.empty_like(x)


def _fitting(config: ProductConfig, columns: int, format: str, programs: int) -> ProductConfig:
    """The config with no more chunks than divide the columns, and a split where there is one.

    With a split one chunk where only that lets all programs run at once: a few that have to wait take as long as all others. V4.1's step
    of one token takes 2 % less so, V4's, whose programs fit, would take 2 % more.
    """
    if config.warps > 1:
        return config
    if format == "fp4" and config.split > 1:
        two, one = AT_ONCE
        return replace(config, chunks=1) if two < programs <= one else config
    return ProductConfig(config.block_tokens, config.block_rows, math.gcd(config.chunks, columns // 128), 1)


def aot_cases() -> list[AotCase]:
    flash, v41 = (4096, 2048, 256, 128), (5120, 2304, 384, 32)  # D, I, E, tile of the input's grid
    few, one, more, mid, many = (
        ProductConfig(*c) for c in ((8, 16, 2, 1, 2), (8, 16, 1, 1, 2), (8, 32, 2, 1), (16, 128, 3, 4), (128, 128, 3, 8))
    )
    cases = []
    for name, sizes, format, configs in (
        ("v4 fp4", flash, "fp4", (few, more, mid, many)),
        ("v4.1 fp4", v41, "fp4", (one, many)),
        ("v4 fp8", flash, "fp8", (few, mid)),
        ("v4.1 fp8", v41, "fp8", (few,)),
        ("v4 plain", flash, "plain", (few, many)),
        ("v4 plain, not rounded", (*flash[:3], None), "plain", (few, mid)),
    ):
        for config in configs:  # one of each format for both architectures: unrolled loops take long to compile
            cases += _product_cases(name, sizes, format, config, (HOPPER, BLACKWELL) if config is configs[0] else (HOPPER,))
    for name, sizes, format in (
        ("v4", flash, "fp4"),
        ("v4.1", v41, "fp4"),
        ("v4 fp8", flash, "fp8"),
        ("v4 plain", (*flash[:3], None), "plain"),
    ):
        cases += _routing_cases(name, sizes, format)
    return cases


def _product_cases(
    name: str, sizes: tuple[int, int, int, int | None], format: str, config: ProductConfig, archs: tuple[int, ...]
) -> list[AotCase]:
    dim, inner, experts, tile = sizes
    config = _fitting(config, math.gcd(dim, inner), format, 0)
    constants = {
        "E": experts,
        "TOKENS": config.block_tokens, "ROWS": config.block_rows, "CHUNKS": config.chunks, "WARPS": config.warps, "SPLIT": config.split,
        "FORMAT": format, "EARLY": True,
    } | ({"s": None} if format == "plain" else {})  # fmt: skip
    quant = None if tile is None else Grid(inner, "e4m3", tile, "ue8m0")
    up = {"K": dim, "I": inner, "CHOICES": 6, "OUT": format, "quant": quant, "TILE": tile or 1}
    text = f"{name} {config.block_tokens}x{config.block_rows} warps {config.warps}"
    planless = config.block_rows == 16
    weights = {"w": "*i32", "plan": "*i32", "blocks": "i32", "first_expert": "i32"} | ({} if format == "plain" else {"s": "*i32"})
    constants, weights = (constants | {"order": None}, weights) if planless else (constants, weights | {"order": "*i32"})
    hidden = weights | {"inputs": "*bf16", "weights": "*fp32", "hidden": "*bf16", "arrivals": "*i32", "limit": "fp32"}
    output = weights | {"hidden": "*bf16", "outputs": "*bf16"} | ({} if planless else {"arrivals": "*i32"})
    shared = {"arrivals": None} if planless else {}
    return [
        AotCase(
            f"{kernel.fn.__name__} {text}", kernel, signature, constants | sizes_of, num_warps=config.warps * config.split, num_stages=1,
            aligned=tuple(n for n, kind in signature.items() if kind[0] == "*"), archs=archs,
            spill_reason="8 bytes in front of the loop, on 100 only" if format == "plain" else None,
        )
        for kernel, signature, sizes_of in ((moe_up, hidden, up), (moe_down, output, {"K": inner, "N": dim, "ARRIVALS": 17, "PARTS": 16} | shared))
    ]  # fmt: skip


def _routing_cases(name: str, sizes: tuple[int, int, int, int | None], format: str) -> list[AotCase]:
    dim, inner, experts, tile = sizes
    padded = next_power_of_2(experts)
    route = {
        "logits": "*fp32", "logits_stride": "i32", "bias": "*fp32", "tid2eid": "*i32", "token_ids": "*i64", "x": "*bf16",
        "experts": "*i32", "weights": "*fp32", "inputs": "*bf16", "scale": "fp32", "temperature": "fp32",
    }  # fmt: skip
    constants: dict[str, Any] = {
        "E": experts, "EP": padded, "CHOICES": 6, "D": dim, "DP": dim, "WIDTH": 1024, "TILE": tile or 1, "FORMAT": format,
        "quant": None if tile is None else Grid(dim, "e4m3", tile, "ue8m0"), "STEPS": False,
    }  # fmt: skip
    cases = []
    for kind, absent in (("scored", "tid2eid"), ("hashed", "bias")):
        signature = {n: k for n, k in route.items() if n != absent}
        cases.append(
            AotCase(
                f"moe_route {name} {kind}",
                moe_route,
                signature,
                constants | {absent: None, "EARLY": True},
                aligned=("x", "inputs"),
            )
        )
    store = {n: constants[n] for n in ("D", "DP", "WIDTH", "TILE", "FORMAT", "quant", "STEPS")}
    cases.append(AotCase(f"moe_input {name}", moe_input, {"x": "*bf16", "inputs": "*bf16"}, store, aligned=("x", "inputs")))
    plan = {
        "experts": "*i32",
        "order": "*i32",
        "plan": "*i32",
        "arrivals": "*i32",
        "choices": "i32",
        "blocks": "i32",
        "first": "i32",
    }
    if format != "fp4":
        return cases  # what follows is the same for every format
    for block, span, warps in ((8, 512, 4), (128, 4096, 8)):
        constants = {"E": experts, "EP": padded, "BLOCK": block, "SPAN": span, "ARRIVALS": 16, "EARLY": True}
        cases.append(
            AotCase(f"moe_plan {name} {block}", moe_plan, plan, constants, num_warps=warps, aligned=("experts", "order"))
        )
    swiglu = {
        "gate": "*bf16",
        "up": "*bf16",
        "gate_stride": "i32",
        "up_stride": "i32",
        "out": "*u8",
        "scales": "*fp32",
        "scales_stride": "i32",
        "tiles_stride": "i32",
        "limit": "fp32",
    }
    total = {"outputs": "*bf16", "experts": "*i32", "shared": "*bf16", "token_ids": "*i64", "out": "*bf16", "first": "i32"}
    constants = {"E": experts, "N": dim, "D": dim, "CHOICES": 6, "WIDTH": 1024, "EARLY": True}
    return [
        *cases,
        AotCase(
            f"moe_swiglu {name}",
            moe_swiglu,
            swiglu,
            {"I": inner, "WIDTH": 1024, "TILE": tile, "EARLY": True},
            aligned=("gate", "up", "out"),
        ),
        AotCase(f"moe_sum {name}", moe_sum, total, constants, aligned=("outputs", "shared", "out")),
    ]
