"""A prefill engine in a process of its own, and a decode engine in this one; this side carries the notes."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.process
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from abyssal.config import EngineConfig
from abyssal.engine.disaggregation import DecodeEngine, PrefillEngine, RequestPart, Sending
from abyssal.engine.link import open_link
from abyssal.engine.request import EngineRequest, RequestUpdate

PREFILL, DECODE = 0, 1
CPU = torch.device("cpu")
T = TypeVar("T")


class Held:
    """The prefill engine waits in the middle of a step."""


@dataclass
class Stepped:
    """What came of a step of the prefill engine."""

    updates: list[RequestUpdate]
    is_drained: bool
    bytes_sent: int


def prefill_process(config: EngineConfig, backend: str, store: str, pipe: multiprocessing.connection.Connection) -> None:
    """Obey `(method, arguments)` until None; notes go through the pipe at once, and "step" ends with `Stepped`."""
    torch.set_num_threads(1)
    engine = PrefillEngine(config, open_link(backend, PREFILL, 2, store, CPU), pipe.send)
    engine.link.connect(senders=1)
    pipe.send(engine.runner.sizes)
    while (command := pipe.recv()) is not None:
        method, arguments = command
        if method == "before_layer":
            _before_layer(engine, pipe, *arguments)
            continue
        answer = getattr(engine, method)(*arguments)
        if method == "step":
            stats = engine.stats()
            pipe.send(Stepped(answer, stats.pages_free == stats.pages_total, engine.link.bytes_sent))
    engine.close()


def _before_layer(engine: PrefillEngine, pipe: multiprocessing.connection.Connection, layer: int, fails: bool) -> None:
    """The next step stops before `layer`, says so, and goes on when it is told; or it fails there."""
    block: Any = engine.runner.model.blocks[layer]
    attention = block.attention

    def once(*arguments: Any) -> Any:
        block.attention = attention
        if fails:
            raise ValueError("broken on purpose")
        pipe.send(Held())
        pipe.recv()
        return attention(*arguments)

    block.attention = once


@dataclass
class Pair:
    process: multiprocessing.process.BaseProcess
    pipe: multiprocessing.connection.Connection
    decode: DecodeEngine
    model: str | Path
    updates: dict[str, list[RequestUpdate]] = field(default_factory=lambda: defaultdict(list))
    parts: list[RequestPart] = field(default_factory=list)
    prefill_is_drained: bool = True
    bytes_sent: int = 0
    is_held: bool = False

    def prefill(self, method: str, *arguments: Any) -> None:
        self.pipe.send((method, arguments))

    def add(self, request: EngineRequest) -> None:
        self.decode.expect(request)
        self.prefill("add_for", DECODE, request)

    def step(self, prefill: bool = True) -> None:
        """One step of the prefill engine, if asked for, and one of the decode engine; notes are carried."""
        if prefill:
            self.prefill("step")
            self.finish_step()
        self._take(self.decode.step())

    def begin_step(self, layer: int) -> None:
        """A step of the prefill engine up to the middle: it waits before `layer`. `finish_step` lets it go on."""
        self.prefill("before_layer", layer, False)
        self.prefill("step")
        self._carry_until(Held)
        self.is_held = True

    def finish_step(self) -> None:
        if self.is_held:
            self.pipe.send(None)
            self.is_held = False
        stepped = self._carry_until(Stepped)
        self.prefill_is_drained, self.bytes_sent = stepped.is_drained, stepped.bytes_sent
        self._take(stepped.updates)

    def _carry_until(self, kind: type[T]) -> T:
        """Hand on notes of the prefill engine until something of `kind` comes."""
        while not isinstance(message := self.pipe.recv(), kind):
            if isinstance(message, Sending):
                self.parts += message.parts
            self.decode.take_note(message)
        return message

    def finish(self, *names: str) -> None:
        while not all(self.updates[name] and self.updates[name][-1].finish_reason for name in names):
            self.step()

    def tokens(self, name: str) -> list[int]:
        return [token for update in self.updates[name] for token in update.token_ids]

    def _take(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            self.updates[update.request_id].append(update)


@contextmanager
def pair(
    folder: Path, model: str | Path, decode: dict[str, Any] | None = None, backend: str = "auto", **options: Any
) -> Iterator[Pair]:
    """`folder`: an empty one; `decode`: options of the decode engine that differ."""
    config = EngineConfig(model=str(model), device="cpu", **options)
    store = str(folder / "store")
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=prefill_process, args=(config, backend, store, there), daemon=True
    )
    process.start()
    link = open_link(backend, DECODE, 2, store, CPU)
    try:
        config = EngineConfig(model=str(model), device="cpu", **(options | (decode or {})))
        engine = DecodeEngine(config, link, lambda note: here.send(("take_note", (note,))))
        link.connect(senders=1)
        here.recv()
        yield Pair(process, here, engine, model)
    finally:
        with suppress(BrokenPipeError):  # a test has ended it
            here.send(None)
        process.join(60)
        process.kill()
        link.close()
