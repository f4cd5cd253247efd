"""Every attention kernel and layout once, on small inputs, for compute-sanitizer.

`compute-sanitizer --tool memcheck python bench/ops/sanitize_sparse_attention.py`; also racecheck, initcheck and synccheck.
"""

from __future__ import annotations

import torch
from bench_sparse_attention import Row, make_inputs, pool

from abyssal.ops.sparse_attention import gluon as wgmma
from abyssal.ops.sparse_attention import triton as portable
from abyssal.ops.sparse_attention.arguments import PAIRS, Splits


def main() -> None:
    pools = {name: pool(name, 16) for name in {name for pair in PAIRS for name in pair}}
    for pair in PAIRS:
        for heads in (4, 64):
            (arguments,) = make_inputs(Row(3, heads, 70), pair, pools, 1)
            arguments[1].lengths[0], arguments[2].lengths[1] = 1, 0
            arguments[2].slots[0, 3] = -1
            for count in (1, 3):
                config = portable.LaunchConfig(64 if heads == 64 else 16, 64, Splits(count, None), 8, 2)
                results = [portable.sparse_attention(*arguments, config=config)[0]]
                results.append(wgmma.sparse_attention(*arguments, config=wgmma.LaunchConfig(Splits(count, None)))[0])
                torch.cuda.synchronize()
                difference = max((result.float() - results[0].float()).abs().max().item() for result in results)
                print(
                    f"{'+'.join(pair):12} heads {heads:3} splits {count}: kernels differ by at most {difference:.4f}", flush=True
                )


if __name__ == "__main__":
    main()
