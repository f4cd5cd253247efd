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


@triton.jit
def prefetch(address, num_bytes, WARPS: tl.constexpr):
    """Bring `num_bytes`, a multiple of 16 WARPS, from int64 `address` on into the L2; nothing waits for them.

    The lanes of a warp share one request, as the instruction is one of a warp: differing ones would go one after the other.
    """
    part = num_bytes // WARPS
    warp = tl.arange(0, 32 * WARPS) // 32
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r",
        [address + warp * part, tl.zeros_like(warp) + part], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
