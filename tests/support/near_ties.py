"""Comparing a quantising model with stored logits: values on a rounding boundary may fall to either side.

Two fp32 programs differ by some 1e-6. A value that lies so close to a boundary of its grid takes one code in the one and the
neighbour in the other; a grid step then moves later logits by up to 0.1 or more. `Rounding` finds such values and can push a tile
of them over the boundary, so that a test can ask whether the stored logits follow from one of the two legitimate codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from torch import Tensor

from abyssal.kv import codec
from abyssal.kv.layouts import Grid

REACH = 1e-6  # distance from a boundary, relative to the largest value of the row, at which rounding is open


@dataclass(frozen=True, slots=True, order=True)
class Tie:
    """A tile of values one of which lies on a boundary."""

    position: int  # of the token that this value belongs to, or of the last one of its group
    call: int  # number of the quantisation within a forward
    row: int
    tile: int
    sign: int  # 1: away from zero crosses the boundary, -1: towards zero


class Rounding:
    """Replaces `codec.quantize` for forwards of one prompt of `length` tokens, each in a single step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
        self.length = length
        self.pushed: set[Tie] = set()
        self.ties: set[Tie] = set()
        self._calls = 0
        self._quantize = codec.quantize
        monkeypatch.setattr(codec, "quantize", self._replacement)

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        """`run()`, leaving in `ties` what was open in it."""
        self._calls = 0
        self.ties.clear()
        return run()

    def _replacement(self, grid: Grid, x: Tensor) -> tuple[Tensor, Tensor]:
        call, self._calls = self._calls, self._calls + 1
        if not len(x):
            return self._quantize(grid, x)
        reach = REACH * x.abs().amax(1, keepdim=True) * x.sign()
        pushed = x.clone()
        for tie in self.pushed:
            if tie.call == call:
                place = tie.row, slice(tie.tile * grid.tile, (tie.tile + 1) * grid.tile)
                pushed[place] += 2 * tie.sign * reach[place]
        codes, scales = self._quantize(grid, pushed)
        here = codec.dequantize(grid, codes, scales)
        for sign in (1, -1):
            there = codec.dequantize(grid, *self._quantize(grid, pushed + sign * reach))
            for row, tile in (there != here).unflatten(1, (-1, grid.tile)).any(-1).nonzero().tolist():
                self.ties.add(Tie(self._position(row, len(x)), call, row, tile, sign))
        return codes, scales

    def _position(self, row: int, rows: int) -> int:
        """Rows are tokens, groups of two tokens, or index heads of tokens."""
        if rows < self.length:
            return 2 * row + 1
        return row // (rows // self.length)
