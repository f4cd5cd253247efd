"""Launches at their worst: behind a sleeping GPU, among programs of others, and with outputs that are still being poisoned.

A kernel that is launched before the one ahead of it ends may read and write nothing of that one before it waits. Where launches keep up
with the GPU, or memory holds the right values from the last time, one that does passes unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from tests.conftest import POISON_LIMIT, filling

SLEEP = 60_000_000  # cycles, about 35 ms: longer than the host takes to launch a step
CROWD = 2_000_000  # ns
LATE = 20_000  # ns


@triton.jit
def _spin(nanoseconds):
    start = globaltimer()
    passed = start - start
    while passed < nanoseconds:
        passed = globaltimer() - start


@triton.jit
def late_fill_kernel(data, count, value, nanoseconds, WIDTH: tl.constexpr):
    """Fill uint8 [count], long after what follows may have been launched."""
    gdc_wait()
    gdc_launch_dependents()
    _spin(nanoseconds)
    for first in range(tl.program_id(0) * WIDTH, count, tl.num_programs(0) * WIDTH):
        at = first + tl.arange(0, WIDTH)
        tl.store(data + at, value.to(tl.uint8), mask=at < count)


@triton.jit
def crowd_kernel(nanoseconds):
    """Programs of many warps that end at different times."""
    _spin(nanoseconds * (tl.program_id(0) % 8 + 1) // 8)


def late_fill(tensor: Tensor, value: int, nanoseconds: int = LATE) -> Tensor:
    """Fill a contiguous tensor's bytes with `value`, so late; a kernel launched early behind this starts before."""
    data = tensor.view(-1).view(torch.uint8)[:POISON_LIMIT]
    programs = min(32, triton.cdiv(len(data), 4096))
    late_fill_kernel[(programs,)](data, len(data), value, nanoseconds, WIDTH=4096, num_warps=4, launch_pdl=True)
    return tensor


def late_poison_(tensor: Tensor) -> Tensor:
    if tensor.is_cuda and tensor.numel() and tensor.is_contiguous() and tensor.dtype != torch.bool:
        late_fill(tensor, 0x40 if tensor.dtype in (torch.int16, torch.int32, torch.int64) else 0xFF)
    return tensor


def late_poison() -> AbstractContextManager[None]:
    """What the package allocates on a GPU becomes poison (see `tests/conftest.py`) as late as it can."""
    return filling(late_poison_)


@contextmanager
def one_by_one() -> Iterator[None]:
    """Each kernel of Triton is launched when the GPU is idle, and waited for."""

    def wait(*_: Any) -> None:
        torch.cuda.synchronize()

    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    for hook in hooks:
        hook.add(wait)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove(wait)


@contextmanager
def all_at_once() -> Iterator[None]:
    """What is launched inside waits for a sleeping GPU, so that the host is far ahead, and then meets one with little room."""
    properties = torch.cuda.get_device_properties("cuda")
    start, other = torch.cuda.Event(), torch.cuda.Stream()
    torch.cuda._sleep(SLEEP)
    start.record()
    with torch.cuda.stream(other):
        other.wait_event(start)
        crowd_kernel[(2 * properties.multi_processor_count - 16,)](CROWD, num_warps=32)
    yield
    torch.cuda.synchronize()


@contextmanager
def at_worst() -> Iterator[None]:
    with all_at_once(), late_poison():
        yield


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_same_at_once(run: Callable[[], Sequence[Tensor]], times: int = 3) -> None:
    """`run` launches kernels; their results have the bits of launches one by one, with outputs poisoned late, and as in other tests."""
    with one_by_one():
        expected = [tensor.clone() for tensor in run()]
    for attempt in range(times):
        for around in (at_worst, all_at_once):
            with around():
                got = run()
            for i, (value, wanted) in enumerate(zip(got, expected, strict=True)):
                different = int((bits(value) != bits(wanted)).sum())
                assert not different, f"{different} bytes of result {i} differ, {around.__name__}, attempt {attempt}"
