"""Facts of a decode step computed on the device: those that `build_batch` computes on the host, and nothing for rows without a sequence."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from abyssal.config import ALLOWED_KV, EngineConfig, ModelConfig
from abyssal.kv import decode
from abyssal.kv.batch import Batch, Chunk, CompressFacts, build_batch, staged
from abyssal.kv.decode import DecodeFacts, DecodeInputs, DecodeTables
from abyssal.kv.pool import NO_PAGE, KVCache, SequenceCache
from abyssal.kv.prefix import PrefixIndex
from abyssal.kv.specs import ROLL_BACK, plan_caches
from abyssal.model_config import parse_model_config
from abyssal.ops.decode_facts import decode_facts
from tests.support.small_model import small_config, v41_config_dict

CPU = torch.device("cpu")
CAPACITY = 1024
WIDTHS = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "sliding_window": 128}
MODELS = {
    "v4": small_config([0, 4, 128, 4], index_topk=300, **WIDTHS),
    "v4 choosing": small_config([4, 128], index_topk=16, **WIDTHS),
    "v41": parse_model_config(v41_config_dict([0, 2, 2, 2, 1, 1], [1, 4], [1, 4], **WIDTHS)),
}
INDEX = ("fp32", "bf16", "fp8", "fp4")
LAYOUTS = [(kv, compressed, index) for kv, compressed in sorted(ALLOWED_KV) for index in INDEX]


class World:
    """Sequences of random lengths, their caches on the host and their tables on the device."""

    def __init__(self, config: ModelConfig, layouts: tuple[str, str, str], rows: int, prefix: bool) -> None:
        kv, compressed, index = layouts
        names = EngineConfig(kv_layout=kv, compressed_kv_layout=compressed, index_layout=index).record_layouts
        plan = plan_caches(config, *names)
        self.config = config
        self.cache = KVCache(plan, dict.fromkeys(plan.page_bytes, 3000), CPU, PrefixIndex("") if prefix else None)
        for pool in self.cache.pools.values():
            random.Random(1).shuffle(pool._free)  # so that neighbours in a table are no neighbours in the pool
        self.tables = DecodeTables(self.cache.specs, rows, CAPACITY, CPU)
        self.facts = [DecodeFacts(config, self.tables, as_lists, decode_facts) for as_lists in (False, True)]

    def sequence(self, ids: list[int]) -> SequenceCache:
        """Computed up to the last of `ids`, as far as the prefix index does not have it."""
        seq = self.cache.new_sequence()
        known = self.cache.reuse(seq, ids)
        if known < len(ids) - 1:
            assert self.cache.allocate(seq, known, len(ids) - 1)
            self.cache.commit(seq, ids, len(ids) - 1)
            self.cache.release_unneeded(seq, len(ids) - 1)
        return seq

    def compare(self, seqs: list[tuple[SequenceCache, list[int]]], count: int, capacity: int) -> None:
        """One step in which each sequence computes the last of its ids, in `count` rows."""
        assert self.cache.allocate_next([seq for seq, _ in seqs], [len(ids) - 1 for _, ids in seqs])
        for (seq, ids), (name, spec) in itertools.product(seqs, self.cache.specs.items()):
            if spec.lifetime == "window" and (table := seq.tables[name]).pages.shape[1]:
                kept = spec.first_block(len(ids) - 1) - table.first_block
                assert kept <= (table.pages.shape[1] == spec.most_blocks and spec.tail_only), "a page was left"
        pages = {id(seq): {n: t.pages.copy() for n, t in seq.tables.items()} for seq, _ in seqs}
        for seq, ids in seqs:
            assert self.cache.allocate(seq, len(ids) - 1, len(ids))
            assert all((t.pages == pages[id(seq)][n]).all() for n, t in seq.tables.items()), "a page was missing"
        chunks = [Chunk(ids[-1:], len(ids) - 1, seq) for seq, ids in seqs]
        inputs = np.zeros((4, count), np.int64)
        inputs[2] = self.tables.empty_row
        rows = self.tables.place([seq for seq, _ in seqs])
        inputs[:, : len(seqs)] = [[ids[-1] for _, ids in seqs], [c.start for c in chunks], rows, [c.cache.folded for c in chunks]]
        for facts in self.facts:
            expected = build_batch(self.config, self.cache, chunks, list(range(len(seqs))), CPU, as_lists=facts.as_lists)
            got = facts.batch(DecodeInputs(*torch.from_numpy(inputs)), capacity)
            assert_same(self.cache, expected, got, len(seqs), count, capacity)
        for seq, ids in seqs:
            self.cache.commit(seq, ids, len(ids))


def assert_same(cache: KVCache, expected: Batch, got: Batch, n: int, count: int, capacity: int) -> None:
    def equal(a: Tensor, b: Tensor, name: Any) -> None:
        assert a.dtype == b.dtype and torch.equal(a, b), (name, a, b)

    for name in ("token_ids", "positions", "logit_rows"):
        equal(getattr(expected, name), getattr(got, name)[:n], name)
        assert len(getattr(got, name)) == count
    for name, table in expected.rope.items():
        equal(table, got.rope[name][:n], name)
    for name, store in expected.stores.items():
        where = got.stores[name]
        equal(store.slots, where.slots[:, :n], name)
        assert (where.slots[:, n:] == -1).all() and torch.equal(where.rows, torch.arange(count)) and where.slots.is_contiguous()
    for name, pages in expected.tables.items():
        equal(pages, got.tables[name][:, :n, : pages.shape[2]], name)
        assert (got.tables[name][:, :n, pages.shape[2] :] == NO_PAGE).all() and (got.tables[name][:, n:] == NO_PAGE).all()
    for name, slots in expected.entries.items():
        equal(slots, got.entries[name][:, :n, : slots.shape[2]], name)
        assert (got.entries[name][:, :n, slots.shape[2] :] == -1).all() and (got.entries[name][:, n:] == -1).all()
    assert expected.entries.keys() == got.entries.keys()
    assert expected.stores.keys() == got.stores.keys() and expected.tables.keys() == got.tables.keys()
    for ratio, facts in expected.compress.items():
        equal(facts.phases, got.compress[ratio].phases[:n], ratio)
        assert_same_groups(facts, got.compress[ratio], n)
    assert len(got.groups) == len(expected.groups)
    for one, group in zip(expected.groups, got.groups, strict=True):
        assert group.shape == (count, 1) and group.rows == slice(0, count)
        assert group.sequences == slice(0, count)
        for name in ("positions", "window_hidden"):
            equal(getattr(one, name), getattr(group, name)[:n], name)
        equal(one.window_slots, group.window_slots[:, :n], "window")
        assert (group.window_slots[:, n:] == -1).all() and group.window_hidden[n:].all()
        for ratio, visible in one.visible.items():
            equal(visible, group.visible[ratio][:n], ratio)
            assert not group.visible[ratio][n:].any() and group.max_visible[ratio] == capacity // ratio
    if expected.lists is None:
        assert got.lists is None
        return
    lists, static = expected.lists, got.lists
    assert static is not None and lists.sequences is None and static.sequences is None
    equal(lists.window_lengths, static.window_lengths[:n], "lengths")
    assert not static.window_lengths[n:].any()
    for row, length in enumerate(lists.window_lengths.tolist()):
        equal(lists.window_slots[:, row, :length], static.window_slots[:, row, :length], row)
    for ratio, visible in lists.visible.items():
        equal(visible, static.visible[ratio][:n], ratio)
        assert not static.visible[ratio][n:].any() and static.max_visible[ratio] == capacity // ratio
    for name in static.entry_slots:  # kinds whose entries the ordinary step lists too, unless it has the fewer of them
        ratio = cache.specs[name].ratio
        assert name in lists.entry_slots
        for row, visible in enumerate(lists.visible[ratio].tolist()):
            equal(lists.entry_slots[name][:, row, :visible], static.entry_slots[name][:, row, :visible], name)
    (span,) = static.spans
    assert span.shape == (count, 1) and span.max_visible == static.max_visible


def assert_same_groups(expected: CompressFacts, got: CompressFacts, n: int) -> None:
    kinds = list(expected.entry_slots)
    entries = [i for i in range(got.num_entries) if got.entry_slots[kinds[0]][0, i] >= 0]
    assert all(i < n for i in entries)
    for name in kinds:
        assert torch.equal(expected.entry_slots[name], got.entry_slots[name][:, entries]), name
        assert (got.entry_slots[name][:, [i for i in range(got.num_entries) if i not in entries]] == -1).all()
        assert got.entry_slots[name].is_contiguous()
    assert torch.equal(expected.rope, got.rope[entries]) and got.rope.is_contiguous()
    groups = list(entries)
    if got.sum_slots:
        first = next(iter(got.sum_slots.values()))
        opened = [i for i in range(first.shape[1]) if first[0, i] >= 0]
        groups += [got.num_entries + i for i in opened]
        for name, slots in expected.sum_slots.items():
            assert torch.equal(slots, got.sum_slots[name][:, opened]), name
            assert torch.equal(expected.carried_sums[name], got.carried_sums[name][:, groups]), name
    assert len(groups) == expected.num_groups
    assert expected.carried.keys() == got.carried.keys() and expected.carried_sums.keys() == got.carried_sums.keys()
    assert pooled(expected, range(expected.num_groups)) == pooled(got, groups)


def pooled(facts: CompressFacts, groups: Any) -> list[list[Any]]:
    """What each group takes up: slots of older rows in all state kinds, rows of the step; nothing for none."""
    carried = torch.cat(list(facts.carried.values())) if facts.carried else torch.empty(1, 0)
    old = carried.shape[1]
    found = []
    for group in groups:
        sources = facts.sources[group].tolist()
        found.append([carried[:, s].tolist() if s < old else s - old for s in sources if s < old + len(facts.phases)])
    return found


lengths = st.one_of(st.integers(1, 20), st.integers(120, 140), st.integers(250, 270), st.integers(1, CAPACITY - 20))


@settings(max_examples=40, deadline=None)
@given(
    model=st.sampled_from(sorted(MODELS)), layouts=st.sampled_from(LAYOUTS), starts=st.lists(lengths, min_size=1, max_size=6),
    steps=st.integers(1, 12), spare=st.integers(0, 3), prefix=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_facts_are_those_of_build_batch(model, layouts, starts, steps, spare, prefix, seed) -> None:
    """Sequences in any order, some leaving out steps, some taking tokens back, over tables that follow by what has changed."""
    rng = random.Random(seed)
    world = World(MODELS[model], layouts, len(starts), prefix)
    seqs = []
    for number, n in enumerate(starts):
        ids = [rng.randrange(5, 90) if number % 2 else 7 for _ in range(n)]  # every other one shares its prefix
        seqs.append((world.sequence(ids), ids))
    for _ in range(steps):
        chosen = rng.sample(seqs, rng.randint(1, len(seqs)))
        world.compare(chosen, len(chosen) + spare, rng.choice([CAPACITY, max(len(ids) for _, ids in chosen)]))
        for seq, ids in chosen:
            back = min(rng.choice([0, 0, 0, 1, ROLL_BACK]), seq.num_tokens - seq.final)
            world.cache.roll_back(seq, back)
            del ids[len(ids) - back :]
            ids.append(rng.randrange(5, 90))


def test_a_row_is_taken_over_and_given_back_clean() -> None:
    """More sequences in turn than rows: a row that held a long one shows nothing of it to a short one."""
    world = World(MODELS["v4"], ("v4", "same", "fp8"), 2, prefix=False)
    for n in (900, 3, 500, 1, 1000, 129, 128, 127):
        ids = [7] * n
        seq = world.sequence(ids)
        world.compare([(seq, ids)], 4, CAPACITY)
        world.cache.free(seq)
        again = [8] * (n // 2 + 1)
        assert world.cache.allocate(seq, 0, len(again) - 1) or len(again) == 1
        world.cache.commit(seq, again, len(again) - 1)
        world.cache.release_unneeded(seq, len(again) - 1)
        world.compare([(seq, again)], 1, CAPACITY)
        world.cache.free(seq)


def test_every_sequence_may_be_in_a_step() -> None:
    world = World(MODELS["v41"], ("v41", "fp4", "fp4"), 5, prefix=True)
    seqs = [(world.sequence(ids), ids) for ids in ([7] * n for n in (1, 2, 64, 300, 301))]
    for step in range(40):
        world.compare(seqs if step % 2 else seqs[::-1], 5, CAPACITY)
        for _, ids in seqs:
            ids.append(7)


def test_only_what_has_changed_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step inside of all pages, or in which they move on, sends nothing; one that opens a page sends that page of every layer."""
    world = World(MODELS["v4"], ("v4", "same", "fp8"), 1, prefix=False)
    sent: list[int] = []

    def record(array: np.ndarray, device: torch.device) -> Tensor:
        sent.append(array.shape[1])
        return staged(array, device)

    monkeypatch.setattr(decode, "staged", record)
    ids = [7] * 322
    seq = world.sequence(ids)
    world.compare([(seq, ids)], 1, CAPACITY)
    (first,) = sent
    assert first == sum(int((table.pages != NO_PAGE).sum()) for table in seq.tables.values())
    for n in range(323, 400):
        sent.clear()
        ids.append(7)
        world.compare([(seq, ids)], 1, CAPACITY)
        # Four layers' windows of 64 tokens a page; ratio 128. Pages of states, of 4 rows, move on.
        assert sum(sent) == 4 * ((n - 1) % 64 == 0) + (n % 256 == 128), (n, sent)


