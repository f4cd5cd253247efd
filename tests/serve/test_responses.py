"""`/v1/responses`: items, streams equal to whole answers, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import FastAPI

from tests.serve.sampling import SamplingClient, stubborn
from tests.serve.scripted import MODEL, ScriptedClient, app_of, post, says

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": MODEL, "input": "Go."}
TOOL = {
    "type": "function",
    "name": "f",
    "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
}
CALL = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="x" string="true">a "b"</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)


def whole(app: FastAPI, **body: Any) -> dict[str, Any]:
    response = post(app, PATH, {**BODY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def streamed(app: FastAPI, **body: Any) -> dict[str, Any]:
    """The last event's response, with which all events before it must agree."""
    items: list[dict[str, Any]] = []
    last: dict[str, Any] = {}
    for number, raw in enumerate(post(app, PATH, {**BODY, **body, "stream": True}).text.removesuffix("\n\n").split("\n\n")):
        name, _, data = raw.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        kind = event["type"]
        assert name == f"event: {kind}" and event["sequence_number"] == number and "DSML" not in raw
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append({**event["item"], "pieces": ""})
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[-1]["id"] and event["output_index"] == len(items) - 1
            items[-1]["pieces"] += event["delta"]
        elif kind.endswith((".text.done", "_text.done", "arguments.done")):
            assert event.get("text", event.get("arguments")) == items[-1]["pieces"]
        elif kind == "response.output_item.done":
            pieces = items[-1]["pieces"]
            item = event["item"]
            assert pieces == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
            items[-1] = item
        elif kind in ("response.created", "response.in_progress"):
            assert number < 2 and event["response"]["output"] == [] and event["response"]["status"] == "in_progress"
        last = event.get("response", last)
    assert last["output"] == items
    return last


def same(app: FastAPI, **body: Any) -> dict[str, Any]:
    one, other = whole(app, **body), streamed(app, **body)
    for response in (one, other):
        for key in ("id", "created_at"):
            response.pop(key)
        for item in response["output"]:
            item.pop("id")
            item.pop("call_id", None)
    assert one == other
    return one


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_items_of_an_answer(step: int) -> None:
    app = app_of(ScriptedClient(says(f"Hm.</think>So.\n\n{CALL}"), step=step), checkpoint_thinks=True)
    response = same(app, tools=[TOOL], instructions="S")
    assert [(item["type"], item["status"]) for item in response["output"]] == [
        ("reasoning", "completed"), ("message", "completed"), ("function_call", "completed"), ("function_call", "completed"),
    ]  # fmt: skip
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert [item["arguments"] for item in response["output"][2:]] == ['{"x": "a \\"b\\""}', "{}"]
    assert (response["status"], response["error"], response["store"]) == ("completed", None, False)
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_items_stand_in_the_order_of_the_answer(step: int) -> None:
    """Whole and streamed alike, when thoughts come again after text, wherever the length ends it, and however many tokens a step brings."""
    app = app_of(
        ScriptedClient(says(f"t1</think>c1<think>t2</think>c2<think></think><think>t3\n\n{CALL}"), step=step),
        checkpoint_thinks=True,
    )
    items = same(app, tools=[TOOL])["output"]
    assert [item.get("content", [{"text": item.get("arguments")}])[0]["text"] for item in items] == [
        "t1", "c1", "t2", "c2", "t3", '{"x": "a \\"b\\""}', "{}",
    ]  # fmt: skip
    for limit in range(1, 80, 9):
        cut = same(app, tools=[TOOL], max_output_tokens=limit)
        assert len(cut["output"]) <= 7 and {item["status"] for item in cut["output"][:-1]} <= {"completed"}


def test_an_answer_cut_off_is_incomplete() -> None:
    response = same(app_of(ScriptedClient(says("one two three"))), max_output_tokens=2)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][-1]["status"] == "incomplete"
    assert same(app_of(ScriptedClient(says(""))))["output"][0]["content"][0]["text"] == "", "an empty answer has its message"


