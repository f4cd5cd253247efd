"""The engine process: takes requests from a socket, steps the engine, reports what each step gave.

Started by `EngineClient` as `python -m abyssal.serve.engine_process SOCKET_ADDRESS ENGINE_CLASS`; a `wire.Start` comes as JSON in
the first line of standard input, which then stays open for as long as the parent lives.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import zmq

import abyssal.engine.grammar  # noqa: F401  now, since the first request that needs it must not hold up the others
from abyssal.config import EngineConfig
from abyssal.engine.disaggregation import DecodeEngine, Note, PrefillEngine
from abyssal.engine.engine import Engine
from abyssal.engine.link import Link
from abyssal.engine.request import RequestUpdate
from abyssal.errors import AbyssalError, ConfigError, RequestError
from abyssal.serve import wire

log = logging.getLogger("abyssal")

BAD_START = 1
STDIN = 0  # read by number: a thread that waits in sys.stdin would hold its lock while the interpreter ends


def main(address: str, engine_class: str) -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    line = _read_line(STDIN)
    if not line.endswith(b"\n"):
        return BAD_START  # the parent ended before it said what to run
    start = msgspec.json.decode(line, type=wire.Start)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(address)
    try:
        return _run(socket, lambda: _load(engine_class)(start.config) if start.place is None else _linked(start.config, start.place))
    finally:
        context.destroy(linger=1000)  # ms, for the last message


def _run(socket: zmq.Socket[bytes], build: Callable[[], Engine]) -> int:
    try:
        engine = build()
    except AbyssalError as error:
        socket.send(wire.encode(wire.Dead(str(error))))
        return BAD_START
    socket.send(wire.encode(wire.Ready(engine.info, engine.stats())))
    try:
        serve(engine, socket)
    except AbyssalError as error:
        log.exception("the engine stopped")
        socket.send(wire.encode(wire.Dead(str(error))))
        return BAD_START
    return 0


def serve(engine: Engine, socket: zmq.Socket[bytes]) -> None:
    """Until told to stop: take what has arrived, compute one step, report."""
    outbox: list[Note] = engine.outbox if isinstance(engine, PrefillEngine | DecodeEngine) else []
    while True:
        updates: list[RequestUpdate] = []
        wait = engine.poll_ms()
        while socket.poll(wait):
            command = wire.decode_command(socket.recv())
            if isinstance(command, wire.Stop):
                return
            updates += _obey(engine, command)
            wait = 0
        updates += engine.step()
        socket.send(wire.encode(wire.Progress(updates, engine.stats(), [wire.wrap(note) for note in outbox])))
        outbox.clear()


def _obey(engine: Any, command: wire.Command) -> list[RequestUpdate]:
    """`engine` is of the class that the command is for."""
    if isinstance(command, wire.Abort):
        engine.abort(command.request_id)
    elif isinstance(command, wire.RoomNote | wire.PartNote):
        engine.take_note(command.note)
    elif not isinstance(command, wire.Stop):
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


def _linked(config: EngineConfig, place: wire.Place) -> Engine:
    """An engine that works with others, each on a GPU of its own where there are any."""
    device = torch.device("cpu")
    if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
        device = torch.device("cuda", place.rank)
        if torch.cuda.device_count() < place.prefill + place.decode:
            raise ConfigError(
                f"{place.prefill} prefill and {place.decode} decode engines need a GPU each, and this machine has "
                f"{torch.cuda.device_count()}; lower prefill_engines or decode_engines"
            )
        torch.cuda.set_device(device)
    link = Link(place.rank, place.prefill + place.decode, place.store, device)
    engine = (PrefillEngine if place.rank < place.prefill else DecodeEngine)(config, link)
    link.connect(place.prefill)
    return engine


def _load(engine_class: str) -> Any:
    module, _, name = engine_class.partition(":")
    return getattr(importlib.import_module(module), name)


def _end_with_parent() -> None:
    """Standard input ends when the parent does, however it dies; an engine without a parent must not hold the device."""
    while os.read(STDIN, 1):
        pass
    os._exit(BAD_START)


def _read_line(descriptor: int) -> bytes:
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(descriptor, 1)):
        line += byte
    return line


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
