"""Mixture of experts: routing and the expert sum (V4 spec 2.11)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from abyssal.ops.linear import LinearWeight, linear

SUM_FLOOR = 1e-20  # scores may all underflow to 0


def route(
    x: Tensor, gate: Tensor, bias: Tensor | None, expert_ids: Tensor | None, k: int, scale: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """Chosen experts and their weights.

    Args:
        x: [T, D]; gate fp32 [E, D].
        bias: fp32 [E], added for the choice only; None in hash layers.
        expert_ids: int [T, k], given by the token in hash layers; None: the k largest of score + bias, ties to the lowest.

    Returns:
        experts int64 [T, k] and weights fp32 [T, k] = score / (sum of the chosen scores + 1e-20) * scale.
    """
    scores = F.softplus(F.linear(x.float(), gate) / temperature).sqrt()  # [T, E]
    if expert_ids is None:
        assert bias is not None, "layers that choose by score have a bias"
        biased = scores + bias
        expert_ids = biased.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = scores.gather(1, expert_ids.long())
    return expert_ids.long(), chosen / (chosen.sum(-1, keepdim=True) + SUM_FLOOR) * scale


def swiglu(gate: Tensor, up: Tensor, weight: Tensor | None, limit: float, dtype: torch.dtype) -> Tensor:
    """silu(min(gate, limit)) clamp(up, -limit, limit) weight, in fp32, rounded to `dtype`; weight fp32 [n, 1] or None."""
    act = F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
    return (act if weight is None else act * weight).to(dtype)


def moe(x: Tensor, experts: Tensor, weights: Tensor, w13: LinearWeight, w2: LinearWeight, limit: float) -> Tensor:
    """Sum of the chosen experts' outputs: x [T, D], experts int64 [T, k], weights fp32 [T, k] -> fp32 [T, D].

    w13 is stacked [E, 2 I, D] (gate rows, then up rows), w2 [E, D, I]. Expert -1 stands for one that is elsewhere, and gives 0.
    """
    tokens, k = experts.shape
    num_experts = w13.data.shape[0]
    flat = torch.where(experts < 0, num_experts, experts).flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts + 1).tolist()[:num_experts]
    rows = order // k
    xs, ws = x.index_select(0, rows), weights.flatten()[order].unsqueeze(1)
    sorted_out = torch.empty_like(xs)
    start = 0
    for index, count in enumerate(counts):
        if count:
            part = slice(start, start + count)
            sorted_out[part] = _expert(xs[part], ws[part], w13.expert(index), w2.expert(index), limit)
            start += count
    sorted_out[start:] = 0.0
    out = torch.empty_like(sorted_out)
    out[order] = sorted_out
    return out.view(tokens, k, x.shape[1]).sum(1, dtype=torch.float32)


def _expert(x: Tensor, weight: Tensor, w13: LinearWeight, w2: LinearWeight, limit: float) -> Tensor:
    gate, up = linear(x, w13).chunk(2, dim=-1)
    return linear(swiglu(gate, up, weight, limit, x.dtype), w2)
