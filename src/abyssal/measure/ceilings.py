"""What this device does at best, measured on the spot: the roofs that a step is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

REPEATS = 5
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}  # beyond every cache
MATRIX = {"cuda": 8192, "cpu": 512}  # rows and columns


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes and operations per second of one device."""

    copy: float  # read plus written
    matmul: float  # of dense products in the run's dtype
    fp8_matmul: float | None  # of e4m3 products; None: the device has none


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Takes about a second."""
    copy = _copy_bandwidth(device)
    size = MATRIX[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    matmul = 2 * size**3 / _seconds(lambda: a @ b, device)
    fp8 = None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        product = torch._scaled_mm  # the one way that PyTorch 2.11 has for this product
        fp8 = 2 * size**3 / _seconds(lambda: product(x, y.t(), one, one, out_dtype=torch.bfloat16), device)
    return Ceilings(copy, matmul, fp8)


def _copy_bandwidth(device: torch.device) -> float:
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / _seconds(lambda: target.copy_(source), device)


def _seconds(fn: Callable[[], object], device: torch.device) -> float:
    """The shortest time of one call: others may use the machine too."""
    times = []
    for _ in range(REPEATS + 1):
        start = synchronised(device)
        fn()
        times.append(synchronised(device) - start)
    return min(times[1:])


def synchronised(device: torch.device) -> float:
    """The clock, in seconds, once the device has done everything that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
