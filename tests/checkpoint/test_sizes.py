"""Memory that weights take, against what the specification counted in the released files."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from abyssal.checkpoint.expected import TensorSpec, expected_tensors
from abyssal.checkpoint.sizes import WeightBytes, weight_bytes
from abyssal.config import ModelConfig, QuantConfig
from abyssal.model_config.presets import load_preset
from tests.support.small_model import small_config

STORED_FP32 = ("hc_", "attn_sink", "ape", "gate.bias")  # V4 spec 4.1; the other weights that run in fp32 are stored in bf16


def grown_in_memory(table: dict[str, TensorSpec]) -> int:
    """Bytes that loading adds to the stored ones: bf16 weights that become fp32; ids shrink from 8 bytes to 4."""
    added = 0
    for name, spec in table.items():
        if spec.kind == "fp32" and not any(word in name for word in STORED_FP32):
            added += 2 * math.prod(spec.shape)
        elif spec.kind == "expert_ids":
            added -= 4 * math.prod(spec.shape)
    return added


def draft_layer(model: ModelConfig) -> tuple[ModelConfig, int]:
    """April's `mtp.0` as a model of one window-only layer without embedding and head, and its projections (V4 spec 4.4)."""
    plain = replace(model.layers[-1], layer=0, ratio=0, kv_source=None, selection="none", index_source=None, router="scored")
    hidden = model.hidden_size
    projections = 2 * (hidden**2 + (hidden // 128) ** 2) + 2 * 2 * hidden
    return replace(model, num_layers=1, layers=(plain,)), projections


@pytest.mark.parametrize(("preset", "published"), [("v4-flash", 159_609_485_896), ("v4-pro", 805.3)])
def test_weights_of_v4_equal_the_released_files(preset: str, published: float) -> None:
    """V4 spec 1.2: Flash to the byte, draft layer included; of Pro only the size in GiB is known."""
    model = load_preset(preset)
    draft, projections = draft_layer(model)
    total = projections
    for config in (model, draft):
        table = expected_tensors(config)
        total += weight_bytes(config, torch.bfloat16).total - grown_in_memory(table)
    ends = 2 * 2 * model.vocab_size * model.hidden_size  # the draft layer shares embedding and head
    total -= ends
    assert total == published if preset == "v4-flash" else f"{total / 2**30:.1f}" == str(published)


def test_weights_of_v41_equal_the_released_files() -> None:
    """V4.1 spec 1.4: experts, n-gram tables and the dense backbone, each to the byte; embedding and head were counted apart."""
    model = load_preset("v4.1-flash")
    weights, ends = weight_bytes(model, torch.bfloat16), 2_647_654_400
    assert weights.experts == 288_777_830_400 and weights.on_disk == 202_758_032_400
    assert weights.rest - grown_in_memory(expected_tensors(model)) == 7_199_094_208 + ends


def test_gpus_share_out_whole_experts() -> None:
    weights = WeightBytes(experts=120, num_experts=12, rest=7, on_disk=1000)
    assert [weights.per_gpu(gpus) for gpus in (1, 2, 5, 12, 20)] == [127, 67, 37, 17, 17] and weights.total == 127


def test_plain_and_fp8_weights() -> None:
    model = small_config([0, 4, 128])
    plain, double = (weight_bytes(model, dtype).total for dtype in (torch.bfloat16, torch.float32))
    linear = sum(math.prod(s.shape) for s in expected_tensors(model).values() if s.kind in ("linear", "projection", "embedding"))
    assert double - plain == 2 * linear
    fp8, fp4 = (weight_bytes(replace(model, quant=QuantConfig((32, 32), kind)), torch.bfloat16) for kind in ("fp8", "fp4"))
    # 3 layers of 4 experts: 3 matrices of 16 x 32; a scale per 32 x 32 values of the two that are joined, or per 32 in a row
    assert fp8.experts == 3 * 4 * (3 * 16 * 32 + 2) and fp4.experts == 3 * 4 * (3 * 16 * 32 // 2 + 32 + 32)
    assert fp8.rest == fp4.rest < plain
