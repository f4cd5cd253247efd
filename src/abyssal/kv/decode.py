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
from abyssal.kv.batch import Batch, CompressFacts, QueryGroup, QueryLists, Span, StoreFacts, page_slots, stores_tokens
from abyssal.kv.pool import ALL, NO_PAGE, PageTable, SequenceCache
from abyssal.kv.specs import ROLL_BACK, CacheSpec
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
        self._all = torch.full((ends[-1],), NO_PAGE, dtype=torch.int32, device=device)
        parts = dict(zip(shapes, pairwise(ends), strict=True))
        self._first = {n: start for n, (start, _) in parts.items()}
        self._host = {n: host[start:end].reshape(shapes[n]) for n, (start, end) in parts.items()}
        self.pages = {n: self._all[start:end].view(shapes[n]) for n, (start, end) in parts.items()}  # [layers, rows, columns]
        self._owners: list[SequenceCache | None] = [None] * num_rows
        self._rows: dict[int, int] = {}  # id of a sequence -> its row

    def place(self, caches: list[SequenceCache]) -> list[int]:
        """The row of each sequence, at most `num_rows` of them; what the device has in it is queued to become up to date."""
        rows = [self._rows.get(id(cache), -1) for cache in caches]
        if -1 in rows:
            self._give_rows(caches, rows)
        parts = []
        added: dict[str, list[tuple[int, int, np.ndarray]]] = {}  # kind -> row, block, its pages [layers]
        for cache, row in zip(caches, rows, strict=True):
            for name, first in cache.changed.items():
                table = cache.tables[name]
                if first == ALL:
                    parts.append(self._replace(name, row, table))
                else:
                    oldest = max(first, table.first_block, table.end_block - self.pages[name].shape[2])
                    new = range(oldest, table.end_block)
                    added.setdefault(name, []).extend((row, b, table.pages[:, b - table.first_block]) for b in new)
            cache.changed.clear()
        parts += [self._add(name, blocks) for name, blocks in added.items() if blocks]
        if parts:
            sent = staged(np.concatenate(parts, axis=1), self.device).to(self.device, non_blocking=True)
            self._all.index_copy_(0, sent[0], sent[1].int())
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

    def _add(self, name: str, blocks: list[tuple[int, int, np.ndarray]]) -> np.ndarray:
        """Note new blocks of several rows -> int64 [2, n], places in `_all` and the pages that belong there.

        What a window leaves behind may stay: a column is read for the blocks that a sequence holds.
        """
        known = self._host[name]
        rows, numbers, pages = zip(*blocks, strict=True)
        row, column = np.array(rows), np.array(numbers) % known.shape[2]
        known[:, row, column] = own = np.stack(pages, axis=1)  # [layers, n]
        layer = np.arange(len(known))[:, None]
        return np.stack((self._place(name, layer, row, column).ravel(), own.ravel()))

    def _place(self, name: str, layer: np.ndarray, row: np.ndarray | int, column: np.ndarray) -> np.ndarray:
        return self._first[name] + (layer * (self.empty_row + 1) + row) * self.pages[name].shape[2] + column

    def _replace(self, name: str, row: int, table: PageTable) -> np.ndarray:
        """Bring a row to the state of `table` -> int64 [2, n], places in `_all` that differ and the pages that belong there."""
        known = self._host[name][:, row]  # [layers, columns]
        columns = known.shape[1]
        wanted = np.full(known.shape, NO_PAGE, np.int32)
        if self.specs[name].lifetime == "window":
            blocks = np.arange(max(table.first_block, table.end_block - columns), table.end_block)
            wanted[:, blocks % columns] = table.pages[:, blocks - table.first_block]
        else:
            wanted[:, table.first_block : table.end_block] = table.pages
        layer, column = (known != wanted).nonzero()
        known[...] = wanted
        return np.stack((self._place(name, layer, row, column), wanted[layer, column]))


def _columns(spec: CacheSpec, max_tokens: int) -> int:
    if spec.lifetime == "window":
        return (spec.window + ROLL_BACK - 1) // spec.entries_per_page + 2
    return max(1, len(spec.blocks(max_tokens)))


