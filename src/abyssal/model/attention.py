"""Attention of one layer: projections, window, compressed entries, grouped output (V4 spec 2.5 to 2.8, V4.1 spec 3.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from abyssal.config import ModelConfig
from abyssal.kv.batch import Batch
from abyssal.kv.pool import KVCache
from abyssal.model.compressor import Compressor
from abyssal.model.indexer import Indexer
from abyssal.model.weights import Weights
from abyssal.ops._select import Ops, Selection
from abyssal.ops.linear import linear, linear_grouped
from abyssal.ops.norm import rms_norm
from abyssal.parallel.comm import Comm


class Attention:
    def __init__(self, weights: Weights, config: ModelConfig, layer: int, dtype: torch.dtype, ops: Ops, comm: Comm) -> None:
        plan = config.layers[layer]
        self.plan, self.config, self.dtype, self.ops = plan, config, dtype, ops
        self.comm = comm
        self.wq_a, self.wq_b = weights.linear("wq_a"), weights.linear("wq_b")
        self.wkv = weights.linear("wkv")
        self.wo_a, self.wo_b = weights.linear("wo_a"), weights.linear("wo_b")
        self.q_norm, self.kv_norm = weights.tensor("q_norm.weight"), weights.tensor("kv_norm.weight")
        self.sink = weights.tensor("attn_sink")
        self.compressor = self.indexer = None
        if plan.owns_compressor:
            self.compressor = Compressor(weights.below("compressor"), config, layer, f"c{plan.ratio}", dtype, ops)
        if plan.owns_indexer:
            self.indexer = Indexer(weights.below("indexer"), config, layer, dtype, ops)

    def __call__(self, x: Tensor, batch: Batch, cache: KVCache, selection: Selection) -> Tensor:
        """x [T, D], normalised -> [T, D]; an index source leaves its choice in `selection`, from where its readers take it."""
        config, plan = self.config, self.plan
        rope, window = batch.rope[plan.rope], cache.views["window"]
        q_latent = rms_norm(linear(x, self.wq_a), self.q_norm, config.rms_eps)  # [T, q_lora]
        q = linear(q_latent, self.wq_b).view(-1, config.num_heads, config.head_dim)  # [T, H, d]
        kv = rms_norm(linear(x, self.wkv), self.kv_norm, config.rms_eps)  # [T, d]
        head_eps = config.rms_eps if config.query_norm else None
        q = self.ops.qkv_insert(q, kv, rope, window, plan.layer, batch.stores["window"], head_eps)
        latent = self.compressor(x, batch, cache) if self.compressor is not None else None
        if self.indexer is not None:
            self.indexer(x, q_latent, latent, batch, cache, selection)
        out = self.ops.attend(q, plan, batch, cache, selection, self.sink, config.head_dim**-0.5)
        out = self.ops.output_quant(out, rope, self.wo_a.quantize_input, self.dtype)
        grouped = linear_grouped(out.view(len(x), config.o_groups, -1), self.wo_a)  # [T, G, o_lora]
        out = linear(grouped.flatten(1), self.wo_b)
        return self.comm.sum(out)
