"""`/v1/messages`: conversations in Anthropic's form."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
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
    ToolChoice,
    check_last,
    check_text,
    check_tools,
    choose_required,
    dump_json,
    make_call,
    make_tool,
    other_part,
    parse_options,
    schema_format,
    tool_entries,
)  # fmt: skip
from abyssal.serve.errors import anthropic_error_body
from abyssal.serve.generation import Form, answer
from abyssal.serve.schemas import MessagesBody
from abyssal.serve.streams import named_event


async def create_message(request: Request) -> Response:
    server = server_of(request)
    with ExitStack() as stack:
        record = stack.enter_context(server.metrics.request("messages"))
        body = await read_body(request, MessagesBody)
        server.require_model(body.model)
        job = await start_chat(request.receive, server, partial(_conversation, body), _params(server, body))
        return await answer(job, MessagesForm(job), request, bool(body.stream), record, stack)


def _params(server: Server, body: MessagesBody) -> SamplingParams:
    if body.max_tokens is None:
        raise RequestError("max_tokens is missing", param="max_tokens")
    given = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "stop": body.stop_sequences}
    said = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**{**server.client.info.sampling_defaults, **said, "max_tokens": body.max_tokens})


def _conversation(body: MessagesBody) -> Conversation:
    """What the request asks of the model. Without `thinking` there is none, as in Anthropic's own API."""
    tools = _tools(body.tools)
    config = parse_options(body.output_config, "output_config", {"effort", "format"})
    effort = config.get("effort")
    thinks = _wants_thinking(body.thinking)
    if effort is not None:
        wants_thinking(effort, None, thinks)  # refuses unknown ones
    return Conversation(
        tuple(_messages(body.system, body.messages)), tools, _choice(body.tool_choice, tools), _format(config), thinks, effort
    )


def _wants_thinking(raw: Any) -> bool:
    kind = parse_options(raw, "thinking", {"type", "budget_tokens", "display"}).get("type", "disabled")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise RequestError(f"thinking.type={show(kind)} is unknown; use enabled, adaptive or disabled", param="thinking.type")
    return bool(kind != "disabled")


def _format(config: dict[str, Any]) -> ResponseFormat | None:
    raw = config.get("format")
    if raw is None:
        return None
    if not isinstance(raw, dict) or raw.get("type") != "json_schema":
        raise RequestError("output_config.format must be {type: json_schema, schema}", param="output_config.format")
    return schema_format(raw, "output_config.format", {"type", "name"})


def _tools(raw: Any) -> tuple[Tool, ...]:
    tools = []
    for i, entry in enumerate(tool_entries(raw)):
        where = f"tools[{i}]"
        if not isinstance(entry, dict) or entry.get("type", "custom") != "custom" or "input_schema" not in entry:
            raise RequestError(f"{where} is not supported; use {{name, description, input_schema}}", param=where)
        function = {key: value for key, value in entry.items() if key not in ("type", "cache_control", "input_schema")}
        tools.append(make_tool({**function, "parameters": entry["input_schema"]}, where, "input_schema"))
    return check_tools(tools)


def _choice(raw: Any, tools: tuple[Tool, ...]) -> ToolChoice:
    given = parse_options(raw, "tool_choice", {"type", "name", "disable_parallel_tool_use"})
    kind, serial = given.get("type", "auto"), given.get("disable_parallel_tool_use", False)
    if kind not in ("auto", "any", "tool", "none") or not isinstance(serial, bool):
        raise RequestError(f"tool_choice={show(raw)} is not supported; its type is auto, any, tool or none", param="tool_choice")
    choice = ToolChoice(parallel=not serial)
    if kind == "any":
        return choose_required(choice, None, tools)
    if kind == "tool":
        return choose_required(choice, check_text(given.get("name"), "tool_choice.name"), tools)
    return replace(choice, mode=kind)


# Messages


def _messages(system: Any, raw: Any) -> list[Message]:
    if not isinstance(raw, list) or not raw:
        raise RequestError("messages must be a non-empty list", param="messages")
    messages = [] if system is None else [Message("system", _text(system, "system", "system"))]
    for i, entry in enumerate(raw):
        where = f"messages[{i}]"
        role = entry.get("role") if isinstance(entry, dict) else None
        if role not in ("user", "assistant", "system") or not isinstance(entry, dict) or entry.keys() != {"role", "content"}:
            raise RequestError(f"{where} must have a role, user or assistant, and content", param=where)
        if role == "assistant":
            messages.append(_assistant(entry["content"], f"{where}.content"))
        elif role == "system":
            messages.append(Message("system", _text(entry["content"], f"{where}.content", "system")))
        else:
            messages += _user(entry["content"], f"{where}.content")
    check_last(messages)
    return messages


