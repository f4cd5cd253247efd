"""Benchmarks of the whole engine, scaled down: their models are valid, their caches decode, their tables fill."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from abyssal.checkpoint.sizes import weight_bytes
from abyssal.config import LayerPlan
from abyssal.engine.engine import Engine
from abyssal.kv import codec
from abyssal.measure.records import add_running, random_hand_over
from abyssal.measure.roof import expected_experts
from abyssal.model_config import load_model_config, parse_model_config
from abyssal.model_config.presets import load_preset
from abyssal.ops import moe as moe_module
from bench import engine_h200
from bench.slices import SLICES, slice_config, write_slice
from bench.soak import Soak, small_pool, soak
from tests.support.families import FAMILIES, write_small
from tests.support.slices import LAYERS, LAYOUTS, SMALL, SMALL_V41, slice_engine, small_slice

NAMES = list(LAYOUTS)


def shifted(plan: LayerPlan, first: int) -> dict[str, Any]:
    """What a layer of a slice that begins at `first` must say of this one."""
    sources = {name: None if (at := getattr(plan, name)) is None else at - first for name in ("kv_source", "index_source")}
    same = {
        name: getattr(plan, name) for name in ("ratio", "rope", "selection", "index_keys", "candidates", "router", "hc_order")
    }
    return {"layer": plan.layer - first, "engram": plan.engram is not None, **sources, **same}


@pytest.mark.parametrize("name", NAMES)
def test_slices_have_the_plans_and_sizes_of_the_released_layers(name: str) -> None:
    part, whole = SLICES[name], load_preset(SLICES[name].preset)
    config = parse_model_config(slice_config(part))
    assert (part.first, part.layers) == {"v4-flash": (0, 20), "v4.1-flash": (14, 16)}[name]
    released = whole.layers[part.first : part.first + part.layers]
    assert [shifted(plan, 0) for plan in config.layers] == [shifted(plan, part.first) for plan in released]
    same = (
        "hidden_size",
        "num_heads",
        "num_experts",
        "moe_intermediate_size",
        "index_topk",
        "quant",
        "max_position",
        "vocab_size",
    )
    assert all(getattr(config, field) == getattr(whole, field) for field in same)
    gib = weight_bytes(config, torch.bfloat16).total / 2**30
    assert gib == pytest.approx({"v4-flash": 69.9, "v4.1-flash": 114.1}[name], abs=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_random_records_are_ones_that_a_writer_stores(name: str, tmp_path: Path) -> None:
    """Decoded and encoded again they mean the same values, so every code and scale is one that a writer could have stored."""
    engine = slice_engine(name, small_slice(name, tmp_path))
    handed = random_hand_over(engine.cache, [5] * 601, 600, torch.Generator().manual_seed(0))
    assert set(handed.records) == set(engine.cache.specs)
    for kind, records in handed.records.items():
        layout = engine.cache.specs[kind].layout
        data, scales = records.flatten(0, 1).tensor_split([layout.data_bytes], dim=1)
        values = codec.decode(layout, data.contiguous(), scales.contiguous())
        assert values.isfinite().all() and values.std() > 0.3
        assert torch.equal(codec.decode(layout, *codec.encode(layout, values)), values), kind


@pytest.mark.parametrize("name", NAMES)
def test_random_sequences_decode_finitely_in_pages_of_their_own(name: str, tmp_path: Path) -> None:
    engine = slice_engine(name, small_slice(name, tmp_path))
    names = add_running(engine, 4, 700)
    run, seen = engine.runner.__class__.__call__, []

    def keep(*args: Any, **more: Any) -> torch.Tensor:
        seen.append(run(engine.runner, *args, **more))
        return seen[-1]

    engine.runner.__class__, plain = (
        type("Recording", (type(engine.runner),), {"__call__": lambda self, *a, **more: keep(*a, **more)}),
        engine.runner.__class__,
    )
    for _ in range(5):
        assert [(u.error, u.finish_reason, len(u.token_ids)) for u in engine.step()] == [(None, None, 1)] * 4
    engine.runner.__class__ = plain
    logits = torch.cat(seen)
    assert logits.shape == (20, 512) and logits.isfinite().all() and 0.1 < logits.std() < 10
    assert len({seq.num_computed for seq in engine.scheduler.running}) == 4, "lengths differ"
    pages = [set(seq.cache.tables["window"].pages.ravel()) for seq in engine.scheduler.running]
    assert not pages[0] & pages[1]
    for request in names:
        engine.abort(request)
    assert not any(engine.stats().pages_by_kind.values())


@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_a_slice_choose_experts_as_the_roof_expects(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly as many different ones as choices at random would: otherwise a step were faster than its roof."""
    engine = slice_engine(name, small_slice(name, tmp_path, n_routed_experts=64), max_num_seqs=12)
    add_running(engine, 12, 200)
    chosen: list[int] = []
    choose = moe_module.choose

    def watch(*args: Any) -> Any:
        experts, weights = choose(*args)
        chosen.append(len(experts.unique()))
        return experts, weights

    monkeypatch.setattr(moe_module, "choose", watch)
    for _ in range(3):
        engine.step()
    expected = expected_experts(engine.runner.model_config, 12)
    assert sum(chosen) / len(chosen) == pytest.approx(expected, rel=0.1)


