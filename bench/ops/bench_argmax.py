"""The largest logit of every row: our two launches and PyTorch's operations. `python -m bench.ops.bench_argmax`, on a GPU."""

from __future__ import annotations

import torch

from abyssal.ops.argmax import argmax as reference
from abyssal.ops.argmax.triton import argmax
from bench.ops.timing import COPY_BANDWIDTH, median_us

VOCABULARY = 129280


def main() -> None:
    print(f"{'rows':>5} {'ours, us':>9} {'eager, us':>9} {'roof, us':>9}")
    for rows in (1, 8, 64, 128):
        inputs = [(torch.randn(rows, VOCABULARY, device="cuda"),) for _ in range(2)]
        roof = 4 * rows * VOCABULARY / COPY_BANDWIDTH * 1e6
        print(f"{rows:>5} {median_us(argmax, inputs):9.1f} {median_us(reference, inputs):9.1f} {roof:9.1f}")


if __name__ == "__main__":
    main()
