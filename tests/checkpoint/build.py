"""Random checkpoints for tests, written from V4 spec 4 and V4.1 spec 5 without the package's own tables.

`random_v4_checkpoint(folder, t4_config(), seed=0)` writes `config.json` and `model.safetensors` and returns the values that a
loader must see: plain fp32 tensors by released name.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

Names = Literal["released", "prefixed", "transformers"]
ScaleType = Literal["e8m0", "u8", "f32"]
Tensors = dict[str, Tensor]

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def t4_config(**changes: Any) -> dict[str, Any]:
    """A small V4 of 6 layers: every layer kind, one hash-routed layer, a selection that bites at 64 tokens."""
    config: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": 320, "hidden_size": 96,
        "moe_intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64,
        "qk_rope_head_dim": 32, "q_lora_rank": 64, "o_groups": 2, "o_lora_rank": 32, "n_routed_experts": 8,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "num_hash_layers": 1, "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
        "hidden_act": "silu", "index_n_heads": 16, "index_head_dim": 32, "index_topk": 16, "sliding_window": 128,
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1},
        "max_position_embeddings": 1048576, "compress_ratios": [0, 0, 4, 128, 4, 128, 0], "num_nextn_predict_layers": 1,
        "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "attention_bias": False,
        "attention_dropout": 0.0, "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }  # fmt: skip
    return config | changes


def random_v4_checkpoint(
    folder: Path,
    config: dict[str, Any],
    seed: int,
    names: Names = "released",
    quantised: bool = True,
    scales: ScaleType = "e8m0",
    shards: int = 1,
    draft: Literal["none", "mtp", "dspark"] = "none",
) -> Tensors:
    """Write a checkpoint and return its fp32 values by released name. `expert_dtype` of `config` decides FP4 or FP8 experts."""
    stored, truth = random_tensors(config, seed, quantised, scales)
    if draft != "none":
        stored |= draft_tensors(config, draft)
    if not quantised:
        config = {k: v for k, v in config.items() if k not in ("quantization_config", "expert_dtype")}
    write(folder, config, renamed(stored, names), shards)
    return truth


def t41_config(**changes: Any) -> dict[str, Any]:
    """A small V4.1 of 6 layers: both ratios, shared and own KV and top-k, candidate blocks, n-gram tables on two layers."""
    config: dict[str, Any] = {
        "model_type": "deepseek_v41_text", "vocab_size": 320, "hidden_size": 96, "moe_intermediate_size": 64, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64, "qk_rope_head_dim": 32, "q_lora_rank": 64, "o_groups": 2,
        "o_lora_rank": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hidden_act": "silu",
        "index_n_heads": 16, "index_head_dim": 64, "index_topk": 16, "sliding_window": 16, "hc_mult": 4, "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6, "rms_norm_eps": 1e-20, "rope_theta": 10000, "compress_rope_theta": 160000,
        "rope_scaling": {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1},
        "max_position_embeddings": 1048576, "compress_ratios": [0, 2, 2, 1, 1, 1], "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 2, 3, 5], "candidate_source_layer_id": 3, "candidate_topk_blocks": 6, "candidate_block_size": 4,
        "engram_layer_ids": [0, 4], "engram_num_embeddings": [420, 508], "engram_max_ngram_size": 3, "engram_vocab_size": 100,
        "engram_n_heads": 2, "engram_head_dim": 64, "engram_compressed_vocab_size": 300, "engram_pad_token_id": 2,
        "num_nextn_predict_layers": 0, "dspark_block_size": 5, "dspark_noise_token_id": 3, "dspark_target_layer_ids": [],
        "dspark_markov_rank": 16, "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 1, "bos_token_id": 0, "eos_token_id": 1,
        "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0,
        "quantization_config": {
            "quant_method": "fp8", "scale_fmt": "ue8m0", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
            "expert_dtype": "fp4",
        },
    }  # fmt: skip
    return config | changes


def random_v41_tensors(config: dict[str, Any], seed: int, quantised: bool = True) -> tuple[Tensors, Tensors]:
    """As `random_tensors`. N-gram tables are always stored as FP8 with a scale per 32 columns."""
    generator = torch.Generator().manual_seed(seed)
    stored: Tensors = {}
    truth: Tensors = {}
    for name, (kind, shape) in v41_shapes(config).items():
        around = 1.0 if "norm" in name or name.endswith(("q_weight", "k_weight")) else 0.0
        value = torch.randn(shape, generator=generator) * _std(name, shape) + around
        if kind == "rows" or (kind in ("fp8", "fp4") and quantised):
            block = (1, 32) if kind == "rows" else (32, 32)
            stored[name], exponents, truth[name] = quantise_fp4(value) if kind == "fp4" else quantise_fp8(value, *block)
            stored[name.removesuffix("weight") + "scale"] = encode_scale(exponents, "e8m0")
        else:
            stored[name] = value if kind == "fp32" or not quantised else value.bfloat16()
            truth[name] = stored[name].float()
    return stored, truth


def v41_shapes(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Released name -> (kind, shape), as `shapes`; kind rows is an n-gram table (V4.1 spec 5.1 to 5.4)."""
    hidden, hc, dim, index_dim = config["hidden_size"], config["hc_mult"], config["head_dim"], config["index_head_dim"]
    out: dict[str, tuple[str, tuple[int, ...]]] = {
        "embed.weight": ("bf16", (config["vocab_size"], hidden)),
        "head.weight": ("bf16", (config["vocab_size"], hidden)),
        "norm.weight": ("bf16", (hidden,)),
    }
    for layer, ratio in enumerate(config["compress_ratios"][: config["num_hidden_layers"]]):
        names = layer_shapes(config | {"expert_dtype": "fp4"}, 0, hashed=False)
        names["ffn.gate.bias_vl"] = ("fp32", (config["n_routed_experts"],))
        if layer in config["kv_source_layer_ids"]:
            names["attn.compressor.wkv.weight"] = ("bf16", (dim, hidden))
            if ratio == 2:
                names["attn.compressor.wgate.weight"] = ("bf16", (dim, hidden))
            names["attn.compressor.norm.weight"] = ("bf16", (dim,))
            names["attn.indexer.wk.weight"] = ("bf16", (index_dim, dim))
            names["attn.indexer.k_norm.weight"] = ("bf16", (index_dim,))
        if layer in config["index_source_layer_ids"]:
            names["attn.indexer.wq_b.weight"] = ("fp8", (config["index_n_heads"] * index_dim, config["q_lora_rank"]))
            names["attn.indexer.weights_proj.weight"] = ("bf16", (config["index_n_heads"], hidden))
        if layer in config["engram_layer_ids"]:
            rows = config["engram_num_embeddings"][config["engram_layer_ids"].index(layer)]
            columns = (config["engram_max_ngram_size"] - 1) * config["engram_n_heads"] * config["engram_head_dim"]
            names["engram.embed.weight"] = ("rows", (rows, config["engram_head_dim"]))
            names["engram.wkv.weight"] = ("fp8", ((hc + 1) * hidden, columns))
            names["engram.q_weight"] = names["engram.k_weight"] = ("bf16", (hc, hidden))
        out |= {f"layers.{layer}.{name}": spec for name, spec in names.items()}
    return out


