"""Sparse attention in Gluon for Hopper: warps that bring records beside warps that weigh them and add them up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from abyssal.kv import layouts
from abyssal.ops._aot import HOPPER, AotCase
from abyssal.ops.sparse_attention.arguments import HEAD_DIM, PAIRS, KeyList, Splits, check, empty_keys
from abyssal.ops.sparse_attention.triton import COMBINE_BLOCK, LOG2_E, combine, fixed_splits, multiprocessors, new_partial

BLOCK_HEADS = 64  # rows of one wgmma
BLOCK_KEYS = 64  # where programs are many; where they are few, half as many keys reach twice as many of them
NUM_WARPS = 4  # of every role
ADD_REGISTERS = 160
BRING_REGISTERS = 80

# Microseconds, fitted to 25 measured launches of 1 to 16 queries with 640 keys each.
START_COST = 5.4  # of one program (launch, queries, first records, result)
BLOCK_COST = {64: 2.8, 32: 1.5}  # of one more block, by its keys
COMBINE_COST = 1.7  # of the second launch
READ_COST = 0.3  # of its reading up to 16 parts of a head at once
PART_COST = 0.03  # of writing and reading one part
SMALL_PARTS = 40  # with blocks of 32 keys more splits paid up to so many parts in all; above, at most 8 splits did


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Splits of one launch, and its blocks of keys: 64 or 32."""

    splits: Splits
    block_keys: int = BLOCK_KEYS


