# ruff: noqa
import importlib
import importlib.util
import sys

import torch

sys.path[:0] = ["bench/ops", "bench/round", "src", "."]
import bench_sparse_attention as b
from timing import median_us

from abyssal.ops.sparse_attention.arguments import Splits

Row = b.Row
torch.manual_seed(0)
names = ("v4", "v41", "v41_fp4", "bf16")
pools = {n: b.pool(n, 2048) for n in names}
MODS = {n: importlib.import_module(n) for n in sys.argv[2].split(",")}
four = importlib.util.module_from_spec(importlib.util.find_spec("spec"))
if "spec" in MODS:
    importlib.util.find_spec("spec").loader.exec_module(four)
    four.bringing_warps = lambda w, e: 4
    MODS["spec4"] = four
V4, FP4, BF = ("v4", "v4"), ("v41", "v41_fp4"), ("bf16", "bf16")
TASKS = [
    (Row(4096, 64, 512), V4),
    (Row(64, 128, 512), V4),
    (Row(1, 64, 512), V4),
    (Row(16, 64, 512), V4),
    (Row(4, 64, 512), V4),
    (Row(64, 64, 512), V4),
    (Row(128, 128, 512), V4),
    (Row(64, 128, 512), FP4),
    (Row(4096, 64, 512), FP4),
    (Row(4096, 64, 512), BF),
    (Row(1, 128, 512), V4),
    (Row(16, 128, 512), V4),
    (Row(256, 64, 512), V4),
    (Row(128, 64, 512), V4),
    (Row(256, 128, 512), V4),
    (Row(1, 64, 512), FP4),
    (Row(64, 64, 512), FP4),
    (Row(128, 64, 512), FP4),
    (Row(16, 128, 1024), V4),
    (Row(64, 128, 1024), V4),
    (Row(1, 64, 8192), V4),
    (Row(16, 64, 8192), V4),
    (Row(64, 64, 8192), V4),
    (Row(64, 64, 8192), FP4),
]
compile_only = sys.argv[1] == "compile"
ONLY_V4 = ("base", "halves")
if compile_only:
    TASKS = [t for t in TASKS if "+".join(t[1]) == sys.argv[3]]
library = importlib.import_module("flash_mla") if importlib.util.find_spec("flash_mla") and not compile_only else None


def inputs_of(row, pair):
    moved = row.tokens * (128 + row.extra) * 584
    sets = max(1, min(8, -(-60_000_000 // moved))) if row.tokens <= 256 else 1
    return b.make_inputs(row, pair, pools, sets)


for row, pair in TASKS:
    inputs = inputs_of(row, pair)
    line = [f"{'+'.join(pair):12} {row.tokens:5} {row.heads:4} {row.extra:5}"]
    for name, m in MODS.items():
        if name == "spec4" and pair != FP4 or name in ONLY_V4 and pair != V4:
            continue
        try:
            if compile_only:
                m.sparse_attention(*inputs[0])
                torch.cuda.synchronize()
                continue
            us = median_us(
                lambda *a: m.sparse_attention(*a),
                inputs,
                repeats=7 if row.tokens <= 256 else 3,
                calls=20 if row.tokens <= 256 else 3,
            )
            line.append(f"{name} {us:.2f}")
        except Exception as e:
            line.append(f"{name} {type(e).__name__} {str(e)[:100]}")
    if library is not None:
        try:
            call = b.flash_call if pair == V4 and row.tokens <= 256 else b.flash_prefill_call if pair == BF else None
            if call:
                line.append(
                    f"flash {median_us(lambda c: c(), [(call(library, *a),) for a in inputs], calls=20 if row.tokens <= 256 else 3):.2f}"
                )
        except Exception as e:
            line.append(f"flash {type(e).__name__} {str(e)[:60]}")
    print("  ".join(line), flush=True)
if compile_only:
    sys.exit()
if importlib.util.find_spec("short"):
    m = importlib.import_module("short")
    combine = m.combine
    for tokens, heads in ((1, 64), (4, 64), (16, 64), (1, 128), (16, 128)):
        inputs = inputs_of(Row(tokens, heads, 512), V4)
        for keys, count in ((32, 10), (32, 20), (32, 7), (32, 4)):
            if tokens * heads // 64 * count > 132:
                continue
            c = m.LaunchConfig(Splits(count, None), keys)
            both = median_us(lambda *a: m.sparse_attention(*a, config=c), inputs)
            m.combine = lambda *a: None
            alone = median_us(lambda *a: m.sparse_attention(*a, config=c), inputs)
            m.combine = combine
            print(
                f"{tokens} x {heads} blocks of {keys}, splits {count}: both {both:.2f}, attention alone {alone:.2f}", flush=True
            )
# parts of one step of few sequences: attention alone, merge alone, no keys at all
for tokens in (1, 16):
    for name, m in MODS.items():
        if name not in ("base", "spec"):
            continue
        inputs = inputs_of(Row(tokens, 64, 512), V4)
        row = Row(tokens, 64, 512)
        combine = m.combine
        for count in (1, 2, 3, 5, 10):
            c = m.LaunchConfig(Splits(count, None))
            both = median_us(lambda *a: m.sparse_attention(*a, config=c), inputs)
            m.combine = lambda *a: None
            alone = median_us(lambda *a: m.sparse_attention(*a, config=c), inputs)
            m.combine = combine
            print(f"{tokens} x 64 {name} splits {count}: both {both:.2f}, attention alone {alone:.2f}", flush=True)
        empty = [(q, w._replace(lengths=w.lengths * 0), e._replace(lengths=e.lengths * 0), s, k) for q, w, e, s, k in inputs]
        c = m.LaunchConfig(Splits(1, None))
        print(f"{tokens} x 64 {name} no keys: {median_us(lambda *a: m.sparse_attention(*a, config=c), empty):.2f}", flush=True)
