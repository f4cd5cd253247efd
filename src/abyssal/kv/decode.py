"""The facts of a step of one token per sequence, with shapes that do not depend on the sequences, computed on the device.

`DecodeTables` keeps page tables on the device and sends what has changed; `DecodeFacts` computes from them, and from a few numbers
per sequence, the `Batch` that `build_batch` would build. Nothing waits for the device, so that a graph can hold all of it. A step has
rows for more sequences than it may get: to one without a sequence every slot is -1 and every length 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from abyssal.config import ModelConfig
from abyssal.kv.batch import (
    Batch,
    CompressFacts,
    QueryGroup,
    QueryLists,
    Span,
    StoreFacts,
    page_slots,
    staged,
    stores_tokens,
)
from abyssal.kv.pool import ALL, NO_PAGE, PageTable, SequenceCache
from abyssal.kv.specs import ROLL_BACK, CacheSpec
from abyssal.ops.decode_facts import NO_FLOOR, Array, Compute, Plan, Table, Task, What
from abyssal.ops.rope import rope_frequencies


class DecodeTables:
    """Page tables of up to `num_rows` sequences on the device, a row each; one more row never has a page.

    A whole-context kind has a column per block. A window has as many as its tokens can touch: block b is in column b % columns.
    """

    def __init__(self, specs: dict[str, CacheSpec], num_rows: int, max_tokens: int, device: torch.device) -> None:
        self.specs, self.empty_row, self.device = specs, num_rows, device
        shapes = {n: (len(s.layers), num_rows + 1, _columns(s, max_tokens)) for n, s in specs.items()}
        ends = [0, *accumulate(math.prod(shape) for shape in shapes.values())]
        host = np.full(ends[-1], NO_PAGE, np.int32)
        self.all_pages = torch.full((ends[-1],), NO_PAGE, dtype=torch.int32, device=device)
        parts = dict(zip(shapes, pairwise(ends), strict=True))
        self.starts = {n: start for n, (start, _) in parts.items()}
        self._known = host  # what the device has
        self._host = {n: host[start:end].reshape(shapes[n]) for n, (start, end) in parts.items()}
        self._layers = {n: np.arange(s, e, math.prod(shapes[n][1:])) for n, (s, e) in parts.items()}  # where each begins
        self.pages = {
            n: self.all_pages[start:end].view(shapes[n]) for n, (start, end) in parts.items()
        }  # [layers, rows, columns]
        self._owners: list[SequenceCache | None] = [None] * num_rows
        self._rows: dict[int, int] = {}  # id of a sequence -> its row

    def of_kind(self, name: str) -> Table:
        """Where its page tables lie in `all_pages`."""
        spec, (layers, _, columns) = self.specs[name], self.pages[name].shape
        return Table(self.starts[name], layers, columns, spec.entries_per_page, spec.record_entries)

    def place(self, caches: list[SequenceCache]) -> list[int]:
        """The row of each sequence, at most `num_rows` of them; what the device has in it is queued to become up to date."""
        rows = [self._rows.get(id(cache), -1) for cache in caches]
        if -1 in rows:
            self._give_rows(caches, rows)
        places: list[np.ndarray] = []  # in `all_pages`
        pages: list[np.ndarray] = []  # that belong there
        added: dict[str, tuple[list[int], list[np.ndarray]]] = {}  # kind -> places in its first layer, pages [layers] of each
        for cache, row in zip(caches, rows, strict=True):
            if not cache.changed:
                continue
            for name, first in cache.changed.items():
                table, columns = cache.tables[name], self._host[name].shape[2]
                if first == ALL:
                    self._replace(name, row, table, places, pages)
                else:  # what a window leaves behind may stay: a column is read for the blocks that a sequence holds
                    where, own = added.setdefault(name, ([], []))
                    for block in range(max(first, table.first_block, table.end_block - columns), table.end_block):
                        where.append(row * columns + block % columns)
                        own.append(table.pages[:, block - table.first_block])
            cache.changed.clear()
        for name, (where, own) in added.items():
            places.append((np.array(where, np.int64)[:, None] + self._layers[name]).ravel())
            pages += own
        if places:
            changes = np.concatenate((*places, *pages)).reshape(2, -1)
            self._known[changes[0]] = changes[1]
            where, what = staged(changes, self.device).to(self.device, non_blocking=True)
            self.all_pages.index_copy_(0, where, what.int())
        return rows

    def _give_rows(self, caches: list[SequenceCache], rows: list[int]) -> None:
        present = set(map(id, caches))
        others = (row for row, owner in enumerate(self._owners) if id(owner) not in present)
        for i, cache in enumerate(caches):
            if rows[i] < 0:
                rows[i] = next(others)
                self._rows.pop(id(self._owners[rows[i]]), None)
                self._owners[rows[i]] = cache
                self._rows[id(cache)] = rows[i]
                cache.changed.update(dict.fromkeys(self.specs, ALL))

    def _replace(self, name: str, row: int, table: PageTable, places: list[np.ndarray], pages: list[np.ndarray]) -> None:
        """Add what brings a row to the state of `table`: the places that differ, and the pages that belong there."""
        known = self._host[name][:, row]  # [layers, columns]
        columns = known.shape[1]
        wanted = np.full(known.shape, NO_PAGE, np.int32)
        if self.specs[name].lifetime == "window":
            blocks = np.arange(max(table.first_block, table.end_block - columns), table.end_block)
            wanted[:, blocks % columns] = table.pages[:, blocks - table.first_block]
        else:
            wanted[:, table.first_block : table.end_block] = table.pages
        layer, column = (known != wanted).nonzero()
        places.append(self._layers[name][layer] + (row * columns + column))
        pages.append(wanted[layer, column])


def _columns(spec: CacheSpec, max_tokens: int) -> int:
    if spec.lifetime == "window":
        return spec.most_blocks
    return max(1, len(spec.blocks(max_tokens)))


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What a step needs to know of each sequence; B rows, of which those without a sequence hold `empty_row` and zeros."""

    token_ids: Tensor  # [B] int64
    positions: Tensor  # [B] int64, of these tokens
    rows: Tensor  # [B] int64, in `DecodeTables`
    folded: Tensor  # [B] int64, as of `SequenceCache`


