"""The Python API: prompts in any form, several runs at a time, misuse, and its end."""

from __future__ import annotations

import gc
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from abyssal import LLM, SamplingParams
from abyssal.checkpoint.source import resolve_model
from abyssal.engine.request import EngineRequest
from abyssal.errors import EngineDeadError, RequestError
from tests.checkpoint.build import random_v4_checkpoint
from tests.support.small_model import config_dict

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8, 9], [10]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    random_v4_checkpoint(path, config_dict([0, 4, 128, 4]), seed=3, quantised=False)
    return path


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:
    with make(folder) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    stats = shared.engine.stats()
    assert stats.pages_free == stats.pages_total
    assert not shared.engine.has_unfinished()


def make(folder: Path) -> LLM:
    return LLM(folder, device="cpu", kv_cache_bytes=8 << 20, max_num_batched_tokens=64, max_model_len=512)


def tokens(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[int]]:
    return [request.outputs[0].token_ids for request in llm.generate(prompts, params)]


def test_forms_of_prompts(llm):
    each = [tokens(llm, ids)[0] for ids in PROMPTS]
    assert tokens(llm, PROMPTS) == tokens(llm, tuple(map(tuple, PROMPTS))) == each
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    "bad",
    [
        *(
            [5, [6, 7]],
            [[6, 7], 5],
            [None],
            [1.5],
            [[5], None],
            ["a", 5],
            [True, [5]],
            [[]],
            [[5], [10**6]],
            [-1],
            [[-1]],
            [[[5]]],
        ),
        *([[2**64]], [[1.5]], [True], 5, None, b"hello", bytearray(b"a"), {5: 1}, {5, 6}, iter([5])),
    ],
)
def test_prompts_that_are_none_are_refused_and_none_is_dropped(llm, bad):
    with pytest.raises(RequestError):
        llm.generate(bad, GREEDY)


@pytest.mark.parametrize("bad", [{"temperature": 0}, "x", 5, 0, [None, "x"], ["x"], [GREEDY] * 3])
def test_params_that_are_none_are_refused(llm, bad):
    with pytest.raises(RequestError):
        llm.generate([[5], [6]], bad)


def test_sampling_params_have_their_name_in_every_method(llm):
    """The name that they have in other engines: scripts pass them by it."""
    message = {"role": "user", "content": "U"}
    for call, prompt in ((llm.generate, [5]), (llm.stream, [5]), (llm.chat, [message]), (llm.stream_chat, [message])):
        with pytest.raises(RequestError, match="^sampling_params must be SamplingParams, not dict$") as caught:
            list(call(prompt, sampling_params={"temperature": 0}))
        assert caught.value.param == "sampling_params"


@pytest.mark.parametrize(
    "change", [{"n": "x"}, {"n": 2.0}, {"n": 0}, {"n": 10**5000}, {"stop": None}, {"temperature": None}, {"seed": "1"}]
)
def test_params_changed_to_something_bad_are_refused(llm, change):
    """Before anything is computed, by every way in."""
    params = SamplingParams(max_tokens=2)
    for name, value in change.items():
        setattr(params, name, value)
    for call in (lambda: llm.generate([5], params), lambda: list(llm.stream([5], params))):
        with pytest.raises(RequestError, match=next(iter(change))):
            call()
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize(
    "bad",
    [
        *(
            {name: value}
            for name in ("token_ids", "positions", "chunk_sizes")
            for value in (5, 1.5, True, "ab", b"ab", {5, 6}, {5: 1})
        ),
        *({"token_ids": None}, {"token_ids": [None]}, {"token_ids": [[5]]}, {"positions": [0.5]}, {"positions": [2]}),
        *(
            {"positions": [[]]},
            {"positions": [True]},
            {"positions": [10**5000]},
            {"chunk_sizes": [1.5, 0.5]},
            {"chunk_sizes": [None]},
            {"chunk_sizes": [0, 2]},
        ),
        *({"reuse_prefix": value} for value in ("x", 1, None, [])),
    ],
)
def test_arguments_of_logits_that_are_none_are_refused(llm, bad):
    with pytest.raises(RequestError, match=next(iter(bad)).removesuffix("s")):
        llm.logits(**{"token_ids": [5, 6]} | bad)


