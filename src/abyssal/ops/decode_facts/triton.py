"""All integers of a decode step in one launch: a program reads which task it has, and computes 1024 elements of one layer of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from abyssal.ops._aot import AotCase
from abyssal.ops.decode_facts import LAST_SLOT, NUM_FIELDS, PROGRAM, Plan, What

SLOTS, COMPLETED, ALL = tl.constexpr(int(What.SLOTS)), tl.constexpr(int(What.COMPLETED)), tl.constexpr(int(What.ALL))
CONTINUED, CONTINUED_OPEN = tl.constexpr(int(What.CONTINUED)), tl.constexpr(int(What.CONTINUED_OPEN))
VISIBLE, LENGTH, PHASE = tl.constexpr(int(What.VISIBLE)), tl.constexpr(int(What.LENGTH)), tl.constexpr(int(What.PHASE))
GROUP_START, SOURCES = tl.constexpr(int(What.GROUP_START)), tl.constexpr(int(What.SOURCES))
SOURCES_COMPLETED = tl.constexpr(int(What.SOURCES_COMPLETED))
LAST_SLOT_TASK, FIELDS, BLOCK = tl.constexpr(int(LAST_SLOT)), tl.constexpr(NUM_FIELDS), tl.constexpr(PROGRAM)
WARPS = 8  # 4 elements per thread: with 8 registers leave room for few programs at a time


@triton.jit
def _groups(position, old, ratio, roll_back):
    """Start of a position's group and its first row that is not in sums; end of the summed rows, and the same two of the group there."""
    group_start = position // ratio * ratio
    until = tl.maximum(old, position + 1 - roll_back)
    open_start = until // ratio * ratio
    return group_start, tl.maximum(old, group_start), until, open_start, tl.maximum(old, open_start)


@triton.jit(do_not_specialize=["count", "table_rows", "roll_back"])
def decode_facts_kernel(positions, rows, folded, pages, tasks, programs, out, out_int64, count, table_rows, roll_back):
    """`out` and `out_int64` are the same memory; names as in `What` and the reference."""
    program = programs + tl.program_id(0) * 3
    task = tasks + tl.load(program) * FIELDS
    layer = tl.load(program + 1)
    what, is_int64, start, layer_stride = tl.load(task), tl.load(task + 1), tl.load(task + 2), tl.load(task + 3)
    width, ratio, shift, floor = tl.load(task + 4), tl.load(task + 5), tl.load(task + 6), tl.load(task + 7)
    table, columns, page_shift, ring_mask = tl.load(task + 8), tl.load(task + 9), tl.load(task + 10), tl.load(task + 11)

    place = tl.load(program + 2) + tl.arange(0, BLOCK)
    stored = place < count * width
    sequence = place // width
    index = place % width
    position = tl.load(positions + sequence, mask=stored, other=0).to(tl.int32)
    row = tl.load(rows + sequence, mask=stored, other=0).to(tl.int32)
    old = tl.load(folded + sequence, mask=stored, other=0).to(tl.int32)
    live = row != table_rows - 1
    end = position + 1
    oldest = tl.maximum(position + shift, floor)

    if what <= LAST_SLOT_TASK:
        if what == SLOTS:
            entry = oldest + index
        elif what == ALL:
            entry = index
            stored &= live & (index < end // ratio)
        elif what == COMPLETED:
            entry = tl.where(live & (end % ratio == 0), end // ratio - 1, -1)
        else:
            group_start, first, until, open_start, open_first = _groups(position, old, ratio, roll_back)
            if what == CONTINUED:
                used = first > group_start
            elif what == CONTINUED_OPEN:
                used = open_first > open_start
            else:
                used = live & (until > open_first)
            entry = tl.where(used, 0, -1)
        in_ring = entry & ring_mask
        column = (in_ring >> page_shift) % columns
        held = tl.load(pages + table + (layer * table_rows + row) * columns + column, mask=stored & (entry >= 0), other=0)
        value = tl.where(held == 0, -1, (held << page_shift) + (in_ring & ((1 << page_shift) - 1)))
    elif what == VISIBLE:
        value = tl.where(live, end // ratio, 0)
    elif what == LENGTH:
        value = tl.where(live, end - oldest, 0)
    elif what == PHASE:
        value = position % ratio
    elif what == GROUP_START:
        value = position // ratio * ratio
    else:
        _, first, until, _, open_first = _groups(position, old, ratio, roll_back)
        before = width - 1
        lower = tl.where(what == SOURCES, 0, tl.where(what == SOURCES_COMPLETED, first, open_first))
        upper = tl.where(what <= SOURCES_COMPLETED, end, until)
        token = position - before + index
        source = tl.where(index == before, count * before + sequence, sequence * before + index)
        value = tl.where((token >= lower) & (token < upper), source, count * before + count)

    target = start + layer * layer_stride + place
    if is_int64:
        tl.store(out_int64 + target, value.to(tl.int64), mask=stored)
    else:
        tl.store(out + target, value, mask=stored)


def decode_facts(positions: Tensor, rows: Tensor, folded: Tensor, pages: Tensor, plan: Plan) -> Tensor:
    """As the reference; what a sequence does not see of arrays of all entries is not written."""
    for part in (positions, rows, folded):
        assert part.dtype == torch.int64 and part.shape == (plan.count,) and part.is_contiguous(), (
            f"{part.dtype} {tuple(part.shape)} with strides {part.stride()}, expected int64 [{plan.count}]"
        )
    assert pages.dtype == torch.int32 and pages.is_contiguous() and len(pages) < 2**31, f"pages are {pages.dtype} [{len(pages)}]"
    memory = torch.empty(plan.words, dtype=torch.int64, device=pages.device)
    tasks, programs = plan.launch
    decode_facts_kernel[(len(programs),)](
        positions, rows, folded, pages, tasks, programs, memory.view(torch.int32), memory, plan.count, plan.table_rows,
        plan.roll_back, num_warps=WARPS,
    )  # fmt: skip
    return memory


def aot_cases() -> list[AotCase]:
    inputs = ("positions", "rows", "folded")
    pointers = ("pages", "tasks", "programs", "out", "out_int64")
    signature = dict.fromkeys(inputs, "*i64") | dict.fromkeys(pointers, "*i32") | {"out_int64": "*i64"}
    signature |= dict.fromkeys(("count", "table_rows", "roll_back"), "i32")
    return [
        AotCase(f"decode_facts inputs aligned={aligned}", decode_facts_kernel, signature, num_warps=WARPS,
                aligned=(*pointers, *inputs) if aligned else pointers)
        for aligned in (True, False)
    ]  # fmt: skip
