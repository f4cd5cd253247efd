"""Reasoning and content told apart: the rules of `abyssal.serve.answer`, equal for any cut of the updates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import abyssal
from abyssal.engine.output import CompletionOutput
from abyssal.engine.request import FinishReason, RequestUpdate, SamplingParams, TokenLogprobs
from abyssal.serve.answer import ChatProcessor
from abyssal.serve.conversation import Conversation
from abyssal.tokenizer import ASSISTANT, BOS, END_THINK, EOS, THINK, USER, Tokenizer

RAW = json.loads((Path(abyssal.__file__).parent / "assets" / "tiny-v4" / "tokenizer.json").read_text())
TINY = Tokenizer(RAW)
# As in published checkpoints: only BOS and EOS are marked special, so the tokenizer itself would spell the others out.
UNMARKED = Tokenizer({**RAW, "added_tokens": [{**t, "special": t["id"] < 2} for t in RAW["added_tokens"]]})

_THINK, _END, _EOS, _USER, _ASSISTANT, _BOS = (TINY.special_id(t) for t in (THINK, END_THINK, EOS, USER, ASSISTANT, BOS))
MARKS = {"<think>": _THINK, "</think>": _END, "<eos>": _EOS, "<user>": _USER, "<assistant>": _ASSISTANT, "<bos>": _BOS}
SPELLINGS = [token["content"] for token in RAW["added_tokens"]]


def ids(*pieces: str) -> list[int]:
    """Text, and control tokens by the names of MARKS."""
    return [token for piece in pieces for token in ([MARKS[piece]] if piece in MARKS else TINY.encode(piece))]


def run(
    tokens: Sequence[int],
    thinking: bool,
    cuts: Sequence[int] = (),
    finish: FinishReason = "length",
    stop_id: int | None = None,
    tokenizer: Tokenizer = TINY,
    **params: Any,
) -> CompletionOutput:
    """The output of `tokens`, given in the pieces that `cuts` makes; `stop_id` is the last token's if that ends it."""
    sampling = SamplingParams(**params)
    prompt = [_BOS, _USER, _ASSISTANT, _THINK if thinking else _END]
    processor = ChatProcessor(tokenizer, sampling, prompt, Conversation(()))
    output, reasoning_tokens = CompletionOutput(0), 0
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for start, end in pairwise(edges):
        part = list(tokens[start:end])
        scores = None if sampling.logprobs is None else [TokenLogprobs(t, -1.0, 1, [], []) for t in part]
        update = RequestUpdate("r", part, scores, None)
        if end == len(tokens) and start == edges[-2]:
            update.finish_reason, update.stop_token_id = finish, stop_id
        delta = processor.push(update)
        output.add(delta)
        reasoning_tokens += delta.num_reasoning_tokens
        if delta.finish_reason is not None:
            break
    assert 0 <= reasoning_tokens <= len(output.token_ids)
    output.error = str(reasoning_tokens)  # carried to the caller
    return output


def split(output: CompletionOutput) -> tuple[str, str]:
    return output.reasoning, output.text


def test_marks_part_reasoning_from_content() -> None:
    tokens = ids("think hard", "</think>", "the answer", "<eos>")
    output = run(tokens, True, finish="stop", stop_id=_EOS)
    assert split(output) == ("think hard", "the answer")
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.token_ids == tokens, "every token counts, marks and EOS too"
    assert int(output.error or 0) == len(ids("think hard")) + 1


def test_without_thinking_all_is_content() -> None:
    assert split(run(ids("hello"), False)) == ("", "hello")


def test_marks_that_change_nothing_are_swallowed() -> None:
    assert split(run(ids("<think>", "a", "<think>", "b", "</think>", "c", "</think>", "d"), True)) == ("ab", "cd")
    assert split(run(ids("</think>", "x"), False)) == ("", "x")


def test_content_may_go_back_to_reasoning() -> None:
    assert split(run(ids("a", "<think>", "b", "</think>", "c"), False)) == ("b", "ac")


def test_text_that_spells_a_mark_is_text() -> None:
    assert split(run(TINY.encode("a</think>b<think>c"), True)) == ("a</think>b<think>c", "")


