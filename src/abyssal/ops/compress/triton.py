"""The compressor after its projections: pool, norm, RoPE, Hadamard, pack and store, and the state rows (V4 spec 2.9, V4.1 spec 3.6).

Groups whose rows are all kept take one launch, and so do longer ones while each sequence adds one token. Else the rows of long groups
are summed by several programs, and a second launch merges the sums. A ratio-1 entry pools nothing: `window_store` stores it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from abyssal.kv import layouts
from abyssal.kv.batch import CompressFacts, StoreFacts
from abyssal.kv.layouts import Layout
from abyssal.ops._aot import AotCase
from abyssal.ops._records import early, exp2, finish_row, load_finish, loads_in_flight, reciprocal, round_like, wait_for_inputs
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
    """A program has all D channels of what it pools, so that the norm needs no other."""

    num_warps: int  # fixes the order of the norm's sum; sums of parts, which have no norm, take twice as many
    part: int = 0  # rows of a long group that one program sums; 0: all of them, one by one


ROWS_AT_ONCE = 8  # of a long group, loaded together
AT_ONCE = 8  # sums of parts, loaded together
LOG2E = tl.constexpr(math.log2(math.e))


def compress_config(dim: int, slots: int, batch_invariant: bool = False) -> CompressConfig:
    """4 channels of all rows per lane, so that pooling needs no exchange.

    Added up row by row, sums have the same bits wherever a step ends and the next goes on with them.
    """
    return CompressConfig(max(1, dim // 128), 0 if batch_invariant else ROWS_AT_ONCE)


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
def _keep_row(x, state_pages, state_page_bytes, slot, STATE_ENTRIES: tl.constexpr, WIDTH: tl.constexpr):
    """Store a row of the step in the state."""
    record = _record(state_pages, state_page_bytes, slot, STATE_ENTRIES, WIDTH)
    tl.store(record + tl.arange(0, WIDTH)[None, :], x, mask=_mask(slot + 1, WIDTH))


@triton.jit
def _sources(
    sources, first, count, rows, rows_stride, num_tokens, carried, num_carried, state_pages, state_page_bytes,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STATE_ENTRIES: tl.constexpr,
):  # fmt: skip
    """Pointers to ROWS rows of a group from number `first` of `count` on, and for each how many rows are behind it: 0 for the empty one.

    Row by row with scalar addresses, so that the loads of all are in flight together.
    """
    source, pointer, behind = (), (), ()
    for i in tl.static_range(ROWS):
        index = tl.load(sources + first + i, mask=first + i < count, other=num_carried + num_tokens)
        source += (index.to(tl.int32),)
    loads_in_flight()
    for i in tl.static_range(ROWS):
        old = source[i] < num_carried
        slot = tl.load(carried + source[i], mask=old, other=0)
        kept = _record(state_pages, state_page_bytes, slot, STATE_ENTRIES, WIDTH)
        pointer += (tl.where(old, kept, rows + (source[i] - num_carried).to(tl.int64) * rows_stride),)
        behind += (num_carried + num_tokens - source[i],)
    return pointer, behind


@triton.jit
def _load_rows(pointer, behind, late, D: tl.constexpr, WIDTH: tl.constexpr):
    """Scores and values, tuples of [1, D]; with overlap rows from number `late` on serve their own group with their second half."""
    score, value = (), ()
    for i in tl.static_range(len(pointer)):
        row = pointer[i] + (D if i >= late else 0) + tl.arange(0, D)[None, :]
        score += (tl.load(row + WIDTH // 2, mask=_mask(behind[i], D), other=float("-inf")),)
        value += (tl.load(row, mask=_mask(behind[i], D), other=0.0),)
    return score, value


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
def _add_one_by_one(m, s, v, score, value):
    for i in tl.static_range(len(score)):
        m, s, v = _add(m, s, v, (score[i],), None, (value[i],))
    return m, s, v


@triton.jit
def _load_sums(pages, page_bytes, slot, ENTRIES: tl.constexpr, D: tl.constexpr):
    """Running sums m, s, v [1, D]; slot -1: over nothing."""
    record = _record(pages, page_bytes, slot, ENTRIES, 3 * D) + tl.arange(0, D)[None, :]
    kept = _mask(slot + 1, D)
    m = tl.load(record, mask=kept, other=float("-inf"))
    return m, tl.load(record + D, mask=kept, other=0.0), tl.load(record + 2 * D, mask=kept, other=0.0)


@triton.jit
def _store_sums(record, m, s, v, D: tl.constexpr):
    column = tl.arange(0, D)[None, :]
    tl.store(record + column, m)
    tl.store(record + D + column, s)
    tl.store(record + 2 * D + column, v)


@triton.jit(do_not_specialize=["num_tokens", "num_groups", "num_carried"])
def compress_kernel(
    rows, rows_stride, num_tokens, norm, sources, num_groups, carried, num_carried, store_rows, store_slots, state_pages,
    state_page_bytes, pages, page_bytes, entry_slots, rope, latent, stored, eps,
    OVERLAP: tl.constexpr, HADAMARD: tl.constexpr, ROPE: tl.constexpr, BF16: tl.constexpr, SLOTS: tl.constexpr,
    TOKEN_EACH: tl.constexpr, layout: tl.constexpr, ENTRIES: tl.constexpr, STATE_ENTRIES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Programs up to num_groups - 1 pool a group of SLOTS rows each, the others copy one state row each.

    TOKEN_EACH: group b ends with token b, whose row the same program copies; its other rows are carried ones, -1 for none.
    """
    D: tl.constexpr = layout.dim
    WIDTH: tl.constexpr = 4 * D if OVERLAP else 2 * D
    program = tl.program_id(0)
    wait_for_inputs(EARLY)
    if program >= num_groups:
        token = tl.load(store_rows + program - num_groups)
        slot = tl.load(store_slots + program - num_groups)
        x = _load_row(rows + token * rows_stride, WIDTH)
        _keep_row(x, state_pages, state_page_bytes, slot, STATE_ENTRIES, WIDTH)
    else:
        target = tl.load(entry_slots + program).to(tl.int64)
        norm_weight, cos, sin = load_finish(norm, rope, program, D, ROPE)
        pointer, behind = (), ()
        if TOKEN_EACH:
            own = rows + program.to(tl.int64) * rows_stride
            kept = tl.load(store_slots + program)
            slots = ()
            for i in tl.static_range(SLOTS - 1):
                slots += (tl.load(carried + program * (SLOTS - 1) + i),)
            x = _load_row(own, WIDTH)
            loads_in_flight()
            for i in tl.static_range(SLOTS - 1):
                pointer += (_record(state_pages, state_page_bytes, slots[i], STATE_ENTRIES, WIDTH),)
                behind += (slots[i] + 1,)
            pointer += (own,)
            behind += (num_tokens,)
        else:
            pointer, behind = _sources(
                sources + program.to(tl.int64) * SLOTS, 0, SLOTS, rows, rows_stride, num_tokens, carried, num_carried, state_pages,
                state_page_bytes, SLOTS, WIDTH, STATE_ENTRIES,
            )  # fmt: skip
        if target >= 0:
            score, value = _load_rows(pointer, behind, SLOTS // 2 if OVERLAP else SLOTS, D, WIDTH)
            loads_in_flight()
            top = score[0]
            for i in tl.static_range(1, SLOTS):
                top = tl.maximum(top, score[i])
            below = top * -LOG2E  # its rounding is a factor of all weights
            s = tl.zeros((1, D), tl.float32)
            v = tl.zeros((1, D), tl.float32)
            for i in tl.static_range(SLOTS):
                weight = exp2(tl.fma(score[i], LOG2E, below))
                s += weight
                v += weight * value[i]
            finish_row(
                round_like(v * reciprocal(s), BF16), norm_weight, cos, sin, eps, program, pages, page_bytes, target + tl.zeros((1,), tl.int64),
                latent, stored, True, ROPE, HADAMARD, BF16, layout, ENTRIES,
            )  # fmt: skip
        if TOKEN_EACH:
            _keep_row(x, state_pages, state_page_bytes, kept, STATE_ENTRIES, WIDTH)


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "num_carried", "blocks"])
def sum_parts_kernel(
    rows, rows_stride, num_tokens, sources, num_slots, carried, num_carried, state_pages, state_page_bytes, carried_sums, sum_pages,
    sum_page_bytes, partial, blocks,
    D: tl.constexpr, ROWS: tl.constexpr, ONE_BY_ONE: tl.constexpr, STATE_ENTRIES: tl.constexpr, SUM_ENTRIES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Sums over `blocks` times ROWS rows of a group, to partial fp32 [G, parts, 3, D]; the first part goes on with carried sums."""
    group, part = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(EARLY)
    before = tl.load(carried_sums + group, mask=part == 0, other=-1)
    m, s, v = _load_sums(sum_pages, sum_page_bytes, before, SUM_ENTRIES, D)
    for block in range(blocks):
        pointer, behind = _sources(
            sources + group.to(tl.int64) * num_slots, (part * blocks + block) * ROWS, num_slots, rows, rows_stride, num_tokens, carried,
            num_carried, state_pages, state_page_bytes, ROWS, 2 * D, STATE_ENTRIES,
        )  # fmt: skip
        score, value = _load_rows(pointer, behind, ROWS, D, 2 * D)
        if ONE_BY_ONE:
            m, s, v = _add_one_by_one(m, s, v, score, value)
        else:
            m, s, v = _add(m, s, v, score, None, value)
    _store_sums(partial + (group.to(tl.int64) * tl.num_programs(1) + part) * (3 * D), m, s, v, D)


@triton.jit(do_not_specialize=["parts", "num_groups", "num_entries"])
def merge_parts_kernel(
    partial, parts, num_groups, num_entries, norm, rows, rows_stride, store_rows, store_slots, state_pages, state_page_bytes,
    sum_slots, sum_pages, sum_page_bytes, pages, page_bytes, entry_slots, rope, latent, stored, eps,
    ROPE: tl.constexpr, BF16: tl.constexpr, AT_ONCE: tl.constexpr,
    layout: tl.constexpr, ENTRIES: tl.constexpr, STATE_ENTRIES: tl.constexpr, SUM_ENTRIES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The first num_entries groups are complete and become entries, the others are kept as sums; further programs copy state rows."""
    D: tl.constexpr = layout.dim
    program = tl.program_id(0)
    wait_for_inputs(EARLY)
    if program >= num_groups:
        token = tl.load(store_rows + program - num_groups)
        slot = tl.load(store_slots + program - num_groups)
        x = _load_row(rows + token * rows_stride, 2 * D)
        _keep_row(x, state_pages, state_page_bytes, slot, STATE_ENTRIES, 2 * D)
    else:
        complete = program < num_entries
        target = tl.load(entry_slots + program, mask=complete, other=0).to(tl.int64)
        target += tl.load(sum_slots + program - num_entries, mask=program >= num_entries, other=0).to(tl.int64)
        norm_weight = tl.zeros((1, D), tl.float32)
        cos = tl.zeros((1, D // 2), tl.float32)
        sin = tl.zeros((1, D // 2), tl.float32)
        if complete:
            norm_weight, cos, sin = load_finish(norm, rope, program, D, ROPE)
        column = tl.arange(0, D)[None, :]
        m = tl.full((1, D), float("-inf"), tl.float32)
        s = tl.zeros((1, D), tl.float32)
        v = tl.zeros((1, D), tl.float32)
        for first in range(0, parts, AT_ONCE):
            top, total, value = (), (), ()
            for i in tl.static_range(AT_ONCE):
                part = partial + (program.to(tl.int64) * parts + first + i) * (3 * D) + column
                there = _mask(parts - first - i + program * 0, D)
                top += (tl.load(part, mask=there, other=float("-inf")),)
                total += (tl.load(part + D, mask=there, other=0.0),)
                value += (tl.load(part + 2 * D, mask=there, other=0.0),)
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
    rows, rows_stride, num_tokens, norm, sources, carried, num_carried, store_slots, state_pages, state_page_bytes,
    carried_sums, sum_slots, sum_pages, sum_page_bytes, pages, page_bytes, entry_slots, rope, latent, stored, eps,
    ROPE: tl.constexpr, BF16: tl.constexpr, SLOTS: tl.constexpr,
    layout: tl.constexpr, ENTRIES: tl.constexpr, STATE_ENTRIES: tl.constexpr, SUM_ENTRIES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program b has token b: its group's entry, if complete; then the oldest kept row joins the sums, and its own row takes that place."""
    D: tl.constexpr = layout.dim
    program, count = tl.program_id(0), tl.num_programs(0)
    wait_for_inputs(EARLY)
    target = tl.load(entry_slots + program).to(tl.int64)
    open_target = tl.load(sum_slots + program)
    open_sums = tl.load(carried_sums + count + program)
    own = rows + program.to(tl.int64) * rows_stride
    kept = tl.load(store_slots + program)
    x = _load_row(own, 2 * D)
    pointer, behind = _sources(
        sources + (count + program).to(tl.int64) * SLOTS, 0, SLOTS, rows, rows_stride, num_tokens, carried, num_carried, state_pages,
        state_page_bytes, 1, 2 * D, STATE_ENTRIES,
    )  # fmt: skip
    if target >= 0:
        m, s, v = _load_sums(sum_pages, sum_page_bytes, tl.load(carried_sums + program), SUM_ENTRIES, D)
        norm_weight, cos, sin = load_finish(norm, rope, program, D, ROPE)
        own_pointer, own_behind = _sources(
            sources + program.to(tl.int64) * SLOTS, 0, SLOTS, rows, rows_stride, num_tokens, carried, num_carried, state_pages,
            state_page_bytes, SLOTS, 2 * D, STATE_ENTRIES,
        )  # fmt: skip
        score, value = _load_rows(own_pointer, own_behind, SLOTS, D, 2 * D)
        m, s, v = _add_one_by_one(m, s, v, score, value)
        finish_row(
            round_like(v * reciprocal(s), BF16), norm_weight, cos, sin, eps, program, pages, page_bytes, target + tl.zeros((1,), tl.int64),
            latent, stored, True, ROPE, False, BF16, layout, ENTRIES,
        )  # fmt: skip
    m, s, v = _load_sums(sum_pages, sum_page_bytes, open_sums, SUM_ENTRIES, D)
    score, value = _load_rows(pointer, behind, 1, D, 2 * D)
    m, s, v = _add_one_by_one(m, s, v, score, value)
    tl.debug_barrier()  # the entry has read what is replaced now
    if open_target >= 0:
        _store_sums(_record(sum_pages, sum_page_bytes, open_target, SUM_ENTRIES, 3 * D), m, s, v, D)
    _keep_row(x, state_pages, state_page_bytes, kept, STATE_ENTRIES, 2 * D)


def compress(
    rows: Tensor,
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
) -> Tensor | None:
    """Store the entries that this step completes and the state rows that later steps read; arguments as the reference's.

    An entry slot or state slot of -1 is left out, so that a captured graph can hold groups that most of its replays leave open.

    Args:
        rows: fp32, contiguous in the last dim.
        stored: fp32 [E, D], receives the rows that were packed.
        batch_invariant: entries do not depend, bit for bit, on how steps cut a sequence.

    Returns:
        With `with_latent` the normalised entries [E, D] in `dtype`, before RoPE.
    """
    entry_slots, rope, layout = facts.entry_slots[entries.name][layer_row], facts.rope, entries.layout
    latent = torch.empty(len(rope), layout.dim, dtype=dtype, device=rows.device) if with_latent else None
    if state is None or store is None:
        assert not rotate_keys, "entries of one token are latents, which are not rotated as V4's index keys are"
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
    assert len(entry_slots) == len(rope) <= groups, f"{len(entry_slots)} slots and {len(rope)} rotations for {groups} groups"
    assert sums is not None or len(rope) == groups, f"{groups} groups, {len(rope)} complete, and no sums"
    config = config or compress_config(dim, slots, batch_invariant)
    options: dict[str, Any] = {"STATE_ENTRIES": state.entries_per_page, "num_warps": config.num_warps}
    of_rows = (rows, rows.stride(0), len(rows))
    of_state = (state.data, state.data.stride(0))
    of_entries = (entries.data, entries.data.stride(0), entry_slots, torch.view_as_real(rope), latent, stored, eps)
    finish = {"ROPE": 2 * rope.shape[1], "BF16": dtype == torch.bfloat16, "layout": layout, "ENTRIES": entries.entries_per_page}
    if sums is None:
        programs = groups if facts.token_each else groups + num_store
        if programs:
            compress_kernel[(programs,)](
                *of_rows, norm, facts.sources, groups, carried, len(carried), store.rows, store_slots, *of_state, *of_entries,
                OVERLAP=overlap, HADAMARD=rotate_keys, SLOTS=slots, TOKEN_EACH=facts.token_each, **finish, **options,
                **early(programs, rows),
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
    blocks = triton.cdiv(config.part or slots, ROWS_AT_ONCE)
    parts = triton.cdiv(slots, blocks * ROWS_AT_ONCE) if slots else 1
    partial = torch.empty(groups, parts, 3, dim, dtype=torch.float32, device=rows.device)
    if groups:
        sum_parts_kernel[(groups, parts)](
            *of_rows, facts.sources, slots, carried, len(carried), *of_state, carried_sums, *of_sums, partial, blocks,
            D=dim, ROWS=ROWS_AT_ONCE, ONE_BY_ONE=config.part == 0, **early(groups * parts, rows),
            **options | {"num_warps": 2 * config.num_warps},
        )  # fmt: skip
    if groups + num_store:  # no program here reads what another one replaces: carried sums and state rows have been read
        merge_parts_kernel[(groups + num_store,)](
            partial, parts, groups, len(rope), norm, rows, rows.stride(0), store.rows, store_slots, *of_state, sum_slots, *of_sums,
            *of_entries, AT_ONCE=AT_ONCE, **finish, **options, **early(groups + num_store, rows),
        )  # fmt: skip
    return latent


def aot_cases() -> list[AotCase]:
    signature = {
        "rows": "*fp32", "rows_stride": "i32", "num_tokens": "i32", "norm": "*fp32", "sources": "*i64", "num_slots": "i32",
        "num_groups": "i32", "num_entries": "i32", "carried": "*i32", "num_carried": "i32", "state_pages": "*u8",
        "state_page_bytes": "i32", "store_rows": "*i64", "store_slots": "*i64", "pages": "*u8", "page_bytes": "i32",
        "entry_slots": "*i32", "rope": "*fp32", "eps": "fp32", "carried_sums": "*i32", "sum_slots": "*i64", "sum_pages": "*u8",
        "sum_page_bytes": "i32", "partial": "*fp32", "parts": "i32", "blocks": "i32",
    }  # fmt: skip
    pointers = ("rows", "norm", "state_pages", "pages", "rope", "sum_pages", "partial")
    aligned = (*pointers, "rows_stride", "state_page_bytes", "page_bytes", "sum_page_bytes")

    def case(name: str, kernel: Any, num_warps: int, constants: dict[str, Any]) -> AotCase:
        types = {n: signature[n] for n in kernel.arg_names if n in signature}
        return AotCase(f"compress {name}", kernel, types, constants, num_warps, aligned=tuple(n for n in aligned if n in types))

    kinds = [(4, name) for name in ("bf16", "v4", "v41", "index_bf16", "index_fp8", "index_mxfp4")]
    kinds += [(2, name) for name in ("bf16", "v41", "v41_fp4")] + [(128, name) for name in ("bf16", "v4", "v41")]
    cases = []
    for ratio, name in kinds:
        layout = layouts.get(name)
        warps = compress_config(layout.dim, ratio).num_warps
        finish: dict[str, Any] = {
            "ROPE": 64, "BF16": True, "layout": layout, "ENTRIES": 256 // ratio, "latent": None, "stored": None,
            "STATE_ENTRIES": 8 if ratio == 128 else 4, "EARLY": True,
        }  # fmt: skip
        if ratio == 128:
            cases.append(
                case(f"ratio 128 {name} merged", merge_parts_kernel, warps, finish | {"AT_ONCE": AT_ONCE, "SUM_ENTRIES": 1})
            )
            cases.append(case(f"ratio 128 {name} token each", token_each_kernel, warps, finish | {"SLOTS": 9, "SUM_ENTRIES": 1}))
            continue
        pooled = finish | {"OVERLAP": ratio == 4, "HADAMARD": layout.dim == 128, "SLOTS": 8 if ratio == 4 else 2}
        for each in (False, True):
            cases.append(case(f"ratio {ratio} {name} token each={each}", compress_kernel, warps, pooled | {"TOKEN_EACH": each}))
    for one_by_one in (False, True):
        constants = {
            "D": 512,
            "ROWS": ROWS_AT_ONCE,
            "ONE_BY_ONE": one_by_one,
            "STATE_ENTRIES": 8,
            "SUM_ENTRIES": 1,
            "EARLY": True,
        }
        cases.append(
            case(f"parts, one by one={one_by_one}", sum_parts_kernel, 2 * compress_config(512, 128).num_warps, constants)
        )
    return cases
