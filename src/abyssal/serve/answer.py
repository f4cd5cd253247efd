"""Turns the updates of one chat request into reasoning, content and tool calls. `abyssal.serve.dsml` states how they are told apart.

More rules, the same for streamed and whole answers:

- A prompt that ends with `<think>` starts in reasoning, any other in content.
- Reasoning that is never closed stays reasoning, however the answer ends: the content is empty then.
- Stop strings are looked for in reasoning and in content: never across a control token, never in a call.
- Log-probabilities are those of the content.
- Other control tokens have no text, unless `skip_special_tokens` is off.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from abyssal.engine.output import CallDelta, OutputDelta, OutputProcessor
from abyssal.engine.request import RequestUpdate, SamplingParams, TokenLogprobs
from abyssal.serve.conversation import Conversation
from abyssal.serve.dsml import MARKS, AnswerParser, CallArguments, CallStart, Event
from abyssal.tokenizer import ASSISTANT, THINK, USER, Tokenizer


@dataclass(slots=True)
class Part:
    """Reasoning, text or a call that stands alone in an answer, or a piece of one."""

    kind: Literal["reasoning", "text", "call"]
    text: str = ""  # of a call, its arguments
    call_id: str = ""  # with the first piece of a call, and so its name
    name: str = ""


def add_part(parts: list[Part], part: Part) -> None:
    """Put a piece to the last part if it goes on with that, otherwise after it."""
    if parts and parts[-1].kind == part.kind and not part.call_id:
        parts[-1].text += part.text
    else:
        parts.append(replace(part))


@dataclass(slots=True)
class ChatDelta(OutputDelta):
    """What one update adds to one answer; `text`, `logprobs` and `text_offsets` are those of the content."""

    num_reasoning_tokens: int = 0  # of token_ids, the mark that ends it included
    parts: list[Part] = field(default_factory=list)  # reasoning, text and calls once more, in their order


class ChatProcessor:
    """One answer. Its text is cut into sections: at control tokens, and where stop strings begin or cease to count.

    Args:
        conversation: what was asked, for its tools.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int], conversation: Conversation
    ) -> None:
        self._tokenizer, self._params = tokenizer, params
        known = {mark: tokenizer.find_special(token) for token, mark in MARKS.items()}
        self._marks = {token: mark for mark, token in known.items() if token is not None}
        turns = {tokenizer.find_special(USER), tokenizer.find_special(ASSISTANT)}  # control tokens, also where not marked special
        self._hidden = turns if params.skip_special_tokens else set()
        choice = conversation.tool_choice
        max_calls = 0 if not conversation.calls_allowed else None if choice.parallel and choice.name is None else 1
        self._parser = AnswerParser(
            prompt_ids[-1] == tokenizer.find_special(THINK), conversation.tools, max_calls, not params.skip_special_tokens
        )
        self._num_tokens = 0
        self._num_fed = 0  # characters given to the parser
        self._num_calls = 0
        self._scores = _ContentScores()
        self._begin_section(prompt_ids, 0)
        self.finished = False

    def push(self, update: RequestUpdate) -> ChatDelta:
        """As `OutputProcessor.push`."""
        delta = ChatDelta(logprobs=None if self._params.logprobs is None else [])
        for i, token in enumerate(update.token_ids):
            if self.finished:
                break
            is_last = i == len(update.token_ids) - 1
            ends = is_last and update.stop_token_id is not None
            part = _part(update, i, is_last)
            delta.token_ids.append(token)
            delta.num_reasoning_tokens += self._parser.is_reasoning
            if token in self._marks and not ends:
                self._end_section(delta)
                self._feed(delta, self._marks[token])
                self._begin_section((), self._num_tokens + 1)
            elif self._parser.is_text != self._stops and not self._section.is_inside_character:
                self._end_section(delta)
                self._begin_section((), self._num_tokens)
            if (token in self._marks or token in self._hidden) and not ends:
                part.token_ids, part.logprobs = [], part.logprobs and []
            self._num_tokens += 1
            self._push_section(delta, part)
        if not update.token_ids and not self.finished:
            self._push_section(delta, update)
        return delta

    def _begin_section(self, prompt_ids: Sequence[int], num_tokens: int) -> None:
        """`num_tokens` came before it."""
        self._stops = self._parser.is_text
        remaining = max(0, self._params.min_tokens - num_tokens)
        params = replace(self._params, min_tokens=remaining, stop=self._params.stop if self._stops else [])
        self._section = OutputProcessor(self._tokenizer, params, prompt_ids)
        self._section_start = self._num_fed

    def _end_section(self, delta: ChatDelta) -> None:
        """Let go of text that waits to become a stop string."""
        rest = self._section.push(RequestUpdate("", [], None, None, finish_reason="stop"))
        self._take(delta, rest)

    def _push_section(self, delta: ChatDelta, update: RequestUpdate) -> None:
        part = self._section.push(update)
        self._take(delta, part)
        if part.finish_reason is None:
            return
        self.finished = True
        delta.finish_reason, delta.stop_reason, delta.error = part.finish_reason, part.stop_reason, part.error
        ends_in_content = self._parser.is_content
        self._give(delta, self._parser.finish())
        if ends_in_content:
            self._scores.add_text(self._num_fed, self._num_fed + 1, 0)  # what has no text, such as EOS
        self._scores.release(delta, self._num_fed + 1)

    def _take(self, delta: ChatDelta, part: OutputDelta) -> None:
        """Pass a section's text and scores on."""
        for score, offset in zip(part.logprobs or (), part.text_offsets, strict=True):
            self._scores.add_score(score, self._section_start + offset)
        self._feed(delta, part.text)

    def _feed(self, delta: ChatDelta, text: str) -> None:
        if text:
            self._num_fed += len(text)
            self._give(delta, self._parser.feed(text))
            self._scores.release(delta, self._parser.num_decided)

    def _give(self, delta: ChatDelta, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, CallStart):
                call = CallDelta(self._num_calls, f"call_{uuid.uuid4().hex[:24]}", event.name)
                delta.calls.append(call)
                add_part(delta.parts, Part("call", "", call.id, call.name))
                self._num_calls += 1
            elif isinstance(event, CallArguments):
                self._add_arguments(delta, event.text)
            elif event.kind == "reasoning":
                delta.reasoning += event.text
                add_part(delta.parts, Part("reasoning", event.text))
            else:
                delta.text += event.text
                add_part(delta.parts, Part("text", event.text))
                self._scores.add_text(event.start, event.end, len(event.text))

    def _add_arguments(self, delta: ChatDelta, text: str) -> None:
        index = self._num_calls - 1
        if not delta.calls or delta.calls[-1].index != index:
            delta.calls.append(CallDelta(index))
        delta.calls[-1].arguments += text
        add_part(delta.parts, Part("call", text))


