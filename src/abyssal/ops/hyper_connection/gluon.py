# mypy: allow-untyped-defs, no-check-untyped-defs
"""A mixing site of many tokens in one launch, on Hopper: every value is read once and written once, weights stay in registers.

Groups of programs take tiles of 8 tokens in turn. Of each tile a slice expands 128 columns of all four streams and holds them in shared
memory until the coefficients of the tile's tokens are known, LAG tiles later; a few more programs of the group, the finishers, add up
what the slices found and compute the coefficients. One hand-over of sums is enough, as `triton.py` beside this tells. A group waits
for itself only, and its programs follow each other in the grid: a launch makes progress as soon as one group runs side by side.

What programs hand to each other carries a tag in the same word of 8 or 16 bytes, which differs from tile to tile and from launch to
launch: a reader knows by it that the word has arrived, without fences, counters or anything to reset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from abyssal.ops._aot import HOPPER, AotCase
from abyssal.ops.hyper_connection import Site
from abyssal.ops.hyper_connection import triton as portable
from abyssal.ops.hyper_connection.triton import (
    KernelWeights,
    LaunchConfig,
    _collapse,
    _expand,
    _float,
    _own_pre,
    _sigmoid,
    _sinkhorn,
    _store_each,
    check,
    expand,
    sm_count,
)

__all__ = ["HandoverState", "KernelWeights", "TileConfig", "expand", "launch_config", "site"]

TILE = gl.constexpr(8)  # tokens
SLICE = gl.constexpr(128)  # columns
WARPS = gl.constexpr(4)
RING = gl.constexpr(8)  # tiles in the hand-over state, more than LAG; few, so that the L2 keeps them
ENTRIES = gl.constexpr(104)  # words of 16 bytes that a slice hands over per tile
RESIDENT = 2  # programs of a multiprocessor
LAG, AHEAD = 7, 3  # of lags of 4 to 7 with as much ahead as shared memory holds, the fastest at 512 and 4,096 tokens (H200)
LEAST_FINISHERS = 4  # of a group, or its slices wait for them

# Eight columns of a token per thread; a warp has 8 tokens x 32 columns, which is an operand of two products of depth 16.
BLOCKED = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [1, 4], [1, 0]))
COLUMN = gl.constexpr(gl.BlockedLayout([1, 1], [8, 4], [1, 4], [1, 0]))
COPY_COMB = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
COPY_POST = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
# Four sums that are handed over by one thread.
PARTS = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2]], [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]], [[4, 0], [8, 0]], [], [16, 32])
)
THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
TILE_SHARED = gl.constexpr(gl.SwizzledSharedLayout(32, 1, 2, [1, 0]))
PARTS_SHARED = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
PLAIN_2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
PLAIN_1 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


def _products(own_pre: bool) -> str:
    """Eight sums over the 32 columns of a warp: 3 x 2 coefficients, then two sums of squares or products of streams, and with own pre
    eight more of these.

    Inputs: 24 weight tensors (stream, coefficients 8 m.., high and low half), 4 streams, without own pre the collapsed vector.
    Row g of a product is coefficient 8 m + g by its high half and row g + 8 by its low half, column n is token n; both are added.
    Sums of products of streams are products of all tokens with all, of which a thread whose columns have its own token keeps one.
    """
    outputs = 16 if own_pre else 8
    weight = outputs
    stream = weight + 24 * 4
    lines = [
        ".reg .f32 p<12>, g<20>; .reg .pred odd; .reg .b32 lane;",
        "mov.u32 lane, %laneid; and.b32 lane, lane, 4; setp.ne.u32 odd, lane, 0;",
    ]
    started: set[str] = set()

    def multiply(to: list[str], a: list[str], b: list[str]) -> None:
        old = ["0f00000000"] * 4 if to[0] not in started else to
        started.add(to[0])
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{', '.join(to)}}}, {{{', '.join(a)}}}, {{{', '.join(b)}}}, "
            f"{{{', '.join(old)}}};"
        )

    def register(first: int, index: int, pair: int) -> str:
        return f"${first + 4 * index + pair}"

    if own_pre:
        squares = [(0, 1, 0), (2, 3, 0), (1, 2, 1), (2, 3, 2), (3, 1, 3)]
        to = [0, 1, 2, 3, 4]
    else:
        squares = [(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 4, 4)]
        to = [0, 0, 0, 0, 1]
    for k in range(4):
        for s in (0, 2):
            b = [register(stream, k, s), register(stream, k, s + 1)]
            for m in range(3):
                high, low = 6 * k + 2 * m, 6 * k + 2 * m + 1
                a = [register(weight, w, s + i) for i in (0, 1) for w in (high, low)]
                multiply([f"p{4 * m + i}" for i in range(4)], a, b)
    for target, (first, second, right) in zip(to, squares, strict=True):
        for s in (0, 2):
            a = [register(stream, n, s + i) for i in (0, 1) for n in (first, second)]
            b = [register(stream, right, s), register(stream, right, s + 1)]
            multiply([f"g{4 * target + i}" for i in range(4)], a, b)
    for m in range(3):
        for j in range(2):
            lines.append(f"add.f32 ${4 * j + m}, p{4 * m + j}, p{4 * m + 2 + j};")
    # 00, 11, 22, 33, 01, 02, 03, 12 and, behind the coefficients, 13, 23; or sum n^2, sum y^2
    kept = (
        [(8, 0), (9, 8), (10, 12), (11, 16), (12, 2), (13, 4), (14, 6), (15, 10), (3, 18), (7, 14)]
        if own_pre
        else [(3, 0), (7, 4)]
    )
    for output, g in kept:
        lines.append(f"selp.f32 ${output}, g{g + 1}, g{g}, odd;")
    return "{ " + " ".join(lines) + " }"


OWN_PRODUCTS = gl.constexpr(_products(True))
OWN_OPERANDS = gl.constexpr(",".join(["=&f"] * 16 + ["r"] * 28 * 4))
GIVEN_PRODUCTS = gl.constexpr(_products(False))
GIVEN_OPERANDS = gl.constexpr(",".join(["=&f"] * 8 + ["r"] * 29 * 4))


@gluon.jit
def _multiply(weights, n, y, OWN_PRE: gl.constexpr):
    """Sums over a warp's columns; see `_products`."""
    if OWN_PRE:
        return gl.inline_asm_elementwise(
            OWN_PRODUCTS, OWN_OPERANDS, weights + n, dtype=(gl.float32, gl.float32), is_pure=True, pack=8
        )
    else:
        return (
            gl.inline_asm_elementwise(GIVEN_PRODUCTS, GIVEN_OPERANDS, weights + n + (y,), dtype=gl.float32, is_pure=True, pack=8),
        )


