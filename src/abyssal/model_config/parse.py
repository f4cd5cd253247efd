"""`config.json` of either model family -> `ModelConfig`, strictly: unknown, missing or contradictory keys are errors."""

from __future__ import annotations

from typing import Any, Literal

from abyssal.config import EngramConfig, Family, LayerPlan, ModelConfig, QuantConfig
from abyssal.errors import ConfigError
from abyssal.model_config import names
from abyssal.model_config.plan import v4_layers, v41_layers
from abyssal.model_config.reader import MAX_INTEGER, Section, merge, rename
from abyssal.model_config.rope import parse_rope

WHERE = "config.json"
DSPARK_KEYS = ("dspark_block_size", "dspark_noise_token_id", "dspark_markov_rank", "dspark_target_layer_ids")
MAX_SINKHORN_ITERATIONS = 1000  # of every layer and step; released models have 20
MAX_NGRAM_SIZE, MAX_NGRAM_HEADS = 16, 64  # a prime is sought for every head of every size; released models have 4 and 8
V41_ONLY = ("kv_source_layer_ids", "index_source_layer_ids")


def parse_model_config(raw: dict[str, Any]) -> ModelConfig:
    """Parses a model's config in any published spelling.

    Args:
        raw: the parsed `config.json` of a V4 or V4.1 checkpoint: released, saved by transformers, or the official inference
            config (V4 spec 1, V4.1 spec 1). The argument is not changed.

    Raises:
        ConfigError: a key is unknown, missing, of the wrong type, unsupported, or contradicts another one.
    """
    family, values = _one_level(raw)
    config = Section(values, WHERE)
    for name, allowed in names.FIXED.items():
        config.require(name, allowed)
    config.ignore(names.IGNORED)
    if family == "v41":
        config.ignore(names.VISION)
    config.require("architectures", ([names.ARCHITECTURES[family]],))
    model = _build(config, family)
    config.finish(known=names.ALIASES)
    return model


def _one_level(raw: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """The family, and all text keys of a config in one flat object under the released spelling."""
    values = rename(raw, names.ALIASES, WHERE)
    kind = values.pop("model_type", None)
    if kind is None and "dim" in raw:
        family: Family = "v41" if any(name in values for name in V41_ONLY) else "v4"
        return family, {**names.INFERENCE_CONFIG[family], **values}
    if kind == "deepseek_v4":
        return "v4", values
    if kind == "deepseek_v41_text":
        return "v41", values
    if kind == "deepseek_v41":
        return "v41", _composite(values)
    supported = "deepseek_v4, deepseek_v41, deepseek_v41_text"
    raise ConfigError(f"{WHERE}: model_type={kind!r} is not supported; supported: {supported}")


def _composite(values: dict[str, Any]) -> dict[str, Any]:
    where = f"{WHERE}: text_config"
    text = rename(values.pop("text_config", None), names.ALIASES, where)
    if text.pop("model_type", "deepseek_v41_text") != "deepseek_v41_text":
        raise ConfigError(f"{where}: model_type must be deepseek_v41_text")
    vision = values.get("vision_config")
    if vision is not None and Section(vision, f"{WHERE}: vision_config").raw("model_type") != "deepseek_v41_vision":
        raise ConfigError(f"{WHERE}: vision_config: model_type must be deepseek_v41_vision")
    # Both objects carry a writer's bookkeeping, which may differ.
    text = {name: value for name, value in text.items() if name not in names.IGNORED}
    return merge(values, text, WHERE)


def _build(config: Section, family: Family) -> ModelConfig:
    num_layers = config.integer("num_hidden_layers")
    vocab_size = config.integer("vocab_size")
    head_dim = config.integer("head_dim", low=2)
    rope_main, rope_compress = parse_rope(config, head_dim)
    engram = _engram(config, num_layers, vocab_size) if family == "v41" else None
    if family == "v4":
        layers = v4_layers(config, num_layers)
    else:
        layers = v41_layers(config, num_layers, engram.layer_ids if engram else ())
    two_level = any(plan.candidates == "publish" for plan in layers)
    num_experts = config.integer("n_routed_experts")
    model = ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=config.integer("num_attention_heads"),
        head_dim=head_dim,
        q_lora_rank=config.integer("q_lora_rank"),
        o_groups=config.integer("o_groups"),
        o_lora_rank=config.integer("o_lora_rank"),
        num_experts=num_experts,
        num_experts_per_token=config.integer("num_experts_per_tok", high=num_experts),
        num_shared_experts=config.integer("n_shared_experts", high=1),
        moe_intermediate_size=config.integer("moe_intermediate_size"),
        routed_scaling_factor=config.number("routed_scaling_factor"),
        gate_temperature=_gate_temperature(config, family),
        swiglu_limit=config.number("swiglu_limit"),
        index_heads=config.integer("index_n_heads"),
        index_head_dim=config.integer("index_head_dim"),
        index_topk=config.integer("index_topk"),
        candidate_topk_blocks=_candidate_size(config, family, "candidate_topk_blocks", two_level),
        candidate_block_size=_candidate_size(config, family, "candidate_block_size", two_level),
        sliding_window=config.integer("sliding_window"),
        hc_mult=config.integer("hc_mult"),
        hc_sinkhorn_iters=config.integer("hc_sinkhorn_iters", high=MAX_SINKHORN_ITERATIONS),
        hc_eps=config.number("hc_eps", high=0.1),
        rms_eps=config.number("rms_norm_eps", high=0.1),
        rope_main=rope_main,
        rope_compress=rope_compress,
        max_position=config.integer("max_position_embeddings"),
        bos_token_id=config.integer("bos_token_id", low=0, high=vocab_size - 1),
        eos_token_ids=read_eos(config, vocab_size),
        quant=_quant(config, family),
        engram=engram,
        layers=layers,
        draft=_draft(config, family, num_layers, vocab_size),
        image_token_id=_image_token(config, family, vocab_size),
    )
    _check(config, model)
    return model


