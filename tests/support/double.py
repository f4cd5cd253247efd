"""The reference backend in double precision.

Whether a value takes one code of its grid or the neighbour is open in fp32, once it lies within rounding noise of the boundary. In
double precision it is decided, so that a quantising model has one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from abyssal.kv import batch, codec
from abyssal.kv.pool import RecordView
from abyssal.ops import hadamard, hyper_connection, moe

WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
KEPT_IN_FP32 = (
    (RecordView, "__init__"),  # storage
    (RecordView, "read"),
    (RecordView, "write"),
    (codec, "quantize"),
    (codec, "dequantize"),
    (batch, "rope_table"),  # the models' own angles are fp32 products
    (hyper_connection, "_sinkhorn_matrices"),  # kept for later runs, as are those below
    (hyper_connection, "_gate_ranges"),
    (hadamard, "hadamard_matrix"),
    (moe, "_sum_of"),
)


@contextmanager
def double_precision() -> Iterator[None]:
    """Models that are loaded, and run, within this compute in fp64. What is stored is what fp32 runs store."""
    mode = _Double()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in KEPT_IN_FP32:
            patch.setattr(owner, name, mode.narrowed(getattr(owner, name)))
        torch.set_default_dtype(torch.float64)
        try:
            with mode:
                yield
        finally:
            torch.set_default_dtype(torch.float32)


class _Double(TorchFunctionMode):
    """Says fp64 wherever the program says fp32."""

    def __init__(self) -> None:
        super().__init__()
        self._wide = True

    def narrowed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` in fp32; its result is widened."""

        def call(*args: Any) -> Any:
            outer, self._wide = self._wide, False
            torch.set_default_dtype(torch.float32)
            try:
                result = function(*map(_narrowed, args))
            finally:
                self._wide = outer
                torch.set_default_dtype(torch.float64 if outer else torch.float32)
            return _widened(result) if outer else result

        return call

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not self._wide or func is Tensor.view:  # a view as another type reads bits
            return func(*args, **kwargs)
        name = func.__name__
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        assert not in_place or args[0].dtype not in WIDER, f"{name} would write to a widened copy"
        if func is Tensor.float:
            func = Tensor.double
        return func(*_widened(args), **{name: _widened(value) for name, value in kwargs.items()})


def _narrowed(value: Any) -> Any:
    """fp64 to fp32; an inexact value to the neighbour with an odd last bit, as no boundary of a grid has one: none is reached."""
    if not isinstance(value, Tensor) or value.dtype != torch.float64:
        return value
    nearest = value.float()
    other = nearest.nextafter(torch.where(value > nearest, torch.inf, -torch.inf))
    even = nearest.view(torch.int32) & 1 == 0
    return torch.where((nearest != value) & even, other, nearest)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in WIDER:
        return value.to(WIDER[value.dtype])
    if isinstance(value, tuple | list):
        return type(value)(_widened(item) for item in value)
    return WIDER.get(value, value) if isinstance(value, torch.dtype) else value