def _blocks(content: Any, where: str) -> list[tuple[str, dict[str, Any], str]]:
    """(type, block, its path) of every block."""
    if isinstance(content, str):
        return [("text", {"text": content}, where)]
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of blocks", param=where)
    found = []
    for i, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise RequestError(f"{where}[{i}] must be an object with a type", param=f"{where}[{i}]")
        found.append((kind, block, f"{where}[{i}]"))
    return found


def _text(content: Any, where: str, role: str) -> str:
    """Text blocks joined by an empty line."""
    parts = []
    for kind, block, path in _blocks(content, where):
        parts.append(check_text(block.get("text"), f"{path}.text") if kind == "text" else other_part(kind, role, path))
    return "\n\n".join(parts)


def _user(content: Any, where: str) -> list[Message]:
    """A message for each block, in order; they are merged later."""
    messages = []
    for kind, block, path in _blocks(content, where):
        if kind == "tool_result":
            call_id = check_text(block.get("tool_use_id"), f"{path}.tool_use_id")
            messages.append(Message("tool", _text(block.get("content") or "", f"{path}.content", "tool"), tool_call_id=call_id))
        elif kind == "text":
            messages.append(Message("user", check_text(block.get("text"), f"{path}.text")))
        else:
            other_part(kind, "user", path)
    if not messages:
        raise RequestError(f"{where} is empty; give at least one block", param=where)
    return messages


def _assistant(content: Any, where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for kind, block, path in _blocks(content, where):
        if kind == "text":
            texts.append(check_text(block.get("text"), f"{path}.text"))
        elif kind == "thinking":
            thoughts.append(check_text(block.get("thinking"), f"{path}.thinking"))
        elif kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise RequestError(f"{path}.input must be an object", param=f"{path}.input")
            calls.append(make_call(block.get("id"), block.get("name"), dump_json(arguments, f"{path}.input"), path))
        elif kind != "redacted_thinking":
            other_part(kind, "assistant", path)
    return Message("assistant", "".join(texts), "".join(thoughts), tool_calls=tuple(calls))


# Answers

_PIECES = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesForm(Form[ChatDelta]):
    """One message of blocks: thinking, text, and calls."""

    def __init__(self, job: ChatJob) -> None:
        self.job = job
        self._open: str | None = None  # kind of the part under way
        self._num_blocks = 0

    def whole(self) -> dict[str, Any]:
        content = [_block(part) for part in self.job.parts[0]]
        return {**self._message(content), **self._end(), "usage": self._usage()}

    def opening(self) -> Iterable[bytes]:
        start = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        yield named_event("message_start", {"type": "message_start", "message": start})

    def events(self, index: int, delta: ChatDelta) -> Iterable[bytes]:
        for part in delta.parts:
            if part.kind != self._open or part.call_id:
                yield from self._stop()
                yield from self._begin(part)
            if part.text:
                yield self._piece(part)

    def closing(self) -> Iterable[bytes]:
        yield from self._stop()
        yield named_event("message_delta", {"type": "message_delta", "delta": self._end(), "usage": self._usage()})
        yield named_event("message_stop", {"type": "message_stop"})

    def failure(self, error: Exception) -> Iterable[bytes]:
        return (named_event("error", anthropic_error_body(error)),)

    def _begin(self, part: Part) -> Iterable[bytes]:
        self._open = part.kind
        empty = _block(replace(part, text="{}" if part.kind == "call" else ""))
        start = {"type": "content_block_start", "index": self._num_blocks, "content_block": empty}
        yield named_event("content_block_start", start)

    def _piece(self, part: Part) -> bytes:
        kind, key = _PIECES[part.kind]
        content = {"type": "content_block_delta", "index": self._num_blocks, "delta": {"type": kind, key: part.text}}
        return named_event("content_block_delta", content)

    def _stop(self) -> Iterable[bytes]:
        if self._open is None:
            return
        yield named_event("content_block_stop", {"type": "content_block_stop", "index": self._num_blocks})
        self._open = None
        self._num_blocks += 1

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        model = self.job.server.client.info.model_name
        return {"id": f"msg_{self.job.key}", "type": "message", "role": "assistant", "model": model, "content": content}

    def _end(self) -> dict[str, Any]:
        output = self.job.outputs[0]
        stopped_by = output.stop_reason if isinstance(output.stop_reason, str) else None
        reason = "stop_sequence" if stopped_by is not None else "tool_use" if output.calls else "end_turn"
        return {"stop_reason": "max_tokens" if output.finish_reason == "length" else reason, "stop_sequence": stopped_by}

    def _usage(self) -> dict[str, int]:
        """The prompt's tokens are told apart by whether they were cached."""
        cached = sum(self.job.cached_tokens)
        return {
            "input_tokens": self.job.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.job.completion_tokens,
        }


def _block(part: Part) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": json.loads(part.text)}
