"""Every kernel compiles ahead of time for the architectures it names, without spills that nobody explains."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SECONDS = 1800  # for a machine that has compiled none of them yet


@pytest.mark.timeout(SECONDS + 60)
def test_kernels_compile_without_unexplained_spills() -> None:
    """All by one command: it keeps every core busy, and a command for each op would import for longer than it compiles."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "abyssal.ops._aot"], check=False, env=env, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
