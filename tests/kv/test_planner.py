"""Dividing a budget into pages: what is promised fits, a budget too small says by how much."""

import pytest
import torch

from abyssal.errors import ConfigError
from abyssal.kv.planner import divide_budget, sequence_pages, step_pages
from abyssal.kv.pool import KVCache
from abyssal.kv.specs import plan_caches
from tests.support.small_model import small_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("ratios", [[0, 4, 128], [0], [128, 4]])
@pytest.mark.parametrize("budget", [5 << 20, 40 << 20])
@pytest.mark.parametrize("max_num_seqs", [1, 4])
@pytest.mark.parametrize("step", [1, 7, 128, 150, 300, 700])  # some leave a gap in the states between what they read and store
def test_the_promised_capacity_fits_in_steps_of_the_promised_size(ratios, budget, max_num_seqs, step):
    plan = plan_caches(small_config(ratios), "fp32", "fp32", "index_fp32")
    sizes = divide_budget(plan, budget, max_num_seqs, step, max_model_len=4096)
    assert sizes.total_bytes <= budget
    cache = KVCache(plan, sizes.num_pages, CPU)
    seq = cache.new_sequence()
    end = sizes.capacity_tokens or 3000
    for start in range(0, end, step):
        stop = min(start + step, end)
        assert cache.allocate(seq, start, stop), (start, sizes)
        cache.release_unneeded(seq, stop)


def test_windows_of_all_sequences_fit_at_once():
    plan = plan_caches(small_config([0, 4, 128]), "fp32", "fp32", "index_fp32")
    sizes = divide_budget(plan, 40 << 20, max_num_seqs=8, step_tokens=64, max_model_len=4096)
    assert sizes.num_sequences == 8
    cache = KVCache(plan, sizes.num_pages, CPU)
    for _ in range(8):
        seq = cache.new_sequence()
        for start in range(0, 200, 50):
            assert cache.allocate(seq, start, start + 50)
            cache.release_unneeded(seq, start + 50)


def test_the_state_of_ratio_128_takes_two_pages_per_layer_however_long_the_sequence():
    released = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "sliding_window": 128}
    plan, without = (plan_caches(small_config(r, **released), "v4", "v4", "index_fp8") for r in ([0, 128, 128], [0, 0, 0]))
    assert sequence_pages(plan)["main"] - sequence_pages(without)["main"] == 2 * 2
    assert step_pages(plan, 5000) == {**step_pages(without, 5000), "small": 0}
    cache = KVCache(plan, {"main": 300, "small": 300}, CPU)
    seq = cache.new_sequence()
    for start in range(0, 3000, 500):
        assert cache.allocate(seq, start, start + 500)
        assert cache.used_by_kind["c128_state"] == cache.used_by_kind["c128_sums"] == 2
        cache.release_unneeded(seq, start + 500)


def test_any_number_of_sequences_is_divided_at_once():
    plan = plan_caches(small_config([0, 4, 128]), "fp32", "fp32", "index_fp32")
    many, few = (divide_budget(plan, 5 << 20, count, 64, 4096) for count in (10**18, 1000))
    assert many.num_sequences == few.num_sequences < 1000


def test_no_more_blocks_than_can_be_used():
    plan = plan_caches(small_config([4]), "fp32", "fp32", "index_fp32")
    sizes = divide_budget(plan, 1 << 40, max_num_seqs=2, step_tokens=64, max_model_len=1000)
    assert sizes.num_blocks == 8


def test_too_small_a_budget_names_the_numbers_and_the_least_that_works():
    plan = plan_caches(small_config([0, 4, 128]), "fp32", "fp32", "index_fp32")
    with pytest.raises(ConfigError, match="kv_cache_bytes=1000 .*give at least (\\d+) bytes") as caught:
        divide_budget(plan, 1000, 1, 64, 4096)
    least = int(str(caught.value).split("at least ")[1].split()[0])
    assert divide_budget(plan, least, 1, 64, 4096).num_blocks == 1
    with pytest.raises(ConfigError):
        divide_budget(plan, least - 1, 1, 64, 4096)


def test_windows_of_others_never_take_the_room_of_a_sequence_that_must_fit():
    """The largest length that fits is the same for any `max_num_seqs`, and the windows take what is left."""
    plan = plan_caches(small_config([0, 4, 128]), "fp32", "fp32", "index_fp32")
    budget = 5 << 20
    alone = divide_budget(plan, budget, 1, 64, 1 << 20, must_fit=1 << 20).capacity_tokens
    assert alone > divide_budget(plan, budget, 64, 64, 1 << 20).capacity_tokens
    for tokens in (1, 256, alone // 2, alone, alone + 1, 1 << 20):
        sizes = divide_budget(plan, budget, 64, 64, 1 << 20, must_fit=tokens)
        assert sizes.total_bytes <= budget
        assert sizes.capacity_tokens >= tokens or (tokens > alone and sizes.capacity_tokens == alone)
        assert (sizes.num_sequences > 1) == (tokens <= alone // 2)
