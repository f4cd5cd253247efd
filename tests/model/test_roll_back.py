"""Tokens that are taken back leave no trace: logits after roll-backs are those of a fresh run, in every kind of state."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from abyssal import LLM
from abyssal.kv.specs import ROLL_BACK
from tests.support.families import FAMILIES, write_small

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4
IDS = random.Random(1).choices(range(160), k=330)
WRONG = [(token + 71) % 160 for token in IDS]


@pytest.fixture(scope="module", params=FAMILIES)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_small(request.param, tmp_path_factory.mktemp("roll_back"), seed=3)
    with LLM(folder, device="cpu", kv_layout="fp32", kv_cache_bytes=128 << 20, max_num_batched_tokens=512) as llm:
        yield llm


class Drafting:
    """Sequences over the same tokens, each with drafts of its own; everything computed is kept as logits of its position."""

    def __init__(self, llm: LLM, count: int) -> None:
        self.runner = llm.engine.runner
        self.cache = self.runner.cache
        self.sequences = [self.cache.new_sequence() for _ in range(count)]
        self.logits: list[dict[int, Tensor]] = [{} for _ in range(count)]

    def step(self, counts: dict[int, tuple[int, int]]) -> None:
        """Compute, of sequence i, counts[i] = (right, wrong) tokens, and take the wrong ones back."""
        order = sorted(counts, key=lambda i: sum(counts[i]) > 1)
        chunks = []
        for i in order:
            (right, wrong), seq = counts[i], self.sequences[i]
            start, kept, end = seq.num_tokens, seq.num_tokens + right, seq.num_tokens + right + wrong
            assert self.cache.allocate(seq, start, end)
            chunks.append(self.runner.chunk(IDS[:kept] + WRONG[kept:end], start, end, seq))
        sizes = [sum(counts[i]) for i in order]
        logits = self.runner(chunks, list(range(sum(sizes)))).clone().split(sizes)
        for i, rows in zip(order, logits, strict=True):
            (right, wrong), seq = counts[i], self.sequences[i]
            self.logits[i].update(zip(range(seq.num_tokens, seq.num_tokens + right), rows, strict=False))
            self.cache.commit(seq, IDS, seq.num_tokens + right, rejected=wrong)
            self.cache.release_unneeded(seq, seq.num_tokens)

    def check(self, expected: Tensor) -> None:
        for logits, seq in zip(self.logits, self.sequences, strict=True):
            assert sorted(logits) == list(range(seq.num_tokens))
            got = torch.stack([logits[p] for p in range(seq.num_tokens)])
            torch.testing.assert_close(got, expected[: seq.num_tokens], rtol=0, atol=TOLERANCE)
            self.cache.free(seq)


@pytest.mark.parametrize("boundary", [4, 128, 256])
def test_logits_after_a_roll_back_across_a_boundary(boundary: int, llm: LLM) -> None:
    """Every way in which up to 8 rejected tokens can end a group of 2, 4 or 128 tokens, or a block of 256, or begin the next."""
    cases = [(kept, wrong) for kept in range(max(1, boundary - 8), boundary + 2) for wrong in (1, 2, 5, 8)]
    run = Drafting(llm, len(cases))
    run.step({i: (kept - 1, 0) for i, (kept, _) in enumerate(cases) if kept > 1})
    run.step({i: (1, wrong) for i, (_, wrong) in enumerate(cases)})  # the verified token and its drafts
    run.step({i: (i % 3, ROLL_BACK - i % 3) for i in range(len(cases))})  # again from there
    run.step({i: (1, 0) for i in range(len(cases))})
    run.step({i: (9, 0) for i in range(len(cases))})
    run.check(llm.logits(IDS))


def test_any_sequence_of_drafts(llm: LLM) -> None:
    """Drafts of 0 to 8 tokens, accepted in part, all along the sequence, some after a long chunk."""
    rng = random.Random(5)
    run = Drafting(llm, 6)
    while unfinished := [i for i, seq in enumerate(run.sequences) if seq.num_tokens < 270]:
        sizes = {i: (rng.choice([0, 1, 1, 2, 3, 5, 40]), rng.randint(0, ROLL_BACK)) for i in unfinished}
        run.step({i: size for i, size in sizes.items() if sum(size)})
    run.check(llm.logits(IDS))


def test_a_roll_back_by_itself_and_what_it_refuses(llm: LLM) -> None:
    cache = llm.engine.cache
    run = Drafting(llm, 1)
    (seq,) = run.sequences
    run.step({0: (140, 0)})
    for tokens in (9, -1):
        with pytest.raises(ValueError, match=f"cannot take back {tokens} of 140 tokens: 132 are final"):
            cache.roll_back(seq, tokens)
    cache.roll_back(seq, 5)
    with pytest.raises(ValueError, match="4 of 135 tokens: 132 are final"):
        cache.roll_back(seq, 4)
    cache.roll_back(seq, 3)
    assert seq.num_tokens == 132
    run.step({0: (125, 0)})
    assert llm.engine.cache.prefix is not None and len(seq.blocks) == 1
    with pytest.raises(ValueError, match="2 of 257 tokens: 256 are final"):  # other sequences may be reading the block
        cache.roll_back(seq, 2)
    cache.roll_back(seq, 1)
    run.logits[0].pop(256)
    run.check(llm.logits(IDS))


def test_pages_after_a_roll_back_are_those_of_a_sequence_that_long(llm: LLM) -> None:
    run = Drafting(llm, 2)
    drafted, plain = run.sequences
    for length in (120, 251, 255):
        run.step({0: (length - drafted.num_tokens, 8), 1: (length - plain.num_tokens, 0)})
        for name, table in drafted.tables.items():
            assert table.end_block == plain.tables[name].end_block, name
    run.check(llm.logits(IDS))
    assert not any(llm.engine.cache.used_by_kind.values())
