"""Decode steps of fixed shapes, run on the CPU without a graph: the tokens of the ordinary steps."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from abyssal.checkpoint.rows import RowTable
from abyssal.engine import engine as engine_module
from abyssal.engine import runner
from abyssal.engine.decoder import Decoder, buckets
from abyssal.engine.flight import Flight
from abyssal.engine.request import EngineRequest, RequestUpdate, SamplingParams
from abyssal.engine.sampler import SamplerState, sample_plain
from abyssal.engine.sequence import Sequence
from abyssal.errors import EngineDeadError
from abyssal.kv.batch import Chunk, Drawn
from abyssal.kv.pool import NO_PAGE
from abyssal.model.moe import MoE
from abyssal.ops._kernels import KernelOps
from abyssal.ops._reference import ReferenceOps
from abyssal.ops.engram import row_values
from tests.engine import test_engine
from tests.engine.test_engine import MIB, alone, assert_drained, drain, engine, greedy, prompt
from tests.model.test_kernels import v4, v41
from tests.support.families import FAMILIES, write_small
from tests.support.stepping import Side, decoding

LENGTHS = (1, 2, 3, 4, 5, 60, 127, 128, 129, 255, 256, 257, 300, 511)
POISON = 0xFF  # NaN in every float format of the engine


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(request.param, tmp_path_factory.mktemp("small"), seed=3)


def test_buckets() -> None:
    assert buckets(1, 2, 64) == [1, 2, 4, 8, 16, 32, 64]
    assert buckets(1, 2, 48) == [1, 2, 4, 8, 16, 32, 48]
    assert buckets(1, 2, 1) == [1] and buckets(8192, 4, 5000) == [5000]
    assert buckets(8192, 4, 1 << 20) == [8192, 32768, 131072, 524288, 1 << 20]


def test_sequences_of_all_lengths_with_aborts(folder: Path) -> None:
    requests = {f"r{i}": (prompt(n, i), greedy(8 + i)) for i, n in enumerate(LENGTHS)}
    expected = alone(folder, requests)
    eng = decoding(engine(folder, max_num_seqs=14, max_model_len=640))
    for name, (ids, params) in requests.items():
        eng.add(EngineRequest(name, ids, params))
    doomed = {"r3", "r9", "r13"}

    def abort_some(step: int) -> None:
        if step == 30:
            for name in doomed:
                eng.abort(name)

    got = drain(eng, abort_some)
    assert_drained(eng)
    for name in requests:
        assert got[name] == expected[name] if name not in doomed else got[name] == expected[name][: len(got[name])]


def test_zero_pages_stay_zero(folder: Path) -> None:
    """Rows without a sequence write nowhere; the page that stands for no page above all."""
    eng = decoding(engine(folder, max_num_seqs=8, max_model_len=640))
    for i in range(5):
        eng.add(EngineRequest(f"r{i}", prompt(130 + i, i), greedy(140)))
    drain(eng)
    assert all(not pool.data[NO_PAGE].any() for pool in eng.cache.pools.values())
    before = [pool.data.clone() for pool in eng.cache.pools.values()]
    assert eng.runner.decoder is not None
    assert eng.runner.decoder([]).shape == (0, eng.info.model_vocab_size)
    assert all(torch.equal(old, pool.data) for old, pool in zip(before, eng.cache.pools.values(), strict=True))


def test_rows_without_a_sequence_have_no_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts leave out ids below 0; every other row has its own token's."""
    eng = decoding(engine(folder, max_num_seqs=8, max_model_len=640))
    for i in range(3):
        eng.add(EngineRequest(f"r{i}", prompt(10 + i, i), greedy(6)))
    seen: list[list[int]] = []
    experts = MoE.__call__

    def record(self: MoE, x: Tensor, token_ids: Tensor) -> Tensor:
        seen.append(token_ids.tolist())
        return experts(self, x, token_ids)

    monkeypatch.setattr(MoE, "__call__", record)
    drain(eng)
    decoded = [ids for ids in seen if len(ids) == 4]
    assert decoded and all(ids[3] == -1 and min(ids[:3]) >= 0 for ids in decoded)


