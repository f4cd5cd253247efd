"""Tools and structured output over HTTP: the chat route, whole and streamed alike, with a scripted model."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from fastapi import FastAPI

from abyssal.engine.request import EngineRequest
from abyssal.serve.chat import ChatFormat
from abyssal.serve.conversation import Conversation, Tool, ToolCall, ToolChoice
from abyssal.serve.protocol import V4, V41, render_calls
from abyssal.serve.structure import answer_format
from abyssal.tokenizer import DSML, Tokenizer
from tests.serve.sampling import SamplingClient, stubborn
from tests.serve.scripted import MODEL, TINY, TOKENIZER, ScriptedClient, app_of, events, post, says
from tests.support.grammars import accepts, compiled

CHAT = "/v1/chat/completions"
USER: list[Any] = [{"role": "user", "content": "Go."}]
END_THINK = 7
V = TOKENIZER.vocab_size
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
CALL = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Köln "2>&1</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)
TWO = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>\n'
    '</｜DSML｜invoke>\n<｜DSML｜invoke name="stop">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)


def whole(app: FastAPI, **body: Any) -> dict[str, Any]:
    response = post(app, CHAT, {"model": MODEL, "messages": USER, **body})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


def streamed(app: FastAPI, **body: Any) -> dict[str, Any]:
    """A stream put together as a whole choice; no event may hold markup, and each call begins once, complete with its names."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    found: dict[str, Any] = {"message": message}
    for part in events(post(app, CHAT, {"model": MODEL, "messages": USER, **body, "stream": True})):
        (choice,) = part["choices"]
        assert "DSML" not in json.dumps(choice, ensure_ascii=False)
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                assert call.keys() == {"index", "id", "type", "function"} and call["function"]["name"], (
                    "the first piece has it all"
                )
                message["tool_calls"].append({**call, "function": {**call["function"]}})
            else:
                assert call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"} and call["index"] >= 0
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        found |= {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    return found


def same(app: FastAPI, **body: Any) -> tuple[str, str, list[tuple[str, Any]], str]:
    """(reasoning, content, calls, finish reason) of whole and streamed answers, which must agree."""
    seen = []
    for choice in (whole(app, **body), streamed(app, **body)):
        message = choice["message"]
        calls = message.get("tool_calls") or []
        assert len({call["id"] for call in calls}) == len(calls) and all(
            call["id"] and call["type"] == "function" for call in calls
        )
        made = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
        seen.append((message["reasoning_content"] or "", message["content"] or "", made, choice["finish_reason"]))
    assert seen[0] == seen[1]
    return seen[0]


# What a model says by itself


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_k01_calls_split_over_updates(step: int) -> None:
    """Token by token and in one piece: the same arguments, without a trace of a tag."""
    app = app_of(ScriptedClient(says(f"Wait.\n\n{CALL}"), step=step))
    assert same(app, tools=TOOLS) == ("", "Wait.", [("weather", {"city": 'Köln "2>&1', "days": 3})], "tool_calls")


def test_k17_calls_have_indices_ids_and_json_text() -> None:
    """Two calls, one of them without arguments; content is null."""
    app = app_of(ScriptedClient(says(TWO)))
    choice = whole(app, tools=TOOLS)
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"city": "Köln"}', "{}"]
    assert [call["index"] for call in streamed(app, tools=TOOLS)["message"]["tool_calls"]] == [0, 1]
    again = [
        *USER,
        choice["message"],
        *({"role": "tool", "tool_call_id": c["id"], "content": "ok"} for c in choice["message"]["tool_calls"]),
    ]
    assert whole(app, tools=TOOLS, messages=again)["finish_reason"] == "tool_calls", "it can be sent back as it is"


def test_k09_each_release_has_its_dialect_and_a_block_ends_thinking() -> None:
    """Without `</think>`. V4.1 needs its own system token, which tiny-v4 lacks."""
    raw = json.loads((TINY / "tokenizer.json").read_text())
    raw["added_tokens"].append({**raw["added_tokens"][0], "id": V, "content": "<｜System｜>"})
    for chat, tokenizer, call in (
        (ChatFormat(True, V4), TOKENIZER, CALL),
        (ChatFormat(True, V41), Tokenizer(raw), CALL.replace("｜DSML｜", "｜DSML｜ ").replace(" tool_calls", " calls")),
    ):
        client = ScriptedClient(says(f"Let me see. {call}"), vocab_size=V + 1)
        seen = same(app_of(client, tokenizer, chat=chat), tools=TOOLS)
        assert seen == ("Let me see.", "", [("weather", {"city": 'Köln "2>&1', "days": 3})], "tool_calls")
        assert (V in client.requests[0].prompt_ids) == (chat.release is V41)


