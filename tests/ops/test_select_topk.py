"""Top-k as an exact set: ties to the lowest position, fewer entries than k, infinities (cases G01, B03)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from abyssal.ops.select_topk import candidate_mask, select_topk


def slow(scores: list[float], visible: int, k: int) -> list[int]:
    order = sorted(range(visible), key=lambda i: (-scores[i], i))
    return sorted(order[:k])


def check(scores: torch.Tensor, visible: torch.Tensor, k: int) -> None:
    got = select_topk(scores, visible, k)
    assert got.dtype == torch.int32 and got.shape == (*scores.shape[:-1], min(k, scores.shape[-1]))
    for row, seen, chosen in zip(scores.tolist(), visible.tolist(), got.tolist(), strict=True):
        expected = slow(row, seen, k)
        real = [c for c in chosen if c >= 0]
        assert real == expected, (row, seen, k)
        assert sorted(chosen, key=lambda c: c < 0) == chosen, "fillers come last"


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 40).flatmap(
        lambda n: st.tuples(
            st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, 1e30, -1e30, -torch.inf]), min_size=n, max_size=n),
            st.integers(0, n),
            st.integers(1, 45),
        )
    )
)
def test_any_ties(case):
    scores, visible, k = case
    check(torch.tensor([scores]), torch.tensor([visible]), k)


@pytest.mark.parametrize("valid", [0, 1, 7, 8, 9])
@pytest.mark.parametrize("fill", [0.0, -torch.inf, 3.5])
def test_g01_all_equal_scores(valid, fill):
    scores = torch.full((2, 12), fill)
    check(scores, torch.tensor([valid, 12]), 8)
    assert torch.equal(select_topk(scores, torch.tensor([valid, 12]), 8), select_topk(scores, torch.tensor([valid, 12]), 8))


def test_invisible_nan_is_ignored():
    scores = torch.tensor([[1.0, 2.0, 3.0, torch.nan, torch.nan]])
    assert select_topk(scores, torch.tensor([3]), 2).tolist() == [[1, 2]]


def test_large_rows():
    torch.manual_seed(0)
    scores = torch.randint(0, 50, (3, 4000)).float()
    check(scores, torch.tensor([4000, 511, 2100]), 512)


SCORES = [0.0, -0.0, 1.0, -1.0, 2.5, 1e30, -1e30]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 30).flatmap(
        lambda n: st.tuples(
            st.lists(st.sampled_from(SCORES), min_size=n, max_size=n),
            st.lists(st.booleans(), min_size=n, max_size=n),
            st.integers(0, n),
            st.integers(1, 35),
        )
    )
)
def test_only_candidates_are_chosen(case):
    """Fewer of them than k leave slots unused; nothing outside fills up."""
    scores, candidates, visible, k = case
    got = select_topk(torch.tensor([scores]), torch.tensor([visible]), k, torch.tensor([candidates]))[0].tolist()
    allowed = [i for i in range(visible) if candidates[i]]
    expected = sorted(sorted(allowed, key=lambda i: (-scores[i], i))[:k])
    assert got == expected + [-1] * (min(k, len(scores)) - len(expected))


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 40).flatmap(
        lambda n: st.tuples(
            st.lists(st.sampled_from(SCORES), min_size=n, max_size=n), st.integers(0, n), st.integers(1, 8), st.integers(1, 9)
        )
    )
)
def test_candidate_blocks(case):
    """The best blocks by their best visible entry, the newest always, ties to the first (V4.1 spec 3.6)."""
    scores, visible, blocks, size = case
    ranks = [(max(scores[b : min(b + size, visible)]), -b) for b in range(0, visible, size)]
    newest = (visible - 1) // size
    order = sorted(range(len(ranks)), key=lambda i: (i != newest, -ranks[i][0], i))
    kept = set(order[:blocks])
    expected = [i < visible and i // size in kept for i in range(len(scores))]
    # what lies beyond the visible entries must not matter
    poisoned = torch.tensor([scores[:visible] + [torch.nan] * (len(scores) - visible)])
    assert candidate_mask(poisoned, torch.tensor([visible]), blocks, size)[0].tolist() == expected


def test_candidate_blocks_per_query():
    scores = torch.arange(24.0).flip(0).view(1, 1, 24).expand(1, 3, 24)
    mask = candidate_mask(scores, torch.tensor([[0, 9, 24]]), blocks=2, block_size=4)
    assert [row.nonzero().flatten().tolist() for row in mask[0]] == [[], [0, 1, 2, 3, 8], [0, 1, 2, 3, 20, 21, 22, 23]]
