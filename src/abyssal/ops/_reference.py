"""The ops in plain PyTorch, on any device. Queries come in groups that share a gather of their keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from abyssal.checkpoint.rows import RowTable
from abyssal.config import LayerPlan, ModelConfig
from abyssal.kv.batch import Batch, CompressFacts, QueryGroup, StoreFacts
from abyssal.kv.layouts import Grid
from abyssal.kv.pool import KVCache, RecordView
from abyssal.ops import hyper_connection as hc
from abyssal.ops._select import Query, Selection, chooses, decides, publishes
from abyssal.ops.argmax import argmax
from abyssal.ops.compress import compress, store_entries
from abyssal.ops.decode_facts import Plan, decode_facts
from abyssal.ops.engram import engram
from abyssal.ops.index_query import index_query
from abyssal.ops.index_score import index_score
from abyssal.ops.linear import LinearWeight, WeightMemory, linear, linear_grouped
from abyssal.ops.moe import ExpertLayer, choice_outputs, choice_sum, experts_of_projected, moe, route, shared_expert
from abyssal.ops.norm import rms_norm
from abyssal.ops.output_quant import output_quant
from abyssal.ops.qkv_insert import qkv_insert
from abyssal.ops.select_topk import candidate_mask, select_topk
from abyssal.ops.sparse_attention import sparse_attention


@dataclass(frozen=True, slots=True)
class _Projections:
    """Weights of one input; where all of them are plain fp32, one matrix that stacks them: one product is faster than several."""

    weights: tuple[LinearWeight | Tensor, ...]
    sizes: list[int]  # N_i, of each weight as it was given

    @property
    def only(self) -> LinearWeight:
        (weight,) = self.weights
        assert isinstance(weight, LinearWeight), "the grouped output's weight is that of a linear layer"
        return weight


@dataclass(frozen=True, slots=True)
class ReferenceExperts:
    layer: ExpertLayer
    of_x: _Projections  # router, and gate and up of the shared expert


class ReferenceOps:
    as_lists = False
    batch_invariant = False

    def __init__(self) -> None:
        self._memory = WeightMemory()

    def beside(self, tokens: int) -> AbstractContextManager[Callable[[], None]]:
        return nullcontext(lambda: None)

    def argmax(self, logits: Tensor) -> Tensor:
        return argmax(logits)

    def decode_facts(self, positions: Tensor, rows: Tensor, folded: Tensor, pages: Tensor, plan: Plan) -> Tensor:
        return decode_facts(positions, rows, folded, pages, plan)

    def qkv_insert(
        self, q: Tensor, kv: Tensor, rope: Tensor, window: RecordView, layer_row: int, store: StoreFacts, eps: float | None
    ) -> Tensor:
        return qkv_insert(q, kv, rope, window, layer_row, store, eps)

    def compress(
        self,
        rows: Tensor,
        bias: Tensor | None,
        norm: Tensor,
        facts: CompressFacts,
        store: StoreFacts | None,
        state: RecordView | None,
        sums: RecordView | None,
        entries: RecordView,
        layer_row: int,
        *,
        overlap: bool,
        rotate_keys: bool,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        return compress(
            rows, bias, norm, facts, store, state, sums, entries, layer_row, overlap=overlap, rotate_keys=rotate_keys, eps=eps, dtype=dtype
        )  # fmt: skip

    def store_latent_keys(self, keys: Tensor, facts: CompressFacts, view: RecordView, layer_row: int) -> None:
        store_entries(keys, facts, view, layer_row, rotate_keys=False)

    def index_query(
        self, q: Tensor, head_weights: Tensor, rope: Tensor, *, rotate_query: bool, grid: Grid | None
    ) -> tuple[Tensor, Tensor]:
        return index_query(q, head_weights, rope, rotate_query=rotate_query, grid=grid)

    def new_selection(self, batch: Batch) -> Selection:
        return Selection([None] * len(batch.groups), [None] * len(batch.groups))

    def chooses(self, plan: LayerPlan, config: ModelConfig, batch: Batch, selection: Selection) -> bool:
        return chooses(plan, config, [group.max_visible[plan.ratio] for group in batch.groups], selection)

    def choose(
        self, plan: LayerPlan, config: ModelConfig, query: Query, batch: Batch, cache: KVCache, selection: Selection
    ) -> None:
        if plan.candidates != "use":
            selection.candidates = [None] * len(batch.groups)
        selection.entries = [None] * len(batch.groups)
        seen = [group.max_visible[plan.ratio] for group in batch.groups]
        scored = [i for i, count in enumerate(seen) if decides(plan, config, count, selection.candidates[i])]
        if not scored:
            return
        assert plan.kv_source is not None
        keys = cache.views[f"c{plan.ratio}_index"]
        q, weights = query()
        for i in scored:
            group = batch.groups[i]
            rows = keys.read(batch.entry_slots(keys.spec, plan.kv_source, group))  # [n, N, Di]
            visible, shape = group.visible[plan.ratio], group.shape
            scores = index_score(q[group.rows].unflatten(0, shape), weights[group.rows].unflatten(0, shape), rows, visible)
            selection.entries[i] = select_topk(scores, visible, config.index_topk, selection.candidates[i])
            if publishes(plan, config, seen[i]):
                assert config.candidate_topk_blocks is not None and config.candidate_block_size is not None
                selection.candidates[i] = candidate_mask(
                    scores, visible, config.candidate_topk_blocks, config.candidate_block_size
                )

    def attend(
        self,
        q: Tensor,
        plan: LayerPlan,
        batch: Batch,
        cache: KVCache,
        selection: Selection,
        sink: Tensor,
        scale: float,
        out: Tensor | None,
    ) -> Tensor:
        assert out is None, "only kernels write to memory that is given"
        chosen = selection.entries if plan.selection == "topk" else [None] * len(batch.groups)
        window, records = cache.views["window"], cache.views.get(f"c{plan.ratio}")
        parts = []
        for group, indices in zip(batch.groups, chosen, strict=True):  # in the order of their tokens
            slots, hidden = group.window_slots[plan.layer], None if group.sees_all else group.window_hidden
            entries = entries_hidden = None
            if records is not None and group.max_visible[plan.ratio]:
                entry_slots, entries_hidden = _entries(plan, group, indices, batch, records)
                if entry_slots.dim() == 2 and records.lies_with(window):  # one gather, one set of keys
                    slots = torch.cat([slots, entry_slots], dim=1)
                    hidden = None if entries_hidden is None else torch.cat([group.window_hidden, entries_hidden], dim=-1)
                else:
                    entries = records.read(entry_slots)
            rows = q[group.rows].view(*group.shape, *q.shape[1:])
            parts.append(sparse_attention(rows, window.read(slots), hidden, entries, entries_hidden, sink, scale).flatten(0, 1))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def prepare_linear(self, *weights: LinearWeight | Tensor) -> _Projections:
        sizes = [weight.shape[0] for weight in weights]
        matrices = [w if isinstance(w, Tensor) else w.data for w in weights if isinstance(w, Tensor) or w.format == "plain"]
        if len(matrices) == len(weights) > 1 and all(m.dtype == torch.float32 for m in matrices):
            return _Projections((self._memory.laid_out(torch.cat(matrices)),), sizes)
        memory = self._memory
        return _Projections(tuple(memory.laid_out(w) if isinstance(w, Tensor) else w.laid_out(memory) for w in weights), sizes)

    def linear(self, x: Any, prepared: _Projections) -> Sequence[Tensor]:
        out = [F.linear(x.float(), w) if isinstance(w, Tensor) else linear(x, w) for w in prepared.weights]
        return out if len(out) == len(prepared.sizes) else out[0].split_with_sizes(prepared.sizes, dim=1)

    def output_quant(self, out: Tensor, rope: Tensor, prepared: _Projections, groups: int, dtype: torch.dtype) -> Tensor:
        return output_quant(out, rope, prepared.only.quantize_input, dtype).view(out.shape[0], groups, -1)

    def linear_grouped(self, x: Any, prepared: _Projections, groups: int) -> Tensor:
        return linear_grouped(x, prepared.only)

    def rms_norm(self, *pairs: tuple[Tensor, Tensor], eps: float, reader: Any = None) -> tuple[Any, ...]:
        return tuple(rms_norm(x, weight, eps) for x, weight in pairs)

    def mix_weights(self, weights: hc.MixWeights) -> hc.MixWeights:
        return replace(weights, fn=self._memory.laid_out(weights.fn))

    def site(
        self,
        source: Tensor,
        norm_weight: Tensor,
        weights: Any,
        *,
        out: Tensor | None,
        post: Tensor | None,
        comb: Tensor | None,
        pre: Tensor | None,
        rms_eps: float,
        eps: float,
        iterations: int,
    ) -> hc.Site:
        return hc.site(
            source, norm_weight, weights, out=out, post=post, comb=comb, pre=pre, rms_eps=rms_eps, eps=eps, iterations=iterations
        )

    def expand(self, streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return hc.expand(streams, out, post, comb)

    def prepare_table(self, table: RowTable) -> None:
        return None

    def table_rows(self, rows: Tensor, prepared: None, dtype: torch.dtype) -> Tensor:
        raise AssertionError("the host reads the rows")

    def engram(self, streams: Tensor, key: Tensor, value: Tensor, weight: Tensor, eps: float) -> Tensor:
        return engram(streams, key, value, weight, eps)

    def prepare_experts(self, layer: ExpertLayer) -> ReferenceExperts:
        of_x = self.prepare_linear(layer.gate, layer.shared_w1, layer.shared_w3)
        names = "w13", "w2", "shared_w1", "shared_w3", "shared_w2"
        return ReferenceExperts(replace(layer, **{name: getattr(layer, name).laid_out(self._memory) for name in names}), of_x)

    def moe(self, x: Tensor, token_ids: Tensor, experts: ReferenceExperts) -> Tensor:
        logits, gate, up = self.linear(x, experts.of_x)
        return experts_of_projected(logits, gate, up, x, token_ids, experts.layer)

    def route(self, x: Tensor, token_ids: Tensor, experts: ReferenceExperts) -> tuple[Tensor, Tensor]:
        layer = experts.layer
        ids = None if layer.tid2eid is None else layer.tid2eid[token_ids]
        return route(x, layer.gate, layer.bias, ids, layer.k, layer.scale, layer.temperature)

    def routed_experts(self, x: Tensor, chosen: Tensor, weights: Tensor, experts: ReferenceExperts, first: int) -> Tensor:
        return moe(x, chosen, weights, experts.layer.w13, experts.layer.w2, experts.layer.limit, first)

    def choice_outputs(self, x: Tensor, chosen: Tensor, weights: Tensor, experts: ReferenceExperts, first: int) -> Tensor:
        return choice_outputs(x, chosen, weights, experts.layer.w13, experts.layer.w2, experts.layer.limit, first)

    def choice_sum(self, outputs: Tensor, chosen: Tensor, shared: Tensor, token_ids: Tensor, experts: ReferenceExperts) -> Tensor:
        return choice_sum(outputs, shared)

    def shared_expert(self, x: Tensor, experts: ReferenceExperts) -> Tensor:
        return shared_expert(x, experts.layer)


def _entries(
    plan: LayerPlan, group: QueryGroup, chosen: Tensor | None, batch: Batch, records: RecordView
) -> tuple[Tensor, Tensor | None]:
    """Slots of compressed entries and from whom they are hidden, [n, b, N or K] or None: all visible ones [n, N], shared by the queries
    of a sequence as are those of an only query, or the chosen ones [n, b, K]."""
    assert plan.kv_source is not None, f"layer {plan.layer} reads no compressed entries"
    slots = batch.entry_slots(records.spec, plan.kv_source, group)  # [n, N]
    if chosen is None:
        if group.sees_all:
            return slots, None
        index = torch.arange(slots.shape[1], device=slots.device)
        return slots, index >= group.visible[plan.ratio].unsqueeze(-1)
    hidden = chosen < 0
    flat = slots.gather(1, chosen.clamp(min=0).flatten(1).long()).masked_fill_(hidden.flatten(1), -1)
    return flat if chosen.shape[1] == 1 else flat.view_as(chosen), hidden
