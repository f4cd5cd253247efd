"""Index queries: RoPE, Hadamard rotation (V4) and the folding of constants into the head weights (V4 spec 2.10)."""

from __future__ import annotations

from torch import Tensor

from abyssal.ops.hadamard import hadamard
from abyssal.ops.rope import rotate


def index_query(q: Tensor, head_weights: Tensor, rope: Tensor, *, rotate_query: bool) -> tuple[Tensor, Tensor]:
    """q [T, Hi, Di], head_weights [T, Hi] -> queries fp32 [T, Hi, Di], weights fp32 [T, Hi] times Di^-0.5 Hi^-0.5."""
    heads, dim = q.shape[1:]
    q_out = rotate(q.float(), rope.unsqueeze(1)).to(q.dtype)
    if rotate_query:
        q_out = hadamard(q_out)
    return q_out.float(), head_weights.float() * (dim**-0.5 * heads**-0.5)
