"""Model configs: every published spelling gives the same plan; everything else is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from abyssal.config import ModelConfig, QuantConfig, RopeConfig, YarnConfig
from abyssal.errors import ConfigError
from abyssal.model_config import load_generation_defaults, load_model_config, parse_model_config
from abyssal.model_config.names import ALIASES
from tests.published_configs import (
    V4_QUANT,
    YARN,
    inference_form,
    transformers_form,
    v4_flash,
    v4_flash_0731,
    v4_pro,
    v4_small,
    v41_flash,
)

RELEASED_YARN = YarnConfig(factor=16.0, original_max_position=65536, beta_fast=32.0, beta_slow=1.0)
GOLDENS = [
    "v4_slide_w16",
    "v4_csa_w16",
    "v4_hca_w128",
    "v4_mix_h512",
    "v41_csa2_w16",
    "v41_engram_w16",
    "v41_h512",
]


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def v41_text(**changes: Any) -> dict[str, Any]:
    config = v41_flash()
    config["text_config"] |= changes
    return config


def ratios(model: ModelConfig) -> list[int]:
    return [plan.ratio for plan in model.layers]


# --- published models ---------------------------------------------------------------------------------------------------


def test_v4_flash_plan() -> None:
    model = parse_model_config(v4_flash())
    assert Counter(ratios(model)) == {0: 2, 4: 21, 128: 20}
    assert [plan.layer for plan in model.layers if plan.owns_indexer] == list(range(2, 43, 2))
    assert [plan.router for plan in model.layers] == ["hash"] * 3 + ["scored"] * 40
    assert model.draft == "mtp" and model.engram is None and model.family == "v4"
    assert model.rope_main == RopeConfig(64, 10000.0, None)
    assert model.rope_compress == RopeConfig(64, 160000.0, RELEASED_YARN)
    assert model.quant == QuantConfig((128, 128), "fp4")
    assert (model.candidate_topk_blocks, model.candidate_block_size, model.gate_temperature) == (None, None, 1.0)
    for plan in model.layers:
        kind = {0: ("main", None, "none", None), 4: ("compress", plan.layer, "topk", plan.layer)}
        kind |= {128: ("compress", plan.layer, "all", None)}
        assert (plan.rope, plan.kv_source, plan.selection, plan.index_source) == kind[plan.ratio]
        assert (plan.candidates, plan.hc_order, plan.engram) == ("none", "own", None)


def test_v4_pro_plan() -> None:
    model = parse_model_config(v4_pro())
    assert Counter(ratios(model)) == {4: 30, 128: 31}
    assert ratios(model)[:4] == [128, 128, 4, 128]
    assert (model.num_heads, model.o_groups, model.index_topk, model.num_experts) == (128, 16, 1024, 384)
    assert model.routed_scaling_factor == 2.5


def test_v4_flash_0731_has_the_same_decoder_and_another_drafter() -> None:
    refreshed, first = parse_model_config(v4_flash_0731()), parse_model_config(v4_flash())
    assert refreshed.draft == "dspark"
    assert dataclasses.replace(refreshed, draft="mtp") == first


def test_v41_flash_plan() -> None:
    model = parse_model_config(v41_flash())
    assert Counter(ratios(model)) == {0: 2, 2: 18, 1: 20}
    assert [plan.layer for plan in model.layers if plan.owns_compressor] == [2, 8, 14, 20]
    assert [plan.layer for plan in model.layers if plan.owns_indexer] == [2, 8, 14, 20, 24, 28, 32, 36]
    # The table of V4.1 spec 3.5: first layer of a group, last layer, KV source, index source.
    groups = [(2, 7, 2, 2), (8, 13, 8, 8), (14, 19, 14, 14), (20, 23, 20, 20)]
    groups += [(24, 27, 20, 24), (28, 31, 20, 28), (32, 35, 20, 32), (36, 39, 20, 36)]
    for first, last, kv_source, index_source in groups:
        for layer in range(first, last + 1):
            plan = model.layers[layer]
            assert (plan.kv_source, plan.index_source, plan.selection) == (kv_source, index_source, "topk")
    candidates = {plan.layer: plan.candidates for plan in model.layers if plan.candidates != "none"}
    assert candidates == {20: "publish", 24: "use", 28: "use", 32: "use", 36: "use"}
    assert {plan.layer: plan.engram for plan in model.layers if plan.engram is not None} == {1: 0, 14: 1}
    assert {(plan.router, plan.hc_order) for plan in model.layers} == {("scored", "previous")}
    assert [plan.rope for plan in model.layers] == ["main"] * 2 + ["compress"] * 38
    assert (model.rms_eps, model.quant, model.draft) == (1e-20, QuantConfig((32, 32), "fp4"), "dspark")
    assert (model.candidate_topk_blocks, model.candidate_block_size) == (2048, 8)
    assert model.engram is not None and model.engram.num_embeddings == (384006168, 384016682)


def test_base_checkpoints_have_fp8_experts() -> None:
    """V4 spec 4.6; and an upload that does not name the experts' format has FP4 ones (V4 spec 1.2)."""
    assert parse_model_config(v4_flash() | {"expert_dtype": "fp8"}).quant == QuantConfig((128, 128), "fp8")
    assert parse_model_config(without(v4_flash(), "expert_dtype")).quant == QuantConfig((128, 128), "fp4")


