"""Decode steps of fixed shapes, run on the CPU without a graph: the tokens of the ordinary steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from abyssal.engine.decoder import Decoder, buckets
from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest
from abyssal.kv.pool import NO_PAGE
from tests.engine.test_engine import alone, assert_drained, drain, engine, greedy, prompt
from tests.support.families import FAMILIES, write_small

LENGTHS = (1, 2, 3, 4, 5, 60, 127, 128, 129, 255, 256, 257, 300, 511)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(request.param, tmp_path_factory.mktemp("small"), seed=3)


def decoding(eng: Engine) -> Engine:
    """The engine as it is with CUDA graphs, but without the graphs."""
    runner = eng.runner
    runner.decoder = Decoder(
        runner.model_config, runner.model, runner.cache, runner.ngrams, runner.device, eng.config.max_num_seqs, runner.max_model_len
    )  # fmt: skip
    return eng


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
