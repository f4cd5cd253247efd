"""Attention of one layer: projections, window, compressed entries, grouped output (V4 spec 2.5 to 2.8, V4.1 spec 3.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from abyssal.config import ModelConfig
from abyssal.kv.batch import Batch, QueryGroup
from abyssal.kv.pool import KVCache
from abyssal.model.compressor import Compressor
from abyssal.model.indexer import Indexer, Selection
from abyssal.model.weights import Weights
from abyssal.ops.linear import linear, linear_grouped
from abyssal.ops.norm import rms_norm
from abyssal.ops.output_quant import output_quant
from abyssal.ops.qkv_insert import qkv_insert
from abyssal.ops.sparse_attention import sparse_attention


class Attention:
    def __init__(self, weights: Weights, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        plan = config.layers[layer]
        self.plan, self.config, self.dtype = plan, config, dtype
        self.wq_a, self.wq_b = weights.linear("wq_a"), weights.linear("wq_b")
        self.wkv = weights.linear("wkv")
        self.wo_a, self.wo_b = weights.linear("wo_a"), weights.linear("wo_b")
        self.q_norm, self.kv_norm = weights.tensor("q_norm.weight"), weights.tensor("kv_norm.weight")
        self.sink = weights.tensor("attn_sink")
        self.compressor = self.indexer = None
        if plan.owns_compressor:
            self.compressor = Compressor(weights.below("compressor"), config, layer, f"c{plan.ratio}", dtype)
        if plan.owns_indexer:
            self.indexer = Indexer(weights.below("indexer"), config, layer, dtype)

    def __call__(self, x: Tensor, batch: Batch, cache: KVCache, selection: Selection) -> Tensor:
        """x [T, D], normalised -> [T, D]; an index source leaves its choice in `selection`, from where its readers take it."""
        config, plan = self.config, self.plan
        rope, window = batch.rope[plan.rope], cache.views["window"]
        q_latent = rms_norm(linear(x, self.wq_a), self.q_norm, config.rms_eps)  # [T, q_lora]
        q = linear(q_latent, self.wq_b).view(-1, config.num_heads, config.head_dim)  # [T, H, d]
        kv = rms_norm(linear(x, self.wkv), self.kv_norm, config.rms_eps)  # [T, d]
        head_eps = config.rms_eps if config.query_norm else None
        q = qkv_insert(q, kv, rope, window, plan.layer, batch.stores["window"], head_eps)
        latent = self.compressor(x, batch, cache) if self.compressor is not None else None
        if self.indexer is not None:
            self.indexer(x, q_latent, latent, batch, cache, selection)
        chosen = selection.entries if plan.selection == "topk" else [None] * len(batch.groups)

        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        for group, entries in zip(batch.groups, chosen, strict=True):
            out[group.rows] = self._attend(q[group.rows].unflatten(0, group.shape), group, entries, batch, cache).flatten(0, 1)
        out = output_quant(out, rope, self.wo_a.quantize_input, self.dtype)
        grouped = linear_grouped(out.view(len(x), config.o_groups, -1), self.wo_a)  # [T, G, o_lora]
        return linear(grouped.flatten(1), self.wo_b)

    def _attend(self, q: Tensor, group: QueryGroup, chosen: Tensor | None, batch: Batch, cache: KVCache) -> Tensor:
        """q [n, b, H, d] -> fp32 [n, b, H, d]."""
        window = cache.views["window"].read(group.window_slots[self.plan.layer])
        entries, hidden = self._entries(group, chosen, batch, cache)
        scale = self.config.head_dim**-0.5
        return sparse_attention(q, window, group.window_hidden, entries, hidden, self.sink, scale)

    def _entries(
        self, group: QueryGroup, chosen: Tensor | None, batch: Batch, cache: KVCache
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Compressed entries and from whom they are hidden: all visible ones [n, N, d], or the chosen ones [n, b, K, d]."""
        source, ratio = self.plan.kv_source, self.plan.ratio
        if source is None or group.max_visible[ratio] == 0:
            return None, None
        records = cache.views[f"c{ratio}"]
        slots = batch.entry_slots(records.spec, source, group)  # [n, N]
        if chosen is None:
            index = torch.arange(slots.shape[1], device=slots.device)
            return records.read(slots), index >= group.visible[ratio].unsqueeze(-1)
        hidden = chosen < 0
        flat = slots.gather(1, chosen.clamp(min=0).flatten(1).long()).view_as(chosen)
        return records.read(flat.masked_fill_(hidden, -1)), hidden
