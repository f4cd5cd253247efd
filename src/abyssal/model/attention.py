"""Attention of one layer: projections, window, compressed entries, grouped output (V4 spec 2.5 to 2.8, V4.1 spec 3.4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from abyssal.config import ModelConfig
from abyssal.kv.batch import Batch, TokenFacts
from abyssal.kv.pool import KVCache
from abyssal.model.compressor import Compressor
from abyssal.model.indexer import Indexer
from abyssal.model.weights import Weights
from abyssal.ops._select import Ops, Selection
from abyssal.ops.linear import LinearWeight
from abyssal.parallel.comm import Comm


@dataclass(frozen=True, slots=True)
class Projected:
    """The projections of an attention's input."""

    q_latent: Any  # [T, q_lora], normalised, as the queries' projections take it
    kv: Tensor  # [T, d], normalised
    rows: list[Tensor]  # [T, ..], what compressor and indexer made of it


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
        of_x, tokens = self.project(x), batch.of_tokens
        out = self.attend(
            of_x.rows, lambda: self.queries(of_x, tokens, cache), lambda: self.index_queries(of_x), batch, cache, selection
        )
        return self.finish(out, tokens)

    def project(self, x: Tensor) -> Projected:
        q_latent, kv, *rows = self.ops.linear(x, self.of_x)
        norms = (q_latent, self.q_norm), (kv, self.kv_norm)
        q_latent, kv = self.ops.rms_norm(*norms, eps=self.config.rms_eps, reader=self.wq_b)
        return Projected(q_latent, kv, rows)

    def queries(self, of_x: Projected, tokens: TokenFacts, cache: KVCache) -> Tensor:
        """[T, H, d]; the window takes up the tokens."""
        config, plan = self.config, self.plan
        q = self.ops.linear(of_x.q_latent, self.wq_b)[0].view(-1, config.num_heads, config.head_dim)
        eps = config.rms_eps if config.query_norm else None
        return self.ops.qkv_insert(q, of_x.kv, tokens.rope[plan.rope], cache.views["window"], plan.layer, tokens.window, eps)

    def index_queries(self, of_x: Projected) -> Tensor:
        """[T, Hi, di] before rotation."""
        assert self.indexer is not None
        return self.indexer.project(of_x.q_latent)

    def attend(
        self,
        rows: list[Tensor],
        queries: Callable[[], Tensor],
        index_queries: Callable[[], Tensor],
        batch: Batch,
        cache: KVCache,
        selection: Selection,
        out: Tensor | None = None,
    ) -> Tensor:
        """[T, H, d], in `out` if given; what the caches hold of a step's sequences is read, and written but for the window.

        Args:
            rows: as of `Projected`.
            queries, index_queries: called at most once, where they are needed.
        """
        config, plan, ops, count = self.config, self.plan, self.ops, len(batch.token_ids)
        # What follows needs no result of this before the attention. The choice, a chain of small kernels, takes longest: it waits for no
        # entries from which no keys are made.
        compress_last = self.indexer is not None and self.indexer.compressor is not None
        with ops.beside(count) as join:
            latent = None if self.compressor is None or compress_last else self.compressor(rows[0], batch, cache)
            if self.indexer is not None:
                head_weights, *of_keys = rows[self.compressor is not None :]
                self.indexer.store_keys(of_keys, latent, batch, cache)
        if self.indexer is not None:
            projected = index_queries() if ops.chooses(plan, config, batch, selection) else None
            with ops.beside(count) as join:
                self.indexer(projected, head_weights, batch, cache, selection)
        q = queries()
        if compress_last and self.compressor is not None:
            self.compressor(rows[0], batch, cache)
        join()
        return ops.attend(q, plan, batch, cache, selection, self.sink, config.head_dim**-0.5, out)

    def finish(self, out: Tensor, tokens: TokenFacts) -> Tensor:
        """What `attend` gave -> [T, D]."""
        config, ops = self.config, self.ops
        quantised = ops.output_quant(out, tokens.rope[self.plan.rope], self.wo_a, config.o_groups, self.dtype)
        grouped = ops.linear_grouped(quantised, self.wo_a, config.o_groups)  # [T, G, o_lora]
        return self.comm.sum(ops.linear(grouped.flatten(1), self.wo_b)[0])
