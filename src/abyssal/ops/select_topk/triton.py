# mypy: allow-untyped-defs
"""Top-k on the GPU in one program per row: first among maxima of groups, then among the entries of the best groups.

The k best entries of a row lie in the k groups whose maxima are best (ties: lowest group): each of these groups holds an entry that
precedes every entry of every other group. So a row of N entries needs no pass over all of them, and no exchange between programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from abyssal.ops._aot import AotCase
from abyssal.ops._records import next_power_of_2

GROUP = 16  # entries per maximum, and maxima per maximum of the next level
TOP_LEVEL = 16384  # values that one program searches at most at its first step; 4096 gives a third step and the same time
MAX_K = 2048  # GROUP * MAX_K values of the later steps fit into the registers of 1024 threads
HIDDEN = tl.constexpr(-(2**31))  # below the key of every float but one NaN


@dataclass(frozen=True)
class SelectConfig:
    """How one launch is cut."""

    levels: int  # 1: entries only; 2: maxima, then entries; 3: maxima of maxima first
    warps: int
    chunk: int  # entries per program, whose last one finishes a row; 0: one program per row


CHUNKS = (2048, 4096)  # entries of a program: the lesser where that gives a multiprocessor at most one
SPREAD_PROGRAMS = 512  # beyond these, a program per row has company enough
SPREAD_ROWS = 16  # the same, where one program's registers hold what it searches


def select_config(rows: int, num_entries: int, k: int) -> SelectConfig:
    """A level more where the first step would search more than TOP_LEVEL values; few long rows are spread over many programs."""
    levels, width = 1, num_entries
    while width > TOP_LEVEL:
        levels, width = levels + 1, -(-width // GROUP)
    short, long = CHUNKS
    if levels > 1 and (rows <= SPREAD_ROWS or k > 512) and rows * -(-num_entries // long) <= SPREAD_PROGRAMS:
        chunk = short if k <= 512 and rows * -(-num_entries // short) <= 128 else long
        return SelectConfig(levels, warps=8 if k <= 512 else 16, chunk=chunk)
    warps = next_power_of_2(width) // 1024 if levels == 1 else next_power_of_2(max(width, GROUP * k)) // 512
    return SelectConfig(levels, warps=min(32, max(4, warps)), chunk=0)


@triton.jit
def _order(values, valid):
    """fp32 -> int32 keys of the same order, -0.0 equal to 0.0; invalid ones are HIDDEN."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(valid, bits ^ ((bits >> 31) & 0x7FFFFFFF), HIDDEN)


