"""Sparse attention in Gluon for Hopper: warps that bring records, warps that weigh them and warps that add them up."""

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
from triton.language.extra.cuda import gdc_launch_dependents

from abyssal.kv import layouts
from abyssal.ops._aot import HOPPER, AotCase
from abyssal.ops.sparse_attention.arguments import HEAD_DIM, PAIRS, KeyList, Splits, check, empty_keys
from abyssal.ops.sparse_attention.triton import FIXED_SPLIT_BLOCKS, LOG2_E, best_split, combine, multiprocessors, new_partial

BLOCK_HEADS = 64  # rows of one wgmma
BLOCK_KEYS = 64
NUM_WARPS = 8  # of the role that keeps the output; four more for each of the others
WEIGH_REGISTERS, CONVERT_REGISTERS = 72, 120


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
        WEIGH_REGISTERS=WEIGH_REGISTERS,
        CONVERT_REGISTERS=CONVERT_REGISTERS,
        num_warps=NUM_WARPS,
    )
    if splits.count > 1:
        combine(partial, sink, out, lse)
    return out, lse


def _key_arguments(keys: KeyList) -> tuple[Tensor, int, Tensor, int, Tensor]:
    return keys.records.pages, keys.records.pages.stride(0), keys.slots, keys.slots.stride(0), keys.lengths


# Threads of a block's codes [64 keys, threads of a row, words]: a row's 8 threads move 128 bytes (`WIDE`) or 64 (`NARROW`). Eight lanes
# in turn hold four threads of two neighbouring rows, so that their 16-byte stores fall into different banks of swizzled rows.
LANES = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [0, 4, 0], [2, 0, 0]]
WARPS = [[4, 0, 0], [8, 0, 0]]
WIDE = gl.constexpr(gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 2], [16, 0, 0], [32, 0, 0]], LANES, WARPS, [], [64, 8, 4]))
NARROW = gl.constexpr(gl.DistributedLinearLayout([[0, 0, 1], [16, 0, 0], [32, 0, 0]], LANES, WARPS, [], [64, 8, 2]))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16]))
QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
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
    WEIGH_REGISTERS: gl.constexpr,
    CONVERT_REGISTERS: gl.constexpr,
):
    """One block of heads of one token over one split of its key blocks, as `attend_kernel` in Triton.

    Three roles run side by side: four warps convert records to bf16 in shared memory, four warps turn them into weights, and eight
    warps, each four with half of the columns, add weighted records to the output. Two blocks of keys and two of weights are on their
    way from one role to the next.
    """
    head_blocks = (H + 63) // 64
    program = gl.program_id(0)
    first_head = program % head_blocks * 64
    split = program // head_blocks % count
    token = program // (head_blocks * count)

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

    q_smem = gl.allocate_shared_memory(gl.bfloat16, [64, D], SHARED)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, D], SHARED)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], SHARED)
    listed = gl.allocate_shared_memory(gl.int32, [2, 64], SHARED_ROW)
    factors = gl.allocate_shared_memory(gl.float32, [3, 64], SHARED_ROW)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=1)
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(p_empty.index(i), count=1)
    mbarrier.init(p_full.index(2), count=1)
    fence_async_shared()

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
                add_up,
                (q_rows, q_stride_h, out_rows, out_stride, H - first_head, last - first, q_smem, k_smem, p_smem, factors,
                 q_full, k_full, k_empty, p_full, p_empty, D, PARTIAL),
            ),
            (
                weigh,
                (sink + first_head, lse_row, H - first_head, last - first, scale_log2, q_smem, k_smem, p_smem, listed, factors,
                 q_full, k_full, p_full, p_empty, PARTIAL),
            ),
            (
                copy_blocks if WINDOW.grid is None else convert_blocks,
                (window_row, window_length, window_pages, window_page_stride, entry_row, entry_length, entry_pages,
                 entry_page_stride, first, last, k_smem, listed, k_full, k_empty, WINDOW, ENTRIES, WINDOW_PER_PAGE,
                 ENTRIES_PER_PAGE),
            ),
        ],
        [4, 4],
        [WEIGH_REGISTERS, CONVERT_REGISTERS],
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
def add_up(
    q_rows, q_stride_h, out_rows, out_stride, heads, blocks, q_smem, k_smem, p_smem, factors, q_full, k_full, k_empty, p_full, p_empty,
    D: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """Bring the queries, then add weights times records over all blocks, and write the scaled sum."""
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, QUERY))
    pointers = gl.expand_dims(q_rows + rows * q_stride_h, 1) + gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, QUERY)), 0)
    q_smem.store(gl.load(pointers, mask=gl.expand_dims(rows < heads, 1), other=0.0))
    fence_async_shared()
    mbarrier.arrive(q_full.index(0))

    acc = gl.zeros([64, D], gl.float32, OUTPUT)
    for block in range(blocks):
        half = block % 2
        phase = block // 2 % 2
        mbarrier.wait(k_full.index(half), phase)
        mbarrier.wait(p_full.index(half), phase)
        keep = factors.index(half).load(gl.SliceLayout(1, OUTPUT))
        acc = acc * gl.expand_dims(keep, 1)
        acc = warpgroup_mma(p_smem.index(half), k_smem.index(half), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(k_empty.index(half))
        mbarrier.arrive(p_empty.index(half))

    mbarrier.wait(p_full.index(2), 0)
    acc = acc * gl.expand_dims(factors.index(2).load(gl.SliceLayout(1, OUTPUT)), 1)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, OUTPUT))
    columns = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, OUTPUT)), 0)
    if not PARTIAL or blocks > 0:  # `combine_kernel` does not read parts without keys
        places = gl.expand_dims(out_rows + rows * out_stride, 1) + columns
        gl.store(places, acc.to(out_rows.dtype.element_ty), mask=gl.expand_dims(rows < heads, 1))


