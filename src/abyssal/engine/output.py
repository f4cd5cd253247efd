"""From engine updates to text: incremental detokenisation, stop strings, and what a finished request returns.

The rules, the same for streamed and whole answers, since both are sums of the same pieces:

- Text is the UTF-8 decoding of all output bytes. A character that is still incomplete waits; one that the end of the output
  cuts off is left out. U+FFFD appears only for bytes that can never become a character.
- Text that may be the beginning of a stop string waits until that is decided. The stop string completed first ends the output;
  of two completed by the same character the longer counts. One completed within the first `min_tokens` tokens is ignored.
- The token that ends the output (EOS or a stop id) has no text unless `include_stop_str_in_output` asks for it.
- Log-probabilities are handed out with the text of their token, so that none of a stop string's leave either.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from abyssal.engine.request import FinishReason, RequestUpdate, SamplingParams, TokenLogprobs
from abyssal.errors import RequestError
from abyssal.tokenizer import Tokenizer


@dataclass(slots=True)
class CallDelta:
    """What one update adds to one tool call. The first of a call has its id and name; the arguments are pieces of JSON text."""

    index: int  # of the call in its answer
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class OutputDelta:
    """What one update adds to one output."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # generated, for counting: their text may still be waiting
    logprobs: list[TokenLogprobs] | None = None  # of the tokens whose text is out by now; None = not asked for
    text_offsets: list[int] = field(default_factory=list)  # one per logprobs: characters of output text before that token
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop id that ended it; None for EOS
    error: str | None = None
    reasoning: str = ""  # of a chat answer: what it thought before and between its text
    calls: list[CallDelta] = field(default_factory=list)  # of a chat answer


@dataclass(slots=True)
class CompletionOutput:
    """One finished or growing output."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # an ending token and those of a stop string included
    logprobs: list[TokenLogprobs] | None = None
    text_offsets: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    reasoning: str = ""  # of a chat answer
    calls: list[CallDelta] = field(default_factory=list)  # of a chat answer, each whole once it has ended

    def add(self, delta: OutputDelta) -> None:
        for call in delta.calls:
            if call.index == len(self.calls):
                self.calls.append(CallDelta(call.index, call.id, call.name))
            self.calls[call.index].arguments += call.arguments
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs += delta.logprobs
        self.text_offsets += delta.text_offsets
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason, self.error = delta.finish_reason, delta.stop_reason, delta.error


@dataclass(slots=True)
class RequestOutput:
    """What a request returns: its prompt and `n` outputs."""

    request_id: str
    prompt: str | None  # None where the prompt came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # entry 0 is None: nothing comes before the first token
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


class OutputProcessor:
    """Turns the updates of one request into text.

    Args:
        tokenizer: None for a model without one; the text stays empty then.
        prompt_ids: the prompt; an output may complete a character that the prompt's last tokens began.

    Raises:
        RequestError: stop strings without a tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        if params.stop and tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none; use stop_token_ids", param="stop")
        self._tokenizer, self._params = tokenizer, params
        self._decoder = _Decoder(b"" if tokenizer is None else b"".join(tokenizer.token_bytes(i) for i in prompt_ids[-3:]))
        self._stops = StopMatcher(params.stop)
        self._waiting = ""  # text not yet handed out
        self._num_released = 0  # characters handed out
        self._num_tokens = 0
        self._scores: deque[tuple[TokenLogprobs, int, int]] = deque()  # waiting ones, with their first and last + 1 character
        self.finished = False

    @property
    def is_inside_character(self) -> bool:
        return self._decoder.is_inside_character

    def push(self, update: RequestUpdate) -> OutputDelta:
        """What `update` adds. When a stop string ends the output (`finish_reason` here but not in `update`), abort the request.

        Updates that come after the end are ignored: their delta is empty.
        """
        delta = OutputDelta(logprobs=None if self._params.logprobs is None else [])
        if self.finished:
            return delta
        for i, token in enumerate(update.token_ids):
            delta.token_ids.append(token)
            ends = update.stop_token_id is not None and i == len(update.token_ids) - 1
            delta.stop_reason = self._take(token, ends, update.logprobs[i] if update.logprobs else None)
            if delta.stop_reason is not None:
                break
        if delta.stop_reason is not None:
            delta.finish_reason = "stop"
        elif update.finish_reason is not None:
            delta.finish_reason, delta.error = update.finish_reason, update.error
            delta.stop_reason = update.stop_token_id if update.stop_token_id in self._params.stop_token_ids else None
        self.finished = delta.finish_reason is not None
        self._release(delta)
        return delta

    def _take(self, token: int, ends: bool, score: TokenLogprobs | None) -> str | None:
        """Add one token to the waiting text -> the stop string that it completes."""
        self._num_tokens += 1
        first = self._num_released + len(self._waiting)
        text = self._decoder.feed(self._bytes(token, ends))
        if score is not None:
            self._scores.append((score, first, first + len(text) + self._decoder.is_inside_character))
        for i, char in enumerate(text if self._params.stop else ""):
            stop = self._stops.feed(char)
            if stop is not None and self._num_tokens > self._params.min_tokens:
                self._waiting += text[: i + 1]
                if not self._params.include_stop_str_in_output:
                    self._waiting = self._waiting[: -len(stop)]
                return stop
        self._waiting += text
        return None

    def _bytes(self, token: int, ends: bool) -> bytes:
        if self._tokenizer is None or (ends and not self._params.include_stop_str_in_output):
            return b""
        return self._tokenizer.token_bytes(token, self._params.skip_special_tokens)

    def _release(self, delta: OutputDelta) -> None:
        """Move the decided part of the waiting text and scores to `delta`."""
        keep = 0 if self.finished else self._stops.num_undecided
        split = len(self._waiting) - keep
        delta.text, self._waiting = self._waiting[:split], self._waiting[split:]
        self._num_released += split
        while self._scores and self._is_out(*self._scores[0], delta):
            score, first, _ = self._scores.popleft()
            if delta.logprobs is not None:
                delta.logprobs.append(score)
                delta.text_offsets.append(first)

    def _is_out(self, _: TokenLogprobs, first: int, end: int, delta: OutputDelta) -> bool:
        """Whether a token's text has been handed out: all of it, or where a stop string cut it, its beginning."""
        if isinstance(delta.stop_reason, str):
            return first < self._num_released
        return self.finished or end <= self._num_released


