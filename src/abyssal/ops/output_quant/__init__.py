"""Inverse RoPE of the attention output and, in bf16 runs, its e4m3 quantisation (V4 spec 2.6, 2.8, 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from abyssal.ops.linear import quantize_e4m3_tiles
from abyssal.ops.norm import rounded
from abyssal.ops.rope import rotate


def output_quant(out: Tensor, rope: Tensor, tile: int | None, dtype: torch.dtype) -> Tensor:
    """Rotate every head's output by the negative angle of the query's position: values carry RoPE too.

    Args:
        out: fp32 [T, H, D].
        rope: complex64 [T, rope_dim / 2], the layer's table at the query positions.
        tile: values that share a quantisation scale in bf16 runs; None: no quantisation.

    Returns:
        [T, H, D] in `dtype`, quantised values already dequantised.
    """
    out = rounded(rotate(out, rope.conj_physical().unsqueeze(1)), dtype)
    if tile is not None and dtype == torch.bfloat16:
        out = quantize_e4m3_tiles(out, tile)
    return out
