"""Rotary position embedding on the trailing dimensions, in interleaved pairs (V4 spec 2.6)."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from abyssal.config import RopeConfig


@lru_cache(maxsize=16)
def rope_frequencies(rope: RopeConfig) -> Tensor:
    """fp32 [dim / 2]: base^(-2i/dim), with YaRN blended towards a factor-times slower rotation.

    Every step is fp32, as in the reference: at position p an ulp of a frequency is p ulps of the angle.
    """
    freqs = 1.0 / rope.base ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    if rope.yarn is not None:
        yarn = rope.yarn

        def corrected_dim(rotations: float) -> float:
            turns = yarn.original_max_position / (rotations * 2 * math.pi)
            return rope.dim * math.log(turns) / (2 * math.log(rope.base))

        low = max(math.floor(corrected_dim(yarn.beta_fast)), 0)
        high = min(math.ceil(corrected_dim(yarn.beta_slow)), rope.dim - 1)
        span = high - low if high != low else 0.001
        kept = 1 - ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
        freqs = freqs / yarn.factor * (1 - kept) + freqs * kept  # 1 - kept is not always the ramp: `kept` is rounded
    return freqs


def rope_table(positions: Tensor, rope: RopeConfig) -> Tensor:
    """positions int [n] -> complex64 [n, dim / 2], cos + i sin of the fp32 products position * frequency."""
    return torch.polar(_one(positions.device), torch.outer(positions.float(), _frequencies_on(positions.device, rope)))


@lru_cache(maxsize=16)
def _frequencies_on(device: torch.device, rope: RopeConfig) -> Tensor:
    return rope_frequencies(rope).to(device)


@lru_cache(maxsize=8)
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """x fp32 [..., d], rotated in place on its last 2 * table.shape[-1] values; table complex64, broadcast against x's pairs."""
    width = 2 * table.shape[-1]
    x.narrow(-1, -width, width).view(table.dtype).mul_(table)
    return x