@gluon.jit
def weigh(
    sink, lse, heads, blocks, scale_log2, q_smem, k_smem, p_smem, listed, factors, q_full, k_full, p_full, p_empty,
    PARTIAL: gl.constexpr,
):  # fmt: skip
    """Weights exp2(score - running maximum) of every block, and the factor that earlier blocks take with a new maximum."""
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    no_scores = gl.zeros([64, 64], gl.float32, SCORES)
    top = gl.full([64], float("-inf"), gl.float32, ROWS)
    total = gl.zeros([64], gl.float32, ROWS)
    mbarrier.wait(q_full.index(0), 0)
    for block in range(blocks):
        half = block % 2
        phase = block // 2 % 2
        mbarrier.wait(k_full.index(half), phase)
        scores = warpgroup_mma(q_smem, k_smem.index(half).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        seen = listed.index(half).load(gl.SliceLayout(0, SCORES)) >= 0
        scores = warpgroup_mma_wait(0, deps=[scores])
        scores = gl.where(gl.expand_dims(seen, 0), scores * scale_log2, float("-inf"))
        new_top = gl.maximum(top, gl.max(scores, axis=1))
        base = gl.where(new_top == float("-inf"), 0.0, new_top)  # no key yet: exp2(-inf - 0) = 0 rather than NaN
        weights = gl.exp2(scores - gl.expand_dims(base, 1))
        keep = gl.exp2(top - base)
        top = new_top
        mbarrier.wait(p_empty.index(half), phase ^ 1)
        p_smem.index(half).store(weights.to(gl.bfloat16))
        factors.index(half).store(keep)
        fence_async_shared()
        mbarrier.arrive(p_full.index(half))
        total = total * keep + gl.sum(weights, axis=1)

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


@gluon.jit
def convert_blocks(
    window_row, window_length, window_pages, window_page_stride, entry_row, entry_length, entry_pages, entry_page_stride,
    first, last, k_smem, listed, k_full, k_empty,
    WINDOW: gl.constexpr, ENTRIES: gl.constexpr, WINDOW_PER_PAGE: gl.constexpr, ENTRIES_PER_PAGE: gl.constexpr,
):  # fmt: skip
    """Read records and write them as bf16; the codes of a block are on their way while the block before it is converted."""
    window_blocks = (window_length + 63) // 64
    slots = block_slots(first, last, window_blocks, window_row, window_length, entry_row, entry_length)
    raw = load_codes(
        first, window_blocks, slots, window_pages, window_page_stride, entry_pages, entry_page_stride,
        WINDOW, ENTRIES, WINDOW_PER_PAGE, ENTRIES_PER_PAGE,
    )  # fmt: skip
    next_slots = block_slots(first + 1, last, window_blocks, window_row, window_length, entry_row, entry_length)
    for block in range(first, last):
        half = (block - first) % 2
        mbarrier.wait(k_empty.index(half), (block - first) // 2 % 2 ^ 1)
        listed.index(half).store(slots)
        words = k_smem.index(half)._reinterpret(gl.int32, [64, 256], SHARED_WORDS)
        if WINDOW.name == ENTRIES.name or block < window_blocks:
            convert_records(raw, words, WINDOW)
        else:
            convert_records(raw, words, ENTRIES)
        fence_async_shared()
        mbarrier.arrive(k_full.index(half))
        slots = next_slots
        raw = load_codes(
            block + 1, window_blocks, slots, window_pages, window_page_stride, entry_pages, entry_page_stride,
            WINDOW, ENTRIES, WINDOW_PER_PAGE, ENTRIES_PER_PAGE,
        )  # fmt: skip
        next_slots = block_slots(block + 2, last, window_blocks, window_row, window_length, entry_row, entry_length)


@gluon.jit
def copy_blocks(
    window_row, window_length, window_pages, window_page_stride, entry_row, entry_length, entry_pages, entry_page_stride,
    first, last, k_smem, listed, k_full, k_empty,
    WINDOW: gl.constexpr, ENTRIES: gl.constexpr, WINDOW_PER_PAGE: gl.constexpr, ENTRIES_PER_PAGE: gl.constexpr,
):  # fmt: skip
    """`convert_blocks` for records that are bf16 already: they go to shared memory without passing registers."""
    window_blocks = (window_length + 63) // 64
    slots = block_slots(first, last, window_blocks, window_row, window_length, entry_row, entry_length)
    for block in range(first, last + 1):
        done = block - first
        half = done % 2
        if block < last:
            mbarrier.wait(k_empty.index(half), done // 2 % 2 ^ 1)
            listed.index(half).store(slots)
            if block < window_blocks:
                copy_records(slots, window_pages, window_page_stride, k_smem.index(half), WINDOW, WINDOW_PER_PAGE)
            else:
                copy_records(slots, entry_pages, entry_page_stride, k_smem.index(half), ENTRIES, ENTRIES_PER_PAGE)
        async_copy.commit_group()
        slots = block_slots(block + 1, last, window_blocks, window_row, window_length, entry_row, entry_length)
        if done > 0:
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
def block_slots(block, last, window_blocks, window_row, window_length, entry_row, entry_length):
    """Slots of a block [64], -1 beyond a list's or the split's end."""
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, WIDE)))
    if block < window_blocks:
        n = n + block * 64
        slots = gl.load(window_row + n, mask=(n < window_length) & (block < last), other=-1)
    else:
        n = n + (block - window_blocks) * 64
        slots = gl.load(entry_row + n, mask=(n < entry_length) & (block < last), other=-1)
    return slots


