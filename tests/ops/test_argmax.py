"""The largest logit: ties, rows without a usable one, odd widths."""

from __future__ import annotations

import math

import pytest
import torch

import abyssal.ops.argmax.triton as kernels
from abyssal.ops.argmax import argmax
from tests.support.records import DEVICE


@pytest.mark.parametrize("of", [argmax, kernels.argmax])
def test_the_first_of_equal_values_and_usable_rows(of):
    """Ties within a part and across parts; the values that make a row unusable do not touch its neighbours."""
    wide = torch.full((8, 9001), -5.0, device=DEVICE)
    logits = wide[:, 1:]  # 9,000 columns of rows that are farther apart
    logits[0, [7, 8, 8999]] = 3.0
    logits[1, [4095, 4096, 8191]] = -1.0
    logits[2] = -math.inf
    logits[3, 8500] = math.nan
    logits[4, [1, 5000]] = torch.tensor([math.inf, 2.0], device=DEVICE)
    logits[5, 8999] = 3.4e38
    logits[6] = -3.4e38
    logits[7, 1:] = -math.inf
    ids, usable = of(logits).tolist()
    assert usable == [1, 1, 0, 0, 0, 1, 1, 1]
    assert [ids[i] for i in (0, 1, 5, 6, 7)] == [7, 4095, 8999, 0, 0]
    assert all(0 <= i < 9000 for i in ids)


@pytest.mark.parametrize("shape", [(1, 1), (3, 130), (5, 4096), (2, 4097), (0, 100)])
def test_kernel_equals_the_reference(shape):
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(4).round().to(DEVICE)  # many are equal
    assert torch.equal(kernels.argmax(logits), argmax(logits))
