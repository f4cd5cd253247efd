"""Rows of a table that lies in host memory, read by the GPU itself, so that no step waits for the host; and their gate (V4.1 spec 3.8)."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from abyssal.errors import ConfigError
from abyssal.ops._aot import AotCase
from abyssal.ops._records import e4m3_values, e8m0_values, store_like, to_fp32
from abyssal.ops.engram import GATE_FLOOR, SCALED

GROUP, FLOOR = tl.constexpr(SCALED), tl.constexpr(GATE_FLOOR)
READ_ONLY = 8  # cudaHostRegisterReadOnly, without which the driver refuses a file's pages
BLOCK = 1024  # values of a stream at a time
FEW_ROWS = 132 * 8  # up to here a program reads one row, or some processors would have none
ROWS_PER_PROGRAM = 8  # beyond: more loads on their way per warp


@dataclass(frozen=True, slots=True)
class SharedTable:
    """A table in host memory that kernels may read."""

    codes: Tensor  # e4m3 as uint8 [R, C]
    scales: Tensor  # e8m0, uint8 [R, C / 32]


def share_table(codes: np.ndarray, scales: np.ndarray, device: torch.device) -> SharedTable:
    """The table, its memory locked and mapped by the driver until the arrays are gone. They are only read.

    Raises:
        ConfigError: the driver refuses, or rows are of a size that the kernel does not take.
    """
    columns = codes.shape[1]
    if columns & (columns - 1) or columns < SCALED:
        raise ConfigError(f"engram_head_dim={columns}: the kernels take powers of two from {SCALED} on; use backend=reference")
    if device.type == "cuda":
        for part in (codes, scales):
            _lock(part)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes
        return SharedTable(torch.from_numpy(codes), torch.from_numpy(scales))


def _lock(memory: np.ndarray) -> None:
    cudart, address = torch.cuda.cudart(), memory.ctypes.data
    try:
        torch.cuda.check_error(int(cudart.cudaHostRegister(address, memory.nbytes, READ_ONLY)))
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
    table_rows_kernel[(-(-count // per_program),)](
        table.codes, table.scales, rows, out, count, C=columns, ROWS=per_program, num_warps=1
    )
    return out


@triton.jit
def engram_kernel(
    streams, key, value, weight, out, key_stride, value_stride, eps, S: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """One stream of one token: its three sums, then its values again."""
    token, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h_row, k_row, v_row = (token * S + stream) * D, token * key_stride + stream * D, token * value_stride
    column = tl.arange(0, BLOCK)
    hh, kk, hk = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, D, BLOCK):
        h, k = to_fp32(tl.load(streams + h_row + first + column)), to_fp32(tl.load(key + k_row + first + column))
        hh += h * h
        kk += k * k
        hk += h * tl.load(weight + stream * D + first + column) * k
    scale = tl.rsqrt(tl.sum(hh) / D + eps) * tl.rsqrt(tl.sum(kk) / D + eps) * D**-0.5
    dot = tl.sum(hk) * scale
    root = tl.sqrt(tl.maximum(tl.abs(dot), FLOOR))
    gate = tl.sigmoid(tl.where(dot < 0, -root, root))
    for first in range(0, D, BLOCK):
        h, v = to_fp32(tl.load(streams + h_row + first + column)), to_fp32(tl.load(value + v_row + first + column))
        store_like(out + h_row + first + column, h + gate * v)


def engram(streams: Tensor, key: Tensor, value: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the reference; a token's bits do not depend on the others."""
    tokens, num_streams, dim = streams.shape
    assert streams.is_contiguous() and weight.is_contiguous(), f"streams {streams.stride()}, weight {weight.stride()}"
    assert key.stride()[1:] == (dim, 1) and value.stride(1) == 1, f"key {key.stride()}, value {value.stride()}"
    out = torch.empty_like(streams)
    if tokens == 0:
        return out
    engram_kernel[(tokens, num_streams)](
        streams, key, value, weight, out, key.stride(0), value.stride(0), eps, S=num_streams, D=dim, BLOCK=min(BLOCK, dim & -dim)
    )
    return out


def aot_cases() -> list[AotCase]:
    signature = {"codes": "*u8", "scales": "*u8", "rows": "*i64", "out": "*bf16", "count": "i32"}
    rows = [
        AotCase(f"engram table rows x{rows}", table_rows_kernel, signature, {"C": 256, "ROWS": rows}, num_warps=1,
                aligned=("codes", "scales", "rows", "out"))
        for rows in (1, ROWS_PER_PROGRAM)
    ]  # fmt: skip
    arrays = dict.fromkeys(("streams", "key", "value", "out"), "*bf16") | {"weight": "*fp32"}
    strides = {"key_stride": "i32", "value_stride": "i32"}
    gate = AotCase(
        "engram gate", engram_kernel, arrays | strides | {"eps": "fp32"}, {"S": 4, "D": 5120, "BLOCK": BLOCK},
        aligned=(*arrays, *strides),
    )  # fmt: skip
    return [*rows, gate]
