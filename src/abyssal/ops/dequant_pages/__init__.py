"""Records of any layout to a workspace of plain values, for prefill: whole pages, or a list of entries."""

from __future__ import annotations

import torch
from torch import Tensor

from abyssal.kv import codec
from abyssal.kv.layouts import Layout


def dequant_pages(
    pages: Tensor, layout: Layout, entries_per_page: int, where: Tensor, *, whole_pages: bool, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Decode records.

    Args:
        pages: uint8 [pages, page bytes], the pool of a bucket; its pages may be longer than the layout's.
        where: int [n], page ids with `whole_pages`, else slots page * entries_per_page + row, -1 for none.

    Returns:
        [n, dim] in `dtype`, or [n, entries_per_page, dim] with `whole_pages`; slot -1 gives zeros.
    """
    if whole_pages:
        return codec.unpack_pages(layout, pages[where.long()], entries_per_page).to(dtype)
    slots = where.long().clamp(min=0)
    rows = codec.unpack_pages(layout, pages[slots // entries_per_page], entries_per_page)  # [n, entries, dim]
    rows = rows[torch.arange(len(slots), device=slots.device), slots % entries_per_page]
    return rows.masked_fill((where < 0).unsqueeze(-1), 0).to(dtype)
