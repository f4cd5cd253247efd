"""Loads a model, sizes its caches, and computes steps."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from abyssal.checkpoint.loader import LoadWeights, load_weights
from abyssal.config import EngineConfig, ModelConfig
from abyssal.engine.decoder import Decoder
from abyssal.engine.pieces import Pieces
from abyssal.engine.workspace import measure_workspace
from abyssal.errors import ConfigError
from abyssal.kv.batch import UNKNOWN, Chunk, Drawn, build_batch
from abyssal.kv.planner import PoolSizes, divide_budget
from abyssal.kv.pool import KVCache, SequenceCache
from abyssal.kv.prefix import PrefixIndex
from abyssal.kv.specs import plan_caches
from abyssal.model.model import AfterLayer, Model
from abyssal.ops._select import select_ops
from abyssal.ops.linear import LinearWeight
from abyssal.ops.ngram_hash import NgramHash, ngram_hash
from abyssal.parallel.comm import ALONE, Comm, Shape
from abyssal.tokenizer import Tokenizer

log = logging.getLogger("abyssal")

# Values of a step's hidden states up to which a CPU computes it on one thread. With two, tiny-v4 decodes a request no faster when nobody
# else wants the cores, and takes nine times as long when somebody does: they wait for each other after every small product.
ONE_THREAD_VALUES = 1024


class Runner:
    """One model on one device, with its page pools."""

    def __init__(
        self,
        folder: Path,
        model_config: ModelConfig,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        load: LoadWeights = load_weights,
        comm: Comm = ALONE,
    ) -> None:
        """`config` is resolved: no option is "auto". `load` reads the weights; a benchmark makes them up."""
        self.model_config, self.config = model_config, config
        self.comm = comm
        self.pieces: Pieces | None = None
        local = comm.mesh.local(model_config)
        self.ngrams = _ngram_hash(model_config, tokenizer)
        self._history = 0 if self.ngrams is None else self.ngrams.history  # tokens that n-grams look back to
        self.device = torch.device(config.device)
        self.dtype = dtype = getattr(torch, config.dtype)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # products accumulate in fp32 (V4 spec 3.3)
        # Before the weights: what does not fit is cheap to find.
        self.plan = plan_caches(model_config, *config.record_layouts)
        self.ops = select_ops(config, local, self.plan, self.device)
        first = comm.mesh.rank == 0
        weights = load(folder, model_config, self.device, dtype, first, config.engram_cache_bytes, comm.mesh)
        self.quantised = any(isinstance(w, LinearWeight) and w.format != "plain" for w in weights.values())
        self.model = Model(weights, local, dtype, self.ops, comm)
        if self.ngrams is not None and self.model.reads_tables:
            self.ngrams = self.ngrams.to(self.device)
        self.step_bytes: int | None = None  # of GPU memory, set aside for the largest step; None: kv_cache_bytes was given
        self.sizes = divide_budget(
            self.plan,
            comm.smallest(self._budget()),
            config.max_num_seqs,
            config.max_num_batched_tokens,
            max_model_len=config.max_model_len or model_config.max_position,
            must_fit=config.max_model_len or 0,
        )
        self.max_model_len = self._max_model_len(self.sizes)
        identity = comm.share(self._identity().encode()).decode()
        prefix = PrefixIndex(repr((identity, config.record_layouts))) if config.enable_prefix_caching else None
        self.cache = KVCache(self.plan, self.sizes.num_pages, self.device, prefix, identity)
        self.decoder: Decoder | None = None
        if config.enable_cuda_graphs:
            self.decoder = Decoder(
                model_config, self.model, self.cache, self.ngrams, self.device, config.max_num_seqs, self.max_model_len
            )
            if self._captures_pieces:
                self.pieces = Pieces(self.model, self.cache, config.max_num_batched_tokens, self.decoder.memory)

    @property
    def capacity_tokens(self) -> int:
        return self.sizes.capacity_tokens or self.model_config.max_position

    @property
    def needs_tokens(self) -> bool:
        """Whether the host has to know the tokens of a step before it is launched: it reads rows of n-gram tables by them."""
        return self.ngrams is not None and not self.model.reads_tables

    def __call__(
        self,
        chunks: list[Chunk],
        logit_rows: list[int],
        after_layer: AfterLayer | None = None,
        drawn: Drawn | None = None,
    ) -> Tensor:
        """Launch `chunks` (pages allocated, single tokens first) -> logits fp32 [len(logit_rows), V] on the device.

        They hold until the next call.

        Args:
            after_layer: as in `Model.compute`, for a runner that captures no graphs.
            drawn: tokens that are missing in `chunks`; none if `needs_tokens`.
        """
        if self.decoder is not None and self.decoder.takes(chunks) and len(logit_rows) == len(chunks):
            return self.decoder(chunks, drawn)
        return self._compute(chunks, self.cache, logit_rows, after_layer, drawn)

    def argmax(self, logits: Tensor) -> Tensor:
        """As of `abyssal.ops`; of the latest logits it may be known already."""
        known = None if self.decoder is None else self.decoder.argmax(logits)
        return self.ops.argmax(logits) if known is None else known

    def _compute(
        self,
        chunks: list[Chunk],
        cache: KVCache,
        logit_rows: list[int],
        after_layer: AfterLayer | None = None,
        drawn: Drawn | None = None,
    ) -> Tensor:
        tokens = sum(len(chunk.token_ids) for chunk in chunks)
        self.comm.enter(tokens)
        batch = build_batch(
            self.model_config, cache, chunks, logit_rows, self.device, self.ngrams, drawn, as_lists=self.ops.as_lists
        )
        with cpu_threads(1 if tokens * self.model_config.hidden_size <= ONE_THREAD_VALUES else torch.get_num_threads()):
            pieces = self._pieces_of(tokens)
            if pieces is None:
                return self.model(batch, cache, after_layer)
            assert cache is self.cache and after_layer is None, "graphs read these caches, and have no place between two layers"
            return pieces(batch)

    def _pieces_of(self, tokens: int) -> Pieces | None:
        """What replays a step of so many tokens, captured by now; None: it is launched op by op."""
        if self.pieces is None or tokens > self.pieces.most_tokens:
            return None
        try:
            self.pieces.capture(tokens)
        except torch.OutOfMemoryError as error:
            log.warning("no memory to capture steps of prompts, which are launched op by op from now on: %s", error)
            self.pieces = None
        return self.pieces

    def idle(self, shape: Shape | None) -> None:
        """Compute this rank's experts in a step of others, in the shape that these agreed on."""
        if shape is None:
            self.model.idle()
        else:
            assert self.decoder is not None, "ranks have the same options"
            self.decoder.idle(shape)

    def chunk(self, token_ids: list[int], start: int, end: int, cache: SequenceCache) -> Chunk:
        """Tokens [start, end) of the sequence `token_ids`, with what its n-gram hashes need of the tokens before.

        `start` may be behind the last of them, for the token that follows.
        """
        before = token_ids[max(0, start - self._history) : start] if self._history else ()
        return Chunk(token_ids[start:end] or [UNKNOWN], start, cache, before)

    def _capture_pieces(self, cache: KVCache) -> Pieces:
        pieces = Pieces(self.model, cache, self.config.max_num_batched_tokens, torch.cuda.graph_pool_handle())
        pieces.capture(pieces.most_tokens)
        return pieces

    @property
    def _captures_pieces(self) -> bool:
        """With several ranks in a step what they exchange depends on the tokens."""
        mesh = self.comm.mesh
        return bool(self.config.enable_cuda_graphs) and self.device.type == "cuda" and mesh.tp == mesh.ep == 1

    def _identity(self) -> str:
        """Says which model and dtype make the records, wherever the checkpoint lies: any training changes the weights sampled here."""
        facts = repr((self.model_config, self.config.dtype)).encode()
        return hashlib.sha256(facts + self.model.sample.cpu().numpy().tobytes()).hexdigest()

    def _budget(self) -> int:
        if self.config.kv_cache_bytes is not None:
            return self.config.kv_cache_bytes
        config, longest = self.config, self.config.max_model_len or self.model_config.max_position
        # The reference gathers the keys of all sequences at the length of the longest: a rare step, left to shrink when it occurs.
        sequences = config.max_num_seqs if self.ops.as_lists else 1
        total = torch.cuda.mem_get_info(self.device)[1]
        try:
            step = measure_workspace(
                self._compute, self.plan, self.device, sequences, config.max_num_batched_tokens, longest, self._history,
                capture=self._capture_pieces if self._captures_pieces else None,
            )  # fmt: skip
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a step of max_num_batched_tokens={config.max_num_batched_tokens} and max_num_seqs={config.max_num_seqs} at {longest} tokens "
                f"does not fit beside {torch.cuda.memory_allocated(self.device) / 2**30:.2f} GiB of weights, of {total / 2**30:.2f} GiB; lower "
                "one of these or max_model_len"
            ) from error
        free, _ = torch.cuda.mem_get_info(self.device)  # after it: libraries and compiled kernels have taken theirs
        unused = int((1 - config.gpu_memory_utilization) * total)
        weights = torch.cuda.memory_allocated(self.device)
        shares = {
            "weights": weights,
            "libraries, kernels and other processes": total - free - weights,
            "the largest step": step,
            f"left free by gpu_memory_utilization={config.gpu_memory_utilization}": unused,
            "KV cache": free - unused - step,
        }
        table = "; ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in shares.items())
        if shares["KV cache"] <= 0:
            raise ConfigError(
                f"no GPU memory left for the KV cache, of {total / 2**30:.2f} GiB: {table}; raise gpu_memory_utilization, lower "
                f"max_num_batched_tokens={config.max_num_batched_tokens} or max_num_seqs={config.max_num_seqs}, or use a larger GPU"
            )
        log.info("GPU memory of %.2f GiB: %s", total / 2**30, table)
        self.step_bytes = step
        return shares["KV cache"]

    def _max_model_len(self, sizes: PoolSizes) -> int:
        capacity, asked = self.capacity_tokens, self.config.max_model_len
        if asked is None:
            return min(capacity, self.model_config.max_position)
        if asked > capacity:
            raise ConfigError(
                f"max_model_len={asked} does not fit: the KV cache of {sizes.total_bytes} bytes holds {capacity} tokens of one "
                f"sequence; raise kv_cache_bytes or set max_model_len to at most {capacity}"
            )
        return asked


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Operators that this thread runs inside use `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _ngram_hash(config: ModelConfig, tokenizer: Tokenizer | None) -> NgramHash | None:
    if config.engram is None:
        return None
    if tokenizer is None:
        raise ConfigError(
            "this model has n-gram tables, which are addressed by the texts of its tokens: tokenizer.json is missing"
        )
    return ngram_hash(config.engram, tokenizer.vocabulary(), config.vocab_size)