class _ContentScores:
    """Log-probabilities that wait until it is decided whether their token's text is content."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[TokenLogprobs, int]] = deque()  # with the first character of the token
        self._content: deque[tuple[int, int, int]] = deque()  # characters [start, end) are content, from this offset on
        self._length = 0  # of the content

    def add_score(self, score: TokenLogprobs, first: int) -> None:
        self._waiting.append((score, first))

    def add_text(self, start: int, end: int, length: int) -> None:
        self._content.append((start, end, self._length))
        self._length += length

    def release(self, delta: ChatDelta, num_decided: int) -> None:
        """Hand out or drop the scores of tokens that begin among the first `num_decided` characters."""
        while self._waiting and self._waiting[0][1] < num_decided:
            score, first = self._waiting.popleft()
            while self._content and self._content[0][1] <= first:
                self._content.popleft()
            if self._content and self._content[0][0] <= first and delta.logprobs is not None:
                start, _, offset = self._content[0]
                delta.logprobs.append(score)
                delta.text_offsets.append(offset + first - start)
        while len(self._content) > 1 and not self._waiting:
            self._content.popleft()


def _part(update: RequestUpdate, index: int, is_last: bool) -> RequestUpdate:
    """The update of one token; the end comes with the last."""
    logprobs = None if update.logprobs is None else update.logprobs[index : index + 1]
    part = RequestUpdate(update.request_id, update.token_ids[index : index + 1], logprobs, None)
    if is_last:
        part.finish_reason, part.stop_token_id, part.error = update.finish_reason, update.stop_token_id, update.error
    return part
