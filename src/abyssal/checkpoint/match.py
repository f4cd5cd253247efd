"""Matching the tensors of the files with those of the model, and checking types and shapes from the headers alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from abyssal.checkpoint.expected import Kind, Table, TensorSpec
from abyssal.checkpoint.files import CheckpointFiles, StoredTensor, listing
from abyssal.checkpoint.names import Slot, draft_kind, is_vision, parse, scale_names, value_names
from abyssal.config import ModelConfig
from abyssal.errors import CheckpointError

log = logging.getLogger(__name__)

FP4_BLOCK = (1, 32)
ROWS_BLOCK = (1, 32)  # rows, columns per scale of a table read by rows (V4.1 spec 5.4)
Format = Literal["plain", "fp8", "fp4"]
_FORMATS: dict[str, Format] = {"F8_E4M3": "fp8", "I8": "fp4", "U8": "fp4", "BF16": "plain", "F16": "plain", "F32": "plain"}
_FLOATS = ("BF16", "F16", "F32")
_TYPES: dict[Kind, tuple[str, ...]] = {
    "linear": tuple(_FORMATS),
    "projection": _FLOATS,
    "fp32": _FLOATS,
    "embedding": _FLOATS,
    "expert_ids": ("I32", "I64"),
    "rows": ("F8_E4M3",),
}
_BYTE_SCALES = ("F8_E8M0", "U8")
_SCALE_TYPES = (*_BYTE_SCALES, "F32")


@dataclass(frozen=True, slots=True)
class Source:
    """A stored tensor and its scale; `format` and `block` say how to read them."""

    value: StoredTensor
    scale: StoredTensor | None
    format: Format
    block: tuple[int, int] | None


Sources = dict[str, dict[Slot, Source]]


def match(files: CheckpointFiles, table: Table, config: ModelConfig) -> Sources:
    """For every entry of `table` the stored tensors that make it up, by slot.

    Raises:
        CheckpointError: a tensor is unknown, left over, missing, given twice, or of a wrong type or shape.
    """
    placed = _place(files, config)
    _refuse_foreign(placed, table, config)
    sources = {target: _gather(target, spec, placed, config) for target, spec in table.items()}
    for entries in sources.values():
        _check_uniform(entries)
    return sources


def _place(files: CheckpointFiles, config: ModelConfig) -> dict[Slot, StoredTensor]:
    placed: dict[Slot, StoredTensor] = {}
    unknown, drafts, vision = [], [], []
    for name, tensor in files.tensors.items():
        if draft_kind(name) is not None:
            drafts.append(name)
        elif config.family == "v41" and is_vision(name):
            vision.append(name)
        elif (slot := parse(name)) is None:
            unknown.append(name)
        elif slot in placed:
            raise CheckpointError(f"{placed[slot].name} and {name} are two spellings of one tensor; keep one of them")
        else:
            placed[slot] = tensor
    if unknown:
        raise CheckpointError(
            f"unknown tensors: {listing(unknown)}; this is not the checkpoint of its config.json, or one that was changed"
        )
    _check_draft(drafts, config)
    if vision:
        log.info("%d tensors of the image tower recognised; not used, this version reads text only", len(vision))
    return placed


def _check_draft(names: list[str], config: ModelConfig) -> None:
    """Draft tensors are not used yet, but a config that calls them something else is refused (their shapes would differ)."""
    if not names:
        return
    kinds = {kind: name for name in names if (kind := draft_kind(name)) != "either"}
    if len(kinds) != 1:
        found = " and ".join(kinds.values()) or "neither e_proj nor main_proj"
        raise CheckpointError(
            f"mtp.* must be an MTP block or DSpark stages, but it holds {found}; remove it or download it again"
        )
    kind, example = kinds.popitem()
    if config.draft not in ("none", kind):
        raise CheckpointError(
            f"config.json announces {config.draft} drafting, but {example} belongs to {kind}; use matching files"
        )
    log.info("%d mtp.* tensors of a %s drafter recognised; not used yet", len(names), kind)


def _refuse_foreign(placed: dict[Slot, StoredTensor], table: Table, config: ModelConfig) -> None:
    foreign = [tensor.name for slot, tensor in placed.items() if not _belongs(slot, table.get(slot.target))]
    if foreign:
        raise CheckpointError(
            f"tensors that config.json does not call for: {listing(foreign)} ({len(config.layers)} layers, "
            f"{config.num_experts} experts); use the config.json that belongs to these weights"
        )


def _belongs(slot: Slot, spec: TensorSpec | None) -> bool:
    return spec is not None and (slot.expert is None or slot.expert < spec.shape[0])


def _needed(target: str, spec: TensorSpec, placed: dict[Slot, StoredTensor]) -> Iterator[Slot]:
    """One slot for the whole, unless the target is stacked from single experts."""
    whole = Slot(target)
    if not spec.pieces or whole in placed:
        yield whole
    else:
        yield from (Slot(target, "value", expert, piece) for expert in range(spec.shape[0]) for piece in spec.pieces)


def _gather(target: str, spec: TensorSpec, placed: dict[Slot, StoredTensor], config: ModelConfig) -> dict[Slot, Source]:
    slots = list(_needed(target, spec, placed))
    if spec.pieces and slots[0].expert is None:
        single = [t.name for slot, t in placed.items() if slot.target == target and slot.expert is not None]
        if single:
            raise CheckpointError(f"{placed[slots[0]].name} and {listing(single)} hold the same experts; keep one form")
    if missing := [slot for slot in slots if slot not in placed]:
        more = f" and {len(missing) - 1} more of {target}" if len(missing) > 1 else ""
        raise CheckpointError(f"missing tensor; names tried: {', '.join(value_names(missing[0]))}{more}; download it again")
    return {slot: _source(slot, spec, placed, config) for slot in slots}


def _source(slot: Slot, spec: TensorSpec, placed: dict[Slot, StoredTensor], config: ModelConfig) -> Source:
    value, scale = placed[slot], placed.get(replace(slot, part="scale"))
    if value.dtype not in _TYPES[spec.kind]:
        raise CheckpointError(f"{value.name} is stored as {value.dtype}; expected {' or '.join(_TYPES[spec.kind])}")
    form: Format = _FORMATS[value.dtype] if spec.kind in ("linear", "rows") else "plain"
    shape = spec.shape
    if slot.expert is not None:
        shape = (shape[1] // len(spec.pieces), shape[2])
    block = ROWS_BLOCK if spec.kind == "rows" else _block(value, form, config)
    _check_shape(value, _stored_shape(value, form, shape))
    _check_scale(value, scale, shape, block, _SCALE_TYPES if spec.kind == "linear" else _BYTE_SCALES)
    return Source(value, scale, form, block)


def _block(value: StoredTensor, form: Format, config: ModelConfig) -> tuple[int, int] | None:
    """Rows and columns per scale."""
    if form == "plain":
        return None
    if config.quant is None:
        raise CheckpointError(f"{value.name} is stored as {value.dtype}, but config.json has no quantization_config; add it")
    return FP4_BLOCK if form == "fp4" else config.quant.weight_block


def _stored_shape(value: StoredTensor, form: Format, shape: tuple[int, ...]) -> tuple[int, ...]:
    if form != "fp4":
        return shape
    if shape[-1] % FP4_BLOCK[1]:
        raise CheckpointError(f"{value.name} is stored as FP4, but its {shape[-1]} columns are not a multiple of {FP4_BLOCK[1]}")
    return *shape[:-1], shape[-1] // 2


def _check_shape(tensor: StoredTensor, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise CheckpointError(
            f"{tensor.name} ({tensor.dtype}) has shape {list(tensor.shape)}, expected {list(expected)}; "
            "config.json and weights do not belong together"
        )


def _check_scale(
    value: StoredTensor, scale: StoredTensor | None, shape: tuple[int, ...], block: tuple[int, int] | None, types: tuple[str, ...]
) -> None:
    """`shape` is the dequantised shape of `value`, `types` those that a scale may have."""
    if block is None:
        if scale is not None:
            raise CheckpointError(f"unused scale {scale.name}: {value.name} is stored as {value.dtype}, which has no scale")
        return
    if scale is None:
        tried = ", ".join(scale_names(value.name))
        raise CheckpointError(
            f"{value.name} is stored as {value.dtype} but has no scale; names tried: {tried}; download it again"
        )
    if scale.dtype not in types:
        raise CheckpointError(f"scale {scale.name} is stored as {scale.dtype}; expected {' or '.join(types)}")
    _check_shape(scale, (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1])))


def _check_uniform(entries: dict[Slot, Source]) -> None:
    """Stacked experts share one buffer, so they share one format."""
    first = next(iter(entries.values()))
    for other in entries.values():
        if other.format != first.format:
            raise CheckpointError(
                f"{first.value.name} is stored as {first.value.dtype} and {other.value.name} as {other.value.dtype}; "
                "the experts of one layer must share a format"
            )
        if first.scale is not None and other.scale is not None and other.scale.dtype != first.scale.dtype:
            raise CheckpointError(
                f"{first.scale.name} is stored as {first.scale.dtype} and {other.scale.name} as {other.scale.dtype}; "
                "the scales of one layer's experts must share a type"
            )
