"""One small launch of every kernel and format of the dense products, for compute-sanitizer.

`compute-sanitizer --tool memcheck python -m bench.ops.sanitize_linear`, then `--tool racecheck`, from the root of the repository.
"""

from __future__ import annotations

import torch

import abyssal.ops.linear.triton as kernels
from abyssal.ops.linear import LinearWeight
from abyssal.ops.norm.triton import rms_norm
from bench.ops.bench_linear import DEVICE, fp8


def main() -> None:
    plain = LinearWeight(torch.randn(24, 640, device=DEVICE).bfloat16(), None, "plain", None, None)
    weights = [fp8(144, 640, 128), fp8(48, 640, 32), plain, torch.randn(40, 640, device=DEVICE)]
    prepared = kernels.prepare_linear(weights)
    for tokens in (1, 3, 9, 17, 40):
        kernels.linear(torch.randn(tokens, 700, device=DEVICE).bfloat16()[:, 60:], prepared, batch_invariant=True)
    for group in prepared.groups[:2]:
        kernels.dequantised(group)
    for block in (128, 32):
        x = kernels.quantise(torch.randn(5, 2 * 640, device=DEVICE).bfloat16(), block)
        grouped = kernels.QuantisedInput(x.codes.view(-1, 2, 640), x.scales, x.tile)
        kernels.linear_grouped(grouped, kernels.prepare_linear([fp8(96, 640, block)]), 2)
        weight = kernels.prepare_linear([fp8(160, 256, block)]).groups[0]
        for splits in (1, 2):
            x = kernels.quantise(torch.randn(5, 256, device=DEVICE).bfloat16(), block)
            kernels.tiled(x, weight, config=kernels.TiledConfig(32, splits, 256 // splits))
    kernels.quantised_values(torch.randn(5, 640, device=DEVICE).bfloat16(), 32)
    pairs = [(torch.randn(5, n, device=DEVICE).bfloat16(), torch.ones(n, device=DEVICE)) for n in (1280, 512)]
    rms_norm(*pairs, eps=1e-6)
    rms_norm(pairs[0], eps=1e-6)
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
