"""What goes wrong, as HTTP: errors leave in OpenAI's shape `{"error": {message, type, param, code}}`, or in Anthropic's on its route."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request, Response

from abyssal.errors import AbyssalError, EngineDeadError, RequestError, show
from abyssal.serve.grammar import GrammarProcessError
from abyssal.serve.streams import ClientLeft, json_response

log = logging.getLogger("abyssal")

CLIENT_LEFT_STATUS = 499  # nobody is there to read it; for the log of a proxy
MAX_PARAM_CHARS = 200  # the name of an unknown field may be as long as a body


class HttpError(AbyssalError):
    """An error with a status of its own, where `RequestError` (always 400) does not say enough."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code


class RequestFailed(AbyssalError):
    """The engine ended one request with an error; the others go on."""


def error_body(error: Exception) -> dict[str, Any]:
    """The body for any error; what is not the client's doing and not deliberate is not told in detail."""
    if isinstance(error, HttpError):
        return _body(str(error), error.kind, error.param, error.code)
    if isinstance(error, RequestError):
        return _body(str(error), "invalid_request_error", error.param, error.code)
    if isinstance(error, EngineDeadError):
        return _body(f"the engine stopped: {error}", "server_error", None, "engine_dead")
    if isinstance(error, GrammarProcessError):
        return _body(str(error), "server_error", None, "grammar_process")
    if isinstance(error, RequestFailed):
        return _body(str(error), "server_error")
    return _body("internal error; the server's log has the details", "server_error")


def error_status(error: Exception) -> int:
    if isinstance(error, HttpError):
        return error.status
    if isinstance(error, RequestError):
        return 400
    return 503 if isinstance(error, EngineDeadError | GrammarProcessError) else 500


ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
}  # fmt: skip


def anthropic_error_body(error: Exception) -> dict[str, Any]:
    """As `error_body`, in Anthropic's shape."""
    status = error_status(error)
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error_body(error)["error"]["message"]}}


def error_response(error: Exception, path: str, headers: dict[str, str] | None = None) -> Response:
    """The answer to a request for `path`, in the shape that its clients know."""
    body = anthropic_error_body(error) if path.startswith(ANTHROPIC_PATH) else error_body(error)
    return json_response(body, error_status(error), headers)


def install_error_handlers(app: FastAPI) -> None:
    for kind in (HttpError, RequestError, EngineDeadError, GrammarProcessError, RequestFailed, Exception):
        app.add_exception_handler(kind, _answer)
    app.add_exception_handler(ClientLeft, _nobody)
    app.add_exception_handler(404, _no_route)
    app.add_exception_handler(405, _no_method)


async def _answer(request: Request, error: Exception) -> Response:
    return error_response(error, request.url.path)


async def _nobody(_: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT_STATUS)


async def _no_route(request: Request, _: Exception) -> Response:
    path = request.url.path
    known = sorted({route.path for route in request.app.routes})
    meant = next((other for other in (f"/v1{path}", path.removeprefix("/v1")) if other != path and other in known), None)
    remedy = f"did you mean {meant}?" if meant else f"known: {', '.join(known)}"
    message = f"there is no route {show(path)}; {remedy}"
    return error_response(HttpError(404, message, "invalid_request_error", code="not_found"), path)


async def _no_method(request: Request, error: Exception) -> Response:
    message = f"{request.method} is not a method of {request.url.path!r}"
    headers = getattr(error, "headers", None)  # names the methods that are
    error_405 = HttpError(405, message, "invalid_request_error", code="method_not_allowed")
    return error_response(error_405, request.url.path, headers)


def _body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    name = None if param is None else _clean(param[:MAX_PARAM_CHARS])
    return {"error": {"message": _clean(message), "type": kind, "param": name, "code": code}}


def _clean(text: str) -> str:
    """A client's lone surrogates, which UTF-8 cannot hold, spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()
