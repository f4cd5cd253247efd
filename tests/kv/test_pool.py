"""Pools and page tables: where records lie, and what sequences take and return."""

import numpy as np
import pytest
import torch

from abyssal.errors import ConfigError
from abyssal.kv.pool import NO_PAGE, KVCache, PagePool, PageTable, entry_slots, range_slots
from abyssal.kv.prefix import PrefixIndex
from abyssal.kv.specs import plan_caches
from tests.support.small_model import small_config

CPU = torch.device("cpu")
CONFIG = small_config([0, 4, 128, 4])
PLAN = plan_caches(CONFIG, "fp32", "fp32", "index_bf16")


def held_pages(cache: KVCache, sequences) -> dict[str, list[int]]:
    held: dict[str, list[int]] = {bucket: [] for bucket in cache.pools}
    for seq in sequences:
        for name, table in seq.tables.items():
            held[cache.specs[name].bucket] += [p for p in table.pages.ravel().tolist() if p != NO_PAGE]
    return held


def test_a_cache_larger_than_the_machine_is_one_clear_error():
    with pytest.raises(ConfigError, match=r"1048576\.0 GiB .* lower kv_cache_bytes"):
        PagePool(2**20, 2**30 - 1, CPU)


def test_taking_too_many_is_an_error_and_takes_nothing():
    pool = PagePool(64, 3, CPU)
    with pytest.raises(RuntimeError, match="3 free pages, 4 asked"):
        pool.take(4)
    assert sorted(pool.take(3).tolist()) == [1, 2, 3] and pool.num_free == 0


def test_allocation_is_all_or_nothing():
    cache = KVCache(PLAN, {"main": 8, "index": 100, "small": 100}, CPU)
    seq = cache.new_sequence()
    before = {b: p.num_free for b, p in cache.pools.items()}
    assert not cache.allocate(seq, 0, 4000)
    assert {b: p.num_free for b, p in cache.pools.items()} == before and held_pages(cache, [seq]) == {b: [] for b in before}


def test_windows_shrink_and_whole_context_stays():
    cache = KVCache(PLAN, {"main": 200, "index": 100, "small": 100}, CPU)
    seq = cache.new_sequence()
    for start in range(0, 2000, 100):
        assert cache.allocate(seq, start, start + 100)
        cache.release_unneeded(seq, start + 100)
    for name, spec in cache.specs.items():
        blocks = int((seq.tables[name].pages[0] != NO_PAGE).sum())
        if spec.lifetime == "context":
            assert blocks == -(-(2000 // spec.ratio) // spec.entries_per_page)
        elif spec.lifetime == "record":
            assert blocks == 1
        else:
            assert blocks <= (spec.window + 8) // spec.entries_per_page + 2
            assert seq.tables[name].first_block == spec.first_kept(2000) // spec.entries_per_page
    cache.free(seq)
    assert all(p.num_free == p.num_pages for p in cache.pools.values()) and not any(cache.used_by_kind.values())


def test_a_pool_emptied_by_one_kind_serves_another():
    cache = KVCache(PLAN, {"main": 24, "index": 100, "small": 100}, CPU)
    first, second = cache.new_sequence(), cache.new_sequence()
    assert cache.allocate(first, 0, 40)
    assert not cache.allocate(second, 0, 400)
    cache.free(first)
    grown = 0
    while cache.allocate(second, grown, grown + 1):
        grown += 1
        cache.release_unneeded(second, grown)
    assert grown > 256 and cache.pools["main"].num_free < len(CONFIG.layers)


@pytest.mark.parametrize("name", list(PLAN.specs))
def test_records_are_where_their_slots_say(name):
    cache = KVCache(PLAN, {"main": 9, "index": 9, "small": 9}, CPU)
    view = cache.views[name]
    spec = view.spec
    count = 9 * spec.entries_per_page
    slots = torch.randperm(count)[: min(count, 50)] + spec.entries_per_page
    values = torch.randn(len(slots), spec.layout.dim)
    view.write(slots, values)
    assert torch.equal(view.read(slots.int()), values.to(spec.layout.dtype).float())
    raw = cache.pools[spec.bucket].data
    for slot, value in zip(slots.tolist(), values, strict=True):
        page, row = divmod(slot, spec.entries_per_page)
        offset = spec.layout.data_offset(row, spec.entries_per_page)
        stored = raw[page, offset : offset + spec.layout.data_bytes].clone().view(spec.layout.dtype)
        assert torch.equal(stored, value.to(spec.layout.dtype))


@pytest.mark.parametrize("name", list(PLAN.specs))
def test_slot_minus_one_reads_zeros_however_poisoned_the_pool(name):
    cache = KVCache(PLAN, {"main": 2, "index": 2, "small": 2}, CPU)
    rows = cache.views[name].read(torch.tensor([[-1, -1]]))
    assert rows.shape[:2] == (1, 2) and rows.abs().max() == 0


def test_a_block_completed_after_a_roll_back_is_known_by_the_tokens_that_came_instead():
    cache = KVCache(PLAN, {"main": 200, "index": 100, "small": 100}, CPU, PrefixIndex("model"))
    old = list(range(600))
    new = old[:295] + [7] * 305
    seq = cache.new_sequence()
    assert cache.allocate(seq, 0, 300)
    cache.commit(seq, old, 300)
    cache.roll_back(seq, 5)
    assert cache.allocate(seq, 295, 512)
    cache.commit(seq, new, 512)
    assert cache.reuse(cache.new_sequence(), old) == 256
    assert cache.reuse(cache.new_sequence(), new) == 512


@pytest.mark.parametrize("name", PLAN.specs)
def test_slots_of_ranges_are_those_of_their_entries(name: str):
    """Of tables that begin anywhere, with holes or without a page, at ranges inside of them and beyond."""
    spec, rng = PLAN.specs[name], np.random.default_rng(0)
    for _ in range(200):
        tables, starts = [], []
        for _ in range(rng.integers(1, 6)):
            blocks = len(spec.blocks(1)) if spec.lifetime == "record" else rng.integers(0, 5)
            pages = rng.integers(1, 100, (len(spec.layers), blocks), dtype=np.int32)
            pages[:, rng.random(blocks) < 0.2] = NO_PAGE
            tables.append(PageTable(pages, 0 if spec.lifetime == "record" else int(rng.integers(0, 3))))
            starts.append(rng.integers(0, 4 * spec.entries_per_page + 2))
        ends = np.array(starts) + rng.integers(0, 3 * spec.entries_per_page, len(starts)) * rng.integers(0, 2, len(starts))
        each = [entry_slots(spec, t, np.arange(a, b)) for t, a, b in zip(tables, starts, ends, strict=True)]
        got = range_slots(spec, tables, np.array(starts), ends)
        assert got.dtype == np.int32 and np.array_equal(got, np.concatenate(each, axis=1))
