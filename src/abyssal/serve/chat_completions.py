"""`/v1/chat/completions`: conversations."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

from fastapi import Request, Response

from abyssal.engine.output import CompletionOutput
from abyssal.engine.request import RequestUpdate, SamplingParams, TokenLogprobs
from abyssal.errors import RequestError
from abyssal.serve.body import read_body
from abyssal.serve.chat import encode_chat, wants_thinking
from abyssal.serve.context import Server, server_of
from abyssal.serve.generation import Job, answer
from abyssal.serve.reasoning import ChatDelta, ChatProcessor
from abyssal.serve.schemas import ChatBody, PromptOptions
from abyssal.tokenizer import Tokenizer


async def create_chat_completion(request: Request) -> Response:
    server = server_of(request)
    with ExitStack() as stack:
        record = stack.enter_context(server.metrics.request("chat_completions"))
        body = await read_body(request, ChatBody)
        server.require_model(body.model)
        params = _params(server, body)
        thinking, ids = await encode_conversation(server, body)
        try:
            job = ChatJob(server, body, ids, params, thinking)
        except RequestError as error:
            error.param = "messages" if error.param == "prompt" else error.param
            raise
        return await answer(job, request, bool(body.stream), record, stack)


async def encode_conversation(server: Server, body: PromptOptions) -> tuple[bool, list[int]]:
    """Whether the answer begins with reasoning, and the prompt's ids.

    Raises:
        RequestError: a message or an option is bad.
    """
    default = server.chat.thinking if server.config.thinking == "auto" else server.config.thinking == "on"
    thinking = wants_thinking(body.reasoning_effort, body.chat_template_kwargs, default, server.chat)
    tokenizer = server.require_tokenizer("messages")
    return thinking, await asyncio.to_thread(encode_chat, tokenizer, body.messages, thinking)


class ChatJob(Job[ChatDelta]):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, server: Server, body: ChatBody, ids: list[int], params: SamplingParams, thinking: bool) -> None:
        super().__init__(server, [ids], params, body.include_usage)
        self._tokenizer = server.require_tokenizer("messages")
        self._thinking = thinking
        self._processors = [ChatProcessor(self._tokenizer, params, ids) for _ in self.requests]
        self._outputs = [CompletionOutput(i) for i in range(len(self.requests))]
        self._begun = [False] * len(self.requests)
        self._reasoning_tokens = 0

    def usage_details(self) -> dict[str, Any]:
        return {"completion_tokens_details": {"reasoning_tokens": self._reasoning_tokens}}

    def push(self, index: int, update: RequestUpdate) -> ChatDelta:
        delta = self._processors[index].push(update)
        self._outputs[index].add(delta)
        self._reasoning_tokens += delta.num_reasoning_tokens
        return delta

    def chunk_choices(self, index: int, delta: ChatDelta) -> list[dict[str, Any]]:
        choices = []
        if not self._begun[index]:
            self._begun[index] = True
            opening = ChatDelta()
            choices.append(self._chunk_choice(index, opening, {"role": "assistant", "content": ""}))
        parts = {"reasoning_content": delta.reasoning, "content": delta.text}
        shown = {name: text for name, text in parts.items() if text}
        if shown or delta.logprobs or delta.finish_reason:
            choices.append(self._chunk_choice(index, delta, shown))
        return choices

    def choice(self, index: int) -> dict[str, Any]:
        output = self._outputs[index]
        message = {
            "role": "assistant",
            "content": output.text,
            "reasoning_content": output.reasoning if self._thinking or output.reasoning else None,
            "refusal": None,
        }
        return {
            "index": index,
            "message": message,
            "logprobs": None if output.logprobs is None else self._logprobs(output.logprobs),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def _chunk_choice(self, index: int, delta: ChatDelta, shown: dict[str, str]) -> dict[str, Any]:
        return {
            "index": index,
            "delta": shown,
            "logprobs": self._logprobs(delta.logprobs) if delta.logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _logprobs(self, scores: list[TokenLogprobs]) -> dict[str, Any]:
        """Of the content's tokens, in their order."""
        return {"content": [_position(self._tokenizer, score) for score in scores], "refusal": None}


def _position(tokenizer: Tokenizer, score: TokenLogprobs) -> dict[str, Any]:
    top = [_token(tokenizer, token, value) for token, value in zip(score.top_ids, score.top_logprobs, strict=True)]
    return {**_token(tokenizer, score.token_id, score.logprob), "top_logprobs": top}


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {"token": tokenizer.token_text(token), "logprob": logprob, "bytes": list(tokenizer.token_bytes(token))}


def _params(server: Server, body: ChatBody) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs goes with logprobs=true only", param="top_logprobs")
    if body.messages is None:
        raise RequestError("messages is missing", param="messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    try:
        return body.sampling_params(server.client.info.sampling_defaults, logprobs=logprobs)
    except RequestError as error:
        if error.param == "logprobs":  # the number has another name here
            raise RequestError(f"top_{error}", param="top_logprobs") from error
        raise
