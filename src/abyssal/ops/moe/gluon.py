# mypy: allow-untyped-defs
"""The products over FP4 experts in Gluon for Hopper: programs that walk over tiles, one role that brings and two that multiply.

A tile is 256 rows of an expert's weights by one block of its tokens. Four warps bring stages of 256 columns into a ring of shared memory:
weights by the copy engine, the tokens' inputs, gathered, and scales by asynchronous copies. Two roles of four warps each take half of the
rows, 64 of the gate and the same 64 of up, or twice 64: they read words in the order in which a lane's 16 bytes are its operand (see
`triton.py`), widen them to bf16 in registers, and multiply them with the inputs in shared memory; while a product runs, the operand of the
next is widened.

Which rows of 64 a warp and a lane hold is free. Eight lanes that load together take rows 4 apart, which lie in other banks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from abyssal.ops._aot import HOPPER, AotCase
from abyssal.ops._gluon import allocate_barriers, wait_for_use
from abyssal.ops._records import multiprocessors, power_of_two, scale_exponent
from abyssal.ops.moe.triton import STAGES, Blocks, Choice, KernelExperts, KernelWeight, TileConfig

COLUMNS = gl.constexpr(256)  # of a stage: 128 bytes of a row's codes
ROWS = gl.constexpr(256)  # of a tile
BRING_WARPS = gl.constexpr(4)
WORDS = gl.NVMMASharedLayout(128, 32, rank=2)
REGISTERS = 168  # per thread at launch; then by role
BRING_REGISTERS = 56
MULTIPLY_REGISTERS = 224
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
PLAIN_ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


class Work(NamedTuple):
    """What tells a role which tiles there are."""

    plan: Any  # int32 [3, blocks]: expert, first place, end
    order: Any  # int32: place -> choice
    blocks: Any
    tiles: Any
    programs: Any


class Ring(NamedTuple):
    """Stages of 256 columns in shared memory."""

    words: Any  # int32 [STAGES * 4, 64, 32]: rows of the first product of both roles, then of the second
    scales: Any  # int32 [STAGES * 2, 128, 2]
    inputs: Any  # bf16 [STAGES * 2, TOKENS, 128]
    full: Any
    empty: Any


class Tokens(NamedTuple):
    """Of the tokens of two tiles in turn: where their results go, -1 for none, and their weights."""

    sources: Any  # int32 [TOKENS]: where inputs of the tile being brought begin, in units of 16 bytes, -1 for none
    rows: Any  # int32 [2, TOKENS]
    weights: Any  # fp32 [2, TOKENS]
    full: Any
    empty: Any


class Largest(NamedTuple):
    """Through which the two roles tell each other the largest magnitude of a token's hidden values."""

    magnitudes: Any  # int32 [4, TOKENS / 2], bf16 of each two tokens: of two tiles in turn, by role
    known: Any


@gluon.constexpr_function
def _mma(tokens):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 16])


@gluon.constexpr_function
def _rows_of_warps(up):
    """Bases of rows by register, lanes 2 to 4, and warps; of the first product so that a lane's results lie side by side in `place`."""
    return (8, (4, 16, 32), (1, 2)) if up else (8, (4, 1, 2), (16, 32))


@gluon.constexpr_function
def _word_layout(up):
    register, lanes, warps = _rows_of_warps(up)
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [register, 0], [0, 16]],
        [[0, 4], [0, 8], *[[n, 0] for n in lanes]],
        [[n, 0] for n in warps],
        [],
        [64, 32],
    )


@gluon.constexpr_function
def _byte_layout(up):
    register, lanes, warps = _rows_of_warps(up)
    return gl.DistributedLinearLayout(
        [[register, 0], [0, 4]], [[0, 1], [0, 2], *[[n, 0] for n in lanes]], [[n, 0] for n in warps], [], [64, 8]
    )


