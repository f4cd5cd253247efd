"""Rows of a V4.1-Flash n-gram table, read by the GPU from host memory, and their gate.

`python -m bench.ops.bench_engram [--tokens 1 8 64 512 4096]`, from the root of the repository, on a GPU. A token reads 24 rows of 264 bytes; beside
it a table in the GPU's own memory, and a copy of as many bytes that lie one after another. The gate stands beside the PyTorch chain.
"""

from __future__ import annotations

import argparse
import mmap

import numpy as np
import torch

from abyssal.ops import engram as reference
from abyssal.ops.engram import triton as kernels
from bench.ops.timing import median_us

ROWS, COLUMNS, PER_TOKEN = 4 << 20, 256, 24  # 1.1 GB: far more than the GPU's translation caches reach at once
STREAMS, HIDDEN = 4, 5120
DEVICE = torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512, 4096])
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds")
    print(f"{'tokens':>6} {'rows, host':>10} {'GB/s':>6} {'device':>8} {'copy':>8} {'gate':>8} {'eager':>8}")
    codes, scales = (np.frombuffer(mmap.mmap(-1, ROWS * n), np.uint8).reshape(ROWS, n) for n in (COLUMNS, COLUMNS // 32))
    host = kernels.share_table(codes, scales, DEVICE)
    device = kernels.SharedTable(host.codes.to(DEVICE), host.scales.to(DEVICE))
    weight = torch.ones(STREAMS, HIDDEN, device=DEVICE)
    for tokens in args.tokens:
        rows = [(torch.randint(0, ROWS, (tokens, PER_TOKEN), device=DEVICE),) for _ in range(8)]
        there, here = (
            median_us(lambda chosen, table=table: kernels.table_rows(table, chosen, torch.bfloat16), rows)
            for table in (host, device)
        )
        moved = tokens * PER_TOKEN * (COLUMNS + COLUMNS // 32)
        target = torch.empty(moved, dtype=torch.uint8, device=DEVICE)
        copied = median_us(target.copy_, [(host.codes.view(-1)[:moved], True)])
        streams = torch.randn(tokens, STREAMS, HIDDEN, device=DEVICE).bfloat16()
        kv = torch.randn(tokens, (STREAMS + 1) * HIDDEN, device=DEVICE).bfloat16()
        arrays = streams, kv[:, : STREAMS * HIDDEN].unflatten(1, (STREAMS, -1)), kv[:, STREAMS * HIDDEN :], weight, 1e-20
        gate, eager = (median_us(op, [arrays]) for op in (kernels.engram, reference.engram))
        print(
            f"{tokens:>6} {there:>10.2f} {moved / there / 1e3:>6.1f} {here:>8.2f} {copied:>8.2f} {gate:>8.2f} {eager:>8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
