"""Sparse attention in Gluon for Hopper: warps that bring records beside warps that weigh them and add them up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from abyssal.kv import layouts
from abyssal.ops._aot import HOPPER, AotCase
from abyssal.ops.sparse_attention.arguments import HEAD_DIM, PAIRS, KeyList, Splits, check, empty_keys
from abyssal.ops.sparse_attention.triton import FIXED_SPLIT_BLOCKS, LOG2_E, best_split, combine, multiprocessors, new_partial

BLOCK_HEADS = 64  # rows of one wgmma
BLOCK_KEYS = 64
NUM_WARPS = 4  # of the role that weighs; four more add the right half, eight bring records
ADD_REGISTERS, BRING_REGISTERS = 160, 72


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Splits of one launch; the tile sizes are fixed."""

    splits: Splits


def launch_config(tokens: int, heads: int, max_keys: tuple[int, int], sms: int, batch_invariant: bool = False) -> LaunchConfig:
    """As for the portable kernel, with blocks of 64 heads and 64 keys."""
    blocks = sum(-(-keys // BLOCK_KEYS) for keys in max_keys)
    if batch_invariant:
        return LaunchConfig(Splits(max(1, -(-blocks // FIXED_SPLIT_BLOCKS)), FIXED_SPLIT_BLOCKS))
    return LaunchConfig(Splits(best_split(tokens * -(-heads // BLOCK_HEADS), blocks, sms), None))


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
    attend_kernel[(tokens * splits.count * -(-heads // BLOCK_HEADS),)](
        q,
        q.stride(0),
        q.stride(1),
        *_key_arguments(window),
        *_key_arguments(entries),
        sink,
        scale * LOG2_E,
        out,
        out.stride(0),
        out.stride(1),
        lse,
        partial.out,
        partial.lse,
        heads,
        splits.count,
        splits.blocks or 0,
        D=HEAD_DIM,
        WINDOW=window.records.layout,
        ENTRIES=entries.records.layout,
        WINDOW_PER_PAGE=window.records.entries_per_page,
        ENTRIES_PER_PAGE=entries.records.entries_per_page,
        PARTIAL=splits.count > 1,
        ADD_REGISTERS=ADD_REGISTERS,
        BRING_REGISTERS=BRING_REGISTERS,
        num_warps=NUM_WARPS,
        launch_pdl=True,
    )
    if splits.count > 1:
        combine(partial, splits, sink, out, lse)
    return out, lse


def _key_arguments(keys: KeyList) -> tuple[Tensor, int, Tensor, int, Tensor]:
    return keys.records.pages, keys.records.pages.stride(0), keys.slots, keys.slots.stride(0), keys.lengths


# Threads of a block's codes [64 keys, threads of a row, words]: a row's 8 threads move 128 bytes (`WIDE`) or 64 (`NARROW`). Eight lanes
# in turn hold four threads of two neighbouring rows, so that their 16-byte stores fall into different banks of swizzled rows.
LANES = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [0, 4, 0], [2, 0, 0]]
WARPS = [[4, 0, 0], [8, 0, 0], [16, 0, 0]]
WIDE = gl.constexpr(gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 2], [32, 0, 0]], LANES, WARPS, [], [64, 8, 4]))
NARROW = gl.constexpr(gl.DistributedLinearLayout([[0, 0, 1], [32, 0, 0]], LANES, WARPS, [], [64, 8, 2]))
REST = gl.constexpr(  # `WIDE` with a row's words in one dimension
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [32, 0]], [[0, 4], [0, 8], [1, 0], [0, 16], [2, 0]], [[4, 0], [8, 0], [16, 0]], [], [64, 32]
    )
)
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
HALF = gl.constexpr(HEAD_DIM // 2)  # columns of one role's output
QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
SHARED_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))
SHARED_ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit(do_not_specialize=["count", "split_blocks"])
def attend_kernel(
    q,
    q_stride_t,
    q_stride_h,
    window_pages,
    window_page_stride,
    window_slots,
    window_slots_stride,
    window_lengths,
    entry_pages,
    entry_page_stride,
    entry_slots,
    entry_slots_stride,
    entry_lengths,
    sink,
    scale_log2,
    out,
    out_stride_t,
    out_stride_h,
    lse,
    partial_out,
    partial_lse,
    H,
    count,
    split_blocks,
    D: gl.constexpr,
    WINDOW: gl.constexpr,
    ENTRIES: gl.constexpr,
    WINDOW_PER_PAGE: gl.constexpr,
    ENTRIES_PER_PAGE: gl.constexpr,
    PARTIAL: gl.constexpr,
    ADD_REGISTERS: gl.constexpr,
    BRING_REGISTERS: gl.constexpr,
):
    """One block of heads of one token over one split of its key blocks, as `attend_kernel` in Triton.

    Three roles run side by side: eight warps bring records to shared memory as bf16, four turn them into weights and add weighted
    records to the left half of the output, four add to the right half. Two blocks of keys and of weights are on their way at a time.
    """
    head_blocks = (H + 63) // 64
    program = gl.program_id(0)
    first_head = program % head_blocks * 64
    split = program // head_blocks % count
    token = program // (head_blocks * count)

    q_smem = gl.allocate_shared_memory(gl.bfloat16, [64, D], SHARED)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, D], SHARED)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], SHARED)
    bias = gl.allocate_shared_memory(gl.float32, [2, 64], SHARED_ROW)
    factors = gl.allocate_shared_memory(gl.float32, [3, 64], SHARED_ROW)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(p_full.index(i), count=1)
    mbarrier.init(p_full.index(2), count=1)
    fence_async_shared()
    gdc_wait()  # launched while the kernel before may still run

    window_length = gl.load(window_lengths + token)
    entry_length = gl.load(entry_lengths + token)
    window_blocks = (window_length + 63) // 64
    blocks = window_blocks + (entry_length + 63) // 64
    first, last = split_range(split, blocks, count, split_blocks)
    window_row = window_slots + token.to(gl.int64) * window_slots_stride
    entry_row = entry_slots + token.to(gl.int64) * entry_slots_stride
    q_rows = q + token.to(gl.int64) * q_stride_t + first_head.to(gl.int64) * q_stride_h
    lse_row = lse + token.to(gl.int64) * H + first_head
    part = token.to(gl.int64) * count + split
    if PARTIAL:
        lse_row = partial_lse + part * H + first_head
    if not PARTIAL:
        out_rows = out + token.to(gl.int64) * out_stride_t + first_head.to(gl.int64) * out_stride_h
        out_stride = out_stride_h
    else:
        out_rows = partial_out + (part * H + first_head) * D
        out_stride = D
        gdc_launch_dependents()  # `combine_kernel` waits for this kernel's end by itself
    gl.warp_specialize(
        [
            (
                weigh_and_add,
                (sink + first_head, lse_row, out_rows, out_stride, H - first_head, last - first, scale_log2, q_smem, k_smem, p_smem,
                 bias, factors, q_full, k_full, k_empty, p_full, PARTIAL),
            ),
            (
                add_right,
                (q_rows, q_stride_h, out_rows, out_stride, H - first_head, last - first, q_smem, k_smem, p_smem, factors, q_full,
                 k_full, k_empty, p_full, PARTIAL),
            ),
            (
                bring_blocks,
                (window_row, window_length, window_pages, window_page_stride, entry_row, entry_length, entry_pages,
                 entry_page_stride, first, last, k_smem, bias, k_full, k_empty, WINDOW, ENTRIES, WINDOW_PER_PAGE,
                 ENTRIES_PER_PAGE),
            ),
        ],
        [4, 8],
        [ADD_REGISTERS, BRING_REGISTERS],
    )  # fmt: skip


@gluon.jit
def split_range(split, blocks, count, split_blocks):
    """First and last + 1 block of a split: a fixed number of blocks each, or evenly (`split_blocks` 0)."""
    first = blocks * split // count
    last = blocks * (split + 1) // count
    if split_blocks > 0:
        first = split * split_blocks
        last = gl.minimum(first + split_blocks, blocks)
    return first, gl.maximum(first, last)


@gluon.jit
def weigh_and_add(
    sink, lse, out_rows, out_stride, heads, blocks, scale_log2, q_smem, k_smem, p_smem, bias, factors, q_full, k_full, k_empty,
    p_full, PARTIAL: gl.constexpr,
):  # fmt: skip
    """Weights exp2(score - running maximum) of every block, for both roles that add, and the left half of the output."""
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    top = gl.full([64], float("-inf"), gl.float32, ROWS)
    total = gl.zeros([64], gl.float32, ROWS)
    no_scores = gl.zeros([64, 64], gl.float32, SCORES)
    acc = gl.zeros([64, HALF], gl.float32, OUTPUT)
    mbarrier.wait(q_full.index(0), 0)
    if blocks > 0:
        mbarrier.wait(k_full.index(0), 0)
        scores = warpgroup_mma(q_smem, k_smem.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        keep, top, total = soften(scores, 0, top, total, scale_log2, p_smem, bias, factors, p_full)
        for block in range(blocks - 1):
            half = block % 2
            acc = acc * gl.expand_dims(gl.convert_layout(keep, gl.SliceLayout(1, OUTPUT)), 1)
            acc = warpgroup_mma(p_smem.index(half), k_smem.index(half).slice(0, HALF, dim=1), acc, is_async=True)
            mbarrier.wait(k_full.index(1 - half), (block + 1) // 2 % 2)
            keys = k_smem.index(1 - half).permute((1, 0))
            scores = warpgroup_mma(q_smem, keys, no_scores, use_acc=False, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(k_empty.index(half))
            scores = warpgroup_mma_wait(0, deps=[scores])
            keep, top, total = soften(scores, block + 1, top, total, scale_log2, p_smem, bias, factors, p_full)
        half = (blocks - 1) % 2
        acc = acc * gl.expand_dims(gl.convert_layout(keep, gl.SliceLayout(1, OUTPUT)), 1)
        acc = warpgroup_mma(p_smem.index(half), k_smem.index(half).slice(0, HALF, dim=1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])

    b_lse = top + gl.log2(total)  # -inf without keys
    factor = 1.0 / gl.where(total > 0, total, 1.0)
    rows = gl.arange(0, 64, layout=ROWS)
    if not PARTIAL:
        b_sink = gl.load(sink + rows, mask=rows < heads, other=0.0)
        share = 1.0 / (1.0 + gl.exp2(b_sink * 1.4426950408889634 - b_lse))
        factor = factor * gl.where(b_lse == float("-inf"), 0.0, share)
    factors.index(2).store(factor)
    mbarrier.arrive(p_full.index(2))
    gl.store(lse + rows, b_lse if PARTIAL else b_lse * 0.6931471805599453, mask=rows < heads)
    if not PARTIAL or blocks > 0:  # `combine_kernel` does not read parts without keys
        store_half(acc, gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT)), out_rows, out_stride, heads)


@gluon.jit
def soften(scores, block, top, total, scale_log2, p_smem, bias, factors, p_full):
    """Write a block's weights, and the factor that what came before takes with a new maximum; that factor, the maximum, the sum."""
    half = block % 2
    scores = scores * scale_log2 + gl.expand_dims(bias.index(half).load(gl.SliceLayout(0, SCORES)), 0)
    new_top = gl.maximum(top, gl.max(scores, axis=1))
    base = gl.where(new_top == float("-inf"), 0.0, new_top)  # no key yet: exp2(-inf - 0) = 0 rather than NaN
    weights = gl.exp2(scores - gl.expand_dims(base, 1))
    keep = gl.exp2(top - base)
    p_smem.index(half).store(weights.to(gl.bfloat16))  # free: the block before last has left shared memory
    factors.index(half).store(keep)
    fence_async_shared()
    mbarrier.arrive(p_full.index(half))
    return keep, new_top, total * keep + gl.sum(weights, axis=1)


@gluon.jit
def add_right(
    q_rows, q_stride_h, out_rows, out_stride, heads, blocks, q_smem, k_smem, p_smem, factors, q_full, k_full, k_empty, p_full,
    PARTIAL: gl.constexpr,
):  # fmt: skip
    """Bring the queries, then add weights times records to the right half of the output."""
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, QUERY))
    for side in gl.static_range(2):
        columns = side * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, QUERY))
        pointers = gl.expand_dims(q_rows + rows * q_stride_h, 1) + gl.expand_dims(columns, 0)
        b_q = gl.load(pointers, mask=gl.expand_dims(rows < heads, 1), other=0.0)
        q_smem.slice(side * HALF, HALF, dim=1).store(b_q)
    fence_async_shared()
    mbarrier.arrive(q_full.index(0))

    acc = gl.zeros([64, HALF], gl.float32, OUTPUT)
    for block in range(blocks):
        half = block % 2
        phase = block // 2 % 2
        mbarrier.wait(k_full.index(half), phase)
        mbarrier.wait(p_full.index(half), phase)
        keep = factors.index(half).load(gl.SliceLayout(1, OUTPUT))
        acc = acc * gl.expand_dims(keep, 1)
        acc = warpgroup_mma(p_smem.index(half), k_smem.index(half).slice(HALF, HALF, dim=1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(k_empty.index(half))

    mbarrier.wait(p_full.index(2), 0)
    if not PARTIAL or blocks > 0:
        store_half(acc, factors.index(2).load(gl.SliceLayout(1, OUTPUT)), out_rows + HALF, out_stride, heads)


@gluon.jit
def store_half(acc, factor, out_rows, out_stride, heads):
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, OUTPUT))
    columns = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, OUTPUT)), 0)
    places = gl.expand_dims(out_rows + rows * out_stride, 1) + columns
    result = (acc * gl.expand_dims(factor, 1)).to(out_rows.dtype.element_ty)
    gl.store(places, result, mask=gl.expand_dims(rows < heads, 1))


