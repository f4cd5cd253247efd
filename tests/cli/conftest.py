"""`abyssal` in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from abyssal.cli import main


@dataclass
class Done:
    code: int
    out: str
    err: str


def without_options(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("ABYSSAL_")} | env


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """`abyssal ARGS` in this process."""

    def invoke(*args: str, env: dict[str, str] | None = None) -> Done:
        monkeypatch.setattr(sys, "argv", ["abyssal", *args])
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", without_options(env or {}))
            with pytest.raises(SystemExit) as ended:
                main()
        captured = capsys.readouterr()
        return Done(int(ended.value.code or 0), captured.out, captured.err)

    return invoke
