"""Record layouts: sizes and places in a page."""

import pytest
import torch

from abyssal.errors import ConfigError
from abyssal.kv import layouts

SIZES = {
    "fp32": 2048, "bf16": 1024, "v4": 584, "v41": 528, "v41_fp4": 288,
    "index_fp32": 512, "index_bf16": 256, "index_fp8": 132, "index_mxfp4": 68,
}  # fmt: skip
PAGES_OF_64 = {"v4": 37440, "v41": 33792, "v41_fp4": 18432, "index_fp8": 8448, "index_mxfp4": 4352}


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_sizes(name, size):
    layout = layouts.get(name)
    assert layout.bytes_per_entry == size
    assert layout.page_bytes(64) >= 64 * size and layout.page_bytes(64) % layout.page_align == 0
    assert layout.page_bytes(0) == 0


@pytest.mark.parametrize(("name", "size"), PAGES_OF_64.items())
def test_page_sizes(name, size):
    assert layouts.get(name).page_bytes(64) == size


def test_packed_layouts_exist_for_their_own_width_only():
    with pytest.raises(ConfigError, match="'v4' stores 512 values per entry, not 96"):
        layouts.get("v4", 96)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("entries", [1, 2, 64])
def test_rows_do_not_overlap_and_stay_in_the_page(name, entries):
    layout = layouts.get(name)
    spans = [(layout.data_offset(i, entries), layout.data_bytes) for i in range(entries)]
    spans += [(layout.scale_offset(i, entries), layout.scale_bytes) for i in range(entries) if layout.scale_bytes]
    covered = [b for start, size in spans for b in range(start, start + size)]
    assert len(covered) == len(set(covered)) == entries * layout.bytes_per_entry
    assert max(covered) < layout.page_bytes(entries)


def test_offsets_are_not_32_bit():
    assert layouts.get("fp32").data_offset(2**21, 2**22) == 2**32


def test_other_widths():
    assert layouts.get("bf16", 96).bytes_per_entry == 192
    assert layouts.state_rows(2048).bytes_per_entry == 8192 and layouts.state_rows(8).dtype == torch.float32


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="'fp16'.*fp32.*bf16"):
        layouts.get("fp16")