def test_a_history_of_items_is_the_prompt_of_the_chat_route() -> None:
    client = ScriptedClient(says("Hi"))
    app = app_of(client, checkpoint_thinks=True)
    items: list[Any] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "S"}]}, {"type": "message", "role": "user", "content": "A"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "T"}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [{"type": "output_text", "text": "C", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": "é"}'}, {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}, {"type": "input_image", "image_url": "http://127.0.0.1:9"}]},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
    ]  # fmt: skip
    whole(app, input=items, tools=[TOOL])
    calls = [
        {"id": i, "type": "function", "function": {"name": "f", "arguments": a}} for i, a in (("1", '{"x": "é"}'), ("2", "{}"))
    ]
    messages = [
        {"role": "system", "content": "S"}, {"role": "user", "content": "A"}, {"role": "assistant", "content": "C", "reasoning": "T", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "2", "content": "two\n\n[Unsupported input_image]"}, {"role": "tool", "tool_call_id": "1", "content": "one"},
    ]  # fmt: skip
    function = {key: value for key, value in TOOL.items() if key != "type"}
    chat = {"model": MODEL, "messages": messages, "tools": [{"type": "function", "function": function}]}
    assert post(app, "/v1/chat/completions", chat).status_code == 200
    assert client.requests[0].prompt_ids == client.requests[1].prompt_ids


def test_required_named_and_json() -> None:
    for choice in ("required", {"type": "function", "name": "f"}):
        response = same(app_of(SamplingClient(stubborn("No."))), tools=[TOOL], tool_choice=choice)
        assert {item["type"] for item in response["output"]} == {"function_call"}
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    response = same(app_of(SamplingClient(stubborn("No."))), text=form)
    assert isinstance(json.loads(response["output"][0]["content"][0]["text"])["a"], bool) and response["text"] == form


def test_efforts_decide_on_thinking() -> None:
    for effort, last in (("none", 7), ("low", 6), (None, 7)):
        client = ScriptedClient(says("Hi"))
        whole(app_of(client), reasoning={"effort": effort, "summary": "auto"})
        assert client.requests[0].prompt_ids[-1] == last


@pytest.mark.parametrize(("body", "param"), [
    ({"input": None}, "input"), ({"input": ""}, "input"), ({"input": []}, "input"), ({"input": [7]}, "input[0]"), ({"input": [{"type": "web_search_call"}]}, "input[0]"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"), ({"input": [{"role": "user", "content": 7}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1:9"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": 'a"', "arguments": "{}"}]}, "input[0].function.name"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"), ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0]"), ({"tool_choice": "required"}, "tool_choice"),
    *(({"tools": [TOOL], "tool_choice": {"type": "function", **name}}, "tool_choice.name") for name in ({}, {"name": None}, {"name": 7})),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f", "z": 1}}, "tool_choice"),
    ({"text": {"format": {"type": "json_object", "z": 1}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}, "z": 1}}}, "text.format"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"background": True}, "background"), ({"truncation": "auto"}, "truncation"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"), ({"text": "x"}, "text"), ({"reasoning": {"effort": "huge"}}, "reasoning_effort"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format.schema.not"), ({"n": 2}, "n"),
    ({"user": "\ud800"}, "user"), ({"metadata": {"a": "\udc00"}}, "metadata"), ({"metadata": {"\ud800": "a"}}, "metadata"),
    ({"text": {"format": {"type": "text", "x": "\ud800"}}}, "text.format"), ({"text": {"verbosity": "\ud800"}}, "text"),
])  # fmt: skip
def test_bad_requests_are_named(body: dict[str, Any], param: str) -> None:
    client = ScriptedClient(says("Hi"))
    for stream in (False, True):
        response = post(app_of(client), PATH, {**BODY, "stream": stream, **body})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
    assert not client.requests


def test_a_stream_that_fails_says_so() -> None:
    last = post(app_of(ScriptedClient(fail_after=3)), PATH, {**BODY, "stream": True}).text.strip().split("\n\n")[-1]
    event = json.loads(last.partition("\n")[2].removeprefix("data: "))
    assert event["type"] == "response.failed" and event["response"]["status"] == "failed"
    assert event["response"]["error"]["message"] == "scripted failure"
