"""Which tensors a model has: V4 spec 4.2 and 4.3, V4.1 spec 5.1 to 5.4, as a table built from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from abyssal.config import Family, LayerPlan, ModelConfig
from abyssal.parallel.mesh import Split

Kind = Literal["linear", "projection", "fp32", "embedding", "expert_ids", "rows"]
INPUT_TILE: dict[Family, int] = {"v4": 128, "v41": 32}  # columns of an activation that share a scale (V4 spec 3.3, V4.1 spec 3.3)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One entry of the loaded weights.

    Kinds: `linear` may be stored plain, FP8 or FP4; `projection` is a linear that is never quantised; `fp32` is used in fp32
    whatever its stored type (V4 spec 3.4); `embedding` takes the run's dtype; `expert_ids` are integers; `rows` is a table that stays
    in its file and is read row by row.
    """

    shape: tuple[int, ...]
    kind: Kind
    input_tile: int | None = None  # tile in which bf16 runs quantise this linear's input (V4 spec 3.3)
    pieces: tuple[str, ...] = ()  # stacked experts: the released tensors of one expert, in row order
    split: Split | None = None  # what several ranks share out; None: each has all of it


Table = dict[str, TensorSpec]


def expected_tensors(config: ModelConfig) -> Table:
    """Every weight of the model by its key in the loaded dictionary: the released name, linears without `.weight`."""
    table: Table = {
        "embed.weight": TensorSpec((config.vocab_size, config.hidden_size), "embedding", split="rows"),
        "head.weight": TensorSpec((config.vocab_size, config.hidden_size), "fp32", split="rows"),
        "norm.weight": TensorSpec((config.hidden_size,), "fp32"),
    }
    if config.layers[-1].hc_order == "own":
        hc = config.hc_mult
        table["hc_head_fn"] = TensorSpec((hc, hc * config.hidden_size), "fp32")
        table["hc_head_base"] = TensorSpec((hc,), "fp32")
        table["hc_head_scale"] = TensorSpec((1,), "fp32")
    for plan in config.layers:
        layer = _hyper_connections(config) | _attention(config, plan) | _experts(config, plan) | _engram(config, plan)
        table |= {f"layers.{plan.layer}.{name}": spec for name, spec in layer.items()}
    return table


def _hyper_connections(config: ModelConfig) -> Table:
    hc = config.hc_mult
    mixes = (2 + hc) * hc  # pre, post, and an hc x hc comb
    table: Table = {}
    for site in ("attn", "ffn"):
        table[f"{site}_norm.weight"] = TensorSpec((config.hidden_size,), "fp32")
        table[f"hc_{site}_fn"] = TensorSpec((mixes, hc * config.hidden_size), "fp32")
        table[f"hc_{site}_base"] = TensorSpec((mixes,), "fp32")
        table[f"hc_{site}_scale"] = TensorSpec((3,), "fp32")
    return table


def _attention(config: ModelConfig, plan: LayerPlan) -> Table:
    heads, dim, rank, hidden = config.num_heads, config.head_dim, config.q_lora_rank, config.hidden_size
    grouped = config.o_groups * config.o_lora_rank
    table = {
        "attn.attn_sink": TensorSpec((heads,), "fp32", split="rows"),
        "attn.wq_a": _linear(config, rank, hidden),
        "attn.q_norm.weight": TensorSpec((rank,), "fp32"),
        "attn.wq_b": _linear(config, heads * dim, rank, "rows"),
        "attn.wkv": _linear(config, dim, hidden),
        "attn.kv_norm.weight": TensorSpec((dim,), "fp32"),
        "attn.wo_a": _linear(config, grouped, heads * dim // config.o_groups, "rows"),
        "attn.wo_b": _linear(config, hidden, grouped, "columns"),
    }
    if plan.owns_compressor:
        table |= _compressor("attn.compressor", plan.ratio, dim, hidden)
    if plan.owns_indexer:
        index_dim = config.index_head_dim
        table["attn.indexer.wq_b"] = _linear(config, config.index_heads * index_dim, rank)
        table["attn.indexer.weights_proj"] = TensorSpec((config.index_heads, hidden), "projection")
        if plan.index_keys == "pooled":
            table |= _compressor("attn.indexer.compressor", plan.ratio, index_dim, hidden)
        elif plan.index_keys == "latent":
            table["attn.indexer.wk"] = TensorSpec((index_dim, dim), "projection")
            table["attn.indexer.k_norm.weight"] = TensorSpec((index_dim,), "fp32")
    return table


def _compressor(prefix: str, ratio: int, dim: int, hidden: int) -> Table:
    columns = dim * (2 if ratio == 4 else 1)  # ratio 4 overlaps: a token feeds two entries (V4 spec 2.9)
    table = {f"{prefix}.wkv.weight": TensorSpec((columns, hidden), "fp32"), f"{prefix}.norm.weight": TensorSpec((dim,), "fp32")}
    if ratio > 1:  # alone in its group, a token needs no weight
        table[f"{prefix}.wgate.weight"] = TensorSpec((columns, hidden), "fp32")
    if ratio >= 4:  # V4.1's groups have no position bias (V4.1 spec 3.6)
        table[f"{prefix}.ape"] = TensorSpec((ratio, columns), "fp32")
    return table


def _experts(config: ModelConfig, plan: LayerPlan) -> Table:
    hidden, inner, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
    shared, tile = inner * config.num_shared_experts, INPUT_TILE[config.family]
    table = {
        "ffn.gate.weight": TensorSpec((experts, hidden), "fp32"),
        "ffn.experts.w13": TensorSpec((experts, 2 * inner, hidden), "linear", tile, ("w1", "w3"), "experts"),
        "ffn.experts.w2": TensorSpec((experts, hidden, inner), "linear", tile, ("w2",), "experts"),
    }
    if plan.router == "hash":
        table["ffn.gate.tid2eid"] = TensorSpec((config.vocab_size, config.num_experts_per_token), "expert_ids")
    else:
        table["ffn.gate.bias"] = TensorSpec((experts,), "fp32")
    if config.family == "v41":
        table["ffn.gate.bias_vl"] = TensorSpec((experts,), "fp32")
    if shared:
        table["ffn.shared_experts.w1"] = _linear(config, shared, hidden, "rows")
        table["ffn.shared_experts.w3"] = _linear(config, shared, hidden, "rows")
        table["ffn.shared_experts.w2"] = _linear(config, hidden, shared, "columns")
    return table


def _engram(config: ModelConfig, plan: LayerPlan) -> Table:
    if plan.engram is None:
        return {}
    engram, hc, hidden = config.engram, config.hc_mult, config.hidden_size
    assert engram is not None
    return {
        "engram.embed": TensorSpec((engram.num_embeddings[plan.engram], engram.head_dim), "rows"),
        "engram.wkv": _linear(config, (hc + 1) * hidden, engram.columns * engram.head_dim),
        "engram.q_weight": TensorSpec((hc, hidden), "fp32"),
        "engram.k_weight": TensorSpec((hc, hidden), "fp32"),
    }


def _linear(config: ModelConfig, rows: int, columns: int, split: Split | None = None) -> TensorSpec:
    return TensorSpec((rows, columns), "linear", INPUT_TILE[config.family], split=split)
