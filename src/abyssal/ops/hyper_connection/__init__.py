"""Manifold-constrained hyper-connections: four residual streams mixed by input-dependent coefficients (V4 spec 2.2 to 2.4)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from abyssal.ops.norm import inverse_rms, rms_norm, rounded

FEW_TOKENS = 2  # whose coefficients a CPU computes faster one by one, in 50 us each, than as tensors, in 150 us


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
    return torch.addcmul(weights.base, F.linear(z, weights.fn) * inverse_rms(z, rms_eps), weights.scale)


def coefficients(raw: Tensor, streams: int, iterations: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """raw [T, 24] -> pre [T, S], post [T, S], comb [T, S, S], fp32."""
    gates, logits = raw.split_with_sizes([2 * streams, streams * streams], 1)
    least, most = _gate_ranges(streams, eps, raw.device)
    pre, post = torch.addcmul(least, gates.sigmoid(), most).chunk(2, 1)
    return pre, post, sinkhorn(logits.view(-1, streams, streams), iterations, eps)


def few_coefficients(
    streams: Tensor, weights: MixWeights, rms_eps: float, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`coefficients` of `mix`, token by token, for four streams [T, 4, D] on a CPU: from the products on in Python's floats."""
    z = streams.flatten(1).float()
    products, lengths = F.linear(z, weights.fn).tolist(), torch.linalg.vector_norm(z, dim=1).tolist()
    base, scale = weights.base.tolist(), weights.scale.tolist()
    tokens = []
    for row, length in zip(products, lengths, strict=True):
        inverse = (length**2 / z.shape[1] + rms_eps) ** -0.5
        raw = [x * inverse * s + b for x, s, b in zip(row, scale, base, strict=True)]
        tokens.append(_coefficients_of_token(raw, iterations, eps))
    pre, post, comb = torch.from_numpy(np.array(tokens, np.float32)).split_with_sizes([4, 4, 16], 1)
    return pre, post, comb.view(-1, 4, 4)


def _coefficients_of_token(raw: list[float], iterations: int, eps: float) -> list[float]:
    """24 raw ones -> 4 of pre, 4 of post, 16 of comb."""
    gates = [1 + math.tanh(x / 2) for x in raw[:8]]  # twice the sigmoids
    return [*(gate / 2 + eps for gate in gates[:4]), *gates[4:], *_sinkhorn_of_token(raw[8:], iterations, eps)]


def _sinkhorn_of_token(logits: list[float], iterations: int, eps: float) -> list[float]:
    """`sinkhorn` of one 4 x 4 matrix k, as 16 floats.

    Each step divides columns, or rows, by eps + their sums, so that the matrix stays r_i k_ij c_j: only r and c change.
    """
    k = [_softmax_plus(logits[i : i + 4], eps) for i in (0, 4, 8, 12)]
    (k00, k01, k02, k03), (k10, k11, k12, k13), (k20, k21, k22, k23), (k30, k31, k32, k33) = k
    r0 = r1 = r2 = r3 = c0 = c1 = c2 = c3 = 1.0
    for i in range(iterations):
        if i > 0:
            r0 /= r0 * (k00 * c0 + k01 * c1 + k02 * c2 + k03 * c3) + eps
            r1 /= r1 * (k10 * c0 + k11 * c1 + k12 * c2 + k13 * c3) + eps
            r2 /= r2 * (k20 * c0 + k21 * c1 + k22 * c2 + k23 * c3) + eps
            r3 /= r3 * (k30 * c0 + k31 * c1 + k32 * c2 + k33 * c3) + eps
        c0 /= c0 * (k00 * r0 + k10 * r1 + k20 * r2 + k30 * r3) + eps
        c1 /= c1 * (k01 * r0 + k11 * r1 + k21 * r2 + k31 * r3) + eps
        c2 /= c2 * (k02 * r0 + k12 * r1 + k22 * r2 + k32 * r3) + eps
        c3 /= c3 * (k03 * r0 + k13 * r1 + k23 * r2 + k33 * r3) + eps
    return [r * x * c for r, row in zip((r0, r1, r2, r3), k, strict=True) for x, c in zip(row, (c0, c1, c2, c3), strict=True)]


def _softmax_plus(logits: list[float], eps: float) -> list[float]:
    most = max(logits)
    exps = [math.exp(x - most) for x in logits]
    total = sum(exps)
    return [x / total + eps for x in exps]


