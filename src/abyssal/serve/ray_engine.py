"""Prefill and decode engines on the machines of a Ray cluster: Ray finds a place for each, and this process is their front.

An engine is the process that it is on one machine. An actor starts it, and ends with it; it talks to the front over TCP, encrypted with a key
that it gets through Ray.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import msgspec
import ray
import torch.distributed as dist
import zmq
import zmq.asyncio
from ray.exceptions import RayError

from abyssal.config import EngineConfig
from abyssal.serve import wire
from abyssal.serve.cluster import join_cluster
from abyssal.serve.disaggregated_client import DisaggregatedClient
from abyssal.serve.engine_client import RankProcesses

LOST = -1  # stands for the exit code of a process whose machine or actor is gone


async def start_apart(config: EngineConfig, num_prefill: int, num_decode: int) -> DisaggregatedClient:
    """As `DisaggregatedClient.start`, each engine on the machine that Ray finds for it; caches go by NIXL.

    Raises:
        ConfigError: the cluster has no room for them.
        AbyssalError: one could not start.
    """
    wanted = f"prefill_engines={num_prefill} and decode_engines={num_decode}"
    bundle = await asyncio.to_thread(join_cluster, config, num_prefill + num_decode, wanted)
    address = ray.util.get_node_ip_address()
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)

    def launch(config: EngineConfig, engine: str, place: wire.Place | None) -> RankProcesses:
        return RayProcesses(config, engine, place, address, bundle)

    return await DisaggregatedClient.start(config, num_prefill, num_decode, "nixl", f"tcp://{address}:{store.port}", launch)


class EngineHost:
    """Runs one engine process, in an actor."""

    def run(self, command: list[str], start: bytes) -> int:
        """The exit code of the process, which ends with this actor."""
        process = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(start)
        process.stdin.flush()
        return process.wait()


class RayProcess:
    """A process somewhere in the cluster, with what `RankProcesses` needs of a `Popen`."""

    returncode: int | None = None

    def __init__(self, bundle: dict[str, float], command: list[str], start: bytes) -> None:
        host: Any = ray.remote(num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), max_restarts=0)(EngineHost)
        self._actor = host.remote()
        self._exit = self._actor.run.remote(command, start)

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float) -> int:
        if (code := self._wait(timeout)) is None:
            raise subprocess.TimeoutExpired("engine", timeout)
        return code

    def kill(self) -> None:
        ray.kill(self._actor)

    def _wait(self, timeout: float) -> int | None:
        if self.returncode is None and ray.wait([self._exit], timeout=timeout)[0]:
            try:
                self.returncode = ray.get(self._exit)
            except RayError:
                self.returncode = LOST
        return self.returncode


class RayProcesses(RankProcesses):
    """One engine process in the cluster, and the socket to it."""

    def __init__(
        self, config: EngineConfig, engine: str, place: wire.Place | None, address: str, bundle: dict[str, float]
    ) -> None:
        """`address`: of this machine in the cluster."""
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.set_hwm(0)
        public, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_server = True
        port = socket.bind_to_random_port(f"tcp://{address}")
        start = msgspec.json.encode(wire.Start(config, place, public.decode())) + b"\n"
        command = ["-m", "abyssal.serve.engine_process", f"tcp://{address}:{port}", engine, "0", ""]
        super().__init__([socket], [RayProcess(bundle, command, start)])

    def clean_up(self) -> None:
        super().clean_up()
        for process in self.processes:
            process.kill()
