"""The engine in its own process: start, updates, aborts, death of either side."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from abyssal.config import EngineConfig
from abyssal.engine.request import EngineRequest, SamplingParams
from abyssal.errors import AbyssalError, EngineDeadError
from abyssal.serve.engine_client import EngineClient

CONFIG = EngineConfig(kv_cache_bytes=128 << 20, num_threads=1, max_model_len=8192)
Test = Callable[[EngineClient], Coroutine[Any, Any, None]]


@asynccontextmanager
async def running() -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(CONFIG)
    try:
        yield client
    finally:
        await client.close()


def run(test: Test) -> None:
    async def main() -> None:
        async with running() as client:
            await asyncio.wait_for(test(client), 120)

    asyncio.run(main())


@pytest.fixture(scope="module")
def shared() -> Iterator[Callable[[Test], None]]:
    """`shared(test)`: with an engine that other tests use too. That it is told to end is no death to report."""
    reported: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = reported.append
    with asyncio.Runner() as runner:
        client = runner.run(EngineClient.start(CONFIG))
        yield lambda test: runner.run(asyncio.wait_for(test(client), 120))
        logging.getLogger().addHandler(handler)
        try:
            runner.run(client.close())
        finally:
            logging.getLogger().removeHandler(handler)
    assert not reported, [record.getMessage() for record in reported]


def request(name: str, max_tokens: int, **more: Any) -> EngineRequest:
    return EngineRequest(name, [0, 3, 500, 4, 7], SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more))


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        await asyncio.sleep(0.05)


def idle_and_drained(client: EngineClient) -> bool:
    stats = client.stats
    return stats.num_running == stats.num_waiting == 0 and stats.pages_free == stats.pages_total


def test_requests_run_side_by_side_and_everything_comes_back(shared: Callable[[Test], None]) -> None:
    async def test(client: EngineClient) -> None:
        async def collect(name: str, count: int) -> list[int]:
            return [t async for update in client.generate(request(name, count)) for t in update.token_ids]

        results = await asyncio.gather(*(collect(f"r{i}", 5 + i) for i in range(4)))
        assert [len(r) for r in results] == [5, 6, 7, 8]
        assert all(r[:5] == results[0] for r in results), "the same prompt, greedy"
        await until(lambda: idle_and_drained(client))

    shared(test)


def test_leaving_early_aborts_in_the_engine(shared: Callable[[Test], None]) -> None:
    async def test(client: EngineClient) -> None:
        async with aclosing(client.generate(request("long", 5000))) as updates:
            async for _ in updates:
                break
        await until(lambda: idle_and_drained(client))
        assert client.stats.generation_tokens < 1000 and client.num_aborted == 1

    shared(test)


def test_a_refused_request_ends_with_an_error_and_the_next_one_runs(shared: Callable[[Test], None]) -> None:
    async def test(client: EngineClient) -> None:
        updates = [u async for u in client.generate(EngineRequest("bad", [10**6], SamplingParams()))]
        assert [u.finish_reason for u in updates] == ["error"] and "1000000" in (updates[0].error or "")
        assert len([u async for u in client.generate(request("good", 2))]) == 2

    shared(test)


def test_a_killed_engine_ends_every_open_request_and_is_known_dead(caplog: pytest.LogCaptureFixture) -> None:
    async def test(client: EngineClient) -> None:
        async def wait(name: str) -> str:
            with pytest.raises(EngineDeadError) as caught:
                async for _ in client.generate(request(name, 5000)):
                    pass
            return str(caught.value)

        waiting = [asyncio.create_task(wait(f"r{i}")) for i in range(3)]
        await until(lambda: client.stats.num_running == 3)
        os.kill(client._processes.processes[0].pid, signal.SIGKILL)
        assert all("exit code -9" in reason for reason in await asyncio.gather(*waiting))
        assert not client.alive
        with pytest.raises(EngineDeadError):
            await anext(client.generate(request("late", 1)))

    run(test)
    assert [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "abyssal"] == [
        ("ERROR", "the engine is gone: the engine process ended with exit code -9")
    ]


def test_an_engine_that_cannot_start_says_why_in_one_line() -> None:
    with pytest.raises(AbyssalError, match="/no/such/folder") as caught:
        asyncio.run(EngineClient.start(EngineConfig(model="/no/such/folder")))
    assert "\n" not in str(caught.value)


def test_the_engine_ends_when_its_parent_is_killed() -> None:
    script = textwrap.dedent("""
        import asyncio
        from abyssal.config import EngineConfig
        from abyssal.serve.engine_client import EngineClient

        async def main():
            client = await EngineClient.start(EngineConfig(kv_cache_bytes=128 << 20, num_threads=1, max_model_len=8192))
            print(client._processes.processes[0].pid, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    engine_pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    end = time.monotonic() + 20
    while os.path.exists(f"/proc/{engine_pid}") and _state(engine_pid) != "Z":
        assert time.monotonic() < end, "the engine outlived its parent"
        time.sleep(0.05)


@pytest.mark.parametrize("said", [b"", b'{"model": "tin'])
def test_an_engine_whose_parent_ended_before_it_spoke_ends_quietly(said: bytes) -> None:
    command = [
        sys.executable,
        "-m",
        "abyssal.serve.engine_process",
        "ipc:///no/such/socket",
        "abyssal.engine.engine:Engine",
        "0",
        "",
    ]
    done = subprocess.run(command, input=said, capture_output=True, check=False, timeout=120)
    assert done.returncode == 1 and done.stderr == b""


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(") ", 1)[1][0]
    except FileNotFoundError:
        return "Z"
