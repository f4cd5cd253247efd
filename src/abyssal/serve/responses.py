"""`/v1/responses`: conversations in the form of OpenAI's newer API. Nothing is stored, so a client sends the whole conversation."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from fastapi import Request, Response

from abyssal.engine.request import SamplingParams
from abyssal.errors import RequestError, show
from abyssal.serve.answer import ChatDelta, Part
from abyssal.serve.body import read_body
from abyssal.serve.chat import wants_thinking
from abyssal.serve.chat_job import ChatJob, start_chat
from abyssal.serve.context import Server, server_of
from abyssal.serve.conversation import (
    Conversation,
    Message,
    ResponseFormat,
    Tool,
    ToolCall,
    check_keys,
    check_last,
    check_text,
    check_tools,
    dump_json,
    make_call,
    make_tool,
    other_part,
    parse_options,
    parse_tool_choice,
    schema_format,
    tool_entries,
)  # fmt: skip
from abyssal.serve.errors import error_body
from abyssal.serve.generation import Form, answer
from abyssal.serve.schemas import ResponsesBody
from abyssal.serve.streams import named_event

ECHOED = ("metadata", "text", "tool_choice", "tools", "user")  # fields that the answer repeats as they came
KINDS = {"reasoning": "reasoning", "text": "message", "call": "function_call"}  # of an answer's parts
ITEMS = ("message", "function_call", "function_call_output", "reasoning")


async def create_response(request: Request) -> Response:
    server = server_of(request)
    with ExitStack() as stack:
        record = stack.enter_context(server.metrics.request("responses"))
        body = await read_body(request, ResponsesBody)
        server.require_model(body.model)
        job = await start_chat(request.receive, server, partial(_conversation, server, body), _params(server, body), "input")
        return await answer(job, ResponsesForm(job, body), request, bool(body.stream), record, stack)


def _params(server: Server, body: ResponsesBody) -> SamplingParams:
    given = {"temperature": body.temperature, "top_p": body.top_p, "max_tokens": body.max_output_tokens}
    said = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**{**server.client.info.sampling_defaults, **said})


def _conversation(server: Server, body: ResponsesBody) -> Conversation:
    effort = parse_options(body.reasoning, "reasoning", {"effort", "summary", "generate_summary"}).get("effort")
    thinking = wants_thinking(effort, body.chat_template_kwargs, server.thinks_by_default)
    tools = _tools(body.tools)
    raw = body.tool_choice
    if isinstance(raw, dict) and raw.get("type") == "function":
        check_keys(raw, {"type", "name"}, "tool_choice")
        check_text(raw.get("name"), "tool_choice.name")
        raw = {"type": "function", "function": {"name": raw["name"]}}
    choice = parse_tool_choice(raw, body.parallel_tool_calls, tools)
    conversation = Conversation(tuple(_messages(body)), tools, choice, _format(body.text), thinking, effort)
    for name in ECHOED:
        check_text(dump_json(getattr(body, name), name), name)
    return conversation


def _format(text: Any) -> ResponseFormat | None:
    raw = parse_options(text, "text", {"format", "verbosity"}).get("format")
    kind = raw.get("type") if isinstance(raw, dict) else None
    if raw is None:
        return None
    if kind in ("text", "json_object"):
        check_keys(raw, {"type"}, "text.format")
        return ResponseFormat() if kind == "json_object" else None
    if kind != "json_schema":
        raise RequestError(
            f"text.format={show(raw)} is not supported; its type is text, json_object or json_schema", param="text.format"
        )
    return schema_format(raw, "text.format", {"type", "name", "description", "strict"})


def _tools(raw: Any) -> tuple[Tool, ...]:
    tools = []
    for i, entry in enumerate(tool_entries(raw)):
        kind = entry.get("type") if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or kind != "function":
            raise RequestError(f"tools[{i}] of type {show(kind)} is not supported; use type function", param=f"tools[{i}]")
        tools.append(make_tool({key: value for key, value in entry.items() if key != "type"}, f"tools[{i}]"))
    return check_tools(tools)


# Input


def _messages(body: ResponsesBody) -> list[Message]:
    """The conversation. What the assistant did in a row - thoughts, text, calls - is one message."""
    messages = [] if body.instructions is None else [Message("system", check_text(body.instructions, "instructions"))]
    raw = [{"role": "user", "content": body.input}] if body.input and isinstance(body.input, str) else body.input
    if not isinstance(raw, list) or not raw:
        raise RequestError("input must be a text or a list of items, and not empty", param="input")
    items = (_item(item, f"input[{i}]") for i, item in enumerate(raw))
    for role, group in groupby(items, key=lambda message: message.role):
        run = [*group]
        messages += [_joined(run)] if role == "assistant" else run
    check_last(messages)
    return messages


def _joined(items: list[Message]) -> Message:
    return Message(
        "assistant",
        "".join(item.content for item in items),
        "".join(item.reasoning for item in items),
        tool_calls=tuple(call for item in items for call in item.tool_calls),
    )


def _item(item: Any, where: str) -> Message:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if not isinstance(item, dict) or kind not in ITEMS:
        raise RequestError(f"{where} of type {show(kind)} is not supported; use {', '.join(ITEMS)}", param=where)
    if kind == "function_call":
        call: ToolCall = make_call(item.get("call_id"), item.get("name"), item.get("arguments"), where)
        return Message("assistant", tool_calls=(call,))
    if kind == "function_call_output":
        call_id = check_text(item.get("call_id"), f"{where}.call_id")
        return Message("tool", _text(item.get("output"), f"{where}.output", "tool"), tool_call_id=call_id)
    if kind == "reasoning":
        return Message("assistant", reasoning=_reasoning(item, where))
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise RequestError(
            f"{where}.role={show(role)} is unknown; use user, assistant, system or developer", param=f"{where}.role"
        )
    return Message("system" if role == "developer" else role, _text(item.get("content"), f"{where}.content", role))


def _reasoning(item: dict[str, Any], where: str) -> str:
    """The thoughts themselves, or where a client keeps none, their summary."""
    for key in ("content", "summary"):
        parts = item.get(key) or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise RequestError(f"{where}.{key} must be a list of texts", param=f"{where}.{key}")
        if parts:
            return "".join(check_text(part.get("text"), f"{where}.{key}") for part in parts)
    return ""


def _text(content: Any, where: str, role: str) -> str:
    if isinstance(content, str):
        return check_text(content, where)
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a text or a list of parts", param=where)
    texts = []
    for i, part in enumerate(content):
        path = f"{where}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str):
            raise RequestError(f"{path} must be an object with a type", param=path)
        if kind in ("input_text", "output_text", "text"):
            texts.append(check_text(part.get("text"), f"{path}.text"))
        else:
            texts.append(other_part(kind, role, path))
    return "\n\n".join(texts)


# Output


class ResponsesForm(Form[ChatDelta]):
    """One response of items: reasoning, a message, and calls."""

    def __init__(self, job: ChatJob, body: ResponsesBody) -> None:
        self.job, self._body = job, body
        self._items: list[dict[str, Any]] = []  # as far as a stream has told of them
        self._num_events = 0

    def whole(self) -> dict[str, Any]:
        output = self.job.outputs[0]
        status = "incomplete" if output.finish_reason == "length" else "completed"
        parts = self.job.parts[0] if output.text or output.calls else [*self.job.parts[0], Part("text")]
        items = [self._item(part, i, "completed") for i, part in enumerate(parts)]
        items[-1]["status"] = status
        return self._response(status, items)

    def opening(self) -> Iterable[bytes]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress", []))

    def events(self, index: int, delta: ChatDelta) -> Iterable[bytes]:
        for part in delta.parts:
            if part.call_id or not self._items or self._items[-1]["type"] != KINDS[part.kind]:
                yield from self._begin(part)
            if part.text:
                yield self._piece(part)

    def closing(self) -> Iterable[bytes]:
        output = self.job.outputs[0]
        status = "incomplete" if output.finish_reason == "length" else "completed"
        if not output.text and not output.calls:
            yield from self._begin(Part("text"))
        yield from self._end(status)
        yield self._event(f"response.{status}", response=self._response(status, self._items))

    def failure(self, error: Exception) -> Iterable[bytes]:
        told = error_body(error)["error"]
        problem = {"code": "server_error", "message": told["message"]}
        yield self._event("response.failed", response={**self._response("failed", self._items), "error": problem})

    # Parts of a stream

    def _begin(self, part: Part) -> Iterable[bytes]:
        yield from self._end("completed")
        item = self._item(replace(part, text=""), len(self._items), "in_progress")
        bare = {**item, "content": []} if "content" in item else item
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=bare)
        if "content" in item:
            yield self._event("response.content_part.added", **self._place(), part=item["content"][0])

    def _piece(self, part: Part) -> bytes:
        if part.kind == "call":
            self._items[-1]["arguments"] += part.text
            place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
            return self._event("response.function_call_arguments.delta", **place, delta=part.text)
        self._items[-1]["content"][0]["text"] += part.text
        if part.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **self._place(), delta=part.text)
        return self._event("response.output_text.delta", **self._place(), delta=part.text, logprobs=[])

    def _end(self, status: str) -> Iterable[bytes]:
        """End the item under way."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            place = {"item_id": item["id"], "output_index": len(self._items) - 1}
            done = {**place, "name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **done)
        else:
            part = item["content"][0]
            if item["type"] == "reasoning":
                yield self._event("response.reasoning_text.done", **self._place(), text=part["text"])
            else:
                yield self._event("response.output_text.done", **self._place(), text=part["text"], logprobs=[])
            yield self._event("response.content_part.done", **self._place(), part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _event(self, kind: str, **content: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **content})

    def _item(self, part: Part, index: int, status: str) -> dict[str, Any]:
        prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[part.kind]
        item: dict[str, Any] = {"id": f"{prefix}_{self.job.key}{index}", "type": KINDS[part.kind], "status": status}
        if part.kind == "reasoning":
            return {**item, "summary": [], "content": [{"type": "reasoning_text", "text": part.text}]}
        if part.kind == "text":
            return {
                **item,
                "role": "assistant",
                "content": [{"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}],
            }
        return {**item, "call_id": part.call_id, "name": part.name, "arguments": part.text}

    def _response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        body, job, params = self._body, self.job, self.job.requests[0].params
        choice, wanted = job.conversation.tool_choice, job.conversation.response_format
        return {
            "id": f"resp_{job.key}",
            "object": "response",
            "created_at": job.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": job.server.client.info.model_name,
            "output": items,
            "parallel_tool_calls": choice.parallel,
            "previous_response_id": None,
            "reasoning": {"effort": job.conversation.effort, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"} if wanted is None else body.text["format"]},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "metadata": body.metadata or {},
            "user": body.user,
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        job = self.job
        return {
            "input_tokens": job.prompt_tokens,
            "input_tokens_details": {"cached_tokens": sum(job.cached_tokens)},
            "output_tokens": job.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": job.reasoning_tokens},
            "total_tokens": job.prompt_tokens + job.completion_tokens,
        }
