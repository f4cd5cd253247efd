"""Prompts of each release with tools: the examples of the specs, their rules, and that what is written can be read back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from abyssal.serve.conversation import Conversation, Message, Tool, ToolCall, parse_messages, parse_tools
from abyssal.serve.dsml import MARKS, AnswerParser, CallArguments, CallStart, Text
from abyssal.serve.protocol import OWN_TEXTS, V4, V41, Release, Texts, fill, render, render_calls
from abyssal.tokenizer import SpecialToken

B, E = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
TEXTS = Texts("TOOLS {dsml_token}\n{tool_schemas}\n", "FORMAT {schema}", {"low": "", "high": "H\n\n", "max": "M\n\n"}, "low")
NUMBERED = Texts(TEXTS.tools, TEXTS.response_format, {"low": "50.\n", "high": "75.\n", "max": "100.\n"}, "high")
FUNCTION = {"name": "f", "description": "größe", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
TOOL = {"type": "function", "function": FUNCTION}
T4 = "TOOLS ｜DSML｜\n" + json.dumps(FUNCTION, ensure_ascii=False) + "\n"


def shown(segments: list[str | SpecialToken]) -> str:
    return "".join(s.text if isinstance(s, SpecialToken) else s for s in segments)


def prompt(
    messages: list[Any], thinking: bool = True, release: Release = V4, texts: Texts = TEXTS, tools: list[Any] | None = None,
    effort: str | None = None,
) -> str:  # fmt: skip
    conversation = Conversation(tuple(parse_messages(messages)), parse_tools(tools))
    return shown(render(conversation.prompt_messages(), release, texts, thinking, effort=effort))


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def calls(*ids: str, content: Any = None, thought: str | None = None, arguments: str = "{}") -> dict[str, Any]:
    made = [{"id": i, "type": "function", "function": {"name": "f", "arguments": arguments}} for i in ids]
    return {"role": "assistant", "content": content, "tool_calls": made, "reasoning_content": thought}


def result(call_id: str, text: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def invoke(release: Release, body: str) -> str:
    d = f"<｜DSML｜{release.invoke}"
    return f'{d} name="f">\n{body}\n</{d[1:]}>'


def block(release: Release, *invokes: str) -> str:
    d = f"｜DSML｜{release.block}>"
    return f"<{d}\n" + "\n".join(invokes) + f"\n</{d}"


# V4 spec 5.6 and 5.8


def test_results_stand_in_the_order_of_their_calls() -> None:
    """Results of b then a, then the user; calls were a, b."""
    arguments = '{"x": "hi", "n": 3, "l": [1,2]}'
    messages = [user("U1"), calls("a", "b", arguments=arguments), result("b", "TB"), result("a", "TA"), user("U2")]
    text = prompt(messages)
    assert text.endswith(
        f"{E}<｜User｜><tool_result>TA</tool_result>\n\n<tool_result>TB</tool_result>\n\nU2<｜Assistant｜><think>"
    )
    assert '<｜DSML｜parameter name="x" string="true">hi</｜DSML｜parameter>\n' in text
    assert 'name="n" string="false">3<' in text and 'name="l" string="false">[1, 2]<' in text


def test_a_call_without_arguments_is_an_empty_line() -> None:
    for arguments in ("{}", "", " "):
        text = prompt([user("U"), calls("a", arguments=arguments), user("V")], thinking=False)
        assert f"</think>\n\n{block(V4, invoke(V4, ''))}{E}<｜User｜>V" in text
    assert '<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>' in text


@pytest.mark.parametrize("arguments", ["nope", "[1, 2]", '"text"', "{'a': 1}", '{"a": NaN}', "null"])
def test_arguments_that_are_no_object_are_one_text(arguments: str) -> None:
    text = prompt([user("U"), calls("a", arguments=arguments), user("V")])
    assert f'<｜DSML｜parameter name="arguments" string="true">{arguments}</｜DSML｜parameter>' in text


def test_tools_come_with_the_first_system_message() -> None:
    question = "<｜User｜>U<｜Assistant｜><think>"
    assert prompt([system("S"), user("U")], tools=[TOOL]) == f"{B}S\n\n{T4}{question}"
    assert prompt([user("U")], tools=[TOOL]) == f"{B}\n\n{T4}{question}", "an empty one is put first"
    two = prompt([system("S"), user("U")], tools=[TOOL, {"type": "function", "function": {"name": "g"}}])
    assert two == f'{B}S\n\n{T4.rstrip()}\n{{"name": "g"}}\n{question}'


def test_the_response_schema_comes_after_the_tools() -> None:
    messages = (Message("system", "S", tools=parse_tools([TOOL]), response_schema={"type": "object"}), Message("user", "U"))
    assert f'S\n\n{T4}\n\nFORMAT {{"type": "object"}}<｜User｜>' in shown(render(messages, V4, TEXTS, False))


def test_k17_histories_with_and_without_content_are_alike() -> None:
    """Content null, empty and absent; arguments as text, as an object, and missing."""
    absent = calls("a", "b")
    del absent["content"]
    objects = json.loads(json.dumps(absent))
    for call in objects["tool_calls"]:
        call["function"]["arguments"] = {}
    missing = json.loads(json.dumps(absent))
    for call in missing["tool_calls"]:
        del call["function"]["arguments"]
    histories = [calls("a", "b"), calls("a", "b", content=""), absent, objects, missing]
    prompts = {prompt([user("U"), turn, result("a", "1"), result("b", "2")], tools=[TOOL]) for turn in histories}
    assert len(prompts) == 1
    assert f"</think>\n\n{block(V4, invoke(V4, ''), invoke(V4, ''))}{E}" in prompts.pop()


def test_k11_reasoning_stays_with_tools_and_goes_without() -> None:
    """Three steps of a tool loop. Both spellings, the same twice, and none at all; the prefix stays the same as the loop grows."""
    for spelling in ({"reasoning_content": "R1"}, {"reasoning": "R1"}, {"reasoning_content": "R1", "reasoning": "R1"}):
        turn = {**calls("a"), "reasoning_content": None, **spelling}
        loop = [user("U"), turn, result("a", "1"), calls("b", thought="R2"), result("b", "2")]
        first, second = prompt(loop[:3], tools=[TOOL]), prompt(loop, tools=[TOOL])
        assert second.startswith(first) and "<think>R1</think>" in first and "<think>R2</think>" in second
        third = prompt([*loop, {"role": "assistant", "content": "A", "reasoning": "R3"}, user("V")], tools=[TOOL])
        assert third.startswith(second) and "R3</think>A" in third, "a new question does not drop it either"
        bare = prompt(loop)
        assert "R1" not in bare and "R2" not in bare, "a result counts as the user's turn"
    empty = prompt([user("U"), calls("a"), result("a", "1")], tools=[TOOL])
    assert "<think></think>\n\n<｜DSML｜tool_calls>" in empty, "a missing field is no error"


def test_list_contents_of_results() -> None:
    parts = [
        {"type": "text", "text": "x"},
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9"}},
        {"type": "text", "text": "y"},
    ]
    assert "<tool_result>x\n\n[Unsupported image_url]\n\ny</tool_result>" in prompt([user("U"), calls("a"), result("a", parts)])
    assert "<tool_result></tool_result>" in prompt([user("U"), calls("a"), result("a", [])])


def test_unknown_results_come_first_and_text_keeps_its_place() -> None:
    messages = [user("U"), calls("a", "b"), result("b", "B"), user("x"), result("zz", "Z"), result("a", "A")]
    shown_results = "<tool_result>Z</tool_result>\n\nx\n\n<tool_result>A</tool_result>\n\n<tool_result>B</tool_result>"
    assert shown_results in prompt(messages)


def test_the_internal_developer_role() -> None:
    """It asks like a user, and goes with the reasoning before the last question."""
    messages = [Message("developer", "D", tools=parse_tools([TOOL])), Message("assistant", "A", "R"), Message("user", "U")]
    assert shown(render(messages, V4, TEXTS, True)).startswith(f"{B}<｜User｜>D\n\n{T4}<｜Assistant｜><think>R</think>A{E}")
    plain = [Message("developer", "D"), *messages[1:]]
    assert shown(render(plain, V4, TEXTS, True)) == f"{B}A{E}<｜User｜>U<｜Assistant｜><think>"
    assert "D" in shown(render(plain, V4, TEXTS, False)), "nothing is dropped in chat mode"


# Efforts (case K07)


@pytest.mark.parametrize(("texts", "release", "expected"), [
    (Texts("", "", {"max": "M\n\n"}), V4, {None: "", "low": "", "high": "", "max": "M\n\n", "medium": "", "xhigh": ""}),
    (TEXTS, V4, {None: "", "low": "", "high": "H\n\n", "max": "M\n\n", "medium": "", "xhigh": "H\n\n", "minimal": ""}),
    (NUMBERED, V41, {None: "75.\n", "low": "50.\n", "high": "75.\n", "max": "100.\n", "medium": "50.\n", "xhigh": "75.\n"}),
])  # fmt: skip
def test_k07_each_release_has_its_own_words(texts: Texts, release: Release, expected: dict[str | None, str]) -> None:
    """April, 0731 and V4.1: the same effort, other prompts."""
    mark = "<｜System｜>" if release is V41 else ""
    for effort, words in expected.items():
        assert prompt([user("U")], True, release, texts, effort=effort) == f"{B}{mark}{words}<｜User｜>U<｜Assistant｜><think>"
        assert prompt([user("U")], False, release, texts, effort=effort) == f"{B}<｜User｜>U<｜Assistant｜></think>"


# V4.1 spec 7


def test_v41_marks_system_messages() -> None:
    assert prompt([system("S"), user("U")], False, V41, NUMBERED) == f"{B}<｜System｜>S<｜User｜>U<｜Assistant｜></think>"
    assert prompt([system("S"), user("U")], True, V41, NUMBERED) == f"{B}<｜System｜>75.\nS<｜User｜>U<｜Assistant｜><think>"
    messages = [user("U"), {"role": "assistant", "content": "A", "reasoning": "R"}, system("S")]
    assert prompt(messages, False, V41, NUMBERED) == (
        f"{B}<｜User｜>U<｜Assistant｜></think>A{E}<｜System｜>S<｜Assistant｜></think>"
    )
    assert "R" not in prompt(messages, True, V41, NUMBERED).replace("<｜User｜>", ""), "a later system message counts as a turn"


def test_v41_results_alone_are_no_new_turn() -> None:
    messages = [user("U"), calls("a", thought="R"), result("a", "1")]
    assert "<think>R</think>" in prompt(messages, True, V41, NUMBERED)
    assert "R</think>" not in prompt([*messages, user("V")], True, V41, NUMBERED)


def test_k09_v41_has_a_dialect_of_its_own() -> None:
    text = prompt([user("U"), calls("a", arguments='{"x": "hi", "n": 3}'), user("V")], False, V41, NUMBERED)
    assert (
        '</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="x" string="true">hi</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="n" string="false">3</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>' + E
    ) in text


# Texts


def test_filling_counts_control_tokens_of_the_template_only() -> None:
    segments = fill("a{{b}} {x}<think>｜DSML｜", {"x": "<think>{y}"})
    assert segments == ["a{b} ", "<think>{y}", SpecialToken("<think>"), SpecialToken("｜DSML｜")]


def test_own_texts_show_the_dialect_that_is_read() -> None:
    """The example in our own words is itself a block."""
    segments = fill(OWN_TEXTS.tools, {"dsml_token": SpecialToken("｜DSML｜"), "tool_schemas": "{}"})
    reason, content, made = read(segments, thinking=False)
    assert made == [("TOOL", {"TEXT_ARGUMENT": "text as it is", "OTHER_ARGUMENT": "JSON"})]
    assert content.startswith("Tools are available") and not reason


# What is written is read back


def read(segments: list[str | SpecialToken], thinking: bool, tools: tuple[Tool, ...] = ()) -> tuple[str, str, list[Any]]:
    """(reasoning, content, [(name, arguments)]) of an answer."""
    parser = AnswerParser(thinking, tools)
    text = "".join(s if isinstance(s, str) else MARKS[s] for s in segments)
    events = [*parser.feed(text), *parser.finish()]
    texts = {kind: "".join(e.text for e in events if isinstance(e, Text) and e.kind == kind) for kind in ("reasoning", "content")}
    made: list[Any] = []
    for event in events:
        if isinstance(event, CallStart):
            made.append((event.name, ""))
        elif isinstance(event, CallArguments):
            made[-1] = (made[-1][0], made[-1][1] + event.text)
    return texts["reasoning"], texts["content"], [(name, json.loads(arguments)) for name, arguments in made]


LETTERS = st.sampled_from(
    [*"a \n\t\"'\\<>/&{}[]:,0é🦀漢｜", "</", "｜DSML｜", "</think>", "</｜DSML｜parameter>", "\u2028", "\x00", "\x7f", '">']
)
WORDS = st.lists(LETTERS, max_size=8).map("".join)
NAMES = st.one_of(
    st.sampled_from(["arguments", "input", "string", "x", "größe", "a b", "漢", "invoke"]),
    st.text(st.characters(exclude_characters='"<>', exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=4)), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(CALLS, WORDS, WORDS, st.sampled_from([V4, V41]), st.booleans())
def test_k01_calls_are_read_back_as_they_were_written(
    made: list[tuple[str, dict[str, Any]]], thought: str, content: str, release: Release, has_schema: bool
) -> None:
    """Any unicode, quotes, newlines and nested JSON, arguments named `arguments` and `input`, values that look like a tag."""
    turns = tuple(ToolCall(str(i), name, json.dumps(arguments)) for i, (name, arguments) in enumerate(made))
    names = dict(made)
    tools = tuple(
        Tool(name, {"name": name, "parameters": {"type": "object", "properties": {key: {} for key in names[name]}}})
        for name in names
    )
    segments: list[str | SpecialToken] = [thought, SpecialToken("</think>"), content, "\n\n", *render_calls(turns, release)]
    thoughts, text, found = read(segments, True, tools if has_schema else ())
    assert found == made
    assert thoughts == thought.rstrip() and text == (content if content.strip() else "")
