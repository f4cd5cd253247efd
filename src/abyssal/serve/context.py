"""What every route works with."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from fastapi import Request

from abyssal.config import ServerConfig
from abyssal.engine.engine import EngineInfo, EngineStats
from abyssal.engine.request import EngineRequest, RequestUpdate
from abyssal.errors import RequestError
from abyssal.serve.chat import ChatFormat
from abyssal.serve.errors import HttpError
from abyssal.serve.grammar import GrammarCompiler
from abyssal.serve.metrics import Metrics
from abyssal.tokenizer import Tokenizer


class Client(Protocol):
    """The engine as the routes see it; `EngineClient` is one."""

    info: EngineInfo
    death: str | None

    @property
    def stats(self) -> EngineStats: ...

    @property
    def alive(self) -> bool: ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[RequestUpdate]: ...


@dataclass(slots=True)
class Server:
    """One server's parts."""

    client: Client
    tokenizer: Tokenizer | None
    config: ServerConfig
    chat: ChatFormat
    grammars: GrammarCompiler
    metrics: Metrics
    started: int = field(default_factory=lambda: int(time.time()))  # Unix seconds

    @property
    def thinks_by_default(self) -> bool:
        """Whether an answer begins with reasoning when the request does not say."""
        return self.chat.thinking if self.config.thinking == "auto" else self.config.thinking == "on"

    def require_model(self, name: str | None) -> None:
        """Raise the 404 of OpenAI unless `name` is the served model."""
        served = self.client.info.model_name
        if name != served:
            asked = "no model is named in the request" if name is None else f"the model {name[:200]!r} does not exist"
            raise HttpError(404, f"{asked}; served here: {served!r}", "invalid_request_error", "model", "model_not_found")

    def require_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer: use /v1/completions with token ids", param=param)
        return self.tokenizer


def server_of(request: Request) -> Server:
    server: Server = request.app.state.server
    return server
