# mypy: allow-untyped-defs
"""Index scores on Hopper: one warp brings keys into shared memory, four widen them in registers and multiply them with the queries.

The order of the 128 dimensions does not matter to a dot product, so each thread takes 16-byte pieces of a key as they lie in memory,
calls them the elements that the instruction expects of it, and the queries are stored in that order.

index_fp8 is widened to fp16. index_mxfp4 becomes integers of 8 bits, whose products have twice the rate and exact sums, where the
scales of every key in two tiles are within a factor of four; a third role, two warps, looks ahead for tiles that are not so, and those
are widened to bf16, as are all keys of a query that is not on the grid of such keys itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from abyssal.kv.layouts import Layout
from abyssal.ops._aot import HOPPER, AotCase
from abyssal.ops._gluon import allocate_barriers, plus, wait_for_use
from abyssal.ops._records import multiprocessors, next_power_of_2
from abyssal.ops.index_score._paged import GROUP, KEYS_PER_TILE, check

KEYS = gl.constexpr(KEYS_PER_TILE)
DIM = gl.constexpr(128)
WARP_KEYS = gl.constexpr(GROUP)  # of a tile, whose maximum is one of `maxima`
ROWS = gl.constexpr(128)  # of work, whose lengths a role looks at together
LANES = gl.constexpr(
    gl.DistributedLinearLayout([], [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]], [[1, 0, 0], [2, 0, 0]], [], [4, 8, 4])
)  # [warp, 8, lane]: a number per thread
PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        [], [[0, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]], [[1, 0, 0, 0], [2, 0, 0, 0]], [], [4, 8, 2, 2]
    )
)  # the same as [warp, 8, pair of lanes, lane of it]


class Work(NamedTuple):
    """What tells a role which tiles there are; of the kernel's arguments."""

    visible: Any
    num_rows: Any
    b: Any
    num_entries: Any


class Rows(NamedTuple):
    """Some rows of work, one after the other. Their keys are counted in stages of the ring."""

    first: Any
    before: Any  # stages
    seen: Any  # each row's keys that any of its queries sees
    begins: Any  # where each row's stages begin and end among those of all rows
    ends: Any
    last: Any  # of `ends`


class Share(NamedTuple):
    """A program's stages among those of all rows, and the row of the first of them."""

    begin: Any
    end: Any
    row: Any
    seen: Any  # of that row, as the next two
    row_begin: Any
    row_end: Any
    looked_from: Any  # `first` and `before` of the rows among which it is
    before: Any


class Ring(NamedTuple):
    """Shared memory for tiles, [STAGES * tiles of a stage, ...], and what tells the state of stages, [STAGES, 1]."""

    words: Any  # of keys
    factors: Any  # as they lie in pages: scales of keys
    full: Any
    empty: Any
    largest: Any  # here and below for products in int8 only: of a key's scales
    units: Any
    wide: Any  # [STAGES, 2]: not 0 if a tile's scales are too wide apart
    checked: Any  # those three are there; `full` where there are none
    gate: Any  # [1, 1]: nobody arrives, but a wait for the use before the first is over at once; `full` where nobody waits


class Queries(NamedTuple):
    """Queries in shared memory, for one kind of product."""

    q: Any  # [QUERIES, HEADS, DIM]
    weights: Any  # [QUERIES, 4, HEADS / 4]
    inexact: Any = None  # for int8, per part of the heads: not 0 where a value is no whole number


class Output(NamedTuple):
    scores: Any
    stride: Any
    maxima: Any
    maxima_stride: Any


class Sums(NamedTuple):
    """What lanes hold of the sums over heads of two tiles' keys, fp32 [warp, 8, lane] each, and the scales of their places."""

    low_a: Any
    high_a: Any
    low_b: Any
    high_b: Any
    scales: Any


class Pairs(NamedTuple):
    """The same where pairs of lanes have told each other: a lane keeps the sum of one of its two keys of a tile."""

    own_a: Any
    other_a: Any  # what the other lane of the pair holds of that key
    own_b: Any
    other_b: Any
    scales: Any


class Done(NamedTuple):
    """Two tiles whose scores are yet to be stored, and where."""

    sums: Any
    entry: Any  # from `at` on, not stored if it is none of the `reach` first
    at: Any
    best_at: Any
    reach: Any


@gluon.jit
def _uniform(x):
    """The same number, of which the compiler then knows that all lanes have it: loops and addresses need fewer registers."""
    return gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _again(x):
    """The same number, so that what is made of it is not made before a loop and kept in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load_words(shared):
    """Words [64, KEY_WORDS] of a tile's keys, 16 bytes per load: a lane has one or two neighbouring pieces of two keys.

    `shared` [1, KEY_WORDS, 32] has rows of 128 bytes, of one or two keys: the copy engine is slow with shorter ones.
    """
    KEY_WORDS: gl.constexpr = shared.shape[1] // 2
    ONE: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 8, 0]],
        [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[0, 16, 0], [0, 32, 0]],
        [],
        [1, 64, 32],
    )
    TWO: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 4, 0]],
        [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0]],
        [[0, 8, 0], [0, 16, 0]],
        [],
        [1, 32, 32],
    )
    return gl.reshape(shared.load(ONE if KEY_WORDS == 32 else TWO), (KEYS, KEY_WORDS))


@gluon.jit
def _pairs_to_lanes(values):
    """[4, 8 or 1, 2, 2 or 1], each with PAIRS or a slice of it, to [warp, 8, lane]."""
    values = gl.broadcast(values, gl.zeros([4, 8, 2, 2], gl.float32, PAIRS))[0]
    return gl.convert_layout(gl.reshape(values, (4, 8, 4)), LANES, assert_trivial=True)


@gluon.jit
def _load_scales(shared):
    """fp32 scales [warp, 8, lane] of two tiles' keys [128] whose scores lanes hold in the end."""
    OWN: gl.constexpr = gl.DistributedLinearLayout([], [[8], [64], [1], [2], [4]], [[16], [32]], [], [128])
    scales = gl.permute(gl.reshape(shared.load(OWN).to(gl.float32, bitcast=True), (2, 4, 2, 8)), (1, 3, 0, 2))
    return gl.convert_layout(gl.reshape(scales, (4, 8, 4)), LANES, assert_trivial=True)


