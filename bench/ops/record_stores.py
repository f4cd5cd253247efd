"""Stores of single records beside published figures of another engine (its GPU): kernel time and graph replay.

`python -m bench.ops.record_stores [--json FILE]`, from the root of the repository, on a GPU. The published kernels write V4.1 records:
store, store + RoPE and norm + RoPE + store of 528 bytes; the compressors of ratio 1 and 2 with their store, 288 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import torch

import abyssal.ops.compress.triton as compressor
import abyssal.ops.qkv_insert.triton as kernels
from abyssal.kv import layouts
from abyssal.kv.batch import StoreFacts
from bench.ops import write_path as wp
from bench.ops.bench_compress import step
from bench.ops.timing import median_us

TOKENS = (1, 8, 64, 512)
PUBLISHED = {  # median us by token count
    "store": (0.96, 0.98, 1.02, 1.39),
    "store + rope": (0.98, 1.00, 1.04, 1.41),
    "norm + rope + store": (1.17, 1.17, 1.20, 1.62),
    "ratio 1 + store": (1.43, 1.41, 1.50, 1.95),
    "ratio 2 + store": (1.78, 1.84, 1.92, 2.52),
}
ENTRIES = 64


def store(name: str, tokens: int, rope: bool, norm: bool, num_warps: int | None = None) -> Callable[[], None]:
    layout = layouts.get(name)
    kv = torch.randn(tokens, 512, device=wp.DEVICE, dtype=torch.bfloat16)
    data, slots = wp.pool(layout, tokens, ENTRIES)
    table, weight = wp.table(tokens), torch.rand(512, device=wp.DEVICE) + 0.5
    config = kernels.window_store_config(layout, norm, rope) if num_warps is None else kernels.WindowStoreConfig(num_warps)
    return lambda: kernels.window_store(
        kv, table if rope else None, data, layout, ENTRIES, slots, norm=weight if norm else None, eps=1e-6, config=config
    )  # fmt: skip


def pairs(tokens: int, num_warps: int = 4) -> Callable[[], None]:
    """`tokens` entries of two tokens each, the first of them carried."""
    layout, state = layouts.get("v41_fp4"), layouts.state_rows(1024)
    rows, norm = torch.randn(tokens, 1024, device=wp.DEVICE), torch.rand(512, device=wp.DEVICE) + 0.5
    data, slots = wp.pool(layout, tokens, ENTRIES)
    states, state_slots = wp.pool(state, 2 * tokens, 4)
    states.view(torch.float32).normal_()
    index = torch.arange(tokens, device=wp.DEVICE)
    sources, table = torch.stack([index, tokens + index], 1), wp.table(tokens)
    facts = step(sources, state_slots[:tokens], slots, table, token_each=True)
    store_facts = StoreFacts(index, state_slots[tokens:].unsqueeze(0))
    pages, kept = compressor.Pages("entries", data, layout, ENTRIES), compressor.Pages("state", states, state, 4)
    return lambda: compressor.compress(
        rows, None, norm, facts, store_facts, kept, None, pages, 0, overlap=False, rotate_keys=False, eps=1e-6, dtype=torch.bfloat16,
        config=compressor.CompressConfig(num_warps),
    )  # fmt: skip


def main() -> None:
    args = wp.arguments(__doc__ or "")
    floor = wp.launch_floor()
    empty = wp.kernel_us(lambda: wp.empty_kernel[(1,)](num_warps=1))
    makers: dict[str, Callable[[int], Callable[[], None]]] = {
        "store": lambda tokens: store("v41", tokens, False, False),
        "store + rope": lambda tokens: store("v41", tokens, True, False),
        "norm + rope + store": lambda tokens: store("v41", tokens, True, True),
        "ratio 1 + store": lambda tokens: store("v41_fp4", tokens, True, True),
        "ratio 2 + store": pairs,
        "store, v4 record": lambda tokens: store("v4", tokens, False, False),
        "store + rope, v4 record": lambda tokens: store("v4", tokens, True, False),
    }
    for name, record, rope, norm in (
        ("store", "v41", False, False),
        ("store + rope", "v41", True, False),
        ("norm + rope + store", "v41", True, True),
        ("ratio 1 + store", "v41_fp4", True, True),
    ):
        for num_warps in (1, 2, 4):
            makers[f"{name}, {num_warps} warps"] = partial(store, record, rope=rope, norm=norm, num_warps=num_warps)
    for num_warps in (2, 8):
        makers[f"ratio 2 + store, {num_warps} warps"] = partial(pairs, num_warps=num_warps)
    print(f"record stores; empty kernel: {empty:.2f} us in the profiler, F = {floor:.2f} us in a graph; {wp.device_line()}")
    print(f"{'cell':28} {'tokens':>6} {'kernel us':>10} {'graph us':>9} {'published':>9} {'ratio':>6}", flush=True)
    rows = []
    for name, maker in makers.items():
        for tokens, published in zip(
            TOKENS, PUBLISHED.get(name.split(",")[0] if "v4" not in name else "", (None,) * len(TOKENS)), strict=True
        ):
            row = {"cell": name, "tokens": tokens, "published_us": published}
            try:
                fn = maker(tokens)
                row |= {"kernel_us": wp.kernel_us(fn), "graph_us": median_us(fn, [()], repeats=9, calls=50)}
            except wp.FAILURES as error:  # the other cells are still worth their time
                torch.cuda.synchronize()
                row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
            rows.append(row)
            head = f"{name:28} {tokens:>6}"
            if "error" in row:
                print(head, row["error"], flush=True)
                continue
            beside = "" if published is None else f" {published:9.2f} {row['kernel_us'] / published:6.2f}"
            print(f"{head} {row['kernel_us']:10.2f} {row['graph_us']:9.2f}{beside}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"floor_us": floor, "empty_kernel_us": empty, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
