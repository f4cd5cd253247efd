"""How much memory a model's weights take on a GPU, from its configuration alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from abyssal.checkpoint.expected import TensorSpec, expected_tensors
from abyssal.checkpoint.match import FP4_BLOCK, ROWS_BLOCK
from abyssal.config import ModelConfig


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Weights as a GPU holds them: quantised ones as stored, the others in the types that the model computes with."""

    experts: int  # routed experts, which several GPUs share out
    num_experts: int
    rest: int  # on every GPU
    on_disk: int  # V4.1's n-gram tables, read row by row

    @property
    def total(self) -> int:
        """Bytes in memory."""
        return self.experts + self.rest

    def per_gpu(self, gpus: int) -> int:
        """Bytes on the fullest of `gpus` GPUs that share out whole experts and each hold all the rest."""
        return self.experts // self.num_experts * -(-self.num_experts // gpus) + self.rest


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> WeightBytes:
    """Bytes of all weights; `dtype` is that of weights which are stored plain. Draft layers are not loaded and not counted."""
    sums = dict.fromkeys(("experts", "rest", "on_disk"), 0)
    for spec in expected_tensors(config).values():
        place = "on_disk" if spec.kind == "rows" else "experts" if spec.pieces else "rest"
        sums[place] += tensor_bytes(spec, config, dtype)
    return WeightBytes(num_experts=config.num_experts, **sums)


def tensor_bytes(spec: TensorSpec, config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one weight in a GPU's memory, or in the files for a table that is read row by row."""
    values = math.prod(spec.shape)
    if spec.kind in ("fp32", "expert_ids"):
        return 4 * values
    fp4 = bool(spec.pieces) and config.quant is not None and config.quant.expert_dtype == "fp4"
    block = FP4_BLOCK if fp4 else _scale_block(spec, config)
    if block is None:
        return dtype.itemsize * values
    *stack, height, width = spec.shape
    scales = math.prod(stack) * -(-height // block[0]) * -(-width // block[1])  # one byte each
    return (values // 2 if fp4 else values) + scales


def _scale_block(spec: TensorSpec, config: ModelConfig) -> tuple[int, int] | None:
    """Rows and columns of FP8 values that share a scale; None: plain values."""
    if spec.kind == "rows":
        return ROWS_BLOCK
    return config.quant.weight_block if spec.kind == "linear" and config.quant is not None else None
