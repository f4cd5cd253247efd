"""Decode steps replayed as CUDA graphs: bit for bit the same step launched op by op, and near each sequence computed alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from abyssal import LLM, SamplingParams
from abyssal.engine.decoder import Decoder
from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest
from abyssal.kv.pool import NO_PAGE
from tests.conftest import POISON_LIMIT
from tests.engine.test_engine import assert_drained, drain
from tests.support.slices import slice_engine, small_slice
from tests.support.stepping import Side

pytestmark = pytest.mark.gpu
BACKENDS = ("hopper", "triton")
LENGTHS = (
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    63,
    64,
    65,
    100,
    126,
    127,
    128,
    129,
    130,
    131,
    132,
    200,
    255,
    256,
    257,
    300,
    384,
    511,
    512,
    513,
)
LENGTHS += (640, 700, 1000, 1300)
OPTIONS = {"device": "cuda", "kv_cache_bytes": 1 << 30, "max_num_batched_tokens": 8192}
Documents = Callable[[int], list[dict[str, Tensor]]]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def without_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Steps keep their fixed shapes from here on, but are launched op by op."""
    yield lambda: monkeypatch.setattr(Decoder, "_captured", lambda *_: None)


def prompts(recall: Documents) -> list[list[int]]:
    ids = recall(2048)[0]["input_ids"].tolist()
    return [ids[i : i + n] for i, n in enumerate(LENGTHS)]


def assert_same_pages(side: Side, other: Side) -> None:
    """As far as they were poisoned, hence equal at first: those that were handed out, and many more."""
    for (bucket, pool), same in zip(side.cache.pools.items(), other.cache.pools.values(), strict=True):
        lowest = POISON_LIMIT // pool.page_bytes
        assert pool.num_pages - pool.num_free < lowest, bucket
        assert not pool.data[NO_PAGE].any() and torch.equal(pool.data[:lowest], same.data[:lowest]), bucket


def test_a_replay_is_the_step(backend: str, recall: Documents, without_graphs: Callable[[], None]) -> None:
    """Batches of every size up to 33, of sequences of all lengths; each step computes other sequences than the one before."""
    every = [*prompts(recall), [5]]
    tokens = [prompt + [7] * 12 for prompt in every]
    sides = [Side("tiny", tokens, backend=backend, max_num_seqs=40, **OPTIONS) for _ in range(2)]
    steps: list[list[dict[tuple[int, int], Tensor]]] = []
    for side in sides:
        assert side.runner.decoder is not None and side.llm.engine.config.enable_cuda_graphs
        side.step([len(prompt) - 1 for prompt in every])  # the first and the last have nothing computed yet
        steps.append([])
        for count in (1, 33, 2, 3, 32, 17, 9, 33, 31, 16, 8):
            first = (7 * count) % 33
            chosen = {(first + i) % 33 for i in range(count)}
            steps[-1].append(side.step([int(i in chosen) for i in range(33)]))
        without_graphs()
    for number, (replayed, launched) in enumerate(zip(*steps, strict=True)):
        assert replayed.keys() == launched.keys()
        for key, logits in replayed.items():
            assert logits.isfinite().all() and torch.equal(logits, launched[key]), (number, key)
    assert_same_pages(*sides)
    for side in sides:
        side.llm.close()


def test_32_requests_together_under_graphs_have_the_logits_of_each_alone_without(backend: str, recall: Documents) -> None:
    """Bit for bit in batch-invariant mode, teacher-forced over 24 steps; each alone is computed by ordinary steps."""
    every = prompts(recall)
    options = OPTIONS | {"backend": backend, "batch_invariant": True}
    tokens = [prompt + recall(2048)[1]["input_ids"].tolist()[i : i + 24] for i, prompt in enumerate(every)]
    together = Side("tiny", tokens, max_num_seqs=32, **options)
    together.step([len(prompt) for prompt in every])
    rows: dict[tuple[int, int], Tensor] = {}
    for _ in range(24):
        rows |= together.step([1] * 32)
    together.llm.close()
    here, alone = [], []
    with LLM("tiny", enable_cuda_graphs=False, **options) as llm:
        assert llm.engine.runner.decoder is None
        for i, ids in enumerate(tokens):
            alone.append(llm.logits(ids, [len(every[i]), *[1] * 24])[len(every[i]) :])
            here.append(torch.stack([rows[i, p] for p in range(len(every[i]), len(ids))]))
    assert torch.equal(torch.cat(here), torch.cat(alone))


