"""Routing and experts against a per-token loop (cases I09, I11); kernels against the reference."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from abyssal.ops.linear import LinearWeight, dequantize, e8m0_to_float
from abyssal.ops.moe import ExpertLayer, expert_layer, moe, route, swiglu
from abyssal.ops.moe import gluon as tiles
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


def test_experts_that_are_elsewhere_give_nothing():
    torch.manual_seed(0)
    x, w13, w2 = torch.randn(9, 16), plain(torch.randn(6, 24, 16)), plain(torch.randn(6, 16, 12))
    experts, weights = torch.stack([torch.randperm(6)[:3] for _ in range(9)]), torch.rand(9, 3)
    experts[4], experts[5, 1] = -1, -1  # rows that only fill up a batch, and choices of nothing
    whole = moe(x, experts, weights, w13, w2, 10.0)
    cuts = [(0, 1), (1, 4), (4, 6)]
    parts = [moe(x, experts, weights, plain(w13.data[a:b]), plain(w2.data[a:b]), 10.0, a) for a, b in cuts]
    torch.testing.assert_close(sum(parts), whole)
    for t in (0, 4, 5):
        one = [
            moe(x[t : t + 1], experts[t : t + 1], weights[t : t + 1], plain(w13.data[a:b]), plain(w2.data[a:b]), 10.0, a)
            for a, b in cuts
        ]
        torch.testing.assert_close(sum(one), whole[t : t + 1])
    assert whole[4].eq(0).all() and moe(x[:0], experts[:0], weights[:0], w13, w2, 10.0).shape == (0, 16)


# Kernels


def random_weight(shape: tuple[int, ...], kind: str, tile: int | None, generator: torch.Generator) -> LinearWeight:
    """`kind`: plain, fp4, fp8 (blocks of 128), fp8_32 (blocks of 32) or fp8_fp32 (scales that are no powers of two)."""
    *lead, rows, columns = shape
    device = generator.device
    if kind == "plain":
        data = (torch.randn(shape, generator=generator, device=device) / columns**0.5).bfloat16()
        return LinearWeight(data, None, "plain", None, tile)
    if kind == "fp4":
        data = torch.randint(0, 256, (*lead, rows, columns // 2), generator=generator, dtype=torch.uint8, device=device)
        block, low = (1, 32), 118
    else:
        data = torch.randn(shape, generator=generator, device=device).mul(60).clamp(-448, 448).to(torch.float8_e4m3fn)
        block, low = (32, 32) if kind == "fp8_32" else (128, 128), 112
    blocks = (*lead, -(-rows // block[0]), -(-columns // block[1]))
    scale = torch.randint(low, low + 4, blocks, generator=generator, device=device).byte()
    if kind == "fp8_fp32":
        scale = torch.exp2(scale.float() - 127) * 1.3
    return LinearWeight(data, scale, "fp4" if kind == "fp4" else "fp8", block, tile)


def random_layer(
    dim: int, inner: int, experts: int, k: int, kind: str, tile: int | None, shared: str = "fp8", *, hashed: bool = False
) -> ExpertLayer:
    """Tokens 0..31 have experts in a hash layer, token 0 the lowest ones."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    gate = torch.randn(experts, dim, generator=generator, device=DEVICE).bfloat16().float()
    bias = torch.randn(experts, generator=generator, device=DEVICE) * 0.1
    ids = torch.stack([(torch.arange(k, device=DEVICE) + token) % experts for token in range(32)]).int()
    return ExpertLayer(
        gate=gate, bias=None if hashed else bias, tid2eid=ids if hashed else None,
        w13=random_weight((experts, 2 * inner, dim), kind, tile, generator),
        w2=random_weight((experts, dim, inner), kind, tile, generator),
        shared_w1=random_weight((inner, dim), shared, tile, generator),
        shared_w3=random_weight((inner, dim), shared, tile, generator),
        shared_w2=random_weight((dim, inner), shared, tile, generator),
        k=k, scale=1.5, temperature=2.0, limit=1.0,
    )  # fmt: skip


