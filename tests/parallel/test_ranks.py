"""Several ranks compute what one computes: experts, heads and vocabulary shared out, with lengths mixed and replicas idle."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from abyssal import LLM
from abyssal.engine.request import EngineRequest, SamplingParams
from tests.support.cuts import random_cuts
from tests.support.ranks import Pool, Scored, engine_job, facts_job, tensors_job

TOLERANCE = 1e-4  # sums of several ranks round in another order
OPTIONS: dict[str, Any] = {"kv_cache_bytes": 64 << 20, "max_model_len": 2048, "max_num_batched_tokens": 256}
MESHES = {
    "dp2-ep2": {"dp": 2, "ep": 2},
    "tp2": {"tp": 2},
    "dp2-tp2": {"dp": 2, "tp": 2},
    "dp2-tp2-ep4": {"dp": 2, "tp": 2, "ep": 4},
    "dp4-ep4": {"dp": 4, "ep": 4},
    "dp4-ep2": {"dp": 4, "ep": 2},
}
GOLDENS = ("v4_csa_w16", "v4_hca_w128", "v4_slide_w16")
LENGTHS = (70, 1, 133, 5)  # of what replicas are given, in turn


def prompt(length: int, vocab: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, vocab) for _ in range(length)]


def request(name: str, ids: list[int], tokens: int, **params: Any) -> EngineRequest:
    return EngineRequest(name, ids, SamplingParams(max_tokens=tokens, ignore_eos=True, **params))


def spread(mesh: dict[str, int], of_replica: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Every rank's arguments: those of a replica are the same."""
    return [given for given in of_replica for _ in range(mesh.get("tp", 1))]


class One:
    """What one rank computes."""

    def __init__(self, folder: str, **options: Any) -> None:
        self.llm = LLM(folder, device="cpu", num_threads=1, **OPTIONS | options)

    def logits(self, scored: list[Scored]) -> list[Tensor]:
        return [self.llm.logits(*each) for each in scored]

    def tokens(self, requests: list[EngineRequest]) -> dict[str, list[int]]:
        outputs = self.llm.generate([r.prompt_ids for r in requests], [r.params for r in requests])
        return {r.request_id: list(o.outputs[0].token_ids) for r, o in zip(requests, outputs, strict=True)}


def check(pool: Pool, mesh: dict[str, int], folder: str, vocab: int, **options: Any) -> list[dict[str, int]]:
    """Every replica scores prompts of its own, cut at random, and decodes requests of its own: greedy, and drawn with a seed."""
    replicas = mesh.get("dp", 1)
    scored, requests = [], []
    for i in range(replicas):
        ids = prompt(LENGTHS[i], vocab, i)
        scored.append([(ids, random_cuts(len(ids), i, 1)[0])])
        requests.append([
            request(f"{i}-{j}", prompt(3 + 37 * j + i, vocab, 10 * i + j), 3 + 2 * i + j, temperature=j % 2, seed=7) for j in range(i % 2, 3)
        ])  # fmt: skip
    scored[-1] *= 2  # one replica is still at work when the others have nothing left to score
    given = [(OPTIONS | options | {"model": folder}, s, r) for s, r in zip(scored, requests, strict=True)]
    answers = pool.run(engine_job, spread(mesh, given), **mesh)
    one = One(folder, **options)
    for i, (s, r) in enumerate(zip(scored, requests, strict=True)):
        for rank in range(i * mesh.get("tp", 1), (i + 1) * mesh.get("tp", 1)):
            logits, tokens, _ = answers[rank]
            for got, expected in zip(logits, one.logits(s), strict=True):
                torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)
            assert tokens == one.tokens(r)
    one.llm.close()
    return [counts for _, _, counts in answers]


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_logits_and_tokens_are_those_of_one_rank(mesh: dict[str, int], name: str, goldens: Callable[[str], Path], ranks: Pool) -> None:
    check(ranks, mesh, str(goldens(name)), vocab=192)


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_tiny_v4(mesh: dict[str, int], ranks: Pool) -> None:
    """Stored in FP8 and FP4: matrices are cut inside their blocks of scales."""
    check(ranks, mesh, "tiny", vocab=4000)
