"""Where the time of some steps goes, by op.

On a GPU the kernels themselves are timed, inside of CUDA graphs too, and each goes to the op whose module defines it. On a CPU,
where every call waits for its result, Python's profiler times functions, and each goes to the file that it is in or was called from.
"""

from __future__ import annotations

import cProfile
import importlib
import pkgutil
import pstats
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import abyssal

PACKAGE = Path(abyssal.__file__).parent
# Kernels of PyTorch and its libraries; the first that matches.
_FOREIGN = (
    (r"gemm|gemv|cutlass|cublas|nvjet|xmma|splitK", "library products"),
    (r"^Mem(cpy|set)", "copies"),
    (r"nccl", "communication"),
    (r"", "PyTorch other"),
)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds, of all that was run."""

    by_op: dict[str, float]  # the largest first
    by_kernel: dict[str, float]  # on a GPU; the largest first
    busy: float  # during which at least one kernel ran; on a CPU the sum of all ops
    total: float


def profile(run: Callable[[], object], device: torch.device) -> Breakdown:
    """Run once under a profiler. On a GPU `run` costs somewhat more host time than without."""
    return _profile_kernels(run) if device.type == "cuda" else _profile_functions(run)


def _profile_kernels(run: Callable[[], object]) -> Breakdown:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
    by_kernel: defaultdict[str, float] = defaultdict(float)
    spans = []
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            by_kernel[event.name] += (event.time_range.end - event.time_range.start) / 1e6
            spans.append((event.time_range.start / 1e6, event.time_range.end / 1e6))
    by_op: defaultdict[str, float] = defaultdict(float)
    for name, seconds in by_kernel.items():
        by_op[op_of_kernel(name)] += seconds
    return Breakdown(_sorted(by_op), _sorted(by_kernel), _union(spans), start.elapsed_time(end) / 1e3)


def op_of_kernel(name: str) -> str:
    """The op that a kernel of the profiler's list belongs to."""
    if (op := kernel_owners().get(name)) is not None:
        return op
    return next(group for pattern, group in _FOREIGN if re.search(pattern, name))


@cache
def kernel_owners() -> dict[str, str]:
    """Kernel name -> op, of every Triton and Gluon kernel of `abyssal.ops`."""
    import triton  # here, since a CPU needs none of it

    owners = {}
    for module in pkgutil.walk_packages([str(PACKAGE / "ops")], "abyssal.ops."):
        op, _, part = module.name.removeprefix("abyssal.ops.").partition(".")
        if part:
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, triton.runtime.KernelInterface):
                    owners[_name(value)] = op
    return owners


def _name(kernel: Any) -> str:
    while not hasattr(kernel, "__name__"):
        kernel = kernel.fn  # wrapped by an autotuner or heuristics
    return str(kernel.__name__)


def _union(spans: list[tuple[float, float]]) -> float:
    """Length of what the intervals cover together."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _profile_functions(run: Callable[[], object]) -> Breakdown:
    profiler = cProfile.Profile()
    profiler.runcall(run)
    stats: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    shares: dict[Any, dict[str, float]] = {}

    def share(function: Any, seen: frozenset[Any] = frozenset()) -> dict[str, float]:
        """Op -> part of a function's own time that is its: all of it, or as much as the op's callers spend in it."""
        if function in shares:
            return shares[function]
        if (op := _op_of_file(function[0])) is not None:
            return {op: 1.0}
        parts: defaultdict[str, float] = defaultdict(float)
        callers = {caller: spent[3] for caller, spent in stats[function][4].items() if caller not in seen and caller in stats}
        for caller, spent in callers.items():
            for op, part in share(caller, seen | {function}).items():
                parts[op] += part * spent / (sum(callers.values()) or 1.0)
        if not seen:
            shares[function] = dict(parts)
        return dict(parts)

    by_op: defaultdict[str, float] = defaultdict(float)
    for function, (_, _, own, _, _) in stats.items():
        for op, part in share(function).items():
            by_op[op] += own * part
    return Breakdown(_sorted(by_op), {}, sum(by_op.values()), sum(entry[2] for entry in stats.values()))


def _op_of_file(file: str) -> str | None:
    """An op's name, or the folder of the package; None for code of others."""
    path = Path(file)
    if not path.is_relative_to(PACKAGE):
        return None
    folder, *rest = path.relative_to(PACKAGE).parts
    if folder != "ops" or rest[0].startswith("_"):
        return folder.removesuffix(".py")
    return rest[0].removesuffix(".py")


def _sorted(seconds: dict[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))
