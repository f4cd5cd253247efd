"""The indexer: which compressed entries each query attends to (V4 spec 2.10, V4.1 spec 3.6)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from abyssal.config import ModelConfig
from abyssal.kv.batch import Batch
from abyssal.kv.pool import KVCache
from abyssal.model.compressor import Compressor
from abyssal.model.weights import Weights
from abyssal.ops._select import Ops, Selection
from abyssal.ops.linear import LinearWeight


class Indexer:
    """Scores compressed entries with small keys and keeps the best `index_topk`."""

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        layer: int,
        dtype: torch.dtype,
        ops: Ops,
        of_x: list[LinearWeight | Tensor],
    ) -> None:
        """`of_x` takes up the projections of the attention's input."""
        plan = config.layers[layer]
        self.plan, self.config, self.ops = plan, config, ops
        self.kind = f"c{plan.ratio}_index"
        self.wq_b = ops.prepare_linear(weights.linear("wq_b"))
        of_x.append(weights.linear("weights_proj"))
        self.compressor = self.wk = self.k_norm = None
        if plan.index_keys == "pooled":
            self.compressor = Compressor(weights.below("compressor"), config, layer, self.kind, dtype, ops, of_x)
        elif plan.index_keys == "latent":
            self.wk, self.k_norm = ops.prepare_linear(weights.linear("wk")), weights.tensor("k_norm.weight")

    def __call__(
        self, of_x: list[Tensor], q_latent: Any, latent: Tensor | None, batch: Batch, cache: KVCache, selection: Selection
    ) -> None:
        """Store this layer's keys, then replace what `selection` holds by this layer's choice.

        Args:
            of_x: head weights [T, Hi] and, where keys are pooled, the compressor's rows.
            q_latent: [T, q_lora], as the attention's queries read it.
            latent: [E, d], entries that the layer's compressor completed, before RoPE; None: it has none.
        """
        head_weights, *rows = of_x
        self._store_keys(rows, latent, batch, cache)
        self.ops.choose(
            self.plan, self.config, lambda: self._query(head_weights, q_latent, batch, cache), batch, cache, selection
        )

    def _query(self, head_weights: Tensor, q_latent: Any, batch: Batch, cache: KVCache) -> tuple[Tensor, Tensor]:
        return self.ops.index_query(
            self.ops.linear(q_latent, self.wq_b)[0].view(-1, self.config.index_heads, self.config.index_head_dim),
            head_weights,
            batch.rope["compress"],
            rotate_query=self.config.hadamard,
            grid=cache.specs[self.kind].layout.grid,
        )

    def _store_keys(self, rows: list[Tensor], latent: Tensor | None, batch: Batch, cache: KVCache) -> None:
        if self.compressor is not None:
            self.compressor(rows[0], batch, cache)
        elif self.k_norm is not None:
            assert latent is not None, "keys are made from the latent of the layer's own compressor"
            keys, *_ = self.ops.linear(latent, self.wk)
            keys, *_ = self.ops.rms_norm((keys, self.k_norm), eps=self.config.rms_eps)
            view = cache.views[self.kind]
            self.ops.store_latent_keys(keys, batch.compress[self.plan.ratio], view, view.spec.row(self.plan.layer))
