"""Prefill and decode engines in a Ray cluster of this machine: clients see one engine, and hear of it when one is lost."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from abyssal import LLM, SamplingParams
from abyssal.config import EngineConfig
from abyssal.errors import ConfigError
from tests.engine.test_link import needs_nixl
from tests.serve.live import COMPLETIONS, MODEL, PATIENCE, LiveServer, endless, read_all, until

pytestmark = [
    pytest.mark.long,
    needs_nixl,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install -e '.[ray]'"),
]


async def start(config: EngineConfig) -> Any:
    import ray

    from abyssal.serve.ray_engine import start_apart

    if "RAY_ADDRESS" not in os.environ:  # an engine counts as one CPU, also where there are fewer
        ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False, configure_logging=False)
    with pytest.raises(ConfigError, match="prefill_engines=2000 and decode_engines=2000 do not fit"):
        await start_apart(config, 2000, 2000)
    return await start_apart(config, 1, 1)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    import ray

    with LiveServer(start, device="cpu") as live:
        yield live
    ray.shutdown()


def test_answers_are_those_of_one_engine(server: LiveServer) -> None:
    prompt = list(range(20, 620))
    settings = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    (choice,) = server.post(COMPLETIONS, {"model": MODEL, "prompt": prompt, "add_special_tokens": False, **settings}).json()[
        "choices"
    ]
    with LLM("tiny", device="cpu", kv_cache_bytes=128 << 20, num_threads=1) as llm:
        (expected,) = llm.generate([prompt], SamplingParams(**settings))
    assert choice["text"] == expected.outputs[0].text
    until(server.is_drained, "drained")


def test_when_an_engine_is_lost_everybody_is_told(server: LiveServer) -> None:
    """Last in this file: the server is of no use afterwards."""
    stream = server.open(COMPLETIONS, endless(COMPLETIONS, stream=True))
    until(lambda: server.client.stats.num_running == 1, "running")
    (prefill,) = server.client._prefill
    prefill._processes.processes[0].kill()
    assert '"engine_dead"' in read_all(stream)
    assert httpx.get(server.url + "/health", timeout=PATIENCE).status_code == 503
    stream.close()
