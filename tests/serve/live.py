"""A real server on loopback over a real engine process, for what happens between processes: leaving, dying, being busy."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import httpx
import uvicorn

from abyssal.config import EngineConfig
from abyssal.serve.engine_client import EngineClient
from abyssal.serve.grammar import GrammarCompiler
from tests.serve.scripted import TOKENIZER, app_of

MODEL = "tiny-v4"
PATIENCE = 120.0  # seconds for what should take a moment: a busy machine is no failure
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"{what}: did not happen in {PATIENCE:.0f} s"
        time.sleep(0.02)


class LiveServer:
    """The application over tiny-v4, in a thread of its own while the `with` block runs."""

    client: Any
    loop: asyncio.AbstractEventLoop
    url: str

    def __init__(self, start: Callable[[EngineConfig], Awaitable[Any]] = EngineClient.start, **engine: Any) -> None:
        """`start` gives the client of the engines."""
        self._start = start
        self._config = EngineConfig(kv_cache_bytes=128 << 20, num_threads=1, max_model_len=8192, **engine)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(PATIENCE), "the server did not start"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the server did not end"

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.client = await self._start(self._config)
        grammars = GrammarCompiler(self.client.info)
        try:
            app = app_of(self.client, TOKENIZER, grammars=grammars)
            settings = uvicorn.Config(app, log_config=None, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
            self._server = uvicorn.Server(settings)
            with socket.create_server(("127.0.0.1", 0)) as listener:
                self.address = listener.getsockname()
                self.url = f"http://127.0.0.1:{self.address[1]}"
                self._ready.set()
                await self._server.serve(sockets=[listener])
        finally:
            grammars.close()
            await self.client.close()

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, PATIENCE)

    def open(self, path: str, body: dict[str, Any]) -> socket.socket:
        """A connection that has sent this request and read nothing; close it to leave."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        connection = self.connect()
        connection.sendall(head.encode() + data)
        return connection

    def metric(self, name: str, **labels: str) -> float:
        """A number of `/metrics`; 0 if it is not there yet."""
        wanted = name + ("{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}" if labels else "")
        for line in httpx.get(self.url + "/metrics", timeout=PATIENCE).text.splitlines():
            key, _, value = line.rpartition(" ")
            if key == wanted:
                return float(value)
        return 0.0

    def is_drained(self) -> bool:
        """Nothing runs or waits, and every page is free."""
        stats = self.client.stats
        return stats.num_running == stats.num_waiting == 0 and stats.pages_free == stats.pages_total


def read_all(connection: socket.socket) -> str:
    """The whole answer, up to the end of a chunked body or of the connection."""
    data = b""
    while not data.endswith(b"0\r\n\r\n") and (part := connection.recv(65536)):
        data += part
    return data.decode()


def endless(path: str, *, stream: bool, n: int = 1, prompt_tokens: int = 8) -> dict[str, Any]:
    """A request that ends only at 8,000 tokens: whoever leaves it leaves early."""
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "a " * prompt_tokens}]}
        if path == CHAT
        else {"prompt": [5 + i % 200 for i in range(prompt_tokens)]}
    )
    return {"model": MODEL, "max_tokens": 8000, "ignore_eos": True, "n": n, "stream": stream, **prompt}