@gluon.jit
def _load_scales_of_one(shared):
    """The same of one tile's keys [1, 64], whose scores for two queries lanes hold."""
    OWN: gl.constexpr = gl.DistributedLinearLayout([], [[0, 8], [0, 0], [0, 1], [0, 2], [0, 4]], [[0, 16], [0, 32]], [], [1, 64])
    scales = gl.permute(gl.reshape(shared.load(OWN).to(gl.float32, bitcast=True), (4, 2, 8)), (0, 2, 1))
    scales = gl.expand_dims(gl.convert_layout(scales, gl.SliceLayout(2, PAIRS), assert_trivial=True), 2)
    return _pairs_to_lanes(scales)


@gluon.jit
def _load_bytes(shared):
    """Bytes [64, 4] of a tile of mxfp4 keys: each thread has those of the pieces that it loads."""
    PIECES: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    return shared._reinterpret(gl.uint8, [KEYS, 4], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])).load(PIECES)


@gluon.jit
def _widen_fp8(words, MMA: gl.constexpr):
    """e4m3 in words [64, 32] -> fp16 [64, 128], the left operand of a product."""
    a, b, c, d = gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .b32 ab, cd;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 ab, low;
        cvt.rn.f16x2.e4m3x2 cd, high;
        mov.b32 {$0, $1}, ab;
        mov.b32 {$2, $3}, cd;
        }""",
        "=h,=h,=h,=h,r",
        [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    both = gl.join(gl.join(a, b), gl.join(c, d))  # [64, lane and half and word, element, pair]
    both = gl.permute(gl.reshape(both, (64, 4, 2, 4, 2, 2)), (0, 2, 3, 5, 1, 4))
    return gl.convert_layout(gl.reshape(both, (64, 128)), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _pair(words, scale, NIBBLE: gl.constexpr):
    """bf16 values of nibbles NIBBLE (0 or 1) and NIBBLE + 4 of each word, times `scale`, as the halves of an int32.

    The three low bits of e2m1, put at the top of bf16's mantissa and the bottom of its exponent, are the value times 2^-126. A
    product with two powers of two puts the nibble there and its sign at the top at once.
    """
    if NIBBLE == 0:
        moved = (words & 0x000F000F) * 0x1040
    else:
        moved = (words & 0x00F000F0) * 0x0104
    code = moved & -0x7E3F7E40
    return gl.inline_asm_elementwise("mul.bf16x2 $0, $1, $2;", "=r,r,r", [code, scale], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _widen_mxfp4(words, exponents, MMA: gl.constexpr):
    """e2m1 in words [64, 16] and exponent bytes [64, 4] -> bf16 [64, 128] times 2^-63, the left operand of a product."""
    words = gl.reshape(words, (64, 4, 4))
    # 2^(exponent - 127 + 126 - 63) in both halves: exact from scales of 2^-62 on, finite up to 2^64
    scale = exponents.to(gl.int32) * 0x00800080 + 63 * 0x00800080
    scale = gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(2, words.type.layout), assert_trivial=True), 2)
    words, scale = gl.broadcast(words, scale)
    t0 = _pair(words, scale, 0)
    t1 = _pair(words, scale, 1)
    t2 = _pair(words >> 8, scale, 0)
    t3 = _pair(words >> 8, scale, 1)
    all_ = gl.join(gl.join(t0, t1), gl.join(t2, t3))  # [64, lane, word, low bit of the nibble, high bit]
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [all_], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
    )
    both = gl.permute(gl.join(low, high), (0, 2, 4, 3, 1, 5))
    return gl.convert_layout(gl.reshape(both, (64, 128)), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _widen_to_int8(words, unit, MMA: gl.constexpr):
    """e2m1 in words [64, 16] -> int8 [64, 128], -2 times `unit` [64, 4] times the value, the left operand of a product.

    A byte permutation looks up four nibbles at once. One finds m, twice `unit` times the magnitude; in another a nibble without sign
    finds 128 - m, or 0 if m is 0, and one with a sign finds the top bit of that everywhere, so 0. Twice the second plus the first is
    256 - m without a sign and m with it, and no byte reaches 256.
    """
    words = gl.reshape(words, (64, 4, 4))
    unit = gl.expand_dims(gl.convert_layout(unit.to(gl.int32), gl.SliceLayout(2, words.type.layout), assert_trivial=True), 2)
    small, large = unit * 0x03020100, unit * 0x0C080604  # twice 0, 0.5, 1, 1.5 and 2, 3, 4, 6
    low, high = gl.inline_asm_elementwise(
        """{
        .reg .b32 bare, top, magnitude, positive;
        and.b32 bare, $2, 0x77777777;
        prmt.b32 magnitude, $3, $4, bare;
        prmt.b32 positive, $5, $6, $2;
        mad.lo.u32 $0, positive, 2, magnitude;
        shr.u32 top, $2, 16;
        shr.u32 bare, bare, 16;
        prmt.b32 magnitude, $3, $4, bare;
        prmt.b32 positive, $5, $6, top;
        mad.lo.u32 $1, positive, 2, magnitude;
        }""",
        "=&r,=&r,r,r,r,r,r",
        # 128 less the first two: as products, as what subtracts and permutes is the busiest
        [words, small, large, unit * -0x03020100 - 0x7F7F8000, unit * -0x0C080604 - 0x7F7F7F80],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    four = gl.join(low, high)  # [64, lane, word, half], four values each
    four = gl.join(four, four)
    values = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [gl.join(four, four)], dtype=gl.int8, is_pure=True, pack=4
    )
    values = gl.permute(values, (0, 2, 3, 1, 4, 5))
    return gl.convert_layout(gl.reshape(values, (64, 128)), gl.DotOperandLayout(0, MMA, 4), assert_trivial=True)


@gluon.jit
def _load_query(q, live, HEADS: gl.constexpr):
    QUERY: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    head = gl.arange(0, HEADS, gl.SliceLayout(1, QUERY))[:, None]
    return gl.load(q + head * DIM + gl.arange(0, DIM, gl.SliceLayout(0, QUERY))[None, :], mask=live)


@gluon.jit
def _store_by_lane(values, shared, HEADS: gl.constexpr):
    """A number per head, [4, HEADS / 4]: those of the heads whose dot products a thread holds, side by side."""
    shared.store(gl.reshape(gl.permute(gl.reshape(values, (HEADS // 8, 4, 2)), (1, 0, 2)), (4, HEADS // 4)))


@gluon.jit
def _store_query(values, weights, to, j: gl.constexpr, HEADS: gl.constexpr):
    """One query [HEADS, DIM] into shared memory, in the keys' order of dimensions, and half of its weights."""
    if to.q.dtype == gl.float16:
        values = values.to(gl.float8e4nv, bitcast=True).to(gl.float16)
        # dimension: lane, half, word, pair, element; place in the product: half, word, pair, lane, element
        values = gl.permute(gl.reshape(values, (HEADS, 4, 2, 4, 2, 2)), (0, 2, 3, 4, 1, 5))
    else:
        values = (values.to(gl.float32) * 9223372036854775808.0).to(gl.bfloat16)  # 2^63, which the keys lack
        # dimension: lane, word, high bit of the nibble, other bits; place: word, other bits, lane, high bit
        values = gl.permute(gl.reshape(values, (HEADS, 4, 4, 2, 4)), (0, 2, 4, 1, 3))
    to.q.index(j).store(gl.reshape(values, (HEADS, DIM)))
    w = gl.load(weights + gl.arange(0, HEADS, gl.BlockedLayout([1], [32], [4], [0])))
    _store_by_lane(0.5 * w, to.weights.index(j), HEADS)


