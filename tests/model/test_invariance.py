"""What must not change the result: where a sequence starts to count its positions, and who else is in the batch."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.small_model import config_dict

pytest.importorskip("transformers", minversion="5.24", reason="draws the random weights in transformers' model")
from abyssal import LLM
from abyssal.kv.batch import Chunk, build_batch
from abyssal.kv.pool import SequenceCache
from abyssal.ops.rope import rope_table
from tests.support import oracle

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4
VOCAB = 160


def load_random(folder: Path, ratios: list[int], **changes: object) -> LLM:
    config = config_dict(ratios, **changes)
    oracle.save_model(oracle.random_model(config, seed=7), config, folder, "released")
    return LLM(folder, device="cpu", dtype="float32", kv_layout="fp32", kv_cache_bytes=128 << 20)


@pytest.fixture(scope="module")
def window_only(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load_random(tmp_path_factory.mktemp("window_only"), [0, 0, 0], num_hash_layers=1)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load_random(tmp_path_factory.mktemp("mixed"), [0, 4, 128, 4], num_hash_layers=1)


def shifted_logits(llm: LLM, token_ids: list[int], shift: int, chunk_sizes: list[int]) -> Tensor:
    """Logits fp32 [n, vocab] when the first token stands at position `shift`: only the rotary tables can tell."""
    runner, config = llm.engine.runner, llm.engine.runner.model_config
    sequence, start, parts = runner.cache.new_sequence(), 0, []
    for size in chunk_sizes:
        assert runner.cache.allocate(sequence, start, start + size)
        chunk = Chunk(token_ids[start : start + size], start, sequence)
        batch = build_batch(config, runner.cache, [chunk], list(range(size)), runner.device)
        positions = batch.positions + shift
        tables = {"main": rope_table(positions, config.rope_main), "compress": rope_table(positions, config.rope_compress)}
        parts.append(runner.model(dataclasses.replace(batch, positions=positions, rope=tables), runner.cache).clone())
        start += size
        runner.cache.commit(sequence, token_ids, start)
        runner.cache.release_unneeded(sequence, start)
    runner.cache.free(sequence)
    return torch.cat(parts)


# Angles are fp32 products, so their rounding grows with the position: measured 2e-5 on logits at 100, 7e-5 at 500, 1e-4 at 1,000.
SHIFTS = st.integers(1, 300)
PROMPTS = st.integers(2, 60).flatmap(lambda n: st.lists(st.integers(0, VOCAB - 1), min_size=n, max_size=n))


def check_translation(llm: LLM, token_ids: list[int], shift: int) -> None:
    for sizes in ([len(token_ids)], [1] * len(token_ids)):
        moved, still = shifted_logits(llm, token_ids, shift, sizes), llm.logits(token_ids)
        torch.testing.assert_close(moved, still, rtol=0, atol=TOLERANCE)


@given(token_ids=PROMPTS, shift=SHIFTS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
def test_translation(window_only: LLM, token_ids: list[int], shift: int) -> None:
    """Window layers see relative positions only: a constant added to all of them changes nothing (V4 spec 2.6)."""
    assert window_only.engine.runner.model_config.rope_main.base == 10000
    check_translation(window_only, token_ids, shift)


@pytest.mark.parametrize("shift", [1, 17, 300])
def test_translation_fails_without_inverse_rope(window_only: LLM, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are values too: without the rotation back, the output depends on the absolute position, and no error is raised."""
    ids = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    check_translation(window_only, ids, shift)
    monkeypatch.setattr("abyssal.ops._reference.output_quant", lambda out, rope, tile, dtype: out.to(dtype))
    with pytest.raises(AssertionError, match="not close"):
        check_translation(window_only, ids, shift)
    moved = (shifted_logits(window_only, ids, shift, [40]) - window_only.logits(ids)).abs().max()
    assert moved > 100 * TOLERANCE


