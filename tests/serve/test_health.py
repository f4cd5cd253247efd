"""Health is answered by the server process, however busy the engine is."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.serve.live import COMPLETIONS, MODEL, LiveServer, endless, until


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(max_num_batched_tokens=2048) as live:
        yield live


def test_health_does_not_wait_for_the_engine(server: LiveServer) -> None:
    """An engine that is stopped answers nothing at all, so whatever is answered now needs no engine. Independent of speed."""
    pid = server.client._processes.processes[0].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        connection = server.open(COMPLETIONS, endless(COMPLETIONS, stream=True))
        for path in ("/health", "/metrics", "/v1/models", "/health"):
            assert httpx.get(server.url + path, timeout=30).status_code == 200
        bodies = {"/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [5]}}
        for path, body in bodies.items():
            assert server.post(path, {"model": MODEL, **body}).status_code == 200
        connection.close()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert server.post(COMPLETIONS, {"model": MODEL, "prompt": "x", "max_tokens": 1}).status_code == 200, "it goes on"
    until(server.is_drained, "drained")


def test_health_during_a_long_prefill(server: LiveServer) -> None:
    """The aim is 100 ms. The bound here is ten times that, for the median: the engine keeps one core busy, and a test machine may
    have no other to give at the moment. A server that waited for engine steps would take seconds, as its own test shows above."""
    before = server.client.stats
    connection = server.open(COMPLETIONS, endless(COMPLETIONS, stream=True, prompt_tokens=7000))
    until(lambda: server.client.stats.prompt_tokens > before.prompt_tokens, "in prefill")
    seconds = []
    with httpx.Client(base_url=server.url, timeout=30) as http:
        while len(seconds) < 20 and server.client.stats.generation_tokens == before.generation_tokens:
            start = time.monotonic()
            assert http.get("/health").json() == {"status": "ok"}
            seconds.append(time.monotonic() - start)
    connection.close()
    assert statistics.median(seconds) < 1, seconds
    until(server.is_drained, "drained")
