"""The files of a checkpoint: which there are, what their headers say, and reading single tensors.

Only safetensors files are read. Everything here is checked before any weight is touched.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from abyssal.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as its file's header describes it."""

    name: str  # as spelled in the file
    file: Path
    dtype: str  # safetensors' name, such as F8_E4M3
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What a folder holds, from headers alone."""

    files: int
    tensors: int
    nbytes: int
    dtypes: dict[str, int]  # safetensors' type name -> number of tensors


class CheckpointFiles:
    """Open safetensors files of one checkpoint; `tensors` maps the names in the files to their headers."""

    def __init__(self, folder: Path) -> None:
        """Open and check every file of `folder`.

        Raises:
            CheckpointError: the folder, the index, a shard or a header is missing, empty, damaged or contradictory.
        """
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self._open: dict[Path, Any] = {}
        index = _find(folder)
        shards = [folder / SINGLE] if index is None else sorted({folder / shard for shard in index.values()})
        for shard in shards:
            self._add(shard, index)
        if index is not None and (absent := sorted(index.keys() - self.tensors.keys())):
            raise CheckpointError(f"{INDEX} lists {listing(absent)}, absent from the shard that it names; download it again")
        if not self.tensors:
            raise CheckpointError(f"{folder} holds no tensors; download the checkpoint again")

    def _add(self, shard: Path, index: dict[str, str] | None) -> None:
        handle = _open_shard(shard)
        names = list(handle.keys())
        if index is not None and (stray := sorted(n for n in names if index.get(n) != shard.name)):
            raise CheckpointError(f"{shard} holds {listing(stray)}, which {INDEX} does not place there; download both again")
        for name in names:
            header = handle.get_slice(name)
            self.tensors[name] = _stored(name, shard, header.get_dtype(), tuple(header.get_shape()))
        self._open[shard] = handle

    def read(self, tensor: StoredTensor, part: tuple[slice | int, ...] = ()) -> Tensor:
        """`tensor[part]` in its stored type, on the CPU; what lies outside is not read.

        The whole tensor may share the mapped file's memory: copy it before keeping it.
        """
        file = self._open[tensor.file]
        return file.get_slice(tensor.name)[part] if part else file.get_tensor(tensor.name)

    def summary(self) -> Summary:
        dtypes: dict[str, int] = {}
        for tensor in self.tensors.values():
            dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + 1
        nbytes = sum(t.nbytes for t in self.tensors.values())
        return Summary(len(self._open), len(self.tensors), nbytes, dict(sorted(dtypes.items())))


def preflight(folder: Path) -> Summary:
    """Check the files of `folder` without reading weights.

    Raises:
        CheckpointError: as `CheckpointFiles`.
    """
    return CheckpointFiles(folder).summary()


def listing(names: list[str], limit: int = 5) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _find(folder: Path) -> dict[str, str] | None:
    """The index of a sharded checkpoint, tensor name -> shard's file name; None for a single file."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder that holds config.json and {SINGLE}")
    entries = sorted(folder.iterdir())
    if folders := [p.name for p in entries if p.suffix == ".safetensors" and p.is_dir()]:
        raise CheckpointError(f"{folder / folders[0]} is a folder, not a safetensors file; remove it or download it again")
    has_single, has_index = (folder / SINGLE).exists(), (folder / INDEX).exists()
    if has_single and has_index:
        raise CheckpointError(f"{folder} holds both {SINGLE} and {INDEX}; keep the one that is meant")
    if not has_single and not has_index:
        found = [p.name for p in entries if p.suffix in (".safetensors", ".bin", ".pt", ".pth")]
        beside = f" (found {listing(found)}; only safetensors files with these names are read)" if found else ""
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}{beside}")
    return _read_index(folder / INDEX) if has_index else None


def _read_index(path: Path) -> dict[str, str]:
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}); download it again") from error
    index = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(index, dict) or not index:
        raise CheckpointError(f"{path} has no weight_map of tensor names to files; download it again")
    for name, shard in index.items():
        # a plain file name: an index must not reach outside its folder
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{path} places {name!r} in {shard!r}, which is not the name of a safetensors file")
    return index


def _open_shard(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"missing shard {path}; download it")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty (0 bytes); download it again")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        with path.open("rb") as file:
            pointer = file.read(23) == b"version https://git-lfs"
        what = "is a Git LFS pointer, not the weights" if pointer else f"is damaged or truncated ({error})"
        raise CheckpointError(f"{path} {what}; download it again") from error


def _stored(name: str, file: Path, dtype: str, shape: tuple[int, ...]) -> StoredTensor:
    if dtype not in _BYTES:
        raise CheckpointError(f"tensor {name} in {file} is stored as {dtype}; known types: {', '.join(_BYTES)}")
    nbytes = _BYTES[dtype]
    for size in shape:
        nbytes *= size
    return StoredTensor(name, file, dtype, shape, nbytes)