def test_k05_a_call_cut_by_the_limit_is_closed() -> None:
    """The finish reason says that it is not whole; its arguments are JSON all the same."""
    ids = TOKENIZER.encode(CALL, special=True)
    app = app_of(ScriptedClient(says(CALL)))
    for limit in range(1, len(ids), 3):
        _, content, calls, finish = same(app, tools=TOOLS, max_tokens=limit)
        assert (
            finish == "length" and (not content or content == "<") and all(isinstance(arguments, dict) for _, arguments in calls)
        )


def test_k03_wrapped_arguments_over_http() -> None:
    call = '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="arguments" string="false">{"city": "Rom"}</｜DSML｜parameter>\n</｜DSML｜invoke>'
    assert same(app_of(ScriptedClient(says(call))), tools=TOOLS)[2] == [("weather", {"city": "Rom"})]


@pytest.mark.parametrize("body", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
def test_k19_none_gives_no_calls(body: dict[str, Any]) -> None:
    """Also without any tools, where it is the default."""
    assert same(app_of(ScriptedClient(says(f"No.\n\n{TWO}"))), **body) == ("", "No.", [], "stop")


def test_one_call_at_a_time() -> None:
    app = app_of(ScriptedClient(says(TWO)))
    assert [name for name, _ in same(app, tools=TOOLS, parallel_tool_calls=False)[2]] == ["weather"]


def test_stop_strings_do_not_count_in_calls() -> None:
    app = app_of(ScriptedClient(says(f"Wait.{CALL}")))
    assert same(app, tools=TOOLS, stop=["Köln", "tool_calls", "invoke"])[3] == "tool_calls"
    assert same(app, tools=TOOLS, stop=["ait"]) == ("", "W", [], "stop")


def test_log_probabilities_are_of_the_content_only() -> None:
    choice = whole(app_of(ScriptedClient(says(f"Wait.\n\n{CALL}"))), tools=TOOLS, logprobs=True)
    assert "".join(score["token"] for score in choice["logprobs"]["content"]) == "Wait."


# What a grammar makes of it


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=["required", "named"])
@pytest.mark.parametrize("text", [CALL, "I would rather not.", TWO, '{"city": 1}'])
def test_k19_a_call_that_has_to_be_made_is_made(thinking: bool, choice: Any, text: str) -> None:
    """Whatever the model wants; after thinking, and with arguments that follow the schema. Nothing leaks into the content."""
    thought = "Hm, let me think." if thinking else ""
    app = app_of(SamplingClient(stubborn(thought + "</think>" * thinking + text)), checkpoint_thinks=thinking)
    reasoning, content, calls, finish = same(app, tools=TOOLS, tool_choice=choice)
    assert (reasoning, content, finish) == (thought, "", "tool_calls") and calls
    for name, arguments in calls:
        jsonschema.validate(arguments, {"weather": WEATHER, "stop": {"type": "object"}}[name])
    if choice != "required":
        assert [name for name, _ in calls] == ["weather"]
    if text == CALL:
        assert calls == [("weather", {"city": 'Köln "2>&1', "days": 3})], "a good call passes as it is"
    if text == TWO and choice == "required":
        assert calls == [("weather", {"city": "Köln"}), ("stop", {})]
        assert len(same(app, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)[2]) == 1


def test_k19_the_end_of_an_answer_waits_for_the_call() -> None:
    """A model that stops while it thinks, or opens a block there, may not: the call comes after `</think>`."""
    for thought in ("Hm.", f"Hm.{CALL}"):
        client = SamplingClient(stubborn(thought))
        choice = whole(app_of(client, checkpoint_thinks=True), tools=TOOLS, tool_choice="required", logit_bias={END_THINK: 40})
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["reasoning_content"].startswith("Hm.")


def test_arguments_that_share_definitions() -> None:
    """Two to the power of 60 ways lead to the text; a definition of the argument's own is none of the tool's."""
    ways: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    definitions = {**ways, "d60": {"enum": ["one", "two"]}, "n": {"type": "integer", "minimum": 3, "maximum": 3}}
    number = {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1, "maxItems": 1, "$defs": {"n": {"type": "boolean"}}}
    properties = {"way": {"$ref": "#/$defs/d0"}, "number": number}
    parameters = {"type": "object", "properties": properties, "required": ["way", "number"], "$defs": definitions}
    conversation = Conversation((), (Tool("f", {"name": "f", "parameters": parameters}, strict=True),), ToolChoice("required"))
    tag = answer_format(conversation, V4, TOKENIZER.special_id(DSML))
    assert tag is not None
    grammar = compiled(tag)
    for way, values, fits in (("one", "[3]", True), ("three", "[3]", False), ("two", "[true]", False)):
        call = ToolCall("", "f", json.dumps({"way": way, "number": json.loads(values)}))
        ids = TOKENIZER.encode_segments(render_calls((call,), V4))
        assert accepts(grammar, ids) == fits, (way, values)


