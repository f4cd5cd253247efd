"""Hand-over: everything that the caches hold of one sequence as one object, to go on with it in another engine or later.

Of windows it has only what the next token reads, of records only rows that mean something; its payload is as large as the planner says.
While its prompt is still being computed, a sequence can travel in parts instead: whole-context entries never change once they are
complete, so that each part has those completed since the one before, and the last one also what is not kept for the whole context.
A part is read layer by layer, each as soon as the step that computes it is through that layer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from abyssal.errors import HandOverError
from abyssal.kv.pool import KVCache, RecordView, SequenceCache, entry_slots
from abyssal.kv.specs import ROLL_BACK, CacheSpec

VERSION = 1
COPIED_AT_ONCE = 128 << 20  # bytes: a long sequence has gigabytes, and a GPU little memory beside its pools


@dataclass(frozen=True, slots=True)
class HandOver:
    """One sequence on the host."""

    identity: str  # of the model and the number format that made the records
    token_ids: list[int]  # all known ones, also those not yet computed
    num_tokens: int  # computed
    folded: int  # as in `SequenceCache`
    kinds: dict[str, dict[str, Any]]  # cache kind -> what its entries are
    records: dict[str, Tensor]  # cache kind -> uint8 [layers, entries, bytes_per_entry]: data row, then scale row

    @property
    def payload_bytes(self) -> int:
        return sum(records.numel() for records in self.records.values())

    def to_bytes(self) -> bytes:
        """One safetensors file: header, token ids, records, and a digest over these."""
        facts = {"version": VERSION, "num_tokens": self.num_tokens, "folded": self.folded}
        header = json.dumps(facts | {"identity": self.identity, "kinds": self.kinds}).encode()
        parts = {f"records.{name}": records for name, records in self.records.items()}
        parts |= {"header": torch.frombuffer(bytearray(header), dtype=torch.uint8)}
        parts |= {"token_ids": torch.tensor(self.token_ids, dtype=torch.int32)}
        return save(parts | {"digest": _digest(parts)})

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """The inverse of `to_bytes`.

        Raises:
            HandOverError: `raw` is damaged, or of another version.
        """
        try:
            parts = load(raw)
            digest = parts.pop("digest")
        except (SafetensorError, KeyError) as error:
            raise HandOverError(f"{len(raw)} bytes are no hand-over of a sequence: {error}; export it again") from error
        if not torch.equal(digest, _digest(parts)):
            raise HandOverError("the hand-over is damaged: its digest does not match its content; send it again")
        try:
            header = json.loads(parts.pop("header").numpy().tobytes())
            if (version := header["version"]) != VERSION:
                raise HandOverError(f"the hand-over has format {version}, this engine reads {VERSION}; use equal versions")
            token_ids = parts.pop("token_ids")
            facts = header["identity"], token_ids.tolist(), int(header["num_tokens"]), int(header["folded"])
            kinds = dict(header["kinds"])
        except (KeyError, ValueError, TypeError, OverflowError) as error:
            raise HandOverError(f"the hand-over lacks what this engine looks for: {error!r}; use equal versions") from error
        if token_ids.dtype != torch.int32 or token_ids.dim() != 1:
            raise HandOverError(
                f"token ids of the hand-over are {token_ids.dtype} {list(token_ids.shape)} instead of int32 [tokens]"
            )
        if unknown := sorted(parts.keys() - {f"records.{name}" for name in kinds}):
            raise HandOverError(f"the hand-over has tensors {unknown} of no cache kind of its own; use equal versions")
        return cls(*facts, kinds, {n.removeprefix("records."): entries for n, entries in parts.items()})


@dataclass(frozen=True, slots=True)
class Part:
    """What a sequence gained by computing tokens [start, end); all that the next token reads is in the parts up to the `last`."""

    start: int
    end: int
    last: bool

    def entries(self, spec: CacheSpec) -> np.ndarray:
        """Indices of the entries of one kind, in the order in which they travel."""
        if spec.lifetime == "context":
            return np.arange(self.start // spec.ratio, self.end // spec.ratio)
        return stored_entries(spec, self.end) if self.last else np.arange(0)


def export(cache: KVCache, seq: SequenceCache, token_ids: list[int]) -> HandOver:
    """Copy what `cache` holds of `seq`, which has computed tokens, to the host. `seq` stays as it is.

    Args:
        token_ids: of the sequence, at least those computed.
    """
    assert 0 < seq.num_tokens <= len(token_ids), (seq.num_tokens, len(token_ids))
    kinds = {name: describe(spec) for name, spec in cache.specs.items()}
    records = {n: _read(cache, spec, seq, stored_entries(spec, seq.num_tokens)) for n, spec in cache.specs.items()}
    return HandOver(cache.identity, list(token_ids), seq.num_tokens, seq.folded, kinds, records)


def restore(cache: KVCache, seq: SequenceCache, handed: HandOver) -> bool:
    """Let the empty `seq` hold what `handed` has; False, and nothing taken, when pages are short.

    Complete blocks that the prefix index knows are shared instead. The tokens are final: none of them can be rolled back, since
    rows before the window did not come along.

    Raises:
        HandOverError: it is of another model or of other layouts, or contradicts itself. Nothing has been touched then.
    """
    check(cache, handed)
    known = cache.allocate_restored(seq, handed.token_ids, handed.num_tokens)
    if known is None:
        return False
    for name, spec in cache.specs.items():
        first = known // spec.ratio if spec.lifetime == "context" else 0
        _write(cache, spec, seq, stored_entries(spec, handed.num_tokens)[first:], handed.records[name][:, first:].flatten(0, 1))
    complete(cache, seq, handed.token_ids, handed.num_tokens, handed.folded)
    return True


def complete(cache: KVCache, seq: SequenceCache, token_ids: list[int], tokens: int, folded: int) -> None:
    """All entries of the first `tokens` of `token_ids` have arrived in `seq`, which `KVCache.allocate_restored` gave its pages."""
    seq.folded, seq.final, seq.restored = folded, tokens, tokens
    cache.commit(seq, token_ids, tokens)


class PartReader:
    """Copies one part layer by layer. Where its records lie is found at once, and all memory taken, so that a copy waits for nothing.

    Attributes:
        messages: by layer of the model, uint8 [bytes] on the device of the cache; undefined until the layer is read.
    """

    def __init__(self, cache: KVCache, seq: SequenceCache, part: Part, sizes: list[int]) -> None:
        """`seq` has pages for `part.end` tokens and has computed them, or is about to; `sizes` are those of `layer_bytes`."""
        device = cache.views["window"].device
        self._sources: list[list[tuple[RecordView, Tensor, Tensor | None]]] = [[] for _ in sizes]
        for name, spec in cache.specs.items():
            if not len(entries := part.entries(spec)):
                continue
            kept = None
            if spec.lifetime == "record":
                kept = _meaningful(spec, seq.folded_after(part.end), part.end).to(device)[:, None]
            for layer, where in zip(spec.layers, _slots(cache, spec, seq, entries), strict=True):
                self._sources[layer].append((cache.views[name], where, kept))
        self.messages = torch.empty(sum(sizes), dtype=torch.uint8, device=device).split(sizes)

    def read(self, layer: int) -> Tensor:
        """The message of `layer` as the caches are now: kind after kind, entry after entry."""
        parts = [
            view.read_bytes(where) if kept is None else view.read_bytes(where) * kept
            for view, where, kept in self._sources[layer]
        ]
        if parts:
            torch.cat([records.flatten() for records in parts], out=self.messages[layer])
        return self.messages[layer]


def write_part(cache: KVCache, seq: SequenceCache, part: Part, messages: Sequence[Tensor]) -> None:
    """Store what a `PartReader` read, by layer, into pages that `KVCache.allocate_restored` took."""
    left = list(messages)
    for spec in cache.specs.values():
        entries = part.entries(spec)
        pieces = []
        for layer in spec.layers:
            piece, left[layer] = left[layer].tensor_split([len(entries) * spec.layout.bytes_per_entry])
            pieces.append(piece)
        _write(cache, spec, seq, entries, torch.cat(pieces).view(-1, spec.layout.bytes_per_entry))
    assert not any(map(len, left)), f"{sum(map(len, messages))} bytes for a part, {sum(map(len, left))} too many"


def check(cache: KVCache, handed: HandOver) -> None:
    """Raise HandOverError unless `handed` fits the model and the layouts of `cache` and is complete."""
    if handed.identity != cache.identity:
        raise HandOverError(
            "the hand-over comes from another model or dtype than this engine's; both must load the same checkpoint"
        )
    kinds = {name: describe(spec) for name, spec in cache.specs.items()}
    for name in kinds | handed.kinds:
        here, there = kinds.get(name), handed.kinds.get(name)
        if here != there:
            raise HandOverError(
                f"cache kind {name!r} is {there} in the hand-over and {here} here; give both engines equal layouts"
            )
    tokens, folded = handed.num_tokens, handed.folded
    if not 0 < tokens <= len(handed.token_ids) or not max(0, tokens - ROLL_BACK) <= folded <= tokens:
        raise HandOverError(f"the hand-over contradicts itself: {tokens} of {len(handed.token_ids)} tokens, sums up to {folded}")
    for name, spec in cache.specs.items():
        expected = (len(spec.layers), len(stored_entries(spec, tokens)), spec.layout.bytes_per_entry)
        records = handed.records.get(name)
        if records is None or records.dtype != torch.uint8 or tuple(records.shape) != expected:
            found = None if records is None else (records.dtype, tuple(records.shape))
            raise HandOverError(f"cache kind {name!r} of the hand-over has {found}; {tokens} tokens need uint8 {expected}")


def stored_entries(spec: CacheSpec, tokens: int) -> np.ndarray:
    """Indices of the entries that a sequence of `tokens` tokens reads next."""
    if spec.lifetime == "record":
        return np.arange(spec.record_entries)
    first = max(0, tokens - spec.window) if spec.lifetime == "window" else 0
    return np.arange(first, tokens // spec.ratio)


def _read(cache: KVCache, spec: CacheSpec, seq: SequenceCache, entries: np.ndarray) -> Tensor:
    """uint8 [layers, entries, bytes_per_entry] on the host; rows of a record that nobody reads are zero, whatever lies there."""
    slots = _slots(cache, spec, seq, entries)
    rows = torch.empty(slots.numel(), spec.layout.bytes_per_entry, dtype=torch.uint8)
    for piece in _pieces(rows):
        rows[piece] = cache.views[spec.name].read_bytes(slots.flatten()[piece])
    records = rows.unflatten(0, slots.shape)
    if spec.lifetime == "record" and len(entries):
        records[:, ~_meaningful(spec, seq.folded, seq.num_tokens)] = 0
    return records


def _write(cache: KVCache, spec: CacheSpec, seq: SequenceCache, entries: np.ndarray, records: Tensor) -> None:
    """The inverse of `_read`: records uint8 [layers * entries, bytes_per_entry], into pages that `seq` holds."""
    slots = _slots(cache, spec, seq, entries).flatten()
    for piece in _pieces(records):
        cache.views[spec.name].write_bytes(slots[piece], records[piece].to(slots.device))


def _pieces(rows: Tensor) -> Iterator[slice]:
    """Parts of uint8 [n, bytes_per_entry] that are copied at once."""
    count = max(1, COPIED_AT_ONCE // rows.shape[1])
    return (slice(start, start + count) for start in range(0, len(rows), count))


def _slots(cache: KVCache, spec: CacheSpec, seq: SequenceCache, entries: np.ndarray) -> Tensor:
    """int64 [layers, entries] on the device of `cache`; `seq` has pages for all of them."""
    slots = entry_slots(spec, seq.tables[spec.name], entries)
    assert (slots >= 0).all(), f"{spec.name} has no page where records are read or arrive"
    return torch.from_numpy(slots).long().to(cache.views[spec.name].device)


def _meaningful(spec: CacheSpec, folded: int, tokens: int) -> Tensor:
    """bool [entries of the record]: of the ring those not yet in the sums, the sums while they are over anything."""
    if spec.ratio > 1:
        return torch.tensor([folded % spec.ratio > 0])
    used = torch.zeros(spec.record_entries, dtype=torch.bool)
    used[torch.arange(folded, tokens) % spec.record_entries] = True
    return used


def describe(spec: CacheSpec) -> dict[str, Any]:
    """What two engines must agree on; where pages end is each one's own affair."""
    return {
        "layout": spec.layout.name,
        "values": spec.layout.dim,
        "layers": list(spec.layers),
        "tokens_per_entry": spec.ratio,
        "lifetime": spec.lifetime,
        "window": spec.window,
        "record_entries": spec.record_entries,
    }


def _digest(parts: dict[str, Tensor]) -> Tensor:
    """uint8 [32], SHA-256 over names, shapes and content in order of names."""
    digest = hashlib.sha256()
    for name in sorted(parts):
        digest.update(f"{name} {parts[name].dtype} {tuple(parts[name].shape)}\n".encode())
        digest.update(parts[name].flatten().view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