def test_decoding_from_random_records_is_decoding_of_a_sequence_so_long(tmp_path: Path) -> None:
    """Where the records are those of a computed sequence, the next tokens are its own: lengths and places are right."""
    engine = slice_engine("v4-flash", small_slice("v4-flash", tmp_path))
    first, second = add_running(engine, 2, 300)
    assert first != second
    by_id = {seq.request.request_id: seq for seq in engine.scheduler.running}
    assert by_id[first].num_computed == 300 and by_id[second].num_computed == 300 - 37
    for seq in by_id.values():
        assert seq.num_remaining == 1 and seq.cache.num_tokens == seq.num_computed and seq.cache.folded == seq.num_computed - 8


@pytest.mark.parametrize("name", ["v4-flash", pytest.param("v4.1-flash", marks=pytest.mark.long)])
def test_the_benchmark_fills_its_table_and_a_row_that_fails_stops_no_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = SMALL if name == "v4-flash" else SMALL_V41
    monkeypatch.setattr(engine_h200, "slice_config", lambda part: slice_config(replace(part, layers=3), **sizes))
    monkeypatch.setattr(engine_h200, "VARIANT_CONTEXT", 300)
    file = tmp_path / "out.json"
    options = ["device=cpu", "dtype=float32", f"kv_layout={LAYOUTS[name]}", "kv_cache_bytes=6MiB", "max_num_batched_tokens=64"]
    arguments = [
        "--models",
        name,
        "--batches",
        "1",
        "3",
        "64",
        "--contexts",
        "200",
        "--long",
        "900",
        "--prefills",
        "150",
        "--steps",
        "2",
    ]
    variants = ["--variants", "seed=1", "no_such_option=1"]
    monkeypatch.setattr(sys, "argv", ["engine_h200", *arguments, *variants, "--json", str(file), "--set", *options])
    engine_h200.main()
    rows = json.loads(file.read_text())["rows"]
    kinds = [(row["variant"], row["kind"], row.get("batch")) for row in rows]
    assert kinds == [
        ("base", "failed", None), ("base", "decode", 3), ("base", "decode", 1), ("base", "decode", 1), ("base", "prefill", None),
        ("seed=1", "failed", None), ("seed=1", "failed", None), ("seed=1", "decode", 1), ("no_such_option=1", "failed", None),
    ]  # fmt: skip
    assert "no room" in rows[0]["error"] and "no_such_option" in rows[-1]["error"]
    decode, prefill = rows[1], rows[4]
    assert decode["median_ms"] > decode["roof_ms"] > 0 and 0.5 < sum(decode["breakdown_ms"].values()) / decode["busy_ms"] <= 1.001
    assert {"moe", "linear", "sparse_attention", "hyper_connection"} <= decode["breakdown_ms"].keys()
    assert decode["host_ms"] is None, "a CPU computes the step itself"
    assert rows[3]["context"] == 900 and prefill["sampled"] is None and prefill["tokens_per_second"] > 0
    assert 0 < prefill["busy_ms"] <= 1.001 * prefill["profiled_ms"]
    table = capsys.readouterr().out.rpartition("measurement\n")[2].splitlines()
    assert len(table) == len(rows) and all(line.startswith(name) for line in table)


