"""Access to loaded weights by name, so that what the model does not take is noticed."""

from __future__ import annotations

from torch import Tensor

from abyssal.checkpoint.rows import RowTable
from abyssal.errors import CheckpointError
from abyssal.ops.hyper_connection import MixWeights
from abyssal.ops.linear import LinearWeight


class Weights:
    """A view of the loaded weights below a name prefix. Each weight is taken once."""

    def __init__(self, tensors: dict[str, Tensor | LinearWeight | RowTable], prefix: str = "") -> None:
        self._tensors = tensors
        self._prefix = prefix

    def below(self, prefix: str) -> Weights:
        return Weights(self._tensors, f"{self._prefix}{prefix}.")

    def tensor(self, name: str) -> Tensor:
        value = self._tensors.pop(self._prefix + name)
        assert isinstance(value, Tensor), f"{self._prefix}{name} is no plain tensor"
        return value

    def linear(self, name: str) -> LinearWeight:
        value = self._tensors.pop(self._prefix + name)
        assert isinstance(value, LinearWeight), f"{self._prefix}{name} is no linear weight"
        return value

    def rows(self, name: str) -> RowTable:
        value = self._tensors.pop(self._prefix + name)
        assert isinstance(value, RowTable), f"{self._prefix}{name} is no table of rows"
        return value

    def mix(self, name: str, streams: int) -> MixWeights:
        fn, base, scale = (self.tensor(f"{name}_{part}") for part in ("fn", "base", "scale"))
        return MixWeights.from_checkpoint(fn, base, scale, streams)

    def assert_all_taken(self) -> None:
        if self._tensors:
            names = ", ".join(sorted(self._tensors)[:5])
            raise CheckpointError(f"{len(self._tensors)} loaded weights are used by no layer: {names}")
