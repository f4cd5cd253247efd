"""Several ranks compute what one computes: experts, heads and vocabulary shared out, with lengths mixed and replicas idle."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from abyssal import LLM
from abyssal.engine.request import EngineRequest, SamplingParams
from abyssal.parallel.ranks import exchange
from tests.checkpoint.build import random_v4_checkpoint
from tests.support.cuts import random_cuts
from tests.support.ranks import Pool, Scored, decoding_job, engine_job, facts_job, preempted_job, row_by_row_job, tensors_job
from tests.support.small_model import config_dict

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
    return [
        5 if token == 4 else token for token in (rng.randrange(2, vocab) for _ in range(length))
    ]  # 4: an image, in V4.1's goldens


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


def cases(usual: dict[str, tuple[str, ...]], names: tuple[str, ...]) -> list[Any]:
    """Every mesh with every model; what is not `usual` only in the long run."""
    return [
        pytest.param(MESHES[mesh], name, id=f"{mesh}-{name}", marks=() if name in usual.get(mesh, ()) else pytest.mark.long)
        for mesh in MESHES
        for name in names
    ]


USUAL = {
    "dp2-ep2": ("v4_csa_w16", "v4_hca_w128"),
    "tp2": ("v4_csa_w16", "v4_slide_w16"),
    "dp2-tp2-ep4": ("v4_csa_w16",),
    "dp4-ep2": ("v4_csa_w16",),
}


@pytest.mark.parametrize(("mesh", "name"), cases(USUAL, GOLDENS))
def test_logits_and_tokens_are_those_of_one_rank(
    mesh: dict[str, int], name: str, goldens: Callable[[str], Path], ranks: Pool
) -> None:
    check(ranks, mesh, str(goldens(name)), vocab=192)


@pytest.mark.parametrize(("mesh", "name"), cases({"dp2-ep2": ("tiny",), "tp2": ("tiny",)}, ("tiny",)))
def test_tiny_v4(mesh: dict[str, int], name: str, ranks: Pool) -> None:
    """Stored in FP8 and FP4: matrices are cut inside their blocks of scales."""
    counts = check(ranks, mesh, name, vocab=4000)
    (alone,) = ranks.run(engine_job, [({"model": name, **OPTIONS}, [], [])])
    whole, part = alone[2]["weights"], counts[0]["weights"]
    assert part < (0.9 if mesh.get("tp", 1) == 1 else 0.75) * whole, "a rank has its part of the weights only"


@pytest.mark.parametrize("mesh", [{"dp": 2, "ep": 2}, {"dp": 4, "ep": 4}], ids=["dp2-ep2", "dp4-ep4"])
def test_batch_invariant_logits_have_the_bits_of_one_rank(mesh: dict[str, int], tmp_path: Path, ranks: Pool) -> None:
    """Replicas of several and of no tokens share 8 experts, of which a token takes 4: where ranks add up parts, bits differ."""
    changes = {"n_routed_experts": 8, "num_experts_per_tok": 4, "num_hash_layers": 1}
    random_v4_checkpoint(tmp_path, config_dict([0, 4, 128], **changes), seed=5, quantised=False)
    options = OPTIONS | {"model": str(tmp_path)}
    scored = [[(prompt(n, 150, n), [n - n // 3, n // 3])] for n in (40, 9, 3, 21)[: mesh["dp"]]]
    scored[0] *= 2  # the others have nothing left by then
    (expected,) = ranks.run(row_by_row_job, [(options, list(chain(*scored)), True)])
    for invariant in (True, False):
        answers = ranks.run(row_by_row_job, [(options, each, invariant) for each in scored], **mesh)
        equal = [torch.equal(a, b) for a, b in zip(chain(*answers), expected, strict=True)]
        assert all(equal) if invariant else not any(equal)


@pytest.mark.parametrize("mesh", [{"dp": 2, "ep": 2}, {"dp": 2, "tp": 2, "ep": 4}], ids=["dp2-ep2", "dp2-tp2-ep4"])
def test_a_replica_without_anything_to_do_takes_part(mesh: dict[str, int], goldens: Callable[[str], Path], ranks: Pool) -> None:
    folder = str(goldens("v4_csa_w16"))
    options = OPTIONS | {"model": folder}
    scored = [(prompt(45, 192, 3), [44, 1])]
    requests = [request("a", prompt(9, 192, 4), 5, temperature=0)]
    answers = ranks.run(engine_job, spread(mesh, [(options, [], []), (options, scored, requests)]), **mesh)
    one = One(folder)
    for logits, tokens, _ in answers[mesh.get("tp", 1) :]:
        torch.testing.assert_close(logits[0], one.logits(scored)[0], rtol=0, atol=TOLERANCE)
        assert tokens == one.tokens(requests)
    one.llm.close()


@pytest.mark.parametrize(
    "mesh",
    [MESHES["dp2-ep2"], MESHES["dp4-ep2"], pytest.param(MESHES["dp2-tp2-ep4"], marks=pytest.mark.long)],
    ids=["dp2-ep2", "dp4-ep2", "dp2-tp2-ep4"],
)
def test_steps_in_fixed_shapes(mesh: dict[str, int], goldens: Callable[[str], Path], ranks: Pool) -> None:
    """Replicas of 3 and 1 sequences, with an abort; one is idle, prefills in chunks beside the other's steps, and is idle again."""
    folder = str(goldens("v4_csa_w16"))
    options = OPTIONS | {"model": folder, "max_num_batched_tokens": 48, "max_num_seqs": 5}
    busy = [request(f"a{i}", prompt(3 + 9 * i, 192, i), 60 + i, temperature=i % 2, seed=5) for i in range(3)]
    short, late = (request(name, prompt(n, 192, n), 9, temperature=0) for name, n in (("b", 30), ("c", 115)))
    given: list[tuple[Any, ...]] = [(options, busy, {40: "a1"}), (options, [short], {30: late})]
    given += [(options, [], {}), (options, [], {})][: mesh["dp"] - 2]
    answers = ranks.run(decoding_job, spread(mesh, given), **mesh)
    one, size = One(folder), mesh.get("tp", 1)
    for rank, (tokens, _) in enumerate(answers):
        expected = one.tokens([[*busy], [short, late], [], []][rank // size])
        for name in tokens.keys() & {"a1"}:
            assert 30 < len(tokens[name]) < 60
            expected[name] = expected[name][: len(tokens[name])]
        assert tokens == expected
    one.llm.close()
    first, second = answers[0][1], answers[size][1]
    assert [common for _, common in first] == [common for _, common in second], "one shape for all"
    pairs = [(mine, theirs, common) for (mine, common), (theirs, _) in zip(first, second, strict=True)]
    assert all(common == (max(a[0], b[0]), max(a[1], b[1])) for a, b, common in pairs if common is not None)
    idle, none = (0, 0), (-1, -1)
    rows, lengths = ((4, 32), (1, 64), (4, 64)), ((4, 64), (1, 2048), (4, 2048))  # one replica brings the rows, one the length
    assert {rows, lengths, ((4, 64), idle, (4, 64)), ((1, 2048), idle, (1, 2048)), ((4, 64), none, None)} <= set(pairs)
    assert all(common is not None for a, b, common in pairs if -1 not in (*a, *b))


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "ep": 2}], ids=["tp2", "dp2-ep2"])
def test_preempted_sequences(mesh: dict[str, int], goldens: Callable[[str], Path], ranks: Pool) -> None:
    """Pages run out. Whether to copy or to compute again is one decision of a replica, though its ranks measure different speeds."""
    folder = str(goldens("v4_csa_w16"))
    options = {"model": folder, "max_model_len": 512, "max_num_batched_tokens": 64, "kv_cache_bytes": 3 << 19}
    options["enable_prefix_caching"] = False
    given = [
        (options, [request(f"{replica}-{i}", prompt(230 + i, 192, i), 40, temperature=0) for i in range(4)])
        for replica in range(mesh.get("dp", 1))
    ]
    answers = ranks.run(preempted_job, spread(mesh, given), **mesh)
    one = One(folder)
    for i, (tokens, counts) in enumerate(answers):
        assert tokens == one.tokens(given[i // mesh.get("tp", 1)][1])
        assert counts["preemptions"] > 0
        if "tp" in mesh:
            assert counts == answers[0][1] and counts["swapped"] > 0, "the first rank wants to copy"
    one.llm.close()


@pytest.mark.gpu
def test_a_graph_replays_an_exchange(tmp_path: Path) -> None:
    """By NCCL, of one rank with itself: the second replay carries what the inputs hold then. Rows without experts come back too.

    The group can be destroyed once the graph is gone; before, it would wait for ever.
    """
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "ranks"), 1), rank=0, world_size=1)
    x, ids = torch.zeros(4, 16, device="cuda", dtype=torch.bfloat16), torch.full((4, 2), -1, device="cuda", dtype=torch.int32)
    weights = torch.zeros(4, 2, device="cuda")

    def compute() -> Tensor:
        return exchange(
            x,
            ids,
            weights,
            [4],
            dist.group.WORLD,
            lambda x, ids, w: x.float() * w.sum(1, keepdim=True) + ids.sum(1, keepdim=True),
        )

    graph = torch.cuda.CUDAGraph()
    try:
        compute()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = compute()
        for value in (1, 2):
            x.fill_(value)
            ids[:3] = 10 * value
            weights.fill_(0.5)
            graph.replay()
            assert out.tolist() == [[21.0 * value] * 16] * 3 + [[value - 2.0] * 16]
    finally:
        del graph
        dist.destroy_process_group()