@pytest.mark.parametrize("name", GOLDENS)
def test_reference_models_parse(name: str, goldens: Callable[[str], Path]) -> None:
    folder = goldens(name)
    raw = json.loads((folder / "config.json").read_text())
    text = raw.get("text_config", raw)
    model = load_model_config(folder)
    assert ratios(model) == text["compress_ratios"]
    assert (model.vocab_size, model.quant, model.draft) == (text["vocab_size"], None, "none")
    assert load_model_config(folder / "config.json") == model


def test_embedded_model_parses() -> None:
    import abyssal

    model = load_model_config(Path(abyssal.__file__).parent / "assets" / "tiny-v4")
    assert ratios(model) == [0, 0, 4, 128, 4, 128, 4]
    assert [plan.router for plan in model.layers] == ["hash"] + ["scored"] * 6
    assert (model.quant, model.draft) == (QuantConfig((128, 128), "fp4"), "none")


# --- spellings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("released", [v4_flash, v4_pro, v4_flash_0731, v4_small])
def test_i05_transformers_form_equals_released_form(released: Callable[[], dict[str, Any]]) -> None:
    assert parse_model_config(transformers_form(released())) == parse_model_config(released())


def test_i05_both_forms_that_agree_are_accepted() -> None:
    both = transformers_form(v4_small()) | {"compress_ratios": v4_small()["compress_ratios"], "num_hash_layers": 1}
    assert parse_model_config(both) == parse_model_config(v4_small())


@pytest.mark.parametrize("layer", range(6))
def test_i05_forms_that_clash_are_refused(layer: int) -> None:
    clash = v4_small()["compress_ratios"]
    clash[layer] = {0: 4, 4: 128, 128: 0}[clash[layer]]
    with pytest.raises(ConfigError, match=f"layer {layer} has ratio"):
        parse_model_config(transformers_form(v4_small()) | {"compress_ratios": clash})


def test_i05_routers_that_clash_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_hash_layers=2 contradicts mlp_layer_types"):
        parse_model_config(transformers_form(v4_small()) | {"num_hash_layers": 2})
    kinds = transformers_form(v4_small())
    kinds["mlp_layer_types"] = ["moe", "hash_moe"] + ["moe"] * 4  # said per layer, any pattern is a model
    assert [plan.router for plan in parse_model_config(kinds).layers] == ["scored", "hash"] + ["scored"] * 4


def test_i05_no_pattern_is_invented() -> None:
    with pytest.raises(ConfigError, match="neither compress_ratios nor layer_types"):
        parse_model_config(without(v4_small(), "compress_ratios"))
    with pytest.raises(ConfigError, match="neither num_hash_layers nor mlp_layer_types"):
        parse_model_config(without(v4_small(), "num_hash_layers"))
    with pytest.raises(ConfigError, match="compress_rates does not give"):
        parse_model_config(without(transformers_form(v4_small()), "compress_rates"))


@pytest.mark.parametrize("released", [v4_flash, v4_pro, v41_flash])
def test_inference_config_equals_released_config(released: Callable[[], dict[str, Any]]) -> None:
    assert parse_model_config(inference_form(released())) == parse_model_config(released())


