"""Page pools, and which pages each sequence holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from abyssal.errors import ConfigError
from abyssal.kv import codec
from abyssal.kv.prefix import Block, Pages, PrefixIndex, block_keys
from abyssal.kv.specs import BLOCK_TOKENS, ROLL_BACK, Bucket, CachePlan, CacheSpec
from abyssal.ops.norm import rounded

ALL = -1
NO_PAGE = 0  # the zero page of every bucket: never handed out, always zero, so that slot -1 reads as zeros


class PagePool:
    """All pages of one size. A page that one kind frees can be taken by any other kind of the bucket.

    A page may have several holders: sequences, and the prefix index, which keeps it for later ones. It is free when it has none.
    """

    def __init__(self, page_bytes: int, num_pages: int, device: torch.device) -> None:
        self.page_bytes = page_bytes
        self.num_pages = num_pages
        try:
            self.data = torch.empty(num_pages + 1, page_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # on a GPU its subclass OutOfMemoryError
            size = (num_pages + 1) * page_bytes
            raise ConfigError(
                f"one of the KV cache's page pools needs {size / 2**30:.1f} GiB at once, which {device} does not have; lower kv_cache_bytes"
            ) from error
        self.data[NO_PAGE].zero_()
        self._free = list(range(num_pages, 0, -1))
        self._holders = np.zeros(num_pages + 1, np.int32)
        self._kept = np.zeros(num_pages + 1, np.int32)  # of the holders, how many are the prefix index
        self.num_idle = 0  # pages that nobody but the prefix index holds

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that can be taken, some of them from the prefix index."""
        return len(self._free) + self.num_idle

    def take(self, count: int) -> np.ndarray:
        """`count` page ids, int32. The caller has checked `num_free`."""
        if count > len(self._free):
            raise RuntimeError(f"page pool has {len(self._free)} free pages, {count} asked")
        taken = np.array(self._free[len(self._free) - count :][::-1], dtype=np.int32)
        del self._free[len(self._free) - count :]
        self._holders[taken] = 1
        return taken

    def share(self, pages: np.ndarray) -> int:
        """One more sequence holds `pages`. Like the following: by how many the pages that sequences hold have changed."""
        return self._change(pages, holders=1, kept=0)

    def give_back(self, pages: np.ndarray) -> int:
        """A sequence lets `pages` go."""
        return self._change(pages, holders=-1, kept=0)

    def keep(self, pages: np.ndarray) -> int:
        """The prefix index holds `pages` too."""
        return self._change(pages, holders=1, kept=1)

    def drop(self, pages: np.ndarray) -> int:
        """The prefix index lets `pages` go."""
        return self._change(pages, holders=-1, kept=-1)

    def has_one_holder(self, page: int) -> bool:
        return bool(self._holders[page] == 1)

    def any_idle(self, pages: np.ndarray) -> bool:
        return bool((self._holders[pages] == self._kept[pages]).any())

    def _change(self, pages: np.ndarray, holders: int, kept: int) -> int:
        """`pages`: held by somebody, any shape, no page twice."""
        pages = pages.ravel()
        held, keeps = self._holders[pages], self._kept[pages]
        num_idle = np.count_nonzero(held == keeps)
        held += holders
        self._holders[pages] = held
        if kept:
            keeps += kept
            self._kept[pages] = keeps
        freed = pages[held == 0]
        self._free.extend(freed[::-1].tolist())
        change = int(np.count_nonzero(held == keeps) - num_idle)
        self.num_idle += change - len(freed)
        return -change


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

    tables: dict[str, PageTable]
    root: bytes  # start of its hash chain; sequences of another root share nothing with it
    keys: list[bytes] = field(default_factory=list)  # of its complete blocks, as far as computed
    blocks: list[Block] = field(default_factory=list)  # in the prefix index, from the first on
    num_tokens: int = 0  # computed and not taken back
    folded: int = 0  # token up to which rows of its group are in the sums of record kinds; the rows from there on are kept
    final: int = 0  # tokens that cannot be taken back any more
    restored: int = 0  # tokens that came from elsewhere, windows before their end only in part
    # Kind -> first block of its table that a copy of it does not know yet; ALL: it may have changed anywhere.
    changed: dict[str, int] = field(default_factory=dict)

    def folded_after(self, end: int) -> int:
        """`folded` after a step that ends at token `end`."""
        return max(self.folded, end - ROLL_BACK)