@pytest.mark.parametrize("bad", [5, None, 1.5, True, b"ab", {5: 1}, {5, 6}, iter([5]), [[5]], [None], ["a"], [5, "a"], []])
def test_a_prompt_of_a_stream_that_is_none_is_refused(llm, bad):
    with pytest.raises(RequestError, match="prompt"):
        list(llm.stream(bad, GREEDY))


def test_streams_read_in_turns_give_the_tokens_of_each_alone(llm):
    alone = tokens(llm, PROMPTS)
    streams = [llm.stream(ids, GREEDY) for ids in PROMPTS]
    found: list[list[int]] = [[] for _ in PROMPTS]
    for turn in range(2):
        for stream, ids in zip(streams, found, strict=True):
            ids += next(stream).token_ids
        assert tokens(llm, PROMPTS[turn]) == [alone[turn]]  # a run in the midst of others
    for stream, ids in zip(streams, found, strict=True):
        for delta in stream:
            ids += delta.token_ids
    assert found == alone


def test_a_stream_that_is_left_takes_nothing_from_others(llm):
    alone = tokens(llm, PROMPTS[1])[0]
    left, kept = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    next(left)
    first = next(kept).token_ids
    left.close()
    assert first + [token for delta in kept for token in delta.token_ids] == alone


def test_an_error_amid_a_run_drops_it_alone(llm, monkeypatch):
    stream = llm.stream(PROMPTS[0], GREEDY)
    found = list(next(stream).token_ids)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate(PROMPTS, GREEDY)
    for delta in stream:
        found += delta.token_ids
    assert [found] == tokens(llm, PROMPTS[0])


def in_threads(calls: list[Any]) -> list[Any]:
    """Results of `calls`, each in a thread of its own, which nobody waits for when it hangs."""

    def run(call: Any, future: Future[Any]) -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  failures of pytest too
            future.set_exception(error)

    futures: list[Future[Any]] = [Future() for _ in calls]
    for pair in zip(calls, futures, strict=True):
        threading.Thread(target=run, args=pair, daemon=True).start()
    return [future.result(timeout=60) for future in futures]


def test_threads_get_the_tokens_of_each_alone(llm):
    """Calls of every kind at once, streams dropped half-way among them."""
    alone, logits = tokens(llm, PROMPTS), llm.logits([5, 6, 7])

    def generate() -> None:
        for _ in range(5):
            assert tokens(llm, PROMPTS) == alone

    def stream() -> None:
        for _ in range(5):
            dropped = llm.stream(PROMPTS[1], GREEDY)
            next(dropped)
            assert [token for delta in llm.stream(PROMPTS[0], GREEDY) for token in delta.token_ids] == alone[0]
            dropped.close()

    def score() -> None:
        for _ in range(5):
            assert llm.logits([5, 6, 7]).equal(logits)

    in_threads([generate, generate, stream, stream, score])


def test_a_call_joins_the_run_of_another_thread(llm):
    """A short call ends while a long one of another thread goes on, and one thread may leave a stream half-read."""
    half_read = llm.stream(PROMPTS[0], GREEDY)
    next(half_read)
    begun, ended = threading.Event(), []

    def long() -> None:
        for _ in llm.stream(PROMPTS[1], SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)):
            begun.set()
        ended.append("long")

    def short() -> None:
        assert begun.wait(60)
        tokens(llm, PROMPTS[2])
        ended.append("short")

    in_threads([long, short])
    assert ended == ["short", "long"]
    half_read.close()