def random_input(tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(1)
    x = torch.randn(tokens, dim, generator=generator, device=DEVICE)
    x *= torch.exp2(torch.randint(-3, 3, (tokens, dim), generator=generator, device=DEVICE).float())
    return x.bfloat16(), torch.randint(0, 32, (tokens,), generator=generator, device=DEVICE)


config = kernels.MoeConfig.of
FEW, MANY, SPLIT = config(8, 64, 1, 1), config(16, 128, 2, 4), config(8, 32, 1, 1, 2)
REAL = {"v4": (4096, 2048, 128, "fp8"), "v4.1": (5120, 2304, 32, "fp8_32")}  # D, I, tile, shared expert


TILES = [kernels.TileConfig.of(block) for block in kernels.STAGES]


def run(layer: ExpertLayer, x: Tensor, ids: Tensor, config: kernels.MoeConfig | kernels.TileConfig | None = None) -> Tensor:
    experts = kernels.prepare_experts(layer)
    if isinstance(config, kernels.TileConfig):
        experts = tiles.with_products(experts)
    return kernels.moe(x, ids, experts, config=config)


def assert_close(out: Tensor, expected: Tensor) -> None:
    """Sums in another order round some bf16 values, and so e4m3 codes, to the neighbour; where that is the largest of a tile, the scale
    of the tile doubles, and all its codes change: seldom, so the median, and all rows but one in fifty, are held closer."""
    assert out.dtype == expected.dtype and out.shape == expected.shape
    out, expected = out.float(), expected.float()
    assert out.isfinite().all()
    size = expected.square().mean(1).sqrt()
    error = (out - expected).square().mean(1).sqrt()
    assert error.median() <= 0.01 * size.median()
    assert (error > 0.02 * size).sum() <= len(out) // 50 and (error <= 0.04 * size).all()
    assert ((out - expected).abs().amax(1) <= 0.08 * size).all()


@pytest.mark.parametrize(
    ("kind", "shared", "tile", "tokens", "k", "config"),
    [
        ("fp4", "plain", 128, 1, 1, SPLIT),
        ("fp4", "fp8_32", 32, 2, 1, MANY),
        ("fp8", "plain", 128, 1, 1, MANY),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("fp4", "fp8", 128, 2, 2, FEW),
                ("fp4", "plain", None, 2, 2, SPLIT),
                ("fp8_32", "fp8_32", 32, 2, 1, FEW),
                ("plain", "plain", 32, 2, 2, FEW),
                ("plain", "plain", None, 2, 1, MANY),
                ("fp8_fp32", "fp8", 128, 2, 1, MANY),
            )
        ),
    ],
)
def test_kernels_match_the_reference(
    kind: str, shared: str, tile: int | None, tokens: int, k: int, config: kernels.MoeConfig
) -> None:
    layer = random_layer(128, 128, 3, k, kind, tile, shared)
    x, ids = random_input(tokens, 128)
    assert_close(run(layer, x, ids, config), expert_layer(x, ids, layer))


def experts_of(layer: ExpertLayer, start: int, stop: int) -> ExpertLayer:
    """The layer of a rank that holds some of the experts."""

    def part(weight: LinearWeight) -> LinearWeight:
        scale = None if weight.scale is None else weight.scale[start:stop].contiguous()
        return replace(weight, data=weight.data[start:stop].contiguous(), scale=scale)

    return replace(layer, w13=part(layer.w13), w2=part(layer.w2))


