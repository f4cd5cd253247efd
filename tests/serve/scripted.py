"""An engine that answers from a script, and ways to ask the HTTP application over it, without sockets or processes."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import openai
from fastapi import FastAPI

import abyssal
from abyssal.config import ServerConfig
from abyssal.engine.engine import EngineInfo, EngineStats
from abyssal.engine.request import (
    EngineRequest,
    FinishReason,
    RequestUpdate,
    TokenLogprobs,
    check_request,
    ending_token_ids,
)
from abyssal.errors import EngineDeadError
from abyssal.serve.app import create_app
from abyssal.serve.chat import ChatFormat
from abyssal.serve.grammar import GrammarCompiler
from abyssal.tokenizer import Tokenizer

TINY = Path(abyssal.__file__).parent / "assets" / "tiny-v4"
MODEL = "scripted"
MAX_MODEL_LEN = 2048

Script = Callable[[EngineRequest], Iterable[int]]


def load_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.load(TINY, 10**6)
    assert tokenizer is not None
    return tokenizer


TOKENIZER = load_tokenizer()


def engine_info(**changes: Any) -> EngineInfo:
    values: dict[str, Any] = {
        "model_name": MODEL, "model_folder": str(TINY), "family": "v4", "vocab_size": TOKENIZER.vocab_size,
        "model_vocab_size": TOKENIZER.vocab_size + 64, "bos_token_id": 0, "eos_token_ids": [1], "max_model_len": MAX_MODEL_LEN,
        "capacity_tokens": 10**6, "options": {}, "sampling_defaults": {},
    }  # fmt: skip
    return EngineInfo(**{**values, **changes})


def echo(request: EngineRequest) -> Iterable[int]:
    """The prompt over and over."""
    return itertools.cycle(request.prompt_ids)


def says(text: str) -> Script:
    """Answer every prompt with `text`, then EOS; control tokens spelled in it are control tokens."""
    return lambda _: [*TOKENIZER.encode(text, special=True), 1]


def score(token: int, count: int) -> TokenLogprobs:
    """Made-up log-probabilities that depend on the token only; the last alternative is "minus infinity"."""
    top = [token if i == 0 else (token + i) % TOKENIZER.vocab_size for i in range(count)]
    values = [-0.125 * (token % 5) - 0.5 * i for i in range(count)]
    if count > 2:
        values[-1] = -9999.0
    return TokenLogprobs(token, -0.125 * (token % 5), 1, top, values)


class ScriptedClient:
    """The engine as the routes see it. Output tokens come from `script`, which may be endless.

    Args:
        script: request -> its output tokens; EOS, stop ids and the length limit end it as in the engine.
        step: tokens per update.
        fail_after: after that many tokens of an output, it ends with the error "scripted failure".
        die_after: likewise, but the whole engine dies.
        gated: every update after the first waits until `gate` is set.

    Attributes:
        requests: every request that came, in order.
        aborted: ids of those that were left before their end.
        open: ids of those that run.
    """

    def __init__(
        self, script: Script = echo, *, step: int = 1, fail_after: int | None = None, die_after: int | None = None,
        gated: bool = False, **info: Any,
    ) -> None:  # fmt: skip
        self.info = engine_info(**info)
        self.script, self.step, self.fail_after, self.die_after = script, step, fail_after, die_after
        self.death: str | None = None
        self.gate: asyncio.Event | None = asyncio.Event() if gated else None
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.open: set[str] = set()
        self.counts: Counter[str] = Counter()

    @property
    def alive(self) -> bool:
        return self.death is None

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.open), num_waiting=0, num_preemptions=0, num_swapped=0, num_steps=self.counts["steps"],
            prompt_tokens=0, cached_tokens=0, generation_tokens=self.counts["tokens"],
            pages_total={"slots": 8}, pages_free={"slots": 8}, pages_cached={"slots": 0}, page_bytes={"slots": 1},
            pages_by_kind={}, bytes_by_kind={},
        )  # fmt: skip

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestUpdate]:
        if self.death is not None:
            raise EngineDeadError(self.death)
        limit = check_request(request, self.info.limits)
        self.requests.append(request)
        self.open.add(request.request_id)
        ended = False
        try:
            async for update in self._updates(request, limit):
                ended = update.finish_reason is not None
                self.counts.update(steps=1, tokens=len(update.token_ids))
                yield update
        finally:
            self.open.discard(request.request_id)
            if not ended and self.alive:
                self.aborted.append(request.request_id)

    async def _updates(self, request: EngineRequest, limit: int) -> AsyncGenerator[RequestUpdate]:
        ends = ending_token_ids(request.params, self.info.eos_token_ids)
        waiting: list[int] = []
        for count, token in enumerate(itertools.islice(self.script(request), limit), 1):
            waiting.append(token)
            reason: FinishReason | None = "stop" if token in ends else "length" if count == limit else None
            is_special = self.fail_after == count or self.die_after == count
            if reason is None and not is_special and len(waiting) < self.step:
                continue
            await self._pass(is_first=count == len(waiting))
            yield self._update(request, waiting, reason, is_first=count == len(waiting))
            waiting = []
            if reason is not None:
                return
            if self.die_after == count:
                self.death = "scripted death"
                raise EngineDeadError(self.death)
            if self.fail_after == count:
                yield RequestUpdate(request.request_id, [], None, None, "error", error="scripted failure")
                return
        raise AssertionError("the script ended before the output did; end it with EOS")

    async def _pass(self, is_first: bool) -> None:
        await asyncio.sleep(0)  # let others run, as a real engine does
        if self.gate is not None and not is_first:
            await self.gate.wait()

    def _update(self, request: EngineRequest, tokens: list[int], reason: FinishReason | None, is_first: bool) -> RequestUpdate:
        params = request.params
        logprobs = None if params.logprobs is None else [score(token, params.logprobs) for token in tokens]
        prompt_logprobs: list[TokenLogprobs | None] | None = None
        if is_first and params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(score(token, params.prompt_logprobs) for token in request.prompt_ids[1:])]
        stop = tokens[-1] if reason == "stop" else None
        return RequestUpdate(request.request_id, list(tokens), logprobs, prompt_logprobs, reason, stop)


GRAMMARS = GrammarCompiler(engine_info(), seconds=60)  # shared: its process takes seconds to start


def app_of(
    client: Any, tokenizer: Tokenizer | None = TOKENIZER, checkpoint_thinks: bool = False, chat: ChatFormat | None = None,
    grammars: GrammarCompiler = GRAMMARS, **config: Any,
) -> FastAPI:  # fmt: skip
    return create_app(client, tokenizer, ServerConfig(**config), chat or ChatFormat(thinking=checkpoint_thinks), grammars)


def http_client(app: FastAPI) -> httpx.AsyncClient:
    """Answers of `app`; a stream comes in one piece, since the transport collects it."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def openai_client(app: FastAPI, api_key: str = "none") -> openai.AsyncOpenAI:
    http: Any = http_client(app)  # openai names its own httpx2 in its types, and takes httpx too
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key=api_key, http_client=http, max_retries=0)


def post(app: FastAPI, path: str, body: Any, **more: Any) -> httpx.Response:
    """One POST in an event loop of its own. `body`: bytes are sent as they are, anything else as JSON."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **more.pop("headers", {})}

    async def ask() -> httpx.Response:
        async with http_client(app) as client:
            return await client.post(path, content=raw, headers=headers, **more)

    return asyncio.run(ask())


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which must end with `[DONE]`."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].partition(";")[0] == "text/event-stream"
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: ") for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
