"""The rules of `abyssal.serve.dsml`: one answer, however it is cut, and never a tag in what a client sees."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from abyssal.serve.conversation import Tool
from abyssal.serve.dsml import DSML_MARK, MAX_HEAD_CHARS, AnswerParser, CallArguments, CallStart, Event, Text

D, THINK, END = "\udc00", "\udc01", "\udc02"  # the marks of `｜DSML｜`, `<think>` and `</think>`


def marked(text: str) -> str:
    """Control tokens spelled in `text` become marks."""
    return text.replace("｜DSML｜", D).replace("<think>", THINK).replace("</think>", END)


def summed(events: Iterable[Event]) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, [(name, arguments)]). No event may hold a mark."""
    texts, calls = {"reasoning": "", "content": ""}, []
    for event in events:
        if isinstance(event, CallStart):
            calls.append((event.name, ""))
            continue
        assert event.text and not set(event.text) & {D, THINK, END}
        if isinstance(event, Text):
            texts[event.kind] += event.text
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return texts["reasoning"], texts["content"], calls


def parse(
    text: str, thinking: bool = False, cuts: Sequence[int] | None = (), tools: Sequence[Tool] = (), max_calls: int | None = None,
    shows_marks: bool = False,
) -> tuple[str, str, list[tuple[str, str]]]:  # fmt: skip
    """`cuts` None: at every character."""
    parser = AnswerParser(thinking, tools, max_calls, shows_marks)
    edges = range(len(text) + 1) if cuts is None else [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    events: list[Event] = []
    for start, end in pairwise(edges):
        events += parser.feed(text[start:end])
    return summed([*events, *parser.finish()])


def same(text: str, thinking: bool = False, **options: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    """The answer, which must be the same whole, by characters, and in two pieces cut anywhere. Arguments are read as JSON."""
    whole = parse(marked(text), thinking, **options)
    assert parse(marked(text), thinking, None, **options) == whole
    for cut in range(len(marked(text))):
        assert parse(marked(text), thinking, [cut], **options) == whole
    return whole[0], whole[1], [(name, json.loads(arguments)) for name, arguments in whole[2]]


def tool(name: str, *arguments: str) -> Tool:
    return Tool(name, {"name": name, "parameters": {"type": "object", "properties": {key: {} for key in arguments}}})


def parameter(key: str, value: str, kind: str | None = "true") -> str:
    attribute = "" if kind is None else f' string="{kind}'
    return f'<｜DSML｜parameter name="{key}"{attribute}">{value}</｜DSML｜parameter>'.replace('"">', '">')


def invoke(name: str, *parameters: str) -> str:
    return f'<｜DSML｜invoke name="{name}">\n' + "\n".join(parameters) + "\n</｜DSML｜invoke>"


def block(*invokes: str, name: str = "tool_calls") -> str:
    return f"<｜DSML｜{name}>\n" + "\n".join(invokes) + f"\n</｜DSML｜{name}>"


# Values


@pytest.mark.parametrize("value", [
    "ls 2>&1", "<", "</", "a</", "｜", "<｜DSML", "</parameter>", "\n", "\n\n", "x\n<", '"', "\\", "\\n", "é🦀", "", " ",
    "</｜DSML｜", "<｜DSML｜", "a<｜DSML｜tool_calls>b", "</｜DSML｜param", "<think>x</think>", "{}", "null",
])  # fmt: skip
def test_k01_values_that_look_like_a_tag(value: str) -> None:
    """Any split, whole and streamed: the same arguments, and always JSON."""
    assert same(block(invoke("f", parameter("x", value), parameter("y", value)))) == ("", "", [("f", {"x": value, "y": value})])


def test_values_that_are_json() -> None:
    texts = ["3", "[1, 2]", '{"a": "b"}', "null", "true", ' "x" ', "1e300", '{"a": [1, ' + "[" * 20 + "]" * 20 + "]}"]
    body = [parameter(f"p{i}", text, "false") for i, text in enumerate(texts)]
    ((_, arguments),) = same(block(invoke("f", *body)))[2]
    assert arguments == {f"p{i}": json.loads(text) for i, text in enumerate(texts)}


@pytest.mark.parametrize("value", [
    "nope", "NaN", "[1,", "'x'", "", "{} {}", "[" * 5000, "[" * 900 + "]" * 900, "1e400", "[-1e400]", '"\\ud800"', '{"\\udfff": ["\\ud83d"]}', "1" * 5000,
])  # fmt: skip
@pytest.mark.parametrize("kind", ["false", None])
def test_values_that_are_no_json_are_text(value: str, kind: str | None) -> None:
    assert parse(marked(block(invoke("f", parameter("x", value, kind)))))[2] == [("f", json.dumps({"x": value}))]


def test_a_value_without_its_attribute_is_json_if_it_can_be() -> None:
    body = [
        parameter("x", "3", None),
        parameter("y", "three", None),
        '<｜DSML｜parameter name="z" kind="w">[]</｜DSML｜parameter>',
    ]
    assert same(block(invoke("f", *body)))[2] == [("f", {"x": 3, "y": "three", "z": []})]


def test_numbers_keep_every_digit() -> None:
    digits = "12345678901234567890.12345678901234567890"
    assert parse(marked(block(invoke("f", parameter("x", digits, "false")))))[2] == [("f", f'{{"x": {digits}}}')]


def test_the_first_of_two_values_counts() -> None:
    body = [parameter("x", "1"), parameter("x", "2", "false"), parameter("y", "3"), parameter("x", "4")]
    assert same(block(invoke("f", *body)))[2] == [("f", {"x": "1", "y": "3"})]


# Missing closers


def test_missing_closing_tags() -> None:
    """Of a parameter, of an invoke, of the block; the newline before the next tag is not of the value."""
    start = '<｜DSML｜parameter name="'
    open_x, open_y = f'{start}x" string="true">1\n', f'{start}y" string="false">2'
    for rest in (f"\n</｜DSML｜invoke>\n{invoke('g')}", f"\n{invoke('g')}", f"</｜DSML｜tool_calls>{invoke('g')}"):
        text = f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n{open_x}{open_y}{rest}'
        assert same(text)[2] == [("f", {"x": "1", "y": 2}), ("g", {})]


@pytest.mark.parametrize("thinking", [False, True])
def test_every_truncation_closes_what_is_open(thinking: bool) -> None:
    """No cut-off tag shows, arguments are JSON, and finished parts are as in the whole."""
    text = marked(
        "Hm."
        + "</think>" * thinking
        + "So.\n\n"
        + block(invoke("f", parameter("x", "ab"), parameter("n", "[1]", "false")), invoke("g"))
    )
    final = parse(text, thinking)
    assert final[2] == [("f", '{"x": "ab", "n": [1]}'), ("g", "{}")]
    for end in range(len(text)):
        reasoning, content, calls = parse(text[:end], thinking)
        assert parse(text[:end], thinking, None) == (reasoning, content, calls)
        assert "Hm.So.".startswith((reasoning + content).rstrip("\n<")), (reasoning, content)
        for name, arguments in calls:
            assert name in ("f", "g") and isinstance(json.loads(arguments), dict)
        if calls:
            assert "ab".startswith(json.loads(calls[0][1]).get("x", "").rstrip("</"))


# Wrappers (case K03)


@pytest.mark.parametrize("name", ["arguments", "input"])
@pytest.mark.parametrize("kind", ["true", "false", None])
def test_k03_a_lone_wrapper_is_unwrapped(name: str, kind: str | None) -> None:
    text = block(invoke("f", parameter(name, ' {"x": "a\\"b", "n": [1]}', kind)))
    assert same(text, tools=[tool("f", "x", "n", "m")])[2] == [("f", {"x": 'a"b', "n": [1]})]


@pytest.mark.parametrize(("value", "known"), [
    ('{"x": 1, "z": 2}', ["x", "n"]), ("{}", ["x"]), ("[1]", ["x"]), ("nope", ["x"]), ('{"x": 1}', ["x", "arguments"]), ('{"x": 1}', []),
])  # fmt: skip
def test_k03_other_wrappers_are_left_alone(value: str, known: list[str]) -> None:
    text = block(invoke("f", parameter("arguments", value)))
    assert same(text, tools=[tool("f", *known)])[2] == [("f", {"arguments": value})]


def test_k03_a_wrapper_beside_others_is_left_alone() -> None:
    text = block(invoke("f", parameter("arguments", '{"x": 1}'), parameter("x", "2")))
    assert same(text, tools=[tool("f", "x")])[2] == [("f", {"arguments": '{"x": 1}', "x": "2"})]
    assert same(text, tools=[tool("g", "x")])[2] == [("f", {"arguments": '{"x": 1}', "x": "2"})]


# Reasoning and content


@pytest.mark.parametrize("start", ["tool_calls", "toolcalls", "tool", " calls", "calls", " tool_calls"])
def test_k09_all_starts_of_a_block(start: str) -> None:
    """Both dialects; a block opened inside thinking ends it."""
    for inner in (invoke("f", parameter("x", "1")), invoke("f", parameter("x", "1")).replace("｜DSML｜", "｜DSML｜ ")):
        assert same(f"Hm. \n{block(inner, name=start)}", True) == ("Hm.", "", [("f", {"x": "1"})])
        assert same(f"Hm.</think>\n\n{block(inner, name=start)}", True) == ("Hm.", "", [("f", {"x": "1"})])


def test_a_block_may_begin_with_an_invoke() -> None:
    assert same("So.\n\n" + invoke("f", parameter("x", "1")))[1:] == ("So.", [("f", {"x": "1"})])


def test_only_the_separator_before_a_block_is_dropped() -> None:
    for content in ("So.", "So.\n", "So. ", "\n\nSo.\n\n"):
        assert same(f"{content}\n\n{block(invoke('f'))}") == ("", content, [("f", {})])
    for blank in ("", "\n\n", " \n\n\n ", "\u2003"):
        assert same(blank + block(invoke("f"))) == ("", "", [("f", {})])
        assert same(blank) == ("", blank, [])


def test_text_after_calls_is_dropped() -> None:
    text = f"A{block(invoke('f'), 'between', invoke('g'))}after<think>x</think>{invoke('h')}end{block(invoke('i'))}"
    assert same(text) == ("", "A", [("f", {}), ("g", {}), ("h", {}), ("i", {})])


def test_marks_of_thinking() -> None:
    assert same("a<think>b</think>c<think>d", False) == ("bd", "ac", [])
    assert same("a <think> b </think></think>c ", True) == ("a  b", "c ", [])
    assert same(" \n<think>b", False) == ("b", "", [])
    assert same("never \n ", True) == ("never", "", [])


def test_a_lost_dsml_token_is_no_text() -> None:
    for thinking in (False, True):
        for text in ("a<｜DSML｜tool_callx>b", "a｜DSML｜b", "a<｜DSML｜ parameter name=b", "a</｜DSML｜tool_calls>b"):
            reasoning, content, calls = same(text, thinking)
            assert (reasoning + content, calls) == (text.replace("｜DSML｜", ""), [])
            assert same(text, thinking, shows_marks=True)[1 - thinking] == text


def test_text_that_only_looks_like_a_tag_is_text() -> None:
    """Spelled in ordinary tokens it is not marked."""
    text = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</think><think>'
    for thinking in (False, True):
        assert parse(text, thinking, None)[1 - thinking] == text


BAD_NAMES = ["<", "a<b", "a>b", "a\tb", "\x7f", "a\x00"]  # a request cannot give them either


@pytest.mark.parametrize("head", [
    "", "f", 'f"', "f\n", 'f\n">', "x" * (MAX_HEAD_CHARS + 1) + '">', f'f{D}">', '">', *(f'{name}">' for name in BAD_NAMES), "f" * 257 + '">',
])  # fmt: skip
def test_a_call_without_a_usable_name_is_dropped(head: str) -> None:
    text = f'A\n\n<{D}tool_calls>\n<{D}invoke name="{head}'
    assert parse(text) == parse(text, cuts=None) == ("", "A", [])
    assert parse(text + "\n" + marked(invoke("g"))) == ("", "A", [("g", "{}")])


def test_a_parameter_without_a_usable_name_is_dropped() -> None:
    bad = f'<｜DSML｜parameter name="{"x" * (MAX_HEAD_CHARS + 1)}" string="true">1</｜DSML｜parameter>'
    assert same(block(invoke("f", '<｜DSML｜parameter name="a\nb">1', parameter("y", "2"))))[2] == [("f", {"y": "2"})]
    assert parse(marked(block(invoke("f", bad, parameter("y", "2")))))[2] == [("f", '{"y": "2"}')]
    for name in (*BAD_NAMES, "x" * 1025):
        assert same(block(invoke("f", parameter(name, "1"), parameter("y", "2"))))[2] == [("f", {"y": "2"})]
    assert same(block(invoke("f", parameter("x" * 1024, "1"))))[2] == [("f", {"x" * 1024: "1"})]


@pytest.mark.parametrize("value", ['"\\ud800"', "1e400", "[" * 900 + "]" * 900])
def test_a_wrapper_is_unwrapped_only_into_what_can_be_passed_on(value: str) -> None:
    raw = f'{{"x": {value}}}'
    assert parse(marked(block(invoke("f", parameter("input", raw, "false")))), tools=[tool("f", "x")])[2] == [
        ("f", json.dumps({"input": raw}))
    ]


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_calls_beyond_the_limit_are_dropped(limit: int) -> None:
    made = same("So.\n\n" + block(invoke("f", parameter("x", "1")), invoke("g")), max_calls=limit)
    assert made == ("", "So.", [("f", {"x": "1"}), ("g", {})][:limit])


def test_arguments_come_as_they_arrive() -> None:
    """A long text is not held back until its end."""
    parser = AnswerParser(False)
    parser.feed(marked('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="write">\n<｜DSML｜parameter name="text" string="true">'))
    pieces = [parser.feed(word) for word in ("one ", "two\n", "three ")]
    assert [piece[0].text for piece in pieces if isinstance(piece[0], CallArguments)] == ["one ", "two", "\\nthree "]


# Any answer, any cut

PIECES = [
    "<", "</", "<｜DSML｜", "</｜DSML｜", "｜DSML｜", "tool_calls>", " calls>", 'invoke name="', "invoke>", 'parameter name="', "parameter>", "f", "x",
    "arguments", '">', '" string="true">', '" string="false">', "\n", "\n\n", " ", "</think>", "<think>", "a", '{"x": 1}', "3", '"', "🦀", "\\",
    "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="x" string="true">', "</｜DSML｜parameter>", "</｜DSML｜invoke>",
    "</｜DSML｜tool_calls>", '<｜DSML｜ invoke name="g">',
]  # fmt: skip
ANSWERS = st.lists(st.sampled_from(PIECES), max_size=25).map("".join).map(marked)
TOOLS = [tool("f", "x", "y"), tool("g")]


@settings(max_examples=400, deadline=None)
@given(ANSWERS, st.booleans(), st.lists(st.integers(0, 200), max_size=8), st.sampled_from([None, 0, 1]), st.booleans())
@example(marked("a\n\n<｜DSML｜tool_calls>"), False, [], None, False)
def test_any_cut_gives_the_same_answer(text: str, thinking: bool, cuts: list[int], limit: int | None, shows: bool) -> None:
    """Well-formed, truncated and broken answers: by characters, in any pieces and whole; arguments are always JSON objects."""
    options: dict[str, Any] = {"tools": TOOLS, "max_calls": limit, "shows_marks": shows}
    whole = parse(text, thinking, (), **options)
    assert parse(text, thinking, None, **options) == whole
    assert parse(text, thinking, cuts, **options) == whole
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole[2])
    if not shows:
        assert "DSML" not in whole[0] + whole[1]


@settings(max_examples=200, deadline=None)
@given(ANSWERS, ANSWERS, st.booleans())
def test_a_stream_only_ever_grows(text: str, more: str, thinking: bool) -> None:
    """What has been sent is never taken back: it begins the final answer, whatever follows."""
    parser = AnswerParser(thinking, TOOLS)
    sent = summed(parser.feed(text))
    final = parse(text + more, thinking, tools=TOOLS)
    assert final[0].startswith(sent[0]) and final[1].startswith(sent[1])
    for (name, arguments), (last_name, last_arguments) in zip(sent[2], final[2], strict=False):
        assert name == last_name and last_arguments.startswith(arguments)
    assert len(sent[2]) <= len(final[2])


def fuzz(seed: int, steps: int) -> None:
    """Random answers, piece by piece, without an exception; the arguments of each are JSON."""
    rng = random.Random(seed)
    pieces = [marked(piece) for piece in PIECES] + [
        chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x11000)])) for _ in range(40)
    ]
    done = 0
    while done < steps:
        parser = AnswerParser(rng.random() < 0.5, TOOLS, rng.choice([None, 0, 1]), rng.random() < 0.5)
        events: list[Event] = []
        for _ in range(rng.choice([3, 30, 300])):
            piece = rng.choice(pieces)
            events += parser.feed(piece if rng.random() < 0.7 else piece[: rng.randrange(len(piece) + 1)])
            done += 1
        for _, arguments in summed([*events, *parser.finish()])[2]:
            assert isinstance(json.loads(arguments), dict)


def test_fuzz() -> None:
    fuzz(0, 30_000)


@pytest.mark.long
def test_fuzz_of_a_million_steps() -> None:
    fuzz(1, 1_000_000)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("piece", ["\n", " ", DSML_MARK])
def test_white_space_that_waits_is_read_once(thinking: bool, piece: str) -> None:
    """A model that has lost its way may write nothing else up to the limit of its context."""
    parser, count = AnswerParser(thinking), 300_000
    events = [event for _ in range(count) for event in parser.feed(piece)]
    events += [*parser.feed("x"), *parser.finish()]
    expected = "x" if piece == DSML_MARK else piece * count + "x"
    assert "".join(event.text for event in events if isinstance(event, Text)) == expected
