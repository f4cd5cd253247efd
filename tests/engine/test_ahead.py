"""Steps of prompts beside sequences that decode, launched while the step before runs: the tokens of an engine that waits for each step."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import abyssal.engine.decoder
import abyssal.engine.engine
from abyssal.checkpoint.rows import RowTable
from abyssal.engine.decoder import Decoder
from abyssal.engine.engine import Engine
from abyssal.engine.flight import Flight
from abyssal.engine.request import EngineRequest, RequestUpdate, SamplingParams
from abyssal.engine.runner import Runner
from abyssal.engine.scheduler import TokenBudget
from abyssal.engine.sequence import Sequence
from abyssal.errors import RequestError
from abyssal.kv.batch import Chunk, Drawn
from abyssal.kv.pool import KVCache
from abyssal.ops._reference import ReferenceOps
from abyssal.ops.engram import row_values
from tests.engine.test_engine import MIB, alone, assert_drained, drain, engine, greedy, prompt
from tests.support.families import FAMILIES, write_small
from tests.support.stepping import decoding

LENGTHS = (70, 300, 5, 129, 40, 513, 3, 96, 95, 97, 256, 31, 1, 2)
KINDS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 40}]


def read(ops: ReferenceOps, rows: Tensor, table: RowTable, dtype: torch.dtype) -> Tensor:
    codes, scales = table.gather(rows)
    return row_values(codes, scales, dtype).view(len(rows), -1)


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """N-gram tables are read as by kernels, so that no step needs tokens that the host does not know."""
    monkeypatch.setattr(ReferenceOps, "prepare_table", lambda ops, table: table)
    monkeypatch.setattr(ReferenceOps, "table_rows", read)
    return write_small(request.param, tmp_path, seed=3)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Receives, of each step launched on tokens under way, how many of its sequences take one, and its tokens in all."""
    seen: list[tuple[int, int]] = []
    run = Runner.__call__

    def record(self: Runner, chunks: list[Chunk], rows: list[int], *args: Any, drawn: Drawn | None = None) -> Tensor:
        if drawn is not None:
            unknown = [i for i, chunk in enumerate(chunks) if chunk.token_ids == [-1]]
            assert unknown == (list(range(len(drawn.tokens))) if drawn.rows is None else drawn.rows.tolist())
            seen.append((len(unknown), sum(len(chunk.token_ids) for chunk in chunks)))
        return run(self, chunks, rows, *args, drawn=drawn)

    monkeypatch.setattr(Runner, "__call__", record)
    return seen


def requests_of(lengths: tuple[int, ...], most: int) -> dict[str, tuple[list[int], SamplingParams]]:
    """Prompts of these lengths and answers of 1 to `most` tokens, greedy and sampled."""
    return {
        f"r{i}": (prompt(n, i), SamplingParams(seed=i, max_tokens=1 + 5 * i % most, ignore_eos=True, **KINDS[i % 3]))
        for i, n in enumerate(lengths)
    }


def add(eng: Engine, requests: dict[str, tuple[list[int], SamplingParams]], *names: str) -> None:
    for name in names:
        eng.add(EngineRequest(name, *requests[name]))


def are_mixed(steps: list[tuple[int, int]]) -> int:
    return sum(tokens > taking for taking, tokens in steps)


@pytest.mark.parametrize("cached", [True, False])
def test_prompts_that_come_one_after_another(cached: bool, folder: Path, steps: list[tuple[int, int]]) -> None:
    """Every few steps one more, so that its chunks run beside the others' tokens; some end in the step before, after one token too."""
    requests = requests_of(LENGTHS, 23)
    expected = alone(folder, requests)
    eng = decoding(engine(folder, enable_prefix_caching=cached, max_num_seqs=6, max_num_batched_tokens=48))
    names = list(requests)
    add(eng, requests, names.pop(0))
    got = drain(eng, lambda step: add(eng, requests, names.pop(0)) if names and step % 3 == 0 else None)
    assert not names and got == expected
    assert are_mixed(steps) > 20
    assert_drained(eng)
    stats = eng.stats()
    assert stats.prompt_tokens + stats.cached_tokens == sum(LENGTHS)
    assert stats.generation_tokens == sum(map(len, expected.values()))


def test_a_known_token_beside_unknown_ones(folder: Path, steps: list[tuple[int, int]]) -> None:
    """Prompts of one token come while others decode: all tokens are single ones, and some of them the host's."""
    requests = requests_of((5, 1, 9, 1, 1, 1), 40)
    expected = alone(folder, requests)
    eng = decoding(engine(folder))
    names = list(requests)
    add(eng, requests, names.pop(0))
    assert drain(eng, lambda step: add(eng, requests, names.pop(0)) if names and step % 2 == 0 else None) == expected
    assert len([1 for taking, tokens in steps if tokens == taking + 1]) >= 3
    assert_drained(eng)


