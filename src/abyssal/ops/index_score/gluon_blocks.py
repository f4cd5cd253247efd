# mypy: allow-untyped-defs
"""Scores of candidate blocks on Hopper: each thread loads the 16-byte pieces of keys that it multiplies straight from their pages.

Blocks lie anywhere, so a tile of 64 keys is many small pieces: too many for the copy engine, but a product's left operand comes from
registers anyway. Keys are widened, and scores summed, as `abyssal.ops.index_score.gluon` does it, bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from abyssal.kv.layouts import Layout
from abyssal.ops._aot import HOPPER, AotCase
from abyssal.ops._records import multiprocessors
from abyssal.ops.index_score._paged import KEYS_PER_TILE, check_blocks
from abyssal.ops.index_score.gluon import (
    DIM,
    KEYS,
    LANES,
    Done,
    Output,
    Pairs,
    Queries,
    Sums,
    _add_lanes,
    _add_pairs,
    _lane_sums,
    _load_query,
    _load_weights,
    _mma,
    _multiply,
    _of_pair,
    _or,
    _output_from,
    _places,
    _prepare_scales,
    _store,
    _store_query,
    _store_query_in_int8,
    _widen_fp8,
    _widen_mxfp4,
    _widen_to_int8,
)

PAIRS = 32  # of tiles that a program takes at most: a bit each
PAIRS_PER_PROGRAM = gl.constexpr(PAIRS)


class Keys(NamedTuple):
    """Where a program's candidates lie: in shared memory, a number for every GRAIN-th of them."""

    pool: Any  # int32
    units: Any  # int32 [tiles, KEYS / GRAIN]: of 64 bytes of the pool before a key, without a sign
    scales: Any  # int32 [tiles / 2, 2 * KEYS / GRAIN]: words from there to its scales


@gluon.constexpr_function
def _grain(block):
    """Candidates that lie side by side."""
    return min(block, 8)