class KVCache:
    """The pools of a model and the rules by which sequences take and return pages."""

    def __init__(
        self,
        plan: CachePlan,
        num_pages: dict[Bucket, int],
        device: torch.device,
        prefix: PrefixIndex | None = None,
        identity: str = "",
    ) -> None:
        """
        Args:
            prefix: where complete blocks are kept for later sequences; None: nothing is kept.
            identity: says what makes the records: model and number format.
        """
        self.specs = plan.specs
        self.device = device
        self.prefix = prefix
        self.identity = identity
        self.pools = {b: PagePool(size, num_pages[b], device) for b, size in plan.page_bytes.items()}
        self.views = {name: RecordView(self.pools[s.bucket].data, s) for name, s in plan.specs.items()}
        self.used_by_kind = dict.fromkeys(plan.specs, 0)  # pages that sequences hold, shared ones once
        # What a token turns over, by its position in a block of tokens: windows that leave a page in front of it behind and begin one with
        # it, those that only leave one, and kinds that only begin one; None: nothing.
        self._turns = [_turned(self.specs, position) for position in range(BLOCK_TOKENS)]
        # Of a window the columns of its table when the first has become the last.
        self._moved = {n: np.roll(np.arange(s.most_blocks), -1) for n, s in self.specs.items() if s.lifetime == "window"}

    def wait(self) -> None:
        """Return once all that was launched on the device, which may read and write records, is done."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def new_sequence(self, salt: str | None = None) -> SequenceCache:
        """An empty sequence; only sequences of the same `salt` share blocks."""
        empty = {name: PageTable(np.zeros((len(s.layers), 0), np.int32)) for name, s in self.specs.items()}
        return SequenceCache(empty, b"" if self.prefix is None else self.prefix.root(salt))

    def allocate(self, seq: SequenceCache, start: int, end: int) -> bool:
        """Give `seq` pages for computing tokens [start, end): all that are needed, or none and False.

        Where memory allows, also those for the state at the block ends inside, at which later sequences may begin.
        """
        inner = self._block_ends(start, end)
        return self._allocate(seq, start, end, inner) or (bool(inner) and self._allocate(seq, start, end, []))

    def _allocate(self, seq: SequenceCache, start: int, end: int, stops: list[int]) -> bool:
        return self._take({n: self._missing_blocks(s, seq.tables[n], start, end, stops) for n, s in self.specs.items()}, seq)

    def allocate_next(self, seqs: list[SequenceCache], positions: list[int]) -> bool:
        """Give each sequence pages for computing the token at its position, all that are needed, or False.

        What `release_unneeded` and `allocate` do between steps of one token each, for all of them at once. Of a window that leaves a page
        behind and begins one, the page moves on, if nobody else holds it.
        """
        dropped: dict[str, list[np.ndarray]] = {}
        wanted: dict[str, list[tuple[SequenceCache, int]]] = {}
        need = dict.fromkeys(self.pools, 0)
        has_records = True
        for seq, position in zip(seqs, positions, strict=True):
            if (turns := self._turns[position % BLOCK_TOKENS]) is None:
                continue
            moving, leaving, opening = turns
            if stuck := [n for n in moving if not self._moves_on(n, seq.tables[n], position)]:
                leaving, opening = leaving + stuck, opening + stuck
            for name in leaving:
                table = seq.tables[name]
                if (count := self.specs[name].first_block(position) - table.first_block) > 0 and table.pages.shape[1]:
                    dropped.setdefault(name, []).append(_cut_front(table, count))
            for name in opening:
                spec, table = self.specs[name], seq.tables[name]
                if spec.lifetime == "record":
                    has_records = has_records and (table.pages.shape[1] > 0 or self.allocate(seq, position, position + 1))
                elif not _has_block(table, block := position // spec.ratio // spec.entries_per_page):
                    wanted.setdefault(name, []).append((seq, block))
                    need[spec.bucket] += len(spec.layers)
        for name, parts in dropped.items():
            pages = np.concatenate(parts, axis=1)
            self._each(PagePool.give_back, {name: pages[pages != NO_PAGE]})
        if not (has_records and self._make_free(need)):
            return False
        for name, where in wanted.items():
            spec = self.specs[name]
            pages = self.pools[spec.bucket].take(len(where) * len(spec.layers))
            self.used_by_kind[name] += len(pages)
            for (seq, block), own in zip(where, pages.reshape(len(where), -1, 1), strict=True):
                table = seq.tables[name]
                if table.pages.shape[1] == 0:
                    table.first_block = block
                assert block == table.end_block, f"{name}: block {block} after {table.end_block} blocks"
                table.pages = np.concatenate((table.pages, own), axis=1)
                seq.changed[name] = min(block, seq.changed.get(name, block))
        return True

    def _moves_on(self, name: str, table: PageTable, position: int) -> bool:
        """Let the first page of a window, left behind at `position`, become the one that begins there, unless it has other holders.

        In a copy of the table, which has block b in column b % `most_blocks`, it is where it was.
        """
        spec, order, pages = self.specs[name], self._moved[name], table.pages
        is_next = pages.shape[1] == len(order) and (table.first_block + len(order)) * spec.entries_per_page == position
        if not (is_next and self.pools[spec.bucket].has_one_holder(pages[0, 0])):
            return False
        table.pages = pages.take(order, axis=1)
        table.first_block += 1
        return True

    def allocate_restored(self, seq: SequenceCache, token_ids: list[int], tokens: int) -> int | None:
        """Give the empty `seq` pages for what a sequence of the first `tokens` of `token_ids` reads next: all, or none and None.

        Returns:
            The tokens, of complete blocks, whose whole-context entries the prefix index has; their pages are shared.
        """
        if self.prefix is not None:
            block_keys(seq.keys, seq.root, token_ids[:tokens])
            self._hold(seq, self.prefix.known(seq.keys[: tokens // BLOCK_TOKENS]))
        known = len(seq.blocks) * BLOCK_TOKENS
        blocks = {n: self._stop_blocks(s, tokens) if s.lifetime == "window" else s.blocks(tokens) for n, s in self.specs.items()}
        if not self._take({n: [b for b in wanted if not _has_block(seq.tables[n], b)] for n, wanted in blocks.items()}, seq):
            self.free(seq)
            return None
        return known

    def _take(self, wanted: dict[str, list[int]], seq: SequenceCache) -> bool:
        need = dict.fromkeys(self.pools, 0)
        for name, blocks in wanted.items():
            need[self.specs[name].bucket] += len(blocks) * len(self.specs[name].layers)
        if not self._make_free(need):
            return False
        for name, blocks in wanted.items():
            self._add_blocks(seq, name, blocks)
        return True

    def _make_free(self, need: dict[Bucket, int]) -> bool:
        """Have so many free pages in each bucket; False, and nothing changed, where pages are short."""
        if any(count > self.pools[bucket].num_available for bucket, count in need.items()):
            return False
        for bucket, count in need.items():
            if count > self.pools[bucket].num_free:
                self._make_room(bucket, count)
        return True

    def reuse(self, seq: SequenceCache, token_ids: list[int]) -> int:
        """Let the empty `seq` hold the longest known prefix of `token_ids`; its length in tokens.

        At least the last token is left to compute: its logits are wanted.
        """
        if self.prefix is None:
            return 0
        block_keys(seq.keys, seq.root, token_ids)
        chain = self.prefix.match(seq.keys[: (len(token_ids) - 1) // BLOCK_TOKENS])
        if not chain:
            return 0
        end = len(chain) * BLOCK_TOKENS
        windows = chain[-1].windows
        assert windows is not None
        self._hold(seq, chain)
        self._each(PagePool.share, windows)
        for name, pages in windows.items():
            self._set_table(seq, name, PageTable(pages.copy(), self._stop_blocks(self.specs[name], end).start))
        seq.num_tokens = seq.folded = seq.final = end
        return end

    def _hold(self, seq: SequenceCache, chain: list[Block]) -> None:
        """Let the empty `seq` share the whole-context pages of `chain`."""
        if not chain:
            return
        assert self.prefix is not None
        for block in chain:
            self.prefix.use(block)
        seq.blocks = chain
        for name in chain[0].pages:
            pages = np.concatenate([block.pages[name] for block in chain], axis=1)
            self._each(PagePool.share, {name: pages})
            self._set_table(seq, name, PageTable(pages))

    def _set_table(self, seq: SequenceCache, name: str, table: PageTable) -> None:
        seq.tables[name] = table
        seq.changed[name] = ALL

    def commit(self, seq: SequenceCache, token_ids: list[int], end: int, rejected: int = 0) -> None:
        """Tokens [0, end) of `seq` are computed: keep its complete blocks. To be called before `release_unneeded`.

        The step may have computed `rejected` more, drafts that are taken back as by `roll_back`.
        """
        seq.folded, seq.num_tokens = seq.folded_after(end + rejected), end + rejected
        seq.final = max(seq.final, seq.folded)
        if rejected:
            self.roll_back(seq, rejected)
        if self.prefix is None or end // BLOCK_TOKENS <= len(seq.blocks):
            return
        block_keys(seq.keys, seq.root, token_ids)
        for index in range(len(seq.blocks), end // BLOCK_TOKENS):
            seq.blocks.append(self._keep_block(seq, index))
        seq.final = max(seq.final, len(seq.blocks) * BLOCK_TOKENS)

    def roll_back(self, seq: SequenceCache, tokens: int) -> None:
        """Take back the last `tokens` of `seq`, as if they had never been computed.

        What they wrote stays where it is until the tokens that come instead write there: no query sees it before. Sums of record
        kinds are ROLL_BACK tokens behind, so they know nothing of tokens that can be taken back.

        Raises:
            ValueError: a step has gone more than ROLL_BACK tokens beyond that point, or the tokens came from elsewhere, or the
                prefix index keeps their block.
        """
        end = seq.num_tokens - tokens
        if tokens < 0 or end < seq.final:
            raise ValueError(f"cannot take back {tokens} of {seq.num_tokens} tokens: {seq.final} are final")
        seq.num_tokens = end
        del seq.keys[end // BLOCK_TOKENS :]  # other tokens may come instead
        for name, spec in self.specs.items():
            if spec.lifetime != "record":
                self._drop_from(seq, name, spec.blocks(end).stop)

    def _keep_block(self, seq: SequenceCache, index: int) -> Block:
        """Put block `index` of `seq` into the prefix index, or let `seq` hold the pages of the equal one that is there."""
        assert self.prefix is not None
        key, own = seq.keys[index], self._block_pages(seq, index)
        end = (index + 1) * BLOCK_TOKENS
        windows = self._window_pages(seq, end) if end >= seq.restored else None
        block = self.prefix.get(key)
        if block is None:
            block = Block(key, seq.blocks[-1] if index else None, own)
            self._each(PagePool.keep, own)
            self.prefix.add(block)
        else:
            for name, pages in own.items():
                entries = self.specs[name].entries_per_page
                first = index * BLOCK_TOKENS // self.specs[name].ratio // entries - seq.tables[name].first_block
                seq.tables[name].pages[:, first : first + pages.shape[1]] = block.pages[name]
                seq.changed[name] = ALL
            self._each(PagePool.share, block.pages)
            self._each(PagePool.give_back, own)
        if block.windows is None and windows is not None:
            self._each(PagePool.keep, windows)
            block.windows = windows
        self.prefix.use(block)
        return block

    def _each(self, action: Callable[[PagePool, np.ndarray], int], pages: Pages) -> None:
        for name, ids in pages.items():
            self.used_by_kind[name] += action(self.pools[self.specs[name].bucket], ids)

    def _block_pages(self, seq: SequenceCache, index: int) -> Pages:
        """Pages of the whole-context kinds in block `index`."""
        pages = {}
        for name, spec in self.specs.items():
            if spec.lifetime == "context":
                per_block = BLOCK_TOKENS // spec.ratio // spec.entries_per_page
                pages[name] = seq.tables[name].pages[:, index * per_block : (index + 1) * per_block].copy()
        return pages

    def _window_pages(self, seq: SequenceCache, end: int) -> Pages | None:
        """Pages of the window kinds that a sequence of `end` tokens reads next; None where `seq` has not all of them."""
        pages = {}
        for name, spec in self.specs.items():
            if spec.lifetime == "window":
                table, blocks = seq.tables[name], self._stop_blocks(spec, end)
                first = blocks.start - table.first_block
                found = table.pages[:, max(first, 0) : blocks.stop - table.first_block]
                if first < 0 or found.shape[1] < len(blocks) or (found == NO_PAGE).any():
                    return None
                pages[name] = found.copy()
        return pages

    def _make_room(self, bucket: Bucket, count: int) -> None:
        """Take idle pages from the prefix index until `count` are free; there are enough of them."""
        assert self.prefix is not None
        pool = self.pools[bucket]
        for block in self.prefix.windows_to_spare():
            if pool.num_free >= count:
                return
            self._drop_windows(block, bucket)
        while pool.num_free < count and (leaf := self.prefix.next_leaf()) is not None:
            self._drop_windows(leaf)
            self._each(PagePool.drop, leaf.pages)
            self.prefix.remove(leaf)
        for block in self.prefix.windows_left():
            if pool.num_free >= count:
                return
            self._drop_windows(block, bucket)

    def _drop_windows(self, block: Block, bucket: Bucket | None = None) -> None:
        """Forget the windows of `block`; with `bucket` only where that frees pages of it."""
        assert self.prefix is not None
        windows = block.windows
        if windows is None:
            return
        if bucket is not None:
            inside = (pages for name, pages in windows.items() if self.specs[name].bucket == bucket)
            if not any(self.pools[bucket].any_idle(pages) for pages in inside):
                return
        self._each(PagePool.drop, windows)
        block.windows = None
        self.prefix.refile(block)

    def missing_pages(self, seq: SequenceCache, tokens: int) -> dict[Bucket, int]:
        """Pages that `seq` would take beyond those it holds to reach `tokens` tokens and be at rest there."""
        missing = dict.fromkeys(self.pools, 0)
        for name, spec in self.specs.items():
            held = int((seq.tables[name].pages[0] != NO_PAGE).sum())
            missing[spec.bucket] += max(0, len(spec.blocks(tokens)) - held) * len(spec.layers)
        return missing

    def release_unneeded(self, seq: SequenceCache, end: int) -> None:
        """Return window pages that no query after `end` tokens reads."""
        for name, spec in self.specs.items():
            if spec.lifetime == "window":
                self._drop_before(name, seq.tables[name], spec.blocks(end).start)

    def free(self, seq: SequenceCache) -> None:
        """Return every page of `seq`; it is then empty."""
        for block in reversed(seq.blocks):
            assert self.prefix is not None
            self.prefix.leave(block)
        seq.blocks = []
        for name, table in seq.tables.items():
            self._drop_before(name, table, table.end_block)
            seq.changed[name] = ALL
            table.first_block = 0
        seq.num_tokens = seq.folded = seq.final = seq.restored = 0

    def _block_ends(self, start: int, end: int) -> list[int]:
        """Ends of blocks in (start, end), where later sequences may begin."""
        if self.prefix is None:
            return []
        return list(range((start // BLOCK_TOKENS + 1) * BLOCK_TOKENS, end, BLOCK_TOKENS))

    def _stop_blocks(self, spec: CacheSpec, end: int) -> range:
        """Page-table blocks of a window kind that a sequence of `end` tokens reads next."""
        return range(max(0, end - spec.window) // spec.entries_per_page, (end - 1) // spec.entries_per_page + 1)

    def _missing_blocks(self, spec: CacheSpec, table: PageTable, start: int, end: int, stops: list[int]) -> list[int]:
        first_block = start // spec.ratio // spec.entries_per_page
        last_entry = end // spec.ratio - 1  # an entry is stored when its group of tokens is complete
        end_block = last_entry // spec.entries_per_page + 1
        needed: Iterable[int] = range(first_block, end_block)
        if spec.lifetime == "record":
            needed = spec.blocks(end)
        elif spec.tail_only:
            tails = [range(spec.first_kept(end) // spec.entries_per_page, end_block)]
            tails += [self._stop_blocks(spec, stop) for stop in stops]
            needed = sorted({block for tail in tails for block in tail if block >= first_block})
        return [b for b in needed if not _has_block(table, b)]

    def _add_blocks(self, seq: SequenceCache, name: str, blocks: list[int]) -> None:
        if not blocks:
            return
        table = seq.tables[name]
        seq.changed[name] = min(blocks[0], seq.changed.get(name, blocks[0]))
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
        dropped = _cut_front(table, count)
        self._each(PagePool.give_back, {name: dropped[dropped != NO_PAGE]})

    def _drop_from(self, seq: SequenceCache, name: str, block: int) -> None:
        table = seq.tables[name]
        seq.changed[name] = ALL
        count = max(0, block - table.first_block)
        dropped = table.pages[:, count:]
        self._each(PagePool.give_back, {name: dropped[dropped != NO_PAGE]})
        table.pages = table.pages[:, :count].copy()


def _has_block(table: PageTable, block: int) -> bool:
    column = block - table.first_block
    return 0 <= column < table.pages.shape[1] and bool(table.pages[0, column] != NO_PAGE)


def _cut_front(table: PageTable, count: int) -> np.ndarray:
    """Pages [layers, count] of the first `count` blocks, of as many as there are; the table has them no more."""
    dropped, table.pages = table.pages[:, :count], table.pages[:, count:]
    table.first_block += dropped.shape[1]
    return dropped


def _turned(specs: dict[str, CacheSpec], position: int) -> tuple[list[str], list[str], list[str]] | None:
    """Kinds as in `KVCache._turns`. Records come first: a sequence without them gets all of its pages at once."""
    kinds = sorted(specs, key=lambda name: specs[name].lifetime != "record")
    leaving = [n for n in kinds if _leaves_page(specs[n], position)]
    opening = [n for n in kinds if _opens_page(specs[n], position)]
    both = [n for n in leaving if n in opening]
    parts = both, [n for n in leaving if n not in both], [n for n in opening if n not in both]
    return parts if any(parts) else None


def _opens_page(spec: CacheSpec, position: int) -> bool:
    """Whether the token at `position` stores the first entry of a page, or may be the first of a sequence that stores anything."""
    if spec.lifetime == "record":
        return position == 0
    entry, rest = divmod(position + 1, spec.ratio)
    return rest == 0 and (entry - 1) % spec.entries_per_page == 0


def _leaves_page(spec: CacheSpec, end: int) -> bool:
    """Whether a window kind has a page too many when a sequence reaches `end` tokens, modulo the block of tokens.

    Of the few rows of a state the page that is not needed any more is kept for some tokens, until it can become the next.
    """
    passed = 0 if spec.tail_only else spec.window + ROLL_BACK
    return spec.lifetime == "window" and (end - passed) % spec.entries_per_page == 0


def entry_slots(spec: CacheSpec, table: PageTable, entries: np.ndarray) -> np.ndarray:
    """Slots int32 [layers, n] of entry indices int64 [n]; -1 for negative indices and where nothing is stored."""
    count = table.pages.shape[1]
    if count == 0 or len(entries) == 0:
        return np.full((len(spec.layers), len(entries)), -1, np.int32)
    if spec.lifetime == "record":
        entries = entries % spec.record_entries
    blocks, rows = np.divmod(entries, spec.entries_per_page)
    blocks -= table.first_block
    pages = table.pages.take(blocks, axis=1, mode="clip")
    held = (blocks.view(np.uint64) < count) & (pages != NO_PAGE)  # as unsigned, negative blocks are beyond all others
    pages *= spec.entries_per_page
    pages += rows.astype(np.int32)
    return np.where(held, pages, np.int32(-1))


def ranges(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, .. ends[0] - 1, starts[1], .."""
    counts = ends - starts
    return np.arange(counts.sum()) + (ends - np.cumsum(counts)).repeat(counts)


