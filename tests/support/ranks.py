"""Ranks for tests: four processes that are started once and run one job after another, as any number of ranks up to four."""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from abyssal.checkpoint.loader import LoadWeights, Weights, load_weights
from abyssal.checkpoint.rows import RowTable
from abyssal.config import EngineConfig
from abyssal.engine import runner
from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest
from abyssal.ops._reference import ReferenceExperts, ReferenceOps
from abyssal.parallel.comm import Shape
from abyssal.parallel.mesh import Mesh
from abyssal.parallel.ranks import RankComm
from tests.support.stepping import decoding

SIZE = 4
PATIENCE = 120.0  # seconds for a job of a second: a busy machine is no failure

Job = Callable[..., Any]  # called with the rank's `RankComm` first


class Pool:
    """`run(job, arguments, dp=2)` -> what `job(comm, *arguments[rank])` returned on every rank."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.ranks"])
        self._folder = tempfile.TemporaryDirectory()
        self._runs = 0
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, rank), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, job: Job, arguments: list[tuple[Any, ...]], *, dp: int = 1, tp: int = 1, ep: int | None = None) -> list[Any]:
        mesh = Mesh(dp, tp, tp if ep is None else ep)
        self._runs += 1
        store = Path(self._folder.name) / str(self._runs)
        assert len(arguments) == mesh.size
        for pipe, given in zip(self._pipes, arguments, strict=False):
            pipe.send((job, (mesh.dp, mesh.tp, mesh.ep), store, given))
        pipes, results = self._pipes[: mesh.size], {}
        while waiting := [pipe for pipe in pipes if pipe not in results]:
            ready = wait(waiting, PATIENCE)
            assert ready, "a rank does not answer"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                failed, results[pipe] = pipe.recv()
                assert not failed, results[pipe]  # others may wait for it
        return [results[pipe] for pipe in pipes]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _work(pipe: Connection, rank: int) -> None:
    torch.set_num_threads(1)
    while True:
        job, (dp, tp, ep), store, given = pipe.recv()
        comm = RankComm(Mesh(dp, tp, ep, rank), store, cuda=False)
        try:
            pipe.send((False, job(comm, *given)))
        except Exception:  # noqa: BLE001 the parent shows it
            pipe.send((True, f"rank {rank}: {traceback.format_exc()}"))
        comm.close()


# Jobs

Scored = tuple[list[int], list[int]]  # token ids, chunk sizes


def engine_job(
    comm: RankComm, options: dict[str, Any], scored: list[Scored], requests: list[EngineRequest]
) -> tuple[list[Tensor], dict[str, list[int]], dict[str, int]]:
    """Score, then generate, while other replicas do what they are given or nothing.

    Returns:
        Logits of every scored prompt, output tokens by request, and counts.
    """
    loaded: list[int] = []

    def load(*arguments: Any) -> Weights:
        weights = load_weights(*arguments)
        tensors = [getattr(weight, "data", weight) for weight in weights.values() if not isinstance(weight, RowTable)]
        loaded.append(sum(tensor.numel() for tensor in tensors))
        return weights

    engine = engine_of(comm, options, load)
    logits = [engine.score(ids, sizes, list(range(len(ids)))) for ids, sizes in scored]
    tokens = generate(engine, comm, requests)
    return logits, tokens, {"weights": loaded[0]}


class RowByRow(ReferenceOps):
    """Every choice of an expert is computed by itself: its bits depend neither on the rows that other ranks bring nor on which experts are
    on this rank (of many numbers at once, the last ones may be computed without vector instructions, by another function)."""

    def __init__(self, batch_invariant: bool) -> None:
        super().__init__()
        self.batch_invariant = batch_invariant

    def choice_outputs(self, x: Tensor, chosen: Tensor, weights: Tensor, experts: ReferenceExperts, first: int) -> Tensor:
        one = partial(ReferenceOps.choice_outputs, self, experts=experts, first=first)
        rows = []
        for row, ids, factors in zip(x.split(1), chosen.split(1), weights.split(1), strict=True):
            choices = zip(ids.split(1, dim=1), factors.split(1, dim=1), strict=True)
            rows.append(torch.cat([one(row, *choice) for choice in choices], dim=1))
        return torch.cat(rows)

    def routed_experts(self, x: Tensor, chosen: Tensor, weights: Tensor, experts: ReferenceExperts, first: int) -> Tensor:
        return self.choice_outputs(x, chosen, weights, experts, first).sum(1, dtype=torch.float32)

    def moe(self, x: Tensor, token_ids: Tensor, experts: ReferenceExperts) -> Tensor:
        chosen, weights = self.route(x, token_ids, experts)
        outputs = self.choice_outputs(x, chosen, weights, experts, 0)
        return self.choice_sum(outputs, chosen, self.shared_expert(x, experts), token_ids, experts)


def row_by_row_job(comm: RankComm, options: dict[str, Any], scored: list[Scored], batch_invariant: bool) -> list[Tensor]:
    """Logits of every scored prompt, computed by `RowByRow`."""
    with patch.object(runner, "select_ops", lambda *_: RowByRow(batch_invariant)):
        engine = engine_of(comm, options)
    logits = [engine.score(ids, sizes, list(range(len(ids)))) for ids, sizes in scored]
    generate(engine, comm, [])
    return logits


def preempted_job(
    comm: RankComm, options: dict[str, Any], requests: list[EngineRequest]
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Generate on ranks that think differently of their speed: the first finds copying cheap, the others computing."""
    engine = engine_of(comm, options)
    swap = engine.swap
    swap.measure_step = lambda tokens, seconds: None  # type: ignore[method-assign]
    swap._tokens_per_second = 1.0 if comm.mesh.leads else 1e12
    tokens = generate(engine, comm, requests)
    stats = engine.stats()
    return tokens, {"preemptions": stats.num_preemptions, "swapped": stats.num_swapped}


