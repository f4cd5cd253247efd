"""Compressor: pool groups of tokens into entries, normalise, rotate, store; and keep the state rows (V4 spec 2.9, V4.1 spec 3.6)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from abyssal.kv.batch import CompressFacts, StoreFacts
from abyssal.kv.pool import RecordView
from abyssal.ops.hadamard import hadamard
from abyssal.ops.norm import rms_norm
from abyssal.ops.rope import rotate


def compress(
    rows: Tensor,
    bias: Tensor | None,
    norm: Tensor,
    facts: CompressFacts,
    store: StoreFacts | None,
    state: RecordView | None,
    sums: RecordView | None,
    entries: RecordView,
    layer_row: int,
    *,
    overlap: bool,
    rotate_keys: bool,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Store the entries that this step completes and the state rows that later steps read.

    Args:
        rows: fp32 [T, 2 c D], per token the projection (c D values), then the scores; c = 2 with overlap (first half for the next
            group's entry, second half for the own), else 1. Overwritten.
            Without state (ratio 1) fp32 [T, D], projections only: every token is an entry.
        bias: fp32 [m, c D], added to the scores of the token at each place of a group; None: there is none (V4.1).
        norm: fp32 [D], weight of the RMS norm after pooling.
        store, state: where the state rows go; None for ratio 1.
        sums: running sums of open groups, fp32 [3 D] each (`accumulate`); None where `state` keeps all rows of a group.
        rotate_keys: Hadamard rotation after RoPE (V4's index keys).
        dtype: the run's dtype, to which pooled values are rounded.

    Returns:
        The normalised entries [E, D] in `dtype`, before RoPE.
    """
    if bias is not None:
        rows[:, bias.shape[1] :] += bias.index_select(0, facts.phases)
    pooled = rows
    if state is not None and facts.num_groups:
        carried = state.read(facts.carried[state.spec.name][layer_row])
        available = torch.cat([carried, rows, _empty_row(rows.shape[1] // 2, rows.device)])
        if sums is None:
            pooled = pool(available, facts.sources, overlap)
        else:
            before = _carried_sums(sums, facts.carried_sums[sums.spec.name][layer_row])
            complete, still_open = accumulate(available, facts.sources, before).tensor_split([facts.num_entries])
            _, s, v = complete.unbind(1)
            pooled = v / s  # [E, D]
            sums.write(facts.sum_slots[sums.spec.name][layer_row], still_open.flatten(1))
    latent = rows.new_empty(0, norm.shape[0], dtype=dtype)
    if facts.num_entries:
        latent = rms_norm(pooled.to(dtype), norm, eps)
        store_entries(latent, facts, entries, layer_row, rotate_keys)
    if state is not None and store is not None:
        state.write(store.slots[layer_row], store.of(rows))
    return latent


def store_entries(latent: Tensor, facts: CompressFacts, entries: RecordView, layer_row: int, rotate_keys: bool) -> None:
    """latent [E, D]: RoPE at the first token of each group, with `rotate_keys` the Hadamard rotation, then pack and store."""
    if facts.num_entries:
        entry = rotate(latent.to(torch.float32, copy=True), facts.rope).to(latent.dtype)
        entry = hadamard(entry) if rotate_keys else entry
        entries.write(facts.entry_slots[entries.spec.name][layer_row], entry)


def pool(rows: Tensor, sources: Tensor, overlap: bool) -> Tensor:
    """rows fp32 [R, 2 c D], sources [E, slots] -> per-channel softmax pooling over the slots, fp32 [E, D]."""
    values, scores = _gather(rows, sources, overlap)
    return (values * scores.softmax(dim=1)).sum(dim=1)


def _gather(rows: Tensor, sources: Tensor, overlap: bool) -> Sequence[Tensor]:
    """rows fp32 [R, 2 c D], sources [G, slots] -> values and scores [G, slots, D] each, by one lookup among the 2 c parts of rows."""
    parts = _parts(sources.shape[1], overlap, rows.device)
    per_row = 4 if overlap else 2
    index = torch.add(parts, sources.unsqueeze(1), alpha=per_row)  # [G, 2, slots]
    return torch.embedding(rows.view(-1, rows.shape[1] // per_row), index).unbind(1)


@lru_cache(maxsize=16)
def _parts(slots: int, overlap: bool, device: torch.device) -> Tensor:
    """int64 [2, slots]: which part of its row is a slot's value, and which its score; with overlap early slots take the first halves."""
    own = torch.arange(slots, device=device) * 2 // slots if overlap else torch.zeros(slots, dtype=torch.int64, device=device)
    return torch.stack([own, own + (2 if overlap else 1)])


def accumulate(rows: Tensor, sources: Tensor, before: Tensor) -> Tensor:
    """Extend running sums m = max score, s = sum of exp(score - m), v = sum of exp(score - m) value: what `pool` gives is v / s.

    Args:
        rows: fp32 [R, 2 D], values and scores.
        sources: int64 [G, slots], rows to add to each group, at least one of them not empty.
        before: fp32 [G, 3, D], (m, s, v) over the earlier rows of the group.

    Returns:
        fp32 [G, 3, D].
    """
    values, scores = _gather(rows, sources, overlap=False)  # [G, slots, D] each
    m_before, s_before, v_before = before.unbind(1)
    m = torch.maximum(scores.amax(1), m_before)  # [G, D]
    weights, kept = (scores - m.unsqueeze(1)).exp_(), (m_before - m).exp_()
    s = torch.addcmul(weights.sum(1), kept, s_before)
    v = torch.addcmul((weights * values).sum(1), kept, v_before)
    return torch.stack([m, s, v], dim=1)


def _carried_sums(sums: RecordView, slots: Tensor) -> Tensor:
    """fp32 [G, 3, D]; slot -1 stands for sums over nothing."""
    stored = sums.read(slots).unflatten(1, (3, -1))
    stored[:, 0].masked_fill_((slots < 0).unsqueeze(1), -torch.inf)
    return stored


@lru_cache(maxsize=16)
def _empty_row(width: int, device: torch.device) -> Tensor:
    """[1, 2 width], the row of a token before the sequence: value 0, score -inf, so that its weight is exactly 0."""
    return torch.tensor([[0.0, -torch.inf]], device=device).repeat_interleave(width, dim=1)