@gluon.jit
def _hand_over(sums, offset, kind, base, tag):
    """Sums of a thread with their tag: kind 0 three of one entry and, where the last offset is not negative, one more; kind 1 two pairs."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred single, pairs, more;
        .reg .b64 lo, hi, to;
        .reg .b128 word;
        setp.eq.s32 single, $12, 0;
        setp.ge.s32 pairs, $8, 0;
        @single setp.lt.s32 pairs, $8, $8;
        setp.ge.s32 more, $11, 0;
        @!single setp.lt.s32 more, $11, $11;
        cvt.s64.s32 to, $8;
        add.s64 to, to, $16;
        mov.b64 lo, {$4, $5};
        mov.b64 hi, {$6, $20};
        mov.b128 word, {lo, hi};
        @single st.relaxed.gpu.global.b128 [to], word;
        mov.b64 lo, {$4, $20};
        mov.b64 hi, {$5, $20};
        mov.b128 word, {lo, hi};
        @pairs st.relaxed.gpu.global.b128 [to], word;
        mov.b64 lo, {$6, $20};
        mov.b64 hi, {$7, $20};
        mov.b128 word, {lo, hi};
        @pairs st.relaxed.gpu.global.b128 [to + 128], word;
        cvt.s64.s32 to, $11;
        add.s64 to, to, $16;
        @more st.relaxed.gpu.global.b64 [to], hi;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        mov.b32 $2, 0;
        mov.b32 $3, 0;
        }""",
        "=r,=r,=r,=r,f,f,f,f,r,r,r,r,r,r,r,r,l,l,l,l,r,r,r,r",
        [sums, offset, kind, base.to(gl.int64), tag],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def _load_word(at):
    return gl.inline_asm_elementwise(
        """{
        .reg .b64 lo, hi;
        .reg .b128 word;
        ld.relaxed.gpu.global.b128 word, [$4];
        mov.b128 {lo, hi}, word;
        mov.b64 {$0, $1}, lo;
        mov.b64 {$2, $3}, hi;
        }""",
        "=r,=r,=r,=r,l",
        [at],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _or(a, b):
    return a | b


@gluon.jit
def _await_tag(at, tag):
    gl.inline_asm_elementwise(
        """{
        .reg .pred here;
        .reg .b32 now;
        AGAIN:
        ld.relaxed.gpu.global.b32 now, [$1 + 4];
        setp.ne.s32 here, now, $2;
        @here bra AGAIN;
        mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [at, tag],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _publish(at, pre, factor, tag):
    """pre and 1 / rms of a token."""
    gl.inline_asm_elementwise(
        """{
        .reg .b64 lo, hi;
        .reg .b128 word;
        mov.b64 lo, {$2, $3};
        mov.b64 hi, {$4, $7};
        mov.b128 word, {lo, hi};
        st.relaxed.gpu.global.b128 [$1], word;
        mov.b64 lo, {$5, $6};
        mov.b128 word, {lo, hi};
        st.relaxed.gpu.global.b128 [$1 + 16], word;
        mov.b32 $0, 0;
        }""",
        "=r,l,f,f,f,f,f,r",
        [at.to(gl.int64), pre[0], pre[1], pre[2], pre[3], factor, tag],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _load_gates(at):
    return gl.inline_asm_elementwise(
        """{
        .reg .b128 word;
        ld.relaxed.gpu.global.b128 word, [$4];
        mov.b128 {$0, $1}, word;
        ld.relaxed.gpu.global.b128 word, [$4 + 16];
        mov.b128 {$2, $3}, word;
        }""",
        "=&l,=&l,=&l,=&l,l",
        [at],
        dtype=(gl.int64, gl.int64, gl.int64, gl.int64),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _await_gates(words, at, tag):
    """What `_publish` stored, loaded again until it has come."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred here;
        .reg .b32 tag;
        .reg .b64 w<4>;
        .reg .b128 word;
        mov.b64 w0, $5;
        mov.b64 w1, $6;
        mov.b64 w2, $7;
        mov.b64 w3, $8;
        AGAIN:
        mov.b64 {$2, tag}, w3;
        setp.eq.s32 here, tag, $10;
        mov.b64 {$2, tag}, w1;
        setp.eq.and.s32 here, tag, $10, here;
        @here bra DONE;
        ld.relaxed.gpu.global.b128 word, [$9];
        mov.b128 {w0, w1}, word;
        ld.relaxed.gpu.global.b128 word, [$9 + 16];
        mov.b128 {w2, w3}, word;
        bra AGAIN;
        DONE:
        mov.b64 {$0, $1}, w0;
        mov.b64 {$3, $4}, w2;
        }""",
        "=&f,=&f,=&f,=&f,=&f,l,l,l,l,l,r",
        [words[0], words[1], words[2], words[3], at.to(gl.int64), tag],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=False,
        pack=1,
    )


@gluon.jit(do_not_specialize=["tokens"])
def hyper_connection_tiles(
    source, out, post, comb, pre, fn, base, scale, norm_weight, streams, x, pre_out, post_out, comb_out, handed, gates, epochs,
    tokens, rms_eps, eps,
    D: gl.constexpr, OWN_PRE: gl.constexpr, ITERATIONS: gl.constexpr, GROUPS: gl.constexpr, FINISHERS: gl.constexpr,
    LAG: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Grid: GROUPS x (D / SLICE slices and FINISHERS)."""
    SLICES: gl.constexpr = D // SLICE
    group, program = gl.program_id(0) // (SLICES + FINISHERS), gl.program_id(0) % (SLICES + FINISHERS)
    tiles = (tokens + (TILE - 1)) // TILE
    count = (tiles - group + (GROUPS - 1)) // GROUPS
    handed += group * (RING * SLICES * ENTRIES * 2)
    gates += group * (RING * TILE * 4)
    if program < SLICES:
        _slice(
            source, out, post, comb, pre, fn, norm_weight, streams, x, handed, gates, epochs + group,
            tokens, group, count, program, D, OWN_PRE, GROUPS, SLICES, LAG, AHEAD,
        )  # fmt: skip
    else:
        _finish(
            base, scale, pre_out, post_out, comb_out, handed, gates, epochs + group,
            tokens, group, count, program - SLICES, rms_eps, eps, D, OWN_PRE, ITERATIONS, GROUPS, SLICES, FINISHERS,
        )  # fmt: skip


@gluon.jit
def _bring(
    i, count, source, out, post, comb, pre, planes, combs, posts, pres, start, tokens, column, D: gl.constexpr, OWN_PRE: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """Copies of tile i, whose first token is `start`, to its slot."""
    if i < count:
        slot = i % AHEAD
        left = tokens - start
        row = gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(1, BLOCKED)), 1)
        columns = gl.expand_dims(gl.arange(0, SLICE, layout=gl.SliceLayout(0, BLOCKED)), 0)
        at = source + (start.to(gl.int64) * (4 * D) + column) + (row * (4 * D) + columns)
        for k in gl.static_range(4):
            async_copy.async_copy_global_to_shared(planes[k].index(slot), at + k * D, mask=row < left)
        at = out + (start.to(gl.int64) * D + column) + (row * D + columns)
        async_copy.async_copy_global_to_shared(planes[4].index(slot), at, mask=row < left)
        row = gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(1, COPY_COMB)), 1)
        at = comb + start * 16 + (row * 16 + gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, COPY_COMB)), 0))
        async_copy.async_copy_global_to_shared(combs.index(slot), at, mask=row < left)
        row = gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(1, COPY_POST)), 1)
        part = row * 4 + gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, COPY_POST)), 0)
        async_copy.async_copy_global_to_shared(posts.index(slot), post + start * 4 + part, mask=row < left)
        if not OWN_PRE:
            async_copy.async_copy_global_to_shared(pres.index(slot), pre + start * 4 + part, mask=row < left)
    async_copy.commit_group()


