"""The whole network: embedding, blocks, final collapse, head (V4 spec 2.1, V4.1 spec 3.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from abyssal.checkpoint.rows import RowTable
from abyssal.config import ModelConfig
from abyssal.kv.batch import Batch
from abyssal.kv.pool import KVCache
from abyssal.model.attention import Attention
from abyssal.model.engram import Engram
from abyssal.model.indexer import Selection
from abyssal.model.moe import MoE
from abyssal.model.weights import Weights
from abyssal.ops import hyper_connection as hc
from abyssal.ops.linear import LinearWeight
from abyssal.ops.norm import rms_norm


class Block:
    """One decoder layer: attention and experts, each between a collapse and an expansion of the streams."""

    def __init__(self, weights: Weights, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        self.config, self.plan = config, config.layers[layer]
        engram = self.plan.engram
        self.engram = None if engram is None else Engram(weights.below("engram"), config, engram, dtype)
        self.attention = Attention(weights.below("attn"), config, layer, dtype)
        self.moe = MoE(weights.below("ffn"), config, layer, dtype)
        self.attn_norm, self.ffn_norm = weights.tensor("attn_norm.weight"), weights.tensor("ffn_norm.weight")
        self.hc_attn, self.hc_ffn = weights.mix("hc_attn", config.hc_mult), weights.mix("hc_ffn", config.hc_mult)

    def __call__(
        self, streams: Tensor, pre: Tensor, rows: Tensor | None, batch: Batch, cache: KVCache, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """One layer.

        Args:
            streams: [T, S, D].
            pre: fp32 [T, S], the mix of the site before.
            rows: what `Engram.read` gave; None in layers without one.

        Returns:
            New streams, and the mix of this layer's last site.
        """
        if self.engram is not None and rows is not None:
            streams = self.engram(streams, rows)
        x, pre, post, comb = self._enter(streams, pre, self.hc_attn)
        out = self.attention(rms_norm(x, self.attn_norm, self.config.rms_eps), batch, cache, selection)
        streams = hc.expand(streams, out, post, comb)

        x, pre, post, comb = self._enter(streams, pre, self.hc_ffn)
        out = self.moe(rms_norm(x, self.ffn_norm, self.config.rms_eps), batch.token_ids)
        return hc.expand(streams, out, post, comb), pre

    def _enter(self, streams: Tensor, previous: Tensor, weights: hc.MixWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Collapse the streams to a sublayer's input x [T, D]; post [T, S] and comb [T, S, S] put its output back.

        The own mix `pre` collapses at once (V4), or at the site after this one (V4.1 spec 3.1).
        """
        config = self.config
        raw = hc.mix(streams, weights, config.rms_eps)
        pre, post, comb = hc.coefficients(raw, config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps)
        x = hc.collapse(streams, pre if self.plan.hc_order == "own" else previous)
        return x, pre, post, comb


class Model:
    """DeepSeek V4 or V4.1. Weights are moved out of `tensors`; one left over is an error."""

    def __init__(self, tensors: dict[str, Tensor | LinearWeight | RowTable], config: ModelConfig, dtype: torch.dtype) -> None:
        weights = Weights(tensors)
        self.config = config
        self.embedding = weights.tensor("embed.weight")
        self.blocks = [Block(weights.below(f"layers.{i}"), config, i, dtype) for i in range(config.num_layers)]
        self.hc_head = weights.mix("hc_head", config.hc_mult) if config.layers[-1].hc_order == "own" else None
        self.norm = weights.tensor("norm.weight")
        self.head = weights.tensor("head.weight")
        weights.assert_all_taken()

    @torch.inference_mode()
    def __call__(self, batch: Batch, cache: KVCache) -> Tensor:
        """Logits fp32 [R, V] of the tokens in `batch.logit_rows`; the caches take up the step's tokens."""
        rows = [None if block.engram is None else block.engram.read(batch) for block in self.blocks]
        streams = F.embedding(batch.token_ids, self.embedding).unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        pre = torch.zeros(streams.shape[:2], device=streams.device)
        pre[:, 0] = 1.0  # the first site sees the embedding as it is (V4.1 spec 3.1)
        selection = Selection([None] * len(batch.groups), [None] * len(batch.groups))
        for block, read in zip(self.blocks, rows, strict=True):
            streams, pre = block(streams, pre, read, batch, cache, selection)
        streams, pre = streams.index_select(0, batch.logit_rows), pre.index_select(0, batch.logit_rows)
        if self.hc_head is not None:
            pre = hc.mix(streams, self.hc_head, self.config.rms_eps).sigmoid() + self.config.hc_eps
        y = rms_norm(hc.collapse(streams, pre), self.norm, self.config.rms_eps)
        return F.linear(y.float(), self.head)
