"""Top-k of index scores as an exact set: ties go to the lowest position."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def select_topk(scores: Tensor, visible: Tensor, k: int, candidates: Tensor | None = None) -> Tensor:
    """The min(k, visible) best entries of every query.

    Args:
        scores: fp32 [..., N]; entries at and beyond `visible` are ignored whatever they hold.
        visible: int [...], at most N.
        k: at least 1.
        candidates: bool [..., N], the only entries that may be chosen; fewer than k of them leave the rest unused.

    Returns:
        Entry indices int32 [..., min(k, N)], ascending, then -1.
    """
    entries = torch.arange(scores.shape[-1], device=scores.device)
    allowed = entries < visible.unsqueeze(-1)
    if candidates is not None:
        allowed = allowed & candidates
    k = min(k, scores.shape[-1])
    if k == scores.shape[-1]:
        return _compact(allowed, k)
    # fp32's lowest value keeps an allowed -inf score above every other entry.
    ranked = torch.where(allowed, scores.clamp(min=torch.finfo(scores.dtype).min), -torch.inf)
    threshold = ranked.topk(k, sorted=False).values.amin(-1, keepdim=True)
    above = ranked > threshold
    equal = (ranked == threshold) & allowed
    room = k - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= room))
    return _compact(chosen, k)


def candidate_mask(scores: Tensor, visible: Tensor, blocks: int, block_size: int) -> Tensor:
    """The entries of the best blocks of `block_size` neighbours: candidates of later layers (V4.1 spec 3.6).

    A block counts as its best entry. The block with the newest visible entry is always among them.

    Args:
        scores: fp32 [..., N]; entries at and beyond `visible` are ignored.
        visible: int [...], at most N.
        blocks: number of blocks to keep.

    Returns:
        bool [..., N]; True for visible entries only.
    """
    count = scores.shape[-1]
    entries = torch.arange(count, device=scores.device)
    allowed = entries < visible.unsqueeze(-1)
    masked = torch.where(allowed, scores, -torch.inf)
    best = F.pad(masked, (0, -count % block_size), value=-torch.inf).unflatten(-1, (-1, block_size)).amax(-1)  # [..., blocks]
    newest = (visible.long() - 1).clamp(min=0) // block_size
    best = best.scatter(-1, newest.unsqueeze(-1), torch.inf)
    kept = select_topk(best, -(-visible // block_size), blocks)  # [..., blocks], -1 unused
    chosen = torch.zeros(*best.shape[:-1], best.shape[-1] + 1, dtype=torch.bool, device=scores.device)
    chosen.scatter_(-1, kept.long() % chosen.shape[-1], True)  # -1 lands in the last column, which is no block
    return allowed & chosen[..., :-1].repeat_interleave(block_size, -1)[..., :count]


def _compact(chosen: Tensor, k: int) -> Tensor:
    """chosen bool [..., N] with at most k True per row -> their indices int32 [..., k], ascending, then -1."""
    rows = chosen.reshape(-1, chosen.shape[-1])
    out = torch.full((len(rows), k), -1, dtype=torch.int32, device=chosen.device)
    row, column = rows.nonzero(as_tuple=True)
    rank = rows.cumsum(-1)[row, column] - 1
    out[row, rank] = column.int()
    return out.view(*chosen.shape[:-1], k)