@gluon.constexpr_function
def _output_layout(tokens):
    """Eight rows of one token per lane."""
    rest = [[n, 0] for n in (16, 32, 64) if n < tokens]
    lanes = [[0, 8], [1, 0], [2, 0], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], *rest], lanes, [[0, 16], [0, 32]], [], [tokens, 64])


@gluon.constexpr_function
def _hidden_layout(tokens):
    """Four columns of one token, which lie side by side, per lane."""
    rest = [[n, 0, 0] for n in (8, 16, 32, 64) if n < tokens]
    lanes = [[0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 2], *rest], lanes, [[0, 1, 0], [0, 8, 0]], [], [tokens, 16, 4])


@gluon.jit
def _renumber(x, ORDER: gl.constexpr):
    """Rows [64, n] with the bits of their numbers in another order, the highest first. Nothing moves."""
    N: gl.constexpr = x.shape[1]
    bits = gl.reshape(x, (2, 2, 2, 2, 2, 2, N))
    return gl.reshape(gl.permute(bits, ORDER), (64, N))


@gluon.jit
def _to_operand(x, UP: gl.constexpr):
    """Rows as they lie in memory -> as the operand numbers them: lanes, register, warps from the lowest bit on."""
    return _renumber(x, (4, 5, 2, 0, 1, 3, 6) if UP else (0, 1, 2, 4, 5, 3, 6))


@gluon.jit
def _from_operand(x, UP: gl.constexpr):
    return _renumber(x, (3, 4, 2, 5, 0, 1, 6) if UP else (0, 1, 2, 5, 3, 4, 6))


@gluon.jit
def _halves(x):
    """[64, 2 n] -> its left and its right half."""
    N: gl.constexpr = x.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(x, (64, 2, N)), (0, 2, 1)))


@gluon.jit
def _load(ring, place, UP: gl.constexpr):
    """Words [64, 16] of both halves of a stage, and their scale bytes [64, 4]."""
    COUNT: gl.constexpr = ring.words.shape[0]
    bytes_ = ring.scales._reinterpret(gl.uint8, [COUNT, 64, 8], PLAIN).index(place).load(_byte_layout(UP))
    words = ring.words.index(place).load(_word_layout(UP))
    first, second = _halves(_to_operand(words, UP))
    first_bytes, second_bytes = _halves(_to_operand(bytes_, UP))
    return first, first_bytes, second, second_bytes


