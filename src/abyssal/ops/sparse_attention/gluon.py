"""Sparse attention over packed records in Gluon for Hopper: wgmma, with the conversion of one block behind the products of another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from abyssal.kv import layouts
from abyssal.ops._aot import HOPPER, AotCase
from abyssal.ops.sparse_attention.arguments import HEAD_DIM, PAIRS, KeyList, Splits, check, empty_keys
from abyssal.ops.sparse_attention.triton import FIXED_SPLIT_BLOCKS, LOG2_E, best_split, combine, multiprocessors, new_partial

BLOCK_HEADS = 64  # rows of one wgmma
BLOCK_KEYS = 64
NUM_WARPS = 8  # two warp groups, each with one half of the output's columns


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
    """As `sparse_attention.triton.sparse_attention`, for packed records (not bf16) on sm_90."""
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
        num_warps=NUM_WARPS,
    )
    if splits.count > 1:
        combine(partial, sink, out, lse)
    return out, lse


def _key_arguments(keys: KeyList) -> tuple[Tensor, int, Tensor, int, Tensor]:
    return keys.records.pages, keys.records.pages.stride(0), keys.slots, keys.slots.stride(0), keys.lengths


# Registers of a block's codes: [64 keys, threads of a row, 4 words]. `WIDE` moves 128 bytes of each key, `NARROW` 64.
WIDE = gl.constexpr(gl.BlockedLayout([1, 1, 4], [4, 8, 1], [8, 1, 1], [2, 1, 0]))
NARROW = gl.constexpr(gl.BlockedLayout([1, 1, 4], [8, 4, 1], [8, 1, 1], [2, 1, 0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
SHARED_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))


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
):
    """One block of heads of one token over one split of its key blocks, as `attend_kernel` in Triton.

    While the tensor cores add block i to the output, the warps convert block i + 1 into the other half of shared memory, and the
    codes of block i + 2 are on their way into registers.
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

    q_smem = gl.allocate_shared_memory(gl.bfloat16, [64, D], SHARED)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, D], SHARED)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)

    slots = load_slots(first, last, window_blocks, window_row, window_length, entry_row, entry_length)
    heads = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, QUERY))
    q_rows = q + token.to(gl.int64) * q_stride_t + heads.to(gl.int64) * q_stride_h
    d = gl.arange(0, D, layout=gl.SliceLayout(0, QUERY))
    b_q = gl.load(gl.expand_dims(q_rows, 1) + gl.expand_dims(d, 0), mask=gl.expand_dims(heads < H, 1), other=0.0)
    raw = load_codes(
        first, window_blocks, slots, window_pages, window_page_stride, entry_pages, entry_page_stride,
        WINDOW, ENTRIES, WINDOW_PER_PAGE, ENTRIES_PER_PAGE,
    )  # fmt: skip
    slots = load_slots(first + 1, last, window_blocks, window_row, window_length, entry_row, entry_length)
    seen = load_seen(first, last, window_blocks, window_row, window_length, entry_row, entry_length)
    q_smem.store(b_q)
    convert(first, window_blocks, raw, k_smem.index(0), WINDOW, ENTRIES)
    raw = load_codes(
        first + 1, window_blocks, slots, window_pages, window_page_stride, entry_pages, entry_page_stride,
        WINDOW, ENTRIES, WINDOW_PER_PAGE, ENTRIES_PER_PAGE,
    )  # fmt: skip
    slots = load_slots(first + 2, last, window_blocks, window_row, window_length, entry_row, entry_length)

    acc = gl.zeros([64, D], gl.float32, OUTPUT)
    no_scores = gl.zeros([64, 64], gl.float32, SCORES)
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    weight_sums = gl.zeros([64, 64], gl.float32, SCORES)
    fence_async_shared()
    scores = warpgroup_mma(q_smem, k_smem.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    weights, top, keep = soften(scores, seen, top, scale_log2)
    weight_sums = weights

    for block in range(first, last - 1):
        half = (block - first) % 2
        seen = load_seen(block + 1, last, window_blocks, window_row, window_length, entry_row, entry_length)
        acc = acc * gl.expand_dims(gl.convert_layout(keep, gl.SliceLayout(1, OUTPUT)), 1)
        p_smem.store(weights.to(gl.bfloat16))
        fence_async_shared()
        acc = warpgroup_mma(p_smem, k_smem.index(half), acc, is_async=True)
        convert(block + 1, window_blocks, raw, k_smem.index(1 - half), WINDOW, ENTRIES)
        raw = load_codes(
            block + 2, window_blocks, slots, window_pages, window_page_stride, entry_pages, entry_page_stride,
            WINDOW, ENTRIES, WINDOW_PER_PAGE, ENTRIES_PER_PAGE,
        )  # fmt: skip
        slots = load_slots(block + 3, last, window_blocks, window_row, window_length, entry_row, entry_length)
        fence_async_shared()
        scores = warpgroup_mma(q_smem, k_smem.index(1 - half).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        acc, scores = warpgroup_mma_wait(0, deps=[acc, scores])
        weights, top, keep = soften(scores, seen, top, scale_log2)
        weight_sums = weight_sums * gl.expand_dims(keep, 1) + weights

    acc = acc * gl.expand_dims(gl.convert_layout(keep, gl.SliceLayout(1, OUTPUT)), 1)
    p_smem.store(weights.to(gl.bfloat16))
    fence_async_shared()
    acc = warpgroup_mma(p_smem, k_smem.index(gl.maximum(last - 1 - first, 0) % 2), acc, is_async=True)
    total = gl.sum(weight_sums, axis=1)
    b_lse = top + gl.log2(total)  # -inf without keys
    factor = 1.0 / gl.where(total > 0, total, 1.0)
    heads = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    if not PARTIAL:
        b_sink = gl.load(sink + heads, mask=heads < H, other=0.0)
        share = 1.0 / (1.0 + gl.exp2(b_sink * 1.4426950408889634 - b_lse))
        factor = factor * gl.where(b_lse == float("-inf"), 0.0, share)
        gl.store(lse + token.to(gl.int64) * H + heads, b_lse * 0.6931471805599453, mask=heads < H)
    else:
        gl.store(partial_lse + (token.to(gl.int64) * count + split) * H + heads, b_lse, mask=heads < H)
    acc = warpgroup_mma_wait(0, deps=[acc])
    acc = acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT)), 1)

    rows = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, OUTPUT))
    columns = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, OUTPUT)), 0)
    in_range = gl.expand_dims(rows < H, 1)
    if not PARTIAL:
        out_rows = out + token.to(gl.int64) * out_stride_t + rows.to(gl.int64) * out_stride_h
        gl.store(gl.expand_dims(out_rows, 1) + columns, acc.to(out.dtype.element_ty), mask=in_range)
    elif last > first:  # `combine_kernel` does not read parts without keys
        out_rows = partial_out + ((token.to(gl.int64) * count + split) * H + rows) * D
        gl.store(gl.expand_dims(out_rows, 1) + columns, acc, mask=in_range)


