"""Hyper-connections against the steps of V4 spec 2.2 to 2.4, written out per token."""

import functools
import itertools
import math

import pytest
import torch

from abyssal.ops import hyper_connection as hc
from abyssal.ops.hyper_connection import gluon as tiles
from abyssal.ops.hyper_connection import triton as kernel

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


@pytest.mark.parametrize("spread", [0.1, 30.0, 1e4])
def test_coefficients_of_one_token_are_rounded_once(spread):
    base = torch.randn(24, generator=torch.Generator().manual_seed(3)) * spread  # of streams of zeros, the raw coefficients
    weights = hc.MixWeights(torch.randn(24, 32), base, torch.ones(24))
    pre, post, comb = hc.few_coefficients(torch.zeros(1, 4, 8), weights, 1e-6, 20, EPS)
    exact = base.double()
    for got, expected in (
        (pre, exact[:4].sigmoid() + EPS),
        (post, 2 * exact[4:8].sigmoid()),
        (comb, sinkhorn_slow(exact[8:].view(4, 4), 20)),
    ):
        torch.testing.assert_close(got[0].double(), expected, rtol=1e-7, atol=1e-15)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_few_tokens_are_mixed_as_many(tokens):
    torch.manual_seed(tokens)
    streams, out, norm = torch.randn(8, 4, 24), torch.randn(8, 24), torch.ones(24)
    weights = hc.MixWeights.from_checkpoint(torch.randn(24, 96) * 0.2, torch.randn(24), torch.tensor([0.5, 1.5, 2.0]), 4)
    options = {"rms_eps": 1e-6, "eps": EPS, "iterations": 20}
    before = hc.site(streams, norm, weights, **options)
    many = hc.site(streams, norm, weights, out=out, post=before.post, comb=before.comb, **options)
    first = hc.site(streams[:tokens], norm, weights, **options)
    few = hc.site(streams[:tokens], norm, weights, out=out[:tokens], post=first.post, comb=first.comb, **options)
    for name in ("streams", "pre", "post", "comb"):
        torch.testing.assert_close(getattr(few, name), getattr(many, name)[:tokens], rtol=1e-5, atol=1e-6)


def test_not_a_number_stays_with_its_token():
    streams = torch.randn(hc.FEW_TOKENS, 4, 8)
    streams[-1, 0, 0] = torch.nan
    weights = hc.MixWeights(torch.randn(24, 32), torch.randn(24), torch.ones(24))
    for part in hc.few_coefficients(streams, weights, 1e-6, 20, EPS):
        assert part[-1].isnan().all()
        assert part[:-1].isfinite().all()


@pytest.mark.parametrize("few", [False, True])
def test_whole_site_and_direction_of_comb(few):
    torch.manual_seed(1)
    tokens, streams, hidden = 5, 4, 24
    h, out = torch.randn(tokens, streams, hidden), torch.randn(tokens, hidden)
    fn, base, scale = torch.randn(24, streams * hidden) * 0.2, torch.randn(24), torch.tensor([0.5, 1.5, 2.0])
    weights = hc.MixWeights.from_checkpoint(fn, base, scale, streams)
    if few:
        pre, post, comb = hc.few_coefficients(h, weights, 1e-6, 20, EPS)
    else:
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


# The kernel

