"""A step on its way: launched on the device, its tokens not yet known to the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from abyssal.engine.sequence import Sequence
from abyssal.kv.batch import Drawn, staged


@dataclass(frozen=True, slots=True)
class Flight:
    """Which sequences a step draws a token for, and where these tokens will be."""

    sequences: list[Sequence]
    indices: list[int]  # of the tokens drawn, each among its sequence's
    num_tokens: int  # that it computes
    begun: float  # as of `time.perf_counter`
    _tokens: Tensor  # int64 [S] on the device, inputs of the step after
    _host: Tensor  # int64 [2, S], tokens and whether logits were usable; filled once `_done`
    _done: torch.cuda.Event | None  # None: there is nothing to wait for

    @classmethod
    def launched(cls, sequences: list[Sequence], indices: list[int], num_tokens: int, begun: float, result: Tensor) -> Flight:
        """`result`: as `sample_plain` returns it; whatever is launched next may write where it lies."""
        tokens = result[0].clone()
        if not result.is_cuda:
            return cls(sequences, indices, num_tokens, begun, tokens, result.clone(), None)
        host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
        host.copy_(result, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return cls(sequences, indices, num_tokens, begun, tokens, host, done)

    def drawn_for(self, sequences: list[Sequence]) -> Drawn | None:
        """What the step after, of `sequences`, takes of this one's tokens; None: nothing.

        It computes a single token of each that takes one, and of each in front of it.
        """
        taking = [row for row, seq in enumerate(sequences) if seq.is_drawing]
        if not taking:
            return None
        if len(taking) == len(sequences) and sequences == self.sequences:
            return Drawn(self._tokens, None)
        place = {seq: i for i, seq in enumerate(self.sequences)}
        found = [(row, place[sequences[row]]) for row in taking]
        rows, places = staged(np.array(found).T.copy(), self._tokens.device).to(self._tokens.device, non_blocking=True)
        return Drawn(self._tokens.index_select(0, places), rows)

    def land(self) -> tuple[list[int], list[int]]:
        """Wait for the step -> token of each of `sequences`, and 1 where its logits were usable."""
        if self._done is not None:
            self._done.synchronize()
        tokens, usable = self._host.tolist()
        return tokens, usable
