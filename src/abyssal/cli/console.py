"""What the commands share to talk to a terminal: results go to stdout, everything else to stderr."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from abyssal.errors import RequestError


def fail(message: str) -> None:
    """Print one red line on stderr."""
    Console(stderr=True).print(Text(f"error: {message}", style="bold red"), soft_wrap=True)


@contextmanager
def reading_input() -> Iterator[None]:
    """Around what reads text from standard input.

    Raises:
        RequestError: it is no text.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise RequestError(
            f"standard input is not {error.encoding}: byte {error.object[error.start]:#04x}; convert it to {error.encoding}"
        ) from error


def log_to_stderr() -> None:
    """Show what the engine says while it starts: the options that `auto` became, memory, loading."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("abyssal").setLevel(logging.INFO)
