"""Repairs of Triton 3.6's interpreter, which runs kernels without a GPU."""

from __future__ import annotations

from typing import Any


def repair_interpreter() -> None:
    """Make the interpreter compute as a GPU does where it does not.

    - Loop bounds from tensors: it takes them by int(), which NumPy 2.4 refuses.
    - Products of bf16: it multiplies the bits as integers.
    - fp32 to bf16: it cuts the lower bits off instead of rounding to nearest, and loses subnormals.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor, dot, convert = (
        interpreter._patch_lang_tensor,
        interpreter.InterpreterBuilder.create_dot,
        interpreter._convert_float,
    )

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

    interpreter._patch_lang_tensor = patch_with_index
    interpreter._convert_float = rounding
    interpreter.InterpreterBuilder.create_dot = dot_of_floats