def test_a_long_prefill_is_sampled_between_its_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from abyssal.measure import steps
    from abyssal.measure.ceilings import Ceilings

    engine = slice_engine("v4-flash", small_slice("v4-flash", tmp_path), max_num_batched_tokens=32)
    chunk, asked = steps._chunk, []

    def timed(eng: Any, start: int, count: int, *rest: Any) -> float:
        chunk(eng, start, count, *rest)
        asked.append((start, count))
        return 1.0 + start

    monkeypatch.setattr(steps, "_chunk", timed)
    monkeypatch.setattr(steps, "FULL_CHUNKS", 4)
    monkeypatch.setattr(steps, "SAMPLES", 3)
    row = steps.measure_prefill(engine, 320, Ceilings(1e9, 1e9, None))
    assert isinstance(row, steps.Prefill), row
    assert asked[:3] == asked[3:6] == [(0, 32), (128, 32), (288, 32)] and row.sampled == 3
    assert row.seconds == pytest.approx(sum(1.0 + start for start in range(0, 320, 32)))
    assert not any(engine.stats().pages_by_kind.values())


@pytest.mark.parametrize("name", ["engine_h200", "parallel_h200", "disaggregated_h200", "recall"])
def test_a_benchmark_that_needs_gpus_says_so_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *(["documents"] if name == "recall" else [])])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^error: this needs [12] CUDA GPU\(s\), and PyTorch sees 0(; --device cpu [a-z -]+)?$"):
        importlib.import_module(f"bench.{name}").main()


def test_slices_are_written_with_all_that_an_engine_reads(tmp_path: Path) -> None:
    write_slice(tmp_path, slice_config(LAYERS["v4.1-flash"], **SMALL_V41))
    config = load_model_config(tmp_path)
    assert config.engram is not None and config.engram.layer_ids == (0,)
    assert {"config.json", "tokenizer.json", "model.safetensors"} == {file.name for file in tmp_path.iterdir()}


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_soak_ends_clean(family: str, tmp_path: Path) -> None:
    """Twenty seconds of random requests, aborts, prefix hits and preemptions; greedy tokens never depend on company."""
    folder = write_small(family, tmp_path, seed=2)
    pool = {"v4": 3 << 20, "v41": 6 << 20}[family]
    counts = soak({"model": str(folder), "device": "cpu", "kv_cache_bytes": pool}, seconds=20, seed=1, exact=True)
    assert counts.finished > 20


def test_a_soak_notices_what_is_left_over(tmp_path: Path) -> None:
    """The checks of the soak can fail: a page that somebody keeps, a request that failed."""
    options = {
        "model": str(write_small("v4", tmp_path, seed=2)),
        "device": "cpu",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
    }
    engine = Engine(small_pool(options))
    run = Soak(engine, seed=0)
    run.assert_drained()
    kept = engine.cache.new_sequence()
    assert engine.cache.allocate(kept, 0, 5)
    with pytest.raises(AssertionError, match="pages lost"):
        run.assert_drained()
    engine.cache.free(kept)
    run.counts.errors.append("planted")
    with pytest.raises(AssertionError, match="planted"):
        run.assert_drained()
