"""A step on its way: launched on the device, its tokens not yet known to the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from abyssal.engine.sequence import Sequence
from abyssal.kv.batch import Drawn, staged


class Strips:
    """Where tokens land on the host: two places in turn, since a step is launched before the one before has landed."""

    def __init__(self, most: int, device: torch.device) -> None:
        """`most`: sequences of a step."""
        is_cuda = device.type == "cuda"
        self._places = [torch.empty(2 * most, dtype=torch.int64, pin_memory=is_cuda) for _ in range(2)]
        self._events = [torch.cuda.Event() if is_cuda else None for _ in range(2)]

    def receive(self, result: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """A place for `result` int64 [2, S], which will be there once the event has happened; None: it is there."""
        self._places.reverse()
        self._events.reverse()
        place, done = self._places[0][: result.numel()].view(result.shape), self._events[0]
        place.copy_(result, non_blocking=True)
        if done is not None:
            done.record()
        return place, done


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
    def launched(
        cls, sequences: list[Sequence], indices: list[int], num_tokens: int, begun: float, result: Tensor, strips: Strips
    ) -> Flight:
        """`result`: as `sample_plain` returns it; whatever is launched next may write where it lies."""
        return cls(sequences, indices, num_tokens, begun, result[0].clone(), *strips.receive(result))

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
