"""Names: every accepted spelling goes to one place, and nothing that merely resembles one is accepted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from abyssal.checkpoint.names import Slot, draft_kind, is_vision, parse, scale_names, value_names
from tests.checkpoint.build import draft_tensors, prefixed_name, shapes, t4_config, t41_config, transformers_name, v41_shapes

RELEASED = list(shapes(t4_config()))
V41 = list(v41_shapes(t41_config()))
PLAIN = [name for name in RELEASED if ".experts." not in name]
WQ_A = Slot("layers.3.attn.wq_a")


@pytest.mark.parametrize("spell", [prefixed_name, lambda name: f"model.{name}", lambda name: name])
def test_j07_spellings_mean_the_same_slot(spell):
    slots = {name: parse(spell(name)) for name in RELEASED}
    assert None not in slots.values() and len(set(slots.values())) == len(RELEASED)
    assert slots == {name: parse(name) for name in RELEASED}


def test_j07_transformers_names_mean_the_same_slot():
    assert {n: parse(transformers_name(n)) for n in PLAIN} == {n: parse(n) for n in PLAIN}
    assert parse("model.layers.3.mlp.experts.gate_up_proj") == Slot("layers.3.ffn.experts.w13")
    assert parse("model.layers.3.mlp.experts.down_proj_scale_inv") == Slot("layers.3.ffn.experts.w2", "scale")
    assert parse("layers.3.ffn.experts.17.w3.weight") == Slot("layers.3.ffn.experts.w13", "value", 17, "w3")


@pytest.mark.parametrize(
    ("name", "slot"),
    [
        ("layers.3.attn.wq_a.weight", WQ_A),
        ("layers.3.attn.wq_a.scale", Slot(WQ_A.target, "scale")),
        ("layers.3.attn.wq_a.weight_scale_inv", Slot(WQ_A.target, "scale")),
        ("layers.3.attn.wq_a.weight_scale", Slot(WQ_A.target, "scale")),
        ("layers.3.hc_attn_scale", Slot("layers.3.hc_attn_scale")),  # a parameter, not the scale of something
        ("model.layers.3.attn_hc.scale", Slot("layers.3.hc_attn_scale")),
        ("model.hc_head.hc_scale", Slot("hc_head_scale")),
    ],
)
def test_j11_scale_and_weight_are_told_apart(name, slot):
    assert parse(name) == slot


@pytest.mark.parametrize(
    "name",
    [
        "", "layers", "layers.3", "layers.3.", "layers..attn.wq_a.weight", "layers.03.attn.wq_a.weight",
        "layers.\u0663.attn.wq_a.weight", "layers.-1.attn.wq_a.weight", "xlayers.3.attn.wq_a.weight",
        "layers.3.attn.wq_a.weight\n", "layers.3.attn.wq_a", "layers.3.attn.wq_a.weight.scale", "layers.3.attn.wq_a.input_scale",
        "layers.3.attn.wq_a.weights", "model.model.layers.3.attn.wq_a.weight", "layers.3.layers.3.attn.wq_a.weight",
        "layers.3.mlp.experts.01.w1.weight", "layers.3.ffn.experts.1.w4.weight", "layers.3.ffn.experts.1.w1.bias",
        "layers.3.ffn.experts.w13", "layers.3.attn.wq_a.bias", "layers.3.attn.compressor.wkv.scale", "model.lm_head.weight",
        "layers.3.attn.indexer.wk.bias", "layers.3.ffn.gate.bias_v", "vision.norm.weight", "aligner.w1.weight",
        "layers.3.engram.embed", "layers.3.engram.q_weight.weight", "engram.wkv.weight",
        "mtp.0.attn.wq_a.weight", "language_model.layers.3.attn.wq_a.weight",
    ],
)  # fmt: skip
def test_j11_resembling_names_are_unknown(name):
    assert parse(name) is None


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(RELEASED), st.data())
def test_j11_one_changed_character_is_never_the_same_slot(name, data):
    position = data.draw(st.integers(0, len(name)))
    replaced = data.draw(st.integers(0, 1))
    changed = name[:position] + data.draw(st.sampled_from(["", *"._01x \nA"])) + name[position + replaced :]
    if changed != name:
        assert parse(changed) != parse(name)


def test_names_tried_lead_back_to_the_slot():
    """What a message suggests must be accepted when the user follows it."""
    for name in RELEASED:
        slot = parse(name)
        tried = value_names(slot)
        assert name in tried and {parse(t).target for t in tried} == {slot.target}
        for scale in scale_names("model.layers.3.self_attn.q_a_proj.weight"):
            assert parse(scale) == Slot(WQ_A.target, "scale")
    assert parse(*scale_names("layers.3.mlp.experts.down_proj")) == Slot("layers.3.ffn.experts.w2", "scale")


def test_j07_v41_names_mean_one_slot_each():
    slots = {name: parse(name) for name in V41}
    assert None not in slots.values() and len(set(slots.values())) == len(V41)
    assert {name: parse(f"model.{name}") for name in V41} == slots
    assert parse("layers.1.engram.embed.scale") == Slot("layers.1.engram.embed", "scale")


def test_tensors_of_the_image_tower():
    for name in (
        "vision.blocks.0.attn.wqkv.bias",
        "aligner.w2.weight",
        "image_start",
        "image_newline",
        "model.vision.norm.weight",
    ):
        assert is_vision(name) and parse(name) is None
    for name in ("vision", "vision.", "xvision.norm.weight", "image_middle", "image_start.weight", "layers.0.vision.w1"):
        assert not is_vision(name)


@pytest.mark.parametrize("draft", ["mtp", "dspark"])
def test_j05_draft_tensors_are_recognised_by_name(draft):
    kinds = {name: draft_kind(name) for name in draft_tensors(t4_config(), draft)}
    assert set(kinds.values()) == {draft, "either"}
    assert all(draft_kind(f"model.{name}") == kind for name, kind in kinds.items())


@pytest.mark.parametrize(
    "name",
    ["mtp.0.attn.wq_a.weightx", "mtp.0.unknown", "mtp.attn.wq_a.weight", "mtp.00.norm.weight", "xmtp.0.norm.weight", "mtp.0.",
     "mtp.0.layers.0.attn.wq_a.weight", "mtp.0.markov_head.embed"],
)  # fmt: skip
def test_j05_other_mtp_names_are_unknown(name):
    assert draft_kind(name) is None and parse(name) is None
