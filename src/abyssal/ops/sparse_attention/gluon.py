"""Sparse attention in Gluon for Hopper: warps that bring records beside warps that weigh them and add them up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from abyssal.kv import layouts
from abyssal.kv.layouts import Layout
from abyssal.ops._aot import HOPPER, AotCase
from abyssal.ops._gluon import allocate_barriers, plus
from abyssal.ops._records import multiprocessors, zero_behind_loads
from abyssal.ops.sparse_attention.arguments import HEAD_DIM, PAIRS, KeyList, Splits, check, empty_keys, splits_alike
from abyssal.ops.sparse_attention.triton import COMBINE_BLOCK, LOG2_E, fixed_splits

BLOCK_HEADS = 64  # rows of one wgmma
BLOCK_KEYS = 64  # where programs are many; where they are few, half as many keys reach twice as many of them
NUM_WARPS = 4  # of the role that weighs; four more add the right half
ADD_REGISTERS = 160
BF16_REGISTERS = 88  # of the role that brings records, for those that are copied
CODE_REGISTERS = 80  # for those that are widened; the role that weighs takes what is left
FEW_REGISTERS = 72  # for one layout without splits, where the role that weighs would otherwise keep values in memory

# Microseconds, fitted to 37 measured launches with splits, of 1 to 64 queries, with an error of 10 % at most.
START_COST = 4.2  # of one program (launch, queries, first records, result)
BLOCK_COST = {64: 2.45, 32: 1.5}  # of one block, by its keys
COMBINE_COST = 0.4  # of the second launch
READ_COST = 0.45  # of its reading 32 more parts of a head
PART_COST = 0.03  # of writing and reading one part of 64 heads
FEW_PARTS = 64 * BLOCK_HEADS  # rows of parts that 64 programs combine: the next kernel finds free multiprocessors; more, by 128


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
    if splits_alike(tokens, heads, blocks[BLOCK_KEYS]):
        return LaunchConfig(Splits(blocks[BLOCK_KEYS], None))

    def cost(config: LaunchConfig) -> float:
        count, keys = config.splits.count, config.block_keys
        waves = -(-programs * count // sms)
        written = PART_COST * tokens * heads / BLOCK_HEADS * count
        parts = COMBINE_COST + READ_COST * ((count - 1) // 32) + written if count > 1 else 0
        return waves * (START_COST + -(-blocks[keys] // count) * BLOCK_COST[keys]) + parts

    return min((LaunchConfig(Splits(count, None), keys) for keys in blocks for count in range(1, blocks[keys] + 1)), key=cost)


def bringing_warps(window: Layout) -> int:
    """Warps that bring records: eight where they are widened; bf16 is copied a little faster by four."""
    return 4 if window.grid is None else 8


class Parts(NamedTuple):
    """Where programs that see a part of a token's keys leave their results, sums of weights exp2(score - largest score) and of records.

    Without splits there are none.
    """

    out: Tensor  # fp16 [T, count, H, 512], a half row relative to its largest magnitude; columns in the order of `part_column`
    rows: Tensor  # fp32 [T, count, H, 4]: largest score, base 2; sum of weights; largest magnitudes of both halves

    @classmethod
    def empty(cls, q: Tensor, count: int) -> Parts:
        tokens, heads, dim = q.shape if count > 1 else (0, 0, HEAD_DIM)
        out = torch.empty(tokens, count, heads, dim, dtype=torch.float16, device=q.device)
        return cls(out, torch.empty(tokens, count, heads, 4, dtype=torch.float32, device=q.device))


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
    """As `sparse_attention.triton.sparse_attention`, on sm_90.

    Raises:
        ValueError: also a scale that is not positive, or rows of queries or results that do not start at multiples of 16 bytes.
    """
    check(q, window, entries, sink)
    if not scale > 0:
        raise ValueError(f"scale must be positive, not {scale}: scores are masked before they are scaled")
    tokens, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device) if out is None else out
    for name, rows in (("q", q), ("out", out)):
        if rows.data_ptr() % 16 or any(stride * rows.element_size() % 16 for stride in _row_strides(rows)):
            raise ValueError(
                f"rows of {name} must start at multiples of 16 bytes, not at {rows.data_ptr()} with strides {rows.stride()}: copy it"
            )
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if tokens == 0:
        return out, lse
    entries = empty_keys(tokens, window) if entries is None else entries
    if config is None:
        widths = (window.slots.shape[1], entries.slots.shape[1])
        config = launch_config(tokens, heads, widths, multiprocessors(q.device), batch_invariant)
    splits = config.splits
    parts = Parts.empty(q, splits.count)
    tiles = tokens * splits.count * -(-heads // BLOCK_HEADS)
    programs = min(tiles, multiprocessors(q.device))
    # Half of a tile's results then takes as much shared memory as half of a block of keys. Records of bf16 would wait for it.
    widened = window.records.layout.grid is not None
    copied = widened and splits.count == 1 and config.block_keys == BLOCK_KEYS and out.dtype == torch.bfloat16
    attend_kernel[(programs,)](
        _rows(q, HEAD_DIM),
        *_key_arguments(window),
        *_key_arguments(entries),
        no_record(q.device),
        sink,
        scale * LOG2_E,
        _rows(out, HEAD_DIM // 2) if copied else out,
        out.stride(0),
        out.stride(1),
        lse,
        parts.out,
        parts.rows,
        heads,
        tiles,
        programs,
        splits.count,
        splits.blocks or 0,
        D=HEAD_DIM,
        WINDOW=window.records.layout,
        ENTRIES=entries.records.layout,
        WINDOW_PER_PAGE=window.records.entries_per_page,
        ENTRIES_PER_PAGE=entries.records.entries_per_page,
        HEAD_BLOCKS=-(-heads // BLOCK_HEADS),
        PARTIAL=splits.count > 1,
        COPIED=copied,
        BLOCK=config.block_keys,
        ADD_REGISTERS=ADD_REGISTERS,
        **_bring_constants(window.records.layout, entries.records.layout, splits.count),
        num_warps=NUM_WARPS,
        launch_pdl=True,
    )
    if splits.count > 1:
        combine(parts, splits, sink, out, lse)
    return out, lse


def combine(parts: Parts, splits: Splits, sink: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge the parts of every query and add the sink; with splits of a fixed size the order does not depend on their number."""
    tokens, count, heads, _ = parts.out.shape
    rows = tokens * heads
    programs = 64 if rows * count <= FEW_PARTS else 128
    columns = min(HEAD_DIM // 2, max(64, next_power_of_2(rows * HEAD_DIM // (16 * programs))))
    pieces = rows * HEAD_DIM // columns
    warps = min(16, next_power_of_2(-(-pieces // programs)))
    block = COMBINE_BLOCK if splits.blocks else min(next_power_of_2(count), 16 if columns > 128 else 32)
    combine_kernel[(-(-pieces // warps),)](
        *parts, sink, out, out.stride(0), out.stride(1), lse, pieces, count,
        H=heads, D=HEAD_DIM, BLOCK=block, WARPS=warps, COLUMNS=columns, num_warps=warps, launch_pdl=True,
    )  # fmt: skip


@cache
def no_record(device: torch.device) -> Tensor:
    """A record of zeros, which kernels read in place of those that do not exist."""
    return torch.zeros(max(layouts.get(name).data_bytes for pair in PAIRS for name in pair), dtype=torch.uint8, device=device)


def _row_strides(rows: Tensor) -> list[int]:
    """Of tokens and heads; HEAD_DIM where there is one only."""
    return [stride if count > 1 else HEAD_DIM for stride, count in zip(rows.stride(), rows.shape[:2], strict=False)]


def _rows(rows: Tensor, columns: int) -> TensorDescriptor:
    """Rows of 64 heads of a token, as the copy engine moves them: it reads zeros for heads that do not exist, and writes none."""
    return TensorDescriptor(rows, list(rows.shape), [*_row_strides(rows), 1], [1, BLOCK_HEADS, columns], ROWS_3D.value)


def _bring_constants(window: Layout, entries: Layout, count: int) -> dict[str, int]:
    if window.grid is None:
        registers = BF16_REGISTERS
    else:
        registers = FEW_REGISTERS if window.name == entries.name and count == 1 else CODE_REGISTERS
    return {"BRING_WARPS": bringing_warps(window), "BRING_REGISTERS": registers}


def _key_arguments(keys: KeyList) -> tuple[Tensor, int, Tensor, int, int, Tensor]:
    return keys.records.pages, keys.records.pages.stride(0), keys.slots, keys.slots.stride(0), keys.slots.shape[1], keys.lengths


HALF = gl.constexpr(HEAD_DIM // 2)  # columns of one role's output
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
ROWS_3D = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=3))
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
SHARED_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))
SHARED_ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def output_rows(columns):
    """Threads of some columns of the output in 16 bits: 16 bytes each, of the rows that they have in `OUTPUT`."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]] + [[0, 32 << i] for i in range((columns // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, columns])


class Work(NamedTuple):
    """What tells a role which tiles there are, and how many keys of each; of the kernel's arguments, as those below."""

    window_lengths: Any
    entry_lengths: Any
    heads: Any
    tiles: Any
    programs: Any  # an argument: of the register of that name the compiler would keep copies in memory
    count: Any
    split_blocks: Any


class Keys(NamedTuple):
    """A list of records."""

    slots: Any
    stride: Any
    width: Any
    pages: Any
    page_stride: Any


@dataclass(frozen=True)
class Formats:
    """How records of both lists are stored."""

    window: Layout
    entries: Layout
    window_per_page: int
    entries_per_page: int


class Output(NamedTuple):
    """Where results go: rows of the output and their log-sum-exp, or of parts and what `Parts` keeps of each row.

    Rows that the copy engine takes have a descriptor, and need no strides.
    """

    rows: Any
    stride_t: Any
    stride_h: Any
    of_rows: Any


class Staged(NamedTuple):
    """Of a program's next tile, where it has all keys: known before records of the last block of this one are widened."""

    slots: Any  # int32 [2, BLOCK], of its first two blocks
    numbers: Any  # int32 [3, 1], as the following indices tell


WINDOW_LENGTH, ENTRY_LENGTH, BLOCKS = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
LAST, SINKS = gl.constexpr(2), gl.constexpr(3)  # of factors, behind two of blocks: of a tile's end, and what goes into them


class Barriers(NamedTuple):
    """Of shared memory that one role fills and another empties."""

    full: Any
    empty: Any


@gluon.constexpr_function
def formats_of(window, entries, window_per_page, entries_per_page):
    return Formats(window, entries, window_per_page, entries_per_page)


@gluon.constexpr_function
def score_layout(block):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block, 16])


@gluon.constexpr_function
def code_layout(words, num_warps, block, turned=False):
    """Threads of codes [keys, threads of a row, words]: all of the role's threads, or eight of a row, as then 16 codes each are 128.

    Eight in turn hold four of two neighbouring rows, so that their stores of 16 of every 32 bytes fall into different banks of swizzled
    rows; `turned`, eight threads with 16 bytes each do so, as no two neighbours hold neighbouring bytes.
    """
    count = max(4, min(8, 32 * num_warps // block))
    threads = [[0, 2, 0], [0, 4, 0], [0, 1, 0]] if turned else [[0, 1, 0], [0, 2, 0], [0, 4, 0]]
    rows = [[1 << i, 0, 0] for i in range(block.bit_length() - 1)]
    of_lanes = 6 - count.bit_length()  # rows, by bits
    of_warps = of_lanes + num_warps.bit_length() - 1
    lanes = [*threads[:2], rows[0], *(threads[2:] if count == 8 else []), *rows[1:of_lanes]]
    of_thread = [[0, 0, 1 << i] for i in range(words.bit_length() - 1)]
    return gl.DistributedLinearLayout(of_thread + rows[of_warps:], lanes, rows[of_lanes:of_warps], [], [block, count, words])


@gluon.jit(do_not_specialize=["H", "window_width", "entry_width", "tiles", "programs", "count", "split_blocks"])
def attend_kernel(
    q,
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
    partial_rows,
    H,
    tiles,
    programs,
    count,
    split_blocks,
    D: gl.constexpr,
    WINDOW: gl.constexpr,
    ENTRIES: gl.constexpr,
    WINDOW_PER_PAGE: gl.constexpr,
    ENTRIES_PER_PAGE: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr,
    PARTIAL: gl.constexpr,
    COPIED: gl.constexpr,
    BLOCK: gl.constexpr,
    ADD_REGISTERS: gl.constexpr,
    BRING_WARPS: gl.constexpr,
    BRING_REGISTERS: gl.constexpr,
):
    """Tiles of 64 heads of one token over one split of its key blocks, as a program of `attend_kernel` in Triton has one.

    Three roles run side by side: BRING_WARPS warps bring records to shared memory as bf16, four turn records into weights, add weighted
    records to the left half of the output and have queries copied, four add to the right half. Every role goes through the program's
    tiles by itself. Two blocks of keys and of weights are on their way at a time. The halves of a block of keys lie in shared memory of
    their own, with barriers of their own: the scores of one are summed while the other is still being widened.

    While results of a tile leave, 64 KB, loads of the multiprocessor wait behind them. So the next tile's queries are asked for as soon
    as this one's last scores are there, and without splits the next tile's first records beside this one's last.

    COPIED: each half of the results leaves from where that half of the tile's last records was, while the next tile's scores begin.
    """
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [1, 64, D], ROWS_3D)
    left = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, HALF], SHARED)
    right = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, HALF], SHARED)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, BLOCK], gl.NVMMASharedLayout(2 * BLOCK, 16, rank=2))
    bias = gl.allocate_shared_memory(gl.float32, [4, BLOCK], SHARED_ROW)
    factors = gl.allocate_shared_memory(gl.float32, [4, 64], SHARED_ROW)
    staged = Staged(
        gl.allocate_shared_memory(gl.int32, [2, BLOCK], SHARED_ROW), gl.allocate_shared_memory(gl.int32, [3, 1], SHARED_ROW)
    )
    never = gl.allocate_shared_memory(gl.int32, [BLOCK], SHARED_ROW)  # zeros, see `nothing`
    never.store(gl.zeros([BLOCK], gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
    q_full = allocate_barriers(1)
    of_left = Barriers(allocate_barriers(2), allocate_barriers(2))
    of_right = Barriers(allocate_barriers(2), allocate_barriers(2))
    of_end, of_staged = of_left, of_left  # not used
    if not PARTIAL:
        of_end = Barriers(allocate_barriers(1), allocate_barriers(1))
        of_staged = Barriers(allocate_barriers(1), allocate_barriers(1))
    p_full = allocate_barriers(2)
    fence_async_shared()

    work = Work(window_lengths, entry_lengths, H, tiles, programs, count, split_blocks)
    to = Output(out, out_stride_t, out_stride_h, lse)
    if PARTIAL:
        to = Output(partial_out, 0, D, partial_rows)
    window = Keys(window_slots, window_slots_stride, window_width, window_pages, window_page_stride)
    entries = Keys(entry_slots, entry_slots_stride, entry_width, entry_pages, entry_page_stride)
    gl.warp_specialize(
        [
            (
                weigh_and_add,
                (work, to, scale_log2, q, q_smem, left, right, p_smem, bias, factors, q_full, of_left, of_right, p_full, of_end,
                 HEAD_BLOCKS, PARTIAL, COPIED),
            ),
            (
                add_right,
                (work, to, sink, window, entries, right, p_smem, factors, staged, of_right, p_full, of_end, of_staged, HEAD_BLOCKS,
                 PARTIAL, COPIED),
            ),
            (
                bring_records,
                (work, window, entries, zeros, left, right, bias, never, staged, of_left, of_right, of_staged, WINDOW, ENTRIES, WINDOW_PER_PAGE,
                 ENTRIES_PER_PAGE, HEAD_BLOCKS, PARTIAL),
            ),
        ],
        [4, BRING_WARPS],
        [ADD_REGISTERS, BRING_REGISTERS],
    )  # fmt: skip


@gluon.jit
def place(tile, work, HEAD_BLOCKS: gl.constexpr, PARTIAL: gl.constexpr):
    """Token, split and first head of a tile."""
    gl.assume(tile >= 0)
    token, split = tile // HEAD_BLOCKS, 0
    if PARTIAL:
        split = token % work.count
        token = token // work.count
    return token, split, tile % HEAD_BLOCKS * 64


@gluon.jit
def split_range(split, blocks, work, PARTIAL: gl.constexpr):
    """First block of a split, and how many: a fixed number each, or evenly (`split_blocks` 0).

    Without splits there is always one, if need be without keys.
    """
    first, mine = 0, gl.maximum(blocks, 1)
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
    work, to, scale_log2, q, q_smem, left, right, p_smem, bias, factors, q_full, of_left, of_right, p_full, of_end,
    HEAD_BLOCKS: gl.constexpr, PARTIAL: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """Weights exp2(score - running maximum) of every block, for both roles that add, and the left half of the output; queries."""
    BLOCK: gl.constexpr = left.shape[1]
    ROWS: gl.constexpr = gl.SliceLayout(1, score_layout(BLOCK))
    queries = q_smem._reinterpret(gl.bfloat16, [64, q_smem.shape[2]], SHARED)
    n = 0  # blocks of earlier tiles
    gdc_wait()  # every role: launched while the kernel before may still run
    gdc_launch_dependents()  # what follows waits for this kernel's end by itself
    copy_queries(gl.program_id(0), q, q_smem, q_full, work, HEAD_BLOCKS, PARTIAL)
    blocks = blocks_of_tile(gl.program_id(0), work, BLOCK, HEAD_BLOCKS, PARTIAL)
    for tile in range(gl.program_id(0), work.tiles, work.programs):
        token, split, first_head = place(tile, work, HEAD_BLOCKS, PARTIAL)
        top = gl.full([64], float("-inf"), gl.float32, ROWS)
        total = of_threads(gl.zeros([64, BLOCK], gl.float32, score_layout(BLOCK)), plus)
        acc = gl.zeros([64, HALF], gl.float32, OUTPUT)
        mbarrier.wait(q_full.index(0), tile // work.programs & 1)
        if blocks > 0:
            mbarrier.wait(of_left.full.index(n & 1), n >> 1 & 1)
            scores = multiply_left(queries, left.index(n & 1), masked(bias, n))
            if COPIED:  # what the tile before left there has been read by now
                tma.store_wait(0)
                mbarrier.arrive(of_left.empty.index((n - 1) & 1), pred=n > 0)
            mbarrier.wait(of_right.full.index(n & 1), n >> 1 & 1)
            scores = warpgroup_mma_wait(0, deps=[multiply_right(queries, right.index(n & 1), scores)])
            if blocks == 1:
                next_queries(tile, q, q_smem, q_full, work, HEAD_BLOCKS, PARTIAL)
            acc, top, total = soften(scores, n, acc, top, total, scale_log2, p_smem, bias, factors, p_full, True)
            end = n + blocks
            for block in range(n + 1, end):
                half = block & 1
                phase = block >> 1 & 1
                acc = warpgroup_mma(p_smem.index(1 - half), left.index(1 - half), acc, is_async=True)
                scores = masked(bias, block)
                mbarrier.wait(of_left.full.index(half), phase)
                scores = multiply_left(queries, left.index(half), scores)
                acc = warpgroup_mma_wait(1, deps=[acc])
                mbarrier.arrive(of_left.empty.index(1 - half))
                mbarrier.wait(of_right.full.index(half), phase)
                scores = warpgroup_mma_wait(0, deps=[multiply_right(queries, right.index(half), scores)])
                if block == end - 1:
                    next_queries(tile, q, q_smem, q_full, work, HEAD_BLOCKS, PARTIAL)
                acc, top, total = soften(scores, block, acc, top, total, scale_log2, p_smem, bias, factors, p_full, False)
            n = end
            last = warpgroup_mma(p_smem.index((n - 1) & 1), left.index((n - 1) & 1), acc, is_async=True)
            factor, next_blocks = at_end(tile, top, total, work, to, factors, of_end, BLOCK, HEAD_BLOCKS, PARTIAL)
            acc = warpgroup_mma_wait(0, deps=[last])
            if not COPIED:
                mbarrier.arrive(of_left.empty.index((n - 1) & 1))
        else:
            next_queries(tile, q, q_smem, q_full, work, HEAD_BLOCKS, PARTIAL)
            factor, next_blocks = at_end(tile, top, total, work, to, factors, of_end, BLOCK, HEAD_BLOCKS, PARTIAL)
        if PARTIAL:
            store_part(0, acc, to, part_of(token, split, work), first_head, work.heads)
        else:
            factor = gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT))
            if COPIED:
                copy_half_out(0, acc, factor, to, left.index((n - 1) & 1), token, first_head)
            else:
                store_half(0, acc, factor, to, token, first_head, work.heads)
        blocks = next_blocks
    if COPIED:
        tma.store_wait(0)


@gluon.jit
def at_end(tile, top, total, work, to, factors, of_end, BLOCK: gl.constexpr, HEAD_BLOCKS: gl.constexpr, PARTIAL: gl.constexpr):
    """What runs beside a tile's last product: what follows from the sums of weights, for both roles that add, is stored.

    Returns the factor of each row, where a tile has all keys, and how many blocks the next tile has.
    """
    token, split, first_head = place(tile, work, HEAD_BLOCKS, PARTIAL)
    rows = here(gl.arange(0, 64, layout=top.type.layout))
    in_range = rows < work.heads - first_head
    next_blocks = blocks_of_tile(gl.minimum(tile + work.programs, work.tiles - 1), work, BLOCK, HEAD_BLOCKS, PARTIAL)
    if PARTIAL:
        total = gl.convert_layout(gl.sum(total, axis=1), top.type.layout, assert_trivial=True)
        of_rows = to.of_rows + ((part_of(token, split, work) * work.heads + first_head) + rows) * 4
        gl.store(of_rows, top, mask=in_range)
        gl.store(of_rows + 1, total, mask=in_range)
        return total, next_blocks
    else:
        total = gl.convert_layout(gl.sum(total, axis=1), top.type.layout, assert_trivial=True)
        b_lse = top + gl.log2(total)  # -inf without keys
        mbarrier.wait(of_end.empty.index(0), here(tile) // work.programs & 1)
        share = 1.0 / (1.0 + gl.exp2(factors.index(SINKS).load(top.type.layout) * 1.4426950408889634 - b_lse))
        factor = gl.where(b_lse == float("-inf"), 0.0, share) / gl.where(total > 0, total, 1.0)
        factors.index(LAST).store(factor)
        mbarrier.arrive(of_end.full.index(0))
        gl.store(to.of_rows + token.to(gl.int64) * work.heads + first_head + rows, b_lse * 0.6931471805599453, mask=in_range)
        return factor, next_blocks


@gluon.jit
def here(rows):
    """The same, but what depends on it is computed here, and not kept in registers through a loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [rows], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wide_product(a, b):
    """In 64 bits, of 32 each: one instruction, where the compiler would keep the signs in registers and take four."""
    return gl.inline_asm_elementwise("mul.wide.s32 $0, $1, $2;", "=l,r,r", [a, b], dtype=gl.int64, is_pure=True, pack=1)


@gluon.jit
def part_of(token, split, work):
    """Index of a tile's part among all parts."""
    return token.to(gl.int64) * work.count + split


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
def soften(scores, block, acc, top, total, scale_log2, p_smem, bias, factors, p_full, FIRST: gl.constexpr):
    """Write a block's weights, and the factor that what came before takes with a new maximum.

    Returns the output so far, the maximum, the sums. In a tile's FIRST block there is nothing to rescale.
    """
    half = block & 1
    rows = gl.convert_layout(gl.max(of_threads(scores, larger), axis=1), top.type.layout, assert_trivial=True)
    new_top = gl.maximum(top, rows * scale_log2)
    base = gl.where(new_top == float("-inf"), 0.0, new_top)  # no key yet: exp2(-inf - 0) = 0 rather than NaN
    keep = gl.exp2(top - base)
    factors.index(half).store(keep)
    if not FIRST:  # beside exponentials, which take longer
        acc = acc * gl.expand_dims(gl.convert_layout(keep, gl.SliceLayout(1, OUTPUT)), 1)
    weights = gl.exp2(scores * scale_log2 - gl.expand_dims(base, 1))
    p_smem.index(half).store(weights.to(gl.bfloat16))  # free: the block before last has left shared memory
    fence_async_shared()
    mbarrier.arrive(p_full.index(half))
    if not FIRST:
        total = total * gl.expand_dims(gl.convert_layout(keep, gl.SliceLayout(1, total.type.layout), assert_trivial=True), 1)
    total += of_threads(weights, plus)
    return acc, new_top, total


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
def add_right(
    work, to, sink, window, entries, right, p_smem, factors, staged, of_right, p_full, of_end, of_staged,
    HEAD_BLOCKS: gl.constexpr, PARTIAL: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """Add weights times records to the right half of the output; without splits leave for others what tiles begin and end with."""
    n = 0  # blocks of earlier tiles
    parity = 0
    gdc_wait()
    BLOCK: gl.constexpr = right.shape[1]
    if not PARTIAL:
        put_number(staged, BLOCKS, blocks_of_tile(gl.program_id(0), work, BLOCK, HEAD_BLOCKS, PARTIAL))
    for tile in range(gl.program_id(0), work.tiles, work.programs):
        if PARTIAL:
            blocks = blocks_of_tile(tile, work, BLOCK, HEAD_BLOCKS, PARTIAL)
        else:
            blocks = number(staged, BLOCKS)  # of this tile, kept there as through the loop it would take a register too many
            mbarrier.wait(of_staged.empty.index(0), parity ^ 1)
            put_sinks(tile, sink, factors, work, HEAD_BLOCKS)
            stage(tile + work.programs, window, entries, work, staged, BLOCK, HEAD_BLOCKS)
            mbarrier.arrive(of_staged.full.index(0))
            mbarrier.arrive(of_end.empty.index(0))
        acc = warpgroup_mma_init(gl.zeros([64, HALF], gl.float32, OUTPUT))
        if COPIED:
            tma.store_wait(0)
        # Not from n on: Triton 3.6 would take n, of which only bounds of loops depend, for a constant.
        for block in range(blocks):
            half = (n + block) & 1
            phase = (n + block) >> 1 & 1
            sums = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(of_right.empty.index(1 - half), pred=(n + block if COPIED else block) > 0)
            mbarrier.wait(of_right.full.index(half), phase)
            mbarrier.wait(p_full.index(half), phase)
            fence_async_shared()
            sums = sums * gl.expand_dims(factors.index(half).load(gl.SliceLayout(1, OUTPUT)), 1)
            acc = warpgroup_mma(p_smem.index(half), right.index(half), sums, is_async=True)
        n += blocks
        acc = warpgroup_mma_wait(0, deps=[acc])
        if not COPIED:
            mbarrier.arrive(of_right.empty.index((n - 1) & 1), pred=blocks > 0)
        token, split, first_head = place(here(tile), work, HEAD_BLOCKS, PARTIAL)
        if PARTIAL:
            store_part(1, acc, to, part_of(token, split, work), first_head, work.heads)
        else:
            mbarrier.wait(of_end.full.index(0), parity)
            factor = factors.index(LAST).load(gl.SliceLayout(1, OUTPUT))
            if COPIED:
                copy_half_out(1, acc, factor, to, right.index((n - 1) & 1), token, first_head)
            else:
                store_half(1, acc, factor, to, token, first_head, work.heads)
        parity ^= 1
    if COPIED:
        tma.store_wait(0)


@gluon.jit
def store_half(SIDE: gl.constexpr, acc, factor, to, token, first_head, heads):
    """Write one half of the output in whole sectors: four threads of a row have 32 bytes in fp32, and exchange values for 64 of bf16.

    One half of that after the other: the exchange of all columns at once would take registers that the roles do not have.
    """
    TYPE: gl.constexpr = to.rows.dtype.element_ty
    gl.assume(to.stride_t >= 0)  # or the compiler would keep their signs
    gl.assume(to.stride_h >= 0)
    out_row = to.rows + token.to(gl.int64) * to.stride_t + first_head.to(gl.int64) * to.stride_h + SIDE * HALF
    quarters = gl.split(gl.reshape(acc, [64, 2, HALF // 2]).permute((0, 2, 1)))
    LAYOUT: gl.constexpr = quarters[0].type.layout
    ROWS: gl.constexpr = output_rows(HALF // 2) if TYPE.primitive_bitwidth == 16 else LAYOUT
    factor = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, LAYOUT), assert_trivial=True), 1)
    for i in gl.static_range(2):
        values = gl.convert_layout((quarters[i] * factor).to(TYPE), ROWS)
        store_rows(values, out_row + i * (HALF // 2), to.stride_h, heads - first_head)


@gluon.jit
def copy_half_out(SIDE: gl.constexpr, acc, factor, to, records, token, first_head):
    """Begin to copy one half of the output from where the last block's records were: the products with that half are done."""
    records.store((acc * gl.expand_dims(factor, 1)).to(gl.bfloat16))
    fence_async_shared()
    records = records._reinterpret(gl.bfloat16, [1, 64, HALF], ROWS_3D)
    tma.async_copy_shared_to_global(to.rows, [token, first_head, SIDE * HALF], records)


@gluon.jit
def store_part(SIDE: gl.constexpr, acc, to, part, first_head, heads):
    """Write one half of a part, each row relative to its largest magnitude, and that. Threads store values where they have them."""
    ROWS: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    first_row = part * heads + first_head
    rows = here(gl.arange(0, 64, layout=ROWS))
    largest = gl.convert_layout(gl.max(of_threads(gl.abs(acc), larger), axis=1), ROWS, assert_trivial=True)
    largest = gl.maximum(largest, 1e-30)
    gl.store(to.of_rows + (first_row + rows) * 4 + (2 + SIDE), largest, mask=rows < heads - first_head)
    values = (acc * gl.expand_dims(1.0 / largest, 1)).to(gl.float16)
    values = gl.reshape(gl.reshape(values, [64, 8, 4, 4, 2]).permute((0, 1, 3, 2, 4)), [64, HALF])
    values = gl.convert_layout(values, output_rows(HALF), assert_trivial=True)
    store_rows(values, to.rows + first_row * to.stride_h + SIDE * HALF, to.stride_h, heads - first_head)


@gluon.jit
def store_rows(values, out, stride, count):
    LAYOUT: gl.constexpr = values.type.layout
    rows = here(gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)))
    columns = gl.expand_dims(gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, LAYOUT)), 0)
    gl.store(gl.expand_dims(out + rows * stride, 1) + columns, values, mask=gl.expand_dims(rows < count, 1))


@gluon.jit
def next_queries(tile, q, q_smem, q_full, work, HEAD_BLOCKS: gl.constexpr, PARTIAL: gl.constexpr):
    """Begin to copy the next tile's queries, as soon as scores of this one need theirs no more."""
    if tile + work.programs < work.tiles:
        copy_queries(here(tile) + work.programs, q, q_smem, q_full, work, HEAD_BLOCKS, PARTIAL)


@gluon.jit
def copy_queries(tile, q, q_smem, q_full, work, HEAD_BLOCKS: gl.constexpr, PARTIAL: gl.constexpr):
    """Begin to copy a tile's queries to shared memory."""
    token, _, first_head = place(tile, work, HEAD_BLOCKS, PARTIAL)
    mbarrier.expect(q_full.index(0), q_smem.shape[1] * q_smem.shape[2] * 2)
    tma.async_copy_global_to_shared(q, [token, first_head, 0], q_full.index(0), q_smem)


@gluon.jit
def bring_records(
    work, window, entries, zeros, left, right, bias, never, staged, of_left, of_right, of_staged,
    WINDOW: gl.constexpr, ENTRIES: gl.constexpr, WINDOW_PER_PAGE: gl.constexpr, ENTRIES_PER_PAGE: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """Bring the records of both lists as bf16, block by block, to shared memory."""
    BLOCK: gl.constexpr = left.shape[1]
    FORMATS: gl.constexpr = formats_of(WINDOW, ENTRIES, WINDOW_PER_PAGE, ENTRIES_PER_PAGE)
    pools = (window.pages, window.page_stride, entries.pages, entries.page_stride, zeros)
    n = 0  # blocks of earlier tiles
    if not PARTIAL:
        lists, blocks, first_slots, slots = begin_tile(gl.program_id(0), window, entries, work, BLOCK, HEAD_BLOCKS, PARTIAL)
        if WINDOW.grid is not None:
            ahead = begin_blocks(n, lists[4] > 0, first_slots, slots, pools, bias, never, WINDOW, FORMATS)
    for tile in range(gl.program_id(0), work.tiles, work.programs):
        if PARTIAL:  # programs with splits have one tile each, or few
            lists, blocks, first_slots, slots = begin_tile(tile, window, entries, work, BLOCK, HEAD_BLOCKS, PARTIAL)
        following = (tile, work, staged, of_staged)
        if WINDOW.grid is None:
            copy_blocks(n, blocks, first_slots, slots, lists, pools, left, right, bias, of_left, of_right, FORMATS)
        elif WINDOW.name == ENTRIES.name:
            if PARTIAL:
                ahead = begin_blocks(n, lists[4] > 0, first_slots, slots, pools, bias, never, WINDOW, FORMATS)
            more = 0 if PARTIAL else gl.where(here(tile) + work.programs < work.tiles, 1, 0)
            for block in range(blocks - more):
                ahead = bring_block(
                    block, n, ahead, lists, (), pools, left, right, bias, never, of_left, of_right, WINDOW, WINDOW, FORMATS
                )
            if not PARTIAL and here(tile) + work.programs < work.tiles:
                ahead = bring_block(blocks - 1, n, ahead, lists, following, pools, left, right, bias, never, of_left, of_right, WINDOW,
                                    WINDOW, FORMATS)  # fmt: skip
        else:
            of_window = gl.minimum(gl.maximum(lists[4], 0), blocks)
            if of_window > 0:
                if PARTIAL:
                    ahead = begin_blocks(n, True, first_slots, slots, pools, bias, never, WINDOW, FORMATS)
                for block in range(of_window - 1):
                    ahead = bring_block(block, n, ahead, lists, (), pools, left, right, bias, never, of_left, of_right, WINDOW, WINDOW,
                                        FORMATS)  # fmt: skip
                next_ahead = bring_block(of_window - 1, n, ahead, lists, (), pools, left, right, bias, never, of_left, of_right, WINDOW,
                                         ENTRIES, FORMATS)  # fmt: skip
            else:
                if not PARTIAL:
                    first_slots, slots = block_slots(0, lists, BLOCK), block_slots(1, lists, BLOCK)
                next_ahead = begin_blocks(n, False, first_slots, slots, pools, bias, never, ENTRIES, FORMATS)
            for block in range(of_window, blocks if PARTIAL else blocks - 1):
                next_ahead = bring_block(block, n, next_ahead, lists, (), pools, left, right, bias, never, of_left, of_right, ENTRIES,
                                         ENTRIES, FORMATS)  # fmt: skip
            if not PARTIAL:
                if of_window < blocks:
                    ahead = bring_block(blocks - 1, n, next_ahead, lists, following, pools, left, right, bias, never, of_left, of_right,
                                        ENTRIES, WINDOW, FORMATS)  # fmt: skip
                else:
                    ahead = begin_staged(n + blocks, following, pools, bias, never, FORMATS)
        n += blocks
        if not PARTIAL:
            wait_for_staged(following)
            lengths = number(staged, WINDOW_LENGTH), number(staged, ENTRY_LENGTH)
            rows, _, split = rows_of_tile(here(tile) + work.programs, window, entries, work, HEAD_BLOCKS, PARTIAL)
            lists, blocks = lists_of_split(rows, lengths[0], lengths[1], split, work, BLOCK, PARTIAL)
            if WINDOW.grid is None:
                first_slots, slots = staged_slots(staged, 0), staged_slots(staged, 1)
            mbarrier.arrive(of_staged.empty.index(0))


@gluon.jit
def rows_of_tile(tile, window, entries, work, HEAD_BLOCKS: gl.constexpr, PARTIAL: gl.constexpr):
    """Slots of both lists of a tile's token, that token, and the tile's split."""
    token, split, _ = place(tile, work, HEAD_BLOCKS, PARTIAL)
    return (window.slots + wide_product(token, window.stride), entries.slots + wide_product(token, entries.stride)), token, split


@gluon.jit
def begin_tile(tile, window, entries, work, BLOCK: gl.constexpr, HEAD_BLOCKS: gl.constexpr, PARTIAL: gl.constexpr):
    """A tile's lists as `lists_of_split` has them, its blocks, and slots of the first two."""
    rows, token, split = rows_of_tile(tile, window, entries, work, HEAD_BLOCKS, PARTIAL)
    # Most lists are full: their slots need not wait for the lengths.
    lists, blocks = lists_of_split(rows, here(window.width), here(entries.width), split, work, BLOCK, PARTIAL)
    first_pointers, first_mask = slot_pointers(0, lists, BLOCK)
    pointers, mask = slot_pointers(1, lists, BLOCK)
    if tile < work.programs:
        gdc_wait()  # now that addresses are known, which the compiler would compute after a wait without a condition
    first_slots = gl.load(first_pointers, mask=first_mask, other=-1)
    slots = gl.load(pointers, mask=mask, other=-1)
    window_length = gl.load(work.window_lengths + token)
    entry_length = gl.load(work.entry_lengths + token)
    if (window_length < window.width) | (entry_length < entries.width):
        lists, blocks = lists_of_split(rows, window_length, entry_length, split, work, BLOCK, PARTIAL)
        first_slots = block_slots(0, lists, BLOCK)
        slots = block_slots(1, lists, BLOCK)
    return lists, blocks, first_slots, slots


@gluon.jit
def stage(tile, window, entries, work, staged, BLOCK: gl.constexpr, HEAD_BLOCKS: gl.constexpr):
    """Leave what bringing a tile's records begins with, for the role that does; none beyond the last tile."""
    rows, token, split = rows_of_tile(tile, window, entries, work, HEAD_BLOCKS, False)
    exists = tile < work.tiles
    window_length = gl.load(work.window_lengths + token, mask=exists, other=0)
    entry_length = gl.load(work.entry_lengths + token, mask=exists, other=0)
    lists, blocks = lists_of_split(rows, window_length, entry_length, split, work, BLOCK, False)
    for i in gl.static_range(2):
        staged.slots.index(i).store(block_slots(i, lists, BLOCK))
    put_number(staged, WINDOW_LENGTH, window_length)
    put_number(staged, ENTRY_LENGTH, entry_length)
    put_number(staged, BLOCKS, blocks)


@gluon.jit
def put_sinks(tile, sink, factors, work, HEAD_BLOCKS: gl.constexpr):
    """Leave the sinks of a tile's heads for its end."""
    _, _, first_head = place(tile, work, HEAD_BLOCKS, False)
    rows = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    factors.index(SINKS).store(gl.load(sink + first_head + rows, mask=rows < work.heads - first_head, other=0.0))


@gluon.jit
def wait_for_staged(following):
    tile, work, _, of_staged = following
    mbarrier.wait(of_staged.full.index(0), here(tile) // work.programs & 1)


@gluon.jit
def staged_slots(staged, BLOCK: gl.constexpr):
    KEYS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, code_layout(4, gl.num_warps(), staged.slots.shape[1])))
    return staged.slots.index(BLOCK).load(KEYS)


@gluon.jit
def number(staged, WHICH: gl.constexpr):
    return gl.max(staged.numbers.index(WHICH).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), axis=0)


@gluon.jit
def put_number(staged, WHICH: gl.constexpr, value):
    staged.numbers.index(WHICH).store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))


