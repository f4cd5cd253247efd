"""A prefill engine in a process of its own, and a decode engine in this one; this side carries the notes."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.process
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future
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


class LocalLink:
    """One way between two engines of this process: what is received has been sent, since notes are taken later."""

    bytes_sent = 0

    def __init__(self, rank: int, way: deque[torch.Tensor]) -> None:
        self.rank, self._way = rank, way

    def connect(self, senders: int) -> None:
        pass

    def send(self, raw: torch.Tensor, receiver: int) -> None:
        self._way.append(raw.clone())

    def receive(self, raw: torch.Tensor, sender: int) -> Future[None]:
        raw.copy_(self._way.popleft())
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def close(self) -> None:
        pass


class Served:
    """Two engines of this process, each stepped only when its process would be: by a command, by a note, or unasked where it polls."""

    def __init__(self, model: str | Path, prefill: dict[str, Any], decode: dict[str, Any]) -> None:
        way: deque[torch.Tensor] = deque()
        self._notes: tuple[deque[Any], deque[Any]] = deque(), deque()  # to each engine
        configs = [EngineConfig(model=str(model), device="cpu", **options) for options in (prefill, decode)]
        self.prefill = PrefillEngine(configs[PREFILL], LocalLink(PREFILL, way), self._notes[DECODE].append)
        self.decode = DecodeEngine(configs[DECODE], LocalLink(DECODE, way), self._notes[PREFILL].append)
        self.updates: dict[str, list[RequestUpdate]] = defaultdict(list)

    def add(self, request: EngineRequest) -> None:
        self.decode.expect(request)
        self.prefill.add_for(DECODE, request)
        self._step(self.prefill)
        self._step(self.decode)

    def turn(self, rank: int) -> bool:
        """What comes next in one process; False: it waits for a message."""
        engine: PrefillEngine | DecodeEngine = (self.prefill, self.decode)[rank]
        notes = self._notes[rank]
        if engine.poll_ms() is None and not notes:
            return False
        while notes:
            engine.take_note(notes.popleft())
        self._step(engine)
        return True

    def run(self) -> None:
        """Until both wait."""
        while any([self.turn(PREFILL), self.turn(DECODE)]):
            pass

    def tokens(self, name: str) -> list[int]:
        return [token for update in self.updates[name] for token in update.token_ids]

    def _step(self, engine: PrefillEngine | DecodeEngine) -> None:
        if engine.has_unfinished():
            for update in engine.step():
                assert update.error is None, update.error
                self.updates[update.request_id].append(update)
