"""The API process's side of the engine process: starts it, watches it, and gives every request its own stream of updates."""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from abyssal.config import EngineConfig
from abyssal.engine.engine import EngineInfo, EngineStats
from abyssal.engine.request import EngineRequest, RequestUpdate
from abyssal.errors import AbyssalError, EngineDeadError
from abyssal.serve import wire

log = logging.getLogger("abyssal")

STOP_SECONDS = 10.0  # an engine that has not ended by then is killed

Updates = asyncio.Queue[RequestUpdate | None]  # None: the engine died


class EngineClient:
    """An engine in a process of its own. Use from one event loop; start with `EngineClient.start`."""

    def __init__(self, folder: Path, socket: zmq.asyncio.Socket, process: subprocess.Popen[bytes], ready: wire.Ready) -> None:
        self.info: EngineInfo = ready.info
        self.stats: EngineStats = ready.stats  # as of the latest step
        self.death: str | None = None  # why the engine is gone
        self.num_aborted = 0
        self.on_note: Callable[[wire.RoomNote | wire.PartNote], None] = lambda _: None
        self.on_death: Callable[[str], None] = lambda _: None
        self._folder, self._socket, self._process = folder, socket, process
        self._queues: dict[str, Updates] = {}
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]

    @classmethod
    async def start(
        cls, config: EngineConfig, engine: str = "abyssal.engine.engine:Engine", place: wire.Place | None = None
    ) -> EngineClient:
        """Start the process and wait until its model is loaded.

        Args:
            engine: class to run, as `module:name`; it has the interface of `Engine`.
            place: among engines that hand sequences over; None: it works alone.

        Raises:
            AbyssalError: it could not start; the message is the engine's own.
        """
        folder = Path(tempfile.mkdtemp(prefix="abyssal-"))  # readable by this user only
        address = f"ipc://{folder / 'engine'}"
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.bind(address)
        process = _spawn(address, engine)
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(wire.Start(config, place)) + b"\n")
            process.stdin.flush()
            return cls(folder, socket, process, await _first_event(socket, process))
        except BaseException:
            process.kill()
            process.wait()
            socket.close(linger=0)
            shutil.rmtree(folder, ignore_errors=True)
            raise

    @property
    def alive(self) -> bool:
        return self.death is None

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
        ended = False
        try:
            self.send(command or wire.Add(request))
            while not ended:
                update = await queue.get()
                if update is None:
                    raise EngineDeadError(self.death or "the engine is gone")
                ended = update.finish_reason is not None
                yield update
        finally:
            del self._queues[request.request_id]
            if not ended and self.alive:
                self.num_aborted += 1
                self.send(wire.Abort(request.request_id))

    async def close(self) -> None:
        """End the engine process; open requests end with `EngineDeadError`."""
        for task in self._tasks:
            task.cancel()
        if self._process.poll() is None:
            self.send(wire.Stop())
        self.die("the server is shutting down")
        try:
            await asyncio.to_thread(self._process.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def send(self, message: wire.Command) -> None:
        self._socket.send(wire.encode(message))  # no limit on the queue is set, so this never waits

    def _require_alive(self) -> None:
        if self.death is not None:
            raise EngineDeadError(self.death)

    async def _receive(self) -> None:
        try:
            while True:
                self._take(wire.decode_event(await self._socket.recv()))
        except Exception as error:  # whatever it is, nobody may wait for ever
            log.exception("a message of the engine process cannot be used")
            self.die(f"its messages cannot be used: {error}")

    def _take(self, event: wire.Ready | wire.Progress | wire.Dead) -> None:
        if isinstance(event, wire.Dead):
            self.die(event.reason)
        elif isinstance(event, wire.Progress):
            self.stats = event.stats
            for note in event.notes:
                self.on_note(note)
            for update in event.updates:
                if (queue := self._queues.get(update.request_id)) is not None:
                    queue.put_nowait(update)

    async def _watch(self) -> None:
        """Notice a process that ends without a word."""
        while self._process.poll() is None:
            await asyncio.sleep(0.1)
        self.die(f"the engine process ended with exit code {self._process.returncode}")

    def die(self, reason: str) -> None:
        """The engine is gone or of no use any more: every open request ends with `EngineDeadError`."""
        if self.death is None:
            self.death = reason
            for queue in self._queues.values():
                queue.put_nowait(None)
            self.on_death(reason)


def _spawn(address: str, engine: str) -> subprocess.Popen[bytes]:
    """In a session of its own, where Ctrl-C does not reach it: when the engine stops is decided here."""
    command = [sys.executable, "-m", "abyssal.serve.engine_process", address, engine]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


async def _first_event(socket: zmq.asyncio.Socket, process: subprocess.Popen[bytes]) -> wire.Ready:
    while not await socket.poll(100):
        if process.poll() is not None and not await socket.poll(500):
            raise AbyssalError(f"the engine process ended with exit code {process.returncode} while loading")
    event = wire.decode_event(await socket.recv())
    if isinstance(event, wire.Ready):
        return event
    raise AbyssalError(event.reason if isinstance(event, wire.Dead) else "the engine process spoke out of turn")