@gluon.jit
def bring_blocks(
    window_row, window_length, window_pages, window_page_stride, entry_row, entry_length, entry_pages, entry_page_stride,
    first, last, k_smem, bias, k_full, k_empty,
    WINDOW: gl.constexpr, ENTRIES: gl.constexpr, WINDOW_PER_PAGE: gl.constexpr, ENTRIES_PER_PAGE: gl.constexpr,
):  # fmt: skip
    """Bring the records of both lists to shared memory as bf16, block by block."""
    bring_list: gl.constexpr = copy_list if WINDOW.grid is None else convert_list
    window_blocks = (window_length + 63) // 64
    middle = gl.minimum(gl.maximum(window_blocks, first), last)
    in_window = gl.minimum(window_length - first * 64, (middle - first) * 64)
    start = middle - window_blocks
    in_entries = gl.minimum(entry_length - start * 64, (last - middle) * 64)
    slots = block_slots(window_row + first * 64, 0, in_window)
    entry_slots = block_slots(entry_row + start * 64, 0, in_entries)
    bring_list(
        slots, window_row + first * 64, in_window, 0, window_pages, window_page_stride, k_smem, bias, k_full, k_empty, WINDOW,
        WINDOW_PER_PAGE,
    )  # fmt: skip
    bring_list(
        entry_slots, entry_row + start * 64, in_entries, middle - first, entry_pages, entry_page_stride, k_smem, bias, k_full,
        k_empty, ENTRIES, ENTRIES_PER_PAGE,
    )  # fmt: skip


