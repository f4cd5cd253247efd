"""Splits an answer into reasoning and content at the control tokens `<think>` and `</think>` (V4 spec 5.7, without tools).

The rules, the same for streamed and whole answers:

- A prompt that ends with `<think>` starts in reasoning, any other in content. The marks are recognised by token id only, and never
  appear as text; a mark that changes nothing is swallowed.
- Reasoning that is never closed stays reasoning, however the answer ends: the content is empty then.
- Stop strings are looked for in reasoning and in content, never across a mark.
- Log-probabilities are those of the content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from abyssal.engine.output import OutputDelta, OutputProcessor
from abyssal.engine.request import RequestUpdate, SamplingParams
from abyssal.tokenizer import ASSISTANT, END_THINK, THINK, USER, Tokenizer


@dataclass(slots=True)
class ChatDelta(OutputDelta):
    """What one update adds to one answer; `text`, `logprobs` and `text_offsets` are those of the content."""

    num_reasoning_tokens: int = 0  # of token_ids, marks included


class ChatProcessor:
    """Turns the updates of one chat request into reasoning and content."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._think, self._end_think = tokenizer.special_id(THINK), tokenizer.special_id(END_THINK)
        turns = {tokenizer.special_id(USER), tokenizer.special_id(ASSISTANT)}  # control tokens, also where not marked special
        self._hidden = turns if params.skip_special_tokens else set()
        self._thinking = prompt_ids[-1] == self._think
        self._num_tokens = 0
        self._num_characters = 0  # of content
        self._section_start = 0  # the first character of this section's content
        self._section = OutputProcessor(tokenizer, params, prompt_ids)
        self.finished = False

    def push(self, update: RequestUpdate) -> ChatDelta:
        """As `OutputProcessor.push`."""
        delta = ChatDelta(logprobs=None if self._params.logprobs is None else [])
        if self.finished:
            return delta
        start, end = 0, len(update.token_ids)
        for i, token in enumerate(update.token_ids):
            is_last = update.stop_token_id is not None and i == end - 1
            if token in (self._think, self._end_think) or (token in self._hidden and not is_last):
                self._feed(delta, _part(update, start, i))
                if delta.finish_reason is not None:
                    return delta
                self._count(delta, [token])
                self._turn(delta, update.request_id, token)
                start = i + 1
        last = _part(update, start, end)
        last.finish_reason, last.stop_token_id, last.error = update.finish_reason, update.stop_token_id, update.error
        self._feed(delta, last)
        return delta

    def _turn(self, delta: ChatDelta, request_id: str, token: int) -> None:
        """Begin reasoning or content, if `token` changes that; text that might have become a stop string is released."""
        thinking = {self._think: True, self._end_think: False}.get(token, self._thinking)
        if thinking == self._thinking:
            return
        rest = self._section.push(RequestUpdate(request_id, [], None, None, finish_reason="stop"))
        self._add(delta, rest)
        self._thinking, self._section_start = thinking, self._num_characters
        params = replace(self._params, min_tokens=max(0, self._params.min_tokens - self._num_tokens))
        self._section = OutputProcessor(self._tokenizer, params, [])

    def _feed(self, delta: ChatDelta, update: RequestUpdate) -> None:
        part = self._section.push(update)
        self._count(delta, part.token_ids)
        self._add(delta, part)
        delta.finish_reason, delta.stop_reason, delta.error = part.finish_reason, part.stop_reason, part.error
        self.finished = part.finish_reason is not None

    def _count(self, delta: ChatDelta, token_ids: list[int]) -> None:
        self._num_tokens += len(token_ids)
        delta.token_ids += token_ids
        delta.num_reasoning_tokens += len(token_ids) * self._thinking

    def _add(self, delta: ChatDelta, part: OutputDelta) -> None:
        if self._thinking:
            delta.reasoning += part.text
        else:
            delta.text += part.text
            self._num_characters += len(part.text)
            delta.text_offsets += [self._section_start + offset for offset in part.text_offsets]
            if delta.logprobs is not None and part.logprobs is not None:
                delta.logprobs += part.logprobs


def _part(update: RequestUpdate, start: int, end: int) -> RequestUpdate:
    logprobs = None if update.logprobs is None else update.logprobs[start:end]
    return RequestUpdate(update.request_id, update.token_ids[start:end], logprobs, None)