@gluon.jit
def split_range(split, blocks, count, split_blocks):
    """First and last + 1 block of a split: a fixed number of blocks each, or evenly (`split_blocks` 0)."""
    first = blocks * split // count
    last = blocks * (split + 1) // count
    if split_blocks > 0:
        first = split * split_blocks
        last = gl.minimum(first + split_blocks, blocks)
    return first, last


@gluon.jit
def soften(scores, seen, top, scale_log2):
    """Weights exp2(score - new top) of a block [64, 64], the new running maximum [64], and the factor of earlier weights."""
    scores = gl.where(gl.expand_dims(seen, 0), scores * scale_log2, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, axis=1))
    base = gl.where(new_top == float("-inf"), 0.0, new_top)  # no key yet: exp2(-inf - 0) = 0 rather than NaN
    return gl.exp2(scores - gl.expand_dims(base, 1)), new_top, gl.exp2(top - base)


@gluon.jit
def block_slots(block, last, window_blocks, window_row, window_length, entry_row, entry_length, LAYOUT: gl.constexpr):
    """Slots of a block [64], -1 beyond a list's or the split's end."""
    n = gl.arange(0, 64, layout=LAYOUT)
    if block < window_blocks:
        n = n + block * 64
        slots = gl.load(window_row + n, mask=(n < window_length) & (block < last), other=-1)
    else:
        n = n + (block - window_blocks) * 64
        slots = gl.load(entry_row + n, mask=(n < entry_length) & (block < last), other=-1)
    return slots


