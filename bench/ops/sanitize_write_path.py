"""One small launch of every write-path kernel and layout, for compute-sanitizer.

`compute-sanitizer --tool memcheck python -m bench.ops.sanitize_write_path`, then `--tool racecheck`, from the root of the repository.
"""

from __future__ import annotations

from typing import Any

import torch

import abyssal.ops.compress.triton as compressor
import abyssal.ops.dequant_pages.triton as dequant
import abyssal.ops.index_query.triton as index_query
import abyssal.ops.output_quant.triton as output_quant
import abyssal.ops.qkv_insert.triton as qkv_insert
from abyssal.kv import layouts
from abyssal.kv.batch import StoreFacts
from bench.ops import write_path as wp
from bench.ops.bench_compress import step

ENTRIES, TOKENS = 4, 5
RECORDS = ("bf16", "v4", "v41", "v41_fp4", "index_bf16", "index_fp8", "index_mxfp4")


def window_kernels() -> None:
    for name in RECORDS:
        layout = layouts.get(name)
        data, slots = wp.pool(layout, TOKENS, ENTRIES)
        slots[1] = -1
        kv, norm = torch.randn(TOKENS, layout.dim, device=wp.DEVICE).bfloat16(), torch.ones(layout.dim, device=wp.DEVICE)
        qkv_insert.window_store(kv, None, data, layout, ENTRIES, slots)
        qkv_insert.window_store(
            kv, wp.table(TOKENS), data, layout, ENTRIES, slots, norm=norm, eps=1e-6, latent=torch.empty_like(kv)
        )
        if name in ("bf16", "v4", "v41"):
            for eps in (None, 1e-6):
                for per_program in (1, 4):
                    q = torch.randn(TOKENS, 8, 512, device=wp.DEVICE).bfloat16()
                    config = qkv_insert.QkvInsertConfig(per_program, 1)
                    qkv_insert.qkv_insert(q, kv, wp.table(TOKENS), data, layout, ENTRIES, slots, eps, config=config)
        for rows in (1, 4):
            for where, whole in ((slots.int(), False), (torch.tensor([1, 0], device=wp.DEVICE), True)):
                dequant.dequant_pages(
                    data, layout, ENTRIES, where, whole_pages=whole, config=dequant.DequantConfig(rows)
                )  # fmt: skip


def query_kernels() -> None:
    out = torch.randn(TOKENS, 8, 512, device=wp.DEVICE).bfloat16()
    for per_program in (1, 4):
        config = output_quant.OutputQuantConfig(per_program, 2)
        for tile in (32, 128):
            output_quant.output_quant_e4m3(out, wp.table(TOKENS), tile, 2, config=config)
        output_quant.output_quant(out, wp.table(TOKENS), None, torch.bfloat16, config=config)
    q, weights = torch.randn(TOKENS, 8, 128, device=wp.DEVICE).bfloat16(), torch.randn(TOKENS, 8, device=wp.DEVICE).bfloat16()
    for name in ("index_bf16", "index_fp8", "index_mxfp4"):
        for rotate in (True, False):
            for parts in (2, 4):
                config = index_query.IndexQueryConfig(8, 4, parts)
                index_query.index_query(
                    q, weights, wp.table(TOKENS), rotate_query=rotate, grid=layouts.get(name).grid, config=config
                )  # fmt: skip


