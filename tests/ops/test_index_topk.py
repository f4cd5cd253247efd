"""Scores and top-k in parts: the same for any workspace that holds a query."""

import pytest
import torch

from abyssal.kv import codec, layouts
from abyssal.ops.index_score import triton
from abyssal.ops.index_topk import index_topk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N, B, ENTRIES = 2, 5, 150
PER_QUERY = 4 * N * (ENTRIES + 10)


def run(workspace_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    layout = layouts.get("index_bf16")
    pool = codec.pack_pages(layout, torch.randn(8, 64, 128, generator=generator))
    arrays = (
        torch.randn(N, B, 8, 128, generator=generator).bfloat16(),
        torch.randn(N, B, 8, generator=generator),
        pool,
        torch.tensor([[7, 2, 4], [1, 5, 3]], dtype=torch.int32),
        torch.tensor([[0, 1, 9, 10, 11], [146, 147, 148, 149, 150]], dtype=torch.int32),
    )
    return index_topk(
        *(x.to(DEVICE) for x in arrays),
        10,
        index_score=triton.index_score,
        layout=layout,
        entries_per_page=64,
        num_entries=ENTRIES,
        workspace_bytes=workspace_bytes,
    ).cpu()


def test_parts_give_what_the_whole_gives():
    whole = run(B * PER_QUERY)
    assert (whole[0] >= 0).sum(-1).tolist() == [0, 1, 9, 10, 10]
    assert (whole[1] >= 0).all() and (whole[1] // 64).unique().tolist() == [1, 3, 5]
    for queries in (1, 2, 4, 100):
        assert torch.equal(run(queries * PER_QUERY + 3), whole)


def test_too_small_a_workspace_is_named():
    with pytest.raises(ValueError, match=f"{PER_QUERY} bytes.*{PER_QUERY - 1}"):
        run(PER_QUERY - 1)
