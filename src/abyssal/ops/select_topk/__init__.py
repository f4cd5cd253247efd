"""Top-k of index scores as an exact set: ties go to the lowest position."""

from __future__ import annotations

import torch
from torch import Tensor


def select_topk(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """The min(k, visible) best entries of every query.

    Args:
        scores: fp32 [..., N]; entries at and beyond `visible` are ignored whatever they hold.
        visible: int [...], at most N.
        k: at least 1.

    Returns:
        Entry indices int32 [..., min(k, N)], ascending, then -1.
    """
    entries = torch.arange(scores.shape[-1], device=scores.device)
    allowed = entries < visible.unsqueeze(-1)
    k = min(k, scores.shape[-1])
    if k == scores.shape[-1]:
        return torch.where(allowed, entries, -1).int()
    # fp32's lowest value keeps a visible -inf score above every invisible entry.
    ranked = torch.where(allowed, scores.clamp(min=torch.finfo(scores.dtype).min), -torch.inf)
    threshold = ranked.topk(k, sorted=False).values.amin(-1, keepdim=True)
    above = ranked > threshold
    equal = (ranked == threshold) & allowed
    room = k - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= room))
    return _compact(chosen, k)


def _compact(chosen: Tensor, k: int) -> Tensor:
    """chosen bool [..., N] with at most k True per row -> their indices int32 [..., k], ascending, then -1."""
    rows = chosen.reshape(-1, chosen.shape[-1])
    out = torch.full((len(rows), k), -1, dtype=torch.int32, device=chosen.device)
    row, column = rows.nonzero(as_tuple=True)
    rank = rows.cumsum(-1)[row, column] - 1
    out[row, rank] = column.int()
    return out.view(*chosen.shape[:-1], k)
