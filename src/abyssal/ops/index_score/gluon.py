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
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from abyssal.kv.layouts import Layout
from abyssal.ops._aot import HOPPER, AotCase
from abyssal.ops.index_score._paged import GROUP, KEYS_PER_TILE, check, multiprocessors

KEYS = gl.constexpr(KEYS_PER_TILE)
DIM = gl.constexpr(128)


@gluon.constexpr_function
def _word_layout(words):
    """int32 words [64 keys, words]: lane l holds 16-byte pieces l % 4 (+ 4) of keys l / 4 and l / 4 + 8 of its warp's 16."""
    registers = [[0, 1], [0, 2]] + ([[0, 16]] if words == 32 else []) + [[8, 0]]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, words])


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _page(pages, tile, end, TILES: gl.constexpr):
    return gl.load(pages + tile // TILES, mask=tile < end, other=0)


@gluon.jit
def _copy_tile(pool, page, page_words, words, scales, tile, end, STAGES: gl.constexpr, TILES: gl.constexpr):
    """A tile's keys and scales, one word per key, on their way into their place in shared memory, if it lies before `end`."""
    WORDS: gl.constexpr = words.shape[2]
    LAYOUT: gl.constexpr = _word_layout(WORDS)
    base = pool + page.to(gl.int64) * page_words
    part = tile % TILES * KEYS
    key = part + gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))[:, None]
    word = gl.arange(0, WORDS, gl.SliceLayout(0, LAYOUT))[None, :]
    async_copy.async_copy_global_to_shared(words.index(tile & (STAGES - 1)), base + key * WORDS + word, mask=tile < end)
    row = part + gl.arange(0, KEYS, gl.BlockedLayout([1], [32], [4], [0]))
    async_copy.async_copy_global_to_shared(scales.index(tile & (STAGES - 1)), base + TILES * KEYS * WORDS + row, mask=tile < end)
    async_copy.commit_group()


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
    return gl.convert_layout(gl.reshape(both, (64, 128)), gl.DotOperandLayout(0, MMA, 2))


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
    """e2m1 in words [64, 16] and four exponent bytes per key -> bf16 [64, 128] times 2^-63, the left operand of a product."""
    words = gl.reshape(words, (64, 4, 4))
    WORDS: gl.constexpr = words.type.layout
    exponents = gl.convert_layout(exponents, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))
    group = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))[None, :]
    exponent = (gl.expand_dims(exponents, 1) >> (8 * group)) & 255
    # 2^(exponent - 127 + 126 - 63) in both halves: exact from scales of 2^-62 on, finite up to 2^64
    scale = gl.expand_dims((exponent + 63) * 0x00800080, 2)
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
    return gl.convert_layout(gl.reshape(both, (64, 128)), gl.DotOperandLayout(0, MMA, 2))


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
def _half_weights(weights, HEADS: gl.constexpr, MMA: gl.constexpr):
    return 0.5 * gl.load(weights + gl.arange(0, HEADS, gl.SliceLayout(0, MMA)))


@gluon.jit
def _take_tile(words, scales, tile, STAGES: gl.constexpr, MMA: gl.constexpr):
    """Words and scales of a tile's keys, as soon as they are in shared memory."""
    async_copy.wait_group(STAGES - 2)
    scale = scales.index(tile & (STAGES - 1)).load(gl.SliceLayout(1, MMA))
    return words.index(tile & (STAGES - 1)).load(_word_layout(words.shape[2])), scale


@gluon.jit
def _widen(packed, scale, LAYOUT: gl.constexpr, MMA: gl.constexpr):
    if LAYOUT == "index_fp8":
        return _widen_fp8(packed, MMA)
    else:
        return _widen_mxfp4(packed, scale, MMA)


@gluon.jit
def _multiply(keys, query, HEADS: gl.constexpr, MMA: gl.constexpr):
    dots = gl.zeros([KEYS, HEADS], gl.float32, MMA)
    return warpgroup_mma(keys, query.permute((1, 0)), dots, use_acc=False, is_async=True)


