"""Records back to values: every layout, any byte, whole pages and lists of entries; the kernel equals the reference bit for bit."""

import pytest
import torch
from safetensors.torch import load_file

import abyssal.ops.dequant_pages.triton as kernels
from abyssal.kv import codec, layouts
from abyssal.ops.dequant_pages import dequant_pages
from tests.support.records import DEVICE, ENTRIES, new_pool

LAYOUTS = ["fp32", "bf16", "v4", "v41", "v41_fp4", "index_bf16", "index_fp8", "index_mxfp4"]


def random_pool(name: str, pages: int, entries: int) -> torch.Tensor:
    """Pages of random bytes: every code and every scale occurs, NaN ones too."""
    torch.manual_seed(0)
    pool = new_pool(layouts.get(name), pages, entries)
    return pool.copy_(torch.randint(0, 256, pool.shape, dtype=torch.uint8))


@pytest.mark.parametrize("name", LAYOUTS)
def test_reference_reads_what_was_packed(name):
    torch.manual_seed(0)
    layout = layouts.get(name)
    x = torch.randn(3, ENTRIES, layout.dim)
    pool = codec.pack_pages(layout, x)
    decoded = codec.unpack_pages(layout, pool, ENTRIES)
    pages = torch.tensor([2, 0])
    assert torch.equal(dequant_pages(pool, layout, ENTRIES, pages, whole_pages=True, dtype=torch.float32), decoded[pages])
    slots = torch.tensor([5, -1, 11, 0], dtype=torch.int32)
    got = dequant_pages(pool, layout, ENTRIES, slots, whole_pages=False)
    assert torch.equal(got[[0, 2, 3]], decoded.flatten(0, 1)[[5, 11, 0]].bfloat16()) and (got[1] == 0).all()


@pytest.mark.parametrize("whole_pages", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_kernel_equals_the_reference_for_any_byte(name, whole_pages):
    layout, entries = layouts.get(name), 8
    pool = random_pool(name, 4, entries)
    where = [3, 1] if whole_pages else [31, 8, -1, 17, 0, 26, 5, 14, 23]
    index = torch.tensor(where, dtype=torch.int32, device=DEVICE)
    dtype = torch.float32 if name == "index_fp8" else torch.bfloat16  # NaN bits of that scale: one rounding less to agree on
    expected = dequant_pages(pool.cpu(), layout, entries, index.cpu(), whole_pages=whole_pages, dtype=dtype)
    got = kernels.dequant_pages(pool, layout, entries, index, whole_pages=whole_pages, dtype=dtype)
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "stored"),
    [("v4", "v4_584"), ("v4", "v4_584_qatfloor"), ("v41", "v41_528"), ("v41_fp4", "v41fp4_288"), ("index_fp8", "idxfp8_132")],
)
def test_kernel_reads_pages_of_either_scale_rule(name, stored, goldens):
    records = load_file(goldens("bytes") / "kv_records.safetensors")
    layout, rows = layouts.get(name), records[f"{stored}.bf16"]
    rows = rows[: len(rows) // 8 * 8]
    data, scales = rows[:, : layout.data_bytes], rows[:, layout.data_bytes :]
    pool = torch.cat([data.reshape(len(rows) // 8, -1), scales.reshape(len(rows) // 8, -1)], 1).to(DEVICE)
    where = torch.arange(len(pool), device=DEVICE)
    got = kernels.dequant_pages(pool, layout, 8, where, whole_pages=True, dtype=torch.float32)
    expected = codec.decode(layout, data, scales)
    assert torch.equal(got.flatten(0, 1).cpu().view(torch.int32), expected.view(torch.int32))


def test_kernel_fills_a_workspace_and_takes_nothing():
    layout, pool = layouts.get("v4"), random_pool("v4", 2, ENTRIES)
    out = torch.full((ENTRIES, 512), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.full((ENTRIES,), -1, dtype=torch.int32, device=DEVICE)
    assert kernels.dequant_pages(pool, layout, ENTRIES, slots, whole_pages=False, out=out) is out and (out == 0).all()
    none = slots[:0]
    assert kernels.dequant_pages(pool, layout, ENTRIES, none, whole_pages=True).shape == (0, ENTRIES, 512)
    with pytest.raises(AssertionError, match="out is"):
        kernels.dequant_pages(pool, layout, ENTRIES, slots, whole_pages=True, out=out)


def test_kernel_config_grows_with_the_work():
    assert kernels.dequant_config(8, 512) == kernels.DequantConfig(1)
    assert kernels.dequant_config(1 << 20, 512) == kernels.DequantConfig(4)
    assert kernels.dequant_config(1 << 20, 128) == kernels.DequantConfig(16)