def test_strict_tools_constrain_calls_and_leave_text_alone() -> None:
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]  # type: ignore[dict-item]
    bad = CALL.replace(">3<", ">33<").replace('name="city"', 'name="town"')
    (_, content, ((name, arguments),), _) = same(app_of(SamplingClient(stubborn(f"Wait.\n\n{bad}"))), tools=strict)
    jsonschema.validate(arguments, WEATHER)
    assert (content, name) == ("Wait.", "weather")
    assert same(app_of(SamplingClient(stubborn("Just text."))), tools=strict)[1:3] == ("Just text.", [])
    loose = same(app_of(SamplingClient(stubborn(TWO.replace('name="city"', 'name="x y"')))), tools=[strict[1], strict[0]])
    assert loose[2][0][0] == "weather" and "city" in loose[2][0][1]


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "at": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    },
    "required": ["city", "at"],
    "additionalProperties": False,
}
FORMATS: list[Any] = [
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("form", FORMATS, ids=["object", "schema"])
@pytest.mark.parametrize("text", ['{"city": "Köln", "at": [1, 2]}', "Sure! Here it is: {", "```json\n{}\n```", '{"city": 3}'])
def test_k21_the_content_is_json_and_reasoning_is_free(thinking: bool, form: Any, text: str) -> None:
    thought = 'I think {"city": nothing}.' if thinking else ""
    app = app_of(SamplingClient(stubborn(thought + "</think>" * thinking + text)), checkpoint_thinks=thinking)
    reasoning, content, calls, finish = same(app, response_format=form)
    assert (reasoning, calls, finish) == (thought, [], "stop")
    answer = json.loads(content)
    jsonschema.validate(answer, SCHEMA if form["type"] == "json_schema" else {"type": "object"})
    if text.startswith('{"city": "K'):
        assert content == text


def test_json_or_a_call() -> None:
    """With tools and a format, the answer is either."""
    form = FORMATS[1]
    assert same(app_of(SamplingClient(stubborn(CALL))), tools=TOOLS, response_format=form)[2][0][0] == "weather"
    content = same(app_of(SamplingClient(stubborn("{ no JSON."))), tools=TOOLS, response_format=form)[1]
    jsonschema.validate(json.loads(content), SCHEMA)


def test_the_prompt_says_what_is_asked() -> None:
    """Tools and the schema are in it, as text."""
    client = ScriptedClient(says("{}"))
    whole(app_of(client), tools=TOOLS, response_format=FORMATS[1])
    prompt = TOKENIZER.decode(client.requests[0].prompt_ids, skip_special_tokens=False)
    assert (
        json.dumps(TOOLS[0]["function"]) in prompt and json.dumps(SCHEMA) in prompt and '<｜DSML｜invoke name="TOOL">' in prompt
    )
    assert client.requests[0].prompt_ids.count(8) > 4, "the example has real DSML tokens"
    assert isinstance(client.requests[0], EngineRequest)


# Answers come back

FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"x": {}, "y": {}}}}
ROUTES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/messages": {"messages": USER, "max_tokens": 9000, "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}]},
    "/v1/responses": {"input": USER, "tools": [{"type": "function", **FUNCTION}]},
}


