"""The indexer: which compressed entries each query attends to (V4 spec 2.10, V4.1 spec 3.6)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from abyssal.config import ModelConfig
from abyssal.kv.batch import Batch, QueryGroup
from abyssal.kv.pool import KVCache
from abyssal.model.compressor import Compressor
from abyssal.model.weights import Weights
from abyssal.ops.compress import store_entries
from abyssal.ops.index_query import index_query
from abyssal.ops.index_score import index_score
from abyssal.ops.linear import linear
from abyssal.ops.norm import rms_norm
from abyssal.ops.select_topk import candidate_mask, select_topk


@dataclass(slots=True)
class Selection:
    """What index sources leave for the layers after them within one step, per query group."""

    entries: list[Tensor | None]  # of the latest index source: chosen entries int32 [n, b, K], -1 unused; None: all visible ones
    candidates: list[Tensor | None]  # bool [n, b, N], the entries that later indexers may choose from; None: all visible ones


class Indexer:
    """Scores compressed entries with small keys and keeps the best `index_topk`."""

    def __init__(self, weights: Weights, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        plan = config.layers[layer]
        self.plan, self.config = plan, config
        self.kind = f"c{plan.ratio}_index"
        self.wq_b = weights.linear("wq_b")
        self.weights_proj = weights.linear("weights_proj")
        self.compressor = self.wk = self.k_norm = None
        if plan.index_keys == "pooled":
            self.compressor = Compressor(weights.below("compressor"), config, layer, self.kind, dtype)
        elif plan.index_keys == "latent":
            self.wk, self.k_norm = weights.linear("wk"), weights.tensor("k_norm.weight")

    def __call__(
        self, x: Tensor, q_latent: Tensor, latent: Tensor | None, batch: Batch, cache: KVCache, selection: Selection
    ) -> None:
        """Store this layer's keys, then replace what `selection` holds by this layer's choice.

        Args:
            x: [T, D], the attention's input.
            q_latent: [T, q_lora].
            latent: [E, d], entries that the layer's compressor completed, before RoPE; None: it has none.
        """
        self._store_keys(x, latent, batch, cache)
        if self.plan.candidates != "use":
            selection.candidates = [None] * len(batch.groups)
        selection.entries = [None] * len(batch.groups)
        scored = [i for i, group in enumerate(batch.groups) if self._decides(group, selection.candidates[i])]
        if not scored:
            return
        q, weights = index_query(
            linear(q_latent, self.wq_b).view(-1, self.config.index_heads, self.config.index_head_dim),
            linear(x, self.weights_proj),
            batch.rope["compress"],
            rotate_query=self.config.hadamard,
            grid=cache.specs[self.kind].layout.grid,
        )
        for i in scored:
            self._choose(i, q, weights, batch, cache, selection)

    def _store_keys(self, x: Tensor, latent: Tensor | None, batch: Batch, cache: KVCache) -> None:
        if self.compressor is not None:
            self.compressor(x, batch, cache)
        elif self.wk is not None:
            assert latent is not None, "keys are made from the latent of the layer's own compressor"
            keys = rms_norm(linear(latent, self.wk), self.k_norm, self.config.rms_eps)
            view = cache.views[self.kind]
            store_entries(keys, batch.compress[self.plan.ratio], view, view.spec.row(self.plan.layer), rotate_keys=False)

    def _decides(self, group: QueryGroup, candidates: Tensor | None) -> bool:
        """Whether some query of the group cannot simply take, or publish, all entries that it sees."""
        count = group.max_visible[self.plan.ratio]
        return count > self.config.index_topk or candidates is not None or self._publishes(count)

    def _publishes(self, count: int) -> bool:
        """Whether `count` visible entries are more than this layer's candidate blocks can hold."""
        if self.plan.candidates != "publish":
            return False
        assert self.config.candidate_topk_blocks is not None and self.config.candidate_block_size is not None
        return count > self.config.candidate_topk_blocks * self.config.candidate_block_size

    def _choose(self, i: int, q: Tensor, weights: Tensor, batch: Batch, cache: KVCache, selection: Selection) -> None:
        group, config = batch.groups[i], self.config
        assert self.plan.kv_source is not None
        keys = cache.views[self.kind]
        rows = keys.read(batch.entry_slots(keys.spec, self.plan.kv_source, group))  # [n, N, Di]
        visible, shape = group.visible[self.plan.ratio], group.shape
        scores = index_score(q[group.rows].unflatten(0, shape), weights[group.rows].unflatten(0, shape), rows, visible)
        selection.entries[i] = select_topk(scores, visible, config.index_topk, selection.candidates[i])
        if self._publishes(rows.shape[1]):
            assert config.candidate_topk_blocks is not None and config.candidate_block_size is not None
            selection.candidates[i] = candidate_mask(scores, visible, config.candidate_topk_blocks, config.candidate_block_size)
