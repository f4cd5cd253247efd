"""The compressor after its projections, in one launch: pool, norm, RoPE, Hadamard, pack and store, and the state rows.

V4 spec 2.9, V4.1 spec 3.6. A ratio-1 entry pools nothing: `window_store` stores it.
"""

from __future__ import annotations

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
from abyssal.ops._records import finish_row, load_finish, round_like
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
    """A program pools one group over all D channels, so that the norm needs no second pass."""

    rows: int  # of a group, loaded at once; blocks of so many are a compile-time count, rounded up to a power of two
    num_warps: int  # of 128 channels each: every thread holds 4 channels of all rows, and pooling needs no exchange


def compress_config(dim: int, slots: int, row_by_row: bool = False) -> CompressConfig:
    """Groups of up to 8 rows at once; longer groups 16 rows at a time, so that 64 KB are in flight per program.

    Added up row by row, sums have the same bits wherever a step ends and the next goes on with them.
    """
    if row_by_row:
        return CompressConfig(1, 2 * max(1, dim // 128))
    if slots <= 8:
        return CompressConfig(triton.next_power_of_2(max(slots, 1)), max(1, dim // 128))
    return CompressConfig(16, 2 * max(1, dim // 128))


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "first_group", "num_groups", "num_entries", "num_carried"])
def compress_kernel(
    rows, rows_stride, num_tokens, norm, sources, num_slots, first_group, num_groups, num_entries,
    carried, num_carried, store_rows, store_slots, state_pages, state_page_bytes,
    carried_sums, sum_slots, sum_pages, sum_page_bytes,
    pages, page_bytes, entry_slots, rope, latent, stored, eps,
    OVERLAP: tl.constexpr, HADAMARD: tl.constexpr, ROPE: tl.constexpr, BF16: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    layout: tl.constexpr, ENTRIES: tl.constexpr, STATE_ENTRIES: tl.constexpr, SUM_ENTRIES: tl.constexpr,
):  # fmt: skip
    """Programs up to group num_groups - 1 pool a group each, from first_group on; the others copy one state row each.

    The first num_entries groups are complete and become entries, the others extend sums.
    """
    D: tl.constexpr = layout.dim
    WIDTH: tl.constexpr = 4 * D if OVERLAP else 2 * D
    program = first_group + tl.program_id(0)
    if program >= num_groups:
        token = tl.load(store_rows + program - num_groups)
        slot = tl.load(store_slots + program - num_groups).to(tl.int64)
        column = tl.arange(0, WIDTH)
        row = tl.load(rows + token * rows_stride + column)
        page = state_pages + slot // STATE_ENTRIES * state_page_bytes + slot % STATE_ENTRIES * (WIDTH * 4)
        tl.store(page.to(tl.pointer_type(tl.float32)) + column, row, mask=slot >= 0)
    else:
        complete = program < num_entries
        target = tl.load(entry_slots + program, mask=complete, other=0).to(tl.int64)
        if SUM_ENTRIES > 0:
            target += tl.load(sum_slots + program - num_entries, mask=program >= num_entries, other=0).to(tl.int64)
        if SUM_ENTRIES == 0:  # every group is complete, and short enough to leave the registers
            norm_weight, cos, sin = load_finish(norm, rope, program, D, ROPE)
            tl.debug_barrier()  # else the compiler moves these loads behind the pooling
        if target >= 0:
            column = tl.arange(0, D)[None, :]
            m = tl.full((1, D), float("-inf"), tl.float32)
            s = tl.zeros((1, D), tl.float32)
            v = tl.zeros((1, D), tl.float32)
            if SUM_ENTRIES > 0:
                before = tl.load(carried_sums + program).to(tl.int64)
                if before >= 0:
                    record = sum_pages + before // SUM_ENTRIES * sum_page_bytes + before % SUM_ENTRIES * (3 * D * 4)
                    sums = record.to(tl.pointer_type(tl.float32)) + column
                    m, s, v = tl.load(sums), tl.load(sums + D), tl.load(sums + 2 * D)
            for block in range(BLOCKS):
                # Row by row with scalar addresses, the loads of all rows in flight together: sources, then slots, then values.
                source, pointer, score, value = (), (), (), ()
                for i in tl.static_range(ROWS):
                    index = block * ROWS + i
                    kept = index < num_slots
                    at = sources + program.to(tl.int64) * num_slots + index
                    source += (tl.load(at, mask=kept, other=num_carried + num_tokens),)
                for i in tl.static_range(ROWS):
                    old = source[i] < num_carried
                    slot = tl.load(carried + source[i], mask=old, other=0).to(tl.int64)
                    page = state_pages + slot // STATE_ENTRIES * state_page_bytes + slot % STATE_ENTRIES * (WIDTH * 4)
                    step_row = rows + (source[i] - num_carried) * rows_stride
                    row = tl.where(old, page.to(tl.pointer_type(tl.float32)), step_row)
                    if OVERLAP and (block * ROWS + i) >= num_slots // 2:  # the second half of a row serves its own group
                        row += D
                    pointer += (row,)
                for i in tl.static_range(ROWS):
                    filled = source[i] < num_carried + num_tokens  # else the empty row
                    score += (tl.load(pointer[i] + WIDTH // 2 + column, mask=filled, other=float("-inf")),)
                    value += (tl.load(pointer[i] + column, mask=filled, other=0.0),)
                top = m
                for i in tl.static_range(ROWS):
                    top = tl.maximum(top, score[i])
                base = tl.where(top == float("-inf"), 0.0, top)  # no row yet: exp(-inf - 0) = 0 rather than NaN
                before_weight = tl.exp(m - base)
                s, v, m = s * before_weight, v * before_weight, top
                for i in tl.static_range(ROWS):
                    weight = tl.exp(score[i] - base)
                    s += weight
                    v += weight * value[i]
            if complete:
                x = round_like(v / s, BF16)
                if SUM_ENTRIES > 0:
                    norm_weight, cos, sin = load_finish(norm, rope, program, D, ROPE)
                finish_row(
                    x, norm_weight, cos, sin, eps, program, pages, page_bytes, target + tl.zeros((1,), tl.int64), latent, stored,
                    True, ROPE, HADAMARD, BF16, layout, ENTRIES,
                )  # fmt: skip
            else:
                if SUM_ENTRIES > 0:
                    record = sum_pages + target // SUM_ENTRIES * sum_page_bytes + target % SUM_ENTRIES * (3 * D * 4)
                    sums = record.to(tl.pointer_type(tl.float32)) + column
                    tl.store(sums, m)
                    tl.store(sums + D, s)
                    tl.store(sums + 2 * D, v)


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
    carried, carried_slots = facts.carried[state.name][layer_row], store.slots[layer_row]
    dim, width, num_store = len(norm), (4 if overlap else 2) * len(norm), len(store.rows)
    assert dim == layout.dim and dim & (dim - 1) == 0, (
        f"the kernels store entries of {layout.dim} values, a power of two, not {dim}; use backend=reference"
    )
    assert rows.shape[1] == width == state.layout.dim and rows.stride(1) == 1, f"rows {tuple(rows.shape)}, state {state.layout}"
    assert rows.dtype == norm.dtype == torch.float32, f"rows are {rows.dtype}, norm {norm.dtype}; both must be fp32"
    assert len(entry_slots) == len(rope) <= groups, f"{len(entry_slots)} slots and {len(rope)} rotations for {groups} groups"
    assert sums is not None or len(rope) == groups, f"{groups} groups, {len(rope)} complete, and no sums"
    config = config or compress_config(dim, slots, row_by_row=batch_invariant and sums is not None)
    state_arguments = (store.rows, carried_slots, state.data, state.data.stride(0))
    sum_arguments: tuple[Tensor | None, Tensor | None, Tensor | None, int] = (None, None, None, 0)
    if sums is not None:
        by_layer = facts.carried_sums[sums.name][layer_row], facts.sum_slots[sums.name][layer_row]
        sum_arguments = (*by_layer, sums.data, sums.data.stride(0))
    in_one_launch = 0 if sums is not None else num_store  # a ring's new rows lie where its old ones are read
    launches = [(0, groups + in_one_launch)]
    if sums is not None and groups - len(rope) != len(rows):
        # A sequence that completes a group may go on in the next, whose sums replace those that the first reads. One of a single
        # token does not: what it completes lies within roll-back of its end.
        launches = [(0, len(rope)), (len(rope), groups - len(rope))]
    for first, count in launches:
        if not count:
            continue
        compress_kernel[(count,)](
            rows, rows.stride(0), len(rows), norm, facts.sources, slots, first, groups, len(rope), carried, len(carried),
            *state_arguments, *sum_arguments, entries.data, entries.data.stride(0), entry_slots, torch.view_as_real(rope), latent, stored,
            eps, OVERLAP=overlap, HADAMARD=rotate_keys, ROPE=2 * rope.shape[1], BF16=dtype == torch.bfloat16, ROWS=config.rows,
            BLOCKS=triton.next_power_of_2(triton.cdiv(slots, config.rows)), layout=layout, ENTRIES=entries.entries_per_page,
            STATE_ENTRIES=state.entries_per_page, SUM_ENTRIES=0 if sums is None else sums.entries_per_page,
            num_warps=config.num_warps,
        )  # fmt: skip
    if sums is not None and num_store:
        state_store_kernel[(num_store,)](
            rows, rows.stride(0), *state_arguments, WIDTH=width, STATE_ENTRIES=state.entries_per_page, num_warps=4
        )  # fmt: skip
    return latent


@triton.jit
def state_store_kernel(
    rows, rows_stride, store_rows, store_slots, state_pages, state_page_bytes, WIDTH: tl.constexpr, STATE_ENTRIES: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    token = tl.load(store_rows + program)
    slot = tl.load(store_slots + program).to(tl.int64)
    if slot >= 0:
        column = tl.arange(0, WIDTH)
        row = tl.load(rows + token * rows_stride + column)
        page = state_pages + slot // STATE_ENTRIES * state_page_bytes + slot % STATE_ENTRIES * (WIDTH * 4)
        tl.store(page.to(tl.pointer_type(tl.float32)) + column, row)


def aot_cases() -> list[AotCase]:
    signature = {
        "rows": "*fp32", "rows_stride": "i32", "num_tokens": "i32", "norm": "*fp32", "sources": "*i64", "num_slots": "i32",
        "first_group": "i32", "num_groups": "i32", "num_entries": "i32", "carried": "*i32", "num_carried": "i32", "state_pages": "*u8",
        "state_page_bytes": "i32", "store_rows": "*i64", "store_slots": "*i64", "pages": "*u8", "page_bytes": "i32",
        "entry_slots": "*i32", "rope": "*fp32", "eps": "fp32",
    }  # fmt: skip
    with_sums = {"carried_sums": "*i32", "sum_slots": "*i64", "sum_pages": "*u8", "sum_page_bytes": "i32"}
    aligned = ("rows", "rows_stride", "norm", "state_pages", "state_page_bytes", "pages", "page_bytes", "rope")
    kinds = [(4, name) for name in ("bf16", "v4", "v41", "index_bf16", "index_fp8", "index_mxfp4")]
    kinds += [(128, name) for name in ("bf16", "v4", "v41")] + [(2, name) for name in ("bf16", "v41", "v41_fp4")]
    cases = []
    for ratio, name, row_by_row in [*((ratio, name, False) for ratio, name in kinds), (128, "v4", True)]:
        layout = layouts.get(name)
        slots = {4: 8, 2: 2, 128: 128}[ratio]
        config = compress_config(layout.dim, slots, row_by_row)
        no_sums: dict[str, Any] = {} if ratio == 128 else dict.fromkeys((*with_sums, "SUM_ENTRIES"), None) | {"SUM_ENTRIES": 0}
        constants: dict[str, Any] = {
            "OVERLAP": ratio == 4, "HADAMARD": layout.dim == 128, "ROPE": 64, "BF16": True, "ROWS": config.rows,
            "BLOCKS": slots // config.rows, "layout": layout,
            "ENTRIES": 256 // ratio, "STATE_ENTRIES": 8 if ratio == 128 else 4, "SUM_ENTRIES": 1, "latent": None, "stored": None,
        }  # fmt: skip
        cases.append(
            AotCase(
                f"compress ratio {ratio} {name}" + " row by row" * row_by_row, compress_kernel, signature | (with_sums if ratio == 128 else {}),
                constants | no_sums, num_warps=config.num_warps,
                aligned=(*aligned, "sum_pages", "sum_page_bytes") if ratio == 128 else aligned,
            )
        )  # fmt: skip
    state = {n: signature[n] for n in ("rows", "rows_stride", "store_rows", "store_slots", "state_pages", "state_page_bytes")}
    cases.append(
        AotCase(
            "compress state ring", state_store_kernel, state, {"WIDTH": 1024, "STATE_ENTRIES": 8},
            aligned=("rows", "rows_stride", "state_pages", "state_page_bytes"),
        )
    )  # fmt: skip
    return cases