def write(folder: Path, config: dict[str, Any], tensors: Tensors, shards: int = 1) -> None:
    """`config.json` and one file, or an index and `shards` files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    index = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[number::shards]}
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def random_tensors(config: dict[str, Any], seed: int, quantised: bool, scales: ScaleType = "e8m0") -> tuple[Tensors, Tensors]:
    """Tensors as stored (released names) and their exact values in fp32 (released names, without scales)."""
    stored, truth = _random_tensors(json.dumps(config), seed, quantised, scales)
    return {name: t.clone() for name, t in stored.items()}, {name: t.clone() for name, t in truth.items()}


@functools.cache
def _random_tensors(config_text: str, seed: int, quantised: bool, scales: ScaleType) -> tuple[Tensors, Tensors]:
    config = json.loads(config_text)
    generator = torch.Generator().manual_seed(seed)
    stored: Tensors = {}
    truth: Tensors = {}
    for name, (kind, shape) in shapes(config).items():
        if kind == "ids":
            stored[name] = torch.randint(0, config["n_routed_experts"], shape, generator=generator)
            truth[name] = stored[name]
            continue
        value = torch.randn(shape, generator=generator) * _std(name, shape) + (1.0 if "norm" in name else 0.0)
        form = kind if kind in ("fp8", "fp4") and quantised else "plain"
        if form == "plain":
            stored[name] = value if kind == "fp32" or not quantised else value.bfloat16()
            truth[name] = stored[name].float()
            continue
        store = quantise_fp8 if form == "fp8" else quantise_fp4
        stored[name], scale, truth[name] = store(value)
        stored[name.removesuffix("weight") + "scale"] = encode_scale(scale, scales)
    return stored, truth


def _std(name: str, shape: tuple[int, ...]) -> float:
    if len(shape) < 2 or "ape" in name:
        return 0.1
    if ".w1." in name or ".w3." in name:
        return 5 / math.sqrt(shape[-1])  # the SwiGLU clamp at 10 fires for some values
    return 1 / math.sqrt(shape[-1])


def quantise_fp8(value: Tensor, height: int = 128, width: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, exponents [ceil(N/height), ceil(K/width)] and exact values of a matrix."""
    rows, columns = value.shape
    exponents = torch.empty(-(-rows // height), -(-columns // width), dtype=torch.int32)
    codes, exact = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(exponents.shape[0]):
        for j in range(exponents.shape[1]):
            place = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            exponents[i, j] = math.ceil(math.log2(max(float(value[place].abs().max()), 1e-4) / 448))
            scale = 2.0 ** int(exponents[i, j])
            codes[place] = (value[place] / scale).to(torch.float8_e4m3fn)
            exact[place] = codes[place].float() * scale
    return codes, exponents, exact


def quantise_fp4(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes int8 [N, K/2], exponents [N, K/32] and exact values of a matrix."""
    blocks = value.unflatten(-1, (-1, 32))
    exponents = (blocks.abs().amax(-1) / 6).clamp(min=2.0**-20).log2().ceil().int()
    scaled = blocks / torch.exp2(exponents.float()).unsqueeze(-1)
    index = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    exact = E2M1[index] * scaled.sign() * torch.exp2(exponents.float()).unsqueeze(-1)
    codes = (index + 8 * (scaled < 0)).flatten(-2).to(torch.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4  # the low nibble is the even column
    return packed.view(torch.int8), exponents, exact.flatten(-2)


def encode_scale(exponents: Tensor, scales: ScaleType) -> Tensor:
    if scales == "f32":
        return torch.exp2(exponents.float())
    encoded = (exponents + 127).to(torch.uint8)
    return encoded if scales == "u8" else encoded.view(torch.float8_e8m0fnu)


def shapes(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Released name -> (kind, shape); kinds: bf16, fp32, fp8, fp4, ids (V4 spec 4.2, 4.3)."""
    hidden, hc = config["hidden_size"], config["hc_mult"]
    out: dict[str, tuple[str, tuple[int, ...]]] = {
        "embed.weight": ("bf16", (config["vocab_size"], hidden)),
        "head.weight": ("bf16", (config["vocab_size"], hidden)),
        "norm.weight": ("bf16", (hidden,)),
        "hc_head_fn": ("fp32", (hc, hc * hidden)),
        "hc_head_base": ("fp32", (hc,)),
        "hc_head_scale": ("fp32", (1,)),
    }
    for layer, ratio in enumerate(config["compress_ratios"][: config["num_hidden_layers"]]):
        hashed = layer < config["num_hash_layers"]
        out |= {f"layers.{layer}.{name}": spec for name, spec in layer_shapes(config, ratio, hashed).items()}
    return out


def layer_shapes(config: dict[str, Any], ratio: int, hashed: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    hidden, dim, rank, hc = config["hidden_size"], config["head_dim"], config["q_lora_rank"], config["hc_mult"]
    heads, groups, inner = config["num_attention_heads"], config["o_groups"], config["moe_intermediate_size"]
    experts, grouped = config["n_routed_experts"], groups * config["o_lora_rank"]
    expert = config.get("expert_dtype", "fp4")
    out: dict[str, tuple[str, tuple[int, ...]]] = {
        "attn.attn_sink": ("fp32", (heads,)),
        "attn.wq_a.weight": ("fp8", (rank, hidden)),
        "attn.q_norm.weight": ("bf16", (rank,)),
        "attn.wq_b.weight": ("fp8", (heads * dim, rank)),
        "attn.wkv.weight": ("fp8", (dim, hidden)),
        "attn.kv_norm.weight": ("bf16", (dim,)),
        "attn.wo_a.weight": ("fp8", (grouped, heads * dim // groups)),
        "attn.wo_b.weight": ("fp8", (hidden, grouped)),
        "ffn.gate.weight": ("bf16", (experts, hidden)),
    }
    for site in ("attn", "ffn"):
        out[f"{site}_norm.weight"] = ("bf16", (hidden,))
        out[f"hc_{site}_fn"] = ("fp32", (hc * (hc + 2), hc * hidden))
        out[f"hc_{site}_base"] = ("fp32", (hc * (hc + 2),))
        out[f"hc_{site}_scale"] = ("fp32", (3,))
    for prefix, kind in ("ffn.shared_experts", "fp8"), *((f"ffn.experts.{e}", expert) for e in range(experts)):
        out[f"{prefix}.w1.weight"] = out[f"{prefix}.w3.weight"] = (kind, (inner, hidden))
        out[f"{prefix}.w2.weight"] = (kind, (hidden, inner))
    if hashed:
        out["ffn.gate.tid2eid"] = ("ids", (config["vocab_size"], config["num_experts_per_tok"]))
    else:
        out["ffn.gate.bias"] = ("fp32", (experts,))
    if ratio:
        out |= _compressor_shapes("attn.compressor", ratio, dim, hidden)
    if ratio == 4:
        index_dim = config["index_head_dim"]
        out["attn.indexer.wq_b.weight"] = ("fp8", (config["index_n_heads"] * index_dim, rank))
        out["attn.indexer.weights_proj.weight"] = ("bf16", (config["index_n_heads"], hidden))
        out |= _compressor_shapes("attn.indexer.compressor", 4, index_dim, hidden)
    return out


def _compressor_shapes(prefix: str, ratio: int, dim: int, hidden: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    columns = 2 * dim if ratio == 4 else dim
    return {
        f"{prefix}.ape": ("fp32", (ratio, columns)),
        f"{prefix}.wkv.weight": ("bf16", (columns, hidden)),
        f"{prefix}.wgate.weight": ("bf16", (columns, hidden)),
        f"{prefix}.norm.weight": ("bf16", (dim,)),
    }


def draft_tensors(config: dict[str, Any], draft: Literal["mtp", "dspark"]) -> Tensors:
    """`mtp.*` of either drafter (V4 spec 4.4, 4.5), small zeros: only names and presence matter."""
    layer = list(layer_shapes(config, ratio=0, hashed=False))
    layer += ["attn.wq_a.scale", "ffn.experts.0.w1.scale"]
    extras = {
        "mtp": [("e_proj.weight", "e_proj.scale", "h_proj.weight", "enorm.weight", "hnorm.weight", "norm.weight", "hc_head_fn")],
        "dspark": [
            ("main_proj.weight", "main_proj.scale", "main_norm.weight"),
            (),
            ("norm.weight", "hc_head_fn", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight",
             "confidence_head.proj.weight"),
        ],
    }  # fmt: skip
    return {f"mtp.{s}.{name}": torch.zeros(1) for s, extra in enumerate(extras[draft]) for name in (*layer, *extra)}


def renamed(tensors: Tensors, names: Names) -> Tensors:
    """The same tensors under another spelling (V4 spec 4.1, 4.7)."""
    if names == "released":
        return tensors
    if names == "prefixed":
        return {prefixed_name(name): value for name, value in tensors.items()}
    out = {transformers_name(name): value for name, value in tensors.items() if ".ffn.experts." not in name}
    layers = sorted({name.split(".ffn.experts.")[0] for name in tensors if ".ffn.experts." in name})
    for layer in layers:
        for part, suffix in (("weight", ""), ("scale", "_scale_inv")):
            if f"{layer}.ffn.experts.0.w1.{part}" in tensors:
                w1, w2, w3 = (_stack(tensors, f"{layer}.ffn.experts", f"{piece}.{part}") for piece in ("w1", "w2", "w3"))
                out[f"model.{layer}.mlp.experts.gate_up_proj{suffix}"] = concatenate((w1, w3), torch.cat, dim=1)
                out[f"model.{layer}.mlp.experts.down_proj{suffix}"] = w2
    return out


def _stack(tensors: Tensors, prefix: str, name: str) -> Tensor:
    experts = sorted({int(key.removeprefix(prefix).split(".")[1]) for key in tensors if key.startswith(prefix)})
    return concatenate([tensors[f"{prefix}.{expert}.{name}"] for expert in experts], torch.stack)


def concatenate(parts: Sequence[Tensor], join: Callable[..., Tensor], **options: int) -> Tensor:
    """`join` for any type: 8-bit floats go through bytes."""
    dtype = parts[0].dtype
    raw = torch.uint8 if dtype.itemsize == 1 else dtype
    return join([part.view(raw) for part in parts], **options).view(dtype)


def prefixed_name(name: str) -> str:
    """With `model.` and the older vendor names that the official converter accepts."""
    for old, new in ((".attn.", ".self_attn."), (".ffn.", ".mlp."), (".gate.bias", ".gate.e_score_correction_bias")):
        name = name.replace(old, new)
    if name.endswith(".scale"):
        name = name.removesuffix(".scale") + ".weight_scale_inv"
    return f"model.{name}"


_TRANSFORMERS = (
    (".attn.indexer.weights_proj.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (".attn.indexer.wq_b.", ".self_attn.compressor.indexer.q_b_proj."),
    (".attn.indexer.compressor.", ".attn.compressor.indexer."),
    (".attn_norm.", ".input_layernorm."), (".ffn_norm.", ".post_attention_layernorm."),
    (".hc_attn_", ".attn_hc."), (".hc_ffn_", ".ffn_hc."),
    (".attn.", ".self_attn."), (".ffn.", ".mlp."), (".attn_sink", ".sinks"),
    ("compressor.norm.", "compressor.kv_norm."), ("indexer.norm.", "indexer.kv_norm."), (".ape", ".position_bias"),
    (".wq_a.", ".q_a_proj."), (".q_norm.", ".q_a_norm."), (".wq_b.", ".q_b_proj."), (".wkv.", ".kv_proj."),
    (".wgate.", ".gate_proj."), (".wo_a.", ".o_a_proj."), (".wo_b.", ".o_b_proj."),
    (".gate.bias", ".gate.e_score_correction_bias"),
    ("shared_experts.w1.", "shared_experts.gate_proj."), ("shared_experts.w2.", "shared_experts.down_proj."),
    ("shared_experts.w3.", "shared_experts.up_proj."),
)  # fmt: skip
_TRANSFORMERS_TOP = {
    "embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight", "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn", "hc_head_base": "model.hc_head.hc_base", "hc_head_scale": "model.hc_head.hc_scale",
}  # fmt: skip


def transformers_name(name: str) -> str:
    """The name in transformers' state dict of a tensor that is not a routed expert's."""
    if name in _TRANSFORMERS_TOP:
        return _TRANSFORMERS_TOP[name]
    hyper = ".hc_" in name
    for old, new in _TRANSFORMERS:
        name = name.replace(old, new)
    if name.endswith(".scale") and not hyper:
        name = name.removesuffix(".scale") + ".weight_scale_inv"
    return f"model.{name}"
