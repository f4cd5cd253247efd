"""Routing and experts against a per-token loop (cases I09, I11); kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from abyssal.ops.linear import LinearWeight
from abyssal.ops.moe import ExpertLayer, expert_layer, moe, route, swiglu
from abyssal.ops.moe import triton as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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


# Kernels


def random_weight(shape: tuple[int, ...], kind: str, tile: int | None, generator: torch.Generator) -> LinearWeight:
    """`kind`: plain, fp4, fp8 (blocks of 128), fp8_32 (blocks of 32) or fp8_fp32 (scales that are no powers of two)."""
    *lead, rows, columns = shape
    if kind == "plain":
        data = (torch.randn(shape, generator=generator) / columns**0.5).bfloat16()
        return LinearWeight(data.to(DEVICE), None, "plain", None, tile)
    if kind == "fp4":
        data = torch.randint(0, 256, (*lead, rows, columns // 2), generator=generator, dtype=torch.uint8)
        block, low = (1, 32), 118
    else:
        data = torch.randn(shape, generator=generator).mul(60).clamp(-448, 448).to(torch.float8_e4m3fn)
        block, low = (32, 32) if kind == "fp8_32" else (128, 128), 112
    scale = torch.randint(low, low + 4, (*lead, -(-rows // block[0]), -(-columns // block[1])), generator=generator).byte()
    if kind == "fp8_fp32":
        scale = torch.exp2(scale.float() - 127) * 1.3
    return LinearWeight(data.to(DEVICE), scale.to(DEVICE), "fp4" if kind == "fp4" else "fp8", block, tile)


def random_layer(
    dim: int,
    inner: int,
    experts: int,
    k: int,
    kind: str,
    tile: int | None,
    *,
    shared: str = "fp8",
    hashed: bool = False,
    seed: int = 0,
) -> ExpertLayer:
    generator = torch.Generator().manual_seed(seed)
    gate = torch.randn(experts, dim, generator=generator).bfloat16().float()
    bias = torch.randn(experts, generator=generator) * 0.1
    ids = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(32)]).int()
    linears = {
        "w13": random_weight((experts, 2 * inner, dim), kind, tile, generator),
        "w2": random_weight((experts, dim, inner), kind, tile, generator),
        "shared_w1": random_weight((inner, dim), shared, tile, generator),
        "shared_w3": random_weight((inner, dim), shared, tile, generator),
        "shared_w2": random_weight((dim, inner), shared, tile, generator),
    }
    return ExpertLayer(
        gate=gate.to(DEVICE), bias=None if hashed else bias.to(DEVICE), tid2eid=ids.to(DEVICE) if hashed else None, **linears,
        k=k, scale=1.5, temperature=2.0, limit=1.0,
    )  # fmt: skip


def random_input(tokens: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, dim, generator=generator) * torch.exp2(
        torch.randint(-3, 3, (tokens, dim), generator=generator).float()
    )
    return x.bfloat16().to(DEVICE), torch.randint(0, 32, (tokens,), generator=generator).to(DEVICE)


def config(tokens: int, rows: int, chunks: int, warps: int) -> kernels.MoeConfig:
    product = kernels.ProductConfig(tokens, rows, chunks, warps)
    return kernels.MoeConfig(product, product)


CONFIGS = [config(8, 16, 1, 1), config(16, 32, 2, 1), config(16, 128, 2, 4)]
FORMATS = [
    ("fp4", "fp8", 128),
    ("fp4", "fp8_32", 32),
    ("fp8", "fp8", 128),
    ("fp8_32", "fp8_32", 32),
    ("plain", "plain", None),
    ("plain", "plain", 32),
    ("fp8_fp32", "fp8_fp32", 128),
]


def assert_close(out: Tensor, expected: Tensor) -> None:
    """Sums in another order round some bf16 values, and so e4m3 codes, to the neighbour: small in the mean of a row, bounded in each."""
    out, expected = out.float(), expected.float()
    assert out.isfinite().all()
    size = expected.norm(dim=1) / expected.shape[1] ** 0.5
    assert ((out - expected).norm(dim=1) / expected.shape[1] ** 0.5 <= 0.01 * size).all()
    assert ((out - expected).abs().amax(1) <= 0.06 * size).all()


def run(layer: ExpertLayer, x: Tensor, ids: Tensor, config: kernels.MoeConfig | None = None) -> Tensor:
    return kernels.moe(x, ids, kernels.prepare_experts(layer), config=config)


@pytest.mark.parametrize("config", CONFIGS, ids=["8", "16", "shared memory"])
@pytest.mark.parametrize(("kind", "shared", "tile"), FORMATS, ids=lambda v: str(v))
def test_kernel_matches_the_reference(kind: str, shared: str, tile: int | None, config: kernels.MoeConfig) -> None:
    layer = random_layer(256, 128, 5, 2, kind, tile, shared=shared)
    x, ids = random_input(7, 256)
    assert_close(run(layer, x, ids, config), expert_layer(x, ids, layer))


@pytest.mark.parametrize("kind", ["fp4", "plain"])
def test_kernel_takes_any_sizes(kind: str) -> None:
    layer = random_layer(96, 160, 3, 2, kind, 32, shared="plain", hashed=True)
    x, ids = random_input(3, 96)
    assert_close(run(layer, x, ids), expert_layer(x, ids, layer))
