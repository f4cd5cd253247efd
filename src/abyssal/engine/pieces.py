"""Steps of any number of tokens, all but the attentions replayed from CUDA graphs.

From behind one attention up to the next, what a layer does depends on the number of tokens alone, so that it is captured as one graph, for
a few numbers up to which steps are filled. The compression of keys, the choice among them, and the attention itself follow the sequences'
lengths and are launched op by op in between.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from abyssal.kv.batch import Batch, StoreFacts, TokenFacts
from abyssal.kv.pool import KVCache
from abyssal.model.model import Block, Model, Residual
from abyssal.ops._select import Selection
from abyssal.ops.hyper_connection import Site

log = logging.getLogger("abyssal")

LEAST = 16  # tokens of the smallest size, and between two
PER_OCTAVE = 4  # sizes from one power of two to the next: what fills a step up is a fifth of it at most


def padded(count: int, most: int) -> int:
    """The size of a step of `count` tokens, 1 to `most`."""
    between = max(LEAST, (1 << (count - 1).bit_length()) // (2 * PER_OCTAVE))
    return min(most, -(-count // between) * between)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A graph that ends before an attention, and what it leaves for that, in memory that graphs own."""

    graph: Any
    block: Block  # of the attention
    rows: list[Tensor]  # as of `Projected`
    queries: Tensor  # [N, H, d]
    index_queries: Tensor | None  # [N, Hi, di]; None: the layer has no indexer


@dataclass(frozen=True, slots=True)
class _Step:
    """The graphs of one size."""

    pieces: list[_Piece]
    end: Any  # the graph behind the last attention
    residual: Residual  # what that leaves