@gluon.jit
def begin_staged(n, following, pools, bias, never, FORMATS: gl.constexpr):
    """As `begin_blocks`, of the next tile, where there was no block of this one to begin it beside."""
    WINDOW: gl.constexpr = FORMATS.window
    wait_for_staged(following)
    staged = following[2]
    in_window = number(staged, WINDOW_LENGTH) > 0
    return begin_blocks(n, in_window, staged_slots(staged, 0), staged_slots(staged, 1), pools, bias, never, WINDOW, FORMATS)


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
def copy_blocks(n, blocks, first_slots, slots, lists, pools, left, right, bias, of_left, of_right, FORMATS: gl.constexpr):
    """Bring a tile's blocks of records that are bf16 already, n blocks after those of the program's first."""
    BLOCK: gl.constexpr = left.shape[1]
    LAYOUT: gl.constexpr = FORMATS.window
    where = locate(n, first_slots, lists[4] > 0, pools, bias, LAYOUT, FORMATS)
    for block in range(blocks):
        half = (n + block) & 1
        phase = (n + block) >> 1 & 1 ^ 1
        mbarrier.wait(of_left.empty.index(half), phase)
        copy_half(0, where, left.index(half))
        async_copy.mbarrier_arrive(of_left.full.index(half))
        mbarrier.wait(of_right.empty.index(half), phase)
        copy_half(1, where, right.index(half))
        async_copy.mbarrier_arrive(of_right.full.index(half))
        where = locate(n + block + 1, slots, block + 1 < lists[4], pools, bias, LAYOUT, FORMATS)
        slots = block_slots(block + 2, lists, BLOCK)
        mbarrier.arrive(of_left.full.index(half))
        mbarrier.arrive(of_right.full.index(half))