KERNEL_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_site(tokens, hidden, *, own=True, source="expand", rows=24, seed=0, scale=1.0, rms_eps=1e-6, iterations=3):
    """(arguments of hc.site but the weights, weights): random values of every size that a trained model has."""
    torch.manual_seed(seed)
    streams = (torch.randn(tokens, 4, hidden) * torch.rand(tokens, 1, 1).mul(4).exp() * scale).bfloat16()
    weights = None
    if rows:
        parts = torch.rand(3 if rows == 24 else 1) + 0.5
        fn = torch.randn(rows, 4 * hidden) / math.sqrt(4 * hidden)
        weights = hc.MixWeights.from_checkpoint(
            fn.to(KERNEL_DEVICE), torch.randn(rows).to(KERNEL_DEVICE), parts.to(KERNEL_DEVICE), 4
        )
    arguments = {
        "source": streams[:, 0].contiguous() if source == "embedding" else streams,
        "norm_weight": torch.rand(hidden) + 0.5,
    }
    if source == "expand":
        arguments["out"] = (torch.randn(tokens, hidden) * scale).bfloat16()
        arguments["post"] = torch.rand(tokens, 4) * 2
        arguments["comb"] = hc.sinkhorn(torch.randn(tokens, 4, 4), 20, EPS).contiguous()
    if not own:
        arguments["pre"] = torch.rand(tokens, 4)
    arguments = {name: tensor.to(KERNEL_DEVICE) for name, tensor in arguments.items()}
    return arguments | {"rms_eps": rms_eps, "eps": EPS, "iterations": iterations}, weights


def run_kernel(arguments, weights, state=None, **more):
    tokens = arguments["source"].shape[0]
    prepared = kernel.KernelWeights.prepare(weights) if weights is not None else None
    state = state or kernel.HandoverState.of_size(32 * max(tokens, 64) * 4, max(tokens, 1), arguments["source"].device)
    return kernel.site(weights=prepared, state=state, **arguments, **more)


def half_ulp(value):
    """Half the distance of neighbouring bf16 numbers at `value`: the largest error of rounding to bf16."""
    return torch.ldexp(torch.ones_like(value), torch.frexp(value)[1].clamp(min=-125) - 9)


def rounds_to(got, exact, error, name):
    """Every element of `got` is the bf16 rounding of some value within `error` of `exact`, both fp64."""
    excess = (got.double() - exact).abs() - error - half_ulp(exact.abs() + error)
    assert (excess <= 0).all(), (
        f"{name}: {(excess > 0).sum()} of {excess.numel()} elements, worst {excess.argmax()} by {excess.max()}"
    )


def check_site(got, arguments, weights, with_mean=False):
    """Every element of every row: streams and mean the roundings of values with fp32 errors, coefficients within 1e-4 of fp32.

    x is rounded twice, as the collapsed vector and after the norm. The norm may be taken of the vector before its rounding or
    after it, with one element more or less rounded to the other side.
    """
    n = got.streams.double()
    if "out" in arguments:
        post, comb = arguments["post"].double().unsqueeze(-1), arguments["comb"].double().transpose(1, 2)
        out, source = arguments["out"].double().unsqueeze(1), arguments["source"].double()
        size = post * out.abs() + comb @ source.abs()
        rounds_to(n, post * out + comb @ source, 6 * 2**-24 * size, "streams")
    else:
        source = arguments["source"]
        assert torch.equal(got.streams, source if source.dim() == 3 else source.unsqueeze(1).expand(-1, 4, -1))
    # From here on from the kernel's own streams: a rounding of theirs to the other side is no error of the coefficients.
    again = {name: value for name, value in arguments.items() if name not in ("out", "post", "comb")} | {"source": got.streams}
    expected = hc.site(weights=weights, **again, with_mean=with_mean)
    for name in ("pre", "post", "comb"):
        a, b = getattr(got, name), getattr(expected, name)
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
    if with_mean:
        rounds_to(got.mean, n.mean(1), 4 * 2**-24 * n.abs().mean(1), "mean")
    else:
        assert got.mean is None

    pre = arguments.get("pre", got.pre).double().unsqueeze(-1)
    y, error = (pre * n).sum(1), 2**-16 * (pre * n.abs()).sum(1)
    error = error + half_ulp(y.abs() + error)
    squares = y.pow(2).mean(-1, keepdim=True)
    factor, rounded = (
        1 / torch.sqrt(s + arguments["rms_eps"]) for s in (squares, y.bfloat16().double().pow(2).mean(-1, keepdim=True))
    )
    share = 2**-8 * y.pow(2).amax(-1, keepdim=True) / y.shape[-1] / squares
    spread = (factor - rounded).abs() + factor * (share + 2**-16)
    weight = arguments["norm_weight"].double()
    rounds_to(got.x, y * factor * weight, weight * (error * factor + (y.abs() + error) * spread), "x")


