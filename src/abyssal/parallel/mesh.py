"""Which part of a model a rank computes: replicas over requests (dp), heads and vocabulary (tp), experts (ep).

Rank r is number r // tp of the replicas and number r % tp inside its replica. Every `ep` consecutive ranks hold one set of all
experts: one replica, or several whole ones, which then compute their steps at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from abyssal.config import EngineConfig, ModelConfig

Split = Literal[
    "rows", "columns", "experts"
]  # which dimension of a weight is shared out: rows and columns over tp, experts over ep


@dataclass(frozen=True, slots=True)
class Mesh:
    """The place of one rank among `dp * tp`."""

    dp: int = 1
    tp: int = 1
    ep: int = 1
    rank: int = 0

    @classmethod
    def of(cls, config: EngineConfig, rank: int = 0) -> Mesh:
        """`rank`'s place; whether the model allows the numbers, `resolve` says."""
        return cls(config.dp, config.tp, config.tp if config.ep is None else config.ep, rank)

    @property
    def size(self) -> int:
        return self.dp * self.tp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def ep_rank(self) -> int:
        return self.rank % self.ep

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its replica."""
        return self.tp_rank == 0

    @property
    def in_step(self) -> bool:
        """Whether replicas share experts, so that none can compute a step alone."""
        return self.ep > self.tp

    def tp_groups(self) -> list[list[int]]:
        return [list(range(first, first + self.tp)) for first in range(0, self.size, self.tp)]

    def ep_groups(self) -> list[list[int]]:
        return [list(range(first, first + self.ep)) for first in range(0, self.size, self.ep)]

    def part(self, split: Split, length: int) -> range:
        """The indices, of `length`, that this rank holds of a dimension that is split over the ranks of a group."""
        count, index = (self.ep, self.ep_rank) if split == "experts" else (self.tp, self.tp_rank)
        assert length % count == 0, f"{length} {split} on {count} ranks"
        return range(length // count * index, length // count * (index + 1))

    def local(self, config: ModelConfig) -> ModelConfig:
        """The model whose attention one rank computes: its heads and its groups of the output projection."""
        return replace(config, num_heads=config.num_heads // self.tp, o_groups=config.o_groups // self.tp)


ONE_RANK = Mesh()
