"""Hadamard rotation: released vector, orthonormality, order."""

import pytest
import torch

from abyssal.ops.hadamard import hadamard, hadamard_matrix


def test_released_vector():
    x = torch.tensor([1.0, 2, 3, 4])
    assert torch.equal(x @ hadamard_matrix(4, x.device), torch.tensor([5.0, -1, -2, 0]) * 2)


def test_released_vector_scaled():
    assert torch.equal(hadamard(torch.tensor([1.0, 2, 3, 4])), torch.tensor([5.0, -1, -2, 0]))


@pytest.mark.parametrize("size", [1, 2, 64, 128])
def test_orthonormal_and_own_inverse(size):
    torch.manual_seed(0)
    x, y = torch.randn(5, size), torch.randn(5, size)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=0, atol=2e-6)
    torch.testing.assert_close((hadamard(x) * hadamard(y)).sum(-1), (x * y).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [0, 3, 96])
def test_other_sizes_are_refused(size):
    with pytest.raises(ValueError, match=str(size)):
        hadamard_matrix(size, torch.device("cpu"))
