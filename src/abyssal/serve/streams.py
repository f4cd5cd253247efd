"""Answers that take long: server-sent events, and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from contextlib import ExitStack, aclosing
from typing import Any, ParamSpec, TypeVar

import msgspec
from fastapi import Response

from abyssal.errors import AbyssalError

P = ParamSpec("P")
T = TypeVar("T")
Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

encode_json = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies must pass events on at once


class ClientLeft(AbyssalError):
    """The client closed its connection before the answer was complete."""


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(content), status, headers, media_type="application/json")


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode_json(content) + b"\n\n"


def named_event(name: str, content: Any) -> bytes:
    """One server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + event(content)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`; a client that leaves before cancels it.

    Raises:
        ClientLeft: it did.
    """
    task, watch = asyncio.create_task(work), asyncio.create_task(_until_left(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft("the client closed its connection")
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def in_thread(receive: Receive, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Result of `work`, which long requests keep busy for seconds, in a thread: others are answered meanwhile.

    Raises:
        ClientLeft: the client did; the result is dropped, and work that waits for a thread is not begun.
    """
    return await while_connected(receive, asyncio.to_thread(work, *args, **kwargs))


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends `events` as they come.

    Args:
        events: never raises, save when cancelled; closed when the stream ends, however it ends.
        at_end: left when the stream ends.
    """

    def __init__(self, events: AsyncIterator[bytes], at_end: ExitStack) -> None:
        super().__init__(headers=STREAM_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events, self._at_end = events, at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._at_end:
                await while_connected(receive, self._send_all(send))
        except ClientLeft:
            return  # a response has begun, so there is none to give

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
