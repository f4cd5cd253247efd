"""A model that computes nothing: what it stores says of which tokens it is made, and what it reads must say the right ones.

It follows the facts of a step as the real layers do. Every record holds a tag of the tokens up to its own, so that a record of
other tokens, of another layer, of another sequence, or of a page that was returned shows at the first read.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

from abyssal.config import ModelConfig
from abyssal.kv.batch import Batch, Chunk, QueryGroup, build_batch
from abyssal.kv.pool import KVCache, SequenceCache

Step = tuple[SequenceCache, list[int], int]  # sequence, its tokens, where the step ends
NONE = (-1.0, -1.0, -1.0)


def prefix_tags(tokens: list[int]) -> np.ndarray:
    """fp32 [n + 1, 3]: entry k stands for tokens [0, k); integers below 256, exact in every plain layout."""
    tags, crc = [0], 0
    for token in tokens:
        tags.append(crc := zlib.crc32(token.to_bytes(2, "little"), crc))
    return np.array([[tag & 255, tag >> 8 & 255, tag >> 16 & 255] for tag in tags], np.float32)


class TaggingModel:
    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def __call__(self, cache: KVCache, steps: list[Step]) -> None:
        """Compute tokens [num_tokens, end) of every sequence, whose pages are allocated."""
        steps = sorted(steps, key=lambda step: step[2] - step[0].num_tokens > 1)
        chunks = [Chunk(tokens[seq.num_tokens : end], seq.num_tokens, seq) for seq, tokens, end in steps]
        tags = [prefix_tags(tokens[:end]) for _, tokens, end in steps]
        batch = build_batch(self.config, cache, chunks, [], torch.device("cpu"))
        own = np.concatenate([t[chunk.start + 1 :] for chunk, t in zip(chunks, tags, strict=True)])  # [T, 3] of the step's tokens
        for ratio in batch.compress:
            self._compress(cache, batch, ratio, chunks, tags, own)
        for name, store in batch.stores.items():
            for layer, slots in enumerate(store.slots):
                _write(cache, name, layer, slots, own[store.rows.numpy()])
        for group in batch.groups:
            self._attend(cache, batch, group, tags)

    def _compress(
        self, cache: KVCache, batch: Batch, ratio: int, chunks: list[Chunk], tags: list[np.ndarray], own: np.ndarray
    ) -> None:
        """Every entry is pooled from all rows of its group, old ones from the state; then it is stored, and so are the sums."""
        facts = batch.compress[ratio]
        complete = [(c, w) for c, chunk in enumerate(chunks) for w in range(chunk.start // ratio, chunk.end // ratio)]
        assert len(complete) == facts.num_entries
        groups = [(c, w, (w + 1) * ratio) for c, w in complete]
        for c, chunk in enumerate(chunks if facts.sum_slots else []):
            folded = max(chunk.cache.folded, chunk.end - 8)
            if folded > chunk.cache.folded and folded % ratio:
                groups.append((c, folded // ratio, folded))
        assert len(groups) == facts.num_groups
        for kind in facts.entry_slots:
            for layer, slots in enumerate(facts.entry_slots[kind]):
                made = np.array([tags[c][(w + 1) * ratio] for c, w in complete])
                if f"{kind}_state" not in facts.carried:  # of ratio 1, or made from the entries of another kind
                    _write(cache, kind, layer, slots, made)
                    continue
                carried = _read(cache, f"{kind}_state", layer, facts.carried[f"{kind}_state"][layer])
                rows = np.concatenate([carried, own, [NONE]])[facts.sources.numpy()]  # [G, slots, 3]
                sums = facts.carried_sums[f"{kind}_sums"][layer] if facts.carried_sums else None
                for g, (c, w, end) in enumerate(groups):
                    first = w * ratio - (ratio if ratio == 4 else 0)
                    if sums is not None and sums[g] >= 0:
                        first = chunks[c].cache.folded
                        assert w * ratio < first < end
                        assert np.array_equal(_read(cache, f"{kind}_sums", layer, sums[g : g + 1])[0], tags[c][first])
                    expected = [tags[c][p + 1] if p >= 0 else NONE for p in range(first, end)]
                    assert np.array_equal(rows[g, : end - first], expected), (kind, layer, w)
                    assert (rows[g, end - first :] == -1).all(), (kind, layer, w)
                _write(cache, kind, layer, slots, made)
                if sums is not None:
                    made = np.array([tags[c][end] for c, _, end in groups[len(complete) :]])
                    _write(cache, f"{kind}_sums", layer, facts.sum_slots[f"{kind}_sums"][layer], made)

    def _attend(self, cache: KVCache, batch: Batch, group: QueryGroup, tags: list[np.ndarray]) -> None:
        """Every query reads its window and the compressed entries that it sees."""
        seen = (~group.window_hidden).any(1).numpy()  # [n, W + b - 1]
        keys = group.positions[:, :1].numpy() + np.arange(seen.shape[1]) - (self.config.sliding_window - 1)
        for layer, slots in enumerate(group.window_slots):
            for i, sequence in enumerate(range(group.sequences.start, group.sequences.stop)):
                read = _read(cache, "window", layer, slots[i][seen[i]])
                assert np.array_equal(read, tags[sequence][keys[i][seen[i]] + 1]), ("window", layer)
        for name, spec in cache.specs.items():
            if spec.lifetime != "context" or group.max_visible[spec.ratio] == 0:
                continue
            for row, layer in enumerate(spec.layers):
                slots = batch.entry_slots(spec, layer, group)
                for i, sequence in enumerate(range(group.sequences.start, group.sequences.stop)):
                    count = int(group.visible[spec.ratio][i].max())
                    expected = tags[sequence][spec.ratio :: spec.ratio][:count]
                    assert np.array_equal(_read(cache, name, row, slots[i, :count]), expected), (name, layer)


def _write(cache: KVCache, name: str, layer: int, slots: Tensor, tags: np.ndarray) -> None:
    if len(slots):
        values = torch.zeros(len(slots), cache.specs[name].layout.dim)
        values[:, 0] = layer + 1
        values[:, 1:4] = torch.from_numpy(tags)
        cache.views[name].write(slots, values)


def _read(cache: KVCache, name: str, layer: int, slots: Tensor) -> np.ndarray:
    """Tags fp32 [n, 3] of records that must have been stored for this layer."""
    values = cache.views[name].read(slots).numpy()
    assert (slots >= 0).all() and (values[:, 0] == layer + 1).all(), (
        f"{name} of layer row {layer} was not stored where it is read"
    )
    return values[:, 1:4]
