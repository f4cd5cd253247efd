"""Host memory for preempted sequences: when copying the caches out and back costs less than computing them again."""

from __future__ import annotations

import time
from collections.abc import Callable

from abyssal.engine.sequence import Sequence
from abyssal.kv.handover import export, restore
from abyssal.kv.planner import sequence_cost
from abyssal.kv.pool import KVCache
from abyssal.kv.specs import BLOCK_TOKENS, CachePlan

FIRST_BYTES_PER_SECOND = 5e9  # guess of the copy speed until one was measured
SMOOTHING = 0.2  # weight of the newest measurement
MEASURED_TOKENS = 64  # fewer say nothing about the speed of a prefill


class SwapSpace:
    """Saved sequences of one engine, at most `max_bytes` in all."""

    def __init__(self, cache: KVCache, plan: CachePlan, max_bytes: int, agree: Callable[[bool], bool] = bool) -> None:
        """`agree` gives one answer to all ranks of a replica, which measure different speeds."""
        self._agree = agree
        self.cache, self.plan, self.max_bytes = cache, plan, max_bytes
        self.used_bytes = 0
        self.num_saved = 0  # since the start
        self._bytes_per_second = FIRST_BYTES_PER_SECOND
        self._tokens_per_second: float | None = None

    def measure_step(self, tokens: int, seconds: float) -> None:
        """A step computed `tokens` tokens: how fast a sequence would be computed again."""
        if tokens >= MEASURED_TOKENS:
            self._tokens_per_second = _smooth(self._tokens_per_second, tokens / seconds)

    def pays(self, seq: Sequence) -> bool:
        """Whether to copy the running `seq` rather than to compute it again.

        Blocks that other sequences use stay where they are, so they need not be computed again.
        """
        if self._tokens_per_second is None or seq.num_computed == 0:
            return False
        size = self._bytes(seq.num_computed)
        shared = sum(block.num_users > 1 for block in seq.cache.blocks) * BLOCK_TOKENS
        computing = (seq.num_computed - shared) / self._tokens_per_second
        return size <= self.max_bytes - self.used_bytes and self._agree(2 * size / self._bytes_per_second < computing)

    def save(self, seq: Sequence) -> None:
        """Copy what the caches hold of `seq` to the host."""
        self.cache.wait()  # a step under way, which is no part of the copy
        start = time.perf_counter()
        seq.saved = export(self.cache, seq.cache, seq.token_ids)
        size = seq.saved.payload_bytes
        self._bytes_per_second = _smooth(self._bytes_per_second, size / (time.perf_counter() - start))
        self.used_bytes += size
        self.num_saved += 1

    def restore(self, seq: Sequence) -> bool:
        """Copy `seq` back; False, and nothing changed, when pages are short. The copy stays until it is dropped."""
        assert seq.saved is not None
        if not restore(self.cache, seq.cache, seq.saved):
            return False
        seq.num_computed = seq.saved.num_tokens
        return True

    def drop(self, seq: Sequence) -> None:
        """Forget what is saved of `seq`, if anything."""
        if seq.saved is not None:
            self.used_bytes -= seq.saved.payload_bytes
            seq.saved = None

    def _bytes(self, tokens: int) -> int:
        return sum(cost.payload for cost in sequence_cost(self.plan, tokens))


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
