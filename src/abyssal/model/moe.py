"""The expert layer of one block (V4 spec 2.11)."""

from __future__ import annotations

from torch import Tensor

from abyssal.config import ModelConfig
from abyssal.model.weights import Weights
from abyssal.ops._select import Ops
from abyssal.ops.moe import ExpertLayer
from abyssal.parallel.comm import Comm


class MoE:
    def __init__(self, weights: Weights, config: ModelConfig, layer: int, ops: Ops, comm: Comm) -> None:
        self.config, self.comm = config, comm
        hashed = config.layers[layer].router == "hash"
        if config.family == "v41":
            self.bias_vl = weights.tensor("gate.bias_vl")  # chooses the experts of image positions, of which there are none yet
        shared = weights.below("shared_experts")
        self.ops = ops
        self.experts = ops.prepare_experts(
            ExpertLayer(
                gate=weights.tensor("gate.weight"),
                bias=None if hashed else weights.tensor("gate.bias"),
                tid2eid=weights.tensor("gate.tid2eid") if hashed else None,
                w13=weights.linear("experts.w13"),
                w2=weights.linear("experts.w2"),
                shared_w1=shared.linear("w1"),
                shared_w3=shared.linear("w3"),
                shared_w2=shared.linear("w2"),
                k=config.num_experts_per_token,
                scale=config.routed_scaling_factor,
                temperature=config.gate_temperature,
                limit=config.swiglu_limit,
            )
        )

    def __call__(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """x [T, D], normalised; token_ids [T] -> [T, D]."""
        if self.comm.mesh.ep == 1:  # every expert is here
            return self.ops.moe(x, token_ids, self.experts)
        chosen, weights = self.ops.route(x, token_ids, self.experts)
        routed = self.comm.experts(x, chosen, weights, self.config.num_experts, self._routed)
        shared = self.ops.shared_expert(x, self.experts)
        if self.ops.batch_invariant:  # no sum over a replica's ranks: it has one
            return self.ops.choice_sum(routed, chosen, shared, token_ids, self.experts)
        return self.comm.sum(routed + shared).to(x.dtype)

    def _routed(self, x: Tensor, chosen: Tensor, weights: Tensor, first: int) -> Tensor:
        """Of this rank's experts the sum, fp32 [T, D]; batch-invariant each choice by itself [T, k, D], as ranks would cut the sum."""
        compute = self.ops.choice_outputs if self.ops.batch_invariant else self.ops.routed_experts
        return compute(x, chosen, weights, self.experts, first)
