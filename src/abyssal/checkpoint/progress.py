"""A progress bar on stderr."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

WIDTH = 30


class ProgressBar:
    """Counts `total` units; draws only if `enabled` and stderr is a terminal, one line, at most once per percent."""

    def __init__(self, label: str, total: int, enabled: bool) -> None:
        self.label = label
        self.total = max(total, 1)
        self.done = 0
        self.drawn = -1  # percent shown last
        self.enabled = enabled and sys.stderr.isatty()

    def __enter__(self) -> Self:
        self.advance(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.enabled:
            print(file=sys.stderr, flush=True)

    def advance(self, units: int) -> None:
        self.done += units
        percent = 100 * self.done // self.total
        if not self.enabled or percent == self.drawn:
            return
        self.drawn = percent
        filled = "#" * (WIDTH * self.done // self.total)
        print(f"\r{self.label} [{filled:<{WIDTH}}] {percent:3d} %", end="", file=sys.stderr, flush=True)
