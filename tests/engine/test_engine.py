"""The engine as a whole on a small random model: batching, preemption, aborts, errors, and pages that all come back."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from abyssal.config import EngineConfig
from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest, RequestUpdate, SamplingParams
from abyssal.engine.sampler import SamplerState
from abyssal.errors import ConfigError, EngineDeadError, RequestError
from tests.checkpoint.build import random_v4_checkpoint
from tests.support.families import FAMILIES, write_small
from tests.support.small_model import config_dict
from tests.support.stepping import decoding

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    random_v4_checkpoint(path, config_dict([0, 4, 128, 4]), seed=3, quantised=False)
    return path


@pytest.fixture(scope="module", params=FAMILIES)
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(request.param, tmp_path_factory.mktemp("small"), seed=3)


def engine(folder: Path, **options) -> Engine:
    defaults = {
        "device": "cpu",
        "kv_cache_bytes": 8 * MIB,
        "max_num_batched_tokens": 96,
        "max_num_seqs": 8,
        "max_model_len": 2048,
    }
    return Engine(EngineConfig(model=str(folder), **(defaults | options)))


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 160) for _ in range(length)]


def greedy(max_tokens: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


def drain(eng: Engine, on_step=None) -> dict[str, list[int]]:
    """Step until idle -> tokens per request; a failed request raises."""
    out: dict[str, list[int]] = {}
    step = 0
    while eng.has_unfinished():
        for update in eng.step():
            assert update.error is None, update.error
            out.setdefault(update.request_id, []).extend(update.token_ids)
        step += 1
        assert step < 5000, "no progress"
        if on_step:
            on_step(step)
    return out


def assert_drained(eng: Engine) -> None:
    stats = eng.stats()
    assert stats.pages_free == stats.pages_total and not any(stats.pages_by_kind.values())
    assert stats.num_running == stats.num_waiting == 0


def alone(folder: Path, requests: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, list[int]]:
    eng = engine(folder)
    out = {}
    for name, (ids, params) in requests.items():
        eng.add(EngineRequest(name, ids, params))
        out |= drain(eng)
    return out


def test_a_mixed_batch_gives_the_tokens_of_each_alone_and_aborts_free_everything(either):
    folder = either
    lengths = [1, 2, 3, 4, 5, 60, 127, 128, 129, 255, 256, 257, 300, 511, 640, 900]
    requests = {f"r{i}": (prompt(n, i), greedy(8 + i)) for i, n in enumerate(lengths)}
    expected = alone(folder, requests)
    eng = engine(folder, max_num_seqs=16)
    for name, (ids, params) in requests.items():
        eng.add(EngineRequest(name, ids, params))
    doomed = {"r3", "r9", "r14"}

    def abort_some(step: int) -> None:
        if step == 12:
            for name in doomed:
                eng.abort(name)

    got = drain(eng, abort_some)
    assert_drained(eng)
    for name in requests.keys() - doomed:
        assert got[name] == expected[name], name
    for name in doomed:
        assert got.get(name, []) == expected[name][: len(got.get(name, []))]


def test_running_out_of_pages_preempts_and_changes_no_token(folder):
    """D01: more work than the pool holds."""
    requests = {f"r{i}": (prompt(200 + 60 * i, i), greedy(40)) for i in range(6)}
    expected = alone(folder, requests)
    eng = engine(folder, kv_cache_bytes=1300 * 1024, max_model_len=None)
    for name, (ids, params) in requests.items():
        eng.add(EngineRequest(name, ids, params))
    got = drain(eng)
    assert eng.stats().num_preemptions > 0, "the pool was not small enough to test anything"
    assert got == expected
    known = sum(len(ids) for ids, _ in requests.values())
    assert eng.stats().prompt_tokens < 3 * known, "sequences pushed each other out over and over"
    assert_drained(eng)


def test_b07_a_request_for_which_there_is_no_room_beside_nobody_is_refused(folder):
    """It would wait for ever, and all others behind it."""
    eng = engine(folder)
    taken = [(pool, pool.take(pool.num_free)) for pool in eng.cache.pools.values()]
    for name in "ab":
        eng.add(EngineRequest(name, prompt(300, ord(name)), greedy(5)))
    (update,) = eng.step()
    assert update.request_id == "a" and update.finish_reason == "error" and "kv_cache_bytes" in (update.error or "")
    for pool, pages in taken:
        pool.give_back(pages)
    assert len(drain(eng)["b"]) == 5
    assert_drained(eng)


def test_d07_penalties_and_seeds_survive_preemption(either):
    folder = either
    params = SamplingParams(temperature=1.3, seed=7, frequency_penalty=1.5, min_tokens=50, max_tokens=120, logprobs=1)
    requests = {"a": (prompt(40, 1), params), "b": (prompt(41, 2), params)}
    expected = alone(folder, requests)
    eng = engine(folder)
    for name, (ids, p) in requests.items():
        eng.add(EngineRequest(name, ids, p))

    def preempt(step: int) -> None:
        if step in (10, 41, 60):
            eng.scheduler.preempt(eng.scheduler.running[-1])

    assert drain(eng, preempt) == expected
    assert eng.stats().num_preemptions >= 3


@pytest.mark.parametrize("after", [1, 10, 128])
def test_d03_a_preempted_request_reports_every_token_once(either, after):
    folder = either
    params = SamplingParams(temperature=0, max_tokens=131, ignore_eos=True)
    expected = alone(folder, {"a": (prompt(7, 3), params)})["a"]
    eng = engine(folder)
    eng.add(EngineRequest("a", prompt(7, 3), params))
    updates: list[RequestUpdate] = []
    while len(updates) < after:
        updates += eng.step()
    eng.scheduler.preempt(eng.scheduler.running[0])
    while eng.has_unfinished():
        updates += eng.step()
    assert [t for u in updates for t in u.token_ids] == expected
    assert [u.finish_reason for u in updates if u.finish_reason] == ["length"] and eng.stats().num_preemptions > 0
    assert_drained(eng)


def test_d05_a_preempted_request_is_recomputed_in_chunks_before_it_samples(folder):
    eng = engine(folder)
    eng.add(EngineRequest("a", prompt(3, 0), greedy(300)))
    for _ in range(200):
        eng.step()
    eng.scheduler.preempt(eng.scheduler.running[0])
    silent = 0
    while not eng.step():
        silent += 1
    assert silent == (3 + 200) // 96, "recomputed in chunks of the step budget"
    eng.abort("a")
    assert_drained(eng)


def test_c03_what_ran_before_changes_nothing(folder):
    fresh = engine(folder)
    for length in (1, 3, 60, 127):
        fresh.add(EngineRequest(f"n{length}", prompt(length, length), greedy(12)))
    expected = drain(fresh)
    eng = engine(folder)
    eng.add(EngineRequest("long", prompt(500, 9), greedy(30)))
    drain(eng)
    for length in (1, 3, 60, 127):
        eng.add(EngineRequest(f"n{length}", prompt(length, length), greedy(12)))
    assert drain(eng) == expected


def test_c07_long_greedy_decode_repeats_exactly(folder):
    runs = []
    for _ in range(2):
        eng = engine(folder)
        eng.add(EngineRequest("a", prompt(20, 5), greedy(300)))
        runs.append(drain(eng)["a"])
    assert runs[0] == runs[1] and len(runs[0]) == 300


def test_one_broken_request_ends_alone(folder, monkeypatch):
    eng = engine(folder)
    names = ["a", "bad", "c"]
    for i, name in enumerate(names):
        eng.add(EngineRequest(name, prompt(10 + i, i), greedy(8)))
    run = eng.runner.__class__.__call__

    def break_on_bad(self, chunks, rows, **more):
        if any(c.token_ids[:1] == prompt(11, 1)[:1] and len(c.token_ids) == 11 for c in chunks):
            raise ValueError("planted")
        return run(self, chunks, rows, **more)

    monkeypatch.setattr(eng.runner.__class__, "__call__", break_on_bad)
    updates: list[RequestUpdate] = []
    while eng.has_unfinished():
        updates += eng.step()
    failed = [u for u in updates if u.error]
    assert [u.request_id for u in failed] == ["bad"] and "planted" in failed[0].error and failed[0].finish_reason == "error"
    expected = alone(folder, {"a": (prompt(10, 0), greedy(8)), "c": (prompt(12, 2), greedy(8))})
    for name in ("a", "c"):
        assert [t for u in updates if u.request_id == name for t in u.token_ids] == expected[name]
    assert_drained(eng)


def test_a_step_that_breaks_half_way_leaves_no_trace(folder):
    """Layers before the fault have moved their running sums on; the others of the batch end with the logprobs they have alone."""
    requests = {"a": (prompt(100, 0), greedy(40, logprobs=0)), "bad": (prompt(11, 1), greedy(4)), "c": (prompt(12, 2), greedy(4))}
    eng, lonely = engine(folder), engine(folder)
    block = eng.runner.model.blocks[-1]

    attend = block.attention

    def break_on_bad(x, batch, *rest):
        if requests["bad"][0][0] in batch.token_ids[batch.positions == 0]:
            raise ValueError("planted")
        return attend(x, batch, *rest)

    block.attention = break_on_bad
    logprobs: list[list[float]] = []
    for each, names in ((eng, ["a", "bad", "c"]), (lonely, ["a"])):
        for name in names:
            each.add(EngineRequest(name, *requests[name]))
        updates: list[RequestUpdate] = []
        while each.has_unfinished():
            updates += each.step()
        assert [u.request_id for u in updates if u.error] == names[1:2]
        logprobs.append([entry.logprob for u in updates if u.request_id == "a" for entry in u.logprobs])
        assert_drained(each)
    assert len(logprobs[0]) == 40
    torch.testing.assert_close(torch.tensor(logprobs[0]), torch.tensor(logprobs[1]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_is_interrupted_leaves_no_trace(ahead, folder):
    """Ctrl-C in a loop over one of several streams: the others go on, each with the logprobs or tokens that it has undisturbed."""
    params = greedy(40, **({} if ahead else {"logprobs": 0}))
    requests = [EngineRequest(name, prompt(length, length), params) for name, length in (("a", 112), ("b", 12), ("late", 200))]
    tokens: list[dict[str, list[int]]] = []
    logprobs: list[list[float]] = []
    for interrupted in (False, True):
        eng = decoding(engine(folder)) if ahead else engine(folder)
        for request in requests:
            eng.add(request)
        block = eng.runner.model.blocks[-1]
        attend, calls = block.attention, itertools.count()

        def attention(*arguments, attend=attend, calls=calls, interrupted=interrupted):
            if next(calls) in (1, 12, 20) and interrupted:  # in a prefill, and in steps of single tokens
                raise KeyboardInterrupt
            return attend(*arguments)

        block.attention = attention
        interrupts, updates = 0, []
        while eng.has_unfinished():
            try:
                updates += eng.step()
            except KeyboardInterrupt:
                interrupts += 1
        assert interrupts == 3 * interrupted and not any(u.error for u in updates)
        assert_drained(eng)
        tokens.append({r.request_id: [u.token_ids[0] for u in updates if u.request_id == r.request_id] for r in requests})
        logprobs.append(
            [score.logprob for r in requests for u in updates if u.request_id == r.request_id for score in u.logprobs or ()]
        )
    assert tokens[0] == tokens[1] and all(len(each) == 40 for each in tokens[0].values())
    torch.testing.assert_close(torch.tensor(logprobs[0]), torch.tensor(logprobs[1]), rtol=0, atol=1e-5)


def test_unusable_logits_end_their_request_only(folder, monkeypatch):
    eng = engine(folder)
    for name in ("a", "b"):
        eng.add(EngineRequest(name, prompt(5, 1), greedy(4)))
    run = eng.runner.__class__.__call__

    def nan_in_row_0(self, chunks, rows, **more):
        logits = run(self, chunks, rows, **more).clone()
        logits[0] = torch.nan
        return logits

    monkeypatch.setattr(eng.runner.__class__, "__call__", nan_in_row_0)
    ended = {u.request_id: u for u in eng.step() if u.finish_reason}
    assert ended["a"].finish_reason == "error" and "b" not in ended
    eng.abort("b")
    assert_drained(eng)


@pytest.mark.parametrize("more", [{}, {"logprobs": 0}], ids=["ahead", "waited for"])
def test_a_token_that_cannot_be_noted_ends_its_request_only(more, folder, monkeypatch):
    """A grammar that does not know its own token, say: the others lose none, whether theirs come before it or behind."""
    requests = {name: (prompt(9 + i, i), greedy(8, **more)) for i, name in enumerate(("a", "bad", "c"))}
    expected = alone(folder, requests)
    eng = decoding(engine(folder))
    for name, (ids, params) in requests.items():
        eng.add(EngineRequest(name, ids, params))
    bad, append = eng._sequences["bad"].sampler, SamplerState.append

    def broken(self, token):
        if self is bad and len(self.output_ids) == 3:
            raise ValueError("planted")
        append(self, token)

    monkeypatch.setattr(SamplerState, "append", broken)
    updates: list[RequestUpdate] = []
    while eng.has_unfinished():
        updates += eng.step()
    got = {name: [t for u in updates if u.request_id == name for t in u.token_ids] for name in requests}
    assert got == expected | {"bad": expected["bad"][:3]}
    (failed,) = [u for u in updates if u.error]
    assert failed.request_id == "bad" and "planted" in failed.error
    assert_drained(eng)


def test_a_prompt_that_cannot_be_scored_ends_its_request_only(folder, monkeypatch):
    """In the middle of it, and without a step being computed twice: other ranks would wait for it."""
    requests = {"a": (prompt(20, 1), greedy(9)), "bad": (prompt(250, 2), greedy(4, prompt_logprobs=1))}
    expected = alone(folder, {"a": requests["a"]})
    eng = engine(folder)
    for name, (ids, params) in requests.items():
        eng.add(EngineRequest(name, ids, params))
    run = eng.runner.__class__.__call__

    def nan_behind_100(self, chunks, rows, **more):
        logits = run(self, chunks, rows, **more).clone()
        if any(chunk.end > 100 for chunk in chunks):
            logits[-1] = torch.nan
        return logits

    monkeypatch.setattr(eng.runner.__class__, "__call__", nan_behind_100)
    monkeypatch.setattr(Engine, "_recover", lambda *_: pytest.fail("computed again"))
    updates: list[RequestUpdate] = []
    while eng.has_unfinished():
        updates += eng.step()
    assert [t for u in updates if u.request_id == "a" for t in u.token_ids] == expected["a"]
    (failed,) = [u for u in updates if u.error]
    assert failed.request_id == "bad" and failed.error.startswith("the model gave no usable logits")
    assert_drained(eng)


def test_a_lost_device_stops_the_engine(folder, monkeypatch):
    eng = engine(folder)
    eng.add(EngineRequest("a", prompt(5, 1), greedy(4)))

    def fault(self, chunks, rows, **more):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(eng.runner.__class__, "__call__", fault)
    with pytest.raises(EngineDeadError, match="illegal memory access"):
        eng.step()


def test_requests_that_can_never_run_are_refused_at_once(folder):
    eng = engine(folder, max_model_len=500)
    with pytest.raises(RequestError) as caught:
        eng.add(EngineRequest("long", prompt(500, 0), greedy(1)))
    assert caught.value.code == "context_length_exceeded"
    for ids in ([], [-1], [160], [True], [1.0]):
        with pytest.raises(RequestError):
            eng.add(EngineRequest("bad", ids, greedy(1)))
    eng.add(EngineRequest("a", prompt(499, 0), greedy(100)))
    with pytest.raises(RequestError, match="already in use"):
        eng.add(EngineRequest("a", [5], greedy(1)))
    assert len(drain(eng)["a"]) == 1, "the cap is clamped to the room left"
    assert_drained(eng)


@pytest.mark.parametrize("token", [-1, 160, 2**31 - 1, 2**63])
def test_i13_ids_outside_the_hash_table_end_their_own_request_only(tmp_path, token):
    """A hash-routed layer indexes a table by token id: an id outside of it is refused before any table is read."""
    random_v4_checkpoint(tmp_path, config_dict([0, 4], num_hash_layers=2), seed=4, quantised=False)
    eng = engine(tmp_path)
    eng.add(EngineRequest("live", prompt(9, 1), greedy(4)))
    expected = drain(eng)["live"]
    eng.add(EngineRequest("live", prompt(9, 1), greedy(4)))
    for ids in ([token], [5, token, 6]):
        with pytest.raises(RequestError, match=str(token)):
            eng.add(EngineRequest("wild", ids, greedy(1)))
        with pytest.raises(RequestError, match=str(token)):
            eng.score(ids, [len(ids)], [0])
    assert drain(eng) == {"live": expected}
    assert_drained(eng)


def test_an_explicit_length_that_does_not_fit_is_refused_and_the_default_is_what_fits(folder):
    with pytest.raises(ConfigError, match=r"max_model_len=4096 does not fit.*\d+ bytes holds (\d+) tokens.*at most \1") as caught:
        engine(folder, kv_cache_bytes=700 * 1024, max_model_len=4096)
    largest = int(str(caught.value).rpartition("at most ")[2])
    assert engine(folder, kv_cache_bytes=700 * 1024, max_model_len=largest).info.max_model_len == largest
    with pytest.raises(ConfigError, match=f"max_model_len={largest + 1} does not fit"):
        engine(folder, kv_cache_bytes=700 * 1024, max_model_len=largest + 1)
    eng = engine(folder, kv_cache_bytes=700 * 1024, max_model_len=None)
    assert eng.info.max_model_len == eng.info.capacity_tokens < 4096
    eng.add(EngineRequest("full", prompt(eng.info.max_model_len - 40, 0), greedy(1000)))
    assert len(drain(eng)["full"]) == 40
    assert_drained(eng)


FILLINGS = [
    *[(1, budget) for budget in (1, 300)],
    *[pytest.param(1, budget, marks=pytest.mark.long) for budget in (48, 150)],  # one token a step, whatever the budget
    *itertools.product((500, 511), (1, 48, 150, 300)),
]


@pytest.mark.parametrize(("prompt_tokens", "budget"), FILLINGS)
def test_one_sequence_fills_the_cache_to_its_last_token(folder, budget, prompt_tokens):
    eng = engine(folder, max_num_seqs=1, max_num_batched_tokens=budget, max_model_len=512)
    assert eng.info.capacity_tokens == 512
    eng.add(EngineRequest("r", prompt(prompt_tokens, 1), SamplingParams(temperature=0, ignore_eos=True)))
    assert len(drain(eng)["r"]) == 512 - prompt_tokens
    assert eng.stats().num_preemptions == 0
    assert_drained(eng)


def test_prompt_logprobs_do_not_depend_on_the_cut(folder):
    ids = prompt(250, 4)
    rows = []
    for budget in (512, 17):
        eng = engine(folder, max_num_batched_tokens=budget)
        eng.add(EngineRequest("a", ids, greedy(2, prompt_logprobs=2)))
        updates = []
        while eng.has_unfinished():
            updates += eng.step()
        assert [u.prompt_logprobs is not None for u in updates] == [True, False]
        rows.append(updates[0].prompt_logprobs)
    reference = engine(folder).score(ids, [96, 96, 58], list(range(250))).log_softmax(-1)
    for got in rows:
        assert got[0] is None and len(got) == 250
        for p in range(1, 250):
            assert got[p].token_id == ids[p] and abs(got[p].logprob - reference[p - 1, ids[p]].item()) < 1e-4


def test_score_returns_its_pages_even_when_it_fails(folder):
    eng = engine(folder)
    with pytest.raises(RequestError):
        eng.score([1] * 40_000, [40_000], [0])
    with pytest.raises(RequestError):
        eng.score([5, 999], [2], [0])
    assert_drained(eng)


def test_min_tokens_and_stop_ids(folder):
    eng = engine(folder)
    ids = prompt(30, 6)
    eng.add(EngineRequest("free", ids, greedy(30)))
    free = drain(eng)["free"]
    stop = free[10]
    first = free.index(stop)
    eng.add(EngineRequest("stop", ids, greedy(30, stop_token_ids=[stop])))
    assert drain(eng)["stop"] == free[: first + 1]
    eng.add(EngineRequest("min", ids, greedy(30, stop_token_ids=[stop], min_tokens=first + 2)))
    got = drain(eng)["min"]
    assert len(got) >= first + 2 and stop not in got[: first + 2 - 1]