def test_inference_config_of_the_refresh() -> None:
    """It counts its three draft stages; also where the file leaves the two epsilons to its program."""
    config = inference_form(v4_flash_0731()) | {"n_mtp_layers": 3}
    assert parse_model_config(without(config, "norm_eps", "hc_eps")) == parse_model_config(v4_flash_0731())


def test_v41_text_config_alone_and_as_transformers_saves_it() -> None:
    """The text part alone is a config; transformers repeats keys in both parts, with null where it does not know."""
    expected = parse_model_config(v41_flash())
    root = v41_flash()
    alone = root["text_config"] | {name: root[name] for name in ("bos_token_id", "eos_token_id", "quantization_config")}
    assert parse_model_config(alone | {"image_token_id": root["image_token_id"]}) == expected
    sources = root["text_config"]["kv_source_layer_ids"]
    kinds = ["shared_compressed_attention" if layer in sources else "sliding_attention" for layer in range(40)]
    repeated = v41_text(
        bos_token_id=None, eos_token_id=1, dtype="bfloat16", architectures=None, layer_types=kinds, engram_pad_id=2, gate_temp=1.0
    )
    assert parse_model_config(repeated) == expected
    kinds[2] = "sliding_attention"
    with pytest.raises(ConfigError, match="layer_types contradicts kv_source_layer_ids"):
        parse_model_config(v41_text(layer_types=kinds))


def test_transformers_defaults_round_trip(tmp_path: Path) -> None:
    """What the library itself emits is accepted whole, by `to_dict` and by `save_pretrained`."""
    transformers = pytest.importorskip("transformers", reason="live oracle")
    config = transformers.DeepseekV4Config()
    config.save_pretrained(tmp_path)
    model = parse_model_config(config.to_dict())
    assert load_model_config(tmp_path) == model
    # The library's own pattern, which is not that of any release (V4 spec 1.2).
    assert ratios(model) == [128, 128] + [128, 4] * 20 + [128]
    assert model.rope_compress == RopeConfig(64, 160000.0, None)


@pytest.mark.parametrize("released", [v4_flash, v4_small, v4_flash_0731])
def test_transformers_saves_the_same_model(released: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    """A released config that went through the library describes the same model."""
    transformers = pytest.importorskip("transformers", reason="live oracle")
    (tmp_path / "config.json").write_text(json.dumps(released()))
    transformers.DeepseekV4Config.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert "compress_ratios" not in saved and "rope_scaling" not in saved
    assert parse_model_config(saved) == parse_model_config(released())


@given(st.sets(st.sampled_from(sorted(ALIASES))))
def test_any_mix_of_spellings_is_the_same_model(chosen: set[str]) -> None:
    for released in (v4_small(), v41_flash()):
        expected = parse_model_config(released)
        for part in (released, released.get("text_config", {})):
            for alias in chosen & {alias for alias, name in ALIASES.items() if name in part}:
                part[alias] = part.pop(ALIASES[alias])
        assert parse_model_config(released) == expected


def test_two_spellings_with_different_values_are_refused() -> None:
    assert parse_model_config(v4_small() | {"dim": 64}) == parse_model_config(v4_small())
    with pytest.raises(ConfigError, match="hidden_size=64 and dim=65 contradict"):
        parse_model_config(v4_small() | {"dim": 65})
    with pytest.raises(ConfigError, match="contradict"):
        parse_model_config(v4_small() | {"dtype": "float32"})
    with pytest.raises(ConfigError, match="eos_token_id is given twice"):
        parse_model_config(v41_text(eos_token_id=5))


# --- rope ---------------------------------------------------------------------------------------------------------------


def rope_forms() -> dict[str, dict[str, Any]]:
    base = without(v4_small(), "rope_scaling")
    main = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125}
    compress = {**YARN, "rope_theta": 160000.0, "attention_factor": 1.0}
    return {
        "flat rope_scaling": base | {"rope_scaling": YARN},
        "flat rope_scaling, both type keys, base inside": base
        | {"rope_scaling": {**YARN, "rope_type": "yarn", "rope_theta": 10000}},
        "flat rope_parameters": base | {"rope_parameters": {**without(YARN, "type"), "rope_type": "yarn"}},
        "nested": base | {"rope_parameters": {"main": main, "compress": compress}},
        "nested without root bases": without(base, "rope_theta", "compress_rope_theta")
        | {"rope_parameters": {"main": main, "compress": compress}},
        "factor instead of size": without(base, "qk_rope_head_dim") | {"partial_rotary_factor": 0.125, "rope_scaling": YARN},
        "two places that agree": base | {"rope_scaling": YARN, "rope_parameters": {"main": main, "compress": compress}},
        "inference names": base | {"rope_factor": 16, "original_seq_len": 65536, "beta_fast": 32, "beta_slow": 1},
    }


