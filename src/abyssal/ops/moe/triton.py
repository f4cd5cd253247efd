"""The expert layer in launches of a fixed grid: route, plan, gate and up with SwiGLU, down, sum (V4 spec 2.11, 3.3, V4.1 spec 3.7).

Weights stay as the checkpoint stores them and become bf16 in registers, where a code times its power-of-two scale is exact. The codes'
bits are placed as a bf16 exponent and mantissa, so that one product per two values removes the bias and applies the scale.

Few tokens: every warp reads rows of weights straight into the registers that its tensor-core products take as operand. A lane reads 16
consecutive bytes of a row, one group of 32 FP4 values; as a sum over K may be taken in any order, the products number K as these bytes
lie in the lanes. Activations are stored in the order in which the unpacked values leave (`place`). Many tokens: tiles go through shared
memory.

A token's sum over K has one order within each of the two kernels, whatever else is in the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from abyssal.kv.layouts import Grid
from abyssal.ops._records import (
    INTERPRETED,
    e2m1_values,
    e4m3_codes,
    e4m3_values,
    power_of_two,
    round_like,
    scale_tiles,
    store_like,
    to_bf16,
    to_fp32,
)
from abyssal.ops.linear import LinearWeight, dequantize
from abyssal.ops.moe import ExpertLayer

CHUNK = tl.constexpr(128)  # values along K per step: one word of four scales per row
GATE_STEP = tl.constexpr(256)  # values along K per partial sum of the router's logits
# Scales enter as 2^(byte - 127 - 32): with the bias of the placed bits they stay within bf16 up to 2^33. Sums are multiplied by 2^32.
SCALE_DOWN = 32
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

    gate: Tensor  # bf16 [P, E, D], the sum of P parts is the router's weight exactly; E padded to 64, D to 256
    bias: Tensor | None  # fp32 [E]
    tid2eid: Tensor | None  # int32 [V, k]
    w13: KernelWeight
    w2: KernelWeight
    shared_w13: KernelWeight
    shared_w2: KernelWeight
    num_experts: int
    k: int
    scale: float
    temperature: float
    limit: float


def prepare_experts(layer: ExpertLayer) -> KernelExperts:
    """The weights of an expert layer; FP4 and FP8 data of released sizes is shared, not copied."""
    shared = _stacked(layer.shared_w1, layer.shared_w3)
    return KernelExperts(
        _gate_parts(layer.gate),
        layer.bias,
        None if layer.tid2eid is None else layer.tid2eid.int(),
        prepare_weight(layer.w13, 2),
        prepare_weight(layer.w2),
        prepare_weight(shared, 2),
        prepare_weight(layer.shared_w2),
        layer.gate.shape[0],
        layer.k,
        layer.scale,
        layer.temperature,
        layer.limit,
    )


def _stacked(gate: LinearWeight, up: LinearWeight) -> LinearWeight:
    """w1 and w3 as one matrix: where a scale block would straddle the seam, its rows are written out."""
    if gate.scale is None or up.scale is None or gate.block is None:
        return LinearWeight(torch.cat([gate.data, up.data]), None, "plain", None, gate.quantize_input)
    height, width = gate.block
    rows = gate.shape[0]
    scales = [part.scale.repeat_interleave(height, 0)[:rows] for part in (gate, up) if part.scale is not None]
    return LinearWeight(torch.cat([gate.data, up.data]), torch.cat(scales), gate.format, (1, width), gate.quantize_input)


def _gate_parts(gate: Tensor) -> Tensor:
    parts: list[Tensor] = []
    rest = gate.float()
    while not parts or rest.any():
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    padding = (0, -gate.shape[1] % GATE_STEP.value, 0, -gate.shape[0] % 64)
    return F.pad(torch.stack(parts), padding).contiguous()


# Launch configs


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """Of one of the two products over experts."""

    block_tokens: int  # of one expert per program
    block_rows: int  # rows of weights per program
    chunks: int  # of 128 along K whose loads are in flight together; through shared memory: pipeline stages
    warps: int  # 1: straight into registers


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Launch config of a layer; both products share the blocks of tokens."""

    up: ProductConfig
    down: ProductConfig


def moe_config(choices: int, experts: int, batch_invariant: bool = False) -> MoeConfig:
    """By the mean number of tokens per expert. Only the kernel decides the bits of a token, so invariance means the one for few tokens."""
    mean = choices / experts
    if mean <= 16 or batch_invariant:
        block = 8 if mean <= 4 else 16
        rows = 16 if choices <= 16 else 32
        return MoeConfig(ProductConfig(block, rows, 2, 1), ProductConfig(block, rows, 2, 1))
    block = 64 if mean <= 64 else 128
    return MoeConfig(ProductConfig(block, 128, 3, 4), ProductConfig(block, 128, 3, 4))