def test_32_greedy_requests_under_graphs_give_the_tokens_of_each_alone_without(backend: str, recall: Documents) -> None:
    """In batch-invariant mode, through the engine's own loop, prompts in one step and in steps of 1000 tokens."""
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    requests = {f"r{i}": (ids, params) for i, ids in enumerate(prompts(recall))}
    options = OPTIONS | {"backend": backend, "batch_invariant": True, "enable_prefix_caching": False}
    with LLM("tiny", enable_cuda_graphs=False, **options) as llm:
        assert llm.engine.runner.decoder is None
        alone = {name: answers(llm.engine, {name: request}, {})[name] for name, request in requests.items()}
    assert len({tuple(tokens) for tokens in alone.values()}) > 4 and all(len(tokens) == 32 for tokens in alone.values())
    for size in (8192, 1000):
        with LLM("tiny", **options | {"max_num_seqs": 32, "max_num_batched_tokens": size}) as llm:
            assert llm.engine.runner.decoder is not None
            assert answers(llm.engine, requests, {}) == alone, size


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_replayed_chunk_is_the_step(batch_invariant: bool, backend: str, recall: Documents) -> None:
    """Bit for bit: chunks alone, beside single tokens and beside another prompt. Numbers of tokens to which some are added, if invariant."""
    docs = [doc["input_ids"].tolist() for doc in recall(2048)]
    long, other = docs[0] + docs[1] + docs[2], docs[3] + docs[4]
    tokens = [long, other, other[:700], other[:2], other[:2000]]
    steps = [[512, 0, 0, 0, 0]] * 5
    steps += [[510, 0, 1, 1, 0], [300, 212, 0, 0, 0], [511, 0, 1, 0, 0], [0, 512, 0, 0, 0], [200, 200, 1, 0, 111]]
    if batch_invariant:
        steps += [[400, 0, 0, 0, 0], [0, 0, 20, 1, 0], [1, 1, 1, 0, 1], [445, 1, 0, 0, 1], [1, 1, 23, 0, 0], [0, 1, 0, 0, 300]]
    steps += [[512, 0, 0, 0, 0]]
    options = OPTIONS | {"backend": backend, "batch_invariant": batch_invariant, "max_num_batched_tokens": 512}
    seen, sides = [], []
    for replays in (True, False):
        side = Side("tiny", tokens, max_num_seqs=8, **options)
        sides.append(side)
        pieces = side.runner.pieces
        assert pieces is not None
        if not replays:
            side.runner.pieces = None
        seen.append([side.step(counts) for counts in steps])
        assert set(pieces._steps) == (set() if not replays else {512, 448, 32, 320} if batch_invariant else {512})
    for number, (replayed, launched) in enumerate(zip(*seen, strict=True)):
        assert replayed.keys() == launched.keys()
        for key, logits in replayed.items():
            assert logits.isfinite().all() and torch.equal(logits, launched[key]), (number, key)
    assert_same_pages(*sides)
    for side in sides:
        side.llm.close()


@pytest.mark.parametrize("name", ["v4-flash", "v4.1-flash"])
def test_replayed_chunks_of_every_kind_of_layer(name: str, backend: str, tmp_path: Path) -> None:
    """In batch-invariant mode, twice, so that steps of every size are captured and replayed."""
    folder = small_slice(name, tmp_path)
    ids = torch.randint(0, 512, (3000,), generator=torch.Generator().manual_seed(0)).tolist()
    sizes = [512, 3, 400, 512, 61, 512, 500, 500]
    options = {"device": "cuda", "dtype": "bfloat16", "backend": backend, "batch_invariant": True, "max_num_batched_tokens": 512}
    got = []
    for replays in (True, False):
        engine = slice_engine(name, folder, **options)
        assert engine.runner.pieces is not None
        if not replays:
            engine.runner.pieces = None
        got += [engine.score(ids, sizes, list(range(len(ids)))) for _ in range(2)]
    assert got[0].isfinite().all() and all(torch.equal(logits, got[0]) for logits in got[1:])


def test_over_the_edge_of_a_shape(backend: str, recall: Documents) -> None:
    """Steps that fill the shape of 8192 tokens and go on in the next, beside a short sequence."""
    options = OPTIONS | {"backend": backend, "batch_invariant": True}
    ids = recall(8192)[0]["input_ids"].tolist()
    long = (ids + recall(2048)[0]["input_ids"].tolist())[: 8192 + 6]
    side = Side("tiny", [long, ids[:300]], max_num_seqs=4, **options)
    assert side.runner.decoder is not None and side.runner.decoder.capacities[0] == 8192
    side.step([8184, 280])
    rows: dict[tuple[int, int], Tensor] = {}
    for _ in range(14):
        rows |= side.step([1, 1])
    assert {capacity for _, capacity in side.runner.decoder._graphs} == {8192, 32768}
    side.llm.close()
    with LLM("tiny", enable_cuda_graphs=False, **options) as llm:
        for i, tokens, start in ((0, long, 8184), (1, ids[:294], 280)):
            alone = llm.logits(tokens, [start, *[1] * (len(tokens) - start)], list(range(start, len(tokens))))
            there = torch.stack([rows[i, p] for p in range(start, len(tokens))])
            assert torch.equal(there, alone), i


