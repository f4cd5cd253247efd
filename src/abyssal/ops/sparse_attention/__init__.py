"""Attention of each query to its window and to compressed entries, with a sink per head (V4 spec 2.7)."""

from __future__ import annotations

import torch
from torch import Tensor


def sparse_attention(
    q: Tensor,
    window: Tensor,
    window_hidden: Tensor,
    entries: Tensor | None,
    entry_hidden: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """One softmax over window and entries; keys and values are the same vectors; the sink only adds to the denominator.

    Args:
        q: [n, b, H, D].
        window: fp32 [n, Kw, D], shared by the b queries of a sequence.
        window_hidden: bool [n, b, Kw], True where the query does not see the key. Rows that nobody sees must be finite.
        entries: fp32 [n, N, D] shared, or [n, b, K, D] chosen per query; None in layers without compression.
        entry_hidden: bool [n, b, N or K].
        sink: fp32 [H], logit of the sink, not scaled.

    Returns:
        fp32 [n, b, H, D].
    """
    q = q.float() * scale
    keys = [_Keys(window, window_hidden)]
    if entries is not None and entry_hidden is not None:
        keys.append(_Keys(entries, entry_hidden))
    sink_column = sink.unsqueeze(1).expand(*q.shape[:-1], 1)
    scores = torch.cat([*(k.scores(q) for k in keys), sink_column], dim=-1)  # [n, b, H, K + 1]
    parts = scores.softmax(-1).split_with_sizes([*(k.count for k in keys), 1], dim=-1)
    out = keys[0].combine(parts[0])
    for key, part in zip(keys[1:], parts[1:], strict=False):
        out += key.combine(part)
    return out


class _Keys:
    """One set of keys, either shared by all queries of a sequence or listed per query."""

    def __init__(self, rows: Tensor, hidden: Tensor) -> None:
        self.shared = rows.dim() == 3
        self.rows = rows if self.shared else rows.flatten(0, 1)  # [n or n b, K, D]
        self.hidden = hidden
        self.count = rows.shape[-2]

    def scores(self, q: Tensor) -> Tensor:
        """q fp32 [n, b, H, D] -> [n, b, H, K], -inf where hidden."""
        n, b, heads, _ = q.shape
        dots = torch.bmm(self._fold(q), self.rows.transpose(1, 2)).view(n, b, heads, -1)
        return dots.masked_fill_(self.hidden.unsqueeze(2), -torch.inf)

    def combine(self, weights: Tensor) -> Tensor:
        """weights [n, b, H, K] -> weighted sum of the rows [n, b, H, D]."""
        n, b, heads, _ = weights.shape
        return torch.bmm(self._fold(weights), self.rows).view(n, b, heads, -1)

    def _fold(self, x: Tensor) -> Tensor:
        """[n, b, H, X] -> [n, b H, X] for shared keys, [n b, H, X] for keys per query."""
        return x.flatten(1, 2) if self.shared else x.flatten(0, 1)
