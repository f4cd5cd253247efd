"""Replicas on a local Ray cluster, behind the HTTP application: lost, replaced and restarted under load. Needs the extra `ray`."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from abyssal.config import EngineConfig
from tests.serve.live import COMPLETIONS, MODEL, PATIENCE, LiveServer, endless, read_all, until

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install -e '.[ray]'")
REPLICAS = 3


def test_without_ray_the_option_says_what_to_install() -> None:
    hidden = "import sys; sys.modules['ray'] = None; import importlib.util as u; find = u.find_spec\n"
    hidden += "u.find_spec = lambda name, *a: None if name == 'ray' else find(name, *a)\n"
    body = hidden + "from abyssal.cli import main; sys.argv = ['abyssal', 'serve', '--ray', '--port', '0']; main()"
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "pip install -e '.[ray]'" in done.stderr, done.stderr


async def start(config: EngineConfig) -> Any:
    import ray

    from abyssal.serve.cluster import ClusterClient

    if "RAY_ADDRESS" not in os.environ:  # a replica counts as one CPU, also where there are fewer
        ray.init(num_cpus=REPLICAS + 1, log_to_driver=False, include_dashboard=False, configure_logging=False)
    return await ClusterClient.start(config, REPLICAS)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(start, device="cpu") as live:
        yield live


def reports(server: LiveServer) -> list[Any]:
    """Of all replicas that answer."""
    return asyncio.run_coroutine_threadsafe(server.client._reports(), server.loop).result(PATIENCE)


def completion(number: int, **more: Any) -> dict[str, Any]:
    prompt = [0, *range(5 + number, 305 + number)]
    return {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 6, "ignore_eos": True, **more}


@pytest.mark.long
@needs_ray
def test_a_killed_replica_ends_its_streams_and_nothing_else(server: LiveServer) -> None:
    """No started stream hangs, requests that had not begun are answered by others, and a new replica joins."""
    streams = [server.open(COMPLETIONS, endless(COMPLETIONS, stream=True, prompt_tokens=8 + i)) for i in range(6)]
    until(lambda: server.client.stats.num_running == 6, "running")
    before = {report.pid: report.stats.num_running for report in reports(server)}
    assert len(before) == REPLICAS and sum(before.values()) == 6
    victim = max(before, key=before.__getitem__)
    with ThreadPoolExecutor(12) as pool:
        unstarted = [pool.submit(server.post, COMPLETIONS, completion(i)) for i in range(12)]
        time.sleep(0.2)  # they are on their way to all replicas; whoever has begun to be answered may fail
        os.kill(victim, signal.SIGKILL)
        answers = [future.result() for future in unstarted]
    assert all(answer.status_code == 200 for answer in answers), [answer.text for answer in answers]
    ended = 0
    for stream in streams:
        stream.settimeout(3)
        try:
            ended += '"engine_dead"' in read_all(stream)
        except TimeoutError:
            pass  # it still runs
        stream.close()
    assert ended == before[victim]
    until(lambda: len(reports(server)) == REPLICAS and victim not in {report.pid for report in reports(server)}, "a new replica")
    assert httpx.get(server.url + "/health", timeout=PATIENCE).status_code == 200
    until(lambda: server.client.stats.num_running == 0, "drained")


@pytest.mark.long
@needs_ray
def test_a_dead_engine_is_as_good_as_a_dead_replica(server: LiveServer) -> None:
    (victim, *_) = [report.pid for report in reports(server)]
    children = subprocess.run(
        ["ps", "--ppid", str(victim), "-o", "pid=,args="], capture_output=True, text=True, check=True
    ).stdout
    (engine,) = [int(line.split()[0]) for line in children.splitlines() if "engine_process" in line]
    os.kill(engine, signal.SIGKILL)
    until(lambda: victim not in {report.pid for report in reports(server)}, "the replica ended")
    assert server.post(COMPLETIONS, completion(50)).status_code == 200
    until(lambda: len(reports(server)) == REPLICAS, "a new replica")


@pytest.mark.long
@needs_ray
def test_a_rolling_restart_loses_no_request(server: LiveServer) -> None:
    before = {report.pid for report in reports(server)}
    server.loop.call_soon_threadsafe(server.client.restart_soon)
    number = 100
    while before & {report.pid for report in reports(server)} or len(reports(server)) < REPLICAS:
        number += 1
        answer = server.post(COMPLETIONS, completion(number))
        assert answer.status_code == 200, answer.text
    assert number > 100


@pytest.mark.long
@needs_ray
def test_a_conversation_stays_with_its_replica(server: LiveServer) -> None:
    """Turns of four conversations in turn; each is found in the caches but for its last, unfinished block."""
    prompts = [[0, *range(400 + 500 * i, 700 + 500 * i)] for i in range(4)]
    for turn in range(3):
        for i in range(4):
            body = {"model": MODEL, "prompt": prompts[i], "temperature": 0, "max_tokens": 4, "ignore_eos": True}
            usage = server.post(COMPLETIONS, body).json()["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            assert turn == 0 or cached >= (len(prompts[i]) - 300) // 256 * 256, json.dumps(usage)
            prompts[i] += range(3000 + 300 * turn, 3300 + 300 * turn)


@needs_ray
@pytest.mark.long
def test_what_does_not_fit_is_refused() -> None:
    from abyssal.errors import ConfigError
    from abyssal.serve.cluster import ClusterClient

    with pytest.raises(ConfigError, match="replicas=4000 do not fit"):
        asyncio.run(ClusterClient.start(EngineConfig(device="cpu"), 4000))