@gluon.constexpr_function
def _by_grain(grain, registers, lanes, warps, keys):
    """A layout of keys as [keys / grain, grain], from the keys between which registers, lanes and warps differ."""
    bases = [[[key // grain, key % grain] for key in bits] for bits in (registers, lanes, warps)]
    return gl.DistributedLinearLayout(*bases, [], [keys // grain, grain])


@gluon.jit
def _per_key(shared, LAYOUT: gl.constexpr):
    """Numbers of groups of candidates, in shared memory -> of every candidate, with LAYOUT of [groups, GRAIN]."""
    GRAIN: gl.constexpr = LAYOUT.shape[1]
    of_group = gl.expand_dims(shared.load(gl.SliceLayout(1, LAYOUT)), 1)
    return gl.broadcast(of_group, gl.expand_dims(gl.arange(0, GRAIN, gl.SliceLayout(0, LAYOUT)), 0))[0]


@gluon.jit
def _load_words(keys, tile, KEY_WORDS: gl.constexpr):
    """Words [64, KEY_WORDS] of a tile's keys, 16 bytes per load: a lane has one or two neighbouring pieces of two keys."""
    GRAIN: gl.constexpr = KEYS // keys.units.shape[1]
    PIECES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]] if KEY_WORDS == 32 else [[0, 1], [0, 2], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]] if KEY_WORDS == 32 else [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [KEYS, KEY_WORDS],
    )
    units = gl.reshape(_per_key(keys.units.index(tile), _by_grain(GRAIN, [8], [0, 0, 1, 2, 4], [16, 32], KEYS)), (KEYS,))
    units = gl.convert_layout(units, gl.SliceLayout(1, PIECES), assert_trivial=True)
    within = gl.arange(0, KEYS, gl.SliceLayout(1, PIECES)) % GRAIN * KEY_WORDS
    piece = keys.pool + (gl.expand_dims(within, 1) + gl.expand_dims(gl.arange(0, KEY_WORDS, gl.SliceLayout(0, PIECES)), 0))
    return gl.load(piece + gl.expand_dims(units.to(gl.uint32).to(gl.int64) * 16, 1))


@gluon.jit
def _load_factors(keys, pair):
    """The word of scales of that key of two tiles whose score a lane holds in the end, int32 [warp, 8, lane]."""
    GRAIN: gl.constexpr = KEYS // keys.units.shape[1]
    LAYOUT: gl.constexpr = _by_grain(GRAIN, [], [8, 64, 1, 2, 4], [16, 32], 2 * KEYS)
    units = _per_key(keys.units._reinterpret(gl.int32, keys.scales.shape, keys.scales.layout).index(pair), LAYOUT)
    at = keys.pool + gl.expand_dims(gl.arange(0, GRAIN, gl.SliceLayout(0, LAYOUT)), 0)
    at += units.to(gl.uint32).to(gl.int64) * 16
    factors = gl.load(at + _per_key(keys.scales.index(pair), LAYOUT))
    factors = gl.permute(gl.reshape(factors, (2, 4, 2, 8)), (1, 3, 0, 2))
    return gl.convert_layout(gl.reshape(factors, (4, 8, 4)), LANES, assert_trivial=True)


@gluon.jit
def _own_byte(values, key: gl.constexpr):
    """Four lanes hold four bytes each, those of the four keys of two tiles that they share: byte i of one of these keys for lane i."""
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LANES)))[None, None, :]
    return gl.inline_asm_elementwise(
        "{ .reg .b32 all; shfl.sync.idx.b32 all, $1, $2, 0x1c1f, -1; prmt.b32 $0, all, 0, $3; }",
        "=r,r,r,r",
        [values, key, 0x4440 | lane],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _own_bytes(values, tile: gl.constexpr):
    """Of four bytes per key, as `_load_factors` has them, those that belong to the pieces that a lane has of a tile: [64, 4]."""
    PIECES: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    both = gl.join(_own_byte(values, 2 * tile), _own_byte(values, 2 * tile + 1))
    return gl.convert_layout(gl.reshape(gl.permute(both, (0, 3, 1, 2)), (KEYS, 4)), PIECES, assert_trivial=True)


@gluon.jit
def _store_scores(done):
    _store(_add_lanes(done.sums, done.entry), done.at, done.best_at, done.entry, done.reach, False)


@gluon.jit
def _score_in_fp16(keys, queries, done, count, HEADS: gl.constexpr):
    """Pairs of tiles of e4m3 keys; beside each the scores of the one before. A positive scale passes the relu."""
    MMA: gl.constexpr = _mma(HEADS, gl.float16)
    of_heads = _load_weights(queries, 0, HEADS)
    words_a, words_b = _load_words(keys, 0, 32), _load_words(keys, 1, 32)
    factors = _load_factors(keys, 0)
    for pair in range(count):
        following = gl.minimum(pair + 1, count - 1)  # of the last, whose words nobody needs, once more
        dots_a = _multiply(_widen_fp8(words_a, MMA), queries, 0, HEADS)
        words_a = _load_words(keys, 2 * following, 32)
        wide_b = _widen_fp8(words_b, MMA)
        words_b = _load_words(keys, 2 * following + 1, 32)
        scales = factors.to(gl.float32, bitcast=True)
        factors = _load_factors(keys, following)
        _store(_add_pairs(done.sums, done.entry), done.at, done.best_at, done.entry, done.reach, False)
        dots_a = warpgroup_mma_wait(0, deps=(dots_a,))
        dots_b = _multiply(wide_b, queries, 0, HEADS)
        own_a, other_a = _of_pair(_lane_sums(dots_a, of_heads, HEADS), done.entry)
        dots_b = warpgroup_mma_wait(0, deps=(dots_b,))
        own_b, other_b = _of_pair(_lane_sums(dots_b, of_heads, HEADS), done.entry)
        done = Done(Pairs(own_a, other_a, own_b, other_b, scales), done.entry + 2 * KEYS, done.at, done.best_at, done.reach)
    _store(_add_pairs(done.sums, done.entry), done.at, done.best_at, done.entry, done.reach, False)


@gluon.jit
def _score_in_int8(keys, queries, done, count, HEADS: gl.constexpr):
    """Pairs of tiles of e2m1 keys -> bits of those pairs in which a key's scales are too wide apart, whose scores are wrong."""
    MMA: gl.constexpr = _mma(HEADS, gl.int8)
    of_heads = _load_weights(queries, 0, HEADS)
    words_a, words_b = _load_words(keys, 0, 16), _load_words(keys, 1, 16)
    factors = _load_factors(keys, 0)
    wide = gl.zeros([4, 8, 4], gl.int32, LANES)
    for pair in range(count):
        following = gl.minimum(pair + 1, count - 1)  # of the last, whose words nobody needs, once more
        largest, units, missing = _prepare_scales(factors)
        factors = _load_factors(keys, following)
        dots_a = _multiply(_widen_to_int8(words_a, _own_bytes(units, 0), MMA), queries, 0, HEADS)
        words_a = _load_words(keys, 2 * following, 16)
        dots_b = _multiply(_widen_to_int8(words_b, _own_bytes(units, 1), MMA), queries, 0, HEADS)
        words_b = _load_words(keys, 2 * following + 1, 16)
        wide |= (missing != 0).to(gl.int32) << pair
        dots_a = warpgroup_mma_wait(1, deps=(dots_a,))
        low_a, high_a = _lane_sums(dots_a, of_heads, HEADS)
        _store_scores(done)
        dots_b = warpgroup_mma_wait(0, deps=(dots_b,))
        low_b, high_b = _lane_sums(dots_b, of_heads, HEADS)
        scales = largest.to(gl.float32, bitcast=True)
        done = Done(Sums(low_a, high_a, low_b, high_b, scales), done.entry + 2 * KEYS, done.at, done.best_at, done.reach)
    _store_scores(done)
    return gl.reduce(gl.reshape(wide, (128,)), 0, _or)


@gluon.jit
def _score_in_bf16(keys, queries, done, count, chosen, HEADS: gl.constexpr):
    """Those pairs of tiles of e2m1 keys whose bit of `chosen` is set, widened with their scales."""
    MMA: gl.constexpr = _mma(HEADS, gl.bfloat16)
    of_heads = _load_weights(queries, 0, HEADS)
    ones = gl.full([4, 8, 4], 1.0, gl.float32, LANES)
    for pair in range(count):
        if ((chosen >> pair) & 1) != 0:
            factors = _load_factors(keys, pair)
            wide = _widen_mxfp4(_load_words(keys, 2 * pair, 16), _own_bytes(factors, 0), MMA)
            dots = warpgroup_mma_wait(0, deps=(_multiply(wide, queries, 0, HEADS),))
            low_a, high_a = _lane_sums(dots, of_heads, HEADS)
            wide = _widen_mxfp4(_load_words(keys, 2 * pair + 1, 16), _own_bytes(factors, 1), MMA)
            dots = warpgroup_mma_wait(0, deps=(_multiply(wide, queries, 0, HEADS),))
            low_b, high_b = _lane_sums(dots, of_heads, HEADS)
            sums = Sums(low_a, high_a, low_b, high_b, ones)
            _store_scores(Done(sums, done.entry + (pair + 1) * (2 * KEYS), done.at, done.best_at, done.reach))


POINTERS = {"weights": "*fp32", "page_table": "*i32", "blocks": "*i32", "visible": "*i32", "out": "*fp32"}
SCALARS = ("table_stride", "b", "num_blocks")


@gluon.jit(do_not_specialize=[*POINTERS, *SCALARS])
def _index_score_blocks_kernel_sm90(
    q,  # [n * b, HEADS, DIM]: bytes of e4m3 for index_fp8, otherwise bf16
    weights,  # fp32 [n * b, HEADS]
    pool,  # int32, pages of page_words
    page_table,  # int32 [n, table_stride]
    blocks,  # int32 [n * b, num_blocks]
    visible,  # int32 [n * b]: of the row's candidates
    out,  # fp32 [n * b, num_blocks * BLOCK]
    page_words,
    table_stride,
    b,
    num_blocks,
    LAYOUT: gl.constexpr,
    HEADS: gl.constexpr,
    ENTRIES: gl.constexpr,  # per page
    BLOCK: gl.constexpr,
):
    """A query's candidates, in equal shares of whole pairs of tiles for the programs of axis 1."""
    FP4: gl.constexpr = LAYOUT == "index_mxfp4"
    GRAIN: gl.constexpr = _grain(BLOCK)
    PER_BLOCK: gl.constexpr = BLOCK // GRAIN
    GROUPS: gl.constexpr = PAIRS_PER_PROGRAM * (2 * KEYS) // GRAIN
    # Swizzled: with 64 heads the four rows of 64 bytes would meet in the same banks.
    WEIGHTS: gl.constexpr = gl.SwizzledSharedLayout(4 if HEADS > 8 else 2, 2, 2 if HEADS == 64 else 1, order=[1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    KEY_WORDS: gl.constexpr = 16 if FP4 else 32
    WIDE: gl.constexpr = gl.bfloat16 if FP4 else gl.float16
    row = gl.program_id(0).to(gl.int64)
    seen = gl.load(visible + row)
    pairs = (seen + (2 * KEYS - 1)) // (2 * KEYS)
    share, rest = pairs // gl.num_programs(1), pairs % gl.num_programs(1)
    first = gl.program_id(1) * share + gl.minimum(gl.program_id(1), rest)
    count = share + (gl.program_id(1) < rest).to(gl.int32)
    if count == 0:
        return

    place = gl.arange(0, GROUPS, gl.BlockedLayout([1], [32], [4], [0]))
    last = (gl.minimum((first + count) * (2 * KEYS), seen) - 1) // BLOCK
    index = gl.minimum(first * (2 * KEYS // BLOCK) + place // PER_BLOCK, last)  # scores of what is read twice are not stored
    entry = gl.load(blocks + row * num_blocks + index) * BLOCK + place % PER_BLOCK * GRAIN
    page = gl.load(page_table + row // b * table_stride + entry // ENTRIES)
    q_shared = gl.allocate_shared_memory(WIDE, [1, HEADS, DIM], gl.NVMMASharedLayout.get_default_for([HEADS, DIM], WIDE))
    w_shared = gl.allocate_shared_memory(gl.float32, [1, 4, HEADS // 4], WEIGHTS)
    precise = Queries(q_shared, w_shared)
    q, weights = q + row * (HEADS * DIM), weights + row * HEADS
    if FP4:
        SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS, DIM], gl.int8)
        queries = Queries(
            gl.allocate_shared_memory(gl.int8, [1, HEADS, DIM], SHARED),
            gl.allocate_shared_memory(gl.float32, [1, 4, HEADS // 4], WEIGHTS),
            gl.allocate_shared_memory(gl.int32, [4 if HEADS > 16 else HEADS // 8], PLAIN),
        )
        _store_query_in_int8(q, weights, queries, HEADS)
    else:
        _store_query(_load_query(q, True, HEADS), weights, precise, 0, HEADS)
    units = gl.allocate_shared_memory(gl.int32, [2 * PAIRS_PER_PROGRAM, KEYS // GRAIN], PLAIN)
    units._reinterpret(gl.int32, [GROUPS], PLAIN).store(page * (page_words // 16) + entry % ENTRIES * (KEY_WORDS // 16))
    scales = gl.allocate_shared_memory(gl.int32, [PAIRS_PER_PROGRAM, 2 * KEYS // GRAIN], PLAIN)
    scales._reinterpret(gl.int32, [GROUPS], PLAIN).store(ENTRIES * KEY_WORDS - entry % ENTRIES * (KEY_WORDS - 1))
    fence_async_shared()
    gl.thread_barrier()

    keys = Keys(pool, units, scales)
    at, best_at = _output_from(Output(out, num_blocks * BLOCK, out, 0), row, 2 * first)
    zeros = gl.zeros([4, 8, 4], gl.float32, LANES)
    before = _places() - 2 * KEYS  # not stored
    reach = gl.minimum(seen - first * (2 * KEYS), count * (2 * KEYS))
    if FP4:
        done = Done(Sums(zeros, zeros, zeros, zeros, zeros), before, at, best_at, reach)
        wide = _score_in_int8(keys, queries, done, count, HEADS)
        if gl.max(queries.inexact.load(gl.BlockedLayout([queries.inexact.shape[0]], [32], [4], [0])).to(gl.uint32), 0) != 0:
            wide = -1
        if wide != 0:
            _store_query(_load_query(q, True, HEADS), weights, precise, 0, HEADS)
            fence_async_shared()
            gl.thread_barrier()
            _score_in_bf16(keys, precise, done, count, wide, HEADS)
    else:
        done = Done(Pairs(zeros, zeros, zeros, zeros, zeros), before, at, best_at, reach)
        _score_in_fp16(keys, precise, done, count, HEADS)


@dataclass(frozen=True)
class BlocksConfig:
    """How one launch is cut."""

    programs: int  # per query, each takes an equal share of its candidates
    registers: int  # per thread


def blocks_config(rows: int, candidates: int, heads: int, multiprocessors: int) -> BlocksConfig:
    """As many programs as registers hold at a time, and of many queries as few as can take their candidates.

    2,048 queries over 16,384 candidates with 32 heads: 583 us in index_mxfp4 and 593 in index_fp8, with registers for three programs 615
    and 625, for five 601 and 793 (spills), with twice the programs per query 603 and 610.
    """
    pairs = -(-candidates // (2 * KEYS_PER_TILE))
    fewest = -(-pairs // PAIRS)
    copies = 3 if heads == 64 else 4
    programs = max(fewest, min(pairs, copies * multiprocessors // rows))
    return BlocksConfig(programs, registers=512 // copies // 8 * 8)


def index_score_blocks(
    q: Tensor,
    weights: Tensor,
    pool: Tensor,
    page_table: Tensor,
    blocks: Tensor,
    visible: Tensor,
    *,
    layout: Layout,
    entries_per_page: int,
    block_size: int,
    out: Tensor | None = None,
    config: BlocksConfig | None = None,
) -> Tensor:
    """As `abyssal.ops.index_score.triton.index_score_blocks`, for compute capability 9.0 and keys of index_fp8 or index_mxfp4.

    Scores have the bits of `abyssal.ops.index_score.gluon.index_score`. mxfp4 scales are exact from 2^-62 to 2^64. A pool may have 256 GiB.
    """
    check_blocks(q, weights, pool, page_table, blocks, visible, layout, entries_per_page, block_size)
    if layout.name == "index_bf16":
        raise ValueError("index_bf16 keys are read by the portable kernel")
    n, b, heads, _ = q.shape
    count = blocks.shape[2] * block_size
    if out is None:
        out = torch.empty(n, b, count, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    assert out.is_contiguous() and out.shape == (n, b, count)
    config = config or blocks_config(n * b, count, heads, multiprocessors(q.device, interpreted=2))
    assert config.programs * PAIRS * 2 * KEYS_PER_TILE >= count
    _index_score_blocks_kernel_sm90[(n * b, config.programs)](
        q.view(torch.uint8) if q.dtype == torch.float8_e4m3fn else q,
        weights,
        pool.view(torch.int32),
        page_table,
        blocks,
        visible,
        out,
        pool.shape[1] // 4,
        page_table.stride(0),
        b,
        blocks.shape[2],
        LAYOUT=layout.name,
        HEADS=heads,
        ENTRIES=entries_per_page,
        BLOCK=block_size,
        num_warps=4,
        maxnreg=config.registers,
    )
    return out


def aot_cases() -> list[AotCase]:
    """Both layouts, blocks of several sizes."""
    return [
        AotCase(
            name=f"index_score_blocks_sm90[{layout},heads={heads},block={block}]",
            kernel=_index_score_blocks_kernel_sm90,
            signature={
                "q": "*u8" if layout == "index_fp8" else "*bf16",
                "pool": "*i32",
                "page_words": "i32",
                **POINTERS,
                **dict.fromkeys(SCALARS, "i32"),
            },
            constants={"LAYOUT": layout, "HEADS": heads, "ENTRIES": 128, "BLOCK": block},
            aligned=("q", "pool", "page_words"),
            archs=(HOPPER,),
            max_registers=blocks_config(1, 16384, heads, 132).registers,
        )
        for layout in ("index_fp8", "index_mxfp4")
        for heads, block in ((32, 8), (64, 8), (8, 1), (8, 64))
    ]
