"""Median times of CUDA-graph replays, and the ceilings that they are compared with."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import torch

COPY_BANDWIDTH = 4.23e12  # bytes/s, device-to-device copy on an H200, read plus written
BF16_FLOPS = 707e12  # flop/s, bf16 matrix product of 8192^3 on an H200


def median_us(fn: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], repeats: int = 5, calls: int = 20) -> float:
    """Median microseconds of one call of `fn(*args)` on the GPU.

    One graph holds at least `calls` calls, in turn over all `inputs`; give so many that together they exceed the L2 (60 MB) where the
    real case reads cold memory. The graph is replayed `repeats` times after a warm-up.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for args in inputs:
            fn(*args)  # compiles, and fills allocator caches
    stream.synchronize()
    rounds = -(-calls // len(inputs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for args in inputs:
                fn(*args)
    times = []
    for index in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if index >= 2:
            times.append(start.elapsed_time(end) * 1e3 / (rounds * len(inputs)))
    return statistics.median(times)


def compile_in_processes(command: Sequence[str], processes: int) -> None:
    """Run `command --processes N --share I` for every I below N at a time: each compiles its part into Triton's cache."""
    workers = [subprocess.Popen([*command, "--processes", str(processes), "--share", str(i)]) for i in range(processes)]
    for worker in workers:
        worker.wait()