@pytest.mark.parametrize("size", [4, 8])
def test_f05_rows_without_a_sequence_write_nothing(size: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences in a shape of 4 or 8, then a step of none, with NaN in every page that nobody holds (case F05)."""
    requests = {f"r{i}": (prompt(125 + i, i), greedy(8)) for i in range(3)}
    expected = alone(folder, requests)
    eng = decoding(engine(folder, max_num_seqs=size, max_model_len=640, kv_cache_bytes=2 * MIB, enable_prefix_caching=False))
    assert eng.runner.decoder is not None
    eng.runner.decoder.batches = [size]
    counts: list[int] = []
    compute = Decoder._compute

    def surrounded(self: Decoder, count: int, capacity: int) -> None:
        for pool in self.cache.pools.values():
            pool.data[pool._free] = POISON
        compute(self, count, capacity)
        assert all((pool.data[pool._free] == POISON).all() and not pool.data[NO_PAGE].any() for pool in self.cache.pools.values())
        counts.append(count)

    monkeypatch.setattr(Decoder, "_compute", surrounded)
    for _ in range(2):
        for name, (ids, params) in requests.items():
            eng.add(EngineRequest(name, ids, params))
        assert drain(eng) == expected
        assert_drained(eng)
        assert eng.runner.decoder([]).shape == (0, eng.info.model_vocab_size)
    assert set(counts) == {size} and len(counts) > 2 * 7


class Reads(TorchDispatchMode):
    """Notes the memory that operations read and none of them made, constants of the code aside."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}  # held, so that no later one gets its address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.lift_fresh.default:
            self.outside |= {address: tensor for address, tensor in _memory((args, kwargs)) if address not in self._made}
        result = func(*args, **(kwargs or {}))
        self._made |= {address: tensor for address, tensor in _memory(result) if address not in self.outside}
        return result


def _memory(tree: Any) -> list[tuple[int, Tensor]]:
    return [(leaf.untyped_storage().data_ptr(), leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.numel()]


def test_f03_every_step_of_a_shape_reads_the_same_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a capture reads is read by every replay: nothing that later steps are given lies elsewhere.

    One prompt 50 times among others, with the same answer each time (case F03).
    """
    same = (prompt(60, 0), greedy(8))
    requests = {f"{i}": same if i % 2 else (prompt(1 + 5 * i % 140, i), greedy(4 + i % 7)) for i in range(100)}
    requests["last"] = (prompt(7, 100), greedy(16))  # alone at the end, in another shape
    (expected,) = alone(folder, {"same": same}).values()
    compute = Decoder._compute
    steps: Counter[tuple[int, ...]] = Counter()
    known: dict[tuple[int, ...], dict[int, Tensor]] = {}  # held, so that nothing else gets their addresses

    def record(self: Decoder, *shape: int) -> None:
        steps[shape] += 1
        if steps[shape] == 1 or steps[shape] > 4:  # the first makes constants; to watch a step takes long
            compute(self, *shape)
            return
        with Reads() as reads:
            compute(self, *shape)
        given = [self._inputs, self.tables.all_pages, *(pool.data for pool in self.cache.pools.values())]
        assert {tensor.data_ptr() for tensor in given} <= reads.outside.keys() == known.setdefault(shape, reads.outside).keys()

    monkeypatch.setattr(Decoder, "_compute", record)
    eng = decoding(engine(folder, max_num_seqs=4, max_num_batched_tokens=512, max_model_len=640))
    for name, (ids, params) in requests.items():
        eng.add(EngineRequest(name, ids, params))
    got = drain(eng)
    assert [got[f"{i}"] for i in range(1, 100, 2)] == [expected] * 50
    assert len(known) > 1 and max(steps.values()) > 50


@pytest.mark.parametrize("cached", [True, False])
def test_f07_32_copies_of_a_prompt_together(cached: bool, ahead: Path) -> None:
    """With and without a prefix index (case F07)."""
    ids, params = prompt(300, 1), greedy(64)
    (expected,) = alone(ahead, {"a": (ids, params)}).values()
    options = {"max_num_seqs": 32, "max_num_batched_tokens": 1024, "kv_cache_bytes": 64 * MIB, "max_model_len": 640}
    eng = decoding(engine(ahead, enable_prefix_caching=cached, **options))
    for i in range(32):
        eng.add(EngineRequest(f"r{i}", ids, params))
    assert drain(eng) == {f"r{i}": expected for i in range(32)}
    stats = eng.stats()
    assert stats.num_preemptions == 0 and (stats.cached_tokens > 0) == cached
    assert_drained(eng)


@pytest.mark.long  # minutes of interpreted kernels
@pytest.mark.timeout(1800)
@pytest.mark.skipif(torch.cuda.is_available(), reason="see test_graphs.py")
@pytest.mark.parametrize(("write", "layout"), [(v4, "v4"), (v41, "v41")], ids=["v4", "v41"])
def test_kernels_in_fixed_shapes(
    write: Callable[[Path], None], layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of ordinary steps by the same kernels: for a short context, where only the fixed shape scores, then for a mixed step."""
    write(tmp_path)
    prompts = [prompt(140, 1), prompt(140, 2)]
    options = {
        "device": "cpu",
        "dtype": "bfloat16",
        "kv_layout": layout,
        "kv_cache_bytes": 16 * MIB,
        "max_model_len": 1024,
        "max_num_seqs": 3,
    }
    reference = Side(tmp_path, prompts, **options)
    monkeypatch.setattr(runner, "select_ops", lambda _, model, caches, device: KernelOps("triton", model, caches, 64, device))
    ordinary, fixed = (Side(tmp_path, prompts, **options) for _ in range(2))
    decoding(fixed.llm.engine)
    reference.step([127, 10])
    for side in (ordinary, fixed):
        side.take_over(reference)
    for counts in ([0, 1], [1, 1]):
        expected, got = ordinary.step(counts), fixed.step(counts)
        assert expected.keys() == got.keys()
        for key, logits in expected.items():
            torch.testing.assert_close(got[key], logits, rtol=0, atol=1e-4 * float(logits.std()))
    for (bucket, pool), other in zip(ordinary.cache.pools.items(), fixed.cache.pools.values(), strict=True):
        assert torch.equal(pool.data, other.data), bucket
    for side in (reference, ordinary, fixed):
        side.llm.close()


CHECKS = [
    test_engine.test_running_out_of_pages_preempts_and_changes_no_token,
    test_engine.test_min_tokens_and_stop_ids,
    *[partial(test_engine.test_d03_a_preempted_request_reports_every_token_once, after=after) for after in (1, 128)],
    pytest.param(partial(test_engine.test_d03_a_preempted_request_reports_every_token_once, after=10), marks=pytest.mark.long),
    partial(test_engine.test_one_sequence_fills_the_cache_to_its_last_token, budget=48, prompt_tokens=500),
]


@pytest.mark.parametrize("check", CHECKS)
def test_what_holds_for_ordinary_steps(
    check: Callable[[Path], None], ahead: Path, monkeypatch: pytest.MonkeyPatch, flights: list[int]
) -> None:
    """Tests of the engine, with steps that are launched one ahead: preempted, aborted and ended while one is under way."""
    plain = test_engine.engine
    monkeypatch.setattr(test_engine, "engine", lambda *args, **options: decoding(plain(*args, **options)))
    check(ahead)
    assert flights


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without n-gram tables: the host need not know a token before the next step."""
    return write_small("v4", tmp_path_factory.mktemp("ahead"), seed=3)


@pytest.fixture
def flights(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Receives the number of sequences of each step that takes its tokens from one under way."""
    following: list[int] = []
    drawn_for = Flight.drawn_for

    def record(self: Flight, sequences: list[Sequence]) -> Drawn | None:
        drawn = drawn_for(self, sequences)
        if drawn is not None:
            following.append(len(sequences))
        return drawn

    monkeypatch.setattr(Flight, "drawn_for", record)
    return following


def test_sampled_tokens_with_requests_of_all_kinds(ahead: Path, flights: list[int]) -> None:
    """Some follow from logits alone, some do not, and at the end those that do are left."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.7, "top_k": 5}, {"temperature": 0.8, "top_p": 0.7},
        {"temperature": 1.2, "min_p": 0.1, "top_k": 20, "top_p": 0.9}, {"temperature": 1.0, "min_tokens": 10},
        {"temperature": 1.0, "frequency_penalty": 1.0, "max_tokens": 12}, {"temperature": 0, "logprobs": 2, "max_tokens": 9},
        {"temperature": 1.0, "logit_bias": {5: 3.0}, "max_tokens": 7},
    ]  # fmt: skip
    requests = {
        f"r{i}": (prompt(5 + i, i), SamplingParams(**({"seed": i, "max_tokens": 40} | kind))) for i, kind in enumerate(kinds)
    }
    expected = alone(ahead, requests)
    eng = decoding(engine(ahead, max_num_seqs=9, max_model_len=640))
    for name, (ids, params) in requests.items():
        eng.add(EngineRequest(name, ids, params))
    assert drain(eng) == expected
    assert_drained(eng)
    assert len(flights) > 20


def test_a_stop_while_the_next_step_is_under_way(ahead: Path, flights: list[int]) -> None:
    """The surplus token is dropped, the others of the batch notice nothing, and the pages can be used at once."""
    requests = {f"r{i}": (prompt(40 + i, i), greedy(30)) for i in range(4)}
    free = alone(ahead, requests)
    stop = free["r2"][10]
    requests["r2"] = (requests["r2"][0], greedy(30, stop_token_ids=[stop]))
    eng = decoding(engine(ahead, max_num_seqs=4, max_model_len=640))
    for name, (ids, params) in requests.items():
        eng.add(EngineRequest(name, ids, params))
    eng.add(EngineRequest("late", *requests["r0"]))  # takes the place of the one that stops
    got = drain(eng)
    assert got.pop("late") == free["r0"]
    free["r2"] = free["r2"][: free["r2"].index(stop) + 1]
    assert got == free
    assert 4 in flights
    assert_drained(eng)


def test_unusable_logits_and_an_abort_in_a_step_under_way(
    ahead: Path, monkeypatch: pytest.MonkeyPatch, flights: list[int]
) -> None:
    requests = {name: (prompt(9 + i, i), greedy(30)) for i, name in enumerate("abc")}
    expected = alone(ahead, requests)
    calls = 0

    def spoil(logits: torch.Tensor, states: list[SamplerState], in_flight: list[int], largest: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        spoilt = logits.index_fill(0, torch.tensor([0]), torch.nan) if calls == 7 else logits
        return sample_plain(spoilt, states, in_flight, largest)

    monkeypatch.setattr(engine_module, "sample_plain", spoil)
    eng = decoding(engine(ahead))
    for name, (ids, params) in requests.items():
        eng.add(EngineRequest(name, ids, params))
    updates: list[RequestUpdate] = []
    for step in itertools.count():
        updates += eng.step()
        if step == 15:
            eng.abort("c")
        if not eng.has_unfinished():
            break
    tokens = {name: [t for u in updates if u.request_id == name for t in u.token_ids] for name in "abc"}
    assert [u.request_id for u in updates if u.error] == ["a"] and "no usable logits" in str(
        next(u.error for u in updates if u.error)
    )
    assert tokens["a"] == expected["a"][:6] and tokens["b"] == expected["b"]
    assert 10 < len(tokens["c"]) < 20 and tokens["c"] == expected["c"][: len(tokens["c"])]
    assert flights
    eng.step()
    assert_drained(eng)


@pytest.mark.parametrize("lasting", [False, True])
def test_a_step_that_cannot_be_launched_ends_its_culprit_only(
    lasting: bool, ahead: Path, monkeypatch: pytest.MonkeyPatch, flights: list[int]
) -> None:
    """The step under way is reported first; then each sequence of the failed step is computed again, alone."""
    requests = {name: (prompt(9 + i, i), greedy(24)) for i, name in enumerate("abc")}
    expected = alone(ahead, requests)
    eng = decoding(engine(ahead))
    for name, (ids, params) in requests.items():
        eng.add(EngineRequest(name, ids, params))
    updates = eng.step()
    doomed = eng.scheduler.running[1].cache

    run = runner.Runner.__call__

    def break_on_b(self: runner.Runner, chunks: list[Chunk], rows: list[int], *, drawn: Drawn | None) -> torch.Tensor:
        if any(c.cache is doomed and c.end == 10 + 12 for c in chunks) and (lasting or drawn is not None):
            raise ValueError("planted")
        return run(self, chunks, rows, drawn=drawn)

    monkeypatch.setattr(runner.Runner, "__call__", break_on_b)
    while eng.has_unfinished():
        updates += eng.step()
    tokens = {name: [t for u in updates if u.request_id == name for t in u.token_ids] for name in "abc"}
    assert [(u.request_id, "planted" in u.error) for u in updates if u.error] == [("b", True)] * lasting
    if lasting:
        expected["b"] = expected["b"][:12]
    assert tokens == expected and flights
    assert_drained(eng)


@pytest.mark.parametrize("where", ["launch", "land"])
def test_a_lost_device_stops_the_engine(where: str, ahead: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eng = decoding(engine(ahead))
    eng.add(EngineRequest("a", prompt(5, 1), greedy(40)))
    for _ in range(5):
        eng.step()

    def fault(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(*((Decoder, "__call__", fault) if where == "launch" else (Flight, "land", fault)))
    with pytest.raises(EngineDeadError, match="illegal memory access"):
        eng.step()


def test_a_request_is_handed_over_while_a_step_is_under_way(ahead: Path, flights: list[int]) -> None:
    requests = {name: (prompt(120 + i, i), greedy(40)) for i, name in enumerate("ab")}
    expected = alone(ahead, requests)
    one, other = decoding(engine(ahead)), decoding(engine(ahead))
    for name, (ids, params) in requests.items():
        one.add(EngineRequest(name, ids, params))
    updates = [u for _ in range(15) for u in one.step()]
    handed = one.export_sequence("a")
    updates += one.step()
    done = handed.token_ids[len(requests["a"][0]) :]
    assert flights and done == [t for u in updates if u.request_id == "a" for t in u.token_ids][: len(done)]
    other.import_sequence(EngineRequest("a", *requests["a"]), handed)
    assert done + drain(other)["a"] == expected["a"]
    one.abort("a")
    rest = [t for u in updates if u.request_id == "b" for t in u.token_ids] + drain(one)["b"]
    assert rest == expected["b"]
    for eng in (one, other):
        assert_drained(eng)


def test_n_gram_tables_on_disk_keep_a_step_from_being_launched_ahead(tmp_path: Path, flights: list[int]) -> None:
    eng = decoding(engine(write_small("v41", tmp_path, seed=3), engram_cache_bytes=0))
    eng.add(EngineRequest("a", prompt(5, 1), greedy(10)))
    assert len(drain(eng)["a"]) == 10 and not flights


def test_n_gram_tables_in_memory_are_read_by_steps_launched_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flights: list[int]
) -> None:
    """As by kernels, from rows that the step itself hashes: prompts shorter and longer than the longest n-gram, one aborted."""
    requests = {f"r{i}": (prompt(n, i), greedy(12 + 5 * i)) for i, n in enumerate((1, 2, 3, 4, 70, 5, 3))}
    expected = alone(write_small("v41", tmp_path, seed=3), requests)
    hashed: list[int] = []

    def read(ops: ReferenceOps, rows: Tensor, table: RowTable, dtype: torch.dtype) -> Tensor:
        hashed.append(len(rows))
        codes, scales = table.gather(rows)
        return row_values(codes, scales, dtype).view(len(rows), -1)

    monkeypatch.setattr(ReferenceOps, "prepare_table", lambda ops, table: table)
    monkeypatch.setattr(ReferenceOps, "table_rows", read)
    eng = decoding(engine(tmp_path, max_num_seqs=7))
    for name, (ids, params) in requests.items():
        eng.add(EngineRequest(name, ids, params))
    got = drain(eng, lambda step: eng.abort("r4") if step == 9 else None)
    assert len(got["r4"]) < 12 + 20 and got == expected | {"r4": expected["r4"][: len(got["r4"])]}
    assert {1, 2, 4, 7} <= set(flights) | set(hashed)
