"""Every error that Abyssal raises on purpose. A message names the offending value and the remedy."""

import reprlib
from typing import Any

MOST_CHARS = 200  # of a value in a message


class AbyssalError(Exception):
    """Base class: catching it catches every deliberate error of the package."""


class ConfigError(AbyssalError):
    """A model's `config.json` or an engine option is unknown, contradictory or impossible."""


class CheckpointError(AbyssalError):
    """A checkpoint file, tensor or scale is missing, left over, or has the wrong type or shape."""


class RequestError(AbyssalError):
    """A request cannot be served as asked; other requests are not touched.

    Args:
        message: what is wrong, with the value, and what to do.
        param: the request field at fault, as the client spelled it.
        code: OpenAI's error code where one exists, such as `context_length_exceeded`.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class HandOverError(AbyssalError):
    """A sequence handed over from elsewhere is damaged, or of another model or layout; nothing has been changed."""


class EngineDeadError(AbyssalError):
    """The engine stopped; no request can be answered any more."""


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = 60  # characters: more than the longest name of a field or option

    def repr(self, x: Any) -> str:
        """Objects within objects are short one by one, not together."""
        text = super().repr(x)
        return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}..."

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write integers of thousands of digits."""
        return super().repr_int(x, level) if x.bit_length() < 1024 else f"<integer of {x.bit_length()} bits>"


show = _Short().repr
"""A value for a message: short, since a message must not carry a megabyte of the client's own input back to it."""


def shorten(path: str) -> str:
    """A path within a request for a message, likewise: names of a client's own are part of it."""
    return path if len(path) <= MOST_CHARS else f"{path[:90]}…{path[-90:]}"
