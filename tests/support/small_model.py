"""Small model configurations for tests of single parts."""

from __future__ import annotations

from typing import Any

from abyssal.config import ModelConfig
from abyssal.model_config import parse_model_config


def config_dict(ratios: list[int], **changes: Any) -> dict[str, Any]:
    """A `config.json` of a small V4 model with these compression ratios."""
    base = {
        "model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "vocab_size": 160, "hidden_size": 32,
        "moe_intermediate_size": 16, "num_hidden_layers": len(ratios), "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
        "qk_rope_head_dim": 16, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8, "n_routed_experts": 4, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "num_hash_layers": 0, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
        "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hidden_act": "silu", "index_n_heads": 16, "index_head_dim": 32, "index_topk": 8,
        "sliding_window": 16, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "rope_theta": 10000,
        "compress_rope_theta": 160000, "max_position_embeddings": 4096, "compress_ratios": ratios, "num_nextn_predict_layers": 0,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1},
        "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0,
    }  # fmt: skip
    return base | changes


def small_config(ratios: list[int], **changes: Any) -> ModelConfig:
    return parse_model_config(config_dict(ratios, **changes))


def every_kind(**changes: Any) -> dict[str, Any]:
    """A `config.json` of six layers of all kinds, with the released window and a selection that bites at 64 tokens."""
    settings = {
        "sliding_window": 128, "index_topk": 16, "num_hash_layers": 1, "n_routed_experts": 8, "max_position_embeddings": 1 << 20,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1},
    }  # fmt: skip
    return config_dict([0, 0, 4, 128, 4, 128], **(settings | changes))


def v41_config_dict(ratios: list[int], kv_sources: list[int], index_sources: list[int], **changes: Any) -> dict[str, Any]:
    """A `config.json` of a small V4.1 model without n-gram tables; candidates come from the last KV source."""
    base = config_dict(ratios) | {
        "model_type": "deepseek_v41_text", "architectures": ["DeepseekV41ForCausalLM"], "rms_norm_eps": 1e-20,
        "kv_source_layer_ids": kv_sources, "index_source_layer_ids": index_sources,
        "candidate_source_layer_id": kv_sources[-1] if kv_sources else -1, "candidate_topk_blocks": 4, "candidate_block_size": 4,
        "engram_layer_ids": [], "engram_num_embeddings": [], "engram_max_ngram_size": 4, "engram_vocab_size": 0, "engram_n_heads": 0,
        "engram_head_dim": 0, "engram_compressed_vocab_size": 0, "engram_pad_token_id": 2, "dspark_block_size": 5,
        "dspark_noise_token_id": 3, "dspark_target_layer_ids": [], "dspark_markov_rank": 8, "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 1,
    }  # fmt: skip
    del base["num_hash_layers"]
    return base | changes