def small(block_tokens, block_hidden, splits, steps, one_launch=False, num_stages=2):
    return kernel.LaunchConfig(block_tokens, block_hidden, splits, steps, 4, num_stages, 255, one_launch)


@pytest.mark.parametrize("own", [True, False], ids=["v4", "v41"])
@pytest.mark.parametrize("source", ["expand", "streams", "embedding"])
def test_kernel_equals_reference(own, source):
    """Ragged last block; two launches with several slices of several steps each, and one launch."""
    arguments, weights = make_site(5, 96, own=own, source=source)
    got = run_kernel(arguments, weights, config=small(4, 16, 3, 2), with_mean=True)
    check_site(got, arguments, weights, with_mean=True)
    arguments, weights = make_site(5, 32, own=own, source=source)
    got = run_kernel(arguments, weights, config=small(4, 32, 1, 1, one_launch=True), with_mean=True)
    check_site(got, arguments, weights, with_mean=True)
    if source == "streams":
        assert got.streams is arguments["source"]


# Programs of several slices wait for each other only where they run side by side.
LAUNCHES = [small(1, 32, 2, 1), small(2, 64, 1, 1), small(2, 16, 4, 1), small(4, 16, 1, 4), small(2, 64, 1, 1, True)]
if KERNEL_DEVICE == "cuda":
    LAUNCHES += [small(1, 32, 2, 1, True), small(2, 16, 4, 1, True), small(16, 16, 4, 1), small(64, 32, 1, 2, num_stages=3)]


@pytest.mark.parametrize("config", LAUNCHES, ids=str)
@pytest.mark.parametrize("own", [True, False], ids=["v4", "v41"])
def test_kernel_launch_shapes(config, own):
    arguments, weights = make_site(3, 64, own=own, seed=1)
    check_site(run_kernel(arguments, weights, config=config), arguments, weights)


@pytest.mark.parametrize("own", [True, False], ids=["v4", "v41"])
def test_kernel_programs_of_one_launch_hand_over(own):
    """Groups of four programs and a ragged last group.

    The interpreter runs programs one after the other without waiting: of three equal launches the last finds all that they hand over.
    """
    arguments, weights = make_site(19, 64, own=own, seed=2)
    state = kernel.HandoverState.of_size(1000, 8, KERNEL_DEVICE)
    config = small(16, 16, 4, 1, one_launch=True)
    for _ in range(3):
        got = run_kernel(arguments, weights, state, config=config)
    check_site(got, arguments, weights)
    assert (state.arrivals & 0x7FFFFFFF == 0).all(), "the next launch would not find the counters as it needs them"


def test_kernel_last_sites():
    """V4's final collapse with 4 coefficients, V4.1's with those of the site before and no weights."""
    arguments, weights = make_site(3, 64, rows=4)
    got = run_kernel(arguments, weights)
    check_site(got, arguments, weights)
    assert got.post is None and got.comb is None
    arguments, weights = make_site(3, 64, rows=0, own=False)
    got = run_kernel(arguments, weights)
    check_site(got, arguments, weights)
    assert got.pre is None


def test_kernel_one_hot_pre_is_the_embedding():
    """V4.1's first site: the sublayer sees the embedding exactly (V4.1 spec 3.1)."""
    arguments, weights = make_site(2, 64, own=False, source="embedding", rms_eps=1e-20)
    arguments["pre"] = torch.tensor([[1.0, 0, 0, 0]] * 2, device=KERNEL_DEVICE)
    got = run_kernel(arguments, weights)
    check_site(got, arguments, weights)
    assert torch.equal(got.streams, arguments["source"].unsqueeze(1).expand(-1, 4, -1))


