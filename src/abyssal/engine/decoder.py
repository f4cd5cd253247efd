"""Steps of one token per sequence, in a few fixed shapes: each shape is captured as a CUDA graph when it first occurs.

Replicas that share experts replay the same graph at the same time, in a shape that holds the steps of all. Each captures it in the same
step, as all know of the same shapes. Beside a step of no shape, which another replica computes, each launches its own op by op.
"""

from __future__ import annotations

import logging
import time

import numpy as np
import torch
from torch import Tensor

from abyssal.config import ModelConfig
from abyssal.kv.batch import Chunk, engram_rows
from abyssal.kv.decode import DecodeFacts, DecodeInputs, DecodeTables, staged
from abyssal.kv.pool import KVCache, SequenceCache
from abyssal.model.model import Model
from abyssal.ops.ngram_hash import NgramHash
from abyssal.parallel.comm import Shape

log = logging.getLogger("abyssal")

FIRST_CAPACITY = 8192  # tokens per sequence of the smallest shape
CAPACITY_FACTOR = 4  # between shapes; only score workspaces and lists of all entries are as wide, work follows the real lengths


def buckets(first: int, factor: int, last: int) -> list[int]:
    """first, first x factor, ... below `last`, and `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return [*sizes, last]


class Decoder:
    """Runs decode steps of one model; the shape is the smallest that holds a step's sequences and its longest context."""

    def __init__(
        self,
        config: ModelConfig,
        model: Model,
        cache: KVCache,
        ngrams: NgramHash | None,
        device: torch.device,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self.model, self.cache, self.ngrams, self.device = model, cache, ngrams, device
        self.tables = DecodeTables(cache.specs, max_num_seqs, max_model_len, device)
        self.facts = DecodeFacts(config, self.tables, model.ops.as_lists, model.ops.decode_facts)
        self.batches = buckets(1, 2, max_num_seqs)
        self.capacities = buckets(FIRST_CAPACITY, CAPACITY_FACTOR, max_model_len)
        self._inputs = torch.zeros(4, max_num_seqs, dtype=torch.int64, device=device)
        self._inputs[2] = self.tables.empty_row
        width = 0 if config.engram is None else config.engram.columns * config.engram.head_dim
        self._table_rows = {  # of the n-gram tables, as `Model.read_tables` gives them
            plan.layer: torch.zeros(max_num_seqs, width, dtype=model.dtype, device=device)
            for plan in config.layers
            if plan.engram is not None
        }
        self._logits = torch.zeros(max_num_seqs, config.vocab_size, device=device)
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None  # of all graphs: no two run at a time

    def takes(self, chunks: list[Chunk]) -> bool:
        """Whether a step of these is one of single tokens that fits the largest shape."""
        return (
            len(chunks) <= self.batches[-1]
            and all(len(c.token_ids) == 1 for c in chunks)
            and all(c.end <= self.capacities[-1] for c in chunks)
        )

    @torch.inference_mode()
    def __call__(self, chunks: list[Chunk]) -> Tensor:
        """Compute one token of each sequence -> logits fp32 [len(chunks), V]; they hold until the next call."""
        if self.ngrams is not None and chunks:
            for layer, read in self.model.read_tables(engram_rows(self.ngrams, chunks)).items():
                self._table_rows[layer][: len(chunks)].copy_(read)
        return self.step([c.cache for c in chunks], [c.start for c in chunks], [c.token_ids[0] for c in chunks])

    @torch.inference_mode()
    def step(self, caches: list[SequenceCache], positions: list[int], token_ids: list[int] | Tensor) -> Tensor:
        """As a call, of a model without n-gram tables.

        Args:
            positions: of the token that each sequence computes.
            token_ids: the tokens, or int64 [S] on the device where the host need not know them.
        """
        longest = max(positions, default=0) + 1
        own = next(n for n in self.batches if n >= len(caches)), next(n for n in self.capacities if n >= longest)
        common = self.model.comm.enter(own[0], own)
        graph = None if common is None or self.device.type != "cuda" else self._captured(*common)
        self._fill(caches, positions, token_ids)
        self._run(graph, common or own)
        return self._logits[: len(caches)]

    @torch.inference_mode()
    def idle(self, shape: Shape) -> None:
        """Take part in a step of `shape` without a sequence."""
        graph = None if self.device.type != "cuda" else self._captured(*shape)
        self._fill([], [], [])
        self._run(graph, shape)

    def _run(self, graph: torch.cuda.CUDAGraph | None, shape: Shape) -> None:
        if graph is None:
            self._compute(*shape)
        else:
            graph.replay()

    def _fill(self, caches: list[SequenceCache], positions: list[int], token_ids: list[int] | Tensor) -> None:
        values = np.zeros((4, self.batches[-1]), np.int64)
        values[0], values[2] = -1, self.tables.empty_row  # no token: no experts
        folded = [cache.folded_after(start) for cache, start in zip(caches, positions, strict=True)]
        rows = self.tables.place(caches)
        values[:, : len(caches)] = [
            positions if isinstance(token_ids, Tensor) else token_ids, positions, rows, folded
        ]  # fmt: skip
        self._inputs.copy_(staged(values, self.device), non_blocking=True)
        if isinstance(token_ids, Tensor):
            self._inputs[0, : len(caches)] = token_ids

    def _compute(self, count: int, capacity: int) -> None:
        batch = self.facts.batch(DecodeInputs(*self._inputs[:, :count]), capacity)
        table_rows = {layer: rows[:count] for layer, rows in self._table_rows.items()}
        self._logits[:count] = self.model.compute(batch, self.cache, table_rows)

    def _captured(self, count: int, capacity: int) -> torch.cuda.CUDAGraph:
        """The graph of a shape. What runs before the capture has no sequences, so it leaves the caches alone."""
        if (count, capacity) in self._graphs:
            return self._graphs[count, capacity]
        begun = time.perf_counter()
        self._fill([], [], [])
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._compute(count, capacity)  # compiles kernels and sets libraries up, which a capture must not
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may wait for streams of theirs meanwhile (`engine.link`).
        with torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"):
            self._compute(count, capacity)
        self._graphs[count, capacity] = graph
        log.info("captured a decode step of %d sequences up to %d tokens in %.1f s", count, capacity, time.perf_counter() - begun)
        return graph
