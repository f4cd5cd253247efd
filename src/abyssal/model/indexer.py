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

    def project(self, q_latent: Any) -> Tensor:
        """Queries [T, Hi, di] before rotation, from q_latent [T, q_lora] as the attention's queries read it."""
        return self.ops.linear(q_latent, self.wq_b)[0].view(-1, self.config.index_heads, self.config.index_head_dim)

    def __call__(
        self, projected: Tensor | None, head_weights: Tensor, batch: Batch, cache: KVCache, selection: Selection
    ) -> None:
        """Replace what `selection` holds by this layer's choice, from what `project` gave, None if nothing has to be chosen, and head
        weights [T, Hi]."""

        def query() -> tuple[Tensor, Tensor]:
            assert projected is not None, "a choice needs queries"
            return self.ops.index_query(
                projected,
                head_weights,
                batch.rope["compress"],
                rotate_query=self.config.hadamard,
                grid=cache.specs[self.kind].layout.grid,
            )

        self.ops.choose(self.plan, self.config, query, batch, cache, selection)

    def store_keys(self, rows: list[Tensor], latent: Tensor | None, batch: Batch, cache: KVCache) -> None:
        """Store this layer's keys.

        Args:
            rows: the compressor's, where keys are pooled.
            latent: [E, d], entries that the layer's compressor completed, before RoPE; None: it has none.
        """
        if self.compressor is not None:
            self.compressor(rows[0], batch, cache)
        elif self.k_norm is not None:
            assert latent is not None, "keys are made from the latent of the layer's own compressor"
            keys, *_ = self.ops.linear(latent, self.wk)
            keys, *_ = self.ops.rms_norm((keys, self.k_norm), eps=self.config.rms_eps)
            view = cache.views[self.kind]
            self.ops.store_latent_keys(keys, batch.compress[self.plan.ratio], view, view.spec.row(self.plan.layer))