def decoding_job(
    comm: RankComm, options: dict[str, Any], requests: list[EngineRequest], events: dict[int, EngineRequest | str]
) -> tuple[dict[str, list[int]], list[tuple[Shape, Shape | None]]]:
    """Generate in fixed shapes, as with CUDA graphs but without the graphs.

    Returns:
        Output tokens by request; of every step the shape of this replica's and the one that is common to all.
    """
    engine = decoding(engine_of(comm, options))
    assert engine.runner.decoder is not None
    engine.runner.decoder.capacities = [32, 64, engine.info.max_model_len]
    shapes = []
    meet = comm._meet

    def record(num_tokens: int, shape: Shape) -> tuple[Shape | None, set[int]]:
        common, known = meet(num_tokens, shape)
        shapes.append((shape, common))
        return common, known

    with patch.object(comm, "_meet", record):
        return generate(engine, comm, requests, events), shapes


def engine_of(comm: RankComm, options: dict[str, Any], load: LoadWeights = load_weights) -> Engine:
    mesh = comm.mesh
    return Engine(EngineConfig(**options, dp=mesh.dp, tp=mesh.tp, ep=mesh.ep, device="cpu", num_threads=1), load, comm)


def generate(
    engine: Engine, comm: RankComm, requests: list[EngineRequest], events: Mapping[int, EngineRequest | str] | None = None
) -> dict[str, list[int]]:
    """Output tokens by request, once all replicas have nothing left to do.

    Args:
        events: step, idle ones included -> a request that comes before it, or the id of one that is aborted.
    """
    tokens: dict[str, list[int]] = defaultdict(list)
    for request in requests:
        engine.add(request)
    for step in itertools.count():
        match (events or {}).get(step):
            case EngineRequest() as request:
                engine.add(request)
            case str() as name:
                engine.abort(name)
        if engine.has_unfinished():
            for update in engine.step():
                assert update.error is None, update.error
                tokens[update.request_id] += update.token_ids
        elif comm.idle(engine.runner.idle):
            break
    stats = engine.stats()
    assert stats.pages_free == stats.pages_total
    return dict(tokens)


def facts_job(comm: RankComm, data: bytes, number: int, decision: bool) -> tuple[bytes, int, bool]:
    return comm.share(data), comm.smallest(number), comm.agree(decision)


def tensors_job(comm: RankComm, table: Tensor, ids: Tensor, partial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = comm.mesh.part("rows", len(table))
    return comm.embed(ids, table[rows.start : rows.stop]), comm.sum(partial.clone()), comm.gather(partial)