def test_kernel_released_sinkhorn_vector():
    """Without input dependence the logits of comb are base."""
    arguments, weights = make_site(2, 64, iterations=20)
    c = torch.tensor([[0.0, 1, -1, 2], [1, 0, 0, -2], [3, -1, 0.5, 0], [0, 0, 1, 1]], device=KERNEL_DEVICE)
    weights.fn.zero_()
    weights.base[8:] = c.flatten()
    expected = torch.tensor([0.0309978, 0.3578961, 0.0400030, 0.5711022], device=KERNEL_DEVICE)
    got = run_kernel(arguments, weights)
    torch.testing.assert_close(got.comb[:, 0], expected.expand(2, 4), rtol=0, atol=2e-7)
    torch.testing.assert_close(got.comb, hc.sinkhorn(c.expand(2, 4, 4), 20, EPS), rtol=0, atol=3e-7)


@pytest.mark.parametrize("spread", [30.0, 200.0])
def test_kernel_sinkhorn_far_from_uniform(spread):
    arguments, weights = make_site(2, 64, seed=3, iterations=20)
    weights.fn.zero_()
    weights.base[8:] = torch.randn(16, device=KERNEL_DEVICE) * spread
    check_site(run_kernel(arguments, weights), arguments, weights)


@pytest.mark.parametrize("scale", [1e-12, 1e4])
def test_kernel_small_and_large_streams(scale):
    arguments, weights = make_site(2, 64, scale=scale, rms_eps=1e-20)
    check_site(run_kernel(arguments, weights), arguments, weights)


@pytest.mark.parametrize("own", [True, False], ids=["v4", "v41"])
def test_kernel_is_batch_invariant_and_repeats(own):
    """A token's result does not depend on its place, nor on the tokens beside it."""
    arguments, weights = make_site(6, 64, own=own, seed=4)
    config = small(4, 16, 2, 2)
    first, again = (run_kernel(arguments, weights, config=config) for _ in range(2))
    order = torch.tensor([3, 5, 0], device=KERNEL_DEVICE)
    fewer = {k: v[order].contiguous() if torch.is_tensor(v) and k != "norm_weight" else v for k, v in arguments.items()}
    part = run_kernel(fewer, weights, config=config)
    for name in ("streams", "x", "pre", "post", "comb"):
        assert torch.equal(getattr(first, name), getattr(again, name)), name
        assert torch.equal(getattr(first, name)[order], getattr(part, name)), name


