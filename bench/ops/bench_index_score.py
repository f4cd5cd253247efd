"""Index scores of one decode step, and of candidate blocks: microseconds, share of the roof, worst error.

`python bench/ops/bench_index_score.py [--json FILE]`. Where sgl-deep-gemm is installed, its paged kernel runs beside on the same bytes.
Warm: one set of keys again and again; cold: sets that together exceed the L2. The roof of candidates is the larger of that of their bytes
and that of a bf16 product.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from index_inputs import PAGE, Paged, random_paged
from timing import BF16_FLOPS, COPY_BANDWIDTH, median_us
from triton.errors import TritonError

from abyssal.kv import codec, layouts
from abyssal.ops.index_score import gluon, gluon_blocks, triton
from abyssal.ops.index_score._paged import GROUP

FAILURES = (TritonError, RuntimeError, ValueError, TypeError, AssertionError, ImportError)
ROWS = [(1, 262144, 64), (4, 262144, 64), (32, 32768, 64), (128, 8192, 64), (1, 1048576, 32), (32, 32768, 32)]
COLD_BYTES = 180e6
BLOCK, BLOCKS = 8, 2048  # candidates of V4.1
BLOCK_ROWS = [(1, 2048, 32768, True), (1, 2048, 32768, False), (1, 1, 262144, True), (64, 1, 262144, True)]  # whether scattered


def kernels(layout: str, row: tuple[int, int, int]) -> dict[str, Callable[..., torch.Tensor]]:
    n, entries, _ = row
    options = {"layout": layouts.get(layout), "entries_per_page": PAGE, "num_entries": entries}
    maxima = {"maxima": torch.empty(n, 1, entries // GROUP, device="cuda")}
    return {
        "gluon": functools.partial(gluon.index_score, **options, **maxima),
        "gluon, no maxima": functools.partial(gluon.index_score, **options),
        "triton": functools.partial(triton.index_score, **options, **maxima),
    }


def worst_error(scores: torch.Tensor, paged: Paged, layout: str, keys: int = 4096) -> float:
    """Largest error of the first scores of sequence 0, relative to the sum of absolute terms, against fp64."""
    pages = paged.pool[paged.table[0, : keys // PAGE].long()]
    decoded = codec.unpack_pages(layouts.get(layout), pages, PAGE).view(keys, 128).double()
    terms = (decoded @ paged.q[0, 0].double().T).relu() * paged.weights[0, 0].double()
    return float(((scores[:keys].double() - terms.sum(1)).abs() / terms.abs().sum(1)).max())


def candidates(n: int, b: int, entries: int, scattered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [n, b, BLOCKS] of every query, and how many entries they hold."""
    most = entries // BLOCK
    if scattered:
        blocks = torch.stack([torch.randperm(most, device="cuda")[:BLOCKS].sort().values for _ in range(n * b)])
    else:
        blocks = torch.arange(BLOCKS, device="cuda").expand(n * b, BLOCKS)
    return blocks.int().reshape(n, b, BLOCKS), torch.full((n, b), BLOCKS * BLOCK, dtype=torch.int32, device="cuda")


