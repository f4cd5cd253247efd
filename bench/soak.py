"""A long run of random requests against one engine, which must end as clean as it began.

    python -m bench.soak [--seconds 420] [--seed 0] [--set NAME=VALUE ...]

Lengths, sampling parameters, common prefixes and aborts are random; the pool is so small that sequences are preempted. A fixed greedy
request runs again and again, and its tokens are compared. In the middle and in the end the engine is drained: no request has failed,
every page is back, and memory has not grown from one to the other.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import resource
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from abyssal.checkpoint.source import resolve_model
from abyssal.config import EngineConfig, from_sources, resolve
from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest, SamplingParams
from abyssal.kv.planner import block_bytes, fixed_bytes
from abyssal.kv.specs import BLOCK_TOKENS, plan_caches
from abyssal.model_config import load_model_config
from abyssal.ops._select import find_gpu

SEQUENCES, LONGEST, MOST_NEW, PREFIXES = 16, 3000, 300, 4
ABORT_SHARE, PREFIX_SHARE = 0.15, 0.5
CANARY_TOKENS = 24
GROWTH = {
    "cuda": 1 << 20,
    "cpu": 96 << 20,
}  # bytes of memory that the second half may take beyond the first; a process has caches


@dataclass
class Counts:
    """What happened."""

    finished: int = 0
    aborted: int = 0
    tokens: int = 0
    steps: int = 0
    canaries: int = 0
    other_canaries: int = 0  # whose tokens were not those of the first
    errors: list[str] = field(default_factory=list)


class Soak:
    """Requests and their fates."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.rng, self.counts = engine, random.Random(seed), Counts()
        self.longest = min(LONGEST, engine.info.max_model_len - MOST_NEW - 1)
        self._prefixes = [self._ids(self.longest // 2) for _ in range(PREFIXES)]
        self._numbers = itertools.count()
        self._lives: dict[str, int | None] = {}  # outstanding requests -> tokens after which they are aborted
        self._got: dict[str, list[int]] = {}
        self._canary_prompt, self.canary = self._ids(self.longest // 4), []

    def _ids(self, count: int) -> list[int]:
        return [self.rng.randrange(self.engine.info.vocab_size) for _ in range(count)]

    def run(self, seconds: float) -> None:
        """Keep the engine busy for so long, then let it finish."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            while len(self._lives) < 2 * SEQUENCES:
                self._add()
            self._step()
        while self.engine.has_unfinished():
            self._step()
        assert not self._lives, f"requests without an end: {sorted(self._lives)}"

    def _add(self) -> None:
        number = next(self._numbers)
        if number % 20 == 0:
            name, ids = f"canary-{number}", self._canary_prompt
            params = SamplingParams(temperature=0, max_tokens=CANARY_TOKENS, ignore_eos=True)
            self._lives[name] = None
        else:
            name, ids, params = f"r{number}", self._prompt(), self._params()
            self._lives[name] = self.rng.randrange(params.max_tokens or 1) if self.rng.random() < ABORT_SHARE else None
        self._got[name] = []
        self.engine.add(EngineRequest(name, ids, params))

    def _prompt(self) -> list[int]:
        if self.rng.random() < PREFIX_SHARE:
            prefix = self.rng.choice(self._prefixes)
            prefix = prefix[: self.rng.randrange(1, len(prefix))]
            return prefix + self._ids(self.rng.randrange(1, self.longest // 8))
        return self._ids(int(self.longest ** self.rng.random()))  # as many short ones as long ones

    def _params(self) -> SamplingParams:
        rng = self.rng
        return SamplingParams(
            temperature=rng.choice([0, 0, 0.7, 1.5]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 0, 40]),
            min_p=rng.choice([0.0, 0.05]),
            presence_penalty=rng.choice([0.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.1]),
            seed=rng.choice([None, 5]),
            max_tokens=rng.randrange(1, MOST_NEW),
            ignore_eos=rng.random() < 0.8,
            logprobs=rng.choice([None, None, 3]),
            prompt_logprobs=rng.choice([None] * 9 + [1]),
        )

    def _step(self) -> None:
        self.counts.steps += 1
        for update in self.engine.step():
            name = update.request_id
            self._got[name] += update.token_ids
            self.counts.tokens += len(update.token_ids)
            if update.error is not None:
                self.counts.errors.append(f"{name}: {update.error}")
            if update.finish_reason is not None:
                self._end(name)
        for name, limit in list(self._lives.items()):
            if limit is not None and len(self._got[name]) >= limit and (limit or self.rng.random() < 0.05):
                self.engine.abort(name)
                self.counts.aborted += 1
                del self._lives[name], self._got[name]

    def _end(self, name: str) -> None:
        del self._lives[name]
        got = self._got.pop(name)
        self.counts.finished += 1
        if name.startswith("canary"):
            self.canary = self.canary or got
            self.counts.canaries += 1
            self.counts.other_canaries += got != self.canary

    def assert_drained(self) -> None:
        stats = self.engine.stats()
        assert not self.counts.errors, self.counts.errors[:5]
        assert stats.pages_free == stats.pages_total, f"pages lost: {stats.pages_free} of {stats.pages_total} are free"
        assert not any(stats.pages_by_kind.values()), stats.pages_by_kind
        assert stats.num_running == stats.num_waiting == 0 and self.engine.swap.used_bytes == 0


def small_pool(options: dict[str, Any]) -> EngineConfig:
    """`options` with caches for about half of the sequences that may run, unless they say otherwise."""
    config = from_sources(options, {})
    if config.kv_cache_bytes is not None:
        return config
    model = load_model_config(resolve_model(config.model))
    resolved = resolve(config, model, torch.cuda.is_available(), find_gpu())
    plan = plan_caches(model, *resolved.record_layouts)
    windows = config.max_num_seqs * fixed_bytes(plan)
    return from_sources(options | {"kv_cache_bytes": windows + 4 * -(-LONGEST // BLOCK_TOKENS) * block_bytes(plan)}, {})


def memory(engine: Engine) -> int:
    """Bytes in use: of the GPU by tensors, or on a CPU the most that this process ever had."""
    gc.collect()
    if engine.runner.device.type == "cuda":
        return torch.cuda.memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def soak(options: dict[str, Any], seconds: float, seed: int, exact: bool) -> Counts:
    """Run, drain and check; `exact`: the repeated greedy request gives the same tokens in every company.

    Raises:
        AssertionError: something is left over, has failed, or was never tried.
    """
    engine = Engine(
        small_pool({"max_num_seqs": SEQUENCES, "max_num_batched_tokens": 512, "max_model_len": LONGEST + 400} | options)
    )
    run, used = Soak(engine, seed), []
    for _ in range(2):
        run.run(seconds / 2)
        run.assert_drained()
        used.append(memory(engine))
    counts, stats = run.counts, engine.stats()
    print(f"{counts}\n{stats}\nmemory after each half: {used}")
    growth = used[1] - used[0]
    assert growth <= GROWTH[engine.runner.device.type], f"memory grew by {growth} bytes from {used[0]}"
    tried = {"aborts": counts.aborted, "preemptions": stats.num_preemptions, "prefix hits": stats.cached_tokens}
    assert all(tried.values()) and counts.canaries > 1, f"not everything was tried: {tried}"
    assert not exact or not counts.other_canaries, f"{counts.other_canaries} of {counts.canaries} repeated requests differ"
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exact", action="store_true", help="fail if the repeated greedy request ever gives other tokens")
    parser.add_argument("--set", metavar="NAME=VALUE", nargs="*", default=[], help="engine options")
    args = parser.parse_args()
    counts = soak(dict(pair.split("=", 1) for pair in args.set), args.seconds, args.seed, args.exact)
    print(f"clean: {counts.finished} finished, {counts.aborted} aborted, {counts.tokens} tokens in {counts.steps} steps")


if __name__ == "__main__":
    main()
