"""Page pools, and which pages each sequence holds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from abyssal.errors import ConfigError
from abyssal.kv import codec
from abyssal.kv.specs import ROLL_BACK, Bucket, CachePlan, CacheSpec

NO_PAGE = 0  # the zero page of every bucket: never handed out, always zero, so that slot -1 reads as zeros


class PagePool:
    """All pages of one size. A page that one kind frees can be taken by any other kind of the bucket."""

    def __init__(self, page_bytes: int, num_pages: int, device: torch.device) -> None:
        self.page_bytes = page_bytes
        self.num_pages = num_pages
        try:
            self.data = torch.empty(num_pages + 1, page_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # on a GPU its subclass OutOfMemoryError
            size = (num_pages + 1) * page_bytes
            raise ConfigError(
                f"the KV cache needs {size / 2**30:.1f} GiB at once, which {device} does not have; lower kv_cache_bytes"
            ) from error
        self.data[NO_PAGE].zero_()
        self._free = list(range(num_pages, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> np.ndarray:
        """`count` page ids, int32. The caller has checked `num_free`."""
        if count > len(self._free):
            raise RuntimeError(f"page pool has {len(self._free)} free pages, {count} asked")
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return np.array(taken[::-1], dtype=np.int32)

    def give_back(self, pages: np.ndarray) -> None:
        self._free.extend(pages[::-1].tolist())


@dataclass(slots=True)
class PageTable:
    """Pages of one cache kind of one sequence, for consecutive blocks of `entries_per_page` entries."""

    pages: np.ndarray  # int32 [layers of the kind, blocks], NO_PAGE where nothing is stored
    first_block: int = 0  # block of column 0

    @property
    def end_block(self) -> int:
        return self.first_block + self.pages.shape[1]


@dataclass(slots=True)
class SequenceCache:
    """Everything that one sequence holds in the pools."""

    tables: dict[str, PageTable] = field(default_factory=dict)
    num_tokens: int = 0  # computed so far
    folded: int = 0  # token up to which rows of its group are in the sums of record kinds; the rows from there on are kept

    def folded_after(self, end: int) -> int:
        """`folded` after a step that ends at token `end`."""
        return max(self.folded, end - ROLL_BACK)


class KVCache:
    """The pools of a model and the rules by which sequences take and return pages."""

    def __init__(self, plan: CachePlan, num_pages: dict[Bucket, int], device: torch.device) -> None:
        self.specs = plan.specs
        self.pools = {b: PagePool(size, num_pages[b], device) for b, size in plan.page_bytes.items()}
        self.views = {name: RecordView(self.pools[s.bucket].data, s) for name, s in plan.specs.items()}
        self.used_by_kind = dict.fromkeys(plan.specs, 0)

    def new_sequence(self) -> SequenceCache:
        empty = {name: PageTable(np.zeros((len(s.layers), 0), np.int32)) for name, s in self.specs.items()}
        return SequenceCache(empty)

    def allocate(self, seq: SequenceCache, start: int, end: int) -> bool:
        """Give `seq` pages for computing tokens [start, end): all that are needed, or none and False."""
        wanted = {name: self._missing_blocks(spec, seq.tables[name], start, end) for name, spec in self.specs.items()}
        need = dict.fromkeys(self.pools, 0)
        for name, blocks in wanted.items():
            need[self.specs[name].bucket] += len(blocks) * len(self.specs[name].layers)
        if any(count > self.pools[bucket].num_free for bucket, count in need.items()):
            return False
        for name, blocks in wanted.items():
            self._add_blocks(name, seq.tables[name], blocks)
        return True

    def missing_pages(self, seq: SequenceCache, tokens: int) -> dict[Bucket, int]:
        """Pages that `seq` would take beyond those it holds to reach `tokens` tokens and be at rest there."""
        missing = dict.fromkeys(self.pools, 0)
        for name, spec in self.specs.items():
            held = int((seq.tables[name].pages[0] != NO_PAGE).sum())
            missing[spec.bucket] += max(0, len(spec.blocks(tokens)) - held) * len(spec.layers)
        return missing

    def commit(self, seq: SequenceCache, end: int) -> None:
        """Note that a step has computed `seq` up to token `end`, and return window pages that nothing reads any more."""
        seq.folded, seq.num_tokens = seq.folded_after(end), end
        for name, spec in self.specs.items():
            if spec.lifetime == "window":
                self._drop_before(name, seq.tables[name], spec.blocks(end).start)

    def free(self, seq: SequenceCache) -> None:
        """Return every page of `seq`; it is then empty."""
        for name, table in seq.tables.items():
            self._drop_before(name, table, table.end_block)
            table.first_block = 0
        seq.num_tokens = seq.folded = 0

    def _missing_blocks(self, spec: CacheSpec, table: PageTable, start: int, end: int) -> list[int]:
        if spec.lifetime == "record":
            return [] if _has_block(table, 0) else [0]
        first = spec.first_kept(end) if spec.tail_only else start
        first_block = first // spec.ratio // spec.entries_per_page
        last_entry = end // spec.ratio - 1  # an entry is stored when its group of tokens is complete
        needed = range(first_block, last_entry // spec.entries_per_page + 1)
        return [b for b in needed if not _has_block(table, b)]

    def _add_blocks(self, name: str, table: PageTable, blocks: list[int]) -> None:
        if not blocks:
            return
        layers = len(self.specs[name].layers)
        if table.pages.shape[1] == 0:
            table.first_block = blocks[0]
        grow = blocks[-1] + 1 - table.end_block
        if grow > 0:
            table.pages = np.pad(table.pages, ((0, 0), (0, grow)), constant_values=NO_PAGE)
        pages = self.pools[self.specs[name].bucket].take(layers * len(blocks))
        table.pages[:, np.array(blocks) - table.first_block] = pages.reshape(layers, -1)
        self.used_by_kind[name] += len(pages)

    def _drop_before(self, name: str, table: PageTable, block: int) -> None:
        count = min(block - table.first_block, table.pages.shape[1])
        if count <= 0:
            return
        dropped = table.pages[:, :count].ravel()
        dropped = dropped[dropped != NO_PAGE]
        self.pools[self.specs[name].bucket].give_back(dropped)
        self.used_by_kind[name] -= len(dropped)
        table.pages = table.pages[:, count:].copy()
        table.first_block += count


def _has_block(table: PageTable, block: int) -> bool:
    column = block - table.first_block
    return 0 <= column < table.pages.shape[1] and bool(table.pages[0, column] != NO_PAGE)


class RecordView:
    """Records of one cache kind inside its bucket's pool, addressed by slot = page * entries_per_page + row.

    The reference backend's way to read and write records; -1 reads as zeros.
    """

    def __init__(self, pool: Tensor, spec: CacheSpec) -> None:
        self.spec = spec
        layout, entries = spec.layout, spec.entries_per_page
        width = layout.dim if layout.grid is None else layout.data_bytes
        values = pool.view(-1) if layout.grid is not None else pool.view(-1).view(layout.dtype)
        stride = pool.shape[1] // values.element_size()
        self._rows = values.as_strided((len(pool), entries, width), (stride, width, 1))
        scale_shape = (len(pool), entries, layout.scale_bytes)
        first_scale = layout.scale_offset(0, entries)
        self._scales = pool.as_strided(scale_shape, (pool.shape[1], layout.scale_bytes, 1), first_scale)
        self._page_rows, remainder = divmod(pool.shape[1], layout.data_bytes)
        # Row indices into one matrix are several times faster than (page, row) pairs, where pages are whole rows.
        self._flat = values.view(-1, width) if remainder == 0 else None

    def read(self, slots: Tensor) -> Tensor:
        """slots int [...] -> fp32 [..., dim]."""
        layout = self.spec.layout
        flat = slots.clamp(min=0).reshape(-1)
        rows = self._rows[self._split(flat)] if self._flat is None else self._flat.index_select(0, self._flat_rows(flat))
        values = rows.float() if layout.grid is None else codec.decode(layout, rows, self._scales[self._split(flat)])
        return values.view(*slots.shape, layout.dim)

    def write(self, slots: Tensor, values: Tensor) -> None:
        """slots int [n], none negative; values [n, dim]."""
        layout = self.spec.layout
        if layout.grid is None:
            rows = values.to(layout.dtype)
        else:
            rows, self._scales[self._split(slots)] = codec.encode(layout, values)
        if self._flat is None:
            self._rows[self._split(slots)] = rows
        else:
            self._flat.index_copy_(0, self._flat_rows(slots).long(), rows)

    def _split(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        entries = self.spec.entries_per_page
        return slots // entries, slots % entries

    def _flat_rows(self, slots: Tensor) -> Tensor:
        entries = self.spec.entries_per_page
        if self._page_rows == entries:
            return slots
        return slots + slots // entries * (self._page_rows - entries)
