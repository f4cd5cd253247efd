"""Tensor names: every accepted spelling, matched whole, to the place where the tensor goes.

Released names, names with a `model.` prefix and transformers' names are accepted (V4 spec 4.1, 4.7). A name is split at fixed
anchors and the rest looked up in a table; no weight that is loaded is matched by part of a name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

SCALE_SUFFIXES = (".scale", ".weight_scale_inv", ".weight_scale")


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one stored tensor goes."""

    target: str  # key of `expected_tensors`
    part: Literal["value", "scale"] = "value"
    expert: int | None = None  # None: not an expert, or all experts of the layer in one tensor
    piece: str = ""  # w1, w2 or w3 of that expert; "": the whole target


# transformers' spellings of modules with a weight and perhaps a scale, relative to `layers.N.`
_LINEARS: dict[str, tuple[str, ...]] = {
    "attn.wq_a": ("self_attn.q_a_proj",),
    "attn.wq_b": ("self_attn.q_b_proj",),
    "attn.wkv": ("self_attn.kv_proj",),
    "attn.wo_a": ("self_attn.o_a_proj",),
    "attn.wo_b": ("self_attn.o_b_proj",),
    "attn.indexer.wq_b": ("self_attn.compressor.indexer.q_b_proj",),
    "attn.indexer.weights_proj": ("self_attn.compressor.indexer.scorer.weights_proj",),
    "attn.indexer.wk": (),
    "engram.embed": (),
    "engram.wkv": (),
    "ffn.shared_experts.w1": ("mlp.shared_experts.gate_proj",),
    "ffn.shared_experts.w2": ("mlp.shared_experts.down_proj",),
    "ffn.shared_experts.w3": ("mlp.shared_experts.up_proj",),
}
_TENSORS: dict[str, tuple[str, ...]] = {
    "attn_norm.weight": ("input_layernorm.weight",),
    "ffn_norm.weight": ("post_attention_layernorm.weight",),
    "hc_attn_fn": ("attn_hc.fn",),
    "hc_attn_base": ("attn_hc.base",),
    "hc_attn_scale": ("attn_hc.scale",),
    "hc_ffn_fn": ("ffn_hc.fn",),
    "hc_ffn_base": ("ffn_hc.base",),
    "hc_ffn_scale": ("ffn_hc.scale",),
    "attn.attn_sink": ("self_attn.sinks",),
    "attn.q_norm.weight": ("self_attn.q_a_norm.weight",),
    "attn.kv_norm.weight": ("attn.norm.weight",),  # written by transformers 5.24's save_pretrained
    "attn.compressor.ape": ("self_attn.compressor.position_bias",),
    "attn.compressor.wkv.weight": ("self_attn.compressor.kv_proj.weight",),
    "attn.compressor.wgate.weight": ("self_attn.compressor.gate_proj.weight",),
    "attn.compressor.norm.weight": ("self_attn.compressor.kv_norm.weight",),
    "attn.indexer.compressor.ape": ("self_attn.compressor.indexer.position_bias",),
    "attn.indexer.compressor.wkv.weight": ("self_attn.compressor.indexer.kv_proj.weight",),
    "attn.indexer.compressor.wgate.weight": ("self_attn.compressor.indexer.gate_proj.weight",),
    "attn.indexer.compressor.norm.weight": ("self_attn.compressor.indexer.kv_norm.weight",),
    "ffn.gate.weight": (),
    "ffn.gate.bias": ("ffn.gate.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
    "ffn.gate.bias_vl": (),
    "ffn.gate.tid2eid": (),
    "attn.indexer.k_norm.weight": (),
    "engram.q_weight": (),
    "engram.k_weight": (),
}
_FUSED = {"mlp.experts.gate_up_proj": "ffn.experts.w13", "mlp.experts.down_proj": "ffn.experts.w2"}
_FUSED_SCALE = "_scale_inv"
_TOP: dict[str, tuple[str, ...]] = {
    "embed.weight": ("model.embed.weight", "embed_tokens.weight", "model.embed_tokens.weight"),
    "head.weight": ("model.head.weight", "lm_head.weight"),
    "norm.weight": ("model.norm.weight",),
    "hc_head_fn": ("model.hc_head_fn", "hc_head.hc_fn", "model.hc_head.hc_fn"),
    "hc_head_base": ("model.hc_head_base", "hc_head.hc_base", "model.hc_head.hc_base"),
    "hc_head_scale": ("model.hc_head_scale", "hc_head.hc_scale", "model.hc_head.hc_scale"),
}


def _spellings(released: str, others: tuple[str, ...]) -> list[str]:
    """`released`, the same below `self_attn` or `mlp`, and `others`."""
    parent, dot, rest = released.partition(".")
    renamed = {"attn": "self_attn", "ffn": "mlp"}.get(parent, parent) + dot + rest
    return list(dict.fromkeys((released, renamed, *others)))


def _layer_names() -> dict[str, tuple[str, Literal["value", "scale"]]]:
    """Accepted name below `layers.N.` -> target below `layers.N.` and which part of it."""
    names: dict[str, tuple[str, Literal["value", "scale"]]] = {}
    for released, others in _LINEARS.items():
        for module in _spellings(released, others):
            names[f"{module}.weight"] = (released, "value")
            names |= {module + suffix: (released, "scale") for suffix in SCALE_SUFFIXES}
    for released, others in _TENSORS.items():
        names |= {name: (released, "value") for name in _spellings(released, others)}
    for fused, target in _FUSED.items():
        names[fused] = (target, "value")
        names[fused + _FUSED_SCALE] = (target, "scale")
    return names


_NUMBER = r"(0|[1-9][0-9]*)"
_LAYER = re.compile(rf"(?:model\.)?layers\.{_NUMBER}\.(.+)")
_EXPERT = re.compile(rf"(?:ffn|mlp)\.experts\.{_NUMBER}\.(w1|w2|w3)\.(weight|scale|weight_scale_inv|weight_scale)")
_DRAFT = re.compile(rf"(?:model\.)?mtp\.{_NUMBER}\.(.+)")
_IN_LAYER = _layer_names()
_IN_TOP = {name: released for released, others in _TOP.items() for name in (released, *others)}


def parse(name: str) -> Slot | None:
    """The slot of a backbone tensor, or None for a name that is not known. Says nothing about whether the model has it."""
    if name in _IN_TOP:
        return Slot(_IN_TOP[name])
    match = _LAYER.fullmatch(name)
    return None if match is None else _parse_in_layer(f"layers.{match[1]}.", match[2])


def _parse_in_layer(prefix: str, name: str) -> Slot | None:
    if name in _IN_LAYER:
        target, part = _IN_LAYER[name]
        return Slot(prefix + target, part)
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    target = "ffn.experts.w2" if match[2] == "w2" else "ffn.experts.w13"
    return Slot(prefix + target, "value" if match[3] == "weight" else "scale", int(match[1]), match[2])


def value_names(slot: Slot) -> list[str]:
    """The spellings looked for when the value of `slot` is missing; those below `layers.` may also start with `model.`."""
    if slot.expert is not None:
        layer, _, stack = slot.target.partition(".ffn.")
        single = [f"{layer}.{parent}.experts.{slot.expert}.{slot.piece}.weight" for parent in ("ffn", "mlp")]
        return single + [f"{layer}.{fused}" for fused, target in _FUSED.items() if target == f"ffn.{stack}"]
    match = _LAYER.fullmatch(slot.target)
    if match is None:
        return [name for name, released in _IN_TOP.items() if released == slot.target]
    return [f"layers.{match[1]}.{name}" for name, place in _IN_LAYER.items() if place == (match[2], "value")]


def scale_names(value_name: str) -> list[str]:
    """The names under which the scale of the tensor called `value_name` may be stored beside it."""
    if not value_name.endswith(".weight"):
        return [value_name + _FUSED_SCALE]
    return [value_name.removesuffix(".weight") + suffix for suffix in SCALE_SUFFIXES]


_DRAFT_MODULES = {"e_proj": "mtp", "h_proj": "mtp", "main_proj": "dspark"}
_DRAFT_TENSORS = {
    "enorm.weight": "mtp",
    "hnorm.weight": "mtp",
    "main_norm.weight": "dspark",
    "markov_head.markov_w1.weight": "dspark",
    "markov_head.markov_w2.weight": "dspark",
    "markov_head.embed.weight": "dspark",
    "markov_head.head.weight": "dspark",
    "confidence_head.proj.weight": "dspark",
}
_DRAFT_SHARED = frozenset(("norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale", "embed.weight", "head.weight"))


def draft_kind(name: str) -> str | None:
    """What a `mtp.N.` tensor belongs to: `mtp`, `dspark`, `either`, or None for a name of neither (V4 spec 4.4, 4.5, V4.1 spec 5.5)."""
    match = _DRAFT.fullmatch(name)
    if match is None:
        return None
    relative = match[2]
    if relative in _DRAFT_TENSORS:
        return _DRAFT_TENSORS[relative]
    for module, kind in _DRAFT_MODULES.items():
        if relative in (f"{module}.weight", *(module + suffix for suffix in SCALE_SUFFIXES)):
            return kind
    known = relative in _DRAFT_SHARED or _parse_in_layer("layers.0.", relative) is not None
    return "either" if known else None


_VISION = re.compile(r"(?:model\.)?(?:(?:vision|aligner)\..+|image_(?:start|end|newline))")


def is_vision(name: str) -> bool:
    """Whether a tensor belongs to V4.1's image tower, its aligner or the marks around an image (V4.1 spec 5.6)."""
    return _VISION.fullmatch(name) is not None
