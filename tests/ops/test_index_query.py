"""Index queries: rotation changes no dot product when keys are rotated alike; constants are folded into the weights."""

import torch

from abyssal.config import RopeConfig
from abyssal.ops.hadamard import hadamard
from abyssal.ops.index_query import index_query
from abyssal.ops.rope import rope_table, rotate

ROPE = RopeConfig(64, 160000.0, None)


def test_weights_and_rotation():
    torch.manual_seed(0)
    q, weights = torch.randn(6, 16, 128), torch.randn(6, 16)
    table = rope_table(torch.arange(6) * 1000, ROPE)
    plain, folded = index_query(q.clone(), weights, table, rotate_query=False)
    turned, _ = index_query(q.clone(), weights, table, rotate_query=True)
    torch.testing.assert_close(folded, weights * 128**-0.5 * 16**-0.5)
    torch.testing.assert_close(plain, rotate(q.clone(), table.unsqueeze(1)))
    key = torch.randn(128)
    torch.testing.assert_close(turned @ hadamard(key), plain @ key, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(turned @ key, plain @ key, atol=0.5)