@gluon.jit
def _widen(words, exponents, MMA: gl.constexpr):
    """e2m1 in words [64, 16] and exponent bytes [64, 4] -> bf16 [64, 128] times 2^-32, the left operand of a product.

    The three low bits of a code, put at the top of bf16's mantissa and the bottom of its exponent, are its value times 2^-126. A product
    with two powers of two puts a nibble there and its sign at the top at once.
    """
    words = gl.reshape(words, (64, 4, 4))
    scale = exponents.to(gl.int32) * 0x00800080 + 94 * 0x00800080  # 2^(exponent - 127 + 126 - 32) in both halves
    scale = gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(2, words.type.layout), assert_trivial=True), 2)
    words, scale = gl.broadcast(words, scale)
    t0, t1, t2, t3 = gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        shr.u32 b, $4, 8;
        and.b32 a, $4, 0x000F000F; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81C081C0; mul.bf16x2 $0, a, $5;
        and.b32 a, $4, 0x00F000F0; mul.lo.u32 a, a, 0x0104; and.b32 a, a, 0x81C081C0; mul.bf16x2 $1, a, $5;
        and.b32 a, b, 0x000F000F; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81C081C0; mul.bf16x2 $2, a, $5;
        and.b32 a, b, 0x00F000F0; mul.lo.u32 a, a, 0x0104; and.b32 a, a, 0x81C081C0; mul.bf16x2 $3, a, $5;
        }""",
        "=&r,=&r,=&r,=&r,r,r",
        [words, scale],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    all_ = gl.join(gl.join(t0, t1), gl.join(t2, t3))  # [64, lane, word, low bit of the nibble, high bit]
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [all_], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
    )
    both = gl.permute(gl.join(low, high), (0, 4, 2, 3, 1, 5))
    return gl.convert_layout(gl.reshape(both, (64, 128)), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _bring(work, weights, scales, inputs, of_choices, ring, tokens, SECOND: gl.constexpr, MATRIX: gl.constexpr, K: gl.constexpr,
           CHOICES: gl.constexpr, UP: gl.constexpr):  # fmt: skip
    """The role of four warps: stages of this program's tiles into the ring.

    Where the next tile's inputs lie takes two dependent loads, made while stages of this one are brought.
    """
    TOKENS: gl.constexpr = ring.inputs.shape[1]
    SCALES: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [BRING_WARPS, 1], [1, 0])
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [BRING_WARPS], [0])
    STEPS: gl.constexpr = K // COLUMNS
    EARLIER: gl.constexpr = STEPS // 2
    TILES: gl.constexpr = MATRIX // ROWS  # of rows
    row = gl.arange(0, 128, gl.SliceLayout(1, SCALES))[:, None]
    word = gl.arange(0, 2, gl.SliceLayout(0, SCALES))[None, :]
    n = 0
    slot = 0
    parity = 0
    expert, start, end = _block(work, gl.program_id(0) // TILES)
    place = start + gl.arange(0, TOKENS, EACH)
    choice = gl.load(work.order + place, mask=place < end, other=0)
    for tile in range(gl.program_id(0), work.tiles, work.programs):
        next_expert, next_start, next_end = _block(work, (tile + work.programs) // TILES)
        inside = place < end
        if UP:
            tokens.sources.store(gl.where(inside, choice // CHOICES * (K // 8), -1))
            weight = gl.load(of_choices + choice)
        else:
            tokens.sources.store(gl.where(inside, place * (K // 8), -1))
        matrix = expert * MATRIX + tile % TILES * (ROWS // 2 if UP else ROWS)
        of_scales = scales + (matrix.to(gl.int64) + row) * (K // 128) + word
        for step in range(EARLIER):
            _bring_stage(n, step, matrix, weights, of_scales, inputs, tokens.sources, ring, SECOND, K)
            n += 1
        mbarrier.wait(tokens.empty.index(slot), parity ^ 1)
        tokens.rows.index(slot).store(gl.where(place < end, place if UP else choice, -1))
        if UP:
            tokens.weights.index(slot).store(weight)
        gl.thread_barrier()
        mbarrier.arrive(tokens.full.index(slot))
        place = next_start + gl.arange(0, TOKENS, EACH)
        choice = gl.load(work.order + place, mask=place < next_end, other=0)
        for step in range(EARLIER, STEPS):
            _bring_stage(n, step, matrix, weights, of_scales, inputs, tokens.sources, ring, SECOND, K)
            n += 1
        parity ^= slot
        slot ^= 1
        expert = next_expert
        start = next_start
        end = next_end


@gluon.jit
def _block(work, block):
    """Expert, first place and end of a block of tokens; zeros where there is none."""
    block = gl.minimum(block, work.blocks - 1)
    expert = gl.load(work.plan + block)
    start, end = gl.load(work.plan + work.blocks + block), gl.load(work.plan + 2 * work.blocks + block)
    return gl.maximum(expert, 0), gl.where(expert >= 0, start, 0), gl.where(expert >= 0, end, 0)


@gluon.jit
def _bring_stage(n, step, matrix, weights, of_scales, inputs, sources, ring, SECOND: gl.constexpr, K: gl.constexpr):
    STAGES: gl.constexpr = ring.full.shape[0]
    stage = wait_for_use(ring.empty, n + STAGES)  # so that all stages are empty at first
    full = ring.full.index(stage)
    mbarrier.expect(full, 4 * 64 * 32 * 4)
    for part in gl.static_range(4):
        at = matrix + part % 2 * 64 + part // 2 * SECOND
        tma.async_copy_global_to_shared(weights, [at, step * 32], full, ring.words.index(stage * 4 + part))
    for part in gl.static_range(2):
        async_copy.async_copy_global_to_shared(
            ring.scales.index(stage * 2 + part), of_scales + step * 2 + part * (SECOND * (K // 128))
        )
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [BRING_WARPS, 1], [1, 0])
    from_row = sources.load(gl.SliceLayout(1, COPY))[:, None]  # not kept in registers
    column = gl.arange(0, 128, gl.SliceLayout(0, COPY))[None, :]
    for part in gl.static_range(2):
        from_ = inputs + (step * COLUMNS + part * 128) + column + from_row.to(gl.int64) * 8
        async_copy.async_copy_global_to_shared(ring.inputs.index(stage * 2 + part), from_, mask=from_row >= 0)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _multiply(work, to, limit, ring, tokens, largest, ROLE: gl.constexpr, MATRIX: gl.constexpr, K: gl.constexpr, OUT: gl.constexpr,
              TILE: gl.constexpr, UP: gl.constexpr):  # fmt: skip
    """A role of four warps: this program's tiles of half of the rows."""
    TOKENS: gl.constexpr = ring.inputs.shape[1]
    MMA: gl.constexpr = _mma(TOKENS)
    TILES: gl.constexpr = MATRIX // ROWS
    STEPS: gl.constexpr = K // COLUMNS
    n = 0
    slot = 0
    parity = 0
    for tile in range(gl.program_id(0), work.tiles, work.programs):
        acc = gl.zeros([64, TOKENS], gl.float32, MMA)
        acc_2 = gl.zeros([64, TOKENS], gl.float32, MMA)
        stage = wait_for_use(ring.full, n)
        fence_async_shared()
        words, exponents, later, later_exponents = _load(ring, stage * 4 + ROLE, UP)
        a = _widen(words, exponents, MMA)
        for _ in range(STEPS - 1):
            acc, acc_2, a_2 = _multiply_stage(stage, a, later, later_exponents, acc, acc_2, ring, ROLE, MMA, UP)
            n += 1
            last = stage
            stage = wait_for_use(ring.full, n)
            fence_async_shared()  # here, so that it ends while the last product still runs
            words, exponents, later, later_exponents = _load(ring, stage * 4 + ROLE, UP)
            a = _widen(words, exponents, MMA)
            acc_2, a_2 = warpgroup_mma_wait(0, deps=(acc_2, a_2))
            gl.thread_barrier()
            mbarrier.arrive(ring.empty.index(last))
        acc, acc_2, a_2 = _multiply_stage(stage, a, later, later_exponents, acc, acc_2, ring, ROLE, MMA, UP)
        n += 1
        acc_2, a_2 = warpgroup_mma_wait(0, deps=(acc_2, a_2))
        gl.thread_barrier()
        mbarrier.arrive(ring.empty.index(stage))
        mbarrier.wait(tokens.full.index(slot), parity)
        if UP:
            _store_hidden(acc, acc_2, tile % TILES * 128, slot, parity, to, limit, tokens, largest, ROLE, OUT, TILE)
        else:
            first = tile % TILES * 256 + ROLE * 64
            _store_output(acc, first, slot, to, tokens, OUT)
            _store_output(acc_2, first + 128, slot, to, tokens, OUT)
        gl.thread_barrier()
        mbarrier.arrive(tokens.empty.index(slot))
        parity ^= slot
        slot ^= 1


