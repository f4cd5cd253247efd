"""`/v1/completions`: raw prompts, as text or token ids."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response

from abyssal.engine.output import CompletionOutput, OutputDelta, OutputProcessor
from abyssal.engine.request import RequestUpdate, SamplingParams, TokenLogprobs, check_ids
from abyssal.errors import RequestError
from abyssal.serve.body import read_body
from abyssal.serve.context import Server, server_of
from abyssal.serve.echo import Echo, echo_prompt
from abyssal.serve.generation import Job, OpenAIForm, answer
from abyssal.serve.schemas import CompletionBody
from abyssal.serve.streams import in_thread
from abyssal.tokenizer import Tokenizer, with_bos

MAX_OUTPUTS = 4096  # of one HTTP request; n alone would allow n times as many as a body holds prompts


async def create_completion(request: Request) -> Response:
    server = server_of(request)
    with ExitStack() as stack:
        record = stack.enter_context(server.metrics.request("completions"))
        body = await read_body(request, CompletionBody)
        server.require_model(body.model)
        job = await in_thread(request.receive, _job, server, body)
        return await answer(job, CompletionForm(job, body.include_usage), request, bool(body.stream), record, stack)


@dataclass(slots=True)
class Prompt:
    ids: list[int]
    is_text: bool
    added_bos: bool


class CompletionJob(Job[OutputDelta]):
    def __init__(self, server: Server, body: CompletionBody, prompts: list[Prompt], params: SamplingParams) -> None:
        super().__init__(server, [prompt.ids for prompt in prompts], params, body.cache_salt)
        self._echoes = [_echo(server.tokenizer, prompt, params) for prompt in prompts] if body.echo else None
        self._processors = [OutputProcessor(server.tokenizer, params, request.prompt_ids) for request in self.requests]
        self.outputs = [CompletionOutput(i) for i in range(len(self.requests))]
        self._begun = [False] * len(self.requests)

    def push(self, index: int, update: RequestUpdate) -> OutputDelta:
        delta = self._processors[index].push(update)
        if self._echoes is not None:
            self._put_prompt(index, update, delta, self._echoes[index // self.n])
        self.outputs[index].add(delta)
        return delta

    def _put_prompt(self, index: int, update: RequestUpdate, delta: OutputDelta, echo: Echo) -> None:
        """The prompt comes with the first update, which brings its log-probabilities; all offsets count from its beginning."""
        delta.text_offsets = [len(echo.text) + offset for offset in delta.text_offsets]
        if self._begun[index]:
            return
        self._begun[index] = True
        delta.text = echo.text + delta.text
        if delta.logprobs is not None:
            ids = self.requests[index].prompt_ids
            known = update.prompt_logprobs or [None] * len(ids)
            delta.logprobs = [lp or _unscored(token) for token, lp in zip(ids, known, strict=True)] + delta.logprobs
            delta.text_offsets = echo.offsets + delta.text_offsets


class CompletionForm(OpenAIForm[OutputDelta]):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"
    job: CompletionJob

    def chunk_choices(self, index: int, delta: OutputDelta) -> list[dict[str, Any]]:
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return []
        return [self._choice(index, delta)]

    def choice(self, index: int) -> dict[str, Any]:
        return self._choice(index, self.job.outputs[index])

    def _choice(self, index: int, part: OutputDelta | CompletionOutput) -> dict[str, Any]:
        tokenizer = self.job.server.tokenizer
        return {
            "index": index,
            "text": part.text,
            "logprobs": None if part.logprobs is None else _logprobs(tokenizer, part.logprobs, part.text_offsets),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }


def _job(server: Server, body: CompletionBody) -> CompletionJob:
    params = _params(server, body)
    return CompletionJob(server, body, _prompts(server, body), params)


def _params(server: Server, body: CompletionBody) -> SamplingParams:
    n = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of != n:
        raise RequestError(f"best_of={body.best_of} is not supported unless it equals n={n}; leave it out", param="best_of")
    prompt_logprobs = body.logprobs if body.echo else None
    return body.sampling_params(server.client.info.sampling_defaults, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs)


def _prompts(server: Server, body: CompletionBody) -> list[Prompt]:
    """`prompt` in its four forms: text, ids, a list of texts, a list of lists of ids."""
    add_bos = body.add_special_tokens is not False
    raw = body.prompt
    if isinstance(raw, str) or (isinstance(raw, list) and raw and not isinstance(raw[0], str | list)):
        raw = [raw]
    if not isinstance(raw, list) or not raw:
        raise RequestError("prompt must be a non-empty text, a list of token ids, or a list of either", param="prompt")
    if any(type(entry) is not type(raw[0]) for entry in raw):
        raise RequestError("prompt mixes text and token ids; send them in requests of their own", param="prompt")
    if (outputs := len(raw) * (body.n or 1)) > MAX_OUTPUTS:
        message = f"{len(raw)} prompts with n={body.n or 1} are {outputs} outputs; a request may have {MAX_OUTPUTS}, send several"
        raise RequestError(message, param="prompt")
    if not all(raw):
        raise RequestError(f"prompt {raw.index(type(raw[0])())} is empty; give at least one token", param="prompt")
    return [_prompt(server, entry, add_bos) for entry in raw]


def _prompt(server: Server, raw: str | list[int], add_bos: bool) -> Prompt:
    info = server.client.info
    if isinstance(raw, str):
        bare = server.require_tokenizer("prompt").encode_prompt(raw, add_bos=False)
    else:
        bare = raw
        check_ids("prompt", bare, info.vocab_size)
    bos = server.tokenizer.bos_token_id if server.tokenizer else info.bos_token_id
    ids = with_bos(bare, bos) if add_bos else bare
    return Prompt(ids, isinstance(raw, str), added_bos=len(ids) > len(bare))


def _echo(tokenizer: Tokenizer | None, prompt: Prompt, params: SamplingParams) -> Echo:
    """A text prompt comes back as it was sent, control tokens written by hand included."""
    return echo_prompt(tokenizer, prompt.ids, prompt.added_bos, not prompt.is_text and params.skip_special_tokens)


def _unscored(token: int) -> TokenLogprobs:
    """The first token of a prompt has nothing before it, so no probability; `rank` 0 marks it."""
    return TokenLogprobs(token, 0.0, 0, [], [])


def _logprobs(tokenizer: Tokenizer | None, scores: list[TokenLogprobs], offsets: list[int]) -> dict[str, Any]:
    def name(token: int) -> str:
        return f"token_id:{token}" if tokenizer is None else tokenizer.token_text(token)

    def top(score: TokenLogprobs) -> dict[str, float] | None:
        if not score.rank:
            return None
        found: dict[str, float] = {}
        for token, value in (*zip(score.top_ids, score.top_logprobs, strict=True), (score.token_id, score.logprob)):
            found.setdefault(name(token), value)  # of tokens that look the same, the most likely
        return found

    return {
        "tokens": [name(score.token_id) for score in scores],
        "token_logprobs": [score.logprob if score.rank else None for score in scores],
        "top_logprobs": [top(score) for score in scores],
        "text_offset": offsets,
    }
