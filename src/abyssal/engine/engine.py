"""The engine: requests in, tokens out, one step at a time. It knows token ids only; text is the caller's."""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from abyssal.checkpoint.source import resolve_model
from abyssal.config import EngineConfig, resolve
from abyssal.engine.request import EngineLimits, EngineRequest, FinishReason, RequestUpdate, check_ids, check_request
from abyssal.engine.runner import Runner
from abyssal.engine.sampler import SampledToken, SamplerState, prompt_logprobs, sample
from abyssal.engine.scheduler import Scheduler
from abyssal.engine.sequence import Sequence
from abyssal.errors import EngineDeadError, RequestError
from abyssal.kv.batch import Chunk
from abyssal.model_config import load_generation_defaults, load_model_config
from abyssal.tokenizer import Tokenizer

if TYPE_CHECKING:
    from abyssal.engine.grammar import GrammarMasks

log = logging.getLogger("abyssal")

Scheduled = list[tuple[Sequence, int]]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a front end needs to know of a running engine."""

    model_name: str
    model_folder: str
    family: str
    vocab_size: int  # ids that mean something: the tokenizer's count where there is one
    model_vocab_size: int
    bos_token_id: int
    eos_token_ids: list[int]
    max_model_len: int
    capacity_tokens: int  # tokens that one sequence can hold in the caches
    options: dict[str, str]  # resolved engine options, printable
    sampling_defaults: dict[str, Any]  # of the checkpoint's generation_config.json, as SamplingParams fields

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(self.vocab_size, self.max_model_len, self.capacity_tokens)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for metrics."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_steps: int
    prompt_tokens: int  # computed so far, recomputation included
    generation_tokens: int
    pages_total: dict[str, int]  # by bucket
    pages_free: dict[str, int]
    page_bytes: dict[str, int]
    pages_by_kind: dict[str, int]


class Engine:
    """Continuous batching over one `Runner`. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(self, config: EngineConfig) -> None:
        folder = resolve_model(config.model)
        model_config = load_model_config(folder)
        self.config = resolve(config, model_config, torch.cuda.is_available())
        if self.config.device == "cpu" and self.config.num_threads is not None:
            torch.set_num_threads(self.config.num_threads)
        self.runner = Runner(folder, model_config, self.config)
        self.cache = self.runner.cache
        # For callers in this process; here it tells which ids mean something, and which end a text.
        self.tokenizer = tokenizer = Tokenizer.load(folder, model_config.vocab_size)
        eos = model_config.eos_token_ids
        self.info = EngineInfo(
            model_name=self.config.served_model_name or folder.name,
            model_folder=str(folder),
            family=model_config.family,
            vocab_size=tokenizer.vocab_size if tokenizer else model_config.vocab_size,
            model_vocab_size=model_config.vocab_size,
            bos_token_id=model_config.bos_token_id,
            eos_token_ids=tokenizer.eos_token_ids(eos) if tokenizer else sorted(eos),
            max_model_len=self.runner.max_model_len,
            capacity_tokens=self.runner.capacity_tokens,
            options={name: str(getattr(self.config, name)) for name in _PRINTED_OPTIONS},
            sampling_defaults=load_generation_defaults(folder)[1],
        )
        self.scheduler = Scheduler(self.cache, self.config.max_num_batched_tokens, self.config.max_num_seqs)
        self._sequences: dict[str, Sequence] = {}
        self._requests_seen = 0
        self._steps = self._prompt_tokens = self._generation_tokens = 0
        self._log_start()

    def _log_start(self) -> None:
        options = ", ".join(f"{name}={value}" for name, value in self.info.options.items())
        log.info("model %s: %s", self.info.model_name, options)
        sizes = self.runner.sizes
        log.info(
            "KV cache %.2f GiB: %d tokens of one sequence, windows of %d sequences; max_model_len %d",
            sizes.total_bytes / 2**30, self.runner.capacity_tokens, sizes.num_sequences, self.runner.max_model_len,
        )  # fmt: skip

    def add(self, request: EngineRequest) -> None:
        """Queue `request`.

        Raises:
            RequestError: it can never be served as asked.
        """
        if request.request_id in self._sequences:
            raise RequestError(f"request id {request.request_id!r} is already in use", param="request_id")
        max_new_tokens = check_request(request, self.info.limits)
        self._requests_seen += 1
        sampler = SamplerState(
            request.params,
            request.prompt_ids,
            self.info.eos_token_ids,
            fallback_seed=(self.config.seed, self._requests_seen),
            mask=None if request.grammar is None else self._grammar_masks.mask(request.grammar),
        )
        seq = Sequence(request, self.cache.new_sequence(), sampler, max_new_tokens, list(request.prompt_ids))
        self._sequences[request.request_id] = seq
        self.scheduler.waiting.append(seq)

    @cached_property
    def _grammar_masks(self) -> GrammarMasks:
        from abyssal.engine.grammar import GrammarMasks  # its library is needed for structured output only, and slow to import

        assert self.tokenizer is not None, "a grammar was compiled, so there is a tokenizer"
        return GrammarMasks(self.tokenizer, self.info.model_vocab_size, self.info.eos_token_ids)

    def abort(self, request_id: str) -> None:
        """Drop a request and return its pages; an unknown or finished id is ignored, since it may just have ended."""
        if (seq := self._sequences.pop(request_id, None)) is not None:
            self.scheduler.remove(seq)

    def score(self, token_ids: list[int], chunk_sizes: list[int], rows: list[int]) -> Tensor:
        """Logits fp32 [len(rows), V] on the CPU of ascending positions `rows`, the prefill cut into `chunk_sizes`.

        Raises:
            RequestError: there is no token, an id is unknown, or the caches have no room beside the requests that run.
        """
        if not token_ids:
            raise RequestError("token_ids is empty; give at least one token", param="token_ids")
        check_ids("token_ids", token_ids, self.info.vocab_size)
        cache, start, first_row, parts = self.cache.new_sequence(), 0, 0, []
        try:
            for count in chunk_sizes:
                if not self.cache.allocate(cache, start, start + count):
                    raise RequestError(
                        f"the KV cache has no room for {len(token_ids)} tokens in chunks of {count}; raise kv_cache_bytes or cut smaller",
                        param="token_ids",
                    )
                end_row = bisect_left(rows, start + count)
                chunk = Chunk(token_ids[start : start + count], start, cache)
                parts.append(self.runner([chunk], [p - start for p in rows[first_row:end_row]]).float().cpu())
                start, first_row = start + count, end_row
                self.cache.release_unneeded(cache, start)
        finally:
            self.cache.free(cache)
        return torch.cat(parts)

    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def step(self) -> list[RequestUpdate]:
        """Compute one batch and report what each request got.

        Raises:
            EngineDeadError: the device is lost; the engine cannot go on.
        """
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return self._refuse_head()
        self._steps += 1
        return self._run(scheduled)

    def stats(self) -> EngineStats:
        pools = self.cache.pools
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_preemptions=self.scheduler.num_preemptions,
            num_steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            pages_total={str(b): p.num_pages for b, p in pools.items()},
            pages_free={str(b): p.num_free for b, p in pools.items()},
            page_bytes={str(b): p.page_bytes for b, p in pools.items()},
            pages_by_kind=dict(self.cache.used_by_kind),
        )

    def _refuse_head(self) -> list[RequestUpdate]:
        """Nothing can be scheduled: with nothing running, the first waiting request can never run."""
        if not self.scheduler.waiting:
            return []
        seq = self.scheduler.waiting[0]
        return [self._fail(seq, "the KV cache cannot hold this request; shorten it or raise kv_cache_bytes")]

    def _run(self, scheduled: Scheduled) -> list[RequestUpdate]:
        try:
            return self._compute(scheduled)
        except Exception as error:
            if _device_lost(error):
                raise EngineDeadError(f"the device failed: {error}") from error
            if len(scheduled) == 1:
                log.exception("request %s failed", scheduled[0][0].request.request_id)
                return [self._fail(scheduled[0][0], f"internal error: {type(error).__name__}: {error}")]
        # One of several sequences broke the step. Nothing was committed, so each is computed alone, and only the culprit ends.
        return [update for item in scheduled for update in self._run([item])]

    def _compute(self, scheduled: Scheduled) -> list[RequestUpdate]:
        chunks, rows, offset = [], [], 0
        wanted: list[tuple[Sequence, list[int], bool]] = []  # sequence, prompt positions to score, whether it samples
        for seq, count in scheduled:
            start, end = seq.num_computed, seq.num_computed + count
            chunks.append(Chunk(seq.token_ids[start:end], start, seq.cache))
            scored = _prompt_positions(seq, start, end)
            samples = end == len(seq.token_ids)
            wanted.append((seq, scored, samples))
            rows += [offset + p - start for p in scored] + [offset + count - 1] * samples
            offset += count
        logits = self.runner(chunks, rows)
        sampled = self._sample(logits, wanted)
        return [u for (seq, count), token in zip(scheduled, sampled, strict=True) if (u := self._commit(seq, count, token))]

    def _sample(self, logits: Tensor, wanted: list[tuple[Sequence, list[int], bool]]) -> list[SampledToken | None]:
        """Record prompt logprobs, and draw one token for every sequence that computed its last one."""
        sample_rows, states, row = [], [], 0
        for seq, scored, samples in wanted:
            if scored:
                targets = [seq.token_ids[p + 1] for p in scored]
                count = seq.request.params.prompt_logprobs or 0
                seq.prompt_logprobs += prompt_logprobs(logits[row : row + len(scored)], targets, count)
                row += len(scored)
            if samples:
                sample_rows.append(row)
                states.append(seq.sampler)
                row += 1
        drawn = iter(sample(logits[sample_rows], states) if states else [])
        return [next(drawn) if samples else None for _, _, samples in wanted]

    def _commit(self, seq: Sequence, count: int, token: SampledToken | None) -> RequestUpdate | None:
        """Advance `seq` by what the step computed; None when the request has nothing to report yet."""
        first_computed = seq.num_computed
        seq.num_computed += count
        self.cache.release_unneeded(seq.cache, seq.num_computed)
        self._prompt_tokens += max(0, min(seq.num_computed, len(seq.request.prompt_ids)) - first_computed)
        if token is None:
            return None
        if token.error is not None:
            return self._fail(seq, token.error)
        seq.token_ids.append(token.token_id)
        seq.sampler.append(token.token_id)
        self._generation_tokens += 1
        reason, stop_id = self._finish_reason(seq, token.token_id)
        if reason is not None:
            self._end(seq)
        asked = seq.request.params.prompt_logprobs is not None and seq.num_output == 1
        return RequestUpdate(
            seq.request.request_id,
            [token.token_id],
            None if token.logprobs is None else [token.logprobs],
            [None, *seq.prompt_logprobs] if asked else None,
            reason,
            stop_id,
        )

    def _finish_reason(self, seq: Sequence, token: int) -> tuple[FinishReason | None, int | None]:
        if token in seq.sampler.ending_ids:  # never drawn before min_tokens
            return "stop", token
        return ("length", None) if seq.num_output >= seq.max_new_tokens else (None, None)

    def _fail(self, seq: Sequence, message: str) -> RequestUpdate:
        self._end(seq)
        return RequestUpdate(seq.request.request_id, [], None, None, finish_reason="error", error=message)

    def _end(self, seq: Sequence) -> None:
        del self._sequences[seq.request.request_id]
        self.scheduler.remove(seq)


_PRINTED_OPTIONS = (
    "device", "dtype", "kv_layout", "compressed_kv_layout", "index_layout", "backend", "max_num_seqs", "max_num_batched_tokens",
)  # fmt: skip


def _prompt_positions(seq: Sequence, start: int, end: int) -> list[int]:
    """Prompt positions in [start, end) whose next token's logprob is asked for and not yet known."""
    if seq.request.params.prompt_logprobs is None:
        return []
    return list(range(max(start, len(seq.prompt_logprobs)), min(end, len(seq.request.prompt_ids) - 1)))


def _device_lost(error: Exception) -> bool:
    """CUDA reports an asynchronous fault in every later call: no request of this process can be computed any more."""
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)