def history(path: str, answer: dict[str, Any]) -> dict[str, Any]:
    """The request that goes on after `answer`."""
    if path == "/v1/responses":
        made = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
        return {
            "input": [
                *USER,
                *answer["output"],
                *({"type": "function_call_output", "call_id": i, "output": "r"} for i in made),
                *USER,
            ]
        }
    if path == CHAT:
        message = answer["choices"][0]["message"]
        made = [call["id"] for call in message.get("tool_calls", ())]
        return {"messages": [*USER, message, *({"role": "tool", "tool_call_id": i, "content": "r"} for i in made), *USER]}
    results = [
        {"type": "tool_result", "tool_use_id": b["id"], "content": "r"} for b in answer["content"] if b["type"] == "tool_use"
    ]
    return {
        "messages": [
            *USER,
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [*results, {"type": "text", "text": "U"}]},
        ]
    }


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("name", "key", "value"), [
    ("f", "x", "1"), ("f" * 256, "x", "1"), ("f" * 257, "x", "1"), ("a<b", "x", "1"), ("a\tb", "x", "1"), ("f", "a<b", "1"), ("f", "a\tb", "1"), ("f", "", "1"),
    ("f", "k" * 1024, "1"), ("f", "k" * 1025, "1"), ("f", "x", '"\\ud800"'), ("f", "x", '{"\\ud800": 1}'), ("f", "x", '"\\ud83d\\ude00"'), ("f", "x", "1e999"),
    ("f", "input", '{"x": "\\ud800"}'), ("f", "input", '{"x": 1e999}'), ("f", "x", "9" * 40), ("f", "x", "9" * 5000), ("f", "x", '{"a": 1, "a": 2}'),
    *(("f", "x", "[" * depth + "]" * depth) for depth in (400, 479, 480, 490, 500, 700, 990, 3000)),
])  # fmt: skip
def test_what_the_server_answers_it_takes_back(path: str, name: str, key: str, value: str) -> None:
    """Odd calls: whole and streamed answers are given, and a history with them is served."""
    text = (
        f'So.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{name}">\n<｜DSML｜parameter name="{key}" string="false">{value}'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )
    app = app_of(ScriptedClient(says(text), max_model_len=20_000))
    body = {"model": MODEL, **ROUTES[path]}
    streamed = post(app, path, {**body, "stream": True})
    assert streamed.status_code == 200 and '"error":{' not in streamed.text
    answer = post(app, path, body)
    assert answer.status_code == 200, answer.text
    again = post(app, path, {**body, **history(path, answer.json())})
    assert again.status_code == 200, again.text


# Bad input

NAMED: dict[str, Any] = {"type": "function", "function": {"name": "stop"}}
NAMES = ["", 'a"b', "a\nb", "<a>", "x" * 257, None, 7, "a\ud800"]


@pytest.mark.parametrize("name", NAMES)
def test_tool_names_that_the_format_cannot_carry(name: Any) -> None:
    refuse({"tools": [{"type": "function", "function": {"name": name}}]}, "tools[0].function.name")


@pytest.mark.parametrize(("body", "param"), [
    ({"tools": {}}, "tools"), ({"tools": ["f"]}, "tools[0]"), ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0]"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"), ({"tools": [{**TOOLS[0], "x": 1}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {'a"': {}}}}}]}, "tools[0].function.parameters.properties"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": "\ud800"}}]}, "tools[0].function.description"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": "any", "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice"), ({"tool_choice": NAMED | {"z": 1}, "tools": TOOLS}, "tool_choice"),
    *(({"tool_choice": {"type": "function", "function": {"name": name}}, "tools": TOOLS}, "tool_choice.function.name") for name in (None, 7, ["f"])),
    ({"tool_choice": {"type": "function", "function": {}}, "tools": TOOLS}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "function", "function": {"name": "stop", "z": 1}}, "tools": TOOLS}, "tool_choice.function"),
    ({"response_format": {"type": "text", "z": 1}}, "response_format"), ({"response_format": {"type": "json_object", "schema": {}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "z": 1}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "shema": 1}}}, "response_format.json_schema"),
 ({"tool_choice": 1, "tools": TOOLS}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"), ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format"), ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": FORMATS[0], "min_tokens": 3}, "min_tokens"), ({"response_format": FORMATS[0], "ignore_eos": True}, "ignore_eos"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"a": {"type": "strin"}}}}}},
        "response_format.json_schema.schema.properties.a.type",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"properties": {"a": {"not": {}}}}}}]},
        "tools[0].function.parameters.properties.a.not",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"properties": {"a": {"$ref": "#"}}}}}]},
        "tools[0].function.parameters.properties.a.$ref",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {
            "$defs": {"d": {"items": {"$ref": "#/properties/b"}}}, "properties": {"a": {"$ref": "#/$defs/d"}, "b": {}}}}}]},
        "tools[0].function.parameters.properties.a.$ref.items.$ref",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {
            "$defs": {"d": {"type": "integer", "description": "d" * 10_000}}, "properties": {f"a{i}": {"$ref": "#/$defs/d"} for i in range(400)}}}}]},
        "tools[0].function.parameters.properties",
    ),
])  # fmt: skip
def test_bad_tools_and_formats_are_named(body: dict[str, Any], param: str) -> None:
    refuse(body, param)


def refuse(body: dict[str, Any], param: str) -> None:
    client = ScriptedClient(says("Hi"))
    for stream in (False, True):
        response = post(app_of(client), CHAT, {"model": MODEL, "messages": USER, "stream": stream, **body})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param and len(error["message"]) < 500, error
    assert not client.requests
