"""Checkpoints that bring a Jinja chat template: it is rendered in a sandbox, and no message can forge a control token."""

from __future__ import annotations

import json
import re
import secrets
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from abyssal.errors import CheckpointError, RequestError
from abyssal.serve.conversation import Conversation, Message, parse_arguments
from abyssal.serve.protocol import Segment
from abyssal.tokenizer import SpecialToken, Tokenizer, read_object


def read_template(folder: Path) -> str | None:
    """The source of a checkpoint's chat template: `chat_template.jinja`, or `chat_template` of `tokenizer_config.json`.

    Raises:
        CheckpointError: a file cannot be read, or it is not a text, nor a list of named ones with a default.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: not readable as text: {error}") from error
    options = folder / "tokenizer_config.json"
    raw = read_object(options).get("chat_template") if options.is_file() else None
    if isinstance(raw, list):
        raw = next((e.get("template") for e in raw if isinstance(e, dict) and e.get("name") == "default"), raw)
    if not isinstance(raw, str | None):
        raise CheckpointError(f"{options}: chat_template must be a text, or a list with a text named default")
    return raw


class ChatTemplate:
    """A compiled chat template.

    Raises:
        CheckpointError: the source is not a template.
    """

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the checkpoint's chat template cannot be used: {error}") from error

    def render(self, conversation: Conversation, tokenizer: Tokenizer) -> list[Segment]:
        """The prompt. What a message spells stays text: it is hidden from the template, and put back afterwards.

        Raises:
            RequestError: the template refuses the conversation, or fails on it.
        """
        veil = _Veil(tokenizer.control_texts())
        tools = [{"type": "function", "function": tool.function} for tool in conversation.tools]
        try:
            text = self._template.render(
                messages=[veil.hide(_message(message)) for message in conversation.messages],
                tools=veil.hide(tools) or None,
                thinking=conversation.thinking,
                enable_thinking=conversation.thinking,
                reasoning_effort=conversation.effort,
                add_generation_prompt=True,
                bos_token=tokenizer.control_text(tokenizer.bos_token_id),
                eos_token=tokenizer.control_text(tokenizer.eos_token_id),
            )
        except Exception as error:  # a template is a program of the checkpoint: whatever it raises, this request is refused
            raise RequestError(f"the model's chat template refuses the conversation: {error}", param="messages") from error
        return veil.reveal(text)


class _Veil:
    """Replaces spelled-out control tokens by marks that nobody can guess, and back."""

    def __init__(self, spellings: list[str]) -> None:
        nonce = secrets.token_hex(8)
        self._marks = {text: f"\ue000{nonce}.{i}\ue001" for i, text in enumerate(spellings)}
        self._texts = {mark: text for text, mark in self._marks.items()}
        self._spelled = _any_of(spellings)
        self._marked = _any_of(list(self._texts))

    def hide(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._spelled.sub(lambda found: self._marks[found[0]], value)
        if isinstance(value, list):
            return [self.hide(entry) for entry in value]
        if isinstance(value, dict):
            return {self.hide(key): self.hide(entry) for key, entry in value.items()}
        return value

    def reveal(self, text: str) -> list[Segment]:
        parts = self._spelled.split(text)
        shown = [
            SpecialToken(part) if i % 2 else self._marked.sub(lambda m: self._texts[m[0]], part) for i, part in enumerate(parts)
        ]
        return [part for part in shown if part != ""]


def _any_of(texts: list[str]) -> re.Pattern[str]:
    """Matches any of `texts`, in a group; nothing where there are none."""
    return re.compile("(" + ("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)") + ")")


def _message(message: Message) -> dict[str, Any]:
    """A message as templates expect it."""
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        shown["reasoning_content"] = message.reasoning
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        shown["tool_call_id"] = message.tool_call_id
    return shown


def _arguments(text: str) -> Any:
    arguments = parse_arguments(text)
    return text if arguments is None else arguments


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """JSON as models were trained on, not as HTML wants it."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
