"""The indexer: which compressed entries each query attends to (V4 spec 2.10, V4.1 spec 3.6)."""

from __future__ import annotations

import torch
from torch import Tensor

from abyssal.config import ModelConfig
from abyssal.kv.batch import Batch
from abyssal.kv.pool import KVCache
from abyssal.model.compressor import Compressor
from abyssal.model.weights import Weights
from abyssal.ops._select import Ops, Selection
from abyssal.ops.linear import linear
from abyssal.ops.norm import rms_norm


class Indexer:
    """Scores compressed entries with small keys and keeps the best `index_topk`."""

    def __init__(self, weights: Weights, config: ModelConfig, layer: int, dtype: torch.dtype, ops: Ops) -> None:
        plan = config.layers[layer]
        self.plan, self.config, self.ops = plan, config, ops
        self.kind = f"c{plan.ratio}_index"
        self.wq_b = weights.linear("wq_b")
        self.weights_proj = weights.linear("weights_proj")
        self.compressor = self.wk = self.k_norm = None
        if plan.index_keys == "pooled":
            self.compressor = Compressor(weights.below("compressor"), config, layer, self.kind, dtype, ops)
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
        self.ops.choose(self.plan, self.config, lambda: self._query(x, q_latent, batch, cache), batch, cache, selection)

    def _query(self, x: Tensor, q_latent: Tensor, batch: Batch, cache: KVCache) -> tuple[Tensor, Tensor]:
        return self.ops.index_query(
            linear(q_latent, self.wq_b).view(-1, self.config.index_heads, self.config.index_head_dim),
            linear(x, self.weights_proj),
            batch.rope["compress"],
            rotate_query=self.config.hadamard,
            grid=cache.specs[self.kind].layout.grid,
        )

    def _store_keys(self, x: Tensor, latent: Tensor | None, batch: Batch, cache: KVCache) -> None:
        if self.compressor is not None:
            self.compressor(x, batch, cache)
        elif self.wk is not None:
            assert latent is not None, "keys are made from the latent of the layer's own compressor"
            keys = rms_norm(linear(latent, self.wk), self.k_norm, self.config.rms_eps)
            view = cache.views[self.kind]
            self.ops.store_latent_keys(keys, batch.compress[self.plan.ratio], view, view.spec.row(self.plan.layer))
