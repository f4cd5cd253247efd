"""Compression against V4 spec 2.9 written out entry by entry, for any cut of the sequence (cases B01, C03)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from abyssal.kv.batch import Chunk, build_batch
from abyssal.kv.pool import KVCache
from abyssal.kv.specs import plan_caches
from abyssal.ops.compress import accumulate, compress, pool
from abyssal.ops.hadamard import hadamard
from abyssal.ops.norm import rms_norm
from abyssal.ops.rope import rope_table, rotate
from tests.support.small_model import small_config

CPU = torch.device("cpu")
DIM = 32


def slow_entry(rows: torch.Tensor, w: int, ratio: int) -> torch.Tensor:
    """Pooled entry w, double: per channel, a softmax over the slots of V4 spec 2.9 steps 2 to 4."""
    values, scores = rows.double().chunk(2, dim=1)
    own = range(w * ratio, (w + 1) * ratio)
    if ratio == 4:
        before = range(w * ratio - ratio, w * ratio)
        slots = [(values[t, :DIM], scores[t, :DIM]) for t in before if t >= 0]
        slots += [(values[t, DIM:], scores[t, DIM:]) for t in own]
    else:
        slots = [(values[t], scores[t]) for t in own]
    v, s = torch.stack([v for v, _ in slots]), torch.stack([s for _, s in slots])
    return (v * s.softmax(0)).sum(0)


def run_cuts(ratio: int, cuts: list[int], index_keys: bool) -> None:
    torch.manual_seed(0)
    total = sum(cuts)
    config = small_config([ratio])
    kind = f"c{ratio}_index" if index_keys else f"c{ratio}"
    cache = KVCache(plan_caches(config, "fp32", "fp32", "index_fp32"), {"main": 80, "index": 40, "small": 20}, CPU)
    entries, state, sums = (cache.views.get(name) for name in (kind, f"{kind}_state", f"{kind}_sums"))
    width = state.spec.layout.dim
    rows, norm = torch.randn(total, width) * 3, torch.rand(DIM) + 0.5
    seq, start, slots = cache.new_sequence(), 0, []
    for count in cuts:
        assert cache.allocate(seq, start, start + count)
        batch = build_batch(config, cache, [Chunk([0] * count, start, seq)], [], CPU)
        facts, store = batch.compress[ratio], batch.stores[state.spec.name]
        compress(
            rows[start : start + count], norm, facts, store, state, sums, entries, 0,
            overlap=ratio == 4, rotate_keys=index_keys, eps=1e-6, dtype=torch.float32,
        )  # fmt: skip
        assert facts.num_entries == (start + count) // ratio - start // ratio
        slots.append(facts.entry_slots[kind][0])
        start += count
        cache.commit(seq, [], start)
        cache.release_unneeded(seq, start)
    got = entries.read(torch.cat(slots))
    for w in range(total // ratio):
        pooled = rms_norm(slow_entry(rows, w, ratio).float()[None], norm, 1e-6)
        expected = rotate(pooled, rope_table(torch.tensor([w * ratio]), config.rope_compress))
        expected = hadamard(expected) if index_keys else expected
        torch.testing.assert_close(got[w : w + 1], expected, rtol=1e-4, atol=2e-5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 13), min_size=1, max_size=8), st.booleans())
def test_ratio_4_any_cuts(cuts, index_keys):
    run_cuts(4, cuts, index_keys)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 60, 127, 128, 129, 200]), min_size=1, max_size=5))
def test_ratio_128_any_cuts(cuts):
    run_cuts(128, cuts, index_keys=False)


@pytest.mark.parametrize("ratio", [4, 128])
def test_token_by_token(ratio):
    run_cuts(ratio, [1] * (ratio * 2 + 3), index_keys=False)


def test_ratio_128_across_steps_that_fold_less_than_a_group():
    """Every place of a group's end among the rows that are kept raw."""
    for first in range(120, 137):
        run_cuts(128, [first, 1, 1, 7, 1, 120, 3], index_keys=False)


@pytest.mark.parametrize("shift", [-1e4, 0.0, 1e4])
def test_sums_added_row_by_row_are_the_softmax_over_all_rows(shift):
    rows = torch.randn(128, 2 * DIM, generator=torch.Generator().manual_seed(1)) * 4
    rows[:, DIM:] += shift
    once = pool(rows, torch.arange(128)[None], overlap=False)
    sums = torch.stack([torch.full((DIM,), -torch.inf), torch.zeros(DIM), torch.zeros(DIM)])[None]
    for row in torch.arange(128).split(3):
        sums = accumulate(rows, row[None], sums)
    torch.testing.assert_close(sums[:, 2] / sums[:, 1], once, rtol=2e-6, atol=2e-6)


def test_sums_of_nothing_take_no_part_and_padding_neither():
    rows = torch.tensor([[5.0, -(2.0**100)], [0.0, -torch.inf]])  # a score below any that a maximum could start from
    before = torch.tensor([[[-torch.inf], [0.0], [0.0]]])
    assert accumulate(rows, torch.tensor([[0, 1, 1]]), before).tolist() == [[[-(2.0**100)], [1.0], [5.0]]]


def test_absent_tokens_have_weight_zero_whatever_the_scores():
    rows = torch.cat([torch.tensor([[7.0, 7.0, -1e4, -1e4]]), torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf]])])
    pooled = pool(rows, torch.tensor([[1, 0]]), overlap=True)
    assert pooled.tolist() == [[7.0]]
