"""Sparse attention on a Hopper GPU: our kernels beside FlashMLA's (package `sgl-flash-mla`, where installed).

`python bench/ops/bench_sparse_attention.py [--json FILE] [--quick]`. Times are medians of CUDA-graph replays; roof: the larger of
products at 707 TFLOP/s and of records, queries and results at 4.23 TB/s.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timing import BF16_FLOPS, COPY_BANDWIDTH, median_us
from triton.errors import TritonError

from abyssal.kv import codec, layouts
from abyssal.ops.sparse_attention import gluon as wgmma
from abyssal.ops.sparse_attention import triton as portable
from abyssal.ops.sparse_attention.arguments import KeyList, Records, Splits

FAILURES = (RuntimeError, ValueError, AssertionError, TritonError)  # of one variant, not of the whole run
PER_PAGE = 64
SCALE = 512**-0.5
L2_BYTES = 60e6


@dataclass(frozen=True)
class Row:
    """Queries, each of a window of 128 and `extra` more, anywhere in the pool.

    As a chunk, queries are of one sequence from token 4,096 on: windows overlap, and entries are all that are visible at ratio 128,
    32 to 47 in lists of `extra`, or `extra` of the 1,024 of ratio 4 that every query sees.
    """

    tokens: int
    heads: int
    extra: int
    chunk: bool = False

    @property
    def flops(self) -> float:
        extra = 40 if self.chunk and self.extra < 64 else self.extra
        return 4.0 * self.tokens * self.heads * (128 + extra) * 512

    @property
    def roof_us(self) -> float:
        records = 0 if self.chunk else self.tokens * (128 + self.extra)
        moved = records * 584.0 + self.tokens * self.heads * 512 * 4
        return max(self.flops / BF16_FLOPS, moved / COPY_BANDWIDTH) * 1e6

    def tflops(self, us: float) -> float:
        return self.flops / us / 1e6


DECODE = [Row(n, 64, 512) for n in (1, 4, 16, 64, 128, 256)]
DECODE += [Row(n, 128, 512) for n in (1, 16, 64, 128, 256)]
DECODE += [Row(n, 128, 1024) for n in (1, 16, 64)] + [Row(n, 64, 8192) for n in (1, 16, 64)]
PREFILL = [Row(4096, 64, 512), Row(4096, 128, 1024), Row(4096, 64, 32)]
PREFILL += [Row(2048, 64, 48, chunk=True), Row(2048, 64, 512, chunk=True)]


def pool(layout: str, pages: int) -> torch.Tensor:
    """Random records; packed once for a few pages and repeated."""
    few = codec.pack_pages(layout, torch.randn(16, PER_PAGE, 512))
    return few.repeat(-(-pages // 16), 1)[:pages].cuda()


def make_inputs(row: Row, pair: tuple[str, str], pools: dict[str, torch.Tensor], sets: int) -> list[tuple[Any, ...]]:
    """Inputs as `sparse_attention` takes them, in `sets` versions with other queries and other records."""

    def keys(layout: str, count: int) -> KeyList:
        records = Records(pools[layout], layouts.get(layout), PER_PAGE)
        slots = torch.randint(len(pools[layout]) * PER_PAGE, (row.tokens, count), dtype=torch.int32, device="cuda")
        return KeyList(records, slots, torch.full((row.tokens,), count, dtype=torch.int32, device="cuda"))

    def chunk_keys(layout: str, count: int) -> KeyList:
        records = Records(pools[layout], layouts.get(layout), PER_PAGE)
        tokens = torch.arange(row.tokens, dtype=torch.int32, device="cuda")
        lengths = torch.full_like(tokens, count)
        if count == 128:
            slots = tokens[:, None] + torch.arange(count, dtype=torch.int32, device="cuda")
        elif count < 64:
            slots = torch.arange(count, dtype=torch.int32, device="cuda").expand(row.tokens, count)
            lengths = 32 + tokens // 128
        else:
            slots = torch.rand(row.tokens, 1024, device="cuda").topk(count).indices.sort(dim=1).values.int()
        return KeyList(records, slots.contiguous(), lengths)

    if row.chunk:
        keys = chunk_keys
    sink = torch.randn(row.heads, device="cuda")
    shape = (row.tokens, row.heads, 512)
    return [
        (torch.randn(shape, device="cuda").bfloat16(), keys(pair[0], 128), keys(pair[1], row.extra), sink, SCALE)
        for _ in range(sets)
    ]


def flash_call(library: Any, q: Any, window: KeyList, entries: KeyList, sink: Any, scale: float) -> Callable[[], Any]:
    """FlashMLA's decoding over the same V4 pages; its plan is made on the first call, outside of the graph."""

    def view(keys: KeyList) -> torch.Tensor:
        pages = keys.records.pages
        return pages.as_strided((len(pages), PER_PAGE, 1, 584), (pages.stride(0), 584, 584, 1)).view(torch.float8_e4m3fn)

    plan = library.get_mla_metadata()[0]
    lists = {"indices": window.slots.unsqueeze(1), "extra_indices_in_kvcache": entries.slots.unsqueeze(1)}
    lengths = {"topk_length": window.lengths, "extra_topk_length": entries.lengths}
    options = {"softmax_scale": scale, "attn_sink": sink, "is_fp8_kvcache": True, "use_legacy": True}
    options |= {"block_table": None, "cache_seqlens": None, "head_dim_v": 512, "tile_scheduler_metadata": plan}
    arguments = {"q": q.unsqueeze(1), "k_cache": view(window), "extra_k_cache": view(entries), **lists, **lengths, **options}
    return lambda: library.flash_mla_with_kvcache(**arguments)


