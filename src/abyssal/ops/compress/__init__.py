"""Compressor: pool groups of tokens into entries, normalise, rotate, store; and keep the state rows (V4 spec 2.9)."""

from __future__ import annotations

import torch
from torch import Tensor

from abyssal.kv.batch import CompressFacts, StoreFacts
from abyssal.kv.pool import RecordView
from abyssal.ops.hadamard import hadamard
from abyssal.ops.norm import rms_norm
from abyssal.ops.rope import rotate


def compress(
    rows: Tensor,
    norm: Tensor,
    facts: CompressFacts,
    store: StoreFacts,
    state: RecordView,
    entries: RecordView,
    layer_row: int,
    *,
    overlap: bool,
    rotate_keys: bool,
    eps: float,
    dtype: torch.dtype,
) -> None:
    """Store the entries that this step completes and the state rows that later steps read.

    Args:
        rows: fp32 [T, 2 c D], per token the projection (c D values), then the scores with their position bias;
            c = 2 with overlap (first half for the next group's entry, second half for the own), else 1.
        norm: fp32 [D], weight of the RMS norm after pooling.
        rotate_keys: Hadamard rotation after RoPE (V4's index keys).
        dtype: the run's dtype, to which pooled values are rounded.
    """
    if facts.num_entries:
        carried = state.read(facts.carried[state.spec.name][layer_row])
        pooled = pool(torch.cat([carried, rows, _empty_row(rows)]), facts.sources, overlap).to(dtype)
        entry = rotate(rms_norm(pooled, norm, eps).float(), facts.rope).to(dtype)
        if rotate_keys:
            entry = hadamard(entry)
        entries.write(facts.entry_slots[entries.spec.name][layer_row], entry)
    state.write(store.slots[layer_row], rows.index_select(0, store.rows))


def pool(rows: Tensor, sources: Tensor, overlap: bool) -> Tensor:
    """rows fp32 [R, 2 c D], sources [E, slots] -> per-channel softmax pooling over the slots, fp32 [E, D]."""
    values, scores = rows.chunk(2, dim=1)  # [R, c D] each
    if overlap:
        group = sources.shape[1] // 2
        (early, late), (early_s, late_s) = values.chunk(2, dim=1), scores.chunk(2, dim=1)
        values = torch.cat([early[sources[:, :group]], late[sources[:, group:]]], dim=1)  # [E, slots, D]
        scores = torch.cat([early_s[sources[:, :group]], late_s[sources[:, group:]]], dim=1)
    else:
        values, scores = values[sources], scores[sources]
    return (values * scores.softmax(dim=1)).sum(dim=1)


def _empty_row(rows: Tensor) -> Tensor:
    """The row of a token before the sequence: value 0, score -inf, so that its weight is exactly 0."""
    half = rows.shape[1] // 2
    return torch.cat([rows.new_zeros(1, half), rows.new_full((1, half), -torch.inf)], dim=1)
