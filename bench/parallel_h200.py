"""Several GPUs of one machine: tokens and logits against one GPU's, then decode speed of a slice of V4-Flash with experts shared out.

    python -m bench.parallel_h200 [--gpus 2 4] [--device cuda] [--equality-only] [--slice-only] [--alone 2] [--layers N] [--sequences N]
        [--json FILE]

Every rank is a process that steps an engine of its own, as the ranks of a server do. `equality`: tiny-v4 with dp and ep, and with tp, against
one GPU. With dp and ep in batch-invariant mode all greedy tokens must be equal. By teacher forcing: float32 logits may differ as sums in
another order do; the mean KL divergence of bfloat16 stands beside that of one GPU with the prompts in smaller chunks; and the same steps
give the same bits again, or kernels and exchanges overlap that must not.
`slice`: layers of the released size with random weights, a given number of sequences on each GPU; the share of communication is that of
NCCL's kernels in a profiled step, waiting for other ranks included. `--alone N` times one rank of N on one GPU: what it computes, with its
messages going to itself, links and waiting aside.
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
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from abyssal.cli.console import log_to_stderr
from abyssal.config import EngineConfig
from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest, SamplingParams
from abyssal.measure.breakdown import profile
from abyssal.measure.ceilings import synchronised
from abyssal.parallel.comm import ALONE, Comm, LocalExperts
from abyssal.parallel.mesh import Mesh
from abyssal.parallel.ranks import RankComm, exchange
from bench.gpus import require_gpus

PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 700, 64
ROWS, CHUNK = 64, 100  # logits compared of each prompt; tokens of the smaller chunks
LAYOUTS = {"float32": "fp32", "bfloat16": "v4"}  # of records, by dtype of the logits compared
WARM_UP, STEPS, PROFILED = 5, 32, 3
PATIENCE = 300.0  # seconds for a job

Job = Callable[..., Any]
Logits = dict[int, np.ndarray]  # prompt -> fp32 [ROWS, V]


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
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _answers(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answers(pipes: list[Connection]) -> list[Any]:
    """One of each rank; the first that dies ends the others."""
    answers: dict[Connection, Any] = {}
    while waiting := [pipe for pipe in pipes if pipe not in answers]:
        ready = wait(waiting, PATIENCE)
        if not ready:
            raise TimeoutError(f"a rank did not answer in {PATIENCE:.0f} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            answers[pipe] = pipe.recv()
    return [answers[pipe] for pipe in pipes]


def _rank(
    pipe: Connection, place: tuple[int, int, int, int], device: str, folder: str, job: Job, arguments: tuple[Any, ...]
) -> None:
    mesh = Mesh(*place)
    if mesh.rank == 0:
        log_to_stderr()
    if device == "cuda":
        torch.cuda.set_device(mesh.rank)
    comm: Comm = ALONE
    if mesh.size > 1:
        comm = RankComm(mesh, Path(folder) / "ranks", cuda=device == "cuda")
    pipe.send(job(comm, device, *arguments))
    pipe.recv()  # until the parent kills this process: an early end would break what others still do


def engine_config(comm: Comm, device: str, **options: Any) -> EngineConfig:
    mesh = comm.mesh
    return EngineConfig(device=device, dp=mesh.dp, tp=mesh.tp, ep=mesh.ep, enable_prefix_caching=False, **options)


# Equality


def equality_job(comm: Comm, device: str, prompts: list[list[int]]) -> tuple[dict[int, list[int]], dict[str, Logits], int]:
    """Of the prompts of this rank's replica: greedy tokens in batch-invariant mode, if one rank computes a replica; logits of the last
    rows by dtype, each prompt a chunk or, in bfloat16 and on one rank, in smaller ones; and how many of these come out with the same bits
    again in bfloat16."""
    mine = range(comm.mesh.dp_rank, len(prompts), comm.mesh.dp)
    options: dict[str, Any] = {"kv_cache_bytes": 1 << 30, "max_model_len": 4096}
    tokens: dict[int, list[int]] = {}
    if comm.mesh.tp == 1:
        engine = Engine(engine_config(comm, device, batch_invariant=device == "cuda", **options), comm=comm)
        params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        tokens = {index: [] for index in mine}
        for index in mine:
            engine.add(EngineRequest(str(index), prompts[index], params))
        for update in steps_together(engine, comm):
            tokens[int(update.request_id)] += update.token_ids
    logits: dict[str, Logits] = {}
    for dtype, layout in LAYOUTS.items():
        engine = Engine(engine_config(comm, device, dtype=dtype, kv_layout=layout, **options), comm=comm)
        own = {index: prompts[index] for index in mine}
        logits[dtype] = scored(engine, comm, own, PROMPT_TOKENS)
        if dtype == "bfloat16" or comm.mesh.size == 1:  # float32 is computed by the reference, whose chunks take long
            logits[f"{dtype} in chunks"] = scored(engine, comm, own, CHUNK)
    again = scored(engine, comm, own, CHUNK)
    return tokens, logits, sum(np.array_equal(again[index], logits["bfloat16 in chunks"][index]) for index in mine)


def scored(engine: Engine, comm: Comm, prompts: dict[int, list[int]], most: int) -> Logits:
    """Of the last tokens of each prompt, computed `most` tokens at a time; replicas begin and end at the same time."""
    found = {}
    for index, ids in prompts.items():
        sizes = [min(most, len(ids) - start) for start in range(0, len(ids), most)]
        found[index] = engine.score(ids, sizes, list(range(max(0, len(ids) - ROWS), len(ids)))).numpy()
    steps_together(engine, comm)
    return found


def steps_together(engine: Engine, comm: Comm) -> list[Any]:
    """Step until all replicas that share experts have nothing left; this one's updates."""
    updates = []
    while True:
        if engine.has_unfinished():
            updates += engine.step()
        elif comm.idle(engine.runner.idle):
            return updates


