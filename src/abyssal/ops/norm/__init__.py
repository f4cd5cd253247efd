"""Root-mean-square normalisation, computed in fp32 and rounded once to the input's dtype."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., d], weight fp32 [d] or None -> weight * x * rsqrt(mean(x^2) + eps), in x's dtype (V4 spec, notation)."""
    z = x.float()
    normalised = z * inverse_rms(z, eps)
    return rounded(normalised if weight is None else normalised.mul_(weight), x.dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`; itself where it is, without the call that small steps on a CPU notice."""
    return x if x.dtype == dtype else x.to(dtype)


def inverse_rms(z: Tensor, eps: float) -> Tensor:
    """z fp32 [..., d] -> rsqrt(mean(z^2) + eps) [..., 1]; torch's `rms_norm` takes twice as long on a CPU."""
    length = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    return torch.addcmul(_constant(eps, z.device), length, length, value=1 / z.shape[-1]).rsqrt_()


@lru_cache(maxsize=8)
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)
