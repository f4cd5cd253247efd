"""What ranks tell each other during a step. `Comm` is one rank's: it exchanges nothing and changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from abyssal.parallel.mesh import ONE_RANK, Mesh

# x [n, D], chosen experts int [n, k], weights fp32 [n, k], number of this rank's first expert -> [n, ...] of this rank's experts, terms of
# a sum over ranks
LocalExperts = Callable[[Tensor, Tensor, Tensor, int], Tensor]
Shape = tuple[int, int]  # of a step of one token per sequence (`engine.decoder`): rows, and tokens per sequence at most


class Comm:
    """One rank alone; `RankComm` has the same methods for several."""

    mesh: Mesh = ONE_RANK

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """token_ids int64 [T], this rank's rows of the embedding -> [T, D] on every rank of the replica; of ids below 0 anything."""
        return F.embedding(token_ids.clamp(min=0), table)

    def sum(self, x: Tensor) -> Tensor:
        """Sum of the partial results of a replica's ranks, the same bits on each; `x` may be overwritten."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """x [T, N] of each rank of the replica -> [T, ranks N], in the order of ranks."""
        return x

    def experts(self, x: Tensor, experts: Tensor, weights: Tensor, num_experts: int, local: LocalExperts) -> Tensor:
        """What `local` gives for every token's chosen experts, summed over where they are.

        Args:
            x: [T, D]; experts int [T, k], among the `num_experts` of a layer; weights fp32 [T, k].
            local: computes the experts of this rank.

        Returns:
            [T, ...]; of a replica with several ranks a part, which `sum` adds up.
        """
        return local(x, experts, weights, 0)

    def enter(self, num_tokens: int, shape: Shape | None = None) -> Shape | None:
        """A step of `num_tokens`, of `shape` if it has one, begins on this rank; returns when all ranks that share its experts have entered.

        Returns:
            The shape in which all of them compute this step, the largest of theirs; None: one of them has a step of no shape, and each
            computes its own.
        """
        return shape

    def idle(self, take_part: Callable[[Shape | None], None]) -> bool:
        """A step without tokens on this rank, which takes any shape.

        Args:
            take_part: computes the experts of this rank in the shape that the others agreed on, if any of them has tokens.

        Returns:
            Whether all of them are idle and know of the same requests: the next one is then told to each, so that each may wait.
        """
        return True

    def smallest(self, number: int) -> int:
        """The smallest `number` of all ranks."""
        return number

    def share(self, data: bytes) -> bytes:
        """The data of the replica's first rank."""
        return data

    def agree(self, decision: bool) -> bool:
        """The decision of the replica's first rank, where each might come to another."""
        return self.share(bytes([decision])) == b"\x01"


ALONE = Comm()
