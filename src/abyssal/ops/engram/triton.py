"""Rows of a table that lies in host memory, read by the GPU itself: no step waits for the host (V4.1 spec 3.8)."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from abyssal.errors import ConfigError
from abyssal.ops._aot import AotCase
from abyssal.ops._records import e4m3_values, e8m0_values, store_like
from abyssal.ops.engram import SCALED

GROUP = tl.constexpr(SCALED)
FEW_ROWS = 132 * 8  # up to here a program reads one row, or some processors would have none
ROWS_PER_PROGRAM = 8  # beyond: more loads on their way per warp


@dataclass(frozen=True, slots=True)
class SharedTable:
    """A table in host memory that kernels may read."""

    codes: Tensor  # e4m3 as uint8 [R, C]
    scales: Tensor  # e8m0, uint8 [R, C / 32]


def share_table(codes: np.ndarray, scales: np.ndarray, device: torch.device) -> SharedTable:
    """The table, its memory locked and mapped by the driver until the arrays are gone.

    Raises:
        ConfigError: the driver refuses, or rows are of a size that the kernel does not take.
    """
    columns = codes.shape[1]
    if columns & (columns - 1) or columns < SCALED:
        raise ConfigError(f"engram_head_dim={columns}: the kernels take powers of two from {SCALED} on; use backend=reference")
    if device.type == "cuda":
        for part in (codes, scales):
            _lock(part)
    return SharedTable(torch.from_numpy(codes), torch.from_numpy(scales))


def _lock(memory: np.ndarray) -> None:
    cudart, address = torch.cuda.cudart(), memory.ctypes.data
    try:
        torch.cuda.check_error(int(cudart.cudaHostRegister(address, memory.nbytes, 0)))
    except RuntimeError as error:
        raise ConfigError(
            f"{memory.nbytes / 2**30:.1f} GiB of n-gram tables in host memory cannot be shared with the GPU: {error}; lower "
            "engram_cache_bytes to leave them on disk"
        ) from error
    weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False  # the process takes it along


@triton.jit(do_not_specialize=["count"])
def table_rows_kernel(codes, scales, rows, out, count, C: tl.constexpr, ROWS: tl.constexpr):
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = (place < count)[:, None]
    row = tl.load(rows + place, mask=place < count, other=0)[:, None]
    column = tl.arange(0, C)[None, :]
    values = e4m3_values(tl.load(codes + row * C + column, mask=kept, other=0))
    scale = e8m0_values(tl.load(scales + row * (C // GROUP) + tl.arange(0, C // GROUP)[None, :], mask=kept, other=0))
    tiles = tl.reshape(values, (ROWS, C // GROUP, GROUP)) * scale[:, :, None]
    store_like(out + place.to(tl.int64)[:, None] * C + column, tl.reshape(tiles, (ROWS, C)), kept)


def table_rows(table: SharedTable, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """`row_values` of rows int64 [T, n] of a table -> [T, n C], on the device of `rows`."""
    columns, count = table.codes.shape[1], rows.numel()
    assert rows.dtype == torch.int64 and rows.is_contiguous(), f"rows are {rows.dtype} with strides {rows.stride()}"
    out = torch.empty(len(rows), rows.shape[1] * columns, dtype=dtype, device=rows.device)
    if count == 0:
        return out
    per_program = 1 if count <= FEW_ROWS else ROWS_PER_PROGRAM
    table_rows_kernel[(triton.cdiv(count, per_program),)](
        table.codes, table.scales, rows, out, count, C=columns, ROWS=per_program, num_warps=1
    )
    return out


def aot_cases() -> list[AotCase]:
    signature = {"codes": "*u8", "scales": "*u8", "rows": "*i64", "out": "*bf16", "count": "i32"}
    return [
        AotCase(f"engram table rows x{rows}", table_rows_kernel, signature, {"C": 256, "ROWS": rows}, num_warps=1,
                aligned=("codes", "scales", "rows", "out"))
        for rows in (1, ROWS_PER_PROGRAM)
    ]  # fmt: skip
