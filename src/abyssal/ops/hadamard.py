"""Orthonormal Hadamard rotation in natural (Sylvester) order (V4 spec 2.10)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=8)
def hadamard_matrix(size: int, device: torch.device) -> Tensor:
    """fp32 [size, size] of +-1, unscaled; size is a power of two."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Hadamard matrix needs a power of two, not {size}")
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def hadamard(x: Tensor) -> Tensor:
    """x [..., d] -> x H d^-0.5, computed in fp32, in x's dtype. H is symmetric and its own inverse."""
    size = x.shape[-1]
    return (x.float() @ hadamard_matrix(size, x.device) * size**-0.5).to(x.dtype)
