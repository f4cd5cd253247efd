"""What the attention kernels share: their arguments, the checks of them, and how keys are split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from abyssal.errors import ConfigError
from abyssal.kv.layouts import Layout

HEAD_DIM = 512
ALIKE_HEADS, ALIKE_TOKENS, ALIKE_BLOCKS = 4, 64, 4  # at most, see `splits_alike`
PAIRS = (("bf16", "bf16"), ("v4", "v4"), ("v41", "v41"), ("v41", "v41_fp4"))  # of window and selected entries


class Records(NamedTuple):
    """Packed records of one cache kind, as they lie in a page pool."""

    pages: Tensor  # uint8 [pages, page bytes]; rows may be further apart than they are long
    layout: Layout
    entries_per_page: int


class KeyList(NamedTuple):
    """The records that each query attends to."""

    records: Records
    slots: Tensor  # int32 [T, K], page * entries_per_page + row; -1: none. Rows may overlap, as those of `Tensor.unfold` do.
    lengths: Tensor  # int32 [T], how many of a row's slots count, at most K


@dataclass(frozen=True, slots=True)
class Splits:
    """How the key blocks of a token are dealt to programs; a program's partial result is combined with its siblings' afterwards."""

    count: int  # programs per token and head block
    blocks: int | None  # blocks of each; None: the token's blocks are dealt evenly, so a result depends on the batch's size


def splits_alike(tokens: int, heads: int, blocks: int) -> bool:
    """Whether every block of 64 keys is a split, of one query as of many, so that a sequence has the same bits alone and among others.

    Other splits would be 1 to 1.5 us faster for one query and for 64: only for so few heads that no released model has them, nor its
    shard on 8 GPUs, and for short lists.
    """
    return heads <= ALIKE_HEADS and tokens <= ALIKE_TOKENS and 1 < blocks <= ALIKE_BLOCKS


def check_layouts(window: Layout, entries: Layout | None) -> None:
    """Refuse record layouts that no kernel reads; the engine calls this when it is built.

    Raises:
        ConfigError: naming the pair and those that exist.
    """
    names = (window.name, window.name if entries is None else entries.name)
    if names not in PAIRS or window.dim != HEAD_DIM or (entries is not None and entries.dim != HEAD_DIM):
        known = ", ".join("+".join(pair) for pair in PAIRS)
        dims = window.dim if entries is None else (window.dim, entries.dim)
        raise ConfigError(
            f"no attention kernel reads window records {names[0]!r} with entries {names[1]!r} of {dims} values; "
            f"there are {known}, of {HEAD_DIM} values"
        )


def check(q: Tensor, window: KeyList, entries: KeyList | None, sink: Tensor) -> None:
    """Refuse what the kernels cannot read, by value.

    Raises:
        ConfigError: a layout pair that no kernel reads.
        ValueError: a wrong shape, type or stride.
    """
    if q.dim() != 3 or q.shape[2] != HEAD_DIM or q.dtype != torch.bfloat16 or q.stride(2) != 1:
        raise ValueError(
            f"q must be bf16 [tokens, heads, {HEAD_DIM}], its last dimension contiguous, "
            f"not {q.dtype} {list(q.shape)} with strides {q.stride()}"
        )
    tokens, heads, _ = q.shape
    if sink.shape != (heads,) or sink.dtype != torch.float32 or not sink.is_contiguous():
        raise ValueError(f"sink must be fp32 [{heads}], not {sink.dtype} {list(sink.shape)}")
    check_layouts(window.records.layout, entries.records.layout if entries is not None else None)
    for name, keys in (("window", window), ("entries", entries)):
        if keys is not None:
            _check_keys(name, keys, tokens)


def _check_keys(name: str, keys: KeyList, tokens: int) -> None:
    pages, layout, count = keys.records
    if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.stride(1) != 1:
        raise ValueError(f"{name}: pages must be uint8 [pages, bytes], not {pages.dtype} {list(pages.shape)}")
    if pages.stride(0) % 16 or pages.data_ptr() % 16:
        raise ValueError(f"{name}: pages must start at multiples of 16 bytes, not at {pages.data_ptr()} + n {pages.stride(0)}")
    if count < 1 or pages.shape[1] < count * layout.bytes_per_entry:
        raise ValueError(f"{name}: {count} records of {layout.name!r} do not fit a page of {pages.shape[1]} bytes")
    slots, lengths = keys.slots, keys.lengths
    if (
        slots.dtype != torch.int32
        or slots.dim() != 2
        or slots.shape[0] != tokens
        or (slots.shape[1] > 1 and slots.stride(1) != 1)
    ):
        raise ValueError(f"{name}: slots must be int32 [{tokens}, K], rows contiguous, not {slots.dtype} {list(slots.shape)}")
    if lengths.dtype != torch.int32 or lengths.shape != (tokens,) or not lengths.is_contiguous():
        raise ValueError(f"{name}: lengths must be int32 [{tokens}], not {lengths.dtype} {list(lengths.shape)}")


def check_slots(keys: KeyList) -> None:
    """Debug mode: stop at slots outside the pool and at lengths beyond the list. Waits for the GPU.

    Raises:
        ValueError: naming the first slot or length.
    """
    limit = keys.records.pages.shape[0] * keys.records.entries_per_page
    width = keys.slots.shape[1]
    bad_length = (keys.lengths < 0) | (keys.lengths > width)
    if bad_length.any():
        token = int(bad_length.nonzero()[0])
        raise ValueError(f"token {token} lists {int(keys.lengths[token])} slots; its row holds {width}")
    listed = torch.arange(width, device=keys.slots.device) < keys.lengths[:, None]
    bad = listed & ((keys.slots < -1) | (keys.slots >= limit))
    if bad.any():
        token, column = bad.nonzero()[0].tolist()
        raise ValueError(f"token {token} lists slot {int(keys.slots[token, column])}; the pool has {limit} and -1 means none")


def empty_keys(tokens: int, like: KeyList) -> KeyList:
    """A list without keys, for layers without compressed entries."""
    return KeyList(like.records, like.slots[:, :0], like.lengths.new_zeros(tokens))


def traits(layout: Layout) -> dict[str, int]:
    """Traits of a layout that kernels take as compile-time constants."""
    grid = layout.grid
    return {
        "DATA_BYTES": layout.data_bytes,
        "SCALE_BYTES": layout.scale_bytes,
        "QUANTISED": 0 if grid is None else grid.values,
        "TILE": layout.dim if grid is None else grid.tile,
        "FP4": int(grid is not None and grid.kind == "e2m1"),
    }