@pytest.mark.parametrize("form", rope_forms())
def test_i01_rope_settings_in_every_form_are_the_same(form: str) -> None:
    model = parse_model_config(rope_forms()[form])
    assert model.rope_main == RopeConfig(64, 10000.0, None)
    assert model.rope_compress == RopeConfig(64, 160000.0, RELEASED_YARN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"compress": {**YARN, "rope_theta": 160000}}}, "'main' is missing"),
        ({"rope_parameters": {"main": {"rope_type": "default"}}}, "'compress' is missing"),
        ({}, "does not give YaRN"),
        (
            {"rope_parameters": {"main": {**YARN, "rope_theta": 10000}, "compress": YARN}},
            "main: rope_type='yarn' is not supported",
        ),
        ({"rope_scaling": {**YARN, "type": "linear"}}, "'linear' is not supported"),
        ({"rope_scaling": {**YARN, "rope_type": "default"}}, "contradict"),
        ({"rope_scaling": {**YARN, "mscale": 1.0}}, "unknown key 'mscale'"),
        ({"rope_scaling": {**YARN, "attention_factor": 1.28}}, "attention_factor=1.28 is not supported"),
        ({"rope_scaling": {**YARN, "rope_theta": 160000}}, "rope_theta gives 10000.0 and"),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, "factor=0.5 must be at least 1"),
        ({"rope_scaling": {**YARN, "beta_fast": 1}}, "must be above beta_slow"),
        ({"rope_scaling": without(YARN, "factor")}, "required key 'factor' is missing"),
        ({"rope_scaling": {"type": "default", "factor": 16}}, "unknown key 'factor'"),
        ({"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 8}}, "keep one of them"),
        ({"rope_scaling": YARN, "partial_rotary_factor": 0.25}, "for the rotary size"),
        ({"rope_scaling": YARN, "partial_rotary_factor": 0.1251}, "not a whole number"),
        ({"rope_scaling": [1]}, "must be a JSON object"),
        ({"rope_factor": 16, "original_seq_len": 65536, "beta_fast": 32}, "required key 'beta_slow' is missing"),
    ],
)
def test_i01_incomplete_or_clashing_rope_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_model_config(without(v4_small(), "rope_scaling") | change)


def test_i01_no_scaling_must_be_said() -> None:
    for said in (
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default"}},
    ):
        model = parse_model_config(without(v4_small(), "rope_scaling") | said)
        assert model.rope_compress == RopeConfig(64, 160000.0, None)
    assert parse_model_config(v4_small() | {"rope_scaling": None, "rope_parameters": YARN}) == parse_model_config(v4_small())


# --- draft stages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [0, 1, 3])
def test_i07_draft_tail_never_shifts_the_decoder(stages: int) -> None:
    released = v4_small()
    decoder = released["compress_ratios"][:6]
    model = parse_model_config(released | {"compress_ratios": decoder + [0] * stages})
    assert ratios(model) == decoder
    assert len(model.layers) == 6


@pytest.mark.parametrize("tail", [[4], [0, 4, 0], [0, 0, 128], [128, 128, 128]])
def test_i07_non_zero_draft_tail_is_refused(tail: list[int]) -> None:
    released = v4_small()
    with pytest.raises(ConfigError, match="belong to draft stages and must be 0"):
        parse_model_config(released | {"compress_ratios": released["compress_ratios"][:6] + tail})
    with pytest.raises(ConfigError, match="belong to draft stages and must be 0"):
        parse_model_config(v41_text(compress_ratios=v41_flash()["text_config"]["compress_ratios"][:40] + [1, 0, 0]))


