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
from abyssal.ops.linear import LinearWeight
from abyssal.parallel.comm import Comm


class Attention:
    def __init__(self, weights: Weights, config: ModelConfig, layer: int, dtype: torch.dtype, ops: Ops, comm: Comm) -> None:
        plan = config.layers[layer]
        self.plan, self.config, self.dtype, self.ops = plan, config, dtype, ops
        self.comm = comm
        self.wq_b, self.wo_a, self.wo_b = (ops.prepare_linear(weights.linear(name)) for name in ("wq_b", "wo_a", "wo_b"))
        self.q_norm, self.kv_norm = weights.tensor("q_norm.weight"), weights.tensor("kv_norm.weight")
        self.sink = weights.tensor("attn_sink")
        self.compressor = self.indexer = None
        of_x: list[LinearWeight | Tensor] = [weights.linear("wq_a"), weights.linear("wkv")]
        if plan.owns_compressor:
            self.compressor = Compressor(weights.below("compressor"), config, layer, f"c{plan.ratio}", dtype, ops, of_x)
        if plan.owns_indexer:
            self.indexer = Indexer(weights.below("indexer"), config, layer, dtype, ops, of_x)
        self.of_x = ops.prepare_linear(*of_x)  # every projection of the input, in the order in which they are used

    def __call__(self, x: Tensor, batch: Batch, cache: KVCache, selection: Selection) -> Tensor:
        """x [T, D], normalised -> [T, D]; an index source leaves its choice in `selection`, from where its readers take it."""
        config, plan, ops = self.config, self.plan, self.ops
        rope, window = batch.rope[plan.rope], cache.views["window"]
        q_latent, kv, *rest = ops.linear(x, self.of_x)
        norms = (q_latent, self.q_norm), (kv, self.kv_norm)
        q_latent, kv = ops.rms_norm(*norms, eps=config.rms_eps, reader=self.wq_b)  # [T, q_lora], [T, d]
        # What follows needs no result of this before the attention. The choice, a chain of small kernels, takes longest: it waits for no
        # entries from which no keys are made.
        compress_last = self.indexer is not None and self.indexer.compressor is not None
        with ops.beside(len(x)) as join:
            latent = None if self.compressor is None or compress_last else self.compressor(rest[0], batch, cache)
            if self.indexer is not None:
                head_weights, *rows = rest[self.compressor is not None :]
                self.indexer.store_keys(rows, latent, batch, cache)
        if self.indexer is not None:
            projected = self.indexer.project(q_latent) if ops.chooses(plan, config, batch, selection) else None
            with ops.beside(len(x)) as join:
                self.indexer(projected, head_weights, batch, cache, selection)
        q = ops.linear(q_latent, self.wq_b)[0].view(-1, config.num_heads, config.head_dim)  # [T, H, d]
        head_eps = config.rms_eps if config.query_norm else None
        q = ops.qkv_insert(q, kv, rope, window, plan.layer, batch.stores["window"], head_eps)
        if compress_last and self.compressor is not None:
            self.compressor(rest[0], batch, cache)
        join()
        out = ops.attend(q, plan, batch, cache, selection, self.sink, config.head_dim**-0.5)
        out = ops.output_quant(out, rope, self.wo_a, config.o_groups, self.dtype)
        grouped = ops.linear_grouped(out, self.wo_a, config.o_groups)  # [T, G, o_lora]
        out = ops.linear(grouped.flatten(1), self.wo_b)[0]
        return self.comm.sum(out)