def num_blocks(choices: int, experts: int, block_tokens: int) -> int:
    """The most blocks of tokens that any routing can fill."""
    return min(choices, (choices + experts * (block_tokens - 1)) // block_tokens)


# Order of activations


@triton.jit
def place(k, FORMAT: tl.constexpr):
    """Where column k of the input lies, so that it meets the unpacked weights.

    A 32-bit word of FP4 holds columns 0..7 and leaves as 0, 4, 1, 5 and 2, 6, 3, 7: two planes, each contiguous over 128 columns. One
    of FP8 leaves as 0, 2, 1, 3.
    """
    if FORMAT == "fp4":
        return (k & ~127) | ((k & 2) << 5) | ((k & 120) >> 1) | ((k & 1) << 1) | ((k & 4) >> 2)
    elif FORMAT == "fp8":
        return (k & ~3) | ((k & 1) << 1) | ((k & 2) >> 1)
    else:
        return k


@triton.jit
def rounded(x, TILE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, quant: tl.constexpr):
    """x fp32 [ROWS, WIDTH] on the e4m3 grid with a scale per tile, dequantised (V4 spec 3.2)."""
    if quant is None:
        return x
    scaled, _, scale = scale_tiles(x, quant, ROWS, WIDTH)
    tiles = tl.reshape(e4m3_values(e4m3_codes(scaled)), (ROWS, WIDTH // TILE, TILE)) * scale[:, :, None]
    return tl.reshape(tiles, (ROWS, WIDTH))


# Unpacking

FP4_ASM = tl.constexpr("""
{
.reg .b32 m, s;
shl.b32 m, $4, 6; and.b32 m, m, 0x01C001C0; shl.b32 s, $4, 12; lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 $0, m, $5;
shl.b32 m, $4, 2; and.b32 m, m, 0x01C001C0; shl.b32 s, $4, 8; lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 $1, m, $5;
shr.b32 m, $4, 2; and.b32 m, m, 0x01C001C0; shl.b32 s, $4, 4; lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 $2, m, $5;
shr.b32 m, $4, 6; and.b32 m, m, 0x01C001C0; lop3.b32 m, $4, 0x80008000, m, 0xEA; mul.rn.bf16x2 $3, m, $5;
}
""")
FP8_ASM = tl.constexpr("""
{
.reg .b32 m, s;
shl.b32 m, $2, 4; and.b32 m, m, 0x07F007F0; shl.b32 s, $2, 8; lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 $0, m, $3;
shr.b32 m, $2, 4; and.b32 m, m, 0x07F007F0; lop3.b32 m, $2, 0x80008000, m, 0xEA; mul.rn.bf16x2 $1, m, $3;
}
""")


@triton.jit
def scale_pairs(word, shift, FORMAT: tl.constexpr):
    """Byte at bit `shift` of a word of e8m0 scales -> int32, two equal bf16 2^(byte - 127 - 32 + bias of the placed bits)."""
    FIELD: tl.constexpr = (126 if FORMAT == "fp4" else 120) - 32
    return ((word >> shift) & 0xFF) * 0x00800080 + FIELD * 0x00800080


@triton.jit
def _scale_value(pairs, BIAS: tl.constexpr):
    return power_of_two(((pairs & 0x7FFF) >> 7) - 127 - BIAS)


@triton.jit
def unpack_fp4(codes, pairs):
    """codes uint8 [R, c, 4 w], pairs int32 of the same shape -> two planes bf16 of that shape, in the order of `place`."""
    if INTERPRETED:
        R: tl.constexpr = codes.shape[0]
        C: tl.constexpr = codes.shape[1]
        W: tl.constexpr = codes.shape[2] // 4
        first, second = tl.split(tl.reshape(codes, (R, C, W, 2, 2)))  # bytes 0, 2 and 1, 3 of each word
        scale = _scale_value(pairs, 126)
        return _nibbles(first, codes.shape, scale), _nibbles(second, codes.shape, scale)
    else:
        return tl.inline_asm_elementwise(
            FP4_ASM, "=r,=r,=r,=r,r,r,r,r,r", [codes, pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )


@triton.jit
def _nibbles(codes, SHAPE: tl.constexpr, scale):
    both = tl.join(e2m1_values(codes & 15), e2m1_values(codes >> 4))  # [R, c, w, 2 bytes, 2 nibbles]
    return to_bf16(tl.reshape(tl.permute(both, (0, 1, 2, 4, 3)), SHAPE) * scale)


@triton.jit
def unpack_fp8(codes, pairs):
    """codes uint8 [R, c, 4 w] -> bf16 of that shape, in the order of `place`."""
    if INTERPRETED:
        R: tl.constexpr = codes.shape[0]
        C: tl.constexpr = codes.shape[1]
        W: tl.constexpr = codes.shape[2] // 4
        words = tl.permute(tl.reshape(e4m3_values(codes), (R, C, W, 2, 2)), (0, 1, 2, 4, 3))
        return to_bf16(tl.reshape(words, codes.shape) * _scale_value(pairs, 120))
    else:
        return tl.inline_asm_elementwise(FP8_ASM, "=r,=r,r,r,r,r,r", [codes, pairs], dtype=tl.bfloat16, is_pure=True, pack=4)


# Products of few tokens: operands straight from memory

# A lane's 16 bytes are the third to the last of the axes (chunk c of four, then bits of the value's place); the tensor core takes four
# values per lane and K step of 32, so K is numbered (high bit, pair, c, word, value).


@triton.jit
def _weight_operand(x, ROWS: tl.constexpr):
    bits = tl.reshape(x, (ROWS, 4, 2, 2, 2, 2))  # c, half, word, pair, value
    return tl.reshape(tl.permute(bits, (0, 2, 4, 1, 3, 5)), (ROWS, 64))


@triton.jit
def _input_operand(x, live, TOKENS: tl.constexpr):
    """x: pointers [TOKENS, 1] to 64 values -> [64, TOKENS] in the order of `_weight_operand`."""
    k = tl.arange(0, 32)[None, :]
    low = tl.load(x + (k // 8 * 16 + k % 8), mask=live, other=0.0)
    high = tl.load(x + (k // 8 * 16 + k % 8 + 8), mask=live, other=0.0)
    both = tl.join(tl.reshape(low, (TOKENS, 4, 2, 2, 2)), tl.reshape(high, (TOKENS, 4, 2, 2, 2)))  # c, word, pair, value, half
    return tl.trans(tl.reshape(tl.permute(both, (0, 5, 3, 1, 2, 4)), (TOKENS, 64)))


@triton.jit
def _plain_operand(x, ROWS: tl.constexpr):
    """[ROWS, 32] bf16, 16 bytes per lane -> K numbered (pair, c, value)."""
    return tl.reshape(tl.permute(tl.reshape(x, (ROWS, 4, 4, 2)), (0, 2, 1, 3)), (ROWS, 32))


@triton.jit
def _load_weights(w, s, at, TILES: tl.constexpr, CHUNKS: tl.constexpr, FORMAT: tl.constexpr):
    """Raw weights and scale words of CHUNKS steps of 128 columns from column 128 `at`; w: a tuple of pointers [16, 1], s: [16]."""
    PARTS: tl.constexpr = 1 if FORMAT == "fp4" else 2 if FORMAT == "fp8" else 4
    WIDTH: tl.constexpr = 32 if FORMAT == "plain" else 64
    column = tl.arange(0, WIDTH)[None, :] + at * (WIDTH * PARTS)
    data, words = (), ()
    for chunk in tl.static_range(CHUNKS):
        for tile in tl.static_range(TILES):
            for part in tl.static_range(PARTS):
                data = data + (tl.load(w[tile] + column + (chunk * PARTS + part) * WIDTH),)
            if FORMAT != "plain":
                words = words + (tl.load(s[tile] + at + chunk),)
    return data, words


@triton.jit
def _multiply(
    sums, data, words, x, live, TILES: tl.constexpr, CHUNKS: tl.constexpr, FORMAT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """sums: a tuple of fp32 [16, TOKENS], one per tile, plus what `_load_weights` gave times the input at pointers x [TOKENS, 1]."""
    PARTS: tl.constexpr = 1 if FORMAT == "fp4" else 2 if FORMAT == "fp8" else 4
    lane = tl.arange(0, 4)[None, :]
    for chunk in tl.static_range(CHUNKS):
        inputs = ()
        for part in tl.static_range(4 if FORMAT == "plain" else 2):
            if FORMAT == "plain":
                raw = tl.load(x + (chunk * 128 + part * 32) + tl.arange(0, 32)[None, :], mask=live, other=0.0)
                inputs = inputs + (tl.trans(_plain_operand(raw, TOKENS)),)
            else:
                inputs = inputs + (_input_operand(x + (chunk * 128 + part * 64), live, TOKENS),)
        new = ()
        for tile in tl.static_range(TILES):
            acc = sums[tile]
            for part in tl.static_range(PARTS):
                raw = data[(chunk * TILES + tile) * PARTS + part]
                if FORMAT == "plain":
                    acc = tl.dot(_plain_operand(raw, 16), inputs[part], acc)
                else:
                    shift = 8 * lane if FORMAT == "fp4" else 8 * (2 * part + lane // 2)
                    pairs = scale_pairs(words[chunk * TILES + tile][:, None], shift, FORMAT)  # [16, 4]
                    codes = tl.reshape(raw, (16, 4, 16))
                    pairs = tl.broadcast_to(pairs[:, :, None], (16, 4, 16))
                    if FORMAT == "fp4":
                        low, high = unpack_fp4(codes, pairs)
                        acc = tl.dot(_weight_operand(low, 16), inputs[0], acc)
                        acc = tl.dot(_weight_operand(high, 16), inputs[1], acc)
                    else:
                        acc = tl.dot(_weight_operand(unpack_fp8(codes, pairs), 16), inputs[part], acc)
            new = new + (acc,)
        sums = new
    return sums


@triton.jit
def _products(
    w, s, x, live, STEPS: tl.constexpr, TILES: tl.constexpr, CHUNKS: tl.constexpr, FORMAT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """TILES products of 16 rows of weights with the input's rows -> a tuple of fp32 [16, TOKENS]; the next loads run ahead."""
    sums = ()
    for _ in tl.static_range(TILES):
        sums = sums + (tl.zeros((16, TOKENS), tl.float32),)
    data, words = _load_weights(w, s, 0, TILES, CHUNKS, FORMAT)
    for step in range(STEPS):
        later, later_words = _load_weights(w, s, tl.minimum(step + 1, STEPS - 1) * CHUNKS, TILES, CHUNKS, FORMAT)
        sums = _multiply(sums, data, words, x + step * (CHUNKS * 128), live, TILES, CHUNKS, FORMAT, TOKENS)
        data, words = later, later_words
    return sums


# Products of many tokens: through shared memory


@triton.jit
def _product(
    w, s, x, live, K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, FORMAT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """w: pointers [ROWS, 1], s: [ROWS], x: [TOKENS, 1] -> fp32 [ROWS, TOKENS]."""
    half = tl.arange(0, 64)[None, :]
    group = tl.arange(0, 4)[None, :]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for step in tl.range(K // 128, num_stages=STAGES):
        first = tl.trans(tl.load(x + step * 128 + half, mask=live, other=0.0))
        second = tl.trans(tl.load(x + step * 128 + 64 + half, mask=live, other=0.0))
        if FORMAT == "plain":
            acc = tl.dot(tl.load(w + step * 128 + half), first, acc)
            acc = tl.dot(tl.load(w + step * 128 + 64 + half), second, acc)
        else:
            word = tl.load(s + step)[:, None]
            if FORMAT == "fp4":
                codes = tl.reshape(tl.load(w + step * 64 + half), (ROWS, 4, 16))
                pairs = tl.broadcast_to(scale_pairs(word, 8 * group, "fp4")[:, :, None], (ROWS, 4, 16))
                low, high = unpack_fp4(codes, pairs)
                acc = tl.dot(tl.reshape(low, (ROWS, 64)), first, acc)
                acc = tl.dot(tl.reshape(high, (ROWS, 64)), second, acc)
            else:
                for part in tl.static_range(2):
                    codes = tl.reshape(tl.load(w + step * 128 + part * 64 + half), (ROWS, 4, 16))
                    pairs = scale_pairs(word, 8 * (2 * part + group // 2), "fp8")
                    pairs = tl.broadcast_to(pairs[:, :, None], (ROWS, 4, 16))
                    values = tl.reshape(unpack_fp8(codes, pairs), (ROWS, 64))
                    acc = tl.dot(values, first if part == 0 else second, acc)
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


@triton.jit(do_not_specialize=["tokens"])
def moe_logits(
    x, gate, partials, tokens, inverse_temperature,
    D: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, PARTS: tl.constexpr, TILES: tl.constexpr, TOKENS: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Router logits in steps of 256 columns: RUN steps are added up in order here, the others by `moe_route`.

    x bf16 [T, D]; gate bf16 [PARTS, EP, DP] -> partials fp32 [DP / 256 / RUN, T, EP].
    """
    expert = tl.program_id(0) * (16 * TILES)
    run = tl.program_id(1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    live = (token < tokens)[:, None]
    row = tl.arange(0, 16)
    total = ()
    for _ in tl.static_range(TILES):
        total = total + (tl.zeros((16, TOKENS), tl.float32),)
    for step in range(RUN):
        start = (run * RUN + step) * 256
        sums = ()
        for _ in tl.static_range(TILES):
            sums = sums + (tl.zeros((16, TOKENS), tl.float32),)
        for part in tl.static_range(PARTS):
            for column in tl.static_range(0, 256, 32):
                at = start + column + tl.arange(0, 32)[None, :]
                kept = live if D == DP else live & (at < D)
                raw = tl.load(x + token.to(tl.int64)[:, None] * D + at, mask=kept, other=0.0)
                operand = tl.trans(_plain_operand(raw, TOKENS))
                new = ()
                for tile in tl.static_range(TILES):
                    weights = tl.load(gate + (part * EP + expert + tile * 16 + row)[:, None] * DP + at)
                    new = new + (tl.dot(_plain_operand(weights, 16), operand, sums[tile]),)
                sums = new
        new = ()
        for tile in tl.static_range(TILES):
            new = new + (total[tile] + sums[tile],)
        total = new
    here = partials + (run.to(tl.int64) * tokens + token[None, :]) * EP + expert
    for tile in tl.static_range(TILES):
        tl.store(here + tile * 16 + row[:, None], total[tile] * inverse_temperature, mask=(token < tokens)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def moe_route(
    partials, bias, tid2eid, token_ids, x, experts, weights, inputs, tokens, scale,
    E: tl.constexpr, EP: tl.constexpr, STRIDE: tl.constexpr, RUNS: tl.constexpr, CHOICES: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, WIDTH: tl.constexpr, quant: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """One token per program: its experts int32 [T, k] and weights fp32 [T, k], and its input on the products' grid, bf16 [T, DP].

    A token id below 0 marks a row that only fills up the batch: its experts are -1.
    """
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EP)
    here = partials + token * STRIDE + expert
    z = tl.load(here, mask=expert < E, other=0.0)
    for run in tl.static_range(1, RUNS):
        z += tl.load(here + run * tokens.to(tl.int64) * STRIDE, mask=expert < E, other=0.0)
    identity = tl.load(token_ids + token)
    _store_input(x + token * D, inputs + token * DP, D, DP, WIDTH, quant, TILE, FORMAT)
    scores = tl.sqrt_rn(_softplus(z))
    taken = tl.arange(0, CHOICES_PADDED(CHOICES))
    chosen = tl.full(taken.shape, -1, tl.int32)
    values = tl.zeros(taken.shape, tl.float32)
    total = 0.0
    if bias is not None:
        biased = tl.where(expert < E, scores + tl.load(bias + expert, mask=expert < E, other=0.0), float("-inf"))
    for j in tl.static_range(CHOICES):
        if bias is not None:
            best = tl.argmax(biased, 0, tie_break_left=True)
            biased = tl.where(expert == best, float("-inf"), biased)
        else:
            best = tl.load(tid2eid + tl.maximum(identity, 0).to(tl.int64) * CHOICES + j)
        value = tl.sum(tl.where(expert == best, scores, 0.0), 0)
        chosen = tl.where(taken == j, best, chosen)
        values = tl.where(taken == j, value, values)
        total += value
    chosen = tl.where(identity < 0, -1, chosen)
    kept = taken < CHOICES
    tl.store(experts + token * CHOICES + taken, chosen, mask=kept)
    tl.store(weights + token * CHOICES + taken, values / (total + SUM_FLOOR) * scale, mask=kept)


@triton.constexpr_function
def CHOICES_PADDED(choices: int) -> int:
    return triton.next_power_of_2(choices)


@triton.jit
def _store_input(
    x, inputs, D: tl.constexpr, DP: tl.constexpr, WIDTH: tl.constexpr, quant: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    for start in tl.static_range(0, DP, WIDTH):
        k = start + tl.arange(0, WIDTH)[None, :]
        raw = to_fp32(tl.load(x + k, mask=k < D, other=0.0))
        tl.store(inputs + place(k, FORMAT), to_bf16(rounded(raw, TILE, 1, WIDTH, quant)), mask=k < DP)


@triton.jit
def moe_input(
    x, inputs, D: tl.constexpr, DP: tl.constexpr, WIDTH: tl.constexpr, quant: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """The input of the shared expert: x [T, D] -> bf16 [T, DP] on the products' grid and in their order."""
    token = tl.program_id(0).to(tl.int64)
    _store_input(x + token * D, inputs + token * DP, D, DP, WIDTH, quant, TILE, FORMAT)


@triton.jit(do_not_specialize=["choices", "blocks"])
def moe_plan(
    experts, order, plan, arrivals, choices, blocks, first,
    E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, ARRIVALS: tl.constexpr,
):  # fmt: skip
    """Sort the choices by expert, stable, and cut each expert's into blocks; program e writes those of expert e.

    order int32 [choices]: sorted place -> choice, token * k + j. plan int32 [3, blocks]: expert, first place, end; expert -1 for blocks
    that the routing leaves empty, which the last program writes. Experts outside `first` .. `first` + E are left out. arrivals int32
    [blocks, ARRIVALS] becomes 0.
    """
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
        if ARRIVALS > 0:
            for start in range(0, mine * ARRIVALS, SPAN):
                tl.store(arrivals + block * ARRIVALS + start + lane, 0, mask=start + lane < mine * ARRIVALS)


@triton.jit
def _block(plan, tokens, blocks, TOKENS: tl.constexpr):
    """Expert, first place and end of this program's block; without a plan one expert takes all tokens in order."""
    block = tl.program_id(1)
    if plan is None:
        expert = 0
        start = block * TOKENS
        end = tl.minimum(start + TOKENS, tokens)
    else:
        expert = tl.load(plan + block)
        start = tl.load(plan + blocks + block)
        end = tl.load(plan + 2 * blocks + block)
    return expert, start, end


@triton.jit
def _swiglu(sums, weight, limit, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """sums [2 ROWS, TOKENS], in every 16 rows 8 of the gate and 8 of up -> bf16 [ROWS, TOKENS] (V4 spec 2.11, 3.5)."""
    pairs = tl.permute(tl.reshape(sums, (ROWS // 8, 2, 8, TOKENS)), (0, 2, 3, 1))
    gate, up = tl.split(tl.reshape(pairs, (ROWS, TOKENS, 2)))
    gate = tl.minimum(round_like(gate, True), limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(round_like(up, True), limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    return to_bf16(gate / (1.0 + tl.exp(-gate)) * up * weight)


@triton.jit(do_not_specialize=["tokens", "blocks"])
def moe_up(
    inputs, w, s, plan, order, weights, hidden, arrivals, tokens, blocks, limit,
    K: tl.constexpr, I: tl.constexpr, CHOICES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    WARPS: tl.constexpr, FORMAT: tl.constexpr, OUT: tl.constexpr, quant: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """hidden bf16 [places, I] = silu(w1 x) (w3 x) weight, on the grid and in the order of the second product's input.

    Where a tile of that grid spans several programs, the last of them to arrive rounds it.
    """
    expert, start, end = _block(plan, tokens, blocks, TOKENS)
    if expert < 0:
        return
    first = tl.program_id(0) * (ROWS // 2)
    places = start + tl.arange(0, TOKENS)
    kept = places < end
    if plan is None:
        token = places
        weight = 1.0
    else:
        choice = tl.load(order + places, mask=kept, other=0)
        token = choice // CHOICES
        weight = tl.load(weights + choice, mask=kept, other=0.0)[None, :]
    x = inputs + token.to(tl.int64)[:, None] * K
    ELEMENTS: tl.constexpr = K // 2 if FORMAT == "fp4" else K
    w += expert.to(tl.int64) * (2 * I * ELEMENTS) if plan is not None else 0
    if FORMAT != "plain":
        s += expert.to(tl.int64) * (2 * I * (K // 128)) if plan is not None else 0
    BIAS: tl.constexpr = 1.0 if FORMAT == "plain" else 2.0**32
    to_hidden = hidden + places.to(tl.int64)[None, :] * I
    if WARPS == 1:
        row = tl.arange(0, 16)
        row = first + row % 8 + row // 8 * I
        data, scales = (), ()
        for tile in tl.static_range(ROWS // 16):
            data = data + (w + (row + tile * 8)[:, None] * ELEMENTS,)
            scales = scales + (s if FORMAT == "plain" else s + (row + tile * 8) * (K // 128),)
        sums = _products(data, scales, x, kept[:, None], K // 128 // CHUNKS, ROWS // 16, CHUNKS, FORMAT, TOKENS)
        for tile in tl.static_range(ROWS // 16):
            value = _swiglu(sums[tile] * BIAS, weight, limit, 8, TOKENS)
            column = first + tile * 8 + tl.arange(0, 8)[:, None]
            tl.store(to_hidden + place(column, OUT), value, mask=kept[None, :])
    else:
        row = tl.arange(0, ROWS)
        row = first + row // 16 * 8 + row % 8 + row // 8 % 2 * I
        scales = s if FORMAT == "plain" else s + row * (K // 128)
        acc = _product(w + row[:, None] * ELEMENTS, scales, x, kept[:, None], K, ROWS, TOKENS, FORMAT, CHUNKS)
        value = _swiglu(acc * BIAS, weight, limit, ROWS // 2, TOKENS)
        column = first + tl.arange(0, ROWS // 2)[:, None]
        tl.store(to_hidden + place(column, OUT), value, mask=kept[None, :])
    if quant is not None:
        SPAN: tl.constexpr = max(TILE, ROWS // 2)
        tl.debug_barrier()
        ready = True
        if SPAN > ROWS // 2:
            counter = arrivals + tl.program_id(1) * (I // SPAN) + first // SPAN
            ready = tl.atomic_add(counter, 1, sem="acq_rel") == SPAN // (ROWS // 2) - 1
        if ready:
            column = first // SPAN * SPAN + tl.arange(0, SPAN)[None, :]
            values = hidden + places.to(tl.int64)[:, None] * I + place(column, OUT)
            raw = to_fp32(tl.load(values, mask=kept[:, None], other=0.0))
            tl.store(values, to_bf16(rounded(raw, TILE, TOKENS, SPAN, quant)), mask=kept[:, None])


@triton.jit(do_not_specialize=["tokens", "blocks"])
def moe_down(
    hidden, w, s, plan, order, outputs, tokens, blocks,
    K: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, WARPS: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """outputs bf16 [choices, N] = w2 hidden; without a plan [T, N]."""
    expert, start, end = _block(plan, tokens, blocks, TOKENS)
    if expert < 0:
        return
    first = tl.program_id(0) * ROWS
    places = start + tl.arange(0, TOKENS)
    kept = places < end
    choice = places if plan is None else tl.load(order + places, mask=kept, other=0)
    x = hidden + places.to(tl.int64)[:, None] * K
    ELEMENTS: tl.constexpr = K // 2 if FORMAT == "fp4" else K
    w += expert.to(tl.int64) * (N * ELEMENTS) if plan is not None else 0
    if FORMAT != "plain":
        s += expert.to(tl.int64) * (N * (K // 128)) if plan is not None else 0
    BIAS: tl.constexpr = 1.0 if FORMAT == "plain" else 2.0**32
    to_output = outputs + choice.to(tl.int64)[None, :] * N + first
    if WARPS == 1:
        row = first + tl.arange(0, 16)
        data, scales = (), ()
        for tile in tl.static_range(ROWS // 16):
            data = data + (w + (row + tile * 16)[:, None] * ELEMENTS,)
            scales = scales + (s if FORMAT == "plain" else s + (row + tile * 16) * (K // 128),)
        sums = _products(data, scales, x, kept[:, None], K // 128 // CHUNKS, ROWS // 16, CHUNKS, FORMAT, TOKENS)
        for tile in tl.static_range(ROWS // 16):
            value = to_bf16(sums[tile] * BIAS)
            tl.store(to_output + tile * 16 + tl.arange(0, 16)[:, None], value, mask=kept[None, :])
    else:
        row = first + tl.arange(0, ROWS)
        scales = s if FORMAT == "plain" else s + row * (K // 128)
        acc = _product(w + row[:, None] * ELEMENTS, scales, x, kept[:, None], K, ROWS, TOKENS, FORMAT, CHUNKS)
        tl.store(to_output + tl.arange(0, ROWS)[:, None], to_bf16(acc * BIAS), mask=kept[None, :])


@triton.jit
def moe_sum(
    outputs, experts, shared, token_ids, out, first,
    E: tl.constexpr, N: tl.constexpr, D: tl.constexpr, CHOICES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out bf16 [T, D]: the outputs of a token's choices in their order, then the shared expert's, in fp32."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    kept = column < D
    total = tl.zeros((WIDTH,), tl.float32)
    for j in tl.static_range(CHOICES):
        expert = tl.load(experts + token * CHOICES + j) - first
        here = kept & (expert >= 0) & (expert < E)
        total += to_fp32(tl.load(outputs + (token * CHOICES + j) * N + column, mask=here, other=0.0))
    live = kept & (tl.load(token_ids + token) >= 0)
    total += to_fp32(tl.load(shared + token * N + column, mask=live, other=0.0))
    store_like(out + token * D + column, total, mask=kept)


# Wrappers


@dataclass(frozen=True, slots=True)
class Choice:
    """Where the tokens of a step go."""

    experts: Tensor  # int32 [T, k]; -1: none
    weights: Tensor  # fp32 [T, k]
    inputs: Tensor  # bf16 [T, DP], as `w13` takes them


def moe(x: Tensor, token_ids: Tensor, experts: KernelExperts, *, config: MoeConfig | None = None) -> Tensor:
    """`abyssal.ops.moe.expert_layer` for bf16: x [T, D], token_ids int [T] -> bf16 [T, D].

    A token id below 0 marks a row that only fills up the batch: it touches no expert and gives zeros.

    Raises:
        TypeError, ValueError: x or token_ids are not of these kinds.
    """
    _check(x, token_ids, experts)
    if len(x) == 0:
        return torch.empty_like(x)
    shared = shared_expert(x, experts)
    return moe_total(routed_experts(route(x, token_ids, experts), experts, config=config), shared, token_ids, x.shape[1])


def _check(x: Tensor, token_ids: Tensor, experts: KernelExperts) -> None:
    if x.dtype != torch.bfloat16:
        raise TypeError(f"x is {x.dtype}: this kernel takes torch.bfloat16; use the reference backend")
    if x.dim() != 2 or x.shape[1] != experts.w13.columns or not x.is_contiguous():
        raise ValueError(f"x is {tuple(x.shape)} with strides {x.stride()}, expected a contiguous [T, {experts.w13.columns}]")
    if token_ids.shape != x.shape[:1] or token_ids.dtype not in (torch.int32, torch.int64) or not token_ids.is_contiguous():
        raise ValueError(f"token_ids is {token_ids.dtype} {tuple(token_ids.shape)}, expected int [{len(x)}]")


def route(x: Tensor, token_ids: Tensor, experts: KernelExperts) -> Choice:
    """Choose experts, and round the input to the grid of the experts' first product: two launches."""
    tokens, dim = x.shape
    parts, padded, width = experts.gate.shape
    steps = width // GATE_STEP.value
    few = tokens <= 64
    runs, tiles, block = (steps, 1, 8) if few else (1, 4, 64)
    partials = torch.empty(runs, tokens, padded, dtype=torch.float32, device=x.device)
    moe_logits[(padded // (16 * tiles), runs, triton.cdiv(tokens, block))](
        x, experts.gate, partials, tokens, 1 / experts.temperature, D=dim, DP=width, EP=padded, PARTS=parts, TILES=tiles,
        TOKENS=block, RUN=steps // runs, num_warps=1, num_stages=1,
    )  # fmt: skip
    chosen = torch.empty(tokens, experts.k, dtype=torch.int32, device=x.device)
    weights = torch.empty(tokens, experts.k, dtype=torch.float32, device=x.device)
    columns = experts.w13.shape[2]
    inputs = torch.empty(tokens, columns, dtype=torch.bfloat16, device=x.device)
    moe_route[(tokens,)](
        partials, experts.bias, experts.tid2eid, token_ids, x, chosen, weights, inputs, tokens, experts.scale,
        E=experts.num_experts, EP=triton.next_power_of_2(padded), STRIDE=padded, RUNS=runs, CHOICES=experts.k,
        **_input_constants(dim, experts.w13), num_warps=4,
    )  # fmt: skip
    return Choice(chosen, weights, inputs)


def _input_constants(dim: int, weight: KernelWeight) -> dict[str, Any]:
    columns = weight.shape[2]
    quant = None if weight.tile is None else Grid(columns, "e4m3", weight.tile, "ue8m0")
    return {
        "D": dim, "DP": columns, "WIDTH": min(1024, columns & -columns), "quant": quant, "TILE": weight.tile or 1,
        "FORMAT": weight.format,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Routed:
    outputs: Tensor  # bf16 [T k, N]; rows of choices outside this rank's experts are not written
    experts: Tensor  # int32 [T, k]
    first: int
    count: int


def routed_experts(choice: Choice, experts: KernelExperts, *, first: int = 0, config: MoeConfig | None = None) -> Routed:
    """The outputs of all choices: three launches.

    Args:
        first: the number of the first expert of `experts`, where a rank holds some of them; choices of others are left out.
    """
    tokens, k = choice.experts.shape
    choices = tokens * k
    count, _, columns = experts.w13.shape
    _, rows, inner = experts.w2.shape
    config = config or moe_config(choices, count)
    up, down = _fitting(config.up, columns), _fitting(config.down, inner)
    assert up.block_tokens == down.block_tokens, f"{config}: the products share their blocks of tokens"
    blocks = num_blocks(choices, count, up.block_tokens)
    device = choice.inputs.device
    tile = experts.w2.tile
    arrivals = 0 if tile is None or tile <= up.block_rows // 2 else inner // tile
    counters = torch.empty(blocks, max(1, arrivals), dtype=torch.int32, device=device)
    order = torch.empty(choices, dtype=torch.int32, device=device)
    plan = torch.empty(3, blocks, dtype=torch.int32, device=device)
    span = min(4096, max(128, triton.next_power_of_2(choices)))
    moe_plan[(count + 1,)](
        choice.experts, order, plan, counters, choices, blocks, first, E=count, EP=triton.next_power_of_2(count),
        BLOCK=up.block_tokens, SPAN=span, ARRIVALS=arrivals, num_warps=4 if span <= 1024 else 8,
    )  # fmt: skip
    hidden = torch.empty(choices, inner, dtype=torch.bfloat16, device=device)
    outputs = torch.empty(choices, rows, dtype=torch.bfloat16, device=device)
    _up(experts.w13, experts.w2, choice.inputs, (plan, order, choice.weights), hidden, counters, choices, k, experts.limit, up)
    _down(experts.w2, hidden, (plan, order), outputs, choices, down)
    return Routed(outputs, choice.experts, first, count)


def shared_expert(x: Tensor, experts: KernelExperts, *, config: MoeConfig | None = None) -> Tensor:
    """The shared expert of all tokens: bf16 [T, N], N padded; three launches, which may run beside the routed experts."""
    tokens, dim = x.shape
    w13, w2 = experts.shared_w13, experts.shared_w2
    _, rows, inner = w2.shape
    config = config or moe_config(tokens, 1)
    up, down = _fitting(config.up, w13.shape[2]), _fitting(config.down, inner)
    inputs = torch.empty(tokens, w13.shape[2], dtype=torch.bfloat16, device=x.device)
    moe_input[(tokens,)](x, inputs, **_input_constants(dim, w13), num_warps=4)
    hidden = torch.empty(tokens, inner, dtype=torch.bfloat16, device=x.device)
    outputs = torch.empty(tokens, rows, dtype=torch.bfloat16, device=x.device)
    blocks = triton.cdiv(tokens, up.block_tokens)
    counters = torch.zeros(blocks, inner // (w2.tile or inner), dtype=torch.int32, device=x.device)
    _up(w13, w2, inputs, (None, None, None), hidden, counters, tokens, 1, experts.limit, up)
    _down(w2, hidden, (None, None), outputs, tokens, down)
    return outputs


def moe_total(routed: Routed, shared: Tensor, token_ids: Tensor, dim: int) -> Tensor:
    """bf16 [T, D]: the sum of the chosen experts' outputs and the shared expert's."""
    tokens, k = routed.experts.shape
    out = torch.empty(tokens, dim, dtype=torch.bfloat16, device=shared.device)
    width = min(1024, triton.next_power_of_2(dim))
    moe_sum[(tokens, triton.cdiv(dim, width))](
        routed.outputs, routed.experts, shared, token_ids, out, routed.first, E=routed.count, N=shared.shape[1], D=dim, CHOICES=k,
        WIDTH=width, num_warps=4,
    )  # fmt: skip
    return out


def _fitting(config: ProductConfig, columns: int) -> ProductConfig:
    """The config with no more chunks than divide the columns."""
    if config.warps > 1:
        return config
    return ProductConfig(config.block_tokens, config.block_rows, math.gcd(config.chunks, columns // 128), 1)


def _up(
    w13: KernelWeight,
    w2: KernelWeight,
    inputs: Tensor,
    routing: tuple[Tensor | None, Tensor | None, Tensor | None],
    hidden: Tensor,
    counters: Tensor,
    choices: int,
    k: int,
    limit: float,
    config: ProductConfig,
) -> None:
    _, rows, columns = w13.shape
    quant = None if w2.tile is None else Grid(rows // 2, "e4m3", w2.tile, "ue8m0")
    plan, order, weights = routing
    blocks = len(counters)
    moe_up[(rows // config.block_rows, blocks)](
        inputs, w13.data, w13.scale, plan, order, weights, hidden, counters, choices, blocks, limit, K=columns, I=rows // 2,
        CHOICES=k, TOKENS=config.block_tokens, ROWS=config.block_rows, CHUNKS=config.chunks, WARPS=config.warps, FORMAT=w13.format,
        OUT=w2.format, quant=quant, TILE=w2.tile or 1, num_warps=config.warps, num_stages=1,
    )  # fmt: skip


def _down(
    w2: KernelWeight,
    hidden: Tensor,
    routing: tuple[Tensor | None, Tensor | None],
    outputs: Tensor,
    choices: int,
    config: ProductConfig,
) -> None:
    _, rows, columns = w2.shape
    plan, order = routing
    blocks = triton.cdiv(choices, config.block_tokens) if plan is None else plan.shape[1]
    moe_down[(rows // config.block_rows, blocks)](
        hidden, w2.data, w2.scale, plan, order, outputs, choices, blocks, K=columns, N=rows, TOKENS=config.block_tokens,
        ROWS=config.block_rows, CHUNKS=config.chunks, WARPS=config.warps, FORMAT=w2.format, num_warps=config.warps, num_stages=1,
    )  # fmt: skip
