"""tiny-v4 finds facts at long range: exactly the answers that a plain fp32 evaluator gets right, whatever the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from abyssal import LLM, SamplingParams

Documents = Callable[[int], list[dict[str, Tensor]]]
CACHE_BYTES = 1 << 30


@pytest.fixture(scope="module")
def tiny() -> Iterator[Callable[[str], LLM]]:
    """`tiny(layout)` -> the model with this cache layout."""
    loaded: dict[str, LLM] = {}

    def load(layout: str) -> LLM:
        if layout not in loaded:
            loaded[layout] = LLM("tiny", device="cpu", dtype="float32", kv_layout=layout, kv_cache_bytes=CACHE_BYTES)
        return loaded[layout]

    yield load
    for llm in loaded.values():
        llm.close()


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


@pytest.mark.parametrize(
    ("tokens", "layout"), [(512, "fp32"), (512, "bf16"), (2048, "fp32"), pytest.param(2048, "bf16", marks=pytest.mark.long)]
)
def test_recall(tokens: int, layout: str, tiny: Callable[[str], LLM], recall: Documents) -> None:
    check_recall(layout, tiny(layout), recall(tokens))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", ["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [8192, 32768])
def test_long_recall(tokens: int, layout: str, tiny: Callable[[str], LLM], recall: Documents) -> None:
    check_recall(layout, tiny(layout), recall(tokens))


def test_margins_leave_no_doubt(recall: Documents) -> None:
    """Exact equality of hits is fair: no stored answer is decided by less than many times the fp32 noise of logits (1e-4)."""
    for tokens in (512, 2048):
        assert min(document["margin"].abs().min().item() for document in recall(tokens)) > 0.1


def test_recall_in_odd_chunks(tiny: Callable[[str], LLM], recall: Documents) -> None:
    """A question apart from its document, and chunks that end inside groups of 4 and 128: the same answers."""
    document = recall(512)[0]
    n, question = len(document["input_ids"]), int(document["question_at"][0])
    for sizes in ([question, n - question], [129] * (n // 129) + [n % 129], [question, *[1] * (n - question)]):
        assert torch.equal(recalled(tiny("fp32"), document, sizes), document["fp32_hits"].bool())


def test_generated_answer(tiny: Callable[[str], LLM], recall: Documents) -> None:
    """The first question of every short document, all asked at once, is answered with its five digits."""
    documents = recall(512)
    prompts = [document["input_ids"].tolist()[: int(document["answer_at"][0]) + 1] for document in documents]
    outputs = tiny("fp32").generate(prompts, SamplingParams(temperature=0, max_tokens=5))
    for document, output in zip(documents, outputs, strict=True):
        assert (output.outputs[0].token_ids == document["digits"][0].tolist()) == bool(document["fp32_hits"][0])
