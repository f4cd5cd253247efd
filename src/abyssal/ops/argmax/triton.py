"""The largest logit in two launches: of parts of rows, then of rows; `max` of PyTorch takes a row by one program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from abyssal.ops._aot import AotCase
from abyssal.ops._records import early, next_power_of_2, wait_for_inputs

WIDTH = 4096  # columns of a part


@triton.jit
def argmax_parts_kernel(logits, stride, best, ids, V, WIDTH: tl.constexpr, EARLY: tl.constexpr):
    """Program (s, p): the largest of columns p WIDTH .. of row s to best fp32 [S, parts], its id to ids int32; a NaN counts as +inf."""
    wait_for_inputs(EARLY)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(logits + row * stride + column, mask=column < V, other=float("-inf"))
    x = tl.where(tl.abs(x) <= float("inf"), x, float("inf"))
    largest, first = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + row * tl.num_programs(1) + part, largest)
    tl.store(ids + row * tl.num_programs(1) + part, part * WIDTH + first)


@triton.jit(do_not_specialize=["parts"])
def argmax_rows_kernel(best, ids, out, parts, PARTS: tl.constexpr, EARLY: tl.constexpr):
    """Program s: of the parts of row s the first of the largest, and whether it is finite -> out int64 [2, S]."""
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    x = tl.load(best + row * parts + part, mask=part < parts, other=float("-inf"))
    largest, first = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out + row, tl.load(ids + row * parts + first).to(tl.int64))
    tl.store(out + tl.num_programs(0) + row, (tl.abs(largest) < float("inf")).to(tl.int64))


def argmax(logits: Tensor) -> Tensor:
    """As the reference; the id of a row that is not usable may be another one."""
    rows, columns = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, f"logits are {logits.dtype} with strides {logits.stride()}"
    out = torch.empty(2, rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    parts = -(-columns // WIDTH)
    best = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    argmax_parts_kernel[rows, parts](
        logits, logits.stride(0), best, ids, columns, WIDTH=WIDTH, num_warps=8, **early(rows * parts, logits)
    )
    argmax_rows_kernel[(rows,)](best, ids, out, parts, PARTS=next_power_of_2(parts), num_warps=1, **early(rows, logits))
    return out


def aot_cases() -> list[AotCase]:
    of_parts = {"logits": "*fp32", "stride": "i32", "best": "*fp32", "ids": "*i32", "V": "i32"}
    of_rows = {"best": "*fp32", "ids": "*i32", "out": "*i64", "parts": "i32"}
    return [
        AotCase(
            "argmax of parts",
            argmax_parts_kernel,
            of_parts,
            {"WIDTH": WIDTH, "EARLY": True},
            8,
            aligned=("logits", "stride", "V"),
        ),
        AotCase("argmax of rows", argmax_rows_kernel, of_rows, {"PARTS": 32, "EARLY": True}, 1),
    ]
