"""What goes into the engine and what comes out: plain dataclasses, shared by the Python API and the server."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from abyssal.errors import RequestError, show
from abyssal.options import hint

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_N = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024  # entries
MAX_STOP_TOKEN_IDS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024  # characters of one stop string
_MAX_COUNT = 2**31 - 1  # tokens; far beyond any context
_MAX_FLOAT = sys.float_info.max  # refuses inf and NaN, and an int that no float can hold


@dataclass(slots=True)
class SamplingParams:
    """How tokens are chosen. Names and defaults are those of the OpenAI API and vLLM, but `max_tokens` has no default;
    `validate` states the ranges.

    Raises:
        RequestError: a name is unknown, a value has the wrong type or is out of range, or two contradict each other.
    """

    n: int = 1
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = all; -1 is accepted and becomes 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None  # top alternatives per generated token; 0 = the chosen one only
    prompt_logprobs: int | None = None
    stop: list[str] = field(default_factory=list)  # one string is accepted and becomes a list
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None  # None = as many as fit
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __new__(cls, *args: Any, **named: Any) -> Self:
        for name in named:
            if name not in cls.__dataclass_fields__:
                raise RequestError(f"unknown parameter {show(name)}{hint(name, cls.__dataclass_fields__)}", param=name)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        self.validate()

    def for_output(self, index: int) -> SamplingParams:
        """Parameters of output `index` of `n`, as a request of its own: a given seed moves on by one per output."""
        seed = None if self.seed is None else min(self.seed + index, 2**63 - 1)
        return replace(self, n=1, seed=seed)

    def validate(self) -> None:
        """Check every field by itself, then those that can contradict each other; -1 for `top_k` becomes 0, a string for `stop` a list."""
        if type(self.top_k) is int and self.top_k == -1:
            self.top_k = 0
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        for name, (low, high) in _INT_RANGES.items():
            _check_int(name, getattr(self, name), low, high)
        for name, (low, high) in _OPTIONAL_INT_RANGES.items():
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low, high)
        for name, (floor, ceiling) in _FLOAT_RANGES.items():
            _check_float(name, getattr(self, name), floor, ceiling)
            setattr(self, name, float(getattr(self, name)))  # an int may be larger than a message can hold
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                raise RequestError(f"{name}=0 is not allowed: it must be above 0 (1 leaves the distribution alone)", param=name)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={show(getattr(self, name))} must be true or false", param=name)
        _check_logit_bias(self.logit_bias)
        _check_stop(self.stop)
        _check_stop_token_ids(self.stop_token_ids)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower it or raise max_tokens",
                param="min_tokens",
            )


_INT_RANGES = {"n": (1, MAX_N), "top_k": (0, _MAX_COUNT), "min_tokens": (0, _MAX_COUNT)}
_OPTIONAL_INT_RANGES = {
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "max_tokens": (1, _MAX_COUNT),
}
_FLOAT_RANGES = {
    "temperature": (0.0, _MAX_FLOAT),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, _MAX_FLOAT),
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must follow, compiled for the model's tokenizer (`abyssal.serve.grammar`)."""

    key: str  # equal for equal grammars
    compiled: bytes
    after: int | None = None  # token id after which it holds, with free text before; None = at once


@dataclass(slots=True)
class EngineRequest:
    """One sequence to generate. `n` > 1 is n of these."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None  # only requests of the same salt share a cached prefix
    grammar: Grammar | None = None


@dataclass(slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, of the distribution before bias, penalties, temperature and truncation.

    Every value is finite: what is below -9999, minus infinity too, is given as -9999.0, because JSON has no infinity.
    Equal values rank by token id, lowest first.
    """

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top_ids: list[int]  # most likely first
    top_logprobs: list[float]


@dataclass(slots=True)
class RequestUpdate:
    """What one engine step did for one request."""

    request_id: str
    token_ids: list[int]  # newly generated, in order; an EOS or stop token that ends the request is included
    logprobs: list[TokenLogprobs] | None  # one per token of token_ids, if asked for
    prompt_logprobs: list[TokenLogprobs | None] | None  # once, with the first token; entry 0 is None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the EOS or stop id that ended it
    error: str | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What bounds a request. A sequence of prompt and output never grows beyond the smaller of the two lengths."""

    vocab_size: int  # token ids that mean something: the tokenizer's count where one exists, which padding of the model exceeds
    max_model_len: int  # tokens
    capacity_tokens: int  # tokens that the caches hold of one sequence
    image_token_id: int | None = None  # a prompt must not hold it


def ending_token_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """Ids that end the output: EOS unless ignored, and the request's own stop ids, also one that equals EOS."""
    eos = () if params.ignore_eos else eos_token_ids
    return frozenset(eos) | frozenset(params.stop_token_ids)