@pytest.mark.parametrize(
    ("hidden", "counts"), [(64, (1, 5, 12)), pytest.param(5120, (1, 2, 8, 64, 300, 1000), marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("own", [True, False], ids=["v4", "v41"])
def test_batch_invariant_mode_is_bit_equal_in_any_batch(own, hidden, counts):
    """Few tokens, many, and on a GPU in another order: the interpreter's products give a row other bits in another place."""
    most = max(counts)
    arguments, weights = make_site(most, hidden, own=own, seed=5)
    state = kernel.HandoverState.allocate(most, hidden, KERNEL_DEVICE, batch_invariant=True)
    together = run_kernel(arguments, weights, state, batch_invariant=True)
    check_site(together, arguments, weights)
    for count in counts:
        order = (torch.randperm(most) if KERNEL_DEVICE == "cuda" else torch.arange(most))[:count].to(KERNEL_DEVICE)
        part = {k: v[order].contiguous() if torch.is_tensor(v) and k != "norm_weight" else v for k, v in arguments.items()}
        got = run_kernel(part, weights, state, batch_invariant=True)
        for name in ("streams", "x", "pre", "post", "comb"):
            assert torch.equal(getattr(got, name), getattr(together, name)[order]), (count, name)


def test_kernel_writes_only_its_tokens():
    """State and outputs beyond the tokens stay untouched: poison in the hand-over rows of missing tokens is never read."""
    arguments, weights = make_site(1, 64)
    check_site(run_kernel(arguments, weights, config=small(4, 16, 4, 1)), arguments, weights)


@pytest.mark.parametrize(("tokens", "hidden"), [(3, 48), (0, 64), pytest.param(3000, 5120, marks=pytest.mark.gpu)])
def test_kernel_expand(tokens, hidden):
    arguments, _ = make_site(tokens, hidden, rows=0)
    parts = [arguments[name] for name in ("source", "out", "post", "comb")]
    got, expected = kernel.expand(*parts), hc.expand(*parts)
    torch.testing.assert_close(got.float(), expected.float(), rtol=2**-7, atol=1e-5)


def test_kernel_without_tokens():
    arguments, weights = make_site(0, 64)
    got = run_kernel(arguments, weights)
    assert got.x.shape == (0, 64) and got.comb.shape == (0, 4, 4)


def test_kernel_refuses_by_name():
    good, weights = make_site(2, 64)
    bad = [
        ({"source": good["source"].float()}, TypeError, "torch.float32"),
        ({"source": good["source"][:, :3]}, ValueError, "3 streams"),
        ({"out": good["out"].float()}, ValueError, "out is torch.float32"),
        ({"out": None}, ValueError, "out, post and comb"),
        ({"comb": good["comb"].transpose(1, 2)}, ValueError, "comb has strides"),
        ({"norm_weight": good["norm_weight"].bfloat16()}, ValueError, "norm_weight is torch.bfloat16"),
        ({"norm_weight": good["norm_weight"][:32]}, ValueError, "norm_weight is"),
    ]
    for change, error, text in bad:
        with pytest.raises(error, match=text):
            run_kernel(good | change, weights)
    with pytest.raises(ValueError, match="given `pre`"):
        run_kernel(good, None)
    with pytest.raises(ValueError, match="allocate it for more tokens"):
        run_kernel(good, weights, state=kernel.HandoverState.of_size(1, 1, KERNEL_DEVICE))
    with pytest.raises(ValueError, match="hidden size 24"):
        kernel.launch_config(1, 24, 132, True)
    with pytest.raises(ValueError, match="24 or 4 coefficients, not 15"):
        kernel.KernelWeights.prepare(hc.MixWeights(torch.zeros(15, 8), torch.zeros(15), torch.zeros(15)))


@pytest.mark.parametrize("hidden", [32, 48, 64, 256, 4096, 5120, 7168])
def test_kernel_config_and_state_cover_every_token_count(hidden):
    state = kernel.HandoverState.allocate(1300, hidden, "cpu", num_sms=132)
    for tokens in (*range(1, 130), *range(130, 1301, 13)):
        for own, one_launch in itertools.product((True, False), (True, False)):
            config = kernel.launch_config(tokens, hidden, 132, own, one_launch)
            assert config.splits * config.steps * config.block_hidden == hidden
            assert state.partials.shape[0] >= config.partial_rows(tokens)
            if config.one_launch:
                assert one_launch and config.steps == 1 and config.programs(tokens) <= config.resident(132)


def test_kernel_weights_keep_sixteen_bits():
    fn = torch.randn(24, 256)
    prepared = kernel.KernelWeights.prepare(hc.MixWeights(fn, torch.arange(24.0), torch.arange(24.0)))
    total = prepared.fn.float().sum(0)
    assert prepared.base.tolist() == [*range(8, 24), *range(4, 8), *range(4)]
    assert ((total[torch.argsort(prepared.base)] - fn).abs() <= fn.abs() * 2**-16).all()


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [4096, 5120, 7168])
@pytest.mark.parametrize("own", [True, False], ids=["v4", "v41"])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 33, 64, 200, 512, 1000])
def test_kernel_at_released_sizes(tokens, own, hidden):
    """One launch and two: both as exact as they must be, with the same streams, and the same bits each time."""
    arguments, weights = make_site(tokens, hidden, own=own, seed=tokens, iterations=20)
    state = kernel.HandoverState.allocate(1024, hidden, "cuda")
    streams = None
    for one_launch in (True, False):
        config = kernel.launch_config(tokens, hidden, kernel.sm_count(torch.device("cuda", 0)), own, one_launch)
        got, again = (run_kernel(arguments, weights, state, config=config) for _ in range(2))
        check_site(got, arguments, weights)
        for name in ("streams", "x", "pre", "post", "comb"):
            assert torch.equal(getattr(got, name), getattr(again, name)), name
        streams = got.streams if streams is None else streams
        assert torch.equal(got.streams, streams)
    assert not (state.arrivals & 0x7FFFFFFF).any()


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [256, 4096, 5120, 7168])
@pytest.mark.parametrize(
    ("source", "rows", "own"),
    [("embedding", 24, True), ("expand", 24, True), ("expand", 4, True), ("expand", 24, False), ("expand", 0, False)],
)
def test_a_token_has_the_same_bits_alone_and_among_eight(own, source, rows, hidden):
    arguments, weights = make_site(8, hidden, own=own, source=source, rows=rows, seed=6, iterations=20)
    state = kernel.HandoverState.allocate(8, hidden, "cuda")
    together = run_kernel(arguments, weights, state)
    for some in (*([i] for i in range(8)), [6, 1], [2, 7, 0], [5, 4, 3, 2, 1]):
        part = {k: v[some].contiguous() if torch.is_tensor(v) and k != "norm_weight" else v for k, v in arguments.items()}
        got = run_kernel(part, weights, state)
        for name in ("streams", "x", "pre", "post", "comb"):
            if getattr(together, name) is not None:
                assert torch.equal(getattr(got, name), getattr(together, name)[some]), (some, name)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64, 300])
