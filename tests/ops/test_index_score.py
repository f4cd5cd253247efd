"""Index scores against a loop; hidden entries may hold anything."""

import pytest
import torch

from abyssal.ops.index_score import index_score


@pytest.mark.parametrize(("n", "b", "heads", "entries"), [(1, 1, 8, 1), (3, 1, 8, 17), (1, 5, 16, 40), (2, 3, 64, 7)])
def test_matches_loop(n, b, heads, entries):
    torch.manual_seed(0)
    q, weights, keys = torch.randn(n, b, heads, 32), torch.randn(n, b, heads), torch.randn(n, entries, 32)
    visible = torch.randint(0, entries + 1, (n, b))
    scores = index_score(q, weights, keys, visible)
    for i in range(n):
        for j in range(b):
            for e in range(entries):
                if e >= visible[i, j]:
                    assert scores[i, j, e] == -torch.inf
                    continue
                terms = (q[i, j].double() @ keys[i, e].double()).relu() * weights[i, j].double()
                assert abs(scores[i, j, e].item() - terms.sum().item()) <= 1e-5 * terms.abs().sum().item() + 1e-7


def test_relu_is_per_head_before_the_weight():
    q = torch.tensor([[[[1.0], [-1.0]]]])
    weights = torch.tensor([[[-2.0, 5.0]]])
    assert index_score(q, weights, torch.tensor([[[3.0]]]), torch.tensor([[1]])).item() == -6.0


def test_hidden_nan_does_not_leak():
    keys = torch.ones(1, 3, 4)
    keys[0, 2] = torch.nan
    scores = index_score(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2), keys, torch.tensor([[2]]))
    assert scores[0, 0].tolist() == [8.0, 8.0, -torch.inf]
