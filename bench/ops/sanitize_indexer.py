"""Small launches of every kernel of the indexer: `compute-sanitizer python bench/ops/sanitize_indexer.py`."""

from __future__ import annotations

import torch
from index_inputs import BUCKET_BYTES, PAGE, random_paged

from abyssal.kv import layouts
from abyssal.ops.index_score import gluon, gluon_blocks, triton
from abyssal.ops.select_topk.triton import GROUP, SelectConfig, candidate_blocks, select_topk


def main() -> None:
    for name in BUCKET_BYTES:
        for n, b, heads, entries in ((3, 1, 64, 640), (1, 5, 32, 128)):
            paged = random_paged(name, n, b, heads, entries)
            for lengths in (0, 1, entries - 1, entries):
                paged.visible.fill_(lengths)
                paged.visible[0] = min(lengths, 65)
                maxima = torch.empty(n, b, entries // GROUP, device="cuda")
                for kernel in (gluon, triton):
                    scores = kernel.index_score(
                        *paged.arrays, layout=layouts.get(name), entries_per_page=PAGE, num_entries=entries, maxima=maxima
                    )
                for levels, chunk in ((1, 0), (2, 0), (3, 0), (2, 64), (3, 128)):
                    given = maxima if levels == 2 else None
                    config = SelectConfig(levels, warps=4, chunk=chunk)
                    select_topk(scores, paged.visible, 24, maxima=given, page_table=paged.table, config=config)
                blocks, count = candidate_blocks(scores, paged.visible, 12, 8)
                for kernel in (gluon_blocks, triton):
                    compact = kernel.index_score_blocks(
                        *paged.arrays[:4], blocks, count, layout=layouts.get(name), entries_per_page=PAGE, block_size=8
                    )
                select_topk(compact, count, 24, blocks=blocks, page_table=paged.table)
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