def worst_block_error(scores: torch.Tensor, paged: Paged, blocks: torch.Tensor, layout: str) -> float:
    """As `worst_error`, of the last query's first blocks."""
    entries = (blocks[-1, -1, :512].unsqueeze(1) * BLOCK + torch.arange(BLOCK, device="cuda")).flatten()
    pages, at = (entries // PAGE).unique(return_inverse=True)
    decoded = codec.unpack_pages(layouts.get(layout), paged.pool[paged.table[-1, pages].long()], PAGE)[at, entries % PAGE]
    terms = (decoded.double() @ paged.q[-1, -1].double().T).relu() * paged.weights[-1, -1].double()
    return float(((scores[-1, -1, : len(entries)].double() - terms.sum(1)).abs() / terms.abs().sum(1)).max())


def block_results(names: list[str] | None, heads: int = 32) -> list[dict]:
    results = []
    for n, b, entries, scattered in BLOCK_ROWS:
        for layout in ("index_fp8", "index_mxfp4"):
            record, options = layouts.get(layout), {"entries_per_page": PAGE, "block_size": BLOCK}
            paged = random_paged(layout, n, b, heads, entries)
            blocks, visible = candidates(n, b, entries, scattered)
            inputs = (*paged.arrays[:4], blocks, visible)
            size = n * min(entries, b * BLOCKS * BLOCK) * record.bytes_per_entry + n * b * BLOCKS * (4 + 4 * BLOCK)
            flops = 2 * n * b * BLOCKS * BLOCK * heads * 128
            for name, module in (("gluon", gluon_blocks), ("triton", triton)):
                if names and name not in names:
                    continue
                call = functools.partial(module.index_score_blocks, layout=record, **options)
                place = "scattered" if scattered else "together"
                result = {"keys": f"{n} x {b} x {BLOCKS} {place}", "heads": heads, "layout": layout, "kernel": name}
                try:
                    result["error"] = worst_block_error(call(*inputs), paged, blocks, layout)
                    result["warm_us"] = result["cold_us"] = median_us(call, [inputs], calls=4 if b > 1 else 20)
                    result["roof_us"] = max(size / COPY_BANDWIDTH, flops / BF16_FLOPS) * 1e6
                except FAILURES as failure:
                    result["failure"] = f"{type(failure).__name__}: {failure}"[:90]
                results.append(result)
            del paged, blocks, inputs
            torch.cuda.empty_cache()
    return results


def deep_gemm_call(n: int, entries: int) -> Callable[..., torch.Tensor]:
    import deep_gemm

    lengths = torch.full((n, 1), entries, dtype=torch.int32, device="cuda")
    plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, deep_gemm.get_num_sms())

    def call(q, weights, pool, table, visible):
        keys = pool.view(-1, PAGE, 1, 132)
        return deep_gemm.fp8_paged_mqa_logits(q, keys, weights.flatten(0, 1), lengths, table, plan, entries)

    return call


def results_of_rows(rows: list[int] | None, names: list[str] | None) -> list[dict]:
    results = []
    for index, row in enumerate(ROWS):
        if rows and index not in rows:
            continue
        n, entries, heads = row
        for layout in ("index_fp8", "index_mxfp4"):
            record = layouts.get(layout)
            size = n * entries * (record.bytes_per_entry + 4)
            sets = [random_paged(layout, n, 1, heads, entries) for _ in range(max(2, -int(-COLD_BYTES // size)))]
            calls = {name: (call, sets) for name, call in kernels(layout, row).items()}
            if layout == "index_mxfp4":
                far_apart = [random_paged(layout, n, 1, heads, entries, exponents=6) for _ in sets]
                calls["gluon, far scales"] = (calls["gluon"][0], far_apart)
            if layout == "index_fp8":
                plain = [random_paged(layout, n, 1, heads, entries, page_bytes=8448) for _ in sets]
                calls["deep_gemm"] = (None, plain)
            for name, (call, inputs) in calls.items():
                if names and name.split(" ")[0].rstrip(",") not in names:
                    continue
                result = {"keys": f"{n} x {entries}", "heads": heads, "layout": layout, "kernel": name}
                try:
                    call = call or deep_gemm_call(n, entries)
                    scores = call(*inputs[0].arrays).reshape(-1)
                    result["error"] = worst_error(scores, inputs[0], layout)
                    result["warm_us"] = median_us(call, [inputs[0].arrays])
                    result["cold_us"] = median_us(call, [p.arrays for p in inputs])
                    result["roof_us"] = size / COPY_BANDWIDTH * 1e6
                except FAILURES as failure:  # one kernel's failure must not hide the others' times
                    result["failure"] = f"{type(failure).__name__}: {failure}"[:90]
                results.append(result)
            del sets, calls
            torch.cuda.empty_cache()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=int, nargs="*", help="indices of the rows to run, without candidate blocks")
    parser.add_argument("--blocks", action="store_true", help="candidate blocks only")
    parser.add_argument("--kernels", nargs="*", help="the first words of their names: gluon, triton, deep_gemm")
    args = parser.parse_args()
    results = [] if args.blocks else results_of_rows(args.rows, args.kernels)
    if not args.rows:
        results += block_results(args.kernels)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; roof: keys, scales and scores at {COPY_BANDWIDTH / 1e12} TB/s"
    )
    print(
        f"{'sequences x keys':24} {'heads':>5} {'layout':12} {'kernel':18} {'warm us':>8} {'cold us':>8} {'roof us':>8} {'of roof':>8} {'error':>8}"
    )
    for r in results:
        head = f"{r['keys']:24} {r['heads']:5} {r['layout']:12} {r['kernel']:18}"
        if "failure" in r:
            print(f"{head} {r['failure']}")
        else:
            print(
                f"{head} {r['warm_us']:8.1f} {r['cold_us']:8.1f} {r['roof_us']:8.1f} {r['roof_us'] / r['cold_us']:8.0%} {r['error']:8.1e}"
            )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