@pytest.mark.parametrize(
    ("source", "rows", "own"),
    [
        ("embedding", 24, True), ("embedding", 24, False), ("streams", 24, True), ("streams", 24, False),
        ("expand", 4, True), ("expand", 0, False), ("streams", 0, False),
    ],
)  # fmt: skip
def test_kernel_other_forms(source, rows, own, tokens):
    """First and last sites, and sites behind a change of the streams, at the token counts of every launch shape."""
    arguments, weights = make_site(tokens, 4096, own=own, source=source, rows=rows, seed=tokens, iterations=20)
    got = run_kernel(arguments, weights, kernel.HandoverState.allocate(300, 4096, "cuda"), with_mean=True)
    check_site(got, arguments, weights, with_mean=True)


@pytest.mark.gpu
@pytest.mark.parametrize("own", [True, False], ids=["v4", "v41"])
def test_kernel_at_many_tokens(own):
    arguments, weights = make_site(8192, 5120, own=own, iterations=20)
    got = run_kernel(arguments, weights, kernel.HandoverState.allocate(8192, 5120, "cuda"))
    check_site(got, arguments, weights)


@pytest.mark.parametrize("own", [True, False], ids=["v4", "v41"])
def test_tiles_config(own):
    """Where tiles run, a program of two per multiprocessor has its registers and its shared memory, and the ring is longer than the lag."""
    for hidden, tokens, sms in itertools.product((48, 64, 256, 4096, 5120, 7168), (1, 64, 65, 512, 1025, 8192), (78, 132)):
        config = tiles.launch_config(tokens, hidden, sms, own)
        if isinstance(config, tiles.TileConfig):
            assert hidden % 128 == 0 and tokens > 64
            programs = config.groups * (hidden // 128 + config.finishers)
            assert 2 * sms * 0.75 <= config.groups * hidden // 128 < programs <= 2 * sms
            assert config.finishers >= 1 and config.lag < tiles.RING.value
            assert 2048 * (config.lag + 1) * (4 if own else 1) + (5 * 2048 + 640) * config.ahead + 8192 < (227 << 10) / 2 - 1024
        else:
            assert config == kernel.launch_config(tokens, hidden, sms, own)
    assert isinstance(tiles.launch_config(4096, 5120, 132, own), tiles.TileConfig)
    assert isinstance(tiles.launch_config(4096, 5120, 60, own), kernel.LaunchConfig)


def test_tiles_refuse_by_name():
    arguments, weights = make_site(2, 256)
    state = tiles.HandoverState.allocate(2, 256, KERNEL_DEVICE, num_sms=4)
    site = functools.partial(tiles.site, weights=kernel.KernelWeights.prepare(weights), state=state, **arguments)
    with pytest.raises(ValueError, match="without the mean"):
        site(config=tiles.TileConfig(1, 1, 7, 3), with_mean=True)
    with pytest.raises(ValueError, match="hand-over state holds"):
        site(config=tiles.TileConfig(5, 1, 7, 3))


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
hopper = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]


