"""RMS norm: fp32 inside, one rounding."""

import pytest
import torch

from abyssal.ops.norm import rms_norm


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
