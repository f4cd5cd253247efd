"""Random models against transformers, computed live: every knob of the configuration, every naming, every cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cuts import random_cuts
from tests.support.small_model import config_dict

pytest.importorskip("transformers", minversion="5.24", reason="transformers knows DeepSeek V4 from 5.24 on")
from abyssal import LLM
from tests.support import oracle
from tests.support.stepping import Side, decoding

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4  # fp32 against fp32 with sums in another order; logits reach 10

# name -> compression ratios, prompt length, what differs from `config_dict`
MODELS: dict[str, tuple[list[int], int, dict[str, Any]]] = {
    "window_only": ([0, 0], 70, {"sliding_window": 7, "num_attention_heads": 6, "o_groups": 3, "hc_sinkhorn_iters": 1}),
    "second_layer_4": ([0, 4, 0, 4], 150, {"num_hash_layers": 1, "index_topk": 5, "hc_sinkhorn_iters": 3, "swiglu_limit": 1.0}),
    "second_layer_128": ([0, 128, 4], 300, {"index_topk": 16, "num_attention_heads": 8, "o_groups": 4, "head_dim": 64}),
    "pro_pattern": ([128, 128, 4, 128, 4], 280, {"num_hash_layers": 3, "sliding_window": 128, "index_n_heads": 32}),
    "all_experts": ([4, 0], 60, {"n_routed_experts": 3, "num_experts_per_tok": 3, "swiglu_limit": 0.5, "hc_mult": 2}),
    "one_expert": ([4, 128], 140, {"n_routed_experts": 16, "num_experts_per_tok": 1, "routed_scaling_factor": 2.5, "o_groups": 1}),
    "no_yarn": ([4, 0], 120, {"rope_scaling": None, "compress_rope_theta": 40000.0, "rope_theta": 500.0, "sliding_window": 33}),
    "steep_yarn": (
        [4, 128], 270,
        {"rope_scaling": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 4, "beta_slow": 2},
         "qk_rope_head_dim": 32, "index_topk": 3, "rms_norm_eps": 1e-5, "hc_eps": 1e-4},
    ),
    "odd_sizes": ([0, 4], 90, {"vocab_size": 97, "hidden_size": 36, "q_lora_rank": 12, "o_lora_rank": 7, "moe_intermediate_size": 11}),
}  # fmt: skip


class Case:
    """A random model, a prompt, and what transformers says about it."""

    def __init__(self, name: str) -> None:
        ratios, length, changes = MODELS[name]
        self.config = config_dict(ratios, **changes)
        self.seed = list(MODELS).index(name)
        self.model = oracle.random_model(self.config, self.seed)
        self.ids, self.expected = oracle.draw_prompt(self.model, length, self.seed)

    def load(self, folder: Path, naming: oracle.Naming) -> LLM:
        oracle.save_model(self.model, self.config, folder, naming)
        return LLM(folder, device="cpu", dtype="float32", kv_layout="fp32", kv_cache_bytes=64 << 20)

    def check(self, llm: LLM, chunk_sizes: list[int] | None = None) -> None:
        logits = llm.logits(self.ids, chunk_sizes)
        assert logits.dtype == torch.float32 and logits.shape == self.expected.shape
        torch.testing.assert_close(logits, self.expected, rtol=0, atol=TOLERANCE, msg=lambda m: f"chunks {chunk_sizes}: {m}")


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.fixture(scope="module")
def llm(case: Case, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return case.load(tmp_path_factory.mktemp("released"), "released")


def test_whole_prompt(case: Case, llm: LLM) -> None:
    case.check(llm)


def test_token_by_token(case: Case, llm: LLM) -> None:
    case.check(llm, [1] * len(case.ids))


def test_random_cuts(case: Case, llm: LLM) -> None:
    for sizes in random_cuts(len(case.ids), case.seed, count=10):
        case.check(llm, sizes)


@pytest.mark.parametrize("naming", ["transformers", "save_pretrained"])
def test_other_namings_load_the_same_model(case: Case, tmp_path: Path, naming: oracle.Naming) -> None:
    """transformers' tensor names, and its own way to save: another spelling of names, layer kinds and rope settings."""
    case.check(case.load(tmp_path, naming))