@gluon.jit
def _multiply_stage(stage, a, later, later_exponents, acc, acc_2, ring, ROLE: gl.constexpr, MMA: gl.constexpr, UP: gl.constexpr):
    """Add a stage's products; `a` is the operand of the first, and the last one is still running in the end."""
    left = ring.inputs.index(stage * 2).permute((1, 0))
    right = ring.inputs.index(stage * 2 + 1).permute((1, 0))
    acc = warpgroup_mma(a, left, acc, is_async=True)
    words, exponents, later_2, later_exponents_2 = _load(ring, stage * 4 + 2 + ROLE, UP)
    a_2 = _widen(words, exponents, MMA)
    acc_2 = warpgroup_mma(a_2, left, acc_2, is_async=True)
    acc, a = warpgroup_mma_wait(1, deps=(acc, a))
    a = _widen(later, later_exponents, MMA)
    acc = warpgroup_mma(a, right, acc, is_async=True)
    acc_2, a_2 = warpgroup_mma_wait(1, deps=(acc_2, a_2))
    a_2 = _widen(later_2, later_exponents_2, MMA)
    acc_2 = warpgroup_mma(a_2, right, acc_2, is_async=True)
    acc, a = warpgroup_mma_wait(1, deps=(acc, a))
    return acc, acc_2, a_2


