"""`Batch`: the facts of one engine step, built once and read by every layer.

Tokens of all scheduled sequences lie one after another; sequences that compute a single token come first, so that their
queries form one rectangular group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from abyssal.config import ModelConfig
from abyssal.kv.pool import NO_PAGE, KVCache, PageTable, SequenceCache
from abyssal.kv.specs import CacheSpec
from abyssal.ops.ngram_hash import NgramHash
from abyssal.ops.rope import rope_table

QUERY_TILE = 64  # queries of one sequence that share a gather of their window; 32 and 128 measured slower on CPU


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + len(token_ids)) of one sequence, to be computed in this step."""

    token_ids: list[int]
    start: int
    cache: SequenceCache
    before: list[int] = field(default_factory=list)  # the ids in front of `start` that n-gram hashes look back to

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """n x b queries: b consecutive tokens of each of n sequences. Decoding: b = 1; prefill: n = 1."""

    rows: slice  # of the step's tokens, n * b of them
    sequences: Tensor  # [n] int64, row in the page tables
    positions: Tensor  # [n, b] int64
    window_slots: Tensor  # [window layers, n, W + b - 1] int32, -1 before the sequence's first token
    window_hidden: Tensor  # [n, b, W + b - 1] bool, True where the query does not see the slot
    visible: dict[int, Tensor]  # ratio -> [n, b] int64, number of compressed entries that the query may see
    max_visible: dict[int, int]  # ratio -> the largest of them

    @property
    def shape(self) -> tuple[int, int]:
        n, b = self.positions.shape
        return n, b


