"""Top-k as an exact set: ties to the lowest position, fewer entries than k, infinities (cases G01, B03)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from abyssal.ops.select_topk import select_topk


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
