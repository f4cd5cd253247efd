"""Which tensors a model has: V4 spec 4.2 and 4.3 as a table built from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from abyssal.config import LayerPlan, ModelConfig
from abyssal.errors import CheckpointError

Kind = Literal["linear", "projection", "fp32", "embedding", "expert_ids"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One entry of the loaded weights.

    Kinds: `linear` may be stored plain, FP8 or FP4; `projection` is a linear that is never quantised; `fp32` is used in fp32
    whatever its stored type (V4 spec 3.4); `embedding` takes the run's dtype; `expert_ids` are integers.
    """

    shape: tuple[int, ...]
    kind: Kind
    input_tile: int | None = None  # tile in which bf16 runs quantise this linear's input (V4 spec 3.3)
    pieces: tuple[str, ...] = ()  # stacked experts: the released tensors of one expert, in row order


Table = dict[str, TensorSpec]


def expected_tensors(config: ModelConfig) -> Table:
    """Every weight of the model by its key in the loaded dictionary: the released name, linears without `.weight`.

    Raises:
        CheckpointError: the family's weights are not known yet.
    """
    if config.family != "v4":
        raise CheckpointError("V4.1 weights are not supported yet; load a V4 checkpoint")
    hc, wide = config.hc_mult, config.hc_mult * config.hidden_size
    table: Table = {
        "embed.weight": TensorSpec((config.vocab_size, config.hidden_size), "embedding"),
        "head.weight": TensorSpec((config.vocab_size, config.hidden_size), "fp32"),
        "norm.weight": TensorSpec((config.hidden_size,), "fp32"),
        "hc_head_fn": TensorSpec((hc, wide), "fp32"),
        "hc_head_base": TensorSpec((hc,), "fp32"),
        "hc_head_scale": TensorSpec((1,), "fp32"),
    }
    for plan in config.layers:
        layer = _hyper_connections(config) | _attention(config, plan) | _experts(config, plan)
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
    heads, dim, rank = config.num_heads, config.head_dim, config.q_lora_rank
    grouped = config.o_groups * config.o_lora_rank
    table = {
        "attn.attn_sink": TensorSpec((heads,), "fp32"),
        "attn.wq_a": _linear(rank, config.hidden_size),
        "attn.q_norm.weight": TensorSpec((rank,), "fp32"),
        "attn.wq_b": _linear(heads * dim, rank),
        "attn.wkv": _linear(dim, config.hidden_size),
        "attn.kv_norm.weight": TensorSpec((dim,), "fp32"),
        "attn.wo_a": _linear(grouped, heads * dim // config.o_groups),
        "attn.wo_b": _linear(config.hidden_size, grouped),
    }
    if plan.owns_compressor:
        table |= _compressor("attn.compressor", plan.ratio, dim, config.hidden_size)
    if plan.owns_indexer:
        table["attn.indexer.wq_b"] = _linear(config.index_heads * config.index_head_dim, rank)
        table["attn.indexer.weights_proj"] = TensorSpec((config.index_heads, config.hidden_size), "projection")
        table |= _compressor("attn.indexer.compressor", plan.ratio, config.index_head_dim, config.hidden_size)
    return table


def _compressor(prefix: str, ratio: int, dim: int, hidden: int) -> Table:
    columns = dim * (2 if ratio == 4 else 1)  # ratio 4 overlaps: a token feeds two entries (V4 spec 2.9)
    return {
        f"{prefix}.ape": TensorSpec((ratio, columns), "fp32"),
        f"{prefix}.wkv.weight": TensorSpec((columns, hidden), "fp32"),
        f"{prefix}.wgate.weight": TensorSpec((columns, hidden), "fp32"),
        f"{prefix}.norm.weight": TensorSpec((dim,), "fp32"),
    }


def _experts(config: ModelConfig, plan: LayerPlan) -> Table:
    hidden, inner, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
    shared = inner * config.num_shared_experts
    table = {
        "ffn.gate.weight": TensorSpec((experts, hidden), "fp32"),
        "ffn.experts.w13": TensorSpec((experts, 2 * inner, hidden), "linear", _INPUT_TILE, ("w1", "w3")),
        "ffn.experts.w2": TensorSpec((experts, hidden, inner), "linear", _INPUT_TILE, ("w2",)),
    }
    if plan.router == "hash":
        table["ffn.gate.tid2eid"] = TensorSpec((config.vocab_size, config.num_experts_per_token), "expert_ids")
    else:
        table["ffn.gate.bias"] = TensorSpec((experts,), "fp32")
    if shared:
        table["ffn.shared_experts.w1"] = _linear(shared, hidden)
        table["ffn.shared_experts.w3"] = _linear(shared, hidden)
        table["ffn.shared_experts.w2"] = _linear(hidden, shared)
    return table


_INPUT_TILE = 128


def _linear(rows: int, columns: int) -> TensorSpec:
    return TensorSpec((rows, columns), "linear", _INPUT_TILE)
