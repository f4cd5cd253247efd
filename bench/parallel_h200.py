"""Several GPUs of one machine: tokens equal to one GPU's, then decode speed of a slice of V4-Flash with experts shared out.

    python -m bench.parallel_h200 [--gpus 2 4] [--device cuda] [--tokens-only] [--slice-only] [--layers N] [--sequences N] [--json FILE]

Every rank is a process that steps an engine of its own, as the ranks of a server do. `tokens`: tiny-v4 with dp and ep, and with tp, against
one GPU, greedy, in bfloat16; a sequence may part from it where two tokens are nearly as likely, so the first tokens that differ are shown
with the gap between the two best logits there. `slice`: layers of the released size with random weights, a given number of sequences on
each GPU; the share of communication is that of NCCL's kernels in a profiled step, waiting for other ranks included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from abyssal.config import EngineConfig
from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest, SamplingParams
from abyssal.measure.breakdown import profile
from abyssal.measure.ceilings import synchronised
from abyssal.parallel.comm import ALONE, Comm
from abyssal.parallel.mesh import Mesh

PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 700, 64
WARM_UP, STEPS, PROFILED = 5, 32, 3
PATIENCE = 200.0  # seconds for a job

Job = Callable[..., Any]


def on_ranks(job: Job, mesh: Mesh, device: str, *arguments: Any) -> list[Any]:
    """What `job(comm, *arguments)` returns on every rank, each in a process with a GPU of its own."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(mesh.size):
            ours, theirs = context.Pipe()
            place = (mesh.dp, mesh.tp, mesh.ep, rank)
            process = context.Process(target=_rank, args=(theirs, place, device, folder, job, arguments), daemon=True)
            process.start()
            pipes.append(ours)
            processes.append(process)
        try:
            return [_answer(pipe) for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answer(pipe: Any) -> Any:
    if not pipe.poll(PATIENCE):
        raise TimeoutError(f"a rank did not answer in {PATIENCE:.0f} s")
    return pipe.recv()


def _rank(pipe: Any, place: tuple[int, int, int, int], device: str, folder: str, job: Job, arguments: tuple[Any, ...]) -> None:
    mesh = Mesh(*place)
    if device == "cuda":
        torch.cuda.set_device(mesh.rank)
    comm: Comm = ALONE
    if mesh.size > 1:
        from abyssal.parallel.ranks import RankComm

        comm = RankComm(mesh, Path(folder) / "ranks", cuda=device == "cuda")
    pipe.send(job(comm, device, *arguments))
    pipe.recv()  # until the parent kills this process: an early end would break what others still do


def engine_config(comm: Comm, device: str, **options: Any) -> EngineConfig:
    mesh = comm.mesh
    return EngineConfig(device=device, dp=mesh.dp, tp=mesh.tp, ep=mesh.ep, enable_prefix_caching=False, **options)


# Tokens


def tokens_job(comm: Comm, device: str, prompts: list[list[int]]) -> dict[int, list[tuple[int, float]]]:
    """Prompt -> its tokens, each with the gap between the two best log-probabilities, of the prompts that this rank's replica was given."""
    engine = Engine(engine_config(comm, device, kv_cache_bytes=1 << 30, max_model_len=4096), comm=comm)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=2)
    mine = range(comm.mesh.dp_rank, len(prompts), comm.mesh.dp)
    for index in mine:
        engine.add(EngineRequest(str(index), prompts[index], params))
    tokens: dict[int, list[tuple[int, float]]] = {index: [] for index in mine}
    for update in steps_together(engine, comm):
        for token, logprobs in zip(update.token_ids, update.logprobs or [], strict=True):
            tokens[int(update.request_id)].append((token, logprobs.top_logprobs[0] - logprobs.top_logprobs[1]))
    return tokens


def steps_together(engine: Engine, comm: Comm) -> list[Any]:
    """Step until all replicas that share experts have nothing left; this one's updates."""
    updates = []
    while True:
        if engine.has_unfinished():
            updates += engine.step()
        elif comm.idle(engine.runner.model.idle):
            return updates


