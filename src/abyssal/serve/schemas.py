"""What requests may hold. Types are strict and null means "not given"; ranges are checked where sampling is defined.

A field that is known to OpenAI's or vLLM's clients but not supported may be sent with a value that asks for nothing.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from abyssal.engine.request import MAX_LOGIT_BIAS, SamplingParams
from abyssal.errors import RequestError

TokenIds = Annotated[
    list[int], Field(fail_fast=True)
]  # an error for each of millions of bad entries would take minutes and gigabytes
Neutral = dict[str, tuple[Any, ...]]  # field -> values that ask for nothing, beside null

_GENERATION_UNSUPPORTED: Neutral = {
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "priority": (0,),
    "logits_processors": ([],),
    "return_token_ids": (False,),
}


_INSTEAD = {
    **dict.fromkeys(
        ("structured_outputs", "guided_json", "guided_regex", "guided_choice"),  # a JSON schema says the same
        "response_format on /v1/chat/completions",
    ),
    "thinking": "chat_template_kwargs or reasoning_effort",
}


class Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Body(Schema):
    """A request body. `model` must be the served one: the routes answer 404 otherwise, also when it is missing."""

    model: str | None = None
    unsupported: ClassVar[Neutral] = {}

    @classmethod
    def drop_unsupported(cls, raw: dict[str, Any]) -> None:
        """Take out fields that this server knows but does not support.

        Raises:
            RequestError: one asks for something.
        """
        for name, neutral in cls.unsupported.items():
            value = raw.pop(name, None)
            if value is not None and value not in neutral:
                remedy = f"use {_INSTEAD[name]}" if name in _INSTEAD else "leave it out"
                raise RequestError(f"{name} is not supported yet; {remedy}", param=name)


class StreamOptions(Schema):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # accepted: nothing is padded


class GenerationBody(Body):
    """What both generating routes share."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    stop: Any = None  # str or list[str]
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # for the client's own bookkeeping
    cache_salt: str | None = Field(None, min_length=1, max_length=256)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling_params(self, defaults: dict[str, Any], **more: Any) -> SamplingParams:
        """Sampling of this request over the checkpoint's `defaults`.

        Raises:
            RequestError: a value is out of range, or two contradict each other.
        """
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options goes with stream=true only", param="stream_options")
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        if self.logit_bias is not None:
            given["logit_bias"] = _bias(self.logit_bias)
        if self.stop is not None:
            given["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        return SamplingParams(**{**defaults, **given, **more})


_SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "stop_token_ids", "include_stop_str_in_output", "min_tokens", "max_tokens", "ignore_eos", "skip_special_tokens",
)  # fmt: skip


def _bias(raw: dict[str, float]) -> dict[int, float]:
    """JSON's names are strings; here they are token ids."""
    if len(raw) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(raw)} entries; at most {MAX_LOGIT_BIAS} are allowed", param="logit_bias")
    for name in raw:
        if not re.fullmatch(r"0|-?[1-9][0-9]{0,18}", name):
            raise RequestError(f"logit_bias: {name[:40]!r} is not a token id", param="logit_bias")
    return {int(name): value for name, value in raw.items()}


class CompletionBody(GenerationBody):
    prompt: Any = None  # str, list[int], list[str] or list[list[int]]
    add_special_tokens: bool | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    unsupported = {
        **_GENERATION_UNSUPPORTED,
        "response_format": ({"type": "text"},),
        "suffix": ("",),
        "prompt_logprobs": (),
    }


class PromptOptions(Schema):
    """What makes a conversation; checked where conversations are made."""

    messages: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Any = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_CHAT_UNSUPPORTED: Neutral = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "include_reasoning": (True,),
    "thinking": (),
    "echo": (False,),
    "add_special_tokens": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": (),
    "media_io_kwargs": (),
    "prompt_logprobs": (),
}


class ChatBody(GenerationBody, PromptOptions):
    logprobs: bool | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None  # as `user`; nothing is stored
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    unsupported = {**_GENERATION_UNSUPPORTED, **_CHAT_UNSUPPORTED}


class TokenizeBody(Body, PromptOptions):
    prompt: str | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Body):
    tokens: TokenIds | None = None


class MessagesBody(Body):
    """Anthropic's body; the parts of conversations are checked where conversations are made."""

    max_tokens: int | None = None
    messages: Any = None
    system: Any = None
    tools: Any = None
    tool_choice: Any = None
    thinking: Any = None
    output_config: Any = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None  # for the client's own bookkeeping
    cache_control: Any = None  # nothing to do: what can be reused is
    unsupported = {
        "service_tier": ("auto", "standard_only"),
        "container": (),
        "mcp_servers": ([],),
        "context_management": (),
        "inference_geo": (),
    }


class ResponsesBody(Body):
    """OpenAI's newer body; the parts of conversations are checked where conversations are made."""

    input: Any = None
    instructions: str | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: Any = None
    reasoning: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None  # nothing is stored, whatever it says
    include: list[str] | None = None  # what it asks for is there or does not exist
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    unsupported = {
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "truncation": ("disabled",),
        "service_tier": ("auto", "default"),
        "max_tool_calls": (),
        "top_logprobs": (0,),
        "prompt": (),
        "context_management": (),
    }