@gluon.jit
def _larger_halves(a, b):
    """For reductions: the larger sizes, with any sign."""
    return gl.inline_asm_elementwise("max.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _or(a, b):
    """For reductions."""
    return a | b


@gluon.jit
def _store_query_in_int8(q, weights, to, HEADS: gl.constexpr):
    """A query [HEADS, DIM] of bf16 as whole numbers below 64 times a power of two per head, which its weights take over."""
    QUERY: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])  # stores of 16 bytes
    PARTS: gl.constexpr = to.inexact.shape[0]  # of heads
    head = gl.arange(0, HEADS, gl.SliceLayout(1, QUERY))
    pair = gl.arange(0, DIM // 2, gl.SliceLayout(0, QUERY))
    w = gl.load(weights + head)
    gl.thread_barrier()  # or the compiler would load weights after all else
    pairs = gl.load(q.to(gl.pointer_type(gl.int32), bitcast=True) + head[:, None] * (DIM // 2) + pair[None, :])
    largest = gl.reduce(pairs, 1, _larger_halves) & 0x7FFF7FFF
    exponent = gl.maximum(largest & 0xFFFF, largest >> 16) >> 7
    exponent = gl.minimum(gl.maximum(exponent, 20), 160)
    if HEADS == 64:
        # The same, but of a thread's two heads neither is known before the other, so that all loads are made at once.
        first, second = gl.split(gl.permute(gl.reshape(exponent, (2, 32)), (1, 0)))
        both = gl.inline_asm_elementwise("max.s32 $0, $1, $2;", "=r,r,r", [first, second], dtype=gl.int32, is_pure=True, pack=1)
        known = gl.reshape(gl.permute(gl.join(gl.minimum(first, both), gl.minimum(second, both)), (1, 0)), (HEADS,))
        exponent = gl.convert_layout(known, exponent.type.layout, assert_trivial=True)
    factor = ((259 - exponent) << 7 | 0x8000) * 0x00010001  # the largest is -32 to -63
    factor, pairs = gl.broadcast(gl.expand_dims(factor, 1), pairs)
    # In halves: 192 plus the number, rounded, whose low byte is 64 plus that; 192 less this; what was rounded off.
    error, whole = gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        fma.rn.bf16x2 a, $3, $5, $7;
        fma.rn.bf16x2 b, $4, $6, $7;
        fma.rn.bf16x2 c, a, $9, $7;
        fma.rn.bf16x2 d, b, $9, $7;
        fma.rn.bf16x2 $0, $3, $5, c;
        fma.rn.bf16x2 $1, $4, $6, d;
        prmt.b32 a, a, b, 0x6420;
        add.u32 a, a, 0x40404040;
        xor.b32 $2, a, 0x80808080;
        }""",
        "=&r,=&r,=&r,r,r,r,r,r,r,r,r",
        [pairs, factor, gl.full_like(pairs, 0x43404340), gl.full_like(pairs, -0x407F4080)],
        dtype=(gl.int32, gl.int16),
        is_pure=True,
        pack=2,
    )
    error = gl.permute(gl.reshape(error, (HEADS // (8 * PARTS), PARTS, 8 * (DIM // 2))), (1, 0, 2))
    to.inexact.store(gl.reduce(gl.reshape(error, (PARTS, HEADS // PARTS * (DIM // 2))), 1, _or))
    # pair of dimensions: lane, word, half, nibbles; place: word, half, lane, nibbles
    whole = gl.permute(gl.reshape(whole, (HEADS, 4, 4, 2, 2)), (0, 2, 3, 1, 4))
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS, DIM // 2], gl.int16)
    to.q._reinterpret(gl.int16, [HEADS, DIM // 2], SHARED).store(gl.reshape(whole, (HEADS, DIM // 2)))
    power = ((exponent - 10) << 23).to(gl.float32, bitcast=True)  # 2^(exponent - 132 - 5)
    _store_by_lane(w * power, to.weights.index(0), HEADS)


@gluon.jit
def _take(ring, place, queries, HEADS: gl.constexpr):
    """A tile's keys, widened for a product with `queries`."""
    return _widen(_load_words(ring.words.index(place)), ring, place, queries, HEADS)


@gluon.jit
def _widen(words, ring, place, queries, HEADS: gl.constexpr):
    """The same of a tile whose words a role already has."""
    MMA: gl.constexpr = _mma(HEADS, queries.q.dtype)
    if queries.q.dtype == gl.float16:
        return _widen_fp8(words, MMA)
    elif queries.q.dtype == gl.int8:
        return _widen_to_int8(words, _load_bytes(ring.units.index(place)), MMA)
    else:
        return _widen_mxfp4(words, _load_bytes(ring.factors.index(place)), MMA)


@gluon.jit
def _multiply(keys, queries, j: gl.constexpr, HEADS: gl.constexpr):
    MMA: gl.constexpr = _mma(HEADS, keys.dtype)
    q = queries.q.index(j).permute((1, 0))
    zeros = gl.zeros([KEYS, HEADS], gl.int32 if keys.dtype == gl.int8 else gl.float32, MMA)
    return warpgroup_mma(keys, q, zeros, use_acc=False, is_async=True)


@gluon.jit
def _by_lane(dots, HEADS: gl.constexpr):
    """Dot products [64, HEADS] as [64, 4, HEADS / 4]: those of a thread side by side."""
    return gl.reshape(gl.permute(gl.reshape(dots, (KEYS, HEADS // 8, 4, 2)), (0, 2, 1, 3)), (KEYS, 4, HEADS // 4))


@gluon.jit
def _load_weights(queries, j: gl.constexpr, HEADS: gl.constexpr):
    """A query's weights of the heads whose dot products a thread holds."""
    dots = gl.zeros([KEYS, HEADS], gl.float32, _mma(HEADS, queries.q.dtype))
    return queries.weights.index(j).load(gl.SliceLayout(0, _by_lane(dots, HEADS).type.layout))


@gluon.jit
def _add_products(a, weight_a, b, weight_b):
    """For reductions: a sum times 1. A plain sum of products would be fused in another order from one kernel to the next."""
    return gl.fma(b, weight_b, a * weight_a), 1.0


@gluon.jit
def _lane_sums(dots, weights, HEADS: gl.constexpr):
    """What each thread holds of its two keys' sums over heads, fp32 [warp, 8, lane] each."""
    if dots.dtype == gl.int32:
        # relu, times 2^-22: the bits of a small whole number are 2^-149 times it, those of one below 0 no number, which becomes 0
        terms = gl.inline_asm_elementwise(
            "mul.sat.f32 $0, $1, 0f7F000000;", "=f,r", [dots], dtype=gl.float32, is_pure=True, pack=1
        )
    else:
        # x + |x| is twice the relu, on the units that multiply: those that compare are the busiest
        terms = dots + gl.abs(dots)
    terms, weights = gl.broadcast(_by_lane(terms, HEADS), gl.expand_dims(weights, 0))
    sums, _ = gl.reduce((terms, weights), 2, _add_products)
    low, high = gl.split(gl.permute(gl.reshape(sums, (4, 2, 8, 4)), (0, 2, 3, 1)))
    return gl.convert_layout(low, LANES, assert_trivial=True), gl.convert_layout(high, LANES, assert_trivial=True)


@gluon.jit
def _from_lane(values, distance: gl.constexpr):
    """The values of the lane whose number differs in the bit `distance`."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", "=f,f,r", [values, distance], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _places():
    """Which of the 128 scores of two tiles a lane holds in the end, [warp, 8, lane]: those of the second in lanes 2 and 3."""
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, LANES)))[:, None, None]
    key = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LANES)))[None, :, None]
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LANES)))[None, None, :]
    return _again(lane // 2 * KEYS + warp * WARP_KEYS + lane % 2 * 8 + key)


@gluon.jit
def _of_pair(sums, places):
    """Of sums of two keys the one whose place a lane has, and what the other lane of its pair holds of it."""
    low, high = sums
    odd = (places & 8) != 0
    return gl.where(odd, high, low), _from_lane(gl.where(odd, low, high), 1)


@gluon.jit
def _add_pairs(pairs, places):
    """The scores of lanes' places, from what the two pairs of lanes that share keys hold."""
    second = (places & KEYS) != 0
    a, b = pairs.own_a + pairs.other_a, pairs.own_b + pairs.other_b
    return (gl.where(second, b, a) + _from_lane(gl.where(second, a, b), 2)) * pairs.scales


@gluon.jit
def _add_lanes(sums, places):
    """The same from what the four lanes that share keys hold."""
    own_a, other_a = _of_pair((sums.low_a, sums.high_a), places)
    own_b, other_b = _of_pair((sums.low_b, sums.high_b), places)
    return _add_pairs(Pairs(own_a, other_a, own_b, other_b, sums.scales), places)


@gluon.jit
def _output_from(to, row, tile):
    """Where the scores and the maxima of a row begin that are those of `tile`."""
    row = row.to(gl.int64)
    return to.scores + row * to.stride + tile * KEYS, to.maxima + row * to.maxima_stride + tile * (KEYS // WARP_KEYS)


@gluon.jit
def _store(scores, at, best_at, entry, reach, MAXIMA: gl.constexpr):
    """scores [warp, 8, lane] of entries from 0 on and below `reach`, and the maxima of a warp's 16 of a tile."""
    seen = entry.to(gl.uint32) < reach.to(gl.uint32)
    gl.store(at + entry, scores, mask=seen)
    if MAXIMA:
        best = gl.reshape(gl.where(seen, scores, -float("inf")), (4, 8, 2, 2))
        best = gl.max(gl.max(best, 3), 1)  # one after the other: lanes of one reduction must lie side by side
        best = gl.convert_layout(best, gl.SliceLayout(1, gl.SliceLayout(3, PAIRS)), assert_trivial=True)
        best = _pairs_to_lanes(gl.expand_dims(gl.expand_dims(best, 1), 3))
        gl.store(best_at + (entry >> 4), best, mask=seen & ((entry & (WARP_KEYS - 1)) == 0))


@gluon.jit
def _scales(shared, stage):
    """Those of a stage, from a number per key of the ring's tiles."""
    STAGES: gl.constexpr = shared.shape[0] // 2
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    return _load_scales(shared._reinterpret(gl.int32, [STAGES, 2 * KEYS], PLAIN).index(stage))


@gluon.jit
def _release(ring, stage):
    """Once all threads have read a stage."""
    gl.thread_barrier()
    mbarrier.arrive(ring.empty.index(stage))
    gl.thread_barrier()  # or the compiler would put one in front of the next product or wait


@gluon.jit
def _sum_tiles(ring, stage, queries, weights, done, HEADS: gl.constexpr, MAXIMA: gl.constexpr):
    """One query and the two tiles of a stage; beside them the scores of those before. A positive scale passes the relu."""
    dots_a = _multiply(_take(ring, 2 * stage, queries, HEADS), queries, 0, HEADS)
    keys = _take(ring, 2 * stage + 1, queries, HEADS)
    scales = _scales(ring.factors, stage)
    _release(ring, stage)
    _store(_add_pairs(done.sums, done.entry), done.at, done.best_at, done.entry, done.reach, MAXIMA)
    dots_a = warpgroup_mma_wait(0, deps=(dots_a,))
    dots_b = _multiply(keys, queries, 0, HEADS)
    own_a, other_a = _of_pair(_lane_sums(dots_a, weights, HEADS), done.entry)
    # The compiler would move these sums behind the second product, but it moves no shuffle over a wait.
    mbarrier.wait(ring.gate.index(0), 1)
    dots_b = warpgroup_mma_wait(0, deps=(dots_b,))
    own_b, other_b = _of_pair(_lane_sums(dots_b, weights, HEADS), done.entry)
    return Pairs(own_a, other_a, own_b, other_b, scales)


@gluon.jit
def _sum_tiles_in_int8(words, ring, stage, queries, weights, done, HEADS: gl.constexpr, MAXIMA: gl.constexpr):
    """The same with both products at once, for which keys of 8 bits leave registers."""
    dots_a = _multiply(_widen(words, ring, 2 * stage, queries, HEADS), queries, 0, HEADS)
    keys = _take(ring, 2 * stage + 1, queries, HEADS)
    scales = _scales(ring.largest, stage)
    dots_b = _multiply(keys, queries, 0, HEADS)
    _release(ring, stage)
    dots_a = warpgroup_mma_wait(1, deps=(dots_a,))
    low_a, high_a = _lane_sums(dots_a, weights, HEADS)
    _store_scores(done, MAXIMA)
    dots_b = warpgroup_mma_wait(0, deps=(dots_b,))
    low_b, high_b = _lane_sums(dots_b, weights, HEADS)
    return Sums(low_a, high_a, low_b, high_b, scales)


@gluon.jit
def _sum_tiles_in_turn(words, ring, stage, queries, done, HEADS: gl.constexpr, MAXIMA: gl.constexpr):
    """The same in fewer registers, of keys that are widened with their scales."""
    _store_scores(done, MAXIMA)
    keys = _widen(words, ring, 2 * stage, queries, HEADS)
    dots = warpgroup_mma_wait(0, deps=(_multiply(keys, queries, 0, HEADS),))
    low_a, high_a = _lane_sums(dots, _load_weights(queries, 0, HEADS), HEADS)
    keys = _take(ring, 2 * stage + 1, queries, HEADS)
    _release(ring, stage)
    dots = warpgroup_mma_wait(0, deps=(_multiply(keys, queries, 0, HEADS),))
    low_b, high_b = _lane_sums(dots, _load_weights(queries, 0, HEADS), HEADS)
    return Sums(low_a, high_a, low_b, high_b, gl.full([4, 8, 4], 1.0, gl.float32, LANES))


@gluon.jit
def _store_scores(done, MAXIMA: gl.constexpr):
    """Of two tiles whose sums are known."""
    _store(_add_lanes(done.sums, done.entry), done.at, done.best_at, done.entry, done.reach, MAXIMA)


@gluon.jit
def _score_queries(ring, stage, queries, to, query, tile, work, count, places, HEADS: gl.constexpr, MAXIMA: gl.constexpr):
    """Several queries, `count` of which are real, and the tile of a stage."""
    QUERIES: gl.constexpr = queries.q.shape[0]
    keys = _take(ring, stage, queries, HEADS)
    if queries.q.dtype == gl.float16:
        scales = _load_scales_of_one(ring.factors.index(stage))
    else:
        scales = gl.full([4, 8, 4], 1.0, gl.float32, LANES)
    dots = _multiply(keys, queries, 0, HEADS)
    gl.thread_barrier()
    mbarrier.arrive(ring.empty.index(stage))
    for j in gl.static_range(0, QUERIES, 2):
        next_dots = _multiply(keys, queries, j + 1, HEADS)
        dots = warpgroup_mma_wait(1, deps=(dots,))
        low_a, high_a = _lane_sums(dots, _load_weights(queries, j, HEADS), HEADS)
        if j + 2 < QUERIES:
            dots = _multiply(keys, queries, j + 2, HEADS)
            next_dots = warpgroup_mma_wait(1, deps=(next_dots,))
        else:
            next_dots = warpgroup_mma_wait(0, deps=(next_dots,))
        low_b, high_b = _lane_sums(next_dots, _load_weights(queries, j + 1, HEADS), HEADS)
        scores = _add_lanes(Sums(low_a, high_a, low_b, high_b, scales), places)
        of_lane = j + places // KEYS
        reach = gl.minimum(gl.load(work.visible + query + of_lane, mask=of_lane < count, other=0), work.num_entries)
        at, best_at = _output_from(to, query + of_lane, tile)
        _store(scores, at, best_at, places % KEYS, gl.maximum(reach - tile * KEYS, 0), MAXIMA)


@gluon.jit
def _is_wide(ring, stage):
    return gl.reduce(ring.wide.index(stage).load(gl.BlockedLayout([2], [32], [4], [0])), 0, _or)


@gluon.jit
def _rows_from(work, first, before, QUERIES: gl.constexpr, WARPS: gl.constexpr):
    """ROWS rows of work from `first` on, with `before` stages before them."""
    COUNTS: gl.constexpr = gl.BlockedLayout([ROWS // 32], [32], [WARPS], [0])  # all of them in every warp
    rows = first + gl.arange(0, ROWS, COUNTS)
    if QUERIES == 1:
        seen = gl.load(work.visible + rows, mask=rows < work.num_rows, other=0)
    else:
        blocks = (work.b + QUERIES - 1) // QUERIES
        seen = gl.zeros([ROWS], gl.int32, COUNTS)
        for j in gl.static_range(QUERIES):
            of_row = rows % blocks * QUERIES + j
            inside = (rows < work.num_rows) & (of_row < work.b)
            seen = gl.maximum(seen, gl.load(work.visible + rows // blocks * work.b + of_row, mask=inside, other=0))
    STAGE_KEYS: gl.constexpr = 2 * KEYS if QUERIES == 1 else KEYS
    seen = gl.minimum(seen, work.num_entries)
    stages = ((seen + STAGE_KEYS - 1).to(gl.uint32) // STAGE_KEYS).to(gl.int32)
    ends = before + gl.associative_scan(stages, 0, plus)
    return Rows(first, before, seen, ends - stages, ends, gl.max(ends, 0))


@gluon.jit
def _share(work, QUERIES: gl.constexpr):
    """This program's, found by four warps before roles part."""
    rows = _rows_from(work, 0, 0, QUERIES, 4)
    total = rows.last
    for first in range(ROWS, work.num_rows, ROWS):
        total = _rows_from(work, first, total, QUERIES, 4).last
    share = (total.to(gl.uint32) // gl.num_programs(0).to(gl.uint32)).to(gl.int32)
    rest = total - share * gl.num_programs(0)
    begin = _uniform(gl.program_id(0) * share + gl.minimum(gl.program_id(0), rest))
    end = _uniform(begin + share + (gl.program_id(0) < rest).to(gl.int32))
    return _from_row_of(work, rows, begin, end, QUERIES, 4)


@gluon.jit
def _from_row_of(work, rows, begin, end, QUERIES: gl.constexpr, WARPS: gl.constexpr):
    """A share from `begin` on, which is in no row before `rows`."""
    while (rows.last <= begin) & (rows.first + ROWS < work.num_rows):
        rows = _rows_from(work, rows.first + ROWS, rows.last, QUERIES, WARPS)
    here = (rows.begins <= begin) & (begin < rows.ends)
    row = rows.first + gl.sum(gl.where(here, gl.arange(0, ROWS, rows.ends.type.layout), 0), 0)
    seen = gl.sum(gl.where(here, rows.seen, 0), 0)
    row_begin, row_end = gl.sum(gl.where(here, rows.begins, 0), 0), gl.sum(gl.where(here, rows.ends, 0), 0)
    return Share(begin, end, _uniform(row), _uniform(seen), _uniform(row_begin), _uniform(row_end), rows.first, rows.before)


@gluon.jit
def _rest(work, share, begin, QUERIES: gl.constexpr, WARPS: gl.constexpr):
    """Of a share, from `begin` on. Lengths are read once more, rather than kept in few registers."""
    if begin < share.end:
        rows = _rows_from(work, share.looked_from, share.before, QUERIES, WARPS)
        share = _from_row_of(work, rows, begin, share.end, QUERIES, WARPS)
    else:
        share = Share(begin, share.end, share.row, share.seen, share.row_begin, share.row_end, share.looked_from, share.before)
    return share


@gluon.jit
def _bring(work, share, keys, scales, page_table, table_stride, ring, QUERIES: gl.constexpr, TILES: gl.constexpr):
    """The role of one warp: this program's tiles into the ring."""
    STAGES: gl.constexpr = ring.full.shape[0]
    ITEMS: gl.constexpr = ring.words.shape[0] // STAGES
    blocks = (work.b + QUERIES - 1) // QUERIES
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    n = 0
    while share.begin < share.end:
        stop = gl.minimum(share.end, share.row_end)
        first, last = (share.begin - share.row_begin) * ITEMS, (stop - share.row_begin) * ITEMS
        if ITEMS == 2:  # of a last pair there may be one only
            last = gl.minimum(last, (share.seen + KEYS - 1) // KEYS)
        table = page_table + (share.row // blocks).to(gl.int64) * table_stride
        for group in range(first, last, 32):
            pages = gl.load(table + (group + lane) // TILES, mask=group + lane < last, other=0)
            for i in range(0, gl.minimum(last - group, 32), ITEMS):
                stage = wait_for_use(ring.empty, n + STAGES)  # so that all stages are empty at first
                full = ring.full.index(stage)
                mbarrier.expect(full, ITEMS * (ring.words.shape[2] * ring.words.shape[3] + ring.factors.shape[2]) * 4)
                for item in gl.static_range(ITEMS):
                    tile = gl.minimum(i + item, last - group - 1)  # a last tile without a second comes twice
                    page = gl.sum(gl.where(lane == tile, pages, 0), 0)
                    part = (group + tile) % TILES
                    place = stage * ITEMS + item
                    tma.async_copy_global_to_shared(keys, [page, part * ring.words.shape[2], 0], full, ring.words.index(place))
                    tma.async_copy_global_to_shared(scales, [page, part * KEYS], full, ring.factors.index(place))
                n += 1
        share = _rest(work, share, stop, QUERIES, 1)


@gluon.jit
def _look_ahead(share, ring):
    """The role of two warps, one per tile: what products in int8 need of the scales, and whether a key's are more than a factor of four
    apart.
    """
    for n in range(share.end - share.begin):
        stage = wait_for_use(ring.full, n)
        _prepare(ring, stage)
        gl.thread_barrier()
        mbarrier.arrive(ring.checked.index(stage))


@gluon.jit
def _prepare_scales(factors):
    """From a key's four scales, as they lie in its page, int32: the bits of the largest times 2^24; bytes that are 4, 2 or 1 where a
    scale is that, a half, a quarter of it; and not 0 where one is less still.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 even, odd, most, other, sel, seven;
        prmt.b32 even, $3, 0, 0x4240;
        prmt.b32 odd, $3, 0, 0x4341;
        max.u16x2 most, even, odd;
        prmt.b32 other, most, most, 0x1032;
        max.u16x2 most, most, other;
        mad.lo.u32 $0, most, 0x00800000, 0x0c000000;
        sub.u32 even, most, even;
        sub.u32 odd, most, odd;
        mov.b32 seven, 0x00070007;
        min.u16x2 even, even, seven;
        min.u16x2 odd, odd, seven;
        mad.lo.u32 sel, odd, 16, even;
        shr.u32 other, sel, 8;
        or.b32 sel, sel, other;
        prmt.b32 $1, 0x00010204, 0, sel;
        sub.u32 $2, $1, 0x01010101;
        lop3.b32 $2, $2, $1, 0x80808080, 0x20;
        }""",
        "=&r,=&r,=&r,r",
        [factors],
        dtype=(gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _prepare(ring, stage):
    """Of the keys of a stage: the largest scale times 2^24, and for each of four scales 4, 2 or 1 where it is that, a half, a quarter of
    it; and not 0 for a tile where a scale is less still.
    """
    STAGES: gl.constexpr = ring.full.shape[0]
    PAIRS: gl.constexpr = gl.BlockedLayout([2], [32], [2], [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    factors = ring.factors._reinterpret(gl.int32, [STAGES, 2 * KEYS], PLAIN).index(stage).load(PAIRS)
    largest, units, missing = _prepare_scales(factors)
    ring.largest._reinterpret(gl.int32, [STAGES, 2 * KEYS], PLAIN).index(stage).store(largest)
    ring.units._reinterpret(gl.int32, [STAGES, 2 * KEYS], PLAIN).index(stage).store(units)
    ring.wide.index(stage).store(gl.reduce(gl.reshape(missing, (2, KEYS)), 1, _or))  # within warps


@gluon.jit
def _score(work, share, q, weights, to, ring, queries, precise, HEADS: gl.constexpr, MAXIMA: gl.constexpr):
    """The role of four warps: scores of this program's tiles."""
    QUERIES: gl.constexpr = queries.q.shape[0]
    MIXED: gl.constexpr = queries.q.dtype == gl.int8
    if share.begin >= share.end:
        gdc_wait()  # or the kernel after the next might start too early
    blocks = (work.b + QUERIES - 1) // QUERIES
    places = _places()
    n = 0
    while share.begin < share.end:
        row, stop = share.row, gl.minimum(share.end, share.row_end)
        first, last = share.begin - share.row_begin, stop - share.row_begin
        query = (row // blocks * work.b + row % blocks * QUERIES).to(gl.int64)
        count = gl.minimum(work.b - row % blocks * QUERIES, QUERIES)
        precise_is_there = False
        gl.thread_barrier()
        if n == 0:
            gdc_wait()  # now that addresses are known, which the compiler would compute after a wait without a condition
            gdc_launch_dependents()  # what follows waits for this kernel's end by itself
        for j in gl.static_range(QUERIES):
            of_query = weights + (query + gl.minimum(j, count - 1)) * HEADS
            if MIXED:
                _store_query_in_int8(q + query * (HEADS * DIM), of_query, queries, HEADS)
            else:
                values = _load_query(q + (query + j) * (HEADS * DIM), j < count, HEADS)
                _store_query(values, of_query, queries, j, HEADS)
        fence_async_shared()
        gl.thread_barrier()
        if QUERIES == 1:
            of_heads = _load_weights(queries, 0, HEADS)
            if MIXED:
                inexact = queries.inexact.load(gl.BlockedLayout([queries.inexact.shape[0]], [32], [4], [0]))
                # as one register: of an `or` the compiler would leave the last step to the loop
                inexact = gl.max(inexact.to(gl.uint32), 0).to(gl.int32)
            zeros = gl.zeros([4, 8, 4], gl.float32, LANES)
            sums = Sums(zeros, zeros, zeros, zeros, zeros) if MIXED else Pairs(zeros, zeros, zeros, zeros, zeros)
            entry = places - 2 * KEYS  # before `first`: not stored
            at, best_at = _output_from(to, query, 2 * first)
            reach = gl.minimum(share.seen, last * (2 * KEYS)) - first * (2 * KEYS)
            for _ in range(first, last):
                stage = wait_for_use(ring.checked, n)
                n += 1
                done = Done(sums, entry, at, best_at, reach)
                if MIXED:
                    words = _load_words(ring.words.index(2 * stage))
                    if (inexact | _is_wide(ring, stage)) != 0:
                        if not precise_is_there:
                            here = _again(row // blocks * work.b + row % blocks)
                            values = _load_query(q + here.to(gl.int64) * (HEADS * DIM), True, HEADS)
                            _store_query(values, weights + here.to(gl.int64) * HEADS, precise, 0, HEADS)
                            fence_async_shared()
                            gl.thread_barrier()
                            precise_is_there = True
                        sums = _sum_tiles_in_turn(words, ring, stage, precise, done, HEADS, MAXIMA)
                    else:
                        sums = _sum_tiles_in_int8(words, ring, stage, queries, of_heads, done, HEADS, MAXIMA)
                else:
                    sums = _sum_tiles(ring, stage, queries, of_heads, done, HEADS, MAXIMA)
                entry += 2 * KEYS
            scores = _add_lanes(sums, entry) if MIXED else _add_pairs(sums, entry)
            _store(scores, at, best_at, entry, reach, MAXIMA)
        else:
            for tile in range(first, last):
                stage = wait_for_use(ring.full, n)
                _score_queries(ring, stage, queries, to, query, tile, work, count, places, HEADS, MAXIMA)
                n += 1
        share = _rest(work, share, stop, QUERIES, 4)


POINTERS = {"weights": "*fp32", "page_table": "*i32", "visible": "*i32", "out": "*fp32", "maxima": "*fp32"}
SCALARS = ("table_stride", "out_stride", "maxima_stride", "num_rows", "b", "num_entries")


# One binary per layout, heads, queries and page size: a prefill has many counts and strides, and parts of tensors begin anywhere.
@gluon.jit(do_not_specialize=[*POINTERS, *SCALARS])
def _index_score_kernel_sm90(
    q,  # [n, b, HEADS, DIM]: bytes of e4m3 for index_fp8, otherwise bf16
    weights,  # fp32 [n, b, HEADS]
    keys,  # int32 [pages, rows, 32]: rows of 128 bytes
    scales,  # int32 [pages, TILES * KEYS]
    page_table,  # int32 [n, table_stride]
    visible,  # int32 [n, b]
    out,  # fp32 [n, b, out_stride]
    maxima,  # fp32 [n, b, maxima_stride], unless MAXIMA is False
    table_stride,
    out_stride,
    maxima_stride,
    num_rows,  # n * ceil(b / QUERIES)
    b,
    num_entries,
    LAYOUT: gl.constexpr,
    HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    MAXIMA: gl.constexpr,
    TILES: gl.constexpr,  # per page
    STAGES: gl.constexpr,
):
    """A row of work is QUERIES queries of a sequence against its pages; programs take equal shares of all rows' tiles."""
    FP4: gl.constexpr = LAYOUT == "index_mxfp4"
    MIXED: gl.constexpr = FP4 and QUERIES == 1
    # Swizzled: with 64 heads the four rows of 64 bytes would meet in the same banks.
    WEIGHTS: gl.constexpr = gl.SwizzledSharedLayout(4 if HEADS > 8 else 2, 2, 2 if HEADS == 64 else 1, order=[1, 0])
    WIDE: gl.constexpr = gl.bfloat16 if FP4 else gl.float16
    ITEMS: gl.constexpr = 2 if QUERIES == 1 else 1  # tiles of a stage
    work = Work(visible, num_rows, b, num_entries)
    share = _share(work, QUERIES)
    words = gl.allocate_shared_memory(gl.int32, [STAGES * ITEMS, 1, KEYS // 2 if FP4 else KEYS, 32], keys.layout)
    factors = gl.allocate_shared_memory(gl.int32, [STAGES * ITEMS, 1, KEYS], scales.layout)
    full, empty = allocate_barriers(STAGES), allocate_barriers(STAGES)
    q_shared = gl.allocate_shared_memory(WIDE, [QUERIES, HEADS, DIM], gl.NVMMASharedLayout.get_default_for([HEADS, DIM], WIDE))
    w_shared = gl.allocate_shared_memory(gl.float32, [QUERIES, 4, HEADS // 4], WEIGHTS)
    precise = Queries(q_shared, w_shared)
    if MIXED:
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
        SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS, DIM], gl.int8)
        largest = gl.allocate_shared_memory(gl.int32, [STAGES * ITEMS, 1, KEYS], PLAIN)
        units = gl.allocate_shared_memory(gl.int32, [STAGES * ITEMS, 1, KEYS], PLAIN)
        wide = gl.allocate_shared_memory(gl.int32, [STAGES, 2], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
        ring = Ring(words, factors, full, empty, largest, units, wide, allocate_barriers(STAGES), full)
        queries = Queries(
            gl.allocate_shared_memory(gl.int8, [QUERIES, HEADS, DIM], SHARED),
            gl.allocate_shared_memory(gl.float32, [QUERIES, 4, HEADS // 4], WEIGHTS),
            gl.allocate_shared_memory(gl.int32, [4 if HEADS > 16 else HEADS // 8], gl.SwizzledSharedLayout(1, 1, 1, order=[0])),
        )
    else:
        gate = allocate_barriers(1) if QUERIES == 1 else full
        ring = Ring(words, factors, full, empty, factors, factors, factors, full, gate)
        queries = precise
    fence_async_shared()  # or the copy engine might not see that barriers are ready
    gl.thread_barrier()  # or what roles get would be stored where a late warp still reads its share
    to = Output(out, out_stride, maxima, maxima_stride)
    if MIXED:
        gl.warp_specialize(
            [
                (_score, (work, share, q, weights, to, ring, queries, precise, HEADS, MAXIMA)),
                (_bring, (work, share, keys, scales, page_table, table_stride, ring, QUERIES, TILES)),
                (_look_ahead, (share, ring)),
            ],
            [1, 2],
            [24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_score, (work, share, q, weights, to, ring, queries, precise, HEADS, MAXIMA)),
                (_bring, (work, share, keys, scales, page_table, table_stride, ring, QUERIES, TILES)),
            ],
            [1],
            [24 if QUERIES == 1 else 40],
        )


@gluon.constexpr_function
def _mma(heads, dtype):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, heads, 32 if dtype == gl.int8 else 16])


@dataclass(frozen=True)
class ScoreConfig:
    """How one launch is cut."""

    programs: int  # persistent, each takes an equal share of all tiles
    queries: int  # consecutive queries of a sequence that share the keys of a tile
    stages: int  # in shared memory, on their way or in use, of two tiles if `queries` is 1, else of one
    registers: int  # per thread at launch, half of what the scoring warps get


def score_config(b: int, heads: int, multiprocessors: int) -> ScoreConfig:
    """As many programs as registers hold: one converts and sums beside another's products.

    With 64 heads scoring threads need 136 registers, so a fourth program would spill: 13.6 in place of 10.6 us for 262,144 keys of index_fp8.
    One query has rings of 2 stages, as its keys of 4 would hold up the queries: 9.2 in place of 8.3 us for 262,144 cold keys of index_mxfp4
    with 32 heads, though 22.9 in place of 23.5 for 1,048,576.
    """
    queries = min(4, next_power_of_2(b))
    copies = 2 if queries > 1 else 3 if heads == 64 else 4
    return ScoreConfig(copies * multiprocessors, queries, stages=2 if queries == 1 else 4, registers=256 // copies // 8 * 8)


def _descriptors(pool: Tensor, key_words: int, entries_per_page: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Keys and scales of a tile, as the copy engine brings them."""
    pages = pool.view(torch.int32)
    layout = gl.NVMMASharedLayout(128, 32, rank=3)
    rows = entries_per_page * key_words // 32
    keys = TensorDescriptor(pages, [len(pages), rows, 32], [pages.shape[1], 32, 1], [1, 2 * key_words, 32], layout)
    scales = pages[:, entries_per_page * key_words :]
    layout = gl.NVMMASharedLayout(0, 32, rank=2)
    return keys, TensorDescriptor(scales, [len(pages), entries_per_page], [pages.shape[1], 1], [1, KEYS_PER_TILE], layout)


def index_score(
    q: Tensor,
    weights: Tensor,
    pool: Tensor,
    page_table: Tensor,
    visible: Tensor,
    *,
    layout: Layout,
    entries_per_page: int,
    num_entries: int,
    out: Tensor | None = None,
    maxima: Tensor | None = None,
    config: ScoreConfig | None = None,
) -> Tensor:
    """As `abyssal.ops.index_score.triton.index_score`, for compute capability 9.0 and keys of index_fp8 or index_mxfp4.

    mxfp4 scales are exact from 2^-62 to 2^64. `pool`, `page_table` and `visible` are read while the kernel launched right before may
    still run: that one writes none of them, and has let this one start only once those before it had ended.
    """
    check(q, weights, pool, page_table, visible, layout, entries_per_page, num_entries, maxima)
    if layout.name == "index_bf16":
        raise ValueError("index_bf16 keys are read by the portable kernel")
    n, b, heads, _ = q.shape
    if out is None:
        out = torch.empty(n, b, num_entries, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    assert out.is_contiguous() and out.shape == (n, b, num_entries)
    config = config or score_config(b, heads, multiprocessors(q.device, interpreted=2))
    rows = n * -(-b // config.queries)
    keys, scales = _descriptors(pool, 32 if layout.name == "index_fp8" else 16, entries_per_page)
    _index_score_kernel_sm90[(config.programs,)](
        q.view(torch.uint8) if q.dtype == torch.float8_e4m3fn else q,
        weights,
        keys,
        scales,
        page_table,
        visible,
        out,
        maxima if maxima is not None else out,
        page_table.stride(0),
        num_entries,
        maxima.shape[-1] if maxima is not None else 0,
        rows,
        b,
        num_entries,
        LAYOUT=layout.name,
        HEADS=heads,
        QUERIES=config.queries,
        MAXIMA=maxima is not None,
        TILES=entries_per_page // KEYS_PER_TILE,
        STAGES=config.stages,
        num_warps=4,
        maxnreg=config.registers,
        launch_pdl=True,
    )
    return out


def _descriptor_type(rank: int, row_words: int, swizzle: int) -> str:
    shape = [1, 2 * row_words, 32] if rank == 3 else [1, KEYS_PER_TILE]
    return f"tensordesc<i32{shape},{gl.NVMMASharedLayout(swizzle, 32, rank=rank)!r}>"


def aot_cases() -> list[AotCase]:
    """Both layouts, Flash's and V4.1's heads."""
    return [
        AotCase(
            name=f"index_score_sm90[{layout},heads={heads},queries={queries}]",
            kernel=_index_score_kernel_sm90,
            signature={
                "q": "*u8" if layout == "index_fp8" else "*bf16",
                "keys": _descriptor_type(3, words, 128),
                "scales": _descriptor_type(2, words, 0),
                **POINTERS,
                **dict.fromkeys(SCALARS, "i32"),
            },
            constants={
                "LAYOUT": layout,
                "HEADS": heads,
                "QUERIES": queries,
                "MAXIMA": True,
                "TILES": 1,
                "STAGES": 2 if queries == 1 else 4,
            },
            num_warps=4,
            max_registers=score_config(queries, heads, 1).registers,
            aligned=("q",),
            archs=(HOPPER,),
        )
        for layout, words in (("index_fp8", 32), ("index_mxfp4", 16))
        for heads, queries in ((64, 1), (32, 1), (8, 1), (64, 4), (32, 4))
    ]
