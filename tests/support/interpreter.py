"""What Triton 3.6's interpreter lacks."""

from __future__ import annotations

import numpy as np
import pytest


def complete_interpreter(patch: pytest.MonkeyPatch) -> None:
    """Makes `tl.dot` multiply values of bf16, which the interpreter keeps as uint16, and `tl.range` take scalars under numpy 2.4."""
    from triton.language import bfloat16
    from triton.runtime import interpreter

    dot, patch_tensor = interpreter.InterpreterBuilder.create_dot, interpreter._patch_lang_tensor

    def values(x: interpreter.TensorHandle) -> np.ndarray:
        return (x.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        if a.dtype.scalar != bfloat16:
            return dot(self, a, b, d, input_precision, max_num_imprecise_acc)
        return interpreter.TensorHandle(np.matmul(values(a), values(b)) + d.data, d.dtype.scalar)

    def patch_lang_tensor(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    patch.setattr(interpreter, "_patch_lang_tensor", patch_lang_tensor)
