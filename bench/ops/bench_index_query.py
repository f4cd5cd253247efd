"""Index queries: one launch against the reference's chain of launches.

`python -m bench.ops.bench_index_query [--json FILE]`, from the root of the repository, on a GPU.
"""

from __future__ import annotations

import torch

import abyssal.ops.index_query.triton as kernels
from abyssal.kv import layouts
from abyssal.ops.index_query import index_query as reference
from bench.ops import write_path as wp

FEW = (4, 1, 2), (8, 4, 2), (16, 4, 2)  # heads per program, warps, parts of a vector
MANY = (16, 4, 2), (32, 4, 2), (32, 4, 4)


def main() -> None:
    args = wp.arguments(__doc__ or "")
    table = wp.Table("index_query", not args.no_compile)
    for shape in wp.SHAPES:
        if shape.name == "v4-pro":  # as v4-flash
            continue
        grid = layouts.get(shape.index).grid
        for tokens in args.tokens:
            width = 1 if shape.index == "index_fp8" else 2
            moved = tokens * (shape.index_heads * (128 * (2 + width) + 2 + 4) + 64 * 4)
            inputs = []
            for _ in range(wp.copies(tokens, moved)):
                q = torch.randn(tokens, shape.index_heads, 128, device=wp.DEVICE, dtype=torch.bfloat16)
                weights = torch.randn(tokens, shape.index_heads, device=wp.DEVICE, dtype=torch.bfloat16)
                inputs.append((q, weights, wp.table(tokens)))
            for per_program, num_warps, parts in FEW if tokens <= 64 else MANY:
                config = kernels.IndexQueryConfig(per_program, num_warps, parts)
                table.time(
                    shape.name, tokens, f"{per_program} heads, {num_warps} warps, {parts} parts",
                    lambda q, weights, rope, config=config, shape=shape, grid=grid: kernels.index_query(
                        q, weights, rope, rotate_query=shape.hadamard, grid=grid, config=config
                    ),
                    inputs, moved,
                )  # fmt: skip

            def chain(q, weights, rope, shape=shape, grid=grid):
                return reference(q, weights, rope, rotate_query=shape.hadamard, grid=grid)

            table.time_chain(shape.name, tokens, chain, inputs, moved)
    table.print()
    table.save(args.json)


if __name__ == "__main__":
    main()
