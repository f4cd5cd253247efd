"""Replay graphs of hyper-connection sites very often beside busy streams; stop at the first wrong bit or hang.

One more stream runs matrix products that fill the device, another, with a state of its own, sites that wait for each other too.
Compiles in parallel processes first. From then on `--hang-seconds` without progress end the process with code 3.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable

import torch
from bench_hyper_connection import make_inputs
from timing import compile_in_processes

from abyssal.ops.hyper_connection import gluon as kernel

TOKENS = (1, 8, 64, 512)
FIELDS = ("streams", "x", "pre", "post", "comb")


def captured(
    hidden: int, stream: torch.cuda.Stream, tokens: tuple[int, ...], say: Callable[[str], None]
) -> tuple[torch.cuda.CUDAGraph, list]:
    """One graph with a site of each order and token count, on one state; and its outputs."""
    state = kernel.HandoverState.allocate(max(tokens), hidden, "cuda")
    sites = []
    for count in tokens:
        for own in (True, False):
            arguments, weights = make_inputs(count, hidden, own, cold=False)
            sites.append((arguments[0], kernel.KernelWeights.prepare(weights[0])))
    torch.cuda.synchronize()  # other streams do not wait for the one that made the inputs
    for arguments, weights in sites:
        with torch.cuda.stream(stream):
            kernel.site(weights=weights, state=state, **arguments)
        stream.synchronize()
        say(f"site of {len(arguments['source'])} tokens, {'given' if 'pre' in arguments else 'own'} pre")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = [kernel.site(weights=weights, state=state, **arguments) for arguments, weights in sites]
    graph.kept = sites, state  # memory that the graph's launches use
    return graph, outputs


def compile_share(hidden: int, share: int, shares: int) -> None:
    """Compile some of the kernels into Triton's cache."""
    state = kernel.HandoverState.allocate(max(TOKENS), hidden, "cuda")
    for count, own in list(itertools.product(TOKENS, (True, False)))[share::shares]:
        arguments, weights = make_inputs(count, hidden, own, cold=False)
        kernel.site(weights=kernel.KernelWeights.prepare(weights[0]), state=state, **arguments[0])
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replays", type=int, default=100_000)
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--seconds", type=float, default=240, help="stop, with success, after so long")
    parser.add_argument("--hang-seconds", type=float, default=20)
    parser.add_argument("--processes", type=int, default=8, help="processes that compile first, if any")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.share is not None:
        compile_share(args.hidden, args.share, args.processes)
        return 0
    begin = progress = time.monotonic()
    done, replays, wrong = False, 0, 0

    def say(stage: str) -> None:
        nonlocal progress
        progress = time.monotonic()
        print(f"{time.monotonic() - begin:5.1f} s: {stage}", flush=True)

    if args.processes:
        compile_in_processes([sys.executable, __file__, "--hidden", str(args.hidden)], args.processes)
        say("compiled")
    if args.compile_only:
        return 0

    def watch() -> None:
        while not done:
            time.sleep(1)
            if time.monotonic() - progress > args.hang_seconds:
                faulthandler.dump_traceback(all_threads=True)
                say(f"HANG: no progress for {args.hang_seconds} s after {replays} replays")
                os._exit(3)

    threading.Thread(target=watch, daemon=True).start()
    main_stream, other_stream, busy_stream = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()
    graph, outputs = captured(args.hidden, main_stream, TOKENS, say)
    other_graph, _ = captured(args.hidden, other_stream, (8, 64), say)
    matrix, product = torch.randn(2, 2048, 2048, device="cuda", dtype=torch.bfloat16).unbind()
    torch.cuda.synchronize()
    say("captured")
    with torch.cuda.stream(main_stream):
        graph.replay()
    main_stream.synchronize()
    expected = [{name: getattr(site, name).clone() for name in FIELDS} for site in outputs]
    torch.cuda.synchronize()
    say("replayed")
    started = time.monotonic()
    while replays < args.replays and time.monotonic() - started < args.seconds:
        for _ in range(50):
            with torch.cuda.stream(busy_stream):
                torch.mm(matrix, matrix, out=product)
            with torch.cuda.stream(other_stream):
                other_graph.replay()
            with torch.cuda.stream(main_stream):
                graph.replay()
                graph.replay()
        replays += 100
        main_stream.synchronize()
        progress = time.monotonic()
        if replays % 2000 == 0:
            torch.cuda.synchronize()
            for site, right in zip(outputs, expected, strict=True):
                wrong += sum(not torch.equal(getattr(site, name), right[name]) for name in FIELDS)
            if wrong:
                break
        if replays % 20_000 == 0:
            say(f"{replays} replays")
    torch.cuda.synchronize()
    done = True
    say(f"{replays} replays, {replays * len(outputs)} launches; {wrong} outputs differ from the first replay")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
