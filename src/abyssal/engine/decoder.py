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
from abyssal.kv.batch import Chunk, Drawn, engram_rows, staged
from abyssal.kv.decode import DecodeFacts, DecodeInputs, DecodeTables
from abyssal.kv.pool import KVCache
from abyssal.model.model import Model
from abyssal.ops.ngram_hash import NgramHash
from abyssal.parallel.comm import Shape

log = logging.getLogger("abyssal")

FIRST_CAPACITY = 8192  # tokens per sequence of the smallest shape
NUM_FACTS = 3  # of a sequence, beside its tokens
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
        # Of each sequence its position, row and sums as in `DecodeInputs`, the token, and the ones before it, the latest first
        self._inputs = torch.zeros(
            NUM_FACTS + 1 + (ngrams.history if ngrams else 0), max_num_seqs, dtype=torch.int64, device=device
        )
        self._inputs[1] = self.tables.empty_row
        self._hash = ngrams if model.reads_tables else None
        self._table_rows: dict[int, Tensor] = {}  # as `Model.read_tables` gives them, where the host reads them
        if self._hash is None:
            self._table_rows = model.empty_table_rows(max_num_seqs)
        self._logits = torch.zeros(max_num_seqs, config.vocab_size, device=device)
        self._largest = torch.zeros(2 * max_num_seqs, dtype=torch.int64, device=device)  # of `argmax` [2, rows of the shape]
        self._given: Tensor | None = None  # logits of the last call
        self._rows = 0  # of its shape
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self.memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None  # of all graphs: no two run at a time

    def close(self) -> None:
        """Destroy the graphs."""
        self._graphs.clear()

    def takes(self, chunks: list[Chunk]) -> bool:
        """Whether a step of these, single tokens first, has no others and fits the largest shape."""
        return (
            len(chunks) <= self.batches[-1]
            and all(len(c.token_ids) == 1 for c in chunks[-1:])
            and max((c.start for c in chunks), default=0) < self.capacities[-1]
        )

    @torch.inference_mode()
    def __call__(self, chunks: list[Chunk], drawn: Drawn | None = None) -> Tensor:
        """Compute one token of each sequence -> logits fp32 [len(chunks), V]; they hold until the next call.

        `drawn`: tokens that are missing in `chunks`, none where the host reads rows of n-gram tables.
        """
        if self.ngrams is not None and self._table_rows and chunks:
            for layer, read in self.model.read_tables(engram_rows(self.ngrams, chunks)).items():
                self._table_rows[layer][: len(chunks)].copy_(read)
        longest = 1 + max((c.start for c in chunks), default=0)
        own = next(n for n in self.batches if n >= len(chunks)), next(n for n in self.capacities if n >= longest)
        common = self.model.comm.enter(own[0], own)
        shape = common or own
        self._launch(shape, common is not None, chunks, drawn)
        self._given, self._rows = self._logits[: len(chunks)], shape[0]
        return self._given

    def argmax(self, logits: Tensor) -> Tensor | None:
        """As of `abyssal.ops`, where a call has just given these `logits`, until the next: the graph has it in it. None: they are others."""
        return self._largest[: 2 * self._rows].view(2, -1)[:, : len(logits)] if logits is self._given else None

    @torch.inference_mode()
    def idle(self, shape: Shape) -> None:
        """Take part in a step of `shape` without a sequence."""
        self._launch(shape, True, [], None)

    def _launch(self, shape: Shape, replay: bool, chunks: list[Chunk], drawn: Drawn | None) -> None:
        """A step in `shape`, on a GPU as a graph if `replay`."""
        graph = self._captured(*shape) if replay and self.device.type == "cuda" else None
        self._fill(chunks, drawn)
        if graph is None:
            self._compute(*shape)
        else:
            graph.replay()

    def _fill(self, chunks: list[Chunk], drawn: Drawn | None) -> None:
        values, count = np.zeros(self._inputs.shape, np.int64), len(chunks)
        values[1], values[NUM_FACTS:] = self.tables.empty_row, -1  # no token: no experts
        caches = [c.cache for c in chunks]
        values[:NUM_FACTS, :count] = [c.start for c in chunks], self.tables.place(caches), [c.folded for c in caches]
        values[NUM_FACTS, :count] = [c.token_ids[0] for c in chunks]
        if self._hash is not None:
            none = [-1] * self._hash.history
            before = [[*c.before[::-1], *none[len(c.before) :]] for c in chunks]
            values[NUM_FACTS + 1 :, :count] = np.array(before, np.int64).reshape(count, len(none)).T
        self._inputs.copy_(staged(values, self.device), non_blocking=True)
        if drawn is not None:
            drawn.put(self._inputs[NUM_FACTS])

    def _compute(self, count: int, capacity: int) -> None:
        facts, tokens = self._inputs[:, :count].split([NUM_FACTS, len(self._inputs) - NUM_FACTS])
        table_rows = {layer: rows[:count] for layer, rows in self._table_rows.items()}
        with self.model.ops.beside(count) as join:  # a dozen small kernels, which need no facts
            if self._hash is not None:
                table_rows = self.model.read_tables(self._hash.rows(tokens.T))
        batch = self.facts.batch(DecodeInputs(tokens[0], *facts), capacity)
        join()
        self._logits[:count] = self.model.compute(batch, self.cache, table_rows)
        self._largest[: 2 * count].view(2, count).copy_(self.model.ops.argmax(self._logits[:count]))

    def _captured(self, count: int, capacity: int) -> torch.cuda.CUDAGraph:
        """The graph of a shape. What runs before the capture has no sequences, so it leaves the caches alone."""
        if (count, capacity) in self._graphs:
            return self._graphs[count, capacity]
        begun = time.perf_counter()
        self._fill([], None)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._compute(count, capacity)  # compiles kernels and sets libraries up, which a capture must not
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may wait for streams of theirs meanwhile (`engine.link`).
        with torch.cuda.graph(graph, pool=self.memory, stream=stream, capture_error_mode="thread_local"):
            self._compute(count, capacity)
        self._graphs[count, capacity] = graph
        log.info("captured a decode step of %d sequences up to %d tokens in %.1f s", count, capacity, time.perf_counter() - begun)
        return graph
