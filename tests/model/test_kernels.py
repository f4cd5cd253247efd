"""Kernels in the engine beside the PyTorch ops, on the CPU through Triton's interpreter: bf16, packed records, released widths."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from abyssal import LLM
from abyssal.config import LayerPlan, ModelConfig
from abyssal.engine import runner as runner_module
from abyssal.kv.batch import Batch
from abyssal.kv.pool import KVCache, SequenceCache
from abyssal.ops._kernels import KernelOps
from abyssal.ops._reference import ReferenceOps
from abyssal.ops._select import Query, Selection
from tests.checkpoint.build import random_v4_checkpoint
from tests.support.small_model import config_dict
from tests.support.v41_model import write_v41

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.skipif(torch.cuda.is_available(), reason="see test_gpu.py")]
WIDTHS = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 8, "num_attention_heads": 2}


def v4(folder: Path) -> None:
    """All experts by hash: a router's choice between near equals would hide small faults behind large differences."""
    scaling = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
    config = config_dict([0, 4, 128], sliding_window=128, num_hash_layers=3, rope_scaling=scaling, **WIDTHS)
    random_v4_checkpoint(folder, config, seed=5, quantised=False)


def v41(folder: Path) -> None:
    write_v41(folder, 5, **WIDTHS)


class Side:
    """One engine, stepped by hand."""

    def __init__(self, folder: Path, layout: str) -> None:
        self.llm = LLM(
            folder, device="cpu", dtype="bfloat16", kv_layout=layout, kv_cache_bytes=16 << 20, max_model_len=1024, max_num_seqs=4,
            enable_prefix_caching=False,
        )  # fmt: skip
        self.runner, self.cache = self.llm.engine.runner, self.llm.engine.cache
        self.sequences: list[SequenceCache] = [self.cache.new_sequence() for _ in range(2)]
        self.ends = [0, 0]

    def step(self, prompts: list[list[int]], counts: list[int]) -> Tensor:
        """Compute so many more tokens of each prompt -> logits of all of them."""
        chunks = []
        for i, count in sorted(enumerate(counts), key=lambda item: item[1] != 1):
            start, self.ends[i] = self.ends[i], self.ends[i] + count
            if count:
                assert self.cache.allocate(self.sequences[i], start, start + count)
                chunks.append(self.runner.chunk(prompts[i], start, start + count, self.sequences[i]))
        logits = self.runner(chunks, list(range(sum(counts))))
        for seq, ids, end in zip(self.sequences, prompts, self.ends, strict=True):
            self.cache.commit(seq, ids, end)
            self.cache.release_unneeded(seq, end)
        return logits

    def take_over(self, other: Side, prompts: list[list[int]]) -> None:
        """Hold what `other` has computed, byte for byte."""
        self.ends = list(other.ends)
        for seq, ids, end in zip(self.sequences, prompts, self.ends, strict=True):
            assert self.cache.allocate(seq, 0, end)
            self.cache.commit(seq, ids, end)
            self.cache.release_unneeded(seq, end)
        for bucket, pool in self.cache.pools.items():
            pool.data.copy_(other.cache.pools[bucket].data)

    def record_choices(self) -> list[set[int]]:
        """Receives, from here on, the slots that each indexer chooses for each token of a step."""
        choices: list[set[int]] = []
        ops, choose = self.runner.ops, self.runner.ops.choose

        def record(
            plan: LayerPlan, config: ModelConfig, query: Query, batch: Batch, cache: KVCache, selection: Selection
        ) -> None:
            choose(plan, config, query, batch, cache, selection)
            spec = cache.specs[f"c{plan.ratio}"]
            if batch.lists is not None:
                (slots,) = selection.entries
                every = batch.lists.all_entries(spec.name, spec.row(plan.kv_source)) if slots is None else slots
                visible = batch.lists.visible[plan.ratio].tolist()
                rows = [row[: None if slots is not None else count] for row, count in zip(every.tolist(), visible, strict=True)]
            else:
                rows = []
                for group, indices in zip(batch.groups, selection.entries, strict=True):
                    every = batch.entry_slots(spec, plan.kv_source, group)
                    for i, j in itertools.product(*map(range, group.shape)):
                        index = range(group.visible[plan.ratio][i, j]) if indices is None else indices[i, j].tolist()
                        rows.append([int(every[i, e]) for e in index if e >= 0])
            choices.extend(set(row) - {-1} for row in rows)

        ops.choose = record
        return choices


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Side, Side]]]:
    made: list[Side] = []

    def make(write: Callable[[Path], None], layout: str) -> tuple[Side, Side]:
        write(tmp_path)
        made.append(Side(tmp_path, layout))
        monkeypatch.setattr(
            runner_module, "select_ops", lambda config, model, caches, device: KernelOps("triton", model, caches, 64, device)
        )
        made.append(Side(tmp_path, layout))
        return made[0], made[1]

    yield make
    for side in made:
        side.llm.close()


@pytest.mark.parametrize(("write", "layout"), [(v4, "v4"), (v41, "v41")], ids=["v4", "v41"])
def test_steps_after_a_prefill_by_the_reference(
    write: Callable[[Path], None], layout: str, sides: Callable[..., tuple[Side, Side]]
) -> None:
    """A chunk over the end of a group of 128 beside a decoding sequence, then both decoding: what one side stored, the other reads."""
    reference, kernels = sides(write, layout)
    assert isinstance(reference.runner.ops, ReferenceOps) and isinstance(kernels.runner.ops, KernelOps)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 150, (140,), generator=generator).tolist() for _ in range(2)]
    reference.step(prompts, [126, 61])
    kernels.take_over(reference, prompts)
    there, here = reference.record_choices(), kernels.record_choices()
    for counts in ([4, 1], [1, 1]):
        expected, logits = reference.step(prompts, counts), kernels.step(prompts, counts)
        assert logits.isfinite().all()
        rows = (logits - expected).abs().amax(1) / expected.std()  # bf16: 0.03 to 0.06 for V4, up to 0.14 for V4.1
        assert rows.median() < 0.1 and rows.max() < 0.25, rows
    assert len(there) == len(here) > 0 and [len(a) for a in there] == [len(b) for b in here]
    topk = reference.runner.model_config.index_topk
    assert max(map(len, here)) == topk, "no query had to choose"
    assert sum(len(a & b) for a, b in zip(there, here, strict=True)) >= 0.9 * sum(map(len, there))