def check_tiles(tokens, hidden, own, config):
    """As exact as it must be, with the same bits each time, and for each token wherever it lies in the batch."""
    arguments, weights = make_site(tokens, hidden, own=own, seed=tokens, iterations=20)
    state, prepared = tiles.HandoverState.allocate(64, hidden, "cuda"), kernel.KernelWeights.prepare(weights)
    got, again = (tiles.site(weights=prepared, state=state, config=config, **arguments) for _ in range(2))
    check_site(got, arguments, weights)
    order = torch.randperm(tokens, device="cuda")[: (tokens + 1) // 2]
    fewer = {k: v[order].contiguous() if torch.is_tensor(v) and k != "norm_weight" else v for k, v in arguments.items()}
    part = tiles.site(weights=prepared, state=state, config=config, **fewer)
    for name in ("streams", "x", "pre", "post", "comb"):
        assert torch.equal(getattr(got, name), getattr(again, name)), name
        assert torch.equal(getattr(got, name)[order], getattr(part, name)), name


@pytest.mark.parametrize("hidden", [pytest.param(hidden, marks=hopper) for hidden in (4096, 5120, 7168)])
@pytest.mark.parametrize("own", [True, False], ids=["v4", "v41"])
def test_tiles_at_released_sizes(own, hidden):
    for tokens in (65, 300, 4100):
        check_tiles(tokens, hidden, own, tiles.launch_config(1 << 20, hidden, 132, own))


@pytest.mark.parametrize("own", [pytest.param(True, marks=hopper, id="v4"), pytest.param(False, marks=hopper, id="v41")])
def test_tiles_of_few_groups_and_more_groups_than_tiles(own):
    """A ring that is used again and again, one finisher, and programs without a tile."""
    for groups, finishers, tokens in ((1, 1, 700), (2, 3, 1), (3, 1, 9), (20, 1, 700)):
        check_tiles(tokens, 256, own, tiles.TileConfig(groups, finishers, tiles.LAG, tiles.AHEAD))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [kernel, pytest.param(tiles, marks=hopper)], ids=["triton", "gluon"])
def test_kernel_replays_in_a_graph_beside_other_work(kernel):
    """Launches of several shapes share one state; a second stream is busy; every replay gives the same bits."""
    state = kernel.HandoverState.allocate(512, 5120, "cuda")
    sites = [make_site(tokens, 5120, own=own, seed=tokens, iterations=20) for tokens in (1, 8, 64, 512) for own in (True, False)]
    prepared = [kernel.KernelWeights.prepare(weights) for _, weights in sites]

    def run():
        return [kernel.site(weights=w, state=state, **a) for (a, _), w in zip(sites, prepared, strict=True)]

    expected = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    other, matrix = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(200):
        with torch.cuda.stream(other):
            torch.mm(matrix, matrix)
        graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(got, expected, strict=True):
        for name in ("streams", "x", "pre", "post", "comb"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