def test_i07_too_few_ratios_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 entries for num_hidden_layers=6"):
        parse_model_config(v4_small() | {"compress_ratios": [0, 0, 4, 128, 4]})


def test_draft_kind() -> None:
    assert parse_model_config(v4_small() | {"num_nextn_predict_layers": 0}).draft == "none"
    assert parse_model_config(v41_text(num_nextn_predict_layers=0)).draft == "none"
    with pytest.raises(ConfigError, match="n_mtp_layers=2 contradicts"):
        parse_model_config(v4_small() | {"n_mtp_layers": 2})
    for name in ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank"):
        with pytest.raises(ConfigError, match=f"required key '{name}' is missing"):
            parse_model_config(without(v4_flash_0731(), name))


# --- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"o_groups": 3}, "must divide num_attention_heads=4"),
        ({"num_hash_layers": 7}, "num_hash_layers=7 must be an integer from 0 to 6"),
        ({"index_topk": 0}, "index_topk=0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 must be an integer from 1 to 8"),
        ({"compress_ratios": [0, 0, 4, 64, 4, 128, 0]}, "gives layer 3 ratio 64; supported: 0, 4, 128"),
        ({"compress_ratios": [0, 0, 2, 128, 4, 128, 0]}, "gives layer 2 ratio 2"),
        ({"compress_ratios": "0,0,4"}, "must be a list of integers"),
        ({"compress_ratios": [0, 0, -4, 128, 4, 128, 0]}, "must be a list of integers"),
        ({"index_head_dim": 96}, "must be a power of two"),
        ({"index_head_dim": 32}, "smaller than the 64 rotary dimensions"),
        ({"qk_rope_head_dim": 63}, "rotate in pairs"),
        ({"qk_rope_head_dim": 514}, "must be an integer from 2 to 512"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 is not supported; only 1 is"),
        ({"hidden_act": "gelu"}, "only 'silu' is"),
        ({"scoring_func": "sigmoid"}, "only 'sqrtsoftplus' is"),
        ({"topk_method": "greedy"}, "only 'noaux_tc' is"),
        ({"norm_topk_prob": False}, "only True is"),
        ({"norm_topk_prob": 1}, "only True is"),
        ({"tie_word_embeddings": True}, "only False is"),
        ({"attention_bias": True}, "only False is"),
        ({"n_group": 8}, "only 1 is"),
        ({"n_shared_experts": 2}, "n_shared_experts=2"),
        ({"model_type": "deepseek_v3"}, "model_type='deepseek_v3' is not supported"),
        ({"model_type": None}, "model_type=None is not supported"),
        ({"architectures": ["DeepseekV41ForCausalLM"]}, "only .'DeepseekV4ForCausalLM'. is"),
        ({"torch_dtype": "int8"}, "dtype='int8' is not supported"),
        ({"expert_dtype": "int4"}, "supported: fp4, fp8"),
        ({"quantization_config": None}, "quantization_config is not"),
        ({"quantization_config": {**V4_QUANT, "expert_dtype": "fp8"}}, "differs from the one in quantization_config"),
        ({"quantization_config": {**V4_QUANT, "quant_method": "awq"}}, "supported: fp8"),
        ({"quantization_config": {**V4_QUANT, "weight_block_size": [128]}}, "two sizes"),
        ({"quantization_config": {**V4_QUANT, "weight_block_size": None}}, "'weight_block_size' is null"),
        ({"quantization_config": {**V4_QUANT, "bits": 4}}, "unknown key 'bits'"),
        ({"eos_token_id": []}, "at least one id"),
        ({"eos_token_id": 192}, "from 0 to 191"),
        ({"eos_token_id": [1, 192]}, "from 0 to 191"),
        ({"bos_token_id": None}, "'bos_token_id' is null"),
        ({"hidden_size": 64.0}, "hidden_size=64.0 must be an integer"),
        ({"hidden_size": True}, "hidden_size=True must be an integer"),
        ({"hidden_size": "64"}, "hidden_size='64' must be an integer"),
        ({"swiglu_limit": float("nan")}, "must be a finite number"),
        ({"swiglu_limit": float("inf")}, "must be a finite number"),
        ({"swiglu_limit": 0}, "must be above 0"),
        ({"rms_norm_eps": -1e-6}, "must be above 0"),
        ({"kv_source_layer_ids": [2]}, "unknown key 'kv_source_layer_ids'"),
        ({"gate_temp": 1.0}, "unknown key 'gate_temp'"),
        ({"sliding_windw": 128}, "unknown key 'sliding_windw'; did you mean 'sliding_window'"),
    ],
)
def test_contradictory_or_unsupported_values_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_model_config(v4_small() | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compress_ratios": [0, 0] + [4] * 18 + [1] * 20}, "gives layer 2 ratio 4; supported: 0, 1, 2"),
        ({"kv_source_layer_ids": [2, 8, 14]}, "gives layer 20 of ratio 1 a source of ratio 2"),
        ({"kv_source_layer_ids": [8, 14, 20]}, "no source at or before layer 2"),
        ({"kv_source_layer_ids": [1, 2, 8, 14, 20]}, "names layer 1, whose ratio is 0"),
        ({"kv_source_layer_ids": [2, 8, 14, 20, 40]}, "from 0 to 39"),
        ({"kv_source_layer_ids": [2, 14, 8, 20]}, "must rise strictly"),
        ({"kv_source_layer_ids": [2, 8, 14, 17, 20]}, "must include every KV source; 17 is missing"),
        ({"index_source_layer_ids": [2, 2, 8, 14, 20]}, "must rise strictly"),
        ({"candidate_source_layer_id": 21}, "must be one of index_source_layer_ids"),
        ({"candidate_source_layer_id": 14}, "must not lie before the last KV source"),
        ({"candidate_source_layer_id": None}, "'candidate_source_layer_id' is null"),
        ({"engram_layer_ids": [1]}, "one entry per engram layer, 1"),
        ({"engram_layer_ids": [14, 1]}, "must rise strictly"),
        ({"engram_layer_ids": [1, 40]}, "from 0 to 39"),
        ({"engram_max_ngram_size": 1}, "from 2 to 16"),
        ({"engram_pad_id": 3}, "contradict"),
        ({"num_hash_layers": 0}, "unknown key 'num_hash_layers'"),
        ({"gate_temp": 0}, "must be above 0"),
        ({"dspark_num_experts_per_tok": 129}, "from 1 to 128"),
        ({"model_type": "deepseek_v4"}, "model_type must be deepseek_v41_text"),
    ],
)
def test_v41_contradictions_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_model_config(v41_text(**change))


