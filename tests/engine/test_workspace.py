"""The largest step, computed on one page before the caches exist; on a GPU, what it takes and what is left."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

from abyssal import LLM, SamplingParams
from abyssal.config import EngineConfig
from abyssal.engine.engine import Engine
from abyssal.engine.workspace import largest_chunks, stand_in_cache, token_counts
from abyssal.errors import ConfigError
from tests.support.families import write_small

GIB = 1 << 30


@pytest.mark.parametrize(
    ("sequences", "budget", "longest", "counts"),
    [
        (1, 96, 4096, [96]),
        (4, 96, 4096, [1, 1, 1, 93]),
        (4, 96, 50, [1, 1, 44, 50]),
        (4, 96, 10, [10, 10, 10, 10]),
        (4, 4, 4096, [1, 1, 1, 1]),
    ],
)
def test_token_counts_fill_the_budget(sequences: int, budget: int, longest: int, counts: list[int]) -> None:
    assert token_counts(sequences, budget, longest) == counts


@pytest.mark.parametrize("family", ["v4", pytest.param("v41", marks=pytest.mark.long)])
def test_the_largest_step_runs_on_one_page_per_bucket(family: str, tmp_path: Path) -> None:
    """Every layer kind at the model's longest context, with no memory for its records, and the engine's caches untouched."""
    config = EngineConfig(
        model=str(write_small(family, tmp_path, seed=1)), device="cpu", kv_cache_bytes=8 << 20, max_num_batched_tokens=64
    )
    runner = Engine(config).runner
    before = {bucket: pool.data.clone() for bucket, pool in runner.cache.pools.items()}
    cache = stand_in_cache(runner.plan, runner.device)
    longest = runner.model_config.max_position
    chunks = largest_chunks(cache, token_counts(5, 64, longest), longest, runner._history)
    assert [chunk.end for chunk in chunks] == [longest] * 5
    logits = runner._compute(chunks, cache, list(range(64)))
    assert logits.shape == (64, runner.model_config.vocab_size)
    for bucket, pool in runner.cache.pools.items():
        assert torch.equal(pool.data, before[bucket]), bucket
        assert cache.pools[bucket].num_pages == 1 and not cache.pools[bucket].data[0].any(), "the zero page stays zero"


def load(cap: float, **options: object) -> LLM:
    """tiny-v4 with at most `cap` bytes of the GPU's memory beyond what is in use now."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return LLM("tiny", device="cuda", gpu_memory_utilization=(total - free + cap) / total, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("gib", [2.0, 1.0, 0.3, 0.05])
def test_m07_a_small_gpu_starts_with_a_stated_limit_or_says_where_memory_went(gib: float) -> None:
    """M07: weights (60 MiB) and little more. Measuring the largest step may itself take more than the cap: memory is not fenced."""
    try:
        llm = load(60 * 2**20 + gib * GIB, max_model_len=8192, max_num_seqs=8)
    except ConfigError as error:
        text = str(error)
        shares = dict(re.findall(r"(\w[\w ,=.]*?) (-?[\d.]+) GiB", text.partition(": ")[2]))
        assert len(shares) == 5 and float(shares["KV cache"]) <= 0 and "lower max_num_batched_tokens" in text, text
        assert gib < 2.0, "two GiB beside the weights are enough"
        return
    with llm:
        sizes = llm.engine.runner.sizes
        assert 0 < sizes.total_bytes <= gib * GIB and llm.engine.info.max_model_len == 8192
        assert len(llm.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


@pytest.mark.gpu
def test_the_largest_real_step_takes_no_more_than_was_set_aside() -> None:
    """With the pool filled to its last byte: prompts of all lengths with logprobs of every token, beside decoding ones."""
    with load(4 * GIB, max_model_len=16384, max_num_seqs=16, max_num_batched_tokens=1024) as llm:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before, aside = torch.cuda.memory_reserved(), llm.engine.runner.step_bytes
        assert aside is not None
        prompts = [[5 + i % 100 for i in range(n)] for n in (1, 300, 1024, 5000, 16000, *[40] * 11)]
        params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0, prompt_logprobs=1)
        outputs = llm.generate(prompts, params)
        assert all(len(output.outputs[0].token_ids) == 20 for output in outputs)
        taken = torch.cuda.max_memory_reserved() - before
        assert 0 < taken <= aside < 4 * GIB, f"steps took {taken} bytes, {aside} were set aside"