@gluon.jit
def begin_blocks(n, in_window, first_slots, slots, pools, bias, never, LAYOUT: gl.constexpr, FORMATS: gl.constexpr):
    """Load codes and scales of both halves of a tile's first block. Returns those and the slots of the block after.

    The compiler gives all loads one scoreboard, so whoever waits for one waits for all that were issued. So later on the loads of a half
    are issued when those of the other have come: their addresses depend on it through `never`, zeros that the compiler does not know.
    Slots depend on these, or the loop over blocks would wait for them at its head, each time.
    """
    if LAYOUT.name != FORMATS.entries.name:
        first_slots = gl.where(in_window, first_slots, -1)  # a tile without a window begins with entries
    where = locate(n, first_slots, in_window, pools, bias, LAYOUT, FORMATS)
    left_codes, left_scales = load_half(0, where, slots * 0, LAYOUT)
    right_codes, right_scales = load_half(1, where, slots * 0, LAYOUT)
    came = gl.max(left_codes[0], axis=2)
    for i in gl.static_range(1, len(left_codes)):
        came |= gl.max(left_codes[i], axis=2)
    came = gl.convert_layout(gl.max(came, axis=1), slots.type.layout, assert_trivial=True) | left_scales[0]
    if LAYOUT.name == "v41":
        came |= left_scales[1]
    return slots | nothing(came, never), left_codes, left_scales, right_codes, right_scales