class Pieces:
    """Computes the steps of one model. The graphs of a size are captured when a step first needs them, behind those of the largest: in the
    memory that these take there is room for all others."""

    def __init__(self, model: Model, cache: KVCache, most_tokens: int, memory: Any) -> None:
        """`memory`: of all graphs, none of which may run at the same time as another."""
        self.model, self.cache, self.most_tokens, self._memory = model, cache, most_tokens, memory
        config, device = model.config, model.embedding.device
        self._stream = _capture_stream(device)
        self._steps: dict[int, _Step] = {}
        # What graphs read of a step, and the results of each attention in turn
        ropes = {"main": config.rope_main, "compress": config.rope_compress}
        self._tokens = TokenFacts(
            torch.full((most_tokens,), -1, device=device),
            {n: torch.zeros(most_tokens, r.dim // 2, dtype=torch.complex64, device=device) for n, r in ropes.items()},
            StoreFacts(torch.arange(most_tokens, device=device), torch.full((config.num_layers, most_tokens), -1, device=device)),
        )
        self._table_rows = model.empty_table_rows(most_tokens)
        self._out = torch.zeros(most_tokens, config.num_heads, config.head_dim, dtype=model.dtype, device=device)

    @torch.inference_mode()
    def capture(self, count: int) -> None:
        """Capture what a step of `count` tokens, 1 to `most_tokens`, needs and has not been captured yet."""
        for size in (self.most_tokens, padded(count, self.most_tokens)):
            if size not in self._steps:
                self._steps[size] = self._captured(size)

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Tensor:
        """Logits as of `Model`, for a batch of as many tokens as `capture` was called for."""
        size = padded(len(batch.token_ids), self.most_tokens)
        step, selection = self._steps[size], self.model.ops.new_selection(batch)
        self._fill(size, batch)
        for piece in step.pieces:
            self._run(piece, batch, selection)
        step.end.replay()
        return self.model.logits(step.residual.at(batch.logit_rows))

    def _fill(self, size: int, batch: Batch) -> None:
        """Set the facts of a step. What is beyond its tokens touches no expert and is stored nowhere."""
        count, ours = len(batch.token_ids), self._tokens
        ours.token_ids[count:size] = -1
        ours.window.slots[:, count:size] = -1
        ours.token_ids[:count] = batch.token_ids
        ours.window.slots[:, :count] = batch.stores["window"].slots
        for name, table in ours.rope.items():
            table[:count] = batch.rope[name]
        for layer, read in self.model.read_tables(batch.engram_rows).items():
            self._table_rows[layer][:count] = read

    def _run(self, piece: _Piece, batch: Batch, selection: Selection) -> None:
        count = len(batch.token_ids)

        def index_queries() -> Tensor:
            assert piece.index_queries is not None
            return piece.index_queries[:count]

        piece.graph.replay()
        piece.block.attention.attend(
            [rows[:count] for rows in piece.rows], lambda: piece.queries[:count], index_queries, batch, self.cache, selection,
            self._out[:count],
        )  # fmt: skip

    def _captured(self, size: int) -> _Step:
        begun = time.perf_counter()
        self._tokens.token_ids[:size] = -1
        self._tokens.window.slots[:, :size] = -1
        self._compute(size, nullcontext)  # compiles kernels and sets libraries up, which a capture must not
        step = self._compute(size, self._capturing)
        log.info("captured a step of %d tokens in %.1f s", size, time.perf_counter() - begun)
        return step

    def _compute(self, size: int, around: Callable[[], AbstractContextManager[Any]]) -> _Step:
        """Launch the pieces for `size` tokens, each inside of what `around` gives, which may be its graph."""
        window = StoreFacts(self._tokens.window.rows[:size], self._tokens.window.slots[:, :size])
        tokens = TokenFacts(self._tokens.token_ids[:size], {n: t[:size] for n, t in self._tokens.rope.items()}, window)

        def leave(block: Block, site: Site) -> Residual:
            return block.leave(site, block.attention.finish(self._out[:size], tokens), tokens.token_ids)

        pieces: list[_Piece] = []
        last: tuple[Block, Site] | None = None
        for layer, block in enumerate(self.model.blocks):
            attention, rows = block.attention, self._table_rows.get(layer)
            with around() as graph:
                residual = self.model.embed(tokens.token_ids) if last is None else leave(*last)
                last = block, block.enter(residual, None if rows is None else rows[:size])
                of_x = attention.project(last[1].x)
                queries = attention.queries(of_x, tokens, self.cache)
                index_queries = None if attention.indexer is None else attention.index_queries(of_x)
            of_index = None if index_queries is None else _alias(index_queries)
            pieces.append(_Piece(graph, block, [_alias(row) for row in of_x.rows], _alias(queries), of_index))
            del residual, of_x, queries, index_queries  # what is captured next may lie where they do
        assert last is not None
        with around() as graph:
            residual = leave(*last)
        parts = (residual.streams, residual.pre, residual.out, residual.post, residual.comb)
        streams, pre, *rest = (None if part is None else _alias(part) for part in parts)
        assert streams is not None and pre is not None
        return _Step(pieces, graph, Residual(streams, pre, *rest))

    @contextmanager
    def _capturing(self) -> Iterator[torch.cuda.CUDAGraph]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Other threads may wait for streams of theirs meanwhile (`engine.link`).
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                yield graph
            except BaseException:
                with suppress(RuntimeError):  # that nothing was captured is known
                    graph.capture_end()
                raise
            graph.capture_end()


@lru_cache(maxsize=8)
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: libraries keep a workspace of 32 MiB for every stream."""
    return torch.cuda.Stream(device)


class _Place:
    def __init__(self, x: Tensor) -> None:
        strides = tuple(n * x.element_size() for n in x.stride())
        kind, data = f"<i{x.element_size()}", (x.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": tuple(x.shape), "strides": strides, "typestr": kind, "data": data, "version": 3}


def _alias(x: Tensor) -> Tensor:
    """`x` by its place in memory, which it does not keep: once it is read, graphs may have something else there."""
    return torch.as_tensor(_Place(x), device=x.device).view(x.dtype)
