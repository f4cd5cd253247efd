"""Configs as published, built in code from the specs' tables, and the same models in other spellings."""

from __future__ import annotations

import copy
from typing import Any

YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
V4_QUANT = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def v4_flash() -> dict[str, Any]:
    """DeepSeek-V4-Flash, first release (V4 spec 1.2)."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 2048,
        "num_hash_layers": 3,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "sliding_window": 128,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": dict(YARN),
        "max_position_embeddings": 1048576,
        "vocab_size": 129280,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_nextn_predict_layers": 1,
        "torch_dtype": "bfloat16",
        "expert_dtype": "fp4",
        "quantization_config": dict(V4_QUANT),
        "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0],
    }


def v4_pro() -> dict[str, Any]:
    """DeepSeek-V4-Pro (V4 spec 1.2)."""
    return v4_flash() | {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "n_routed_experts": 384,
        "moe_intermediate_size": 3072,
        "routed_scaling_factor": 2.5,
        "index_topk": 1024,
        "compress_ratios": [128, 128] + [4, 128] * 29 + [4] + [0],
    }


def v4_flash_0731() -> dict[str, Any]:
    """V4-Flash with the three-stage DSpark drafter, which still counts one stage (V4 spec 1.4)."""
    return v4_flash() | {
        "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0, 0, 0],
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [40, 41, 42],
        "dspark_markov_rank": 256,
    }


def v4_small() -> dict[str, Any]:
    """Six decoder layers of all three kinds and one draft stage."""
    return v4_flash() | {
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "o_groups": 2,
        "o_lora_rank": 16,
        "q_lora_rank": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_hash_layers": 1,
        "index_topk": 16,
        "index_n_heads": 16,
        "vocab_size": 192,
        "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
    }


def v41_flash() -> dict[str, Any]:
    """DeepSeek-V4.1-Flash, composite (V4.1 spec 1.1 to 1.3)."""
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": 129280,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-20,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "sliding_window": 128,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {**YARN, "rope_type": "yarn"},
        "max_position_embeddings": 1048576,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 16000000,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_compressed_vocab_size": 99092,
        "engram_pad_token_id": 2,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
        "attention_bias": False,
        "attention_dropout": 0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "transformers_version": "5.6.0",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": 129264,
        "text_config": text,
        "vision_config": {
            "model_type": "deepseek_v41_vision",
            "num_hidden_layers": 32,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "intermediate_size": 2816,
            "patch_size": 14,
            "rope_theta": 10000,
            "downsample_ratio": 3,
            "max_image_tokens": 1024,
            "min_pixels": 295936,
            "max_wh_ratio": None,
        },
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
    }


def transformers_form(released: dict[str, Any]) -> dict[str, Any]:
    """A V4 config as transformers saves it (V4 spec 1.2): layer kinds instead of ratios, nested rope, root rope bases kept."""
    config = copy.deepcopy(released)
    layers = config["num_hidden_layers"]
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    config["layer_types"] = [kinds[ratio] for ratio in config.pop("compress_ratios")[:layers]]
    config["compress_rates"] = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    hashed = config.pop("num_hash_layers")
    config["mlp_layer_types"] = ["hash_moe"] * hashed + ["moe"] * (layers - hashed)
    factor = config.pop("qk_rope_head_dim") / config["head_dim"]
    yarn = config.pop("rope_scaling")
    main = {"rope_type": "default", "rope_theta": config["rope_theta"], "partial_rotary_factor": factor}
    compress = {**yarn, "rope_type": "yarn", "rope_theta": config["compress_rope_theta"], "partial_rotary_factor": factor}
    config["rope_parameters"] = {"main": main, "compress": {**compress, "attention_factor": 1.0}}
    config["partial_rotary_factor"] = factor
    config["dtype"] = config.pop("torch_dtype")
    if "quantization_config" in config:
        config["quantization_config"]["expert_dtype"] = config["expert_dtype"]
    return config | {"transformers_version": "5.24.0", "mlp_bias": False, "output_router_logits": False, "pad_token_id": None}


def inference_form(released: dict[str, Any]) -> dict[str, Any]:
    """The official inference config of the same model (V4 spec 1.3, V4.1 spec 1.2)."""
    config = copy.deepcopy(released)
    config |= config.pop("text_config", {})
    names = {
        "hidden_size": "dim",
        "moe_intermediate_size": "moe_inter_dim",
        "num_hidden_layers": "n_layers",
        "num_hash_layers": "n_hash_layers",
        "num_attention_heads": "n_heads",
        "num_experts_per_tok": "n_activated_experts",
        "scoring_func": "score_func",
        "routed_scaling_factor": "route_scale",
        "qk_rope_head_dim": "rope_head_dim",
        "sliding_window": "window_size",
        "rms_norm_eps": "norm_eps",
        "num_nextn_predict_layers": "n_mtp_layers",
        "kv_source_layer_ids": "kv_source_layers",
        "index_source_layer_ids": "index_source_layers",
        "candidate_source_layer_id": "candidate_source_layer",
        "engram_pad_token_id": "engram_pad_id",
        "dspark_num_experts_per_tok": "dspark_n_activated_experts",
    }
    left_out = ("architectures", "model_type", "max_position_embeddings", "bos_token_id", "eos_token_id", "quantization_config")
    yarn = config.pop("rope_scaling")
    form = {names.get(name, name): value for name, value in config.items() if name not in left_out and name != "vision_config"}
    form.pop("torch_dtype", None)
    return form | {
        "dtype": "fp8",
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
        "original_seq_len": yarn["original_max_position_embeddings"],
        "rope_factor": yarn["factor"],
        "beta_fast": yarn["beta_fast"],
        "beta_slow": yarn["beta_slow"],
    }
