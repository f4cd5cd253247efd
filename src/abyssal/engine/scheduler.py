"""Which sequences compute how many tokens in the next step.

Running sequences go first, those that decode before those that prefill, then waiting ones in order of arrival. When pages run
out, the sequence admitted last gives up its pages and waits; its caches are copied to the host and back, or computed again from
its tokens, whichever costs less.
"""

from __future__ import annotations

from collections import deque

from abyssal.engine.sequence import Sequence
from abyssal.engine.swap import SwapSpace
from abyssal.kv.pool import KVCache

FIRST_PATIENCE = 64  # steps that fit before a reduced budget grows; twice as many after every failure
REFUSAL_STEPS = 8  # for which a refusal stands while the same sequences run: to look up a long prefix again takes milliseconds


class TokenBudget:
    """Most tokens of a step: halved when one runs out of memory, doubled again after many that fit.

    Each failure doubles how many these are, so that a limit which stays is tried ever less often: what a failed step held is computed
    again, and would never be done if the next failure always came first.
    """

    def __init__(self, most: int) -> None:
        self.most = self.tokens = most
        self._patience, self._fitting = FIRST_PATIENCE // 2, 0

    def exceeded(self, tokens: int) -> None:
        """A step of `tokens` ran out of memory."""
        self.tokens = max(1, min(self.tokens, tokens) // 2)
        self._patience, self._fitting = 2 * self._patience, 0

    def fits(self) -> None:
        """A step was computed."""
        self._fitting += self.tokens < self.most
        if self._fitting >= self._patience:
            self.tokens, self._fitting = min(self.most, 2 * self.tokens), 0


class Scheduler:
    def __init__(self, cache: KVCache, swap: SwapSpace, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.cache, self.swap = cache, swap
        self.budget = TokenBudget(max_num_batched_tokens)
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0
        self._refused: tuple[Sequence, list[Sequence]] | None = None  # found no room beside these
        self._refusal_age = 0

    def schedule(self) -> list[tuple[Sequence, int]]:
        """Sequences and token counts of the next step, single tokens first; their pages are allocated.

        Nothing where pages are short while tokens are under way: each of them may be the last of its sequence.
        """
        plan: dict[Sequence, int] = {}
        preempted = self.num_preemptions
        single = [seq for seq in self.running if seq.num_remaining == 1][: self.budget.tokens]
        if self.cache.allocate_next([seq.cache for seq in single], [seq.num_computed for seq in single]):
            plan |= dict.fromkeys(single, 1)
        others = [seq for seq in self.running if seq not in plan]
        for seq in sorted(others, key=lambda s: s.num_remaining > 1):
            count = self._fit(seq, plan) if seq in self.running else 0  # a sequence before it may have pushed it out
            if not count:
                continue
            fits = self.cache.allocate(seq.cache, seq.num_computed, seq.num_computed + count)
            if not fits and any(s.is_drawing for s in self.running):
                return []
            if fits or self._allocate_or_preempt(seq, count, plan):
                plan[seq] = count
        if preempted == self.num_preemptions:
            self._admit(plan)
        return sorted(plan.items(), key=lambda item: item[1] > 1)

    def _fit(self, seq: Sequence, plan: dict[Sequence, int]) -> int:
        return min(seq.num_remaining, self.budget.tokens - sum(plan.values()))

    def _allocate_or_preempt(self, seq: Sequence, count: int, plan: dict[Sequence, int]) -> bool:
        while not self.cache.allocate(seq.cache, seq.num_computed, seq.num_computed + count):
            victim = self.running[-1]
            self.preempt(victim)
            plan.pop(victim, None)
            if victim is seq:
                return False
        return True

    def _admit(self, plan: dict[Sequence, int]) -> None:
        while self.waiting and len(self.running) < self.max_num_seqs and self._fit(self.waiting[0], plan):
            seq = self.waiting[0]
            if self._refusal_stands(seq):
                return
            if seq.saved is not None:
                fits = self.has_room(seq) and self.swap.restore(seq)
            else:
                if seq.may_reuse:
                    seq.num_computed = self.cache.reuse(seq.cache, seq.token_ids)
                fits = self.has_room(seq)
            count = self._fit(seq, plan)
            if not fits or not self.cache.allocate(seq.cache, seq.num_computed, seq.num_computed + count):
                self._release(seq)
                self._refused, self._refusal_age = (seq, self.running.copy()), 0
                return
            if seq.num_output == 0:  # of one that comes back, what it had computed itself does not count
                seq.num_cached = min(seq.num_cached, seq.num_computed) if seq.has_run else seq.num_computed
            seq.has_run = True
            self.swap.drop(seq)
            self.running.append(self.waiting.popleft())
            plan[seq] = count

    def _refusal_stands(self, seq: Sequence) -> bool:
        """Beside nobody it does not: who has the pages then, and gives them back, is unknown here (`engine.disaggregation`)."""
        self._refusal_age += 1
        return bool(self.running) and self._refused == (seq, self.running) and self._refusal_age < REFUSAL_STEPS

    def has_room(self, newcomer: Sequence) -> bool:
        """Whether all tokens known so far of `newcomer` and of the running sequences would fit at the same time.

        Admission by the first chunk alone would let sequences push each other out and be computed over and over.
        """
        if not self.running:
            return True
        claims = [self.cache.missing_pages(s.cache, s.num_computed + s.num_remaining + 1) for s in (*self.running, newcomer)]
        return all(sum(claim[bucket] for claim in claims) <= pool.num_available for bucket, pool in self.cache.pools.items())

    def preempt(self, seq: Sequence) -> None:
        """Take the pages of the running `seq`; it waits, first in line, to be copied back or computed again."""
        self.running.remove(seq)
        if self.swap.pays(seq):
            self.swap.save(seq)
        self._release(seq)
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def restart(self, seqs: list[Sequence]) -> None:
        """Take the pages of running `seqs`, whose records cannot be relied on; they wait, first in line, to be computed again."""
        for seq in sorted(seqs, key=self.running.index, reverse=True):
            self.running.remove(seq)
            self._release(seq)
            self.waiting.appendleft(seq)
        self.num_preemptions += len(seqs)

    def remove(self, seq: Sequence) -> None:
        """Forget `seq` and return its pages."""
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
        self.swap.drop(seq)
        self.cache.free(seq.cache)

    def _release(self, seq: Sequence) -> None:
        self.cache.free(seq.cache)
        seq.num_computed = 0