def test_a_stop_in_the_step_before(folder: Path, steps: list[tuple[int, int]]) -> None:
    """A prompt's chunk runs beside the surplus token of each; the next request takes the place and the pages."""
    requests = {f"r{i}": (prompt(9 + i, i), greedy(30)) for i in range(4)} | {"long": (prompt(500, 9), greedy(5))}
    expected = alone(folder, requests)
    for i in range(4):
        ids, answer = requests[f"r{i}"][0], expected[f"r{i}"]
        requests[f"r{i}"] = (ids, greedy(30, stop_token_ids=[answer[7 + i]]))
        expected[f"r{i}"] = answer[: answer.index(answer[7 + i]) + 1]
    eng = decoding(engine(folder, max_num_seqs=5, max_num_batched_tokens=32))
    add(eng, requests, "r0", "r1", "r2", "r3")
    eng.step()
    add(eng, requests, "long")
    eng.add(EngineRequest("late", *requests["r0"]))
    got = drain(eng)
    assert got.pop("late") == expected["r0"] and got == expected
    assert are_mixed(steps) > 8
    assert_drained(eng)


@pytest.mark.parametrize("seed", range(4))
def test_arrivals_aborts_and_preemptions_at_random(seed: int, folder: Path, steps: list[tuple[int, int]]) -> None:
    """In few pages, with and without copies on the host; prompts share beginnings, and names come again while their step is under way."""
    rng = random.Random(seed)
    requests = requests_of(tuple(rng.randrange(1, 300) for _ in range(24)), 40)
    for i in range(0, 24, 4):
        ids = prompt(256, seed) + requests[f"r{i}"][0]
        requests[f"r{i}"] = (ids, requests[f"r{i}"][1])
    expected = alone(folder, requests)
    pages = {
        "kv_cache_bytes": 2 * MIB,
        "max_model_len": 640,
        "swap_bytes": seed % 2 * 64 * MIB,
        "enable_prefix_caching": seed < 2,
    }
    eng = decoding(engine(folder, max_num_seqs=rng.randrange(3, 9), max_num_batched_tokens=rng.randrange(20, 200), **pages))
    names, tokens, is_aborted = list(requests), {name: [] for name in requests}, set()
    for _ in range(3000):
        if names and rng.random() < 0.3:
            add(eng, requests, names.pop())
        if rng.random() < 0.05 and (running := eng.scheduler.running):
            name = rng.choice(running).request.request_id
            eng.abort(name)
            if rng.random() < 0.5:
                tokens[name] = []
                add(eng, requests, name)
            else:
                is_aborted.add(name)
        if not names and not eng.has_unfinished():
            break
        for update in eng.step():
            assert update.error is None
            tokens[update.request_id] += update.token_ids
    assert not names and not eng.has_unfinished(), "no progress"
    for name, answer in tokens.items():
        assert answer == expected[name] or (name in is_aborted and answer == expected[name][: len(answer)]), name
    assert are_mixed(steps) > 10
    eng.step()
    assert_drained(eng)


def test_pages_run_out_beside_a_prompt(folder: Path, steps: list[tuple[int, int]]) -> None:
    """Nothing is preempted for pages that the tokens under way give back."""
    requests = requests_of((400, 380, 390, 300, 410, 250), 150)
    expected = alone(folder, requests)
    eng = decoding(engine(folder, kv_cache_bytes=MIB, enable_prefix_caching=False, max_model_len=640))
    add(eng, requests, *requests)
    preempt = eng.scheduler.preempt

    def record(seq: Sequence) -> None:
        assert not any(s.is_drawing for s in eng.scheduler.running)
        preempt(seq)

    eng.scheduler.preempt = record  # type: ignore[method-assign]
    assert drain(eng) == expected
    assert are_mixed(steps) > 1
    assert_drained(eng)


