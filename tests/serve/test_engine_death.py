"""An engine that dies, or fails one request: everybody who waits is told, nobody waits for ever."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from abyssal.engine.request import EngineRequest
from abyssal.serve import wire
from tests.serve.live import CHAT, COMPLETIONS, LiveServer, endless, read_all, until
from tests.serve.scripted import MODEL, ScriptedClient, app_of, events, post

BODY = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 20}


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with LiveServer() as live:
        yield live


def last_event(answer: str) -> dict[str, Any]:
    """The last event before `[DONE]` of a stream's raw answer."""
    lines = [line for line in answer.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    event: dict[str, Any] = json.loads(lines[-2].removeprefix("data: "))
    return event


def check_all_are_told(server: LiveServer, reason: str, kill: Any) -> None:
    streams = [server.open(path, endless(path, stream=True)) for path in (CHAT, COMPLETIONS)]
    wholes = [server.open(path, endless(path, stream=False, n=2)) for path in (CHAT, COMPLETIONS)]
    until(lambda: server.client.stats.num_running == 6, "running")
    assert httpx.get(server.url + "/health").status_code == 200
    kill()
    for connection in streams:
        error = last_event(read_all(connection))["error"]
        assert error["code"] == "engine_dead" and reason in error["message"]
        connection.close()
    for connection in wholes:
        assert connection.recv(65536).startswith(b"HTTP/1.1 503")
        connection.close()
    health = httpx.get(server.url + "/health")
    assert health.status_code == 503 and reason in health.json()["error"]["message"]
    for stream in (False, True):
        assert server.post(CHAT, endless(CHAT, stream=stream)).status_code == 503, "found before a stream opens"
    assert server.metric("abyssal_engine_up") == 0
    for route in ("completions", "chat_completions"):
        assert server.metric("abyssal_requests_total", outcome="failed", route=route) >= 2


def test_a_killed_engine_ends_every_open_request_with_an_error(server: LiveServer) -> None:
    pid = server.client._processes.processes[0].pid
    check_all_are_told(server, "exit code -9", lambda: os.kill(pid, signal.SIGKILL))


def test_messages_that_cannot_be_read_are_a_death(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: bytes) -> Any:
        raise ValueError("no such message")

    check_all_are_told(server, "no such message", lambda: monkeypatch.setattr(wire, "decode_event", broken))


# The same without processes, at exact places


@pytest.mark.parametrize("after", [1, 3])
def test_death_in_the_middle_of_an_answer(after: int) -> None:
    told = events(post(app_of(ScriptedClient(die_after=after)), COMPLETIONS, {**BODY, "stream": True}))
    assert told[-1]["error"]["code"] == "engine_dead" and all("choices" in event for event in told[:-1])
    response = post(app_of(ScriptedClient(die_after=after)), COMPLETIONS, BODY)
    assert response.status_code == 503 and response.json()["error"]["code"] == "engine_dead"


def fails_for(culprit: int) -> Any:
    """A script that breaks when it meets the token `culprit`."""

    def script(request: EngineRequest) -> Iterable[int]:
        for count in range(100):
            assert count < 2 or culprit not in request.prompt_ids, "a secret detail"
            yield 9

    return script


async def together(app: FastAPI, *bodies: dict[str, Any]) -> list[httpx.Response]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return list(await asyncio.wait_for(asyncio.gather(*(client.post(COMPLETIONS, json=body) for body in bodies)), 30))


@pytest.mark.parametrize("stream", [False, True])
def test_an_exception_that_nobody_foresaw_ends_one_request_only(stream: bool) -> None:
    """It is not told in detail, does not hang, and leaves the others alone."""
    client = ScriptedClient(fails_for(13))
    bad = {**BODY, "prompt": [13], "stream": stream}
    responses = asyncio.run(together(app_of(client), BODY, bad, BODY))
    assert [responses[i].json()["usage"]["completion_tokens"] for i in (0, 2)] == [20, 20]
    error = events(responses[1])[-1]["error"] if stream else responses[1].json()["error"]
    assert stream or responses[1].status_code == 500
    assert error["type"] == "server_error" and "secret" not in responses[1].text
    assert not client.open


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_one_output_drops_its_siblings(stream: bool) -> None:
    """Two prompts in a request, one of which fails: the other is not computed for nobody."""
    client = ScriptedClient(fails_for(13))
    body = {**BODY, "prompt": [[7, 7], [13, 13]], "max_tokens": 90, "stream": stream}
    (response,) = asyncio.run(together(app_of(client), body))
    assert "server_error" in response.text
    assert not client.open and len(client.aborted) == 2
    assert client.counts["tokens"] < 90


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_that_the_engine_reports_for_a_request(stream: bool) -> None:
    response = post(app_of(ScriptedClient(fail_after=2)), COMPLETIONS, {**BODY, "stream": stream})
    error = events(response)[-1]["error"] if stream else response.json()["error"]
    assert error["message"] == "scripted failure" and (stream or response.status_code == 500)


def test_a_dead_engine_is_known_before_a_stream_opens() -> None:
    client = ScriptedClient()
    app = app_of(client)
    client.death = "scripted death"
    for body in (BODY, {**BODY, "stream": True}):
        assert post(app, COMPLETIONS, body).status_code == 503
    assert post(app, COMPLETIONS, {**BODY, "temperature": -1}).status_code == 400, "the client's own mistake comes first"