@gluon.jit
def _load4(planes, slot):
    """One tile of four streams."""
    values = ()
    for k in gl.static_range(4):
        values = values + (planes[k].index(slot).load(BLOCKED),)
    return values


@gluon.jit
def _columns(shared, COUNT: gl.constexpr):
    """[8, COUNT] in shared memory -> COUNT x [8, 1]"""
    values = ()
    for j in gl.static_range(COUNT):
        values = values + (gl.convert_layout(shared.slice(j, 1, dim=1).load(COLUMN), BLOCKED, assert_trivial=True),)
    return values


@gluon.jit
def _slice(
    source, out, post, comb, pre, fn, norm_weight, streams, x, handed, gates, epoch, tokens, group, count, split,
    D: gl.constexpr, OWN_PRE: gl.constexpr, GROUPS: gl.constexpr, SLICES: gl.constexpr, LAG: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """128 columns of all tiles of a group."""
    planes = ()  # streams and what is added to them; apart, as the compiler separates all uses of one buffer by barriers
    for _ in gl.static_range(5):
        planes = planes + (gl.allocate_shared_memory(gl.bfloat16, [AHEAD, TILE, SLICE], TILE_SHARED),)
    held = ()  # new streams, or the collapsed vector, until the norm is known
    for _ in gl.static_range(4 if OWN_PRE else 1):
        held = held + (gl.allocate_shared_memory(gl.bfloat16, [LAG + 1, TILE, SLICE], TILE_SHARED),)
    combs = gl.allocate_shared_memory(gl.float32, [AHEAD, TILE, 16], PLAIN_2)
    posts = gl.allocate_shared_memory(gl.float32, [AHEAD, TILE, 4], PLAIN_2)
    pres = gl.allocate_shared_memory(gl.float32, [AHEAD, TILE, 4], PLAIN_2)
    parts = gl.allocate_shared_memory(gl.float32, [2 * TILE, SLICE], PARTS_SHARED)

    column = split * SLICE
    local = gl.arange(0, TILE, layout=gl.SliceLayout(1, BLOCKED))
    columns = gl.arange(0, SLICE, layout=gl.SliceLayout(0, BLOCKED))
    stream_at = gl.expand_dims(local * (4 * D), 1) + gl.expand_dims(columns, 0)
    x_at = gl.expand_dims(local * D, 1) + gl.expand_dims(columns, 0)
    # Behind copies they would wait for all of these: a multiprocessor's loads return in turn.
    weights = ()
    for k in gl.static_range(4):
        for m in gl.static_range(3):
            for half in gl.static_range(2):
                weights = weights + (gl.load(fn + ((24 * half + 8 * m) * (4 * D) + k * D) + column + stream_at),)
    norm = gl.expand_dims(gl.load(norm_weight + column + columns), 0)

    # Where a thread's sums go: of rows 0 to 7 three coefficients of one token, and where the columns have the row's own token
    # one product of streams; of rows 8 to 15 four of these. Entries: 64 of coefficients g, 8 + g, 16 + g, 32 of two products, 8 of the others.
    row = gl.expand_dims(gl.arange(0, 2 * TILE, layout=gl.SliceLayout(1, PARTS)), 1)
    lane = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, PARTS)), 0)
    q, odd = lane // 8, lane // 4 % 2
    token = row % TILE
    own = q == token // 2
    kind = (row + lane * 0) // TILE
    coefficients = (token * TILE + q * 2 + odd) * 16
    pairs = (64 + odd * (2 * TILE) + token) * 16
    single = (96 + token) * 16 + odd * 8
    offset = gl.where(kind == 1, gl.where(own, pairs, -1), gl.where(lane % 4 < 3, coefficients, gl.where(own, single, -1)))
    if not OWN_PRE:
        offset = gl.where(kind == 1, -1, offset)

    gdc_launch_dependents()
    gdc_wait()
    first_tag = gl.load(epoch)
    for i in gl.static_range(AHEAD):
        _bring(
            i, count, source, out, post, comb, pre, planes, combs, posts, pres, (group + i * GROUPS) * TILE, tokens, column, D, OWN_PRE,
            AHEAD,
        )  # fmt: skip
    for i in range(count + LAG):
        done = i - LAG
        gates_at = gates + (done % RING + RING) % RING * (TILE * 4) + local * 4
        words = _load_gates(gates_at)
        async_copy.wait_group(AHEAD - 1)
        gl.thread_barrier()
        if i < count:
            slot = i % AHEAD
            start = (group + i * GROUPS) * TILE
            mask = gl.expand_dims(local < tokens - start, 1)
            old_comb = _columns(combs.index(i % AHEAD), 16)
            old_post = _columns(posts.index(i % AHEAD), 4)
            n = _expand(_load4(planes, slot), planes[4].index(slot).load(BLOCKED), old_post, old_comb, False)
            _store_each(streams + (start.to(gl.int64) * (4 * D) + column) + stream_at, n, D, mask)
            y = n[0]
            if OWN_PRE:
                for k in gl.static_range(4):
                    held[k].index(i % (LAG + 1)).store(n[k])
            else:
                y = _collapse(n, _columns(pres.index(i % AHEAD), 4))
                held[0].index(i % (LAG + 1)).store(y)
            sums = _multiply(weights, n, y, OWN_PRE)
            if OWN_PRE:
                both = gl.reshape(gl.permute(gl.join(sums[0], sums[1]), (2, 0, 1)), (2 * TILE, SLICE))
                parts.store(both)
            else:
                parts.slice(0, TILE, dim=0).store(sums[0])
            total = parts.slice(0, 32, dim=1).load(PARTS)
            for w in gl.static_range(1, 4):
                total += parts.slice(32 * w, 32, dim=1).load(PARTS)
            _hand_over(total, offset, kind, handed + (i % RING * SLICES + split) * (ENTRIES * 2), first_tag + i)
        _bring(
            i + AHEAD, count, source, out, post, comb, pre, planes, combs, posts, pres, (group + (i + AHEAD) * GROUPS) * TILE,
            tokens, column, D, OWN_PRE, AHEAD,
        )  # fmt: skip
        if done >= 0:
            slot = done % (LAG + 1)
            start = (group + done * GROUPS) * TILE
            mask = gl.expand_dims(local < tokens - start, 1)
            own_pre = _await_gates(words, gates_at, first_tag + done)
            if OWN_PRE:
                gates_of = ()
                for k in gl.static_range(4):
                    gates_of = gates_of + (gl.expand_dims(own_pre[k], 1),)
                y = _collapse(_load4(held, slot), gates_of)
            else:
                y = held[0].index(slot).load(BLOCKED)
            normed = _float(y) * gl.expand_dims(own_pre[4], 1) * norm
            gl.store(x + (start.to(gl.int64) * D + column) + x_at, normed.to(gl.bfloat16), mask=mask)
    async_copy.wait_group(0)
    if split == 0:
        gl.store(epoch, first_tag + count)