@lru_cache(maxsize=4096)
def launch_config(tokens: int, heads: int, max_keys: tuple[int, int], sms: int, batch_invariant: bool = False) -> LaunchConfig:
    """Splits and blocks of keys that take the least time, as for the portable kernel, with blocks of 64 heads.

    In batch-invariant mode a split is a fixed number of blocks of 64 keys whatever else is in the batch.
    """
    programs = tokens * -(-heads // BLOCK_HEADS)
    blocks = {keys: max(1, sum(-(-n // keys) for n in max_keys)) for keys in BLOCK_COST}
    if batch_invariant:
        return LaunchConfig(fixed_splits(blocks[BLOCK_KEYS]))

    def cost(config: LaunchConfig) -> float:
        count, keys = config.splits.count, config.block_keys
        waves = -(-programs * count // sms)
        parts = COMBINE_COST + READ_COST * -(-count // COMBINE_BLOCK) + PART_COST * programs * count if count > 1 else 0
        return waves * (START_COST + -(-blocks[keys] // count) * BLOCK_COST[keys]) + parts

    most = {64: blocks[64], 32: min(blocks[32], max(8, SMALL_PARTS // programs))}
    return min((LaunchConfig(Splits(count, None), keys) for keys in most for count in range(1, most[keys] + 1)), key=cost)


def sparse_attention(
    q: Tensor,
    window: KeyList,
    entries: KeyList | None,
    sink: Tensor,
    scale: float,
    *,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """As `sparse_attention.triton.sparse_attention`, on sm_90."""
    check(q, window, entries, sink)
    if not scale > 0:
        raise ValueError(f"scale must be positive, not {scale}: masks are added before scaling")
    tokens, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device) if out is None else out
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if tokens == 0:
        return out, lse
    entries = empty_keys(tokens, window) if entries is None else entries
    if config is None:
        widths = (window.slots.shape[1], entries.slots.shape[1])
        config = launch_config(tokens, heads, widths, multiprocessors(q.device), batch_invariant)
    splits = config.splits
    partial = new_partial(q, splits.count)
    tiles = tokens * splits.count * -(-heads // BLOCK_HEADS)
    attend_kernel[(min(tiles, multiprocessors(q.device)),)](
        q,
        q.stride(0),
        q.stride(1),
        *_key_arguments(window),
        *_key_arguments(entries),
        no_record(q.device),
        sink,
        scale * LOG2_E,
        out,
        out.stride(0),
        out.stride(1),
        lse,
        partial.out,
        partial.lse,
        partial.scale,
        heads,
        tiles,
        splits.count,
        splits.blocks or 0,
        D=HEAD_DIM,
        WINDOW=window.records.layout,
        ENTRIES=entries.records.layout,
        WINDOW_PER_PAGE=window.records.entries_per_page,
        ENTRIES_PER_PAGE=entries.records.entries_per_page,
        HEAD_BLOCKS=-(-heads // BLOCK_HEADS),
        PARTIAL=splits.count > 1,
        BLOCK=config.block_keys,
        ADD_REGISTERS=ADD_REGISTERS,
        BRING_REGISTERS=BRING_REGISTERS,
        num_warps=NUM_WARPS,
        launch_pdl=True,
    )
    if splits.count > 1:
        combine(partial, splits, sink, out, lse)
    return out, lse


@cache
def no_record(device: torch.device) -> Tensor:
    """A record of zeros, which kernels read in place of those that do not exist."""
    return torch.zeros(max(layouts.get(name).data_bytes for pair in PAIRS for name in pair), dtype=torch.uint8, device=device)


def _key_arguments(keys: KeyList) -> tuple[Tensor, int, Tensor, int, int, Tensor]:
    return keys.records.pages, keys.records.pages.stride(0), keys.slots, keys.slots.stride(0), keys.slots.shape[1], keys.lengths


HALF = gl.constexpr(HEAD_DIM // 2)  # columns of one role's output
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
SHARED_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))
SHARED_ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


# Threads of one half of the output in bf16: 16 bytes each, of the rows that they have in `OUTPUT`.
OUTPUT_ROWS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, HEAD_DIM // 2],
    )
)


class Work(NamedTuple):
    """What tells a role which tiles there are, and how many keys of each; of the kernel's arguments, as those below."""

    window_lengths: Any
    entry_lengths: Any
    heads: Any
    tiles: Any
    count: Any
    split_blocks: Any


class Queries(NamedTuple):
    rows: Any
    stride_t: Any
    stride_h: Any


class Keys(NamedTuple):
    """A list of records."""

    slots: Any
    stride: Any
    width: Any
    pages: Any
    page_stride: Any


class Output(NamedTuple):
    """Where results go: rows of the output, or of parts, and their log-sum-exp."""

    rows: Any
    stride_t: Any
    stride_h: Any
    lse: Any
    scale: Any  # of parts


class Barriers(NamedTuple):
    """Of shared memory that one role fills and another empties."""

    full: Any
    empty: Any


@gluon.constexpr_function
def score_layout(block):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block, 16])


@gluon.constexpr_function
def code_layout(words, block):
    """Threads of codes [keys, 4, words]: four of a row, so that eight in turn hold two neighbouring rows.

    So their stores of 16 of every 32 bytes fall into different banks of swizzled rows.
    """
    of_thread = [[0, 0, 1 << i] for i in range(words.bit_length() - 1)] + ([[32, 0, 0]] if block == 64 else [])
    of_lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(of_thread, of_lanes, [[8, 0, 0], [16, 0, 0]], [], [block, 4, words])


@gluon.jit(do_not_specialize=["H", "window_width", "entry_width", "tiles", "count", "split_blocks"])
def attend_kernel(
    q,
    q_stride_t,
    q_stride_h,
    window_pages,
    window_page_stride,
    window_slots,
    window_slots_stride,
    window_width,
    window_lengths,
    entry_pages,
    entry_page_stride,
    entry_slots,
    entry_slots_stride,
    entry_width,
    entry_lengths,
    zeros,
    sink,
    scale_log2,
    out,
    out_stride_t,
    out_stride_h,
    lse,
    partial_out,
    partial_lse,
    partial_scale,
    H,
    tiles,
    count,
    split_blocks,
    D: gl.constexpr,
    WINDOW: gl.constexpr,
    ENTRIES: gl.constexpr,
    WINDOW_PER_PAGE: gl.constexpr,
    ENTRIES_PER_PAGE: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr,
    PARTIAL: gl.constexpr,
    BLOCK: gl.constexpr,
    ADD_REGISTERS: gl.constexpr,
    BRING_REGISTERS: gl.constexpr,
):
    """Tiles of 64 heads of one token over one split of its key blocks, as a program of `attend_kernel` in Triton has one.

    Four roles of four warps run side by side. Two bring records to shared memory as bf16, the left and the right half of each. One turns
    records into weights and adds weighted records to the left half of the output, one adds to the right half and brings queries. Every
    role goes through the program's tiles by itself, so that records of the next tile come while results of this one leave. Two blocks
    of keys and of weights are on their way at a time. The halves of a block of keys have barriers of their own: the scores of one are
    summed while the other is still being widened.
    """
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [64, D], SHARED)
    left = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, HALF], SHARED)
    right = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, HALF], SHARED)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, BLOCK], gl.NVMMASharedLayout(2 * BLOCK, 16, rank=2))
    bias = gl.allocate_shared_memory(gl.float32, [4, BLOCK], SHARED_ROW)
    factors = gl.allocate_shared_memory(gl.float32, [4, 64], SHARED_ROW)
    of_q = Barriers(allocate_barriers(1), allocate_barriers(1))
    of_left = Barriers(allocate_barriers(2), allocate_barriers(2))
    of_right = Barriers(allocate_barriers(2), allocate_barriers(2))
    of_end = Barriers(allocate_barriers(1), allocate_barriers(1))
    p_full = allocate_barriers(2)
    fence_async_shared()
    gdc_wait()  # launched while the kernel before may still run
    gdc_launch_dependents()  # what follows waits for this kernel's end by itself

    work = Work(window_lengths, entry_lengths, H, tiles, count, split_blocks)
    queries = Queries(q, q_stride_t, q_stride_h)
    to = Output(out, out_stride_t, out_stride_h, lse, lse)
    if PARTIAL:
        to = Output(partial_out, 0, D, partial_lse, partial_scale)
    window = Keys(window_slots, window_slots_stride, window_width, window_pages, window_page_stride)
    entries = Keys(entry_slots, entry_slots_stride, entry_width, entry_pages, entry_page_stride)
    gl.warp_specialize(
        [
            (
                weigh_and_add,
                (work, to, sink, scale_log2, q_smem, left, right, p_smem, bias, factors, of_q, of_left, of_right, p_full, of_end,
                 HEAD_BLOCKS, PARTIAL),
            ),
            (
                add_right,
                (work, to, queries, q_smem, right, p_smem, factors, of_q, of_right, p_full, of_end, HEAD_BLOCKS, PARTIAL),
            ),
            (
                bring_half,
                (work, window, entries, zeros, left, bias, of_left, 0, WINDOW, ENTRIES, WINDOW_PER_PAGE, ENTRIES_PER_PAGE, HEAD_BLOCKS,
                 PARTIAL),
            ),
            (
                bring_half,
                (work, window, entries, zeros, right, bias, of_right, 1, WINDOW, ENTRIES, WINDOW_PER_PAGE, ENTRIES_PER_PAGE,
                 HEAD_BLOCKS, PARTIAL),
            ),
        ],
        [4, 4, 4],
        [ADD_REGISTERS, BRING_REGISTERS, BRING_REGISTERS],
    )  # fmt: skip


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit
def place(tile, work, HEAD_BLOCKS: gl.constexpr, PARTIAL: gl.constexpr):
    """Token, split and first head of a tile."""
    token, split = tile // HEAD_BLOCKS, 0
    if PARTIAL:
        split = token % work.count
        token = token // work.count
    return token, split, tile % HEAD_BLOCKS * 64


@gluon.jit
def split_range(split, blocks, work, PARTIAL: gl.constexpr):
    """First block of a split, and how many: a fixed number each, or evenly (`split_blocks` 0)."""
    first, mine = 0, blocks
    if PARTIAL:
        each = blocks // work.count
        more = blocks - each * work.count
        first = split * each + gl.minimum(split, more)
        mine = gl.where(split < more, each + 1, each)
        if work.split_blocks > 0:
            first = split * work.split_blocks
            mine = gl.minimum(gl.maximum(blocks - first, 0), work.split_blocks)
    return first, mine


@gluon.jit
def blocks_of_tile(tile, work, BLOCK: gl.constexpr, HEAD_BLOCKS: gl.constexpr, PARTIAL: gl.constexpr):
    token, split, _ = place(tile, work, HEAD_BLOCKS, PARTIAL)
    window_blocks = (gl.load(work.window_lengths + token) + BLOCK - 1) // BLOCK
    entry_blocks = (gl.load(work.entry_lengths + token) + BLOCK - 1) // BLOCK
    return split_range(split, window_blocks + entry_blocks, work, PARTIAL)[1]


@gluon.jit
def weigh_and_add(
    work, to, sink, scale_log2, q_smem, left, right, p_smem, bias, factors, of_q, of_left, of_right, p_full, of_end,
    HEAD_BLOCKS: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """Weights exp2(score - running maximum) of every block, for both roles that add, and the left half of the output."""
    BLOCK: gl.constexpr = left.shape[1]
    ROWS: gl.constexpr = gl.SliceLayout(1, score_layout(BLOCK))
    n = 0  # blocks of earlier tiles
    parity = 0
    blocks = blocks_of_tile(gl.program_id(0), work, BLOCK, HEAD_BLOCKS, PARTIAL)
    for tile in range(gl.program_id(0), work.tiles, gl.num_programs(0)):
        token, split, first_head = place(tile, work, HEAD_BLOCKS, PARTIAL)
        top = gl.full([64], float("-inf"), gl.float32, ROWS)
        total = of_threads(gl.zeros([64, BLOCK], gl.float32, score_layout(BLOCK)), plus)
        acc = gl.zeros([64, HALF], gl.float32, OUTPUT)
        mbarrier.wait(of_q.full.index(0), parity)
        if blocks > 0:
            mbarrier.wait(of_left.full.index(n & 1), n >> 1 & 1)
            scores = multiply_left(q_smem, left.index(n & 1), masked(bias, n))
            mbarrier.wait(of_right.full.index(n & 1), n >> 1 & 1)
            scores = warpgroup_mma_wait(0, deps=[multiply_right(q_smem, right.index(n & 1), scores)])
            scores, acc, top, total = soften(scores, n, acc, top, total, scale_log2, p_smem, bias, factors, p_full)
            for block in range(blocks - 1):
                half = (n + block) & 1
                phase = (n + block + 1) >> 1 & 1
                acc = warpgroup_mma(p_smem.index(half), left.index(half), acc, is_async=True)
                mbarrier.wait(of_left.full.index(1 - half), phase)
                scores = multiply_left(q_smem, left.index(1 - half), scores)
                acc = warpgroup_mma_wait(1, deps=[acc])
                mbarrier.arrive(of_left.empty.index(half))
                mbarrier.wait(of_right.full.index(1 - half), phase)
                scores = warpgroup_mma_wait(0, deps=[multiply_right(q_smem, right.index(1 - half), scores)])
                block_after = n + block + 1
                scores, acc, top, total = soften(scores, block_after, acc, top, total, scale_log2, p_smem, bias, factors, p_full)
            n += blocks
            half = (n - 1) & 1
            mbarrier.arrive(of_q.empty.index(0))
            last = warpgroup_mma(p_smem.index(half), left.index(half), acc, is_async=True)
            b_sink, next_blocks = at_end(tile, sink, work, BLOCK, HEAD_BLOCKS, PARTIAL)
            acc = warpgroup_mma_wait(0, deps=[last])
            mbarrier.arrive(of_left.empty.index(half))
        else:
            mbarrier.arrive(of_q.empty.index(0))
            b_sink, next_blocks = at_end(tile, sink, work, BLOCK, HEAD_BLOCKS, PARTIAL)

        total = gl.convert_layout(gl.sum(total, axis=1), ROWS, assert_trivial=True)
        b_lse = top + gl.log2(total)  # -inf without keys
        factor = 1.0 / gl.where(total > 0, total, 1.0)
        rows = here(gl.arange(0, 64, layout=ROWS))
        in_range = rows < work.heads - first_head
        part = part_of(token, split, work, PARTIAL)
        of_rows = part * work.heads + first_head + rows
        if not PARTIAL:
            share = 1.0 / (1.0 + gl.exp2(b_sink * 1.4426950408889634 - b_lse))
            factor = factor * gl.where(b_lse == float("-inf"), 0.0, share)
        mbarrier.wait(of_end.empty.index(0), parity)
        if PARTIAL:
            largest = gl.maximum(gl.convert_layout(largest_of_rows(acc), ROWS), factors.index(3).load(ROWS))
            gl.store(to.scale + of_rows, largest * factor, mask=in_range)
            factor = 1.0 / largest
        factors.index(2).store(factor)
        mbarrier.arrive(of_end.full.index(0))
        parity ^= 1
        gl.store(to.lse + of_rows, b_lse if PARTIAL else b_lse * 0.6931471805599453, mask=in_range)
        if not PARTIAL or blocks > 0:  # `combine_kernel` does not read parts without keys
            of_acc = gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT))
            store_half(0, acc, of_acc, to, token, part, first_head, work.heads, PARTIAL)
        blocks = next_blocks


@gluon.jit
def at_end(tile, sink, work, BLOCK: gl.constexpr, HEAD_BLOCKS: gl.constexpr, PARTIAL: gl.constexpr):
    """What is loaded during a tile's last product: sinks of its heads, where it has all keys, and how many blocks the next tile has."""
    _, _, first_head = place(tile, work, HEAD_BLOCKS, PARTIAL)
    rows = here(gl.arange(0, 64, layout=gl.SliceLayout(1, score_layout(BLOCK))))
    b_sink = rows.to(gl.float32)
    if not PARTIAL:
        b_sink = gl.load(sink + first_head + rows, mask=rows < work.heads - first_head, other=0.0)
    return b_sink, blocks_of_tile(gl.minimum(tile + gl.num_programs(0), work.tiles - 1), work, BLOCK, HEAD_BLOCKS, PARTIAL)


@gluon.jit
def here(rows):
    """The same, but what depends on it is computed here, and not kept in registers through a loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [rows], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def largest_of_rows(acc):
    """Largest magnitude of each row; not 0, as rows are divided by it."""
    return gl.maximum(gl.max(gl.abs(acc), axis=1), 1e-30)


@gluon.jit
def part_of(token, split, work, PARTIAL: gl.constexpr):
    """Index of a tile's part among all parts; without splits, of its token."""
    if PARTIAL:
        return token.to(gl.int64) * work.count + split
    else:
        return token.to(gl.int64)


@gluon.jit
def masked(bias, block):
    """What scores of a block begin with: 0, and -inf where there is no key. It is there before the block's records are."""
    BLOCK: gl.constexpr = bias.shape[1]
    row = gl.expand_dims(bias.index(block & 3).load(gl.SliceLayout(0, score_layout(BLOCK))), 0)
    return gl.broadcast(row, gl.zeros([64, BLOCK], gl.float32, score_layout(BLOCK)))[0]


@gluon.jit
def multiply_left(q_smem, left, scores):
    """Begin the scores of a block, before scaling, with the left halves of queries and records.

    Who brings records has loads of the next block on their way and must not wait for them, as a fence would; so the readers fence.
    """
    fence_async_shared()
    return warpgroup_mma(q_smem.slice(0, HALF, dim=1), left.permute((1, 0)), scores, is_async=True)


@gluon.jit
def multiply_right(q_smem, right, scores):
    fence_async_shared()
    return warpgroup_mma(q_smem.slice(HALF, HALF, dim=1), right.permute((1, 0)), scores, is_async=True)


@gluon.jit
def soften(scores, block, acc, top, total, scale_log2, p_smem, bias, factors, p_full):
    """Write a block's weights, and the factor that what came before takes with a new maximum.

    Returns what the next block's scores begin with, the output so far, the maximum, the sums.
    """
    half = block & 1
    rows = gl.convert_layout(gl.max(of_threads(scores, larger), axis=1), top.type.layout, assert_trivial=True)
    new_top = gl.maximum(top, rows * scale_log2)
    base = gl.where(new_top == float("-inf"), 0.0, new_top)  # no key yet: exp2(-inf - 0) = 0 rather than NaN
    keep = gl.exp2(top - base)
    factors.index(half).store(keep)
    acc = acc * gl.expand_dims(gl.convert_layout(keep, gl.SliceLayout(1, OUTPUT)), 1)  # beside exponentials, which take longer
    weights = gl.exp2(scores * scale_log2 - gl.expand_dims(base, 1))
    p_smem.index(half).store(weights.to(gl.bfloat16))  # free: the block before last has left shared memory
    scores = masked(bias, block + 1)
    fence_async_shared()
    mbarrier.arrive(p_full.index(half))
    total = total * gl.expand_dims(gl.convert_layout(keep, gl.SliceLayout(1, total.type.layout), assert_trivial=True), 1)
    return scores, acc, new_top, total + of_threads(weights, plus)


@gluon.jit
def of_threads(values, combine: gl.constexpr):
    """What each thread's values of a row make [64, 4], as a tree: a reduction would be a chain."""
    COUNT: gl.constexpr = values.shape[1] // 4
    values = gl.reshape(gl.reshape(values, [64, COUNT // 2, 4, 2]).permute((0, 2, 1, 3)), [64, 4, COUNT])
    for i in gl.static_range(COUNT.bit_length() - 1):
        even, odd = gl.split(gl.reshape(values, [64, 4, COUNT >> (i + 1), 2]))
        values = combine(even, odd)
    return gl.reshape(values, [64, 4])


@gluon.jit
def larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def add_right(
    work, to, queries, q_smem, right, p_smem, factors, of_q, of_right, p_full, of_end, HEAD_BLOCKS: gl.constexpr, PARTIAL: gl.constexpr
):  # fmt: skip
    """Add weights times records to the right half of the output; bring queries, those of the next tile during a tile's last product."""
    n = 0  # blocks of earlier tiles
    parity = 0
    copy_queries(gl.program_id(0), queries, q_smem, of_q.full, work, HEAD_BLOCKS, PARTIAL)
    for tile in range(gl.program_id(0), work.tiles, gl.num_programs(0)):
        token, split, first_head = place(tile, work, HEAD_BLOCKS, PARTIAL)
        BLOCK: gl.constexpr = right.shape[1]
        blocks = blocks_of_tile(tile, work, BLOCK, HEAD_BLOCKS, PARTIAL)
        acc = warpgroup_mma_init(gl.zeros([64, HALF], gl.float32, OUTPUT))
        # Not from n on: Triton 3.6 would take n, of which only bounds of loops depend, for a constant.
        for block in range(blocks):
            half = (n + block) & 1
            phase = (n + block) >> 1 & 1
            sums = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(of_right.empty.index(1 - half), pred=block > 0)
            mbarrier.wait(of_right.full.index(half), phase)
            mbarrier.wait(p_full.index(half), phase)
            fence_async_shared()
            sums = sums * gl.expand_dims(factors.index(half).load(gl.SliceLayout(1, OUTPUT)), 1)
            acc = warpgroup_mma(p_smem.index(half), right.index(half), sums, is_async=True)
        n += blocks
        if not PARTIAL:
            mbarrier.arrive(of_end.empty.index(0))
        mbarrier.wait(of_q.empty.index(0), parity)
        if tile + gl.num_programs(0) < work.tiles:
            copy_queries(tile + gl.num_programs(0), queries, q_smem, of_q.full, work, HEAD_BLOCKS, PARTIAL)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(of_right.empty.index((n - 1) & 1), pred=blocks > 0)
        if PARTIAL:
            factors.index(3).store(largest_of_rows(acc))
            mbarrier.arrive(of_end.empty.index(0))
        mbarrier.wait(of_end.full.index(0), parity)
        parity ^= 1
        factor = factors.index(2).load(gl.SliceLayout(1, OUTPUT))
        if not PARTIAL or blocks > 0:
            part = part_of(token, split, work, PARTIAL)
            store_half(1, acc, factor, to, token, part, first_head, work.heads, PARTIAL)


@gluon.jit
def store_half(SIDE: gl.constexpr, acc, factor, to, token, part, first_head, heads, PARTIAL: gl.constexpr):
    """Write one half of the output in whole sectors: four threads of a row have 32 bytes in fp32, and exchange values for 64 of 16 bits."""
    TYPE: gl.constexpr = to.rows.dtype.element_ty
    ROWS: gl.constexpr = OUTPUT_ROWS if TYPE.primitive_bitwidth == 16 else OUTPUT
    if PARTIAL:
        out_row = to.rows + (part * heads + first_head) * to.stride_h
    else:
        out_row = to.rows + token.to(gl.int64) * to.stride_t + first_head.to(gl.int64) * to.stride_h
    values = gl.convert_layout((acc * gl.expand_dims(factor, 1)).to(TYPE), ROWS)
    rows = here(gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS)))
    columns = gl.expand_dims(SIDE * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, ROWS)), 0)
    gl.store(gl.expand_dims(out_row + rows * to.stride_h, 1) + columns, values, mask=gl.expand_dims(rows < heads - first_head, 1))


