# mypy: allow-untyped-defs, no-check-untyped-defs
"""A mixing site of a few hundred tokens in one wave, on Hopper: all that a program reads is on its way at once and stays in shared memory.

A program has TOKENS tokens and some columns of all four streams, one program on each multiprocessor; the programs of the same tokens
form a group. Streams are expanded in place as they arrive, and a warp keeps its sums in registers until the last column. They are
handed over once, as words of 16 bytes with a tag that differs from launch to launch, and every program of a group adds up what it
needs of them for its own tokens: the factors of the collapse and of the norm, as `triton.py` beside this tells. Behind the groups a
few more programs compute the coefficients. A group waits for itself only, and its programs follow each other in the grid: a launch
makes progress as soon as one group runs side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from abyssal.ops.hyper_connection import Site
from abyssal.ops.hyper_connection.triton import (
    KernelWeights,
    _collapse,
    _expand,
    _float,
    _own_pre,
    _sigmoid,
    _sinkhorn,
    _store_each,
)

COLUMNS = gl.constexpr(64)  # of a step
WORDS = gl.constexpr(16)  # of 16 bytes for each token: 8 of coefficients, 4 or 1 of products of streams, the others unused
RING = gl.constexpr(2)  # steps on their way to shared memory


@gluon.constexpr_function
def _token_bases(tokens: int, first: int) -> list[list[int]]:
    return [[first << i, 0] for i in range((tokens // first).bit_length() - 1)]


@gluon.constexpr_function
def _tile(tokens):
    """A warp has 16 tokens x 32 columns, a thread 8 columns of tokens g and g + 8: operands of two products of depth 16."""
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]], lanes, [[0, 32], *_token_bases(tokens, 16)], [], [tokens, 64]
    )


@gluon.constexpr_function
def _tile_3d(tokens):
    """`_tile` as [tokens / 16, 16, 64]."""
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[0, 0, 32]] + [[1 << i, 0, 0] for i in range((tokens // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 8, 0]], lanes, warps, [], [tokens // 16, 16, 64])


@gluon.constexpr_function
def _weights_of_tile(tokens):
    """[1, 16, 64], for all tokens the same."""
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[0, 0, 32]] + [[0, 0, 0] for i in range((tokens // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 8, 0]], lanes, warps, [], [1, 16, 64])


@gluon.constexpr_function
def _column_of_tile(tokens):
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[0, 0], *_token_bases(tokens, 16)], [], [tokens, 1])


@gluon.constexpr_function
def _eight_sums(tokens):
    """Eight sums of one token in each thread, of one half of a step's columns."""
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4]], lanes, _token_bases(tokens, 8), [], [tokens, 32])


@gluon.constexpr_function
def _words(tokens, count):
    """4 or 8 words of a token in four threads."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 4]] if count == 8 else [], lanes, _token_bases(tokens, 8), [], [tokens, count])


@gluon.constexpr_function
def _words_of_two(tokens, count):
    """`_words` of two groups."""
    registers = [[0, 4], [tokens, 0]] if count == 8 else [[tokens, 0]]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _token_bases(tokens, 8), [], [2 * tokens, count])


@gluon.constexpr_function
def _rows(tokens, lanes, elements):
    """Rows of `lanes` x `elements` values, a warp's side by side."""
    return gl.BlockedLayout([1, elements], [32 // lanes, lanes], [tokens // 8, 1], [1, 0])


TILE_SHARED = gl.constexpr(gl.SwizzledSharedLayout(32, 1, 2, [1, 0]))
PARTS_SHARED = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
WEIGHTS_SHARED = gl.constexpr(gl.SwizzledSharedLayout(32, 1, 2, [2, 1, 0]))
PLAIN_2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


def _mma(to: list[str], a: list[str], b: list[str], old: list[str]) -> str:
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{', '.join(to)}}}, {{{', '.join(a)}}}, {{{', '.join(b)}}}, "
        f"{{{', '.join(old)}}};"
    )


def _products() -> str:
    """Sums of one stream times 24 weights over the 32 columns of a warp, added to those before.

    Inputs: 16 sums, of each token those of coefficients 8 m + 2 c and 8 m + 2 c + 1 for m = 0 to 2 and two others; three weight
    tensors (coefficients 8 m.., in rows g the high and in rows g + 8 the low halves); the stream.
    """
    lines = []
    for s in (0, 2):
        a = [f"${56 + 2 * s + i}" for i in range(4)]
        for half in (0, 4):
            for m in range(3):
                b = [f"${32 + 8 * m + half + s + i}" for i in (0, 1)]
                to = [f"${i + 2 * m + e}" for i in (0, 8) for e in (0, 1)]
                old = [f"${16 + i + 2 * m + e}" for i in (0, 8) for e in (0, 1)] if s == half == 0 else to
                lines.append(_mma(to, a, b, old))
    lines += [f"mov.b32 ${i}, ${16 + i};" for i in (6, 7, 14, 15)]
    return "{ " + " ".join(lines) + " }"