@pytest.mark.parametrize("model", MODELS)
def test_pages_that_others_hold_stay_theirs(model: str) -> None:
    """Two sequences part behind a block, whose last windows the prefix index keeps for a third."""
    world = World(MODELS[model], ("v41", "same", "fp8"), 3, prefix=True)
    cache, ids = world.cache, [7] * 256
    one, two = [*ids, 8, 8], [*ids, 9]
    first, second = world.sequence(one), world.sequence(two)
    assert cache.prefix is not None and second.num_tokens == 256
    kept = cache.prefix.match(first.keys)[-1].windows
    assert kept is not None and all(pages.size for pages in kept.values())
    for _ in range(160):
        world.compare([(first, one), (second, two)], 2, CAPACITY)
        for seq, tokens in ((first, one), (second, two)):
            for name, pages in kept.items():
                other = second if seq is first else first
                written = seq.tables[name].pages[:, -1]
                assert not np.isin(written, pages).any() and not np.isin(written, other.tables[name].pages).any(), name
            tokens.append(7)
    third = world.sequence([*ids, 5])
    assert third.num_tokens == 256 and all((third.tables[name].pages == pages).all() for name, pages in kept.items())
    for seq in (first, second, third):
        cache.free(seq)
    assert not any(cache.used_by_kind.values())
