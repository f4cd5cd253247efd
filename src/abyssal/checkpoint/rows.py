"""A table of which rows are read: from its file when they are needed, the last ones being kept, or from memory if all of it fits there."""

from __future__ import annotations

import json
import mmap
import os
import weakref
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from abyssal.checkpoint.files import StoredTensor
from abyssal.errors import CheckpointError


class RowTable:
    """A stored matrix [R, C] of e4m3 codes with one e8m0 scale per row and 32 columns, read row by row.

    Rows come by `pread`: read through a memory map they would count as memory of this process for as long as they lie in the
    page cache. What was read is kept in a direct-mapped cache, in which row r has the one place r mod (number of places). A table
    that fits into the cache is mapped as a whole.

    Args:
        values, scales: the two stored tensors.
        cache_bytes: the cache takes at most this much.

    Raises:
        CheckpointError: the file ends early.
    """

    def __init__(self, values: StoredTensor, scales: StoredTensor, cache_bytes: int) -> None:
        self.num_rows, self.columns = values.shape
        self._parts = [_Part(tensor, tensor.nbytes // self.num_rows) for tensor in (values, scales)]
        # codes uint8 [R, C] and scales uint8 [R, ceil(C / 32)] of the whole table; None: rows are read one by one
        self.held: tuple[np.ndarray, np.ndarray] | None = None
        if values.nbytes + scales.nbytes <= cache_bytes:
            codes, of_tiles = (part.mapped(self.num_rows) for part in self._parts)
            self.held, cache_bytes = (codes, of_tiles), 0
        width = sum(part.row_bytes for part in self._parts)
        places = min(self.num_rows, cache_bytes // (width + np.dtype(np.int64).itemsize))
        self._cached_row = np.full(places, -1, np.int64)
        self._cached = np.empty((places, width), np.uint8)

    def gather(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows int64 [...] on the CPU -> codes float8_e4m3fn [n, C], scales uint8 [n, ceil(C / 32)], n = rows.numel().

        Raises:
            CheckpointError: the file ends early.
        """
        asked = rows.numpy().ravel()
        if asked.size and not 0 <= asked.min() <= asked.max() < self.num_rows:
            raise IndexError(f"rows {asked.min()} to {asked.max()} asked of a table of {self.num_rows}")
        if self.held is not None:
            codes, scales = (part[asked] for part in self.held)
        else:
            unique, inverse = np.unique(asked, return_inverse=True)
            codes, scales = np.split(self._lookup(unique)[inverse], [self._parts[0].row_bytes], axis=1)
        return torch.from_numpy(np.ascontiguousarray(codes)).view(torch.float8_e4m3fn), torch.from_numpy(
            np.ascontiguousarray(scales)
        )

    def _lookup(self, rows: np.ndarray) -> np.ndarray:
        """Rising row numbers [n] -> their bytes uint8 [n, width]."""
        out = np.empty((len(rows), self._cached.shape[1]), np.uint8)
        places = len(self._cached_row)
        place = rows % places if places else rows
        found = self._cached_row[place] == rows if places else np.zeros(len(rows), bool)
        out[found] = self._cached[place[found]]
        missing = np.flatnonzero(~found)
        self._read(rows, missing, out)
        if places:
            # Of rows with the same place one is kept.
            kept_place, first = np.unique(place[missing], return_index=True)
            kept = missing[first]
            self._cached_row[kept_place], self._cached[kept_place] = rows[kept], out[kept]
        return out

    def _read(self, rows: np.ndarray, missing: np.ndarray, out: np.ndarray) -> None:
        begin = 0
        for part in self._parts:
            wanted = rows[missing].tolist()
            for row in wanted:  # all reads are under way at the disk before the first is waited for
                part.announce(row)
            for row, index in zip(wanted, missing.tolist(), strict=True):
                part.read(row, memoryview(out[index])[begin : begin + part.row_bytes])
            begin += part.row_bytes


class _Part:
    """One stored tensor, its first dimension counted as rows."""

    def __init__(self, tensor: StoredTensor, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self._tensor = tensor
        self._begin = _data_offset(tensor.file, tensor.name)
        self._fd = os.open(tensor.file, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)  # neighbours of a hashed row are of no use

    def announce(self, row: int) -> None:
        os.posix_fadvise(self._fd, self._begin + row * self.row_bytes, self.row_bytes, os.POSIX_FADV_WILLNEED)

    def mapped(self, rows: int) -> np.ndarray:
        """uint8 [rows, row_bytes], the file's own pages, which all processes that map them share."""
        skipped = self._begin % mmap.ALLOCATIONGRANULARITY
        try:
            memory = mmap.mmap(
                self._fd, skipped + rows * self.row_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=self._begin - skipped
            )
        except ValueError as error:
            raise self._short() from error
        return np.frombuffer(memory, np.uint8, rows * self.row_bytes, skipped).reshape(rows, self.row_bytes)

    def read(self, row: int, into: memoryview) -> None:
        if os.preadv(self._fd, [into], self._begin + row * self.row_bytes) != self.row_bytes:
            raise self._short()

    def _short(self) -> CheckpointError:
        return CheckpointError(f"{self._tensor.file} ends inside {self._tensor.name}; download it again")


def _data_offset(file: Path, name: str) -> int:
    """Byte in a safetensors file at which the data of tensor `name` begins: 8 bytes of header length, the header, the data."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    return 8 + length + int(header[name]["data_offsets"][0])
