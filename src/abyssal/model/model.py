"""The whole network: embedding, blocks, final collapse, head (V4 spec 2.1, V4.1 spec 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from abyssal.checkpoint.rows import RowTable
from abyssal.config import ModelConfig
from abyssal.kv.batch import Batch
from abyssal.kv.pool import KVCache
from abyssal.model.attention import Attention
from abyssal.model.engram import Engram
from abyssal.model.moe import MoE
from abyssal.model.weights import Weights
from abyssal.ops._select import Ops, Selection
from abyssal.ops.hyper_connection import Site
from abyssal.ops.linear import LinearWeight
from abyssal.parallel.comm import ALONE, Comm

AfterLayer = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Residual:
    """What lies between two mixing sites: streams, and the sublayer's output that the next site expands into them."""

    streams: Tensor  # [T, S, D]; before the first site embeddings [T, D], of which every stream is a copy
    pre: Tensor  # fp32 [T, S], the mix of the site before
    out: Tensor | None = None  # [T, D]; None: there is nothing to expand
    post: Tensor | None = None  # fp32 [T, S]
    comb: Tensor | None = None  # fp32 [T, S, S]

    @classmethod
    def after(cls, site: Site, out: Tensor) -> Residual:
        assert site.pre is not None
        return cls(site.streams, site.pre, out, site.post, site.comb)

    def at(self, rows: Tensor) -> Residual:
        """Of some tokens only; rows int64 [R], ascending."""
        if len(rows) == len(self.streams):
            return self
        parts = (self.streams, self.pre, self.out, self.post, self.comb)
        streams, pre, *rest = (None if part is None else part.index_select(0, rows) for part in parts)
        assert streams is not None and pre is not None
        return Residual(streams, pre, *rest)

    def expanded(self, ops: Ops, num_streams: int) -> Tensor:
        """Streams [T, S, D] with the sublayer's output in them (V4 spec 2.3)."""
        if self.out is None or self.post is None or self.comb is None:
            return self.streams if self.streams.dim() == 3 else self.streams.unsqueeze(1).repeat(1, num_streams, 1)
        return ops.expand(self.streams, self.out, self.post, self.comb)


class Block:
    """One decoder layer: attention and experts, each behind a mixing site (V4 spec 2.4, V4.1 spec 3.1)."""

    def __init__(self, weights: Weights, config: ModelConfig, layer: int, dtype: torch.dtype, ops: Ops, comm: Comm) -> None:
        self.config, self.plan, self.ops = config, config.layers[layer], ops
        engram = self.plan.engram
        self.engram = None if engram is None else Engram(weights.below("engram"), config, engram, dtype, ops)
        self.attention = Attention(weights.below("attn"), config, layer, dtype, ops, comm)
        self.moe = MoE(weights.below("ffn"), config, layer, ops, comm)
        self.attn_norm, self.ffn_norm = weights.tensor("attn_norm.weight"), weights.tensor("ffn_norm.weight")
        self.hc_attn, self.hc_ffn = (ops.mix_weights(weights.mix(name, config.hc_mult)) for name in ("hc_attn", "hc_ffn"))

    def __call__(self, residual: Residual, rows: Tensor | None, batch: Batch, cache: KVCache, selection: Selection) -> Residual:
        """One layer; `rows` is what `Engram.read` gave, None in layers without one."""
        site = self.enter(residual, rows)
        return self.leave(site, self.attention(site.x, batch, cache, selection), batch.token_ids)

    def enter(self, residual: Residual, rows: Tensor | None) -> Site:
        """The attention's input, up to which nothing depends on a token's sequence."""
        if self.engram is not None and rows is not None:
            streams = residual.expanded(self.ops, self.config.hc_mult)
            residual = Residual(self.engram(streams, rows), residual.pre)
        return self._enter(residual, self.hc_attn, self.attn_norm)

    def leave(self, site: Site, out: Tensor, token_ids: Tensor) -> Residual:
        """After the attention, which gave `out` [T, D] for what `enter` gave."""
        site = self._enter(Residual.after(site, out), self.hc_ffn, self.ffn_norm)
        return Residual.after(site, self.moe(site.x, token_ids))

    def _enter(self, residual: Residual, weights: Any, norm: Tensor) -> Site:
        """The own mix collapses the streams at once (V4), or at the site after this one (V4.1 spec 3.1)."""
        return enter(self.ops, self.config, residual, weights, norm, own=self.plan.hc_order == "own")