@gluon.jit
def load_codes(
    block, window_blocks, slots, window_pages, window_page_stride, entry_pages, entry_page_stride,
    WINDOW: gl.constexpr, ENTRIES: gl.constexpr, WINDOW_PER_PAGE: gl.constexpr, ENTRIES_PER_PAGE: gl.constexpr,
):  # fmt: skip
    """Records of a block as they are stored, zero where there is none: words of 128 (or 64) bytes of each, and their scales."""
    if block < window_blocks:
        raw = load_records(slots, window_pages, window_page_stride, WINDOW, WINDOW_PER_PAGE)
    else:
        raw = load_records(slots, entry_pages, entry_page_stride, ENTRIES, ENTRIES_PER_PAGE)
    return raw


@gluon.jit
def load_records(slots, pages, page_stride, LAYOUT: gl.constexpr, PER_PAGE: gl.constexpr):
    there = slots >= 0
    slot = gl.maximum(slots, 0)
    page = pages + (slot // PER_PAGE).to(gl.int64) * page_stride
    data = page + slot % PER_PAGE * LAYOUT.data_bytes
    scale = page + (PER_PAGE * LAYOUT.data_bytes + slot % PER_PAGE * LAYOUT.scale_bytes)
    w0 = load_words(data, there, WIDE)
    w1 = load_words(data + 128, there, WIDE)
    if LAYOUT.name == "v4":
        w2 = load_words(data + 256, there, WIDE)
        w3 = load_words(data + 384, there, NARROW)
        rest = load_words(data + 448, there, WIDE)
        s0 = gl.load(scale.to(gl.pointer_type(gl.int32)), mask=there, other=0)
        s1 = gl.load(scale.to(gl.pointer_type(gl.int32)) + 1, mask=there, other=0)
        s2, s3 = s0, s1
    elif LAYOUT.name == "v41":
        w2 = load_words(data + 256, there, WIDE)
        w3 = load_words(data + 384, there, WIDE)
        rest = w0
        s0 = load_scales(scale, there, 0, 2, gl.uint8)
        s1 = load_scales(scale, there, 4, 2, gl.uint8)
        s2 = load_scales(scale, there, 8, 2, gl.uint8)
        s3 = load_scales(scale, there, 12, 2, gl.uint8)
    else:
        gl.static_assert(LAYOUT.name == "v41_fp4")
        w2, w3, rest = w0, w0, w0
        s0 = load_scales(scale, there, 0, 1, gl.uint16)
        s1 = load_scales(scale, there, 16, 1, gl.uint16)
        s2, s3 = s0, s0
    return w0, w1, w2, w3, rest, s0, s1, s2, s3


@gluon.jit
def load_words(data, there, LAYOUT: gl.constexpr):
    """Bytes of each key from `data` on: int32 [64, 8, words], 8 threads of a row."""
    WORDS: gl.constexpr = LAYOUT.shape[2]
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    data, there = gl.convert_layout(data, ROWS, assert_trivial=True), gl.convert_layout(there, ROWS, assert_trivial=True)
    rows = gl.expand_dims(gl.expand_dims(data.to(gl.pointer_type(gl.int32)), 1), 2)
    v = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0), 2)
    w = gl.expand_dims(gl.expand_dims(gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT))), 0), 0)
    return gl.load(rows + (v * WORDS + w), mask=gl.expand_dims(gl.expand_dims(there, 1), 2), other=0)


