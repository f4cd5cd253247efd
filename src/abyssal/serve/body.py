"""Request bodies: JSON without ambiguity, then a schema that knows every field."""

from __future__ import annotations

import json
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import ValidationError

from abyssal.errors import RequestError, shorten, show
from abyssal.options import hint
from abyssal.serve.conversation import MAX_LEVELS, is_deeper
from abyssal.serve.errors import HttpError
from abyssal.serve.schemas import Body
from abyssal.serve.streams import ClientLeft, in_thread

MAX_BODY_BYTES = 64 << 20  # a million token ids take 7 MiB, the text of as many less
MAX_PARTS = 2 << 20  # commas and opening brackets, which bound the values; twice the ids of a million tokens
TOO_DEEP = f"the body is nested too deeply; at most {MAX_LEVELS} levels are allowed"
MAX_NAMES = 10_000  # of one object; no field needs more, and each unknown one costs an error

ROUTES = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/responses"}  # of what makes a prompt

B = TypeVar("B", bound=Body)


async def read_body(request: Request, schema: type[B]) -> B:
    """The request's body as `schema`.

    Raises:
        RequestError: not a JSON object, or a field is unknown, unsupported, or of the wrong type; names the field.
        HttpError: wrong content type (415), or too large (413).
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        message = f"content type {media_type[:80]!r} is not supported; send the header 'Content-Type: application/json'"
        raise HttpError(415, message, "invalid_request_error", code="unsupported_media_type")
    return await in_thread(request.receive, _parse, await _receive_all(request), schema)


def _parse(data: bytes, schema: type[B]) -> B:
    raw = parse_object(data)
    schema.drop_unsupported(raw)
    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        raise _request_error(error, schema) from error


async def _receive_all(request: Request) -> bytes:
    parts, size, more = [], 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft("the client closed its connection while it sent the request")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            message_text = f"the body is larger than {MAX_BODY_BYTES >> 20} MiB"
            raise HttpError(413, message_text, "invalid_request_error", code="request_too_large")
        more = message.get("more_body", False)
    return b"".join(parts)


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object as RFC 8259 has it; a name given twice, too many names or values, NaN and infinities are refused.

    Raises:
        RequestError: it is not one.
    """
    if (parts := sum(map(data.count, (b",", b"[", b"{")))) > MAX_PARTS:  # no other thread runs while lists are parsed
        raise RequestError(f"the body holds {parts} commas and opening brackets; at most {MAX_PARTS} are allowed, send less")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from error
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise RequestError(TOO_DEEP) from error
    except ValueError as error:  # a number of more digits than Python converts
        raise RequestError(f"the body is not usable JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {type(value).__name__}")
    if is_deeper(value, MAX_LEVELS):
        raise RequestError(TOO_DEEP)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_NAMES:
        raise RequestError(f"the body holds an object of {len(pairs)} names; at most {MAX_NAMES} are allowed")
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise RequestError(f"the body gives {show(twice)} twice; which one is meant is unclear", param=twice)
    return found


def _no_constant(name: str) -> NoReturn:
    raise RequestError(f"the body holds {name}, which is not JSON")


def _request_error(error: ValidationError, schema: type[Body]) -> RequestError:
    first = error.errors(include_url=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return RequestError(f"unknown field {show(param)}{_remedy(param, schema)}", param=param)
    if first["type"] == "missing":
        return RequestError(f"{shorten(param)} is missing", param=param)
    what = first["msg"].replace("Input should be", "must be").replace("Extra inputs are", "must be")
    return RequestError(f"{shorten(param)}={show(first['input'])} {what}", param=param)


def _remedy(name: str, schema: type[Body]) -> str:
    """What to do about an unknown field."""
    if name in ROUTES:
        return f"; it goes to {ROUTES[name]}"
    return hint(name[:40], schema.model_fields, "leave it out")
