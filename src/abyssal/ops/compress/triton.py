"""The compressor after its projections: pool, norm, RoPE, Hadamard, pack and store, and the state rows (V4 spec 2.9, V4.1 spec 3.6).

Groups whose rows are all kept take one launch, and so do longer ones while each sequence adds one token. Else the rows of long groups
are summed by several programs, and a second launch merges the sums. A ratio-1 entry pools nothing: `window_store` stores it. Only
`rows` may come from the kernel launched just before; all else is read before that one has ended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from abyssal.kv import layouts
from abyssal.kv.batch import CompressFacts, StoreFacts
from abyssal.kv.layouts import Layout
from abyssal.ops._aot import AotCase
from abyssal.ops._records import (
    early,
    exp2,
    finish_row,
    load_finish,
    loads_in_flight,
    reciprocal,
    round_like,
    wait_for_inputs,
    zero_behind_loads,
)
from abyssal.ops.qkv_insert.triton import window_store


@dataclass(frozen=True, slots=True)
class Pages:
    """Where one cache kind lies."""

    name: str
    data: Tensor  # uint8 [pages, page bytes], the pool of the kind's bucket
    layout: Layout
    entries_per_page: int


@dataclass(frozen=True, slots=True)
class CompressConfig:
    """A program has all D channels of what it pools, so that the norm needs no other and pooling no exchange."""

    num_warps: int  # fixes the order of the norm's sum
    registers: int | None = None  # per thread at most


@dataclass(frozen=True, slots=True)
class SumConfig:
    """Of the first launch for long groups."""

    rows: int  # of a group, loaded together
    num_warps: int
    registers: int | None = None  # per thread at most
    one_by_one: bool = False  # one program sums all rows of a group, one after the other


LOG2E = tl.constexpr(math.log2(math.e))


def compress_config(dim: int, pairs: bool, groups: int, batch_invariant: bool) -> CompressConfig:
    """2 channels per lane while an entry's way is what counts, 4 of pairs of rows and where there are many groups.

    us on an H200, 4 and 2: V4 main 10.8 and 11.5 for 1,024 groups, 2.14 and 1.99 for 64; keys 4.28 and 4.47, 1.80 and 1.69. With 32 registers
    16 programs of 2,048 pairs run at the same time on a multiprocessor: 6.5, else 6.8.
    """
    many = groups >= 256
    num_warps = max(1, dim // (128 if pairs or (many and not batch_invariant) else 64))
    return CompressConfig(num_warps, 32 if pairs and many else None)


def config_of_sums(groups: int, batch_invariant: bool) -> SumConfig:
    """Added up row by row, sums have the same bits wherever a step ends and the next goes on with them.

    Else 16 rows per program where there are many groups: 64 KiB, of which two programs per multiprocessor keep memory busy.
    """
    if batch_invariant:
        return SumConfig(8, 8, one_by_one=True)
    return SumConfig(8, 8) if groups < 16 else SumConfig(16, 8, registers=128)


@triton.jit
def _record(pages, page_bytes, slot, ENTRIES: tl.constexpr, WIDTH: tl.constexpr):
    """Pointer to record fp32 [WIDTH] number `slot`."""
    slot = slot.to(tl.uint32)
    record = pages + (slot // ENTRIES).to(tl.int64) * page_bytes + slot % ENTRIES * (WIDTH * 4)
    return record.to(tl.pointer_type(tl.float32))


@triton.jit
def _mask(count, WIDTH: tl.constexpr):
    """[1, WIDTH] of one value: whether count > 0."""
    return tl.zeros((1, WIDTH), tl.int32) + count.to(tl.int32) > 0


@triton.jit
def _load_row(row, WIDTH: tl.constexpr):
    return tl.load(row + tl.arange(0, WIDTH)[None, :])


@triton.jit
def _load_bias(bias, phases, token, WIDTH: tl.constexpr):
    """What is added to a row of the step, fp32 [1, WIDTH]: 0 to its values, to its scores the bias of the token's place in its group."""
    if bias is None:
        added = 0.0
    else:
        column = tl.arange(0, WIDTH)[None, :] - WIDTH // 2
        added = tl.load(bias + tl.load(phases + token) * (WIDTH // 2) + column, mask=column >= 0, other=0.0)
    return added


@triton.jit
def _keep_row(x, state_pages, state_page_bytes, slot, STATE_ENTRIES: tl.constexpr, WIDTH: tl.constexpr):
    """Store a row of the step in the state."""
    record = _record(state_pages, state_page_bytes, slot, STATE_ENTRIES, WIDTH)
    tl.store(record + tl.arange(0, WIDTH)[None, :], x, mask=_mask(slot + 1, WIDTH))


@triton.jit
def _copy_row(
    rows, rows_stride, bias, phases, store_rows, store_slots, index, state_pages, state_page_bytes,
    STATE_ENTRIES: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The program that stores row number `index` of those that the state keeps."""
    token = tl.load(store_rows + index)
    slot = tl.load(store_slots + index)
    added = _load_bias(bias, phases, token, WIDTH)
    wait_for_inputs(EARLY)
    _keep_row(_load_row(rows + token * rows_stride, WIDTH) + added, state_pages, state_page_bytes, slot, STATE_ENTRIES, WIDTH)


@triton.jit
def _sources(
    sources, first, count, num_tokens, carried, num_carried, rows, rows_stride, state_pages, state_page_bytes,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STATE_ENTRIES: tl.constexpr,
):  # fmt: skip
    """Numbers of ROWS rows of a group from number `first` of `count` on, and pointers to them; of a carried one of slot -1 to any.

    Row by row with scalar addresses, so that the loads of all are in flight together.
    """
    source, pointer = (), ()
    for i in tl.static_range(ROWS):
        index = tl.load(sources + first + i, mask=first + i < count, other=num_carried + num_tokens)
        source += (index.to(tl.int32),)
    loads_in_flight()
    for i in tl.static_range(ROWS):
        old = source[i] < num_carried
        slot = tl.maximum(tl.load(carried + source[i], mask=old, other=0), 0)
        kept = _record(state_pages, state_page_bytes, slot, STATE_ENTRIES, WIDTH)
        pointer += (tl.where(old, kept, rows + (source[i] - num_carried).to(tl.int64) * rows_stride),)
    return source, pointer


@triton.jit
def _load_scored(row, there, D: tl.constexpr, WIDTH: tl.constexpr):
    """Scores and values [1, D] at a row's pointer; -inf and 0 unless `there` > 0."""
    row += tl.arange(0, D)[None, :]
    mask = _mask(there, D)
    return tl.load(row + WIDTH // 2, mask=mask, other=float("-inf")), tl.load(row, mask=mask, other=0.0)


@triton.jit
def _biased(score, added, source, num_carried, D: tl.constexpr):
    """Scores of a group's rows with what is added to those of the step; carried ones have it. Loads before stay in flight together."""
    zero, biased = zero_behind_loads(), ()
    for i in tl.static_range(len(score)):
        if len(added) == 0:
            biased += (score[i] + zero * 1.0,)
        else:
            biased += (score[i] + tl.where(_mask(source[i] - num_carried + 1 + zero, D), added[i], 0.0),)
    return biased


@triton.jit
def _sums_of(score, value):
    """Tuples of [1, D] -> largest score, sum of exp(score - it), and sum of exp(score - it) value."""
    top = score[0]
    for i in tl.static_range(1, len(score)):
        top = tl.maximum(top, score[i])
    below = top * -LOG2E  # its rounding is a factor of all weights
    s = tl.zeros(top.shape, tl.float32)
    v = tl.zeros(top.shape, tl.float32)
    for i in tl.static_range(len(score)):
        weight = exp2(tl.fma(score[i], LOG2E, below))
        s += weight
        v += weight * value[i]
    return top, s, v


@triton.jit
def _add(m, s, v, top, total, value):
    """Extend sums (`accumulate` of the reference) by others, tuples of tops, totals and values; a total of None is of a single row."""
    most = m
    for i in tl.static_range(len(top)):
        most = tl.maximum(most, top[i])
    base = tl.where(most == float("-inf"), 0.0, most)  # no row yet: exp2(-inf - 0) = 0 rather than NaN
    kept = exp2((m - base) * LOG2E)
    s, v = s * kept, v * kept
    for i in tl.static_range(len(top)):
        weight = exp2((top[i] - base) * LOG2E)
        s += weight if total is None else weight * total[i]
        v += weight * value[i]
    return most, s, v


@triton.jit
def _add_row(m, s, v, score, value):
    return _add(m, s, v, (score,), None, (value,))


@triton.jit
def _load_sums(record, there, D: tl.constexpr):
    """Running sums m, s, v [1, D] at a record's pointer; over nothing unless `there` > 0."""
    record += tl.arange(0, D)[None, :]
    mask = _mask(there, D)
    m = tl.load(record, mask=mask, other=float("-inf"))
    return m, tl.load(record + D, mask=mask, other=0.0), tl.load(record + 2 * D, mask=mask, other=0.0)


@triton.jit
def _store_sums(record, m, s, v, D: tl.constexpr):
    column = tl.arange(0, D)[None, :]
    tl.store(record + column, m)
    tl.store(record + D + column, s)
    tl.store(record + 2 * D + column, v)


@triton.jit(do_not_specialize=["num_tokens", "num_groups", "num_carried"])
def compress_kernel(
    rows, rows_stride, num_tokens, bias, phases, norm, sources, num_groups, carried, num_carried, store_rows, store_slots,
    state_pages, state_page_bytes, pages, page_bytes, entry_slots, rope, latent, stored, eps,
    OVERLAP: tl.constexpr, HADAMARD: tl.constexpr, ROPE: tl.constexpr, BF16: tl.constexpr, SLOTS: tl.constexpr,
    TOKEN_EACH: tl.constexpr, layout: tl.constexpr, ENTRIES: tl.constexpr, STATE_ENTRIES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Programs up to num_groups - 1 pool a group of SLOTS rows each, the others copy one state row each.

    TOKEN_EACH: group b ends with token b; its other rows are carried ones, -1 for none. These are summed before the token's row is there.
    """
    D: tl.constexpr = layout.dim
    WIDTH: tl.constexpr = 4 * D if OVERLAP else 2 * D
    RATIO: tl.constexpr = SLOTS // 2 if OVERLAP else SLOTS
    # With overlap a row serves the next group with its first half, its own with its second.
    OWN: tl.constexpr = D if OVERLAP else 0
    program = tl.program_id(0)
    if program >= num_groups:
        _copy_row(
            rows, rows_stride, bias, phases, store_rows, store_slots, program - num_groups, state_pages, state_page_bytes,
            STATE_ENTRIES, WIDTH, EARLY,
        )  # fmt: skip
    elif TOKEN_EACH:
        target = tl.load(entry_slots + program).to(tl.int64)
        norm_weight, cos, sin = load_finish(norm, rope, program, D, ROPE)
        own = rows + program.to(tl.int64) * rows_stride
        slots = ()
        for i in tl.static_range(SLOTS - 1):
            slots += (tl.load(carried + program * (SLOTS - 1) + i),)
        added = 0.0 if bias is None else _load_row(bias + tl.load(phases + program) * (WIDTH // 2) + OWN, D)
        loads_in_flight()
        score, value = (), ()
        for i in tl.static_range(SLOTS - 1):
            row = _record(state_pages, state_page_bytes, slots[i], STATE_ENTRIES, WIDTH)
            there = tl.where(target >= 0, slots[i] + 1, 0)
            loaded = _load_scored(row + (OWN if i >= SLOTS - RATIO else 0), there, D, WIDTH)
            score += (loaded[0],)
            value += (loaded[1],)
        m, s, v = _sums_of(score, value)
        wait_for_inputs(EARLY)
        last_score, last_value = _load_row(own + OWN + WIDTH // 2, D) + added, _load_row(own + OWN, D)
        if target >= 0:
            m, s, v = _add_row(m, s, v, last_score, last_value)
            finish_row(
                round_like(v * reciprocal(s), BF16), norm_weight, cos, sin, eps, program, pages, page_bytes, target + tl.zeros((1,), tl.int64),
                latent, stored, True, ROPE, HADAMARD, BF16, layout, ENTRIES,
            )  # fmt: skip
    else:
        added = ()
        if bias is not None:
            for i in tl.static_range(SLOTS):
                added += (_load_row(bias + i % RATIO * (WIDTH // 2) + (OWN if i >= SLOTS - RATIO else 0), D),)
        target = tl.load(entry_slots + program).to(tl.int64)
        norm_weight, cos, sin = load_finish(norm, rope, program, D, ROPE)
        source, pointer = _sources(
            sources + program.to(tl.int64) * SLOTS, 0, SLOTS, num_tokens, carried, num_carried, rows, rows_stride, state_pages,
            state_page_bytes, SLOTS, WIDTH, STATE_ENTRIES,
        )  # fmt: skip
        wait_for_inputs(EARLY)
        score, value = (), ()
        for i in tl.static_range(SLOTS):  # of groups that are left out too: these loads do not wait for the slot
            loaded = _load_scored(pointer[i] + (OWN if i >= SLOTS - RATIO else 0), num_carried + num_tokens - source[i], D, WIDTH)
            score += (loaded[0],)
            value += (loaded[1],)
        biased = _biased(score, added, source, num_carried, D)
        m, s, v = _sums_of(biased[: SLOTS - 1], value[: SLOTS - 1])
        if target >= 0:
            m, s, v = _add_row(m, s, v, biased[SLOTS - 1], value[SLOTS - 1])
            finish_row(
                round_like(v * reciprocal(s), BF16), norm_weight, cos, sin, eps, program, pages, page_bytes, target + tl.zeros((1,), tl.int64),
                latent, stored, True, ROPE, HADAMARD, BF16, layout, ENTRIES,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "num_carried", "blocks"])
def sum_parts_kernel(
    rows, rows_stride, num_tokens, bias, phases, sources, num_slots, carried, num_carried, state_pages, state_page_bytes,
    carried_sums, sum_pages, sum_page_bytes, partial, blocks,
    D: tl.constexpr, ROWS: tl.constexpr, ONE_BY_ONE: tl.constexpr, STATE_ENTRIES: tl.constexpr, SUM_ENTRIES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Sums over `blocks` times ROWS rows of a group, to partial fp32 [G, parts, 3, D]; the first part goes on with carried sums."""
    part, group = tl.program_id(0), tl.program_id(1)
    before = tl.load(carried_sums + group, mask=part == 0, other=-1)
    m, s, v = _load_sums(_record(sum_pages, sum_page_bytes, before, SUM_ENTRIES, 3 * D), before + 1, D)
    end = num_carried + num_tokens
    for block in range(blocks):
        source, pointer = _sources(
            sources + group.to(tl.int64) * num_slots, (part * blocks + block) * ROWS, num_slots, num_tokens, carried, num_carried, rows,
            rows_stride, state_pages, state_page_bytes, ROWS, 2 * D, STATE_ENTRIES,
        )  # fmt: skip
        added = ()
        if bias is not None:
            for i in tl.static_range(ROWS):
                of_step = (source[i] >= num_carried) & (source[i] < end)
                phase = tl.load(phases + source[i] - num_carried, mask=of_step, other=0)
                added += (_load_row(bias + phase * D, D),)
        wait_for_inputs(EARLY)
        score, value = (), ()
        for i in tl.static_range(ROWS):
            loaded = _load_scored(pointer[i], end - source[i], D, 2 * D)
            score += (loaded[0],)
            value += (loaded[1],)
        biased = _biased(score, added, source, num_carried, D)
        if ONE_BY_ONE:
            for i in tl.static_range(ROWS):
                m, s, v = _add_row(m, s, v, biased[i], value[i])
        else:
            m, s, v = _add(m, s, v, biased, None, value)
    if blocks == 0:
        wait_for_inputs(EARLY)
    _store_sums(partial + (group.to(tl.int64) * tl.num_programs(0) + part) * (3 * D), m, s, v, D)


@triton.jit(do_not_specialize=["parts", "num_groups", "num_entries"])
def merge_parts_kernel(
    partial, parts, num_groups, num_entries, norm, rows, rows_stride, bias, phases, store_rows, store_slots, state_pages,
    state_page_bytes, sum_slots, sum_pages, sum_page_bytes, pages, page_bytes, entry_slots, rope, latent, stored, eps,
    ROPE: tl.constexpr, BF16: tl.constexpr, AT_ONCE: tl.constexpr,
    layout: tl.constexpr, ENTRIES: tl.constexpr, STATE_ENTRIES: tl.constexpr, SUM_ENTRIES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The first num_entries groups are complete and become entries, the others are kept as sums; further programs copy state rows."""
    D: tl.constexpr = layout.dim
    program = tl.program_id(0)
    if program >= num_groups:
        _copy_row(
            rows, rows_stride, bias, phases, store_rows, store_slots, program - num_groups, state_pages, state_page_bytes,
            STATE_ENTRIES, 2 * D, EARLY,
        )  # fmt: skip
    else:
        complete = program < num_entries
        target = tl.load(entry_slots + program, mask=complete, other=0).to(tl.int64)
        target += tl.load(sum_slots + program - num_entries, mask=program >= num_entries, other=0).to(tl.int64)
        norm_weight = tl.zeros((1, D), tl.float32)
        cos = tl.zeros((1, D // 2), tl.float32)
        sin = tl.zeros((1, D // 2), tl.float32)
        if complete:
            norm_weight, cos, sin = load_finish(norm, rope, program, D, ROPE)
        wait_for_inputs(EARLY)
        m = tl.full((1, D), float("-inf"), tl.float32)
        s = tl.zeros((1, D), tl.float32)
        v = tl.zeros((1, D), tl.float32)
        for first in range(0, parts, AT_ONCE):
            top, total, value = (), (), ()
            for i in tl.static_range(AT_ONCE):
                record = partial + (program.to(tl.int64) * parts + first + i) * (3 * D)
                loaded = _load_sums(record, parts - first - i + program * 0, D)
                top += (loaded[0],)
                total += (loaded[1],)
                value += (loaded[2],)
            m, s, v = _add(m, s, v, top, total, value)
        if target >= 0:
            if complete:
                finish_row(
                    round_like(v * reciprocal(s), BF16), norm_weight, cos, sin, eps, program, pages, page_bytes,
                    target + tl.zeros((1,), tl.int64), latent, stored, True, ROPE, False, BF16, layout, ENTRIES,
                )  # fmt: skip
            else:
                _store_sums(_record(sum_pages, sum_page_bytes, target, SUM_ENTRIES, 3 * D), m, s, v, D)


@triton.jit(do_not_specialize=["num_tokens", "num_carried"])
def token_each_kernel(
    rows, rows_stride, num_tokens, bias, phases, norm, sources, carried, num_carried, store_slots, state_pages, state_page_bytes,
    carried_sums, sum_slots, sum_pages, sum_page_bytes, pages, page_bytes, entry_slots, rope, latent, stored, eps,
    ROPE: tl.constexpr, BF16: tl.constexpr, SLOTS: tl.constexpr,
    layout: tl.constexpr, ENTRIES: tl.constexpr, STATE_ENTRIES: tl.constexpr, SUM_ENTRIES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program b has token b: its group's entry, if complete; then the oldest kept row joins the sums, and its own row takes that place."""
    D: tl.constexpr = layout.dim
    program, count = tl.program_id(0), tl.num_programs(0)
    target = tl.load(entry_slots + program).to(tl.int64)
    open_target = tl.load(sum_slots + program)
    kept = tl.load(store_slots + program)
    oldest = tl.load(sources + (count + program).to(tl.int64) * SLOTS)
    oldest_slot = tl.load(carried + program * (SLOTS - 1))
    before, open_before = tl.load(carried_sums + program), tl.load(carried_sums + count + program)
    added = _load_bias(bias, phases, program, 2 * D)
    loads_in_flight()
    open_m, open_s, open_v = _load_sums(_record(sum_pages, sum_page_bytes, open_before, SUM_ENTRIES, 3 * D), open_before + 1, D)
    record = _record(state_pages, state_page_bytes, oldest_slot, STATE_ENTRIES, 2 * D)
    score, value = _load_scored(record, oldest < num_carried, D, 2 * D)
    open_m, open_s, open_v = _add_row(open_m, open_s, open_v, score, value)
    wait_for_inputs(EARLY)
    own = rows + program.to(tl.int64) * rows_stride
    x = _load_row(own, 2 * D) + added
    if target >= 0:
        m, s, v = _load_sums(_record(sum_pages, sum_page_bytes, before, SUM_ENTRIES, 3 * D), before + 1, D)
        norm_weight, cos, sin = load_finish(norm, rope, program, D, ROPE)
        source, pointer = _sources(
            sources + program.to(tl.int64) * SLOTS, 0, SLOTS, num_tokens, carried, num_carried, rows, rows_stride, state_pages,
            state_page_bytes, SLOTS, 2 * D, STATE_ENTRIES,
        )  # fmt: skip
        for i in tl.static_range(SLOTS):
            loaded = _load_scored(pointer[i], num_carried + num_tokens - source[i], D, 2 * D)
            biased = loaded[0]
            if i == SLOTS - 1 and bias is not None:
                biased += _load_row(bias + tl.load(phases + program) * D, D)
            m, s, v = _add_row(m, s, v, biased, loaded[1])
        finish_row(
            round_like(v * reciprocal(s), BF16), norm_weight, cos, sin, eps, program, pages, page_bytes, target + tl.zeros((1,), tl.int64),
            latent, stored, True, ROPE, False, BF16, layout, ENTRIES,
        )  # fmt: skip
    tl.debug_barrier()  # the entry has read what is replaced now
    if open_target >= 0:
        _store_sums(_record(sum_pages, sum_page_bytes, open_target, SUM_ENTRIES, 3 * D), open_m, open_s, open_v, D)
    _keep_row(x, state_pages, state_page_bytes, kept, STATE_ENTRIES, 2 * D)


def compress(
    rows: Tensor,
    bias: Tensor | None,
    norm: Tensor,
    facts: CompressFacts,
    store: StoreFacts | None,
    state: Pages | None,
    sums: Pages | None,
    entries: Pages,
    layer_row: int,
    *,
    overlap: bool,
    rotate_keys: bool,
    eps: float,
    dtype: torch.dtype,
    with_latent: bool = False,
    stored: Tensor | None = None,
    batch_invariant: bool = False,
    config: CompressConfig | None = None,
    sum_config: SumConfig | None = None,
) -> Tensor | None:
    """Store the entries that this step completes and the state rows that later steps read; arguments as the reference's.

    An entry slot or state slot of -1 is left out, so that a captured graph can hold groups that most of its replays leave open.

    `norm`, `bias`, facts, state and sums are read before the kernel launched just before has ended, and maybe the one before that
    (`wait_before_product`): neither may write them.

    Args:
        rows: fp32, contiguous in the last dim; kept.
        stored: fp32 [E, D], receives the rows that were packed.
        batch_invariant: entries do not depend, bit for bit, on how steps cut a sequence.

    Returns:
        With `with_latent` the normalised entries [E, D] in `dtype`, before RoPE.
    """
    entry_slots, rope, layout = facts.entry_slots[entries.name][layer_row], facts.rope, entries.layout
    latent = torch.empty(len(rope), layout.dim, dtype=dtype, device=rows.device) if with_latent else None
    if state is None or store is None:
        assert not rotate_keys and bias is None, "entries of one token are latents, which are not rotated as V4's index keys are"
        window_store(
            rows.to(dtype), rope, entries.data, layout, entries.entries_per_page, entry_slots, norm=norm, eps=eps, latent=latent,
            stored=stored,
        )  # fmt: skip
        return latent
    groups, slots = facts.sources.shape
    carried, store_slots = facts.carried[state.name][layer_row], store.slots[layer_row]
    dim, width, num_store = len(norm), (4 if overlap else 2) * len(norm), len(store.rows)
    assert dim == layout.dim and dim & (dim - 1) == 0, (
        f"the kernels store entries of {layout.dim} values, a power of two, not {dim}; use backend=reference"
    )
    assert rows.shape[1] == width == state.layout.dim and rows.stride(1) == 1, f"rows {tuple(rows.shape)}, state {state.layout}"
    assert rows.dtype == norm.dtype == torch.float32, f"rows are {rows.dtype}, norm {norm.dtype}; both must be fp32"
    ratio = slots // 2 if overlap else slots
    assert bias is None or (bias.dtype == torch.float32 and bias.is_contiguous() and bias.shape[1] == width // 2), (
        f"bias is {bias.dtype} {tuple(bias.shape)}, fp32 [ratio, {width // 2}] is wanted"
    )
    assert bias is None or sums is not None or len(bias) == ratio, f"bias of {len(bias)} places for groups of {ratio}"
    assert bias is None or (len(facts.phases) == len(rows) and facts.phases.is_contiguous()), "a bias needs every token's place"
    assert len(entry_slots) == len(rope) <= groups, f"{len(entry_slots)} slots and {len(rope)} rotations for {groups} groups"
    assert sums is not None or len(rope) == groups, f"{groups} groups, {len(rope)} complete, and no sums"
    config = config or compress_config(dim, sums is None and not overlap, 0 if facts.token_each else groups, batch_invariant)
    options: dict[str, Any] = {
        "STATE_ENTRIES": state.entries_per_page, "num_warps": config.num_warps, "maxnreg": config.registers,
    }  # fmt: skip
    of_rows = (rows, rows.stride(0), len(rows), bias, facts.phases)
    of_state = (state.data, state.data.stride(0))
    of_entries = (entries.data, entries.data.stride(0), entry_slots, torch.view_as_real(rope), latent, stored, eps)
    finish = {"ROPE": 2 * rope.shape[1], "BF16": dtype == torch.bfloat16, "layout": layout, "ENTRIES": entries.entries_per_page}
    if sums is None:
        programs = groups + num_store
        if programs:
            compress_kernel[(programs,)](
                *of_rows, norm, facts.sources, groups, carried, len(carried), store.rows, store_slots, *of_state, *of_entries,
                OVERLAP=overlap, HADAMARD=rotate_keys, SLOTS=slots, TOKEN_EACH=facts.token_each,
                **finish, **options, **early(programs, rows),
            )  # fmt: skip
        return latent
    assert not overlap and not rotate_keys, "only main KV, without overlap, has running sums"
    carried_sums, sum_slots = facts.carried_sums[sums.name][layer_row], facts.sum_slots[sums.name][layer_row]
    of_sums = (sums.data, sums.data.stride(0))
    options["SUM_ENTRIES"] = sums.entries_per_page
    if facts.token_each:
        token_each_kernel[(len(rows),)](
            *of_rows, norm, facts.sources, carried, len(carried), store_slots, *of_state, carried_sums, sum_slots, *of_sums, *of_entries,
            SLOTS=slots, **finish, **options, **early(len(rows), rows),
        )  # fmt: skip
        return latent
    summing = sum_config or config_of_sums(groups, batch_invariant)
    blocks = -(-slots // summing.rows) if summing.one_by_one else 1
    parts = 1 if summing.one_by_one else max(1, -(-slots // summing.rows))
    partial = torch.empty(groups, parts, 3, dim, dtype=torch.float32, device=rows.device)
    if groups:
        sum_parts_kernel[(parts, groups)](
            *of_rows, facts.sources, slots, carried, len(carried), *of_state, carried_sums, *of_sums, partial, blocks,
            D=dim, ROWS=summing.rows, ONE_BY_ONE=summing.one_by_one, **early(groups * parts, rows),
            **options | {"num_warps": summing.num_warps, "maxnreg": summing.registers},
        )  # fmt: skip
    if groups + num_store:  # no program here reads what another one replaces: carried sums and state rows have been read
        merge_parts_kernel[(groups + num_store,)](
            partial, parts, groups, len(rope), norm, rows, rows.stride(0), bias, facts.phases, store.rows, store_slots, *of_state,
            sum_slots, *of_sums, *of_entries, AT_ONCE=8 if parts <= 8 else 16, **finish, **options, **early(groups + num_store, rows),
        )  # fmt: skip
    return latent


def aot_cases() -> list[AotCase]:
    signature = {
        "rows": "*fp32", "rows_stride": "i32", "num_tokens": "i32", "bias": "*fp32", "phases": "*i64", "norm": "*fp32",
        "sources": "*i64", "num_slots": "i32", "num_groups": "i32", "num_entries": "i32", "carried": "*i32", "num_carried": "i32", "state_pages": "*u8",
        "state_page_bytes": "i32", "store_rows": "*i64", "store_slots": "*i64", "pages": "*u8", "page_bytes": "i32",
        "entry_slots": "*i32", "rope": "*fp32", "eps": "fp32", "carried_sums": "*i32", "sum_slots": "*i64", "sum_pages": "*u8",
        "sum_page_bytes": "i32", "partial": "*fp32", "parts": "i32", "blocks": "i32",
    }  # fmt: skip
    pointers = ("rows", "bias", "norm", "state_pages", "pages", "rope", "sum_pages", "partial")
    aligned = (*pointers, "rows_stride", "state_page_bytes", "page_bytes", "sum_page_bytes")

    def case(name: str, kernel: Any, num_warps: int, constants: dict[str, Any]) -> AotCase:
        types = {n: signature[n] for n in kernel.arg_names if n in signature and n not in constants}
        return AotCase(f"compress {name}", kernel, types, constants, num_warps, aligned=tuple(n for n in aligned if n in types))

    kinds = [(4, name) for name in ("bf16", "v4", "v41", "index_bf16", "index_fp8", "index_mxfp4")]
    kinds += [(2, name) for name in ("bf16", "v41", "v41_fp4")] + [(128, name) for name in ("bf16", "v4", "v41")]
    cases = []
    for ratio, name in kinds:
        layout = layouts.get(name)
        slots = {4: 8, 2: 2, 128: 9}[ratio]
        warps = compress_config(layout.dim, ratio == 2, 0, False).num_warps
        finish: dict[str, Any] = {
            "ROPE": 64, "BF16": True, "layout": layout, "ENTRIES": 256 // ratio, "latent": None, "stored": None,
            "STATE_ENTRIES": 8 if ratio == 128 else 4, "EARLY": True,
        }  # fmt: skip
        if ratio == 2:  # V4.1 has no position bias
            finish["bias"] = None
        if ratio == 128:
            cases.append(case(f"ratio 128 {name} merged", merge_parts_kernel, warps, finish | {"AT_ONCE": 16, "SUM_ENTRIES": 1}))
            cases.append(
                case(f"ratio 128 {name} token each", token_each_kernel, warps, finish | {"SLOTS": slots, "SUM_ENTRIES": 1})
            )
            continue
        pooled = finish | {"OVERLAP": ratio == 4, "HADAMARD": layout.dim == 128, "SLOTS": slots}
        for each, config in dict.fromkeys((g == 0, compress_config(layout.dim, ratio == 2, g, False)) for g in (0, 1, 256)):
            cases.append(replace(
                case(f"ratio {ratio} {name} token each={each} {config}", compress_kernel, config.num_warps, pooled | {"TOKEN_EACH": each}),
                max_registers=config.registers,
            ))  # fmt: skip
    for summing in (config_of_sums(1, True), config_of_sums(1, False), config_of_sums(16, False)):
        constants = {
            "D": 512, "ROWS": summing.rows, "ONE_BY_ONE": summing.one_by_one, "STATE_ENTRIES": 8, "SUM_ENTRIES": 1,
            "EARLY": True,
        }  # fmt: skip
        cases.append(replace(
            case(f"ratio 128 {summing}", sum_parts_kernel, summing.num_warps, constants), max_registers=summing.registers
        ))  # fmt: skip
    return cases
