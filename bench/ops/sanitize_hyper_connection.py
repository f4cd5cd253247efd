"""Every kind of hyper-connection launch once, with few tokens and a small hidden size, for compute-sanitizer."""

from __future__ import annotations

import torch
from bench_hyper_connection import make_inputs

from abyssal.ops import hyper_connection as hc
from abyssal.ops.hyper_connection import gluon
from abyssal.ops.hyper_connection import triton as kernel


def main() -> None:
    hidden = 256
    configs = [kernel.LaunchConfig(4, 64, 4, 1, 4, 2, 255, True), kernel.LaunchConfig(4, 32, 4, 2, 4, 3, 255, False)]
    configs += [kernel.LaunchConfig(64, 32, 2, 4, 4, 3, 255, False)]
    state = kernel.HandoverState.of_size(256, 8, "cuda")
    launches = 0
    for own in (True, False):
        arguments, weights = make_inputs(7, hidden, own, cold=False)
        full, head = weights[0], hc.MixWeights(weights[0].fn[:4].contiguous(), weights[0].base[:4], weights[0].scale[:4])
        for name in ("expand", "streams", "embedding"):
            inputs = dict(arguments[0])
            if name != "expand":
                inputs |= {"out": None, "post": None, "comb": None}
            if name == "embedding":
                inputs["source"] = inputs["source"][:, 0].contiguous()
            for some in (full, head) if own else (full, None):
                prepared = kernel.KernelWeights.prepare(some) if some is not None else None
                for each in configs:
                    kernel.site(weights=prepared, state=state, with_mean=True, config=each, **inputs)
                    torch.cuda.synchronize()
                    launches += 1
        prepared, tiles = kernel.KernelWeights.prepare(full), gluon.HandoverState.allocate(64, hidden, "cuda")
        arguments, _ = make_inputs(100, hidden, own, cold=False)
        for groups in (1, 3):
            tile_config = gluon.TileConfig(groups, 1, gluon.LAG, gluon.AHEAD)
            gluon.site(weights=prepared, state=tiles, config=tile_config, **arguments[0])
            torch.cuda.synchronize()
            launches += 1
    print(f"{launches} launches")


if __name__ == "__main__":
    main()
