"""Temporary: which choices differ between two configs of the products."""
import torch
import tests.ops.test_moe as t
from abyssal.ops.moe import triton as M
dim, inner, tile, shared = t.REAL["v4.1"]
layer = t.random_layer(dim, inner, 32, 6, "fp4", tile, shared)
experts = M.prepare_experts(layer)
for tokens in (64, 65, 300):
    x, ids = t.random_input(tokens, dim)
    def outputs(config):
        choice = M.route(x, ids, experts, config)
        return M.routed_experts(choice, experts, config).outputs.float(), choice.experts.flatten()
    want, chosen = outputs(t.config(8, 32, 2, 1))
    counts = torch.bincount(chosen, minlength=32)
    for config in (t.config(16, 128, 3, 4), t.config(16, 128, 3, 4), t.config(16, 128, 2, 4), t.config(16, 64, 3, 4), t.config(32, 128, 3, 4), t.config(64, 128, 3, 4),
                   M.MoeConfig(M.ProductConfig(16, 128, 3, 4), M.ProductConfig(16, 128, 1, 4)), M.MoeConfig(M.ProductConfig(16, 128, 1, 4), M.ProductConfig(16, 128, 3, 4))):
        out, _ = outputs(config)
        bad = ((out - want).norm(dim=1) / want.norm(dim=1)) > 0.003
        rel = ((out - want).norm(dim=1) / want.norm(dim=1))
        columns = ((out - want).abs() > 0.02 * want.abs().mean()).float().mean(0).view(-1, 128).mean(1)
        print(tokens, config.up, config.down.chunks, "bad rows", int(bad.sum()), "of", len(bad), "median", float(rel.median()), "experts", chosen[bad].unique().tolist()[:40], "their counts", counts[chosen[bad].unique()].tolist()[:40], "columns", [round(v, 2) for v in columns.tolist()][:8], flush=True)