@pytest.mark.parametrize("tokenizer", [TINY, UNMARKED], ids=["special", "unmarked"])
@pytest.mark.parametrize(
    ("end", "finish", "stop_id", "params"),
    [
        (["<eos>"], "stop", _EOS, {}),
        ([], "length", None, {}),
        ([" STOP and more"], "length", None, {"stop": [" STOP"]}),
        (["<user>"], "stop", _USER, {"stop_token_ids": [_USER]}),
    ],
    ids=["eos", "length", "stop string", "stop id"],
)
def test_k05_reasoning_that_never_ends_stays_reasoning(
    tokenizer: Tokenizer, end: list[str], finish: FinishReason, stop_id: int | None, params: dict[str, Any]
) -> None:
    """Whatever ends it, in one piece and token by token; no control token is spelled out in either field."""
    tokens = ids("so I think", *end)
    whole = run(tokens, True, (), finish, stop_id, tokenizer, **params)
    streamed = run(tokens, True, range(len(tokens)), finish, stop_id, tokenizer, **params)
    assert split(whole) == split(streamed) == ("so I think", "")
    assert whole.finish_reason == streamed.finish_reason == ("stop" if params.get("stop") else finish)
    assert whole.error == streamed.error


@pytest.mark.parametrize("tokenizer", [TINY, UNMARKED], ids=["special", "unmarked"])
@pytest.mark.parametrize("thinking", [True, False])
def test_k05_control_tokens_are_never_text(tokenizer: Tokenizer, thinking: bool) -> None:
    """Turn marks in the middle, and EOS where it is ignored: hidden also by a tokenizer that does not mark them special."""
    tokens = ids("a", "<user>", "b", "<assistant>", "<eos>", "c", "</think>", "d", "<user>", "<bos>", "e")
    output = run(tokens, thinking, tokenizer=tokenizer, ignore_eos=True)
    assert split(output) == (("abc", "de") if thinking else ("", "abcde"))
    assert output.token_ids == tokens


def test_control_tokens_show_where_asked_but_marks_never() -> None:
    output = run(ids("a", "<user>", "</think>", "b"), True, skip_special_tokens=False)
    assert split(output) == ("a<｜User｜>", "b")


# Stop strings


def test_stop_string_in_reasoning_ends_the_answer() -> None:
    output = run(ids("one two three", "</think>", "four"), True, stop=["two"])
    assert split(output) == ("one", "")  # white space at the end of reasoning is dropped
    assert (output.finish_reason, output.stop_reason) == ("stop", "two")


def test_stop_string_is_not_looked_for_across_a_mark() -> None:
    """Text held back at the mark, because it might have become a stop string, is let go there."""
    output = run(ids("so", "</think>", "me text"), True, stop=["some"])
    assert split(output) == ("so", "me text")
    assert output.finish_reason == "length"


def test_stop_string_before_a_mark_in_the_same_update() -> None:
    output = run(ids("a STOP", "</think>", "b"), True, stop=["STOP"])
    assert split(output) == ("a", "") and output.stop_reason == "STOP"
    assert output.token_ids == ids("a STOP"), "tokens after the end do not count"


@pytest.mark.parametrize("min_tokens", [0, 3, 4, 5, 6, 7, 8])
def test_min_tokens_counts_reasoning_and_marks(min_tokens: int) -> None:
    """A stop string completed by token n counts when n > min_tokens, wherever the mark stands."""
    head, tail = ids("a"), ids("b", "X", "c", "X", "d")
    tokens = [*head, _END, *tail]
    places = [i + 1 for i, t in enumerate(tokens) if [t] == ids("X")]  # 1-based
    assert len(places) == 2
    output = run(tokens, True, min_tokens=min_tokens, stop=["X"])
    ends = next((place for place in places if place > min_tokens), None)
    assert output.finish_reason == ("length" if ends is None else "stop")
    assert len(output.token_ids) == (ends or len(tokens))


def test_updates_after_the_end_are_ignored() -> None:
    processor = ChatProcessor(TINY, SamplingParams(stop=["X"]), [_THINK], Conversation(()))
    first = processor.push(RequestUpdate("r", ids("aX"), None, None))
    late = processor.push(RequestUpdate("r", ids("b", "</think>", "c"), None, None))
    assert (first.reasoning, first.finish_reason) == ("a", "stop")
    assert (late.reasoning, late.text, late.token_ids) == ("", "", [])


