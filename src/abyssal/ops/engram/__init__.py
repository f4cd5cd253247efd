"""Engram: n-gram table rows, and how they are gated by how well they fit and added to every stream (V4.1 spec 3.8)."""

from __future__ import annotations

import torch
from torch import Tensor

from abyssal.ops.linear import LinearWeight, dequantize
from abyssal.ops.norm import rms_norm

SCALED = 32  # columns of a table row that share a scale
GATE_FLOOR = 1e-6  # of |dot| under the square root


def row_values(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a table as values: codes e4m3 [n, C], scales e8m0 as uint8 [n, C / 32] -> [n, C] in `dtype`; exact in bf16."""
    return dequantize(LinearWeight(codes, scales, "fp8", (1, SCALED), None), dtype)


def engram(streams: Tensor, key: Tensor, value: Tensor, weight: Tensor, eps: float) -> Tensor:
    """streams[i] + gate_i value, with gate_i = sigmoid(sign(dot_i) sqrt(|dot_i|)) and dot_i the product of the normalised pair.

    Args:
        streams: [T, S, D].
        key: [T, S, D], compared with each stream.
        value: [T, D], shared by the streams.
        weight: fp32 [S, D], the product of the weights of both norms.

    Returns:
        [T, S, D] in the streams' dtype; everything before is fp32.
    """
    h, k = streams.float(), key.float()
    dot = (rms_norm(h, None, eps) * weight * rms_norm(k, None, eps)).sum(-1) * h.shape[-1] ** -0.5  # [T, S]
    gate = torch.sigmoid(dot.abs().clamp(min=GATE_FLOOR).sqrt().copysign(dot))
    return (h + gate.unsqueeze(-1) * value.float().unsqueeze(1)).to(streams.dtype)
