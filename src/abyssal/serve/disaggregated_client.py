"""Several engines as one: each request goes to a prefill engine and to a decode engine, and the notes of these two go through here."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

from abyssal.config import EngineConfig
from abyssal.engine.disaggregation import Note, Reserved
from abyssal.engine.engine import EngineInfo, EngineStats
from abyssal.engine.request import EngineRequest, RequestUpdate
from abyssal.errors import AbyssalError, EngineDeadError
from abyssal.serve import wire
from abyssal.serve.engine_client import EngineClient, Launch, common_info, total_stats


class DisaggregatedClient:
    """Use from one event loop; start with `DisaggregatedClient.start`. When one engine dies, all are dead: their links break."""

    def __init__(self, prefill: list[EngineClient], decode: list[EngineClient], folder: Path) -> None:
        """Ranks count through `prefill`, then `decode`; `folder` is removed at the end."""
        self.info: EngineInfo = common_info([engine.info for engine in (*prefill, *decode)])
        self.death: str | None = None
        self._prefill, self._decode, self._folder = prefill, decode, folder
        self._prefill_of: dict[str, EngineClient] = {}
        self._load: Counter[EngineClient] = Counter()
        for engine in (*prefill, *decode):
            engine.on_note, engine.on_death = self._carry, self._die
            if engine.death is not None:
                self._die(engine.death)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        num_prefill: int,
        num_decode: int,
        transfer_backend: str = "auto",
        store: str | None = None,
        launch: Launch | None = None,
    ) -> DisaggregatedClient:
        """Start the engines and wait until their models are loaded and their links stand.

        Args:
            store: as for `engine.link.open_store`; None: a file of this machine.
            launch: starts each engine where it has one GPU for itself; None: on this machine.

        Raises:
            AbyssalError: one could not start; the message is its own.
        """
        folder = Path(tempfile.mkdtemp(prefix="abyssal-"))
        store = store or str(folder / "ranks")
        places = [
            wire.Place(rank, num_prefill, num_decode, store, transfer_backend, device=rank if launch is None else 0)
            for rank in range(num_prefill + num_decode)
        ]
        tasks: list[asyncio.Task[EngineClient]] = []
        try:
            async with asyncio.TaskGroup() as group:  # when one fails, those that still start are ended
                tasks += [group.create_task(EngineClient.start(config, place=place, launch=launch)) for place in places]
        except BaseException as error:
            ready = [task.result() for task in tasks if not task.cancelled() and task.exception() is None]
            await asyncio.gather(*(engine.close() for engine in ready))
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, BaseExceptionGroup):
                raise next((one for one in error.exceptions if isinstance(one, AbyssalError)), error) from None
            raise
        engines = [task.result() for task in tasks]
        return cls(engines[:num_prefill], engines[num_prefill:], folder)

    @property
    def alive(self) -> bool:
        return self.death is None

    @property
    def stats(self) -> EngineStats:
        """Sums over the engines."""
        return total_stats([engine.stats for engine in (*self._prefill, *self._decode)])

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestUpdate]:
        """As `EngineClient.generate`: the first update comes from the prefill engine, the others from the decode engine.

        Raises:
            EngineDeadError: an engine is gone.
        """
        if self.death is not None:
            raise EngineDeadError(self.death)
        prefill, decode = (min(engines, key=lambda engine: self._load[engine]) for engines in (self._prefill, self._decode))
        receiver = len(self._prefill) + self._decode.index(decode)
        self._prefill_of[request.request_id] = prefill
        later = decode.generate(request, wire.Expect(request))
        second = asyncio.ensure_future(anext(later))  # begins now: the decode engine takes pages while the prompt is computed
        try:
            async with aclosing(prefill.generate(request, wire.AddFor(request, receiver))) as sooner:
                with self._busy(prefill, decode):
                    first = await anext(sooner)
                yield first
                if first.finish_reason is None:
                    with self._busy(decode):
                        yield await second
                        async for update in later:
                            yield update
        finally:
            del self._prefill_of[request.request_id]  # first: who is cancelled twice leaves where it waits
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            await later.aclose()

    async def close(self) -> None:
        """End the engine processes; open requests end with `EngineDeadError`."""
        await asyncio.gather(*(engine.close() for engine in (*self._prefill, *self._decode)))
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def _busy(self, *engines: EngineClient) -> Iterator[None]:
        self._load.update(engines)
        try:
            yield
        finally:
            self._load.subtract(engines)

    def _carry(self, note: Note) -> None:
        if not isinstance(note, Reserved):
            self._decode[note.receiver - len(self._prefill)].pass_on(note)
        elif (prefill := self._prefill_of.get(note.request_id)) is not None:
            prefill.pass_on(note)

    def _die(self, reason: str) -> None:
        if self.death is None:
            self.death = reason
            for engine in (*self._prefill, *self._decode):
                engine.die(reason)
