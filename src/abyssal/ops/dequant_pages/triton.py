"""Records to a workspace of plain values: a program decodes a few entries and writes them (V4 spec 3.7, V4.1 spec 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from abyssal.kv import layouts
from abyssal.kv.layouts import Layout
from abyssal.ops._aot import AotCase
from abyssal.ops._records import early, load_records, store_like, wait_for_inputs


@dataclass(frozen=True, slots=True)
class DequantConfig:
    """One warp per program; a record is decoded in the lanes that hold it."""

    entries_per_program: int


def dequant_config(entries: int, dim: int) -> DequantConfig:
    """Values per lane: 16 while programs are few, then 64, for more loads in flight."""
    lanes = 32 * (16 if entries * dim <= 132 * 8 * 512 else 64)
    return DequantConfig(max(1, lanes // dim))


@triton.jit
def dequant_pages_kernel(
    pages, page_bytes, where, out, count, ENTRIES: tl.constexpr, WHOLE_PAGES: tl.constexpr, layout: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wait_for_inputs(EARLY)
    inside = row < count
    if WHOLE_PAGES:
        page = tl.load(where + row // ENTRIES, mask=inside, other=0).to(tl.int32)
        slots = tl.where(inside, page * ENTRIES + row % ENTRIES, -1)
    else:
        slots = tl.load(where + row, mask=inside, other=-1).to(tl.int32)
    x = load_records(pages, page_bytes, slots, layout, ENTRIES, ROWS)
    D: tl.constexpr = layout.dim
    store_like(out + row.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :], x, inside[:, None])


def dequant_pages(
    pages: Tensor,
    layout: Layout,
    entries_per_page: int,
    where: Tensor,
    *,
    whole_pages: bool,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    config: DequantConfig | None = None,
) -> Tensor:
    """As the reference; `out` is the workspace to fill, contiguous, bf16 or fp32."""
    shape = (len(where), entries_per_page, layout.dim) if whole_pages else (len(where), layout.dim)
    assert layout.dim & (layout.dim - 1) == 0, f"records of {layout.dim} values, no power of two; use backend=reference"
    assert pages.dtype == torch.uint8 and pages.stride(1) == 1, f"pages are {pages.dtype} with strides {pages.stride()}"
    assert out is None or (out.shape == shape and out.is_contiguous()), f"out is {tuple(out.shape)}, not {shape}"
    out = torch.empty(shape, dtype=dtype, device=pages.device) if out is None else out
    count = len(where) * (entries_per_page if whole_pages else 1)
    if count == 0:
        return out
    config = config or dequant_config(count, layout.dim)
    programs = -(-count // config.entries_per_program)
    dequant_pages_kernel[(programs,)](
        pages, pages.stride(0), where, out, count, ENTRIES=entries_per_page, WHOLE_PAGES=whole_pages, layout=layout,
        ROWS=config.entries_per_program, num_warps=1, **early(programs, pages),
    )  # fmt: skip
    return out


def aot_cases() -> list[AotCase]:
    cases = []
    for name in ("bf16", "v4", "v41", "v41_fp4", "index_bf16", "index_fp8", "index_mxfp4"):
        layout = layouts.get(name)
        for whole in (True, False):
            for values in (16, 64):
                rows = max(1, 32 * values // layout.dim)
                cases.append(
                    AotCase(
                        f"dequant_pages {name} whole={whole} x{rows}", dequant_pages_kernel,
                        {"pages": "*u8", "page_bytes": "i32", "where": "*i32", "out": "*bf16", "count": "i32"},
                        {"ENTRIES": 64, "WHOLE_PAGES": whole, "layout": layout, "ROWS": rows, "EARLY": True}, num_warps=1,
                        aligned=("pages", "page_bytes", "where", "out"),
                    )
                )  # fmt: skip
    return cases