@dataclass(frozen=True, slots=True)
class CompressFacts:
    """Which compressed entries a step completes for one ratio, and from which rows (V4 spec 2.9, V4.1 spec 3.6)."""

    phases: Tensor  # [T] int64, position of every token in its group
    sources: Tensor  # [E, slots] int64 into carried rows, then the step's tokens, then one empty row
    carried: dict[str, Tensor]  # state kind -> [layers, C] int32, slots of rows of earlier steps
    entry_slots: dict[str, Tensor]  # kind -> [layers, E] int32, where each entry is stored
    rope: Tensor  # [E, rope_dim / 2] complex64, at the first token of each group

    @property
    def num_entries(self) -> int:
        return self.sources.shape[0]


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """Which of the step's tokens one per-token kind stores, and where."""

    rows: Tensor  # [n] int64, of the step's tokens
    slots: Tensor  # [layers, n] int64


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. T tokens, S sequences."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    logit_rows: Tensor  # [R] int64, tokens whose logits are wanted
    rope: dict[str, Tensor]  # "main" and "compress" -> [T, rope_dim / 2] complex64
    groups: list[QueryGroup]
    stores: dict[str, StoreFacts]  # window and state kinds
    compress: dict[int, CompressFacts]  # ratio -> facts
    tables: dict[str, Tensor]  # whole-context kinds -> [layers, S, pages] int32, NO_PAGE after the last
    engram_rows: (
        Tensor | None
    )  # [engram layers, T, columns] int64 on the CPU, rows of the n-gram tables; None: the model has none

    def entry_slots(self, spec: CacheSpec, layer: int, group: QueryGroup) -> Tensor:
        """Slots int32 [n, N] of the entries that a group's sequences have, N = the most that any of its queries sees.

        -1 stands beyond the entries of a shorter sequence.
        """
        count, entries = group.max_visible[spec.ratio], spec.entries_per_page
        pages = self.tables[spec.name][spec.row(layer)][group.sequences, : -(-count // entries)]  # [n, pages]
        index = torch.arange(count, dtype=torch.int32, device=pages.device)
        slots = pages.index_select(1, index // entries) * entries + index % entries
        return slots.masked_fill_(index >= group.visible[spec.ratio][:, -1:], -1)


def build_batch(
    config: ModelConfig,
    cache: KVCache,
    chunks: list[Chunk],
    logit_rows: list[int],
    device: torch.device,
    ngrams: NgramHash | None = None,
) -> Batch:
    """Facts for computing `chunks`; every chunk's pages are allocated, chunks of one token come first.

    `ngrams` is the hash of a model with n-gram tables.
    """
    counts = np.array([len(c.token_ids) for c in chunks])
    offsets = np.concatenate([[0], np.cumsum(counts)])
    positions = np.concatenate([np.arange(c.start, c.end) for c in chunks])
    ropes = {"main": config.rope_main, "compress": config.rope_compress}
    positions_t = torch.from_numpy(positions).to(device)
    ratios = sorted({plan.ratio for plan in config.layers if plan.ratio})
    return Batch(
        token_ids=torch.tensor([t for c in chunks for t in c.token_ids], device=device),
        positions=positions_t,
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        rope={name: rope_table(positions_t, rope) for name, rope in ropes.items()},
        groups=_query_groups(cache.specs["window"], ratios, chunks, offsets, device),
        stores={n: _store_facts(s, chunks, offsets, device) for n, s in cache.specs.items() if s.window is not None},
        compress={r: _compress_facts(config, cache, r, chunks, offsets, positions_t) for r in ratios},
        tables={n: _stack_tables(n, s, chunks, device) for n, s in cache.specs.items() if s.window is None},
        engram_rows=None if ngrams is None else _engram_rows(ngrams, chunks),
    )


def _engram_rows(ngrams: NgramHash, chunks: list[Chunk]) -> Tensor:
    for chunk in chunks:
        assert len(chunk.before) == min(chunk.start, ngrams.history), f"{len(chunk.before)} ids before position {chunk.start}"
    return torch.from_numpy(np.concatenate([ngrams.rows(c.before, c.token_ids) for c in chunks], axis=1))


def _slots(spec: CacheSpec, table: PageTable, entries: np.ndarray) -> np.ndarray:
    """Slots int32 [layers, n] of entry indices [n]; -1 for negative indices and where nothing is stored."""
    blocks = entries // spec.entries_per_page - table.first_block
    held = (entries >= 0) & (blocks >= 0) & (blocks < table.pages.shape[1])
    if table.pages.shape[1] == 0:
        return np.full((len(spec.layers), len(entries)), -1, np.int32)
    pages = table.pages[:, np.where(held, blocks, 0)]
    slots = pages * spec.entries_per_page + (entries % spec.entries_per_page).astype(np.int32)
    return np.where(held & (pages != NO_PAGE), slots, -1).astype(np.int32)


def _store_facts(spec: CacheSpec, chunks: list[Chunk], offsets: np.ndarray, device: torch.device) -> StoreFacts:
    rows, slots = [], []
    for chunk, offset in zip(chunks, offsets, strict=False):
        first = max(chunk.start, spec.first_kept(chunk.end)) if spec.tail_only else chunk.start
        positions = np.arange(first, chunk.end)
        rows.append(positions - chunk.start + offset)
        slots.append(_slots(spec, chunk.cache.tables[spec.name], positions))
    return StoreFacts(
        torch.from_numpy(np.concatenate(rows)).to(device),
        torch.from_numpy(np.concatenate(slots, axis=1)).long().to(device),
    )


def _compress_facts(
    config: ModelConfig, cache: KVCache, ratio: int, chunks: list[Chunk], offsets: np.ndarray, positions: Tensor
) -> CompressFacts:
    """Entry w of a ratio pools tokens [m w, m w + m), with overlap also the m before; older ones come from the state kinds."""
    overlap, device = ratio if ratio == 4 else 0, positions.device
    kinds = [n for n in (f"c{ratio}", f"c{ratio}_index") if n in cache.specs]
    entries = [np.arange(c.start // ratio, c.end // ratio) for c in chunks]
    carried = [_carried(c, w, ratio, overlap) for c, w in zip(chunks, entries, strict=True)]
    num_carried = sum(map(len, carried))
    sources, base = [], 0
    for chunk, w, old, offset in zip(chunks, entries, carried, offsets, strict=False):
        tokens = w[:, None] * ratio + np.arange(-overlap, ratio)  # [E, slots]
        from_state = base + tokens - (chunk.start - len(old))
        from_step = num_carried + offset + tokens - chunk.start
        row = np.where(tokens < chunk.start, from_state, from_step)
        sources.append(np.where(tokens < 0, num_carried + offsets[-1], row))
        base += len(old)

    def slots(name: str, where: list[np.ndarray]) -> Tensor:
        parts = [_slots(cache.specs[name], c.cache.tables[name], p) for c, p in zip(chunks, where, strict=True)]
        return torch.from_numpy(np.concatenate(parts, axis=1)).to(device)

    first_tokens = torch.from_numpy(np.concatenate(entries) * ratio).to(device)
    return CompressFacts(
        phases=positions % ratio,
        sources=torch.from_numpy(np.concatenate(sources)).to(device),
        carried={f"{n}_state": slots(f"{n}_state", carried) for n in kinds if f"{n}_state" in cache.specs},
        entry_slots={n: slots(n, entries) for n in kinds},
        rope=rope_table(first_tokens, config.rope_compress),
    )


def _carried(chunk: Chunk, entries: np.ndarray, ratio: int, overlap: int) -> np.ndarray:
    """Positions before the chunk whose rows its entries pool."""
    first = max(0, entries[0] * ratio - overlap) if len(entries) else chunk.start
    return np.arange(first, chunk.start)


def _stack_tables(name: str, spec: CacheSpec, chunks: list[Chunk], device: torch.device) -> Tensor:
    tables = [c.cache.tables[name].pages for c in chunks]
    width = max(t.shape[1] for t in tables)
    stacked = np.full((len(spec.layers), len(chunks), width), NO_PAGE, np.int32)
    for row, table in enumerate(tables):
        stacked[:, row, : table.shape[1]] = table
    return torch.from_numpy(stacked).to(device)


def _query_groups(
    spec: CacheSpec, ratios: list[int], chunks: list[Chunk], offsets: np.ndarray, device: torch.device
) -> list[QueryGroup]:
    decoding = sum(len(c.token_ids) == 1 for c in chunks)
    groups = []
    if decoding:
        starts = [c.start for c in chunks[:decoding]]
        groups.append(_query_group(spec, ratios, chunks, list(range(decoding)), starts, 1, slice(0, decoding), device))
    for row in range(decoding, len(chunks)):
        chunk = chunks[row]
        for start in range(chunk.start, chunk.end, QUERY_TILE):
            size = min(QUERY_TILE, chunk.end - start)
            first = int(offsets[row]) + start - chunk.start
            groups.append(_query_group(spec, ratios, chunks, [row], [start], size, slice(first, first + size), device))
    return groups


def _query_group(
    spec: CacheSpec,
    ratios: list[int],
    chunks: list[Chunk],
    sequences: list[int],
    starts: list[int],
    size: int,
    rows: slice,
    device: torch.device,
) -> QueryGroup:
    assert spec.window is not None
    reach = spec.window - 1
    positions = np.array(starts)[:, None] + np.arange(size)  # [n, b]
    keys = np.array(starts)[:, None] + np.arange(-reach, size)  # [n, W + b - 1]
    slots = [_slots(spec, chunks[s].cache.tables[spec.name], k) for s, k in zip(sequences, keys, strict=True)]
    distance = positions[:, :, None] - keys[:, None, :]
    mask = (distance >= 0) & (distance <= reach) & (keys >= 0)[:, None, :]
    visible = {r: (positions + 1) // r for r in ratios}
    return QueryGroup(
        rows=rows,
        sequences=torch.tensor(sequences, device=device),
        positions=torch.from_numpy(positions).to(device),
        window_slots=torch.from_numpy(np.stack(slots, axis=1)).to(device),
        window_hidden=torch.from_numpy(~mask).to(device),
        visible={r: torch.from_numpy(v).to(device) for r, v in visible.items()},
        max_visible={r: int(v.max()) for r, v in visible.items()},
    )
