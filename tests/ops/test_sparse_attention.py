"""Sparse attention against a per-query loop in double precision."""

import itertools

import pytest
import torch

from abyssal.ops.sparse_attention import sparse_attention

DIM = 24


def slow(q, keys, sink, scale):
    """q [H, D], keys [K, D] double -> [H, D]: softmax over keys with one more term exp(sink) in the denominator."""
    scores = q @ keys.T * scale
    largest = torch.maximum(scores.amax(-1), sink) if scores.shape[1] else sink
    weights = (scores - largest[:, None]).exp()
    return (weights @ keys) / (weights.sum(-1) + (sink - largest).exp())[:, None]


@pytest.mark.parametrize(("n", "b", "heads"), [(1, 1, 1), (4, 1, 4), (1, 7, 4), (2, 3, 64)])
@pytest.mark.parametrize("kind", ["none", "shared", "chosen"])
def test_matches_loop(n, b, heads, kind):
    torch.manual_seed(0)
    q, sink = torch.randn(n, b, heads, DIM) * 3, torch.randn(heads) * 4
    window, window_mask = torch.randn(n, 9, DIM), torch.rand(n, b, 9) < 0.6
    window_mask[..., 0] = True
    entries = {"none": None, "shared": torch.randn(n, 5, DIM), "chosen": torch.randn(n, b, 6, DIM)}[kind]
    mask = None if entries is None else torch.rand(n, b, entries.shape[-2]) < 0.5
    out = sparse_attention(q, window, ~window_mask, entries, None if mask is None else ~mask, sink, 0.3)
    for i, j in itertools.product(range(n), range(b)):
        keys = [window[i][window_mask[i, j]]]
        if entries is not None:
            keys.append((entries[i] if kind == "shared" else entries[i, j])[mask[i, j]])
        expected = slow(q[i, j].double(), torch.cat(keys).double(), sink.double(), 0.3)
        torch.testing.assert_close(out[i, j].double(), expected, rtol=1e-4, atol=1e-5)


def test_masked_rows_have_no_weight_at_all():
    torch.manual_seed(0)
    q, window, sink = torch.randn(1, 2, 4, DIM), torch.randn(1, 8, DIM), torch.zeros(4)
    mask = torch.zeros(1, 2, 8, dtype=torch.bool)
    mask[..., 2] = True
    out = sparse_attention(q, window, ~mask, None, None, sink, 1.0)
    window[:, 3:] = 1e30
    assert torch.equal(out, sparse_attention(q, window, ~mask, None, None, sink, 1.0))


def test_sink_takes_weight_and_extreme_logits_stay_finite():
    q, window = torch.full((1, 1, 2, DIM), 1e3), torch.full((1, 1, DIM), 1e3)
    mask = torch.ones(1, 1, 1, dtype=torch.bool)
    out = sparse_attention(q, window, ~mask, None, None, torch.tensor([-1e30, 3e38]), 1.0)
    assert torch.equal(out[0, 0, 0], window[0, 0]) and out[0, 0, 1].abs().max() == 0


def test_order_of_entries_does_not_matter():
    torch.manual_seed(0)
    q, window, sink = torch.randn(1, 1, 4, DIM), torch.randn(1, 3, DIM), torch.randn(4)
    ones = torch.ones(1, 1, 3, dtype=torch.bool)
    entries, perm = torch.randn(1, 1, 10, DIM), torch.randperm(10)
    seen = torch.rand(1, 1, 10) < 0.7
    a = sparse_attention(q, window, ~ones, entries, ~seen, sink, 0.2)
    b = sparse_attention(q, window, ~ones, entries[:, :, perm], ~seen[..., perm], sink, 0.2)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
