"""Any one linear of a quantised checkpoint may be stored plain: neighbours of another format are computed as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from abyssal import LLM
from tests.checkpoint.build import random_v4_checkpoint, t4_config

NAMES = ["attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "ffn.shared_experts.w1", "ffn.shared_experts.w2"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_one_plain_linear_among_quantised_ones(name: str, dtype: str, tmp_path: Path) -> None:
    config = t4_config(compress_ratios=[0, 0, 4, 128, 4, 128], num_nextn_predict_layers=0)
    values = random_v4_checkpoint(tmp_path, config, seed=1)
    options = {"device": "cpu", "dtype": dtype, "kv_layout": "fp32", "kv_cache_bytes": 16 << 20, "max_model_len": 256}
    with LLM(tmp_path, **options) as llm:
        expected = llm.logits([3, 4, 5, 6, 7])
    file = next(tmp_path.glob("*.safetensors"))
    tensors = load_file(file)
    del tensors[f"layers.0.{name}.scale"]
    tensors[f"layers.0.{name}.weight"] = values[f"layers.0.{name}.weight"].bfloat16()  # exact: powers of two scale e4m3
    save_file(tensors, file)
    with LLM(tmp_path, **options) as llm:
        got = llm.logits([3, 4, 5, 6, 7])
    assert got.isfinite().all()
    if dtype == "float32":
        assert torch.equal(got, expected), "the same values in another format"
