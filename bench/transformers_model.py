"""A V4 checkpoint in transformers: names there and back, and exact fp32 copies of FP8 and FP4 weights.

Written independently of the package, so that the two loaders check each other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

# Released name -> transformers' name (V4 spec 4.7), of the whole model and below `layers.N.`
TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"hc_{site}_{part}": f"{site}_hc.{part}" for site in ("attn", "ffn") for part in ("fn", "base", "scale")},
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.wkv.weight": "self_attn.compressor.kv_proj.weight",
    "attn.compressor.wgate.weight": "self_attn.compressor.gate_proj.weight",
    "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn.indexer.compressor.wkv.weight": "self_attn.compressor.indexer.kv_proj.weight",
    "attn.indexer.compressor.wgate.weight": "self_attn.compressor.indexer.gate_proj.weight",
    "attn.indexer.compressor.norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 128  # rows and columns that share an FP8 scale
GROUP = 32  # columns that share an FP4 scale


def to_transformers(released: dict[str, Tensor], num_layers: int, num_experts: int) -> dict[str, Tensor]:
    """Unquantised tensors under released names -> transformers' state dict, experts of a layer stacked."""
    state = {other: released[name] for name, other in TOP.items()}
    for layer in range(num_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        state |= {theirs + other: released[ours + name] for name, other in LAYER.items() if ours + name in released}
        w1, w2, w3 = (
            torch.stack([released[f"{ours}ffn.experts.{e}.{w}.weight"] for e in range(num_experts)]) for w in ("w1", "w2", "w3")
        )
        state[f"{theirs}mlp.experts.gate_up_proj"] = torch.cat([w1, w3], dim=1)  # [E, 2 I, D]
        state[f"{theirs}mlp.experts.down_proj"] = w2
    return state


def to_released(state: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """The inverse of `to_transformers`."""
    released = {name: state[other] for name, other in TOP.items()}
    for layer in range(num_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        released |= {ours + name: state[theirs + other] for name, other in LAYER.items() if theirs + other in state}
        for e, w13 in enumerate(state[f"{theirs}mlp.experts.gate_up_proj"]):
            w1, w3 = w13.chunk(2)
            w2 = state[f"{theirs}mlp.experts.down_proj"][e]
            released |= {f"{ours}ffn.experts.{e}.{w}.weight": t for w, t in (("w1", w1), ("w2", w2), ("w3", w3))}
    return released


def read_dequantised(path: Path) -> dict[str, Tensor]:
    """One safetensors file with released names -> every tensor by name, weights with scales multiplied out in fp32."""
    with safe_open(path, "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors = {}
    for name, value in stored.items():
        if name.endswith(".scale"):
            continue
        scale = stored.get(name.removesuffix(".weight") + ".scale") if name.endswith(".weight") else None
        if scale is not None:
            tensors[name] = _times_scale(value, torch.exp2(scale.view(torch.uint8).float() - 127))
        else:
            tensors[name] = value.float() if value.is_floating_point() else value
    return tensors


def _times_scale(value: Tensor, scale: Tensor) -> Tensor:
    """FP8 [N, K] with scale [N/128, K/128], or FP4 pairs int8 [N, K/2], low nibble first, with scale [N, K/32]."""
    if value.dtype == torch.int8:
        codes = value.view(torch.uint8).long()
        table = torch.tensor(E2M1 + tuple(-v for v in E2M1))
        values = table[torch.stack([codes & 15, codes >> 4], dim=-1)].flatten(1)
        return values * scale.repeat_interleave(GROUP, dim=1)
    rows, columns = value.shape
    return value.float() * scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


def transformers_config(config: dict[str, Any]) -> DeepseekV4Config:
    """The class of a released `config.json`, without quantisation; transformers changes what it is given, so it gets a copy."""
    copy = json.loads(json.dumps(config))
    for name in ("quantization_config", "expert_dtype", "torch_dtype"):
        copy.pop(name, None)
    return DeepseekV4Config(**copy)


def empty_model(config: dict[str, Any]) -> DeepseekV4ForCausalLM:
    """fp32, eager attention; weights are to be loaded or drawn."""
    model = DeepseekV4ForCausalLM._from_config(transformers_config(config), attn_implementation="eager", dtype=torch.float32)
    return model.eval()


def load_transformers(folder: Path) -> DeepseekV4ForCausalLM:
    """A released single-file checkpoint as an fp32 transformers model."""
    config = json.loads((folder / "config.json").read_text())
    model = empty_model(config)
    tensors = read_dequantised(folder / "model.safetensors")
    model.load_state_dict(to_transformers(tensors, config["num_hidden_layers"], config["n_routed_experts"]))
    return model