def compare_tokens(gpus: list[int], device: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 4000, (PROMPT_TOKENS - 40 * i,), generator=generator).tolist() for i in range(PROMPTS)]
    (one,) = on_ranks(tokens_job, Mesh(), device, prompts)
    found = {}
    meshes = [Mesh(n, 1, n) for n in gpus] + [Mesh(1, 2, 2)] + ([Mesh(2, 2, 4)] if max(gpus) >= 4 else [])
    for mesh in meshes:
        name = f"dp={mesh.dp} tp={mesh.tp} ep={mesh.ep}"
        got: dict[int, list[tuple[int, float]]] = {}
        for answer in on_ranks(tokens_job, mesh, device, prompts):
            for index, tokens in answer.items():
                assert [t for t, _ in got.setdefault(index, tokens)] == [t for t, _ in tokens], "ranks of a replica differ"
        partings = []
        for index, tokens in sorted(got.items()):
            at = next((i for i, (a, b) in enumerate(zip(one[index], tokens, strict=True)) if a[0] != b[0]), None)
            if at is not None:
                partings.append({"prompt": index, "at": at, "gap": one[index][at][1]})
        found[name] = {"equal": len(got) - len(partings), "of": len(prompts), "partings": partings}
        print(
            f"tokens {name}: {len(got) - len(partings)} of {len(prompts)} sequences equal to one rank's; {partings}", flush=True
        )
    return found


# Slice


def slice_job(comm: Comm, device: str, folder: str, sequences: int, context: int) -> dict[str, Any]:
    """Decode `sequences` sequences on this rank's replica, all ranks at a time."""
    from abyssal.measure.records import add_running
    from bench.slices import random_weights

    config = engine_config(comm, device, model=folder, max_num_seqs=sequences, gpu_memory_utilization=0.95)
    engine = Engine(config, random_weights, comm)
    names = add_running(engine, sequences, min(context, engine.info.max_model_len - 200))
    for _ in range(WARM_UP):
        engine.step()
    ends = [synchronised(engine.runner.device)]
    for _ in range(STEPS):
        engine.step()
        ends.append(time.perf_counter())
    ends[-1] = synchronised(engine.runner.device)
    assert len(engine.scheduler.running) == len(names)
    communication, busy = _profiled(engine) if device == "cuda" else (0.0, 0.0)
    return {
        "median_ms": statistics.median(b - a for a, b in itertools.pairwise(ends)) * 1e3,
        "tokens_per_second": sequences * STEPS / (ends[-1] - ends[0]),
        "communication_ms": communication,
        "kernels_ms": busy,
        "capacity_tokens": (engine.runner.sizes.num_blocks or 0) * engine.config.block_size,
        "weights_and_caches_gib": torch.cuda.memory_allocated() / 2**30 if device == "cuda" else 0.0,
    }


def _profiled(engine: Engine) -> tuple[float, float]:
    """Milliseconds of NCCL's kernels and of all kernels in a step."""
    found = profile(lambda: [engine.step() for _ in range(PROFILED)], engine.runner.device)
    times = found.by_op.get("communication", 0.0), sum(found.by_kernel.values())
    return times[0] / PROFILED * 1e3, times[1] / PROFILED * 1e3


def measure_slice(gpus: list[int], device: str, layers: int, sequences: int, context: int) -> dict[str, Any]:
    from dataclasses import replace

    from bench.slices import SLICES, slice_config, write_slice

    rows = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_slice(Path(temporary), slice_config(replace(SLICES["v4-flash"], layers=layers)))
        for count in [1, *gpus]:
            ranks = on_ranks(slice_job, Mesh(count, 1, count), device, str(folder), sequences, context)
            speed = sum(rank["tokens_per_second"] for rank in ranks)
            step = statistics.mean(rank["median_ms"] for rank in ranks)
            share = statistics.mean(
                rank["communication_ms"] / rank["kernels_ms"] if rank["kernels_ms"] else 0.0 for rank in ranks
            )
            capacity = sum(rank["capacity_tokens"] for rank in ranks)
            rows[count] = {
                "tokens_per_second": speed,
                "step_ms": step,
                "communication": share,
                "capacity_tokens": capacity,
                "ranks": ranks,
            }
            print(
                f"slice of {layers} layers, {count} GPUs x {sequences} sequences: {step:.2f} ms a step, {speed:.0f} tok/s, "
                f"{speed / rows[1]['tokens_per_second']:.2f} times one GPU; NCCL {share:.0%} of kernel time; caches of {capacity} tokens",
                flush=True,
            )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", help="numbers of ranks; default: 2, and 4 if there are as many")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens-only", action="store_true")
    parser.add_argument("--slice-only", action="store_true")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=128, help="on each GPU")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    present = torch.cuda.device_count() if args.device == "cuda" else 2
    gpus = args.gpus or [n for n in (2, 4) if n <= present]
    result: dict[str, Any] = {"device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu"}
    if not args.slice_only:
        result["tokens"] = compare_tokens(gpus, args.device)
    if not args.tokens_only:
        result["slice"] = measure_slice(gpus, args.device, args.layers, args.sequences, args.context)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
