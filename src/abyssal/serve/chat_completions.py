"""`/v1/chat/completions`: conversations."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from fastapi import Request, Response

from abyssal.engine.output import CallDelta
from abyssal.engine.request import SamplingParams, TokenLogprobs
from abyssal.errors import RequestError
from abyssal.serve.answer import ChatDelta
from abyssal.serve.body import read_body
from abyssal.serve.chat import wants_thinking
from abyssal.serve.chat_job import ChatJob, start_chat
from abyssal.serve.context import Server, server_of
from abyssal.serve.conversation import (
    Conversation,
    parse_messages,
    parse_response_format,
    parse_tool_choice,
    parse_tools,
)  # fmt: skip
from abyssal.serve.generation import OpenAIForm, answer
from abyssal.serve.schemas import ChatBody, PromptOptions
from abyssal.tokenizer import Tokenizer


async def create_chat_completion(request: Request) -> Response:
    server = server_of(request)
    with ExitStack() as stack:
        record = stack.enter_context(server.metrics.request("chat_completions"))
        body = await read_body(request, ChatBody)
        server.require_model(body.model)
        params = _params(server, body)
        job = await start_chat(
            request.receive, server, partial(conversation_of, server, body), params, cache_salt=body.cache_salt
        )
        return await answer(job, ChatForm(job, body.include_usage), request, bool(body.stream), record, stack)


def conversation_of(server: Server, body: PromptOptions) -> Conversation:
    """What the request asks of the model.

    Raises:
        RequestError: a message or an option is bad.
    """
    thinking = wants_thinking(body.reasoning_effort, body.chat_template_kwargs, server.thinks_by_default)
    tools = parse_tools(body.tools)
    return Conversation(
        tuple(parse_messages(body.messages)),
        tools,
        parse_tool_choice(body.tool_choice, body.parallel_tool_calls, tools),
        parse_response_format(body.response_format),
        thinking,
        body.reasoning_effort,
    )


class ChatForm(OpenAIForm[ChatDelta]):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    job: ChatJob

    def __init__(self, job: ChatJob, include_usage: bool) -> None:
        super().__init__(job, include_usage)
        self._begun = [False] * len(job.requests)

    def usage(self) -> dict[str, Any]:
        return {**super().usage(), "completion_tokens_details": {"reasoning_tokens": self.job.reasoning_tokens}}

    def chunk_choices(self, index: int, delta: ChatDelta) -> list[dict[str, Any]]:
        choices = []
        if not self._begun[index]:
            self._begun[index] = True
            choices.append(self._chunk_choice(index, ChatDelta(), {"role": "assistant", "content": ""}))
        parts = {"reasoning_content": delta.reasoning, "content": delta.text, "tool_calls": [*map(_call_chunk, delta.calls)]}
        shown = {name: part for name, part in parts.items() if part}
        if shown or delta.logprobs or delta.finish_reason:
            choices.append(self._chunk_choice(index, delta, shown))
        return choices

    def choice(self, index: int) -> dict[str, Any]:
        output = self.job.outputs[index]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": output.text or (None if output.calls else ""),
            "reasoning_content": output.reasoning if self.job.conversation.thinking or output.reasoning else None,
            "refusal": None,
        }
        if output.calls:
            message["tool_calls"] = [_call(call) for call in output.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": None if output.logprobs is None else self._logprobs(output.logprobs),
            "finish_reason": self._finish_reason(index),
            "stop_reason": output.stop_reason,
        }

    def _chunk_choice(self, index: int, delta: ChatDelta, shown: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": index,
            "delta": shown,
            "logprobs": self._logprobs(delta.logprobs) if delta.logprobs else None,
            "finish_reason": delta.finish_reason and self._finish_reason(index),
            "stop_reason": delta.stop_reason,
        }

    def _finish_reason(self, index: int) -> str | None:
        output = self.job.outputs[index]
        return "tool_calls" if output.calls and output.finish_reason == "stop" else output.finish_reason

    def _logprobs(self, scores: list[TokenLogprobs]) -> dict[str, Any]:
        """Of the content's tokens, in their order."""
        return {"content": [_position(self.job.tokenizer, score) for score in scores], "refusal": None}


def _call(call: CallDelta) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_chunk(call: CallDelta) -> dict[str, Any]:
    """Id, type and name come once, with the call's first piece (case K17)."""
    if call.id:
        return {"index": call.index, **_call(call)}
    return {"index": call.index, "function": {"arguments": call.arguments}}


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
