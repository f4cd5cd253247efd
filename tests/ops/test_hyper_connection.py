"""Hyper-connections against the steps of V4 spec 2.2 to 2.4, written out per token."""

import math

import pytest
import torch

from abyssal.ops import hyper_connection as hc

EPS = 1e-6


def sinkhorn_slow(c: torch.Tensor, iterations: int) -> torch.Tensor:
    m = c.double().softmax(-1) + EPS
    m = m / (m.sum(0, keepdim=True) + EPS)
    for _ in range(iterations - 1):
        m = m / (m.sum(1, keepdim=True) + EPS)
        m = m / (m.sum(0, keepdim=True) + EPS)
    return m


def test_released_sinkhorn_vector():
    c = torch.tensor([[0.0, 1, -1, 2], [1, 0, 0, -2], [3, -1, 0.5, 0], [0, 0, 1, 1]])
    expected = torch.tensor([
        [0.0309978, 0.3578961, 0.0400030, 0.5711022], [0.2514324, 0.3928823, 0.3244703, 0.0312141],
        [0.6711882, 0.0522189, 0.1932683, 0.0833236], [0.0463805, 0.1970018, 0.4422576, 0.3143592],
    ])  # fmt: skip
    torch.testing.assert_close(hc.sinkhorn(c[None], 20, EPS)[0], expected, rtol=0, atol=2e-7)


def test_first_column_step():
    c = torch.tensor([[0.0, 1, -1, 2], [1, 0, 0, -2], [3, -1, 0.5, 0], [0, 0, 1, 1]])
    first = hc.sinkhorn(c[None], 1, EPS)[0, 0]
    torch.testing.assert_close(first, torch.tensor([0.0528, 0.3993, 0.0475, 0.5959]), rtol=0, atol=5e-5)


@pytest.mark.parametrize("tokens", [0, 1, 3, 257])
@pytest.mark.parametrize("spread", [0.1, 30.0])
def test_sinkhorn_rows(tokens, spread):
    torch.manual_seed(tokens)
    c = torch.randn(tokens, 4, 4) * spread
    got = hc.sinkhorn(c, 20, EPS)
    assert got.shape == (tokens, 4, 4)
    for t in range(min(tokens, 20)):
        torch.testing.assert_close(got[t].double(), sinkhorn_slow(c[t], 20), rtol=2e-5, atol=1e-7)


def test_whole_site_and_direction_of_comb():
    torch.manual_seed(1)
    tokens, streams, hidden = 5, 4, 24
    h, out = torch.randn(tokens, streams, hidden), torch.randn(tokens, hidden)
    fn, base, scale = torch.randn(24, streams * hidden) * 0.2, torch.randn(24), torch.tensor([0.5, 1.5, 2.0])
    weights = hc.MixWeights.from_checkpoint(fn, base, scale, streams)
    pre, post, comb = hc.coefficients(hc.mix(h, weights, 1e-6), streams, 20, EPS)
    x, new = hc.collapse(h, pre), hc.expand(h, out, post, comb)
    for t in range(tokens):
        z = h[t].double().flatten()
        raw = (fn.double() @ z) / math.sqrt(z.pow(2).mean() + 1e-6)
        p = torch.sigmoid(raw[:4] * 0.5 + base[:4]) + EPS
        q = 2 * torch.sigmoid(raw[4:8] * 1.5 + base[4:8])
        c = sinkhorn_slow((raw[8:] * 2.0 + base[8:]).view(4, 4), 20)
        torch.testing.assert_close(x[t].double(), (p[:, None] * h[t].double()).sum(0), rtol=1e-5, atol=1e-5)
        for k in range(streams):
            expected = q[k] * out[t].double() + sum(c[j, k] * h[t, j].double() for j in range(streams))
            torch.testing.assert_close(new[t, k].double(), expected, rtol=1e-5, atol=2e-5)


def test_bf16_streams_keep_fp32_coefficients():
    torch.manual_seed(2)
    h, pre = torch.randn(3, 4, 16).bfloat16(), torch.rand(3, 4)
    assert torch.equal(hc.collapse(h, pre), hc.collapse(h.float(), pre).bfloat16())
    out, post, comb = torch.randn(3, 16).bfloat16(), torch.rand(3, 4), torch.rand(3, 4, 4)
    assert torch.equal(hc.expand(h, out, post, comb), hc.expand(h.float(), out.float(), post, comb).bfloat16())