@triton.jit
def _narrow(keys, low, high, k):
    """A third of the range of the k-th largest of at most 2^15 keys: at least k reach `low` < `high`, fewer than k anything above `high`.

    Returns low, high and, if low has moved, how many keys reach it, otherwise less than k.
    """
    span = (high - low).to(tl.uint32)
    third = (span // 3).to(tl.int32)
    first = low + (span.to(tl.int32) - 2 * third)
    second = high - third
    # One sum counts both: bits 16 and up, and the bits below.
    reach = tl.sum((keys >= first).to(tl.int32) + ((keys >= second).to(tl.int32) << 16), 0)
    above = (reach >> 16) & 0xFFFF
    reach = reach & 0xFFFF
    if above >= k:
        low = second
        reach = above
    elif reach >= k:
        low = first
        high = second - 1
    else:
        high = first - 1
    return low, high, reach


@triton.jit
def _raised(floor, keys, WIDTH: tl.constexpr, K_BLOCK: tl.constexpr):
    """`floor`, or the least maximum of K_BLOCK sets if that is more: so many keys reach it, however they are dealt out."""
    if WIDTH > K_BLOCK:
        best = tl.max(tl.reshape(keys, (K_BLOCK, WIDTH // K_BLOCK), can_reorder=True), 1)
        floor = tl.maximum(floor, tl.min(best, 0))
    return floor


@triton.jit
def _choose(keys, floor, count, k):
    """The k largest of `count` keys that are not HIDDEN, lowest index first among equals -> (chosen, rank among the chosen, k-th key).

    `floor`: a key that at least k keys reach, or HIDDEN.
    """
    low = tl.maximum(floor, HIDDEN + 1)
    high = tl.max(keys, 0)
    if count <= k:
        low = HIDDEN
        high = HIDDEN
    while low < high:
        low, high, reach = _narrow(keys, low, high, k)
        if reach == k:
            high = low
    above = keys > low
    equal = (keys == low) & (keys != HIDDEN)
    room = k - tl.sum(above.to(tl.int32), 0)
    # One scan counts both: at most 2^15 of each precede any entry.
    before = tl.cumsum((above.to(tl.int32) << 16) + equal.to(tl.int32), 0)
    equals = before & 0xFFFF
    chosen = above | (equal & (equals <= room))
    return chosen, (before >> 16) + tl.minimum(equals, room) - 1, low


@triton.jit
def _slots(position, valid, blocks, pages, BLOCK: tl.constexpr, ENTRIES: tl.constexpr):
    """Places among candidates become positions where blocks are given, these slots where pages are."""
    if BLOCK > 0:
        position = tl.load(blocks + position // BLOCK, mask=valid, other=0) * BLOCK + position % BLOCK
    if ENTRIES > 0:
        position = tl.load(pages + position // ENTRIES, mask=valid, other=0) * ENTRIES + position % ENTRIES
    return position


@triton.jit
def _finish_row(out, found, k, blocks, pages, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr):
    """The `found` entries of a row become what they stand for; -1 after them."""
    place = tl.arange(0, K_BLOCK)
    tl.debug_barrier()
    slot = _slots(tl.load(out + place, mask=place < found, other=0), place < found, blocks, pages, BLOCK, ENTRIES)
    tl.debug_barrier()
    tl.store(out + place, tl.where(place < found, slot, -1), mask=place < k)


@triton.jit
def _refine(source, row_out, visible, chosen_count, K_BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Keys and indices of the members of the `chosen_count` groups in `row_out`, as far as they are visible."""
    member = tl.arange(0, K_BLOCK * GROUP)
    inside = member // GROUP < chosen_count
    index = tl.load(row_out + member // GROUP, mask=inside, other=0) * GROUP + member % GROUP
    valid = inside & (index < visible)
    return _order(tl.load(source + index, mask=valid, other=0.0), valid), index


@triton.jit
def _select_topk_kernel(
    scores,  # fp32 [rows, score_stride]
    maxima,  # fp32 [rows, maxima_stride]: of GROUP entries
    tops,  # fp32 [rows, tops_stride]: of GROUP maxima
    visible,  # int32 [rows]
    blocks,  # int32 [rows, blocks_stride]: of the candidates that the entries are
    page_table,  # int32 [rows / queries, table_stride]
    out,  # int32 [rows, k]
    score_stride,
    maxima_stride,
    tops_stride,
    blocks_stride,
    table_stride,
    num_entries,
    k,
    queries,
    LEVELS: tl.constexpr,
    WIDTH: tl.constexpr,  # of the first step
    K_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,  # entries of such a block; 0: they are all entries
    ENTRIES: tl.constexpr,  # entries per page; 0: positions are wanted
    EARLY: tl.constexpr,  # on a GPU, where the launch may come before the end of the kernel before
):
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    row_out = out + row * k
    seen = tl.minimum(tl.load(visible + row), num_entries)
    pages = page_table + row // queries * table_stride
    if LEVELS == 1 and WIDTH > 4 * K_BLOCK:  # noqa: SIM102 decided when compiled
        if seen <= WIDTH // 4:  # the shape of a graph is wider than most of its rows
            index = tl.arange(0, WIDTH // 4)
            keys = _order(tl.load(scores + row * score_stride + index, mask=index < num_entries, other=0.0), index < seen)
            chosen, rank, floor = _choose(keys, _raised(HIDDEN, keys, WIDTH // 4, K_BLOCK), seen, k)
            tl.store(row_out + rank, index, mask=chosen)
            _finish_row(row_out, tl.minimum(seen, k), k, blocks + row * blocks_stride, pages, K_BLOCK, BLOCK, ENTRIES)
            return
    groups = tl.cdiv(seen, GROUP)
    supers = tl.cdiv(groups, GROUP)
    index = tl.arange(0, WIDTH)
    if LEVELS == 1:
        width = seen
        inside = index < num_entries
        first = scores + row * score_stride
    elif LEVELS == 2:
        width = groups
        inside = index < maxima_stride
        first = maxima + row * maxima_stride
    else:
        width = supers
        inside = index < tops_stride
        first = tops + row * tops_stride
    keys = _order(tl.load(first + index, mask=inside, other=0.0), index < width)
    chosen, rank, floor = _choose(keys, _raised(HIDDEN, keys, WIDTH, K_BLOCK), width, k)
    if LEVELS == 3:
        tl.store(row_out + rank, index, mask=chosen)
        tl.debug_barrier()
        keys, index = _refine(maxima + row * maxima_stride, row_out, groups, tl.minimum(supers, k), K_BLOCK, GROUP)
        tl.debug_barrier()
        chosen, rank, floor = _choose(keys, _raised(floor, keys, K_BLOCK * GROUP, K_BLOCK), groups, k)
    if LEVELS >= 2:
        tl.store(row_out + rank, index, mask=chosen)
        tl.debug_barrier()
        keys, index = _refine(scores + row * score_stride, row_out, seen, tl.minimum(groups, k), K_BLOCK, GROUP)
        tl.debug_barrier()
        chosen, rank, floor = _choose(keys, _raised(floor, keys, K_BLOCK * GROUP, K_BLOCK), seen, k)
    tl.store(row_out + rank, index, mask=chosen)
    _finish_row(row_out, tl.minimum(seen, k), k, blocks + row * blocks_stride, pages, K_BLOCK, BLOCK, ENTRIES)


@triton.jit
def _group_maxima_kernel(
    scores,
    visible,
    maxima,
    tops,
    score_stride,
    maxima_stride,
    tops_stride,
    num_entries,
    GROUP: tl.constexpr,
    TOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Largest visible score of every GROUP entries, and of every GROUP of these if TOPS."""
    row = tl.program_id(1).to(tl.int64)
    seen = tl.minimum(tl.load(visible + row), num_entries)
    start = tl.program_id(0) * BLOCK
    if start >= seen:
        return
    entry = start + tl.arange(0, BLOCK)
    values = tl.load(scores + row * score_stride + entry, mask=entry < seen, other=-float("inf"))
    best = tl.max(values.reshape(BLOCK // GROUP, GROUP), 1)
    group = start // GROUP + tl.arange(0, BLOCK // GROUP)
    tl.store(maxima + row * maxima_stride + group, best, mask=group * GROUP < seen)
    if TOPS:
        best = tl.max(best.reshape(BLOCK // GROUP // GROUP, GROUP), 1)
        top = start // (GROUP * GROUP) + tl.arange(0, BLOCK // GROUP // GROUP)
        tl.store(tops + row * tops_stride + top, best, mask=top * GROUP * GROUP < seen)


@triton.jit
def _floor(keys, count, k, WIDTH: tl.constexpr, K_BLOCK: tl.constexpr):
    """A key that at least k of `count` keys that are not HIDDEN reach, and not many more; HIDDEN if there are fewer."""
    low = HIDDEN
    if count >= k:
        high = tl.max(keys, 0)
        low = _raised(HIDDEN, keys, WIDTH, K_BLOCK)
        if low == HIDDEN:
            low = tl.min(tl.where(keys == HIDDEN, high, keys), 0)
        reach = tl.sum((keys >= low).to(tl.int32), 0)
        while (low < high) & (reach > k + k // 4):
            before = low
            low, high, now = _narrow(keys, low, high, k)
            if low != before:
                reach = now
    return low


@triton.jit
def _choose_from_places(
    candidate_keys,
    candidates,
    out,
    floor,
    seen,
    chunks,
    k,
    CHUNK: tl.constexpr,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The k best of a row's `seen` entries, which are among the candidates, none of which lies beyond the first PLACES of its chunk."""
    each = tl.arange(0, WIDTH)
    inside = each // PLACES < chunks
    place = each // PLACES * CHUNK + each % PLACES
    keys = tl.load(candidate_keys + place, mask=inside, other=HIDDEN, cache_modifier=".cg")
    index = tl.load(candidates + place, mask=inside, other=0, cache_modifier=".cg")
    chosen, rank, _ = _choose(keys, floor, seen, k)
    tl.store(out + rank, index, mask=chosen)


@triton.jit
def _choose_from_few(
    candidate_keys,
    candidates,
    counts,
    out,
    floor,
    total,
    k,
    CHUNK: tl.constexpr,
    LOG_CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The k best of `total` <= WIDTH candidates, counts[c] of which lie from c * CHUNK on, by ascending position."""
    ends = tl.cumsum(counts, 0)
    slot = tl.arange(0, WIDTH)
    chunk = tl.zeros([WIDTH], tl.int32)  # number of ends at or before the slot
    for bit in tl.static_range(LOG_CHUNKS):
        step = 1 << (LOG_CHUNKS - 1 - bit)
        chunk += tl.where(tl.gather(ends, chunk + (step - 1), 0) <= slot, step, 0)
    place = chunk * CHUNK + slot - tl.gather(ends - counts, chunk, 0)
    keys = tl.load(candidate_keys + place, mask=slot < total, other=HIDDEN, cache_modifier=".cg")
    index = tl.load(candidates + place, mask=slot < total, other=0, cache_modifier=".cg")
    chosen, rank, _ = _choose(keys, floor, total, k)
    tl.store(out + rank, index, mask=chosen)


@triton.jit
def _choose_from_chunks(candidate_keys, candidates, chunk_counts, out, chunks, k, CHUNK: tl.constexpr):
    """As `_choose_from_few` for any number of candidates above k, chunk after chunk."""
    slot = tl.arange(0, CHUNK)
    low = HIDDEN + 1
    high = 2147483647
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)
        reach = 0
        for chunk in range(chunks):
            count = tl.load(chunk_counts + chunk, cache_modifier=".cg")
            keys = tl.load(candidate_keys + chunk * CHUNK + slot, mask=slot < count, other=HIDDEN, cache_modifier=".cg")
            reach += tl.sum((keys >= middle).to(tl.int32), 0)
        if reach >= k:
            low = middle
        else:
            high = middle - 1
        if reach == k:
            high = middle
    above_all = 0
    for chunk in range(chunks):
        count = tl.load(chunk_counts + chunk, cache_modifier=".cg")
        keys = tl.load(candidate_keys + chunk * CHUNK + slot, mask=slot < count, other=HIDDEN, cache_modifier=".cg")
        above_all += tl.sum((keys > low).to(tl.int32), 0)
    room = k - above_all
    above_before = 0
    equal_before = 0
    for chunk in range(chunks):
        count = tl.load(chunk_counts + chunk, cache_modifier=".cg")
        keys = tl.load(candidate_keys + chunk * CHUNK + slot, mask=slot < count, other=HIDDEN, cache_modifier=".cg")
        index = tl.load(candidates + chunk * CHUNK + slot, mask=slot < count, other=0, cache_modifier=".cg")
        above = keys > low
        equal = (keys == low) & (slot < count)
        aboves = above_before + tl.cumsum(above.to(tl.int32), 0)
        equals = equal_before + tl.cumsum(equal.to(tl.int32), 0)
        chosen = above | (equal & (equals <= room))
        tl.store(out + aboves + tl.minimum(equals, room) - 1, index, mask=chosen)
        above_before += tl.sum(above.to(tl.int32), 0)
        equal_before += tl.sum(equal.to(tl.int32), 0)


@triton.jit
def _select_spread_kernel(
    scores,  # fp32 [rows, score_stride]
    maxima,  # fp32 [rows, maxima_stride]: of SPAN entries
    visible,  # int32 [rows]
    blocks,  # int32 [rows, blocks_stride]: of the candidates that the entries are
    page_table,  # int32 [rows / queries, table_stride]
    out,  # int32 [rows, k]
    candidate_keys,  # int32 [rows, chunks * CHUNK]
    candidates,  # int32 [rows, chunks * CHUNK]: what `out` gets of them
    chunk_counts,  # int32 [rows, chunks]
    arrivals,  # int32 [rows], zero before and after: programs, and 2^16 for each that has more than PLACES candidates
    score_stride,
    maxima_stride,
    blocks_stride,
    table_stride,
    num_entries,
    k,
    queries,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    LOG_CHUNKS: tl.constexpr,  # of the number of chunks, rounded up
    PLACES: tl.constexpr,  # of a chunk's candidates in the usual choice
    WIDTH: tl.constexpr,  # of the search for a floor
    DEPTH: tl.constexpr,  # maxima per value of this search
    K_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
    EARLY: tl.constexpr,  # on a GPU, where the launch may come before the end of the kernel before
):
    """Chunk program_id(0) of a row: its entries above a floor that k entries reach; the last program of the row chooses among them.

    Every program finds the same floor, from the row's maxima: that of WIDTH disjoint sets of entries.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    seen = tl.minimum(tl.load(visible + row), num_entries)
    row_keys = candidate_keys + row * (chunks * CHUNK)
    row_candidates = candidates + row * (chunks * CHUNK)
    row_counts = chunk_counts + row * chunks
    row_out = out + row * k
    place = tl.arange(0, PLACES)
    count = 0
    floor = HIDDEN  # also to a program that has no entries, should it finish the row
    if chunk * CHUNK < seen:
        entry = chunk * CHUNK + tl.arange(0, CHUNK)
        keys = _order(tl.load(scores + row * score_stride + entry, mask=entry < num_entries, other=0.0), entry < seen)
        index = tl.arange(0, DEPTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        tops = tl.load(maxima + row * maxima_stride + index, mask=index < maxima_stride, other=0.0)
        tops = _order(tops, index < tl.cdiv(seen, SPAN))
        slot = _slots(
            entry, entry < seen, blocks + row * blocks_stride, page_table + row // queries * table_stride, BLOCK, ENTRIES
        )
        floor = _floor(tl.max(tops, 0), tl.minimum(tl.cdiv(seen, SPAN), WIDTH), k, WIDTH, K_BLOCK)
        candidate = (keys >= floor) & (keys != HIDDEN)
        rank = tl.cumsum(candidate.to(tl.int32), 0) - 1
        tl.store(row_keys + chunk * CHUNK + rank, keys, mask=candidate)
        tl.store(row_candidates + chunk * CHUNK + rank, slot, mask=candidate)
        count = tl.sum(candidate.to(tl.int32), 0)
    tl.store(row_counts + chunk, count)
    tl.store(row_keys + chunk * CHUNK + place, HIDDEN, mask=place >= count)
    tl.debug_barrier()
    arrival = tl.where(count > PLACES, 0x10001, 1)
    arrival += tl.atomic_add(arrivals + row, arrival, sem="acq_rel", scope="gpu")
    if arrival & 0xFFFF == chunks:
        if arrival == chunks:
            _choose_from_places(row_keys, row_candidates, row_out, floor, seen, chunks, k, CHUNK, PLACES, PLACES << LOG_CHUNKS)
        else:
            each = tl.arange(0, 1 << LOG_CHUNKS)
            counts = tl.load(row_counts + each, mask=each < chunks, other=0, cache_modifier=".cg")
            total = tl.sum(counts, 0)
            if total <= 4 * K_BLOCK:
                _choose_from_few(row_keys, row_candidates, counts, row_out, floor, total, k, CHUNK, LOG_CHUNKS, 4 * K_BLOCK)
            elif total <= GROUP * K_BLOCK:
                _choose_from_few(row_keys, row_candidates, counts, row_out, floor, total, k, CHUNK, LOG_CHUNKS, GROUP * K_BLOCK)
            else:
                _choose_from_chunks(row_keys, row_candidates, row_counts, row_out, chunks, k, CHUNK)
        rest = tl.arange(0, K_BLOCK)
        tl.store(row_out + rest, -1, mask=(rest >= seen) & (rest < k))
        tl.store(arrivals + row, 0)


@triton.jit
def _block_maxima_kernel(
    scores,
    visible,
    maxima,
    visible_blocks,
    visible_candidates,
    score_stride,
    maxima_stride,
    num_entries,
    kept,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Largest visible score of each of BLOCKS blocks, infinite for the newest block; how many blocks and candidates a query has."""
    row = tl.program_id(1).to(tl.int64)
    seen = tl.minimum(tl.load(visible + row), num_entries)
    count = tl.cdiv(seen, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(visible_blocks + row, count)
        # the newest block is the last of those kept: what lies before it is full
        tl.store(visible_candidates + row, seen - tl.maximum(count - kept, 0) * BLOCK)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    entry = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(scores + row * score_stride + entry, mask=entry < seen, other=-float("inf"))
    best = tl.where(block == count - 1, float("inf"), tl.max(values, 1))
    tl.store(maxima + row * maxima_stride + block, best, mask=block < count)


MAXIMA_BLOCK = 2048  # entries per program: 128 programs for 2^18


def select_topk(
    scores: Tensor,
    visible: Tensor,
    k: int,
    *,
    maxima: Tensor | None = None,
    blocks: Tensor | None = None,
    page_table: Tensor | None = None,
    entries_per_page: int = 64,
    arrivals: Tensor | None = None,
    out: Tensor | None = None,
    config: SelectConfig | None = None,
) -> Tensor:
    """The min(k, visible) best entries of every query, ties to the lowest position.

    Args:
        scores: fp32 [n, b, N] without NaN; entries at and beyond `visible` are ignored whatever they hold.
        visible: int32 [n, b], at most N. Read on the GPU: a captured graph follows it.
        k: 1 to 2048.
        maxima: fp32 [n, b, >= N / 16], the largest visible score of every 16 entries, as `index_score` writes them; computed if missing.
        blocks: int32 [n, b, K]: the entries are those of K blocks, as `index_score_blocks` scores them; results are theirs.
        page_table: int32 [n, P]: results are slots page * entries_per_page + row; without it they are positions.
        arrivals: int32 [n, b] of zeros, left as zeros; saves their making. Calls that may overlap in time need one each.
        out: int32 [n, b, k].

    Returns:
        int32 [n, b, k], by ascending position, then -1.
    """
    n, b, num_entries = scores.shape
    if not 1 <= k <= MAX_K:
        raise ValueError(f"select_topk takes k from 1 to {MAX_K}, got {k}")
    config = config or select_config(n * b, num_entries, k)
    if config.chunk and config.levels == 1:
        raise ValueError("a row spread over programs needs 2 or 3 levels")
    if num_entries > TOP_LEVEL * GROUP ** (config.levels - 1):
        raise ValueError(f"{num_entries} entries need more than {config.levels} levels")
    assert scores.dtype == torch.float32 and scores.stride(2) == 1 and scores.stride(0) == b * scores.stride(1)
    assert visible.dtype == torch.int32 and visible.is_contiguous()
    if out is None:
        out = torch.empty(n, b, k, dtype=torch.int32, device=scores.device)
    if out.numel() == 0:
        return out
    assert out.is_contiguous() and (page_table is None or (page_table.dtype == torch.int32 and page_table.stride(1) == 1))
    groups = max(1, -(-num_entries // GROUP))
    need_maxima, need_tops = config.levels >= 2 and maxima is None, config.levels == 3
    if need_maxima:
        maxima = scores.new_empty(n, b, groups)
    tops = scores.new_empty(n, b, -(-groups // GROUP)) if need_tops else scores
    if need_maxima or need_tops:
        _group_maxima_kernel[(-(-num_entries // MAXIMA_BLOCK), n * b)](
            scores,
            visible,
            maxima,
            tops,
            scores.stride(1),
            maxima.shape[-1] if maxima is not None else 0,
            tops.shape[-1],
            num_entries,
            GROUP=GROUP,
            TOPS=need_tops,
            BLOCK=MAXIMA_BLOCK,
            num_warps=4,
        )
    assert maxima is None or (maxima.is_contiguous() and maxima.shape[-1] >= groups)
    if config.chunk:
        first = maxima if config.levels == 2 else tops
        assert first is not None
        _launch_spread(scores, first, visible, k, blocks, page_table, entries_per_page, arrivals, out, config)
        return out
    width = num_entries if config.levels == 1 else -(-num_entries // GROUP ** (config.levels - 1))
    _select_topk_kernel[(n * b,)](
        scores,
        maxima if maxima is not None else scores,
        tops,
        visible,
        blocks if blocks is not None else visible,
        page_table if page_table is not None else visible,
        out,
        scores.stride(1),
        maxima.shape[-1] if maxima is not None else 0,
        tops.shape[-1],
        blocks.shape[2] if blocks is not None else 0,
        page_table.stride(0) if page_table is not None else 0,
        num_entries,
        k,
        b,
        LEVELS=config.levels,
        WIDTH=max(16, next_power_of_2(width)),
        K_BLOCK=next_power_of_2(k),
        GROUP=GROUP,
        BLOCK=num_entries // blocks.shape[2] if blocks is not None else 0,
        ENTRIES=entries_per_page if page_table is not None else 0,
        EARLY=out.is_cuda,
        num_warps=config.warps,
        launch_pdl=out.is_cuda,
    )
    return out


def candidate_blocks(scores: Tensor, visible: Tensor, blocks: int, block_size: int) -> tuple[Tensor, Tensor]:
    """The best `blocks` blocks of every query, the one with its newest visible entry always among them (V4.1 spec 3.6).

    Args:
        scores: fp32 [n, b, N] without NaN; entries at and beyond `visible` are ignored.
        visible: int32 [n, b], at most N.
        blocks: 1 to 2048.
        block_size: entries of a block, a power of two.

    Returns:
        Blocks int32 [n, b, blocks], ascending, then -1, and how many visible entries they hold, int32 [n, b].
    """
    n, b, num_entries = scores.shape
    count = -(-num_entries // block_size)
    maxima = scores.new_empty(n, b, count)
    visible_blocks, visible_candidates = torch.empty_like(visible), torch.empty_like(visible)
    per_program = 2048 // block_size
    if count:
        _block_maxima_kernel[(-(-count // per_program), n * b)](
            scores,
            visible,
            maxima,
            visible_blocks,
            visible_candidates,
            scores.stride(1),
            count,
            num_entries,
            blocks,
            BLOCK=block_size,
            BLOCKS=per_program,
            num_warps=4,
        )
    return select_topk(maxima, visible_blocks, blocks), visible_candidates


def _launch_spread(
    scores: Tensor,
    maxima: Tensor,
    visible: Tensor,
    k: int,
    blocks: Tensor | None,
    page_table: Tensor | None,
    entries_per_page: int,
    arrivals: Tensor | None,
    out: Tensor,
    config: SelectConfig,
) -> None:
    n, b, num_entries = scores.shape
    chunks = -(-num_entries // config.chunk)
    candidates = torch.empty(2, n * b, chunks * config.chunk, dtype=torch.int32, device=scores.device)
    _select_spread_kernel[(chunks, n * b)](
        scores,
        maxima,
        visible,
        blocks if blocks is not None else visible,
        page_table if page_table is not None else visible,
        out,
        candidates[0],
        candidates[1],
        candidates.new_empty(n * b, chunks),
        arrivals if arrivals is not None else candidates.new_zeros(n * b),
        scores.stride(1),
        maxima.shape[-1],
        blocks.shape[2] if blocks is not None else 0,
        page_table.stride(0) if page_table is not None else 0,
        num_entries,
        k,
        b,
        **_spread_constants(num_entries, k, config),
        BLOCK=num_entries // blocks.shape[2] if blocks is not None else 0,
        ENTRIES=entries_per_page if page_table is not None else 0,
        EARLY=out.is_cuda,
        num_warps=config.warps,
        launch_pdl=out.is_cuda,
    )


def _spread_constants(num_entries: int, k: int, config: SelectConfig) -> dict[str, int]:
    span = GROUP ** (config.levels - 1)
    values = next_power_of_2(-(-num_entries // span))
    width = max(16, min(4096, values))
    log_chunks = max(1, (-(-num_entries // config.chunk) - 1).bit_length())
    return {
        "SPAN": span,
        "CHUNK": config.chunk,
        "LOG_CHUNKS": log_chunks,
        "PLACES": min(config.chunk, max(16, 4 * next_power_of_2(k) >> log_chunks)),
        "WIDTH": width,
        "DEPTH": max(1, values // width),
        "K_BLOCK": next_power_of_2(k),
        "GROUP": GROUP,
    }


def aot_cases() -> list[AotCase]:
    """One, two and three levels, positions and slots."""
    pointers = {
        "scores": "*fp32",
        "maxima": "*fp32",
        "tops": "*fp32",
        "visible": "*i32",
        "blocks": "*i32",
        "page_table": "*i32",
        "out": "*i32",
    }
    strides = ("score_stride", "maxima_stride", "tops_stride")
    cases = []
    for num_entries, k, entries in (
        (8192, 512, 64),
        (262144, 512, 64),
        (262144, 1024, 64),
        (1048576, 512, 64),
        (131072, 2048, 0),
    ):
        config = select_config(1024, num_entries, k)
        cases.append(
            AotCase(
                name=f"select_topk[N={num_entries},k={k},levels={config.levels},entries_per_page={entries}]",
                kernel=_select_topk_kernel,
                signature={
                    **pointers,
                    **dict.fromkeys((*strides, "blocks_stride", "table_stride", "num_entries", "k", "queries"), "i32"),
                },
                constants={
                    "LEVELS": config.levels,
                    "WIDTH": next_power_of_2(-(-num_entries // GROUP ** (config.levels - 1))),
                    "K_BLOCK": k,
                    "GROUP": GROUP,
                    "BLOCK": 0,
                    "ENTRIES": entries,
                    "EARLY": True,
                },
                num_warps=config.warps,
                aligned=(*pointers, *strides, "num_entries", "k"),
                spill_reason="one program holds GROUP * k keys" if k > 512 else None,
            )
        )
    for num_entries, k in ((32768, 512), (262144, 512), (262144, 1024), (1048576, 512), (131072, 2048)):
        config = select_config(1, num_entries, k)
        cases.append(
            AotCase(
                name=f"select_spread[N={num_entries},k={k},levels={config.levels}]",
                kernel=_select_spread_kernel,
                signature={n: t for n, t in pointers.items() if n != "tops"}
                | dict.fromkeys(("candidate_keys", "candidates", "chunk_counts", "arrivals"), "*i32")
                | dict.fromkeys(
                    ("score_stride", "maxima_stride", "blocks_stride", "table_stride", "num_entries", "k", "queries"), "i32"
                ),
                constants=_spread_constants(num_entries, k, config) | {"BLOCK": 0, "ENTRIES": 64, "EARLY": True},
                num_warps=config.warps,
                spill_reason="the last program holds GROUP * k keys" if k > 512 else None,
                aligned=(
                    "scores",
                    "maxima",
                    "candidate_keys",
                    "candidates",
                    "out",
                    "score_stride",
                    "maxima_stride",
                    "num_entries",
                ),
            )
        )
    cases.append(
        AotCase(
            name="block_maxima[block_size=8]",
            kernel=_block_maxima_kernel,
            signature={"scores": "*fp32", "visible": "*i32", "maxima": "*fp32"}
            | dict.fromkeys(("visible_blocks", "visible_candidates"), "*i32")
            | dict.fromkeys(("score_stride", "maxima_stride", "num_entries", "kept"), "i32"),
            constants={"BLOCK": 8, "BLOCKS": 256},
            aligned=("scores", "maxima", "score_stride", "maxima_stride", "num_entries", "kept"),
        )
    )
    for tops in (False, True):
        cases.append(
            AotCase(
                name=f"group_maxima[tops={tops}]",
                kernel=_group_maxima_kernel,
                signature={n: t for n, t in pointers.items() if n not in ("blocks", "page_table", "out")}
                | dict.fromkeys((*strides, "num_entries"), "i32"),
                constants={"GROUP": GROUP, "TOPS": tops, "BLOCK": MAXIMA_BLOCK},
                aligned=("scores", "maxima", "tops", *strides, "num_entries"),
            )
        )
    return cases
