"""`Batch`: the facts of one engine step, built once and read by every layer.

Tokens of all scheduled sequences lie one after another; sequences that compute a single token come first, so that their
queries form one rectangular group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from abyssal.config import ModelConfig
from abyssal.kv.pool import NO_PAGE, KVCache, SequenceCache, entry_slots, range_slots, ranges
from abyssal.kv.specs import ROLL_BACK, CacheSpec
from abyssal.ops.ngram_hash import NgramHash
from abyssal.ops.rope import rope_table

UNKNOWN = -1  # stands for a token that only the device knows
SCORE_BYTES = 256 << 20  # of index scores computed at once
QUERY_TILE = 64  # queries of one sequence that share a gather of their window; 32 and 128 measured slower on CPU


class Chunk(NamedTuple):
    """Tokens [start, start + len(token_ids)) of one sequence, to be computed in this step."""

    token_ids: list[int]  # UNKNOWN for one of `Drawn`
    start: int
    cache: SequenceCache
    before: Sequence[int] = ()  # the ids in front of `start` that n-gram hashes look back to

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens of a step that the device has drawn in the one before, and the host does not know yet."""

    tokens: Tensor  # int64 [n] on the device
    rows: Tensor | None  # int64 [n] on the device, of the step's tokens; None: the first n

    def put(self, token_ids: Tensor) -> None:
        """Write them into `token_ids` [T], of all tokens of the step."""
        if self.rows is None:
            token_ids[: len(self.tokens)] = self.tokens
        else:
            token_ids.index_copy_(0, self.rows, self.tokens)


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """n x b queries: b consecutive tokens of each of n sequences. Decoding: b = 1; prefill: n = 1."""

    rows: slice  # of the step's tokens, n * b of them
    sequences: slice  # of the step's sequences
    positions: Tensor  # [n, b] int64
    window_slots: Tensor  # [window layers, n, W + b - 1] int32, -1 before the sequence's first token
    window_hidden: Tensor  # [n, b, W + b - 1] bool, True where the query does not see the slot
    visible: dict[int, Tensor]  # ratio -> [n, b] int64, number of compressed entries that the query may see
    max_visible: dict[int, int]  # ratio -> the largest of them
    sees_all: bool  # whether every query sees all window slots, and `max_visible` entries

    @property
    def shape(self) -> tuple[int, int]:
        n, b = self.positions.shape
        return n, b


@dataclass(frozen=True, slots=True)
class Span:
    """n x b queries whose index scores are computed at once: b consecutive tokens of each of n sequences."""

    rows: slice  # of the step's tokens, n * b of them
    sequences: slice  # of the step's sequences
    max_visible: dict[int, int]  # ratio -> the most compressed entries that one of the queries sees

    @property
    def shape(self) -> tuple[int, int]:
        n = self.sequences.stop - self.sequences.start
        return n, (self.rows.stop - self.rows.start) // n


@dataclass(frozen=True, slots=True)
class QueryLists:
    """What each query of a step reads, as lists of slots: the kernels take all tokens of a step in one launch."""

    sequences: Tensor | None  # [T] int64, row in the page tables; None: token t is of sequence t
    window_slots: Tensor  # [layers, T, W] int32, the oldest first; what lies beyond a query's length is some other slot
    window_lengths: Tensor  # [T] int32
    visible: dict[int, Tensor]  # ratio -> [T] int32, number of compressed entries that the query may see
    max_visible: dict[int, int]  # ratio -> the largest of them
    entry_slots: dict[str, Tensor]  # kinds of which queries see all entries -> [layers, S, N] int32, of those that it sees
    spans: list[Span]

    def all_entries(self, kind: str, row: int) -> Tensor:
        """Slots int32 [T, N] of all entries of a kind's layer `row`; entry e of a query is visible if e < its `visible`."""
        slots = self.entry_slots[kind][row]
        if self.sequences is None:
            return slots
        return slots.expand(len(self.sequences), -1) if len(slots) == 1 else slots.index_select(0, self.sequences)