def read_eos(config: Section, vocab_size: int | None) -> tuple[int, ...]:
    """`eos_token_id`: one id or a list of them, in order and without repeats."""
    high = MAX_INTEGER if vocab_size is None else vocab_size - 1
    if not isinstance(config.raw("eos_token_id"), list):
        return (config.integer("eos_token_id", low=0, high=high),)
    ids = config.integers("eos_token_id", high=high)
    if not ids:
        raise config.fail("eos_token_id", "must name at least one id")
    return tuple(dict.fromkeys(ids))


def _gate_temperature(config: Section, family: Family) -> float:
    """V4.1 divides router logits by it, 1.0 when absent (V4.1 spec 1.2); V4 has no such key."""
    return config.number("gate_temp") if family == "v41" and config.given("gate_temp") else 1.0


def _candidate_size(config: Section, family: Family, name: str, two_level: bool) -> int | None:
    if family == "v4":
        return None
    size = config.integer(name)
    return size if two_level else None


def _quant(config: Section, family: Family) -> QuantConfig | None:
    """Storage of quantised linears (V4 spec 1.2 and 4.6, V4.1 spec 1.1)."""
    dtype = config.text("dtype", names.DTYPES) if config.given("dtype") else None
    stated = {config.where: config.text("expert_dtype", ("fp4", "fp8"))} if config.given("expert_dtype") else {}
    if dtype == "fp8":  # the inference config's way to say it
        block: tuple[int, ...] = names.INFERENCE_WEIGHT_BLOCK[family]
    elif config.given("quantization_config"):
        section = config.section("quantization_config")
        block = _weight_block(section)
        if section.given("expert_dtype"):
            stated[section.where] = section.text("expert_dtype", ("fp4", "fp8"))
        section.finish()
    elif stated:
        raise config.fail("expert_dtype", "is given, but quantization_config is not; add it, or remove expert_dtype")
    else:
        return None
    if len(set(stated.values())) > 1:
        raise config.fail("expert_dtype", "differs from the one in quantization_config; keep one of them")
    if not stated and family == "v41":
        raise ConfigError(f"{config.where}: quantization_config: required key 'expert_dtype' is missing")
    # V4's first upload did not name it and had FP4 experts (V4 spec 1.2).
    expert_dtype: Literal["fp4", "fp8"] = "fp8" if "fp8" in stated.values() else "fp4"
    return QuantConfig(weight_block=(block[0], block[1]), expert_dtype=expert_dtype)


