"""A server whose prompts are computed by one engine and continued by another: clients see one engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from abyssal import LLM, SamplingParams
from abyssal.config import EngineConfig, ServerConfig
from abyssal.errors import ConfigError
from abyssal.serve import wire
from abyssal.serve.disaggregated_client import DisaggregatedClient
from abyssal.serve.engine_client import EngineClient
from tests.serve.live import CHAT, COMPLETIONS, MODEL, PATIENCE, LiveServer, endless, read_all, until


async def start(config: EngineConfig) -> DisaggregatedClient:
    return await DisaggregatedClient.start(config, 1, 1)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(start) as live:
        yield live


def completion(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 12,
        "ignore_eos": True,
        "add_special_tokens": False,
        **more,
    }


def test_answers_are_those_of_one_engine(server: LiveServer) -> None:
    """Side by side: short and long prompts, several outputs, one token only, seeds, log-probabilities."""
    prompts = [[7], list(range(20, 320)), list(range(300, 900))]
    bodies = [completion(prompt) for prompt in prompts]
    bodies += [completion(prompts[1], temperature=0.8, seed=3, n=2), completion(prompts[2], max_tokens=1, logprobs=2)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: server.post(COMPLETIONS, body).json()["choices"], bodies))
    with LLM("tiny", device="cpu", kv_cache_bytes=128 << 20, num_threads=1) as llm:
        for body, choices in zip(bodies, answers, strict=True):
            names = ("temperature", "max_tokens", "ignore_eos", "seed", "n", "logprobs")
            params = SamplingParams(**{name: body[name] for name in names if name in body})
            (expected,) = llm.generate([body["prompt"]], params)
            assert [choice["text"] for choice in choices] == [output.text for output in expected.outputs]
            assert {choice["finish_reason"] for choice in choices} == {"length"}
    until(server.is_drained, "drained")
    stats = server.client.stats
    assert stats.generation_tokens == 3 * 12 + 2 * 12 + 1


def test_a_stream_and_a_client_that_leaves(server: LiveServer) -> None:
    leaver = server.open(CHAT, endless(CHAT, stream=True, prompt_tokens=600))
    until(lambda: server.client.stats.num_running == 1, "running")
    with server.open(COMPLETIONS, completion([5, 6, 7], stream=True, max_tokens=20)) as connection:
        answer = read_all(connection)
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    assert answer.count("data: [DONE]") == 1 and events[-1]["choices"][0]["finish_reason"] == "length"
    leaver.close()
    until(server.is_drained, "drained")


def test_nothing_of_a_request_stays_however_it_ends(server: LiveServer) -> None:
    """By its length, by its first token, by a stop string, which cancels it twice, or by a client that leaves early or late."""
    text = server.post(COMPLETIONS, completion([7])).json()["choices"][0]["text"]
    for more in ({"max_tokens": 1}, {"stop": text[4]}, {"stop": text[4], "n": 3}, {"stop": text[0]}):
        assert server.post(COMPLETIONS, completion([7], **more)).status_code == 200
    for body in (endless(COMPLETIONS, stream=True), endless(CHAT, stream=False, prompt_tokens=3000)):
        server.open(COMPLETIONS if "prompt" in body else CHAT, body).close()
        with server.open(COMPLETIONS if "prompt" in body else CHAT, body):
            until(lambda: server.client.stats.num_running > 0, "running")
    until(server.is_drained, "drained")
    client = server.client
    until(lambda: not client._prefill_of and not any(client._load.values()), "forgotten")
    assert not any(engine._queues or any(engine._loads) for engine in (*client._prefill, *client._decode))


def test_when_one_engine_dies_everybody_is_told(server: LiveServer) -> None:
    """Last in this file: the server is of no use afterwards."""
    stream = server.open(CHAT, endless(CHAT, stream=True))
    until(lambda: server.client.stats.num_running == 1, "running")
    (prefill,) = server.client._prefill
    os.kill(prefill._processes.processes[0].pid, signal.SIGKILL)
    assert '"engine_dead"' in read_all(stream)
    assert httpx.get(server.url + "/health", timeout=PATIENCE).status_code == 503
    assert server.post(COMPLETIONS, completion([5])).status_code == 503
    stream.close()


@pytest.mark.parametrize("cancelled", [False, True])
def test_an_engine_that_is_ready_ends_when_the_start_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cancelled: bool
) -> None:
    """Whether another engine could not start, or whoever started them no longer waits."""
    closed: list[int] = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    class Engine:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        async def close(self) -> None:
            closed.append(self.rank)

    async def start_one(config: EngineConfig, place: wire.Place, launch: object) -> Engine:
        if place.rank == 2 and not cancelled:
            await asyncio.sleep(0.01)
            raise ConfigError("no room")
        if place.rank in (1, 2):
            await asyncio.Event().wait()
        return Engine(place.rank)

    async def whole() -> None:
        starting = asyncio.ensure_future(DisaggregatedClient.start(EngineConfig(), 2, 2))
        if cancelled:
            await asyncio.sleep(0.01)
            starting.cancel()
        await starting

    monkeypatch.setattr(EngineClient, "start", start_one)
    with pytest.raises(asyncio.CancelledError if cancelled else ConfigError):
        asyncio.run(whole())
    assert closed == [0, 3] and not list(tmp_path.iterdir())


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="decode_engines=2 needs prefill_engines"):
        ServerConfig(decode_engines=2)
    with pytest.raises(ConfigError, match="replicas=3 needs ray"):
        ServerConfig(replicas=3)
    with pytest.raises(ConfigError, match="replicas=2 do not go with prefill_engines"):
        ServerConfig(ray=True, replicas=2, prefill_engines=1)
