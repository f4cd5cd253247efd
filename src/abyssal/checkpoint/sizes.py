"""How much memory a model's weights take on a GPU, from its configuration alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from abyssal.checkpoint.expected import TensorSpec, expected_tensors
from abyssal.checkpoint.match import FP4_BLOCK
from abyssal.config import ModelConfig


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Weights as a GPU holds them: quantised ones as stored, the others in the types that the model computes with."""

    experts: int  # routed experts, which several GPUs share out
    num_experts: int
    rest: int  # on every GPU

    @property
    def total(self) -> int:
        return self.experts + self.rest

    def per_gpu(self, gpus: int) -> int:
        """Bytes on the fullest of `gpus` GPUs that share out whole experts and each hold all the rest."""
        return self.experts // self.num_experts * -(-self.num_experts // gpus) + self.rest


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> WeightBytes:
    """Bytes of all weights; `dtype` is that of weights which are stored plain. Draft layers are not loaded and not counted."""
    experts = rest = 0
    for spec in expected_tensors(config).values():
        size = _tensor_bytes(spec, config, dtype)
        experts, rest = (experts + size, rest) if spec.pieces else (experts, rest + size)
    return WeightBytes(experts, config.num_experts, rest)


def _tensor_bytes(spec: TensorSpec, config: ModelConfig, dtype: torch.dtype) -> int:
    values = math.prod(spec.shape)
    if spec.kind in ("fp32", "expert_ids"):
        return 4 * values
    if spec.kind != "linear" or config.quant is None:
        return dtype.itemsize * values
    fp4 = bool(spec.pieces) and config.quant.expert_dtype == "fp4"
    rows, columns = FP4_BLOCK if fp4 else config.quant.weight_block
    *stack, height, width = spec.shape
    scales = math.prod(stack) * -(-height // rows) * -(-width // columns)  # one byte each
    return (values // 2 if fp4 else values) + scales
