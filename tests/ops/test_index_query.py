"""Index queries: rotation changes no dot product when keys are rotated alike; constants are folded into the weights."""

import pytest
import torch

from abyssal.config import RopeConfig
from abyssal.kv import codec, layouts
from abyssal.ops.hadamard import hadamard
from abyssal.ops.index_query import index_query
from abyssal.ops.rope import rope_table, rotate

ROPE = RopeConfig(64, 160000.0, None)


def test_weights_and_rotation():
    torch.manual_seed(0)
    q, weights = torch.randn(6, 16, 128), torch.randn(6, 16)
    table = rope_table(torch.arange(6) * 1000, ROPE)
    plain, folded = index_query(q.clone(), weights, table, rotate_query=False, grid=None)
    turned, _ = index_query(q.clone(), weights, table, rotate_query=True, grid=None)
    torch.testing.assert_close(folded, weights * 128**-0.5 * 16**-0.5)
    torch.testing.assert_close(plain, rotate(q.clone(), table.unsqueeze(1)))
    key = torch.randn(128)
    torch.testing.assert_close(turned @ hadamard(key), plain @ key, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(turned @ key, plain @ key, atol=0.5)


@pytest.mark.parametrize("layout", ["index_fp8", "index_mxfp4"])
def test_queries_follow_the_grid_of_the_keys(layout):
    """Scores of the outputs equal those of queries encoded and decoded as keys are, weights as they were."""
    torch.manual_seed(0)
    q, weights = torch.randn(5, 8, 128) * torch.logspace(-3, 3, 8)[:, None], torch.randn(5, 8)
    table = rope_table(torch.arange(5) * 100, ROPE)
    exact, plain_weights = index_query(q.clone(), weights, table, rotate_query=True, grid=None)
    got, folded = index_query(q.clone(), weights, table, rotate_query=True, grid=layouts.get(layout).grid)
    rows = codec.decode(layout, *codec.encode(layout, exact.flatten(0, 1))).view_as(exact)
    key = torch.randn(128)
    torch.testing.assert_close((got @ key).relu() * folded, (rows @ key).relu() * plain_weights, rtol=1e-5, atol=1e-6)
    assert not torch.equal(rows, exact)