@gluon.jit
def bring_block(
    block, n, ahead, lists, following, pools, left, right, bias, never, of_left, of_right, LAYOUT: gl.constexpr,
    NEXT: gl.constexpr, FORMATS: gl.constexpr,
):  # fmt: skip
    """Widen a block's codes, n blocks after those of the program's first. Returns the same of the next block, in layout NEXT.

    The next block is the next tile's first where something is `following`, and of that layout where the tile has one of it.

    Codes of one half of a block are on their way while those of the other are widened, and slots a block ahead of them.
    """
    slots, left_codes, left_scales, right_codes, right_scales = ahead
    half = (n + block) & 1
    phase = (n + block) >> 1 & 1 ^ 1
    mbarrier.wait(of_left.empty.index(half), phase)
    convert_half(0, left_codes, left_scales, left.index(half), LAYOUT)
    mbarrier.arrive(of_left.full.index(half))
    if len(following) == 0:
        in_window = block + 1 < lists[4]
    else:
        wait_for_staged(following)
        slots = staged_slots(following[2], 0)
        in_window = number(following[2], WINDOW_LENGTH) > 0
        if LAYOUT.name != NEXT.name:
            slots = gl.where(in_window, slots, -1)
    where = locate(n + block + 1, slots, in_window, pools, bias, NEXT, FORMATS)
    left_codes, left_scales = load_half(0, where, nothing(right_scales[0], never), NEXT)
    if len(following) == 0:
        slots = block_slots(block + 2, lists, left.shape[1])
    else:
        slots = staged_slots(following[2], 1)
    mbarrier.wait(of_right.empty.index(half), phase)
    convert_half(1, right_codes, right_scales, right.index(half), LAYOUT)
    mbarrier.arrive(of_right.full.index(half))
    right_codes, right_scales = load_half(1, where, nothing(left_scales[0], never), NEXT)
    return slots, left_codes, left_scales, right_codes, right_scales