@lru_cache(maxsize=8)
def _gate_ranges(streams: int, eps: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """What is added to the sigmoids of pre and post, eps and 0, and their factors, 1 and 2; each [2 S]."""
    least, most = torch.tensor([[eps, 0.0], [1.0, 2.0]], device=device).repeat_interleave(streams, dim=1)
    return least, most


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """logits [T, S, S] -> nearly doubly stochastic [T, S, S]; ends with a column normalisation (V4 spec 2.2, step 7)."""
    size = logits.shape[-1]
    start, constant, row_sums, column_sums = _sinkhorn_matrices(size, eps, logits.device)
    # Flattened, plus eps, with one more column that stays 1: through it the products below add eps to every sum.
    comb = F.linear(logits.softmax(-1).flatten(1), start, constant)  # [T, S S + 1]
    sums, mm, divide = torch.empty_like(comb), torch.mm, comb.div_  # looked up once, for 39 uses
    divide(mm(comb, column_sums, out=sums))
    for _ in range(iterations - 1):
        divide(mm(comb, row_sums, out=sums))
        divide(mm(comb, column_sums, out=sums))
    return comb[:, :-1].view(-1, size, size)


@lru_cache(maxsize=8)
def _sinkhorn_matrices(size: int, eps: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What Sinkhorn's steps on a flattened S x S matrix, n = S S elements, multiply by and add.

    [n + 1, n] and [n + 1] add eps to every element and append a 1; then two [n + 1, n + 1] replace every element by eps + the sum
    of its row, or column.
    """
    eye, ones = torch.eye(size, device=device), torch.ones(size, size, device=device)
    matrices = []
    for sums in (torch.kron(eye, ones), torch.kron(ones, eye)):
        padded = F.pad(sums, (0, 1, 0, 1))
        padded[-1, :-1], padded[-1, -1] = eps, 1.0
        matrices.append(padded)
    start = F.pad(torch.eye(size * size, device=device), (0, 0, 0, 1))
    return start, matrices[0][-1], matrices[0], matrices[1]


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """streams [T, S, D], pre fp32 [T, S] -> sum_j pre[j] streams[j], [T, D] in the streams' dtype."""
    return rounded(torch.bmm(pre.unsqueeze(1), streams.float()).squeeze(1), streams.dtype)


def expand(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """new[k] = post[k] out + sum_j comb[j, k] streams[j]: streams [T, S, D], out [T, D] -> [T, S, D] (V4 spec 2.3)."""
    own = post.unsqueeze(-1) * out.float().unsqueeze(1)
    return rounded(own.baddbmm_(comb.mT, streams.float()), streams.dtype)


@dataclass(frozen=True, slots=True)
class Site:
    """What one mixing site hands to its sublayer (`x`) and to the next site."""

    streams: Tensor  # [T, S, D], the site's own streams
    x: Tensor  # [T, D], collapsed and normalised
    pre: Tensor | None  # fp32 [T, S]; None without weights
    post: Tensor | None  # fp32 [T, S]; None without weights and for the final collapse
    comb: Tensor | None  # fp32 [T, S, S]; as post
    mean: Tensor | None  # [T, D], mean over the streams where asked for


def site(
    source: Tensor,
    norm_weight: Tensor,
    weights: MixWeights | None,
    *,
    out: Tensor | None = None,
    post: Tensor | None = None,
    comb: Tensor | None = None,
    pre: Tensor | None = None,
    with_mean: bool = False,
    rms_eps: float,
    eps: float,
    iterations: int,
) -> Site:
    """Expand of the site before, then coefficients, collapse and norm of this one (V4 spec 2.2 to 2.4, V4.1 spec 3.1 and 3.2).

    `source` is streams [T, S, D], or embeddings [T, D] of which every stream is a copy. With the sublayer output `out` [T, D] and the
    `post`, `comb` of the site before, the streams are expanded first. `pre` fp32 [T, S] given: the streams are collapsed with it
    (V4.1: that of the site before); None: with the site's own (V4). `weights` None: no coefficients (V4.1's last collapse).
    """
    if source.dim() == 3:
        num_streams = source.shape[1]
    else:
        assert weights is not None, "the first site has coefficients"
        num_streams = weights.fn.shape[1] // source.shape[1]
    if out is not None:
        assert post is not None and comb is not None, "expanding `out` needs the post and comb of the site before"
        streams = expand(source, out, post, comb)
    else:
        streams = source if source.dim() == 3 else source.unsqueeze(1).repeat(1, num_streams, 1)
    own = new_post = new_comb = None
    if weights is not None:
        if weights.fn.shape[0] == num_streams:
            own = mix(streams, weights, rms_eps).sigmoid() + eps
        elif num_streams == 4 and streams.is_cpu and 0 < len(streams) <= FEW_TOKENS:
            own, new_post, new_comb = few_coefficients(streams, weights, rms_eps, iterations, eps)
        else:
            own, new_post, new_comb = coefficients(mix(streams, weights, rms_eps), num_streams, iterations, eps)
    gates = own if pre is None else pre
    assert gates is not None, "without weights the site collapses with a given `pre`"
    x = rms_norm(collapse(streams, gates), norm_weight, rms_eps)
    mean = streams.float().mean(1).to(streams.dtype) if with_mean else None
    return Site(streams, x, own, new_post, new_comb, mean)