class StopMatcher:
    """Looks for stop strings in a text given character by character, in constant time each (Knuth, Morris and Pratt).

    Attributes:
        num_undecided: characters at the end of the text that may be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in sorted(stops, key=len, reverse=True)]
        self._matched = [0] * len(stops)  # per stop string, characters of it that the text ends with
        self.num_undecided = 0

    def feed(self, char: str) -> str | None:
        """The longest stop string that `char` completes."""
        found = None
        for i, (stop, borders) in enumerate(self._stops):
            length = self._matched[i]
            while length and stop[length] != char:
                length = borders[length]
            length += stop[length] == char
            if length == len(stop):
                found = found or stop
                length = borders[length]
            self._matched[i] = length
        self.num_undecided = max(self._matched, default=0)
        return found


def _borders(text: str) -> list[int]:
    """Entry n: length of the longest proper prefix of text[:n] that is also its suffix."""
    borders, length = [0, 0], 0
    for char in text[1:]:
        while length and text[length] != char:
            length = borders[length]
        length += text[length] == char
        borders.append(length)
    return borders


class _Decoder:
    """Bytes to text. Bytes that cannot become a character give U+FFFD at once; those that still can, wait."""

    def __init__(self, prompt_tail: bytes) -> None:
        """`prompt_tail`: at least the last three bytes of the prompt, or all of it."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        before = codecs.getincrementaldecoder("utf-8")("replace")
        before.decode(prompt_tail)
        self._begun = before.getstate()[0]  # a character that the prompt began

    @property
    def is_inside_character(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def feed(self, raw: bytes) -> str:
        if self._begun and raw:
            # Only a continuation byte goes on with the prompt's character; else that broken character is the prompt's own.
            raw, self._begun = self._begun * (0x80 <= raw[0] < 0xC0) + raw, b""
        return self._utf8.decode(raw)
