"""Steps of the most tokens that a step may have, as those of a long prompt are: all but the attentions is replayed from CUDA graphs.

From behind one attention up to the next, what a layer does depends on the number of tokens alone, so that it is captured as one graph. The
compression of keys, the choice among them, and the attention itself follow the sequences' lengths and are launched op by op in between.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from abyssal.kv.batch import Batch, StoreFacts, TokenFacts
from abyssal.kv.pool import KVCache
from abyssal.model.model import Block, Model, Residual
from abyssal.ops._select import Selection

log = logging.getLogger("abyssal")


@dataclass(frozen=True, slots=True)
class _Piece:
    """A graph that ends before an attention, and what it leaves for that, in memory that graphs own."""

    graph: torch.cuda.CUDAGraph
    block: Block  # of the attention
    rows: list[Tensor]  # as of `Projected`
    queries: Tensor  # [T, H, d]
    index_queries: Tensor | None  # [T, Hi, di]


class Pieces:
    """Computes steps of `num_tokens` tokens. The first only compiles kernels, the second is captured while it is computed."""

    def __init__(self, model: Model, cache: KVCache, num_tokens: int, memory: Any) -> None:
        """`memory`: of all graphs, none of which may run at the same time as another."""
        self.model, self.cache, self.num_tokens, self._memory = model, cache, num_tokens, memory
        device = model.embedding.device
        self._stream = torch.cuda.Stream(device)  # of captures
        self._ratios = {block.attention.plan.ratio for block in model.blocks if block.attention.indexer is not None}
        self._is_compiled = False
        self._pieces: list[_Piece] = []

    def takes(self, batch: Batch) -> bool:
        """Whether a step has so many tokens, and keys have to be chosen in all layers: queries for it are captured."""
        assert batch.lists is not None
        chooses = all(batch.lists.max_visible[ratio] > self.model.config.index_topk for ratio in self._ratios)
        return len(batch.token_ids) == self.num_tokens and chooses

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Tensor:
        """Logits as of `Model`, for a batch that it `takes`."""
        rows = self.model.read_tables(batch.engram_rows)
        if not self._is_compiled:
            self._is_compiled = True
            return self.model.compute(batch, self.cache, rows)
        if not self._pieces:
            try:
                self._capture(batch, rows)
            except BaseException:
                self._pieces.clear()
                raise
        else:
            self._replay(batch, rows)
        return self.model.logits(self._last.at(batch.logit_rows))

    def _replay(self, batch: Batch, rows: dict[int, Tensor]) -> None:
        for ours, theirs in zip(_inputs(self._tokens, self._rows), _inputs(batch.of_tokens, rows), strict=True):
            ours.copy_(theirs)
        selection = self.model.ops.new_selection(batch)
        for piece in self._pieces:
            piece.graph.replay()
            self._attend(piece, batch, selection)
        self._end.replay()

    def _attend(self, piece: _Piece, batch: Batch, selection: Selection) -> None:
        def index_queries() -> Tensor:
            assert piece.index_queries is not None
            return piece.index_queries

        attend = piece.block.attention.attend
        attend(piece.rows, lambda: piece.queries, index_queries, batch, self.cache, selection, self._out)

    def _capture(self, batch: Batch, rows: dict[int, Tensor]) -> None:
        """What a graph has is launched by a replay at once, so that the step is computed as well."""
        begun = time.perf_counter()
        model, of_batch = self.model, batch.of_tokens
        window = StoreFacts(of_batch.window.rows, of_batch.window.slots.clone())
        rope = {name: table.clone() for name, table in of_batch.rope.items()}
        self._tokens = tokens = TokenFacts(of_batch.token_ids.clone(), rope, window)
        self._rows = {layer: read.clone() for layer, read in rows.items()}
        sizes = self.num_tokens, model.config.num_heads, model.config.head_dim
        self._out = torch.empty(sizes, dtype=model.dtype, device=tokens.token_ids.device)  # of every attention in turn
        selection = model.ops.new_selection(batch)
        residual, last = None, None
        for layer, block in enumerate(model.blocks):
            attention = block.attention
            with self._capturing() as graph:
                residual = model.embed(tokens.token_ids) if last is None else self._leave(*last)
                site = block.enter(residual, self._rows.get(layer))
                of_x = attention.project(site.x)
                queries = attention.queries(of_x, tokens, self.cache)
                index_queries = None if attention.indexer is None else attention.index_queries(of_x)
            left = [_alias(row) for row in of_x.rows], _alias(queries), None if index_queries is None else _alias(index_queries)
            self._pieces.append(_Piece(graph, block, *left))
            del residual, of_x, queries, index_queries  # what is captured next may lie where they do
            graph.replay()
            self._attend(self._pieces[-1], batch, selection)
            last = block, site
        assert last is not None
        with self._capturing() as self._end:
            residual = self._leave(*last)
        parts = (residual.streams, residual.pre, residual.out, residual.post, residual.comb)
        streams, pre, *rest = (None if part is None else _alias(part) for part in parts)
        assert streams is not None and pre is not None
        self._last = Residual(streams, pre, *rest)
        self._end.replay()
        log.info("captured a step of %d tokens in %.1f s", self.num_tokens, time.perf_counter() - begun)

    def _leave(self, block: Block, site: Any) -> Residual:
        out = block.attention.finish(self._out, self._tokens)
        return block.leave(site, out, self._tokens.token_ids)

    @contextmanager
    def _capturing(self) -> Iterator[torch.cuda.CUDAGraph]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Other threads may wait for streams of theirs meanwhile (`engine.link`).
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                yield graph
            finally:
                graph.capture_end()


def _inputs(tokens: TokenFacts, rows: dict[int, Tensor]) -> list[Tensor]:
    """What differs from step to step, of what graphs read."""
    return [tokens.token_ids, *tokens.rope.values(), tokens.window.slots, *rows.values()]


class _Place:
    def __init__(self, x: Tensor) -> None:
        strides = tuple(n * x.element_size() for n in x.stride())
        kind, data = f"<i{x.element_size()}", (x.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": tuple(x.shape), "strides": strides, "typestr": kind, "data": data, "version": 3}


def _alias(x: Tensor) -> Tensor:
    """`x` by its place in memory, which it does not keep: graphs captured later may use it for something else once this one is read."""
    return torch.as_tensor(_Place(x), device=x.device).view(x.dtype)
