"""A decode step on its way: launched on the device, its tokens not yet known to the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from abyssal.engine.sequence import Sequence
from abyssal.kv.batch import staged


@dataclass(frozen=True, slots=True)
class Flight:
    """What a step computes, and where its tokens will be."""

    sequences: list[Sequence]
    positions: list[int]  # of the token that each sequence computes
    tokens: Tensor  # int64 [S] on the device, the input of the step after
    _host: Tensor  # int64 [2, S], tokens and whether logits were usable; filled once `_done`
    _done: torch.cuda.Event | None  # None: there is nothing to wait for

    @classmethod
    def launched(cls, sequences: list[Sequence], positions: list[int], result: Tensor) -> Flight:
        """`result`: as `sample_plain` returns it."""
        if not result.is_cuda:
            return cls(sequences, positions, result[0], result, None)
        host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
        host.copy_(result, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return cls(sequences, positions, result[0], host, done)

    def __iter__(self) -> Iterator[tuple[Sequence, int]]:
        return zip(self.sequences, self.positions, strict=True)

    def tokens_of(self, sequences: list[Sequence]) -> Tensor:
        """int64 [len(sequences)] on the device: the tokens of some of the step's sequences."""
        if sequences == self.sequences:
            return self.tokens
        row = {id(seq): i for i, seq in enumerate(self.sequences)}
        rows = staged(np.array([row[id(seq)] for seq in sequences]), self.tokens.device)
        return self.tokens.index_select(0, rows.to(self.tokens.device, non_blocking=True))

    def land(self) -> tuple[list[int], list[int]]:
        """Wait for the step -> token of each sequence, and 1 where its logits were usable."""
        if self._done is not None:
            self._done.synchronize()
        tokens, usable = self._host.tolist()
        return tokens, usable
