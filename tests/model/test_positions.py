"""Long prompts against the full forward: no decline with position, each layer on its own rotary table (case I03)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.24", reason="is the reference")
from abyssal import LLM
from abyssal.kv import batch as batch_module
from abyssal.ops.rope import rope_table
from tests.checkpoint.build import t4_config
from tests.support import oracle

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH, PART = 1600, 400
UNQUANTISED = {"expert_dtype", "quantization_config", "torch_dtype"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], torch.Tensor]:
    ratios = [0, 0, 4, 128, 4, 128]
    config = {k: v for k, v in t4_config(compress_ratios=ratios, num_nextn_predict_layers=0).items() if k not in UNQUANTISED}
    model = oracle.random_model(config, seed=5)
    ids, logits = oracle.draw_prompt(model, LENGTH, seed=6, margin=1e-6)
    folder = oracle.save_model(model, config, tmp_path_factory.mktemp("t4"), "released")
    return folder, ids, logits


def mean_kl(got: torch.Tensor, expected: torch.Tensor) -> list[float]:
    """Mean KL(expected | got) of every part of the prompt."""
    p, q = expected.double().log_softmax(-1), got.double().log_softmax(-1)
    return [part.mean().item() for part in (p.exp() * (p - q)).sum(-1).split(PART)]


def load(folder: Path) -> LLM:
    return LLM(folder, device="cpu", dtype="float32", kv_layout="fp32", kv_cache_bytes=64 << 20, max_model_len=4096)


def test_i03_no_decline_with_length(reference: tuple[Path, list[int], torch.Tensor]) -> None:
    folder, ids, expected = reference
    with load(folder) as llm:
        got = llm.logits(ids, chunk_sizes=[700, 1, 899])
    assert max(mean_kl(got, expected)) < 1e-8
    assert (got - expected).abs().max() < 1e-4


@pytest.mark.parametrize("used", ["main", "compress"])
def test_i03_one_table_for_all_layers_is_seen(
    used: str, reference: tuple[Path, list[int], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ids, expected = reference
    with load(folder) as llm:
        config = llm.engine.runner.model_config
        one = config.rope_main if used == "main" else config.rope_compress
        monkeypatch.setattr(batch_module, "rope_table", lambda positions, _: rope_table(positions, one))
        got = llm.logits(ids)
    assert dataclasses.asdict(config.rope_main) != dataclasses.asdict(config.rope_compress)
    assert mean_kl(got, expected)[-1] > 1e-3
