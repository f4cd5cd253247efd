"""Which implementation of the ops a model runs: chosen once, when the model is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch
from torch import Tensor

from abyssal.checkpoint.rows import RowTable
from abyssal.config import EngineConfig, Gpu, LayerPlan, ModelConfig
from abyssal.kv.batch import Batch, CompressFacts, StoreFacts
from abyssal.kv.layouts import Grid
from abyssal.kv.pool import KVCache, RecordView
from abyssal.kv.specs import CachePlan
from abyssal.ops.decode_facts import Plan
from abyssal.ops.hyper_connection import MixWeights, Site
from abyssal.ops.linear import LinearWeight
from abyssal.ops.moe import ExpertLayer


@dataclass(slots=True)
class Selection:
    """What index sources leave for the layers after them within one step; None stands for all visible entries.

    The reference has an item per query group: entries int32 [n, b, K], indices. Kernels have one for the step: int32 [T, K], slots.
    Unused ones are -1.
    """

    entries: list[Tensor | None]  # of the latest index source
    # What later indexers may choose from, per query group: bool [n, b, N]; kernels: `candidate_blocks` per span.
    candidates: list[Any]
    lengths: dict[int, Tensor] = field(default_factory=dict)  # kernels: ratio -> int32 [T], entries of each query's list


Query = Callable[[], tuple[Tensor, Tensor]]  # index queries and head weights as `Ops.index_query` returns them


class Ops(Protocol):
    """The ops of a step that have kernels, with one signature for every implementation; shapes are those of the reference."""

    as_lists: bool  # which view of a step's queries `build_batch` prepares
    batch_invariant: bool  # whether a token's results have the same bits whatever else is in its step

    def argmax(self, logits: Tensor) -> Tensor:
        """Logits fp32 [S, V] -> int64 [2, S]: the first id of the largest, and whether that one is finite."""

    def decode_facts(self, positions: Tensor, rows: Tensor, folded: Tensor, pages: Tensor, plan: Plan) -> Tensor: ...

    def qkv_insert(
        self, q: Tensor, kv: Tensor, rope: Tensor, window: RecordView, layer_row: int, store: StoreFacts, eps: float | None
    ) -> Tensor: ...

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
    ) -> Tensor: ...

    def store_latent_keys(self, keys: Tensor, facts: CompressFacts, view: RecordView, layer_row: int) -> None: ...

    def index_query(
        self, q: Tensor, head_weights: Tensor, rope: Tensor, *, rotate_query: bool, grid: Grid | None
    ) -> tuple[Tensor, Tensor]: ...

    def beside(self, tokens: int) -> AbstractContextManager[Callable[[], None]]:
        """Of a step of so many tokens, launches inside may run beside those that follow, until the function that it gives is called.

        What they read has to be kept until then.
        """
        ...

    def new_selection(self, batch: Batch) -> Selection: ...

    def chooses(self, plan: LayerPlan, config: ModelConfig, batch: Batch, selection: Selection) -> bool:
        """Whether `choose` will call its `query`."""

    def choose(
        self, plan: LayerPlan, config: ModelConfig, query: Query, batch: Batch, cache: KVCache, selection: Selection
    ) -> None:
        """Replace what `selection` holds by the choice of layer `plan`; `query` is called where a choice has to be made."""

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
        """q [T, H, D] over every query's window and entries -> [T, H, D], in `out` if given."""

    def prepare_linear(self, *weights: LinearWeight | Tensor) -> Any:
        """Weights [N_i, K] of one input as `linear` takes them. A `Tensor` asks for fp32 mathematics."""

    def linear(self, x: Any, prepared: Any) -> Sequence[Tensor]:
        """x [T, K], or what `rms_norm` gave its reader -> [T, N_i] of each weight, in x's dtype, fp32 for a `Tensor`; each contiguous in N_i."""

    def output_quant(self, out: Tensor, rope: Tensor, prepared: Any, groups: int, dtype: torch.dtype) -> Any:
        """The attention output [T, H, D] as `linear_grouped` of `prepared` takes it, in `groups` groups of heads."""

    def linear_grouped(self, x: Any, prepared: Any, groups: int) -> Tensor:
        """The result of `output_quant` by one weight [G R, K] -> [T, G, R]."""

    def rms_norm(self, *pairs: tuple[Tensor, Tensor], eps: float, reader: Any = None) -> tuple[Any, ...]:
        """One or two pairs of x [T, D_i] and weight fp32 [D_i] -> the normalised tensors, the first as `linear` of `reader` takes it."""

    def prepare_table(self, table: RowTable) -> Any:
        """A table of n-gram rows as `table_rows` reads it; None: only the host can read it."""

    def table_rows(self, rows: Tensor, prepared: Any, dtype: torch.dtype) -> Tensor:
        """Values of the table's rows int64 [T, n] -> [T, n C]."""

    def engram(self, streams: Tensor, key: Tensor, value: Tensor, weight: Tensor, eps: float) -> Tensor:
        """streams [T, S, D], key [T, S, D], value [T, D], weight fp32 [S, D] -> [T, S, D]."""

    def mix_weights(self, weights: MixWeights) -> Any:
        """The weights of a mixing site as `site` takes them."""

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
    ) -> Site: ...

    def expand(self, streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor: ...

    def prepare_experts(self, layer: ExpertLayer) -> Any:
        """The weights of an expert layer as `moe` takes them; what `layer` holds may become part of them."""

    def moe(self, x: Tensor, token_ids: Tensor, experts: Any) -> Tensor:
        """x [T, D], token_ids [T] -> [T, D]."""

    # The parts of `moe`, where several ranks share out the experts

    def route(self, x: Tensor, token_ids: Tensor, experts: Any) -> tuple[Tensor, Tensor]:
        """x [T, D], token_ids [T] -> experts int [T, k], weights fp32 [T, k]."""

    def routed_experts(self, x: Tensor, chosen: Tensor, weights: Tensor, experts: Any, first: int) -> Tensor:
        """Sum of those chosen experts that `experts` has, whose first is number `first`: x [T, D] -> fp32 [T, D]."""

    def choice_outputs(self, x: Tensor, chosen: Tensor, weights: Tensor, experts: Any, first: int) -> Tensor:
        """The terms of that sum, for `batch_invariant`: x [T, D] -> [T, k, D], 0 for experts elsewhere."""

    def choice_sum(self, outputs: Tensor, chosen: Tensor, shared: Tensor, token_ids: Tensor, experts: Any) -> Tensor:
        """Outputs [T, k, D] of all choices and those of the shared expert [T, D] -> [T, D], added up in the order of `moe`."""

    def shared_expert(self, x: Tensor, experts: Any) -> Tensor:
        """x [T, D] -> [T, D]."""


def publishes(plan: LayerPlan, config: ModelConfig, count: int) -> bool:
    """Whether `count` visible entries are more than the candidate blocks of layer `plan` can hold."""
    if plan.candidates != "publish":
        return False
    assert config.candidate_topk_blocks is not None and config.candidate_block_size is not None
    return count > config.candidate_topk_blocks * config.candidate_block_size


def decides(plan: LayerPlan, config: ModelConfig, count: int, candidates: Any) -> bool:
    """Whether a query that sees `count` entries cannot simply take, or publish, all of them."""
    return count > config.index_topk or candidates is not None or publishes(plan, config, count)


def chooses(plan: LayerPlan, config: ModelConfig, counts: Sequence[int], selection: Selection) -> bool:
    """Whether one of the query groups, whose queries see up to `counts` entries, does."""
    known = selection.candidates if plan.candidates == "use" else [None] * len(counts)
    return any(decides(plan, config, *group) for group in zip(counts, known, strict=True))


def find_gpu() -> Gpu | None:
    """The CUDA device of this process; None: there is none."""
    if not torch.cuda.is_available():
        return None
    try:
        release: str | None = version("triton")
    except PackageNotFoundError:
        release = None
    return Gpu(torch.cuda.get_device_capability(), release)


def select_ops(config: EngineConfig, model: ModelConfig, caches: CachePlan, device: torch.device) -> Ops:
    """The implementation that the resolved `config` names.

    Raises:
        ConfigError: a kernel does not take this model's sizes or records.
    """
    if config.backend == "reference":
        from abyssal.ops._reference import ReferenceOps

        return ReferenceOps()
    from abyssal.ops._kernels import KernelOps

    return KernelOps(config.backend, model, caches, config.max_num_batched_tokens, device, config.batch_invariant)
