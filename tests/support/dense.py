"""V4's forward pass over one whole sequence, without pages, block tables or chunks: every cache is one tensor indexed by position.

Products have the shapes that the engine gives them when it computes the sequence in one step, so that rows to be stored are equal to
the bit: else a rounding difference would turn up as another code of a packed record. Stored rows are replaced by
decode(encode(row)).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from abyssal.kv import codec
from abyssal.kv.batch import QUERY_TILE
from abyssal.kv.layouts import Layout
from abyssal.model.attention import Attention
from abyssal.model.compressor import Compressor
from abyssal.model.indexer import Indexer
from abyssal.model.model import Model
from abyssal.ops import hyper_connection as hc
from abyssal.ops.hadamard import hadamard
from abyssal.ops.index_query import index_query
from abyssal.ops.index_score import index_score
from abyssal.ops.norm import rms_norm
from abyssal.ops.rope import rope_table, rotate
from abyssal.ops.sparse_attention import sparse_attention

RoundTrip = Callable[[str, Tensor], Tensor]  # cache kind, rows [n, d] -> what a reader finds


def through_records(layouts: dict[str, Layout]) -> RoundTrip:
    """decode(encode(row)) of each kind's layout."""
    return lambda kind, rows: codec.decode(layouts[kind], *codec.encode(layouts[kind], rows)).view_as(rows)


@torch.inference_mode()
def dense_logits(model: Model, token_ids: list[int], layouts: dict[str, Layout]) -> Tensor:
    """fp32 [n, vocab] in plain fp32 mathematics."""
    config, ids = model.config, torch.tensor(token_ids)
    run = _Dense(len(token_ids), config, layouts)
    streams = F.embedding(ids, model.embedding).unsqueeze(1).repeat(1, config.hc_mult, 1)
    for block in model.blocks:
        for weights, norm, layer in ((block.hc_attn, block.attn_norm, None), (block.hc_ffn, block.ffn_norm, block.moe)):
            raw = hc.mix(streams, weights, config.rms_eps)
            pre, post, comb = hc.coefficients(raw, config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps)
            x = rms_norm(hc.collapse(streams, pre), norm, config.rms_eps)
            out = run.attention(block.attention, x) if layer is None else layer(x, ids)
            streams = hc.expand(streams, out, post, comb)
    pre = hc.mix(streams, model.hc_head, config.rms_eps).sigmoid() + config.hc_eps
    return model.ops.linear(rms_norm(hc.collapse(streams, pre), model.norm, config.rms_eps), model.head)[0]


