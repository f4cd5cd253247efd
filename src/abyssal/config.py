"""Model and engine configuration.

`ModelConfig` is what a checkpoint's `config.json` says, in one vocabulary for both families and all spellings; `LayerPlan`
is what one layer does. `EngineConfig` holds every option of the engine; the command line and the environment derive from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["v4", "v41"]


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """YaRN as DeepSeek uses it: frequencies only, attention factor 1 (V4 spec 2.6)."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rotary table. `dim` trailing dimensions rotate in interleaved pairs."""

    dim: int
    base: float
    yarn: YarnConfig | None


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """How quantised linear weights are stored; None in `ModelConfig` means that nothing is quantised."""

    weight_block: tuple[int, int]  # rows, columns that share one scale in FP8 weights
    expert_dtype: Literal["fp4", "fp8"]


@dataclass(frozen=True, slots=True)
class EngramConfig:
    """V4.1's n-gram tables (V4.1 spec 1.2)."""

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]  # rows, one per entry of layer_ids
    max_ngram_size: int
    vocab_size: int
    n_heads: int
    head_dim: int
    pad_token_id: int
    compressed_vocab_size: int


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one decoder layer owns, reads and computes."""

    layer: int
    ratio: int  # tokens per compressed entry; 0 = window only
    rope: Literal["main", "compress"]
    kv_source: int | None  # layer whose compressed KV (and index keys) this one reads; == layer: it owns a compressor
    selection: Literal["none", "all", "topk"]  # which compressed entries a query attends to
    index_source: int | None  # layer whose top-k this one uses; == layer: it runs an indexer
    candidates: Literal["none", "publish", "use"]  # two-level selection of V4.1
    router: Literal["hash", "scored"]
    engram: int | None  # index into EngramConfig.layer_ids
    hc_order: Literal["own", "previous"]  # whose `pre` mix collapses the streams: this site's (V4), the previous site's (V4.1)

    @property
    def owns_compressor(self) -> bool:
        return self.kv_source == self.layer

    @property
    def owns_indexer(self) -> bool:
        return self.index_source == self.layer


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model, in the names of this project. Sizes are counts unless a comment says otherwise."""

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    gate_temperature: float
    swiglu_limit: float
    index_heads: int
    index_head_dim: int
    index_topk: int
    candidate_topk_blocks: int | None
    candidate_block_size: int | None
    sliding_window: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_eps: float
    rope_main: RopeConfig
    rope_compress: RopeConfig
    max_position: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    quant: QuantConfig | None
    engram: EngramConfig | None
    layers: tuple[LayerPlan, ...]
    draft: Literal["none", "mtp", "dspark"]  # what `mtp.*` holds, if present