def compare(gpus: list[int], device: str) -> dict[str, Any]:
    """Tokens and logits of several ranks beside one rank's, and one rank's logits beside its own in smaller chunks."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 4000, (PROMPT_TOKENS - 40 * i,), generator=generator).tolist() for i in range(PROMPTS)]
    ((tokens, one, repeated),) = on_ranks(equality_job, Mesh(), device, prompts)
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, logits: dict[str, Logits], **counts: int) -> None:
        found[name] = differences(one, logits) | counts
        row = found[name]
        repeats = f"; same bits again {row['repeated']} of {PROMPTS}" if "repeated" in row else ""
        equal = f"; batch-invariant tokens equal {row['equal']} of {PROMPTS}" if "equal" in row else ""
        print(
            f"{name}: float32 logits within {row['float32']:.1e} of one rank's; bfloat16: mean KL from one rank {row['from_one']:.5f}, "
            f"from its float32 {row['from_float32']:.5f}{repeats}{equal}",
            flush=True,
        )

    add("one rank", one, repeated=repeated)
    add("one rank in chunks", {dtype: one[f"{dtype} in chunks"] for dtype in LAYOUTS})
    for mesh in [Mesh(n, 1, n) for n in gpus] + [Mesh(1, 2, 2)] + ([Mesh(2, 2, 4)] if max(gpus) >= 4 else []):
        answers = on_ranks(equality_job, mesh, device, prompts)
        logits = {dtype: {i: x for _, each, _ in answers for i, x in each[dtype].items()} for dtype in LAYOUTS}
        counts = {"repeated": sum(count for _, _, count in answers[:: mesh.tp])}
        if mesh.tp == 1:
            counts["equal"] = sum(tokens[i] == got for each, _, _ in answers for i, got in each.items())
        add(f"dp={mesh.dp} tp={mesh.tp} ep={mesh.ep}", logits, **counts)
    return found


def differences(one: dict[str, Logits], other: dict[str, Logits]) -> dict[str, float]:
    """The largest difference of float32 logits; the mean KL divergence of `other` in bfloat16 from `one`, in bfloat16 and in float32."""

    def rows(side: dict[str, Logits], dtype: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([side[dtype][i] for i in one[dtype]])).double()

    def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
        p, q = p.log_softmax(-1), q.log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1).mean().item()

    exact, got = rows(one, "float32"), rows(other, "bfloat16")
    return {
        "float32": (rows(other, "float32") - exact).abs().max().item(),
        "from_one": divergence(rows(one, "bfloat16"), got),
        "from_float32": divergence(exact, got),
    }


# Slice


def slice_job(comm: Comm, device: str, folder: str, sequences: int, context: int) -> dict[str, Any]:
    """Decode `sequences` sequences on this rank's replica, all ranks at a time."""
    from abyssal.measure.records import add_running
    from bench.slices import random_weights

    config = engine_config(comm, device, model=folder, max_num_seqs=sequences, gpu_memory_utilization=0.95)
    engine = Engine(config, random_weights, comm)
    # The length seeds tokens and records, or all replicas would choose the same experts.
    names = add_running(engine, sequences, min(context, engine.info.max_model_len - 200) - comm.mesh.dp_rank)
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