def _weight_block(section: Section) -> tuple[int, ...]:
    section.text("quant_method", ("fp8",))
    section.require("fmt", ("e4m3",))
    section.require("activation_scheme", ("dynamic",))
    section.require("scale_fmt", ("ue8m0", "float"))  # scales carry their own dtype
    section.require("dequantize", (False,))
    section.ignore(("modules_to_not_convert", "modules_to_convert"))  # each tensor carries its own format
    block = section.integers("weight_block_size", low=1)
    if len(block) != 2:
        raise section.fail("weight_block_size", "must hold two sizes, rows and columns")
    return block


def _engram(config: Section, num_layers: int, vocab_size: int) -> EngramConfig | None:
    """The n-gram tables (V4.1 spec 1.2, 3.8); None when no layer has one, whatever the other keys say."""
    layer_ids = config.integers("engram_layer_ids", high=num_layers - 1)
    low = 1 if layer_ids else 0
    engram = EngramConfig(
        layer_ids=layer_ids,
        num_embeddings=config.integers("engram_num_embeddings", low=low),
        max_ngram_size=config.integer("engram_max_ngram_size", low=2 * low, high=MAX_NGRAM_SIZE if layer_ids else MAX_INTEGER),
        vocab_size=config.integer("engram_vocab_size", low=low),
        n_heads=config.integer("engram_n_heads", low=low, high=MAX_NGRAM_HEADS if layer_ids else MAX_INTEGER),
        head_dim=config.integer("engram_head_dim", low=low),
        pad_token_id=config.integer("engram_pad_token_id", low=0, high=vocab_size - 1),
        compressed_vocab_size=config.integer("engram_compressed_vocab_size", low=low, high=vocab_size),
    )
    if list(layer_ids) != sorted(set(layer_ids)):
        raise config.fail("engram_layer_ids", "must rise strictly")
    if len(engram.num_embeddings) != len(layer_ids):
        raise config.fail("engram_num_embeddings", f"must have one entry per engram layer, {len(layer_ids)}")
    return engram if layer_ids else None


def _image_token(config: Section, family: Family, vocab_size: int) -> int | None:
    if family == "v4" or not config.given("image_token_id"):
        return None
    return config.integer("image_token_id", low=0, high=vocab_size - 1)


def _draft(config: Section, family: Family, num_layers: int, vocab_size: int) -> Literal["none", "mtp", "dspark"]:
    """What `mtp.*` tensors would hold. V4's refreshed releases count one stage and have three (V4 spec 1.4)."""
    stages = [config.integer(name, low=0) for name in ("num_nextn_predict_layers", "n_mtp_layers") if config.given(name)]
    if not stages:
        raise ConfigError(f"{config.where}: required key 'num_nextn_predict_layers' is missing; 0 means no draft layers")
    dspark = family == "v41" or any(config.given(name) for name in DSPARK_KEYS)
    if dspark:
        _check_dspark(config, family, num_layers, vocab_size)
    elif len(set(stages)) > 1:
        raise config.fail("n_mtp_layers", "contradicts num_nextn_predict_layers; keep one of them")
    if not any(stages):
        return "none"
    return "dspark" if dspark else "mtp"


def _check_dspark(config: Section, family: Family, num_layers: int, vocab_size: int) -> None:
    block_size, noise_token, markov_rank, target_layers = DSPARK_KEYS
    config.integer(block_size)
    config.integer(noise_token, low=0, high=vocab_size - 1)
    config.integer(markov_rank)
    config.integers(target_layers, high=num_layers - 1)
    if family == "v41":
        experts = config.integer("dspark_n_routed_experts")
        config.integer("dspark_num_experts_per_tok", high=experts)


def _check(config: Section, model: ModelConfig) -> None:
    """Relations between sizes that the equations need."""
    if model.num_heads % model.o_groups:
        raise config.fail("o_groups", f"must divide num_attention_heads={model.num_heads} (V4 spec 2.8)")
    if model.rope_main.dim % 2:
        raise config.fail("qk_rope_head_dim", f"gives {model.rope_main.dim} rotary dimensions; they rotate in pairs")
    if model.rope_main.dim > model.index_head_dim:
        raise config.fail("index_head_dim", f"is smaller than the {model.rope_main.dim} rotary dimensions")
    if model.family == "v4" and _has_indexer(model.layers) and model.index_head_dim & (model.index_head_dim - 1):
        raise config.fail("index_head_dim", "must be a power of two for the Hadamard rotation (V4 spec 2.10)")


def _has_indexer(layers: tuple[LayerPlan, ...]) -> bool:
    return any(plan.owns_indexer for plan in layers)
