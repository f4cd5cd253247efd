# mypy: allow-untyped-defs
"""Index scores on Hopper: keys go from memory into registers, are widened there, and meet the queries in a warpgroup product.

The order of the 128 dimensions does not matter to a dot product, so each thread takes 16-byte pieces of a key as they lie in memory,
calls them the elements that the instruction expects of it, and the queries are stored in that order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from abyssal.kv.layouts import Layout
from abyssal.ops._aot import HOPPER, AotCase
from abyssal.ops.index_score._paged import GROUP, KEYS_PER_TILE, check, multiprocessors

KEYS = gl.constexpr(KEYS_PER_TILE)
DIM = gl.constexpr(128)
WARP_KEYS = gl.constexpr(GROUP)  # of a tile, whose maximum is one of `maxima`


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _page(pages, tile, end, TILES: gl.constexpr):
    """The page of a tile; page 0, whose keys nobody looks at, for tiles from `end` on."""
    return gl.load(pages + tile // TILES, mask=tile < end, other=0)


@gluon.jit
def _prefetch_bytes(start, count: gl.constexpr, page):
    gl.inline_asm_elementwise(
        """{
        .reg .pred wanted;
        setp.ge.s32 wanted, $2, 0;
        @wanted cp.async.bulk.prefetch.L2.global [$1], $3;
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r",
        [start, page, count],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _row_at(ends, tile, total):
    """The row of a tile of all rows, and where it begins and ends among them."""
    before = ends <= tile
    return gl.sum(before.to(gl.int32), 0), gl.max(gl.where(before, ends, 0), 0), gl.min(gl.where(before, total, ends), 0)


@gluon.jit
def _coming(pages, tile, mine, end, TILES: gl.constexpr):
    """The page of the tile that each thread is to prefetch, -1 for none."""
    return gl.load(pages + tile // TILES, mask=mine & (tile < end), other=-1)


@gluon.jit
def _prefetch(pool, page, tile, PAGE_WORDS: gl.constexpr, KEY_WORDS: gl.constexpr, TILES: gl.constexpr):
    """Brings tiles of keys into the L2: each thread the one of its `page`, if that is not -1."""
    start = pool.to(gl.int64) + page.to(gl.int64) * (4 * PAGE_WORDS)
    part = tile % TILES * KEYS
    if TILES == 1:
        _prefetch_bytes(start, KEYS * (KEY_WORDS + 1) * 4, page)
    else:
        _prefetch_bytes(start + part * (KEY_WORDS * 4), KEYS * KEY_WORDS * 4, page)
        _prefetch_bytes(start + TILES * KEYS * KEY_WORDS * 4 + part * 4, KEYS * 4, page)


@gluon.jit
def _load_keys(pieces, page, tile, PAGE_WORDS: gl.constexpr, KEY_WORDS: gl.constexpr, TILES: gl.constexpr):
    """Words [64, KEY_WORDS] of a tile's keys, 16 bytes per load and thread."""
    first = pieces + page.to(gl.int64) * PAGE_WORDS + tile % TILES * (KEYS * KEY_WORDS)
    below = first + 8 * KEY_WORDS
    if KEY_WORDS == 32:
        both = gl.join(gl.join(gl.load(first), gl.load(below)), gl.join(gl.load(first + 16), gl.load(below + 16)))
        words = gl.permute(both, (0, 4, 1, 5, 2, 3))  # [warp, half of its keys, key, half of the key, lane, word]
    else:
        words = gl.permute(gl.join(gl.load(first), gl.load(below)), (0, 4, 1, 2, 3))
    return gl.reshape(words, (KEYS, KEY_WORDS))


@gluon.jit
def _load_exponents(lanes, page, tile, PAGE_WORDS: gl.constexpr, KEY_WORDS: gl.constexpr, TILES: gl.constexpr):
    """Scale bytes [64, 4] of a tile of mxfp4 keys: each thread has those of the pieces that it loads."""
    first = lanes + page.to(gl.int64) * (4 * PAGE_WORDS) + tile % TILES * (KEYS * 4)
    return gl.reshape(gl.permute(gl.join(gl.load(first), gl.load(first + 32)), (0, 3, 1, 2)), (KEYS, 4))


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
    both = gl.join(gl.join(a, b), gl.join(c, d))  # [64, half and lane and word, element, pair]
    both = gl.permute(gl.reshape(both, (64, 2, 4, 4, 2, 2)), (0, 1, 3, 5, 2, 4))
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
def _load_query(q, live, HEADS: gl.constexpr):
    QUERY: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    head = gl.arange(0, HEADS, gl.SliceLayout(1, QUERY))[:, None]
    return gl.load(q + head * DIM + gl.arange(0, DIM, gl.SliceLayout(0, QUERY))[None, :], mask=live)


@gluon.jit
def _store_query(values, shared, HEADS: gl.constexpr, LAYOUT: gl.constexpr):
    """One query [HEADS, DIM] into shared memory, in the keys' order of dimensions."""
    if LAYOUT == "index_fp8":
        values = values.to(gl.float8e4nv, bitcast=True).to(gl.float16)
        # dimension: half, lane, word, pair, element; place in the product: half, word, pair, lane, element
        values = gl.permute(gl.reshape(values, (HEADS, 2, 4, 4, 2, 2)), (0, 1, 3, 4, 2, 5))
    else:
        values = (values.to(gl.float32) * 9223372036854775808.0).to(gl.bfloat16)  # 2^63, which the keys lack
        # dimension: lane, word, high bit of the nibble, other bits; place: word, other bits, lane, high bit
        values = gl.permute(gl.reshape(values, (HEADS, 4, 4, 2, 4)), (0, 2, 4, 1, 3))
    shared.store(gl.reshape(values, (HEADS, DIM)))


@gluon.jit
def _store_weights(weights, shared, HEADS: gl.constexpr):
    """Half of a query's weights, [4, HEADS / 4]: those of the heads whose dot products a thread holds, side by side."""
    halves = 0.5 * gl.load(weights + gl.arange(0, HEADS, gl.BlockedLayout([1], [32], [4], [0])))
    shared.store(gl.reshape(gl.permute(gl.reshape(halves, (HEADS // 8, 4, 2)), (1, 0, 2)), (4, HEADS // 4)))


@gluon.jit
def _load_tile(pieces, lanes, page, tile, PAGE_WORDS: gl.constexpr, KEY_WORDS: gl.constexpr, TILES: gl.constexpr):
    """Words of a tile's keys and, for mxfp4, scale bytes."""
    words = _load_keys(pieces, page, tile, PAGE_WORDS, KEY_WORDS, TILES)
    if KEY_WORDS == 32:
        scale = gl.load(lanes + page.to(gl.int64) * PAGE_WORDS + tile % TILES * KEYS)
        return words, scale.to(gl.float32, bitcast=True)
    else:
        return words, _load_exponents(lanes, page, tile, PAGE_WORDS, KEY_WORDS, TILES)


@gluon.jit
def _widen(words, exponents, MMA: gl.constexpr):
    if words.shape[1] == 32:
        return _widen_fp8(words, MMA)
    else:
        return _widen_mxfp4(words, exponents, MMA)


@gluon.jit
def _multiply(keys, query, HEADS: gl.constexpr, MMA: gl.constexpr):
    dots = gl.zeros([KEYS, HEADS], gl.float32, MMA)
    return warpgroup_mma(keys, query.permute((1, 0)), dots, use_acc=False, is_async=True)


@gluon.jit
def _lane_sums(dots, w_shared, HEADS: gl.constexpr, LANES: gl.constexpr):
    """What each thread holds of its two keys' sums over heads, fp32 [warp, 8, lane] each."""
    # x + |x| is twice the relu, on the units that multiply: those that compare are the busiest
    terms = gl.permute(gl.reshape(dots + gl.abs(dots), (KEYS, HEADS // 8, 4, 2)), (0, 2, 1, 3))
    terms = gl.reshape(terms, (KEYS, 4, HEADS // 4))
    w = w_shared.load(gl.SliceLayout(0, terms.type.layout))
    sums = gl.sum(terms * gl.expand_dims(w, 0), 2)
    low, high = gl.split(gl.permute(gl.reshape(sums, (4, 2, 8, 4)), (0, 2, 3, 1)))
    return gl.convert_layout(low, LANES, assert_trivial=True), gl.convert_layout(high, LANES, assert_trivial=True)


@gluon.jit
def _from_lane(values, distance: gl.constexpr):
    """The values of the lane whose number differs in the bit `distance`."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", "=f,f,r", [values, distance], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _add_lanes(low_a, high_a, low_b, high_b, lane):
    """Sums over the four lanes that share keys; each lane gets one: 0 and 1 those of the first two arguments, 2 and 3 of the others."""
    second = (lane & 2) != 0
    low = gl.where(second, low_b, low_a) + _from_lane(gl.where(second, low_a, low_b), 2)
    high = gl.where(second, high_b, high_a) + _from_lane(gl.where(second, high_a, high_b), 2)
    odd = (lane & 1) != 0
    return gl.where(odd, high, low) + _from_lane(gl.where(odd, low, high), 1)


@gluon.jit
def _reach(visible, j, queries, num_entries):
    return gl.minimum(gl.load(visible + j, mask=j < queries, other=0), num_entries)


@gluon.jit
def _store(scores, out, best_out, entry, group, reach, group_reach, MAXIMA: gl.constexpr, BEST: gl.constexpr):
    """scores [warp, 8, lane] below `reach`, and the maxima [warp, 2] of a warp's 16 in lanes 0 and 1, and in lanes 2 and 3."""
    gl.store(out, scores, mask=entry < reach)
    if MAXIMA:
        seen = gl.reshape(gl.where(entry < reach, scores, -float("inf")), (4, 8, 2, 2))
        best = gl.max(gl.max(seen, 3), 1)  # one after the other: lanes of one reduction must lie side by side
        gl.store(best_out, gl.convert_layout(best, BEST, assert_trivial=True), mask=group * WARP_KEYS < group_reach)


@gluon.jit
def _index_score_kernel_sm90(
    q,  # [n, b, HEADS, DIM]: bytes of e4m3 for index_fp8, otherwise bf16
    weights,  # fp32 [n, b, HEADS]
    pool,  # int32 words of pages
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
    ROWS: gl.constexpr,  # num_rows, rounded up to a power of two
    MAXIMA: gl.constexpr,
    PAGE_WORDS: gl.constexpr,
    TILES: gl.constexpr,  # per page
    AHEAD: gl.constexpr,  # tiles on their way to the L2
):
    """A row of work is QUERIES queries of a sequence against its pages; programs take equal shares of all rows' tiles."""
    gdc_wait()  # launched while the kernel before may still run
    gdc_launch_dependents()  # what follows waits for this kernel's end by itself
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    COUNTS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    TYPE: gl.constexpr = gl.float16 if LAYOUT == "index_fp8" else gl.bfloat16
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS, DIM], TYPE)
    q_shared = gl.allocate_shared_memory(TYPE, [QUERIES, HEADS, DIM], SHARED)
    # A warp has 16 keys of a tile: lane l holds pieces l % 4 (+ 4) of 16 bytes of keys l / 4 and l / 4 + 8.
    PIECES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0]],
        [],
        [4, 8, 4, 4],
    )
    LANES: gl.constexpr = gl.SliceLayout(3, PIECES)
    BEST: gl.constexpr = gl.DistributedLinearLayout([], [[0, 0], [0, 1], [0, 0], [0, 0], [0, 0]], [[1, 0], [2, 0]], [], [4, 2])
    # Swizzled: with 64 heads the four rows of 64 bytes would meet in the same banks.
    WEIGHTS: gl.constexpr = gl.SwizzledSharedLayout(4 if HEADS > 8 else 2, 2, 2 if HEADS == 64 else 1, order=[1, 0])
    w_shared = gl.allocate_shared_memory(gl.float32, [QUERIES, 4, HEADS // 4], WEIGHTS)
    KEY_WORDS: gl.constexpr = 32 if LAYOUT == "index_fp8" else 16
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LANES)))[None, None, :]
    of_eight = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LANES)))[None, :, None]
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, LANES)))[:, None, None]
    key = warp * 16 + of_eight
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, PIECES))))[None, None, None, :]
    pieces = pool + gl.expand_dims(key * KEY_WORDS + lane * 4, 3) + word
    # After the sums, lanes 0 and 1 hold keys `own` of one item, and lanes 2 and 3 those of another.
    own = key + (lane & 1) * 8
    if LAYOUT == "index_fp8":
        lanes = pool + TILES * KEYS * KEY_WORDS + own
    else:
        lanes = pool.to(gl.pointer_type(gl.uint8), bitcast=True) + TILES * KEYS * KEY_WORDS * 4 + key * 4 + lane
    item = lane >> 1
    ITEMS: gl.constexpr = 2 if QUERIES == 1 else 1  # tiles of a pass
    thread = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    best_warp = gl.arange(0, 4, gl.SliceLayout(1, BEST))[:, None]
    best_item = gl.arange(0, 2, gl.SliceLayout(0, BEST))[None, :]

    rows = gl.arange(0, ROWS, COUNTS)
    blocks = (b + QUERIES - 1) // QUERIES
    seen = gl.zeros([ROWS], gl.int32, COUNTS)
    for j in gl.static_range(QUERIES):
        of_row = rows % blocks * QUERIES + j
        inside = (rows < num_rows) & (of_row < b)
        seen = gl.maximum(seen, gl.load(visible + rows // blocks * b + of_row, mask=inside, other=0))
    tiles = (gl.minimum(seen, num_entries) + KEYS - 1) // KEYS
    ends = gl.associative_scan(tiles, 0, _add)
    total = gl.sum(tiles, 0)
    share = total // gl.num_programs(0)
    rest = total % gl.num_programs(0)
    begin = gl.program_id(0) * share + gl.minimum(gl.program_id(0), rest)
    end = begin + share + (gl.program_id(0) < rest).to(gl.int32)
    while begin < end:
        row, row_begin, row_end = _row_at(ends, begin, total)
        stop = gl.minimum(end, row_end)
        first, last = begin - row_begin, stop - row_begin
        begin = stop
        sequence = row // blocks
        # The query is on its way before the pages are known: one latency less.
        query = (sequence * b + row % blocks * QUERIES).to(gl.int64)
        queries = gl.minimum(b - row % blocks * QUERIES, QUERIES)
        values = _load_query(q + query * (HEADS * DIM), True, HEADS)
        pages = page_table + sequence.to(gl.int64) * table_stride
        # Pages of the tiles that a thread brings into the L2: all of the first ones at once, then as many as a pass takes.
        coming = _coming(pages, first + thread, thread < AHEAD, last, TILES)
        _prefetch(pool, coming, first + thread, PAGE_WORDS, KEY_WORDS, TILES)
        coming = _coming(pages, first + AHEAD + thread, thread < ITEMS, last, TILES)
        if QUERIES == 1 and stop < end:  # the first tiles of the row after, too; with more queries a row is long
            next_row, next_begin, next_end = _row_at(ends, stop, total)
            next_pages = page_table + (next_row // blocks).to(gl.int64) * table_stride
            next_page = _coming(next_pages, thread, thread < AHEAD, gl.minimum(end, next_end) - next_begin, TILES)
            _prefetch(pool, next_page, thread, PAGE_WORDS, KEY_WORDS, TILES)
        words, scales = _load_tile(pieces, lanes, _page(pages, first, last, TILES), first, PAGE_WORDS, KEY_WORDS, TILES)
        page_b, page_a = _page(pages, first + 1, last, TILES), _page(pages, first + 2, last, TILES)

        gl.thread_barrier()
        _store_weights(weights + query * HEADS, w_shared.index(0), HEADS)
        _store_query(values, q_shared.index(0), HEADS, LAYOUT)
        for j in gl.static_range(1, QUERIES):
            values = _load_query(q + (query + j) * (HEADS * DIM), j < queries, HEADS)
            _store_weights(weights + (query + gl.minimum(j, queries - 1)) * HEADS, w_shared.index(j), HEADS)
            _store_query(values, q_shared.index(j), HEADS, LAYOUT)
        fence_async_shared()
        gl.thread_barrier()

        if QUERIES == 1:
            # The items of a pass are two tiles.
            reach = gl.minimum(gl.minimum(gl.load(visible + query), num_entries), last * KEYS)
            out_row = out + query * out_stride
            best_row = maxima + query * maxima_stride
            for tile in range(first, last, 2):
                keys = _widen(words, scales, MMA)
                dots = _multiply(keys, q_shared.index(0), HEADS, MMA)
                scale_a = scales
                words, scales = _load_tile(pieces, lanes, page_b, tile + 1, PAGE_WORDS, KEY_WORDS, TILES)
                page_b = _page(pages, tile + 3, last, TILES)
                dots = warpgroup_mma_wait(0, deps=(dots,))
                low_a, high_a = _lane_sums(dots, w_shared.index(0), HEADS, LANES)
                keys = _widen(words, scales, MMA)
                dots = _multiply(keys, q_shared.index(0), HEADS, MMA)
                scale_b = scales
                words, scales = _load_tile(pieces, lanes, page_a, tile + 2, PAGE_WORDS, KEY_WORDS, TILES)
                page_a = _page(pages, tile + 4, last, TILES)
                _prefetch(pool, coming, tile + AHEAD + thread, PAGE_WORDS, KEY_WORDS, TILES)
                coming = _coming(pages, tile + AHEAD + 2 + thread, thread < 2, last, TILES)
                dots = warpgroup_mma_wait(0, deps=(dots,))
                low_b, high_b = _lane_sums(dots, w_shared.index(0), HEADS, LANES)
                scores = _add_lanes(low_a, high_a, low_b, high_b, lane)
                if LAYOUT == "index_fp8":
                    scores *= gl.where(item == 0, scale_a, scale_b)  # a positive scale passes the relu
                entry = (tile + item) * KEYS + own
                group = (tile + best_item) * (KEYS // WARP_KEYS) + best_warp
                _store(scores, out_row + entry, best_row + group, entry, group, reach, reach, MAXIMA, BEST)
        else:
            # The items of a pass are two queries.
            for tile in range(first, last):
                keys = _widen(words, scales, MMA)
                scale = scales
                dots = _multiply(keys, q_shared.index(0), HEADS, MMA)
                words, scales = _load_tile(pieces, lanes, page_b, tile + 1, PAGE_WORDS, KEY_WORDS, TILES)
                page_b, page_a = page_a, _page(pages, tile + 3, last, TILES)
                _prefetch(pool, coming, tile + AHEAD + thread, PAGE_WORDS, KEY_WORDS, TILES)
                coming = _coming(pages, tile + AHEAD + 1 + thread, thread < 1, last, TILES)
                entry = tile * KEYS + own
                group = tile * (KEYS // WARP_KEYS) + best_warp
                for j in gl.static_range(0, QUERIES, 2):
                    next_dots = _multiply(keys, q_shared.index(j + 1), HEADS, MMA)
                    dots = warpgroup_mma_wait(1, deps=(dots,))
                    low_a, high_a = _lane_sums(dots, w_shared.index(j), HEADS, LANES)
                    if j + 2 < QUERIES:
                        dots = _multiply(keys, q_shared.index(j + 2), HEADS, MMA)
                        next_dots = warpgroup_mma_wait(1, deps=(next_dots,))
                    else:
                        next_dots = warpgroup_mma_wait(0, deps=(next_dots,))
                    low_b, high_b = _lane_sums(next_dots, w_shared.index(j + 1), HEADS, LANES)
                    scores = _add_lanes(low_a, high_a, low_b, high_b, lane)
                    if LAYOUT == "index_fp8":
                        scores *= scale
                    reach = _reach(visible + query, j + item, queries, num_entries)
                    group_reach = _reach(visible + query, j + best_item, queries, num_entries)
                    out_row = out + (query + j + item) * out_stride
                    best_row = maxima + (query + j + best_item) * maxima_stride
                    _store(scores, out_row + entry, best_row + group, entry, group, reach, group_reach, MAXIMA, BEST)


@dataclass(frozen=True)
class ScoreConfig:
    """How one launch is cut."""

    programs: int  # persistent programs of one warpgroup, each takes an equal share of all tiles
    queries: int  # consecutive queries of a sequence that share the keys of a tile
    ahead: int  # tiles of a program on their way to the L2
    registers: int  # per thread at most


def score_config(layout: str, b: int, heads: int, multiprocessors: int) -> ScoreConfig:
    """As many programs as registers hold: one converts and sums beside another's products.

    More tiles ahead than two push each other out of the L2: 1.4 times the time with eight of index_fp8.
    """
    queries = min(4, triton.next_power_of_2(b))
    copies = 2 if queries > 1 else 5 if layout == "index_mxfp4" and heads <= 32 else 4
    return ScoreConfig(copies * multiprocessors, queries, ahead=2, registers=min(255, 512 // copies // 8 * 8))


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

    mxfp4 scales are exact from 2^-62 to 2^64.
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
    config = config or score_config(layout.name, b, heads, multiprocessors(q))
    rows = n * -(-b // config.queries)
    _index_score_kernel_sm90[(config.programs,)](
        q.view(torch.uint8) if q.dtype == torch.float8_e4m3fn else q,
        weights,
        pool.view(torch.int32),
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
        ROWS=triton.next_power_of_2(rows),
        MAXIMA=maxima is not None,
        PAGE_WORDS=pool.shape[1] // 4,
        TILES=entries_per_page // KEYS_PER_TILE,
        AHEAD=config.ahead,
        num_warps=4,
        maxnreg=config.registers,
        launch_pdl=True,
    )
    return out


def aot_cases() -> list[AotCase]:
    """Both layouts, Flash's and V4.1's heads."""
    pointers = {"weights": "*fp32", "pool": "*i32", "page_table": "*i32", "visible": "*i32", "out": "*fp32", "maxima": "*fp32"}
    scalars = ("table_stride", "out_stride", "maxima_stride", "num_rows", "b", "num_entries")
    return [
        AotCase(
            name=f"index_score_sm90[{layout},heads={heads},queries={queries},rows={rows}]",
            kernel=_index_score_kernel_sm90,
            signature={"q": "*u8" if layout == "index_fp8" else "*bf16", **pointers, **dict.fromkeys(scalars, "i32")},
            constants={
                "LAYOUT": layout,
                "HEADS": heads,
                "QUERIES": queries,
                "ROWS": rows,
                "MAXIMA": True,
                "PAGE_WORDS": 2160 if layout == "index_fp8" else 1152,
                "TILES": 1,
                "AHEAD": 2,
            },
            num_warps=4,
            aligned=("q", *pointers, "out_stride", "maxima_stride"),
            archs=(HOPPER,),
        )
        for layout in ("index_fp8", "index_mxfp4")
        for heads, queries, rows in ((64, 1, 1), (64, 1, 128), (32, 1, 1), (8, 1, 1), (64, 4, 64), (32, 4, 64))
    ]
