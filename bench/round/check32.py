# ruff: noqa
import importlib, sys, torch

sys.path[:0] = ["bench/ops", "bench/round", "src", "."]
import bench_sparse_attention as b
from abyssal.ops.sparse_attention.arguments import PAIRS, Splits
from abyssal.ops.sparse_attention import triton as portable

m = importlib.import_module("short")
torch.manual_seed(1)
pools = {n: b.pool(n, 64) for n in ("v4", "v41", "v41_fp4", "bf16")}
only = sys.argv[1:]
for pair in PAIRS:
    if only and "+".join(pair) not in only:
        continue
    for heads in (64, 128):
        q, w, e, s, k = b.make_inputs(b.Row(150, heads, 512), pair, pools, 1)[0]
        w.lengths.random_(0, 129), e.lengths.random_(0, 513)
        w.lengths[:20], e.lengths[:20] = 128, 512
        w.lengths[20:24], e.lengths[20:24] = 0, 0
        w.slots[torch.rand(w.slots.shape, device="cuda") < 0.1] = -1
        expected, elog = portable.sparse_attention(q, w, e, s, k)
        for count in (1, 3, 20):
            out, lse = m.sparse_attention(q, w, e, s, k, config=m.LaunchConfig(Splits(count, None), 32))
            out, want = out.float(), expected.float()
            error = ((out - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-20)).max().item()
            same = torch.allclose(lse, elog, rtol=1e-5, atol=1e-4)
            print("+".join(pair), heads, count, f"{error:.2e}", same, "OK" if error < 6e-3 and same else "WRONG", flush=True)