def test_parts_of_several_ranks_make_up_the_experts() -> None:
    """And a row without experts, which only fills up a batch."""
    layer = random_layer(128, 128, 3, 2, "fp4", 128)
    x, ids = random_input(3, 128)
    chosen, weights = kernels.choices_of(x, ids, kernels.prepare_experts(layer))
    chosen[2] = -1
    total = torch.zeros(3, 128, device=DEVICE)
    for first, stop in ((0, 1), (1, 3)):
        cut = kernels.prepare_experts(experts_of(layer, first, stop))
        part = kernels.part_of_experts(x, chosen, weights, cut, first, config=MANY)
        assert part.dtype == torch.float32
        total += part
    expected = moe(x[:2], chosen[:2], weights[:2], layer.w13, layer.w2, layer.limit)
    assert_close(total[:2].bfloat16(), expected.bfloat16())
    assert total[2].eq(0).all()


def sum_over_ranks(layer: ExpertLayer, x: Tensor, ids: Tensor, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """The layer in batch-invariant mode by ranks that hold experts cuts[i] .. cuts[i + 1], and the tokens' experts."""
    whole = kernels.prepare_experts(layer)
    chosen, weights = kernels.choices_of(x, ids, whole, batch_invariant=True)
    parts = [
        kernels.outputs_of_choices(x, chosen, weights, kernels.prepare_experts(experts_of(layer, first, stop)), first)
        for first, stop in itertools.pairwise(cuts)
    ]
    shared = kernels.shared_part(x, whole, batch_invariant=True)
    return kernels.sum_of_choices(torch.stack(parts).sum(0), chosen, shared, ids, whole), chosen


@pytest.mark.parametrize(
    ("kind", "tile", "hashed", "config"),
    [
        ("fp4", 32, True, MANY),
        pytest.param("fp4", 128, False, FEW, marks=pytest.mark.long),
        pytest.param("fp8_32", 32, False, FEW, marks=pytest.mark.long),
        pytest.param("plain", None, False, FEW, marks=pytest.mark.long),
    ],
)
def test_batch_invariant_ranks_have_the_bits_of_one(
    kind: str, tile: int | None, hashed: bool, config: kernels.MoeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three choices, a row that fills up the batch, and a rank of whose experts nobody wants any."""
    monkeypatch.setattr(kernels, "moe_config", lambda *_, **__: config)
    dim, inner = (96, 112) if hashed else (128, 128)
    layer = random_layer(dim, inner, 5, 3, kind, tile, "plain", hashed=hashed)
    if hashed:
        layer = replace(layer, tid2eid=torch.tensor([[3, 0, 2], [2, 3, 2]], dtype=torch.int32, device=DEVICE))
        ids = torch.tensor([0, -1, 1], device=DEVICE)
    else:
        layer.bias[4] = -1e3
        ids = torch.tensor([0, -1, 0], device=DEVICE)
    x = random_input(3, dim)[0]
    total, chosen = sum_over_ranks(layer, x, ids, [0, 2, 4, 5])
    assert chosen[1].eq(-1).all() and 4 not in chosen
    assert torch.equal(total, kernels.moe(x, ids, kernels.prepare_experts(layer), batch_invariant=True))
    assert_close(total[::2], expert_layer(x[::2], ids[::2], layer))


def test_ranks_without_tokens_launch_nothing() -> None:
    experts = kernels.prepare_experts(random_layer(128, 128, 3, 2, "fp4", 128))
    x, ids = random_input(0, 128)
    chosen, weights = kernels.choices_of(x, ids, experts)
    assert chosen.shape == weights.shape == (0, 2) and chosen.dtype == torch.int32
    assert kernels.part_of_experts(x, chosen, weights, experts, 0).shape == kernels.shared_part(x, experts).shape == (0, 128)
    outputs = kernels.outputs_of_choices(x, chosen, weights, experts, 0)
    assert outputs.shape == (0, 2, 128) and kernels.sum_of_choices(outputs, chosen, x, ids, experts).shape == (0, 128)


def test_kernels_take_any_sizes() -> None:
    layer = random_layer(96, 112, 2, 1, "fp4", 32, "plain", hashed=True)
    x, ids = random_input(1, 96)
    assert_close(run(layer, x, ids, MANY), expert_layer(x, ids, layer))


def test_rows_that_fill_up_a_batch_are_zeros() -> None:
    """NaN in such a row reaches nobody."""
    layer = random_layer(128, 128, 2, 1, "plain", None, "plain", hashed=True)
    x, ids = random_input(3, 128)
    expected = run(layer, x[::2].contiguous(), ids[::2].contiguous(), MANY)
    x[1], ids[1] = float("nan"), -1
    out = run(layer, x, ids, MANY)
    assert torch.equal(out[::2], expected) and (out[1] == 0).all()


def test_no_tokens() -> None:
    layer = random_layer(128, 128, 2, 1, "plain", None, "plain")
    assert run(layer, *random_input(0, 128)).shape == (0, 128)


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize(("tokens", "dim"), [(5, 300), (7, 256)])
def test_route_matches_the_reference(tokens: int, dim: int, hashed: bool) -> None:
    layer = random_layer(dim, 128, 40, 6, "plain", None, "plain", hashed=hashed)
    x, ids = random_input(tokens, dim)
    experts, weights = route(x, layer.gate, layer.bias, None if layer.tid2eid is None else layer.tid2eid[ids], 6, 1.5, 2.0)
    choice = kernels.route(x, ids, kernels.prepare_experts(layer), MANY)
    assert torch.equal(choice.experts.long(), experts)
    torch.testing.assert_close(choice.weights, weights, rtol=2e-5, atol=0)


def test_route_prefers_the_lowest_of_equal_experts() -> None:
    layer = random_layer(128, 128, 40, 6, "plain", None, "plain")
    layer.bias.zero_()
    ids = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    choice = kernels.route(torch.zeros(3, 128, dtype=torch.bfloat16, device=DEVICE), ids, kernels.prepare_experts(layer), MANY)
    assert choice.experts.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    torch.testing.assert_close(choice.weights, torch.full((3, 6), 0.25, device=DEVICE))


def test_scores_of_extreme_logits_are_those_of_the_reference() -> None:
    """Logits from -80, whose e^z is still normal, to 80, and weights to 1e-5: ln(1 + e^z) must not be taken from a rounded 1 + e^z."""
    layer = random_layer(128, 128, 64, 6, "plain", None, "plain")
    layer.gate.zero_()[:, 0] = torch.linspace(-160, 160, 64, device=DEVICE).bfloat16().float()
    layer.bias.copy_(torch.linspace(100, -100, 64, device=DEVICE))
    x = torch.zeros(2, 128, dtype=torch.bfloat16, device=DEVICE)
    x[:, 0] = torch.tensor([1.0, 0.05])
    experts, weights = route(x, layer.gate, layer.bias, None, 6, 1.5, 2.0)
    choice = kernels.route(x, torch.zeros(2, dtype=torch.int64, device=DEVICE), kernels.prepare_experts(layer), MANY)
    assert torch.equal(choice.experts.long(), experts)
    torch.testing.assert_close(choice.weights, weights, rtol=3e-5, atol=0)


@pytest.mark.parametrize("skew", ["spread", "one expert", "half untouched", "other ranks"])
@pytest.mark.parametrize(("tokens", "block"), [(1, 8), (50, 8), (50, 64)])
def test_plan_sorts_choices_into_blocks(tokens: int, block: int, skew: str) -> None:
    experts, k, first = 12, 6, 4 if skew == "other ranks" else 0
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, 20 if skew == "other ranks" else experts, (tokens, k), generator=generator)
    if skew == "one expert":
        ids[:] = 7
    elif skew == "half untouched":
        ids = ids // 2 * 2
    choices = tokens * k
    blocks = kernels.num_blocks(choices, experts, block)
    order, plan = (torch.full((n,), 1 << 20, dtype=torch.int32, device=DEVICE) for n in (choices, 3 * blocks))
    arrivals = torch.full((blocks, 4), 9, dtype=torch.int32, device=DEVICE)
    kernels.moe_plan[(experts + 1,)](
        ids.int().to(DEVICE),
        order,
        plan,
        arrivals,
        choices,
        blocks,
        first,
        E=experts,
        EP=16,
        BLOCK=block,
        SPAN=128,
        ARRIVALS=4,
        EARLY=False,
    )
    local = ids.flatten() - first
    lists = [[i for i, e in enumerate(local.tolist()) if e == expert] for expert in range(experts)]
    rows, place = [], 0
    for expert, members in enumerate(lists):
        for start in range(0, len(members), block):
            rows.append((expert, place + start, place + min(start + block, len(members))))
        place += len(members)
    plan = plan.view(3, blocks).tolist()
    assert list(zip(*plan, strict=True))[: len(rows)] == rows
    assert plan[0][len(rows) :] == [-1] * (blocks - len(rows))
    assert order[:place].tolist() == [choice for members in lists for choice in members]
    assert (arrivals[: len(rows)] == 0).all()


def test_blocks_of_any_routing_fit() -> None:
    """The bound is reached by the routing that leaves most blocks nearly empty, and never passed."""
    for choices in (1, 6, 7, 50, 384):
        for experts in (1, 5, 64):
            for block in (1, 8, 16):
                touched = min(experts, choices)
                worst = touched - 1 + -(-(choices - touched + 1) // block)
                bound = kernels.num_blocks(choices, experts, block)
                assert worst <= bound, (choices, experts, block)
                assert bound <= worst + experts


def test_prepared_weights_are_the_stored_ones() -> None:
    layer = random_layer(96, 160, 3, 2, "fp4", 32, "fp8_32")
    prepared = kernels.prepare_weight(layer.w13, 2)
    assert prepared.shape == (3, 512, 128) and prepared.scale is not None
    scale = e8m0_to_float(prepared.scale.view(torch.uint8)).repeat_interleave(32, -1)
    codes = torch.stack((prepared.data & 15, prepared.data >> 4), -1).flatten(-2)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=DEVICE)
    got = torch.cat((grid, -grid))[codes.long()] * scale
    expected = dequantize(layer.w13, torch.float32)
    assert torch.equal(got[:, :160, :96], expected[:, :160]) and torch.equal(got[:, 256:416, :96], expected[:, 160:])
    assert (got[:, 160:256] == 0).all() and (got[..., 96:] == 0).all()


def test_released_sizes_are_not_copied() -> None:
    layer = random_layer(128, 128, 2, 1, "fp4", 128)
    prepared = kernels.prepare_experts(layer)
    assert prepared.w13.data.data_ptr() == layer.w13.data.data_ptr() and prepared.w2.data.data_ptr() == layer.w2.data.data_ptr()


def test_bad_input_is_named() -> None:
    layer = random_layer(128, 128, 2, 1, "plain", None, "plain")
    x, ids = random_input(2, 128)
    with pytest.raises(TypeError, match="float32"):
        run(layer, x.float(), ids)
    with pytest.raises(ValueError, match=r"\(2, 64\)"):
        run(layer, x[:, :64], ids)
    with pytest.raises(ValueError, match="token_ids"):
        run(layer, x, ids[:1])


def test_tiles_refuse_what_they_do_not_take() -> None:
    def refusal(dim: int, inner: int, kind: str, tile: int | None) -> str | None:
        return tiles.refusal(kernels.prepare_experts(random_layer(dim, inner, 1, 1, kind, tile, "plain")))

    assert refusal(256, 512, "fp4", 128) is refusal(512, 256, "fp4", None) is None
    assert refusal(256, 256, "fp8", 128) == "weights are fp8 and fp8, not fp4"
    for dim, inner in ((128, 256), (256, 384), (640, 256)):
        assert "multiples of 256" in str(refusal(dim, inner, "fp4", 32)), (dim, inner)
    assert "for each 256" in str(refusal(256, 256, "fp4", 256))


def test_many_tokens_take_tiles_where_there_are_any() -> None:
    """Blocks by the mean number of tokens per expert; in batch-invariant mode the kernel for few."""
    blocks = [kernels.moe_config(6 * tokens, 256, tiles=True).block_tokens for tokens in (128, 512, 1024, 2048, 4096)]
    assert blocks == [16, 16, 32, 64, 128]
    for choices, invariant in ((512, False), (24576, True)):
        assert isinstance(kernels.moe_config(choices, 256, invariant, tiles=True), kernels.MoeConfig)


def test_few_choices_need_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without one the same bits, twice: the last program of a tile leaves its counter as it was."""
    layer = kernels.prepare_experts(random_layer(128, 128, 4, 2, "fp4", 128, "plain", hashed=True))
    x, _ = random_input(3, 128)
    # Experts of their own: in one block, the interpreter gives a second token other bits.
    ids = torch.tensor([0, -1, 2], device=DEVICE)
    outs = [kernels.moe(x, ids, layer, config=FEW) for _ in range(2)]
    assert layer.arrivals.shape == (kernels.PLANLESS_CHOICES, 1) and not layer.arrivals.any()
    monkeypatch.setattr(kernels, "PLANLESS_CHOICES", 0)
    assert torch.equal(kernels.moe(x, ids, layer, config=FEW), outs[0]) and torch.equal(outs[0], outs[1])


def test_programs_of_one_token_run_at_once() -> None:
    """V4.1's programs fit into the registers with one chunk in flight, V4's with two; those of more tokens do not anyway."""
    for experts, columns, programs, chunks in (
        (256, 4096, 1536, 2),
        (384, 5120, 1728, 1),
        (384, 2304, 1920, 1),
        (384, 5120, 3456, 2),
    ):
        few = kernels.moe_config(6, experts).up
        assert kernels._fitting(few, columns, "fp4", programs).chunks == chunks, f"{programs} programs"


CONFIGS = {
    "default": (None,),
    "few": (config(8, 32, 2, 1), config(16, 64, 2, 1)),
    "many": (config(16, 128, 3, 4), config(64, 128, 3, 4), config(128, 128, 3, 8)),
    "tiles": TILES,
}


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 300, 1000])
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("configs", CONFIGS)
def test_real_sizes_match_the_reference(configs: str, name: str, tokens: int) -> None:
    dim, inner, tile, shared = REAL[name]
    layer = random_layer(dim, inner, 32, 6, "fp4", tile, shared)
    x, ids = random_input(tokens, dim)
    expected = expert_layer(x, ids, layer)
    for chosen in CONFIGS[configs]:
        out = run(layer, x, ids, chosen)
        assert_close(out, expected)
        error = (out.float() - expected.float()).square().mean(1) / expected.float().square().mean(1)
        assert error.sqrt().median() <= 0.001  # sums in another order touch few rows, a product that takes wrong values all


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "tile"), [("fp8", 128), ("fp8_32", 32), ("plain", None), ("fp8_fp32", 128)])
@pytest.mark.parametrize("tokens", [3, 200])
def test_other_formats_of_real_sizes(kind: str, tile: int | None, tokens: int) -> None:
    layer = random_layer(4096, 2048, 8, 2, kind, tile, "fp8" if kind == "fp8_fp32" else kind)
    x, ids = random_input(tokens, 4096)
    assert_close(run(layer, x, ids), expert_layer(x, ids, layer))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [70, 500])
