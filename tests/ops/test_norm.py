"""RMS norm: fp32 inside, one rounding."""

import pytest
import torch

import abyssal.ops.norm.triton as kernels
from abyssal.ops.linear import quantize_e4m3_tiles
from abyssal.ops.linear.triton import quantise
from abyssal.ops.norm import rms_norm
from tests.support.records import DEVICE, bf16_steps


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("eps", [1e-6, 1e-20])
def test_matches_double(scale, eps):
    torch.manual_seed(0)
    x, weight = torch.randn(7, 33) * scale, torch.randn(33)
    exact = weight.double() * x.double() * (x.double().pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    torch.testing.assert_close(rms_norm(x, weight, eps).double(), exact, rtol=2e-6, atol=1e-30)


def test_bf16_is_rounded_once():
    torch.manual_seed(0)
    x, weight = torch.randn(9, 64).bfloat16(), torch.rand(64) + 0.5
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm(x.float(), weight, 1e-6).bfloat16())


def test_zeros_stay_zero():
    assert torch.equal(rms_norm(torch.zeros(2, 8), None, 1e-6), torch.zeros(2, 8))


# Kernel


@pytest.mark.parametrize("count", [1, 5])
def test_kernel_of_one_and_two_tensors(count):
    """Strided rows of any width; fp32 sums in another order move a bf16 result by one step at most."""
    torch.manual_seed(0)
    wide = (torch.randn(count, 128, device=DEVICE) * torch.logspace(-4, 4, count, device=DEVICE)[:, None]).bfloat16()
    wide[-1] = 0
    pairs = [(wide[:, :80], torch.rand(80, device=DEVICE) + 0.5), (wide[:, 96:], torch.rand(32, device=DEVICE) + 0.5)]
    for chosen in (pairs, pairs[1:]):
        for (x, weight), got in zip(chosen, kernels.rms_norm(*chosen, eps=1e-20), strict=True):
            assert got.is_contiguous() and not got.isnan().any()
            assert bf16_steps(got, rms_norm(x, weight, 1e-20)).max() <= 1
    assert kernels.rms_norm((wide[:0], torch.ones(128, device=DEVICE)), eps=1e-6)[0].shape == (0, 128)


@pytest.mark.parametrize("tile", [32, 128])
def test_kernel_rounds_the_first_result_for_a_product(tile):
    torch.manual_seed(0)
    x, y = (torch.randn(3, n, device=DEVICE).bfloat16() for n in (320, 96))
    pairs = (x, torch.rand(320, device=DEVICE)), (y, torch.rand(96, device=DEVICE))
    plain, other = kernels.rms_norm(*pairs, eps=1e-6)
    quantised, same = kernels.rms_norm(*pairs, eps=1e-6, tile=tile)
    assert torch.equal(quantised.values(), quantize_e4m3_tiles(plain, tile)) and torch.equal(same, other)
    codes = quantise(plain, tile)
    assert torch.equal(codes.codes.view(torch.uint8), quantised.codes.view(torch.uint8))
    assert torch.equal(codes.scales, quantised.scales)
