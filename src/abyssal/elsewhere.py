"""What vLLM and SGLang call things, for messages about names that are unknown here; docs/deploy.md has the same of options, as a table."""

from __future__ import annotations

# Option, parameter or field there -> the one here that does it. "no_" is the command line's way to turn a switch off.
HERE = {
    "model_path": "model",
    "fastapi_root_path": "root_path",
    "context_length": "max_model_len",
    "mem_fraction_static": "gpu_memory_utilization",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "swap_space": "swap_bytes",
    "max_running_requests": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "kv_cache_dtype": "kv_layout",
    "disable_radix_cache": "no_enable_prefix_caching",
    "enforce_eager": "no_enable_cuda_graphs",
    "disable_cuda_graph": "no_enable_cuda_graphs",
    "attention_backend": "backend",
    "random_seed": "seed",
    "data_parallel_size": "dp",
    "dp_size": "dp",
    "enable_dp_attention": "dp",
    "enable_expert_parallel": "ep",
    "ep_size": "ep",
    "tensor_parallel_size": "tp",
    "tp_size": "tp",
    "kv_transfer_config": "prefill_engines",
    "disaggregation_mode": "prefill_engines",
    "disaggregation_transfer_backend": "transfer_backend",
    # of requests
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "enable_thinking": "chat_template_kwargs",
    "guided_decoding": "response_format",
    "json_schema": "response_format",
    "regex": "response_format",
}

_STRUCTURED = "structured output is response_format on /v1/chat/completions"

# What is not here under any name -> why it need not or cannot be given.
ABSENT = {
    "allowed_origins": "put a proxy in front for browsers",
    "enable_auto_tool_choice": "calls are always read",
    "tool_call_parser": "calls are always read",
    "reasoning_parser": "reasoning is always read",
    "separate_reasoning": "reasoning is always apart",
    "trust_remote_code": "no code of a checkpoint is run",
    "quantization": "weights are used in the formats in which they are stored",
    "load_format": "weights are read from safetensors files",
    "tokenizer": "the checkpoint's own is used",
    "chat_template": "the checkpoint's own is used",
    "enable_chunked_prefill": "prompts are always cut by max_num_batched_tokens",
    "pipeline_parallel_size": "layers are not shared out; dp, ep and tp share out the rest",
    "pp_size": "layers are not shared out; dp, ep and tp share out the rest",
    "speculative_config": "there is no drafting",
    "speculative_algorithm": "there is no drafting",
    "enable_lora": "there are no adapters",
    "guided_decoding": _STRUCTURED,
    "structured_outputs": _STRUCTURED,
    "json_schema": _STRUCTURED,
    "regex": _STRUCTURED,
    "ebnf": _STRUCTURED,
}
