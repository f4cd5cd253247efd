"""The benchmark of several GPUs, scaled down: its parts run, and measure what they say."""

from __future__ import annotations

from pathlib import Path

from bench.parallel_h200 import OUTPUT_TOKENS, slice_job, tokens_job
from tests.support.ranks import Pool
from tests.support.slices import small_slice


def test_a_slice_decodes_on_every_replica(tmp_path: Path, ranks: Pool) -> None:
    folder = str(small_slice("v4-flash", tmp_path))
    for row in ranks.run(slice_job, [("cpu", folder, 2, 200)] * 2, dp=2, ep=2):
        assert row["tokens_per_second"] > 0 and row["median_ms"] > 0 and row["capacity_tokens"] > 0


def test_tokens_of_all_replicas_are_those_of_one(ranks: Pool) -> None:
    prompts = [[5 + (i * j) % 90 for i in range(20)] for j in range(1, 4)]
    (one,) = ranks.run(tokens_job, [("cpu", prompts)])
    first, second = ranks.run(tokens_job, [("cpu", prompts)] * 2, dp=2, ep=2)
    assert sorted(first | second) == [0, 1, 2] and len(one[0]) == OUTPUT_TOKENS
    for index, tokens in (first | second).items():
        assert [token for token, _ in tokens] == [token for token, _ in one[index]]
        assert all(gap >= 0 for _, gap in tokens)