@dataclass(frozen=True, slots=True)
class CompressFacts:
    """Which groups of tokens a step pools for one ratio, and from which rows (V4 spec 2.9, V4.1 spec 3.6).

    G groups: first the E whose entries the step completes; then, of a ratio with running sums, those left open by sequences
    whose sums take up more rows.
    """

    phases: Tensor  # [T] int64, position of every token in its group
    sources: Tensor  # [G, slots] int64 into carried rows, then the step's tokens, then one empty row
    carried: dict[str, Tensor]  # state kind -> [layers, C] int32, slots of rows of earlier steps
    carried_sums: dict[str, Tensor]  # sums kind -> [layers, G] int32, sums over a group's earlier rows; -1: there are none
    sum_slots: dict[str, Tensor]  # sums kind -> [layers, G - E] int64, where the sums of open groups are stored
    entry_slots: dict[str, Tensor]  # kind -> [layers, E] int32, where each entry is stored
    rope: Tensor  # [E, rope_dim / 2] complex64, at the first token of each group
    # Group b is that of token b, complete or with entry slot -1. Its other rows are the carried ones of the same index, slot -1 for none,
    # and the token's row is stored as row b. With sums, group B + b is what sequence b adds to its sums, at most its first source.
    token_each: bool = False

    @property
    def num_groups(self) -> int:
        return self.sources.shape[0]

    @property
    def num_entries(self) -> int:
        return self.rope.shape[0]


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """Which of the step's tokens one per-token kind stores, and where."""

    rows: Tensor  # [n] int64, of the step's tokens, ascending
    slots: Tensor  # [layers, n] int64

    def of(self, values: Tensor) -> Tensor:
        """values [T, D] of all tokens -> [n, D], those that are stored."""
        return values if self.rows.shape[0] == values.shape[0] else values.index_select(0, self.rows)


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """What a layer needs to know of a step's tokens as long as it reads nothing of what their sequences hold."""

    token_ids: Tensor  # [T] int64
    rope: dict[str, Tensor]  # as of the batch
    window: StoreFacts


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. T tokens, S sequences."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    logit_rows: Tensor  # [R] int64, tokens whose logits are wanted, ascending
    rope: dict[str, Tensor]  # "main" and "compress" -> [T, rope_dim / 2] complex64
    groups: list[QueryGroup]  # the reference's view of the queries; empty where `lists` is given
    lists: QueryLists | None  # the kernels' view
    stores: dict[str, StoreFacts]  # kinds that store rows of single tokens: windows, states
    compress: dict[int, CompressFacts]  # ratio -> facts
    tables: dict[str, Tensor]  # for `lists`: whole-context kinds -> [layers, S, pages] int32, NO_PAGE after the last
    entries: dict[str, Tensor]  # for `groups`: whole-context kinds -> [layers, S, entries] int32 slots, -1 after the last
    # Rows of the n-gram tables, [engram layers, T, columns] int64 on the device of the hash; None: there are none
    engram_rows: Tensor | None

    @property
    def of_tokens(self) -> TokenFacts:
        return TokenFacts(self.token_ids, self.rope, self.stores["window"])

    def entry_slots(self, spec: CacheSpec, layer: int, group: QueryGroup) -> Tensor:
        """Slots int32 [n, N] of the entries that a group's sequences have, N = the most that any of its queries sees.

        -1 stands beyond the entries of a shorter sequence.
        """
        return self.entries[spec.name][spec.row(layer), group.sequences, : group.max_visible[spec.ratio]]


