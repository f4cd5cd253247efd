# mypy: allow-untyped-defs
"""What kernels in Gluon share, beside `_records.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """Barriers [COUNT, 1] in shared memory, on each of which so many arrivals are awaited.

    Only where a role uses them: see `idle_barriers` of `_aot.py`.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def wait_for_use(barriers, n):
    """For the n-th use of the stages of a ring -> its stage."""
    STAGES: gl.constexpr = barriers.shape[0]
    stage = (n.to(gl.uint32) % STAGES).to(gl.int32)
    mbarrier.wait(barriers.index(stage), (n.to(gl.uint32) // STAGES & 1).to(gl.int32))
    return stage


@gluon.jit
def plus(a, b):
    """For reductions and scans."""
    return a + b