class Batched:
    """Several sequences computed together, each step one engine batch of given chunk sizes."""

    def __init__(self, llm: LLM, prompts: list[list[int]]) -> None:
        self.runner, self.prompts = llm.engine.runner, prompts
        self.caches: list[SequenceCache] = [self.runner.cache.new_sequence() for _ in prompts]
        self.done = [0] * len(prompts)
        self.logits: list[list[Tensor]] = [[] for _ in prompts]

    def step(self, sizes: dict[int, int]) -> None:
        """Compute the next sizes[i] tokens of sequence i; single tokens go first, as the engine orders them."""
        order = sorted(sizes, key=lambda i: sizes[i] > 1)
        for i in order:
            assert self.runner.cache.allocate(self.caches[i], self.done[i], self.done[i] + sizes[i])
        chunks = [Chunk(self.prompts[i][self.done[i] : self.done[i] + sizes[i]], self.done[i], self.caches[i]) for i in order]
        logits = self.runner(chunks, list(range(sum(sizes.values()))))
        for i, rows in zip(order, logits.split([sizes[i] for i in order]), strict=True):
            self.logits[i].append(rows.clone())
            self.done[i] += sizes[i]
            self.runner.cache.commit(self.caches[i], self.prompts[i], self.done[i])
            self.runner.cache.release_unneeded(self.caches[i], self.done[i])

    def close(self) -> None:
        for cache in self.caches:
            self.runner.cache.free(cache)


@pytest.fixture
def batched() -> Iterator[Callable[[LLM, list[list[int]]], Batched]]:
    made: list[Batched] = []

    def make(llm: LLM, prompts: list[list[int]]) -> Batched:
        made.append(Batched(llm, prompts))
        return made[-1]

    yield make
    for run in made:
        run.close()


STEP_SIZES = (0, 1, 1, 1, 2, 3, 4, 5, 17, 64, 65, 127, 128, 129)


@pytest.mark.parametrize("seed", range(20))
def test_batch_invariance(mixed: LLM, batched: Callable[[LLM, list[list[int]]], Batched], seed: int) -> None:
    """Prefill and decode of up to five sequences in any mixture: each has the logits that it has alone.

    Seeds are fixed: in a rare mixture two experts or entries may have scores that are equal to rounding.
    """
    schedule = random.Random(seed)
    lengths = schedule.choices([1, 2, 3, 4, 5, 40, 128, 129, 200, 300], k=schedule.randint(2, 5))
    prompts = [[schedule.randrange(VOCAB) for _ in range(n)] for n in lengths]
    run = batched(mixed, prompts)
    while left := {i: n - run.done[i] for i, n in enumerate(lengths) if run.done[i] < n}:
        sizes = {i: min(n, schedule.choice(STEP_SIZES)) for i, n in left.items()}
        run.step({i: n for i, n in sizes.items() if n} or left)
    run.close()
    for prompt, parts in zip(prompts, run.logits, strict=True):
        torch.testing.assert_close(torch.cat(parts), mixed.logits(prompt), rtol=0, atol=TOLERANCE)


def test_order_in_batch(mixed: LLM, batched: Callable[[LLM, list[list[int]]], Batched]) -> None:
    """Decoding in a permuted batch gives permuted results."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in (130, 3, 64, 257, 5)]
    outcomes = []
    for order in (range(5), (3, 0, 4, 2, 1)):
        run = batched(mixed, [prompts[i] for i in order])
        for k, i in enumerate(order):
            if len(prompts[i]) > 3:
                run.step({k: len(prompts[i]) - 3})
        for _ in range(3):
            run.step(dict.fromkeys(range(5), 1))
        outcomes.append({i: torch.cat(run.logits[k]) for k, i in enumerate(order)})
    for i in range(5):
        torch.testing.assert_close(outcomes[0][i], outcomes[1][i], rtol=0, atol=TOLERANCE)


def test_nothing_leaks_between_sequences(mixed: LLM, batched: Callable[[LLM, list[list[int]]], Batched]) -> None:
    """NaN in every free page: a sequence reads only what it has written itself."""
    ids = torch.randint(VOCAB, (300,), generator=torch.Generator().manual_seed(4)).tolist()
    expected = mixed.logits(ids)
    for pool in mixed.engine.cache.pools.values():
        pool.data[1:] = 0xFF
    run = batched(mixed, [ids, ids[:50]])
    run.step({0: 150, 1: 49})
    run.step({0: 1, 1: 1})
    run.step({0: 149})
    torch.testing.assert_close(torch.cat(run.logits[0]), expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(torch.cat(run.logits[1]), expected[:50], rtol=0, atol=TOLERANCE)
