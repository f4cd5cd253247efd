"""Linear layers over plain, FP8 and FP4 weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A matrix [N, K] (or stacked experts [E, N, K]) as the checkpoint stores it, or dequantised.

    Source of the formats: V4 spec 4.1.
    """

    data: Tensor  # plain: [.., N, K] fp32/bf16; fp8: [.., N, K] float8_e4m3fn; fp4: [.., N, K/2] uint8, even index in the low nibble
    scale: Tensor | None  # uint8 e8m0 (2^(b-127)) or fp32, [.., ceil(N/block[0]), ceil(K/block[1])]; None for plain
    format: Literal["plain", "fp8", "fp4"]
    block: tuple[int, int] | None  # rows, columns per scale: fp8 (128, 128), fp4 (1, 32)
    quantize_input: int | None  # tile along K in which bf16 runs quantise the input to e4m3; None: the input is not quantised
