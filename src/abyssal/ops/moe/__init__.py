"""Mixture of experts: routing and the expert sum (V4 spec 2.11)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from abyssal.ops.linear import LinearWeight, linear
from abyssal.ops.norm import rounded

SUM_FLOOR = 1e-20  # scores may all underflow to 0


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """Weights and constants of one expert layer."""

    gate: Tensor  # fp32 [E, D]
    bias: Tensor | None  # fp32 [E]; None in hash layers
    tid2eid: Tensor | None  # int [V, k], hash layers: the experts of a token id
    w13: LinearWeight  # [E, 2 I, D]: gate rows, then up rows
    w2: LinearWeight  # [E, D, I]
    shared_w1: LinearWeight  # [I, D]
    shared_w3: LinearWeight  # [I, D]
    shared_w2: LinearWeight  # [D, I]
    k: int
    scale: float
    temperature: float
    limit: float


def expert_layer(x: Tensor, token_ids: Tensor, layer: ExpertLayer) -> Tensor:
    """Routed experts plus the shared one: x [T, D], normalised, and token_ids [T] -> [T, D] in x's dtype."""
    projected = F.linear(x.float(), layer.gate), linear(x, layer.shared_w1), linear(x, layer.shared_w3)
    return experts_of_projected(*projected, x, token_ids, layer)


def experts_of_projected(logits: Tensor, gate: Tensor, up: Tensor, x: Tensor, token_ids: Tensor, layer: ExpertLayer) -> Tensor:
    """As `expert_layer`, with the router's logits fp32 [T, E] and the shared expert's gate and up [T, I]."""
    ids = None if layer.tid2eid is None else layer.tid2eid[token_ids]
    experts, weights = choose(logits, layer.bias, ids, layer.k, layer.scale, layer.temperature)
    shared = _shared_of(gate, up, layer, x.dtype).float()
    return rounded(_add_outputs(shared, x, experts, weights, layer.w13, layer.w2, layer.limit, 0), x.dtype)


def shared_expert(x: Tensor, layer: ExpertLayer) -> Tensor:
    """[T, D] -> [T, D]."""
    return _shared_of(linear(x, layer.shared_w1), linear(x, layer.shared_w3), layer, x.dtype)


def _shared_of(gate: Tensor, up: Tensor, layer: ExpertLayer, dtype: torch.dtype) -> Tensor:
    return linear(swiglu(gate, up, None, layer.limit, dtype), layer.shared_w2)


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
    return choose(F.linear(x.float(), gate), bias, expert_ids, k, scale, temperature)


def choose(
    logits: Tensor, bias: Tensor | None, expert_ids: Tensor | None, k: int, scale: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """As `route`, from the products [T, E] of tokens and gates."""
    scores = F.softplus(logits if temperature == 1 else logits / temperature).sqrt_()  # [T, E]
    if expert_ids is None:
        assert bias is not None, "layers that choose by score have a bias"
        _, best = torch.sort(scores + bias, dim=-1, descending=True, stable=True)
        expert_ids = best.narrow(1, 0, k)
    expert_ids = expert_ids.long()
    chosen = scores.gather(1, expert_ids)
    ones, floor = _sum_of(k, scale, logits.device)
    return expert_ids, chosen.div_(F.linear(chosen, ones, floor))


@lru_cache(maxsize=8)
def _sum_of(k: int, scale: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """As weight [1, k] and bias [1] of a linear layer: (sum of k values + 1e-20) / scale."""
    return torch.full((1, k), 1 / scale, device=device), torch.full((1,), SUM_FLOOR / scale, device=device)


def swiglu(gate: Tensor, up: Tensor, weight: Tensor | float | None, limit: float, dtype: torch.dtype) -> Tensor:
    """silu(min(gate, limit)) clamp(up, -limit, limit) weight, in fp32, rounded to `dtype`; weight fp32 [n, 1], one for all, or None."""
    act = F.silu(gate.float().clamp(max=limit)).mul_(up.float().clamp(-limit, limit))
    return rounded(act if weight is None else act.mul_(weight), dtype)


def moe(x: Tensor, experts: Tensor, weights: Tensor, w13: LinearWeight, w2: LinearWeight, limit: float, first: int = 0) -> Tensor:
    """Sum of the chosen experts' outputs, fp32 [T, D]; arguments as of `choice_outputs`."""
    return _add_outputs(torch.zeros(x.shape, device=x.device), x, experts, weights, w13, w2, limit, first)


def _add_outputs(
    total: Tensor, x: Tensor, experts: Tensor, weights: Tensor, w13: LinearWeight, w2: LinearWeight, limit: float, first: int
) -> Tensor:
    """Add to `total` fp32 [T, D] what the chosen experts give, in the order of the experts."""
    if len(x) == 1:  # nothing is to be gathered
        for expert, weight in sorted(zip(experts[0].tolist(), weights[0].tolist(), strict=True)):
            if first <= expert < first + w13.shape[0]:
                gate, up = linear(x, w13, expert - first).chunk(2, dim=1)
                total += linear(swiglu(gate, up, weight, limit, x.dtype), w2, expert - first)
        return total
    _, tokens, outputs = _outputs_by_expert(x, experts, weights, w13, w2, limit, first)
    return total.index_add_(0, tokens, outputs.float())


def choice_sum(outputs: Tensor, shared: Tensor) -> Tensor:
    """Outputs of each choice [T, k, D], and of the shared expert [T, D] -> their sum in its dtype."""
    return (outputs.sum(1, dtype=torch.float32) + shared).to(shared.dtype)


def choice_outputs(
    x: Tensor, experts: Tensor, weights: Tensor, w13: LinearWeight, w2: LinearWeight, limit: float, first: int = 0
) -> Tensor:
    """The output of every choice, weighted: x [T, D], experts int64 [T, k], weights fp32 [T, k] -> [T, k, D] in x's dtype.

    w13 is stacked [E, 2 I, D] (gate rows, then up rows), w2 [E, D, I], of experts first .. first + E - 1; others give 0.
    """
    order, _, outputs = _outputs_by_expert(x, experts, weights, w13, w2, limit, first)
    return x.new_zeros(experts.numel(), x.shape[1]).index_copy_(0, order, outputs).view(*experts.shape, x.shape[1])


def _outputs_by_expert(
    x: Tensor, experts: Tensor, weights: Tensor, w13: LinearWeight, w2: LinearWeight, limit: float, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The choices of these experts, by expert: indices [P] among all T k choices, their tokens [P], and outputs [P, D]."""
    chosen, order = experts.flatten().sort(stable=True)
    counts = Counter(chosen.tolist())
    here = {expert - first: count for expert, count in counts.items() if first <= expert < first + w13.data.shape[0]}
    if not here:
        return order[:0], order[:0], x.new_empty(0, x.shape[1])
    start = sum(count for expert, count in counts.items() if expert < first)
    order = order[start : start + sum(here.values())]
    tokens = torch.floor_divide(order, experts.shape[1])
    gate, up = _linear_by_expert(x.index_select(0, tokens), w13, here).chunk(2, dim=1)
    hidden = swiglu(gate, up, weights.reshape(-1, 1).index_select(0, order), limit, x.dtype)
    return order, tokens, _linear_by_expert(hidden, w2, here)


def _linear_by_expert(x: Tensor, weight: LinearWeight, counts: dict[int, int]) -> Tensor:
    """x [P, K], so many rows of each expert in turn, by the matrices [E, N, K] of these experts -> [P, N]."""
    parts = zip(counts, x.split_with_sizes(list(counts.values())), strict=True)
    return torch.cat([linear(rows, weight, index) for index, rows in parts])