class DecodeFacts:
    """Builds the `Batch` of a step from `DecodeInputs`, by operations on tensors of fixed shapes."""

    def __init__(self, config: ModelConfig, tables: DecodeTables, as_lists: bool, compute: Compute) -> None:
        """
        Args:
            as_lists: as for `build_batch`.
            compute: `decode_facts` of `abyssal.ops`.
        """
        self.config, self.tables, self.specs, self.as_lists, self.compute = config, tables, tables.specs, as_lists, compute
        self.ratios = sorted({plan.ratio for plan in config.layers if plan.ratio})
        ropes = [config.rope_main, *[config.rope_compress] * (1 + len(self.ratios))]
        self.frequencies = torch.stack([rope_frequencies(rope) for rope in ropes]).unsqueeze(1).to(tables.device)
        self._shapes: dict[tuple[int, int], _Shape] = {}

    def batch(self, inputs: DecodeInputs, capacity: int) -> Batch:
        """The facts of a step; every sequence in it has at most `capacity` tokens, the new one included."""
        key = (len(inputs.positions), capacity)
        if key not in self._shapes:
            self._shapes[key] = _Shape(self, *key)
        shape = self._shapes[key]
        memory = self.compute(inputs.positions, inputs.rows, inputs.folded, self.tables.all_pages, shape.plan)
        got = {name: array.of(memory) for name, array in shape.arrays.items()}
        turned = got["rope", 0].view(-1, shape.count, 1).float() * self.frequencies
        main, compress, *of_groups = torch.polar(shape.ones, turned)
        tables = {
            n: self.tables.pages[n][:, :, : _columns(s, capacity)].index_select(1, inputs.rows)
            for n, s in self.specs.items()
            if s.lifetime == "context"
        }
        visible = {r: got["visible", r][0] for r in self.ratios}  # [B, 1]
        return Batch(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            logit_rows=shape.each,
            rope={"main": main, "compress": compress},
            groups=[] if self.as_lists else [self._group(shape, inputs, got, visible)],
            lists=self._lists(shape, got) if self.as_lists else None,
            stores={n: StoreFacts(shape.each, slots[:, :, 0]) for n, slots in _named("store", got).items()},
            compress={r: _compress(r, got, rope) for r, rope in zip(self.ratios, of_groups, strict=True)},
            tables=tables if self.as_lists else {},
            entries={} if self.as_lists else {n: self._entries(n, pages, visible, shape.most) for n, pages in tables.items()},
            engram_rows=None,
        )

    def _entries(self, name: str, pages: Tensor, visible: dict[int, Tensor], most: dict[int, int]) -> Tensor:
        """Slots int32 [layers, B, most] of what each sequence has of a whole-context kind, from its page tables [layers, B, P]."""
        ratio = self.specs[name].ratio
        beyond = torch.arange(most[ratio], device=pages.device) >= visible[ratio]
        return page_slots(pages, self.specs[name], most[ratio]).masked_fill_(beyond, -1)

    def _group(self, shape: _Shape, inputs: DecodeInputs, got: _Got, visible: dict[int, Tensor]) -> QueryGroup:
        slots, every = got["window", "window"], slice(0, shape.count)
        return QueryGroup(
            rows=every,
            sequences=every,
            positions=inputs.positions.unsqueeze(1),
            window_slots=slots,
            window_hidden=(slots[0] < 0).unsqueeze(1),
            visible=visible,
            max_visible=shape.most,
            sees_all=False,  # of the shape's most
        )

    def _lists(self, shape: _Shape, got: _Got) -> QueryLists:
        every = slice(0, shape.count)
        return QueryLists(
            sequences=None,
            window_slots=got["window", "window"],
            window_lengths=got["window lengths", 0][0, :, 0],
            visible={r: got["visible", r][0, :, 0] for r in self.ratios},
            max_visible=shape.most,
            entry_slots=_named("all", got),
            spans=[Span(every, every, shape.most)],
        )


