"""tiny-v4 finds facts at long range: exactly the answers that a plain fp32 evaluator gets right, whatever the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from abyssal import LLM

Documents = Callable[[int], list[dict[str, Tensor]]]
CACHE_BYTES = 1 << 30


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def tiny(request: pytest.FixtureRequest) -> Iterator[tuple[str, LLM]]:
    with LLM("tiny", device="cpu", dtype="float32", kv_layout=request.param, kv_cache_bytes=CACHE_BYTES) as llm:
        yield request.param, llm


def recalled(llm: LLM, document: dict[str, Tensor], chunk_sizes: list[int] | None = None) -> Tensor:
    """bool [8]: whether all five digits of each answer are the likeliest tokens."""
    rows = document["answer_at"].long()[:, None] + torch.arange(5)  # [8, 5]
    logits = llm.logits(document["input_ids"].tolist(), chunk_sizes, positions=rows.flatten().tolist())
    return (logits.argmax(-1).view_as(rows) == document["digits"]).all(1)


def check_recall(layout: str, llm: LLM, documents: list[dict[str, Tensor]]) -> None:
    hits = torch.stack([recalled(llm, document) for document in documents])
    stored = torch.stack([document["fp32_hits"] for document in documents]).bool()
    if layout == "fp32":
        assert torch.equal(hits, stored), f"other answers than stored: {(hits != stored).nonzero().tolist()}"
    else:
        allowed = max(1, stored.numel() // 80)
        assert hits.sum() >= stored.sum() - allowed, f"{int(hits.sum())} right, {int(stored.sum())} stored"


@pytest.mark.parametrize("tokens", [512, 2048])
def test_recall(tokens: int, tiny: tuple[str, LLM], recall: Documents) -> None:
    check_recall(*tiny, recall(tokens))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tokens", [8192, 32768])
def test_long_recall(tokens: int, tiny: tuple[str, LLM], recall: Documents) -> None:
    check_recall(*tiny, recall(tokens))


def test_margins_leave_no_doubt(recall: Documents) -> None:
    """Exact equality of hits is fair: no stored answer is decided by less than many times the fp32 noise of logits (1e-4)."""
    for tokens in (512, 2048):
        assert min(document["margin"].abs().min().item() for document in recall(tokens)) > 0.1


def test_recall_in_odd_chunks(tiny: tuple[str, LLM], recall: Documents) -> None:
    """A question apart from its document, and chunks that end inside groups of 4 and 128: the same answers."""
    _, llm = tiny
    document = recall(512)[0]
    n, question = len(document["input_ids"]), int(document["question_at"][0])
    for sizes in ([question, n - question], [129] * (n // 129) + [n % 129], [question, *[1] * (n - question)]):
        assert torch.equal(recalled(llm, document, sizes), document["fp32_hits"].bool())


def test_generated_answer(recall: Documents) -> None:
    """Asked alone, the first question of every short document is answered with its five digits."""
    from abyssal import SamplingParams

    with LLM("tiny", device="cpu", dtype="float32", kv_layout="fp32", kv_cache_bytes=CACHE_BYTES) as llm:
        prompts, digits = [], []
        for document in recall(512):
            ids = document["input_ids"].tolist()
            prompts.append(ids[: int(document["answer_at"][0]) + 1])
            digits.append(document["digits"][0].tolist())
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5))
        answers = [output.outputs[0].token_ids for output in outputs]
        right = [bool(document["fp32_hits"][0]) for document in recall(512)]
        assert [answer == wanted for answer, wanted in zip(answers, digits, strict=True)] == right