@pytest.mark.parametrize("where", ["launch", "alone"])
def test_a_shortage_of_memory_in_a_step_launched_ahead(
    where: str, folder: Path, steps: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step before is reported, the failed one computed again in smaller ones: no token is lost or comes twice."""
    requests = requests_of(LENGTHS, 23)
    expected = alone(folder, requests)
    eng = decoding(engine(folder, max_num_seqs=6, max_num_batched_tokens=64))
    block, count = eng.runner.model.blocks[2], 0
    attention, run = block.attention, Runner.__call__
    fails = False

    def call(self: Runner, chunks: list[Chunk], rows: list[int], *args: Any, drawn: Drawn | None = None) -> Tensor:
        nonlocal fails, count
        mixed = drawn is not None and any(len(c.token_ids) > 1 for c in chunks)
        count += mixed
        fails = mixed and count % 4 == 1 and count < 30
        return run(self, chunks, rows, *args, drawn=drawn)

    def attend(*args: Any) -> Tensor:
        out = attention(*args)
        if fails:
            raise torch.OutOfMemoryError("planted") if where == "launch" else ValueError("planted")
        return out

    monkeypatch.setattr(Runner, "__call__", call)
    block.attention = attend  # type: ignore[assignment]
    names = list(requests)
    add(eng, requests, names.pop(0))
    got = drain(eng, lambda step: add(eng, requests, names.pop(0)) if names and step % 3 == 0 else None)
    assert not names and got == expected and count > 8
    assert eng.scheduler.num_preemptions > 0 or where == "alone"
    assert_drained(eng)


def test_requests_that_wait_for_their_tokens_beside_others(folder: Path, steps: list[tuple[int, int]]) -> None:
    """Logprobs, penalties and a prompt's logprobs come and go while the others' steps are launched ahead."""
    requests = requests_of((70, 60, 200, 100), 60)
    requests["scored"] = (prompt(150, 20), greedy(4, prompt_logprobs=1))
    requests["logprobs"] = (prompt(50, 21), greedy(6, logprobs=1))
    requests["penalty"] = (prompt(90, 22), greedy(9, frequency_penalty=1.5))
    requests["least"] = (prompt(90, 22), SamplingParams(seed=1, max_tokens=30, min_tokens=9))
    expected = alone(folder, requests)
    eng = decoding(engine(folder, max_num_batched_tokens=32))
    names = list(requests)
    add(eng, requests, names.pop(0))
    updates: list[RequestUpdate] = []
    for step in range(3000):
        if names and step % 6 == 0:
            add(eng, requests, names.pop(0))
        updates += eng.step()
        if not names and not eng.has_unfinished():
            break
    assert {n: [t for u in updates if u.request_id == n for t in u.token_ids] for n in requests} == expected
    (scored,) = (u.prompt_logprobs for u in updates if u.prompt_logprobs is not None)
    assert len(scored) == 150 and are_mixed(steps) > 5
    assert_drained(eng)


def test_a_prompt_alone_is_launched_chunk_by_chunk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk is launched before the one before is waited for, and the first token's step before the last chunk is."""
    events: list[str] = []
    take_off, land = Engine._take_off, Flight.land

    def launch(self: Engine, *args: Any) -> Flight:
        events.append("launch")
        return take_off(self, *args)

    def wait(self: Flight) -> tuple[list[int], list[int]]:
        events.append("land")
        return land(self)

    eng = decoding(engine(folder))
    monkeypatch.setattr(Engine, "_take_off", launch)
    monkeypatch.setattr(Flight, "land", wait)
    eng.add(EngineRequest("a", prompt(3 * 96, 1), greedy(3)))
    assert len(drain(eng)["a"]) == 3
    assert events == ["launch", *["launch", "land"] * 4, "land"]
    assert_drained(eng)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_new_shape_while_tokens_are_under_way(temperature: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs before a shape is captured writes where the step before has left its tokens."""
    monkeypatch.setattr(abyssal.engine.decoder, "FIRST_CAPACITY", 64)
    launch, warm = Decoder._launch, set()

    def after_a_capture(self: Decoder, shape: tuple[int, int], replay: bool, chunks: list[Chunk], drawn: Drawn | None) -> None:
        if shape not in warm:
            warm.add(shape)
            self._fill([], None)
            self._compute(*shape)
        launch(self, shape, replay, chunks, drawn)

    monkeypatch.setattr(Decoder, "_launch", after_a_capture)
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=40, ignore_eos=True) for i in range(2)]
    requests = {f"r{i}": (prompt(50, i), params[i]) for i in range(2)}
    expected = alone(folder, requests)
    warm.clear()
    eng = decoding(engine(folder, max_num_batched_tokens=128))
    add(eng, requests, *requests)
    assert drain(eng) == expected and len(warm) > 1


def test_score_between_steps(folder: Path) -> None:
    requests = {"a": (prompt(20, 1), greedy(12))}
    expected = alone(folder, requests)
    eng = decoding(engine(folder))
    add(eng, requests, "a")

    def on_step(step: int) -> None:
        if step == 4:
            eng.score([3, 4, 5], [1, 1, 1], [0, 1, 2])

    assert drain(eng, on_step) == expected


def test_a_step_that_nobody_waits_for_is_not_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed of steps, by which swap decides, would fall to nothing after an idle hour."""
    ticks, late = itertools.count(), [0.0]
    monkeypatch.setattr(abyssal.engine.engine.time, "perf_counter", lambda: next(ticks) * 1e-3 + late[0])
    eng = decoding(engine(folder))
    eng.add(EngineRequest("a", prompt(300, 1), greedy(3)))
    eng.step()
    eng.abort("a")
    assert not eng.has_unfinished()
    late[0] = 3600.0
    eng.add(EngineRequest("b", prompt(5, 2), greedy(3)))
    drain(eng)
    assert eng.swap._tokens_per_second is None or eng.swap._tokens_per_second > 1000


@pytest.mark.parametrize("failure", [ValueError("planted"), torch.OutOfMemoryError("planted")], ids=["error", "memory"])
def test_a_culprit_that_ends_meanwhile_takes_nobody_along(
    failure: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that breaks has one more sequence, whose last token is known only now."""
    requests = {"a": (prompt(20, 1), greedy(30)), "b": (prompt(60, 2), greedy(30))}
    expected = alone(folder, requests)
    ids, answer = requests["a"][0], expected["a"]
    last = next(i for i in range(5, 25) if answer[i] not in answer[:i])
    requests["a"] = ids, greedy(30, stop_token_ids=[answer[last]])
    expected["a"] = answer[: last + 1]
    eng = decoding(engine(folder))
    run = Runner.__call__

    def broken(self: Runner, chunks: list[Chunk], rows: list[int], *args: Any, drawn: Drawn | None = None) -> Tensor:
        if any(chunk.start == len(ids) + last and chunk.token_ids == [-1] for chunk in chunks):
            raise failure
        return run(self, chunks, rows, *args, drawn=drawn)

    monkeypatch.setattr(Runner, "__call__", broken)
    too_large: list[int] = []
    exceeded = TokenBudget.exceeded

    def record(self: TokenBudget, tokens: int) -> None:
        too_large.append(tokens)
        exceeded(self, tokens)

    monkeypatch.setattr(TokenBudget, "exceeded", record)
    add(eng, requests, *requests)
    assert drain(eng) == expected
    assert too_large == ([2] if isinstance(failure, torch.OutOfMemoryError) else [])


def test_an_update_of_the_request_before_of_that_name(folder: Path) -> None:
    requests = {"a": (prompt(20, 1), greedy(9)), "b": (prompt(25, 2), greedy(9))}
    expected = alone(folder, requests)
    eng = decoding(engine(folder))
    add(eng, requests, *requests)
    for _ in range(4):
        eng.step()
    eng.export_sequence("a")  # for which the step under way has to land
    eng.abort("b")
    add(eng, requests, "b")
    assert drain(eng)["b"] == expected["b"]


def landed_with_a_last_token(folder: Path) -> Engine:
    """One of two requests, "a", has ended in a step that landed for the sake of the other; nobody was told."""
    eng = decoding(engine(folder))
    add(eng, {"a": (prompt(20, 1), greedy(3)), "b": (prompt(25, 2), greedy(30))}, "a", "b")
    for _ in range(3):
        eng.step()
    assert "a" in eng._sequences
    eng.export_sequence("b")
    assert [(u.request_id, u.finish_reason) for u in eng._landed] == [("a", "length"), ("b", None)]
    return eng


def test_a_name_is_in_use_until_its_last_update_is_reported(folder: Path) -> None:
    again = {"a": (prompt(30, 3), greedy(7))}
    expected = alone(folder, again)
    eng = landed_with_a_last_token(folder)
    with pytest.raises(RequestError, match="in use"):
        add(eng, again, "a")
    last = [update for update in eng.step() if update.request_id == "a"]
    assert [update.finish_reason for update in last] == ["length"]
    add(eng, again, "a")
    assert drain(eng)["a"] == expected["a"]
    assert_drained(eng)


def test_nothing_is_reported_of_an_aborted_request_whose_last_token_has_landed(folder: Path) -> None:
    again = {"a": (prompt(30, 3), greedy(7))}
    expected = alone(folder, again)
    eng = landed_with_a_last_token(folder)
    eng.abort("a")
    add(eng, again, "a")
    assert drain(eng)["a"] == expected["a"]
    eng = landed_with_a_last_token(folder)
    eng.abort("a")
    eng.abort("b")
    assert not eng.has_unfinished()
    assert_drained(eng)


def test_an_engine_waits_for_its_device_before_it_is_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step under way reads graphs and writes tokens to the host."""
    events: list[str] = []
    monkeypatch.setattr(KVCache, "wait", lambda _: events.append("wait"))
    monkeypatch.setattr(Decoder, "close", lambda _: events.append("close"))
    eng = decoding(engine(folder))
    add(eng, {"a": (prompt(20, 1), greedy(9))}, "a")
    eng.step()
    assert eng._flight is not None
    eng.close()
    assert events == ["wait", "close"] and eng._flight is None


def test_an_engine_whose_device_is_lost_is_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: KVCache) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    closed: list[bool] = []
    monkeypatch.setattr(KVCache, "wait", lost)
    monkeypatch.setattr(Decoder, "close", lambda _: closed.append(True))
    decoding(engine(folder)).close()
    assert closed
