"""One engine process: takes requests from a socket, steps the engine, reports what each step gave.

Started by `RankProcesses` of `abyssal.serve.engine_client` as `python -m abyssal.serve.engine_process SOCKET_ADDRESS ENGINE_CLASS RANK STORE`; a
`wire.Start` comes as JSON in the first line of standard input, which then stays open for as long as the parent lives.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import zmq

import abyssal.engine.grammar  # noqa: F401  now, since the first request that needs it must not hold up the others
from abyssal.config import EngineConfig
from abyssal.engine.disaggregation import DecodeEngine, Note, PrefillEngine
from abyssal.engine.engine import Engine
from abyssal.engine.link import open_link
from abyssal.engine.request import RequestUpdate
from abyssal.errors import AbyssalError, ConfigError, EngineDeadError, RequestError
from abyssal.parallel.comm import ALONE, Comm
from abyssal.parallel.mesh import Mesh
from abyssal.parallel.ranks import RankComm
from abyssal.serve import wire

log = logging.getLogger("abyssal")

BAD_START = 1
STDIN = 0  # read by number: a thread that waits in sys.stdin would hold its lock while the interpreter ends

Socket = zmq.Socket[bytes]


def main(address: str, engine_class: str, rank: str, store: str) -> int:
    level = logging.INFO if rank == "0" else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(message)s", stream=sys.stderr)
    line = _read_line(STDIN)
    if not line.endswith(b"\n"):
        return BAD_START  # the parent ended before it said what to run
    start = msgspec.json.decode(line, type=wire.Start)
    config = start.config
    stores = (store,) if start.place is None else (store, start.place.store)
    threading.Thread(target=_end_with_parent, args=((address, *stores),), daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    if start.server_key is not None:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = start.server_key.encode()
    socket.connect(address)
    build, mesh = _load(engine_class), Mesh.of(config, int(rank))
    try:
        if start.place is not None:
            place = start.place
            return _run(socket, lambda: _linked(config, place, socket), Inbox(socket), ALONE)
        if mesh.size == 1:
            return _run(socket, lambda: build(config), Inbox(socket), ALONE)
        cuda = config.device != "cpu" and torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(mesh.rank)
        comm = RankComm(mesh, Path(store), cuda)
        code = _run(socket, lambda: build(config, comm=comm), RankInbox(socket, comm), comm)
        comm.close()
        return code
    finally:
        context.destroy(linger=1000)  # ms, for the last message


def _run(socket: Socket, build: Callable[[], Engine], inbox: Commands, comm: Comm) -> int:
    try:
        engine = build()
    except AbyssalError as error:
        socket.send(wire.encode(wire.Dead(str(error))))
        return BAD_START
    socket.send(wire.encode(wire.Ready(engine.info, engine.stats())))
    try:
        serve(engine, inbox, socket, comm)
    except AbyssalError as error:
        log.exception("the engine stopped")
        socket.send(wire.encode(wire.Dead(str(error))))
        return BAD_START
    finally:
        engine.close()
    return 0


class Commands(Protocol):
    """Where commands come from."""

    def take(self, engine: Engine) -> list[wire.Command] | None:
        """What has arrived since, in order; waits while there is nothing to do. None: it is time to end."""

    def note(self, updates: list[RequestUpdate]) -> None:
        """What came of the commands and of the step after them."""


class Inbox:
    """The commands of an engine that is alone."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket

    def take(self, engine: Engine) -> list[wire.Command] | None:
        commands = [wire.decode_command(data) for data in drain(self._socket, engine.poll_ms())]
        return None if any(isinstance(command, wire.Stop) for command in commands) else commands

    def note(self, updates: list[RequestUpdate]) -> None:
        pass


class RankInbox:
    """The commands of one of several ranks: the first rank of a replica takes them from its socket and shares them with the others.

    All ranks of a replica then do the same, step by step; that they still agree is checked with every message.
    """

    def __init__(self, socket: Socket, comm: RankComm) -> None:
        self._socket, self._comm = socket, comm
        self._told = 0  # digest of the latest updates

    def take(self, engine: Engine) -> list[wire.Command] | None:
        comm = self._comm
        busy = engine.has_unfinished()
        quiet = not busy and comm.idle(engine.runner.idle)
        messages = drain(self._socket, None if quiet else 0) if comm.mesh.leads else []
        told, messages = _SHARED.decode(comm.share(wire.encode((self._told, messages))))
        if told != self._told:
            raise EngineDeadError(f"rank {comm.mesh.rank} computed other tokens than the first rank of its replica")
        commands = [wire.decode_command(data) for data in messages]
        comm.num_requests += sum(not isinstance(command, wire.Abort) for command in commands)
        comm.stopping |= any(isinstance(command, wire.Stop) for command in commands)
        if not comm.stopping:
            return commands
        while not comm.all_stopping:
            comm.idle(engine.runner.idle)
        return None

    def note(self, updates: list[RequestUpdate]) -> None:
        facts = [(update.request_id, update.token_ids, update.finish_reason) for update in updates]
        self._told = zlib.crc32(repr(facts).encode())


