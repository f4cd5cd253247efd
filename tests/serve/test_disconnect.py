"""L07: a client that leaves ends its request, wherever the request is, and gives everything back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.live import CHAT, COMPLETIONS, MODEL, LiveServer, endless, until

SEATS = 3  # sequences that run at a time
ROUTES = {CHAT: "chat_completions", COMPLETIONS: "completions"}
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    # Small steps: a prompt of thousands of tokens stays in prefill for many of them.
    with LiveServer(max_num_seqs=SEATS, max_num_batched_tokens=64) as live:
        yield live


def aborted(server: LiveServer, path: str) -> float:
    return server.metric("abyssal_requests_total", outcome="aborted", route=ROUTES[path])


def check_gone(server: LiveServer, path: str, aborted_before: float, tokens_before: int) -> None:
    until(server.is_drained, "drained")
    until(lambda: aborted(server, path) == aborted_before + 1, "counted as aborted")
    generated = server.client.stats.generation_tokens - tokens_before
    assert generated < 4000, f"{generated} tokens were generated; the clients had long left"
    assert server.post(COMPLETIONS, {"model": MODEL, "prompt": "In the", "max_tokens": 2}).status_code == 200, "alive"


@both_ways
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("n", [1, 3])
def test_l07_leaving_while_tokens_are_decoded(server: LiveServer, path: str, n: int, stream: bool) -> None:
    before, tokens = aborted(server, path), server.client.stats.generation_tokens
    connection = server.open(path, endless(path, stream=stream, n=n))
    until(lambda: server.client.stats.num_running == n, "running")
    until(lambda: server.client.stats.generation_tokens > tokens + n, "decoding")
    connection.close()
    check_gone(server, path, before, tokens)


@both_ways
def test_l07_leaving_while_the_prompt_is_computed(server: LiveServer, stream: bool) -> None:
    prompt_tokens = 6000
    before, stats = aborted(server, COMPLETIONS), server.client.stats
    connection = server.open(COMPLETIONS, endless(COMPLETIONS, stream=stream, prompt_tokens=prompt_tokens))
    until(lambda: server.client.stats.prompt_tokens > stats.prompt_tokens, "in prefill")
    connection.close()
    until(server.is_drained, "drained")
    computed = server.client.stats.prompt_tokens - stats.prompt_tokens
    assert computed < prompt_tokens and server.client.stats.generation_tokens == stats.generation_tokens
    check_gone(server, COMPLETIONS, before, stats.generation_tokens)


@both_ways
def test_l07_leaving_while_queued(server: LiveServer, stream: bool) -> None:
    """All seats are taken; the one who waits leaves, and those who run go on."""
    before, tokens = aborted(server, COMPLETIONS), server.client.stats.generation_tokens
    first = server.open(COMPLETIONS, endless(COMPLETIONS, stream=True, n=SEATS))
    until(lambda: server.client.stats.num_running == SEATS, "seats taken")
    waits = server.open(COMPLETIONS, endless(COMPLETIONS, stream=stream))
    until(lambda: server.client.stats.num_waiting == 1, "waiting")
    waits.close()
    until(lambda: server.client.stats.num_waiting == 0, "left the queue")
    until(lambda: aborted(server, COMPLETIONS) == before + 1, "counted as aborted")
    assert server.client.stats.num_running == SEATS
    first.close()
    check_gone(server, COMPLETIONS, before + 1, tokens)


def test_l07_leaving_between_the_events_of_a_stream(server: LiveServer) -> None:
    """A reset, with answers unread, instead of an orderly end."""
    before, tokens = aborted(server, CHAT), server.client.stats.generation_tokens
    connection = server.open(CHAT, endless(CHAT, stream=True))
    assert connection.recv(64).startswith(b"HTTP/1.1 200")
    until(lambda: server.client.stats.generation_tokens > tokens + 5, "more events on the way")
    connection.close()
    check_gone(server, CHAT, before, tokens)


def test_l07_leaving_while_the_request_is_sent(server: LiveServer) -> None:
    """Half a body is no request: nothing reaches the engine, and the server lives on."""
    steps, before = server.client.stats.num_steps, aborted(server, COMPLETIONS)
    half = server.connect()
    half.sendall(
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{{".encode()
    )
    half.close()
    until(lambda: aborted(server, COMPLETIONS) == before + 1, "counted as aborted")
    assert server.client.stats.num_steps == steps
    check_gone(server, COMPLETIONS, before, server.client.stats.generation_tokens)