def test_facts_of_a_replica(ranks: Pool) -> None:
    """Data of the first rank, whatever its size; the smallest number of all ranks."""
    for size in (0, 1, 4095, 4096, 4097, 100_000):
        data = [random.Random(size + replica).randbytes(size) for replica in range(2)]
        given = [(data[0], 7, True), (b"other", 5, False), (data[1], 9, False), (b"", 6, True)]
        assert ranks.run(facts_job, given, dp=2, tp=2) == [(data[0], 5, True)] * 2 + [(data[1], 5, False)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_a_replica(dtype: torch.dtype, ranks: Pool) -> None:
    """Embedding by parts of the vocabulary, its first and last ids; sums and rows one beside another; and no rows at all."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(12, 5, generator=generator).to(dtype)
    for ids in (torch.tensor([0, 11, 2, 3, 5, 6, 8, 9, 4]), torch.empty(0, dtype=torch.int64)):
        partial = [torch.randn(len(ids), 3, generator=generator).to(dtype) for _ in range(4)]
        answers = ranks.run(tensors_job, [(table, ids, part) for part in partial], tp=4)
        for embedded, total, gathered in answers:
            assert torch.equal(embedded, table[ids])
            assert torch.equal(total, answers[0][1]), "the same bits on each rank"
            torch.testing.assert_close(
                total, sum(partial, torch.zeros(())), rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-6
            )
            assert torch.equal(gathered, torch.cat(partial, dim=1))


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("name", ["v41_csa2_w16", "v41_engram_w16"])
def test_v41(mesh: dict[str, int], name: str, goldens: Callable[[str], Path], ranks: Pool) -> None:
    check(ranks, mesh, str(goldens(name)), vocab=192)
