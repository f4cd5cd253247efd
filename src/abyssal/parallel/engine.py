"""Many ranks behind the interface of one engine, for `LLM`: processes as the server has them, asked from this thread."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from abyssal.config import EngineConfig
from abyssal.engine.engine import EngineInfo, EngineStats
from abyssal.engine.request import EngineRequest, RequestUpdate, check_request
from abyssal.errors import AbyssalError, RequestError
from abyssal.serve.engine_client import EngineClient
from abyssal.tokenizer import Tokenizer

T = TypeVar("T")


class RankedEngine:
    """An engine whose ranks are processes. They step by themselves; `step` waits for what comes of it."""

    def __init__(self, config: EngineConfig) -> None:
        """
        Raises:
            AbyssalError: a rank cannot start; the message is its own.
        """
        self.config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._updates: queue.Queue[RequestUpdate | AbyssalError] = queue.Queue()
        self._tasks: dict[str, Future[None]] = {}
        try:
            self._client = self._run(EngineClient.start(config))
        except BaseException:
            self._end_loop()
            raise
        self.tokenizer = Tokenizer.load(Path(self.info.model_folder), self.info.model_vocab_size)

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    def stats(self) -> EngineStats:
        """As of the latest step of every replica."""
        return self._client.stats

    def add(self, request: EngineRequest) -> None:
        """As `Engine.add`."""
        if request.request_id in self._tasks:
            raise RequestError(f"request id {request.request_id!r} is already in use", param="request_id")
        check_request(request, self.info.limits)
        self._tasks[request.request_id] = asyncio.run_coroutine_threadsafe(self._follow(request), self._loop)

    def abort(self, request_id: str) -> None:
        """As `Engine.abort`."""
        if (task := self._tasks.pop(request_id, None)) is not None:
            task.cancel()

    def score(self, token_ids: list[int], chunk_sizes: list[int], rows: list[int], reuse_prefix: bool = False) -> Tensor:
        """As `Engine.score`."""
        return self._run(self._client.score(token_ids, chunk_sizes, rows, reuse_prefix))

    def has_unfinished(self) -> bool:
        return bool(self._tasks)

    def step(self) -> list[RequestUpdate]:
        """Wait until a request gained something; what all have gained since the last call.

        Raises:
            EngineDeadError: a rank is gone.
        """
        updates: list[RequestUpdate] = []
        while (self._tasks and not updates) or not self._updates.empty():
            update = self._updates.get()
            if isinstance(update, AbyssalError):
                if updates:
                    self._updates.put(update)  # for the next call: what the others gained is not lost
                    return updates
                raise update  # one at a time: every request has its own, and may be waited for by another thread
            if update.request_id in self._tasks:  # it may have been aborted
                updates.append(update)
                if update.finish_reason is not None:
                    del self._tasks[update.request_id]
        return updates

    def close(self) -> None:
        """End the processes."""
        self._run(self._client.close())
        self._end_loop()

    async def _follow(self, request: EngineRequest) -> None:
        try:
            async with aclosing(self._client.generate(request)) as updates:
                async for update in updates:
                    self._updates.put(update)
        except AbyssalError as error:
            self._updates.put(error)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