def _squares(own_pre: bool) -> str:
    """Sums over the 32 columns of a warp of products of a token's streams, added to those before: ten, or sum n^2 and sum y^2.

    Products are of all tokens with all, of which a thread whose columns have its own token keeps one.
    """
    tensors, streams = (2, 4) if own_pre else (1, 5)
    first_sum, quad = 16 * tensors, 32 * tensors
    stream = quad + 8 * streams
    if own_pre:  # 13, 23 beside the coefficients; 00, 11, 22, 33, 01, 02, 03, 12
        pairs = {6: [(1, 3)], 7: [(2, 3)], 16: [(0, 0)], 17: [(1, 1)], 18: [(2, 2)], 19: [(3, 3)]}
        pairs |= {20: [(0, 1)], 21: [(0, 2)], 22: [(0, 3)], 23: [(1, 2)]}
    else:
        pairs = {6: [(0, 0), (1, 1), (2, 2), (3, 3)], 7: [(4, 4)]}
    lines = [
        ".reg .f32 g<4>, kept; .reg .pred odd; .reg .b32 lane;",
        "mov.u32 lane, %laneid; and.b32 lane, lane, 4; setp.ne.u32 odd, lane, 0;",
    ]
    to = [f"g{i}" for i in range(4)]
    for output, products in pairs.items():
        for rows in (0, 1):
            old = ["0f00000000"] * 4
            for left, right in products:
                for s in (0, 2):
                    a = [f"${quad + 8 * left + 2 * s + i}" for i in range(4)]
                    b = [f"${stream + 8 * right + 4 * rows + s + i}" for i in (0, 1)]
                    lines.append(_mma(to, a, b, old))
                    old = to
            at = output + 8 * rows
            lines += [f"selp.f32 kept, g{2 * rows + 1}, g{2 * rows}, odd;", f"add.f32 ${at}, ${first_sum + at}, kept;"]
    changed = {output + 8 * rows for output in pairs for rows in (0, 1)}
    lines += [f"mov.b32 ${i}, ${first_sum + i};" for i in range(first_sum) if i not in changed]
    return "{ " + " ".join(lines) + " }"


PRODUCTS = gl.constexpr(_products())
PRODUCTS_OPERANDS = gl.constexpr(",".join(["=&f"] * 16 + ["f"] * 16 + ["r"] * 32))
OWN_SQUARES = gl.constexpr(_squares(True))
OWN_OPERANDS = gl.constexpr(",".join(["=&f"] * 32 + ["f"] * 32 + ["r"] * 64))
GIVEN_SQUARES = gl.constexpr(_squares(False))
GIVEN_OPERANDS = gl.constexpr(",".join(["=&f"] * 16 + ["f"] * 16 + ["r"] * 80))
QUADS = gl.constexpr(" ".join(f"or.b32 ${o}, ${8 + i}, $16;" for o, i in enumerate((0, 4, 1, 5, 2, 6, 3, 7))))
QUADS_OPERANDS = gl.constexpr(",".join(["=r"] * 8 + ["r"] * 24))


@gluon.jit
def _quads(n, zero):
    """The stream in the order of registers that products of 16 tokens take.

    `zero` is one that the compiler does not know: it would not keep these copies, but make new ones for each product.
    """
    return gl.inline_asm_elementwise(QUADS, QUADS_OPERANDS, [n, zero], dtype=gl.bfloat16, is_pure=True, pack=16)


@gluon.jit
def _add_products(sums, weights, quads):
    return gl.inline_asm_elementwise(
        PRODUCTS, PRODUCTS_OPERANDS, (sums,) + weights + (quads,), dtype=gl.float32, is_pure=True, pack=16
    )


@gluon.jit
def _add_squares(sums, grams, quads, n, OWN_PRE: gl.constexpr):
    """`n` and `quads` are the streams and, with a given pre, the collapsed vector."""
    if OWN_PRE:
        return gl.inline_asm_elementwise(
            OWN_SQUARES, OWN_OPERANDS, (sums, grams) + quads + n, dtype=(gl.float32, gl.float32), is_pure=True, pack=16
        )
    else:
        return (
            gl.inline_asm_elementwise(
                GIVEN_SQUARES, GIVEN_OPERANDS, (sums,) + quads + n, dtype=gl.float32, is_pure=True, pack=16
            ),
            grams,
        )


