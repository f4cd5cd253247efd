"""Times of decode steps and prefills of a running engine, beside what they cannot avoid."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from abyssal.config import ModelConfig
from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest
from abyssal.errors import RequestError
from abyssal.measure.breakdown import Breakdown, profile
from abyssal.measure.ceilings import Ceilings, synchronised
from abyssal.measure.records import GREEDY, add_running
from abyssal.measure.roof import StepBytes, mean_decode_bytes, prefill_flops

WARM_UP = 3  # steps before the clock: compilation, allocator caches
PROFILED = 3  # steps under the profiler
FULL_CHUNKS = 48  # a prefill of more chunks is sampled
ONE_TOKEN = replace(GREEDY, max_tokens=1)  # nothing is launched behind a prompt
SAMPLES = 5  # positions of a sampled prefill, evenly from its first chunk to its last: the time grows linearly between them

# Which ceiling an op's products meet; the others run in the dtype of the model.
FP8_OPS = ("moe", "linear", "index_score")
PARTS = {"linear": ("linear", "library products")}  # ops whose work is done under several names


@dataclass(frozen=True, slots=True)
class Decode:
    """One row of decode measurements: `batch` sequences of about `context` tokens."""

    batch: int
    context: int
    median_ms: float  # of one step, from when its tokens are known to when those of the next are
    tokens_per_second: float
    roof_ms: float
    bytes: StepBytes
    breakdown_ms: dict[str, float] | None  # of one step, by op
    kernels_ms: dict[str, float] | None  # and on a GPU by kernel
    busy_ms: float | None  # of a profiled step, during which a kernel ran
    host_ms: float | None  # median of what a step takes the host on a GPU that has nothing left to do: it waits for nothing

    @property
    def share(self) -> float:
        """Part of the step that its bytes would take at the copy bandwidth."""
        return self.roof_ms / self.median_ms


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prefill of `tokens` tokens in chunks of `chunk`."""

    tokens: int
    chunk: int
    sampled: int | None  # chunks that were measured, the total being interpolated; None: all of them
    seconds: float
    first_seconds: float  # the same when it is done for the first time: kernels are compiled for new lengths
    # Of those measured, in their order; if they are all, until the host goes on, which is a chunk ahead on a GPU
    chunk_ms: list[float]
    peak_bytes: int | None  # of memory on a GPU while it ran, weights and caches included
    breakdown_ms: dict[str, float]  # of the middle chunk, by op
    kernels_ms: dict[str, float]  # and on a GPU by kernel
    busy_ms: float  # of the middle chunk, during which a kernel ran
    profiled_ms: float  # that chunk in all: what busy_ms falls short of it is what a graph could save
    share: dict[str, float]  # op -> part of its time in the middle chunk that its operations would take at the ceiling

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Failed:
    """A row that could not be measured."""

    what: str
    error: str


Row = Decode | Prefill | Failed


def decode_rows(
    engine: Engine, batches: list[int], context: int, steps: int, ceilings: Ceilings, with_breakdown: bool
) -> Iterator[Decode | Failed]:
    """Decode at several batch sizes, the largest first: sequences are dropped from one size to the next.

    The caches hold random records (`abyssal.measure.records`); tokens are drawn greedily.
    """
    context = min(context, engine.info.max_model_len - 2 * steps - WARM_UP - PROFILED - 1)
    names: list[str] = []
    try:
        names = add_running(engine, max(batches), context)
        refused = None
    except RequestError:
        names = list(running(engine))
        refused = f"no room for more than {len(names)}; raise kv_cache_bytes or, on a GPU, gpu_memory_utilization"
    for batch in sorted(batches, reverse=True):
        what = f"decode, {batch} sequences of {context}"
        if batch > len(names):
            yield Failed(what, refused or "requests have ended")
            continue
        for name in names[batch:]:
            engine.abort(name)
        names = names[:batch]
        try:
            yield _decode(engine, context, steps, ceilings, with_breakdown)
        except Exception as error:  # noqa: BLE001 the other rows are wanted all the same
            yield Failed(what, f"{type(error).__name__}: {error}")
            names = [name for name in names if name in running(engine)]
    for name in names:
        engine.abort(name)


def running(engine: Engine) -> dict[str, int]:
    """Request id -> tokens computed, of the running sequences."""
    return {seq.request.request_id: seq.num_computed for seq in engine.scheduler.running}


def _decode(engine: Engine, context: int, steps: int, ceilings: Ceilings, with_breakdown: bool) -> Decode:
    batch = len(engine.scheduler.running)
    for _ in range(WARM_UP):
        engine.step()
    contexts = list(running(engine).values())
    gc.collect()  # not while the clock runs
    ends = [time.perf_counter()]
    for _ in range(steps):
        engine.step()
        ends.append(time.perf_counter())
    assert len(engine.scheduler.running) == batch, "a request ended while it was measured"
    moved = mean_decode_bytes(stored_config(engine), engine.runner.plan, engine.runner.dtype, contexts, steps)
    host = _host_seconds(engine, steps) if engine.runner.device.type == "cuda" else None
    found = None
    if with_breakdown:
        found = profile(lambda: [engine.step() for _ in range(PROFILED)], engine.runner.device)
    return Decode(
        batch=batch,
        context=context,
        median_ms=statistics.median(np.diff(ends).tolist()) * 1e3,
        tokens_per_second=batch * steps / (ends[-1] - ends[0]),
        roof_ms=moved.total / ceilings.copy * 1e3,
        bytes=moved,
        breakdown_ms=None if found is None else _milliseconds(found.by_op, PROFILED),
        kernels_ms=None if found is None else _milliseconds(found.by_kernel, PROFILED),
        busy_ms=None if found is None else found.busy / PROFILED * 1e3,
        host_ms=None if host is None else statistics.median(host) * 1e3,
    )


