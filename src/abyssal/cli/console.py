"""What the commands share to talk to a terminal: results go to stdout, everything else to stderr."""

from __future__ import annotations

import logging

from rich.console import Console
from rich.text import Text


def fail(message: str) -> None:
    """Print one red line on stderr."""
    Console(stderr=True).print(Text(f"error: {message}", style="bold red"), soft_wrap=True)


def log_to_stderr() -> None:
    """Show what the engine says while it starts: the options that `auto` became, memory, loading."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("abyssal").setLevel(logging.INFO)