def _hand_over_words(own_pre: bool) -> str:
    """Two words of coefficients of each thread, and of the thread whose columns have its own token those of products of streams."""
    at = 24 if own_pre else 16
    words = [("$8", "$10", "$12"), ("$9", "$11", "$13")]
    if own_pre:
        words += [("$16", "$17", "$18"), ("$19", "$20", "$21"), ("$22", "$23", "$14"), ("$15", "$15", "$15")]
    else:
        words += [("$14", "$15", "$15")]
    lines = [
        ".reg .pred own; .reg .b32 a, b; .reg .b64 lo, hi, to; .reg .b128 word;",
        "mov.u32 a, %laneid; shr.u32 b, a, 3; and.b32 a, a, 3; setp.eq.u32 own, a, b;",
        f"cvt.u64.u32 to, ${at}; add.s64 to, to, ${at + 8};",
    ]
    for index, (a, b, c) in enumerate(words):
        if index == 2:
            lines += [f"and.b32 a, ${at}, 0xffffff00; cvt.u64.u32 to, a; add.s64 to, to, ${at + 8};"]
        predicate, offset = ("", 16 * index) if index < 2 else ("@own ", 128 + 16 * (index - 2))
        lines += [
            f"mov.b64 lo, {{{a}, {b}}}; mov.b64 hi, {{{c}, ${at + 16}}}; mov.b128 word, {{lo, hi}};",
            f"{predicate}st.relaxed.gpu.global.b128 [to + {offset}], word;",
        ]
    lines += [f"mov.b32 ${i}, 0;" for i in range(8)]
    return "{ " + " ".join(lines) + " }"


OWN_WORDS = gl.constexpr(_hand_over_words(True))
OWN_WORDS_OPERANDS = gl.constexpr(",".join(["=&r"] * 8 + ["f"] * 16 + ["r"] * 8 + ["l"] * 8 + ["r"] * 8))
GIVEN_WORDS = gl.constexpr(_hand_over_words(False))
GIVEN_WORDS_OPERANDS = gl.constexpr(",".join(["=&r"] * 8 + ["f"] * 8 + ["r"] * 8 + ["l"] * 8 + ["r"] * 8))


@gluon.jit
def _hand_over(sums, grams, offset, base, tag, OWN_PRE: gl.constexpr):
    if OWN_PRE:
        gl.inline_asm_elementwise(
            OWN_WORDS, OWN_WORDS_OPERANDS, [sums, grams, offset, base.to(gl.int64), tag], dtype=gl.int32, is_pure=False, pack=8
        )
    else:
        gl.inline_asm_elementwise(
            GIVEN_WORDS, GIVEN_WORDS_OPERANDS, [sums, offset, base.to(gl.int64), tag], dtype=gl.int32, is_pure=False, pack=8
        )


