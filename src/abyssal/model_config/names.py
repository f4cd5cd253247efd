"""Every key of a model's config that the parser knows besides the ones it reads by name."""

from __future__ import annotations

from typing import Any

from abyssal.config import Family

# Other spellings -> the released config's spelling (V4 spec 1.3, V4.1 spec 1.2).
ALIASES = {
    "dim": "hidden_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_hash_layers": "num_hash_layers",
    "n_heads": "num_attention_heads",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "rope_head_dim": "qk_rope_head_dim",
    "window_size": "sliding_window",
    "norm_eps": "rms_norm_eps",
    "torch_dtype": "dtype",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "engram_pad_id": "engram_pad_token_id",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
}

# Keys with one supported value; absent means that value.
FIXED: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1,),  # one head serves as key and value (V4 spec 2.5)
    "hidden_act": ("silu",),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "n_group": (1,),  # experts are not grouped
    "topk_group": (1,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
    "is_encoder_decoder": (False,),
    "scale_fmt": ("ue8m0",),
}

# Keys that do not change what a forward pass computes, and why.
IGNORED = {
    "_name_or_path": "where the config came from",
    "transformers_version": "who wrote the file",
    "auto_map": "names Python code in the checkpoint's folder; such code is never run",
    "initializer_range": "training only",
    "attention_dropout": "training only",
    "output_router_logits": "training only",
    "router_aux_loss_coef": "training only",
    "router_jitter_noise": "training only",
    "use_cache": "the engine always uses its cache",
    "return_dict": "shape of a Python return value elsewhere",
    "output_attentions": "shape of a Python return value elsewhere",
    "output_hidden_states": "shape of a Python return value elsewhere",
    "chunk_size_feed_forward": "memory trade-off elsewhere, same result",
    "problem_type": "classification heads only",
    "id2label": "classification heads only",
    "label2id": "classification heads only",
    "pad_token_id": "the engine never pads with a token",
}

# V4.1's image tower, recognised and not used for text (V4.1 spec 1.3).
VISION = (
    "vision_config",
    "vision_n_layers",
    "vision_dim",
    "vision_n_heads",
    "vision_inter_dim",
    "vision_patch_size",
    "vision_rope_theta",
    "vision_downsample_ratio",
    "vision_max_n_token",
    "vision_min_pixels",
    "vision_max_wh_ratio",
)

# What the official inference config leaves to its program. It fills only a file in that spelling (no `model_type`).
INFERENCE_CONFIG: dict[Family, dict[str, Any]] = {
    "v4": {
        "rms_norm_eps": 1e-6,
        "hc_eps": 1e-6,
        "max_position_embeddings": 1048576,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "v41": {
        "max_position_embeddings": 1048576,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
}
INFERENCE_WEIGHT_BLOCK: dict[Family, tuple[int, int]] = {"v4": (128, 128), "v41": (32, 32)}

ARCHITECTURES: dict[Family, str] = {"v4": "DeepseekV4ForCausalLM", "v41": "DeepseekV41ForCausalLM"}
DTYPES = ("bfloat16", "float32", "float16", "bf16", "fp32", "fp8")