def staged(array: np.ndarray, device: torch.device) -> Tensor:
    """`array` in memory from which a copy to `device` waits for nothing that is queued there."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory()


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What a step needs to know of each sequence; B rows, of which those without a sequence hold `empty_row` and zeros."""

    token_ids: Tensor  # [B] int64
    positions: Tensor  # [B] int64, of these tokens
    rows: Tensor  # [B] int64, in `DecodeTables`
    folded: Tensor  # [B] int64, as of `SequenceCache`


class DecodeFacts:
    """Builds the `Batch` of a step from `DecodeInputs`, by operations on tensors of fixed shapes."""

    def __init__(self, config: ModelConfig, tables: DecodeTables, as_lists: bool) -> None:
        """`as_lists`: as for `build_batch`."""
        self.config, self.tables, self.specs, self.as_lists = config, tables, tables.specs, as_lists
        self.ratios = sorted({plan.ratio for plan in config.layers if plan.ratio})
        ropes = [config.rope_main, *[config.rope_compress] * (1 + len(self.ratios))]
        self._frequencies = torch.stack([rope_frequencies(rope) for rope in ropes]).unsqueeze(1).to(tables.device)

    def batch(self, inputs: DecodeInputs, capacity: int) -> Batch:
        """The facts of a step; every sequence in it has at most `capacity` tokens, the new one included."""
        positions = inputs.positions.int()
        step = _Step(inputs.rows, positions, positions + 1, inputs.rows != self.tables.empty_row, inputs.folded.int(), capacity)
        first_tokens = [positions // r * r for r in self.ratios]
        turned = torch.stack([positions, positions, *first_tokens]).float().unsqueeze(2) * self._frequencies
        main, compress, *of_groups = torch.polar(torch.ones_like(turned), turned)
        each = torch.arange(len(positions), device=positions.device)
        tables = {
            n: self.tables.pages[n][:, :, : _columns(s, capacity)].index_select(1, inputs.rows)
            for n, s in self.specs.items()
            if s.lifetime == "context"
        }
        own = positions.unsqueeze(1)
        stores = {
            n: StoreFacts(each, self._slots(n, step, own)[:, :, 0].long()) for n, s in self.specs.items() if stores_tokens(s)
        }
        return Batch(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            logit_rows=each,
            rope={"main": main, "compress": compress},
            groups=[] if self.as_lists else [self._group(step)],
            lists=self._lists(step, tables) if self.as_lists else None,
            stores=stores,
            compress={r: self._compress(r, step, rope) for r, rope in zip(self.ratios, of_groups, strict=True)},
            tables=tables,
            engram_rows=None,
        )

    def _slots(self, name: str, step: _Step, entries: Tensor) -> Tensor:
        """Slots int32 [layers, B, n] of entries int32 [B, n]; -1 for negative ones and where nothing is stored."""
        spec, pages = self.specs[name], self.tables.pages[name]
        columns, per_page = pages.shape[2], spec.entries_per_page
        stored = entries % spec.record_entries if spec.lifetime == "record" else entries
        place = step.rows.unsqueeze(1) * columns + stored // per_page % columns
        held = pages.flatten(1).index_select(1, place.flatten()).view(-1, *place.shape)
        slots = held * per_page + stored % per_page
        return slots.masked_fill_((held == NO_PAGE) | (entries < 0), -1)

    def _visible(self, step: _Step) -> dict[int, Tensor]:
        return {r: (step.ends // r).masked_fill_(~step.live, 0) for r in self.ratios}

    def _group(self, step: _Step) -> QueryGroup:
        window = self.specs["window"]
        reach = torch.arange(1 - window.window, 1, dtype=torch.int32, device=step.ends.device)
        slots = self._slots("window", step, step.positions.unsqueeze(1) + reach)  # [layers, B, W]
        count = len(step.ends)
        return QueryGroup(
            rows=slice(0, count),
            sequences=torch.arange(count, device=step.ends.device),
            positions=step.positions.long().unsqueeze(1),
            window_slots=slots,
            window_hidden=(slots[0] < 0).unsqueeze(1),
            visible={r: v.long().unsqueeze(1) for r, v in self._visible(step).items()},
            max_visible={r: step.capacity // r for r in self.ratios},
        )

    def _lists(self, step: _Step, tables: dict[str, Tensor]) -> QueryLists:
        window, count = self.specs["window"], len(step.ends)
        oldest = (step.ends - window.window).clamp_(min=0)
        keys = oldest.unsqueeze(1) + torch.arange(window.window, dtype=torch.int32, device=step.ends.device)
        most = {r: step.capacity // r for r in self.ratios}
        wholly = {
            f"c{p.ratio}"
            for p in self.config.layers
            if p.selection == "all" or (p.ratio and most[p.ratio] <= self.config.index_topk)
        }
        return QueryLists(
            sequences=None,
            window_slots=self._slots("window", step, keys),
            window_lengths=(step.ends - oldest).masked_fill_(~step.live, 0),
            visible=self._visible(step),
            max_visible=most,
            entry_slots={n: page_slots(tables[n], self.specs[n], most[self.specs[n].ratio]) for n in wholly},
            spans=[Span(slice(0, count), slice(0, count), most)],
        )

    def _compress(self, ratio: int, step: _Step, rope: Tensor) -> CompressFacts:
        """Row b completes group b, or leaves it out; with sums, group B + b is what sequence b adds to its sums."""
        kinds = [n for n in (f"c{ratio}", f"c{ratio}_index") if n in self.specs]
        with_state = [f"{n}_state" for n in kinds if f"{n}_state" in self.specs]
        with_sums = [f"{n}_sums" for n in kinds if f"{n}_sums" in self.specs]
        ends, device, count = step.ends, step.ends.device, len(step.ends)
        complete = step.live & (ends % ratio == 0)
        entry = (ends // ratio - 1).masked_fill(~complete, -1).unsqueeze(1)
        # A group takes up so many tokens, the new one last.
        span = ROLL_BACK + 1 if with_sums else 2 * ratio if ratio == 4 else ratio
        tokens = step.positions.unsqueeze(1) + torch.arange(1 - span, 1, dtype=torch.int32, device=device)  # [B, span]
        carried = count * (span - 1)
        index = torch.arange(carried, device=device).view(count, -1)
        new = torch.arange(carried, carried + count, device=device).unsqueeze(1)
        sources, empty = torch.cat((index, new), dim=1), carried + count
        carried_sums, sum_slots = {}, {}
        if with_sums:
            start = step.positions // ratio * ratio  # of the group that the new token is in
            first = torch.maximum(step.folded, start)
            folded = torch.maximum(step.folded, ends - ROLL_BACK)
            open_first = torch.maximum(step.folded, folded // ratio * ratio)
            complete_sources = sources.masked_fill(tokens < first.unsqueeze(1), empty)
            used = (tokens >= open_first.unsqueeze(1)) & (tokens < folded.unsqueeze(1))
            sources = torch.cat((complete_sources, sources.masked_fill(~used, empty)))
            continued = torch.cat((first > start, open_first > folded // ratio * ratio))  # [2 B]
            grows = step.live & (folded > open_first)
            for name in with_sums:
                slots = self._slots(name, step, torch.zeros_like(ends).unsqueeze(1))[:, :, 0]  # [layers, B]
                carried_sums[name] = slots.repeat(1, 2).masked_fill_(~continued, -1)
                sum_slots[name] = slots.masked_fill(~grows, -1).long()
        else:
            sources = sources.masked_fill(tokens < 0, empty)
        return CompressFacts(
            phases=(step.positions % ratio).long(),
            sources=sources,
            carried={n: self._slots(n, step, tokens[:, :-1]).flatten(1) for n in with_state},
            carried_sums=carried_sums,
            sum_slots=sum_slots,
            entry_slots={n: self._slots(n, step, entry)[:, :, 0] for n in kinds},
            rope=rope,
        )


@dataclass(frozen=True, slots=True)
class _Step:
    rows: Tensor  # [B] int64
    positions: Tensor  # [B] int32
    ends: Tensor  # [B] int32, positions + 1
    live: Tensor  # [B] bool, there is a sequence
    folded: Tensor  # [B] int32
    capacity: int
