"""Weights in memory: reading, checking values, stacking experts, and whether quantised weights are dequantised."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from abyssal.checkpoint.expected import Table, TensorSpec, expected_tensors
from abyssal.checkpoint.files import CheckpointFiles, StoredTensor
from abyssal.checkpoint.match import Source, Sources, match
from abyssal.checkpoint.names import Slot
from abyssal.checkpoint.progress import ProgressBar
from abyssal.checkpoint.rows import RowTable
from abyssal.config import ModelConfig
from abyssal.errors import CheckpointError
from abyssal.ops.linear import LinearWeight, dequantize
from abyssal.parallel.mesh import ONE_RANK, Mesh

log = logging.getLogger(__name__)

Part = tuple[slice | int, ...]
Weights = dict[str, Tensor | LinearWeight | RowTable]
LoadWeights = Callable[
    [Path, ModelConfig, torch.device, torch.dtype, bool, int, Mesh], Weights
]  # the arguments of `load_weights`
MAX_SCALE_EXPONENT = 20  # real scales are far below; bytes read as numbers are far above (J01)


def load_weights(
    folder: Path,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: bool,
    row_cache_bytes: int = 0,
    mesh: Mesh = ONE_RANK,
) -> Weights:
    """Load a checkpoint, strictly.

    Args:
        folder: holds `model.safetensors`, or `model.safetensors.index.json` and its shards.
        device: on a GPU quantised weights stay as stored; on the CPU they are dequantised if that takes at most half of the
            physical memory.
        dtype: of plain and dequantised linears and of the embedding. Everything that V4 spec 3.4 uses in fp32 is fp32.
        progress: draw a bar on stderr if that is a terminal.
        row_cache_bytes: memory for rows of tables, all tables together; one that does not fit into its part stays in its file.
        mesh: of several ranks each reads the part that it computes; shapes below are those of one.

    Returns:
        Released name without a prefix -> weight. Linears are `LinearWeight`s and drop `.weight`; the experts of a layer are
        stacked as `layers.N.ffn.experts.w13` [E, 2I, D] (w1 rows, then w3 rows) and `.w2` [E, D, I]. N-gram tables are
        `RowTable`s.

    Raises:
        CheckpointError: anything is missing, left over, damaged, or not as `config` says. Names and shapes are checked before
            the first weight is read.
    """
    table = expected_tensors(config)
    files = CheckpointFiles(folder)
    sources = match(files, table, config)
    summary = files.summary()
    types = ", ".join(f"{count} {name}" for name, count in summary.dtypes.items())
    log.info("checkpoint %s: %d tensors, %s (%s)", folder, summary.tensors, size(summary.nbytes), types)
    tables = {target: sources.pop(target) for target, spec in table.items() if spec.kind == "rows"}
    weights: Weights = {}
    for target, entries in tables.items():
        weights[target] = row_table = _row_table(entries, row_cache_bytes // len(tables))
        how = "from disk, row by row" if row_table.held is None else "from memory"
        log.info("%s, %s: read %s", target, size(sum(map(_nbytes, entries.values()))), how)
    loader = _Loader(files, config, mesh, device, dtype, dequantise=_choose_dequantised(table, sources, mesh, device, dtype))
    total = sum(_nbytes(source) for entries in sources.values() for source in entries.values())
    with ProgressBar("loading weights", total, enabled=progress) as bar:
        for target, entries in sources.items():
            weights[target] = loader.load(table[target], entries)
            bar.advance(sum(_nbytes(source) for source in entries.values()))
    return weights


def _row_table(sources: dict[Slot, Source], cache_bytes: int) -> RowTable:
    (source,) = sources.values()
    assert source.scale is not None
    return RowTable(source.value, source.scale, cache_bytes)


def size(nbytes: int) -> str:
    """A byte count for people."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _nbytes(source: Source) -> int:
    return source.value.nbytes + (source.scale.nbytes if source.scale else 0)