class _Dense:
    def __init__(self, length: int, config, layouts: dict[str, Layout]) -> None:
        self.config, self.layouts, self.length = config, layouts, length
        self.round_trip = through_records(layouts)
        self.positions = torch.arange(length)
        self.reach = config.sliding_window - 1
        self.rope = {
            "main": rope_table(self.positions, config.rope_main),
            "compress": rope_table(self.positions, config.rope_compress),
        }

    def attention(self, att: Attention, x: Tensor) -> Tensor:
        config, plan = self.config, att.plan
        rope = self.rope[plan.rope]
        latent, kv, *rest = att.ops.linear(x, att.of_x)
        latent = rms_norm(latent, att.q_norm, config.rms_eps)
        q = att.ops.linear(latent, att.wq_b)[0].view(-1, config.num_heads, config.head_dim)
        q = rotate(rms_norm(q, None, config.rms_eps), rope.unsqueeze(1))
        kv = rotate(rms_norm(kv, att.kv_norm, config.rms_eps), rope)
        window = torch.cat([kv.new_zeros(self.reach, kv.shape[1]), self.round_trip("window", kv)])  # row i: position i - reach
        entries = None if att.compressor is None else self.entries(att.compressor, rest.pop(0))
        choose = None if att.indexer is None else self.chooser(att.indexer, *rest, latent)
        out = torch.empty_like(q)
        for start in range(0, self.length, QUERY_TILE):
            tile = self.positions[start : start + QUERY_TILE]
            keys = torch.arange(start - self.reach, start + len(tile))
            distance = tile[:, None] - keys
            hidden = (distance < 0) | (distance > self.reach) | (keys < 0)
            shown, entries_hidden = None, None
            if entries is not None and (most := (start + len(tile)) // plan.ratio):
                visible = (tile + 1) // plan.ratio
                chosen = choose(tile, visible, most) if choose is not None else None
                if chosen is None:
                    shown, entries_hidden = entries[None, :most], torch.arange(most) >= visible[None, :, None]
                else:
                    shown = entries[chosen.clamp(min=0)].masked_fill_((chosen < 0).unsqueeze(-1), 0.0)
                    entries_hidden = chosen < 0
            keys, hidden = window[None, start : start + self.reach + len(tile)], hidden[None]
            shared = shown is not None and (shown.dim() == 3 or len(tile) == 1)
            if shared and plan.ratio == 4 and self.layouts["c4"] == self.layouts["window"]:  # they lie in one pool
                keys, shown = torch.cat([keys, shown.view(1, -1, keys.shape[-1])], dim=1), None
                hidden = torch.cat([hidden, entries_hidden], dim=-1)
            out[tile] = sparse_attention(
                q[None, tile], keys, hidden, shown, entries_hidden, att.sink, config.head_dim**-0.5
            ).squeeze(0)  # fmt: skip
        out = rotate(out, rope.conj().unsqueeze(1))
        grouped = att.ops.linear_grouped(out.view(self.length, config.o_groups, -1), att.wo_a, config.o_groups)
        return att.ops.linear(grouped.flatten(1), att.wo_b)[0]

    def entries(self, compressor: Compressor, rows: Tensor) -> Tensor:
        """Entry w pools tokens [m w, m w + m), with ratio 4 also the m before with the other half of the projection."""
        ratio, count = compressor.ratio, self.length // compressor.ratio
        if not count:
            return rows.new_zeros(0, len(compressor.norm))
        values, scores = rows.chunk(2, dim=1)
        scores = scores + compressor.bias[self.positions % ratio]
        values, scores = (part[: count * ratio].view(count, ratio, -1) for part in (values, scores))
        if ratio == 4:
            (early, late), (early_s, late_s) = values.chunk(2, dim=2), scores.chunk(2, dim=2)
            before = torch.cat([torch.zeros_like(early[:1]), early[:-1]])
            before_s = torch.cat([torch.full_like(early_s[:1], -torch.inf), early_s[:-1]])
            values, scores = torch.cat([before, late], dim=1), torch.cat([before_s, late_s], dim=1)
        if ratio == 128:
            weights = (scores - scores.amax(1, keepdim=True)).exp()
            pooled = (weights * values).sum(1) / weights.sum(1)
        else:
            pooled = (values * scores.softmax(1)).sum(1)
        pooled = rms_norm(pooled, compressor.norm, compressor.rms_eps)
        entry = rotate(pooled, self.rope["compress"][: count * ratio : ratio])
        return self.round_trip(compressor.kind, hadamard(entry) if compressor.kind.endswith("_index") else entry)

    def chooser(
        self, indexer: Indexer, head_weights: Tensor, rows: Tensor, latent: Tensor
    ) -> Callable[[Tensor, Tensor, int], Tensor | None]:
        keys = self.entries(indexer.compressor, rows)
        q, weights = index_query(
            indexer.ops.linear(latent, indexer.wq_b)[0].view(-1, indexer.config.index_heads, indexer.config.index_head_dim),
            head_weights,
            self.rope["compress"],
            rotate_query=True,
            grid=self.layouts[indexer.compressor.kind].grid,
        )

        def choose(tile: Tensor, visible: Tensor, most: int) -> Tensor | None:
            """Entries [1, b, K] of the queries at `tile`, -1 for none; None: all that are visible."""
            if most <= indexer.config.index_topk:
                return None
            scores = index_score(q[None, tile], weights[None, tile], keys[None, :most], visible[None])
            order = scores.sort(dim=-1, descending=True, stable=True).indices[..., : indexer.config.index_topk]
            chosen = order.masked_fill(order >= visible[None, :, None], most).sort(dim=-1).values
            return chosen.masked_fill(chosen == most, -1)

        return choose
