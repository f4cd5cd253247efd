"""One compressor: of the main KV, or of an indexer's keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from abyssal.config import ModelConfig
from abyssal.kv.batch import Batch
from abyssal.kv.pool import KVCache
from abyssal.model.weights import Weights
from abyssal.ops.compress import compress


class Compressor:
    """Pools `ratio` tokens into one entry of the cache kind `kind` (V4 spec 2.9). Everything up to the pooling is fp32."""

    def __init__(self, weights: Weights, config: ModelConfig, layer: int, kind: str, dtype: torch.dtype) -> None:
        self.ratio = config.layers[layer].ratio
        self.layer = layer
        self.kind = kind
        self.rms_eps = config.rms_eps
        self.dtype = dtype
        wkv, wgate = weights.tensor("wkv.weight"), weights.tensor("wgate.weight")
        self.w = torch.cat([wkv, wgate])  # [2 c d, D]
        self.bias = F.pad(weights.tensor("ape"), (len(wkv), 0))  # [ratio, 2 c d], zero for the values
        self.norm = weights.tensor("norm.weight")

    def __call__(self, x: Tensor, batch: Batch, cache: KVCache) -> None:
        """x [T, D], the attention's input: store what this step completes, and the state."""
        entries, state, sums = cache.views[self.kind], cache.views[f"{self.kind}_state"], cache.views.get(f"{self.kind}_sums")
        facts = batch.compress[self.ratio]
        rows = F.linear(x.float(), self.w) + self.bias[facts.phases]  # [T, 2 c d]
        compress(
            rows,
            self.norm,
            facts,
            batch.stores[state.spec.name],
            state,
            sums,
            entries,
            entries.spec.row(self.layer),
            overlap=self.ratio == 4,
            rotate_keys=self.kind.endswith("_index"),
            eps=self.rms_eps,
            dtype=self.dtype,
        )