EXTREME = [10**12, 2**63, 10**400, -(10**400), 1e13, 1e308, float("inf"), float("nan"), 5e-324, 1e-40]


def numbers(value: Any) -> Iterator[int | float]:
    """Every number that a config holds."""
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from numbers(part)


def extremes(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`values` with one number exchanged for an extreme one, each number in turn."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from (values | {key: other} for other in extremes(value))
        elif type(value) in (int, float):
            yield from (values | {key: extreme} for extreme in EXTREME)
        elif isinstance(value, list) and value and type(value[0]) is int:
            yield from (values | {key: [extreme, *value[1:]]} for extreme in EXTREME)


@pytest.mark.parametrize(
    "values", [v4_small() | {"quantization_config": V4_QUANT}, v4_small() | {"rope_scaling": YARN}, v41_text()]
)
def test_no_number_beyond_what_the_model_can_compute_with_passes(values: dict[str, Any]) -> None:
    num_refused = 0
    for extreme in extremes(values):
        try:
            model = parse_model_config(extreme)
        except ConfigError as error:
            assert len(str(error)) < 400
            num_refused += 1
        else:
            assert all(abs(number) < 2**31 or isinstance(number, float) for number in numbers(model))
            assert all(number == 0 or 1e-30 <= abs(number) <= 1e12 for number in numbers(model))
    assert num_refused > 200


@pytest.mark.parametrize("iterations", [10**9, 1001])
def test_iterations_that_never_end_are_refused(iterations: int) -> None:
    with pytest.raises(ConfigError, match="hc_sinkhorn_iters.* from 1 to 1000"):
        parse_model_config(v4_small() | {"hc_sinkhorn_iters": iterations})


def test_v41_without_second_level() -> None:
    model = parse_model_config(v41_text(candidate_source_layer_id=-1))
    assert {plan.candidates for plan in model.layers} == {"none"}
    assert (model.candidate_topk_blocks, model.candidate_block_size) == (None, None)


def test_v41_without_engram() -> None:
    model = parse_model_config(v41_text(engram_layer_ids=[], engram_num_embeddings=[], engram_compressed_vocab_size=0))
    assert model.engram is None and {plan.engram for plan in model.layers} == {None}


def test_v41_experts_format_must_be_said() -> None:
    config = v41_flash()
    del config["quantization_config"]["expert_dtype"]
    with pytest.raises(ConfigError, match="'expert_dtype' is missing"):
        parse_model_config(config)


def test_v41_vision_part_is_recognised() -> None:
    config = v41_flash()
    assert parse_model_config(config).image_token_id == 129264 and parse_model_config(v4_flash()).image_token_id is None
    with pytest.raises(ConfigError, match="image_token_id"):
        parse_model_config(config | {"image_token_id": 129280})
    config["vision_config"]["model_type"] = "clip_vision"
    with pytest.raises(ConfigError, match="deepseek_v41_vision"):
        parse_model_config(config)


def test_the_argument_is_not_changed() -> None:
    for released in (v4_flash(), v41_flash(), transformers_form(v4_small()), inference_form(v41_flash())):
        before = copy.deepcopy(released)
        parse_model_config(released)
        assert released == before


# Keys whose absence has a meaning of its own that equals the released value, or that do not matter.
OPTIONAL = {
    *("architectures", "transformers_version", "pad_token_id", "image_token_id", "vision_config", "initializer_range"),
    *("use_cache", "attention_dropout", "attention_bias", "tie_word_embeddings", "hidden_act", "scoring_func", "topk_method"),
    *("norm_topk_prob", "num_key_value_heads", "torch_dtype", "dtype", "expert_dtype"),
    # an unquantised V4.1 checkpoint; in V4 expert_dtype stays behind and contradicts
    "quantization_config",
}


@pytest.mark.parametrize("released", [v4_small, v4_flash_0731, v41_flash])
def test_every_key_that_matters_is_required(released: Callable[[], dict[str, Any]]) -> None:
    """Dropping one key, or setting it to null, is refused unless the key is known to be optional."""
    for spoil in (lambda part, name: part.pop(name), lambda part, name: part.update({name: None})):
        for inner in (False, True):
            for name in released().get("text_config", {}) if inner else released():
                config = released()
                part = config["text_config"] if inner else config
                spoil(part, name)
                if name in OPTIONAL or (name, part.get(name, 0)) == ("rope_scaling", None) or (inner and name == "model_type"):
                    continue
                with pytest.raises(ConfigError):
                    parse_model_config(config)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.data(), st.sampled_from(["released", "transformers", "inference", "v41"]))