@gluon.jit
def _store_word(at, a, b, c, tag):
    gl.inline_asm_elementwise(
        """{
        .reg .b64 lo, hi;
        .reg .b128 word;
        mov.b64 lo, {$2, $3};
        mov.b64 hi, {$4, $5};
        mov.b128 word, {lo, hi};
        st.relaxed.gpu.global.b128 [$1], word;
        mov.b32 $0, 0;
        }""",
        "=r,l,f,f,f,r",
        [at.to(gl.int64), a, b, c, tag],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _load_word(at):
    return gl.inline_asm_elementwise(
        """{
        .reg .b128 word;
        ld.relaxed.gpu.global.b128 word, [$2];
        mov.b128 {$0, $1}, word;
        }""",
        "=l,=l,l",
        [at],
        dtype=(gl.int64, gl.int64),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _await_word(word, at, tag):
    """The three numbers of a word, which is loaded again until it has the tag."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred here;
        .reg .b32 tag;
        .reg .b64 lo, hi;
        .reg .b128 word;
        mov.b64 lo, $3;
        mov.b64 hi, $4;
        AGAIN:
        mov.b64 {$2, tag}, hi;
        setp.eq.s32 here, tag, $6;
        @here bra DONE;
        ld.relaxed.gpu.global.b128 word, [$5];
        mov.b128 {lo, hi}, word;
        bra AGAIN;
        DONE:
        mov.b64 {$0, $1}, lo;
        }""",
        "=&f,=&f,=&f,l,l,l,r",
        [word[0], word[1], at.to(gl.int64), tag],
        dtype=(gl.float32, gl.float32, gl.float32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _read_words(at, tag):
    """The three numbers of each word."""
    return _await_word(_load_word(at), at, tag)


@gluon.jit
def _add_up(handed, summed, parts, tag, program, OWN_PRE: gl.constexpr, TOKENS: gl.constexpr, SLICES: gl.constexpr):
    """Sums over all programs of a group, of a program's share of the tokens; each warp adds up what some programs found."""
    SHARE: gl.constexpr = triton.next_power_of_2((TOKENS + SLICES - 1) // SLICES)
    ENTRIES: gl.constexpr = SHARE * WORDS
    BY_WARP: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [TOKENS // 8, 1], [1, 0])
    BY_ENTRY: gl.constexpr = gl.BlockedLayout([TOKENS // 8, 1], [1, 32], [1, TOKENS // 8], [0, 1])
    if program * SHARE < TOKENS:
        entry = gl.arange(0, ENTRIES, layout=gl.SliceLayout(0, BY_WARP))
        warp = gl.expand_dims(gl.arange(0, TOKENS // 8, layout=gl.SliceLayout(1, BY_WARP)), 1)
        word = entry // WORDS * WORDS + gl.minimum(entry % WORDS, 11 if OWN_PRE else 8)
        at = handed + (program * ENTRIES + gl.expand_dims(word, 0)) * 2
        words = ()
        for i in gl.static_range((SLICES + TOKENS // 8 - 1) // (TOKENS // 8)):
            words = words + (_load_word(at + gl.minimum(warp + i * (TOKENS // 8), SLICES - 1) * (TOKENS * WORDS * 2)),)
        total = _await_word(words[0], at + warp * (TOKENS * WORDS * 2), tag)
        for i in gl.static_range(1, (SLICES + TOKENS // 8 - 1) // (TOKENS // 8)):
            split = warp + i * (TOKENS // 8)
            more = _await_word(words[i], at + gl.minimum(split, SLICES - 1) * (TOKENS * WORDS * 2), tag)
            here = gl.where(split < SLICES, 1.0, 0.0)
            total = (total[0] + more[0] * here, total[1] + more[1] * here, total[2] + more[2] * here)
        by_warp = parts._reinterpret(gl.float32, [TOKENS * COLUMNS // (TOKENS // 8 * ENTRIES), TOKENS // 8, ENTRIES], PLAIN_2)
        for i in gl.static_range(3):
            by_warp.index(i).store(total[i])
        sums = ()
        for i in gl.static_range(3):
            sums = sums + (gl.sum(by_warp.index(i).load(BY_ENTRY), axis=0),)
        entry = gl.arange(0, ENTRIES, layout=gl.SliceLayout(0, BY_ENTRY))
        _store_word(summed + (program * ENTRIES + entry) * 2, sums[0], sums[1], sums[2], tag)


@gluon.jit(do_not_specialize=["tokens"])
def hyper_connection_wave(
    source, out, post, comb, pre, fn, base, scale, norm_weight, streams, x, pre_out, post_out, comb_out, handed, summed, epochs,
    tokens, rms_eps, eps, D: gl.constexpr, OWN_PRE: gl.constexpr, ITERATIONS: gl.constexpr,
    TOKENS: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Grid: groups of TOKENS tokens x D / COLUMNS / STEPS programs, then one program for the coefficients of two groups each."""
    SLICES: gl.constexpr = D // (COLUMNS * STEPS)
    groups = (tokens + (TOKENS - 1)) // TOKENS
    group, program = gl.program_id(0) // SLICES, gl.program_id(0) % SLICES
    STRIDE: gl.constexpr = D // 128 * (TOKENS * WORDS * 2)  # of a group, whatever the launch: so the tags in it only grow
    if group < groups:
        _slice(
            source, out, post, comb, pre, fn, base, scale, norm_weight, streams, x, handed + group * STRIDE, summed + group * (TOKENS * WORDS * 2),
            epochs + group,
            group * TOKENS, tokens, program, rms_eps, eps, D, OWN_PRE, TOKENS, STEPS, SLICES,
        )  # fmt: skip
    else:
        _finish(
            base, scale, pre_out, post_out, comb_out, summed, epochs, tokens, groups, gl.program_id(0) - groups * SLICES,
            rms_eps, eps, D, OWN_PRE, ITERATIONS, TOKENS,
        )  # fmt: skip


@gluon.jit
def _prefetch_weights(fn, D: gl.constexpr, TOKENS: gl.constexpr, STEPS: gl.constexpr):
    """Bring a program's columns of the 2 x 24 x 4 rows to the L2, a line of 128 bytes at a time."""
    LINES: gl.constexpr = 2 * 24 * 4 * STEPS
    THREADS: gl.constexpr = 4 * TOKENS
    first = gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [TOKENS // 8], [0]))
    for i in gl.static_range((LINES + THREADS - 1) // THREADS):
        line = gl.minimum(first + i * THREADS, LINES - 1)
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [fn + (line // STEPS * D + line % STEPS * COLUMNS)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def _columns(shared, COUNT: gl.constexpr):
    """[TOKENS, COUNT] in shared memory -> COUNT x [TOKENS, 1]"""
    values = ()
    for j in gl.static_range(COUNT):
        values = values + (_column(shared, j),)
    return values


@gluon.jit
def _column(shared, COLUMN_INDEX: gl.constexpr):
    TOKENS: gl.constexpr = shared.shape[0]
    column = shared.slice(COLUMN_INDEX, 1, dim=1).load(_column_of_tile(TOKENS))
    return gl.convert_layout(column, _tile(TOKENS), assert_trivial=True)


@gluon.jit
def _load4(planes, step):
    TILE: gl.constexpr = _tile(planes[0].shape[1])
    values = ()
    for k in gl.static_range(4):
        values = values + (planes[k].index(step).load(TILE),)
    return values


@gluon.jit
def _bring(step, source, out, planes, outs, left, first_column, D: gl.constexpr, TOKENS: gl.constexpr, STEPS: gl.constexpr):
    """Copies of one step's streams and of what is added to them."""
    if step < STEPS:
        COPY: gl.constexpr = _rows(TOKENS, 8, 8)
        row = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, COPY)), 1)
        column = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, COPY)), 0)
        at = source + (first_column + step * COLUMNS) + (row * (4 * D) + column)
        for k in gl.static_range(4):
            async_copy.async_copy_global_to_shared(planes[k].index(step), at + k * D, mask=row < left)
        at = out + (first_column + step * COLUMNS) + (row * D + column)
        async_copy.async_copy_global_to_shared(outs.index(step % RING), at, mask=row < left)
    async_copy.commit_group()


@gluon.jit
def _bring_weights(step, fn, weights, weight_at, STEPS: gl.constexpr):
    """Copies of the high and low halves of one step's weights."""
    if step < STEPS:
        for m in gl.static_range(3):
            async_copy.async_copy_global_to_shared(weights[m], fn + step * COLUMNS + weight_at[m])
    async_copy.commit_group()


@gluon.jit
def _load_weights(weights, STREAM: gl.constexpr, TOKENS: gl.constexpr):
    values = ()
    for m in gl.static_range(3):
        value = weights[m].slice(STREAM, 1, dim=0).load(_weights_of_tile(TOKENS))
        values = values + (gl.convert_layout(value, _tile_3d(TOKENS), assert_trivial=True),)
    return values


@gluon.jit
def _in_3d(value, TOKENS: gl.constexpr):
    return gl.convert_layout(gl.reshape(value, (TOKENS // 16, 16, COLUMNS)), _tile_3d(TOKENS), assert_trivial=True)


@gluon.jit
def _in_2d(value, TOKENS: gl.constexpr):
    return gl.convert_layout(gl.reshape(value, (TOKENS, COLUMNS)), _tile(TOKENS), assert_trivial=True)


@gluon.jit
def _slice(
    source, out, post, comb, pre, fn, base, scale, norm_weight, streams, x, handed, summed, epoch, start, tokens, program, rms_eps, eps,
    D: gl.constexpr, OWN_PRE: gl.constexpr, TOKENS: gl.constexpr, STEPS: gl.constexpr, SLICES: gl.constexpr,
):  # fmt: skip
    """Some columns of a group's tokens, from first to last."""
    TILE: gl.constexpr = _tile(TOKENS)
    SUMS: gl.constexpr = _eight_sums(TOKENS)
    WORDS_OF: gl.constexpr = _words(TOKENS, 8 if OWN_PRE else 4)
    COPY_WEIGHTS: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [TOKENS // 16, 2, 1], [2, 1, 0])
    COPY_POST: gl.constexpr = _rows(TOKENS, 1, 4)
    planes = ()  # streams, replaced by the new ones
    for _ in gl.static_range(4):
        planes = planes + (gl.allocate_shared_memory(gl.bfloat16, [STEPS, TOKENS, COLUMNS], TILE_SHARED),)
    outs = gl.allocate_shared_memory(gl.bfloat16, [RING, TOKENS, COLUMNS], TILE_SHARED)
    weights = ()
    for _ in gl.static_range(3):
        weights = weights + (gl.allocate_shared_memory(gl.bfloat16, [4, 16, COLUMNS], WEIGHTS_SHARED),)
    combs = gl.allocate_shared_memory(gl.float32, [4, TOKENS, 4], PLAIN_2)
    posts = gl.allocate_shared_memory(gl.float32, [TOKENS, 4], PLAIN_2)
    pres = gl.allocate_shared_memory(gl.float32, [TOKENS, 4], PLAIN_2)
    parts = gl.allocate_shared_memory(gl.float32, [TOKENS, COLUMNS], PARTS_SHARED)

    first_column = program * (STEPS * COLUMNS)
    left = tokens - start
    local = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, TILE))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, TILE))
    mask = gl.expand_dims(local < left, 1)
    stream_at = gl.expand_dims(local * (4 * D), 1) + gl.expand_dims(columns, 0)
    x_at = gl.expand_dims(local * D, 1) + gl.expand_dims(columns, 0)
    source += start.to(gl.int64) * (4 * D)
    streams += start.to(gl.int64) * (4 * D)
    out += start.to(gl.int64) * D
    x += start.to(gl.int64) * D
    fn += first_column
    # Coefficients 20 to 23, which make pre, change places with 6, 14, 7 and 15, so that two words have them.
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY_WEIGHTS)))
    g, half = row % 8, row // 8 * (24 * 4 * D)
    stream = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY_WEIGHTS))), 1), 2) * D
    stream += gl.expand_dims(gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(0, COPY_WEIGHTS))), 0), 0)
    weight_at = (
        stream + gl.expand_dims(gl.expand_dims(half + gl.where(g >= 6, g * 2 + 8, g) * (4 * D), 0), 2),
        stream + gl.expand_dims(gl.expand_dims(half + gl.where(g >= 6, g * 2 + 9, g + 8) * (4 * D), 0), 2),
        stream + gl.expand_dims(gl.expand_dims(half + gl.where(g >= 4, g // 2 + g % 2 * 8 + 4, g + 16) * (4 * D), 0), 2),
    )
    _prefetch_weights(fn, D, TOKENS, STEPS)
    gdc_launch_dependents()
    gdc_wait()
    tag = gl.load(epoch)
    row = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, COPY_POST)), 1)
    four = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, COPY_POST)), 0)
    for j in gl.static_range(4):
        async_copy.async_copy_global_to_shared(combs.index(j), comb + start * 16 + (row * 16 + j * 4 + four), mask=row < left)
    part = row * 4 + four
    async_copy.async_copy_global_to_shared(posts, post + start * 4 + part, mask=row < left)
    if not OWN_PRE:
        async_copy.async_copy_global_to_shared(pres, pre + start * 4 + part, mask=row < left)
    _bring(0, source, out, planes, outs, left, first_column, D, TOKENS, STEPS)
    _bring_weights(0, fn, weights, weight_at, STEPS)
    _bring(1, source, out, planes, outs, left, first_column, D, TOKENS, STEPS)

    zero = tokens >> 31
    sums = gl.zeros([TOKENS // 16, 16, COLUMNS], gl.float32, _tile_3d(TOKENS))
    grams = sums
    for step in range(STEPS):
        column = first_column + step * COLUMNS
        async_copy.wait_group(2)
        gl.thread_barrier()
        old_comb = ()
        for j in gl.static_range(4):
            old_comb = old_comb + _columns(combs.index(j), 4)
        n = _expand(_load4(planes, step), outs.index(step % RING).load(TILE), _columns(posts, 4), old_comb, False)
        _store_each(streams + column + stream_at, n, D, mask)
        if OWN_PRE:
            for k in gl.static_range(4):
                planes[k].index(step).store(n[k])
        else:
            y = _collapse(n, _columns(pres, 4))
            planes[0].index(step).store(y)
            n = n + (y,)
        quads, operands = (), ()
        for k in gl.static_range(4 if OWN_PRE else 5):
            quads = quads + (_in_3d(_quads(n[k], zero), TOKENS),)
            operands = operands + (_in_3d(n[k], TOKENS),)
        async_copy.wait_group(1)
        gl.thread_barrier()
        for k in gl.static_range(4):
            sums = _add_products(sums, _load_weights(weights, k, TOKENS), quads[k])
        sums, grams = _add_squares(sums, grams, quads, operands, OWN_PRE)
        _bring_weights(step + 1, fn, weights, weight_at, STEPS)
        _bring(step + 2, source, out, planes, outs, left, first_column, D, TOKENS, STEPS)
    sums, grams = _in_2d(sums, TOKENS), _in_2d(grams, TOKENS)

    parts.store(sums)
    total = parts.slice(0, 32, dim=1).load(SUMS) + parts.slice(32, 32, dim=1).load(SUMS)
    products = total
    if OWN_PRE:
        parts.store(grams)
        products = parts.slice(0, 32, dim=1).load(SUMS) + parts.slice(32, 32, dim=1).load(SUMS)
    token = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, SUMS)), 1)
    offset = token * 256 + gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, SUMS)) // 8 * 32, 0)
    _hand_over(total, products, offset, handed + program * (TOKENS * WORDS * 2), tag, OWN_PRE)
    _add_up(handed, summed, parts, tag, program, OWN_PRE, TOKENS, SLICES)

    gathered = parts._reinterpret(gl.float32, [8, TOKENS, 8], PLAIN_2)
    if OWN_PRE:
        token = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, WORDS_OF)), 1)
        word = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, WORDS_OF)), 0)
        word = token * WORDS + gl.where(word < 4, 8 + word, 6 + word % 2)
        totals = _read_words(summed + word * 2, tag)
        for i in gl.static_range(3):
            gathered.index(i).store(totals[i])
        raw, all_base, all_scale = (), (), ()
        for k in gl.static_range(4):
            raw = raw + (_column(gathered.index(k % 2), 4 + k // 2),)
            all_base, all_scale = all_base + (gl.load(base + 20 + k),), all_scale + (gl.load(scale + 20 + k),)
        for k in gl.static_range(10):
            raw = raw + (_column(gathered.index(k % 3), k // 3),)
        own, factor = _own_pre(raw, all_base, all_scale, rms_eps, eps, D)
    else:
        token = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, WORDS_OF)), 1)
        word = token * WORDS + 8 + gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, WORDS_OF)) * 0, 0)
        totals = _read_words(summed + word * 2, tag)
        gathered.index(0).slice(0, 4, dim=1).store(totals[1])
        factor = gl.rsqrt(_column(gathered.index(0), 0) / D + rms_eps)
        own = (factor, factor, factor, factor)
    for step in range(STEPS):
        column = first_column + step * COLUMNS
        norm = gl.expand_dims(gl.load(norm_weight + column + columns), 0)
        if OWN_PRE:
            y = _collapse(_load4(planes, step), own)
        else:
            y = planes[0].index(step).load(TILE)
        normed = _float(y) * factor * norm
        gl.store(x + column + x_at, normed.to(gl.bfloat16), mask=mask)