@gluon.jit
def _store_output(acc, first, slot, to, tokens, OUT: gl.constexpr):
    """acc [64, TOKENS], 2^-32 times rows `first` .. of the tokens' outputs, whose rows have OUT values."""
    TOKENS: gl.constexpr = acc.shape[1]
    STORE: gl.constexpr = _output_layout(TOKENS)
    value = gl.permute(_from_operand((acc * 4294967296.0).to(gl.bfloat16), False), (1, 0))
    value = gl.convert_layout(value, STORE)
    row = tokens.rows.index(slot).load(gl.SliceLayout(1, STORE))[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, STORE))[None, :]
    gl.store(to + row.to(gl.int64) * OUT + first + column, value, mask=row >= 0)


@gluon.jit
def _tokens_apart(x):
    """[64, TOKENS] -> the first and the second of every two tokens."""
    return gl.split(gl.reshape(x, (64, x.shape[1] // 2, 2)))


@gluon.jit
def _like(x, pairs):
    """Numbers of each two tokens [TOKENS / 2] beside [.., TOKENS / 2]."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(0, pairs.type.layout), assert_trivial=True), 0)


@gluon.jit
def _swiglu(gate, up, weight, limit):
    """2^-32 times gate and up [64, TOKENS], fp32 weights [TOKENS] -> hidden values of each two tokens, bf16, in an int32 [64, TOKENS / 2].

    As in `triton.py`: silu(min(gate, limit)) clamp(up, -limit, limit) weight, gate and up rounded to bf16. Factors 2^32 and 2^64 are part
    of constants.
    """
    gate_0, gate_1 = _tokens_apart(gate)
    up_0, up_1 = _tokens_apart(up)
    weight_0, weight_1 = gl.split(gl.reshape(weight * 18446744073709551616.0, (weight.shape[0] // 2, 2)))
    bound = gl.full_like(gate_0, limit * 2.3283064365386963e-10)
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 both;
        .reg .f32 g, h, u, v, e, f, low;
        neg.f32 low, $7;
        cvt.rn.bf16x2.f32 both, $2, $1; shl.b32 g, both, 16; and.b32 h, both, 0xffff0000;
        cvt.rn.bf16x2.f32 both, $4, $3; shl.b32 u, both, 16; and.b32 v, both, 0xffff0000;
        min.NaN.f32 g, g, $7; min.NaN.f32 h, h, $7;
        min.NaN.f32 u, u, $7; min.NaN.f32 v, v, $7; max.NaN.f32 u, u, low; max.NaN.f32 v, v, low;
        mul.f32 e, g, 0fCFB8AA3B; mul.f32 f, h, 0fCFB8AA3B;
        ex2.approx.ftz.f32 e, e; ex2.approx.ftz.f32 f, f;
        add.f32 e, e, 0f3F800000; add.f32 f, f, 0f3F800000;
        rcp.approx.ftz.f32 e, e; rcp.approx.ftz.f32 f, f;
        mul.f32 g, g, e; mul.f32 h, h, f; mul.f32 g, g, u; mul.f32 h, h, v; mul.f32 g, g, $5; mul.f32 h, h, $6;
        cvt.rn.bf16x2.f32 $0, h, g;
        }""",
        "=r,f,f,f,f,f,f,f",
        [gate_0, gate_1, up_0, up_1, _like(weight_0, gate_0), _like(weight_1, gate_0), bound],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _larger_halves(a, b):
    """For reductions of magnitudes of bf16 in pairs."""
    return gl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _rounded(pairs, most):
    """bf16 in pairs, on the e4m3 grid with the scales of the largest magnitudes, pairs too, that broadcast to them (V4 spec 3.2)."""
    exponent_0 = scale_exponent((most << 16).to(gl.float32, bitcast=True), "e4m3")
    exponent_1 = scale_exponent((most & -0x10000).to(gl.float32, bitcast=True), "e4m3")
    inverse_0, inverse_1 = power_of_two(-exponent_0), power_of_two(-exponent_1)
    scale_0, scale_1 = power_of_two(exponent_0), power_of_two(exponent_1)
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 both;
        .reg .b16 codes, low, high;
        .reg .f32 a, b;
        shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000;
        mul.f32 a, a, $2; mul.f32 b, b, $3;
        cvt.rn.satfinite.e4m3x2.f32 codes, b, a;
        cvt.rn.f16x2.e4m3x2 both, codes;
        mov.b32 {low, high}, both;
        cvt.f32.f16 a, low; cvt.f32.f16 b, high;
        mul.f32 a, a, $4; mul.f32 b, b, $5;
        cvt.rn.bf16x2.f32 $0, b, a;
        }""",
        "=r,r,f,f,f,f",
        [pairs, inverse_0, inverse_1, scale_0, scale_1],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _store_hidden(
    gate, up, first, slot, parity, to, limit, tokens, largest, ROLE: gl.constexpr, OUT: gl.constexpr, TILE: gl.constexpr
):
    """2^-32 times gate and up [64, TOKENS] -> hidden values `first` + 64 ROLE .., on the grid of tiles of TILE and in the order of `place`
    for steps.
    """
    TOKENS: gl.constexpr = gate.shape[1]
    STORE: gl.constexpr = _hidden_layout(TOKENS)
    gate = _from_operand(gate, True)
    weight = tokens.weights.index(slot).load(gl.SliceLayout(0, gate.type.layout))
    pairs = _swiglu(gate, _from_operand(up, True), weight, limit)
    if TILE is not None:
        magnitudes = pairs & 0x7FFF7FFF
        if TILE == 128:
            most = gl.reduce(magnitudes, 0, _larger_halves)
            largest.magnitudes.index(slot * 2 + ROLE).store(most)
            gl.thread_barrier()
            mbarrier.arrive(largest.known.index(slot))
            mbarrier.wait(largest.known.index(slot), parity)
            most = _larger_halves(most, largest.magnitudes.index(slot * 2 + 1 - ROLE).load(most.type.layout))
            pairs = _rounded(pairs, gl.expand_dims(most, 0))
        else:
            magnitudes = gl.reshape(magnitudes, (64 // TILE, TILE, TOKENS // 2))
            most = gl.expand_dims(gl.reduce(magnitudes, 1, _larger_halves), 1)
            pairs = gl.reshape(_rounded(gl.reshape(pairs, (64 // TILE, TILE, TOKENS // 2)), most), (64, TOKENS // 2))
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
    )
    bits = gl.reshape(gl.join(low, high), (2, 2, 2, 2, 2, 2, TOKENS))  # columns' bits, the highest, 5, first
    value = gl.reshape(gl.permute(bits, (6, 4, 1, 2, 5, 0, 3)), (TOKENS, 16, 4))  # bits 1, 4, 3, 0, and 5, 2; 6 is the role's
    value = gl.convert_layout(value, STORE)
    row = gl.expand_dims(gl.expand_dims(tokens.rows.index(slot).load(gl.SliceLayout(1, gl.SliceLayout(2, STORE))), 1), 2)
    part = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, STORE))), 0), 2)
    column = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, STORE))), 0), 1)
    gl.store(to + row.to(gl.int64) * OUT + (first + ROLE * 4) + part * 8 + column, value, mask=row >= 0)


@gluon.jit
def _count_blocks(plan, blocks):
    """Blocks that have an expert; these come first."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, 512, LAYOUT)
    count = gl.zeros([512], gl.int32, LAYOUT)
    for begin in range(0, blocks, 512):
        experts = gl.load(plan + begin + lane, mask=begin + lane < blocks, other=-1)
        count += (experts >= 0).to(gl.int32)
    return gl.sum(count, 0)


@gluon.jit(do_not_specialize=["blocks"])
def _moe_product_sm90(
    weights,  # int32 [E * MATRIX, K / 8] of codes, boxes of [64, 32]
    scales,  # int32 [E * MATRIX, K / 128]
    inputs,  # bf16 [tokens, K] for the first product, else [places, K]
    plan,  # int32 [3, blocks]
    order,  # int32 [choices]
    of_choices,  # fp32 [choices]: weights, for the first product only
    to,  # bf16 [places, OUT], or [choices, OUT]
    blocks,
    limit,
    MATRIX: gl.constexpr,  # rows of an expert's weights
    K: gl.constexpr,
    OUT: gl.constexpr,
    CHOICES: gl.constexpr,
    TILE: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    UP: gl.constexpr,
    BRING_REGISTERS: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
):
    """One of the two products over experts; the first gives hidden values, on the grid and in the order of the second's input."""
    INPUTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, 128], gl.bfloat16)
    SECOND: gl.constexpr = MATRIX // 2 if UP else 128  # how far the second product's rows are from the first's
    words = gl.allocate_shared_memory(gl.int32, [STAGES * 4, 64, 32], weights.layout)
    factors = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 128, 2], PLAIN)
    x = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, TOKENS, 128], INPUTS)
    ring = Ring(words, factors, x, allocate_barriers(STAGES, 1 + 32 * BRING_WARPS), allocate_barriers(STAGES, 2))
    rows = gl.allocate_shared_memory(gl.int32, [2, TOKENS], PLAIN_ROW)
    of_rows = gl.allocate_shared_memory(gl.float32, [2, TOKENS], PLAIN_ROW)
    sources = gl.allocate_shared_memory(gl.int32, [TOKENS], PLAIN_ROW)
    tokens = Tokens(sources, rows, of_rows, allocate_barriers(2, 1), allocate_barriers(2, 2))
    largest = Largest(sources, tokens.full)  # not used
    if TILE == 128:
        largest = Largest(gl.allocate_shared_memory(gl.int32, [4, TOKENS // 2], PLAIN_ROW), allocate_barriers(2, 2))
    fence_async_shared()
    gdc_wait()
    gdc_launch_dependents()  # what follows waits for this kernel's end by itself
    work = Work(plan, order, blocks, _count_blocks(plan, blocks) * (MATRIX // ROWS), gl.num_programs(0))
    gl.thread_barrier()  # or what roles get would be stored where a late warp still reads the count
    gl.warp_specialize(
        [
            (_multiply, (work, to, limit, ring, tokens, largest, 0, MATRIX, K, OUT, TILE, UP)),
            (_multiply, (work, to, limit, ring, tokens, largest, 1, MATRIX, K, OUT, TILE, UP)),
            (_bring, (work, weights, scales, inputs, of_choices, ring, tokens, SECOND, MATRIX, K, CHOICES, UP)),
        ],
        [4, BRING_WARPS],
        [MULTIPLY_REGISTERS, BRING_REGISTERS],
    )


def refusal(experts: KernelExperts) -> str | None:
    """Why `products` does not take these experts; None: it does."""
    formats = experts.w13.format, experts.w2.format
    if formats != ("fp4", "fp4"):
        return f"weights are {' and '.join(formats)}, not fp4"
    _, dim, inner = experts.w2.shape
    if dim % 256 or inner % 256 or experts.w13.shape[1:] != (2 * inner, dim):
        return f"{dim} and {inner} columns, padded, are no multiples of 256"
    if experts.w2.tile not in (None, 32, 64, 128):
        return f"a scale of hidden values for each {experts.w2.tile}, not 32, 64 or 128"
    return None


def with_products(experts: KernelExperts) -> KernelExperts:
    """Experts whose products of many tokens are this module's, unless it refuses them."""
    if refusal(experts):
        return experts
    return replace(experts, products=partial(_products, _words(experts.w13), _words(experts.w2)))


def _words(weight: KernelWeight) -> TensorDescriptor:
    """As the copy engine brings them; made once, as it takes 10 us."""
    words = weight.words.view(-1, weight.shape[2] // 8)
    return TensorDescriptor(words, list(words.shape), [words.shape[1], 1], [64, 32], WORDS)


def _products(
    w13: TensorDescriptor, w2: TensorDescriptor, choice: Choice, experts: KernelExperts, blocks: Blocks, config: TileConfig
) -> Tensor:
    """The outputs of all choices, bf16 [T k, D], by two launches; rows of choices that `blocks` lacks are not written."""
    _, rows, inner = experts.w2.shape
    choices = choice.experts.numel()
    device = choice.inputs.device
    hidden = torch.empty(choices, inner, dtype=torch.bfloat16, device=device)
    outputs = torch.empty(choices, rows, dtype=torch.bfloat16, device=device)
    programs = multiprocessors(device)
    for descriptor, weight, inputs, to in ((w13, experts.w13, choice.inputs, hidden), (w2, experts.w2, hidden, outputs)):
        up = to is hidden
        _moe_product_sm90[(min(programs, blocks.count * (weight.shape[1] // ROWS.value)),)](
            descriptor, weight.scale, inputs, blocks.plan, blocks.order, choice.weights, to, blocks.count, experts.limit,
            MATRIX=weight.shape[1], K=weight.shape[2], OUT=to.shape[1], CHOICES=choice.experts.shape[1],
            TILE=experts.w2.tile if up else None, TOKENS=config.block_tokens, STAGES=config.stages, UP=up,
            BRING_REGISTERS=BRING_REGISTERS, MULTIPLY_REGISTERS=MULTIPLY_REGISTERS, num_warps=4, maxnreg=REGISTERS, launch_pdl=True,
        )  # fmt: skip
    return outputs


def aot_cases() -> list[AotCase]:
    descriptor = f"tensordesc<i32[64, 32],{WORDS!r}>"
    signature = {
        "weights": descriptor, "scales": "*i32", "inputs": "*bf16", "plan": "*i32", "order": "*i32", "of_choices": "*fp32",
        "to": "*bf16", "blocks": "i32", "limit": "fp32",
    }  # fmt: skip
    registers = {"BRING_REGISTERS": BRING_REGISTERS, "MULTIPLY_REGISTERS": MULTIPLY_REGISTERS}
    cases = []
    for name, dim, inner, tile in (("v4", 4096, 2048, 128), ("v4.1", 5120, 2304, 32)):
        for tokens, stages in STAGES.items():
            config = {"CHOICES": 6, "TOKENS": tokens, "STAGES": stages} | registers
            up = {"MATRIX": 2 * inner, "K": dim, "OUT": inner, "TILE": tile, "UP": True}
            down = {"MATRIX": dim, "K": inner, "OUT": dim, "TILE": None, "UP": False}
            cases += [
                AotCase(
                    f"moe_product_sm90 {name} {'up' if sizes is up else 'down'}, {tokens} tokens", _moe_product_sm90, signature,
                    config | sizes, num_warps=4, aligned=("scales", "inputs", "to"), archs=(HOPPER,), max_registers=REGISTERS,
                    spill_reason="numbers of the role that brings, read once a tile" if tokens == 128 else None,
                )
                for sizes in (up, down)
            ]  # fmt: skip
    return cases