def flash_prefill_call(library: Any, q: Any, window: KeyList, entries: KeyList, sink: Any, scale: float) -> Callable[[], Any]:
    """FlashMLA's prefill over one bf16 workspace that holds the records of both lists."""
    kv = entries.records.pages.view(torch.bfloat16).view(-1, 1, 512)
    indices = torch.cat([window.slots, entries.slots], dim=1).unsqueeze(1)
    return lambda: library.flash_mla_sparse_fwd(q, kv, indices, scale, attn_sink=sink, use_legacy=True)


def variants(row: Row, pair: tuple[str, str], quick: bool) -> dict[str, Callable[..., Any]]:
    """Name -> function of the inputs."""
    blocks = 2 + -(-row.extra // 64)
    programs = row.tokens * -(-row.heads // 64)
    split = portable.best_split(programs, blocks, 132)
    chosen = wgmma.launch_config(row.tokens, row.heads, (128, row.extra), 132)
    configs = [chosen]
    if not quick and row.tokens <= 256:
        counts = [c for c in (1, 2, 3, 4, 5, 8, 10, 16, 33, 65) if c <= blocks and programs * c <= 528]
        configs += [wgmma.LaunchConfig(Splits(count, None), keys) for keys in (64, 32) for count in counts]
    found: dict[str, Callable[..., Any]] = {}
    for config in dict.fromkeys(configs):
        name = f"gluon k{config.block_keys} /{config.splits.count}{'*' if config == chosen else ''}"
        found[name] = lambda *a, c=config: wgmma.sparse_attention(*a, config=c)
    many = not quick and row == Row(64, 64, 512)  # each variant is a compilation
    for keys, warps, stages in [(64, 8, 2), (64, 8, 1), (32, 8, 2), (32, 4, 2)] if many else [(64, 8, 2)]:
        config = portable.LaunchConfig(64, keys, Splits(split, None), warps, stages)
        found[f"triton k{keys} w{warps} s{stages} /{split}"] = lambda *a, c=config: portable.sparse_attention(*a, config=c)
    return found


def measure(row: Row, pair: tuple[str, str], pools: dict[str, torch.Tensor], library: Any, quick: bool) -> list[dict[str, Any]]:
    moved = row.tokens * (128 + row.extra) * 584
    sets = max(1, min(8, math.ceil(L2_BYTES / moved))) if row.tokens <= 256 else 1
    inputs = make_inputs(row, pair, pools, sets)
    named: list[tuple[str, Callable[[], float]]] = []
    for name, function in variants(row, pair, quick).items():
        named.append((name, lambda f=function: median_us(f, inputs)))
    flash = {("v4", "v4"): flash_call, ("bf16", "bf16"): flash_prefill_call}.get(pair)
    if library is not None and flash is not None and (row.tokens > 256) == (flash is flash_prefill_call):
        named.append(("flash_mla", lambda: median_us(lambda call: call(), [(flash(library, *a),) for a in inputs])))
    results = []
    for name, run in named:
        result: dict[str, Any] = {
            "pair": "+".join(pair),
            "tokens": row.tokens,
            "heads": row.heads,
            "extra": row.extra,
            "kernel": name,
        }
        try:
            us = run()
            results.append(result | {"us": round(us, 2), "tflops": round(row.tflops(us), 1), "roof_us": round(row.roof_us, 1)})
        except FAILURES as error:  # one variant's failure is a line of the table
            torch.cuda.synchronize()
            results.append(result | {"us": math.inf, "error": f"{type(error).__name__}: {str(error)[:160]}"})
        print(results[-1], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--quick", action="store_true", help="one configuration of each kernel")
    parser.add_argument("--rows", choices=["decode", "prefill", "all"], default="all")
    args = parser.parse_args()
    torch.manual_seed(0)
    names = ("v4", "v41", "v41_fp4", "bf16")
    pools = {name: pool(name, 2048) for name in names}  # 131072 records, 77 MB of v4: more than the L2
    library = importlib.import_module("flash_mla") if importlib.util.find_spec("flash_mla") else None
    print_errors(pools, library)
    results = []
    if args.rows in ("decode", "all"):
        for row in DECODE:
            results += measure(row, ("v4", "v4"), pools, library, args.quick)
        for pair in (("v41", "v41_fp4"), ("v41", "v41")):
            for row in DECODE if pair[1] == "v41_fp4" else DECODE[:4]:
                results += measure(row, pair, pools, None, True)
    if args.rows in ("prefill", "all"):
        for row in PREFILL:
            for pair in (("v4", "v4"), ("v41", "v41_fp4"), ("bf16", "bf16")):
                results += measure(row, pair, pools, None, True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "results": results}, file, indent=1)
    print_table(results)


def decoded(keys: KeyList) -> torch.Tensor:
    """Listed records as fp32 [T, K, 512]."""
    pages, layout, count = keys.records
    return codec.unpack_pages(layout, pages, count).flatten(0, 1)[keys.slots.long()]


def print_errors(pools: dict[str, torch.Tensor], library: Any) -> None:
    """Row errors (norm of the difference over norm) against the fp32 reference on decoded records: median and maximum."""
    for pair in (("v4", "v4"), ("v41", "v41_fp4"), ("v41", "v41")):
        q, window, entries, sink, scale = make_inputs(Row(64, 64, 512), pair, pools, 1)[0]
        q = q * 4  # scores that matter
        keys = torch.cat([decoded(window), decoded(entries)], dim=1)
        scores = torch.einsum("thd,tkd->thk", q.double(), keys.double()) * scale
        weights = torch.cat([scores, sink.double()[None, :, None].expand(64, -1, 1)], dim=2).softmax(-1)[..., :-1]
        expected = torch.einsum("thk,tkd->thd", weights, keys.double())
        kernels: dict[str, Callable[[], Any]] = {
            "gluon": lambda: wgmma.sparse_attention(q, window, entries, sink, scale)[0],  # noqa: B023
            "triton": lambda: portable.sparse_attention(q, window, entries, sink, scale)[0],  # noqa: B023
        }
        if library is not None and pair == ("v4", "v4"):
            kernels["flash_mla"] = lambda: flash_call(library, q, window, entries, sink, scale)()[0].squeeze(1)  # noqa: B023
        for name, kernel in kernels.items():
            try:
                error = ((kernel().double() - expected).norm(dim=-1) / expected.norm(dim=-1)).flatten()
                print(
                    f"row error {'+'.join(pair):12} {name:10} median {error.median():.3e} maximum {error.max():.3e}", flush=True
                )
            except FAILURES as failure:
                print(f"row error {'+'.join(pair):12} {name:10} {type(failure).__name__}: {str(failure)[:160]}", flush=True)


def print_table(results: list[dict[str, Any]]) -> None:
    print(
        f"{'records':12} {'tokens':>6} {'heads':>5} {'extra':>5} {'roof':>6}  {'gluon':>7} {'/n':>4} {'best':>7} {'/n':>4} {'triton':>7} {'flash':>7}"
    )
    keys = dict.fromkeys((r["pair"], r["tokens"], r["heads"], r["extra"]) for r in results)
    for key in keys:
        rows = [r for r in results if (r["pair"], r["tokens"], r["heads"], r["extra"]) == key]
        none = {"us": math.inf, "kernel": "/-"}
        gluon = [r for r in rows if r["kernel"].startswith("gluon")] or [none]
        chosen = next((r for r in gluon if r["kernel"].endswith("*")), none)
        best = min(gluon, key=lambda r: r["us"])
        triton = min((r["us"] for r in rows if r["kernel"].startswith("triton")), default=math.inf)
        flash = min((r["us"] for r in rows if r["kernel"] == "flash_mla"), default=math.inf)
        roof = next((r["roof_us"] for r in rows if "roof_us" in r), math.nan)
        count = [r["kernel"].rstrip("*").partition("/")[2] for r in (chosen, best)]
        print(
            f"{key[0]:12} {key[1]:>6} {key[2]:>5} {key[3]:>5} {roof:>6.1f}  {chosen['us']:>7.1f} {count[0]:>4} "
            f"{best['us']:>7.1f} {count[1]:>4} {triton:>7.1f} {flash:>7.1f}"
        )
    for r in results:
        if "error" in r:
            print("ERROR", r["pair"], r["tokens"], r["heads"], r["extra"], r["kernel"], r["error"])


if __name__ == "__main__":
    main()