@gluon.jit
def convert_list(
    slots,
    slot_row,
    length,
    done,
    pages,
    page_stride,
    k_smem,
    bias,
    k_full,
    k_empty,
    LAYOUT: gl.constexpr,
    PER_PAGE: gl.constexpr,
):
    """Convert `length` packed records, the first in `slots`; `done` blocks came before. A part of the next block is asked for as one is converted."""
    data, row = locate(slots, pages, page_stride, LAYOUT, PER_PAGE)
    w0, s0 = load_part(0, data, row, LAYOUT, PER_PAGE)
    w1, s1 = load_part(1, data, row, LAYOUT, PER_PAGE)
    w2, s2 = load_part(2, data, row, LAYOUT, PER_PAGE)
    w3, s3 = load_part(3, data, row, LAYOUT, PER_PAGE)
    for block in range((length + 63) // 64):
        half = (done + block) % 2
        words = k_smem.index(half)._reinterpret(gl.int32, [64, 256], SHARED_WORDS)
        next_slots = block_slots(slot_row, block + 1, length)
        mbarrier.wait(k_empty.index(half), (done + block) // 2 % 2 ^ 1)
        bias.index(half).store(gl.where(slots >= 0, 0.0, float("-inf")))
        if LAYOUT.name == "v4":
            copy_rest(data, row, words.slice(224, 32, dim=1), LAYOUT)
        slots = next_slots
        data, row = locate(slots, pages, page_stride, LAYOUT, PER_PAGE)
        convert_part(0, w0, s0, words, LAYOUT)
        w0, s0 = load_part(0, data, row, LAYOUT, PER_PAGE)
        convert_part(1, w1, s1, words, LAYOUT)
        w1, s1 = load_part(1, data, row, LAYOUT, PER_PAGE)
        convert_part(2, w2, s2, words, LAYOUT)
        w2, s2 = load_part(2, data, row, LAYOUT, PER_PAGE)
        convert_part(3, w3, s3, words, LAYOUT)
        w3, s3 = load_part(3, data, row, LAYOUT, PER_PAGE)
        if LAYOUT.name == "v4":
            async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(k_full.index(half))


@gluon.jit
def copy_list(
    slots,
    slot_row,
    length,
    done,
    pages,
    page_stride,
    k_smem,
    bias,
    k_full,
    k_empty,
    LAYOUT: gl.constexpr,
    PER_PAGE: gl.constexpr,
):
    """`convert_list` for records that are bf16 already: they go to shared memory without passing registers."""
    blocks = (length + 63) // 64
    for block in range(blocks + 1):
        half = (done + block) % 2
        if block < blocks:
            mbarrier.wait(k_empty.index(half), (done + block) // 2 % 2 ^ 1)
            bias.index(half).store(gl.where(slots >= 0, 0.0, float("-inf")))
            copy_records(slots, pages, page_stride, k_smem.index(half), LAYOUT, PER_PAGE)
        async_copy.commit_group()
        slots = block_slots(slot_row, block + 1, length)
        if block > 0:
            async_copy.wait_group(1)
            fence_async_shared()
            mbarrier.arrive(k_full.index(1 - half))


@gluon.jit
def copy_records(slots, pages, page_stride, k_smem, LAYOUT: gl.constexpr, PER_PAGE: gl.constexpr):
    ROWS: gl.constexpr = gl.SliceLayout(1, COPY)
    there = gl.convert_layout(slots >= 0, ROWS)
    slot = gl.convert_layout(gl.maximum(slots, 0), ROWS)
    rows = pages + (slot // PER_PAGE).to(gl.int64) * page_stride + slot % PER_PAGE * LAYOUT.data_bytes
    columns = gl.expand_dims(gl.arange(0, LAYOUT.dim, layout=gl.SliceLayout(0, COPY)), 0)
    pointers = gl.expand_dims(rows.to(gl.pointer_type(gl.bfloat16)), 1) + columns
    async_copy.async_copy_global_to_shared(k_smem, pointers, mask=gl.expand_dims(there, 1))


@gluon.jit
def block_slots(slot_row, block, length):
    """Slots of a block [64], -1 beyond the list's end."""
    n = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, WIDE)))
    return gl.load(slot_row + n, mask=n < length, other=-1)


@gluon.jit
def locate(slots, pages, page_stride, LAYOUT: gl.constexpr, PER_PAGE: gl.constexpr):
    """Where records lie, and in which row of their pages; row -1: no record."""
    slot = gl.maximum(slots, 0)
    row = slot % PER_PAGE
    data = pages + (slot // PER_PAGE).to(gl.int64) * page_stride + row * LAYOUT.data_bytes
    return data, gl.where(slots >= 0, row, -1)


@gluon.jit
def load_words(data, there, LAYOUT: gl.constexpr):
    """Bytes of each key from `data` on: int32 [64, 8, words], 8 threads of a row."""
    WORDS: gl.constexpr = LAYOUT.shape[2]
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    data, there = gl.convert_layout(data, ROWS, assert_trivial=True), gl.convert_layout(there, ROWS, assert_trivial=True)
    rows = gl.expand_dims(gl.expand_dims(data, 1), 2)
    v = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0), 2)
    w = gl.expand_dims(gl.expand_dims(gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT))), 0), 0)
    return gl.load(rows + (v * WORDS + w), mask=gl.expand_dims(gl.expand_dims(there, 1), 2), other=0)


