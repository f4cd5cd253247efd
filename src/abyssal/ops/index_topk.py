"""Scores and top-k of many queries through a workspace of bounded size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from abyssal.kv.layouts import Layout
from abyssal.ops.index_score._paged import GROUP
from abyssal.ops.select_topk.triton import select_topk


def index_topk(
    q: Tensor,
    weights: Tensor,
    pool: Tensor,
    page_table: Tensor,
    visible: Tensor,
    k: int,
    *,
    index_score: Callable[..., Tensor],
    layout: Layout,
    entries_per_page: int,
    num_entries: int,
    workspace_bytes: int,
) -> Tensor:
    """The slots of the min(k, visible) best entries of every query (V4 spec 2.10), a few queries after the other.

    Args:
        q, weights, pool, page_table, visible, layout, entries_per_page, num_entries: as of `index_score`.
        k: 1 to 2048.
        index_score: of `abyssal.ops.index_score.gluon` or `.triton`.
        workspace_bytes: for scores and their maxima, 4.25 bytes per entry and query: 256 MiB hold 60 queries of 2^20 entries.

    Returns:
        int32 [n, b, k], as of `select_topk` with pages.

    Raises:
        ValueError: the workspace does not hold one query per sequence.
    """
    n, b = visible.shape
    groups = -(-num_entries // GROUP)
    per_query = 4 * n * (num_entries + groups)
    step = min(b, workspace_bytes // per_query) if per_query else b
    if b and not step:
        raise ValueError(f"a query of {n} sequences needs {per_query} bytes of workspace, got {workspace_bytes}")
    out = torch.empty(n, b, k, dtype=torch.int32, device=q.device)
    for start in range(0, b, step) if b else ():
        part = slice(start, start + step)
        seen = visible[:, part].contiguous()
        maxima = torch.empty(n, seen.shape[1], groups, device=q.device)
        scores = index_score(
            q[:, part].contiguous(),
            weights[:, part].contiguous(),
            pool,
            page_table,
            seen,
            layout=layout,
            entries_per_page=entries_per_page,
            num_entries=num_entries,
            maxima=maxima,
        )
        out[:, part] = select_topk(scores, seen, k, maxima=maxima, page_table=page_table, entries_per_page=entries_per_page)
    return out