class OneOf(Comm):
    """One rank of `ranks` by itself: its rows again, with other experts, stand for those of the others, and NCCL carries all to itself."""

    def __init__(self, ranks: int, device: str) -> None:
        self.mesh = Mesh(ranks, 1, ranks)
        backend = {"cuda": "nccl", "cpu": "gloo"}[device]
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    def experts(self, x: Tensor, experts: Tensor, weights: Tensor, num_experts: int, local: LocalExperts) -> Tensor:
        ranks, shift = self.mesh.ep, num_experts // 2 - 1
        ids = torch.cat([torch.where(experts < 0, -1, (experts + shift * rank) % num_experts) for rank in range(ranks)])
        rows, scales = x.repeat(ranks, 1), weights.repeat(ranks, 1)
        return exchange(rows, ids, scales, [len(rows)], dist.group.WORLD, lambda *given: local(*given, 0))[: len(x)]


def alone_job(comm: Comm, device: str, ranks: int, *arguments: Any) -> dict[str, Any]:
    return slice_job(OneOf(ranks, device), device, *arguments)


def _profiled(engine: Engine) -> tuple[float, float]:
    """Milliseconds of NCCL's kernels and of all kernels in a step."""
    found = profile(lambda: [engine.step() for _ in range(PROFILED)], engine.runner.device)
    times = found.by_op.get("communication", 0.0), sum(found.by_kernel.values())
    return times[0] / PROFILED * 1e3, times[1] / PROFILED * 1e3


def measure_slice(gpus: list[int], alone: list[int], device: str, layers: int, sequences: int, context: int) -> dict[str, Any]:
    from dataclasses import replace

    from bench.slices import SLICES, slice_config, write_slice

    rows: dict[Any, dict[str, Any]] = {}
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
        for count in alone:
            (row,) = on_ranks(alone_job, Mesh(), device, count, str(folder), sequences, context)
            rows[f"one of {count}"] = row
            speed = count * row["tokens_per_second"] / rows[1]["tokens_per_second"]
            print(
                f"one rank of {count} by itself: {row['median_ms']:.2f} ms a step; {speed:.2f} times one GPU if links cost nothing",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", help="numbers of ranks; default: 2, and 4 if there are as many")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--equality-only", action="store_true")
    parser.add_argument("--slice-only", action="store_true")
    parser.add_argument("--alone", type=int, nargs="+", default=[], metavar="N", help="also one rank of N by itself")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=128, help="on each GPU")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    present = torch.cuda.device_count() if args.device == "cuda" else 2
    gpus = args.gpus or [n for n in (2, 4) if n <= present]
    if args.device == "cuda":
        require_gpus(max([1, *gpus]), "--device cpu --equality-only runs on any machine")
    result: dict[str, Any] = {"device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu"}
    if not args.slice_only:
        result["equality"] = compare(gpus, args.device)
    if not args.equality_only:
        result["slice"] = measure_slice(gpus, args.alone, args.device, args.layers, args.sequences, args.context)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
