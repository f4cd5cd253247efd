"""Conversations to prompts: V4's format without its tools part (V4 spec 5.2 to 5.5). Needs no server package.

A prompt is a list of segments, text and `SpecialToken`, so that what a message spells can never become a control token.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from abyssal.errors import ConfigError, RequestError
from abyssal.tokenizer import ASSISTANT, BOS, END_THINK, EOS, LATEST_REMINDER, THINK, USER, SpecialToken, Tokenizer

Segment = str | SpecialToken

ROLES = ("system", "developer", "user", "assistant", "latest_reminder")
TASKS = {name: SpecialToken(f"<｜{name}｜>") for name in ("action", "query", "authority", "domain", "title", "read_url")}
EFFORTS = ("none", "minimal", "low", "medium", "high", "max")

# Message keys that ask for nothing when empty: the openai client sends them back with an answer of the assistant.
_TOOL_KEYS = ("tool_calls", "tool_call_id", "function_call")
_EMPTY_KEYS = ("name", "refusal", "audio", "annotations")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. The public role `developer` has become `system`: the model's own developer role is internal (V4 spec 5.3)."""

    role: str
    content: str
    reasoning: str = ""  # of the assistant
    task: str | None = None  # a key of TASKS


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What a checkpoint says about conversations."""

    thinking: bool  # for requests that do not say
    silent_efforts: tuple[str, ...]  # reasoning efforts that add no text to the prompt


def load_chat_settings(folder: Path) -> ChatSettings:
    """Read `abyssal.json`, and which table of efforts the checkpoint's encoding file has (V4 spec 5.4).

    Raises:
        ConfigError: `abyssal.json` is not an object of known keys.
    """
    thinking = True
    if (path := folder / "abyssal.json").exists():
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
        if not isinstance(given, dict) or given.keys() - {"thinking"} or not isinstance(given.get("thinking", True), bool):
            raise ConfigError(f"{path} must be an object with the one key 'thinking', true or false, not {given!r}")
        thinking = given.get("thinking", True)
    encoding = folder / "encoding" / "encoding_dsv4.py"
    has_prompt_table = encoding.exists() and "REASONING_EFFORT_PROMPTS" in encoding.read_text(encoding="utf-8")
    return ChatSettings(thinking, ("minimal", "low", "medium") if has_prompt_table else ("minimal", "low", "medium", "high"))


def wants_thinking(effort: str | None, switches: dict[str, Any] | None, default: bool, settings: ChatSettings) -> bool:
    """Whether the answer begins with reasoning.

    Args:
        effort: `reasoning_effort`; "none" turns thinking off, any other turns it on.
        switches: `chat_template_kwargs`: `thinking` or `enable_thinking`.
        default: when the request does not say.

    Raises:
        RequestError: unknown or contradictory values, or an effort whose instruction text is not available.
    """
    said = set()
    for name, value in (switches or {}).items():
        if name not in ("thinking", "enable_thinking") or not isinstance(value, bool):
            raise RequestError(
                f"chat_template_kwargs: {reprlib.repr(name)} = {reprlib.repr(value)} is unknown; it takes thinking or enable_thinking, true or false",
                param="chat_template_kwargs",
            )
        said.add(value)
    if effort is not None:
        if effort not in EFFORTS:
            message = f"reasoning_effort={reprlib.repr(effort)} is unknown; use {', '.join(EFFORTS)}"
            raise RequestError(message, param="reasoning_effort")
        if effort != "none" and effort not in settings.silent_efforts:
            raise RequestError(
                f"reasoning_effort={effort!r} needs an instruction text from the checkpoint's encoding file, which this version "
                f"does not read; use {', '.join(('none', *settings.silent_efforts))}",
                param="reasoning_effort",
            )
        said.add(effort != "none")
    if len(said) > 1:
        raise RequestError(
            "reasoning_effort and chat_template_kwargs disagree on whether to think; give one of them", param="reasoning_effort"
        )
    return said.pop() if said else default


def encode_chat(tokenizer: Tokenizer, messages: Any, thinking: bool) -> list[int]:
    """Token ids of the prompt that asks for the next answer of a conversation of raw `messages`, BOS included.

    Raises:
        RequestError: a message is bad, or the tokenizer lacks a control token that the conversation needs.
    """
    segments = render(parse_messages(messages), thinking)
    try:
        return tokenizer.encode_segments(segments)
    except RequestError as error:
        raise RequestError(str(error), param="messages") from error


def parse_messages(raw: Any) -> list[Message]:
    """Check a list of `{"role": ..., "content": ...}`.

    Raises:
        RequestError: naming the message and key at fault.
    """
    if not isinstance(raw, list) or not raw:
        raise RequestError("messages must be a non-empty list", param="messages")
    messages = [_parse_message(message, f"messages[{i}]") for i, message in enumerate(raw)]
    if messages[-1].role not in ("user", "system") and messages[-1].task is None:
        raise RequestError(
            f"the last message is of role {messages[-1].role!r}, which leaves nothing to answer; end with a user message",
            param=f"messages[{len(messages) - 1}].role",
        )
    return messages


def render(messages: Sequence[Message], thinking: bool, drop_thinking: bool = True, effort_text: str = "") -> list[Segment]:
    """The prompt of a conversation (V4 spec 5.3).

    Args:
        thinking: thinking mode; it ends with `<think>` then, otherwise with `</think>`.
        drop_thinking: leave out reasoning before the last user message, as the model expects without tools.
        effort_text: instruction text of the reasoning effort; used in thinking mode only.
    """
    messages = merge_users(messages)
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    prompt: list[Segment] = [BOS]
    if thinking and effort_text:
        prompt.append(effort_text)
    for i, message in enumerate(messages):
        keeps = thinking and (not drop_thinking or i >= last_user)  # reasoning stays from here on
        if message.role == "user":
            prompt.append(USER)
        elif message.role == "latest_reminder":
            prompt.append(LATEST_REMINDER)
        elif message.role == "assistant" and keeps and not (i and messages[i - 1].task):
            prompt += [message.reasoning, END_THINK]
        prompt.append(message.content)
        if message.role == "assistant":
            prompt.append(EOS)
        follower = messages[i + 1].role if i + 1 < len(messages) else None
        if follower in (None, "assistant", "latest_reminder"):
            # An action is chosen with thinking open wherever it stands; an answer before the last question was given without.
            thinks = thinking if message.task == "action" else keeps
            prompt += _transition(message, is_last=follower is None, mark=THINK if thinks else END_THINK)
    return [segment for segment in prompt if segment != ""]


def merge_users(messages: Sequence[Message]) -> list[Message]:
    """Join each user message to a user message directly before it, unless that one has a task (V4 spec 5.5)."""
    merged: list[Message] = []
    for message in messages:
        before = merged[-1] if merged else None
        if before is not None and message.role == before.role == "user" and before.task is None:
            merged[-1] = replace(before, content=f"{before.content}\n\n{message.content}")
        else:
            merged.append(message)
    return merged


def _transition(message: Message, is_last: bool, mark: SpecialToken) -> list[Segment]:
    """What opens the next turn after `message`."""
    if message.task is not None and message.task != "action":
        return [TASKS[message.task]]
    if message.task == "action":
        return [ASSISTANT, mark, TASKS["action"]]
    # The official encoder opens nothing after a system message; one that ends a conversation still wants an answer.
    opens = message.role == "user" or (message.role == "system" and is_last)
    return [ASSISTANT, mark] if opens else []


def _parse_message(raw: Any, where: str) -> Message:
    if not isinstance(raw, dict):
        raise RequestError(f"{where} must be an object with role and content, not {type(raw).__name__}", param=where)
    role = raw.get("role")
    if role in ("tool", "function"):
        raise RequestError(f"{where}.role: tool calls are not supported yet", param=f"{where}.role")
    if role not in ROLES:
        raise RequestError(f"{where}.role={reprlib.repr(role)} is unknown; use {', '.join(ROLES)}", param=f"{where}.role")
    for key, value in raw.items():
        if key in _TOOL_KEYS and value not in (None, [], ""):
            raise RequestError(f"{where}.{key}: tool calls are not supported yet", param=f"{where}.{key}")
        if key in _EMPTY_KEYS and value not in (None, [], ""):
            raise RequestError(f"{where}.{key} is not supported; leave it out", param=f"{where}.{key}")
        if key not in ("role", "content", "reasoning_content", "reasoning", "task", *_TOOL_KEYS, *_EMPTY_KEYS):
            raise RequestError(f"{where} has the unknown key {reprlib.repr(key)}", param=f"{where}.{key}")
    reasoning = _reasoning(raw, where)
    if reasoning and role != "assistant":
        raise RequestError(f"{where}: reasoning belongs to messages of the assistant only", param=f"{where}.reasoning_content")
    if raw.get("content") is None and not reasoning:
        raise RequestError(f"{where}.content is missing", param=f"{where}.content")
    content = "" if raw.get("content") is None else _text(raw["content"], f"{where}.content")
    return Message("system" if role == "developer" else role, content, reasoning, _task(raw.get("task"), f"{where}.task"))


def _task(value: Any, where: str) -> str | None:
    if value is not None and value not in list(TASKS):  # a list: the value may be of any type
        raise RequestError(f"{where}={reprlib.repr(value)} is unknown; use {', '.join(TASKS)}", param=where)
    return value


def _reasoning(raw: dict[str, Any], where: str) -> str:
    """Both spellings are in use; an answer may come back with both, the same."""
    given = {value for key in ("reasoning_content", "reasoning") if (value := _string_or_none(raw.get(key), f"{where}.{key}"))}
    if len(given) > 1:
        raise RequestError(
            f"{where}: reasoning_content and reasoning differ; give one of them", param=f"{where}.reasoning_content"
        )
    return given.pop() if given else ""


def _string_or_none(value: Any, where: str) -> str | None:
    return None if value is None else _string(value, where)


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{where} must be a string, not {type(value).__name__}", param=where)
    if surrogate := re.search("[\ud800-\udfff]", value):
        raise RequestError(
            f"{where} holds the lone surrogate U+{ord(surrogate[0]):04X}, which no text can; remove it", param=where
        )
    return value


def _text(content: Any, where: str) -> str:
    """Text, or text parts joined by an empty line, as the model's format joins blocks."""
    if isinstance(content, str):
        return _string(content, where)
    if not isinstance(content, list) or not content:
        raise RequestError(f"{where} must be a string or a non-empty list of text parts", param=where)
    return "\n\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        shown = kind if isinstance(kind, str) and re.fullmatch(r"\w{1,40}", kind) else type(part).__name__
        raise RequestError(
            f"{where}: parts of type {shown} are not supported, this model reads text only; nothing was fetched", param=where
        )
    if part.keys() != {"type", "text"}:
        raise RequestError(f"{where} must have type and text, and nothing else", param=where)
    return _string(part["text"], f"{where}.text")
