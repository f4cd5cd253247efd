"""The engine: requests in, tokens out, one step at a time. It knows token ids only; text is the caller's."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from abyssal.checkpoint.loader import LoadWeights, load_weights
from abyssal.checkpoint.source import resolve_model
from abyssal.config import EngineConfig, resolve
from abyssal.engine.flight import Flight, Strips
from abyssal.engine.request import EngineLimits, EngineRequest, FinishReason, RequestUpdate, check_ids, check_request
from abyssal.engine.runner import Runner
from abyssal.engine.sampler import SampledToken, SamplerState, prompt_logprobs, sample, sample_plain, unusable
from abyssal.engine.scheduler import Scheduler
from abyssal.engine.sequence import Sequence
from abyssal.engine.swap import SwapSpace
from abyssal.errors import EngineDeadError, RequestError
from abyssal.kv.batch import Chunk, Drawn
from abyssal.kv.handover import HandOver, check, export, restore
from abyssal.kv.planner import fixed_bytes, token_bytes
from abyssal.model_config import load_generation_defaults, load_model_config
from abyssal.ops._select import find_gpu
from abyssal.parallel.comm import ALONE, Comm
from abyssal.tokenizer import Tokenizer

if TYPE_CHECKING:
    from abyssal.engine.grammar import GrammarMasks

log = logging.getLogger("abyssal")

T = TypeVar("T")
Scheduled = list[tuple[Sequence, int]]
OUT_OF_MEMORY = torch.OutOfMemoryError()
MOST_SHORTAGES = 3  # times that a sequence may run out of memory alone: another process may have had it for a moment


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
    image_token_id: int | None = None

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(self.vocab_size, self.max_model_len, self.capacity_tokens, self.image_token_id)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for metrics."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_swapped: int  # preemptions whose caches were copied to the host
    num_steps: int
    prompt_tokens: int  # computed so far, recomputation included
    cached_tokens: int  # of prompts, taken from the prefix index instead
    generation_tokens: int
    pages_total: dict[str, int]  # by bucket
    pages_free: dict[str, int]  # with those that only the prefix index holds
    pages_cached: dict[str, int]  # these
    page_bytes: dict[str, int]
    pages_by_kind: dict[str, int]
    bytes_by_kind: dict[str, int]  # of those pages


class Engine:
    """Continuous batching over one `Runner`. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(self, config: EngineConfig, load: LoadWeights = load_weights, comm: Comm = ALONE) -> None:
        """
        Args:
            load: reads the weights; a benchmark makes them up.
            comm: of several ranks each has an engine; those of one replica are given the same requests and steps.
        """
        self.comm = comm
        folder = resolve_model(config.model)
        model_config = load_model_config(folder)
        self.config = resolve(config, model_config, torch.cuda.is_available(), find_gpu())
        if self.config.device == "cpu" and self.config.num_threads is not None:
            torch.set_num_threads(self.config.num_threads)
        # For callers in this process; here it tells which ids mean something, and which end a text.
        self.tokenizer = tokenizer = Tokenizer.load(folder, model_config.vocab_size)
        self.runner = Runner(folder, model_config, self.config, tokenizer, load, comm)
        self.cache = self.runner.cache
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
            image_token_id=model_config.image_token_id,
        )
        self.swap = SwapSpace(self.cache, self.runner.plan, self.config.swap_bytes, comm.agree)
        self.scheduler = Scheduler(self.cache, self.swap, self.config.max_num_batched_tokens, self.config.max_num_seqs)
        self._sequences: dict[str, Sequence] = {}
        self._flight: Flight | None = None  # a step that nobody has waited for yet
        self._strips = Strips(self.config.max_num_seqs, self.runner.device)
        self._landed_at = 0.0  # when the last one was done, as of `time.perf_counter`
        self._landed: list[RequestUpdate] = []  # found out between steps, to be reported by the next
        self._requests_seen = 0
        self._steps = self._prompt_tokens = self._cached_tokens = self._generation_tokens = 0
        self._log_start()

    def _log_start(self) -> None:
        options = ", ".join(f"{name}={value}" for name, value in self.info.options.items())
        log.info("model %s: %s", self.info.model_name, options)
        sizes = self.runner.sizes
        log.info(
            "KV cache %.4g GiB: %d tokens of one sequence, windows of %d sequences; max_model_len %d",
            sizes.total_bytes / 2**30, self.runner.capacity_tokens, sizes.num_sequences, self.runner.max_model_len,
        )  # fmt: skip
        kinds = ", ".join(f"{name} {size:g}" for name, size in token_bytes(self.runner.plan).items())
        log.info(
            "bytes per token: %s; windows and states: up to %.2f MiB of pages per sequence",
            kinds or "none", fixed_bytes(self.runner.plan) / 2**20,
        )  # fmt: skip

    def add(self, request: EngineRequest) -> None:
        """Queue `request`.

        Raises:
            RequestError: it can never be served as asked.
        """
        seq = self._new_sequence(request, [])
        self._sequences[request.request_id] = seq
        self.scheduler.waiting.append(seq)

    def _new_sequence(self, request: EngineRequest, output_ids: list[int]) -> Sequence:
        if self._is_in_use(request.request_id):
            raise RequestError(f"request id {request.request_id!r} is already in use", param="request_id")
        max_new_tokens = check_request(request, self.info.limits)
        self._requests_seen += 1
        seed = (self.config.seed, self._requests_seen)
        mask = None if request.grammar is None else self._grammar_masks.mask(request.grammar)
        sampler = SamplerState(request.params, request.prompt_ids, self.info.eos_token_ids, seed, output_ids, mask)
        token_ids = [*request.prompt_ids, *output_ids]
        return Sequence(request, self.cache.new_sequence(request.cache_salt), sampler, max_new_tokens, token_ids)

    @cached_property
    def _grammar_masks(self) -> GrammarMasks:
        from abyssal.engine.grammar import GrammarMasks  # its library is needed for structured output only, and slow to import

        assert self.tokenizer is not None, "a grammar was compiled, so there is a tokenizer"
        return GrammarMasks(self.tokenizer, self.info.model_vocab_size, self.info.eos_token_ids)

    def abort(self, request_id: str) -> None:
        """Drop a request and return its pages; an unknown or finished id is ignored, since it may just have ended.

        No step reports anything of it any more.
        """
        if (seq := self._sequences.pop(request_id, None)) is not None:
            self.scheduler.remove(seq)
            if not self._sequences:  # nobody waits for it, and it would be measured up to the next request
                self._flight = None
        self._landed = [update for update in self._landed if update.request_id != request_id]

    def score(self, token_ids: list[int], chunk_sizes: list[int], rows: list[int], reuse_prefix: bool = False) -> Tensor:
        """Logits fp32 [len(rows), V] on the CPU of ascending positions `rows`, the prefill cut into `chunk_sizes`.

        With `reuse_prefix` known tokens are not computed, and their rows are NaN; what is left is cut where it would be anyway.

        Raises:
            RequestError: there is no token, an id is unknown, or the caches have no room beside the requests that run.
        """
        if not token_ids:
            raise RequestError("token_ids is empty; give at least one token", param="token_ids")
        check_ids("token_ids", token_ids, self.info.vocab_size)
        cache = self.cache.new_sequence()
        try:
            start = self.cache.reuse(cache, token_ids) if reuse_prefix else 0
            first_row = bisect_left(rows, start)
            parts = [torch.full((first_row, self.info.model_vocab_size), torch.nan)]
            for end in accumulate(chunk_sizes):
                if end <= start:
                    continue
                if not self.cache.allocate(cache, start, end):
                    raise RequestError(
                        f"the KV cache has no room for {len(token_ids)} tokens in chunks of {end - start}; raise kv_cache_bytes or "
                        "cut smaller",
                        param="token_ids",
                    )
                end_row = bisect_left(rows, end)
                chunk = self.runner.chunk(token_ids, start, end, cache)
                parts.append(self.runner([chunk], [p - start for p in rows[first_row:end_row]]).float().cpu())
                start, first_row = end, end_row
                self.cache.commit(cache, token_ids, start)
                self.cache.release_unneeded(cache, start)
        finally:
            self.cache.free(cache)
        return torch.cat(parts)

    def export_sequence(self, request_id: str) -> HandOver:
        """What is computed of a running request, for `import_sequence` of another engine. The request goes on here, too.

        Raises:
            RequestError: the request is unknown or nothing of it is in the caches.
        """
        self._land_between_steps()
        seq = self._sequences.get(request_id)
        if seq is None or seq.num_computed == 0:
            raise RequestError(f"request {request_id!r} has nothing in the caches; export it while it runs", param="request_id")
        return export(self.cache, seq.cache, seq.token_ids)

    def import_sequence(self, request: EngineRequest, handed: HandOver) -> None:
        """Take up `request` where another engine left it: the next step computes the first token that `handed` lacks.

        Tokens that `handed` has beyond the prompt are output that its engine has reported already.

        Raises:
            HandOverError: `handed` is of another model or layout, or damaged.
            RequestError: the request is not the one handed over, cannot be served, or there is no room at this time.
        """
        check(self.cache, handed)
        self._land_between_steps()
        prompt, output = request.prompt_ids, handed.token_ids[len(request.prompt_ids) :]
        seq = self._new_sequence(request, output)
        if handed.token_ids[: len(prompt)] != prompt:
            raise RequestError("the hand-over has another prompt than the request", param="prompt")
        check_ids("token_ids", output, self.info.vocab_size)
        if handed.num_tokens >= len(seq.token_ids) or len(output) >= seq.max_new_tokens:
            raise RequestError("the hand-over leaves nothing to compute; raise max_tokens", param="max_tokens")
        if request.params.prompt_logprobs is not None and not output:
            raise RequestError("prompt_logprobs need the whole prompt to be computed by one engine", param="prompt_logprobs")
        if len(self.scheduler.running) >= self.config.max_num_seqs or not restore(self.cache, seq.cache, handed):
            raise RequestError(f"no room for a sequence of {handed.num_tokens} tokens now; try again when requests have ended")
        seq.num_computed = handed.num_tokens
        self._sequences[request.request_id] = seq
        self.scheduler.running.append(seq)

    def has_unfinished(self) -> bool:
        return bool(self._sequences or self._landed)

    def poll_ms(self) -> int | None:
        """Milliseconds that whoever steps the engine may wait for messages before the next step; None: for as long as none comes."""
        return 0 if self._sequences or self._landed else None

    def step(self) -> list[RequestUpdate]:
        """Compute one batch and report what each request got.

        On a GPU, steps of plain requests are launched one ahead: such a step reports what the one before it computed, the first nothing.

        Raises:
            EngineDeadError: the device is lost; the engine cannot go on.
        """
        try:
            return self._step()
        except KeyboardInterrupt:  # in the middle of the layers, most likely: no record of what runs can be relied on
            self._flight = None
            self.scheduler.restart(self.scheduler.running)
            raise

    def _step(self) -> list[RequestUpdate]:
        scheduled = self.scheduler.schedule()
        flies = self._can_fly(scheduled)
        if self._flight is not None and not flies:  # what comes next follows from its tokens
            self._land_between_steps()
            scheduled = self.scheduler.schedule()
            flies = self._can_fly(scheduled)
        self._steps += bool(scheduled)
        if flies:
            updates = self._launch(scheduled)
        else:
            updates = self._run(scheduled) if scheduled else self._refuse_head()
        landed, self._landed = self._landed, []
        return landed + updates

    def close(self) -> None:
        """Wait for a step under way, then let go of the captured graphs: a communicator that they use can be destroyed only after them.

        The rest goes with the object.
        """
        self._flight = None
        try:
            self.cache.wait()
        except RuntimeError as error:
            log.warning("the device failed before the engine was closed: %s", error)
        if self.runner.decoder is not None:
            self.runner.decoder.close()

    def stats(self) -> EngineStats:
        pools = self.cache.pools
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_preemptions=self.scheduler.num_preemptions,
            num_swapped=self.swap.num_saved,
            num_steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generation_tokens=self._generation_tokens,
            pages_total={str(b): p.num_pages for b, p in pools.items()},
            pages_free={str(b): p.num_available for b, p in pools.items()},
            pages_cached={str(b): p.num_idle for b, p in pools.items()},
            page_bytes={str(b): p.page_bytes for b, p in pools.items()},
            pages_by_kind=dict(self.cache.used_by_kind),
            bytes_by_kind={
                n: count * pools[self.cache.specs[n].bucket].page_bytes for n, count in self.cache.used_by_kind.items()
            },
        )

    def _refuse_head(self) -> list[RequestUpdate]:
        """Nothing can be scheduled: with nothing running, the first waiting request can never run."""
        if not self.scheduler.waiting:
            return []
        seq = self.scheduler.waiting[0]
        return [self._fail(seq, "the KV cache cannot hold this request; shorten it or raise kv_cache_bytes")]

    def _run(self, scheduled: Scheduled) -> list[RequestUpdate]:
        updates, failure = self._attempt(lambda: self._compute(scheduled), len(scheduled))
        return updates or [] if failure is None else self._redo(scheduled, failure)

    def _attempt(self, compute: Callable[[], T], num_sequences: int) -> tuple[T | None, Exception | None]:
        """The result of a step, or why there is none. `OUT_OF_MEMORY` stands for all errors of its kind: these keep a step's tensors.

        Raises:
            EngineDeadError: the device is lost.
        """
        try:
            result = compute()
        except torch.OutOfMemoryError as error:
            log.warning("a step of %d sequences ran out of memory: %s", num_sequences, error)
            return None, OUT_OF_MEMORY
        except EngineDeadError:
            raise
        except Exception as error:
            if _device_lost(error):
                raise EngineDeadError(f"the device failed: {error}") from error
            return None, error
        self.scheduler.budget.fits()
        return result, None

    def _redo(self, scheduled: Scheduled, failure: Exception) -> list[RequestUpdate]:
        """Compute what the step of `scheduled`, which failed, should have; some of its sequences may have ended meanwhile."""
        left = [(seq, count) for seq, count in scheduled if self._is_unfinished(seq)]
        if failure is OUT_OF_MEMORY:
            return self._shrink(left, sum(count for _, count in scheduled)) if left else []
        return self._recover(left, failure, len(scheduled))

    def _recover(self, scheduled: Scheduled, error: Exception, num_sequences: int) -> list[RequestUpdate]:
        """A step of `num_sequences` failed with `error`; `scheduled` are those of them that have not ended."""
        self._require_alone(f"{type(error).__name__}: {error}")
        if scheduled and num_sequences == 1:
            return [self._break(scheduled[0][0], error)]
        # One of several sequences broke the step, half-way through the layers: no record can be relied on. Each is computed again
        # from its first token, alone, and only the culprit ends.
        ends = [(seq, seq.num_computed + count) for seq, count in scheduled]
        for seq, _ in scheduled:
            self.cache.free(seq.cache)
            seq.num_computed = 0
        return [update for seq, end in ends for update in self._recompute(seq, end)]

    def _require_alone(self, why: str) -> None:
        """A step that failed can be computed again by a rank that is alone; others are in the middle of it, and would wait.

        Raises:
            EngineDeadError: there are others.
        """
        if self.comm.mesh.size > 1:
            raise EngineDeadError(f"a step failed on rank {self.comm.mesh.rank}: {why}")

    def _shrink(self, scheduled: Scheduled, tokens: int) -> list[RequestUpdate]:
        """A step of `tokens` did not fit into memory: those of its sequences that have not ended are computed again, in smaller steps.

        A sequence ends only when it has run out of memory several times alone, with a single token.
        """
        self._require_alone("out of memory; lower max_num_batched_tokens or gpu_memory_utilization")
        if self.runner.device.type == "cuda":
            torch.cuda.empty_cache()
        self.scheduler.budget.exceeded(tokens)
        if tokens == 1:
            (seq, _), *_ = scheduled
            seq.num_shortages += 1
            if seq.num_shortages == MOST_SHORTAGES:
                return [self._fail(seq, f"out of memory: not even one token fits behind {seq.num_computed}; shorten the request")]
        self.scheduler.restart([seq for seq, _ in scheduled])
        return []

    def _recompute(self, seq: Sequence, end: int) -> list[RequestUpdate]:
        """Compute `seq`, which holds no pages, up to token `end` in steps of its own, or leave it to the scheduler to do."""
        updates: list[RequestUpdate] = []
        if seq.may_reuse:
            seq.num_computed = self.cache.reuse(seq.cache, seq.token_ids)
        while seq.num_computed < end and not updates and seq in self.scheduler.running:
            count = min(end - seq.num_computed, self.scheduler.budget.tokens)
            if not self.cache.allocate(seq.cache, seq.num_computed, seq.num_computed + count):
                self.scheduler.preempt(seq)
                return []
            updates = self._run([(seq, count)])
        return updates

    def _can_fly(self, scheduled: Scheduled) -> bool:
        """Whether a step can be launched while the one before runs, and what it draws need not be known before the next is launched.

        What a sequence alone broke has to show at once.
        """
        if not scheduled or (self.runner.decoder is None and self.runner.device.type == "cpu"):
            return False
        for seq, count in scheduled:
            if not seq.sampler.is_plain and seq.draws(count):
                return False
            if seq.request.params.prompt_logprobs is not None and _prompt_positions(
                seq, seq.num_computed, seq.num_computed + count
            ):
                return False
        return not (self.runner.needs_tokens and any(seq.is_drawing for seq, _ in scheduled))

    def _launch(self, scheduled: Scheduled) -> list[RequestUpdate]:
        """Launch a step, then wait for the one before, from which it takes its tokens."""
        before, self._flight = self._flight, None
        self._flight, failure = self._attempt(lambda: self._take_off(scheduled, before), len(scheduled))
        updates = [] if before is None else self._land(before)
        if failure is not None:
            updates += self._redo(scheduled, failure)
        return updates

    @torch.inference_mode()
    def _take_off(self, scheduled: Scheduled, before: Flight | None) -> Flight:
        begun = time.perf_counter()
        drawn = None if before is None else before.drawn_for([seq for seq, _ in scheduled])
        sequences, indices, ahead, rows, num_tokens = [], [], [], [], 0
        for seq, count in scheduled:
            num_tokens += count
            index, known = seq.num_computed + count, len(seq.token_ids)
            if index >= known:
                sequences.append(seq)
                indices.append(index)
                ahead.append(index - known)
                rows.append(num_tokens - 1)
        logits = self._forward(scheduled, self._chunks(scheduled), rows, drawn)
        result = sample_plain(logits, [seq.sampler for seq in sequences], ahead, self.runner.argmax)
        flight = Flight.launched(sequences, indices, num_tokens, begun, result, self._strips)
        self._advance(scheduled)
        return flight

    def _land(self, flight: Flight) -> list[RequestUpdate]:
        """Wait for `flight` and report its tokens; those of requests that ended since, or that are known, are dropped."""
        try:
            tokens, usable = flight.land()
        except RuntimeError as error:
            raise EngineDeadError(f"the device failed: {error}") from error
        now = time.perf_counter()
        if flight.num_tokens > len(flight.sequences):
            self.swap.measure_step(flight.num_tokens, now - max(flight.begun, self._landed_at))
        self._landed_at = now
        updates, going_on = [], []
        for seq, index, token, is_usable in zip(flight.sequences, flight.indices, tokens, usable, strict=True):
            if self._is_unfinished(seq) and len(seq.token_ids) == index:
                updates.append(update := self._take(seq, SampledToken(token) if is_usable else unusable()))
                if seq.is_drawing and update.finish_reason is None:
                    going_on.append((seq, 1))
        self._settle(going_on)
        return updates

    def _land_between_steps(self) -> None:
        """Have the host know what the device knows."""
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self._landed += self._land(flight)

    def _is_in_use(self, request_id: str) -> bool:
        """Whether a step may still report something of that request."""
        return request_id in self._sequences or any(update.request_id == request_id for update in self._landed)

    def _is_unfinished(self, seq: Sequence) -> bool:
        return self._sequences.get(seq.request.request_id) is seq

    def _compute(self, scheduled: Scheduled) -> list[RequestUpdate]:
        rows, offset = [], 0
        wanted: list[tuple[Sequence, list[int], bool]] = []  # sequence, prompt positions to score, whether it samples
        for seq, count in scheduled:
            start, end = seq.num_computed, seq.num_computed + count
            scored, samples = _prompt_positions(seq, start, end), seq.draws(count)
            wanted.append((seq, scored, samples))
            rows += [offset + p - start for p in scored] + [offset + count - 1] * samples
            offset += count
        begun = time.perf_counter()
        sampled = self._sample(self._forward(scheduled, self._chunks(scheduled), rows), wanted)
        if not rows:
            self.cache.wait()
        self.swap.measure_step(offset, time.perf_counter() - begun)
        self._advance(scheduled)
        return [self._take(seq, token) for (seq, _), token in zip(scheduled, sampled, strict=True) if token is not None]

    def _chunks(self, scheduled: Scheduled) -> list[Chunk]:
        return [
            self.runner.chunk(seq.token_ids, seq.num_computed, seq.num_computed + count, seq.cache) for seq, count in scheduled
        ]

    def _forward(self, scheduled: Scheduled, chunks: list[Chunk], rows: list[int], drawn: Drawn | None = None) -> Tensor:
        """Logits of `rows`; `chunks` are those of `scheduled`, `drawn` what they lack."""
        return self.runner(chunks, rows, drawn=drawn)

    def _sample(self, logits: Tensor, wanted: list[tuple[Sequence, list[int], bool]]) -> list[SampledToken | None]:
        """Record prompt logprobs, and draw one token for every sequence that computed its last one; an error where that failed."""
        sample_rows, states, row = [], [], 0
        unscored: dict[int, SampledToken] = {}
        for i, (seq, scored, samples) in enumerate(wanted):
            if scored:
                targets = [seq.token_ids[p + 1] for p in scored]
                count = seq.request.params.prompt_logprobs or 0
                try:
                    seq.prompt_logprobs += prompt_logprobs(logits[row : row + len(scored)], targets, count)
                except RequestError as error:
                    unscored[i] = SampledToken(-1, error=str(error))
                row += len(scored)
            if samples:
                sample_rows.append(row)
                states.append(seq.sampler)
                row += 1
        if len(sample_rows) < len(logits):
            logits = logits[sample_rows]
        drawn = iter(sample(logits, states))
        tokens = [next(drawn) if samples else None for _, _, samples in wanted]
        return [unscored.get(i, token) for i, token in enumerate(tokens)]

    def _advance(self, scheduled: Scheduled) -> None:
        """A step has been launched: it counts as computed."""
        known = []
        for seq, count in scheduled:
            if (left := len(seq.request.prompt_ids) - seq.num_computed) > 0:
                self._prompt_tokens += min(count, left)
            seq.num_computed += count
            if seq.num_computed <= len(seq.token_ids):
                known.append((seq, count))
        self._settle(known)

    def _settle(self, computed: Scheduled) -> None:
        """Keep the complete blocks of sequences of which a step computed so many tokens, all known by now, and return unneeded pages.

        Between two steps of single tokens the scheduler does that (`KVCache.allocate_next`).
        """
        for seq, count in computed:
            self.cache.commit(seq.cache, seq.token_ids, seq.num_computed)
            if count > 1 or seq.num_computed + 1 < len(seq.token_ids):
                self.cache.release_unneeded(seq.cache, seq.num_computed)

    def _take(self, seq: Sequence, token: SampledToken) -> RequestUpdate:
        """Add the token that `seq` has drawn, and end it where that is its last."""
        if token.error is not None:
            return self._fail(seq, token.error)
        try:
            seq.sampler.append(token.token_id)
        except Exception as error:  # noqa: BLE001 others' tokens are taken by now: the step cannot be computed again
            return self._break(seq, error)
        seq.token_ids.append(token.token_id)
        self._generation_tokens += 1
        num_output = seq.num_output
        is_first = num_output == 1
        if is_first:
            self._cached_tokens += seq.num_cached
        reason: FinishReason | None = None
        is_ending = token.token_id in seq.sampler.ending_ids  # never drawn before min_tokens
        if is_ending or num_output >= seq.max_new_tokens:
            reason = "stop" if is_ending else "length"
            self._end(seq)
        return RequestUpdate(
            seq.request.request_id,
            [token.token_id],
            None if token.logprobs is None else [token.logprobs],
            [None, *seq.prompt_logprobs] if is_first and seq.request.params.prompt_logprobs is not None else None,
            reason,
            token.token_id if is_ending else None,
            num_cached_tokens=seq.num_cached,
        )

    def _break(self, seq: Sequence, error: Exception) -> RequestUpdate:
        log.error("request %s failed", seq.request.request_id, exc_info=error)
        return self._fail(seq, f"internal error: {type(error).__name__}: {error}")

    def _fail(self, seq: Sequence, message: str) -> RequestUpdate:
        self._end(seq)
        return RequestUpdate(seq.request.request_id, [], None, None, finish_reason="error", error=message)

    def _end(self, seq: Sequence) -> None:
        del self._sequences[seq.request.request_id]
        self.scheduler.remove(seq)


_PRINTED_OPTIONS = (
    "device", "dtype", "kv_layout", "compressed_kv_layout", "index_layout", "backend", "max_num_seqs", "max_num_batched_tokens",
    "dp", "tp", "ep",
)  # fmt: skip


def _prompt_positions(seq: Sequence, start: int, end: int) -> list[int]:
    """Prompt positions in [start, end) whose next token's logprob is asked for and not yet known."""
    if seq.request.params.prompt_logprobs is None:
        return []
    return list(range(max(start, len(seq.prompt_logprobs)), min(end, len(seq.request.prompt_ids) - 1)))


def _device_lost(error: Exception) -> bool:
    """CUDA reports an asynchronous fault in every later call: no request of this process can be computed any more."""
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)