@gluon.jit
def load_scales(scale, there, FIRST: gl.constexpr, THREADS: gl.constexpr, TYPE: gl.constexpr):
    """The scale byte (uint8) or two (uint16) of each thread's words: int32 [64, 8]; THREADS share one, from byte FIRST on."""
    rows = gl.expand_dims((scale + FIRST).to(gl.pointer_type(TYPE)), 1)
    v = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, WIDE))), 0)
    return gl.load(rows + v // THREADS, mask=gl.expand_dims(there, 1), other=0).to(gl.int32)


@gluon.jit
def convert_records(raw, words, LAYOUT: gl.constexpr):
    w0, w1, w2, w3, rest, s0, s1, s2, s3 = raw
    if LAYOUT.name == "v4":  # two scales per 128 bytes
        v = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, WIDE))), 0)
        s2, s3 = gl.expand_dims(s1, 1) >> (v // 4 * 8), gl.expand_dims(s1, 1) >> 16
        s0, s1 = gl.expand_dims(s0, 1) >> (v // 4 * 8), gl.expand_dims(s0, 1) >> (v // 4 * 8 + 16)
        s0, s1, s2, s3 = s0 & 0xFF, s1 & 0xFF, s2 & 0xFF, (s3 + v * 0) & 0xFF
    if LAYOUT.name == "v41_fp4":
        convert_e2m1(w0, s0, words.slice(0, 128, dim=1))
        convert_e2m1(w1, s1, words.slice(128, 128, dim=1))
    else:
        convert_e4m3(w0, s0, words.slice(0, 64, dim=1))
        convert_e4m3(w1, s1, words.slice(64, 64, dim=1))
        convert_e4m3(w2, s2, words.slice(128, 64, dim=1))
        if LAYOUT.name == "v4":
            s3 = gl.convert_layout(s3, gl.SliceLayout(2, NARROW), assert_trivial=True)
            convert_e4m3(w3, s3, words.slice(192, 32, dim=1))
            words.slice(224, 32, dim=1).store(gl.reshape(rest, [64, 32]))
        else:
            convert_e4m3(w3, s3, words.slice(192, 64, dim=1))


@gluon.jit
def convert_e4m3(codes, scale, words):
    """codes int32 [64, V, 4] of four e4m3 each, scale int32 [64, V] e8m0 -> words [64, 8 V] of two bf16 each.

    A code's bits moved to bf16's fields are its value times 2^-120; the factor 2^120 comes first, so that no scale overflows.
    """
    pair = scale * 0x00800080  # 2^(scale - 127), twice
    pair = gl.where(scale == 0, 0x00400040, gl.where(scale == 255, 0x7FC07FC0, pair))
    pair, codes = gl.broadcast(gl.expand_dims(pair, 2), codes)
    low, high = gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, t, u, c;
        mov.b32 c, 0x7b807b80;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        shr.u32 t, a, 4;
        shr.u32 u, b, 4;
        and.b32 t, t, 0x07f007f0;
        and.b32 u, u, 0x07f007f0;
        lop3.b32 a, a, 0x80008000, t, 0xea;
        lop3.b32 b, b, 0x80008000, u, 0xea;
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
        constants |= {"WEIGH_REGISTERS": WEIGH_REGISTERS, "CONVERT_REGISTERS": CONVERT_REGISTERS}
        name = f"sparse_attention gluon {'+'.join(pair)} splits {count}"
        reason = "the converting warps hold the codes of a whole block; addresses that are used once per block"
        return AotCase(name, attend_kernel, signature, constants, NUM_WARPS, 1, aligned, archs=(HOPPER,), spill_reason=reason)

    return [attend(pair, count) for pair in PAIRS for count in (1, 2)]
