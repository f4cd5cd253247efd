"""What the kernels that score paged index keys ask of their arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from abyssal.kv.layouts import Layout

KEYS_PER_TILE = 64  # one warpgroup's rows of a matrix product; a page of an index kind holds one or two tiles
GROUP = 16  # entries per maximum: the 16 rows of a tile that one warp holds, so that no maximum crosses warps
QUERY_DTYPES = {"index_fp8": torch.float8_e4m3fn, "index_mxfp4": torch.bfloat16, "index_bf16": torch.bfloat16}


def check(
    q: Tensor,
    weights: Tensor,
    pool: Tensor,
    page_table: Tensor,
    visible: Tensor,
    layout: Layout,
    entries_per_page: int,
    num_entries: int,
    maxima: Tensor | None,
) -> None:
    """Raises ValueError for what the kernels do not read, asserts the form of the rest."""
    n, b, heads, dim = q.shape
    if layout.name not in QUERY_DTYPES:
        raise ValueError(f"index_score reads {', '.join(QUERY_DTYPES)}, not {layout.name}")
    if q.dtype != QUERY_DTYPES[layout.name]:
        raise ValueError(f"{layout.name} keys need {QUERY_DTYPES[layout.name]} queries, got {q.dtype}")
    if dim != 128 or layout.dim != 128:
        raise ValueError(f"index_score needs queries and keys of 128 values, got {dim} and {layout.dim}")
    if entries_per_page not in (KEYS_PER_TILE, 2 * KEYS_PER_TILE):
        raise ValueError(f"index_score needs pages of {KEYS_PER_TILE} or {2 * KEYS_PER_TILE} entries, got {entries_per_page}")
    if heads not in (8, 16, 32, 64):
        raise ValueError(f"index_score needs 8, 16, 32 or 64 heads, got {heads}")
    if pool.shape[1] < layout.page_bytes(entries_per_page) or pool.shape[1] % 64:
        raise ValueError(f"{layout.name} needs pages of {layout.page_bytes(entries_per_page)} bytes or more, got {pool.shape[1]}")
    if page_table.shape[1] * entries_per_page < num_entries:
        raise ValueError(f"{num_entries} entries need {-(-num_entries // entries_per_page)} pages, got {page_table.shape[1]}")
    assert weights.shape == (n, b, heads) and visible.shape == (n, b) and len(page_table) == n
    assert weights.dtype == torch.float32 and visible.dtype == torch.int32 and page_table.dtype == torch.int32
    assert q.is_contiguous() and weights.is_contiguous() and visible.is_contiguous() and pool.is_contiguous()
    assert page_table.stride(1) == 1
    if maxima is not None:
        assert maxima.is_contiguous() and maxima.shape[:2] == (n, b) and maxima.shape[2] * GROUP >= num_entries


def check_blocks(
    q: Tensor,
    weights: Tensor,
    pool: Tensor,
    page_table: Tensor,
    blocks: Tensor,
    visible: Tensor,
    layout: Layout,
    entries_per_page: int,
    block_size: int,
) -> None:
    """The same for candidate blocks."""
    n, b, _, _ = q.shape
    if block_size & (block_size - 1) or not 1 <= block_size <= KEYS_PER_TILE:
        raise ValueError(f"a page of {entries_per_page} entries must hold whole blocks, got blocks of {block_size}")
    check(q, weights, pool, page_table, visible, layout, entries_per_page, 0, None)
    assert blocks.shape[:2] == (n, b) and blocks.dtype == torch.int32 and blocks.is_contiguous()