# Log-probabilities


def test_logprobs_are_those_of_the_content() -> None:
    tokens = ids("think", "</think>", "the answer", "<think>", "more", "</think>", " is", "<eos>")
    output = run(tokens, True, finish="stop", stop_id=_EOS, logprobs=0)
    assert output.logprobs is not None
    content = [*ids("the answer"), *ids(" is"), _EOS]
    assert [score.token_id for score in output.logprobs] == content
    offsets, length = [], 0
    for token in content:
        offsets.append(length)
        length += len(TINY.token_bytes(token, skip_special_tokens=True))
    assert output.text == "the answer is" and output.text_offsets == offsets


def test_a_turn_mark_that_ends_the_answer_keeps_its_score_and_may_be_included() -> None:
    """Hidden as text in the middle, but a stop id of the request like any other at the end."""
    tokens = ids("</think>", "b", "<user>")
    options: dict[str, Any] = {
        "finish": "stop",
        "stop_id": _USER,
        "tokenizer": UNMARKED,
        "stop_token_ids": [_USER],
        "logprobs": 0,
    }
    output = run(tokens, True, **options)
    assert (output.text, output.stop_reason) == ("b", _USER)
    assert [score.token_id for score in output.logprobs or []] == tokens[1:]
    assert run(tokens, True, include_stop_str_in_output=True, **options).text == "b<｜User｜>"


def test_logprobs_not_asked_for_are_none() -> None:
    assert run(ids("a", "</think>", "b"), True).logprobs is None
    assert run(ids("a"), True, logprobs=0).logprobs == []


# Any output, any cut


OUTPUTS = st.lists(st.one_of(st.sampled_from(list(MARKS.values())), st.integers(0, TINY.vocab_size - 1)), max_size=24)
CUTS = st.lists(st.integers(0, 24), max_size=24)
STOPS = st.lists(st.sampled_from(["a", "e", " th", "in", "\n", "é"]), max_size=3, unique=True)


@settings(max_examples=300, deadline=None)
@given(OUTPUTS, CUTS, STOPS, st.booleans(), st.booleans(), st.integers(0, 6), st.booleans(), st.sampled_from([TINY, UNMARKED]))
@example(ids("🦭", "</think>", "🦭"), list(range(24)), [], True, False, 0, True, TINY)
@example(ids("🦭")[:2] + ids("</think>", "🦭"), list(range(24)), [], True, False, 0, True, TINY)
def test_k05_streamed_equals_whole(
    tokens: list[int],
    cuts: list[int],
    stops: list[str],
    thinking: bool,
    include: bool,
    min_tokens: int,
    logprobs: bool,
    tokenizer: Tokenizer,
) -> None:
    params: dict[str, Any] = {"stop": stops, "include_stop_str_in_output": include, "min_tokens": min_tokens, "ignore_eos": True}
    params["logprobs"] = 0 if logprobs else None
    whole = run(tokens, thinking, (), tokenizer=tokenizer, **params)
    assert run(tokens, thinking, cuts, tokenizer=tokenizer, **params) == whole
    if not stops:
        assert len(whole.token_ids) == len(tokens)


@settings(max_examples=150, deadline=None)
@given(OUTPUTS, st.booleans())
def test_k05_no_spelling_of_a_control_token_in_any_output(tokens: list[int], thinking: bool) -> None:
    """Ordinary tokens are chosen that cannot spell one together, so any spelling would be a leak."""
    harmless = [t for t in tokens if t < 9 or not set(TINY.token_bytes(t)) & set("<>｜".encode())]
    output = run([t for t in harmless if t not in (2, 5, 8)], thinking, tokenizer=UNMARKED, ignore_eos=True)
    assert not any(spelling in output.reasoning + "\0" + output.text for spelling in SPELLINGS)


def test_a_character_cut_by_a_mark_is_left_out() -> None:
    seal = ids("🦭")
    assert len(seal) > 1
    assert split(run([*ids("a"), *seal[:-1], _END, *ids("b")], True)) == ("a", "b")