def answers(eng: Engine, requests: dict[str, tuple[list[int], SamplingParams]], aborted: dict[int, str]) -> dict[str, list[int]]:
    for name, (ids, params) in requests.items():
        eng.add(EngineRequest(name, ids, params))
    got = drain(eng, lambda step: eng.abort(aborted[step]) if step in aborted else None)
    eng.step()
    assert_drained(eng)
    assert all(not pool.data[NO_PAGE].any() for pool in eng.cache.pools.values())
    return got


def test_f03_a_prompt_50_times_among_others(backend: str, recall: Documents) -> None:
    """Each time the answer without graphs: greedy, in batch-invariant mode (case F03)."""
    every = prompts(recall)
    same = (every[20], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    requests = {}
    for i in range(50):
        requests[f"same {i}"] = same
        requests[f"other {i}"] = (every[i % 32], SamplingParams(temperature=0, max_tokens=4 + i % 13, ignore_eos=True))
    options = OPTIONS | {"backend": backend, "batch_invariant": True, "enable_prefix_caching": False}
    with LLM("tiny", enable_cuda_graphs=False, **options) as llm:
        (expected,) = answers(llm.engine, {"alone": same}, {}).values()
    with LLM("tiny", max_num_seqs=6, **options) as llm:
        got = answers(llm.engine, requests, {})
    assert [got[f"same {i}"] for i in range(50)] == [expected] * 50


@pytest.mark.parametrize("cached", [True, False])
def test_f07_32_copies_of_a_prompt_together(cached: bool, backend: str, recall: Documents) -> None:
    """With and without a prefix index, in batch-invariant mode (case F07)."""
    request = (recall(2048)[0]["input_ids"].tolist()[:1000], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    options = OPTIONS | {"backend": backend, "batch_invariant": True, "enable_prefix_caching": cached}
    with LLM("tiny", enable_cuda_graphs=False, **options) as llm:
        (expected,) = answers(llm.engine, {"alone": request}, {}).values()
    with LLM("tiny", max_num_seqs=32, **options) as llm:
        assert answers(llm.engine, {f"r{i}": request for i in range(32)}, {}) == {f"r{i}": expected for i in range(32)}
        assert (llm.engine.stats().cached_tokens > 0) == cached


def test_steps_launched_ahead_with_aborts(backend: str, recall: Documents, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled requests, all of one length of answer: the same tokens as where each step is waited for."""
    every = prompts(recall)
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 40}]
    requests = {
        f"r{i}": (ids, SamplingParams(seed=i, max_tokens=64, ignore_eos=True, **kinds[i % 3])) for i, ids in enumerate(every)
    }
    with LLM("tiny", backend=backend, max_num_seqs=32, enable_prefix_caching=False, **OPTIONS) as llm:
        ahead = answers(llm.engine, requests, {})
        monkeypatch.setattr(Engine, "_can_fly", lambda *_: False)
        assert answers(llm.engine, requests, {}) == ahead and all(len(tokens) == 64 for tokens in ahead.values())
        monkeypatch.undo()
        doomed = {20: "r3", 30: "r31", 31: "r0", 40: "r17"}
        got = answers(llm.engine, requests, doomed)
        for name, tokens in got.items():
            assert len(tokens) < 64 if name in doomed.values() else len(tokens) == 64


@pytest.mark.parametrize("name", ["v4-flash", "v4.1-flash"])
def test_chunks_beside_tokens_are_launched_ahead(
    name: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batch-invariant mode: prompts that come one after another, greedy and sampled, as where each step is waited for."""
    generator = torch.Generator().manual_seed(1)
    requests = {
        f"r{i}": (
            torch.randint(0, 512, (n,), generator=generator).tolist(),
            SamplingParams(temperature=i % 2, seed=i, max_tokens=3 + 7 * (i + 5) % 40, ignore_eos=True),
        )
        for i, n in enumerate((40, 300, 1, 129, 513, 2, 250, 31, 190, 3))
    }
    options = {"device": "cuda", "dtype": "bfloat16", "backend": backend, "batch_invariant": True, "max_num_batched_tokens": 64}
    engine = slice_engine(name, small_slice(name, tmp_path), **options)
    assert not engine.runner.needs_tokens
    mixed, takes_off = [], Engine._take_off

    def record(self: Engine, scheduled: Any, before: Any) -> Any:
        mixed.append(before is not None and len({count for _, count in scheduled}) > 1)
        return takes_off(self, scheduled, before)

    monkeypatch.setattr(Engine, "_take_off", record)
    got = []
    for waits in (False, False, True):
        if waits:
            monkeypatch.setattr(Engine, "_can_fly", lambda *_: False)
        left = list(requests)

        def come(step: int, left: list[str] = left) -> None:
            if left and step % 4 == 0:
                engine.add(EngineRequest(left[0], *requests[left.pop(0)]))

        come(0)
        got.append(drain(engine, come))
        assert not left
        assert_drained(engine)
    assert got[0] == got[1] == got[2] and got[0].keys() == requests.keys() and sum(mixed) > 20


def test_n_gram_tables_are_read_inside_of_a_graph(backend: str, tmp_path: Path) -> None:
    """From host memory, by steps launched ahead: the tokens of steps for which the host reads them from disk, and of no graphs.

    V4.1, greedy, in batch-invariant mode; prompts shorter and longer than the longest n-gram.
    """
    folder = small_slice("v4.1-flash", tmp_path)
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    requests = {
        f"r{n}": (torch.randint(0, 512, (n,), generator=generator).tolist(), params) for n in (1, 2, 3, 4, 5, 60, 130, 300)
    }
    options = {"device": "cuda", "dtype": "bfloat16", "backend": backend, "batch_invariant": True, "max_num_batched_tokens": 512}
    got = []
    for changes, needs_tokens in (({}, False), ({"engram_cache_bytes": 0}, True), ({"enable_cuda_graphs": False}, False)):
        engine = slice_engine("v4.1-flash", folder, **options, **changes)
        assert engine.runner.needs_tokens is needs_tokens
        got.append(answers(engine, requests, {}))
    assert got[0] == got[1] == got[2] and len({tuple(tokens) for tokens in got[0].values()}) > 4


def test_stops_at_any_time(backend: str, recall: Documents) -> None:
    """Answers of many lengths, more requests than rows: each ends where it does without graphs, as far as numbers agree."""
    every = prompts(recall)
    requests = {
        f"r{i}": (ids, SamplingParams(temperature=0, max_tokens=1 + i, ignore_eos=i % 2 == 0)) for i, ids in enumerate(every)
    }
    with LLM("tiny", backend=backend, max_num_seqs=7, **OPTIONS) as llm:
        got = answers_with_prefix(llm.engine, requests)
    assert got.keys() == requests.keys()
    for name, (_, params) in requests.items():
        assert len(got[name]) == params.max_tokens or not params.ignore_eos


def answers_with_prefix(eng: Engine, requests: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, list[int]]:
    """Twice, the second time from the prefix index: it may hold pages, and nothing else does at the end."""
    for _ in range(2):
        for name, (ids, params) in requests.items():
            eng.add(EngineRequest(name, ids, params))
        got = drain(eng)
        stats = eng.stats()
        assert stats.pages_free == stats.pages_total and not any(stats.pages_by_kind.values())
    return got


def test_a_step_under_way_is_done_before_an_engine_is_closed(backend: str, recall: Documents) -> None:
    llm = LLM("tiny", backend=backend, **OPTIONS)
    llm.engine.add(EngineRequest("a", prompts(recall)[10], SamplingParams(temperature=0, max_tokens=9)))
    for _ in range(3):
        llm.engine.step()
    torch.cuda._sleep(1 << 30)  # half a second
    llm.engine.step()
    flight = llm.engine._flight
    assert flight is not None and not flight._done.query()
    llm.close()
    assert flight._done.query()


def test_a_copy_to_the_host_is_timed_without_the_step_in_front(backend: str, recall: Documents) -> None:
    with LLM("tiny", backend=backend, **OPTIONS) as llm:
        llm.engine.add(EngineRequest("a", prompts(recall)[-1], SamplingParams(temperature=0, max_tokens=9)))
        for _ in range(3):
            llm.engine.step()
        (seq,) = llm.engine.scheduler.running
        llm.engine.swap.save(seq)  # the first time a copy sets something up
        llm.engine.swap.drop(seq)
        llm.engine.swap._bytes_per_second = 1.0
        torch.cuda._sleep(1 << 30)
        llm.engine.swap.save(seq)
        assert seq.saved is not None
        assert llm.engine.swap._bytes_per_second > 0.2 * seq.saved.payload_bytes / 0.2
