"""What goes wrong, as HTTP: every error leaves in OpenAI's shape `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request, Response

from abyssal.errors import AbyssalError, EngineDeadError, RequestError
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
    if isinstance(error, RequestFailed):
        return _body(str(error), "server_error")
    return _body("internal error; the server's log has the details", "server_error")


def error_status(error: Exception) -> int:
    if isinstance(error, HttpError):
        return error.status
    if isinstance(error, RequestError):
        return 400
    return 503 if isinstance(error, EngineDeadError) else 500


def error_response(error: Exception, headers: dict[str, str] | None = None) -> Response:
    return json_response(error_body(error), error_status(error), headers)


def install_error_handlers(app: FastAPI) -> None:
    for kind in (HttpError, RequestError, EngineDeadError, RequestFailed, Exception):
        app.add_exception_handler(kind, _answer)
    app.add_exception_handler(ClientLeft, _nobody)
    app.add_exception_handler(404, _no_route)
    app.add_exception_handler(405, _no_method)


async def _answer(_: Request, error: Exception) -> Response:
    return error_response(error)


async def _nobody(_: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT_STATUS)


async def _no_route(request: Request, _: Exception) -> Response:
    return error_response(HttpError(404, f"there is no route {request.url.path!r}", "invalid_request_error", code="not_found"))


async def _no_method(request: Request, error: Exception) -> Response:
    message = f"{request.method} is not a method of {request.url.path!r}"
    headers = getattr(error, "headers", None)  # names the methods that are
    return error_response(HttpError(405, message, "invalid_request_error", code="method_not_allowed"), headers)


def _body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    name = None if param is None else _clean(param[:MAX_PARAM_CHARS])
    return {"error": {"message": _clean(message), "type": kind, "param": name, "code": code}}


def _clean(text: str) -> str:
    """A client's lone surrogates, which UTF-8 cannot hold, spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()