@gluon.jit
def _finish(
    base, scale, pre_out, post_out, comb_out, summed, epochs, tokens, groups, finisher, rms_eps, eps,
    D: gl.constexpr, OWN_PRE: gl.constexpr, ITERATIONS: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """pre, post and comb of two groups (V4 spec 2.2, steps 2 to 7)."""
    EIGHT: gl.constexpr = _words_of_two(TOKENS, 8)
    FOUR: gl.constexpr = _words_of_two(TOKENS, 4)
    ROWS: gl.constexpr = _rows(TOKENS, 1, 1)
    sums = gl.allocate_shared_memory(gl.float32, [3, 2 * TOKENS, 8], PLAIN_2)
    squares = gl.allocate_shared_memory(gl.float32, [3, 2 * TOKENS, 4], PLAIN_2)
    all_base, all_scale = (), ()
    for k in gl.static_range(24):
        all_base, all_scale = all_base + (gl.load(base + k),), all_scale + (gl.load(scale + k),)
    gdc_launch_dependents()
    gdc_wait()
    row = gl.arange(0, 2 * TOKENS, layout=gl.SliceLayout(1, EIGHT))
    group = gl.minimum(finisher * 2 + row // TOKENS, groups - 1)
    word = gl.expand_dims(group * (TOKENS * WORDS) + row % TOKENS * WORDS, 1)
    word += gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, EIGHT)), 0)
    totals = _read_words(summed + word * 2, gl.expand_dims(gl.load(epochs + group), 1))
    for i in gl.static_range(3):
        sums.index(i).store(totals[i])
    row = gl.arange(0, 2 * TOKENS, layout=gl.SliceLayout(1, FOUR))
    group = gl.minimum(finisher * 2 + row // TOKENS, groups - 1)
    word = gl.expand_dims(group * (TOKENS * WORDS) + row % TOKENS * WORDS + 8, 1)
    word += gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, FOUR)) % (2 if OWN_PRE else 1), 0)
    totals = _read_words(summed + word * 2, gl.expand_dims(gl.load(epochs + group), 1))
    for i in gl.static_range(3):
        squares.index(i).store(totals[i])
    gl.thread_barrier()
    for half in gl.static_range(2):
        if finisher * 2 + half < groups:
            epoch = epochs + finisher * 2 + half
            gl.store(epoch, gl.load(epoch) + 1)

    row = finisher * (2 * TOKENS) + gl.expand_dims(gl.arange(0, 2 * TOKENS, layout=gl.SliceLayout(1, ROWS)), 1)
    valid = row < tokens
    total = squares.index(0).slice(0, 1, dim=1).load(ROWS)
    if OWN_PRE:
        total += squares.index(1).slice(0, 1, dim=1).load(ROWS)
        total += squares.index(2).slice(0, 1, dim=1).load(ROWS) + squares.index(0).slice(1, 1, dim=1).load(ROWS)
    rstd = gl.rsqrt(total / (4 * D) + rms_eps)
    raw = ()
    for i in gl.static_range(24):
        raw = raw + (_coefficient_sum(sums, i, ROWS) * rstd * all_scale[i] + all_base[i],)
    for k in gl.static_range(4):
        gl.store(pre_out + row * 4 + k, _sigmoid(raw[20 + k]) + eps, mask=valid)
        gl.store(post_out + row * 4 + k, _sigmoid(raw[16 + k]) * 2.0, mask=valid)
    _store_each(comb_out + row * 16, _sinkhorn(raw, eps, ITERATIONS), 1, valid)


