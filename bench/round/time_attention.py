# ruff: noqa
import importlib.util
import sys

sys.path[:0] = ["bench/ops", "src", "."]
import bench_sparse_attention as b
import torch
from timing import median_us

from abyssal.ops.sparse_attention import gluon as m
from abyssal.ops.sparse_attention.arguments import Splits

Row = b.Row
torch.manual_seed(0)
V4, FP4, BF = ("v4", "v4"), ("v41", "v41_fp4"), ("bf16", "bf16")
pools = {n: b.pool(n, 2048) for n in ("v4", "v41", "v41_fp4", "bf16")}
print("pools", flush=True)


def inputs_of(row, pair):
    moved = row.tokens * (128 + row.extra) * 584
    sets = max(1, min(8, -(-60_000_000 // moved))) if row.tokens <= 256 else 1
    return b.make_inputs(row, pair, pools, sets)


def us(row, inputs, config):
    small = row.tokens <= 256
    return median_us(
        lambda *a: m.sparse_attention(*a, config=config), inputs, repeats=5 if small else 3, calls=20 if small else 3
    )


def chosen(row):
    return m.launch_config(row.tokens, row.heads, (128, row.extra), 132)


if sys.argv[1] == "compile":
    what = sys.argv[2]
    if what == "v4":
        todo = [(V4, h, c, 64) for h in (64, 128) for c in (1, 2)]
    elif what == "v4_32":
        todo = [(V4, h, 20, 32) for h in (64, 128)]
    else:
        todo = [(FP4, 64, 1, 64), (FP4, 64, 2, 64), (FP4, 128, 1, 64), (BF, 64, 1, 64)]
    for pair, heads, count, keys in todo:
        m.sparse_attention(
            *b.make_inputs(Row(2, heads, 512), pair, pools, 1)[0], config=m.LaunchConfig(Splits(count, None), keys)
        )
        torch.cuda.synchronize()
        print(pair, heads, count, keys, "compiled", flush=True)
    sys.exit()

library = importlib.import_module("flash_mla") if importlib.util.find_spec("flash_mla") else None
multiprocessors = m.multiprocessors
ROWS = [
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
]
MORE = [
    (Row(1, 128, 512), V4),
    (Row(16, 128, 512), V4),
    (Row(256, 64, 512), V4),
    (Row(128, 64, 512), V4),
    (Row(256, 128, 512), V4),
    (Row(1, 64, 512), FP4),
    (Row(64, 64, 512), FP4),
    (Row(128, 64, 512), FP4),
    (Row(1, 128, 1024), V4),
    (Row(16, 128, 1024), V4),
    (Row(64, 128, 1024), V4),
    (Row(1, 64, 8192), V4),
    (Row(16, 64, 8192), V4),
    (Row(64, 64, 8192), V4),
    (Row(64, 64, 8192), FP4),
]


def table(rows, flash):
    for row, pair in rows:
        inputs = inputs_of(row, pair)
        config = chosen(row)
        line = f"{'+'.join(pair):12} {row.tokens:5} x {row.heads:3}, {row.extra:5} /{config.splits.count}: {us(row, inputs, config):.2f}"
        if row.tokens * -(-row.heads // 64) * config.splits.count > 132:
            m.multiprocessors = lambda device: 10**9
            line += f"  one tile each {us(row, inputs, config):.2f}"
            m.multiprocessors = multiprocessors
        call = b.flash_call if pair == V4 and row.tokens <= 256 else b.flash_prefill_call if pair == BF else None
        if flash and library is not None and call is not None:
            try:
                line += f"  flash {median_us(lambda c: c(), [(call(library, *a),) for a in inputs], calls=20 if row.tokens <= 256 else 3):.2f}"
            except Exception as e:
                line += f"  flash {type(e).__name__} {str(e)[:60]}"
        print(line, flush=True)


table(ROWS, True)
for tokens, heads in ((1, 64), (4, 64), (16, 64), (1, 128), (16, 128)):
    row = Row(tokens, heads, 512)
    inputs = inputs_of(row, V4)
    for keys, counts in ((64, (2, 3, 4, 5, 10)), (32, (4, 7, 8, 10, 20))):
        line = f"{tokens} x {heads} blocks of {keys}:"
        for count in counts:
            if tokens * heads // 64 * count <= 160:
                line += f"  /{count} {us(row, inputs, m.LaunchConfig(Splits(count, None), keys)):.2f}"
        print(line, flush=True)
table(MORE, False)
combine = m.combine
for tokens in (1, 16):
    row = Row(tokens, 64, 512)
    inputs = inputs_of(row, V4)
    m.combine = lambda *a: None
    for keys, count in ((64, 5), (64, 10), (32, 20), (32, 8)):
        if tokens * count <= 160:
            print(
                f"{tokens} x 64 without the merge, blocks of {keys} /{count}: {us(row, inputs, m.LaunchConfig(Splits(count, None), keys)):.2f}",
                flush=True,
            )
    m.combine = combine