@gluon.jit
def copy_rest(data, row, words, LAYOUT: gl.constexpr):
    """The bf16 values at the end of a V4 record go to shared memory as they are."""
    ROWS: gl.constexpr = gl.SliceLayout(1, REST)
    there = gl.expand_dims(gl.convert_layout(row >= 0, ROWS, assert_trivial=True), 1)
    rows = (gl.convert_layout(data, ROWS, assert_trivial=True) + LAYOUT.grid.values).to(gl.pointer_type(gl.int32))
    columns = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, REST)), 0)
    async_copy.async_copy_global_to_shared(words, gl.expand_dims(rows, 1) + columns, mask=there)
    async_copy.commit_group()


@gluon.jit
def load_part(PART: gl.constexpr, data, row, LAYOUT: gl.constexpr, PER_PAGE: gl.constexpr):
    """128 bytes of each record of a block, or V4's last 64 codes, and their scales; zeros where the layout has no such part."""
    WORDS: gl.constexpr = NARROW if LAYOUT.name == "v4" and PART == 3 else WIDE
    there = (row >= 0) & (PART * 128 < LAYOUT.data_bytes)
    scales = data + (PER_PAGE * LAYOUT.data_bytes - row * (LAYOUT.data_bytes - LAYOUT.scale_bytes))
    part = load_words(data.to(gl.pointer_type(gl.int32)) + PART * 32, there, WORDS)
    if LAYOUT.name == "v4":  # of each 64 values
        scale = gl.load(scales.to(gl.pointer_type(gl.uint16)) + PART, mask=there, other=0).to(gl.int32)
    elif LAYOUT.name == "v41":
        scale = load_scales(scales, there, PART * 4, 2, gl.uint8)
    else:
        gl.static_assert(LAYOUT.name == "v41_fp4")
        scale = load_scales(scales, there, PART * 16, 1, gl.uint16)
    return part, scale


