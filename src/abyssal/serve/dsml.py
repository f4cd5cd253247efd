"""Reads an answer: reasoning, content and tool calls, from text that comes in pieces of any size (V4 spec 5.7, V4.1 spec 7.2).

The rules, the same for streamed and whole answers, since both are sums of the same events:

- Control tokens count by their id only. They arrive as the characters `THINK_MARK`, `END_THINK_MARK` and `DSML_MARK`, which no text
  can hold, so what a model spells in ordinary tokens is always text.
- `</think>` ends reasoning, and so does the start of a block. In content `</think>` is swallowed, `<think>` goes back to reasoning.
- A block starts with `<｜DSML｜tool_calls>` (or toolcalls, tool, calls), or directly with an invoke. Tags are read with and without
  a space after the DSML token, so both dialects are read alike. Outside of invokes, and after the block, text is dropped.
- Content that is blank before a block is dropped, as are the two newlines that part other content from it. Trailing white space of
  reasoning is dropped.
- A parameter ends at its closing tag, or where the next tag of the block begins; the end of the answer closes everything. The first
  of two parameters of one name counts.
- A call whose name no tool may have is dropped, and so is an argument whose name a history may not have.
- Values: string="true" is text as it stands; otherwise JSON, and text if it is not JSON that can be passed on (`is_json`). A lone
  parameter named `arguments` or `input` that the tool does not have is unwrapped if it holds an object of arguments that the tool
  does have.
- A DSML token outside of any tag is no text of reasoning and content. In a value it is: to drop it would change the argument.
- A tag that the end of the answer cuts off is dropped from its `<` if its DSML token is there already.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from abyssal.serve.conversation import MAX_KEY_CHARS, Tool, is_json, is_key, is_name, parse_json
from abyssal.tokenizer import DSML, END_THINK, THINK, SpecialToken

DSML_MARK, THINK_MARK, END_THINK_MARK = "\udc00", "\udc01", "\udc02"
MARKS: dict[SpecialToken, str] = {DSML: DSML_MARK, THINK: THINK_MARK, END_THINK: END_THINK_MARK}

BLOCK_NAMES = ("tool_calls", "toolcalls", "tool", "calls")
WRAPPERS = ("arguments", "input")
MAX_HEAD_CHARS = MAX_KEY_CHARS + 64  # of what stands between a tag's first quote and its end

_SPELLED = str.maketrans({mark: token.text for token, mark in MARKS.items()})
_MARK_CHARS = frozenset(MARKS.values())
_ANY_MARK = "[" + "".join(MARKS.values()) + "]"


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of reasoning or content. Characters count as they arrived, marks included: [start, end) became `text`."""

    kind: Literal["reasoning", "content"]
    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; the arguments that follow, up to the next of these, are its own."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the call's arguments as JSON text."""

    text: str


Event = Text | CallStart | CallArguments


