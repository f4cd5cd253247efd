"""Top-k of index scores: microseconds beside torch.topk, and scoring plus selection of one sequence.

`python bench/ops/bench_select_topk.py [--json FILE]`.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from index_inputs import PAGE, random_paged
from timing import COPY_BANDWIDTH, median_us
from triton.errors import TritonError

from abyssal.kv import layouts
from abyssal.ops.index_score.gluon import index_score
from abyssal.ops.index_score.gluon_blocks import index_score_blocks
from abyssal.ops.select_topk import select_topk as reference
from abyssal.ops.select_topk.triton import GROUP, SelectConfig, candidate_blocks, select_config, select_topk

FAILURES = (TritonError, RuntimeError, ValueError, TypeError, AssertionError, ImportError)
ROWS = [
    (1, 262144, 512),
    (4, 262144, 512),
    (32, 32768, 512),
    (128, 8192, 512),
    (1, 1048576, 512),
    (1, 262144, 1024),
    (256, 262144, 512),
]
TUNED = {  # levels, warps, chunk
    (1, 262144, 512): [(3, 8, 4096)],
    (32, 32768, 512): [(2, 8, 4096)],
    (128, 8192, 512): [(1, 16, 0)],
}


def measure(name: str, row: str, call: Callable[..., torch.Tensor], inputs: list[tuple], expected: torch.Tensor | None) -> dict:
    result: dict = {"row": row, "kernel": name}
    try:
        if expected is not None and not torch.equal(call(*inputs[0]).cpu(), expected):
            result["failure"] = "WRONG entries"
        else:
            result["us"] = median_us(call, inputs)
    except FAILURES as failure:  # one kernel's failure must not hide the others' times
        result["failure"] = f"{type(failure).__name__}: {failure}"[:90]
    print(f"{row:22} {name:32} " + (result["failure"] if "failure" in result else f"{result['us']:8.1f}"), flush=True)
    return result


def selections() -> list[dict]:
    results = []
    for n, entries, k in ROWS:
        row = f"{k} of {n} x {entries}"
        sets = []
        for _ in range(4 if n < 256 else 1):
            scores = torch.randn(n, 1, entries, device="cuda")
            visible = torch.full((n, 1), entries, dtype=torch.int32, device="cuda")
            sets.append((scores, visible, scores.view(n, 1, -1, GROUP).amax(-1)))
        expected = reference(*sets[0][:2], k).cpu()
        default = select_config(n, entries, k)
        arrivals = torch.zeros(n, 1, dtype=torch.int32, device="cuda")
        cases = {"triton": (default, False)}
        if default.levels > 1:
            cases["triton, maxima given"] = (default, True)
        for levels, warps, chunk in TUNED.get((n, entries, k), []):
            cases[f"{levels} levels, {warps} warps, {chunk}"] = (SelectConfig(levels, warps, chunk), True)
        for name, (config, given) in cases.items():

            def call(scores, visible, maxima, config=config, given=given, k=k, arrivals=arrivals):
                return select_topk(scores, visible, k, maxima=maxima if given else None, arrivals=arrivals, config=config)

            results.append(measure(name, row, call, sets, expected))
        results.append(measure("torch.topk", row, lambda s, v, m, k=k: s.topk(k, sorted=False).indices, sets, None))
    return results


def steps() -> list[dict]:
    """Scoring and selection together, maxima handed over."""
    results = []
    for layout in ("index_fp8", "index_mxfp4"):
        for n, entries, heads in ((1, 262144, 64), (4, 262144, 64), (128, 8192, 64), (1, 1048576, 32)):
            sets = [random_paged(layout, n, 1, heads, entries) for _ in range(2 if n * entries > 300000 else 6)]
            maxima = torch.empty(n, 1, entries // GROUP, device="cuda")
            arrivals = torch.zeros(n, 1, dtype=torch.int32, device="cuda")
            score = functools.partial(
                index_score, layout=layouts.get(layout), entries_per_page=PAGE, num_entries=entries, maxima=maxima
            )

            def call(q, weights, pool, table, visible, score=score, maxima=maxima, arrivals=arrivals):
                scores = score(q, weights, pool, table, visible)
                return select_topk(scores, visible, 512, maxima=maxima, arrivals=arrivals, page_table=table)

            results.append(measure(f"score {layout} + select", f"512 of {n} x {entries}", call, [s.arrays for s in sets], None))
            del sets
            torch.cuda.empty_cache()
    return results


def candidates() -> list[dict]:
    """V4.1's second level: 2,048 blocks of 8, their scores, and the choice among them."""
    results = []
    for layout in ("index_fp8", "index_mxfp4"):
        for n, entries in ((1, 262144), (1, 1048576), (16, 65536)):
            paged = random_paged(layout, n, 1, 32, entries)
            scores = torch.randn(n, 1, entries, device="cuda")
            blocks, count = candidate_blocks(scores, paged.visible, 2048, 8)
            score = functools.partial(index_score_blocks, layout=layouts.get(layout), entries_per_page=PAGE, block_size=8)

            def publish(scores, visible):
                return candidate_blocks(scores, visible, 2048, 8)[0]

            def use(q, weights, pool, table, blocks, count, score=score):
                return select_topk(score(q, weights, pool, table, blocks, count), count, 512, blocks=blocks, page_table=table)

            row = f"{n} x {entries}"
            results.append(measure("candidate blocks", row, publish, [(scores, paged.visible)], None))
            inputs = [(*paged.arrays[:4], blocks, count)]
            results.append(measure(f"{layout}, 16,384 candidates", row, score, inputs, None))
            results.append(measure(f"{layout}, candidates + select", row, use, inputs, None))
            del paged, scores
            torch.cuda.empty_cache()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; one read of 262,144 scores: {262144 * 4 / COPY_BANDWIDTH * 1e6:.2f} us"
    )
    print(f"{'entries':22} {'kernel':32} {'us':>8}", flush=True)
    results = selections() + steps() + candidates()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