def build_batch(
    config: ModelConfig,
    cache: KVCache,
    chunks: list[Chunk],
    logit_rows: list[int],
    device: torch.device,
    ngrams: NgramHash | None = None,
    drawn: Drawn | None = None,
    *,
    as_lists: bool = False,
) -> Batch:
    """Facts for computing `chunks`; every chunk's pages are allocated, chunks of one token come first.

    Args:
        ngrams: the hash of a model with n-gram tables; with `drawn` on `device`.
        drawn: tokens that are missing in `chunks`.
        as_lists: whether queries are described by `lists`, as kernels take them, or by `groups`, as the reference does.
    """
    offsets = np.array([0, *accumulate(len(c.token_ids) for c in chunks)])
    positions = _joined([np.arange(c.start, c.end) for c in chunks])
    ratios = sorted({plan.ratio for plan in config.layers if plan.ratio})
    completed = {r: [np.arange(c.start // r, c.end // r) for c in chunks] for r in ratios}  # entries, by chunk
    turned = [positions, *(_joined(entries) * r for r, entries in completed.items())]  # positions whose rotations layers need
    rope, *of_entries = rope_table(_tensor(_joined(turned), device), config.rope_compress).split_with_sizes([*map(len, turned)])
    positions_t = _tensor(positions, device)
    token_ids = _tensor(_joined([np.array(c.token_ids, np.int64) for c in chunks]), device)
    if drawn is not None:
        drawn.put(token_ids)
    whole = {n: s for n, s in cache.specs.items() if s.lifetime == "context"}
    tables = {n: _stack_tables(n, s, chunks, device) for n, s in whole.items()} if as_lists else {}
    return Batch(
        token_ids=token_ids,
        positions=positions_t,
        logit_rows=_tensor(np.array(logit_rows, np.int64), device),
        rope={"main": rope_table(positions_t, config.rope_main), "compress": rope},
        groups=[] if as_lists else _query_groups(cache.specs["window"], ratios, chunks, offsets, device),
        lists=_query_lists(config, cache, ratios, chunks, offsets, tables, device) if as_lists else None,
        stores={n: _store_facts(s, chunks, offsets, device) for n, s in cache.specs.items() if stores_tokens(s)},
        compress={
            r: _compress_facts(cache, r, chunks, offsets, positions, completed[r], rope, device)
            for r, rope in zip(ratios, of_entries, strict=True)
        },
        tables=tables,
        entries={} if as_lists else {n: _entries(s, chunks, device) for n, s in whole.items()},
        engram_rows=None if ngrams is None else engram_rows(ngrams, chunks, drawn),
    )


def staged(array: np.ndarray, device: torch.device) -> Tensor:
    """`array` in memory from which a copy to `device` waits for nothing that is queued there."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory()


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    """Contiguous, which an array picked out of another need not be: kernels step over rows by their length."""
    return staged(np.ascontiguousarray(array), device).to(device, non_blocking=True)


def _joined(parts: list[np.ndarray], axis: int = 0) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)


def engram_rows(ngrams: NgramHash, chunks: list[Chunk], drawn: Drawn | None = None) -> Tensor:
    """As `Batch.engram_rows`; no token of the step comes behind one that is `drawn`."""
    recent = _tensor(torch.cat([_recent(chunk, ngrams.history) for chunk in chunks]).numpy(), ngrams.device)
    if drawn is not None:
        drawn.put(recent[:, 0])
    return ngrams.rows(recent)


def _recent(chunk: Chunk, history: int) -> Tensor:
    """[T, history + 1], as `NgramHash.rows` takes them."""
    assert len(chunk.before) == min(chunk.start, history), f"{len(chunk.before)} ids before position {chunk.start}"
    missing = [-1] * (history - len(chunk.before))
    return torch.tensor([*missing, *chunk.before, *chunk.token_ids]).unfold(0, history + 1, 1).flip(1)


def stores_tokens(spec: CacheSpec) -> bool:
    return spec.lifetime != "context" and spec.ratio == 1


def _store_facts(spec: CacheSpec, chunks: list[Chunk], offsets: np.ndarray, device: torch.device) -> StoreFacts:
    """Rows and slots of the tokens for which `spec` has pages; for a tail-only kind these are few of a long chunk."""
    starts = np.array([c.start for c in chunks])
    ends = starts + np.diff(offsets)
    firsts = np.maximum(starts, [spec.first_kept(c.end) for c in chunks]) if spec.lifetime == "record" else starts
    slots = _slots(spec, chunks, firsts, ends)
    (stored,) = (slots[0] >= 0).nonzero()
    rows = ranges(offsets[:-1] + firsts - starts, offsets[1:])[stored]
    return StoreFacts(_tensor(rows, device), _tensor(slots.take(stored, axis=1).astype(np.int64), device))


def _slots(spec: CacheSpec, chunks: list[Chunk], starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """As `range_slots` of the sequences of `chunks`."""
    return range_slots(spec, [c.cache.tables[spec.name] for c in chunks], starts, ends)


@dataclass(frozen=True, slots=True)
class _Groups:
    """Groups of tokens that a step pools, of all its sequences; completed ones first."""

    chunk: np.ndarray  # [G]
    tokens: np.ndarray  # [G, slots] positions, -1 for none
    has_sums: np.ndarray  # [G] bool, whether rows of the group before these are in the sequence's sums


def _compress_facts(
    cache: KVCache,
    ratio: int,
    chunks: list[Chunk],
    offsets: np.ndarray,
    positions: np.ndarray,
    entries: list[np.ndarray],
    rope: Tensor,
    device: torch.device,
) -> CompressFacts:
    """Which rows make up the entries and sums of a step: the step's own, older ones from the state kinds.

    `entries`: those that each chunk completes; `rope`: of their first tokens.
    """
    kinds = [n for n in (f"c{ratio}", f"c{ratio}_index") if n in cache.specs]
    with_state = [n for n in kinds if f"{n}_state" in cache.specs]
    with_sums = [f"{n}_sums" for n in kinds if f"{n}_sums" in cache.specs]
    groups = _summed_groups(chunks, ratio) if with_sums else _whole_groups(entries, ratio)
    num_entries = rope.shape[0]
    sources, first_carried = _sources(groups, chunks, offsets)
    starts = np.array([c.start for c in chunks])
    ends, nothing = starts + np.diff(offsets), np.zeros_like(starts)

    def slots(name: str, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        return _slots(cache.specs[name], chunks, starts, ends)

    sums = {n: slots(n, nothing, nothing + 1)[:, groups.chunk] for n in with_sums}  # [layers, G]
    return CompressFacts(
        phases=_tensor(positions % ratio, device),
        sources=_tensor(sources, device),
        carried={f"{n}_state": _tensor(slots(f"{n}_state", first_carried, starts), device) for n in with_state},
        carried_sums={n: _tensor(np.where(groups.has_sums, s, -1), device) for n, s in sums.items()},
        sum_slots={n: _tensor(s[:, num_entries:].astype(np.int64), device) for n, s in sums.items()},
        entry_slots={n: _tensor(slots(n, starts // ratio, ends // ratio), device) for n in kinds},
        rope=rope,
    )


def _sources(groups: _Groups, chunks: list[Chunk], offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`CompressFacts.sources`, and by chunk the first position whose row of an earlier step comes before those of the step."""
    starts = np.array([c.start for c in chunks])
    start, used = starts[groups.chunk, None], groups.tokens >= 0
    first = starts.copy()  # position of the first row of an earlier step, by chunk
    if len(groups.chunk):
        np.minimum.at(first, groups.chunk, np.where(used, groups.tokens, start).min(axis=1))
    ends = np.cumsum(starts - first)
    from_state = (ends - starts)[groups.chunk, None] + groups.tokens
    from_step = ends[-1] + (offsets[:-1] - starts)[groups.chunk, None] + groups.tokens
    sources = np.where(used, np.where(groups.tokens < start, from_state, from_step), ends[-1] + offsets[-1])
    return sources, first


def _whole_groups(entries: list[np.ndarray], ratio: int) -> _Groups:
    """Entry w of a ratio pools tokens [m w, m w + m), with overlap also the m before; `entries` by chunk."""
    overlap = ratio if ratio == 4 else 0
    owners = np.repeat(np.arange(len(entries)), [len(w) for w in entries])
    tokens = _joined(entries)[:, None] * ratio + np.arange(-overlap, ratio)
    return _Groups(owners, tokens, np.zeros(len(owners), bool))


def _summed_groups(chunks: list[Chunk], ratio: int) -> _Groups:
    """Entry w pools tokens [m w, m w + m); the sums then take up the rows of the last group that are beyond roll-back.

    Rows before a sequence's `folded` are pooled already, in its sums.
    """
    groups: list[tuple[int, int, int, int]] = []  # chunk, group, first token, end
    for i, chunk in enumerate(chunks):
        folded = chunk.cache.folded
        assert chunk.start - ROLL_BACK <= folded <= chunk.start, (
            f"rows up to {folded} are summed, the step starts at {chunk.start}"
        )
        for w in range(chunk.start // ratio, chunk.end // ratio):
            groups.append((i, w, max(folded, w * ratio), (w + 1) * ratio))
    for i, chunk in enumerate(chunks):
        end = chunk.cache.folded_after(chunk.end)
        w = end // ratio
        if end > (first := max(chunk.cache.folded, w * ratio)):
            groups.append((i, w, first, end))
    owners, index, first_tokens, ends = np.array(groups, np.int64).reshape(-1, 4).T
    tokens = first_tokens[:, None] + np.arange(max(ends - first_tokens, default=0))
    return _Groups(owners, np.where(tokens < ends[:, None], tokens, -1), first_tokens > index * ratio)


def _stack_tables(name: str, spec: CacheSpec, chunks: list[Chunk], device: torch.device) -> Tensor:
    tables = [c.cache.tables[name].pages for c in chunks]
    width = max(t.shape[1] for t in tables)
    stacked = np.full((len(spec.layers), len(chunks), width), NO_PAGE, np.int32)
    for row, table in enumerate(tables):
        stacked[:, row, : table.shape[1]] = table
    return _tensor(stacked, device)


def _entries(spec: CacheSpec, chunks: list[Chunk], device: torch.device) -> Tensor:
    counts = [chunk.end // spec.ratio for chunk in chunks]
    slots = np.full((len(spec.layers), len(chunks), max(counts)), -1, np.int32)
    for row, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
        slots[:, row, :count] = entry_slots(spec, chunk.cache.tables[spec.name], np.arange(count))
    return _tensor(slots, device)


def _query_groups(
    spec: CacheSpec, ratios: list[int], chunks: list[Chunk], offsets: np.ndarray, device: torch.device
) -> list[QueryGroup]:
    decoding = sum(len(c.token_ids) == 1 for c in chunks)
    groups = []
    if decoding:
        starts = [c.start for c in chunks[:decoding]]
        groups.append(_query_group(spec, ratios, chunks, slice(0, decoding), starts, 1, slice(0, decoding), device))
    for row in range(decoding, len(chunks)):
        chunk = chunks[row]
        for start in range(chunk.start, chunk.end, QUERY_TILE):
            size = min(QUERY_TILE, chunk.end - start)
            first = int(offsets[row]) + start - chunk.start
            groups.append(
                _query_group(spec, ratios, chunks, slice(row, row + 1), [start], size, slice(first, first + size), device)
            )
    return groups


def _query_group(
    spec: CacheSpec,
    ratios: list[int],
    chunks: list[Chunk],
    sequences: slice,
    starts: list[int],
    size: int,
    rows: slice,
    device: torch.device,
) -> QueryGroup:
    reach = spec.window - 1
    positions = np.array(starts)[:, None] + np.arange(size)  # [n, b]
    keys = np.array(starts)[:, None] + np.arange(-reach, size)  # [n, W + b - 1]
    slots = [entry_slots(spec, c.cache.tables[spec.name], k) for c, k in zip(chunks[sequences], keys, strict=True)]
    distance = positions[:, :, None] - keys[:, None, :]
    mask = (distance >= 0) & (distance <= reach) & (keys >= 0)[:, None, :]
    visible = {r: (positions + 1) // r for r in ratios}
    most = {r: int(v.max()) for r, v in visible.items()}
    return QueryGroup(
        rows=rows,
        sequences=sequences,
        positions=_tensor(positions, device),
        window_slots=_tensor(np.stack(slots, axis=1), device),
        window_hidden=_tensor(~mask, device),
        visible={r: _tensor(v, device) for r, v in visible.items()},
        max_visible=most,
        sees_all=bool(mask.all()) and all(int(v.min()) == most[r] for r, v in visible.items()),
    )


def _query_lists(
    config: ModelConfig,
    cache: KVCache,
    ratios: list[int],
    chunks: list[Chunk],
    offsets: np.ndarray,
    tables: dict[str, Tensor],
    device: torch.device,
) -> QueryLists:
    counts, starts = np.diff(offsets), np.array([c.start for c in chunks])
    window = cache.specs["window"]
    firsts = np.maximum(starts - (window.window - 1), 0)  # oldest token that a chunk's queries see
    ends = np.cumsum(starts + counts - firsts)
    slots = _slots(window, chunks, firsts, starts + counts)
    positions = ranges(starts, starts + counts)
    oldest = np.maximum(positions - (window.window - 1), 0)
    place = oldest + np.repeat(ends - starts - counts, counts)  # of the oldest key of a query in `slots`
    index = _tensor(place, device)[:, None] + torch.arange(window.window, device=device)
    visible = {r: (positions + 1) // r for r in ratios}
    most = {r: int(v.max()) for r, v in visible.items()}
    wholly = {f"c{p.ratio}" for p in config.layers if p.selection == "all" or (p.ratio and most[p.ratio] <= config.index_topk)}
    whole = {name: page_slots(tables[name], cache.specs[name], most[cache.specs[name].ratio]) for name in wholly}
    one_each = len(positions) == len(chunks)
    return QueryLists(
        sequences=None if one_each else _tensor(np.repeat(np.arange(len(chunks)), counts), device),
        window_slots=_tensor(slots, device)[:, index.clamp_(max=slots.shape[1] - 1)],
        window_lengths=_tensor((positions - oldest + 1).astype(np.int32), device),
        visible={r: _tensor(v.astype(np.int32), device) for r, v in visible.items()},
        max_visible=most,
        entry_slots=whole,
        spans=_spans(chunks, offsets, visible),
    )


def page_slots(pages: Tensor, spec: CacheSpec, count: int) -> Tensor:
    """pages int32 [..., P] -> slots int32 [..., count] of the first `count` entries; beyond a sequence's last page in the zero page."""
    entry = torch.arange(count, dtype=torch.int32, device=pages.device)
    return pages.index_select(-1, entry // spec.entries_per_page) * spec.entries_per_page + entry % spec.entries_per_page


def _spans(chunks: list[Chunk], offsets: np.ndarray, visible: dict[int, np.ndarray]) -> list[Span]:
    """Chunks of one token together; longer ones each alone, cut where their scores would take more than SCORE_BYTES."""
    decoding = sum(len(c.token_ids) == 1 for c in chunks)
    cuts = [(slice(0, decoding), slice(0, decoding))] if decoding else []
    for row in range(decoding, len(chunks)):
        start, end = int(offsets[row]), int(offsets[row + 1])
        most = max((int(v[end - 1]) for v in visible.values()), default=0)
        size = max(QUERY_TILE, SCORE_BYTES // (4 * max(most, 1)))
        cuts += [(slice(first, min(first + size, end)), slice(row, row + 1)) for first in range(start, end, size)]
    return [Span(rows, seqs, {r: int(v[rows].max()) for r, v in visible.items()}) for rows, seqs in cuts]
