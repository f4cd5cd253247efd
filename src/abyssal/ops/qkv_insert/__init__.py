"""Query norm and RoPE, KV RoPE and the store of the window record (V4 spec 2.5)."""

from __future__ import annotations

from torch import Tensor

from abyssal.kv.batch import StoreFacts
from abyssal.kv.pool import RecordView
from abyssal.ops.norm import rms_norm, rounded
from abyssal.ops.rope import rotate


def qkv_insert(
    q: Tensor, kv: Tensor, rope: Tensor, window: RecordView, layer_row: int, store: StoreFacts, eps: float | None
) -> Tensor:
    """Rotate q and kv, store kv in the window pages, return q.

    Args:
        q: [T, H, D]; with `eps` each head is first normalised without weight.
        kv: [T, D], key and value in one.
        rope: complex64 [T, rope_dim / 2] of the layer's table.
        layer_row: row of this layer in the window kind.

    Returns:
        q [T, H, D] in its own dtype.
    """
    dtype = q.dtype
    if eps is not None:
        q = rms_norm(q, None, eps)
    q = rounded(rotate(q.float(), rope.unsqueeze(1)), dtype)
    kv = rounded(rotate(kv.float(), rope), dtype)
    window.write(store.slots[layer_row], store.of(kv))
    return q
