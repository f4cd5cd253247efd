"""Temporary: how far the expert layer is from the reference."""
import torch
import tests.ops.test_moe as t
from abyssal.ops.moe import expert_layer
for name, (dim, inner, tile, shared) in t.REAL.items():
    layer = t.random_layer(dim, inner, 32, 6, "fp4", tile, shared)
    for tokens in (1, 7, 64, 300, 1000):
        x, ids = t.random_input(tokens, dim)
        want = expert_layer(x, ids, layer).float()
        for chosen in (None, t.config(8, 32, 2, 1), t.config(16, 64, 2, 1), t.config(128, 128, 3, 8)):
            out = t.run(layer, x, ids, chosen).float()
            size = want.square().mean(1).sqrt()
            rel = (out - want).square().mean(1).sqrt() / size
            print(f"{name} {tokens:5} {chosen and chosen.up.block_tokens} median {rel.median():.5f} max {rel.max():.5f} above .002: {(rel > .002).float().mean():.4f} element {((out - want).abs().amax(1) / size).max():.5f}", flush=True)