def test_a_stream_that_the_garbage_collector_ends_amid_a_step_breaks_nothing(llm, monkeypatch):
    """Its thread holds the engine then; the request leaves when the step is over."""
    alone = tokens(llm, PROMPTS)
    step = llm.engine.step
    for moment in ("before", "after"):
        cycle: list[Any] = [llm.stream(PROMPTS[0], GREEDY)]
        next(cycle[0])
        cycle.append(cycle)
        del cycle

        def collecting(moment: str = moment) -> Any:
            monkeypatch.undo()
            if moment == "before":
                gc.collect()
            updates = step()
            gc.collect()
            return updates

        monkeypatch.setattr(llm.engine, "step", collecting)
        assert tokens(llm, PROMPTS) == alone


def test_a_call_amid_a_step_of_the_same_thread_is_refused(llm, monkeypatch):
    """As of a signal handler: it would wait for itself."""
    alone, step, told = tokens(llm, PROMPTS), llm.engine.step, []

    def interrupted() -> Any:
        monkeypatch.undo()
        for call in (lambda: tokens(llm, PROMPTS), lambda: llm.logits([5])):
            with pytest.raises(RequestError, match="amid a step") as caught:
                call()
            told.append(caught.value)
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    assert in_threads([lambda: tokens(llm, PROMPTS)]) == [alone]
    assert len(told) == 2


def test_a_signal_handler_may_close_and_leave_amid_a_step(folder, monkeypatch):
    llm = make(folder)

    def interrupted() -> Any:
        llm.close()
        raise SystemExit(3)

    monkeypatch.setattr(llm.engine, "step", interrupted)

    def run() -> None:
        with pytest.raises(SystemExit):
            tokens(llm, PROMPTS)
        with pytest.raises(EngineDeadError, match="closed"):
            tokens(llm, PROMPTS)

    in_threads([run])


def test_what_others_ask_of_the_engine_is_theirs(llm):
    llm.engine.add(EngineRequest("theirs", [5, 6], SamplingParams(max_tokens=2)))
    assert tokens(llm, PROMPTS[:1]) == tokens(llm, PROMPTS[:1])
    llm.engine.abort("theirs")


def test_closing_amid_the_run_of_another_thread_ends_it(folder):
    llm, begun = make(folder), threading.Event()

    def run() -> None:
        with pytest.raises(EngineDeadError, match="closed"):
            for _ in llm.stream(PROMPTS[0], SamplingParams(max_tokens=500, ignore_eos=True)):
                begun.set()

    def close() -> None:
        assert begun.wait(60)
        llm.close()

    in_threads([run, close, close])


def test_logits_of_no_token(llm):
    with pytest.raises(RequestError, match="empty"):
        llm.logits([])


def test_closing_twice_is_allowed_and_use_after_it_says_so(folder):
    with make(folder) as llm:
        stream = llm.stream(PROMPTS[0], GREEDY)
        next(stream)
        llm.close()
        with pytest.raises(EngineDeadError, match="closed"):
            next(stream)
    for use in (lambda: llm.generate(PROMPTS, GREEDY), lambda: llm.logits([5])):
        with pytest.raises(EngineDeadError, match="closed"):
            use()


def test_l27_an_end_of_text_id_of_the_config_or_the_tokenizer_ends_an_answer(tmp_path):
    folder = tmp_path / "tiny"
    shutil.copytree(resolve_model("tiny"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 300}))
    with LLM(folder, device="cpu", kv_cache_bytes=64 << 20, max_model_len=512) as llm:
        for token in (1, 300):
            params = SamplingParams(temperature=0, max_tokens=3, logit_bias={token: 100})
            (output,) = llm.generate([5, 6], params)[0].outputs
            assert (output.token_ids, output.finish_reason, output.stop_reason) == ([token], "stop", None)
            assert tokens(llm, [5, 6], replace(params, ignore_eos=True)) == [[token] * 3]