@gluon.jit
def _coefficient_sum(sums, COEFFICIENT: gl.constexpr, ROWS: gl.constexpr):
    PLACE: gl.constexpr = _place(COEFFICIENT)
    return sums.index(PLACE // 8).slice(PLACE % 8, 1, dim=1).load(ROWS)


@gluon.constexpr_function
def _place(coefficient):
    """Where a coefficient's sum is: those that make pre change places with 6, 14, 7 and 15."""
    moved = {20: 6, 21: 14, 22: 7, 23: 15, 6: 20, 14: 21, 7: 22, 15: 23}
    return moved.get(coefficient, coefficient)


@dataclass(frozen=True, slots=True)
class WaveConfig:
    """A program has `tokens` tokens and `steps` times COLUMNS columns."""

    tokens: int
    steps: int

    def programs(self, tokens: int, hidden: int) -> int:
        groups = -(-tokens // self.tokens)
        return groups * (hidden // (COLUMNS.value * self.steps)) + (groups + 1) // 2


@dataclass(frozen=True, slots=True)
class HandoverState:
    """Memory through which the programs of a launch hand over. One per stream of launches, allocated before capture."""

    handed: Tensor  # int64 [groups, D / 128 programs, WORDS, 2]
    summed: Tensor  # int64 [groups, tokens, WORDS, 2]
    epochs: Tensor  # int32 [groups]: the tag of the next launch

    @classmethod
    def allocate(cls, max_tokens: int, hidden: int, device: torch.device | str) -> HandoverState:
        groups = -(-max_tokens // 32)
        return cls(
            torch.zeros(groups // 2 + 1, hidden // 128, 64 * WORDS.value, 2, dtype=torch.int64, device=device),
            torch.zeros(groups // 2 + 1, 64, WORDS.value, 2, dtype=torch.int64, device=device),
            torch.ones(groups, dtype=torch.int32, device=device),
        )


def site(
    source: Tensor,
    out: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor | None,
    weights: KernelWeights,
    norm_weight: Tensor,
    state: HandoverState,
    config: WaveConfig,
    *,
    rms_eps: float,
    eps: float,
    iterations: int,
) -> Site:
    tokens, hidden = source.shape[0], source.shape[-1]
    streams, x = torch.empty_like(source), torch.empty_like(out)
    new_pre, new_post, new_comb = torch.empty_like(post), torch.empty_like(post), torch.empty_like(comb)
    hyper_connection_wave[(config.programs(tokens, hidden),)](
        source, out, post, comb, pre, weights.fn, weights.base, weights.scale, norm_weight, streams, x, new_pre, new_post, new_comb,
        state.handed, state.summed, state.epochs, tokens, rms_eps, eps,
        ITERATIONS=iterations, **constants(config, hidden, pre is None), num_warps=config.tokens // 8, launch_pdl=True,
    )  # fmt: skip
    return Site(streams, x, new_pre, new_post, new_comb, None)


def constants(config: WaveConfig, hidden: int, own_pre: bool) -> dict[str, Any]:
    return {"D": hidden, "OWN_PRE": own_pre, "TOKENS": config.tokens, "STEPS": config.steps}
