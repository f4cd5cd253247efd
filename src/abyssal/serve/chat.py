"""How one checkpoint speaks: its prompt format, its texts, and whether it thinks unless told otherwise."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from abyssal.errors import ConfigError, RequestError, show
from abyssal.serve.chat_template import ChatTemplate, read_template
from abyssal.serve.conversation import Conversation
from abyssal.serve.encoding_file import find_encoding_file, load_texts
from abyssal.serve.protocol import EFFORTS, OWN_TEXTS, RELEASES, V4, Release, Texts, render
from abyssal.tokenizer import Tokenizer

log = logging.getLogger("abyssal")


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """A checkpoint's side of every conversation."""

    thinking: bool = True  # for requests that do not say
    release: Release = V4
    texts: Texts = OWN_TEXTS
    template: ChatTemplate | None = None  # in place of release and texts

    def encode(self, tokenizer: Tokenizer, conversation: Conversation) -> list[int]:
        """Token ids of the prompt that asks for the next answer, BOS included.

        Raises:
            RequestError: the tokenizer or the texts lack what the conversation needs, or the template refuses it.
        """
        if conversation.effort == "max" and not self.texts.efforts and self.template is None:
            raise RequestError(
                "reasoning_effort='max' needs an instruction text, and this checkpoint has no encoding file; use another effort",
                param="reasoning_effort",
            )
        if self.template is not None:
            segments = self.template.render(conversation, tokenizer)
        else:
            messages = conversation.prompt_messages()
            segments = render(messages, self.release, self.texts, conversation.thinking, effort=conversation.effort)
        try:
            return tokenizer.encode_segments(segments)
        except RequestError as error:
            raise RequestError(str(error), param="messages") from error


def load_chat_format(folder: Path, family: str) -> ChatFormat:
    """What a checkpoint says about conversations: `abyssal.json`, then its encoding file, else its Jinja template, else our texts.

    Raises:
        ConfigError: `abyssal.json` is not an object of known keys.
        CheckpointError: the encoding file or the template cannot be used.
    """
    thinking = _default_thinking(folder / "abyssal.json")
    if (path := find_encoding_file(folder)) is not None:
        return ChatFormat(thinking, RELEASES[family], load_texts(path, family))
    if (source := read_template(folder)) is not None:
        return ChatFormat(thinking, RELEASES[family], template=ChatTemplate(source))
    log.info("no encoding file and no chat template in %s: tools are described in words of our own", folder)
    return ChatFormat(thinking, RELEASES[family])


def _default_thinking(path: Path) -> bool:
    if not path.exists():
        return True
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(given, dict) or given.keys() - {"thinking"} or not isinstance(given.get("thinking", True), bool):
        raise ConfigError(f"{path} must be an object with the one key 'thinking', true or false, not {given!r}")
    return bool(given.get("thinking", True))


def wants_thinking(effort: str | None, switches: dict[str, Any] | None, default: bool) -> bool:
    """Whether the answer begins with reasoning.

    Args:
        effort: `reasoning_effort`; "none" turns thinking off, any other turns it on.
        switches: `chat_template_kwargs`: `thinking` or `enable_thinking`.
        default: when the request does not say.

    Raises:
        RequestError: unknown or contradictory values.
    """
    said = set()
    for name, value in (switches or {}).items():
        if name not in ("thinking", "enable_thinking") or not isinstance(value, bool):
            raise RequestError(
                f"chat_template_kwargs: {show(name)} = {show(value)} is unknown; it takes thinking or enable_thinking, true or false",
                param="chat_template_kwargs",
            )
        said.add(value)
    if effort is not None:
        if effort not in EFFORTS:
            message = f"reasoning_effort={show(effort)} is unknown; use {', '.join(EFFORTS)}"
            raise RequestError(message, param="reasoning_effort")
        said.add(effort != "none")
    if len(said) > 1:
        names = ("thinking", "enable_thinking") if effort is None else ("reasoning_effort", "chat_template_kwargs")
        raise RequestError(
            f"{' and '.join(names)} disagree on whether to think; give one of them",
            param="chat_template_kwargs" if effort is None else "reasoning_effort",
        )
    return said.pop() if said else default