def _host_seconds(engine: Engine, steps: int) -> list[float]:
    """Of steps that each begin when the one before is done on the device."""
    taken = []
    for _ in range(steps):
        begin = synchronised(engine.runner.device)
        engine.step()
        taken.append(time.perf_counter() - begin)
    return taken


def measure_prefill(engine: Engine, tokens: int, ceilings: Ceilings) -> Prefill | Failed:
    """A prefill in chunks of `max_num_batched_tokens`; of a long one some chunks, behind random records.

    The total of a sampled prefill is interpolated between its chunks.
    """
    tokens = min(tokens, engine.info.max_model_len - 1)
    chunk = min(engine.config.max_num_batched_tokens, tokens)
    starts = np.arange(0, tokens, chunk)
    device = engine.runner.device
    sampled = None if len(starts) <= FULL_CHUNKS else SAMPLES
    rounds: list[tuple[float, list[float]]] = []  # seconds in all and of each measured chunk, the first time and again
    try:
        for _ in range(2):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            rounds.append(_whole(engine, tokens) if sampled is None else _sampled(engine, starts, tokens, chunk))
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        middle = int(starts[len(starts) // 2])
        count = min(chunk, tokens - middle)
        found: list[Breakdown] = []
        _chunk(engine, middle, count, lambda run: found.append(profile(run, device)))
    except Exception as error:  # noqa: BLE001 the other rows are wanted all the same
        _abort_all(engine)
        return Failed(f"prefill of {tokens}", f"{type(error).__name__}: {error}")
    flops = prefill_flops(stored_config(engine), middle, count)
    spent = {op: sum(found[0].by_op.get(name, 0) for name in PARTS.get(op, (op,))) for op in flops}
    return Prefill(
        tokens=tokens,
        chunk=chunk,
        sampled=sampled,
        seconds=rounds[1][0],
        first_seconds=rounds[0][0],
        chunk_ms=[seconds * 1e3 for seconds in rounds[1][1]],
        peak_bytes=peak,
        breakdown_ms=_milliseconds(found[0].by_op, 1),
        kernels_ms=_milliseconds(found[0].by_kernel, 1),
        busy_ms=found[0].busy * 1e3,
        profiled_ms=found[0].total * 1e3,
        share={op: flops[op] / _ceiling(op, ceilings) / spent[op] for op in flops if spent[op]},
    )


def _ceiling(op: str, ceilings: Ceilings) -> float:
    return ceilings.fp8_matmul if op in FP8_OPS and ceilings.fp8_matmul is not None else ceilings.matmul


def _whole(engine: Engine, tokens: int) -> tuple[float, list[float]]:
    """Seconds until the first token after a prompt of `tokens`, and of each step."""
    _add_prompt(engine, tokens, seed=tokens)
    device = engine.runner.device
    ends = [synchronised(device)]
    while not engine.step():
        ends.append(time.perf_counter())
    ends.append(synchronised(device))
    _abort_all(engine)
    return ends[-1] - ends[0], np.diff(ends).tolist()


def _sampled(engine: Engine, starts: np.ndarray, tokens: int, chunk: int) -> tuple[float, list[float]]:
    """Seconds of all chunks, interpolated, and of those measured."""
    positions = starts[np.linspace(0, len(starts) - 1, SAMPLES).round().astype(int)]
    times = [_chunk(engine, int(start), min(chunk, tokens - int(start))) for start in positions]
    return float(np.interp(starts, positions, times).sum()), times


def _chunk(engine: Engine, start: int, count: int, around: Callable[[Callable[[], None]], Any] | None = None) -> float:
    """Seconds of computing tokens [start, start + count) of one sequence; `around` may run that under a profiler."""
    if start:
        add_running(engine, 1, start, count - 1, params=ONE_TOKEN)
    else:
        _add_prompt(engine, count, seed=start)

    def run() -> None:
        while not engine.step():
            pass

    begin = synchronised(engine.runner.device)
    run() if around is None else around(run)
    seconds = synchronised(engine.runner.device) - begin
    _abort_all(engine)
    return seconds


def _add_prompt(engine: Engine, tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, engine.info.vocab_size, (tokens,), generator=generator).tolist()
    engine.add(EngineRequest("prefill", ids, ONE_TOKEN))


def _abort_all(engine: Engine) -> None:
    for name in list(running(engine)):
        engine.abort(name)


def _milliseconds(seconds: dict[str, float], steps: int) -> dict[str, float]:
    return {name: value / steps * 1e3 for name, value in seconds.items()}


def stored_config(engine: Engine) -> ModelConfig:
    """The model's config, without its quantisation where the loader dequantised the weights."""
    config = engine.runner.model_config
    return config if engine.runner.quantised else replace(config, quant=None)


def as_dict(row: Row) -> dict[str, Any]:
    """For JSON."""
    extra = {"share": row.share} if isinstance(row, Decode) else {}
    if isinstance(row, Prefill):
        extra = {"tokens_per_second": row.tokens_per_second}
    return {"kind": type(row).__name__.lower(), **asdict(row), **extra}
