"""`abyssal serve --ray`: engine replicas on the machines of a Ray cluster, as a Ray Serve deployment; this process is their front.

Ray Serve places the replicas, checks their health, replaces dead ones and rolls out restarts. Ours are three small parts: the replica, which
is an `EngineClient` in an actor; the router, which follows prefixes; and the client, which repeats requests that had not begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from math import inf
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from abyssal.config import EngineConfig
from abyssal.engine.engine import EngineInfo, EngineStats
from abyssal.engine.request import EngineRequest, RequestUpdate
from abyssal.errors import AbyssalError, ConfigError, EngineDeadError
from abyssal.parallel.router import Router
from abyssal.serve.engine_client import EngineClient, common_info, total_stats

log = logging.getLogger("abyssal")

APP = "abyssal"
MAX_REPLICAS = 1024  # that a router tells apart
MAX_ATTEMPTS = 5  # of a request that no replica has begun to answer
HEALTH_SECONDS = 2.0
STATS_SECONDS = 1.0
DRAIN_SECONDS = 600.0  # what runs on a replica that is replaced has this long


@dataclass(frozen=True, slots=True)
class Report:
    """What one replica says of itself."""

    pid: int
    info: EngineInfo
    stats: EngineStats


class EngineReplica:
    """One engine, of one or of several ranks on the GPUs of a node. Runs in an actor of Ray Serve."""

    async def __init__(self, config: EngineConfig, restarts: int) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        """`restarts`: a replica of an older number is replaced."""
        self._client = await EngineClient.start(config)
        self._client.on_death = lambda _: os._exit(1)  # Ray sees the end of an actor at once

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestUpdate]:
        async with contextlib.aclosing(self._client.generate(request)) as updates:
            async for update in updates:
                yield update

    async def report(self) -> Report:
        return Report(os.getpid(), self._client.info, self._client.stats)

    async def check_health(self) -> None:
        """Called by Ray Serve; an answer is all it wants, since a dead engine ends the actor."""

    async def __del__(self) -> None:
        self._client.on_death = lambda _: None
        await self._client.close()


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that holds its longest prefix, load permitting: `parallel.router.Router` over Ray's replicas."""

    def initialize_state(self, block_size: int) -> None:
        self._router = Router(MAX_REPLICAS, block_size)
        self._slots: dict[ReplicaID, int] = {}
        self._free = list(range(MAX_REPLICAS))[::-1]
        self._loads: Counter[ReplicaID] = Counter()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        current = {replica.replica_id for replica in replicas}
        for gone in self._slots.keys() - current:
            slot = self._slots.pop(gone)
            self._router.forget(slot)
            self._loads.pop(gone, None)
            self._free.append(slot)
        for new in current - self._slots.keys():
            self._slots[new] = self._free.pop()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The chosen replica first, then the others, least loaded first, for when it takes no more."""
        ranked = sorted(candidate_replicas, key=lambda replica: self._loads[replica.replica_id])
        if pending_request is None or not ranked:
            return [[replica] for replica in ranked]
        request: EngineRequest = pending_request.args[0]
        loads = [inf] * MAX_REPLICAS
        for replica in ranked:
            loads[self._slots[replica.replica_id]] = self._loads[replica.replica_id]
        slot = self._router.choose(request.prompt_ids, loads, request.cache_salt)
        return [[replica] for replica in sorted(ranked, key=lambda replica: self._slots[replica.replica_id] != slot)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        request: EngineRequest = pending_request.args[0]
        self._loads[replica_id] += 1
        if replica_id in self._slots:
            self._router.sent(self._slots[replica_id], request.prompt_ids, request.cache_salt)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._loads[replica_id] -= 1


class ClusterClient:
    """All replicas as one engine. Use from one event loop; start with `ClusterClient.start`.

    Attributes:
        death: why no request can be answered at this time; a new replica ends that.
        stats: sums over the replicas, as of the last second.
    """

    info: EngineInfo
    stats: EngineStats
    _watcher: asyncio.Task[None]
    _bundle: dict[str, float]  # what a replica takes of a node

    def __init__(self, config: EngineConfig, replicas: int, router: type[RequestRouter] | None) -> None:
        self._config, self._replicas, self._router = config, replicas, router
        self._restarts = 0
        self._restart: asyncio.Task[None] | None = None
        self.death: str | None = None

    @classmethod
    async def start(cls, config: EngineConfig, replicas: int, router: type[RequestRouter] | None = PrefixRouter) -> ClusterClient:
        """Join the cluster that RAY_ADDRESS names, or start one on this machine, and wait until every replica is loaded.

        Args:
            router: None: Ray's own, which knows nothing of prefixes.

        Raises:
            ConfigError: the cluster lacks what the replicas need.
            AbyssalError: the replicas do not start.
        """
        client = cls(config, replicas, router)
        client._bundle = await asyncio.to_thread(join_cluster, config, replicas, f"replicas={replicas}")
        await asyncio.to_thread(serve.start, proxy_location="Disabled")  # this process is the front
        try:
            await client._deploy()
            reports = await client._reports()
        except BaseException:
            await asyncio.to_thread(_leave)
            raise
        client.info = common_info([report.info for report in reports])
        client.stats = total_stats([report.stats for report in reports])
        client._watcher = asyncio.create_task(client._watch())
        return client

    @property
    def alive(self) -> bool:
        return self.death is None

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestUpdate]:
        """As `EngineClient.generate`. A request whose replica is lost before its first token begins again on another one.

        Raises:
            EngineDeadError: the replica was lost later, or several were lost one after another.
        """
        for attempt in range(MAX_ATTEMPTS):
            begun = ended = False
            stream = self._handle.options(stream=True).generate.remote(request)
            try:
                async for update in stream:
                    begun, ended = True, update.finish_reason is not None
                    yield update
                return
            except (RayError, RayServeException) as error:
                if begun or attempt == MAX_ATTEMPTS - 1:
                    raise EngineDeadError(f"the replica that answered was lost: {_first_line(error)}") from error
                log.warning("request %s begins again: its replica was lost", request.request_id)
            finally:
                if not ended:
                    stream.cancel()

    async def restart(self) -> None:
        """Replace the replicas one after another; what they are answering is finished first."""
        self._restarts += 1
        await self._deploy()

    def restart_soon(self) -> None:
        """As `restart`, beside what runs; a call while one is under way is ignored."""
        if self._restart is None or self._restart.done():
            self._restart = asyncio.create_task(self.restart())

    async def close(self) -> None:
        """End the replicas, and leave the cluster."""
        self._watcher.cancel()
        self.death = "the server is shutting down"
        await asyncio.to_thread(_leave)

    async def _deploy(self) -> None:
        options: dict[str, Any] = {}
        if self._router is not None:
            options["request_router_config"] = RequestRouterConfig(
                request_router_class=self._router, request_router_kwargs={"block_size": self._config.block_size}
            )
        deployment = serve.deployment(
            EngineReplica,
            num_replicas=self._replicas,
            ray_actor_options={"num_cpus": self._bundle["CPU"], "num_gpus": self._bundle.get("GPU", 0)},
            placement_group_bundles=[self._bundle],
            placement_group_strategy="STRICT_PACK",
            max_ongoing_requests=2 * self._config.max_num_seqs * self._config.dp,
            health_check_period_s=HEALTH_SECONDS,
            graceful_shutdown_timeout_s=DRAIN_SECONDS,
            **options,
        )
        app = deployment.bind(self._config, self._restarts)
        try:
            handle = await asyncio.to_thread(serve.run, app, name=APP, route_prefix=None)
        except RuntimeError as error:
            raise AbyssalError(f"the replicas do not start: {_first_line(error)}") from error
        self._handle = handle

    async def _reports(self) -> list[Report]:
        """Of the replicas that answer."""
        answers = await self._handle.broadcast("report").results_async(timeout_s=30, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, Report)]

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(STATS_SECONDS)
            reports = await self._reports()
            self.death = None if reports else "no replica is running; new ones are being started"
            if reports:
                self.stats = total_stats([report.stats for report in reports])


def join_cluster(config: EngineConfig, engines: int, wanted: str) -> dict[str, float]:
    """Join the cluster that RAY_ADDRESS names, or start one on this machine; what an engine takes of a node.

    Args:
        wanted: the option or options that ask for so many engines, for the message.

    Raises:
        ConfigError: they do not fit.
    """
    ray.init(ignore_reinit_error=True, log_to_driver=False, include_dashboard=False, configure_logging=False)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    on_gpus = config.device == "cuda" or (config.device == "auto" and any("GPU" in node for node in nodes))
    bundle = {"CPU": 1.0} | ({"GPU": float(config.dp * config.tp)} if on_gpus else {})
    fitting = sum(int(min(node.get(kind, 0) // count for kind, count in bundle.items())) for node in nodes)
    if fitting < engines:
        raise ConfigError(
            f"{wanted} do not fit: each engine needs {bundle} on one node, and the cluster's {len(nodes)} node(s) have room for "
            f"{fitting}; ask for fewer, lower dp or tp, or add nodes"
        )
    return bundle


def _leave() -> None:
    serve.delete(APP)
    serve.shutdown()
    ray.shutdown()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
