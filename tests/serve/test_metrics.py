"""`/metrics` against the pools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from abyssal.config import EngineConfig
from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest, SamplingParams
from abyssal.serve.metrics import Metrics


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    yield Engine(EngineConfig(device="cpu", kv_layout="v4", kv_cache_bytes=48 << 20, max_model_len=2048, max_num_seqs=4))


def scraped(engine: Engine) -> dict[tuple[str, str], float]:
    """(metric, value of its label) -> number."""
    text = Metrics(engine.stats, lambda: True).render().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, next(iter(sample.labels.values()), "")): sample.value for sample in samples}


def test_m03_cache_metrics_equal_what_is_allocated(engine: Engine) -> None:
    """M03: sizes of the pools to 5 %, and what is in use by kind, to the byte."""
    found = scraped(engine)
    for bucket, pool in engine.cache.pools.items():
        assert found["abyssal_cache_bytes_total", bucket] == pytest.approx(pool.data.nbytes, rel=0.05)
        assert found["abyssal_cache_pages_free", bucket] == found["abyssal_cache_pages_total", bucket] == pool.num_pages
    assert sum(found["abyssal_cache_bytes_total", b] for b in engine.cache.pools) == engine.runner.sizes.total_bytes
    engine.add(EngineRequest("a", [5] * 700, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)))
    engine.step()
    found, pools = scraped(engine), engine.cache.pools
    kinds = {label: value for (name, label), value in found.items() if name == "abyssal_cache_bytes_used"}
    assert set(kinds) == set(engine.cache.specs) and all(value > 0 for value in kinds.values())
    assert {"window", "c4", "c4_index", "c4_state", "c4_index_state", "c128", "c128_state", "c128_sums"} == set(kinds)
    assert sum(kinds.values()) == sum((p.num_pages - p.num_available) * p.page_bytes for p in pools.values())
    for bucket, pool in pools.items():
        pages = sum(value for (name, kind), value in found.items() if name == "abyssal_cache_pages_used"
                    and engine.cache.specs[kind].bucket == bucket)  # fmt: skip
        assert pages == pool.num_pages - pool.num_available > 0
    while engine.has_unfinished():
        engine.step()
    assert not any(value for (name, _), value in scraped(engine).items() if name == "abyssal_cache_bytes_used")


def test_reused_tokens_and_pages_are_counted(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    before = scraped(engine)["abyssal_cached_prompt_tokens_total", ""]
    for name in ("first", "second"):
        engine.add(EngineRequest(name, list(range(10, 610)), params))
        while engine.has_unfinished():
            engine.step()
    found = scraped(engine)
    assert found["abyssal_cached_prompt_tokens_total", ""] - before == 512
    for bucket, pool in engine.cache.pools.items():
        assert found["abyssal_cache_pages_reusable", bucket] == pool.num_idle > 0