@gluon.jit
def copy_queries(tile, queries, q_smem, q_full, work, HEAD_BLOCKS: gl.constexpr, PARTIAL: gl.constexpr):
    """Begin to copy a tile's queries to shared memory."""
    token, _, first_head = place(tile, work, HEAD_BLOCKS, PARTIAL)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    columns = gl.arange(0, HALF, layout=gl.SliceLayout(0, COPY))
    q_row = queries.rows + token.to(gl.int64) * queries.stride_t
    for first in gl.static_range(0, 64, 8):
        rows = here(gl.arange(first, first + 8, layout=gl.SliceLayout(1, COPY)))
        pointers = gl.expand_dims(q_row + (first_head + rows).to(gl.int64) * queries.stride_h, 1) + gl.expand_dims(columns, 0)
        mask = gl.expand_dims(rows < work.heads - first_head, 1)
        for side in gl.static_range(2):
            to = q_smem.slice(first, 8).slice(side * HALF, HALF, dim=1)
            async_copy.async_copy_global_to_shared(to, pointers + side * HALF, mask=mask)
    async_copy.mbarrier_arrive(q_full.index(0))
    mbarrier.arrive(q_full.index(0))


@gluon.jit
def bring_half(
    work, window, entries, zeros, keys, bias, of_keys, SIDE: gl.constexpr,
    WINDOW: gl.constexpr, ENTRIES: gl.constexpr, WINDOW_PER_PAGE: gl.constexpr, ENTRIES_PER_PAGE: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """Bring one half of the records of both lists as bf16, block by block, to shared memory."""
    BLOCK: gl.constexpr = keys.shape[1]
    n = 0  # blocks of earlier tiles
    for tile in range(gl.program_id(0), work.tiles, gl.num_programs(0)):
        token, split, _ = place(tile, work, HEAD_BLOCKS, PARTIAL)
        rows = window.slots + token.to(gl.int64) * window.stride, entries.slots + token.to(gl.int64) * entries.stride
        window_length = gl.load(work.window_lengths + token)
        entry_length = gl.load(work.entry_lengths + token)
        # Most lists are full: their slots need not wait for the lengths.
        lists, blocks = lists_of_split(rows, window.width, entries.width, split, work, BLOCK, PARTIAL)
        first_slots = block_slots(0, lists, BLOCK)
        slots = block_slots(1, lists, BLOCK)
        if (window_length < window.width) | (entry_length < entries.width):
            lists, blocks = lists_of_split(rows, window_length, entry_length, split, work, BLOCK, PARTIAL)
            first_slots = block_slots(0, lists, BLOCK)
            slots = block_slots(1, lists, BLOCK)
        pools = (window.pages, window.page_stride, entries.pages, entries.page_stride, zeros, lists[4])
        if WINDOW.name == ENTRIES.name:
            bring_blocks(n, 0, blocks, first_slots, slots, lists, pools, keys, bias, of_keys, SIDE, True, WINDOW, WINDOW_PER_PAGE,
                         ENTRIES_PER_PAGE)  # fmt: skip
        else:
            of_window = gl.minimum(gl.maximum(lists[4], 0), blocks)
            bring_blocks(n, 0, of_window, first_slots, slots, lists, pools, keys, bias, of_keys, SIDE, False, WINDOW, WINDOW_PER_PAGE,
                         ENTRIES_PER_PAGE)  # fmt: skip
            first_slots = block_slots(of_window, lists, BLOCK)
            slots = block_slots(of_window + 1, lists, BLOCK)
            bring_blocks(n, of_window, blocks, first_slots, slots, lists, pools, keys, bias, of_keys, SIDE, True, ENTRIES,
                         WINDOW_PER_PAGE, ENTRIES_PER_PAGE)  # fmt: skip
        n += blocks


@gluon.jit
def lists_of_split(rows, window_length, entry_length, split, work, BLOCK: gl.constexpr, PARTIAL: gl.constexpr):
    """Both lists as if slot 0 of either were the first of all blocks of a split, none reaching beyond its last; and its blocks."""
    window_blocks = (window_length + BLOCK - 1) // BLOCK
    first, blocks = split_range(split, window_blocks + (entry_length + BLOCK - 1) // BLOCK, work, PARTIAL)
    window_blocks = window_blocks - first
    window_end = gl.minimum(window_length - first * BLOCK, blocks * BLOCK)
    entry_end = gl.minimum(entry_length + window_blocks * BLOCK, blocks * BLOCK)
    return (rows[0] + first * BLOCK, window_end, rows[1] - window_blocks * BLOCK, entry_end, window_blocks), blocks


@gluon.jit
def bring_blocks(
    n, first, end, first_slots, slots, lists, pools, keys, bias, of_keys, SIDE: gl.constexpr, LAST: gl.constexpr,
    LAYOUT: gl.constexpr, WINDOW_PER_PAGE: gl.constexpr, ENTRIES_PER_PAGE: gl.constexpr,
):  # fmt: skip
    """Bring one half of the records of one layout in a tile's blocks `first` to `end`, n blocks after those of the program's first.

    LAST: no other layout's records follow.
    Codes of the next block are on their way once those of this one are widened, and with them slots of the block after it: the compiler
    gives all these loads one scoreboard, so whoever waits for one waits for all that were issued.
    """
    BLOCK: gl.constexpr = keys.shape[1]
    where = locate(first, end, n, first_slots, pools, bias, SIDE, LAST, LAYOUT, WINDOW_PER_PAGE, ENTRIES_PER_PAGE)
    if LAYOUT.grid is None:
        for block in range(first, end):
            half = (n + block) & 1
            mbarrier.wait(of_keys.empty.index(half), (n + block) >> 1 & 1 ^ 1)
            copy_half(SIDE, where, keys.index(half))
            async_copy.mbarrier_arrive(of_keys.full.index(half))
            where = locate(block + 1, end, n, slots, pools, bias, SIDE, LAST, LAYOUT, WINDOW_PER_PAGE, ENTRIES_PER_PAGE)
            slots = block_slots(block + 2, lists, BLOCK)
            mbarrier.arrive(of_keys.full.index(half))
    else:
        codes, scales = load_codes(SIDE, where, LAYOUT), load_scales(SIDE, where, LAYOUT)
        for block in range(first, end):
            half = (n + block) & 1
            mbarrier.wait(of_keys.empty.index(half), (n + block) >> 1 & 1 ^ 1)
            convert_half(SIDE, codes, scales, keys.index(half), LAYOUT)
            where = locate(block + 1, end, n, slots, pools, bias, SIDE, LAST, LAYOUT, WINDOW_PER_PAGE, ENTRIES_PER_PAGE)
            mbarrier.arrive(of_keys.full.index(half))
            codes, scales = load_codes(SIDE, where, LAYOUT), load_scales(SIDE, where, LAYOUT)
            slots = block_slots(block + 2, lists, BLOCK)


@gluon.jit
def block_slots(block, lists, BLOCK: gl.constexpr):
    """Slots of a block, -1 beyond its list's end."""
    window_row, window_end, entry_row, entry_end, window_blocks = lists
    in_window = block < window_blocks
    KEYS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, code_layout(4, BLOCK)))  # one value per key
    n = here(block * BLOCK + gl.arange(0, BLOCK, layout=KEYS))  # or the compiler would count blocks in 64 bits, for addresses
    return gl.load((window_row if in_window else entry_row) + n, mask=n < (window_end if in_window else entry_end), other=-1)


