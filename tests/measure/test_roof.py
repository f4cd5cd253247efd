"""Bytes and operations of a step, against the weights that are loaded and the slots that a step names."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import abyssal.engine.runner as runner_module
import abyssal.ops._reference as reference
from abyssal.checkpoint.loader import Weights
from abyssal.checkpoint.rows import RowTable
from abyssal.kv.batch import Batch
from abyssal.measure.records import add_running
from abyssal.measure.roof import decode_bytes, expected_experts, mean_decode_bytes, prefill_flops
from abyssal.ops.linear import LinearWeight
from bench.slices import random_weights
from tests.support.slices import LAYOUTS, slice_engine, small_slice

NAMES = list(LAYOUTS)


def stored_bytes(weight: torch.Tensor | LinearWeight) -> int:
    if isinstance(weight, torch.Tensor):
        return weight.nbytes
    return weight.data.nbytes + (0 if weight.scale is None else weight.scale.nbytes)


@pytest.mark.parametrize("name", NAMES)
def test_weight_bytes_are_those_of_a_built_model_when_all_experts_are_chosen(name: str, tmp_path: Path) -> None:
    loaded: Weights = {}

    def keep(*args: Any) -> Weights:
        loaded.update(random_weights(*args))
        return dict(loaded)

    folder = small_slice(name, tmp_path, num_experts_per_tok=8)
    engine = slice_engine(name, folder, keep)
    config, tokens = engine.runner.model_config, 3
    assert config.num_experts_per_token == config.num_experts
    moved = decode_bytes(config, engine.runner.plan, torch.float32, [600, 500, 400])
    whole = {n: stored_bytes(w) for n, w in loaded.items() if not isinstance(w, RowTable)}
    rows = {n: loaded[n].shape[0] for n in whole if n == "embed.weight" or n.endswith("tid2eid")}
    assert len(rows) == 1 + 3 * (config.family == "v4")
    expected = sum(size for n, size in whole.items() if n not in rows and not n.endswith("bias_vl"))
    expected += sum(whole[n] * tokens // count for n, count in rows.items())
    assert moved.weight_total == pytest.approx(expected, rel=1e-12)
    short = decode_bytes(config, engine.runner.plan, torch.float32, [40])
    queries = sum(size for n, size in whole.items() if n.endswith(("indexer.wq_b", "indexer.weights_proj")))
    assert moved.weights["indexers"] - short.weights.get("indexers", 0) == queries > 0, "nothing to choose: no queries are made"


def test_expected_experts_are_what_random_choices_touch(tmp_path: Path) -> None:
    engine = slice_engine("v4-flash", small_slice("v4-flash", tmp_path, n_routed_experts=32, num_experts_per_tok=6))
    config = engine.runner.model_config
    rng = np.random.default_rng(0)
    for tokens in (1, 4, 20):
        touched = [len({e for _ in range(tokens) for e in rng.permutation(32)[:6]}) for _ in range(2000)]
        assert expected_experts(config, tokens) == pytest.approx(np.mean(touched), abs=0.15)
    one, many = (decode_bytes(config, engine.runner.plan, torch.float32, [300] * n).weights["experts"] for n in (1, 10**6))
    assert one == pytest.approx(many * 6 / 32)


class Reads:
    """Counts what a step of the reference reads, from its facts and from what its ops are given."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.config, self.specs = engine.runner.model_config, engine.cache.specs
        build, choose = runner_module.build_batch, engine.runner.ops.choose

        def building(*args: Any, **options: Any) -> Batch:
            self._count(build(*args, **(options | {"as_lists": True})))
            return build(*args, **options)

        def choosing(plan: Any, config: Any, query: Any, batch: Batch, cache: Any, selection: Any) -> None:
            candidates = selection.candidates[0] if plan.candidates == "use" else None
            scored: list[int] = []
            score = reference.index_score

            def scoring(q: Any, weights: Any, keys: Any, visible: Any) -> Any:
                scored.append(int(visible.sum() if candidates is None else candidates.sum()))
                return score(q, weights, keys, visible)

            with monkeypatch.context() as patch:
                patch.setattr(reference, "index_score", scoring)
                choose(plan, config, query, batch, cache, selection)
            self.read[f"c{plan.ratio}_index"] += sum(scored)

        def attending(q: Any, plan: Any, batch: Batch, cache: Any, selection: Any, *rest: Any) -> Any:
            if plan.kv_source is not None:
                (group,), chosen = batch.groups, selection.entries[0] if plan.selection == "topk" else None
                count = group.visible[plan.ratio].sum() if chosen is None else (chosen >= 0).sum()
                self.read[f"c{plan.ratio}"] += int(count)
            return attend(q, plan, batch, cache, selection, *rest)

        attend = engine.runner.ops.attend
        monkeypatch.setattr(runner_module, "build_batch", building)
        monkeypatch.setattr(engine.runner.ops, "choose", choosing)
        monkeypatch.setattr(engine.runner.ops, "attend", attending)

    def _count(self, batch: Batch) -> None:
        assert batch.lists is not None
        self.read["window"] += self.config.num_layers * int(batch.lists.window_lengths.sum())
        for name, store in batch.stores.items():
            self.written[name] += store.slots.numel()
        for facts in batch.compress.values():
            for name, slots in facts.entry_slots.items():
                self.written[name] += slots.numel()
            for name, slots in facts.carried.items():
                used = facts.sources[(facts.sources >= 0) & (facts.sources < slots.shape[1])]
                self.read[name] += len(slots) * used.numel()
            for name, slots in facts.carried_sums.items():
                self.read[name] += int((slots >= 0).sum())
            for name, slots in facts.sum_slots.items():
                self.written[name] += slots.numel()

    def bytes(self, counts: Counter[str]) -> dict[str, int]:
        return {name: counts[name] * spec.layout.bytes_per_entry for name, spec in self.specs.items()}