def test_spoiled_keys_are_never_accepted_silently(data: st.DataObject, form: str) -> None:
    """Random keys dropped or misspelled: either an error, or exactly the same model."""
    source = {
        "released": v4_flash_0731,
        "transformers": lambda: transformers_form(v4_small()),
        "inference": lambda: inference_form(v4_small()),
        "v41": v41_flash,
    }[form]
    config, expected = source(), parse_model_config(source())
    part = config["text_config"] if form == "v41" and data.draw(st.booleans()) else config
    for name in data.draw(st.lists(st.sampled_from(sorted(part)), min_size=1, max_size=3, unique=True)):
        value = part.pop(name)
        if data.draw(st.booleans()):
            place = data.draw(st.integers(0, len(name) - 1))
            misspelled = name[:place] + name[place + 1 :]
            if misspelled not in part:
                part[misspelled] = value
    try:
        model = parse_model_config(config)
    except ConfigError:
        return
    if "quantization_config" not in config:
        expected = dataclasses.replace(expected, quant=model.quant)  # both keys of it gone: an unquantised checkpoint
    if "image_token_id" not in config:
        expected = dataclasses.replace(expected, image_token_id=None)  # the key is optional: a model of text only
    assert model == expected


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.data())
def test_wrong_types_are_config_errors(data: st.DataObject) -> None:
    """Any JSON value in any place gives a model or a `ConfigError`, never another exception."""
    config = data.draw(st.sampled_from([v4_small(), v41_flash(), transformers_form(v4_small()), inference_form(v4_small())]))
    nested = [part for part in config.values() if isinstance(part, dict)]
    part = data.draw(st.sampled_from([config, *nested]))
    junk = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=5,
    )
    part[data.draw(st.sampled_from(sorted(part)))] = data.draw(junk)
    try:
        parse_model_config(config)
    except ConfigError as error:
        assert len(str(error)) < 1000


