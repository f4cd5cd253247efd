"""Admission against what the pools really hold, without computing anything."""

from __future__ import annotations

import itertools

import pytest
import torch

from abyssal.engine.request import EngineRequest, SamplingParams
from abyssal.engine.sampler import SamplerState
from abyssal.engine.scheduler import REFUSAL_STEPS, Scheduler, TokenBudget
from abyssal.engine.sequence import Sequence
from abyssal.engine.swap import SwapSpace
from abyssal.errors import ConfigError
from abyssal.kv.planner import divide_budget
from abyssal.kv.pool import KVCache
from abyssal.kv.specs import Bucket, CachePlan, plan_caches
from tests.support.small_model import small_config

CPU = torch.device("cpu")
RELEASED = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "sliding_window": 128}
PLAN = plan_caches(small_config([0, 0, 4, 128, 4, 128], **RELEASED), "v4", "v4", "index_fp8")


def scheduler_of(pages: dict[Bucket, int], step_tokens: int, lengths: list[int]) -> Scheduler:
    """A scheduler with a waiting sequence of each length."""
    cache = KVCache(PLAN, pages, CPU)
    scheduler = Scheduler(cache, SwapSpace(cache, PLAN, max_bytes=0), step_tokens, max_num_seqs=64)
    for i, length in enumerate(lengths):
        request = EngineRequest(str(i), [1] * length, SamplingParams())
        sampler = SamplerState(request.params, request.prompt_ids, [], fallback_seed=(0, i))
        scheduler.waiting.append(Sequence(request, scheduler.cache.new_sequence(), sampler, 1, list(request.prompt_ids)))
    return scheduler


def compute(scheduler: Scheduler) -> list[Sequence]:
    """One step in which nothing is sampled: the sequences that took part."""
    scheduled = scheduler.schedule()
    for seq, count in scheduled:
        seq.num_computed += count
        scheduler.cache.commit(seq.cache, seq.token_ids, seq.num_computed)
        scheduler.cache.release_unneeded(seq.cache, seq.num_computed)
    return [seq for seq, _ in scheduled]


def holds(plan: CachePlan, pages: dict[Bucket, int], tokens: int, step: int) -> int:
    """How many sequences of `tokens` tokens pools of so many pages hold, computed one after another."""
    cache = KVCache(plan, pages, CPU)
    for count in itertools.count():
        seq = cache.new_sequence()
        for start in range(0, tokens, step):
            end = min(start + step, tokens)
            if not cache.allocate(seq, start, end):
                return count
            cache.commit(seq, [], end)
            cache.release_unneeded(seq, end)
    raise AssertionError("endless pools")


@pytest.mark.parametrize("tokens", [1000, 6000])
def test_m05_the_schedulers_limit_is_that_of_the_pools(tokens: int) -> None:
    """M05: sequences that are admitted at once, against those that the pools hold."""
    pages = divide_budget(PLAN, 80 << 20, 64, 512, 8192).num_pages
    scheduler = scheduler_of(pages, 512, [tokens] * 64)
    while compute(scheduler):
        pass
    real = holds(PLAN, pages, tokens, 512)
    assert 3 < real < 64 and 0.9 * real <= len(scheduler.running) <= real and not scheduler.num_preemptions


@pytest.mark.parametrize("budget", [32768, 65536])
def test_b07_a_prompt_longer_than_the_token_budget_makes_progress(budget: int) -> None:
    """B07: prompts of 33K, 52K and 64K tokens; a cache that cannot take such steps is refused, with the numbers."""
    lengths = [33_000, 52_000, 64_000]
    with pytest.raises(ConfigError, match=f"max_num_batched_tokens={budget} .*lower max_num_batched_tokens"):
        divide_budget(PLAN, 60 << 20, 64, budget, 65536)
    scheduler = scheduler_of(divide_budget(PLAN, 600 << 20, 64, budget, 65536).num_pages, budget, lengths)
    while scheduler.waiting or any(seq.num_remaining for seq in scheduler.running):
        done = compute(scheduler)
        assert done, "nothing runs while something waits"
        for seq in [seq for seq in scheduler.running if not seq.num_remaining]:
            lengths.remove(len(seq.token_ids))
            scheduler.remove(seq)
    assert not lengths
    assert all(pool.num_free == pool.num_pages for pool in scheduler.cache.pools.values())


def test_a_reduced_budget_grows_ever_more_slowly_after_failures() -> None:
    budget = TokenBudget(96)
    budget.fits()
    assert budget.tokens == 96
    budget.exceeded(90)
    assert budget.tokens == 45, "half of what was too much"

    def steps_until_it_grows() -> int:
        before = budget.tokens
        for step in range(1, 10_000):
            budget.fits()
            if budget.tokens > before:
                assert budget.tokens == min(96, 2 * before)
                return step
        raise AssertionError("it never grew")

    patience = []
    for _ in range(4):
        patience.append(steps_until_it_grows())
        while budget.tokens < 96:
            steps_until_it_grows()
        budget.exceeded(96)
    assert patience == sorted(set(patience)) and patience[-1] == 8 * patience[0], "or a limit that stays would be hit for ever"
    for _ in range(9):
        budget.exceeded(1)
    assert budget.tokens == 1


def test_a_refused_sequence_is_looked_up_seldom_and_admitted_as_soon_as_another_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scheduler_of(divide_budget(PLAN, 80 << 20, 64, 512, 8192).num_pages, 512, [6000] * 64)
    while compute(scheduler):
        pass
    lookups, reuse = [], scheduler.cache.reuse
    monkeypatch.setattr(scheduler.cache, "reuse", lambda seq, ids: lookups.append(seq) or reuse(seq, ids))
    first, refused = scheduler.running[0], scheduler.waiting[0]
    for _ in range(5 * REFUSAL_STEPS):
        scheduler.schedule()
    assert len(lookups) == 5 and all(seq is refused.cache for seq in lookups)
    scheduler.remove(first)
    assert refused in compute(scheduler)
