"""Cache kinds and page sizes."""

import pytest

from abyssal.kv import layouts
from abyssal.kv.planner import block_pages
from abyssal.kv.specs import BLOCK_TOKENS, plan_caches
from abyssal.model_config import parse_model_config
from tests import published_configs
from tests.support.small_model import small_config

RELEASED = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "sliding_window": 128}


def test_kinds_of_a_mixed_model():
    specs = plan_caches(small_config([0, 4, 128, 4], **RELEASED), "fp32", "fp32", "index_fp32").specs
    assert set(specs) == {"window", "c4", "c4_state", "c4_index", "c4_index_state", "c128", "c128_state", "c128_sums"}
    assert specs["window"].layers == (0, 1, 2, 3) and specs["c4"].layers == (1, 3) and specs["c128"].layers == (2,)
    assert (specs["c4_state"].window, specs["window"].window) == (8, 128)
    assert {n for n, s in specs.items() if s.lifetime == "context"} == {"c4", "c4_index", "c128"}
    assert {n for n, s in specs.items() if s.lifetime == "record"} == {"c128_state", "c128_sums"}
    assert specs["c4"].entries_per_page == 64 and specs["c128"].entries_per_page == 2


def test_whole_context_blocks_of_256_tokens():
    plan = plan_caches(small_config([4, 128], **RELEASED), "bf16", "bf16", "index_bf16")
    for spec in plan.specs.values():
        if spec.lifetime == "context":
            assert BLOCK_TOKENS % (spec.ratio * spec.entries_per_page) == 0


@pytest.mark.parametrize("ratios", [[0], [0, 4], [128], [0, 4, 128, 4]])
@pytest.mark.parametrize("dims", [{}, RELEASED, {"head_dim": 96}])
@pytest.mark.parametrize("layout", ["fp32", "bf16"])
def test_every_page_holds_its_entries_and_buckets_are_at_most_three(ratios, dims, layout):
    plan = plan_caches(small_config(ratios, **dims), layout, layout, f"index_{layout}")
    assert len(plan.page_bytes) <= 3
    for spec in plan.specs.values():
        page = plan.page_bytes[spec.bucket]
        assert 1 <= spec.entries_per_page and spec.layout.page_bytes(spec.entries_per_page) <= page
        if spec.lifetime == "context":
            assert page <= 1.03 * spec.layout.page_bytes(spec.entries_per_page), "padding of a whole-context kind"


KV_PAIRS = [("fp32", "fp32"), ("bf16", "bf16"), ("v4", "v4"), ("v41", "v41"), ("v41", "v41_fp4")]
INDEX = ["index_fp32", "index_bf16", "index_fp8", "index_mxfp4"]


def released(name):
    return parse_model_config(getattr(published_configs, name)())


@pytest.mark.parametrize("index", INDEX)
@pytest.mark.parametrize("kv", KV_PAIRS)
@pytest.mark.parametrize("model", ["v4_flash", "v4_pro", "v41_flash"])
def test_padding_of_the_whole_context_kinds_stays_under_3_percent(model, kv, index):
    plan = plan_caches(released(model), *kv, index)
    paid = sum(count * plan.page_bytes[bucket] for bucket, count in block_pages(plan).items())
    lasting = [spec for spec in plan.specs.values() if spec.lifetime == "context"]
    payload = sum(len(s.layers) * BLOCK_TOKENS // s.ratio * s.layout.bytes_per_entry for s in lasting)
    assert payload <= paid < 1.03 * payload
    for spec in plan.specs.values():
        assert spec.layout.page_bytes(spec.entries_per_page) <= plan.page_bytes[spec.bucket]


def test_kinds_of_v41_belong_to_the_source_layers():
    """V4.1 spec 3.5, 3.6: four sources; of the ratio-2 ones the open pair; index keys have no state of their own."""
    specs = plan_caches(released("v41_flash"), "v41", "v41_fp4", "index_mxfp4").specs
    assert {name: spec.layers for name, spec in specs.items() if name != "window"} == {
        "c1": (20,), "c1_index": (20,), "c2": (2, 8, 14), "c2_state": (2, 8, 14), "c2_index": (2, 8, 14),
    }  # fmt: skip
    assert specs["window"].layers == tuple(range(40))
    assert specs["c2_state"].window == 2 and specs["c2_state"].layout == layouts.state_rows(1024)


def test_a_ratio_1_block_of_v41_takes_two_pages():
    plan = plan_caches(released("v41_flash"), "v41", "v41_fp4", "index_mxfp4")
    assert plan.page_bytes == {"main": 36864, "index": 8704}
    assert block_pages(plan) == {"main": 3 + 2, "index": 3 + 2}
    assert plan.specs["c1"].entries_per_page == plan.specs["c2"].entries_per_page == 128


def test_windows_fit_the_pages_of_narrower_records():
    """The page size follows the records that last: windows take as many of theirs as a power of two allows."""
    plan = plan_caches(released("v4_pro"), "v41", "v41_fp4", "index_fp8")
    assert plan.page_bytes == {"main": 18432, "index": 8448, "small": 768}
    assert plan.specs["c4"].entries_per_page == 64 and plan.specs["window"].entries_per_page == 32


def test_first_kept_covers_the_window_and_a_roll_back():
    window = plan_caches(small_config([0], **RELEASED), "fp32", "fp32", "index_fp32").specs["window"]
    assert [window.first_kept(n) for n in (1, 136, 137, 1000)] == [0, 0, 1, 864]


@pytest.mark.parametrize("layout", ["fp32", "bf16", "v4", "v41"])
def test_state_of_ratio_128_is_a_record_of_38912_bytes(layout):
    specs = plan_caches(small_config([0, 128], **RELEASED), layout, layout, "index_bf16").specs
    rows, sums = specs["c128_state"], specs["c128_sums"]
    assert (rows.entries_per_page, sums.entries_per_page) == (8, 1) and {rows.bucket, sums.bucket} == {"main"}
    assert rows.layout.page_bytes(8) + sums.layout.page_bytes(1) == 38912
    assert [list(rows.blocks(n)) for n in (0, 1, 8, 9, 5000)] == [[], [0], [0], [0], [0]]


BUCKETS = {
    ("v4", "v4", "index_fp8"): {"main": 37440, "index": 8640, "small": 1728},
    ("v4", "v4", "index_mxfp4"): {"main": 37440, "index": 4608, "small": 1728},
}


@pytest.mark.parametrize("names", BUCKETS)
def test_released_bucket_sizes(names):
    plan = plan_caches(small_config([0, 4, 128, 4], **RELEASED), *names)
    assert plan.page_bytes == BUCKETS[names]
    state = plan.specs["c4_index_state"].entries_per_page
    assert state == {"index_fp8": 4, "index_mxfp4": 2}[names[2]]
