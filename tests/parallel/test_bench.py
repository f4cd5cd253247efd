"""The benchmark of several GPUs, scaled down: its parts run, and measure what they say."""

from __future__ import annotations

from pathlib import Path

from abyssal.parallel.mesh import Mesh
from bench.parallel_h200 import OUTPUT_TOKENS, alone_job, differences, equality_job, on_ranks, slice_job
from tests.support.ranks import Pool
from tests.support.slices import small_slice


def test_a_slice_decodes_on_every_replica(tmp_path: Path, ranks: Pool) -> None:
    folder = str(small_slice("v4-flash", tmp_path))
    for row in ranks.run(slice_job, [("cpu", folder, 2, 200)] * 2, dp=2, ep=2):
        assert row["tokens_per_second"] > 0 and row["median_ms"] > 0 and row["capacity_tokens"] > 0


def test_one_rank_of_several_decodes_by_itself(tmp_path: Path) -> None:
    (row,) = on_ranks(alone_job, Mesh(), "cpu", 4, str(small_slice("v4-flash", tmp_path)), 2, 200)
    assert row["tokens_per_second"] > 0 and row["capacity_tokens"] > 0


def test_tokens_and_logits_of_all_replicas_are_those_of_one(ranks: Pool) -> None:
    prompts = [[5 + (i * j) % 90 for i in range(20)] for j in range(1, 4)]
    ((tokens, one, repeated),) = ranks.run(equality_job, [("cpu", prompts)])
    answers = ranks.run(equality_job, [("cpu", prompts)] * 2, dp=2, ep=2)
    assert sorted(tokens) == [0, 1, 2] and {len(each) for each in tokens.values()} == {OUTPUT_TOKENS}
    assert answers[0][0] | answers[1][0] == tokens and repeated == answers[0][2] + answers[1][2] == 3
    both = {name: answers[0][1][name] | answers[1][1][name] for name in ("float32", "bfloat16")}
    found = differences(one, both)
    assert found["float32"] < 1e-4 and 0 <= found["from_one"] < 1e-3 < found["from_float32"] < 1
    turned = {name: {i: -x for i, x in rows.items()} for name, rows in both.items()}
    assert min(differences(one, turned).values()) > 1
