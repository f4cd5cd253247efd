"""Ranks as processes: requests reach every replica, leaving and dying are noticed by all, and a restart serves again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from abyssal import LLM, SamplingParams
from abyssal.errors import EngineDeadError, RequestError
from tests.serve.live import CHAT, COMPLETIONS, LiveServer, endless, read_all, until
from tests.serve.test_engine_death import last_event

OPTIONS = {"kv_cache_bytes": 128 << 20, "num_threads": 1, "max_model_len": 8192, "device": "cpu"}
PROMPTS = [[5 + (i * j) % 900 for i in range(3 + 90 * j)] for j in range(1, 5)]
BOS = 0
DEADLINE = 5.0  # seconds in which everybody is told of a dead rank


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with LLM("tiny", **OPTIONS) as llm:
        yield llm


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def complete(server: LiveServer, prompt: list[int]) -> str:
    body = {"model": "tiny-v4", "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    response = server.post(COMPLETIONS, body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def check_serves(server: LiveServer, one: LLM) -> None:
    """All at once, and one after another: the texts are those of one rank."""
    beginnings = [[BOS, *prompt] for prompt in PROMPTS]  # the API puts it there
    expected = [output.outputs[0].text for output in one.generate(beginnings, greedy(6))]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(lambda prompt: complete(server, prompt), PROMPTS)) == expected
    assert [complete(server, prompt) for prompt in PROMPTS] == expected
    assert all(stats.num_steps > 0 for stats in server.client._stats), "every replica was given some"
    until(server.is_drained, "drained")


def test_replicas_serve_and_a_killed_rank_ends_everything_and_a_restart_serves_again(one: LLM) -> None:
    with LiveServer(device="cpu", dp=2, ep=2) as server:
        check_serves(server, one)
        check_leaving(server)
        check_death(server)
    with LiveServer(device="cpu", dp=2, ep=2) as server:
        check_serves(server, one)


def check_leaving(server: LiveServer) -> None:
    """Clients that leave in the middle: their sequences go, on every replica, and the others are answered."""
    connections = [server.open(path, endless(path, stream=True)) for path in (CHAT, COMPLETIONS) * 2]
    until(lambda: server.client.stats.num_running == 4, "running")
    assert all(stats.num_running > 0 for stats in server.client._stats)
    for connection in connections:
        assert connection.recv(1)
        connection.close()
    until(server.is_drained, "drained")
    assert server.client.num_aborted == 4


def check_death(server: LiveServer) -> None:
    streams = [server.open(path, endless(path, stream=True)) for path in (CHAT, COMPLETIONS)]
    whole = server.open(COMPLETIONS, endless(COMPLETIONS, stream=False, n=2))
    until(lambda: server.client.stats.num_running == 4, "running")
    assert httpx.get(server.url + "/health").status_code == 200
    processes = server.client._processes.processes
    os.kill(processes[1].pid, signal.SIGKILL)
    begun = time.monotonic()
    for connection in streams:
        assert last_event(read_all(connection))["error"]["code"] == "engine_dead"
        connection.close()
    assert whole.recv(65536).startswith(b"HTTP/1.1 503")
    whole.close()
    assert httpx.get(server.url + "/health").status_code == 503
    assert time.monotonic() - begun < DEADLINE
    until(lambda: all(process.poll() is not None for process in processes), "the other ranks ended too")
    assert server.post(COMPLETIONS, endless(COMPLETIONS, stream=False)).status_code == 503


def test_llm_over_two_ranks_of_a_replica(one: LLM) -> None:
    """Text, token ids, logits, errors and streams as with one; then a rank is killed."""
    with LLM("tiny", **OPTIONS, tp=2) as llm:
        ids = PROMPTS[0]
        torch.testing.assert_close(llm.logits(ids), one.logits(ids), rtol=0, atol=1e-4)
        torch.testing.assert_close(
            llm.logits(ids, [50, 43], positions=[92, 3]), one.logits(ids, positions=[92, 3]), rtol=0, atol=1e-4
        )
        drawn = SamplingParams(temperature=1, seed=3, max_tokens=7, ignore_eos=True, logprobs=2)
        for params in (greedy(7), drawn):
            got, expected = (each.generate(PROMPTS, params) for each in (llm, one))
            assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in expected]
        with pytest.raises(RequestError, match="5000"):
            llm.logits([5000])
        with pytest.raises(RequestError, match="8192"):
            llm.generate([ids * 100], greedy(1))
        expected = [output.outputs[0].token_ids for output in one.generate(PROMPTS, greedy(7))]
        with ThreadPoolExecutor(3) as pool:
            for each in [pool.submit(llm.generate, PROMPTS, greedy(7)) for _ in range(3)]:
                assert [output.outputs[0].token_ids for output in each.result(timeout=60)] == expected
        stream = llm.stream(ids, greedy(5000))
        assert next(stream).text is not None
        stream.close()
        until(lambda: llm.engine.stats().num_running == 0, "dropped")
        assert llm.generate([ids], greedy(4))[0].outputs[0].token_ids == one.generate([ids], greedy(4))[0].outputs[0].token_ids
        streams = [llm.stream(ids, greedy(5000)) for _ in range(2)]
        assert all(next(stream).error is None for stream in streams)
        os.kill(llm.engine._client._processes.processes[1].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="rank"):
            llm.generate([ids], greedy(5000))
        for stream in streams:
            with pytest.raises(EngineDeadError, match="rank"):
                list(stream)
        with pytest.raises(EngineDeadError):
            llm.logits(ids)