@gluon.jit
def nothing(came, never):
    """Zeros that are known when `came` is, and not before what was done before is done."""
    return (came & never.load(came.type.layout)) * 16


@gluon.jit
def block_slots(block, lists, BLOCK: gl.constexpr):
    """Slots of a block, -1 beyond its list's end."""
    pointers, mask = slot_pointers(block, lists, BLOCK)
    return gl.load(pointers, mask=mask, other=-1)


@gluon.jit
def slot_pointers(block, lists, BLOCK: gl.constexpr):
    window_row, window_end, entry_row, entry_end, window_blocks = lists
    in_window = block < window_blocks
    KEYS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, code_layout(4, gl.num_warps(), BLOCK)))  # one value per key
    n = here(block * BLOCK + gl.arange(0, BLOCK, layout=KEYS))  # or the compiler would count blocks in 64 bits, for addresses
    return (window_row if in_window else entry_row) + n, n < (window_end if in_window else entry_end)


@gluon.jit
def locate(n, slots, in_window, pools, bias, LAYOUT: gl.constexpr, FORMATS: gl.constexpr):
    """Where records lie, and how far from there their scales.

    What to add to scores is written on the way: four blocks have a place for it, as that of a block is read last when the block
    after next comes to shared memory.
    """
    bias.index(n & 3).store(gl.where(slots >= 0, 0.0, float("-inf")))
    window_pages, window_page_stride, entry_pages, entry_page_stride, zeros = pools
    slot = gl.maximum(slots, 0)
    if FORMATS.window.name != FORMATS.entries.name:
        in_window = LAYOUT.name == FORMATS.window.name
    PER_PAGE: gl.constexpr = FORMATS.window_per_page
    if PER_PAGE == FORMATS.entries_per_page:
        page, row = slot // PER_PAGE, slot % PER_PAGE
    else:
        page = slot // PER_PAGE if in_window else slot // FORMATS.entries_per_page
        row = slot % PER_PAGE if in_window else slot % FORMATS.entries_per_page
    all_data = (PER_PAGE if in_window else FORMATS.entries_per_page) * LAYOUT.data_bytes
    pages = window_pages if in_window else entry_pages
    data = pages + page.to(gl.int64) * (window_page_stride if in_window else entry_page_stride) + row * LAYOUT.data_bytes
    known = slots >= 0
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
def load_half(SIDE: gl.constexpr, where, after, LAYOUT: gl.constexpr):
    return load_codes(SIDE, where, after, LAYOUT), load_scales(SIDE, where, after, LAYOUT)


