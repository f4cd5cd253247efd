"""Device functions of kernels that are launched before the kernel in front of them ends (programmatic dependent launch).

Such a kernel reads only what no kernel writes, above all weights, and writes nothing, until `gdc_wait` returns: then all earlier kernels
of its stream have ended.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def take_over(EARLY: tl.constexpr):
    """Start of a small kernel: let the next one start beside it, and wait for the one before."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
