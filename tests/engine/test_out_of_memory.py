"""Steps that run out of memory: they become smaller, and every request still ends with its own tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from abyssal.config import EngineConfig
from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest, RequestUpdate, SamplingParams
from abyssal.kv.batch import Chunk
from tests.support.families import FAMILIES, write_small

REQUESTS = {f"r{n}": ([2 + (7 * n + i * i) % 150 for i in range(n)], 6 + n % 5) for n in (1, 3, 40, 129, 260, 300)}
LOGPROBS = {"r129"}  # whose prompt's logprobs are wanted: nothing may be reported twice


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(request.param, tmp_path_factory.mktemp("small"), seed=3)


def engine(folder: Path, **options: Any) -> Engine:
    defaults = {
        "device": "cpu",
        "kv_cache_bytes": 8 << 20,
        "max_num_batched_tokens": 96,
        "max_num_seqs": 8,
        "max_model_len": 1024,
    }
    return Engine(EngineConfig(model=str(folder), **(defaults | options)))


def add_all(eng: Engine) -> None:
    for name, (ids, count) in REQUESTS.items():
        scored = 1 if name in LOGPROBS else None
        eng.add(
            EngineRequest(name, ids, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, prompt_logprobs=scored))
        )


def finish(eng: Engine, most_steps: int = 3000) -> dict[str, list[RequestUpdate]]:
    updates: dict[str, list[RequestUpdate]] = {}
    for _ in range(most_steps):
        if not eng.has_unfinished():
            break
        for update in eng.step():
            updates.setdefault(update.request_id, []).append(update)
    assert not eng.has_unfinished(), "no progress"
    stats = eng.stats()
    assert stats.pages_free == stats.pages_total and not any(stats.pages_by_kind.values())
    return updates


def tokens(updates: dict[str, list[RequestUpdate]]) -> dict[str, list[int]]:
    return {name: [t for update in own for t in update.token_ids] for name, own in updates.items()}


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    eng = engine(folder)
    add_all(eng)
    return tokens(finish(eng))


def run_out(eng: Engine, monkeypatch: pytest.MonkeyPatch, when: Callable[[list[Chunk]], bool], layer: int = 2) -> list[int]:
    """Half-way through the layers, after caches were written, steps run out of memory `when` told so; their sizes."""
    block, run = eng.runner.model.blocks[layer], eng.runner.__class__.__call__
    attention, state, failed = block.attention, {"fail": False}, []

    def call(self: Any, chunks: list[Chunk], rows: list[int], **more: Any) -> torch.Tensor:
        state["fail"] = when(chunks)
        if state["fail"]:
            failed.append(sum(len(c.token_ids) for c in chunks))
        return run(self, chunks, rows, **more)

    def attend(*args: Any) -> torch.Tensor:
        out = attention(*args)
        if state["fail"]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB (planted)")
        return out

    monkeypatch.setattr(eng.runner.__class__, "__call__", call)
    block.attention = attend
    return failed


@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_limit_on_the_step_is_found_and_every_request_ends_with_its_tokens(
    folder: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, caching: bool
) -> None:
    """Steps of more than 30 tokens never fit."""
    eng = engine(folder, enable_prefix_caching=caching)
    failed = run_out(eng, monkeypatch, lambda chunks: sum(len(c.token_ids) for c in chunks) > 30)
    add_all(eng)
    updates = finish(eng)
    assert tokens(updates) == expected
    assert failed[:2] == [96, 48] and len(failed) < 10, "halved until it fits, and tried again seldom"
    assert not any(update.error for own in updates.values() for update in own)
    for name in LOGPROBS:
        (scored,) = [update.prompt_logprobs for update in updates[name] if update.prompt_logprobs is not None]
        assert len(scored) == len(REQUESTS[name][0])
    assert eng.stats().num_preemptions > 0


@pytest.mark.parametrize(("every", "until"), [(2, 12), pytest.param(5, 26, marks=pytest.mark.long)])
def test_steps_that_fail_now_and_then_are_computed_again(
    folder: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, every: int, until: int
) -> None:
    """Another process takes memory and gives it back: decoding steps fail too, for a while."""
    eng, count = engine(folder), [0]

    def now_and_then(chunks: list[Chunk]) -> bool:
        count[0] += 1
        return count[0] % every == 0 and count[0] <= until

    failed = run_out(eng, monkeypatch, now_and_then)
    add_all(eng)
    assert tokens(finish(eng)) == expected
    assert len(failed) == until // every


def test_a_request_that_never_fits_ends_alone_and_the_engine_goes_on(
    folder: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    eng = engine(folder)
    run_out(eng, monkeypatch, lambda chunks: any(c.end > 280 for c in chunks))
    add_all(eng)
    updates = finish(eng)
    (update,) = [update for update in updates.pop("r300") if update.error]
    assert update.finish_reason == "error" and "out of memory" in update.error
    assert tokens(updates) == {name: ids for name, ids in expected.items() if name != "r300"}


def test_a_fault_beside_a_shortage_does_not_lose_the_others(
    folder: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request breaks its step; while the others are computed again alone, memory runs short."""
    eng = engine(folder, max_num_batched_tokens=1024)
    bad = REQUESTS["r40"][0]
    failed = run_out(eng, monkeypatch, lambda chunks: len(chunks) == 1 and len(chunks[0].token_ids) > 100)
    run = eng.runner.__class__.__call__

    def break_on_bad(self: Any, chunks: list[Chunk], rows: list[int], **more: Any) -> torch.Tensor:
        if any(c.token_ids == bad for c in chunks):
            raise ValueError("planted")
        return run(self, chunks, rows, **more)

    monkeypatch.setattr(eng.runner.__class__, "__call__", break_on_bad)
    add_all(eng)
    updates = finish(eng)
    assert failed and [update.error is not None for update in updates.pop("r40")] == [True]
    assert tokens(updates) == {name: ids for name, ids in expected.items() if name != "r40"}
