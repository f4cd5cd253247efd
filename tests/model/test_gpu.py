"""The same engine on a CUDA device through plain PyTorch: the answers of the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from abyssal import LLM, SamplingParams
from tests.model.test_recall import recalled

pytestmark = pytest.mark.gpu
Documents = Callable[[int], list[dict[str, Tensor]]]
CACHE_BYTES = 1 << 30
QUESTION = "<｜User｜>Define harbor.<｜Assistant｜></think>"


def test_fp32_answers_are_those_of_the_cpu() -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    answers = []
    for device in ("cpu", "cuda"):
        with LLM("tiny", device=device, dtype="float32", kv_layout="fp32", kv_cache_bytes=CACHE_BYTES) as llm:
            answers.append(llm.generate([QUESTION, QUESTION + "A"], params))
    for here, there in zip(*answers, strict=True):
        assert here.outputs[0].token_ids == there.outputs[0].token_ids and here.outputs[0].text


@pytest.mark.parametrize("tokens", [512, 2048, 8192])
def test_fp32_recall_is_exactly_the_stored_one(tokens: int, recall: Documents) -> None:
    with LLM("tiny", device="cuda", dtype="float32", kv_layout="fp32", kv_cache_bytes=CACHE_BYTES) as llm:
        for document in recall(tokens):
            assert torch.equal(recalled(llm, document), document["fp32_hits"].bool())


@pytest.mark.parametrize("tokens", [512, 2048, 8192])
@pytest.mark.parametrize(("kv_layout", "lost"), [("bf16", 1), ("auto", 2)])
def test_default_precision_loses_few_answers_of_80(kv_layout: str, lost: int, tokens: int, recall: Documents) -> None:
    """bf16 alone may lose one; packed records, the default, 2 % more."""
    with LLM("tiny", device="cuda", kv_layout=kv_layout, kv_cache_bytes=CACHE_BYTES) as llm:
        config = llm.engine.config
        assert (config.dtype, config.kv_layout) == ("bfloat16", {"auto": "v4"}.get(kv_layout, kv_layout))
        hits = sum(int(recalled(llm, document).sum()) for document in recall(tokens))
        assert hits >= sum(int(document["fp32_hits"].sum()) for document in recall(tokens)) - lost, f"{hits} right"


def test_weights_stay_in_their_stored_format() -> None:
    with LLM("tiny", device="cuda", kv_cache_bytes=CACHE_BYTES) as llm:
        block = llm.engine.runner.model.blocks[2]
        assert block.attention.wq_b.format == "fp8" and block.moe.w13.format == "fp4"
        assert llm.generate(QUESTION, SamplingParams(temperature=0, max_tokens=5))[0].outputs[0].token_ids
