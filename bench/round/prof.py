# ruff: noqa
import importlib
import sys

import torch

sys.path[:0] = ["bench/ops", "bench/round", "src", "."]
import bench_sparse_attention as b

m = importlib.import_module(sys.argv[1])
p = {n: b.pool(n, 2048) for n in ("v4", "v41", "v41_fp4")}
for row, pair in (
    (b.Row(4096, 64, 512), ("v4", "v4")),
    (b.Row(1, 64, 512), ("v4", "v4")),
    (b.Row(64, 128, 512), ("v41", "v41_fp4")),
):
    a = b.make_inputs(row, pair, p, 1)[0]
    m.sparse_attention(*a)
    torch.cuda.synchronize()