def test_random_junk_is_refused() -> None:
    for junk in ({}, {"dim": 1}, {"model_type": "deepseek_v4"}, {"model_type": "deepseek_v41"}, {"model_type": ["deepseek_v4"]}):
        with pytest.raises(ConfigError):
            parse_model_config(junk)


# --- files --------------------------------------------------------------------------------------------------------------


def write(folder: Path, **files: Any) -> Path:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[1]", "must hold a JSON object"),
        ("[" * 100_000, "is not JSON"),
        ('{"model_type": "deepseek_v4", "model_type": "deepseek_v4"}', "appears twice"),
    ],
)
def test_broken_config_file(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model_config(write(tmp_path, config=text))


def test_missing_config_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="does not exist"):
            load_model_config(path)


def test_config_file_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(ConfigError, match="is not JSON"):
        load_model_config(tmp_path)


def test_config_file_with_a_number_that_python_does_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"hidden_size": {"9" * 5000}}}')
    with pytest.raises(ConfigError, match="is not JSON"):
        load_model_config(tmp_path)


def test_n07_code_named_by_a_config_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    write(tmp_path, config=v4_small() | {"auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}})
    assert load_model_config(tmp_path) == parse_model_config(v4_small())
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("in_config", "in_generation", "union"),
    [(1, 7, (1, 7)), ([1, 5], 1, (1, 5)), (1, [5, 1, 6], (1, 5, 6)), ([3, 3], None, (3,)), (1, None, (1,))],
)
def test_l27_eos_ids_of_both_files_are_joined(in_config: Any, in_generation: Any, union: tuple[int, ...], tmp_path: Path) -> None:
    write(tmp_path, config=v4_small() | {"eos_token_id": in_config}, generation_config={"eos_token_id": in_generation})
    assert load_model_config(tmp_path).eos_token_ids == union


def test_l27_eos_outside_the_vocabulary(tmp_path: Path) -> None:
    write(tmp_path, config=v4_small(), generation_config={"eos_token_id": 192})
    with pytest.raises(ConfigError, match="outside the vocabulary of 192"):
        load_model_config(tmp_path)


def test_generation_defaults(tmp_path: Path) -> None:
    assert load_generation_defaults(tmp_path) == ((), {})
    released = {
        "_from_model_config": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 1.0,
    }
    write(tmp_path, generation_config=released | {"transformers_version": "4.46.3"})
    assert load_generation_defaults(tmp_path) == ((1,), {"temperature": 1.0, "top_p": 1.0})
    write(tmp_path, generation_config={"do_sample": False, "temperature": 0.7, "top_k": 20, "max_new_tokens": 9, "min_p": 0})
    assert load_generation_defaults(tmp_path) == ((), {"temperature": 0.0, "top_k": 20, "max_tokens": 9, "min_p": 0.0})


@pytest.mark.parametrize(
    "bad",
    [
        {"temprature": 1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"temperature": -1},
        {"top_k": 1.5},
        {"do_sample": "yes"},
        {"eos_token_id": "</s>"},
    ],
)
def test_bad_generation_defaults_are_refused(bad: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        load_generation_defaults(write(tmp_path, generation_config=bad))


def test_generation_config_saved_by_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="live oracle")
    transformers.GenerationConfig(eos_token_id=[1, 2], do_sample=True, temperature=0.6, top_p=0.95).save_pretrained(tmp_path)
    assert load_generation_defaults(tmp_path) == ((1, 2), {"temperature": 0.6, "top_p": 0.95})
