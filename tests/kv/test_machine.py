"""Everything that can happen to sequences in the pools, in any order: no page is lost, owned twice, or read after its return."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from abyssal.kv.handover import HandOver, export, restore
from abyssal.kv.pool import NO_PAGE, KVCache, SequenceCache
from abyssal.kv.prefix import PrefixIndex, block_keys
from abyssal.kv.specs import BLOCK_TOKENS, ROLL_BACK, plan_caches
from abyssal.model_config import parse_model_config
from tests.support.small_model import small_config, v41_config_dict
from tests.support.tagging import TaggingModel

CPU = torch.device("cpu")
CONFIG = small_config([0, 4, 128, 4])
V41_CONFIG = parse_model_config(v41_config_dict([0, 2, 2, 1, 1], [1, 3], [1, 2, 3, 4]))
PAGES = {"main": 150, "index": 60, "small": 14}
V41_PAGES = {"main": 180, "index": 60}
LONGEST = 800
COMMON = random.Random(0).choices(range(150), k=LONGEST)


def text(parts_at: int, seed: int) -> list[int]:
    """Texts begin alike and part at a position."""
    rng = random.Random(seed)
    return COMMON[:parts_at] + [150 + rng.randrange(10) for _ in range(LONGEST - parts_at)]


@dataclass(eq=False)
class Live:
    cache: KVCache
    seq: SequenceCache
    tokens: list[int]
    came_with: int = 0  # tokens that were not computed here
    furthest: int = 0  # end of the longest step

    @property
    def final(self) -> int:
        return max(self.came_with, self.furthest - ROLL_BACK, len(self.seq.blocks) * BLOCK_TOKENS)


class KVMachine(RuleBasedStateMachine):
    """Two engines' caches. Sequences grow by steps of several, with drafts; begin at known prefixes; pause, resume, move and end."""

    prefix = True
    config = CONFIG
    pages = PAGES

    def __init__(self) -> None:
        super().__init__()
        self.model = TaggingModel(self.config)
        self.live: list[Live] = []
        self.paused: list[tuple[KVCache, list[int], int, HandOver | None]] = []  # tokens, and how many were computed
        self.seed = 0

    @initialize(small=st.booleans())
    def build(self, small: bool) -> None:
        plan = plan_caches(self.config, "fp32", "bf16", "index_bf16")
        sizes = (self.pages, {name: count * 2 // 3 for name, count in self.pages.items()} if small else self.pages)
        self.caches = [KVCache(plan, s, CPU, PrefixIndex("model") if self.prefix else None, "model") for s in sizes]

    def pick(self, which: int) -> Live:
        return self.live[which % len(self.live)]

    def begin(self, cache: KVCache, tokens: list[int], length: int) -> bool:
        """A new sequence of `tokens` from the longest known prefix on, up to token `length`; False: no room, and nothing is taken."""
        live = Live(cache, cache.new_sequence(), tokens)
        known = cache.reuse(live.seq, tokens[:length])
        live.came_with = live.furthest = known
        assert known < length and known % BLOCK_TOKENS == 0 and (self.prefix or known == 0)
        if self.compute([live], [length - known], [0]):
            self.live.append(live)
            return True
        cache.free(live.seq)
        return False

    def compute(self, lives: list[Live], counts: list[int], drafts: list[int]) -> bool:
        """One step of sequences of one cache: `counts` tokens of each, and wrong `drafts` after them, taken back at once."""
        steps = []
        for live, count, wrong in zip(lives, counts, drafts, strict=True):
            end = live.seq.num_tokens + count
            tokens = live.tokens[:end] + [159] * wrong
            before = {name: table.pages.copy() for name, table in live.seq.tables.items()}
            if live.cache.allocate(live.seq, live.seq.num_tokens, end + wrong):
                steps.append((live.seq, tokens, end + wrong))
            else:
                assert all(np.array_equal(before[name], table.pages) for name, table in live.seq.tables.items())
        if not steps:
            return False
        self.model(lives[0].cache, steps)
        for live, count, wrong in zip(lives, counts, drafts, strict=True):
            if any(live.seq is seq for seq, _, _ in steps):
                live.furthest = max(live.furthest, live.seq.num_tokens + count + wrong)
                live.cache.commit(live.seq, live.tokens, live.seq.num_tokens + count, rejected=wrong)
        return True

    @rule(
        cache=st.integers(0, 1),
        parts_at=st.sampled_from([600, 512, 300, 256, 255]),
        length=st.one_of(st.sampled_from([257, 300, 513, 600]), st.integers(1, 300)),
    )
    def start(self, cache: int, parts_at: int, length: int) -> None:
        self.begin(self.caches[cache], text(parts_at, seed=parts_at), length)

    @precondition(lambda self: self.live)
    @rule(
        which=st.integers(0, 99),
        count=st.one_of(st.integers(1, 9), st.sampled_from([120, 128, 250, 256])),
        second=st.integers(0, 9),
        drafts=st.tuples(st.integers(0, ROLL_BACK), st.integers(0, ROLL_BACK)),
    )
    def step(self, which: int, count: int, second: int, drafts: tuple[int, int]) -> None:
        first = self.pick(which)
        others = [live for live in self.live if live.cache is first.cache and live is not first]
        lives = [first, *others[:1]] if second else [first]
        counts = [min(n, LONGEST - live.seq.num_tokens) for n, live in zip((count, second), lives, strict=False)]
        if all(counts):
            self.compute(lives, counts, list(drafts[: len(lives)]))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), tokens=st.integers(1, ROLL_BACK + 1))
    def roll_back(self, which: int, tokens: int) -> None:
        """Other tokens come instead."""
        live = self.pick(which)
        end = live.seq.num_tokens - tokens
        assert live.seq.final == live.final
        if end < live.final:
            with pytest.raises(ValueError, match="final"):
                live.cache.roll_back(live.seq, tokens)
            return
        live.cache.roll_back(live.seq, tokens)
        self.seed += 1
        live.tokens = live.tokens[:end] + text(0, self.seed)[end:]

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def trim(self, which: int) -> None:
        live = self.pick(which)
        live.cache.release_unneeded(live.seq, live.seq.num_tokens)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        live = self.pick(which)
        self.live.remove(live)
        live.cache.free(live.seq)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), save=st.booleans())
    def preempt(self, which: int, save: bool) -> None:
        """Give up the pages, with or without a copy outside of the pools."""
        live = self.pick(which)
        saved = export(live.cache, live.seq, live.tokens) if save and live.seq.num_tokens else None
        self.live.remove(live)
        self.paused.append((live.cache, live.tokens, live.seq.num_tokens, saved))
        live.cache.free(live.seq)

    @precondition(lambda self: self.paused)
    @rule(which=st.integers(0, 99))
    def resume(self, which: int) -> None:
        cache, tokens, length, saved = self.paused.pop(which % len(self.paused))
        if saved is None:
            done = length == 0 or self.begin(cache, tokens, length)
        elif done := restore(cache, seq := cache.new_sequence(), saved):
            self.live.append(Live(cache, seq, tokens, seq.num_tokens, seq.num_tokens))
        if not done:
            self.paused.append((cache, tokens, length, saved))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), stays=st.booleans())
    def move(self, which: int, stays: bool) -> None:
        """To the other engine, over a wire."""
        live = self.pick(which)
        if live.seq.num_tokens == 0:
            return
        other = self.caches[self.caches[0] is live.cache]
        handed = HandOver.from_bytes(export(live.cache, live.seq, live.tokens).to_bytes())
        free = {name: pool.num_available for name, pool in other.pools.items()}
        if not restore(other, seq := other.new_sequence(), handed):
            assert free == {name: pool.num_available for name, pool in other.pools.items()}
            return
        self.live.append(Live(other, seq, live.tokens, seq.num_tokens, seq.num_tokens))
        if not stays:
            self.live.remove(live)
            live.cache.free(live.seq)

    @rule(cache=st.integers(0, 1), which=st.integers(0, 99), part=st.floats(0, 1))
    def evict(self, cache: int, which: int, part: float) -> None:
        """Memory asks for pages that only the prefix index holds."""
        bucket = list(self.pages)[which % len(self.pages)]
        pool = self.caches[cache].pools[bucket]
        wanted = int(pool.num_available * part)
        if self.prefix:
            self.caches[cache]._make_room(bucket, wanted)
        assert pool.num_free >= wanted or not self.prefix

    @invariant()
    def every_holder_is_counted_and_free_pages_are_poisoned(self) -> None:
        for cache in self.caches:
            blocks = list(cache.prefix._blocks.values()) if cache.prefix else []
            mine = [live.seq for live in self.live if live.cache is cache]
            used = dict.fromkeys(cache.specs, 0)
            for bucket, pool in cache.pools.items():
                sequences, index = np.zeros(pool.num_pages + 1, int), np.zeros(pool.num_pages + 1, int)
                for name in [n for n, s in cache.specs.items() if s.bucket == bucket]:
                    held = np.zeros_like(sequences)
                    for seq in mine:
                        np.add.at(held, seq.tables[name].pages.ravel(), 1)
                    held[NO_PAGE] = 0
                    used[name] = int((held > 0).sum())
                    assert not (sequences.astype(bool) & held.astype(bool)).any(), "a page belongs to two kinds"
                    sequences += held
                    for pages in (p for block in blocks for p in (block.pages, block.windows or {})):
                        np.add.at(index, pages.get(name, np.empty((0,), int)).ravel(), 1)
                assert np.array_equal(pool._holders, sequences + index) and np.array_equal(pool._kept, index)
                free = np.flatnonzero(pool._holders == 0)[1:]
                assert sorted(pool._free) == free.tolist() and index[NO_PAGE] == 0
                assert pool.num_idle == int(((index > 0) & (sequences == 0)).sum())
                assert not pool.data[NO_PAGE].any()
                pool.data[torch.from_numpy(free)] = 0xFF
            assert used == cache.used_by_kind

    @invariant()
    def only_known_prefixes_are_shared(self) -> None:
        """A page with two sequences holds tokens that both have."""
        for cache in self.caches:
            owners: dict[tuple[str, int], Live] = {}
            for live in (live for live in self.live if live.cache is cache):
                for name, table in live.seq.tables.items():
                    spec = cache.specs[name]
                    for column, page in enumerate(table.pages[0].tolist()):
                        if page == NO_PAGE:
                            continue
                        other = owners.setdefault((spec.bucket, page), live)
                        end = (table.first_block + column + 1) * spec.entries_per_page * spec.ratio
                        assert other is live or (self.prefix and other.tokens[:end] == live.tokens[:end]), name
                block_keys(keys := [], live.seq.root, live.tokens[: len(live.seq.blocks) * BLOCK_TOKENS])
                assert [block.key for block in live.seq.blocks] == keys, "a block is known by other tokens than it holds"

    def teardown(self) -> None:
        """What is left can be had to the last page, by any kind."""
        for live in self.live:
            live.cache.free(live.seq)
        for cache in self.caches:
            assert not any(cache.used_by_kind.values())
            for bucket, pool in cache.pools.items():
                assert pool.num_available == pool.num_pages
                if self.prefix:
                    cache._make_room(bucket, pool.num_pages)
                pool.give_back(pool.take(pool.num_pages))
            assert not cache.prefix


class KVMachineWithoutPrefix(KVMachine):
    prefix = False


class V41Machine(KVMachine):
    config = V41_CONFIG
    pages = V41_PAGES


MACHINES = [KVMachine, KVMachineWithoutPrefix, V41Machine]


QUICK = settings(max_examples=15, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("machine", MACHINES)
def test_any_order_of_events(machine: type[KVMachine]) -> None:
    run_state_machine_as_test(machine, settings=QUICK)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", MACHINES)
def test_any_order_of_many_events(machine: type[KVMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(QUICK, max_examples=1000, stateful_step_count=60))
