"""Rows of a V4.1-Flash n-gram table, read by the GPU from host memory, beside a table in its own memory and a copy of as many bytes.

`python -m bench.ops.bench_engram [--tokens 1 8 64 512 4096]`, from the root of the repository, on a GPU. A token reads 24 rows of 264 bytes.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from abyssal.ops.engram.triton import SharedTable, share_table, table_rows
from bench.ops.timing import median_us

ROWS, COLUMNS, PER_TOKEN = 4 << 20, 256, 24  # 1.1 GB: far more than the GPU's translation caches reach at once
DEVICE = torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512, 4096])
    args = parser.parse_args()
    codes, scales = (np.full((ROWS, width), 120, np.uint8) for width in (COLUMNS, COLUMNS // 32))
    host = share_table(codes, scales, DEVICE)
    tables = {"host": host, "device": SharedTable(host.codes.to(DEVICE), host.scales.to(DEVICE))}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'tokens':>6} {'host us':>9} {'GB/s':>6} {'device us':>9} {'copy us':>9}")
    for tokens in args.tokens:
        rows = [(torch.randint(0, ROWS, (tokens, PER_TOKEN), device=DEVICE),) for _ in range(8)]
        times = {
            name: median_us(lambda chosen, table=table: table_rows(table, chosen, torch.bfloat16), rows)
            for name, table in tables.items()
        }
        moved = tokens * PER_TOKEN * (COLUMNS + COLUMNS // 32)
        source, target = host.codes.view(-1)[:moved], torch.empty(moved, dtype=torch.uint8, device=DEVICE)
        copied = median_us(lambda source=source, target=target: target.copy_(source, non_blocking=True), [()])
        rate = moved / times["host"] / 1e3
        print(f"{tokens:>6} {times['host']:>9.2f} {rate:>6.1f} {times['device']:>9.2f} {copied:>9.2f}", flush=True)


if __name__ == "__main__":
    main()
