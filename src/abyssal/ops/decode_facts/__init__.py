"""Integers that describe a step of one token per sequence: slots, sources and lengths, from three numbers of each sequence.

A `Plan` says which arrays a step needs, what is in them and where they lie; all of them are filled at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from enum import IntEnum, auto
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

PROGRAM = 1024  # elements that one program of the kernel computes
NO_FLOOR = -(2**30)  # below every position


class What(IntEnum):
    """What element i of a sequence is. p: its position; r: the task's ratio; folded: as of `SequenceCache`, before the step.

    Sums over the rows of a group take up those in front of p + 1 - roll_back (V4 spec 2.9): the step completes a group, or leaves
    one open that the sums of earlier rows may continue.
    """

    # Slots of an entry of a kind, -1 where it stores nothing
    SLOTS = 0  # of entry max(p + shift, floor) + i
    COMPLETED = auto()  # of the entry that p completes
    ALL = auto()  # of entry i; only visible ones are written
    CONTINUED = auto()  # of the sums that the group of p continues, counted as one that is completed
    CONTINUED_OPEN = auto()  # of the sums that the open group continues
    GROWN = auto()  # of the sums of the open group, if they take up rows
    # Numbers
    VISIBLE = auto()  # complete groups up to p
    LENGTH = auto()  # tokens from max(p + shift, floor) to p
    PHASE = auto()  # p % r
    GROUP_START = auto()  # first token of the group of p
    # Index of the row of token p + 1 - width + i: among carried rows those before p, then those of p, then an empty one for what is left out
    SOURCES = auto()
    SOURCES_COMPLETED = auto()  # of the group of p, as far as it is not in sums
    SOURCES_OPEN = auto()  # of the open group, as far as the sums take it up in this step


LAST_SLOT = What.GROWN


@dataclass(frozen=True, slots=True)
class Table:
    """Where the page tables int32 [layers, rows, columns] of a kind lie among those of all kinds; block b is in column b % columns."""

    start: int
    layers: int
    columns: int
    entries_per_page: int
    ring: int  # entries of a record, in which entry e is at e % ring; 0: no record

    def __post_init__(self) -> None:
        sizes = (self.entries_per_page, self.ring or 1)
        assert all(n & (n - 1) == 0 for n in sizes), f"{sizes} entries per page and per record are no powers of two"


@dataclass(frozen=True, slots=True)
class Array:
    """A contiguous [layers, rows, width] in the memory that a step fills."""

    start: int  # in elements of its dtype
    shape: tuple[int, int, int]
    dtype: torch.dtype

    def of(self, memory: Tensor) -> Tensor:
        return memory.view(self.dtype)[self.start : self.start + math.prod(self.shape)].view(self.shape)


@dataclass(frozen=True, slots=True)
class Task:
    """Fill rows [part count, part count + count) of an array."""

    what: What
    array: Array
    table: Table | None = None  # of slots
    part: int = 0
    ratio: int = 1
    shift: int = 0
    floor: int = 0


@dataclass(frozen=True, slots=True)
class _Fields:
    """A task as the kernel reads it."""

    what: int
    is_int64: int
    start: int
    layer_stride: int
    width: int
    ratio: int
    shift: int
    floor: int
    pages: int
    columns: int
    page_shift: int
    ring_mask: int


NUM_FIELDS = len(_Fields.__slots__)


@dataclass
class Plan:
    """The arrays of a step of `count` sequences."""

    count: int
    table_rows: int  # rows of the page tables; the last one is of no sequence
    roll_back: int  # latest rows of a sequence that sums leave out
    device: torch.device
    words: int = 0  # int64 words of memory
    tasks: list[Task] = field(default_factory=list)

    def array(self, dtype: torch.dtype, layers: int, rows: int, width: int) -> Array:
        """A new one, int32 or int64, at a multiple of 64 bytes."""
        made = Array(self.words * (8 // dtype.itemsize), (layers, rows, width), dtype)
        self.words += -(-layers * rows * width * dtype.itemsize // 64) * 8
        return made

    @cached_property
    def launch(self) -> tuple[Tensor, Tensor]:
        """Tasks int32 [tasks, NUM_FIELDS]; programs int32 [programs, 3], each of a task, a layer, and the first of its elements."""
        assert self.words < 2**30, f"a step of {self.count} sequences needs {self.words * 8 / 2**30:.1f} GiB of slots"
        parts = []
        for number, task in enumerate(self.tasks):
            layers, _, width = task.array.shape
            layer, first = np.meshgrid(np.arange(layers), np.arange(0, self.count * width, PROGRAM), indexing="ij")
            parts.append(np.stack([np.full(layer.size, number), layer.ravel(), first.ravel()], axis=1))
        fields = np.array([astuple(self._fields(task)) for task in self.tasks], np.int32)
        programs = np.concatenate(parts).astype(np.int32)
        return torch.from_numpy(fields).to(self.device), torch.from_numpy(programs).to(self.device)

    def _fields(self, task: Task) -> _Fields:
        _, rows, width = task.array.shape
        table = task.table or Table(0, 0, 1, 1, 0)
        return _Fields(
            what=task.what,
            is_int64=task.array.dtype == torch.int64,
            start=task.array.start + task.part * self.count * width,
            layer_stride=rows * width,
            width=width,
            ratio=task.ratio,
            shift=task.shift,
            floor=task.floor,
            pages=table.start,
            columns=table.columns,
            page_shift=table.entries_per_page.bit_length() - 1,
            ring_mask=(table.ring or 2**31) - 1,
        )


Compute = Callable[[Tensor, Tensor, Tensor, Tensor, Plan], Tensor]


def decode_facts(positions: Tensor, rows: Tensor, folded: Tensor, pages: Tensor, plan: Plan) -> Tensor:
    """Fill the arrays of a plan.

    Args:
        positions, rows, folded: int64 [count]: of each sequence its token, its row in the page tables, the rows that its sums hold.
        pages: int32, the page tables of all kinds one after another, 0 for no page.

    Returns:
        int64 [plan.words], in which `Array.of` finds the arrays.
    """
    memory = torch.empty(plan.words, dtype=torch.int64, device=pages.device)
    position, row, old = (part.int().unsqueeze(1) for part in (positions, rows, folded))
    for task in plan.tasks:
        index = torch.arange(task.array.shape[2], dtype=torch.int32, device=pages.device)
        step = _Step(position, row, old, row != plan.table_rows - 1, index, task, plan)
        values = step.slots(pages) if task.what <= LAST_SLOT else step.numbers()
        task.array.of(memory)[:, task.part * plan.count :][:, : plan.count].copy_(values)
    return memory


class _Step:
    """One task; names as in `What`."""

    def __init__(self, position: Tensor, row: Tensor, old: Tensor, live: Tensor, index: Tensor, task: Task, plan: Plan) -> None:
        """position, row, old int32 [B, 1], live bool [B, 1], index int32 [n]."""
        self.position, self.row, self.live, self.index, self.task, self.plan = position, row, live, index, task, plan
        self.end = position + 1
        self.visible = (self.end // task.ratio).masked_fill(~live, 0)
        self.start = position // task.ratio * task.ratio
        self.first = torch.maximum(old, self.start)
        self.folded = torch.maximum(old, self.end - plan.roll_back)  # after the step
        self.open_start = self.folded // task.ratio * task.ratio
        self.open_first = torch.maximum(old, self.open_start)

    def slots(self, pages: Tensor) -> Tensor:
        """int32 [layers, B, n]"""
        table, entry = self.task.table, self._entries()
        assert table is not None
        stored = entry % table.ring if table.ring else entry
        place = self.row * table.columns + stored // table.entries_per_page % table.columns
        size = self.plan.table_rows * table.columns
        held = pages[table.start : table.start + table.layers * size].view(table.layers, size)[:, place]
        slots = held * table.entries_per_page + stored % table.entries_per_page
        return slots.masked_fill_((held == 0) | (entry < 0), -1)

    def _entries(self) -> Tensor:
        """int32 [B, n], -1 for none."""
        task = self.task
        if task.what == What.SLOTS:
            return (self.position + task.shift).clamp(min=task.floor) + self.index
        if task.what == What.COMPLETED:
            return (self.end // task.ratio - 1).masked_fill(~self.live | (self.end % task.ratio != 0), -1)
        if task.what == What.ALL:
            return self.index.masked_fill(self.index >= self.visible, -1)
        used = {
            What.CONTINUED: self.first > self.start,
            What.CONTINUED_OPEN: self.open_first > self.open_start,
            What.GROWN: self.live & (self.folded > self.open_first),
        }[task.what]
        return used.int() - 1  # a record of one entry

    def numbers(self) -> Tensor:
        """int32 [B, n]"""
        task = self.task
        if task.what == What.VISIBLE:
            return self.visible
        if task.what == What.LENGTH:
            return (self.end - (self.position + task.shift).clamp(min=task.floor)).masked_fill(~self.live, 0)
        if task.what == What.PHASE:
            return self.position % task.ratio
        if task.what == What.GROUP_START:
            return self.start
        lower, upper = {
            What.SOURCES: (torch.zeros_like(self.end), self.end),
            What.SOURCES_COMPLETED: (self.first, self.end),
            What.SOURCES_OPEN: (self.open_first, self.folded),
        }[task.what]
        before, count = len(self.index) - 1, self.plan.count
        sequence = torch.arange(count, dtype=torch.int32, device=self.index.device).unsqueeze(1)
        token = self.position - before + self.index
        source = torch.where(self.index == before, count * before + sequence, sequence * before + self.index)
        return source.masked_fill((token < lower) | (token >= upper), count * before + count)
