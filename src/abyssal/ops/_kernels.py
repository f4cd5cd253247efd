"""The ops in Triton, and in Gluon where that is faster on Hopper. All tokens of a step in one launch; bf16 only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from abyssal.checkpoint.rows import RowTable
from abyssal.config import LayerPlan, ModelConfig
from abyssal.errors import ConfigError
from abyssal.kv.batch import Batch, CompressFacts, QueryLists, Span, StoreFacts
from abyssal.kv.layouts import Grid, Layout
from abyssal.kv.pool import KVCache, RecordView
from abyssal.kv.specs import CachePlan
from abyssal.ops._select import Query, Selection, chooses, publishes
from abyssal.ops._streams import forked
from abyssal.ops.argmax.triton import argmax
from abyssal.ops.compress.triton import Pages, compress
from abyssal.ops.decode_facts import Plan
from abyssal.ops.decode_facts.triton import decode_facts
from abyssal.ops.engram.triton import SharedTable, engram, share_table, table_rows
from abyssal.ops.hyper_connection import MixWeights, Site
from abyssal.ops.hyper_connection import triton as portable_hc
from abyssal.ops.index_query.triton import index_query
from abyssal.ops.index_score import triton as portable_score
from abyssal.ops.index_score._paged import GROUP, KEYS_PER_TILE, QUERY_DTYPES
from abyssal.ops.linear import LinearWeight
from abyssal.ops.linear import triton as products
from abyssal.ops.moe import ExpertLayer
from abyssal.ops.moe.triton import (
    KernelExperts,
    choices_of,
    moe,
    outputs_of_choices,
    part_of_experts,
    prepare_experts,
    shared_part,
    sum_of_choices,
)
from abyssal.ops.norm.triton import rms_norm
from abyssal.ops.output_quant.triton import output_quant, output_quant_e4m3
from abyssal.ops.qkv_insert.triton import qkv_insert, window_store
from abyssal.ops.select_topk.triton import MAX_K, SPREAD_PROGRAMS, candidate_blocks, select_topk
from abyssal.ops.sparse_attention import triton as portable_attention
from abyssal.ops.sparse_attention.arguments import KeyList, Records, check_layouts

log = logging.getLogger("abyssal")

MAX_HEADS = 128
BESIDE_TOKENS = 16  # of a step whose kernels leave room for others beside them; from 32 on one stream is as fast, or faster
KEYS_PER_PAGE = (KEYS_PER_TILE, 2 * KEYS_PER_TILE)


class KernelOps:
    """Kernels for one model on one device."""

    as_lists = True

    def __init__(
        self,
        backend: str,
        model: ModelConfig,
        caches: CachePlan,
        max_tokens: int,
        device: torch.device,
        batch_invariant: bool = False,
    ) -> None:
        """
        Args:
            backend: triton or hopper.
            max_tokens: tokens of a step for which memory is set aside; a larger step makes more.
            batch_invariant: see `Ops`; launches whose sums are cut alike for every step.

        Raises:
            ConfigError: a kernel does not take these sizes or records.
        """
        check_model(model, caches)
        self.hidden, self.device, self.batch_invariant = model.hidden_size, device, batch_invariant
        attention: Callable[..., tuple[Tensor, Tensor]] = portable_attention.sparse_attention
        self._score: Callable[..., Tensor] = partial(portable_score.index_score, batch_invariant=batch_invariant)
        self._score_blocks: Callable[..., Tensor] = portable_score.index_score_blocks
        keys = [spec for name, spec in caches.specs.items() if name.endswith("_index")]
        gluon = []
        if backend == "hopper":
            from abyssal.ops.sparse_attention import gluon as hopper_attention

            attention = hopper_attention.sparse_attention
            gluon.append("sparse_attention")
        self._sites: Any = portable_hc
        if backend == "hopper":
            from abyssal.ops.hyper_connection import gluon as hopper_hc

            self._sites = hopper_hc
            gluon.append("hyper_connection")
        if backend == "hopper" and all(spec.layout.name != "index_bf16" for spec in keys):
            from abyssal.ops.index_score.gluon import index_score
            from abyssal.ops.index_score.gluon_blocks import index_score_blocks

            self._score, self._score_blocks = index_score, index_score_blocks
            gluon.append("index_score")
        self._experts: Any = None  # the module of products over FP4 experts
        self._refused = False
        if backend == "hopper" and not batch_invariant:
            from abyssal.ops.moe import gluon as hopper_moe

            self._experts = hopper_moe
            gluon.append("moe")
        self._attention = partial(attention, batch_invariant=batch_invariant)
        self._handovers: list[Any] = []  # the last is in use, graphs may have captured the others
        self._reserve(max_tokens)
        self._beside = self._shared = None
        if device.type == "cuda":
            # of compression and choice beside the queries, a chain of small kernels for which one large one has to make room
            self._beside = torch.cuda.Stream(device, priority=-1)
            self._shared = torch.cuda.Stream(device)  # of the shared expert beside the routed ones
        self._arrivals = torch.zeros(SPREAD_PROGRAMS, dtype=torch.int32, device=device)  # of programs that choose for one query
        mode = "; batch-invariant" if batch_invariant else ""
        log.info("ops: Gluon %s; all others Triton%s", ", ".join(gluon) or "none", mode)

    def _reserve(self, tokens: int) -> None:
        """Memory through which the programs of a `site` hand their sums over."""
        self._handovers.append(
            self._sites.HandoverState.allocate(tokens, self.hidden, self.device, batch_invariant=self.batch_invariant)
        )
        self._reserved = tokens

    def argmax(self, logits: Tensor) -> Tensor:
        return argmax(logits)

    def decode_facts(self, positions: Tensor, rows: Tensor, folded: Tensor, pages: Tensor, plan: Plan) -> Tensor:
        return decode_facts(positions, rows, folded, pages, plan)

    def beside(self, tokens: int) -> AbstractContextManager[Callable[[], None]]:
        return forked(self._beside if tokens <= BESIDE_TOKENS else None)

    def qkv_insert(
        self, q: Tensor, kv: Tensor, rope: Tensor, window: RecordView, layer_row: int, store: StoreFacts, eps: float | None
    ) -> Tensor:
        assert len(store.rows) == len(kv), "the window stores every token of a step"
        return qkv_insert(q, kv, rope, *_records(window), store.slots[layer_row], eps)

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
        latent = compress(
            rows, bias, norm, facts, store, _pages(state), _pages(sums), Pages(entries.spec.name, *_records(entries)), layer_row,
            overlap=overlap, rotate_keys=rotate_keys, eps=eps, dtype=dtype, with_latent=True,
            batch_invariant=self.batch_invariant,
        )  # fmt: skip
        assert latent is not None
        return latent

    def store_latent_keys(self, keys: Tensor, facts: CompressFacts, view: RecordView, layer_row: int) -> None:
        window_store(keys, facts.rope, *_records(view), facts.entry_slots[view.spec.name][layer_row])

    def index_query(
        self, q: Tensor, head_weights: Tensor, rope: Tensor, *, rotate_query: bool, grid: Grid | None
    ) -> tuple[Tensor, Tensor]:
        return index_query(q, head_weights, rope, rotate_query=rotate_query, grid=grid)

    def new_selection(self, batch: Batch) -> Selection:
        return Selection([None], [None] * len(_lists(batch).spans))

    def chooses(self, plan: LayerPlan, config: ModelConfig, batch: Batch, selection: Selection) -> bool:
        return chooses(plan, config, [span.max_visible[plan.ratio] for span in _lists(batch).spans], selection)

    def choose(
        self, plan: LayerPlan, config: ModelConfig, query: Query, batch: Batch, cache: KVCache, selection: Selection
    ) -> None:
        lists, ratio = _lists(batch), plan.ratio
        if plan.candidates != "use":
            selection.candidates = [None] * len(lists.spans)
        selection.entries = [None]
        if not self.chooses(plan, config, batch, selection):
            return
        q, weights = query()
        k = min(config.index_topk, lists.max_visible[ratio])
        chosen = torch.empty(len(q), k, dtype=torch.int32, device=q.device)
        for i, span in enumerate(lists.spans):
            if span.max_visible[ratio]:
                self._choose_in(i, span, plan, config, q, weights, batch, cache, selection, chosen)
            else:
                chosen[span.rows] = -1
        selection.entries = [chosen]

    def _choose_in(
        self,
        i: int,
        span: Span,
        plan: LayerPlan,
        config: ModelConfig,
        q: Tensor,
        weights: Tensor,
        batch: Batch,
        cache: KVCache,
        selection: Selection,
        chosen: Tensor,
    ) -> None:
        """Fill the rows of `chosen` [T, k] that belong to span number `i`, and publish its candidates."""
        assert plan.kv_source is not None
        keys, records = cache.views[f"c{plan.ratio}_index"], cache.views[f"c{plan.ratio}"]
        shape, count = span.shape, span.max_visible[plan.ratio]
        key_pages, entry_pages = (
            batch.tables[v.spec.name][v.spec.row(plan.kv_source)][span.sequences] for v in (keys, records)
        )  # [n, pages]
        visible = _lists(batch).visible[plan.ratio][span.rows].view(shape)
        q, weights = q[span.rows].unflatten(0, shape), weights[span.rows].unflatten(0, shape)
        out = chosen[span.rows].view(*shape, -1)
        layout, per_page = keys.spec.layout, keys.spec.entries_per_page
        candidates = selection.candidates[i]
        maxima = blocks = None
        if candidates is None:
            maxima = torch.empty(*shape, -(-count // GROUP), dtype=torch.float32, device=q.device)
            scores = self._score(
                q,
                weights,
                keys.pages,
                key_pages,
                visible,
                layout=layout,
                entries_per_page=per_page,
                num_entries=count,
                maxima=maxima,
            )
            if publishes(plan, config, count):
                assert config.candidate_topk_blocks is not None and config.candidate_block_size is not None
                selection.candidates[i] = candidate_blocks(
                    scores, visible, config.candidate_topk_blocks, config.candidate_block_size
                )
        else:
            blocks, visible = candidates
            assert config.candidate_block_size is not None
            scores = self._score_blocks(
                q, weights, keys.pages, key_pages, blocks, visible, layout=layout, entries_per_page=per_page,
                block_size=config.candidate_block_size,
            )  # fmt: skip
        arrivals = self._arrivals[: visible.numel()].view(shape) if visible.numel() <= SPREAD_PROGRAMS else None
        select_topk(
            scores, visible, out.shape[2], maxima=maxima, blocks=blocks, page_table=entry_pages,
            entries_per_page=records.spec.entries_per_page, out=out, arrivals=arrivals,
        )  # fmt: skip

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
        lists = _lists(batch)
        window = KeyList(_records(cache.views["window"]), lists.window_slots[plan.layer], lists.window_lengths)
        entries = None
        if plan.kv_source is not None and lists.max_visible[plan.ratio]:
            view, visible = cache.views[f"c{plan.ratio}"], lists.visible[plan.ratio]
            chosen = selection.entries[0] if plan.selection == "topk" else None
            if chosen is None:
                entries = KeyList(_records(view), lists.all_entries(view.spec.name, view.spec.row(plan.kv_source)), visible)
            else:
                if plan.ratio not in selection.lengths:
                    selection.lengths[plan.ratio] = visible.clamp(max=chosen.shape[1])
                entries = KeyList(_records(view), chosen, selection.lengths[plan.ratio])
        return self._attention(q, window, entries, sink, scale, out=out)[0]

    def prepare_linear(self, *weights: LinearWeight | Tensor) -> products.PreparedLinear:
        return products.prepare_linear(weights)

    def linear(self, x: products.Input, prepared: products.PreparedLinear) -> tuple[Tensor, ...]:
        return products.linear(x, prepared, batch_invariant=self.batch_invariant)

    def output_quant(
        self, out: Tensor, rope: Tensor, prepared: products.PreparedLinear, groups: int, dtype: torch.dtype
    ) -> Tensor | products.QuantisedInput:
        tile = prepared.groups[0].tile
        if tile is not None and products.takes_codes(len(out), prepared, groups, batch_invariant=self.batch_invariant):
            return output_quant_e4m3(out, rope, tile, groups)
        return output_quant(out, rope, tile, dtype).view(len(out), groups, -1)

    def linear_grouped(self, x: Tensor | products.QuantisedInput, prepared: products.PreparedLinear, groups: int) -> Tensor:
        return products.linear_grouped(x, prepared, groups, batch_invariant=self.batch_invariant)

    def rms_norm(
        self, *pairs: tuple[Tensor, Tensor], eps: float, reader: products.PreparedLinear | None = None
    ) -> tuple[Any, ...]:
        codes = reader is not None and products.takes_codes(len(pairs[0][0]), reader, batch_invariant=self.batch_invariant)
        return rms_norm(*pairs, eps=eps, tile=reader.groups[0].tile if reader is not None and codes else None)

    def prepare_table(self, table: RowTable) -> SharedTable | None:
        return None if table.held is None else share_table(*table.held, self.device)

    def table_rows(self, rows: Tensor, prepared: SharedTable, dtype: torch.dtype) -> Tensor:
        return table_rows(prepared, rows, dtype)

    def engram(self, streams: Tensor, key: Tensor, value: Tensor, weight: Tensor, eps: float) -> Tensor:
        return engram(streams, key, value, weight, eps)

    def mix_weights(self, weights: MixWeights) -> portable_hc.KernelWeights:
        return portable_hc.KernelWeights.prepare(weights)

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
    ) -> Site:
        if len(source) > self._reserved:
            self._reserve(len(source))
        result: Site = self._sites.site(
            source, norm_weight, weights, self._handovers[-1], out=out, post=post, comb=comb, pre=pre, rms_eps=rms_eps, eps=eps,
            iterations=iterations, batch_invariant=self.batch_invariant,
        )  # fmt: skip
        return result

    def expand(self, streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return portable_hc.expand(streams, out, post, comb)

    def prepare_experts(self, layer: ExpertLayer) -> KernelExperts:
        experts = prepare_experts(layer)
        if self._experts is None:
            return experts
        prepared: KernelExperts = self._experts.with_products(experts)
        if prepared.products is None and not self._refused:
            log.info("ops: moe Triton: %s", self._experts.refusal(experts))
            self._refused = True
        return prepared

    def moe(self, x: Tensor, token_ids: Tensor, experts: KernelExperts) -> Tensor:
        beside = self._shared if len(x) <= BESIDE_TOKENS else None
        return moe(x, token_ids, experts, batch_invariant=self.batch_invariant, beside=beside)

    def route(self, x: Tensor, token_ids: Tensor, experts: KernelExperts) -> tuple[Tensor, Tensor]:
        return choices_of(x, token_ids, experts, batch_invariant=self.batch_invariant)

    def routed_experts(self, x: Tensor, chosen: Tensor, weights: Tensor, experts: KernelExperts, first: int) -> Tensor:
        return part_of_experts(x, chosen, weights, experts, first)

    def choice_outputs(self, x: Tensor, chosen: Tensor, weights: Tensor, experts: KernelExperts, first: int) -> Tensor:
        return outputs_of_choices(x, chosen, weights, experts, first)

    def choice_sum(self, outputs: Tensor, chosen: Tensor, shared: Tensor, token_ids: Tensor, experts: KernelExperts) -> Tensor:
        return sum_of_choices(outputs, chosen, shared, token_ids, experts)

    def shared_expert(self, x: Tensor, experts: KernelExperts) -> Tensor:
        return shared_part(x, experts, batch_invariant=self.batch_invariant)


def check_model(model: ModelConfig, caches: CachePlan) -> None:
    """Refuse what the kernels do not take, by name.

    Raises:
        ConfigError: naming the size or record.
    """
    limits = [
        ("num_attention_heads", model.num_heads, model.num_heads <= MAX_HEADS, f"at most {MAX_HEADS}"),
        ("hc_mult", model.hc_mult, model.hc_mult == portable_hc.STREAMS, str(portable_hc.STREAMS)),
        ("hidden_size", model.hidden_size, model.hidden_size % 16 == 0, "a multiple of 16"),
        ("o_lora_rank", model.o_lora_rank, model.o_lora_rank % 16 == 0, "a multiple of 16"),
    ]
    indexed = [plan for plan in model.layers if plan.index_source is not None]
    if indexed:
        limits += [
            ("index_n_heads", model.index_heads, model.index_heads in (8, 16, 32, 64), "8, 16, 32 or 64"),
            ("index_topk", model.index_topk, model.index_topk <= MAX_K, f"at most {MAX_K}"),
        ]
    if (block := model.candidate_block_size) is not None:
        limits.append(("candidate_block_size", block, block in (1, 2, 4, 8, 16, 32, 64), f"a power of two up to {KEYS_PER_TILE}"))
    for name, value, fits, known in limits:
        if not fits:
            raise ConfigError(f"{name}={value}: the kernels take {known}; use backend=reference")
    for name, spec in caches.specs.items():
        if name.endswith("_index") and (spec.layout.name not in QUERY_DTYPES or spec.entries_per_page not in KEYS_PER_PAGE):
            raise ConfigError(
                f"index keys {spec.layout.name!r} in pages of {spec.entries_per_page}: the kernels read {', '.join(QUERY_DTYPES)} in "
                f"pages of {' or '.join(map(str, KEYS_PER_PAGE))}; choose another index_layout or backend=reference"
            )
    compressed: list[Layout | None] = [
        spec.layout for name, spec in caches.specs.items() if spec.lifetime == "context" and not name.endswith("_index")
    ]
    for layout in compressed or [None]:
        check_layouts(caches.specs["window"].layout, layout)
    for plan in indexed:
        assert plan.index_source is not None
        source = model.layers[plan.index_source]
        if source.kv_source != plan.kv_source:
            raise ConfigError(
                f"layer {plan.layer} reads compressed KV of layer {plan.kv_source} by the choice of layer {source.layer}, made among that "
                f"of layer {source.kv_source}: the kernels keep choices as places in memory; use backend=reference"
            )


def _records(view: RecordView) -> Records:
    return Records(view.pages, view.spec.layout, view.spec.entries_per_page)


def _pages(view: RecordView | None) -> Pages | None:
    return None if view is None else Pages(view.spec.name, *_records(view))


def _lists(batch: Batch) -> QueryLists:
    assert batch.lists is not None, "the batch was built for the reference"
    return batch.lists