def compress_kernels() -> None:
    cases = [(4, name) for name in RECORDS if name != "v41_fp4"] + [
        (2, "bf16"),
        (2, "v41"),
        (2, "v41_fp4"),
        (128, "v4"),
        (128, "v41"),
    ]
    for ratio, name in cases:
        layout = layouts.get(name)
        dim, slots = layout.dim, {4: 8, 2: 2, 128: 20}[ratio]
        width = (4 if ratio == 4 else 2) * dim
        state, record = layouts.state_rows(width), layouts.state_rows(3 * dim)
        data, entry_slots = wp.pool(layout, 2, ENTRIES)
        states, state_slots = wp.pool(state, TOKENS + 3, ENTRIES)
        records = wp.pool(record, 4, 1)[0]
        groups = 4 if ratio == 128 else 2
        sources = torch.randint(0, TOKENS + 4, (groups, slots), device=wp.DEVICE)
        sources[:, -1] = 3
        pages = torch.arange(1, 5, device=wp.DEVICE)
        facts = step(
            sources, state_slots[:3], entry_slots, wp.table(2), torch.tensor([1, -1, 2, -1], device=wp.DEVICE)[:groups], pages[:2],
            phases=torch.arange(TOKENS, device=wp.DEVICE) % ratio,
        )  # fmt: skip
        bias = torch.randn(ratio, width // 2, device=wp.DEVICE) if ratio > 2 else None
        variants: tuple[dict[str, Any], ...] = ({}, {"config": compressor.compress_config(dim, ratio == 2, 256, False)})
        if ratio == 128:
            variants = {}, {"sum_config": compressor.config_of_sums(16, False)}, {"batch_invariant": True}
        for variant in variants:
            compressor.compress(
                torch.randn(TOKENS, width, device=wp.DEVICE), bias, torch.ones(dim, device=wp.DEVICE), facts,
                StoreFacts(torch.arange(TOKENS, device=wp.DEVICE), state_slots[None, 3:]),
                compressor.Pages("state", states, state, ENTRIES),
                compressor.Pages("sums", records, record, 1) if ratio == 128 else None,
                compressor.Pages("entries", data, layout, ENTRIES), 0, overlap=ratio == 4, rotate_keys=dim == 128, eps=1e-6,
                dtype=torch.bfloat16, **variant,
            )  # fmt: skip


def token_each_kernels() -> None:
    for ratio, name in ((4, "v4"), (4, "index_fp8"), (2, "v41_fp4"), (128, "v4")):
        layout, slots = layouts.get(name), {4: 8, 2: 2, 128: 9}[ratio]
        dim = layout.dim
        width = (4 if ratio == 4 else 2) * dim
        state, record = layouts.state_rows(width), layouts.state_rows(3 * dim)
        data, entry_slots = wp.pool(layout, TOKENS, ENTRIES)
        states, state_slots = wp.pool(state, TOKENS * slots, ENTRIES)
        carried, each = state_slots[: TOKENS * (slots - 1)], torch.arange(TOKENS, device=wp.DEVICE)
        sources = torch.cat([torch.arange(len(carried), device=wp.DEVICE).view(TOKENS, -1), len(carried) + each.unsqueeze(1)], 1)
        entry_slots[1] = -1
        pages = each + 1
        facts = step(
            sources.repeat(2 if ratio == 128 else 1, 1), carried, entry_slots, wp.table(TOKENS), pages.repeat(2), pages, True,
            each % ratio,
        )  # fmt: skip
        bias = torch.randn(ratio, width // 2, device=wp.DEVICE) if ratio > 2 else None
        compressor.compress(
            torch.randn(TOKENS, width, device=wp.DEVICE), bias, torch.ones(dim, device=wp.DEVICE), facts,
            StoreFacts(each, state_slots[None, len(carried) :]), compressor.Pages("state", states, state, ENTRIES),
            compressor.Pages("sums", wp.pool(record, TOKENS, 1)[0], record, 1) if ratio == 128 else None,
            compressor.Pages("entries", data, layout, ENTRIES), 0, overlap=ratio == 4, rotate_keys=dim == 128, eps=1e-6,
            dtype=torch.bfloat16,
        )  # fmt: skip


def main() -> None:
    window_kernels()
    query_kernels()
    compress_kernels()
    token_each_kernels()
    torch.cuda.synchronize()
    print("every write-path kernel ran")


if __name__ == "__main__":
    main()
