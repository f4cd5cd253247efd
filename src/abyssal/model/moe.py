"""The expert layer of one block (V4 spec 2.11)."""

from __future__ import annotations

import torch
from torch import Tensor

from abyssal.config import ModelConfig
from abyssal.model.weights import Weights
from abyssal.ops.linear import linear
from abyssal.ops.moe import moe, route, swiglu
from abyssal.parallel.comm import Comm


class MoE:
    def __init__(self, weights: Weights, config: ModelConfig, layer: int, dtype: torch.dtype, comm: Comm) -> None:
        self.config, self.dtype, self.comm = config, dtype, comm
        hashed = config.layers[layer].router == "hash"
        self.gate = weights.tensor("gate.weight")
        self.tid2eid = weights.tensor("gate.tid2eid") if hashed else None
        self.bias = None if hashed else weights.tensor("gate.bias")
        if config.family == "v41":
            self.bias_vl = weights.tensor("gate.bias_vl")  # chooses the experts of image positions, of which there are none yet
        self.w13, self.w2 = weights.linear("experts.w13"), weights.linear("experts.w2")
        shared = weights.below("shared_experts")
        self.shared_w1, self.shared_w2, self.shared_w3 = (shared.linear(name) for name in ("w1", "w2", "w3"))

    def __call__(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """x [T, D], normalised; token_ids [T] -> [T, D]."""
        config = self.config
        ids = None if self.tid2eid is None else self.tid2eid[token_ids]
        experts, weights = route(
            x, self.gate, self.bias, ids, config.num_experts_per_token, config.routed_scaling_factor, config.gate_temperature
        )
        routed = self.comm.experts(x, experts, weights, config.num_experts, self._experts)  # fp32
        shared = swiglu(linear(x, self.shared_w1), linear(x, self.shared_w3), None, config.swiglu_limit, self.dtype)
        out = self.comm.sum(routed + linear(shared, self.shared_w2))
        return out.to(self.dtype)

    def _experts(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Those of this rank, as `ops.moe.moe`."""
        return moe(x, experts, weights, self.w13, self.w2, self.config.swiglu_limit)
