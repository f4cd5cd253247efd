"""Index queries: RoPE, Hadamard rotation (V4), the grid of the keys, and constants folded into the head weights (V4 spec 2.10)."""

from __future__ import annotations

import torch
from torch import Tensor

from abyssal.kv import codec
from abyssal.kv.layouts import Grid
from abyssal.ops.hadamard import hadamard
from abyssal.ops.rope import rotate


def index_query(q: Tensor, head_weights: Tensor, rope: Tensor, *, rotate_query: bool, grid: Grid | None) -> tuple[Tensor, Tensor]:
    """Queries as the scores use them.

    Args:
        q: [T, Hi, Di]; may be overwritten.
        head_weights: [T, Hi].
        rope: complex64 [T, rope_dim / 2].
        rotate_query: Hadamard rotation after RoPE (V4).
        grid: of the index keys, which the queries follow; None: no quantisation.

    Returns:
        Queries fp32 [T, Hi, Di], and weights fp32 [T, Hi] times Di^-0.5 Hi^-0.5. A scale per head is folded into the weights: it is
        positive, so it passes through the relu.
    """
    heads, dim = q.shape[1:]
    q_out = rotate(q.float(), rope.unsqueeze(1)).to(q.dtype)
    q_out = (hadamard(q_out) if rotate_query else q_out).float()
    weights = head_weights.float() * (dim**-0.5 * heads**-0.5)
    if grid is None:
        return q_out, weights
    codes, scales = codec.quantize(grid, q_out.flatten(0, 1))
    if grid.scale == "fp32":
        return codes.view(torch.float8_e4m3fn).float().view_as(q_out), weights * scales.view(torch.float32).view_as(weights)
    return codec.dequantize(grid, codes, scales).view_as(q_out), weights
