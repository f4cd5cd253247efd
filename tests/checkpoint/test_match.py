"""Matching: one tensor too many, too few, misspelt, or of a wrong shape or type stops the load and names itself."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from abyssal.checkpoint.expected import expected_tensors
from abyssal.checkpoint.files import StoredTensor
from abyssal.checkpoint.match import match
from abyssal.checkpoint.names import parse
from abyssal.errors import CheckpointError
from abyssal.model_config import parse_model_config
from tests.checkpoint.build import Names, draft_tensors, random_tensors, renamed, t4_config

TYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0",
    torch.int8: "I8", torch.uint8: "U8", torch.int64: "I64", torch.int32: "I32", torch.float16: "F16",
}  # fmt: skip
# every kind of layer and of tensor, and few experts
CONFIG = t4_config(num_hidden_layers=3, compress_ratios=[0, 4, 128, 0], n_routed_experts=2)
STORED, _ = random_tensors(CONFIG, seed=0, quantised=True)


def check(tensors: dict[str, Tensor], **changes: object) -> None:
    """`match` on headers alone."""
    headers = {n: StoredTensor(n, Path("f"), TYPES[t.dtype], tuple(t.shape), t.nbytes) for n, t in tensors.items()}
    config = parse_model_config({key: value for key, value in (CONFIG | changes).items() if value is not None})
    match(SimpleNamespace(tensors=headers), expected_tensors(config), config)


def refused(tensors: dict[str, Tensor], **changes: object) -> str:
    with pytest.raises(CheckpointError) as error:
        check(tensors, **changes)
    assert "\n" not in str(error.value)
    return str(error.value)


def without(tensors: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.parametrize("names", ["released", "prefixed", "transformers"])
def test_unchanged_tensors_match(names: Names):
    check(renamed(STORED, names))


@pytest.mark.parametrize("names", ["released", "prefixed", "transformers"])
def test_j09_each_tensor_removed(names: Names):
    """Weights and scales, fp8 and fp4: the message names the tensor and, for a scale, the names tried."""
    tensors = renamed(STORED, names)
    for name in tensors:
        message = refused(without(tensors, name))
        slot = parse(name)
        if slot.part == "scale":
            assert "has no scale; names tried:" in message and name in message
        else:
            assert message.startswith("missing tensor; names tried:")
            assert name.removeprefix("model.") in message


def test_j03_known_alias_of_one_scale():
    """One scale alone under another known name is accepted; its weight keeps the released name."""
    for name in ("layers.0.attn.wq_a.scale", "layers.1.ffn.experts.1.w3.scale"):
        for alias in (".weight_scale_inv", ".weight_scale"):
            check(without(STORED, name) | {name.removesuffix(".scale") + alias: STORED[name]})


def test_j03_each_scale_under_an_unknown_name():
    for name in STORED:
        if parse(name).part == "scale":
            unknown = name.removesuffix("scale") + "scale_2"
            assert f"unknown tensors: {unknown}" in refused(without(STORED, name) | {unknown: STORED[name]})


def test_j03_unused_scale_is_listed():
    plain, _ = random_tensors(CONFIG, seed=0, quantised=False)
    scale = {"layers.0.attn.wq_a.scale": STORED["layers.0.attn.wq_a.scale"]}
    assert "unused scale layers.0.attn.wq_a.scale" in refused(plain | scale)
    for name in ("layers.0.attn.wq_a.input_scale", "layers.0.attn_norm.scale", "embed.scale"):
        assert f"unknown tensors: {name};" in refused(STORED | {name: torch.ones(1)})
    projection = "layers.1.attn.indexer.weights_proj.scale"
    assert f"unused scale {projection}" in refused(STORED | {projection: torch.ones(1, 1)})


def test_unknown_tensors_are_listed_up_to_five():
    message = refused(STORED | {f"extra.{i}": torch.ones(1) for i in range(7)})
    assert "extra.0, extra.1, extra.2, extra.3, extra.4 and 2 more;" in message


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(STORED)), st.data())
def test_j07_a_misspelt_tensor_stops_the_load(name, data):
    """Never loaded without it, never ignored."""
    position = data.draw(st.integers(0, len(name) - 1))
    changed = name[:position] + data.draw(st.sampled_from(["", "x", "_", "0"])) + name[position + 1 :]
    if changed != name:
        tensors = without(STORED, name) | {changed: STORED[name]}
        refused(tensors)


def test_each_tensor_with_a_wrong_shape():
    for name, tensor in STORED.items():
        longer = torch.empty(tensor.shape[0] + 1, *tensor.shape[1:], dtype=tensor.dtype)
        message = refused(STORED | {name: longer})
        assert f"{name} (" in message
        assert f"has shape {list(longer.shape)}, expected {list(tensor.shape)}" in message
        assert f"expected {list(tensor.shape)}" in refused(STORED | {name: tensor.flatten().unsqueeze(0).unsqueeze(0)})


def test_each_tensor_with_a_wrong_type():
    for name, tensor in STORED.items():
        wrong = torch.float32 if parse(name).target.endswith("tid2eid") else torch.int64
        assert f"{name} is stored as" in refused(STORED | {name: tensor.view(torch.uint8).to(wrong).reshape(-1)})


@pytest.mark.parametrize("name", ["layers.0.attn_norm.weight", "embed.weight", "layers.1.attn.indexer.weights_proj.weight"])
def test_a_tensor_that_is_never_quantised(name):
    assert "is stored as F8_E4M3; expected BF16 or" in refused(STORED | {name: STORED[name].to(torch.float8_e4m3fn)})


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (1,), (1, 1, 1)])
def test_scale_of_a_wrong_shape(shape):
    """wo_a [64, 128] has one block."""
    name = "layers.0.attn.wo_a.scale"
    if shape == (1, 1):
        assert STORED[name].shape == shape
    else:
        assert f"{name} (F32) has shape {list(shape)}, expected [1, 1]" in refused(STORED | {name: torch.ones(shape)})


def test_scale_type():
    name = "layers.0.attn.wo_a.scale"
    assert "stored as BF16; expected F8_E8M0 or U8 or F32" in refused(STORED | {name: torch.ones(1, 1).bfloat16()})


def test_two_spellings_of_one_tensor():
    name = "layers.0.attn.wq_a.weight"
    for other in (f"model.{name}", "layers.0.self_attn.q_a_proj.weight"):
        message = refused(STORED | {other: STORED[name]})
        assert "two spellings of one tensor" in message and name in message and other in message
    assert "two spellings" in refused(STORED | {"layers.0.attn.wq_a.weight_scale": STORED["layers.0.attn.wq_a.scale"]})


def test_single_and_fused_experts():
    fused = {n: t for n, t in renamed(STORED, "transformers").items() if n.startswith("model.layers.1.mlp.experts.down")}
    message = refused(STORED | fused)
    assert "model.layers.1.mlp.experts.down_proj and layers.1.ffn.experts.0.w2" in message


def test_experts_of_mixed_formats():
    w1, w3 = "layers.1.ffn.experts.0.w1", "layers.1.ffn.experts.1.w3"
    plain = without(STORED, f"{w3}.scale") | {f"{w3}.weight": torch.ones(64, 96)}
    message = refused(plain)
    assert f"{w1}.weight" in message and f"{w3}.weight as F32" in message
    assert f"{w3}.scale as U8" in refused(STORED | {f"{w3}.scale": STORED[f"{w3}.scale"].view(torch.uint8)})


@pytest.mark.parametrize(
    "name",
    [
        "layers.3.attn_norm.weight", "layers.0.ffn.experts.2.w1.weight", "layers.0.ffn.gate.bias", "layers.1.ffn.gate.tid2eid",
        "layers.0.attn.compressor.ape", "layers.2.attn.indexer.wq_b.weight", "layers.2.attn.indexer.compressor.ape",
    ],
)  # fmt: skip
def test_tensors_of_another_configuration(name):
    """A layer, expert, router or compressor too many: config.json belongs to other weights."""
    assert f"config.json does not call for: {name} (3 layers, 2 experts)" in refused(STORED | {name: torch.ones(1)})


def test_a_layer_fewer_in_the_file():
    assert "missing tensor" in refused(STORED, num_hidden_layers=4, compress_ratios=[0, 4, 128, 128, 0])


def test_quantised_tensors_without_quantization_config():
    assert "has no quantization_config" in refused(STORED, quantization_config=None, expert_dtype=None)


def test_fp4_needs_whole_blocks():
    """40 columns hold no whole number of blocks of 32; refused, not rounded."""
    config = CONFIG | {"moe_intermediate_size": 40}
    tensors, _ = random_tensors(config | {"expert_dtype": "fp8"}, seed=0, quantised=True)
    tensors["layers.0.ffn.experts.0.w2.weight"] = torch.zeros(96, 20, dtype=torch.int8)
    assert "its 40 columns are not a multiple of 32" in refused(tensors, moe_intermediate_size=40)


@pytest.mark.parametrize("draft", ["mtp", "dspark"])
@pytest.mark.parametrize("names", ["released", "prefixed"])
def test_j05_draft_reported_once(draft, names, caplog):
    dspark = {"dspark_block_size": 5, "dspark_noise_token_id": 3, "dspark_markov_rank": 4, "dspark_target_layer_ids": [0, 1, 2]}
    tensors = STORED | draft_tensors(CONFIG, draft)
    with caplog.at_level(logging.INFO, logger="abyssal"):
        check(renamed(tensors, names), **(dspark if draft == "dspark" else {}))
    (record,) = caplog.records
    assert f"mtp.* tensors of a {draft} drafter recognised; not used yet" in record.getMessage()


def test_j05_draft_of_the_other_kind():
    dspark = {"dspark_block_size": 5, "dspark_noise_token_id": 3, "dspark_markov_rank": 4, "dspark_target_layer_ids": [0, 1, 2]}
    message = refused(STORED | draft_tensors(CONFIG, "dspark"))
    assert "announces mtp drafting" in message and "belongs to dspark" in message
    message = refused(STORED | draft_tensors(CONFIG, "mtp"), **dspark)
    assert "announces dspark drafting" in message and "belongs to mtp" in message


def test_j05_draft_of_both_kinds_or_of_none():
    both = draft_tensors(CONFIG, "dspark") | draft_tensors(CONFIG, "mtp")
    assert "e_proj" in refused(STORED | both) or "hnorm" in refused(STORED | both)
    assert "neither e_proj nor main_proj" in refused(STORED | {"mtp.0.attn_norm.weight": torch.ones(1)})
    assert "unknown tensors: mtp.0.proj.weight" in refused(STORED | {"mtp.0.proj.weight": torch.ones(1)})


def test_vision_tensors_do_not_belong_to_v4():
    assert "unknown tensors: aligner.w1.weight, vision.norm.weight" in refused(
        STORED | {"aligner.w1.weight": torch.ones(1), "vision.norm.weight": torch.ones(1)}
    )
