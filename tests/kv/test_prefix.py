"""Prefix reuse in the pools: what is shared stays as it is, no page is lost, and memory comes back when it is asked for."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from abyssal.kv.planner import divide_budget, fitting_sequences, sequence_cost
from abyssal.kv.pool import NO_PAGE, KVCache, PagePool, SequenceCache
from abyssal.kv.prefix import PrefixIndex
from abyssal.kv.specs import BLOCK_TOKENS, plan_caches
from tests.support.small_model import small_config

CPU = torch.device("cpu")
PLAN = plan_caches(small_config([0, 4, 128, 4]), "fp32", "fp32", "index_bf16")
ROOM = {"main": 400, "index": 100, "small": 60}


def cache_of(pages: dict[str, int]) -> KVCache:
    return KVCache(PLAN, pages, CPU, PrefixIndex("model"))


def computed(cache: KVCache, tokens: list[int], salt: str | None = None, step: int = 10**9) -> SequenceCache:
    """A sequence that computed `tokens` in steps, reusing what is known."""
    seq = cache.new_sequence(salt)
    start = cache.reuse(seq, tokens)
    while start < len(tokens):
        end = min(start + step, len(tokens))
        assert cache.allocate(seq, start, end)
        cache.commit(seq, tokens, end)
        cache.release_unneeded(seq, end)
        start = end
    return seq


def reusable(cache: KVCache, tokens: list[int], salt: str | None = None) -> int:
    seq = cache.new_sequence(salt)
    try:
        return cache.reuse(seq, tokens)
    finally:
        cache.free(seq)


TOKENS = list(range(1000, 3000))


@pytest.mark.parametrize("step", [1, 100, 256, 600, 10**9])
def test_every_block_end_can_begin_a_sequence_however_the_prefill_was_cut(step):
    cache = cache_of(ROOM)
    cache.free(computed(cache, TOKENS[:1100], step=step))
    for length in (1, 255, 256, 257, 512, 513, 900, 1024, 1025, 1100):
        assert reusable(cache, TOKENS[:length]) == (length - 1) // 256 * 256
    for changed in (0, 255, 256, 700):
        other = [*TOKENS[:changed], 5, *TOKENS[changed + 1 : 1100]]
        assert reusable(cache, other) == changed // 256 * 256


def test_salts_and_other_models_share_nothing():
    cache = cache_of(ROOM)
    cache.free(computed(cache, TOKENS[:600], salt="a"))
    assert reusable(cache, TOKENS[:600], "a") == 512
    assert reusable(cache, TOKENS[:600]) == reusable(cache, TOKENS[:600], "b") == 0
    assert PrefixIndex("model").root("a") != PrefixIndex("other").root("a") != PrefixIndex("other").root(None)


def test_equal_blocks_computed_twice_are_held_once():
    cache = cache_of(ROOM)
    first, second = cache.new_sequence(), cache.new_sequence()
    for seq in (first, second):
        assert cache.allocate(seq, 0, 600)
    used = dict(cache.used_by_kind)
    for seq in (first, second):
        cache.commit(seq, TOKENS[:600], 600)
    for name, spec in cache.specs.items():
        if spec.lifetime == "context":
            per_block = 256 // spec.ratio // spec.entries_per_page
            assert cache.used_by_kind[name] == used[name] - 2 * per_block * len(spec.layers)
            shared = first.tables[name].pages[:, : 2 * per_block]
            assert np.array_equal(shared, second.tables[name].pages[:, : 2 * per_block])
    cache.free(first), cache.free(second)
    assert not any(cache.used_by_kind.values())


def test_windows_inside_a_chain_go_first_then_the_oldest_leaf():
    cache = cache_of({"main": 80, "index": 60, "small": 30})
    old, new = TOKENS[:1025], TOKENS[500:1525]
    for tokens in (old, new):
        cache.free(computed(cache, tokens, step=256))
    main = cache.pools["main"]
    assert cache.prefix is not None and main.num_free < 30
    ends = [len(old) // 256 - 1, len(old) // 256 + len(new) // 256 - 1]
    blocks = list(cache.prefix._blocks.values())
    while any(block.windows is not None for i, block in enumerate(blocks) if i not in ends):
        cache._make_room("main", main.num_free + 1)
    assert reusable(cache, old) == reusable(cache, new) == 1024  # all windows inside the chains went, and nothing else
    assert reusable(cache, old[:1000]) == reusable(cache, new[:1000]) == 0
    cache._make_room("main", main.num_free + 1)
    assert reusable(cache, old) == 0 and reusable(cache, new) == 1024


def test_a15_a_prefix_whose_end_lost_its_windows_is_reused_up_to_the_block_before():
    cache = cache_of(ROOM)
    cache.free(computed(cache, TOKENS[:1025], step=256))
    assert cache.prefix is not None
    blocks, main = list(cache.prefix._blocks.values()), cache.pools["main"]
    for left in (2, 1, 0):
        while blocks[left].windows is not None:
            cache._make_room("main", main.num_free + 1)
        assert [block.windows is not None for block in blocks] == [*[True] * left, *[False] * (3 - left), True]
        assert reusable(cache, TOKENS[:1000]) == left * BLOCK_TOKENS and reusable(cache, TOKENS[:1025]) == 1024


def test_windows_of_a_fork_that_lost_one_side_can_be_had():
    cache = cache_of(ROOM)
    side = computed(cache, [*TOKENS[:256], *range(300)])
    live = computed(cache, TOKENS[:556])
    cache.free(side)
    main = cache.pools["main"]
    wanted = main.num_available
    cache._make_room("main", wanted)
    assert main.num_free == wanted and main.num_idle == 0 and live.blocks


def test_what_a_sequence_uses_is_never_taken():
    cache = cache_of({"main": 60, "index": 40, "small": 20})
    seq = computed(cache, TOKENS[:600])
    tables = {name: table.pages.copy() for name, table in seq.tables.items()}
    other, length = cache.new_sequence(), 0
    while cache.allocate(other, length, length + 1):
        length += 1
        cache.commit(other, list(range(9000)), length)
        cache.release_unneeded(other, length)
    held = {(cache.specs[n].bucket, p) for n, t in seq.tables.items() for p in t.pages.ravel().tolist() if p}
    others = {(cache.specs[n].bucket, p) for n, t in other.tables.items() for p in t.pages.ravel().tolist() if p}
    assert length > 300 and not held & others
    assert all(np.array_equal(tables[n], t.pages) for n, t in seq.tables.items())


RELEASED = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "sliding_window": 128}
PACKED = plan_caches(small_config([0, 0, 4, 128, 4, 128], **RELEASED), "v4", "v4", "index_fp8")


def test_a03_four_prompts_of_32k_in_pools_for_six_are_reused_whole():
    """A03: computed at the same time in chunks of 2,048, sent again at the same time; every kind takes what the plan says."""
    tokens, step = 32768, 2048
    budget = next(mib << 20 for mib in range(1000) if fitting_sequences(PACKED, mib << 20, tokens, step) == 6)
    cache = KVCache(PACKED, divide_budget(PACKED, budget, 6, step, tokens).num_pages, CPU, PrefixIndex("model"))
    prompts = [np.random.default_rng(seed).integers(0, 9999, tokens).tolist() for seed in range(4)]
    sequences = [cache.new_sequence() for _ in prompts]
    for end in range(step, tokens + 1, step):
        for seq, prompt in zip(sequences, prompts, strict=True):
            assert cache.allocate(seq, end - step, end)
            cache.commit(seq, prompt, end)
            cache.release_unneeded(seq, end)
    planned = {c.spec.name: 4 * c.pages // PACKED.page_bytes[c.spec.bucket] for c in sequence_cost(PACKED, tokens)}
    assert cache.used_by_kind == planned
    for seq in sequences:
        cache.free(seq)
    sequences = [cache.new_sequence() for _ in prompts]
    reused = [cache.reuse(seq, prompt) for seq, prompt in zip(sequences, prompts, strict=True)]
    assert reused == [tokens - BLOCK_TOKENS] * 4 and min(reused) >= 0.9 * tokens
    for seq, prompt, start in zip(sequences, prompts, reused, strict=True):
        assert cache.allocate(seq, start, tokens)
        cache.commit(seq, prompt, tokens)


@pytest.mark.parametrize("shared", [16384, 32768, 33001])
def test_a15_a_half_shared_prompt_is_half_reused(shared):
    cache = KVCache(PACKED, divide_budget(PACKED, 400 << 20, 16, 2048, 65536).num_pages, CPU, PrefixIndex("model"))
    prompt = np.random.default_rng(1).integers(0, 9999, 65536).tolist()
    cache.free(computed(cache, prompt, step=2048))
    assert reusable(cache, prompt[:shared] + [0] * 20000) == shared // BLOCK_TOKENS * BLOCK_TOKENS


class PrefixMachine(RuleBasedStateMachine):
    """Sequences over few different texts that start from known prefixes, grow, are trimmed and end, in pools that are too small."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = cache_of({"main": 70, "index": 40, "small": 12})
        self.live: list[tuple[SequenceCache, list[int]]] = []
        self.lengths: list[int] = []

    @rule(first=st.integers(0, 1), turn=st.sampled_from([256, 300, 512]), length=st.integers(1, 900), count=st.integers(1, 700))
    def start(self, first: int, turn: int, length: int, count: int) -> None:
        tokens = [first] * min(turn, length) + [first + 2] * max(0, length - turn) + [9] * 1000
        seq = self.cache.new_sequence()
        known = self.cache.reuse(seq, tokens[:length])
        assert known % BLOCK_TOKENS == 0 and known < length
        end = min(length, known + count)
        if self.cache.allocate(seq, known, end):
            self.cache.commit(seq, tokens, end)
            self.live.append((seq, tokens))
            self.lengths.append(end)
        else:
            self.cache.free(seq)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), count=st.integers(1, 300))
    def extend(self, which: int, count: int) -> None:
        which %= len(self.live)
        seq, tokens = self.live[which]
        end = self.lengths[which] + count
        if end <= len(tokens) and self.cache.allocate(seq, self.lengths[which], end):
            self.lengths[which] = end
            self.cache.commit(seq, tokens, end)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def trim(self, which: int) -> None:
        which %= len(self.live)
        self.cache.release_unneeded(self.live[which][0], self.lengths[which])

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        which %= len(self.live)
        self.lengths.pop(which)
        self.cache.free(self.live.pop(which)[0])

    @invariant()
    def holders_are_counted(self) -> None:
        assert self.cache.prefix is not None
        blocks = list(self.cache.prefix._blocks.values())
        used = dict.fromkeys(self.cache.specs, 0)
        for bucket, pool in self.cache.pools.items():
            names = [n for n, s in self.cache.specs.items() if s.bucket == bucket]
            sequences, index = np.zeros(pool.num_pages + 1, int), np.zeros(pool.num_pages + 1, int)
            for name in names:
                mine = np.zeros_like(sequences)
                for seq, _ in self.live:
                    np.add.at(mine, seq.tables[name].pages.ravel(), 1)
                mine[NO_PAGE] = 0
                used[name] = int((mine > 0).sum())
                sequences += mine
                for block in blocks:
                    for pages in (block.pages, block.windows or {}):
                        np.add.at(index, pages.get(name, np.empty((0,), int)).ravel(), 1)
            assert np.array_equal(pool._holders, sequences + index) and np.array_equal(pool._kept, index)
            free = np.flatnonzero(pool._holders == 0)[1:]
            assert sorted(pool._free) == free.tolist() and index[NO_PAGE] == 0
            assert pool.num_idle == int(((index > 0) & (sequences == 0)).sum())
        assert used == self.cache.used_by_kind

    @invariant()
    def what_queries_read_is_held(self) -> None:
        for (seq, _), length in zip(self.live, self.lengths, strict=True):
            assert len(seq.blocks) == length // BLOCK_TOKENS
            for name, spec in self.cache.specs.items():
                if spec.lifetime == "record":
                    assert (seq.tables[name].pages != NO_PAGE).sum() == len(spec.layers) * len(spec.blocks(length))
                    continue
                reach = 0 if spec.lifetime == "context" else max(0, length - spec.window)
                entries = np.arange(reach // spec.ratio, length // spec.ratio)
                columns = entries // spec.entries_per_page - seq.tables[name].first_block
                assert (columns >= 0).all() and (seq.tables[name].pages[:, columns] != NO_PAGE).all(), name

    def teardown(self) -> None:
        """Every idle page can be had: one sequence after another fills the pools to the last page."""
        for seq, _ in self.live:
            self.cache.free(seq)
        for bucket, pool in self.cache.pools.items():
            assert pool.num_available == pool.num_pages
            self.cache._make_room(bucket, pool.num_pages)
            assert pool.num_free == pool.num_pages and pool.num_idle == 0
        assert len(self.cache.prefix) == 0


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_holding_and_keeping_in_any_order_counts_pages_once():
    pool = PagePool(16, 4, CPU)
    pages = pool.take(2)
    assert [pool.keep(pages), pool.share(pages), pool.give_back(pages), pool.give_back(pages)] == [0, 0, 0, -2]
    assert (pool.num_free, pool.num_idle, pool.num_available) == (2, 2, 4)
    assert pool.share(pages) == 2 and pool.drop(pages) == 0 and pool.give_back(pages) == -2
    assert (pool.num_free, pool.num_idle) == (4, 0)
