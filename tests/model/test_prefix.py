"""Logits after a prefix hit are those of the uncached run, for whatever was reused."""

import pytest
import torch

from abyssal import LLM, SamplingParams
from abyssal.errors import RequestError
from tests.checkpoint.build import random_v4_checkpoint
from tests.support.small_model import config_dict


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", kv_cache_bytes=96 << 20, max_model_len=4096) as llm:
        yield llm


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(2, 4000, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_reused_rows_are_nan_and_the_others_those_of_the_uncached_run(llm):
    prompt = tokens(900, seed=1)
    fresh = llm.logits(prompt)
    for length, cut in ((900, None), (700, [300, 400]), (513, [1] * 513)):
        reused = llm.logits(prompt[:length], chunk_sizes=cut, reuse_prefix=True)
        known = (length - 1) // 256 * 256
        assert reused[:known].isnan().all() and not reused[known:].isnan().any()
        torch.testing.assert_close(reused[known:], fresh[known:length], atol=1e-4, rtol=0)


def test_a_prompt_that_parts_from_a_known_one_is_computed_from_the_last_common_block(llm):
    first = tokens(1000, seed=2)
    llm.logits(first)
    for common in (255, 256, 300, 600):
        prompt = first[:common] + tokens(400, seed=common)
        reused = llm.logits(prompt, reuse_prefix=True)
        known = common // 256 * 256
        assert reused[:known].isnan().all()
        torch.testing.assert_close(reused[known:], llm.logits(prompt)[known:], atol=1e-4, rtol=0)


def test_logits_read_the_prefix_cache_only_when_asked(llm):
    prompt = tokens(600, seed=3)
    assert not llm.logits(prompt).isnan().any() and not llm.logits(prompt).isnan().any()
    other = LLM("tiny", enable_prefix_caching=False, kv_cache_bytes=96 << 20, max_model_len=1024)
    with other, pytest.raises(RequestError, match="enable_prefix_caching"):
        other.logits(prompt, reuse_prefix=True)


def test_generation_after_a_hit_gives_the_same_tokens_and_counts_them(llm):
    prompt = tokens(700, seed=4)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM("tiny", enable_prefix_caching=False, kv_cache_bytes=96 << 20, max_model_len=1024) as other:
        alone = other.generate(prompt, params)[0]
    first, second = llm.generate(prompt, params)[0], llm.generate(prompt, params)[0]
    assert alone.outputs[0].token_ids == first.outputs[0].token_ids == second.outputs[0].token_ids
    assert (alone.num_cached_tokens, first.num_cached_tokens, second.num_cached_tokens) == (0, 0, 512)


def test_what_the_first_of_several_outputs_computed_is_no_saving_of_the_others(llm):
    prompt, params = tokens(600, seed=14), SamplingParams(n=3, max_tokens=2, ignore_eos=True, seed=1)
    cold, warm = llm.generate(prompt, params)[0], llm.generate(prompt, params)[0]
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 512)


def test_prompt_logprobs_are_complete_after_a_hit(llm):
    prompt = tokens(600, seed=5)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    first, second = llm.generate(prompt, params)[0], llm.generate(prompt, params)[0]
    assert second.num_cached_tokens == 0 and len(second.prompt_logprobs) == 600
    assert first.prompt_logprobs == second.prompt_logprobs


def test_a_chat_of_twelve_turns_reuses_every_full_block_it_has_in_common(llm):
    """6,000 tokens in all, of which each turn computes only what is new, to the block."""
    with LLM("tiny", kv_cache_bytes=96 << 20, max_model_len=8192) as chat:
        text, previous = tokens(400, seed=6), 0
        for turn in range(12):
            out = chat.generate(text, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]
            assert out.num_cached_tokens == max(0, previous - 1) // 256 * 256, turn
            text = text + out.outputs[0].token_ids
            previous = len(text)  # the last token of an answer is not computed
            text = text + tokens(472, seed=7 + turn)
            pool = chat.engine.stats()
            assert pool.pages_free == pool.pages_total
        assert len(text) > 5900
        kept = chat.engine.stats().pages_cached
        blocks = chat.engine.cache.prefix
        assert blocks is not None and len(blocks) == (previous - 1) // 256 and kept["small"] == 2 * len(blocks)


def test_windows_wider_than_a_block_are_kept_whole(tmp_path):
    random_v4_checkpoint(tmp_path, config_dict([0, 4, 128, 4], sliding_window=300), seed=0, quantised=False)
    with LLM(str(tmp_path), kv_cache_bytes=64 << 20, max_model_len=2048) as llm:
        prompt = [t % 150 + 2 for t in tokens(900, seed=8)]
        fresh = llm.logits(prompt)
        reused = llm.logits(prompt, reuse_prefix=True)
        assert reused[:768].isnan().all()
        torch.testing.assert_close(reused[768:], fresh[768:], atol=1e-4, rtol=0)
