"""`/v1/messages`: histories, streams equal to whole answers, and errors in Anthropic's shape."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import FastAPI

from abyssal.errors import RequestError
from abyssal.serve.messages import _assistant
from tests.serve.sampling import SamplingClient, stubborn
from tests.serve.scripted import MODEL, TOKENIZER, ScriptedClient, app_of, post, says

PATH = "/v1/messages"
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "messages": [{"role": "user", "content": "Go."}]}
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}}
THINKS = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
CALL = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="x" string="true">a "b"</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)


def whole(app: FastAPI, **body: Any) -> dict[str, Any]:
    response = post(app, PATH, {**BODY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def streamed(app: FastAPI, **body: Any) -> dict[str, Any]:
    """A stream put together as a whole message. Blocks begin, grow and end one after another."""
    response = post(app, PATH, {**BODY, **body, "stream": True})
    message: dict[str, Any] = {}
    pieces: list[str] = []
    is_open = False
    for raw in response.text.removesuffix("\n\n").split("\n\n"):
        name, _, data = raw.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and "DSML" not in raw
        kind = event["type"]
        if kind == "message_start":
            assert not message
            message = event["message"]
        elif kind == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            pieces, is_open = [], True
        elif kind == "content_block_delta":
            assert is_open and event["index"] == len(message["content"]) - 1
            (piece,) = [value for key, value in event["delta"].items() if key != "type"]
            pieces.append(piece)
        elif kind == "content_block_stop":
            assert is_open and event["index"] == len(message["content"]) - 1
            block, is_open = message["content"][-1], False
            if block["type"] == "tool_use":
                block["input"] = json.loads("".join(pieces))
            else:
                block[block["type"]] = "".join(pieces)
        elif kind == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
        else:
            assert kind == "message_stop" and not is_open
    return message


def same(app: FastAPI, **body: Any) -> dict[str, Any]:
    one, other = whole(app, **body), streamed(app, **body)
    for message in (one, other):
        message.pop("id")
        for block in message["content"]:
            block.pop("id", None)
    assert one == other
    return one


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_thinking_text_and_calls(step: int) -> None:
    app = app_of(ScriptedClient(says(f"Hm.</think>So.\n\n{CALL}"), step=step))
    message = same(app, tools=[TOOL], **THINKS)
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "So."},
        {"type": "tool_use", "name": "f", "input": {"x": 'a "b"'}},
        {"type": "tool_use", "name": "f", "input": {}},
    ]
    assert (message["stop_reason"], message["stop_sequence"], message["role"], message["model"]) == (
        "tool_use",
        None,
        "assistant",
        MODEL,
    )


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_blocks_stand_in_the_order_of_the_answer(step: int) -> None:
    """Whole and streamed alike, when thoughts come again after text, and however many tokens a step brings."""
    app = app_of(ScriptedClient(says(f"t1</think>c1<think>t2</think>c2<think></think><think>t3\n\n{CALL}"), step=step))
    content = same(app, tools=[TOOL], **THINKS)["content"]
    assert [block.get(block["type"], block.get("input")) for block in content] == [
        "t1", "c1", "t2", "c2", "t3", {"x": 'a "b"'}, {},
    ]  # fmt: skip


def test_why_an_answer_ended() -> None:
    app = app_of(ScriptedClient(says("one two three")))
    assert same(app)["stop_reason"] == "end_turn"
    assert same(app, max_tokens=2)["stop_reason"] == "max_tokens"
    stopped = same(app, stop_sequences=["two"])
    assert (stopped["stop_reason"], stopped["stop_sequence"], stopped["content"][0]["text"]) == ("stop_sequence", "two", "one ")
    assert same(app_of(ScriptedClient(says(""))))["content"] == []


@pytest.mark.parametrize(
    ("thinking", "last"), [(None, 7), ({"type": "disabled"}, 7), (THINKS["thinking"], 6), ({"type": "adaptive"}, 6)]
)
def test_thinking_only_when_asked(thinking: Any, last: int) -> None:
    """As in Anthropic's own API, whatever the checkpoint's default."""
    client = ScriptedClient(says("Hi"))
    whole(app_of(client, checkpoint_thinks=True), thinking=thinking)
    assert client.requests[0].prompt_ids[-1] == last


def test_a_history_of_blocks_is_the_prompt_of_the_chat_route() -> None:
    client = ScriptedClient(says("Hi"))
    app = app_of(client)
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "T", "signature": ""}, {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "C"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"x": "é"}}, {"type": "tool_use", "id": "2", "name": "f", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "two"}, {"type": "image", "source": {}}]},
            {"type": "tool_result", "tool_use_id": "1", "content": "one", "is_error": True}, {"type": "tool_result", "tool_use_id": "3"}, {"type": "text", "text": "D"},
        ]},
    ]  # fmt: skip
    whole(app, messages=blocks, system=[{"type": "text", "text": "S"}], tools=[TOOL], **THINKS)
    calls = [
        {"id": i, "type": "function", "function": {"name": "f", "arguments": a}} for i, a in (("1", '{"x": "é"}'), ("2", "{}"))
    ]
    function = {"name": "f", "parameters": TOOL["input_schema"]}
    messages = [
        {"role": "system", "content": "S"}, {"role": "user", "content": "A"}, {"role": "user", "content": "B"},
        {"role": "assistant", "content": "C", "reasoning_content": "T", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "2", "content": "two\n\n[Unsupported image]"}, {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "3", "content": ""}, {"role": "user", "content": "D"},
    ]  # fmt: skip
    chat = {
        "model": MODEL,
        "messages": messages,
        "tools": [{"type": "function", "function": function}],
        "chat_template_kwargs": {"thinking": True},
    }
    assert post(app, "/v1/chat/completions", chat).status_code == 200
    assert client.requests[0].prompt_ids == client.requests[1].prompt_ids
    assert "<think>T</think>C" in TOKENIZER.decode(client.requests[0].prompt_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "f"}, {"type": "any", "disable_parallel_tool_use": True}]
)
def test_a_call_that_has_to_be_made(choice: dict[str, Any]) -> None:
    message = same(app_of(SamplingClient(stubborn("No."))), tools=[TOOL], tool_choice=choice)
    assert message["stop_reason"] == "tool_use" and {block["type"] for block in message["content"]} == {"tool_use"}
    assert all(isinstance(block["input"]["x"], str) for block in message["content"])


def test_no_calls_and_json() -> None:
    assert same(app_of(ScriptedClient(says(CALL))), tools=[TOOL], tool_choice={"type": "none"})["content"] == []
    form = {
        "format": {
            "type": "json_schema",
            "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
        }
    }
    (block,) = same(app_of(SamplingClient(stubborn("No."))), output_config=form)["content"]
    assert isinstance(json.loads(block["text"])["a"], bool)


@pytest.mark.parametrize("body", [
    {"max_tokens": None}, {"max_tokens": 0}, {"messages": []}, {"messages": None}, {"messages": [{"role": "tool", "content": "x"}]},
    {"messages": [{"role": "user", "content": []}]}, {"messages": [{"role": "user", "content": 7}]}, {"messages": [{"role": "user", "content": ["x"]}]},
    {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:9"}}]}]},
    {"messages": [{"role": "user", "content": "x", "name": "y"}]}, {"messages": [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, {"system": 7}, {"temprature": 1}, {"top_p": 2},
    {"tools": [{"name": "f"}]}, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, {"tools": [{**TOOL, "name": 'a"b'}]}, {"tools": {}},
    {"tool_choice": {"type": "any"}}, {"tool_choice": "auto", "tools": [TOOL]}, {"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]},
    {"thinking": {"type": "maybe"}}, {"thinking": True}, {"output_config": {"effort": "huge"}}, {"output_config": {"format": {"type": "xml"}}},
    {"output_config": {"format": {"type": "json_schema", "schema": {}, "z": 1}}}, {"tool_choice": {"type": "tool"}, "tools": [TOOL]},
    {"output_config": {"effort": "max"}, **THINKS}, {"mcp_servers": [{}]}, {"stop_sequences": [""]},
])  # fmt: skip
def test_bad_requests_are_refused_in_their_shape(body: dict[str, Any]) -> None:
    client = ScriptedClient(says("Hi"))
    for stream in (False, True):
        response = post(app_of(client), PATH, {**BODY, "stream": stream, **body})
        assert response.status_code == 400, response.text
        error = response.json()
        assert error["type"] == "error" and error["error"].keys() == {"type", "message"}
        assert error["error"]["type"] == "invalid_request_error" and 0 < len(error["error"]["message"]) < 500
    assert not client.requests


def test_other_errors_have_their_types() -> None:
    app = app_of(ScriptedClient(says("Hi")))
    assert post(app, PATH, {**BODY, "model": "x"}).json()["error"]["type"] == "not_found_error"
    assert post(app, PATH, b"{").json()["error"]["type"] == "invalid_request_error"
    failing = post(app_of(ScriptedClient(fail_after=2)), PATH, BODY)
    assert failing.status_code == 500 and failing.json() == {
        "type": "error",
        "error": {"type": "api_error", "message": "scripted failure"},
    }
    last = post(app_of(ScriptedClient(fail_after=2)), PATH, {**BODY, "stream": True}).text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\n") and "scripted failure" in last


def test_an_input_nested_too_deeply_for_the_prompt_is_refused() -> None:
    """However deep the body's parser goes: a value built here is deeper."""
    value: dict[str, Any] = {}
    for _ in range(5000):
        value = {"a": value}
    with pytest.raises(RequestError, match="nested too deeply"):
        _assistant([{"type": "tool_use", "id": "c", "name": "f", "input": value}], "messages[0]")
