"""Every kernel compiles ahead of time for the architectures it names, without spills that nobody explains."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.test_repo import ops


def kernel_ops() -> list[str]:
    return sorted(op for op, files in ops().items() if any("def aot_cases" in file.read_text() for file in files))


@pytest.mark.parametrize("op", kernel_ops())
def test_kernels_compile_without_unexplained_spills(op: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "abyssal.ops._aot", op], check=False, env=env, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stdout + done.stderr
