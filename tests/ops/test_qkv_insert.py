"""Query and key/value preparation and the window store."""

import pytest
import torch

from abyssal.kv.batch import Chunk, build_batch
from abyssal.kv.pool import KVCache
from abyssal.kv.specs import plan_caches
from abyssal.ops.qkv_insert import qkv_insert
from abyssal.ops.rope import rotate
from tests.support.small_model import small_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("layout", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stores_rotated_rows_and_returns_normed_rotated_queries(layout, dtype):
    torch.manual_seed(0)
    config = small_config([0, 0])
    cache = KVCache(plan_caches(config, layout, layout, "index_fp32"), {"main": 12}, CPU)
    seq = cache.new_sequence()
    assert cache.allocate(seq, 0, 70)
    batch = build_batch(config, cache, [Chunk(list(range(70)), 0, seq)], [], CPU)
    q, kv = torch.randn(70, 4, 32).to(dtype), torch.randn(70, 32).to(dtype)
    window = cache.views["window"]
    out = qkv_insert(q.clone(), kv.clone(), batch.rope["main"], window, 1, batch.stores["window"], 1e-6)

    table = batch.rope["main"]
    stored = window.read(batch.stores["window"].slots[1])
    expected_kv = rotate(kv.float(), table).to(dtype)
    assert torch.equal(stored, expected_kv.to(window.spec.layout.dtype).float())
    normed = (q.float() * (q.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).to(dtype)
    expected_q = rotate(normed.float(), table.unsqueeze(1)).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(out, expected_q, rtol=0, atol=tolerance)
    untouched = window.read(batch.stores["window"].slots[0])
    assert untouched.isnan().all(), "another layer's pages were written"


def test_v41_queries_are_not_normed():
    config = small_config([0])
    cache = KVCache(plan_caches(config, "fp32", "fp32", "index_fp32"), {"main": 4}, CPU)
    seq = cache.new_sequence()
    assert cache.allocate(seq, 0, 3)
    batch = build_batch(config, cache, [Chunk([1, 2, 3], 0, seq)], [], CPU)
    q = torch.full((3, 4, 32), 5.0)
    out = qkv_insert(q.clone(), torch.randn(3, 32), batch.rope["main"], cache.views["window"], 0, batch.stores["window"], None)
    assert torch.equal(out[..., :16], q[..., :16])