@gluon.jit
def load_codes(SIDE: gl.constexpr, where, after, LAYOUT: gl.constexpr):
    """Codes of one half in parts of 16 for each thread of a row, int32 [keys, threads, 4], or [keys, threads, 2] of four bits each.

    v4: the last 64 values are bf16 [keys, threads, words], and what codes there are before them within a part, [keys, threads, 2].
    """
    KEYS: gl.constexpr = where[0].shape[0]
    WORDS: gl.constexpr = 2 if LAYOUT.name == "v41_fp4" else 4
    PART: gl.constexpr = code_layout(WORDS, gl.num_warps(), KEYS)
    T: gl.constexpr = PART.shape[1]
    WHOLE: gl.constexpr = 12 // T if LAYOUT.name == "v4" and SIDE == 1 else 16 // T
    words = where[0].to(gl.pointer_type(gl.int32)) + SIDE * 16 * WORDS
    parts = ()
    for i in gl.static_range(WHOLE):
        parts = parts + (load_words(words + i * WORDS * T, after, PART),)
    if WHOLE < 16 // T:
        if T == 8:
            parts = parts + (load_words(words + 32, after, code_layout(2, gl.num_warps(), KEYS, True)),)
        parts = parts + (load_words(words + 48, after, code_layout(32 // T, gl.num_warps(), KEYS, T == 8)),)
    return parts


@gluon.jit
def load_words(data, after, LAYOUT: gl.constexpr, STEP: gl.constexpr = 1):
    """Bytes of each key from `data` on: int32 [keys, threads of a row, words]; STEP 0: the same for all threads."""
    data = gl.convert_layout(data, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)), assert_trivial=True)
    after = gl.convert_layout(after, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)), assert_trivial=True)
    v = gl.expand_dims(gl.expand_dims(gl.arange(0, LAYOUT.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0), 2)
    w = gl.expand_dims(gl.expand_dims(gl.arange(0, LAYOUT.shape[2], layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT))), 0), 0)
    return gl.load(gl.expand_dims(gl.expand_dims(data + after, 1), 2) + (v * (STEP * LAYOUT.shape[2]) + w))


