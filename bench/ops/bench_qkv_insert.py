"""Query norm and RoPE with the window store: one launch against the reference's chain of launches.

`python -m bench.ops.bench_qkv_insert [--json FILE]`, from the root of the repository, on a GPU.
"""

from __future__ import annotations

import torch

import abyssal.ops.qkv_insert.triton as kernels
from abyssal.kv import layouts
from abyssal.kv.batch import StoreFacts
from abyssal.ops.qkv_insert import qkv_insert as reference
from bench.ops import write_path as wp

ENTRIES = 64
WITH_NORM = (2, 1), (4, 2), (4, 4)  # heads per program, warps
WITHOUT_NORM = (8, 1), (16, 2), (32, 4)


def main() -> None:
    args = wp.arguments(__doc__ or "")
    table = wp.Table("qkv_insert", not args.no_compile)
    for shape in wp.SHAPES:
        layout = layouts.get(shape.layout)
        for tokens in args.tokens:
            width = 512 if shape.eps is not None else 64  # values of a query that change
            moved = tokens * (shape.heads * width * 2 * 2 + 512 * 2 + layout.bytes_per_entry + 64 * 4)
            inputs = []
            for _ in range(wp.copies(tokens, moved)):
                q = torch.randn(tokens, shape.heads, 512, device=wp.DEVICE, dtype=torch.bfloat16)
                kv = torch.randn(tokens, 512, device=wp.DEVICE, dtype=torch.bfloat16)
                data, slots = wp.pool(layout, tokens, ENTRIES)
                inputs.append((q, kv, wp.table(tokens), data, slots))
            for per_program, num_warps in WITH_NORM if shape.eps is not None else WITHOUT_NORM:
                config = kernels.QkvInsertConfig(per_program, num_warps)
                table.time(
                    shape.name, tokens, f"{per_program} heads, {num_warps} warps",
                    lambda q, kv, rope, data, slots, config=config, layout=layout, eps=shape.eps: kernels.qkv_insert(
                        q, kv, rope, data, layout, ENTRIES, slots, eps, config=config
                    ),
                    inputs, moved, None if shape.eps is not None else (2 * width, 1024),
                )  # fmt: skip

            def chain(q, kv, rope, data, slots, layout=layout, eps=shape.eps):
                store = StoreFacts(torch.arange(len(kv), device=wp.DEVICE), slots.unsqueeze(0))
                return reference(q, kv, rope, wp.view("window", data, layout, ENTRIES), 0, store, eps)

            table.time_chain(shape.name, tokens, chain, inputs, moved)
            del inputs
    table.print()
    table.save(args.json)


if __name__ == "__main__":
    main()