@gluon.jit
def load_scales(scale, there, FIRST: gl.constexpr, THREADS: gl.constexpr, TYPE: gl.constexpr):
    """The scale byte (uint8) or two (uint16) of each thread's words: int32 [64, 8]; THREADS share one, from byte FIRST on."""
    rows = gl.expand_dims((scale + FIRST).to(gl.pointer_type(TYPE)), 1)
    v = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, WIDE))), 0)
    return gl.load(rows + v // THREADS, mask=gl.expand_dims(there, 1), other=0).to(gl.int32)


@gluon.jit
def convert_part(PART: gl.constexpr, part, scale, words, LAYOUT: gl.constexpr):
    """Write one part of a block as bf16 into its columns of shared memory."""
    if LAYOUT.name == "v41_fp4":
        if PART < 2:
            convert_e2m1(part, scale, words.slice(PART * 128, 128, dim=1))
    elif LAYOUT.name == "v41":
        convert_e4m3(part, scale, words.slice(PART * 64, 64, dim=1))
    else:  # a scale byte per 64 values
        WORDS: gl.constexpr = NARROW if PART == 3 else WIDE
        ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, WORDS))
        v = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, WORDS))), 0)
        shift = v // 4 * 8 if PART < 3 else v * 0
        scale = (gl.expand_dims(gl.convert_layout(scale, ROWS, assert_trivial=True), 1) >> shift) & 0xFF
        convert_e4m3(part, scale, words.slice(PART * 64, 32 if PART == 3 else 64, dim=1))


