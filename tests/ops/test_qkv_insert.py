"""Query and key/value preparation and the window store."""

import pytest
import torch
from safetensors.torch import load_file

import abyssal.ops.qkv_insert.triton as kernels
from abyssal.config import RopeConfig
from abyssal.kv import layouts
from abyssal.kv.batch import Chunk, build_batch
from abyssal.kv.pool import KVCache
from abyssal.kv.specs import plan_caches
from abyssal.ops.norm import rms_norm
from abyssal.ops.qkv_insert import qkv_insert
from abyssal.ops.rope import rope_table, rotate
from tests.support.records import DEVICE, ENTRIES, POISON, bf16_steps, new_pool, written
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


# Kernels


def table_of(tokens: int, start: int = 0) -> torch.Tensor:
    return rope_table(torch.arange(start, start + tokens) * 37, RopeConfig(64, 160000.0, None)).to(DEVICE)


def assert_rows_near(got: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> None:
    """Within one bf16 step, or 1e-5 of the row's size in fp32."""
    if dtype == torch.bfloat16:
        assert bf16_steps(got, reference).max() <= 1
    else:
        assert ((got - reference).abs() <= 1e-5 * reference.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("name", ["bf16", "v4", "v41"])
def test_kernel_stores_what_the_codec_encodes(name, eps, dtype):
    """Strided inputs, a token that is not stored, pages out of order; queries normed and rotated in place."""
    torch.manual_seed(0)
    layout, tokens, heads = layouts.get(name), 5, 4
    q = torch.randn(tokens, heads, 1024, device=DEVICE).to(dtype)[..., 256:768]
    kv = (torch.randn(tokens, 768, device=DEVICE) * 3).to(dtype)[:, 128:640]
    kv[1] *= 1e-6
    kv[2, :64] = 0
    table, pool = table_of(tokens), new_pool(layout, 6)
    slots = torch.tensor([23, 4, -1, 0, 10], device=DEVICE)
    expected_q = q.float() if eps is None else rms_norm(q, None, eps).float()
    expected_q = rotate(expected_q.clone(), table.unsqueeze(1)).to(dtype)
    stored = torch.full((tokens, 512), torch.nan, device=DEVICE)
    before = pool.clone()
    out = kernels.qkv_insert(q, kv, table, pool, layout, ENTRIES, slots, eps, stored=stored)
    assert out.data_ptr() == q.data_ptr()
    assert_rows_near(stored, rotate(kv.float(), table).to(dtype).float(), dtype)
    assert torch.equal(pool.cpu(), written(before, layout, slots, stored))
    # The norm may round to the neighbour, and the rotation mixes two values: their size counts, not that of the result.
    pair = expected_q.float().unflatten(-1, (-1, 2)).abs().amax(-1, keepdim=True).expand(-1, -1, -1, 2).flatten(-2)
    assert ((out.float() - expected_q.float()).abs() <= pair * (2**-6 if dtype == torch.bfloat16 else 1e-5)).all()
    if eps is None:
        assert torch.equal(out[..., :448], expected_q[..., :448])


def test_kernel_config_gives_every_head_a_program():
    for tokens in (1, 8, 64, 4096):
        for heads in (4, 64, 128):
            for norm in (True, False):
                config = kernels.qkv_insert_config(tokens, heads, norm)
                assert heads % config.heads_per_program == 0
            assert kernels.qkv_insert_config(tokens, heads, True) == kernels.qkv_insert_config(1, heads, True)
    torch.manual_seed(0)
    q, kv, table = torch.randn(2, 8, 512, device=DEVICE), torch.randn(2, 512, device=DEVICE), table_of(2)
    outs = []
    for per_program in (1, 4, 8):
        layout = layouts.get("v4")
        slots = torch.arange(2, device=DEVICE)
        config = kernels.QkvInsertConfig(per_program, 1)
        outs.append(kernels.qkv_insert(q.clone(), kv, table, new_pool(layout, 1), layout, ENTRIES, slots, 1e-6, config=config))
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["bf16", "v4", "v41", "v41_fp4", "index_bf16", "index_fp8", "index_mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_alone_equals_the_stored_byte_cases(name, dtype, goldens):
    """Every handed byte case, negative zeros, ties and group maxima included."""
    layout = layouts.get(name)
    rows = load_file(goldens("bytes") / "kv_records.safetensors")
    x = rows[f"in{layout.dim}.{'f32' if dtype == torch.float32 else 'bf16'}"].to(DEVICE)
    assert x.dtype == dtype
    pool = new_pool(layout, len(x) // ENTRIES + 1)
    slots = torch.randperm(len(x), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    before = pool.clone()
    kernels.window_store(x, None, pool, layout, ENTRIES, slots)
    assert torch.equal(pool.cpu(), written(before, layout, slots, x))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", ["v4", "v41"])
def test_store_with_rope_and_norm(name, norm):
    torch.manual_seed(0)
    layout, table = layouts.get(name), table_of(3, 1000)
    kv, weight = torch.randn(3, 512, device=DEVICE).bfloat16(), torch.rand(512, device=DEVICE) + 0.5
    stored, pool, slots = torch.empty(3, 512, device=DEVICE), new_pool(layout, 1), torch.tensor([2, -1, 0], device=DEVICE)
    before = pool.clone()
    kernels.window_store(
        kv, table, pool, layout, ENTRIES, slots, norm=weight if norm else None, eps=1e-6, stored=stored
    )  # fmt: skip
    row = rms_norm(kv, weight, 1e-6) if norm else kv
    expected = rotate(row.float(), table)
    pair = expected.unflatten(-1, (-1, 2)).abs().amax(-1, keepdim=True).expand(-1, -1, 2).flatten(-2)
    assert ((stored - expected).abs() <= pair * (2**-6 if norm else 2**-8)).all()
    assert torch.equal(pool.cpu(), written(before, layout, slots, stored))


def test_kernels_of_an_empty_batch_touch_nothing():
    layout = layouts.get("v4")
    pool, none = new_pool(layout, 1), torch.empty(0, 512, device=DEVICE)
    slots = torch.empty(0, dtype=torch.int64, device=DEVICE)
    q = torch.empty(0, 4, 512, device=DEVICE)
    assert kernels.qkv_insert(q, none, table_of(0), pool, layout, ENTRIES, slots, None) is q
    kernels.window_store(none, None, pool, layout, ENTRIES, slots)
    assert (pool == POISON).all()


@pytest.mark.parametrize("name", ["bf16", "v4", "v41"])
def test_kernel_reaches_the_highest_pages_of_a_100_gib_pool(name, tmp_path, monkeypatch):
    """Offsets beyond 32 bits (case H01). The pool is a sparse file."""
    layout, entries = layouts.get(name), 64
    stride = layout.page_bytes(entries)
    count = 100 * 2**30 // stride
    if DEVICE == "cuda":
        pool = torch.empty(count, stride, dtype=torch.uint8, device=DEVICE)
        pool[-2:] = POISON
    else:
        pool = torch.from_file(str(tmp_path / "pool"), shared=True, size=count * stride, dtype=torch.uint8).view(count, stride)
        # The interpreter copies every argument back to where it lies already.
        monkeypatch.setattr(torch.UntypedStorage, "copy_", lambda self, source, non_blocking=None: self)
    slots = torch.tensor([count * entries - 1, (count - 1) * entries - 2], device=DEVICE)
    x = torch.randn(2, 512, device=DEVICE).bfloat16()
    before = pool[-2:].clone()
    kernels.window_store(x, None, pool, layout, entries, slots)
    assert torch.equal(pool[-2:].cpu(), written(before, layout, slots - (count - 2) * entries, x, entries))


def test_other_head_sizes_are_refused_by_name():
    layout = layouts.get("bf16", 96)
    kv, slots = torch.randn(2, 96, device=DEVICE), torch.arange(2, device=DEVICE)
    with pytest.raises(AssertionError, match="not 96; use backend=reference"):
        kernels.window_store(kv, None, new_pool(layout, 1), layout, ENTRIES, slots)
