"""The Python API: an engine in this process."""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from abyssal.config import EngineConfig, from_sources
from abyssal.engine.engine import Engine
from abyssal.engine.output import CompletionOutput, OutputDelta, OutputProcessor, RequestOutput
from abyssal.engine.request import EngineRequest, RequestUpdate, SamplingParams, check_ids
from abyssal.errors import EngineDeadError, RequestError, show
from abyssal.serve.answer import ChatProcessor
from abyssal.serve.chat import load_chat_format
from abyssal.serve.conversation import Conversation, parse_messages, parse_tools
from abyssal.tokenizer import Tokenizer

if TYPE_CHECKING:
    from abyssal.parallel.engine import RankedEngine

Prompt = str | list[int]


class LLM:
    """A model, loaded and ready. `model` is a folder, a hub name or "tiny".

    Options are the fields of `EngineConfig`; what is not given comes from `ABYSSAL_` variables, then from the defaults.

    Several threads may use it at a time. They take turns at the engine, a step each, and every step computes for all of them, so a
    call does not wait until the others are done (`logits` is one turn).

    Raises:
        ConfigError: an option is unknown or impossible.
        CheckpointError: the checkpoint cannot be loaded.
    """

    def __init__(self, model: str | Path = "tiny", **options: Any) -> None:
        self._engine: Engine | RankedEngine | None = _start(from_sources({"model": str(model), **options}, os.environ))
        self.tokenizer = self.engine.tokenizer
        self._chat = load_chat_format(Path(self.engine.info.model_folder), self.engine.info.family)
        self._ids = itertools.count()
        self._owners: dict[str, tuple[_Job, int]] = {}  # of every request in the engine: its job, and which output of it
        self._dropped: deque[str] = deque()  # requests that nobody waits for; they leave the engine when no turn is under way
        self._lock = threading.Lock()  # held during a turn
        self._next = threading.Lock()  # held by who has the next turn
        self._holder: int | None = None  # whose turn it is
        self._threads: set[int] = set()  # that have a turn or wait for one

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Release weights and caches. The object cannot be used afterwards, save to close it again."""
        me = threading.get_ident()
        if self._holder == me:  # a signal handler, which interrupts the turn and may not let it go on
            self._close()
        elif me in self._threads:  # or interrupts this thread's wait for one
            with self._lock:
                self._close()
        else:
            with self._turn():
                self._close()

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @property
    def engine(self) -> Engine | RankedEngine:
        """The engine: in this process, unless there are several ranks.

        Raises:
            EngineDeadError: the object is closed.
        """
        if self._engine is None:
            raise EngineDeadError("this LLM is closed; make another one")
        return self._engine

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Complete every prompt (text or token ids), all in one batch; outputs in the order of the prompts.

        Raises:
            RequestError: a prompt or parameter is bad; nothing is generated then.
        """
        many = _as_prompts(prompts)
        each = list(sampling_params) if isinstance(sampling_params, list | tuple) else [sampling_params] * len(many)
        if len(each) != len(many):
            raise RequestError(
                f"{len(many)} prompts but {len(each)} SamplingParams; give one, or one per prompt", param="sampling_params"
            )
        jobs = [self._job(p, _checked(sp)) for p, sp in zip(many, each, strict=True)]
        for _ in self._run(jobs):
            pass
        return [job.output for job in jobs]

    def chat(
        self,
        messages: list[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        thinking: bool | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> RequestOutput:
        """Answer a conversation of `{"role": ..., "content": ...}` messages; outputs have `reasoning` and `calls` beside `text`.

        Args:
            thinking: whether the answer begins with reasoning; None = the checkpoint's default.
            tools: functions that the model may call, in OpenAI's form.

        Raises:
            RequestError: a message, tool or parameter is bad.
        """
        job = self._chat_job(messages, _checked(sampling_params), thinking, tools)
        for _ in self._run([job]):
            pass
        return job.output

    def stream_chat(
        self,
        messages: list[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        thinking: bool | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> Iterator[OutputDelta]:
        """As `chat` with n = 1, piece by piece. Leaving the loop early drops the request."""
        return self._run([self._chat_job(messages, replace(_checked(sampling_params), n=1), thinking, tools)])

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[OutputDelta]:
        """Complete one prompt piece by piece (n = 1). Leaving the loop early drops the request."""
        return self._run([self._job(prompt, replace(_checked(sampling_params), n=1))])

    def logits(
        self,
        token_ids: Sequence[int],
        chunk_sizes: Sequence[int] | None = None,
        positions: Sequence[int] | None = None,
        reuse_prefix: bool = False,
    ) -> Tensor:
        """Logits of a token sequence, computed through the paged caches as serving does.

        Args:
            token_ids: n ids.
            chunk_sizes: how the prefill is cut, summing to n; None: as few chunks as `max_num_batched_tokens` allows.
            positions: rows to return, each in [0, n); None: all.
            reuse_prefix: take known tokens from the prefix cache; their rows are NaN.

        Returns:
            fp32 [n or len(positions), vocab], on the CPU.

        Raises:
            RequestError: an argument is bad, or the caches have no room.
        """
        ids, config = _integers("token_ids", token_ids), self.engine.config
        if not isinstance(reuse_prefix, bool):
            raise RequestError(f"reuse_prefix={show(reuse_prefix)} must be True or False", param="reuse_prefix")
        if reuse_prefix and not config.enable_prefix_caching:
            raise RequestError("reuse_prefix=True needs enable_prefix_caching, which is off", param="reuse_prefix")
        most = config.max_num_batched_tokens
        sizes = _even_chunks(len(ids), most) if chunk_sizes is None else _integers("chunk_sizes", chunk_sizes)
        if any(type(s) is not int or s < 1 for s in sizes) or sum(sizes) != len(ids):
            raise RequestError(
                f"chunk_sizes must be positive integers and sum to {len(ids)}, not {show(sizes)}", param="chunk_sizes"
            )
        wanted = list(range(len(ids))) if positions is None else _integers("positions", positions)
        if bad := [p for p in wanted if type(p) is not int or not 0 <= p < len(ids)]:
            raise RequestError(f"position {show(bad[0])} is none of the {len(ids)} tokens; they count from 0", param="positions")
        rows = sorted(set(wanted))
        with self._turn():
            logits = self.engine.score(ids, sizes, rows, reuse_prefix)
        row = {position: i for i, position in enumerate(rows)}
        return logits[[row[p] for p in wanted]] if wanted != rows else logits

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str | list | tuple):
            raise RequestError(f"a prompt must be a text or a list of token ids, not {type(prompt).__name__}", param="prompt")
        if not isinstance(prompt, str):
            check_ids("prompt", prompt, self.engine.info.vocab_size)
            return list(prompt)
        return self._require_tokenizer().encode_prompt(prompt)

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this checkpoint has no tokenizer.json: give token ids, not text", param="prompt")
        return self.tokenizer

    def _job(self, prompt: Prompt, params: SamplingParams) -> _Job:
        text, ids = prompt if isinstance(prompt, str) else None, self._prompt_ids(prompt)
        processors = [OutputProcessor(self.tokenizer, params, ids) for _ in range(params.n)]
        return _Job(f"llm-{next(self._ids)}", text, ids, params, processors)

    def _chat_job(
        self,
        messages: list[dict[str, Any]],
        params: SamplingParams,
        thinking: bool | None,
        tools: list[dict[str, Any]] | None,
    ) -> _Job:
        tokenizer = self._require_tokenizer()
        known = parse_tools(tools)
        if not isinstance(thinking, bool | None):
            raise RequestError(f"thinking={show(thinking)} must be True, False or None", param="thinking")
        conversation = Conversation(
            tuple(parse_messages(messages)),
            known,
            thinking=self._chat.thinking if thinking is None else thinking,
        )
        ids = self._chat.encode(tokenizer, conversation)
        processors = [ChatProcessor(tokenizer, params, ids, conversation) for _ in range(params.n)]
        return _Job(f"llm-{next(self._ids)}", None, ids, params, processors)

    def _run(self, jobs: list[_Job]) -> Iterator[OutputDelta]:
        """Step until every job is done; whatever ends the loop, nothing of the jobs stays in the engine.

        Several of these loops may be under way, streams that are read now and then or calls of other threads: a step computes for
        all of them, and hands to each job what is its own.
        """
        owners = {request.request_id: (job, index) for job in jobs for index, request in enumerate(job.requests)}
        try:
            with self._turn():
                engine = self.engine
                self._owners |= owners
                for job in jobs:
                    for request in job.requests:
                        engine.add(request)
            finished = False
            while not finished:
                with self._turn():  # others may have stepped since the last
                    if not any(job.arrived for job in jobs) and not all(job.output.finished for job in jobs):
                        self._step()
                    arrived = [delta for job in jobs for delta in job.take()]
                    finished = all(job.output.finished for job in jobs)
                yield from arrived
        finally:
            self._dropped.extend(owners)
            self._drop()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The engine is this thread's alone. Who waits has the next turn, even if the thread of the last one asks again at once.

        Raises:
            RequestError: the thread has a turn already.
        """
        thread = threading.get_ident()
        if thread in self._threads:
            raise RequestError(
                "a signal handler or destructor called this LLM amid a step of the same thread; call it from another"
            )
        try:
            self._threads.add(thread)
            with ExitStack() as waiting:
                waiting.enter_context(self._next)
                with self._lock:
                    waiting.close()
                    self._holder = thread
                    try:
                        yield
                    finally:
                        self._holder = None
        finally:
            self._threads.discard(thread)
            self._drop()

    def _drop(self) -> None:
        """Take dropped requests out of the engine, unless a turn is under way: its end does it then.

        Never waits. The garbage collector ends a forgotten stream wherever it happens to run, also amid a turn of the same thread.
        """
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                while self._dropped:
                    request_id = self._dropped.popleft()
                    if self._owners.pop(request_id, None) is not None and self._engine is not None:
                        self._engine.abort(request_id)
            finally:
                self._lock.release()

    def _step(self) -> None:
        """Compute one step and hand its updates to the jobs."""
        engine = self.engine
        for update in engine.step():
            if update.request_id not in self._owners:
                continue  # added by who uses the engine itself
            job, index = self._owners[update.request_id]
            delta = job.push(index, update)
            if delta.finish_reason is not None and update.finish_reason is None:
                engine.abort(update.request_id)  # a stop string ended it


class _Job:
    """One prompt and its n outputs, each of them a request to the engine.

    Attributes:
        arrived: what the outputs gained and nobody has taken yet.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        processors: Sequence[OutputProcessor | ChatProcessor],
    ) -> None:
        self.requests = [EngineRequest(f"{request_id}-{i}", prompt_ids, params.for_output(i)) for i in range(params.n)]
        self.output = RequestOutput(request_id, prompt, prompt_ids, [CompletionOutput(i) for i in range(params.n)])
        self.arrived: list[OutputDelta] = []
        self._processors = processors

    def take(self) -> list[OutputDelta]:
        """What arrived since the last call."""
        arrived, self.arrived = self.arrived, []
        return arrived

    def push(self, index: int, update: RequestUpdate) -> OutputDelta:
        """Take one update of output `index`; what it adds."""
        delta = self._processors[index].push(update)
        self.arrived.append(delta)
        self.output.outputs[index].add(delta)
        if index == 0:  # the other outputs find what this one computed
            self.output.num_cached_tokens = max(self.output.num_cached_tokens, update.num_cached_tokens)
        if update.prompt_logprobs is not None:
            self.output.prompt_logprobs = update.prompt_logprobs
        return delta


def _start(config: EngineConfig) -> Engine | RankedEngine:
    if config.dp * config.tp == 1:
        return Engine(config)
    from abyssal.parallel.engine import RankedEngine  # what processes need to talk is not needed by one

    return RankedEngine(config)


def _even_chunks(total: int, most: int) -> list[int]:
    return [min(most, total - start) for start in range(0, total, most)]


def _integers(name: str, value: Any) -> list[int]:
    """A sequence argument as a list; its entries are checked where they are used.

    Raises:
        RequestError: it is none.
    """
    if not isinstance(value, list | tuple | range):
        raise RequestError(f"{name} must be a list of integers, not {type(value).__name__}", param=name)
    return list(value)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several -> several. A list of integers is one prompt of token ids.

    Raises:
        RequestError: it is no text and no list, or some entries are prompts and others are not.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise RequestError(
            f"prompts must be a text or a list of prompts or token ids, not {type(prompts).__name__}", param="prompt"
        )
    if prompts and all(isinstance(p, int) for p in prompts):
        return [list(prompts)]
    if not all(isinstance(p, str | list | tuple) for p in prompts):
        raise RequestError(
            "prompts must be texts and lists of token ids, or one list of token ids; not a mixture", param="prompt"
        )
    return list(prompts)


def _checked(params: Any) -> SamplingParams:
    """`SamplingParams`, which may have been changed since they were made; None stands for the defaults.

    Raises:
        RequestError: it is something else, or a value is bad.
    """
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params must be SamplingParams, not {type(params).__name__}", param="sampling_params")
    params.validate()
    return params
