"""A prefill engine in a process of its own, and a decode engine in this one; this side carries the notes."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from abyssal.config import EngineConfig
from abyssal.engine.disaggregation import DecodeEngine, PartSent, PrefillEngine
from abyssal.engine.link import Link
from abyssal.engine.request import EngineRequest, RequestUpdate

PREFILL, DECODE = 0, 1
CPU = torch.device("cpu")


def prefill_process(config: EngineConfig, store: str, pipe: multiprocessing.connection.Connection) -> None:
    """Obey `(method, arguments)` until None; "step" answers with updates, notes, free pages and bytes sent."""
    torch.set_num_threads(1)
    engine = PrefillEngine(config, Link(PREFILL, 2, store, CPU))
    engine.link.connect(senders=1)
    pipe.send(engine.runner.sizes)
    while (command := pipe.recv()) is not None:
        method, arguments = command
        answer = getattr(engine, method)(*arguments)
        if method == "step":
            notes, engine.outbox = engine.outbox, []
            stats = engine.stats()
            pipe.send((answer, notes, stats.pages_free == stats.pages_total, engine.link.bytes_sent))


@dataclass
class Pair:
    pipe: multiprocessing.connection.Connection
    decode: DecodeEngine
    model: str | Path
    updates: dict[str, list[RequestUpdate]] = field(default_factory=lambda: defaultdict(list))
    parts: list[PartSent] = field(default_factory=list)
    prefill_is_drained: bool = True
    bytes_sent: int = 0

    def prefill(self, method: str, *arguments: Any) -> None:
        self.pipe.send((method, arguments))

    def add(self, request: EngineRequest) -> None:
        self.decode.expect(request)
        self.prefill("add_for", DECODE, request)

    def step(self, prefill: bool = True) -> None:
        """One step of the prefill engine, if asked for, and one of the decode engine; notes are carried."""
        if prefill:
            self.prefill("step")
            updates, notes, self.prefill_is_drained, self.bytes_sent = self.pipe.recv()
            self._take(updates)
            for note in notes:
                self.parts.append(note)
                self.decode.take_note(note)
        self._take(self.decode.step())
        for note in self.decode.outbox:
            self.prefill("take_note", note)
        self.decode.outbox.clear()

    def finish(self, *names: str) -> None:
        while not all(self.updates[name] and self.updates[name][-1].finish_reason for name in names):
            self.step()

    def tokens(self, name: str) -> list[int]:
        return [token for update in self.updates[name] for token in update.token_ids]

    def _take(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            self.updates[update.request_id].append(update)


@contextmanager
def pair(folder: Path, model: str | Path, decode: dict[str, Any] | None = None, **options: Any) -> Iterator[Pair]:
    """`folder`: an empty one; `decode`: options of the decode engine that differ."""
    config = EngineConfig(model=str(model), device="cpu", **options)
    store = str(folder / "store")
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=prefill_process, args=(config, store, there), daemon=True)
    process.start()
    link = Link(DECODE, 2, store, CPU)
    try:
        engine = DecodeEngine(EngineConfig(model=str(model), device="cpu", **(options | (decode or {}))), link)
        link.connect(senders=1)
        here.recv()
        yield Pair(here, engine, model)
    finally:
        here.send(None)
        process.join(60)
        process.kill()
        dist.destroy_process_group()
