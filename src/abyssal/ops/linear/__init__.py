"""Linear layers over plain, FP8 and FP4 weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from abyssal.ops.norm import rounded

E4M3_MAX = 448.0
E4M3_AMAX_FLOOR = 1e-4
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0..7; code + 8 is the negative (V4 spec 3.1)
CACHE_LINE = 16  # fp32 values
ROOM_AT_ONCE = 1 << 24  # fp32 values; memory that nothing has been written to takes none


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A matrix [N, K] (or stacked experts [E, N, K]) as the checkpoint stores it, or dequantised.

    Source of the formats: V4 spec 4.1.
    """

    data: Tensor  # plain: [.., N, K] fp32/bf16; fp8: [.., N, K] float8_e4m3fn; fp4: [.., N, K/2] uint8, even index in low nibble
    scale: Tensor | None  # uint8 e8m0 (2^(b-127)) or fp32, [.., ceil(N/block[0]), ceil(K/block[1])]; None for plain
    format: Literal["plain", "fp8", "fp4"]
    block: tuple[int, int] | None  # rows, columns per scale: fp8 (128, 128), fp4 (1, 32)
    quantize_input: int | None  # tile along K in which bf16 runs quantise the input to e4m3; None: the input is not quantised

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dequantised matrix: (N, K), or (E, N, K)."""
        *rest, columns = self.data.shape
        return *rest, columns * 2 if self.format == "fp4" else columns

    def laid_out(self, memory: WeightMemory) -> LinearWeight:
        """A plain matrix by `memory`; others as they are."""
        return replace(self, data=memory.laid_out(self.data)) if self.format == "plain" else self


class WeightMemory:
    """Where and how a model's matrices lie, so that few rows are multiplied by them fast. Those on a GPU stay as they are.

    On a CPU high ones lie by columns: products read them in order then, in half the time. All lie side by side in memory for which numpy
    asks for huge pages: a decode step reads every weight once, and in small pages finding them takes 7 % of tiny-v4's step.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0)

    def laid_out(self, matrix: Tensor) -> Tensor:
        """`matrix` [.., N, K], or its copy here."""
        rows, columns = matrix.shape[-2:]
        if not matrix.is_cpu:
            return matrix
        return self._copy(matrix.mT).mT if rows >= columns else self._copy(matrix)

    def _copy(self, matrix: Tensor) -> Tensor:
        if matrix.dtype != torch.float32:
            return matrix.contiguous()
        size = matrix.numel()
        if size > len(self._free):
            room = torch.from_numpy(np.empty(max(size, ROOM_AT_ONCE) + CACHE_LINE, np.float32))
            self._free = room[-room.data_ptr() % (4 * CACHE_LINE) // 4 :]
        own, self._free = self._free[:size], self._free[-(-size // CACHE_LINE) * CACHE_LINE :]
        return own.view(matrix.shape).copy_(matrix)


def ceil_log2(v: Tensor) -> Tensor:
    """ceil(log2 v) of positive normal fp32 values, int32, exact: read from the bits, no logarithm (V4 spec 3.2)."""
    bits = v.float().view(torch.int32)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).int()


def exp2(exponent: Tensor) -> Tensor:
    """2^exponent as fp32, exact, for int32 exponents -127..127; -127 is the one subnormal."""
    bits = (exponent + 127) << 23
    return torch.where(exponent == -127, 0x00400000, bits).to(torch.int32).view(torch.float32)


def e8m0_to_float(byte: Tensor) -> Tensor:
    """uint8 e8m0 -> fp32 2^(byte - 127). Byte 255 (NaN) is not allowed here; the loader refuses it (V4 spec 3.1)."""
    return exp2(byte.int() - 127)


def quantize_e4m3_tiles(x: Tensor, tile: int) -> Tensor:
    """Round `x` [.., K] to e4m3 with one power-of-two scale per `tile` values of the last dim, and dequantise.

    scale = 2^ceil(log2(max(amax, 1e-4) / 448)) (V4 spec 3.2); a last tile may be shorter. Returns x's shape and dtype.
    """
    columns = x.shape[-1]
    tiles = F.pad(x.float(), (0, -columns % tile)).unflatten(-1, (-1, tile))  # [.., K/tile, tile]
    amax = tiles.abs().amax(-1, keepdim=True).clamp(min=E4M3_AMAX_FLOOR)
    # times the rounded reciprocal, as the models were trained: a division would differ in the last bit
    scale = exp2(ceil_log2(amax * torch.tensor(1 / E4M3_MAX, dtype=torch.float32)))
    codes = (tiles / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2)[..., :columns].to(x.dtype)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """uint8 [.., K/2] -> fp32 [.., K]: the low nibble holds the even index (V4 spec 4.1)."""
    return F.embedding(packed.int(), _pairs_of_e2m1(packed.device)).flatten(-2)  # on the CPU half the time of indexing


@lru_cache(maxsize=8)
def _pairs_of_e2m1(device: torch.device) -> Tensor:
    """[256, 2]: the values of the low and the high nibble of a byte."""
    values = torch.tensor(E2M1_VALUES, device=device)
    values = torch.cat((values, -values))
    return torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)


def dequantize(weight: LinearWeight, dtype: torch.dtype, expert: int | None = None) -> Tensor:
    """The matrix [.., N, K] in `dtype`, of stacked ones that of `expert`: value times scale in fp32, rounded once.

    With power-of-two scales the result is exact in fp32 and in bf16, as e4m3 and e2m1 have at most 4 significant bits.
    """
    data = weight.data if expert is None else weight.data[expert]
    if weight.format == "plain":
        return rounded(data, dtype)
    assert weight.scale is not None and weight.block is not None, f"{weight.format} weight without scale or block"
    values = unpack_e2m1(data) if weight.format == "fp4" else data.float()
    rows, columns = values.shape[-2:]
    scale = weight.scale if expert is None else weight.scale[expert]
    scale = e8m0_to_float(scale) if scale.dtype == torch.uint8 else scale
    scale = scale.repeat_interleave(weight.block[0], -2)[..., :rows, :]  # [.., N, ceil(K/block)]
    scale = scale.repeat_interleave(weight.block[1], -1)[..., :columns]
    return values.mul_(scale).to(dtype)


def linear(x: Tensor, weight: LinearWeight, expert: int | None = None) -> Tensor:
    """x [T, K] times weight [N, K] transposed, of stacked ones that of `expert` -> [T, N].

    Computed in x's dtype with fp32 accumulation, rounded to x's dtype. In bf16 the input of a weight with `quantize_input` is first
    rounded to e4m3, as the FP8 and FP4 products of V4 spec 3.3 do; fp32 is plain mathematics.
    """
    matrix = dequantize(weight, x.dtype, expert)
    if x.dtype == torch.bfloat16 and weight.quantize_input is not None:
        x = quantize_e4m3_tiles(x, weight.quantize_input)
    return F.linear(x, matrix)


def linear_grouped(x: Tensor, weight: LinearWeight) -> Tensor:
    """x [T, G, K] times weight [G R, K], group g by its own R rows -> [T, G, R] (V4 spec 2.8). `output_quant` has quantised the input."""
    matrix = dequantize(weight, x.dtype).view(x.shape[1], -1, x.shape[2])  # [G, R, K]
    return torch.bmm(x.transpose(0, 1), matrix.transpose(1, 2)).transpose(0, 1)
