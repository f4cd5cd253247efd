"""Runs the outputs of one HTTP request, and answers in one piece or as a stream of events."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from contextlib import ExitStack, aclosing
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import Request, Response

from abyssal.engine.output import OutputDelta
from abyssal.engine.request import EngineRequest, Grammar, RequestUpdate, SamplingParams, check_request
from abyssal.errors import AbyssalError, EngineDeadError
from abyssal.serve.context import Server
from abyssal.serve.errors import RequestFailed, error_body
from abyssal.serve.metrics import RequestRecord, TokenClock
from abyssal.serve.streams import DONE, EventStream, event, json_response, while_connected

log = logging.getLogger("abyssal")

D = TypeVar("D", bound=OutputDelta)
Arrivals = asyncio.Queue[tuple[int, RequestUpdate | Exception]]


class Job(ABC, Generic[D]):
    """The outputs of one HTTP request: n per prompt, each a request to the engine.

    Args:
        cache_salt: prompts share a cached prefix with those of the same salt only.
        grammar: what every output must follow.

    Raises:
        RequestError: one of them can never be served; nothing has been started then.
    """

    def __init__(
        self,
        server: Server,
        prompts: list[list[int]],
        params: SamplingParams,
        cache_salt: str | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        self.server, self.n = server, params.n
        self.key, self.created = uuid.uuid4().hex, int(time.time())
        each = [(ids, params.for_output(i)) for ids in prompts for i in range(params.n)]
        self.requests = [EngineRequest(f"{self.key}-{i}", ids, own, cache_salt, grammar) for i, (ids, own) in enumerate(each)]
        for request in self.requests[:: self.n]:  # the outputs of one prompt differ in their seeds only
            check_request(request, server.client.info.limits)
        self.prompt_tokens = sum(map(len, prompts))
        self.completion_tokens = 0
        self.cached_tokens = [0] * len(prompts)

    @abstractmethod
    def push(self, index: int, update: RequestUpdate) -> D:
        """Take one update of output `index`; what it adds."""

    async def deltas(self) -> AsyncGenerator[tuple[int, D]]:
        """(index, what that output gains) until all have ended. Closing it early drops what still runs.

        Raises:
            EngineDeadError: the engine is gone.
            RequestFailed: one output failed; the others are dropped.
        """
        arrivals: Arrivals = asyncio.Queue()
        pumps = [asyncio.create_task(self._pump(i, request, arrivals)) for i, request in enumerate(self.requests)]
        clocks = [TokenClock(self.server.metrics) for _ in self.requests]
        running = len(self.requests)
        try:
            while running:
                index, update = await arrivals.get()
                if isinstance(update, Exception):
                    raise update
                if update.error is not None:
                    raise RequestFailed(update.error)
                delta = self.push(index, update)
                clocks[index].tick(len(delta.token_ids))
                self._count(index, update, delta)
                if delta.finish_reason is not None:
                    running -= 1
                    pumps[index].cancel()  # it has ended, or a stop string ends it here
                yield index, delta
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, index: int, request: EngineRequest, arrivals: Arrivals) -> None:
        try:
            async with aclosing(self.server.client.generate(request)) as updates:
                async for update in updates:
                    arrivals.put_nowait((index, update))
        except Exception as error:  # noqa: BLE001  `deltas` raises it: whatever it is, who waits for this output must hear of it
            arrivals.put_nowait((index, error))

    def _count(self, index: int, update: RequestUpdate, delta: D) -> None:
        self.completion_tokens += len(delta.token_ids)
        if index % self.n == 0:  # a prompt's other outputs find what this one computed
            prompt = index // self.n
            self.cached_tokens[prompt] = max(self.cached_tokens[prompt], update.num_cached_tokens)


class Form(ABC, Generic[D]):
    """How one API tells of a job: the whole answer, and the events of a stream."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer, once all outputs have ended."""

    def opening(self) -> Iterable[bytes]:
        """Events before the first delta."""
        return ()

    @abstractmethod
    def events(self, index: int, delta: D) -> Iterable[bytes]:
        """Events for what output `index` gained."""

    @abstractmethod
    def closing(self) -> Iterable[bytes]:
        """Events after the last delta."""

    @abstractmethod
    def failure(self, error: Exception) -> Iterable[bytes]:
        """Events that end a stream early."""


class OpenAIForm(Form[D]):
    """What OpenAI's two older routes share.

    Args:
        include_usage: every chunk has the field, and the last chunk has it alone (case L01).
    """

    prefix: ClassVar[str]  # of ids
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, job: Job[D], include_usage: bool) -> None:
        self.job, self._include_usage = job, include_usage

    @abstractmethod
    def choice(self, index: int) -> dict[str, Any]:
        """The whole choice `index`."""

    @abstractmethod
    def chunk_choices(self, index: int, delta: D) -> list[dict[str, Any]]:
        """Choices that a stream sends for `delta`, each in an event of its own."""

    def usage(self) -> dict[str, Any]:
        """A prompt with n outputs counts once."""
        job = self.job
        return {
            "prompt_tokens": job.prompt_tokens,
            "completion_tokens": job.completion_tokens,
            "total_tokens": job.prompt_tokens + job.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(job.cached_tokens)},
        }

    def whole(self) -> dict[str, Any]:
        choices = [self.choice(i) for i in range(len(self.job.requests))]
        return {**self._envelope(self.whole_object, choices), "usage": self.usage()}

    def events(self, index: int, delta: D) -> Iterable[bytes]:
        no_usage: dict[str, Any] = {"usage": None} if self._include_usage else {}
        for choice in self.chunk_choices(index, delta):
            yield event({**self._envelope(self.chunk_object, [choice]), **no_usage})

    def closing(self) -> Iterable[bytes]:
        if self._include_usage:
            yield event({**self._envelope(self.chunk_object, []), "usage": self.usage()})
        yield DONE

    def failure(self, error: Exception) -> Iterable[bytes]:
        return (event(error_body(error)), DONE)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        job, model = self.job, self.job.server.client.info.model_name
        return {"id": f"{self.prefix}-{job.key}", "object": kind, "created": job.created, "model": model, "choices": choices}


async def answer(job: Job[D], form: Form[D], request: Request, stream: bool, record: RequestRecord, stack: ExitStack) -> Response:
    """Run `job` for a client. When it leaves, the job is dropped.

    Args:
        record: gets the outcome of a stream, whose errors are events.
        stack: ends with the answer.
    """
    client = job.server.client
    if not client.alive:
        raise EngineDeadError(client.death or "it is gone")
    if stream:
        return EventStream(_events(job, form, record), stack.pop_all())
    await while_connected(request.receive, _run(job))
    return json_response(form.whole())


async def _run(job: Job[D]) -> None:
    async with aclosing(job.deltas()) as deltas:
        async for _ in deltas:
            pass


async def _events(job: Job[D], form: Form[D], record: RequestRecord) -> AsyncGenerator[bytes]:
    try:
        for data in form.opening():
            yield data
        async with aclosing(job.deltas()) as deltas:
            async for index, delta in deltas:
                for data in form.events(index, delta):
                    yield data
        for data in form.closing():
            yield data
    except Exception as error:  # the status line is gone: whatever happened must reach the client as an event
        if not isinstance(error, AbyssalError):
            log.exception("a stream failed")
        record.outcome = "failed"
        for data in form.failure(error):
            yield data