@gluon.jit
def convert_e4m3(codes, scale, words):
    """codes int32 [64, V, 4] of four e4m3 each, scale int32 [64, V] e8m0 -> words [64, 8 V] of two bf16 each.

    A code's bits moved to bf16's fields are its value times 2^-120; the factor 2^120 comes first, so that no scale overflows. Sixteen
    times a code moves exponent and mantissa, and its sign to bit 11; 240 times the sign alone adds what is missing to bit 15.
    """
    pair = gl.maximum(scale * 0x00800080, 0x00400040)  # 2^(scale - 127), twice
    pair = gl.where(scale == 255, 0x7FC07FC0, pair)
    pair, codes = gl.broadcast(gl.expand_dims(pair, 2), codes)
    low, high = gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, t, u, c;
        mov.b32 c, 0x7b807b80;
        prmt.b32 a, $2, 0, 0x4140;
        prmt.b32 b, $2, 0, 0x4342;
        and.b32 t, a, 0x00800080;
        and.b32 u, b, 0x00800080;
        mul.lo.u32 a, a, 16;
        mul.lo.u32 b, b, 16;
        mad.lo.u32 a, t, 240, a;
        mad.lo.u32 b, u, 240, b;
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
    words.store(gl.reshape(gl.join(low, high), [words.shape[0], words.shape[1]]))


