"""An engine whose steps a test lays out token by token."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from torch import Tensor

from abyssal import LLM
from abyssal.config import LayerPlan, ModelConfig
from abyssal.engine.decoder import Decoder
from abyssal.engine.engine import Engine
from abyssal.kv.batch import Batch
from abyssal.kv.pool import KVCache, SequenceCache
from abyssal.ops._select import Query, Selection


def decoding(engine: Engine) -> Engine:
    """The engine as it is with CUDA graphs, but without the graphs."""
    runner = engine.runner
    runner.decoder = Decoder(
        runner.model_config, runner.model, runner.cache, runner.ngrams, runner.device, engine.config.max_num_seqs, runner.max_model_len
    )  # fmt: skip
    return engine


class Side:
    """One engine with one sequence per prompt; two of them are stepped alike and compared."""

    def __init__(self, folder: Path | str, prompts: list[list[int]], **options: Any) -> None:
        self.llm = LLM(folder, enable_prefix_caching=False, **options)
        self.prompts = prompts
        self.runner, self.cache = self.llm.engine.runner, self.llm.engine.cache
        self.sequences: list[SequenceCache] = [self.cache.new_sequence() for _ in prompts]
        self.ends = [0] * len(prompts)

    def step(self, counts: list[int]) -> dict[tuple[int, int], Tensor]:
        """Compute so many more tokens of each prompt -> logits by prompt and position."""
        chunks, where = [], []
        for i, count in sorted(enumerate(counts), key=lambda item: item[1] != 1):
            start, self.ends[i] = self.ends[i], self.ends[i] + count
            if count:
                assert self.cache.allocate(self.sequences[i], start, start + count)
                chunks.append(self.runner.chunk(self.prompts[i], start, start + count, self.sequences[i]))
                where += [(i, position) for position in range(start, start + count)]
        logits = self.runner(chunks, list(range(len(where)))).cpu()
        self._settle()
        return dict(zip(where, logits, strict=True))

    def take_over(self, other: Side) -> None:
        """Hold what `other` has computed, byte for byte: it has allocated each sequence in one step, all in the same."""
        self.ends = list(other.ends)
        for seq, end in zip(self.sequences, self.ends, strict=True):
            assert self.cache.allocate(seq, 0, end)
        self._settle()
        for (name, table), seq in itertools.product(self.cache.specs.items(), range(len(self.sequences))):
            mine, theirs = (side.sequences[seq].tables[name].pages for side in (self, other))
            assert (mine == theirs).all(), (name, table)
        for bucket, pool in self.cache.pools.items():
            pool.data.copy_(other.cache.pools[bucket].data)

    def _settle(self) -> None:
        for seq, ids, end in zip(self.sequences, self.prompts, self.ends, strict=True):
            if end:
                self.cache.commit(seq, ids, end)
                self.cache.release_unneeded(seq, end)

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
