"""Repairs of Triton 3.6's interpreter, which runs kernels without a GPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any


def repair_interpreter() -> None:
    """Make the interpreter compute as a GPU does where it does not, and take less time.

    - Loop bounds from tensors: it takes them by int(), which NumPy 2.4 refuses.
    - Products of bf16: it multiplies the bits as integers.
    - fp32 to bf16: it cuts the lower bits off instead of rounding to nearest, and loses subnormals.

    Time: it patches the language anew in every call of a device function, builds its table of types for every operation, prepares
    checks of integer sums that it then leaves out, and describes the type of every tuple, such as shapes, which is seldom asked for.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    patch, patch_tensor, dot, convert = (
        interpreter._patch_lang,
        interpreter._patch_lang_tensor,
        interpreter.InterpreterBuilder.create_dot,
        interpreter._convert_float,
    )
    attribute, builder = tl.tuple.__getattr__, interpreter.interpreter_builder
    patched: set[Any] = set()  # modules, while a kernel runs

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch_once(function: Any) -> Any:
        seen = {module for module in function.__globals__.values() if module is tl or module is tl.core}
        if not seen or not seen <= patched:
            scope = Scope()
            scope._changes = patch(function)._changes
            patched.update(seen)
            return scope
        return interpreter._LangPatchScope()

    scalar_dtype = functools.cache(interpreter._get_np_dtype)

    def np_dtype(kind: Any) -> Any:
        scalar = kind.scalar
        return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else scalar_dtype(scalar)

    def make_tuple(self: Any, values: Any, kind: Any = None) -> None:
        self.values = [*values]
        if kind is not None:
            self.type = kind if isinstance(kind, tl.tuple_type) else tl.tuple_type(kind)

    def tuple_attribute(self: Any, name: str) -> Any:
        if name != "type":
            return attribute(self, name)
        self.type = tl.core._type_for_tuple_values(self.values)
        return self.type

    def patch_with_index(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def rounding(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == tl.bfloat16 and target == tl.float32:
            return data.view(np.uint16).astype(np.uint32) << 16
        if source != tl.float32 or target != tl.bfloat16:
            return convert(data, source, target, mode)
        bits = np.ascontiguousarray(data).view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)

    def widen(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle(rounding(x.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32)

    def dot_of_floats(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widen(a), widen(b), *rest)

    tl.tuple.__init__, tl.tuple.__getattr__ = make_tuple, tuple_attribute
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = np_dtype
    interpreter._patch_lang_tensor = patch_with_index
    interpreter._convert_float = rounding
    interpreter.InterpreterBuilder.create_dot = dot_of_floats