@gluon.jit
def _store_scores(
    dots, w, scale, tile, reach, out, best_out, LAYOUT: gl.constexpr, GROUP: gl.constexpr, MAXIMA: gl.constexpr, MMA: gl.constexpr
):
    entry = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, MMA))
    # x + |x| is twice the relu, on the units that multiply: those that compare are the busiest
    scores = gl.sum((dots + gl.abs(dots)) * w[None, :], 1)
    if LAYOUT == "index_fp8":
        scores *= scale.to(gl.float32, bitcast=True)  # a positive scale passes the relu
    gl.store(out + entry, scores, mask=entry < reach)
    if MAXIMA:
        best = gl.max(gl.reshape(gl.where(entry < reach, scores, -float("inf")), (KEYS // GROUP, GROUP)), 1)
        group = tile * (KEYS // GROUP) + gl.arange(0, KEYS // GROUP, best.type.layout)
        gl.store(best_out + group, best, mask=group * GROUP < reach)


@gluon.jit
def _index_score_kernel_sm90(
    q,  # [n, b, HEADS, DIM]: bytes of e4m3 for index_fp8, otherwise bf16
    weights,  # fp32 [n, b, HEADS]
    pool,  # int32 words of pages
    page_table,  # int32 [n, table_stride]
    visible,  # int32 [n, b]
    out,  # fp32 [n, b, out_stride]
    maxima,  # fp32 [n, b, maxima_stride], unless MAXIMA is False
    page_words,
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
    GROUP: gl.constexpr,
    MAXIMA: gl.constexpr,
    STAGES: gl.constexpr,  # tiles in shared memory, a power of two
    TILES: gl.constexpr,  # per page
):
    """A row of work is QUERIES queries of a sequence against its pages; programs take equal shares of all rows' tiles."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    COUNTS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    TYPE: gl.constexpr = gl.float16 if LAYOUT == "index_fp8" else gl.bfloat16
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS, DIM], TYPE)
    q_shared = gl.allocate_shared_memory(TYPE, [QUERIES, HEADS, DIM], SHARED)
    KEY_WORDS: gl.constexpr = 32 if LAYOUT == "index_fp8" else 16
    # Eight lanes read 16 bytes each of two keys: the swizzle puts them into different banks.
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(vec=4, per_phase=32 // KEY_WORDS, max_phase=KEY_WORDS // 4, order=[1, 0])
    words = gl.allocate_shared_memory(gl.int32, [STAGES, KEYS, KEY_WORDS], SWIZZLED)
    scales = gl.allocate_shared_memory(gl.int32, [STAGES, KEYS], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))

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
        row = gl.sum((ends <= begin).to(gl.int32), 0)
        first = begin - gl.max(gl.where(ends <= begin, ends, 0), 0)
        row_end = gl.min(gl.where(ends <= begin, total, ends), 0)
        stop = gl.minimum(end, row_end)
        last = first + stop - begin
        begin = stop
        sequence = row // blocks
        # The query is on its way before the pages are known: one latency less.
        query = (sequence * b + row % blocks * QUERIES).to(gl.int64)
        queries = gl.minimum(b - row % blocks * QUERIES, QUERIES)
        values = _load_query(q + query * (HEADS * DIM), True, HEADS)
        w = _half_weights(weights + query * HEADS, HEADS, MMA)
        reach = gl.minimum(gl.load(visible + query), num_entries)
        out_row = out + query * out_stride
        best_row = maxima + query * maxima_stride

        pages = page_table + sequence.to(gl.int64) * table_stride
        for s in gl.static_range(STAGES - 1):
            page = _page(pages, first + s, last, TILES)
            _copy_tile(pool, page, page_words, words, scales, first + s, last, STAGES, TILES)
        page = _page(pages, first + STAGES - 1, last, TILES)

        gl.thread_barrier()
        _store_query(values, q_shared.index(0), HEADS, LAYOUT)
        for j in gl.static_range(1, QUERIES):
            values = _load_query(q + (query + j) * (HEADS * DIM), j < queries, HEADS)
            _store_query(values, q_shared.index(j), HEADS, LAYOUT)
        fence_async_shared()
        gl.thread_barrier()

        if QUERIES == 1:
            # A product is always under way: the sums of one tile run beside the product of the next.
            packed, scale = _take_tile(words, scales, first, STAGES, MMA)
            _copy_tile(pool, page, page_words, words, scales, first + STAGES - 1, last, STAGES, TILES)
            page = _page(pages, first + STAGES, last, TILES)
            dots = _multiply(_widen(packed, scale, LAYOUT, MMA), q_shared.index(0), HEADS, MMA)
            for tile in range(first, last, 2):
                ahead = tile + STAGES
                packed, next_scale = _take_tile(words, scales, tile + 1, STAGES, MMA)
                _copy_tile(pool, page, page_words, words, scales, ahead, last, STAGES, TILES)
                page = _page(pages, ahead + 1, last, TILES)
                dots, packed = warpgroup_mma_wait(0, deps=(dots, packed))
                next_dots = _multiply(_widen(packed, next_scale, LAYOUT, MMA), q_shared.index(0), HEADS, MMA)
                _store_scores(dots, w, scale, tile, reach, out_row, best_row, LAYOUT, GROUP, MAXIMA, MMA)
                packed, scale = _take_tile(words, scales, tile + 2, STAGES, MMA)
                _copy_tile(pool, page, page_words, words, scales, ahead + 1, last, STAGES, TILES)
                page = _page(pages, ahead + 2, last, TILES)
                next_dots, packed = warpgroup_mma_wait(0, deps=(next_dots, packed))
                dots = _multiply(_widen(packed, scale, LAYOUT, MMA), q_shared.index(0), HEADS, MMA)
                next_reach = gl.where(tile + 1 < last, reach, 0)
                _store_scores(next_dots, w, next_scale, tile + 1, next_reach, out_row, best_row, LAYOUT, GROUP, MAXIMA, MMA)
            warpgroup_mma_wait(0, deps=(dots,))
        else:
            for tile in range(first, last):
                ahead = tile + STAGES - 1
                packed, scale = _take_tile(words, scales, tile, STAGES, MMA)
                _copy_tile(pool, page, page_words, words, scales, ahead, last, STAGES, TILES)
                page = _page(pages, ahead + 1, last, TILES)
                keys = _widen(packed, scale, LAYOUT, MMA)
                dots = _multiply(keys, q_shared.index(0), HEADS, MMA)
                for j in gl.static_range(QUERIES):
                    w = _half_weights(weights + (query + gl.minimum(j, queries - 1)) * HEADS, HEADS, MMA)
                    reach = gl.minimum(gl.load(visible + query + j, mask=j < queries, other=0), num_entries)
                    if j + 1 < QUERIES:
                        next_dots = _multiply(keys, q_shared.index(j + 1), HEADS, MMA)
                        dots = warpgroup_mma_wait(1, deps=(dots,))
                    else:
                        dots = warpgroup_mma_wait(0, deps=(dots,))
                    out_j, best_j = out_row + j * out_stride, best_row + j * maxima_stride
                    _store_scores(dots, w, scale, tile, reach, out_j, best_j, LAYOUT, GROUP, MAXIMA, MMA)
                    if j + 1 < QUERIES:
                        dots = next_dots


@dataclass(frozen=True)
class ScoreConfig:
    """How one launch is cut."""

    programs: int  # persistent programs of one warpgroup, each takes an equal share of all tiles
    queries: int  # consecutive queries of a sequence that share the keys of a tile
    stages: int  # tiles in shared memory per program, a power of two, all but one of them on their way
    registers: int  # per thread at most


def score_config(b: int, heads: int, multiprocessors: int) -> ScoreConfig:
    """As many programs as registers and shared memory hold: one converts and sums beside another's products."""
    queries = min(4, triton.next_power_of_2(b))
    copies = 2 if queries > 1 else 3 if heads >= 32 else 4
    return ScoreConfig(copies * multiprocessors, queries, stages=4, registers=min(255, 512 // copies // 8 * 8))


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
    config = config or score_config(b, heads, multiprocessors(q))
    rows = n * -(-b // config.queries)
    _index_score_kernel_sm90[(config.programs,)](
        q.view(torch.uint8) if q.dtype == torch.float8_e4m3fn else q,
        weights,
        pool.view(torch.int32),
        page_table,
        visible,
        out,
        maxima if maxima is not None else out,
        pool.shape[1] // 4,
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
        GROUP=GROUP,
        MAXIMA=maxima is not None,
        STAGES=config.stages,
        TILES=entries_per_page // KEYS_PER_TILE,
        num_warps=4,
        maxnreg=config.registers,
    )
    return out


def aot_cases() -> list[AotCase]:
    """Both layouts, Flash's and V4.1's heads."""
    pointers = {"weights": "*fp32", "pool": "*i32", "page_table": "*i32", "visible": "*i32", "out": "*fp32", "maxima": "*fp32"}
    scalars = ("page_words", "table_stride", "out_stride", "maxima_stride", "num_rows", "b", "num_entries")
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
                "GROUP": GROUP,
                "MAXIMA": True,
                "STAGES": 4,
                "TILES": 1,
            },
            num_warps=4,
            aligned=("q", *pointers, "page_words", "out_stride", "maxima_stride"),
            archs=(HOPPER,),
        )
        for layout in ("index_fp8", "index_mxfp4")
        for heads, queries, rows in ((64, 1, 1), (64, 1, 128), (32, 1, 1), (8, 1, 1), (64, 4, 64), (32, 4, 64))
    ]