def check_request(request: EngineRequest, limits: EngineLimits) -> int:
    """Check a request against an engine.

    Returns:
        How many tokens it may generate: `max_tokens`, clamped to the room that the prompt leaves; all of that room for None.

    Raises:
        RequestError: it can never be served as asked. An over-long prompt has OpenAI's code `context_length_exceeded`.
    """
    params = request.params
    params.validate()
    if not isinstance(request.request_id, str) or not request.request_id:
        raise RequestError(f"request_id={show(request.request_id)} must be a non-empty string", param="request_id")
    if not isinstance(request.prompt_ids, list) or not request.prompt_ids:
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    check_ids("prompt", request.prompt_ids, limits.vocab_size)
    _check_text("cache_salt", request.cache_salt or "")
    if limits.image_token_id in request.prompt_ids:
        raise RequestError(
            f"prompt: token id {limits.image_token_id} stands for an image, and this version reads text only; leave images out",
            param="prompt",
        )
    check_ids("logit_bias", params.logit_bias or (), limits.vocab_size)
    check_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    if request.grammar is not None and (params.ignore_eos or params.min_tokens):
        name = "ignore_eos" if params.ignore_eos else "min_tokens"
        raise RequestError(
            f"{name} does not go with structured output, which ends where its grammar says; leave it out", param=name
        )
    room = _room(len(request.prompt_ids), limits)
    if params.min_tokens > room:
        raise RequestError(
            f"min_tokens={params.min_tokens} does not fit: a prompt of {len(request.prompt_ids)} tokens leaves room for {room}; "
            "lower it or shorten the prompt",
            param="min_tokens",
        )
    return room if params.max_tokens is None else min(params.max_tokens, room)


def _room(prompt_tokens: int, limits: EngineLimits) -> int:
    limit = min(limits.max_model_len, limits.capacity_tokens)
    if prompt_tokens >= limit:
        what = "the model's context" if limits.max_model_len < limits.capacity_tokens else "the KV cache"
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens, but {what} holds {limit} and at least one must be left for the output; "
            f"shorten it to at most {limit - 1} tokens",
            param="prompt",
            code="context_length_exceeded",
        )
    return limit - prompt_tokens


def check_ids(name: str, ids: Iterable[Any], vocab_size: int) -> None:
    """Raise RequestError, naming the field `name`, unless every id is an integer in [0, vocab_size)."""
    for token in ids:
        if type(token) is not int:  # bool is an int to isinstance
            raise RequestError(f"{name}: {show(token)} is not a token id; ids are integers", param=name)
        if not 0 <= token < vocab_size:
            raise RequestError(f"{name}: token id {show(token)} is out of range; ids are 0 to {vocab_size - 1}", param=name)


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int:
        raise RequestError(f"{name}={show(value)} must be an integer", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name}={show(value)} is out of range; it must be {low} to {high}", param=name)


def _check_float(name: str, value: Any, low: float, high: float) -> None:
    if type(value) not in (int, float):
        raise RequestError(f"{name}={show(value)} must be a number", param=name)
    if not low <= value <= high:  # false for NaN
        bound = f"finite and at least {low:g}" if high == _MAX_FLOAT else f"{low:g} to {high:g}"
        raise RequestError(f"{name}={show(value)} is out of range; it must be {bound}", param=name)


def _check_logit_bias(bias: Any) -> None:
    if bias is None:
        return
    if not isinstance(bias, dict):
        raise RequestError(f"logit_bias={show(bias)} must map token ids to numbers", param="logit_bias")
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS} are allowed", param="logit_bias")
    check_ids("logit_bias", bias, _MAX_COUNT)
    for token, value in bias.items():
        if type(value) not in (int, float) or not -100 <= value <= 100:
            message = f"logit_bias: the value {show(value)} of token id {token} must be a number from -100 to 100"
            raise RequestError(message, param="logit_bias")


def _check_stop(stop: Any) -> None:
    if not isinstance(stop, list) or not all(isinstance(s, str) for s in stop):
        raise RequestError(f"stop={show(stop)} must be a list of strings", param="stop")
    if len(stop) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed", param="stop")
    for text in stop:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise RequestError(f"stop: {show(text)} must have 1 to {MAX_STOP_CHARS} characters", param="stop")
        _check_text("stop", text)


def _check_text(name: str, text: str) -> None:
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise RequestError(f"{name}: {show(text)} holds a lone surrogate, which no text can contain; remove it", param=name)


def _check_stop_token_ids(ids: Any) -> None:
    if not isinstance(ids, list):
        raise RequestError(f"stop_token_ids={show(ids)} must be a list of token ids", param="stop_token_ids")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        message = f"stop_token_ids has {len(ids)} entries; at most {MAX_STOP_TOKEN_IDS} are allowed"
        raise RequestError(message, param="stop_token_ids")
    check_ids("stop_token_ids", ids, _MAX_COUNT)
