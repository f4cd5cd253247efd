"""Every kernel compiles ahead of time for the architectures it names, without spills that nobody explains."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from abyssal.ops._aot import idle_barriers

SECONDS = 1800  # for a machine that has compiled none of them yet


@pytest.mark.timeout(SECONDS + 60)
def test_kernels_compile_without_unexplained_spills() -> None:
    """All by one command: it keeps every core busy, and a command for each op would import for longer than it compiles."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "abyssal.ops._aot"], check=False, env=env, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_barriers_that_no_role_uses_are_named() -> None:
    """Used by a role or by all, invalidated, of one role only; and idle ones, of which one is waited for before there are roles."""
    barrier = "!ttg.memdesc<2x1xi64, #shared, #smem, mutable>"
    names = ("by_role", "by_all", "gone", "idle", "early")
    lines = [line for name in names for line in (
        f"%{name} = ttg.local_alloc : () -> {barrier}",
        f"%{name}_0 = ttg.memdesc_index %{name}[%c0_i32] : {barrier}",
        f"ttng.init_barrier %{name}_0, 1",
    )]  # fmt: skip
    lines += [
        "%data = ttg.local_alloc : () -> !ttg.memdesc<64xi32>",
        "ttng.inval_barrier %gone_0",
        "ttng.wait_barrier %early_0, %phase",
    ]
    roles = ["ttg.warp_specialize(%by_role, %data)", "%here = ttg.memdesc_index %by_all[%i]", "ttng.wait_barrier %here, %phase"]
    assert idle_barriers("\n".join(lines + roles)) == ["%idle", "%early"]
    assert idle_barriers("\n".join(lines)) == ["%by_role", "%by_all", "%idle"]
