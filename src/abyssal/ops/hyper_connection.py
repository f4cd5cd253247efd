"""Manifold-constrained hyper-connections: four residual streams mixed by input-dependent coefficients (V4 spec 2.2 to 2.4)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MixWeights:
    """Parameters of one mixing site, fp32. `fn` [24, 4 D] for a sublayer, [4, 4 D] for the final collapse."""

    fn: Tensor
    base: Tensor  # [24] or [4]
    scale: Tensor  # [24] or [4]: the stored per-part scales, repeated per coefficient

    @classmethod
    def from_checkpoint(cls, fn: Tensor, base: Tensor, scale: Tensor, streams: int) -> MixWeights:
        """`scale` [3] (pre, post, comb) or [1] (pre), as stored."""
        parts = torch.tensor([streams, streams, streams * streams], device=scale.device)[: len(scale)]
        return cls(fn, base, scale.repeat_interleave(parts))


def mix(streams: Tensor, weights: MixWeights, rms_eps: float) -> Tensor:
    """streams [T, S, D] -> raw coefficients fp32 [T, 24 or 4]: (z fn^T) rsqrt(mean z^2 + eps) scale + base."""
    z = streams.flatten(1).float()  # [T, S D], stream-major
    raw = F.linear(F.rms_norm(z, z.shape[-1:], None, rms_eps), weights.fn)
    return torch.addcmul(weights.base, raw, weights.scale)


def coefficients(raw: Tensor, streams: int, iterations: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """raw [T, 24] -> pre [T, S], post [T, S], comb [T, S, S], fp32."""
    gates = raw[:, : 2 * streams].sigmoid()
    pre, post = gates[:, :streams] + eps, gates[:, streams:] * 2
    comb = sinkhorn(raw[:, 2 * streams :].view(-1, streams, streams), iterations, eps)
    return pre, post, comb


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """logits [T, S, S] -> nearly doubly stochastic [T, S, S]; ends with a column normalisation (V4 spec 2.2, step 7)."""
    size = logits.shape[-1]
    comb = (logits.softmax(-1) + eps).flatten(1)  # [T, S S]
    same_row, same_column = _sum_matrices(size, logits.device)
    eps_row = torch.full_like(same_row[0], eps)
    comb.div_(torch.addmm(eps_row, comb, same_column))
    for _ in range(iterations - 1):
        comb.div_(torch.addmm(eps_row, comb, same_row))
        comb.div_(torch.addmm(eps_row, comb, same_column))
    return comb.view(-1, size, size)


@lru_cache(maxsize=8)
def _sum_matrices(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """0/1 matrices [S S, S S] that replace every element of a flattened S x S matrix by the sum of its row, or column."""
    eye, ones = torch.eye(size, device=device), torch.ones(size, size, device=device)
    return torch.kron(eye, ones), torch.kron(ones, eye)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """streams [T, S, D], pre fp32 [T, S] -> sum_j pre[j] streams[j], [T, D] in the streams' dtype."""
    return torch.bmm(pre.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)


def expand(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """new[k] = post[k] out + sum_j comb[j, k] streams[j]: streams [T, S, D], out [T, D] -> [T, S, D] (V4 spec 2.3)."""
    own = post.unsqueeze(-1) * out.float().unsqueeze(1)
    return torch.baddbmm(own, comb.transpose(1, 2), streams.float()).to(streams.dtype)
