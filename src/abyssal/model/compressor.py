"""One compressor: of the main KV, or of an indexer's keys."""

from __future__ import annotations

import torch
from torch import Tensor

from abyssal.config import ModelConfig
from abyssal.kv.batch import Batch
from abyssal.kv.pool import KVCache
from abyssal.model.weights import Weights
from abyssal.ops._select import Ops
from abyssal.ops.linear import LinearWeight


class Compressor:
    """Pools `ratio` tokens into one entry of the cache kind `kind` (V4 spec 2.9, V4.1 spec 3.6). Up to the pooling all is fp32."""

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        layer: int,
        kind: str,
        dtype: torch.dtype,
        ops: Ops,
        of_x: list[LinearWeight | Tensor],
    ) -> None:
        """`of_x` takes up the projection of the attention's input."""
        self.ratio = config.layers[layer].ratio
        self.layer = layer
        self.kind = kind
        self.kinds = kind, f"{kind}_state", f"{kind}_sums"
        self.rms_eps = config.rms_eps
        self.dtype, self.ops = dtype, ops
        wkv = weights.tensor("wkv.weight")
        of_x.append(wkv if self.ratio == 1 else torch.cat([wkv, weights.tensor("wgate.weight")]))  # [2 c d, D]; ratio 1: [d, D]
        self.bias = weights.tensor("ape") if config.family == "v4" else None  # [ratio, c d]
        self.norm = weights.tensor("norm.weight")

    def __call__(self, rows: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        """rows fp32 [T, 2 c d], the projected input, overwritten: store what this step completes, and the state.

        Returns the completed entries [E, d] before rotation: V4.1 makes its index keys from them.
        """
        entries, state, sums = map(cache.views.get, self.kinds)
        assert entries is not None
        facts = batch.compress[self.ratio]
        return self.ops.compress(
            rows,
            self.bias,
            self.norm,
            facts,
            batch.stores[state.spec.name] if state is not None else None,
            state,
            sums,
            entries,
            entries.spec.row(self.layer),
            overlap=self.ratio == 4,
            rotate_keys=self.kind.endswith("_index"),
            eps=self.rms_eps,
            dtype=self.dtype,
        )
