"""Reference pack and unpack."""

import pytest
import torch

from abyssal.kv import codec, layouts

SPECIAL = [0.0, -0.0, 1.0, 1e-45, 3e38, -1.5, 2.0**-126]


@pytest.mark.parametrize("name", ["fp32", "bf16", "index_fp32", "index_bf16"])
def test_round_trip_is_rounding_to_the_stored_type(name):
    layout = layouts.get(name)
    x = torch.randn(9, layout.dim)
    x[0, : len(SPECIAL)] = torch.tensor(SPECIAL)
    data, scales = codec.encode(name, x)
    assert data.shape == (9, layout.data_bytes) and scales.shape == (9, 0) and data.dtype == scales.dtype == torch.uint8
    decoded = codec.decode(name, data, scales)
    expected = x.to(layout.dtype).float()
    assert torch.equal(decoded.view(torch.int32), expected.view(torch.int32)), "bit-exact, sign of zero included"


@pytest.mark.parametrize("entries", [1, 2, 64])
def test_pages(entries):
    x = torch.randn(3, entries, 512)
    pages = codec.pack_pages("bf16", x)
    assert pages.shape == (3, layouts.get("bf16").page_bytes(entries))
    assert torch.equal(codec.unpack_pages("bf16", pages, entries), x.bfloat16().float())
    row = pages[1, layouts.get("bf16").data_offset(entries - 1, entries) :][:1024].view(torch.bfloat16)
    assert torch.equal(row, x[1, entries - 1].bfloat16())


def test_layout_objects_of_other_widths():
    layout = layouts.get("fp32", 96)
    x = torch.randn(2, 5, 96)
    assert torch.equal(codec.unpack_pages(layout, codec.pack_pages(layout, x), 5), x)