def _choose_dequantised(table: Table, sources: Sources, mesh: Mesh, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether quantised weights become plain ones in `dtype`, on all ranks; logs the decision."""
    quantised = any(source.format != "plain" for entries in sources.values() for source in entries.values())
    if not quantised:
        return False
    if device.type != "cpu":
        log.info("quantised weights stay as stored on %s", device)
        return False
    needed = sum(math.prod(local_shape(table[target], mesh)) * _itemsize(table[target], dtype) for target in sources)
    needed *= mesh.size
    half = physical_memory() // 2
    name = str(dtype).removeprefix("torch.")
    if needed <= half:
        log.info("weights dequantised to %s: %s of memory (limit %s, half of it)", name, size(needed), size(half))
    else:
        log.info("weights stay as stored: in %s they need %s, more than %s, half of memory", name, size(needed), size(half))
    return needed <= half


def _itemsize(spec: TensorSpec, dtype: torch.dtype) -> int:
    return 4 if spec.kind in ("fp32", "expert_ids") else dtype.itemsize


def physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Loader:
    """Reads one entry of the table at a time; never holds more than one stored tensor beside the results."""

    def __init__(
        self,
        files: CheckpointFiles,
        config: ModelConfig,
        mesh: Mesh,
        device: torch.device,
        dtype: torch.dtype,
        dequantise: bool,
    ) -> None:
        self.files = files
        self.config = config
        self.mesh = mesh
        self.device = device
        self.dtype = dtype
        self.dequantise = dequantise

    def load(self, spec: TensorSpec, sources: dict[Slot, Source]) -> Tensor | LinearWeight:
        if spec.kind in ("linear", "projection"):
            return self._linear(spec, sources)
        (source,) = sources.values()
        if spec.kind == "expert_ids":
            return self._expert_ids(source.value)
        dtype = torch.float32 if spec.kind == "fp32" else self.dtype
        cut = _cut(spec, self.mesh)
        # copied, as what the reader returns may be the mapped file itself
        return self.files.read(source.value, () if cut is None else (slice(cut.start, cut.stop),)).to(
            self.device, dtype, copy=True
        )

    def _expert_ids(self, tensor: StoredTensor) -> Tensor:
        ids = self.files.read(tensor)
        low, high, experts = int(ids.min()), int(ids.max()), self.config.num_experts
        if low < 0 or high >= experts:
            raise CheckpointError(f"{tensor.name} holds expert ids {low} to {high}; the model has experts 0 to {experts - 1}")
        return ids.to(self.device, torch.int32, copy=True)

    def _linear(self, spec: TensorSpec, sources: dict[Slot, Source]) -> LinearWeight:
        source = next(iter(sources.values()))
        tile = None if source.format == "plain" else spec.input_tile
        if source.format == "plain" or self.dequantise:
            return self._plain(spec, sources, tile)
        return self._stored(spec, sources, tile)

    def _plain(self, spec: TensorSpec, sources: dict[Slot, Source], tile: int | None) -> LinearWeight:
        data = torch.empty(local_shape(spec, self.mesh), dtype=self.dtype, device=self.device)
        stack = data if spec.pieces else data.unsqueeze(0)
        for expert, row, piece in self._pieces(spec, sources):
            stack[expert, row : row + piece.shape[0]] = dequantize(piece, self.dtype).to(self.device)
        return LinearWeight(data, None, "plain", None, tile)

    def _stored(self, spec: TensorSpec, sources: dict[Slot, Source], tile: int | None) -> LinearWeight:
        if not spec.pieces:
            ((_, _, whole),) = self._pieces(spec, sources)
            assert whole.scale is not None
            data, scale = (part.to(self.device, copy=True) for part in (whole.data, whole.scale))
            return LinearWeight(data, scale, whole.format, whole.block, tile)
        first = next(iter(sources.values()))
        rows, block = _joint_block(spec, first)
        fp4 = first.format == "fp4"
        experts, _, columns = local_shape(spec, self.mesh)
        values = torch.uint8 if fp4 else torch.float8_e4m3fn
        data = torch.empty(experts, rows, columns // 2 if fp4 else columns, dtype=values, device=self.device)
        assert first.scale is not None
        scales = torch.float32 if first.scale.dtype == "F32" else torch.uint8
        scale = torch.empty(experts, -(-rows // block[0]), -(-columns // block[1]), dtype=scales, device=self.device)
        for expert, row, piece in self._pieces(spec, sources):
            assert piece.scale is not None and piece.block is not None
            height = piece.shape[0]
            data[expert, row : row + height] = piece.data.to(self.device)
            part = scale[expert, row // block[0] : -(-(row + height) // block[0])]
            part.copy_(piece.scale.repeat_interleave(piece.block[0] // block[0], 0)[: len(part)])
        return LinearWeight(data, scale, first.format, block, tile)

    def _pieces(self, spec: TensorSpec, sources: dict[Slot, Source]) -> Iterator[tuple[int, int, LinearWeight]]:
        """Expert among those of this rank (0 if there are none), first row in the target, and matrix [N, K] on the CPU, one by one."""
        if not spec.pieces:
            (source,) = sources.values()
            yield 0, 0, self._read_cut(spec, source)
            return
        held = self.mesh.part("experts", spec.shape[0])
        for slot, source in sources.items():
            if slot.expert is None:
                yield from ((expert - held.start, 0, self._read(source, (expert,))) for expert in held)
            elif slot.expert in held:
                row = spec.pieces.index(slot.piece) * source.value.shape[0]
                yield slot.expert - held.start, row, self._read(source)

    def _read_cut(self, spec: TensorSpec, source: Source) -> LinearWeight:
        """This rank's rows or columns of a matrix."""
        cut = _cut(spec, self.mesh)
        if cut is None:
            return self._read(source)
        axis, start, stop = _axis(spec), cut.start, cut.stop
        values = 2 if source.format == "fp4" and axis == 1 else 1  # per stored column
        part = _along(axis, start // values, stop // values)
        if source.block is None:
            return self._read(source, part)
        size = source.block[axis]
        first, last = start // size, -(-stop // size)
        matrix = self._read(source, part, _along(axis, first, last))
        if start % size == 0 or last == first + 1:
            return matrix
        # The part begins inside a block: smaller blocks begin with it, and scales are repeated.
        fine = math.gcd(start, size)
        assert matrix.scale is not None
        index = torch.arange(start, stop, fine) // size - first
        block = (fine, source.block[1]) if axis == 0 else (source.block[0], fine)
        return replace(matrix, scale=matrix.scale.index_select(axis, index), block=block)

    def _read(self, source: Source, part: Part = (), scale_part: Part | None = None) -> LinearWeight:
        """A stored matrix, or `part` of it; `scale_part` of its scale if that is another."""
        data = self.files.read(source.value, part)
        if source.format == "plain":
            return LinearWeight(data, None, "plain", None, None)
        assert source.scale is not None
        scale = self.files.read(source.scale, part if scale_part is None else scale_part)
        if source.scale.dtype != "F32":
            scale = scale.view(torch.uint8)  # bytes: a cast would turn 2^-7 into 120
        _check_scale_values(scale, source.scale.name)
        return LinearWeight(data.view(torch.uint8) if source.format == "fp4" else data, scale, source.format, source.block, None)


def local_shape(spec: TensorSpec, mesh: Mesh) -> tuple[int, ...]:
    """Shape of one rank's part."""
    cut, axis = _cut(spec, mesh), _axis(spec)
    return spec.shape if cut is None else (*spec.shape[:axis], len(cut), *spec.shape[axis + 1 :])


def _cut(spec: TensorSpec, mesh: Mesh) -> range | None:
    """What this rank holds of the dimension that is shared out; None: everything."""
    if spec.split is None:
        return None
    length = spec.shape[_axis(spec)]
    part = mesh.part(spec.split, length)
    return None if len(part) == length else part


def _axis(spec: TensorSpec) -> int:
    return int(spec.split == "columns")


def _along(axis: int, start: int, stop: int) -> Part:
    return (slice(None),) * axis + (slice(start, stop),)


def _joint_block(spec: TensorSpec, source: Source) -> tuple[int, tuple[int, int]]:
    """Rows of one expert's stacked matrix and the block that its scales get.

    w1 and w3 stacked keep their own scale rows only if a block does not straddle the seam; where the released block would, a
    smaller one that divides both is used and scales are repeated.
    """
    assert source.block is not None
    rows, (height, width) = spec.shape[-2], source.block
    stored = source.value.shape[-2]
    return rows, (height if stored == rows else math.gcd(stored, height), width)


def _check_scale_values(scale: Tensor, name: str) -> None:
    """Scales must be finite, not negative and at most 2^20."""
    if scale.dtype == torch.uint8:
        bad = scale > MAX_SCALE_EXPONENT + 127  # 255, NaN, included
        values = [f"2^{int(b) - 127}" if b < 255 else "NaN" for b in scale[bad][:1]]
    else:
        bad = ~((scale >= 0) & (scale <= 2.0**MAX_SCALE_EXPONENT))
        values = [f"{float(v):g}" for v in scale[bad][:1]]
    if values:
        raise CheckpointError(
            f"scale {name} holds {values[0]}; expected finite values from 0 to 2^{MAX_SCALE_EXPONENT}. "
            "The file was converted wrongly or is damaged: download it again"
        )