@gluon.jit
def convert_e2m1(codes, scale, words):
    """codes int32 [64, V, 4] of eight e2m1 each, scale int32 [64, V] of two e4m3 -> words [64, 16 V] of two bf16 each.

    Both bytes of a magnitude's bf16 are looked up, eight entries by three bits; the sign is bit 3.
    """
    half = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, WIDE))), 0), 0) // 2
    scale, half = gl.broadcast(gl.expand_dims(scale, 2), half)
    scale = (scale >> (half * 8)) & 0xFF
    a, b, c, d = gl.inline_asm_elementwise(
        """{
        .reg .b32 m, n, s, h, l, i, k, g, t, f, x;
        and.b32 t, $5, 0x80;
        shl.b32 f, $5, 4;
        and.b32 f, f, 0x7f0;
        shl.b32 t, t, 8;
        or.b32 f, f, t;
        prmt.b32 f, f, f, 0x1010;
        mov.b32 x, 0x7b807b80;
        mul.rn.bf16x2 f, f, x;
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
        prmt.b32 m, i, h, 0x5140;
        prmt.b32 n, i, h, 0x7362;
        prmt.b32 i, l, k, 0x5140;
        prmt.b32 h, l, k, 0x7362;
        prmt.b32 t, s, $4, 0x4000;
        lop3.b32 m, t, 0x80008000, m, 0xea;
        prmt.b32 t, s, $4, 0x5010;
        lop3.b32 n, t, 0x80008000, n, 0xea;
        prmt.b32 t, s, $4, 0x6020;
        lop3.b32 i, t, 0x80008000, i, 0xea;
        prmt.b32 t, s, $4, 0x7030;
        lop3.b32 h, t, 0x80008000, h, 0xea;
        mul.rn.bf16x2 $0, m, f;
        mul.rn.bf16x2 $1, n, f;
        mul.rn.bf16x2 $2, i, f;
        mul.rn.bf16x2 $3, h, f;
        }""",
        "=&r,=&r,=&r,=&r,r,r",
        [codes, scale],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    pairs = gl.join(gl.join(a, c), gl.join(b, d))  # [64, V, 4, 2, 2], in the order a, b, c, d
    words.store(gl.reshape(pairs, [words.shape[0], words.shape[1]]))


def aot_cases() -> list[AotCase]:
    """Every pair of layouts, with splits and without."""
    pointers = dict.fromkeys(("q", "out"), "*bf16") | dict.fromkeys(("window_pages", "entry_pages"), "*u8")
    pointers |= dict.fromkeys(("window_slots", "window_lengths", "entry_slots", "entry_lengths"), "*i32")
    pointers |= dict.fromkeys(("sink", "lse", "partial_out", "partial_lse"), "*fp32")
    numbers = ("q_stride_t", "q_stride_h", "window_page_stride", "window_slots_stride", "entry_page_stride", "entry_slots_stride")
    aligned = (*pointers, *numbers, "out_stride_t", "out_stride_h", "H")
    signature = pointers | dict.fromkeys((*aligned[len(pointers) :], "count", "split_blocks"), "i32") | {"scale_log2": "fp32"}

    def attend(pair: tuple[str, str], count: int) -> AotCase:
        constants = {"D": HEAD_DIM, "WINDOW": layouts.get(pair[0]), "ENTRIES": layouts.get(pair[1]), "PARTIAL": count > 1}
        constants |= {"WINDOW_PER_PAGE": 64, "ENTRIES_PER_PAGE": 64}
        constants |= {"ADD_REGISTERS": ADD_REGISTERS, "BRING_REGISTERS": BRING_REGISTERS}
        name = f"sparse_attention gluon {'+'.join(pair)} splits {count}"
        reason = "the converting warps hold the codes of a whole block; addresses that are used once per block"
        return AotCase(name, attend_kernel, signature, constants, NUM_WARPS, 1, aligned, archs=(HOPPER,), spill_reason=reason)

    return [attend(pair, count) for pair in PAIRS for count in (1, 2)]
