"""Many requests of mixed lengths on tiny-v4, some dropped half way: the others' tokens are those of each alone."""

from __future__ import annotations

import random

import pytest

from abyssal.config import EngineConfig
from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest, SamplingParams

LENGTHS = [1, 2, 5, 17, 64, 127, 128, 129, 300, 512, 777, 1024, 1500, 2048, 2500, 3000]
ABORTED = {"r4": 3, "r9": 9, "r12": 14, "r15": 6}  # request -> step after which it is dropped


def tiny(**options) -> Engine:
    return Engine(EngineConfig(device="cpu", kv_cache_bytes=1 << 30, max_model_len=8192, **options))


def requests() -> list[EngineRequest]:
    rng = random.Random(0)
    params = [SamplingParams(temperature=0, max_tokens=12 + i, ignore_eos=True) for i in range(len(LENGTHS))]
    return [EngineRequest(f"r{i}", [rng.randrange(10, 4096) for _ in range(n)], params[i]) for i, n in enumerate(LENGTHS)]


def drain(engine: Engine, drop: dict[str, int]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    step = 0
    while engine.has_unfinished():
        for update in engine.step():
            assert update.error is None
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
        step += 1
        for name in [n for n, last in drop.items() if last == step]:
            engine.abort(name)
    return tokens


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("budget", [512, 2048])
def test_16_concurrent_requests(budget: int) -> None:
    expected: dict[str, list[int]] = {}
    alone = tiny()
    for request in requests():
        alone.add(request)
        expected |= drain(alone, {})
    together = tiny(max_num_seqs=16, max_num_batched_tokens=budget)
    for request in requests():
        together.add(request)
    got = drain(together, ABORTED)
    for name, tokens in expected.items():
        assert got.get(name, []) == (tokens[: len(got.get(name, []))] if name in ABORTED else tokens), name
    stats = together.stats()
    assert stats.pages_free == stats.pages_total and not any(stats.pages_by_kind.values())
