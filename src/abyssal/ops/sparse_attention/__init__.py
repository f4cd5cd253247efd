"""Attention of each query to its window and to compressed entries, with a sink per head (V4 spec 2.7)."""

from __future__ import annotations

import torch
from torch import Tensor


def sparse_attention(
    q: Tensor,
    window: Tensor,
    window_hidden: Tensor | None,
    entries: Tensor | None,
    entry_hidden: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """One softmax over window and entries; keys and values are the same vectors; the sink only adds to the denominator.

    Args:
        q: [n, b, H, D].
        window: fp32 [n, Kw, D], shared by the b queries of a sequence.
        window_hidden: bool [n, b, Kw], True where the query does not see the key. Rows that nobody sees must be finite. None: every
            query sees every key.
        entries: fp32 [n, N, D] shared, or [n, b, K, D] chosen per query; None in layers without compression.
        entry_hidden: bool [n, b, N or K], or None, likewise.
        sink: fp32 [H], logit of the sink, not scaled.

    Returns:
        fp32 [n, b, H, D].
    """
    n, b, heads, _ = q.shape
    q = q.float() * scale
    sets = [(window, window_hidden)]
    if entries is not None:
        sets.append((entries, entry_hidden))
    scores = [_scores(q, rows, hidden) for rows, hidden in sets]  # [n, b, H, K] each
    sink_column = sink.view(heads, 1).expand(n, b, heads, 1)
    parts = torch.cat([*scores, sink_column], dim=-1).softmax(-1).split_with_sizes([*(s.shape[-1] for s in scores), 1], dim=-1)
    out, *others = (_products(part, rows) for part, (rows, _) in zip(parts, sets, strict=False))
    return out.add_(*others) if others else out


def _scores(q: Tensor, rows: Tensor, hidden: Tensor | None) -> Tensor:
    scores = _products(q, rows.mT)
    return scores if hidden is None else scores.masked_fill_(hidden.unsqueeze(2), -torch.inf)


def _products(x: Tensor, matrices: Tensor) -> Tensor:
    """x [n, b, H, X] times matrices [n, X, Y] of a sequence or [n, b, X, Y] of a query -> [n, b, H, Y]."""
    n, b, heads, _ = x.shape
    if matrices.dim() == 4:
        return torch.bmm(x.flatten(0, 1), matrices.flatten(0, 1)).view(n, b, heads, -1)
    return torch.bmm(x.flatten(1, 2), matrices).view(n, b, heads, -1)
