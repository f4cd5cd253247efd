"""Signals end the server and its engine in good order: exit code 0, nothing left, no traceback."""

from __future__ import annotations

import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from abyssal.config import ServerConfig
from abyssal.serve.run import end_signals
from tests.serve.live import MODEL, PATIENCE, until
from tests.serve.process import KEY, Process, check_clean, start


def open_stream(process: Process, max_tokens: int) -> Iterator[str]:
    """Lines of a stream that has begun."""
    body = {"model": MODEL, "prompt": [5, 6], "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", f"{process.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE) as response:
        lines = (line for line in response.iter_lines() if line)
        yield next(lines)
        yield from lines


def test_a_signal_lets_open_requests_finish() -> None:
    """On a machine too slow for 20 tokens in the time of grace, the stream ends with an error event, but it ends properly."""
    process = start()
    engine = process.engine()
    lines = open_stream(process, 20)
    next(lines)
    process.press(signal.SIGTERM)
    *_, last = lines
    assert last == "data: [DONE]"
    check_clean(process, engine)


def test_a_second_signal_waits_for_nobody() -> None:
    process = start()
    engine = process.engine()
    lines = open_stream(process, 4000)
    next(lines)
    process.press(signal.SIGHUP)
    got = [next(lines)]
    process.press(signal.SIGTERM)
    with suppress(httpx.RemoteProtocolError):  # it may be cut off, or be told
        got += lines
    assert len(got) < 3000
    check_clean(process, engine)


def test_a_closed_terminal_ends_the_server_unless_it_is_to_go_on() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler, expected in ((signal.SIG_DFL, True), (signal.SIG_IGN, False)):
            signal.signal(signal.SIGHUP, handler)
            assert (signal.SIGHUP in end_signals(ServerConfig())) == expected
            assert signal.SIGHUP not in end_signals(ServerConfig(ray=True)), "it restarts replicas"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_while_the_model_is_loaded() -> None:
    """Also in the seconds in which the engine process still imports."""
    process = Process()
    until(process.engine, "an engine process")
    engine = process.engine()
    process.press(signal.SIGINT)
    check_clean(process, engine)


@pytest.mark.parametrize("options", ["", "--dp 2", "--prefill-engines 1 --decode-engines 1"])
def test_a_killed_server_leaves_no_files(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is too long for the name of a socket
        monkeypatch.setenv("TMPDIR", folder)
        process = start(*options.split())
        assert list(Path(folder).glob("abyssal-*/*"))
        process.process.kill()
        until(lambda: not list(Path(folder).glob("abyssal-*")), "the files are gone")
        process.wait()


def test_a_port_that_is_taken_stops_the_start_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        process = Process("--port", str(port))
        code, output = process.wait()
    assert code == 2 and f"port {port}" in output and "checkpoint" not in output and len(output.splitlines()) == 1, output