def enter(ops: Ops, config: ModelConfig, residual: Residual, weights: Any, norm: Tensor, own: bool) -> Site:
    return ops.site(
        residual.streams, norm, weights, out=residual.out, post=residual.post, comb=residual.comb, pre=None if own else residual.pre,
        rms_eps=config.rms_eps, eps=config.hc_eps, iterations=config.hc_sinkhorn_iters,
    )  # fmt: skip


class Model:
    """DeepSeek V4 or V4.1. Weights are moved out of `tensors`; one left over is an error."""

    def __init__(
        self,
        tensors: dict[str, Tensor | LinearWeight | RowTable],
        config: ModelConfig,
        dtype: torch.dtype,
        ops: Ops,
        comm: Comm = ALONE,
    ) -> None:
        """Of several ranks each has `Mesh.local` of the configuration, and its part of the weights."""
        weights = Weights(tensors)
        self.config, self.dtype, self.ops = config, dtype, ops
        self.comm = comm
        self.embedding = weights.tensor("embed.weight")
        # The first site sees the embedding as it is (V4.1 spec 3.1).
        self.first_pre = torch.eye(1, config.hc_mult, device=self.embedding.device)  # [1, S]
        self.blocks = [Block(weights.below(f"layers.{i}"), config, i, dtype, ops, comm) for i in range(config.num_layers)]
        self._engrams = {i: block.engram for i, block in enumerate(self.blocks) if block.engram is not None}
        self.reads_tables = all(engram.readable is not None for engram in self._engrams.values())  # without the host
        self.hc_head = None
        if config.layers[-1].hc_order == "own":
            self.hc_head = ops.mix_weights(weights.mix("hc_head", config.hc_mult))
        self.norm = weights.tensor("norm.weight")
        head = weights.tensor("head.weight")
        self.sample = torch.cat([self.norm.flatten().float(), head[:8].flatten().float()])  # tells trainings of one model apart
        self.head = ops.prepare_linear(head)
        weights.assert_all_taken()

    def __call__(self, batch: Batch, cache: KVCache, after_layer: AfterLayer | None = None) -> Tensor:
        """Logits fp32 [R, V] of the tokens in `batch.logit_rows`; the caches take up the step's tokens."""
        return self.compute(batch, cache, self.read_tables(batch.engram_rows), after_layer)

    @torch.inference_mode()
    def read_tables(self, engram_rows: Tensor | None) -> dict[int, Tensor]:
        """Layer -> what its n-gram table holds for the tokens of a step, on the model's device.

        `engram_rows`: as in `Batch`; on the device too where `reads_tables`.
        """
        if not self._engrams:
            return {}
        assert engram_rows is not None, "the step was built without the n-gram hash"
        return {i: engram.read(engram_rows, self.embedding.device) for i, engram in self._engrams.items()}

    def empty_table_rows(self, count: int) -> dict[int, Tensor]:
        """Room for what `read_tables` gives for `count` tokens, zeros."""
        engram, device = self.config.engram, self.embedding.device
        if engram is None:
            return {}
        return {i: torch.zeros(count, engram.columns * engram.head_dim, dtype=self.dtype, device=device) for i in self._engrams}

    @torch.inference_mode()
    def compute(self, batch: Batch, cache: KVCache, rows: dict[int, Tensor], after_layer: AfterLayer | None = None) -> Tensor:
        """As a call, with what `read_tables` gave. `after_layer` is called with each layer whose records are in the caches."""
        residual = self.embed(batch.token_ids)
        selection = self.ops.new_selection(batch)
        for layer, block in enumerate(self.blocks):
            residual = block(residual, rows.get(layer), batch, cache, selection)
            if after_layer is not None:
                after_layer(layer)
        return self.logits(residual.at(batch.logit_rows))

    def embed(self, token_ids: Tensor) -> Residual:
        embedded = self.comm.embed(token_ids, self.embedding)
        return Residual(embedded, self.first_pre.expand(len(embedded), -1).contiguous())

    def logits(self, last: Residual) -> Tensor:
        """fp32 [R, V] of R tokens behind the last layer."""
        y = enter(self.ops, self.config, last, self.hc_head, self.norm, own=self.hc_head is not None).x
        logits = self.ops.linear(y, self.head)[0]
        return self.comm.gather(logits)

    @torch.inference_mode()
    def idle(self) -> None:
        """Compute the experts of this rank in a step of others, without tokens of its own."""
        nothing = self.embedding.new_empty(0, self.config.hidden_size)
        token_ids = torch.empty(0, dtype=torch.int64, device=nothing.device)
        for block in self.blocks:
            block.moe(nothing, token_ids)