class _Markers:
    """A set of strings to look for, each with a meaning."""

    def __init__(self, meanings: Mapping[str, Sequence[str]]) -> None:
        self._meaning = {marker: meaning for meaning, markers in meanings.items() for marker in markers}
        longest_first = sorted(self._meaning, key=len, reverse=True)
        self._full = re.compile("|".join(map(re.escape, longest_first)))
        self._prefixes = {marker[:n] for marker in self._meaning for n in range(1, len(marker))}
        self._longest = len(longest_first[0])

    def find(self, text: str, start: int = 0) -> tuple[int, int, str] | None:
        """(start, end, meaning) of the first one; none begins before `start`."""
        found = self._full.search(text, start)
        return None if found is None else (found.start(), found.end(), self._meaning[found[0]])

    def undecided(self, text: str) -> int:
        """Where the longest tail begins that may become one; the text's length if there is none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start:] in self._prefixes:
                return start
        return len(text)


def _tags(opening: str, names: Sequence[str], ending: str, newline: bool = False) -> list[str]:
    """All spellings of a tag; with `newline` also those that a newline precedes."""
    tags = [f"{opening}{DSML_MARK}{space}{name}{ending}" for space in ("", " ") for name in names]
    return tags + ["\n" + tag for tag in tags] * newline


def _call_tags(newline: bool) -> dict[str, list[str]]:
    return {
        "parameter": _tags("<", ["parameter"], ' name="', newline),
        "invoke": _tags("<", ["invoke"], ' name="', newline),
        "end": _tags("</", ["invoke", *BLOCK_NAMES], ">", newline),
    }


_STARTS = {"block": _tags("<", BLOCK_NAMES, ">"), "invoke": _tags("<", ["invoke"], ' name="')}
_IN_TEXT = {
    "reasoning": _Markers({**_STARTS, "other": [END_THINK_MARK]}),
    "content": _Markers({**_STARTS, "other": [THINK_MARK]}),
}
_IN_BLOCK = _Markers({"invoke": _STARTS["invoke"]})
_IN_CALL = _Markers(_call_tags(newline=False))
_IN_VALUE = _Markers({"end value": _tags("</", ["parameter"], ">"), **_call_tags(newline=True)})


class AnswerParser:
    """The state machine.

    Args:
        thinking: the answer begins in reasoning.
        tools: those of the request; their schemas decide on unwrapping.
        max_calls: calls beyond this number are read and dropped; None = all are given.
        shows_marks: a DSML token outside of any tag is spelled out in reasoning and content.
    """

    def __init__(
        self, thinking: bool, tools: Sequence[Tool] = (), max_calls: int | None = None, shows_marks: bool = False
    ) -> None:
        self._kind: Literal["reasoning", "content"] = "reasoning" if thinking else "content"
        self._known = {tool.name: frozenset(tool.parameters.get("properties") or ()) for tool in tools}
        self._max_calls, self._shows_marks = max_calls, shows_marks
        self._step: Callable[[bool], bool] = self._read_text
        self._buffer = ""  # what is not decided yet
        self._num_blank = 0  # characters of the buffer, from its first on, known to be white space that waits
        self._is_blank = True  # the content so far
        self._num_calls = 0
        self._call: _Arguments | None = None
        self._events: list[Event] = []
        self.num_decided = 0  # characters before the buffer: they have become events, or never will

    @property
    def is_reasoning(self) -> bool:
        return self._step == self._read_text and self._kind == "reasoning"

    @property
    def is_content(self) -> bool:
        return self._step == self._read_text and self._kind == "content"

    @property
    def is_text(self) -> bool:
        """Whether the end of what came is text, not part of a tag or of a call."""
        return self._step == self._read_text and DSML_MARK not in self._buffer

    def feed(self, text: str) -> list[Event]:
        """What `text` adds, as far as it is decided."""
        self._buffer += text
        return self._run(is_last=False)

    def finish(self) -> list[Event]:
        """What the end of the answer adds."""
        return self._run(is_last=True)

    def _run(self, is_last: bool) -> list[Event]:
        self._events = []
        while self._step(is_last):
            pass
        if is_last:
            self._end_call()
        return self._events

    # States. Each takes what is decided out of the buffer, and says whether there may be more to take.

    def _read_text(self, is_last: bool) -> bool:
        found = _IN_TEXT[self._kind].find(self._buffer, self._num_blank)
        if found is None:
            end = self._end_of_rest(_IN_TEXT[self._kind], is_last)
            kept = self._kept(self._buffer[:end], at_mark=False, is_last=is_last)
            self._emit(kept)
            self._num_blank = end - kept
            self._skip(len(self._buffer) * is_last)
            return False
        start, end, meaning = found
        kept = self._kept(self._buffer[:start], at_mark=True, is_last=False)
        self._emit(kept)
        self._skip(end - kept)
        if meaning == "other":
            self._kind = "content" if self._kind == "reasoning" else "reasoning"
        else:
            self._kind = "content"
            self._step = self._read_name if meaning == "invoke" else self._read_block
        return True

    def _kept(self, text: str, at_mark: bool, is_last: bool) -> int:
        """How much of decided text can be handed out: white space that may come before a block waits."""
        if self._kind == "reasoning":
            return _length_without_tail(text, self._num_blank)
        if is_last:
            return len(text)
        if self._is_blank and not _length_without_tail(text, self._num_blank):
            return 0
        if at_mark:
            return len(text.removesuffix("\n\n"))
        return len(text) - min(2, len(text) - len(text.rstrip("\n")))

    def _read_block(self, is_last: bool) -> bool:
        found = _IN_BLOCK.find(self._buffer)
        if found is None:
            self._skip(len(self._buffer) if is_last else _IN_BLOCK.undecided(self._buffer))
            return False
        self._skip(found[1])
        self._step = self._read_name
        return True

    def _read_name(self, is_last: bool) -> bool:
        return self._read_head(is_last, self._start_call, self._read_block)

    def _read_call(self, is_last: bool) -> bool:
        found = _IN_CALL.find(self._buffer)
        if found is None:
            self._skip(len(self._buffer) if is_last else _IN_CALL.undecided(self._buffer))
            return False
        self._skip(found[1])
        self._after(found[2])
        return True

    def _read_key(self, is_last: bool) -> bool:
        return self._read_head(is_last, self._open_argument, self._read_call)

    def _read_value(self, is_last: bool) -> bool:
        assert self._call is not None
        found = _IN_VALUE.find(self._buffer)
        end = self._end_of_rest(_IN_VALUE, is_last) if found is None else found[0]
        self._call.add(self._buffer[:end].translate(_SPELLED))
        if found is None:
            self._skip(len(self._buffer) if is_last else end)
            if is_last:
                self._call.close()
            return False
        self._skip(found[1])
        self._call.close()
        self._after(found[2])
        return True

    def _after(self, meaning: str) -> None:
        """The state after a tag inside of a call."""
        if meaning in ("invoke", "end"):
            self._end_call()
        steps = {"end value": self._read_call, "parameter": self._read_key, "invoke": self._read_name, "end": self._read_block}
        self._step = steps[meaning]

    # Parts

    def _end_of_rest(self, markers: _Markers, is_last: bool) -> int:
        """How much of a buffer without any marker is decided."""
        end = markers.undecided(self._buffer)
        return len(self._buffer) if is_last and DSML_MARK not in self._buffer[end:] else end

    def _read_head(self, is_last: bool, take: Callable[[str], None], fallback: Callable[[bool], bool]) -> bool:
        """The rest of a tag up to its closing quote and bracket goes to `take`; what cannot be one is left to the state `fallback`."""
        end = self._buffer.find('">', 0, MAX_HEAD_CHARS + 2)
        head = self._buffer[: MAX_HEAD_CHARS + 1 if end < 0 else end]
        if re.search(rf"\n|{_ANY_MARK}", head) or (end < 0 and len(head) > MAX_HEAD_CHARS):
            self._step = fallback
            return True
        if end >= 0:
            self._skip(end + 2)
            take(head)
            return True
        self._skip(len(self._buffer) * is_last)
        return False

    def _start_call(self, head: str) -> None:
        name = head.partition('"')[0]
        if not is_name(name):
            self._step = self._read_block
            return
        emits = self._max_calls is None or self._num_calls < self._max_calls
        self._num_calls += 1
        if emits:
            self._events.append(CallStart(name))
        self._call = _Arguments(self._known.get(name, frozenset()), self._emit_arguments if emits else _drop)
        self._step = self._read_call

    def _open_argument(self, head: str) -> None:
        assert self._call is not None
        key, _, attributes = head.partition('"')
        if not is_key(key):
            self._step = self._read_call
            return
        kind = re.fullmatch(r'\s*string="(true|false)', attributes)
        self._call.open(key, is_text=kind is not None and kind[1] == "true")
        self._step = self._read_value

    def _end_call(self) -> None:
        if self._call is not None:
            self._call.end()
            self._call = None

    def _emit_arguments(self, text: str) -> None:
        """Pieces in a row are one event."""
        last = self._events[-1] if self._events else None
        if isinstance(last, CallArguments):
            self._events[-1] = CallArguments(last.text + text)
        elif text:
            self._events.append(CallArguments(text))

    def _emit(self, count: int) -> None:
        """Hand out the first `count` characters as text."""
        if count:
            self._num_blank = 0
        for part in re.findall(rf"{_ANY_MARK}|[^{_ANY_MARK[1:-1]}]+", self._buffer[:count]):
            shown = part
            if part in _MARK_CHARS:
                shown = DSML.text if part == DSML_MARK and self._shows_marks else ""
            if shown:
                self._is_blank &= self._kind == "reasoning" or not shown.strip()
                self._events.append(Text(self._kind, shown, self.num_decided, self.num_decided + len(part)))
            self.num_decided += len(part)
        self._buffer = self._buffer[count:]

    def _skip(self, count: int) -> None:
        self.num_decided += count
        self._buffer = self._buffer[count:]
        self._num_blank = max(0, self._num_blank - count)


def _length_without_tail(text: str, num_blank: int) -> int:
    """Characters before the white space, and marks amid it, at the end of `text`, whose first `num_blank` are nothing else."""
    end = len(text)
    while end > num_blank and (text[end - 1].isspace() or text[end - 1] in _MARK_CHARS):
        end -= 1
    return end if end > num_blank else 0


def _drop(_: str) -> None:
    pass


class _Arguments:
    """Writes the arguments of one call as a JSON object, as early as they are certain.

    Args:
        known: arguments that the tool has; empty when that is not known.
        emit: takes the pieces.
    """

    def __init__(self, known: frozenset[str], emit: Callable[[str], None]) -> None:
        self._known, self._emit = known, emit
        self._keys: set[str] = set()
        self._waiting: list[str] | None = None  # pieces held back while the call may be a lone wrapper
        self._value: list[str] = []
        self._is_text = self._is_twice = False

    def open(self, key: str, is_text: bool) -> None:
        """Begin an argument."""
        self._is_twice = key in self._keys
        if self._is_twice:
            return
        self._is_text, self._value = is_text, []
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._emit("".join(waiting))
        if not self._keys and key in WRAPPERS and self._known and key not in self._known:
            self._waiting = []
        self._write(("{" if not self._keys else ", ") + json.dumps(key, ensure_ascii=False) + (': "' if is_text else ": "))
        self._keys.add(key)

    def add(self, text: str) -> None:
        """A piece of the argument's value."""
        if self._is_twice:
            return
        if self._is_text:
            self._write(json.dumps(text, ensure_ascii=False)[1:-1])
        if not self._is_text or self._waiting is not None:
            self._value.append(text)

    def close(self) -> None:
        """End the argument."""
        if self._is_twice:
            return
        raw = "".join(self._value)
        self._write('"' if self._is_text else raw.strip() if is_json(raw) else json.dumps(raw, ensure_ascii=False))

    def end(self) -> None:
        """End the call."""
        if self._waiting is None:
            self._emit("}" if self._keys else "{}")
            return
        raw = "".join(self._value)
        inner = parse_json(raw) if is_json(raw) else None
        is_wrapper = isinstance(inner, dict) and inner and inner.keys() <= self._known
        self._emit(raw.strip() if is_wrapper else "".join(self._waiting) + "}")

    def _write(self, text: str) -> None:
        if self._waiting is None:
            self._emit(text)
        else:
            self._waiting.append(text)
