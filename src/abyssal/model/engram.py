"""The n-gram memory of a V4.1 layer (V4.1 spec 3.8)."""

from __future__ import annotations

import torch
from torch import Tensor

from abyssal.config import ModelConfig
from abyssal.model.weights import Weights
from abyssal.ops._select import Ops
from abyssal.ops.engram import row_values


class Engram:
    """Adds what the table holds for a token's last n-grams to the streams, before the layer's first site."""

    def __init__(self, weights: Weights, config: ModelConfig, index: int, dtype: torch.dtype, ops: Ops) -> None:
        self.index, self.rms_eps, self.dtype, self.ops = index, config.rms_eps, dtype, ops
        self.streams, self.hidden = config.hc_mult, config.hidden_size
        self.table = weights.rows("embed")
        self.readable = ops.prepare_table(self.table)  # None: only the host can read it
        self.wkv = ops.prepare_linear(weights.linear("wkv"))
        self.weight = weights.tensor("q_weight") * weights.tensor("k_weight")  # [S, D]

    def read(self, engram_rows: Tensor, device: torch.device) -> Tensor:
        """The step's table rows, in one gather: `Batch.engram_rows` -> [T, columns * head_dim] on `device`."""
        rows = engram_rows[self.index]  # [T, columns]
        if self.readable is not None:
            return self.ops.table_rows(rows.to(device), self.readable, self.dtype)
        codes, scales = self.table.gather(rows)
        return row_values(codes.to(device), scales.to(device), self.dtype).view(len(rows), -1)

    def __call__(self, streams: Tensor, rows: Tensor) -> Tensor:
        """streams [T, S, D], rows of `read` -> [T, S, D]."""
        kv, *_ = self.ops.linear(rows, self.wkv)  # [T, (S + 1) D]
        key, value = kv.split([self.streams * self.hidden, self.hidden], dim=1)
        return self.ops.engram(streams, key.unflatten(1, (self.streams, -1)), value, self.weight, self.rms_eps)