@pytest.mark.parametrize("spelling", ["rope_parameters", "nested", "with_type"])
def test_rope_spellings_give_the_same_model(tmp_path: Path, spelling: str) -> None:
    """Flat `rope_parameters`, nested ones, and `type` for `rope_type`: read as transformers reads the released spelling."""
    case = Case("steep_yarn")
    yarn = case.config.pop("rope_scaling")
    if spelling == "with_type":
        case.config["rope_scaling"] = {**yarn, "type": yarn["rope_type"]}
    elif spelling == "rope_parameters":
        case.config["rope_parameters"] = yarn
    else:
        del case.config["rope_theta"], case.config["compress_rope_theta"], case.config["qk_rope_head_dim"]
        case.config["rope_parameters"] = {
            "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 1.0},
            "compress": {**yarn, "rope_theta": 160000, "partial_rotary_factor": 1.0, "attention_factor": 1.0},
        }
    case.check(case.load(tmp_path, "released"))


@pytest.mark.parametrize("width", [16, 24, 512])
def test_g03_selection_is_as_wide_as_the_config_says(width: int, tmp_path: Path) -> None:
    """From in front of 4 x width tokens, where selection begins, to behind; decoded in ordinary and in fixed shapes (case G03)."""
    config = config_dict([0, 4, 4], index_topk=width)
    model = oracle.random_model(config, seed=width)
    ids, expected = oracle.draw_prompt(model, 4 * width + 10, seed=width)
    oracle.save_model(model, config, tmp_path, "released")
    start, options = 4 * width - 5, {"device": "cpu", "dtype": "float32", "kv_layout": "fp32", "kv_cache_bytes": 64 << 20}
    with LLM(tmp_path, **options) as llm:
        for sizes in (None, [start, *[1] * 15]):
            torch.testing.assert_close(llm.logits(ids, sizes), expected, rtol=0, atol=TOLERANCE)
    side = Side(tmp_path, [ids], **options)
    decoding(side.llm.engine)
    side.step([start])
    for position in range(start, len(ids)):
        torch.testing.assert_close(side.step([1])[0, position], expected[position], rtol=0, atol=TOLERANCE)
    side.llm.close()


@pytest.mark.parametrize("part", ["sinks", "e_score_correction_bias", "position_bias", "base"])
def test_small_parameters_act(case: Case, part: str) -> None:
    """A comparison shows nothing about what has no effect: each kind, set to zero, must move the oracle itself."""
    state = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items() if name.endswith(f".{part}")}
    if part == "e_score_correction_bias" and case.config["num_experts_per_tok"] == case.config["n_routed_experts"]:
        pytest.skip("all experts are chosen, whatever the bias")
    if not zeros:
        assert part == "position_bias" and not any(case.config["compress_ratios"])
        pytest.skip("no compressed layer")
    case.model.load_state_dict(state | zeros)
    moved = (oracle.oracle_logits(case.model, case.ids) - case.expected).abs().max()
    case.model.load_state_dict(state)
    assert moved > 100 * TOLERANCE, f"{part} moves logits by {moved:.1e} only"


@pytest.mark.parametrize("name", ["second_layer_4", "all_experts"])
def test_swiglu_clamp_acts(name: str) -> None:
    """As above, for the limit of the expert activations."""
    case = Case(name)
    limited = [module for module in case.model.modules() if hasattr(module, "limit")]
    assert limited
    for module in limited:
        module.limit = 1e9
    moved = (oracle.oracle_logits(case.model, case.ids) - case.expected).abs().max()
    assert moved > 100 * TOLERANCE, f"the clamp moves logits by {moved:.1e} only"


def test_quantised_weights_of_tiny() -> None:
    """FP8 linears and FP4 experts of a trained model, dequantised twice: by the engine and by a second reading of the spec."""
    from bench.transformers_model import load_transformers

    with LLM("tiny", device="cpu", dtype="float32", kv_layout="fp32", kv_cache_bytes=64 << 20) as llm:
        ids = torch.randint(300, 4000, (400,), generator=torch.Generator().manual_seed(5)).tolist()
        expected = oracle.oracle_logits(load_transformers(Path(llm.engine.info.model_folder)), ids)
        torch.testing.assert_close(llm.logits(ids), expected, rtol=0, atol=5e-4)  # logits reach 30: 1e-4 relative to 6