@pytest.mark.parametrize("context", [pytest.param(2, marks=pytest.mark.long), pytest.param(9, marks=pytest.mark.long), 131, 640])
@pytest.mark.parametrize("name", NAMES)
def test_cache_bytes_are_those_of_the_slots_of_real_steps(
    name: str, context: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over steps that complete groups of every ratio and steps that do not."""
    engine = slice_engine(name, small_slice(name, tmp_path))
    add_running(engine, 3, context)
    # Sequences of 640 tokens make candidates; the first of them completes a group of 128 tokens at once.
    for step in range(6):
        with monkeypatch.context() as patch:
            reads = Reads(engine, patch)
            contexts = [seq.num_computed for seq in engine.scheduler.running]
            engine.step()
        moved = decode_bytes(engine.runner.model_config, engine.runner.plan, torch.float32, contexts)
        assert moved.cache_written == reads.bytes(reads.written), (step, contexts)
        found = reads.bytes(reads.read)
        if name == "v4.1-flash" and context > 128:  # the newest candidate block need not be full
            spec = engine.cache.specs["c1_index"]
            slack = len(contexts) * engine.runner.model_config.candidate_block_size * spec.layout.bytes_per_entry
            assert 0 <= moved.cache_read["c1_index"] - found.pop("c1_index") < slack
        assert {kind: moved.cache_read[kind] for kind in found} == found, (step, contexts)


def test_the_mean_over_steps_counts_what_only_some_of_them_do(tmp_path: Path) -> None:
    engine = slice_engine("v4-flash", small_slice("v4-flash", tmp_path))
    config, plan = engine.runner.model_config, engine.runner.plan
    mean = mean_decode_bytes(config, plan, torch.float32, [300], 128)
    owners = len(plan.specs["c4"].layers)
    assert mean.cache_written["c4"] == pytest.approx(owners * plan.specs["c4"].layout.bytes_per_entry / 4)
    assert mean.cache_written["c128"] == pytest.approx(len(plan.specs["c128"].layers) * 584 / 128)


@pytest.mark.parametrize("name", NAMES)
def test_prefill_operations_add_up_over_chunks_and_grow_with_position(name: str, tmp_path: Path) -> None:
    config = slice_engine(name, small_slice(name, tmp_path)).runner.model_config
    whole = prefill_flops(config, 0, 1024)
    halves = [prefill_flops(config, start, 512) for start in (0, 512)]
    head = 2 * config.vocab_size * config.hidden_size  # of the last token of each chunk
    assert halves[0]["linear"] + halves[1]["linear"] - head == pytest.approx(whole["linear"])
    for op in ("moe", "sparse_attention"):
        assert halves[0][op] + halves[1][op] == pytest.approx(whole[op])
    assert halves[1]["sparse_attention"] > halves[0]["sparse_attention"] and halves[1]["moe"] == halves[0]["moe"]
    # One token's experts by hand: three products of hidden times inner size for each chosen one, in every layer.
    each = 3 * 2 * config.hidden_size * config.moe_intermediate_size
    assert whole["moe"] == 1024 * config.num_layers * config.num_experts_per_token * each
