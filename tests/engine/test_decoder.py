"""Decode steps of fixed shapes, run on the CPU without a graph: the tokens of the ordinary steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from abyssal.engine import runner
from abyssal.engine.decoder import Decoder, buckets
from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest
from abyssal.kv.pool import NO_PAGE
from abyssal.ops._kernels import KernelOps
from tests.engine.test_engine import MIB, alone, assert_drained, drain, engine, greedy, prompt
from tests.model.test_kernels import v4, v41
from tests.support.families import FAMILIES, write_small
from tests.support.stepping import Side

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
