"""Milliseconds of one decoding step of the whole engine, by backend and number of sequences; and of a prefill.

    python bench/engine_step.py [--model tiny] [--sequences 1 32] [--context 1024] [--steps 30] [--json FILE]

The prompts differ and are not shared. A step is `Engine.step`: scheduling, facts, forward, sampling. `facts` is the part of it that
`build_batch` takes on the CPU. Steps are launched one by one, without CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from abyssal import LLM, SamplingParams
from abyssal.engine import runner
from abyssal.engine.request import EngineRequest

WARM_UP = 5  # steps before the clock: compilation, allocator caches


def synchronised() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


class Clock:
    """Adds up what a function takes."""

    def __init__(self, fn: Any) -> None:
        self.fn, self.seconds = fn, 0.0

    def __call__(self, *args: Any, **options: Any) -> Any:
        start = synchronised()
        result = self.fn(*args, **options)
        self.seconds += synchronised() - start
        return result


def measure(model: str, backend: str, sequences: int, context: int, steps: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    budget = 2048
    with LLM(model, device="cuda", dtype="bfloat16", backend=backend, kv_cache_bytes=8 << 30, max_num_seqs=sequences,
             max_num_batched_tokens=budget, enable_prefix_caching=False) as llm:  # fmt: skip
        engine = llm.engine
        prefills = []
        params = SamplingParams(
            temperature=0, max_tokens=WARM_UP + steps + 2 * sequences * context // budget + 8, ignore_eos=True
        )
        for i in range(sequences):
            ids = torch.randint(3, engine.info.vocab_size, (context,), generator=generator).tolist()
            engine.add(EngineRequest(str(i), ids, params))
        while engine.scheduler.waiting or any(s.num_computed < context for s in engine.scheduler.running):
            start = synchronised()
            engine.step()
            prefills.append((synchronised() - start) * 1e3)
        for _ in range(WARM_UP):
            engine.step()
        times = []
        for _ in range(steps):
            start = synchronised()
            engine.step()
            times.append((synchronised() - start) * 1e3)
        assert len(engine.scheduler.running) == sequences, "a request ended while it was measured"
        clock = runner.build_batch = Clock(runner.build_batch)
        engine.step()
        runner.build_batch = clock.fn
        return {"step": statistics.median(times), "facts": clock.seconds * 1e3, "prefill": min(prefills)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--backends", nargs="+", default=["reference", "triton", "hopper"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    print(f"{'backend':10} {'sequences':>9} {'step ms':>8} {'facts ms':>8} {'fastest prefill step ms':>23}", flush=True)
    for sequences in args.sequences:
        for backend in args.backends:
            try:
                figures = measure(args.model, backend, sequences, args.context, args.steps)
            except Exception as error:  # noqa: BLE001 the other rows are wanted all the same
                print(f"{backend} {sequences}: {type(error).__name__}: {error}")
                continue
            results.append({"backend": backend, "sequences": sequences, "context": args.context, **figures})
            step, facts, prefill = (figures[name] for name in ("step", "facts", "prefill"))
            print(f"{backend:10} {sequences:>9} {step:>8.2f} {facts:>8.2f} {prefill:>23.2f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