@gluon.jit
def locate(
    block, end, n, slots, pools, bias, SIDE: gl.constexpr, LAST: gl.constexpr, LAYOUT: gl.constexpr, WINDOW_PER_PAGE: gl.constexpr,
    ENTRIES_PER_PAGE: gl.constexpr,
):  # fmt: skip
    """Where records lie, those before block `end`, and how far from there their scales.

    What to add to scores is written on the way, by one role: four blocks have a place for it, as that of a block is read last when the
    block after next comes to shared memory.
    """
    if SIDE == 0:
        bias.index((n + block) & 3).store(gl.where(slots >= 0, 0.0, float("-inf")))
    window_pages, window_page_stride, entry_pages, entry_page_stride, zeros, window_blocks = pools
    in_window = block < window_blocks
    slot = gl.maximum(slots, 0)
    if WINDOW_PER_PAGE == ENTRIES_PER_PAGE:
        page, row = slot // WINDOW_PER_PAGE, slot % WINDOW_PER_PAGE
    else:
        page = gl.where(in_window, slot // WINDOW_PER_PAGE, slot // ENTRIES_PER_PAGE)
        row = gl.where(in_window, slot % WINDOW_PER_PAGE, slot % ENTRIES_PER_PAGE)
    all_data = (WINDOW_PER_PAGE if in_window else ENTRIES_PER_PAGE) * LAYOUT.data_bytes
    pages = window_pages if in_window else entry_pages
    data = pages + page.to(gl.int64) * (window_page_stride if in_window else entry_page_stride) + row * LAYOUT.data_bytes
    known = slots >= 0
    if not LAST:
        known = known & (block < end)
    data = gl.where(known, data, zeros)
    return data, gl.where(known, all_data - row * (LAYOUT.data_bytes - LAYOUT.scale_bytes), 0)


@gluon.jit
def copy_half(SIDE: gl.constexpr, where, keys):
    """Records that are bf16 already go to shared memory without passing registers."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    rows = gl.expand_dims(gl.convert_layout(where[0], gl.SliceLayout(1, COPY)).to(gl.pointer_type(gl.bfloat16)), 1)
    columns = SIDE * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, COPY))
    async_copy.async_copy_global_to_shared(keys, rows + gl.expand_dims(columns, 0))


@gluon.jit
def load_codes(SIDE: gl.constexpr, where, LAYOUT: gl.constexpr):
    """Codes of one half in four parts of 64, int32 [keys, 4, 4], or [keys, 4, 2] of four bits each.

    v4: the last 64 values are bf16 [keys, 4, 8].
    """
    KEYS: gl.constexpr = where[0].shape[0]
    WORDS: gl.constexpr = 2 if LAYOUT.name == "v41_fp4" else 4  # of a thread's codes
    PART: gl.constexpr = code_layout(WORDS, KEYS)
    LAST: gl.constexpr = code_layout(8, KEYS) if LAYOUT.name == "v4" and SIDE == 1 else PART
    words = where[0].to(gl.pointer_type(gl.int32)) + SIDE * 16 * WORDS
    return (
        load_words(words, PART),
        load_words(words + 4 * WORDS, PART),
        load_words(words + 8 * WORDS, PART),
        load_words(words + 12 * WORDS, LAST),
    )


@gluon.jit
def load_words(data, LAYOUT: gl.constexpr, STEP: gl.constexpr = 1):
    """Bytes of each key from `data` on: int32 [keys, 4, words]; STEP 0: the same for all threads of a row."""
    WORDS: gl.constexpr = LAYOUT.shape[2]
    data = gl.convert_layout(data, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)), assert_trivial=True)
    v = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0), 2)
    w = gl.expand_dims(gl.expand_dims(gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT))), 0), 0)
    return gl.load(gl.expand_dims(gl.expand_dims(data, 1), 2) + (v * (STEP * WORDS) + w))


@gluon.jit
def load_scales(SIDE: gl.constexpr, where, LAYOUT: gl.constexpr):
    """Scales of one half, in words: int32 [keys] one (v4) or two (v41), or [keys, 4, 4] all four (v41_fp4)."""
    scales = (where[0] + where[1]).to(gl.pointer_type(gl.int32))
    if LAYOUT.name == "v4":
        return (gl.load(scales + SIDE),)
    elif LAYOUT.name == "v41":
        return gl.load(scales + SIDE * 2), gl.load(scales + (SIDE * 2 + 1))
    else:
        gl.static_assert(LAYOUT.name == "v41_fp4")
        return (load_words(scales + SIDE * 4, code_layout(4, where[0].shape[0]), 0),)


@gluon.jit
def convert_half(SIDE: gl.constexpr, codes, scales, keys, LAYOUT: gl.constexpr):
    """Write one half of a block as bf16 into shared memory."""
    KEYS: gl.constexpr = keys.shape[0]
    values = ()
    for i in gl.static_range(4):
        if LAYOUT.name == "v41_fp4":
            part = convert_e2m1(codes[i], pick_scale_of_16(scales[0], i, code_layout(2, KEYS)))
        elif LAYOUT.name == "v4" and SIDE == 1 and i == 3:
            part = codes[3]
        else:
            part = convert_e4m3(codes[i], pick_scale(scales, i * 4, 4 // len(scales), code_layout(4, KEYS)))
        values = values + (gl.reshape(part, [KEYS, 32]),)
    # At once: between stores to one place the compiler puts barriers.
    words = beside(beside(values[0], values[1]), beside(values[2], values[3]))
    keys._reinterpret(gl.int32, [KEYS, 128], SHARED_WORDS).store(words)


@gluon.jit
def beside(left, right):
    return gl.reshape(gl.join(left, right).permute((0, 2, 1)), [left.shape[0], 2 * left.shape[1]])


@gluon.jit
def pick_scale(scales, FIRST: gl.constexpr, OF_SCALE: gl.constexpr, LAYOUT: gl.constexpr):
    """The scale byte of each thread's codes [keys, 4], from thread FIRST of a whole half's on; OF_SCALE threads share one."""
    word = gl.convert_layout(scales[FIRST // (4 * OF_SCALE)], gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)), assert_trivial=True)
    v = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0)
    return (gl.expand_dims(word, 1) >> (FIRST + v) // OF_SCALE % 4 * 8) & 0xFF


@gluon.jit
def pick_scale_of_16(scales, PART: gl.constexpr, LAYOUT: gl.constexpr):
    """As `pick_scale`, of four words of scales [keys, 4, 4], one byte for each thread of a part."""
    words = gl.split(gl.split(gl.reshape(scales, [LAYOUT.shape[0], 4, 2, 2]))[PART % 2])[PART // 2]
    v = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0)
    return (gl.convert_layout(words, gl.SliceLayout(2, LAYOUT), assert_trivial=True) >> v * 8) & 0xFF


@gluon.jit
def convert_e4m3(codes, scale):
    """codes int32 [64, 8, V] of four e4m3 each, scale int32 [64, 8] e8m0 -> words [64, 8, V, 2] of two bf16 each.

    A code's bits moved to bf16's fields are its value times 2^-120; the factor 2^120 comes first, so that no scale overflows. Each
    code gets 16 bits below copies of its sign; moved by four, a mask leaves one copy in place of the sign.
    """
    pair = gl.maximum(scale * 0x00800080, 0x00400040)  # 2^(scale - 127), twice
    pair = gl.where(scale == 255, 0x7FC07FC0, pair)
    pair, codes = gl.broadcast(gl.expand_dims(pair, 2), codes)
    low, high = gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c;
        mov.b32 c, 0x7b807b80;
        prmt.b32 a, $2, 0, 0x9180;
        prmt.b32 b, $2, 0, 0xb3a2;
        mul.lo.u32 a, a, 16;
        mul.lo.u32 b, b, 16;
        and.b32 a, a, 0x87f087f0;
        and.b32 b, b, 0x87f087f0;
        mul.rn.bf16x2 a, a, c;
        mul.rn.bf16x2 b, b, c;
        mul.rn.bf16x2 $0, a, $3;
        mul.rn.bf16x2 $1, b, $3;
        }""",
        "=&r,=&r,r,r",
        [codes, pair],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.join(low, high)


@gluon.jit
def convert_e2m1(codes, scale):
    """codes int32 [64, 8, V] of eight e2m1 each, scale int32 [64, 8] e4m3 -> words [64, 8, V, 2, 2] of two bf16 each.

    Both bytes of a magnitude's bf16 are looked up, eight entries by three bits; the sign is bit 3. A scale's bits moved to bf16's fields
    are its value times 2^-120.
    """
    pair = gl.inline_asm_elementwise(
        "{ .reg .b32 c; mov.b32 c, 0x7b807b80; mul.rn.bf16x2 $0, $1, c; }",
        "=r,r",
        [((scale & 0x7F) << 4 | (scale & 0x80) << 8) * 0x10001],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    pair, codes = gl.broadcast(gl.expand_dims(pair, 2), codes)
    a, b, c, d = gl.inline_asm_elementwise(
        """{
        .reg .b32 m, n, s, h, l, i, k, g, t, x;
        mov.b32 k, 0x3f3f3f00;
        mov.b32 g, 0x40404040;
        mov.b32 x, 0xc0804000;
        mov.b32 l, 0xc0800000;
        and.b32 m, $4, 0x77777777;
        shr.u32 n, m, 16;
        shl.b32 s, $4, 4;
        prmt.b32 h, k, g, m;
        prmt.b32 i, l, x, m;
        prmt.b32 k, k, g, n;
        prmt.b32 l, l, x, n;
        prmt.b32 t, s, $4, 0x5140;
        lop3.b32 h, t, 0x80808080, h, 0xea;
        prmt.b32 t, s, $4, 0x7362;
        lop3.b32 k, t, 0x80808080, k, 0xea;
        prmt.b32 m, i, h, 0x5140;
        prmt.b32 n, i, h, 0x7362;
        prmt.b32 i, l, k, 0x5140;
        prmt.b32 h, l, k, 0x7362;
        mul.rn.bf16x2 $0, m, $5;
        mul.rn.bf16x2 $1, n, $5;
        mul.rn.bf16x2 $2, i, $5;
        mul.rn.bf16x2 $3, h, $5;
        }""",
        "=&r,=&r,=&r,=&r,r,r",
        [codes, pair],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.join(gl.join(a, c), gl.join(b, d))  # in the order a, b, c, d


def aot_cases() -> list[AotCase]:
    """Every pair of layouts, with splits and without, and blocks of 32 keys."""
    pointers = dict.fromkeys(("q", "out"), "*bf16") | dict.fromkeys(("window_pages", "entry_pages", "zeros"), "*u8")
    pointers |= dict.fromkeys(("window_slots", "window_lengths", "entry_slots", "entry_lengths"), "*i32")
    pointers |= dict.fromkeys(("sink", "lse", "partial_lse", "partial_scale"), "*fp32") | {"partial_out": "*fp16"}
    numbers = ("q_stride_t", "q_stride_h", "window_page_stride", "window_slots_stride", "entry_page_stride", "entry_slots_stride")
    aligned = (*pointers, *numbers, "out_stride_t", "out_stride_h")
    numbers = (*aligned[len(pointers) :], "H", "window_width", "entry_width", "tiles", "count", "split_blocks")
    signature = pointers | dict.fromkeys(numbers, "i32") | {"scale_log2": "fp32"}

    def attend(pair: tuple[str, str], count: int, keys: int = BLOCK_KEYS) -> AotCase:
        window, entries = layouts.get(pair[0]), layouts.get(pair[1])
        constants = {"D": HEAD_DIM, "WINDOW": window, "ENTRIES": entries, "WINDOW_PER_PAGE": 64, "ENTRIES_PER_PAGE": 64}
        constants |= {"PARTIAL": count > 1, "HEAD_BLOCKS": 1, "BLOCK": keys}
        constants |= {"ADD_REGISTERS": ADD_REGISTERS, "BRING_REGISTERS": BRING_REGISTERS}
        name = f"sparse_attention gluon {'+'.join(pair)} k{keys} splits {count}"
        reason = "the converting warps hold the codes of a whole block; addresses that are used once per block"
        return AotCase(name, attend_kernel, signature, constants, NUM_WARPS, 1, aligned, archs=(HOPPER,), spill_reason=reason)

    return [attend(pair, count) for pair in PAIRS for count in (1, 2)] + [attend(pair, 2, 32) for pair in PAIRS]