def test_route_of_many_tokens(tokens: int) -> None:
    layer = random_layer(256, 128, 256, 6, "plain", None, "plain")
    x, ids = random_input(tokens, 256)
    experts, weights = route(x, layer.gate, layer.bias, None, 6, 1.5, 2.0)
    choice = kernels.route(x, ids, kernels.prepare_experts(layer), MANY)
    same = (choice.experts == experts).all(1)
    assert same.float().mean() >= 0.99  # sums in another order decide between near equals
    torch.testing.assert_close(choice.weights[same], weights[same], rtol=2e-5, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("chosen", [FEW, config(16, 32, 2, 1), config(64, 128, 3, 4), kernels.TileConfig.of(64)], ids=str)
def test_all_tokens_to_the_same_experts(chosen: kernels.MoeConfig | kernels.TileConfig) -> None:
    layer = random_layer(1024, 512, 16, 2, "fp4", 128, hashed=True)
    x, ids = random_input(300, 1024)
    ids.fill_(3)
    assert_close(run(layer, x, ids, chosen), expert_layer(x, ids, layer))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "inner", "tile", "block"), [(256, 512, None, 16), (768, 256, 64, 32), (512, 768, 32, 64), (512, 256, 128, 128)]
)
def test_tiles_of_ragged_blocks(dim: int, inner: int, tile: int | None, block: int) -> None:
    """Experts without tokens, with few and with several blocks; NaN in rows that fill up the batch reaches nobody."""
    layer = random_layer(dim, inner, 24, 3, "fp4", tile, "plain", hashed=True)
    x, _ = random_input(300, dim)
    ids = torch.randint(0, 300, (300,), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(2)).sub(200).clamp(0, 15)
    expected = expert_layer(x, ids, layer)
    x, ids = x.repeat_interleave(2, 0), ids.repeat_interleave(2)
    x[1::2], ids[1::2] = float("nan"), -1
    out = run(layer, x, ids, kernels.TileConfig.of(block))
    assert (out[1::2] == 0).all()
    assert_close(out[::2], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_tiles_of_parts_of_several_ranks(name: str) -> None:
    dim, inner, tile, shared = REAL[name]
    layer = random_layer(dim, inner, 24, 6, "fp4", tile, shared)
    x, ids = random_input(200, dim)
    chosen, weights = kernels.choices_of(x, ids, tiles.with_products(kernels.prepare_experts(layer)))
    chosen[7] = -1
    total = torch.zeros(200, dim, device=DEVICE)
    for first, stop in ((0, 1), (1, 16), (16, 24)):
        cut = tiles.with_products(kernels.prepare_experts(experts_of(layer, first, stop)))
        assert cut.products is not None
        total += kernels.part_of_experts(x, chosen, weights, cut, first)
    assert total[7].eq(0).all()
    kept = torch.arange(200, device=DEVICE) != 7
    assert_close(total[kept].bfloat16(), moe(x[kept], chosen[kept], weights[kept], layer.w13, layer.w2, layer.limit).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_a_token_keeps_its_bits_in_tiles(name: str) -> None:
    """Wherever in a tile, and among whichever others: one order of every sum."""
    dim, inner, tile, shared = REAL[name]
    layer = tiles.with_products(kernels.prepare_experts(random_layer(dim, inner, 8, 6, "fp4", tile, shared)))
    x, ids = random_input(400, dim)
    order = torch.randperm(400, device=DEVICE)[:250]
    for config in TILES:
        choice = kernels.route(x, ids, layer, config)
        part = kernels.Choice(*(value[order].contiguous() for value in (choice.experts, choice.weights, choice.inputs)))
        together = kernels.routed_experts(choice, layer, config).outputs.view(400, -1)
        assert torch.equal(kernels.routed_experts(part, layer, config).outputs.view(250, -1), together[order])


@pytest.mark.gpu
def test_tiles_of_many_experts() -> None:
    """All of V4.1's, some of which few tokens want."""
    layer = random_layer(5120, 2304, 384, 6, "fp4", 32, "fp8_32")
    x, ids = random_input(500, 5120)
    assert_close(run(layer, x, ids, kernels.TileConfig.of(16)), expert_layer(x, ids, layer))


@pytest.mark.gpu  # the interpreter's products give a row other bits by its place in a tile
def test_routing_of_many_tokens_has_the_bits_of_few() -> None:
    """At a temperature that is no power of two, and by more columns than one partial sum takes."""
    layer = kernels.prepare_experts(replace(random_layer(512, 128, 16, 2, "fp4", 128), temperature=3.0))
    x, ids = random_input(70, 512)
    config = kernels.moe_config(70 * 2, 16, batch_invariant=True)
    together = kernels.route(x, ids, layer, config, batch_invariant=True)
    for rows in (slice(0, 1), slice(30, 70)):
        part = kernels.route(x[rows], ids[rows], layer, config, batch_invariant=True)
        assert torch.equal(part.weights, together.weights[rows]) and torch.equal(part.experts, together.experts[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_a_token_keeps_its_bits_in_any_batch(name: str) -> None:
    """Alone, permuted, and among rows that fill up: one kernel, hence one order of every sum."""
    dim, inner, tile, shared = REAL[name]
    layer = kernels.prepare_experts(random_layer(dim, inner, 32, 6, "fp4", tile, shared))
    x, ids = random_input(96, dim)
    together = kernels.moe(x, ids, layer, batch_invariant=True)
    order = torch.randperm(96, device=DEVICE)
    assert torch.equal(kernels.moe(x[order], ids[order], layer, batch_invariant=True), together[order])
    for token in (0, 50, 95):
        alone = kernels.moe(x[token : token + 1], ids[token : token + 1], layer, batch_invariant=True)
        assert torch.equal(alone[0], together[token])
    beside = kernels.moe(x, ids, layer, batch_invariant=True, beside=torch.cuda.Stream())
    assert torch.equal(beside, together)
    padded = torch.cat([x[:5], torch.full_like(x[:11], float("nan"))]), torch.cat([ids[:5], torch.full_like(ids[:11], -1)])
    assert torch.equal(kernels.moe(*padded, layer, batch_invariant=True)[:5], together[:5])


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_batch_invariant_ranks_of_real_sizes_have_the_bits_of_one(name: str, tokens: int) -> None:
    """Each rank computes the rows of others beside these, as the experts' owner does."""
    dim, inner, tile, shared = REAL[name]
    layer = random_layer(dim, inner, 32, 6, "fp4", tile, shared)
    x, ids = random_input(96, dim)
    expected = kernels.moe(x[:tokens], ids[:tokens], kernels.prepare_experts(layer), batch_invariant=True)
    assert torch.equal(sum_over_ranks(layer, x, ids, [0, 8, 16, 24, 32])[0][:tokens], expected)


@pytest.mark.gpu
def test_a_graph_replays_what_a_call_computes() -> None:
    layer = kernels.prepare_experts(random_layer(1024, 512, 16, 2, "fp4", 128))
    x, ids = random_input(8, 1024)
    expected = kernels.moe(x, ids, layer)
    graph = torch.cuda.CUDAGraph()
    static = torch.zeros_like(x)
    kernels.moe(static, ids, layer)
    with torch.cuda.graph(graph):
        out = kernels.moe(static, ids, layer, beside=torch.cuda.Stream())
    for _ in range(3):
        static.copy_(x)
        graph.replay()
        assert torch.equal(out, expected)
        static.zero_()


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_a_product_that_begins_while_the_one_before_ends_has_its_input(name: str) -> None:
    """With a plan, some blocks of which stay empty: replays beside other work give the bits of the first call."""
    dim, inner, tile, shared = REAL[name]
    layer = random_layer(dim, inner, 32, 6, "fp4", tile, shared)
    x, ids = random_input(8, dim)
    ids[3:5] = -1
    chosen, prepared = config(8, 32, 2, 1), kernels.prepare_experts(layer)
    expected = kernels.moe(x, ids, prepared, config=chosen)
    assert_close(expected[:3], expert_layer(x[:3], ids[:3], layer))
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        outs = [kernels.moe(x, ids, prepared, config=chosen, beside=other) for _ in range(4)]
    busy, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE)
    for _ in range(50):
        with torch.cuda.stream(busy):
            torch.mm(noise, noise)
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, expected) for out in outs)
