"""Prompts of many chunks: the handed cases B05 and B09, on a small random model with every layer kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from abyssal import LLM
from abyssal.ops import _reference
from tests.checkpoint.build import random_v4_checkpoint
from tests.support.small_model import every_kind

pytestmark = pytest.mark.usefixtures("one_thread")

TOPK = 16


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("every_kind")
    random_v4_checkpoint(folder, every_kind(), seed=7, quantised=False)
    with LLM(folder, device="cpu", kv_cache_bytes=256 << 20, max_num_batched_tokens=8192, max_model_len=65536) as llm:
        yield llm


def tokens(count: int) -> list[int]:
    return torch.randint(2, 160, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def last_choices(
    llm: LLM, ids: list[int], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], list[int], Tensor]:
    """Entries chosen for the last query by each indexer, entries that each call scored, and the last token's logits."""
    chosen: list[Tensor] = []
    scored: list[int] = []
    select = _reference.select_topk

    def spied(scores: Tensor, visible: Tensor, *rest: object) -> Tensor:
        result = select(scores, visible, *rest)
        scored.append(scores.shape[-1])
        if scored[-1] == len(ids) // 4:
            chosen.append(result[0, -1].sort().values)
        assert scores.shape[-1] == int(visible.max())
        return result

    with monkeypatch.context() as patch:
        patch.setattr(_reference, "select_topk", spied)
        logits = llm.logits(ids, sizes, positions=[len(ids) - 1])
    assert len(chosen) == 2, "two layers of ratio 4"
    return chosen, scored, logits


def test_b05_the_indexer_sees_entries_of_all_earlier_chunks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """B05: 6,042 tokens in chunks of 2,048. As many keys are scored as there are entries, and those of the first chunk are chosen."""
    ids = tokens(6042)
    chosen, scored, logits = last_choices(llm, ids, [2048, 2048, 1946], monkeypatch)
    assert max(scored) == 6042 // 4 == 1510 and all(len(entries) == TOPK for entries in chosen)
    assert all((entries >= 0).all() and (entries < 512).any() and (entries > 1024).any() for entries in chosen)
    others, _, same = last_choices(llm, ids, [700] * 8 + [442], monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(chosen, others, strict=True))
    torch.testing.assert_close(logits, same, atol=1e-4, rtol=0)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_b09_prefill_past_32768_tokens(llm: LLM) -> None:
    """B09: 57,794 tokens, in chunks of 8,192 and of 5,000."""
    ids, last = tokens(57794), list(range(57794 - 8, 57794))
    logits = llm.logits(ids, [8192] * 7 + [450], positions=last)
    other = llm.logits(ids, [5000] * 11 + [2794], positions=last)
    assert logits.isfinite().all()
    torch.testing.assert_close(logits, other, atol=1e-4, rtol=0)
