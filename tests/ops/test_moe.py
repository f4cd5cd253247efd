"""Routing and experts against a per-token loop (cases I09, I11)."""

import pytest
import torch

from abyssal.ops.linear import LinearWeight
from abyssal.ops.moe import moe, route, swiglu


def plain(data: torch.Tensor) -> LinearWeight:
    return LinearWeight(data, None, "plain", None, None)


def softplus_sqrt(v: torch.Tensor) -> torch.Tensor:
    return torch.log1p(v.double().exp()).where(v < 20, v.double()).sqrt()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_i11_scored_routing(temperature):
    torch.manual_seed(0)
    x, gate, bias = torch.randn(1000, 16) * 3, torch.randn(12, 16), torch.randn(12)
    experts, weights = route(x, gate, bias, None, 3, 1.5, temperature)
    scores = softplus_sqrt((x.double() @ gate.double().T) / temperature)
    for t in range(1000):
        expected = sorted(range(12), key=lambda e: (-(scores[t, e] + bias[e]).item(), e))[:3]
        assert experts[t].tolist() == expected
        chosen = scores[t, expected]
        torch.testing.assert_close(weights[t].double(), chosen / chosen.sum() * 1.5, rtol=1e-5, atol=1e-6)


def test_i11_bias_changes_the_choice_only():
    x, gate = torch.randn(4, 8), torch.randn(6, 8)
    same = route(x, gate, torch.full((6,), 7.0), None, 2, 1.0, 1.0)
    none = route(x, gate, torch.zeros(6), None, 2, 1.0, 1.0)
    assert torch.equal(same[0], none[0]) and torch.equal(same[1], none[1])
    forced = route(x, gate, torch.tensor([0, 0, 0, 0, 0, 1e6]), None, 2, 1.0, 1.0)
    assert (forced[0][:, 0] == 5).all() and forced[1].max() < 1


def test_i11_hash_routing_ignores_scores_for_the_choice():
    torch.manual_seed(0)
    x, gate, ids = torch.randn(5, 8), torch.randn(6, 8), torch.tensor([[0, 5], [1, 2], [3, 4], [5, 0], [2, 2]], dtype=torch.int32)
    experts, weights = route(x, gate, None, ids, 2, 2.5, 1.0)
    assert torch.equal(experts, ids.long())
    torch.testing.assert_close(weights.sum(-1), torch.full((5,), 2.5))


def test_equal_scores_choose_the_lowest_experts():
    experts, _ = route(torch.zeros(3, 8), torch.randn(16, 8), torch.zeros(16), None, 4, 1.0, 1.0)
    assert experts.tolist() == [[0, 1, 2, 3]] * 3


def test_i09_gate_is_clamped_above_only_and_up_both_ways():
    gate, up = torch.tensor([[50.0, -50.0, 1.0, 1.0]]), torch.tensor([[1.0, 1.0, 50.0, -50.0]])

    def silu(v: float) -> torch.Tensor:
        return v * torch.sigmoid(torch.tensor(v))

    got = swiglu(gate, up, None, 10.0, torch.float32)[0]
    torch.testing.assert_close(got, torch.tensor([silu(10.0), silu(-50.0), silu(1.0) * 10, silu(1.0) * -10]))


@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_matches_loop(tokens):
    torch.manual_seed(tokens)
    x, w13, w2 = torch.randn(tokens, 16), torch.randn(5, 24, 16), torch.randn(5, 16, 12)
    experts, weights = torch.randint(0, 5, (tokens, 3)), torch.rand(tokens, 3)
    out = moe(x, experts, weights, plain(w13), plain(w2), 2.0)
    for t in range(tokens):
        total = torch.zeros(16, dtype=torch.float64)
        for e, weight in zip(experts[t].tolist(), weights[t].double(), strict=True):
            gate, up = (w13[e].double() @ x[t].double()).chunk(2)
            gate, up = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
            total += w2[e].double() @ (gate * gate.sigmoid() * up * weight)
        torch.testing.assert_close(out[t].double(), total, rtol=1e-4, atol=1e-4)


def test_a_token_does_not_depend_on_its_batch():
    torch.manual_seed(0)
    x, w13, w2 = torch.randn(40, 16), plain(torch.randn(5, 24, 16)), plain(torch.randn(5, 16, 12))
    experts, weights = torch.randint(0, 5, (40, 2)), torch.rand(40, 2)
    together = moe(x, experts, weights, w13, w2, 10.0)
    for t in range(0, 40, 7):
        alone = moe(x[t : t + 1], experts[t : t + 1], weights[t : t + 1], w13, w2, 10.0)
        torch.testing.assert_close(together[t : t + 1], alone, rtol=1e-5, atol=1e-5)