@gluon.jit
def load_scales(SIDE: gl.constexpr, where, after, LAYOUT: gl.constexpr):
    """Scales of one half in words int32 [keys], one (v4) or two (v41); of v41_fp4 the first, and all four [keys, threads, 4]."""
    scales = (where[0] + where[1]).to(gl.pointer_type(gl.int32))
    if LAYOUT.name == "v4":
        return (gl.load(scales + (after + SIDE)),)
    elif LAYOUT.name == "v41":
        scales += after + SIDE * 2
        return gl.load(scales), gl.load(scales + 1)
    else:
        gl.static_assert(LAYOUT.name == "v41_fp4")
        scales += SIDE * 4
        return gl.load(scales + after), load_words(scales, after, code_layout(4, gl.num_warps(), where[0].shape[0]), 0)


@gluon.jit
def convert_half(SIDE: gl.constexpr, codes, scales, keys, LAYOUT: gl.constexpr):
    """Write one half of a block as bf16 into shared memory."""
    KEYS: gl.constexpr = keys.shape[0]
    PART: gl.constexpr = codes[0].type.layout
    T: gl.constexpr = PART.shape[1]
    CODED: gl.constexpr = 12 // T if LAYOUT.name == "v4" and SIDE == 1 else 16 // T
    values = ()
    for i in gl.static_range(CODED):
        if LAYOUT.name == "v41_fp4":
            part = convert_e2m1(codes[i], pick_scale_of_16(scales[1], i, PART))
        else:
            part = convert_e4m3(codes[i], pick_scale(scales, i * T, 4 // len(scales), PART))
        values = values + (gl.reshape(part, [KEYS, 8 * T]),)
    if CODED < 16 // T:
        last = gl.reshape(codes[len(codes) - 1], [KEYS, 32])
        if T == 8:
            part = convert_e4m3(codes[1], pick_scale(scales, 16, 8, code_layout(2, gl.num_warps(), KEYS, True)))
            last = beside(gl.reshape(part, [KEYS, 32]), last)
        values = values + (last,)
    keys = keys._reinterpret(gl.int32, [KEYS, 128], SHARED_WORDS)
    if values[0].type.layout != values[1].type.layout:
        keys.slice(0, 64, dim=1).store(values[0])
        keys.slice(64, 64, dim=1).store(values[1])
    else:  # at once: between stores to one place the compiler puts barriers
        words = beside(values[0], values[1])
        if T == 4:
            words = beside(words, beside(values[2], values[3]))
        keys.store(words)


@gluon.jit
def beside(left, right):
    return gl.reshape(gl.join(left, right).permute((0, 2, 1)), [left.shape[0], 2 * left.shape[1]])


@gluon.jit
def pick_scale(scales, FIRST: gl.constexpr, OF_SCALE: gl.constexpr, LAYOUT: gl.constexpr):
    """The scale byte of each thread's codes [keys, threads], from thread FIRST of a whole half's on; OF_SCALE threads share one."""
    word = gl.convert_layout(scales[FIRST // (4 * OF_SCALE)], gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)), assert_trivial=True)
    v = gl.expand_dims(gl.arange(0, LAYOUT.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0)
    return (gl.expand_dims(word, 1) >> (FIRST + v) // OF_SCALE % 4 * 8) & 0xFF


@gluon.jit
def pick_scale_of_16(scales, PART: gl.constexpr, LAYOUT: gl.constexpr):
    """As `pick_scale`, of four words of scales [keys, threads, 4], one byte for each thread of a part."""
    KEYS: gl.constexpr = LAYOUT.shape[0]
    T: gl.constexpr = LAYOUT.shape[1]
    even, odd = gl.split(gl.reshape(scales, [KEYS, T, 2, 2]))
    first = gl.convert_layout(gl.split(even)[PART * T // 8], gl.SliceLayout(2, LAYOUT), assert_trivial=True)
    second = gl.convert_layout(gl.split(odd)[PART * T // 8], gl.SliceLayout(2, LAYOUT), assert_trivial=True)
    v = gl.expand_dims(gl.arange(0, T, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0)
    word = gl.where((v < 4) if T == 8 else (v < 4) & (PART % 2 == 0), first, second)
    return (word >> v % 4 * 8) & 0xFF


@gluon.jit(do_not_specialize=["pieces", "count"])
def combine_kernel(
    partial_out, partial_rows, sink, out, out_stride_t, out_stride_h, lse, pieces, count,
    H: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, WARPS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Weighted means of the parts of rows, COLUMNS of a row in each warp, BLOCK parts at a time; those without keys change no bit."""
    PARTS: gl.constexpr = gl.BlockedLayout([1, BLOCK, COLUMNS // 32], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    OUT: gl.constexpr = gl.SliceLayout(1, PARTS)  # of a warp
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])  # of a part of each lane
    ROW: gl.constexpr = gl.SliceLayout(1, LANES)
    piece = gl.program_id(0) * WARPS + gl.arange(0, WARPS, layout=ROW)
    in_range = piece < pieces
    piece = gl.minimum(piece, pieces - 1)
    row, first_column = piece // (D // COLUMNS), piece % (D // COLUMNS) * COLUMNS
    token, head = row // H, row % H
    b_sink = gl.load(sink + head)
    first = token.to(gl.int64) * count * H + head
    n = gl.expand_dims(gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LANES)), 0)
    of_rows = gl.expand_dims(partial_rows + first * 4, 1) + n * (4 * H)
    of_scale = gl.expand_dims(2 + first_column // HALF, 1)
    column = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, OUT)), 0)
    m = gl.expand_dims(gl.expand_dims(gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, PARTS))), 0), 2)
    of_out = gl.convert_layout(partial_out + first * D + first_column, OUT_ROW)
    of_out = gl.expand_dims(gl.expand_dims(of_out, 1) + column, 1) + m * (D * H)
    out_row = out + token.to(gl.int64) * out_stride_t + head.to(gl.int64) * out_stride_h + first_column
    top = gl.full([WARPS], float("-inf"), gl.float32, ROW)
    total = gl.zeros([WARPS], gl.float32, ROW)
    acc = gl.zeros([WARPS, COLUMNS], gl.float32, OUT)
    gdc_launch_dependents()  # early: what follows reads no parts, and the kernel that writes them began when all others had ended
    of_rows -= BLOCK * 4 * H
    of_out -= BLOCK * D * H
    # Launched while the parts are still being written, it first rehearses without a part: addresses and instructions come ahead.
    for start in range(-BLOCK, count, BLOCK):
        parts = gl.where(start >= 0, count - start, 0)
        if start >= 0:
            gdc_wait()
        b_top = gl.load(of_rows, mask=n < parts, other=float("-inf"))
        b_total = gl.load(of_rows + 1, mask=n < parts, other=0.0)
        b_scale = gl.load(of_rows + of_scale, mask=n < parts, other=0.0)
        b_out = gl.load(of_out, mask=m < parts, other=0.0)
        b_top = (b_top.to(gl.int32, bitcast=True) | zero_behind_loads()).to(gl.float32, bitcast=True)
        new_top = gl.maximum(top, gl.max(b_top, axis=1))
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
        keep = gl.exp2(top - base)
        weight = gl.exp2(b_top - gl.expand_dims(base, 1))
        total = total * keep + gl.sum(weight * b_total, axis=1)
        factor = gl.convert_layout(weight * b_scale, gl.SliceLayout(2, PARTS))
        acc = acc * gl.expand_dims(gl.convert_layout(keep, OUT_ROW), 1)
        acc += gl.sum(b_out.to(gl.float32) * gl.expand_dims(factor, 2), axis=1)
        top = new_top
        of_rows += BLOCK * 4 * H
        of_out += BLOCK * D * H
    b_lse = top + gl.log2(total)
    share = 1.0 / (1.0 + gl.exp2(b_sink * 1.4426950408889634 - b_lse))
    share = gl.where(b_lse == float("-inf"), 0.0, share) / gl.where(total > 0, total, 1.0)
    values = acc * gl.expand_dims(gl.convert_layout(share, OUT_ROW), 1)
    pointers = gl.expand_dims(gl.convert_layout(out_row, OUT_ROW), 1) + part_column(column)
    gl.store(pointers, values.to(out.dtype.element_ty), mask=gl.expand_dims(gl.convert_layout(in_range, OUT_ROW), 1))
    gl.store(lse + row, b_lse * 0.6931471805599453, mask=in_range & (first_column == 0))


@gluon.jit
def part_column(d):
    """Where parts have column d: a thread's pairs in four neighbouring tiles of 8 columns lie side by side. Also the other way round."""
    return d // 32 * 32 + d // 2 % 4 * 8 + d // 8 % 4 * 2 + d % 2


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
    """Every pair of layouts, with splits and without, and blocks of 32 keys; results that no copy engine takes."""
    pointers = {"out": "*bf16"} | dict.fromkeys(("window_pages", "entry_pages", "zeros"), "*u8")
    pointers |= dict.fromkeys(("window_slots", "window_lengths", "entry_slots", "entry_lengths"), "*i32")
    pointers |= dict.fromkeys(("sink", "lse", "partial_rows"), "*fp32") | {"partial_out": "*fp16"}
    numbers = ("window_page_stride", "window_slots_stride", "entry_page_stride", "entry_slots_stride")
    aligned = (*pointers, *numbers, "out_stride_t", "out_stride_h")
    numbers = (*aligned[len(pointers) :], "H", "window_width", "entry_width", "tiles", "programs", "count", "split_blocks")
    signature = pointers | dict.fromkeys(numbers, "i32") | {"scale_log2": "fp32"}

    def rows(columns: int) -> str:
        return f"tensordesc<bf16{[1, BLOCK_HEADS, columns]},{ROWS_3D.value!r}>"

    signature["q"] = rows(HEAD_DIM)

    def attend(pair: tuple[str, str], count: int, keys: int = BLOCK_KEYS) -> AotCase:
        window, entries = layouts.get(pair[0]), layouts.get(pair[1])
        constants = {"D": HEAD_DIM, "WINDOW": window, "ENTRIES": entries, "WINDOW_PER_PAGE": 64, "ENTRIES_PER_PAGE": 64}
        copied = window.grid is not None and count == 1 and keys == BLOCK_KEYS
        types = signature | ({"out": rows(HEAD_DIM // 2)} if copied else {})
        addresses = tuple(name for name in aligned if not (copied and name == "out"))
        constants |= {"PARTIAL": count > 1, "COPIED": copied, "HEAD_BLOCKS": 1, "BLOCK": keys}
        constants |= {"ADD_REGISTERS": ADD_REGISTERS, **_bring_constants(window, entries, count)}
        name = f"sparse_attention gluon {'+'.join(pair)} k{keys} splits {count}"
        reason = "what is used once per tile, while its results leave and its blocks are weighed"
        return AotCase(name, attend_kernel, types, constants, NUM_WARPS, 1, addresses, archs=(HOPPER,), spill_reason=reason)

    results = {"partial_out": "*fp16", "partial_rows": "*fp32", "sink": "*fp32", "out": "*bf16", "lse": "*fp32"}
    addresses = (*results, "out_stride_t", "out_stride_h")
    arguments = results | dict.fromkeys(("out_stride_t", "out_stride_h", "pieces", "count"), "i32")
    shape = {"H": 64, "D": HEAD_DIM, "BLOCK": COMBINE_BLOCK, "WARPS": 16, "COLUMNS": HEAD_DIM // 2}
    merge = AotCase("sparse_attention gluon combine", combine_kernel, arguments, shape, 16, 1, addresses, archs=(HOPPER,))
    cases = [attend(pair, count) for pair in PAIRS for count in (1, 2)] + [attend(pair, 2, 32) for pair in PAIRS]
    return [*cases, attend(("v4", "v4"), 1, 32), merge]