def range_slots(spec: CacheSpec, tables: list[PageTable], starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """`entry_slots` of the entries starts[i] to ends[i] - 1 of each table in turn, as int32 [layers, n]; no start is negative."""
    counts = ends - starts
    table = np.arange(len(tables)).repeat(counts)
    entries = ranges(starts, ends)
    if spec.lifetime == "record":
        entries %= spec.record_entries
        starts, ends = np.zeros_like(starts), np.full_like(ends, spec.record_entries)
    blocks, rows = np.divmod(entries, spec.entries_per_page)
    first_blocks, end_blocks = (starts // spec.entries_per_page).tolist(), (-(-ends // spec.entries_per_page)).tolist()
    parts = [np.full((len(spec.layers), 1), NO_PAGE, np.int32)]  # column 0 of all; then the columns of each table that are read
    places, width = [(0, 0, 0)] * len(tables), 1  # first of these blocks, their end, what leads to their columns
    for i in counts.nonzero()[0].tolist():
        pages, first = tables[i].pages, tables[i].first_block
        begin, end = max(first_blocks[i], first), min(end_blocks[i], first + pages.shape[1])
        if begin < end:
            places[i] = begin, end, width - begin
            parts.append(pages[:, begin - first : end - first])
            width += end - begin
    begins, stops, shifts = np.array(places, np.int64).T
    columns = np.where((blocks >= begins[table]) & (blocks < stops[table]), blocks + shifts[table], 0)
    found = np.concatenate(parts, axis=1).take(columns, axis=1)
    return np.where(found == NO_PAGE, np.int32(-1), found * spec.entries_per_page + rows.astype(np.int32))


class RecordView:
    """Records of one cache kind inside its bucket's pool, addressed by slot = page * entries_per_page + row.

    The reference backend's way to read and write records; -1 reads as zeros.
    """

    def __init__(self, pool: Tensor, spec: CacheSpec) -> None:
        self.spec = spec
        self.pages = pool  # uint8 [pages, page bytes], what kernels read and write
        layout, entries = spec.layout, spec.entries_per_page
        width = layout.dim if layout.grid is None else layout.data_bytes
        values = pool.view(-1) if layout.grid is not None else pool.view(-1).view(layout.dtype)
        stride = pool.shape[1] // values.element_size()
        self._rows = values.as_strided((len(pool), entries, width), (stride, width, 1))
        self._data = pool.as_strided((len(pool), entries, layout.data_bytes), (pool.shape[1], layout.data_bytes, 1))
        scale_shape = (len(pool), entries, layout.scale_bytes)
        first_scale = layout.scale_offset(0, entries)
        self._scales = pool.as_strided(scale_shape, (pool.shape[1], layout.scale_bytes, 1), first_scale)
        # Row indices into one matrix are several times faster than (page, row) pairs, where pages are whole rows or hold one.
        self._page_rows, remainder = (1, 0) if entries == 1 else divmod(pool.shape[1], layout.data_bytes)
        self._flat = self._rows[:, 0] if entries == 1 else values.view(-1, width) if remainder == 0 else None

    @property
    def device(self) -> torch.device:
        return self._data.device

    def lies_with(self, other: RecordView) -> bool:
        """Whether the slots of both count the same rows of one pool, so that one `read` may take slots of either."""
        mine, theirs = self.spec, other.spec
        return self.pages is other.pages and (mine.layout, mine.entries_per_page) == (theirs.layout, theirs.entries_per_page)

    def read_bytes(self, slots: Tensor) -> Tensor:
        """slots int64 [n], none negative -> uint8 [n, bytes_per_entry]: the data row, then the scale row."""
        where = self._split(slots)
        return torch.cat([self._data[where], self._scales[where]], dim=1)

    def write_bytes(self, slots: Tensor, records: Tensor) -> None:
        """The inverse of `read_bytes`."""
        where = self._split(slots)
        self._data[where], self._scales[where] = records.tensor_split([self.spec.layout.data_bytes], dim=1)

    def read(self, slots: Tensor) -> Tensor:
        """slots int [...] -> fp32 [..., dim]."""
        layout, slots = self.spec.layout, slots.clamp(min=0)
        rows = self._rows[self._split(slots)] if self._flat is None else torch.embedding(self._flat, self._flat_rows(slots))
        if layout.grid is None:
            return rows.float()
        scales = self._scales[self._split(slots)]
        return codec.decode(layout, rows.flatten(0, -2), scales.flatten(0, -2)).view(*slots.shape, layout.dim)

    def write(self, slots: Tensor, values: Tensor) -> None:
        """slots int [n], -1 where the row is not stored; values [n, dim]."""
        if -1 in slots.tolist():
            stored = slots >= 0
            slots, values = slots[stored], values[stored]
        layout = self.spec.layout
        if layout.grid is None:
            rows = rounded(values, layout.dtype)
        else:
            rows, self._scales[self._split(slots)] = codec.encode(layout, values)
        if self._flat is None:
            self._rows[self._split(slots)] = rows
        else:
            self._flat.index_copy_(0, self._flat_rows(slots).long(), rows)

    def _split(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        entries = self.spec.entries_per_page
        return torch.floor_divide(slots, entries), slots % entries

    def _flat_rows(self, slots: Tensor) -> Tensor:
        entries = self.spec.entries_per_page
        if self._page_rows == entries:
            return slots
        return torch.add(slots, torch.floor_divide(slots, entries), alpha=self._page_rows - entries)