_Key = tuple[str, str | int]  # what an array is; of which kind or ratio
_Got = dict[_Key, Tensor]


def _named(what: str, got: _Got) -> dict[str, Tensor]:
    return {str(name): array for (key, name), array in got.items() if key == what}


def _compress(ratio: int, got: _Got, rope: Tensor) -> CompressFacts:
    """Row b completes group b, or leaves it out; with sums, group B + b is what sequence b adds to its sums."""
    main, index = f"c{ratio}", f"c{ratio}_index"

    def of_kinds(what: str, suffix: str) -> dict[str, Tensor]:
        return {n: got[what, n] for n in (main + suffix, index + suffix) if (what, n) in got}

    return CompressFacts(
        phases=got["phases", ratio][0, :, 0],
        sources=got["sources", ratio][0],
        carried={n: slots.flatten(1) for n, slots in of_kinds("carried", "_state").items()},
        carried_sums={n: slots[:, :, 0] for n, slots in of_kinds("carried sums", "_sums").items()},
        sum_slots={n: slots[:, :, 0] for n, slots in of_kinds("sums", "_sums").items()},
        entry_slots={n: slots[:, :, 0] for n, slots in of_kinds("entries", "").items()},
        rope=rope,
        token_each=True,
    )


class _Shape:
    """The arrays of steps of `count` rows with up to `capacity` tokens each, and constants beside them."""

    def __init__(self, facts: DecodeFacts, count: int, capacity: int) -> None:
        self.count, self.most = count, {r: capacity // r for r in facts.ratios}
        device, self._tables = facts.tables.device, facts.tables
        self.each = torch.arange(count, device=device)
        self.ones = torch.ones(len(facts.frequencies), count, facts.frequencies.shape[2], device=device)
        self.plan = Plan(count, facts.tables.empty_row + 1, ROLL_BACK, device)
        self.arrays: dict[_Key, Array] = {}
        ropes = self._new(("rope", 0), torch.int32, 1, len(facts.frequencies))
        for part, ratio in enumerate((1, 1, *facts.ratios)):
            self._fill(What.GROUP_START, ropes, part=part, ratio=ratio)
        for name, spec in facts.specs.items():
            if stores_tokens(spec):
                self._slots(What.SLOTS, "store", name, torch.int64)
        window = facts.specs["window"].window
        floor = 0 if facts.as_lists else NO_FLOOR
        self._slots(What.SLOTS, "window", "window", width=window, shift=1 - window, floor=floor)
        for ratio in facts.ratios:
            visible = self._new(("visible", ratio), torch.int32 if facts.as_lists else torch.int64)
            self._fill(What.VISIBLE, visible, ratio=ratio)
            self._compress(ratio)
        if facts.as_lists:
            self._fill(What.LENGTH, self._new(("window lengths", 0), torch.int32), shift=1 - window)
            most, topk = self.most, facts.config.index_topk
            wholly = {
                f"c{p.ratio}": p.ratio for p in facts.config.layers if p.selection == "all" or (p.ratio and most[p.ratio] <= topk)
            }
            for name, ratio in wholly.items():
                self._slots(What.ALL, "all", name, width=most[ratio], ratio=ratio)

    def _compress(self, ratio: int) -> None:
        specs = self._tables.specs
        kinds = [n for n in (f"c{ratio}", f"c{ratio}_index") if n in specs]
        with_sums = [f"{n}_sums" for n in kinds if f"{n}_sums" in specs]
        # A group takes up so many tokens, the new one last.
        span = ROLL_BACK + 1 if with_sums else 2 * ratio if ratio == 4 else ratio
        self._fill(What.PHASE, self._new(("phases", ratio), torch.int64), ratio=ratio)
        sources = self._new(("sources", ratio), torch.int64, 1, 2 if with_sums else 1, span)
        if with_sums:
            self._fill(What.SOURCES_COMPLETED, sources, ratio=ratio)
            self._fill(What.SOURCES_OPEN, sources, part=1, ratio=ratio)
        else:
            self._fill(What.SOURCES, sources, ratio=ratio)
        for name in kinds:
            self._slots(What.COMPLETED, "entries", name, ratio=ratio)
            if f"{name}_state" in specs:
                self._slots(What.SLOTS, "carried", f"{name}_state", width=span - 1, shift=1 - span, floor=NO_FLOOR)
        for name in with_sums:
            continued = self._slots(What.CONTINUED, "carried sums", name, parts=2, ratio=ratio)
            self._fill(What.CONTINUED_OPEN, continued, name, part=1, ratio=ratio)
            self._slots(What.GROWN, "sums", name, torch.int64, ratio=ratio)

    def _slots(
        self,
        what: What,
        key: str,
        name: str,
        dtype: torch.dtype = torch.int32,
        *,
        parts: int = 1,
        width: int = 1,
        ratio: int = 1,
        shift: int = 0,
        floor: int = 0,
    ) -> Array:
        array = self._new((key, name), dtype, len(self._tables.specs[name].layers), parts, width)
        self._fill(what, array, name, ratio=ratio, shift=shift, floor=floor)
        return array

    def _new(self, key: _Key, dtype: torch.dtype, layers: int = 1, parts: int = 1, width: int = 1) -> Array:
        self.arrays[key] = self.plan.array(dtype, layers, parts * self.count, width)
        return self.arrays[key]

    def _fill(
        self, what: What, array: Array, name: str | None = None, *, part: int = 0, ratio: int = 1, shift: int = 0, floor: int = 0
    ) -> None:
        table = None if name is None else self._tables.of_kind(name)
        self.plan.tasks.append(Task(what, array, table, part, ratio, shift, floor))