@gluon.jit
def load_seen(block, last, window_blocks, window_row, window_length, entry_row, entry_length):
    """Which keys of a block are there, along the columns of the scores."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    return block_slots(block, last, window_blocks, window_row, window_length, entry_row, entry_length, COLUMNS) >= 0


@gluon.jit
def load_slots(block, last, window_blocks, window_row, window_length, entry_row, entry_length):
    """Slots of a block along the rows of both register layouts."""
    WIDE_ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, WIDE))
    NARROW_ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, NARROW))
    wide = block_slots(block, last, window_blocks, window_row, window_length, entry_row, entry_length, WIDE_ROWS)
    narrow = block_slots(block, last, window_blocks, window_row, window_length, entry_row, entry_length, NARROW_ROWS)
    return wide, narrow


@gluon.jit
def load_codes(
    block, window_blocks, slots, window_pages, window_page_stride, entry_pages, entry_page_stride,
    WINDOW: gl.constexpr, ENTRIES: gl.constexpr, WINDOW_PER_PAGE: gl.constexpr, ENTRIES_PER_PAGE: gl.constexpr,
):  # fmt: skip
    """Records of a block as they are stored, zero where there is none: words and scales of four 128-value or two 256-value parts."""
    if block < window_blocks:
        raw = load_records(slots, window_pages, window_page_stride, WINDOW, WINDOW_PER_PAGE)
    else:
        raw = load_records(slots, entry_pages, entry_page_stride, ENTRIES, ENTRIES_PER_PAGE)
    return raw


@gluon.jit
def load_records(slots, pages, page_stride, LAYOUT: gl.constexpr, PER_PAGE: gl.constexpr):
    wide, narrow = slots
    w0 = load_words(wide, pages, page_stride, PER_PAGE, LAYOUT, 0, WIDE)
    w1 = load_words(wide, pages, page_stride, PER_PAGE, LAYOUT, 128, WIDE)
    if LAYOUT.name == "v4":
        w2 = load_words(wide, pages, page_stride, PER_PAGE, LAYOUT, 256, WIDE)
        w3 = load_words(narrow, pages, page_stride, PER_PAGE, LAYOUT, 384, NARROW)
        rest = load_words(wide, pages, page_stride, PER_PAGE, LAYOUT, 448, WIDE)
        s0 = load_scales(wide, pages, page_stride, PER_PAGE, LAYOUT, 0, 4, gl.uint8, WIDE)
        s1 = load_scales(wide, pages, page_stride, PER_PAGE, LAYOUT, 2, 4, gl.uint8, WIDE)
        s2 = load_scales(wide, pages, page_stride, PER_PAGE, LAYOUT, 4, 4, gl.uint8, WIDE)
        s3 = load_scales(narrow, pages, page_stride, PER_PAGE, LAYOUT, 6, 4, gl.uint8, NARROW)
    elif LAYOUT.name == "v41":
        w2 = load_words(wide, pages, page_stride, PER_PAGE, LAYOUT, 256, WIDE)
        w3 = load_words(wide, pages, page_stride, PER_PAGE, LAYOUT, 384, WIDE)
        rest = w0
        s0 = load_scales(wide, pages, page_stride, PER_PAGE, LAYOUT, 0, 2, gl.uint8, WIDE)
        s1 = load_scales(wide, pages, page_stride, PER_PAGE, LAYOUT, 4, 2, gl.uint8, WIDE)
        s2 = load_scales(wide, pages, page_stride, PER_PAGE, LAYOUT, 8, 2, gl.uint8, WIDE)
        s3 = load_scales(wide, pages, page_stride, PER_PAGE, LAYOUT, 12, 2, gl.uint8, WIDE)
    else:
        gl.static_assert(LAYOUT.name == "v41_fp4")
        w2, w3, rest = w0, w0, w0
        s0 = load_scales(wide, pages, page_stride, PER_PAGE, LAYOUT, 0, 1, gl.uint16, WIDE)
        s1 = load_scales(wide, pages, page_stride, PER_PAGE, LAYOUT, 16, 1, gl.uint16, WIDE)
        s2, s3 = s0, s0
    return w0, w1, w2, w3, rest, s0, s1, s2, s3


@gluon.jit
def load_words(
    slot, pages, page_stride, PER_PAGE: gl.constexpr, RECORD: gl.constexpr, OFFSET: gl.constexpr, LAYOUT: gl.constexpr
):
    """Bytes [OFFSET, OFFSET + 16 V) of each key's data row: int32 [64, V, 4], V threads of a row."""
    V: gl.constexpr = LAYOUT.threads_per_warp[1]
    there = slot >= 0
    slot = gl.maximum(slot, 0)
    data = pages + (slot // PER_PAGE).to(gl.int64) * page_stride + (slot % PER_PAGE * RECORD.data_bytes + OFFSET)
    rows = gl.expand_dims(gl.expand_dims(data.to(gl.pointer_type(gl.int32)), 1), 2)
    v = gl.expand_dims(gl.expand_dims(gl.arange(0, V, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0), 2)
    w = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT))), 0), 0)
    return gl.load(rows + (v * 4 + w), mask=gl.expand_dims(gl.expand_dims(there, 1), 2), other=0)


