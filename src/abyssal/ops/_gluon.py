# mypy: allow-untyped-defs
"""What kernels in Gluon share, beside `_records.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr):
    """Barriers [COUNT, 1] in shared memory, on each of which one arrival is awaited."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit
def plus(a, b):
    """For reductions and scans."""
    return a + b