_SHARED = msgspec.msgpack.Decoder(tuple[int, list[bytes]])


def serve(engine: Engine, inbox: Commands, socket: Socket, comm: Comm) -> None:
    """Until told to stop: take what has arrived, compute one step, report."""
    while (commands := inbox.take(engine)) is not None:
        updates = [update for command in commands for update in _obey(engine, command, socket, comm)]
        works = engine.has_unfinished()
        if works:
            updates += engine.step()
        inbox.note(updates)
        if comm.mesh.leads and (works or commands):
            socket.send(wire.encode(wire.Progress(updates, engine.stats())))


def drain(socket: Socket, wait_ms: int | None) -> list[bytes]:
    """All messages that are there; the first is waited for, for so long or, with None, until it comes."""
    messages: list[bytes] = []
    while socket.poll(0 if messages else wait_ms):
        messages.append(socket.recv())
    return messages


def _obey(engine: Any, command: wire.Command, socket: Socket, comm: Comm) -> list[RequestUpdate]:
    """`engine` is of the class that the command is for."""
    if isinstance(command, wire.Abort):
        engine.abort(command.request_id)
    elif isinstance(command, wire.Score):
        answer = _score(engine, command)
        if comm.mesh.leads:
            socket.send(wire.encode(answer))
    elif isinstance(command, Note):
        engine.take_note(command)
    elif isinstance(command, wire.Add | wire.AddFor | wire.Expect):
        try:
            if isinstance(command, wire.Add):
                engine.add(command.request)
            elif isinstance(command, wire.AddFor):
                engine.add_for(command.receiver, command.request)
            else:
                engine.expect(command.request)
        except RequestError as error:
            return [RequestUpdate(command.request.request_id, [], None, None, finish_reason="error", error=str(error))]
    return []


def _score(engine: Engine, command: wire.Score) -> wire.Scored:
    try:
        logits = engine.score(command.token_ids, command.chunk_sizes, command.rows, command.reuse_prefix)
    except RequestError as error:
        return wire.Scored(b"", str(error), error.param)
    return wire.Scored(logits.numpy().tobytes())


def _linked(config: EngineConfig, place: wire.Place, socket: Socket) -> Engine:
    """An engine that works with others, each on a GPU of its own where there are any."""
    device = torch.device("cpu")
    if config.device != "cpu" and torch.cuda.is_available():
        if torch.cuda.device_count() <= place.device:
            raise ConfigError(
                f"{place.prefill} prefill and {place.decode} decode engines need a GPU each, and this machine has "
                f"{torch.cuda.device_count()}; lower prefill_engines or decode_engines"
            )
        device = torch.device("cuda", place.device)
        torch.cuda.set_device(device)
    link = open_link(place.backend, place.rank, place.prefill + place.decode, place.store, device)
    build = PrefillEngine if place.rank < place.prefill else DecodeEngine
    engine = build(config, link, lambda note: socket.send(wire.encode(note)))
    link.connect(place.prefill)
    return engine


def _load(engine_class: str) -> Any:
    module, _, name = engine_class.partition(":")
    return getattr(importlib.import_module(module), name)


def _end_with_parent(addresses: tuple[str, ...]) -> None:
    """Standard input ends when the parent does, however it dies; an engine without a parent must not hold the device, and removes
    those of the parent's files that it was given, with their folder once no other engine's are in it."""
    while os.read(STDIN, 1):
        pass
    for address in addresses:
        file = Path(address.removeprefix("ipc://"))  # tcp://... is no file
        with suppress(OSError):
            file.unlink()
        with suppress(OSError):
            file.parent.rmdir()
    os._exit(BAD_START)


def _read_line(descriptor: int) -> bytes:
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(descriptor, 1)):
        line += byte
    return line


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
