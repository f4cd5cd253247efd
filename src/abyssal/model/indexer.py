"""The indexer of a ratio-4 layer: which compressed entries each query attends to (V4 spec 2.10)."""

from __future__ import annotations

import torch
from torch import Tensor

from abyssal.config import ModelConfig
from abyssal.kv.batch import Batch, QueryGroup
from abyssal.kv.pool import KVCache
from abyssal.model.compressor import Compressor
from abyssal.model.weights import Weights
from abyssal.ops.index_query import index_query
from abyssal.ops.index_score import index_score
from abyssal.ops.linear import linear
from abyssal.ops.select_topk import select_topk


class Indexer:
    """Scores compressed entries with small keys of its own and keeps the best `index_topk`."""

    def __init__(self, weights: Weights, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        self.layer = layer
        self.ratio = config.layers[layer].ratio
        self.heads, self.dim, self.topk = config.index_heads, config.index_head_dim, config.index_topk
        self.wq_b = weights.linear("wq_b")
        self.weights_proj = weights.linear("weights_proj")
        self.compressor = Compressor(weights.below("compressor"), config, layer, f"c{self.ratio}_index", dtype)

    def __call__(self, x: Tensor, q_latent: Tensor, batch: Batch, cache: KVCache) -> list[Tensor | None]:
        """x [T, D], q_latent [T, q_lora] -> per query group the chosen entries int32 [n, b, K], or None for all visible."""
        self.compressor(x, batch, cache)
        if all(g.max_visible[self.ratio] <= self.topk for g in batch.groups):
            return [None] * len(batch.groups)
        q, weights = index_query(
            linear(q_latent, self.wq_b).view(-1, self.heads, self.dim),
            linear(x, self.weights_proj),
            batch.rope["compress"],
            rotate_query=True,
            grid=cache.specs[self.compressor.kind].layout.grid,
        )
        return [self._choose(q, weights, group, batch, cache) for group in batch.groups]

    def _choose(self, q: Tensor, weights: Tensor, group: QueryGroup, batch: Batch, cache: KVCache) -> Tensor | None:
        if group.max_visible[self.ratio] <= self.topk:
            return None
        keys = cache.views[self.compressor.kind]
        rows = keys.read(batch.entry_slots(keys.spec, self.layer, group))  # [n, N, Di]
        visible = group.visible[self.ratio]
        shape = group.shape
        scores = index_score(q[group.rows].unflatten(0, shape), weights[group.rows].unflatten(0, shape), rows, visible)
        return select_topk(scores, visible, self.topk)
