"""The API process's side of the engine processes: starts them, watches them, and gives every request its own stream of updates.

There is one process per rank. The first rank of every replica is given requests; the others hear of them from it.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import zmq
import zmq.asyncio
from torch import Tensor

from abyssal.checkpoint.source import resolve_model
from abyssal.config import EngineConfig, resolve_ranks
from abyssal.engine.disaggregation import Note
from abyssal.engine.engine import EngineInfo, EngineStats
from abyssal.engine.request import EngineRequest, RequestUpdate
from abyssal.errors import AbyssalError, ConfigError, EngineDeadError, RequestError
from abyssal.model_config import load_model_config
from abyssal.parallel.mesh import Mesh
from abyssal.parallel.router import Router
from abyssal.serve import wire

log = logging.getLogger("abyssal")

STOP_SECONDS = 10.0  # an engine that has not ended by then is killed
LAST_WORDS_SECONDS = 0.5

Updates = asyncio.Queue[RequestUpdate | None]  # None: the engine died
Ready = list[wire.Ready]
Launch = Callable[[EngineConfig, str, wire.Place | None], "RankProcesses"]


class EngineClient:
    """An engine in processes of its own. Use from one event loop; start with `EngineClient.start`."""

    def __init__(self, config: EngineConfig, processes: RankProcesses, ready: Ready) -> None:
        leaders = ready[:: config.tp]
        self.info: EngineInfo = common_info([event.info for event in leaders])
        self.death: str | None = None  # why the engine is gone
        self.num_aborted = 0
        self.on_note: Callable[[Note], None] = lambda _: None
        self.on_death: Callable[[str], None] = lambda _: None
        self._mesh = Mesh.of(config)
        self._processes = processes
        self._stats = [event.stats for event in leaders]  # of every replica, as of its latest step
        self._router = Router(config.dp, config.block_size)
        self._loads = [0] * config.dp  # requests that each replica has
        self._queues: dict[str, Updates] = {}
        self._scores: list[deque[asyncio.Future[wire.Scored | None]]] = [deque() for _ in range(config.dp)]
        receivers = [self._receive(rank) for rank in range(self._mesh.size)]
        self._tasks = [asyncio.create_task(task) for task in (*receivers, self._watch())]

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        engine: str = "abyssal.engine.engine:Engine",
        place: wire.Place | None = None,
        launch: Launch | None = None,
    ) -> EngineClient:
        """Start the processes and wait until their model is loaded.

        Args:
            engine: class to run, as `module:name`; it has the interface of `Engine`.
            place: among engines that hand sequences over; None: it hands nothing over.
            launch: starts the processes; None: on this machine.

        Raises:
            AbyssalError: it could not start; the message is the engine's own.
        """
        if config.dp * config.tp > 1:
            _check_ranks(config)
        processes = (launch or RankProcesses.launch)(config, engine, place)
        try:
            return cls(config, processes, await processes.ready())
        except BaseException:
            processes.kill()
            processes.end()
            processes.clean_up()
            raise

    @property
    def alive(self) -> bool:
        return self.death is None

    @property
    def stats(self) -> EngineStats:
        return self._stats[0] if len(self._stats) == 1 else total_stats(self._stats)

    async def generate(
        self, request: EngineRequest, command: wire.AddFor | wire.Expect | None = None
    ) -> AsyncGenerator[RequestUpdate]:
        """Updates of one request until it ends. Leaving the loop early drops the request: close the generator to be sure when.

        Args:
            command: how to queue it; None: as one that this engine computes from its first token to its last.

        Raises:
            EngineDeadError: the engine is gone.
        """
        self._require_alive()
        queue: Updates = asyncio.Queue()
        self._queues[request.request_id] = queue
        replica = self._choose(request.prompt_ids, request.cache_salt)
        self._loads[replica] += 1
        ended = False
        try:
            self._hand_out(command or wire.Add(request), replica)
            while not ended:
                update = await queue.get()
                if update is None:
                    raise EngineDeadError(self.death or "the engine is gone")
                ended = update.finish_reason is not None
                yield update
        finally:
            del self._queues[request.request_id]
            self._loads[replica] -= 1
            if not ended and self.alive:
                self.num_aborted += 1
                self._send(wire.Abort(request.request_id), replica)

    async def score(self, token_ids: list[int], chunk_sizes: list[int], rows: list[int], reuse_prefix: bool = False) -> Tensor:
        """As `Engine.score`.

        Raises:
            RequestError: as `Engine.score`.
            EngineDeadError: the engine is gone.
        """
        self._require_alive()
        replica = self._choose(token_ids, None)
        answer: asyncio.Future[wire.Scored | None] = asyncio.get_running_loop().create_future()
        self._scores[replica].append(answer)
        self._hand_out(wire.Score(token_ids, chunk_sizes, rows, reuse_prefix), replica)
        scored = await answer
        if scored is None:
            raise EngineDeadError(self.death or "the engine is gone")
        if scored.error is not None:
            raise RequestError(scored.error, param=scored.param)
        return torch.frombuffer(bytearray(scored.logits), dtype=torch.float32).view(len(rows), self.info.model_vocab_size)

    def pass_on(self, note: Note) -> None:
        """A note of another engine."""
        self._send(note, 0)

    async def close(self) -> None:
        """End the engine processes; open requests end with `EngineDeadError`."""
        for task in self._tasks:
            task.cancel()
        for replica in range(self._mesh.dp):
            self._send(wire.Stop(), replica)
        self.die("the server is shutting down")
        await asyncio.to_thread(self._processes.end)
        self._processes.clean_up()

    def _choose(self, token_ids: list[int], salt: str | None) -> int:
        if self._mesh.dp == 1:
            return 0
        replica = self._router.choose(token_ids, self._loads, salt)
        self._router.sent(replica, token_ids, salt)
        return replica

    def _hand_out(self, command: wire.Add | wire.AddFor | wire.Expect | wire.Score, replica: int) -> None:
        """Give `command` to a replica, and wake those that share its experts: they count what is handed out, see `RankComm.idle`."""
        self._send(command, replica)
        if self._mesh.in_step:
            together = self._mesh.ep // self._mesh.tp
            first = replica // together * together
            for other in range(first, first + together):
                if other != replica:
                    self._send(wire.Wake(), other)

    def _send(self, command: wire.Command, replica: int) -> None:
        self._processes.sockets[replica * self._mesh.tp].send(wire.encode(command))  # the queue has no limit: this never waits

    def _require_alive(self) -> None:
        if self.death is not None:
            raise EngineDeadError(self.death)

    async def _receive(self, rank: int) -> None:
        try:
            while True:
                self._take(wire.decode_event(await self._processes.sockets[rank].recv()), rank // self._mesh.tp)
        except Exception as error:  # whatever it is, nobody may wait for ever
            log.exception("a message of the engine process cannot be used")
            self.die(f"its messages cannot be used: {error}")

    def _take(self, event: wire.Event, replica: int) -> None:
        if isinstance(event, wire.Dead):
            self._lose(event.reason)
        elif isinstance(event, wire.Scored):
            if not (answer := self._scores[replica].popleft()).done():  # who asked may have left
                answer.set_result(event)
        elif isinstance(event, wire.Progress):
            self._stats[replica] = event.stats
            for update in event.updates:
                if (queue := self._queues.get(update.request_id)) is not None:
                    queue.put_nowait(update)
        elif isinstance(event, Note):
            self.on_note(event)

    async def _watch(self) -> None:
        """Notice a process that ends without a word; without it the others cannot go on."""
        while (reason := self._processes.ended()) is None:
            await asyncio.sleep(0.1)
        self._lose(reason)
        self._processes.kill()

    def _lose(self, reason: str) -> None:
        """The engine died by itself: unlike the end of the server, or of an engine linked to this one, it is logged here."""
        if self.alive:
            log.error("the engine is gone: %s", reason)
        self.die(reason)

    def die(self, reason: str) -> None:
        """The engine is gone or of no use any more: every open request ends with `EngineDeadError`."""
        if self.death is None:
            self.death = reason
            for queue in self._queues.values():
                queue.put_nowait(None)
            for answer in (answer for answers in self._scores for answer in answers):
                if not answer.done():
                    answer.set_result(None)
            self.on_death(reason)


class Process(Protocol):
    """What is needed of a process: as `subprocess.Popen` has it."""

    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def kill(self) -> None: ...


class RankProcesses:
    """The engine processes of one front, by rank, and its sockets to them."""

    def __init__(self, sockets: list[zmq.asyncio.Socket], processes: Sequence[Process], folder: Path | None = None) -> None:
        """`folder` is removed at the end."""
        self.sockets, self.processes, self._folder = sockets, processes, folder

    @classmethod
    def launch(cls, config: EngineConfig, engine: str, place: wire.Place | None) -> RankProcesses:
        """Start the processes on this machine."""
        folder = Path(tempfile.mkdtemp(prefix="abyssal-"))  # readable by this user only
        sockets: list[zmq.asyncio.Socket] = []
        processes: list[subprocess.Popen[bytes]] = []
        for rank in range(config.dp * config.tp):
            address = f"ipc://{folder / f'engine-{rank}'}"
            socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
            socket.set_hwm(0)
            socket.bind(address)
            sockets.append(socket)
            # In a session of its own, where Ctrl-C does not reach it: when the engine stops is decided here.
            command = [
                sys.executable,
                "-m",
                "abyssal.serve.engine_process",
                address,
                engine,
                str(rank),
                str(folder / "ranks"),
            ]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            processes.append(process)
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(wire.Start(config, place)) + b"\n")
            process.stdin.flush()
        return cls(sockets, processes, folder)

    async def ready(self) -> Ready:
        """What each rank says once it is loaded.

        Raises:
            AbyssalError: one cannot start.
        """
        ready: dict[int, wire.Ready] = {}
        dead_since: float | None = (
            None  # what a rank has to say of why is waited for a moment: another one's words may explain it
        )
        while len(ready) < len(self.processes):
            for rank, socket in enumerate(self.sockets):
                if await socket.poll(20):
                    ready[rank] = _readiness(wire.decode_event(await socket.recv()))
            if (reason := self.ended()) is not None:
                dead_since = dead_since or time.monotonic()
                if time.monotonic() - dead_since > LAST_WORDS_SECONDS:
                    raise AbyssalError(f"{reason} while loading")
        return [ready[rank] for rank in range(len(ready))]

    def ended(self) -> str | None:
        """Which process has ended, and how; None: all run."""
        for rank, process in enumerate(self.processes):
            if process.poll() is not None:
                return f"{self._name(rank)} ended with exit code {process.returncode}"
        return None

    def _name(self, rank: int) -> str:
        return "the engine process" if len(self.processes) == 1 else f"the engine process of rank {rank}"

    def end(self) -> None:
        """Wait for processes that were told to stop; they have STOP_SECONDS."""
        deadline = time.monotonic() + STOP_SECONDS
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_SECONDS)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def clean_up(self) -> None:
        for socket in self.sockets:
            socket.close(linger=0)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _readiness(event: wire.Event) -> wire.Ready:
    if isinstance(event, wire.Ready):
        return event
    raise AbyssalError(event.reason if isinstance(event, wire.Dead) else "the engine process spoke out of turn")


def _check_ranks(config: EngineConfig) -> None:
    """Before any process starts: what the model or the machine cannot do.

    Raises:
        ConfigError: the numbers do not go with the model, or there are too few GPUs.
    """
    resolve_ranks(config, load_model_config(resolve_model(config.model)))
    size = config.dp * config.tp
    if config.device != "cpu" and torch.cuda.is_available() and torch.cuda.device_count() < size:
        raise ConfigError(
            f"dp={config.dp} and tp={config.tp} need {size} GPUs, and this machine has {torch.cuda.device_count()}; lower them, or set "
            "device=cpu"
        )


def common_info(infos: list[EngineInfo]) -> EngineInfo:
    """What holds on every replica."""
    return replace(
        infos[0],
        max_model_len=min(info.max_model_len for info in infos),
        capacity_tokens=min(info.capacity_tokens for info in infos),
    )


def total_stats(all_stats: Iterable[EngineStats]) -> EngineStats:
    """Counts of all replicas together; a page has one size everywhere."""
    sums: dict[str, Any] = {}
    for stats in all_stats:
        for name in (field.name for field in fields(stats)):
            value = getattr(stats, name)
            if name == "page_bytes" or name not in sums:
                sums[name] = value
            elif isinstance(value, dict):
                sums[name] = {key: sums[name][key] + count for key, count in value.items()}
            else:
                sums[name] += value
    return EngineStats(**sums)
