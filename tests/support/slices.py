"""Slices of the released models, scaled down to run on a CPU: real layer plans and record widths, weights as released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from abyssal.checkpoint.loader import LoadWeights
from abyssal.config import EngineConfig
from abyssal.engine.engine import Engine
from bench.slices import SLICES, Slice, random_weights, slice_config, write_slice

SMALL = {
    "hidden_size": 64, "vocab_size": 512, "num_attention_heads": 4, "q_lora_rank": 64, "o_lora_rank": 32, "o_groups": 2,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "index_n_heads": 8, "index_topk": 64,
}  # fmt: skip
SMALL_V41 = SMALL | {
    "candidate_topk_blocks": 16, "engram_vocab_size": 50, "engram_head_dim": 32, "engram_n_heads": 2,
    "engram_compressed_vocab_size": 512,
}  # fmt: skip
LAYERS = {"v4-flash": Slice("v4-flash", 0, 5), "v4.1-flash": Slice("v4.1-flash", 14, 11)}  # every kind of layer
LAYOUTS = {"v4-flash": "v4", "v4.1-flash": "v41"}


def small_slice(name: str, folder: Path, part: Slice | None = None, **changes: Any) -> Path:
    sizes = SMALL if SLICES[name].preset == "v4-flash" else SMALL_V41
    return write_slice(folder, slice_config(part or LAYERS[name], **(sizes | changes)))


def slice_engine(name: str, folder: Path, load: LoadWeights = random_weights, **options: Any) -> Engine:
    defaults = {
        "device": "cpu", "dtype": "float32", "kv_layout": LAYOUTS[name], "kv_cache_bytes": 64 << 20, "max_num_seqs": 8,
        "max_num_batched_tokens": 128, "enable_prefix_caching": False,
    }  # fmt: skip
    return Engine(EngineConfig(model=str(folder), **(defaults | options)), load)
