"""The whole network: embedding, blocks, final collapse, head (V4 spec 2.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from abyssal.config import ModelConfig
from abyssal.kv.batch import Batch
from abyssal.kv.pool import KVCache
from abyssal.model.attention import Attention
from abyssal.model.moe import MoE
from abyssal.model.weights import Weights
from abyssal.ops import hyper_connection as hc
from abyssal.ops.linear import LinearWeight
from abyssal.ops.norm import rms_norm


class Block:
    """One decoder layer: attention and experts, each between a collapse and an expansion of the streams."""

    def __init__(self, weights: Weights, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        self.config = config
        self.attention = Attention(weights.below("attn"), config, layer, dtype)
        self.moe = MoE(weights.below("ffn"), config, layer, dtype)
        self.attn_norm, self.ffn_norm = weights.tensor("attn_norm.weight"), weights.tensor("ffn_norm.weight")
        self.hc_attn, self.hc_ffn = weights.mix("hc_attn", config.hc_mult), weights.mix("hc_ffn", config.hc_mult)

    def __call__(self, streams: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        """streams [T, S, D] -> [T, S, D]."""
        x, post, comb = self._enter(streams, self.hc_attn)
        out = self.attention(rms_norm(x, self.attn_norm, self.config.rms_eps), batch, cache)
        streams = hc.expand(streams, out, post, comb)

        x, post, comb = self._enter(streams, self.hc_ffn)
        out = self.moe(rms_norm(x, self.ffn_norm, self.config.rms_eps), batch.token_ids)
        return hc.expand(streams, out, post, comb)

    def _enter(self, streams: Tensor, weights: hc.MixWeights) -> tuple[Tensor, Tensor, Tensor]:
        """Collapse the streams to a sublayer's input x [T, D]; post [T, S] and comb [T, S, S] put its output back."""
        config = self.config
        raw = hc.mix(streams, weights, config.rms_eps)
        pre, post, comb = hc.coefficients(raw, config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps)
        return hc.collapse(streams, pre), post, comb


class Model:
    """DeepSeek V4. Weights are moved out of `tensors`; one left over is an error."""

    def __init__(self, tensors: dict[str, Tensor | LinearWeight], config: ModelConfig, dtype: torch.dtype) -> None:
        weights = Weights(tensors)
        self.config = config
        self.embedding = weights.tensor("embed.weight")
        self.blocks = [Block(weights.below(f"layers.{i}"), config, i, dtype) for i in range(config.num_layers)]
        self.hc_head = weights.mix("hc_head", config.hc_mult)
        self.norm = weights.tensor("norm.weight")
        self.head = weights.tensor("head.weight")
        weights.assert_all_taken()

    @torch.inference_mode()
    def __call__(self, batch: Batch, cache: KVCache) -> Tensor:
        """Logits fp32 [R, V] of the tokens in `batch.logit_rows`; the caches take up the step's tokens."""
        streams = F.embedding(batch.token_ids, self.embedding).unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        for block in self.blocks:
            streams = block(streams, batch, cache)
        streams = streams.index_select(0, batch.logit_rows)
        pre = hc.mix(streams, self.hc_head, self.config.rms_eps).sigmoid() + self.config.hc_eps
        y = rms_norm(hc.collapse(streams, pre), self.norm, self.config.rms_eps)
        return F.linear(y.float(), self.head)
