"""`abyssal chat`: what is sent, what is remembered, what a failure leaves behind."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from abyssal.cli.chat import converse
from abyssal.engine.request import SamplingParams
from abyssal.errors import RequestError


@dataclass
class Delta:
    text: str
    error: str | None = None
    reasoning: str = ""


@dataclass
class ScriptedLLM:
    """Answers "A1", "A2", ... in two pieces; fails where the script says so."""

    errors: dict[int, BaseException | str] = field(default_factory=dict)
    asked: list[list[dict[str, Any]]] = field(default_factory=list)
    thinking: list[bool | None] = field(default_factory=list)

    def stream_chat(self, messages: list[dict[str, Any]], params: SamplingParams, thinking: bool | None) -> Iterator[Delta]:
        self.asked.append([dict(m) for m in messages])
        self.thinking.append(thinking)
        yield Delta("", reasoning="hmm ")
        yield Delta("A")
        error = self.errors.get(len(self.asked))
        if isinstance(error, BaseException):
            raise error
        if error is not None:
            yield Delta("", error)
            return
        yield Delta(str(len(self.asked)))


def talk(monkeypatch: pytest.MonkeyPatch, text: str, llm: ScriptedLLM, start: list[dict[str, Any]] | None = None) -> list[str]:
    """Run `text` as standard input; the contents of every request, joined by |."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    converse(llm, start or [], SamplingParams(), True)  # type: ignore[arg-type]
    return ["|".join(m["content"] for m in messages) for messages in llm.asked]


def test_the_conversation_grows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llm = ScriptedLLM()
    assert talk(monkeypatch, "one\ntwo\n\n   \nthree", llm) == ["one", "one|A1|two", "one|A1|two|A2|three"]
    assert [m["role"] for m in llm.asked[-1]] == ["user", "assistant"] * 2 + ["user"]
    printed = capsys.readouterr()
    assert printed.out == "A1\nA2\nA3\n"
    assert printed.err.count("hmm ") == 3
    assert llm.thinking == [True] * 3


def test_reset_keeps_the_system_message_and_exit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    start = [{"role": "system", "content": "S"}]
    asked = talk(monkeypatch, "one\n/reset\ntwo\n/exit\nthree\n", ScriptedLLM(), start)
    assert asked == ["S|one", "S|two"]
    assert start == [{"role": "system", "content": "S"}]


def test_an_unknown_command_is_not_sent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert talk(monkeypatch, "/rest now\n /rest is sent\n", ScriptedLLM()) == ["/rest is sent"]
    assert "unknown command '/rest'" in capsys.readouterr().err


def test_input_that_is_no_text_ends_the_conversation_with_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ScriptedLLM()
    lines = io.TextIOWrapper(io.BytesIO(b"one\n" + b"\n" * 10_000 + b"gr\xfcn\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", lines)
    with pytest.raises(RequestError, match="standard input is not utf-8: byte 0xfc"):
        converse(llm, [], SamplingParams(), True)  # type: ignore[arg-type]
    assert len(llm.asked) == 1


def test_a_failed_turn_is_forgotten(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused at the start, or ended by an error of the engine half way."""
    llm = ScriptedLLM(errors={1: RequestError("the prompt is too long"), 2: "not a number in the logits"})
    assert talk(monkeypatch, "one\ntwo\nthree\n", llm) == ["one", "two", "three"]
    printed = capsys.readouterr().err
    assert "error: the prompt is too long" in printed and "error: not a number in the logits" in printed


def test_an_interrupted_answer_is_kept_as_far_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ScriptedLLM(errors={1: KeyboardInterrupt()})
    assert talk(monkeypatch, "one\ntwo\n", llm) == ["one", "one|A|two"]


def test_help_is_not_sent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert talk(monkeypatch, "/help\none\n", ScriptedLLM()) == ["one"]
    printed = capsys.readouterr().err
    assert "/reset" in printed and "unknown" not in printed


def test_an_interrupt_at_the_prompt_begins_a_new_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says how to leave; the conversation goes on."""
    typed = iter([KeyboardInterrupt(), "one", KeyboardInterrupt(), KeyboardInterrupt(), "two", EOFError()])

    def read(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    llm = ScriptedLLM()
    monkeypatch.setattr("sys.stdin", Terminal())
    converse(llm, [], SamplingParams(), True)  # type: ignore[arg-type]
    assert [len(messages) for messages in llm.asked] == [1, 3]
    assert capsys.readouterr().err.count("/exit or Ctrl-D leaves") == 4
