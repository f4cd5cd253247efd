"""The HTTP application: every route, with who may call it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response

from abyssal.config import ServerConfig
from abyssal.errors import EngineDeadError
from abyssal.serve.auth import Access, RequireKey
from abyssal.serve.chat import ChatFormat
from abyssal.serve.chat_completions import create_chat_completion
from abyssal.serve.completions import create_completion
from abyssal.serve.context import Client, Server, server_of
from abyssal.serve.errors import install_error_handlers
from abyssal.serve.grammar import GrammarCompiler
from abyssal.serve.messages import create_message
from abyssal.serve.metrics import CONTENT_TYPE, Metrics
from abyssal.serve.responses import create_response
from abyssal.serve.streams import json_response
from abyssal.serve.tokens import detokenize, tokenize
from abyssal.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    access: Access
    endpoint: Callable[[Request], Awaitable[Response]]


def create_app(
    client: Client, tokenizer: Tokenizer | None, config: ServerConfig, chat: ChatFormat, grammars: GrammarCompiler
) -> FastAPI:
    """An application over a running engine."""
    # No generated pages: they would be routes that nobody declared.
    app = FastAPI(title="Abyssal", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    metrics = Metrics(lambda: client.stats, lambda: client.alive)
    app.state.server = Server(client, tokenizer, config, chat, grammars, metrics)
    for route in ROUTES:
        app.add_api_route(route.path, route.endpoint, methods=[route.method], response_model=None)
    install_error_handlers(app)
    public = frozenset(route.path for route in ROUTES if route.access is Access.PUBLIC)
    app.add_middleware(RequireKey, api_key=config.api_key, public=public)
    return app


async def health(request: Request) -> Response:
    """200 while the engine lives. Nothing is asked of the engine, so a busy one delays nothing."""
    client = server_of(request).client
    if not client.alive:
        raise EngineDeadError(client.death or "it is gone")
    return json_response({"status": "ok"})


async def metrics(request: Request) -> Response:
    return Response(server_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE})


async def list_models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_model(server_of(request))]})


async def get_model(request: Request) -> Response:
    server = server_of(request)
    server.require_model(request.path_params["model"])
    return json_response(_model(server))


def _model(server: Server) -> dict[str, object]:
    info = server.client.info
    return {
        "id": info.model_name,
        "object": "model",
        "created": server.started,
        "owned_by": "abyssal",
        "max_model_len": info.max_model_len,
    }


ROUTES = (
    Route("GET", "/health", Access.PUBLIC, health),
    Route("GET", "/metrics", Access.KEY, metrics),
    Route("GET", "/v1/models", Access.KEY, list_models),
    Route("GET", "/v1/models/{model:path}", Access.KEY, get_model),
    Route("POST", "/v1/completions", Access.KEY, create_completion),
    Route("POST", "/v1/chat/completions", Access.KEY, create_chat_completion),
    Route("POST", "/v1/messages", Access.KEY, create_message),
    Route("POST", "/v1/responses", Access.KEY, create_response),
    Route("POST", "/tokenize", Access.KEY, tokenize),
    Route("POST", "/detokenize", Access.KEY, detokenize),
)