@gluon.jit
def _finish(
    base, scale, pre_out, post_out, comb_out, handed, gates, epoch, tokens, group, count, finisher, rms_eps, eps,
    D: gl.constexpr, OWN_PRE: gl.constexpr, ITERATIONS: gl.constexpr, GROUPS: gl.constexpr, SLICES: gl.constexpr,
    FINISHERS: gl.constexpr,
):  # fmt: skip
    """pre, post and comb of every FINISHERS-th tile of a group (V4 spec 2.2, steps 2 to 7), and what its slices need of them."""
    sums = gl.allocate_shared_memory(gl.float32, [2 * 3, 128], PLAIN_1)
    thread = gl.arange(0, 128, layout=THREADS)
    if OWN_PRE:
        entry = gl.minimum(thread, ENTRIES - 1)
    else:  # whose entries 64 to 95 nobody writes
        entry = gl.where(thread < 64, thread, 96 + thread % 8)
    is_pair = gl.where(entry >= 64, -1, 0)
    local = gl.arange(0, TILE, layout=THREADS)
    all_base, all_scale = (), ()
    for k in gl.static_range(24):
        all_base, all_scale = all_base + (gl.load(base + k),), all_scale + (gl.load(scale + k),)
    gdc_launch_dependents()
    gdc_wait()
    if finisher < count:
        first_tag = gl.load(epoch)
        for i in range(finisher, count, FINISHERS):
            tag = first_tag + i
            at = handed + i % RING * (SLICES * ENTRIES * 2)
            # Each slice's last word tells when to look; almost always the others are there then, too.
            _await_tag(at + gl.minimum(thread, SLICES - 1) * (ENTRIES * 2) + (ENTRIES * 2 - 1), tag)
            gl.thread_barrier()
            a, b, c = _add_words(at + entry * 2, is_pair, tag, SLICES)
            buffer = i // FINISHERS % 2 * 3
            sums.index(buffer).store(a)
            sums.index(buffer + 1).store(b)
            sums.index(buffer + 2).store(c)
            gates_at = gates + i % RING * (TILE * 4) + local * 4
            if OWN_PRE:
                v = ()
                for k in gl.static_range(4):
                    v = v + (_sum_of(sums, buffer, 2, 4 + k),)
                for k in gl.static_range(8):
                    v = v + (_sum_of(sums, buffer, k % 2 * 2, 8 + k // 2),)
                v = v + (_sum_of(sums, buffer, 0, 12), _sum_of(sums, buffer, 2, 12))
                own, factor = _own_pre(
                    v,
                    (all_base[20], all_base[21], all_base[22], all_base[23]),
                    (all_scale[20], all_scale[21], all_scale[22], all_scale[23]),
                    rms_eps,
                    eps,
                    D,
                )
                _publish(gates_at, own, factor, tag)
            else:
                factor = gl.rsqrt(_sum_of(sums, buffer, 2, 12) / D + rms_eps)
                _publish(gates_at, (factor, factor, factor, factor), factor, tag)
            _store_coefficients(
                sums, buffer, all_base, all_scale, pre_out, post_out, comb_out, (group + i * GROUPS) * TILE, tokens, rms_eps, eps,
                D, OWN_PRE, ITERATIONS,
            )  # fmt: skip


@gluon.jit
def _add_words(at, is_pair, tag, SLICES: gl.constexpr):
    """Sums over all slices of the three numbers of an entry, or of a pair's as the first and the third; all again if one was missing."""
    IN_FLIGHT: gl.constexpr = min(20, SLICES)
    a = gl.zeros([128], gl.float32, THREADS)
    b, c, missing = a, a, 1
    while missing != 0:
        a = gl.zeros([128], gl.float32, THREADS)
        b, c = a, a
        wrong = gl.zeros([128], gl.int32, THREADS)
        words = ()
        for s in gl.static_range(IN_FLIGHT):
            words = words + (_load_word(at + s * (ENTRIES * 2)),)
        for s in gl.static_range(SLICES):
            a += words[s][0].to(gl.float32, bitcast=True)
            b += words[s][1].to(gl.float32, bitcast=True)
            c += words[s][2].to(gl.float32, bitcast=True)
            wrong |= (words[s][3] ^ tag) | ((words[s][1] ^ tag) & is_pair)
            if s + IN_FLIGHT < SLICES:
                words = words + (_load_word(at + (s + IN_FLIGHT) * (ENTRIES * 2)),)
        missing = gl.reduce(wrong, 0, _or)
    return a, b, c


@gluon.jit
def _sum_of(sums, buffer, WORD: gl.constexpr, ROW: gl.constexpr):
    """One sum of each token: number WORD of entries 8 ROW.. ."""
    return sums.index(buffer + WORD).slice(TILE * ROW, TILE, dim=0).load(THREADS)


@gluon.jit
def _store_coefficients(
    sums, buffer, all_base, all_scale, pre_out, post_out, comb_out, start, tokens, rms_eps, eps,
    D: gl.constexpr, OWN_PRE: gl.constexpr, ITERATIONS: gl.constexpr,
):  # fmt: skip
    row = start + gl.arange(0, TILE, layout=THREADS)
    valid = row < tokens
    if OWN_PRE:
        squares = (_sum_of(sums, buffer, 0, 8) + _sum_of(sums, buffer, 2, 8)) + (
            _sum_of(sums, buffer, 0, 9) + _sum_of(sums, buffer, 2, 9)
        )
    else:
        squares = _sum_of(sums, buffer, 0, 12)
    rstd = gl.rsqrt(squares / (4 * D) + rms_eps)
    raw = ()
    for i in gl.static_range(24):
        raw = raw + (_sum_of(sums, buffer, i // 8, i % 8) * rstd * all_scale[i] + all_base[i],)
    for k in gl.static_range(4):
        gl.store(pre_out + row * 4 + k, _sigmoid(raw[20 + k]) + eps, mask=valid)
        gl.store(post_out + row * 4 + k, _sigmoid(raw[16 + k]) * 2.0, mask=valid)
    _store_each(comb_out + row * 16, _sinkhorn(raw, eps, ITERATIONS), 1, valid)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """A group is `hidden / SLICE` slices and some finishers; groups take tiles in turn."""

    groups: int
    finishers: int
    lag: int  # tiles between a slice's first and last touch of a tile
    ahead: int  # tiles on their way to shared memory


def launch_config(tokens: int, hidden: int, num_sms: int, own_pre: bool) -> TileConfig | LaunchConfig:
    """Tiles beyond 64 tokens where most multiprocessors get slices; otherwise what `triton.py` launches."""
    slices = hidden // SLICE.value
    groups = RESIDENT * num_sms // (slices + LEAST_FINISHERS)
    if tokens <= 64 or hidden % SLICE.value or 4 * groups * slices < 3 * RESIDENT * num_sms:
        return portable.launch_config(tokens, hidden, num_sms, own_pre)
    return TileConfig(groups, min(8, RESIDENT * num_sms // groups - slices), LAG, AHEAD)


@dataclass(frozen=True, slots=True)
class HandoverState:
    """Memory through which the programs of a launch hand over. One per stream of launches, allocated before capture.

    Launches that share it must run one after the other, all with one hidden size. Nothing has to be reset between them.
    """

    few: portable.HandoverState
    handed: Tensor  # int64 [words]: of each group RING tiles of [slices, ENTRIES] words of 16 bytes
    gates: Tensor  # int64 [groups, RING, TILE, 4]
    epochs: Tensor  # int32 [groups]: the tag of the next launch's first tile

    @classmethod
    def allocate(
        cls,
        max_tokens: int,
        hidden: int,
        device: torch.device | str,
        num_sms: int | None = None,
        *,
        batch_invariant: bool = False,
    ) -> HandoverState:
        """For launches of up to `max_tokens` tokens."""
        num_sms = num_sms or sm_count(torch.device(device))
        few = portable.HandoverState.allocate(max_tokens, hidden, device, num_sms, batch_invariant=batch_invariant)
        groups = RESIDENT * num_sms // max(1, hidden // SLICE.value)
        return cls(
            few,
            torch.zeros(_handed_words(groups, hidden), dtype=torch.int64, device=device),
            torch.zeros(groups, RING.value, TILE.value, 4, dtype=torch.int64, device=device),
            torch.ones(groups, dtype=torch.int32, device=device),
        )


def _handed_words(groups: int, hidden: int) -> int:
    return groups * RING.value * (hidden // SLICE.value) * ENTRIES.value * 2


def site(
    source: Tensor,
    norm_weight: Tensor,
    weights: KernelWeights | None,
    state: HandoverState,
    *,
    out: Tensor | None = None,
    post: Tensor | None = None,
    comb: Tensor | None = None,
    pre: Tensor | None = None,
    with_mean: bool = False,
    rms_eps: float,
    eps: float,
    iterations: int,
    batch_invariant: bool = False,
    config: TileConfig | LaunchConfig | None = None,
) -> Site:
    """`abyssal.ops.hyper_connection.site` for bf16 streams, as `triton.site`: tiles where many tokens are expanded and get 24 coefficients."""
    tokens, hidden = source.shape[0], source.shape[-1]
    tiled = out is not None and weights is not None and weights.fn.shape[1] == 24 and not with_mean and not batch_invariant
    if config is None and tiled:
        config = launch_config(tokens, hidden, sm_count(source.device), pre is None)
    if not isinstance(config, TileConfig) or tokens == 0:
        few = config if isinstance(config, LaunchConfig) else None
        return portable.site(
            source, norm_weight, weights, state.few, out=out, post=post, comb=comb, pre=pre, with_mean=with_mean, rms_eps=rms_eps,
            eps=eps, iterations=iterations, batch_invariant=batch_invariant, config=few,
        )  # fmt: skip
    if not tiled:
        raise ValueError(
            "tiles are for expanded sites with 24 coefficients, without the mean and not batch-invariant: pass no config"
        )
    check(source, norm_weight, weights, out, post, comb, pre)
    assert out is not None and post is not None and comb is not None and weights is not None
    words = _handed_words(config.groups, hidden)
    if state.handed.numel() < words or state.epochs.numel() < config.groups:
        raise ValueError(
            f"the hand-over state holds {state.handed.numel()} words, {config} of hidden size {hidden} needs {words}"
        )
    streams, x = torch.empty_like(source), torch.empty_like(out)
    new_pre, new_post, new_comb = torch.empty_like(post), torch.empty_like(post), torch.empty_like(comb)
    hyper_connection_tiles[(config.groups * (hidden // SLICE.value + config.finishers),)](
        source, out, post, comb, pre, weights.fn, weights.base, weights.scale, norm_weight, streams, x, new_pre, new_post, new_comb,
        state.handed, state.gates, state.epochs, tokens, rms_eps, eps,
        ITERATIONS=iterations, **_constants(config, hidden, pre is None), num_warps=WARPS.value, launch_pdl=True,
    )  # fmt: skip
    return Site(streams, x, new_pre, new_post, new_comb, None)


def _constants(config: TileConfig, hidden: int, own_pre: bool) -> dict[str, Any]:
    return {
        "D": hidden,
        "OWN_PRE": own_pre,
        "GROUPS": config.groups,
        "FINISHERS": config.finishers,
        "LAG": config.lag,
        "AHEAD": config.ahead,
    }


def aot_cases() -> list[AotCase]:
    """Both orders at the released hidden sizes."""
    types = {name: "*fp32" for name in ("post", "comb", "pre", "base", "scale", "norm_weight", "pre_out", "post_out", "comb_out")}
    types |= {name: "*bf16" for name in ("source", "out", "fn", "streams", "x")}
    types |= {"handed": "*i64", "gates": "*i64", "epochs": "*i32", "tokens": "i32", "rms_eps": "fp32", "eps": "fp32"}
    cases = []
    for own, hidden in ((True, 4096), (True, 5120), (True, 7168), (False, 5120)):
        config = launch_config(1 << 20, hidden, 132, own)
        assert isinstance(config, TileConfig)
        absent = {"pre"} if own else set()
        cases.append(
            AotCase(
                f"tiles {'own' if own else 'given'} pre D{hidden}",
                hyper_connection_tiles,
                {name: kind for name, kind in types.items() if name not in absent},
                _constants(config, hidden, own) | {"ITERATIONS": 20} | dict.fromkeys(absent),
                num_warps=WARPS.value,
                aligned=tuple(name for name, kind in types.items() if kind.startswith("*") and name not in absent),
                archs=(HOPPER,),
            )
        )
    return cases
