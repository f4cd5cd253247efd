"""Index scores: sum over heads of relu(q . k) times the head's weight (V4 spec 2.10)."""

from __future__ import annotations

import torch
from torch import Tensor


def index_score(q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """Scores of every query against its sequence's keys; entries that the query may not see get -inf.

    Args:
        q: fp32 [n, b, Hi, Di].
        weights: fp32 [n, b, Hi], may be negative.
        keys: fp32 [n, N, Di].
        visible: int [n, b], number of leading entries that each query sees.

    Returns:
        fp32 [n, b, N].
    """
    n, b, heads, dim = q.shape
    dots = torch.bmm(q.reshape(n, b * heads, dim), keys.transpose(1, 2)).relu_()  # [n, b Hi, N]
    scores = torch.bmm(weights.reshape(n * b, 1, heads), dots.view(n * b, heads, -1)).view(n, b, -1)
    hidden = torch.arange(keys.shape[1], device=q.device) >= visible.unsqueeze(-1)
    return scores.masked_fill_(hidden, -torch.inf)