@gluon.jit
def load_scales(
    slot, pages, page_stride, PER_PAGE: gl.constexpr, RECORD: gl.constexpr, FIRST: gl.constexpr,
    THREADS: gl.constexpr, TYPE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The scale byte (uint8) or two (uint16) of each thread's 16 bytes: int32 [64, V]; THREADS share one, from byte FIRST on."""
    V: gl.constexpr = LAYOUT.threads_per_warp[1]
    there = slot >= 0
    slot = gl.maximum(slot, 0)
    scales = (
        pages
        + (slot // PER_PAGE).to(gl.int64) * page_stride
        + (PER_PAGE * RECORD.data_bytes + slot % PER_PAGE * RECORD.scale_bytes + FIRST)
    )
    rows = gl.expand_dims(scales.to(gl.pointer_type(TYPE)), 1)
    v = gl.expand_dims(gl.arange(0, V, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0)
    return gl.load(rows + v // THREADS, mask=gl.expand_dims(there, 1), other=0).to(gl.int32)


@gluon.jit
def convert(block, window_blocks, raw, k_smem, WINDOW: gl.constexpr, ENTRIES: gl.constexpr):
    """Write a block's records as bf16 [64, 512] into shared memory."""
    words = k_smem._reinterpret(gl.int32, [64, 256], SHARED_WORDS)
    if WINDOW.name == ENTRIES.name or block < window_blocks:
        convert_records(raw, words, WINDOW)
    else:
        convert_records(raw, words, ENTRIES)


@gluon.jit
def convert_records(raw, words, LAYOUT: gl.constexpr):
    w0, w1, w2, w3, rest, s0, s1, s2, s3 = raw
    if LAYOUT.name == "v41_fp4":
        convert_e2m1(w0, s0, words.slice(0, 128, dim=1))
        convert_e2m1(w1, s1, words.slice(128, 128, dim=1))
    else:
        convert_e4m3(w0, s0, words.slice(0, 64, dim=1))
        convert_e4m3(w1, s1, words.slice(64, 64, dim=1))
        convert_e4m3(w2, s2, words.slice(128, 64, dim=1))
        if LAYOUT.name == "v4":
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
    """Every pair of packed layouts, with splits and without."""
    pointers = dict.fromkeys(("q", "out"), "*bf16") | dict.fromkeys(("window_pages", "entry_pages"), "*u8")
    pointers |= dict.fromkeys(("window_slots", "window_lengths", "entry_slots", "entry_lengths"), "*i32")
    pointers |= dict.fromkeys(("sink", "lse", "partial_out", "partial_lse"), "*fp32")
    numbers = ("q_stride_t", "q_stride_h", "window_page_stride", "window_slots_stride", "entry_page_stride", "entry_slots_stride")
    aligned = (*pointers, *numbers, "out_stride_t", "out_stride_h", "H")
    signature = pointers | dict.fromkeys((*aligned[len(pointers) :], "count", "split_blocks"), "i32") | {"scale_log2": "fp32"}

    def attend(pair: tuple[str, str], count: int) -> AotCase:
        constants = {"D": HEAD_DIM, "WINDOW": layouts.get(pair[0]), "ENTRIES": layouts.get(pair[1]), "PARTIAL": count > 1}
        constants |= {"WINDOW_PER_PAGE": 64, "ENTRIES_PER_PAGE": 64}
        name = f"sparse_attention gluon {'+'.join(pair)} splits {count}"
        reason = "beside the output in 128 registers, addresses that are used once per block"
        return AotCase(name, attend_kernel, signature, constants, NUM_WARPS, 1, aligned, archs=(HOPPER,), spill_reason=reason)

    return [attend(pair, count) for pair in PAIRS[1:] for count in (1, 2)]
