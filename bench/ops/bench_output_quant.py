"""Inverse RoPE and quantisation of the attention output: one launch against the reference's chain of launches.

`python -m bench.ops.bench_output_quant [--json FILE]`, from the root of the repository, on a GPU.
"""

from __future__ import annotations

import torch

import abyssal.ops.output_quant.triton as kernels
from abyssal.ops.output_quant import output_quant as reference
from bench.ops import write_path as wp


def main() -> None:
    args = wp.arguments(__doc__ or "")
    table = wp.Table("output_quant", not args.no_compile)
    for shape in wp.SHAPES:
        for tokens in args.tokens:
            moved = tokens * (shape.heads * 512 * (2 + 1) + shape.heads * 512 // shape.tile + 64 * 4)
            inputs = [
                (torch.randn(tokens, shape.heads, 512, device=wp.DEVICE, dtype=torch.bfloat16), wp.table(tokens))
                for _ in range(wp.copies(tokens, moved))
            ]
            for per_program, num_warps in ((1, 1), (4, 2), (4, 4), (8, 4)):
                config = kernels.OutputQuantConfig(per_program, num_warps)
                table.time(
                    shape.name, tokens, f"of {per_program} tokens, {num_warps} warps",
                    lambda out, rope, config=config, shape=shape: kernels.output_quant_e4m3(
                        out, rope, shape.tile, shape.groups, config=config
                    ),
                    inputs, moved,
                )  # fmt: skip

            def chain(out, rope, tile=shape.tile):
                return reference(out.float(), rope, tile, torch.bfloat16)

            table.time_chain(shape.name, tokens, chain, inputs, moved)
            del inputs
    table.print()
    table.save(args.json)


if __name__ == "__main__":
    main()
