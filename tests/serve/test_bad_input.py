"""Requests that cannot be served: each is refused with OpenAI's error, before anything has started, and the next one is served."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from abyssal.engine.request import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, SamplingParams
from abyssal.errors import RequestError
from abyssal.serve.body import MAX_BODY_BYTES, parse_object
from abyssal.serve.completions import MAX_OUTPUTS
from abyssal.serve.conversation import MAX_LEVELS
from abyssal.serve.schemas import CompletionBody, DetokenizeBody
from tests.serve.scripted import MAX_MODEL_LEN, MODEL, TOKENIZER, ScriptedClient, app_of, echo, events, http_client, post, says

V = TOKENIZER.vocab_size
CHAT, RAW, RESPONSES, TOKENIZE, DETOKENIZE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
)
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]},
    RAW: {"model": MODEL, "prompt": "Hi"},
    RESPONSES: {"model": MODEL, "input": "Hi"},
    TOKENIZE: {"model": MODEL, "prompt": "Hi"},
    DETOKENIZE: {"model": MODEL, "tokens": [48]},
}
GENERATING = (RAW, CHAT)

CLIENT = ScriptedClient(says("Hello"))
APP = app_of(CLIENT)


@pytest.fixture(autouse=True)
def alive() -> Iterator[None]:
    """A refused request never reaches the engine, and a plain one after it is served."""
    CLIENT.requests.clear()
    yield
    assert not CLIENT.open and not CLIENT.aborted
    assert post(APP, RAW, BODIES[RAW]).json()["choices"][0]["text"] == "Hello"


def error_of(response: httpx.Response, status: int = 400, param: str | None = None, code: str | None = None) -> str:
    """The message of an error in OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = json.loads(response.text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    error = body["error"]
    assert error["type"] == "invalid_request_error" and (error["param"], error["code"]) == (param, code), error
    assert 0 < len(error["message"]) < 500, "the client's own input is not sent back to it"
    assert not CLIENT.requests
    return error["message"]


def refuse(path: str, change: dict[str, Any], **expected: Any) -> str:
    return error_of(post(APP, path, {**BODIES[path], **change}), **expected)


def accept(path: str, change: dict[str, Any]) -> SamplingParams:
    """What the engine got."""
    response = post(APP, path, {**BODIES[path], **change})
    assert response.status_code == 200, response.text
    return CLIENT.requests[0].params


def get(path: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with http_client(APP) as client:
            return await client.get(path)

    return asyncio.run(ask())


# L05: bodies that are no request

NOT_A_REQUEST = {
    "broken": b'{"model": "scripted", "prompt": ',
    "comma": b'{"model": "scripted", "prompt": "Hi",}',
    "two values": b'{"model": "scripted", "prompt": "Hi"} {}',
    "empty": b"",
    "blank": b"  \n",
    "array": b"[]",
    "null": b"null",
    "number": b"7",
    "string": b'"Hi"',
    "not UTF-8": b'{"model": "scripted", "prompt": "\xff"}',
    "UTF-16": '{"model": "scripted"}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"model": "scripted", "prompt": "Hi"}',
    "deep lists": b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "deep objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "deep and broken": b"[" * 1_000_000,
    "NaN": b'{"model": "scripted", "prompt": "Hi", "temperature": NaN}',
    "infinity": b'{"model": "scripted", "prompt": "Hi", "temperature": -Infinity}',
    "number of 5,000 digits": b'{"model": "scripted", "prompt": "Hi", "seed": ' + b"9" * 5000 + b"}",
    "control character": b'{"model": "scripted", "prompt": "a\x00b"}',
}


@pytest.mark.parametrize("stream", [False, True])
def test_l05_whatever_is_not_nested_too_deeply_can_be_sent_back(stream: bool) -> None:
    """The answer of this route repeats the tools."""
    app, deepest = app_of(ScriptedClient(says("Hello"), max_model_len=10**6)), 0
    for depth in range(480, 1000, 4):
        tool = {"type": "function", "name": "f", "parameters": {"default": "@"}}
        body = json.dumps({**BODIES[RESPONSES], "tools": [tool], "stream": stream})
        response = post(app, RESPONSES, body.replace('"@"', '{"a":' * depth + "1" + "}" * depth).encode())
        if response.status_code == 200:
            assert response.text.count('{"a":' * depth) == (3 if stream else 1) and "failed" not in response.text
            deepest = depth
        else:
            error_of(response)
    assert deepest == MAX_LEVELS - 4  # the body, its tools, the tool, its parameters


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", NOT_A_REQUEST)
def test_l05_bodies_that_are_no_request(path: str, name: str) -> None:
    error_of(post(APP, path, NOT_A_REQUEST[name]))


@pytest.mark.parametrize("body", [
    b'{"model": "scripted", "prompt": "Hi", "prompt": "Ho"}', b'{"prompt": "Hi", "prompt": "Hi"}',
])  # fmt: skip
def test_l05_a_name_given_twice(body: bytes) -> None:
    assert "twice" in error_of(post(APP, RAW, body), param="prompt")


def test_l05_a_name_given_twice_further_in() -> None:
    body = b'{"model": "scripted", "prompt": "Hi", "logit_bias": {"5": 1, "5": -1}}'
    assert "twice" in error_of(post(APP, RAW, body), param="5")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""])
def test_l05_other_content_types(path: str, kind: str) -> None:
    body = json.dumps(BODIES[path]).encode()
    message = error_of(post(APP, path, body, headers={"content-type": kind}), 415, code="unsupported_media_type")
    assert "application/json" in message


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_l05_spellings_of_the_content_type(kind: str) -> None:
    assert post(APP, RAW, json.dumps(BODIES[RAW]).encode(), headers={"content-type": kind}).status_code == 200


def test_l05_a_body_too_large() -> None:
    body = b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'
    error_of(post(APP, RAW, body), 413, code="request_too_large")


@pytest.mark.parametrize("text", ["true", "1.5", "[{}]", '""'])
def test_only_objects_are_bodies(text: str) -> None:
    with pytest.raises(RequestError, match="must be a JSON object"):
        parse_object(text.encode())


def test_unknown_fields_are_named() -> None:
    for path in BODIES:
        assert "temprature" in refuse(path, {"temprature": 0}, param="temprature")
    for path, name, words in (
        (CHAT, "temprature", "did you mean 'temperature'?"), (RAW, "max_token", "did you mean 'max_tokens'?"), (CHAT, "zzz", "leave it out"),
        (RAW, "messages", "/v1/chat/completions"), (CHAT, "prompt", "/v1/completions"), (CHAT, "input", "/v1/responses"),
        (CHAT, "max_new_tokens", "here it is 'max_tokens'"), (CHAT, "enable_thinking", "here it is 'chat_template_kwargs'"),
        (CHAT, "thinking", "use chat_template_kwargs"), (CHAT, "separate_reasoning", "reasoning is always apart"),
        (CHAT, "guided_json", "use response_format"), (RAW, "guided_choice", "use response_format on /v1/chat/completions"),
    ):  # fmt: skip
        assert words in refuse(path, {name: {}}, param=name)
    for name in ("include_use", "continuous_usage_stats"):
        assert f"'stream_options.{name}'" in refuse(
            RAW, {"stream": True, "stream_options": {name: True}}, param=f"stream_options.{name}"
        )


def test_unknown_fields_in_bulk_are_refused_in_short() -> None:
    """Neither one name of a megabyte nor a million names or entries are sent back, or become an error each."""
    name = "x" * 10**6
    for path in BODIES:
        refuse(path, {name: 1}, param=name[:200])
        error_of(post(APP, path, f'{{"{name}": 1, "{name}": 2}}'.encode()), param=name[:200])
        refuse(path, {f"x{i}": 1 for i in range(20_000)})
    refuse(CHAT, {"messages": [{"role": "user", "content": "U", name: 1}]}, param=f"messages[0].{name}"[:200])
    for field, value in (("logit_bias", "x"), ("metadata", 1)):
        refuse(CHAT, {field: {name: value}}, param=f"{field}.{name}"[:200])
    wide: Any = "x" * 99
    for _ in range(5):
        wide = {f"{i}" * 99: wide for i in range(4)}
    for field in ("tool_choice", "response_format", "stop", "reasoning_effort"):
        refuse(CHAT, {field: wide}, param=field)
    for schema, field in ((DetokenizeBody, "tokens"), (CompletionBody, "stop_token_ids")):
        with pytest.raises(ValidationError) as caught:
            schema.model_validate({field: [""] * 1000})
        assert caught.value.error_count() == 1


@pytest.mark.parametrize(("path", "name", "value"), [
    (CHAT, "functions", [{"name": "f"}]), (CHAT, "guided_json", {}), (CHAT, "modalities", ["audio"]),
    (RAW, "suffix", "end"), (RAW, "response_format", {"type": "json_schema"}), (RAW, "guided_regex", "a+"),
    (RAW, "use_beam_search", True), (CHAT, "audio", {}), (CHAT, "echo", True),
])  # fmt: skip
def test_known_fields_without_support_are_refused_in_words(path: str, name: str, value: Any) -> None:
    assert f"{name} is not supported yet" in refuse(path, {name: value}, param=name)


@pytest.mark.parametrize(("path", "name", "value"), [
    (CHAT, "tools", []), (CHAT, "tools", None), (CHAT, "tool_choice", "none"), (CHAT, "response_format", {"type": "text"}),
    (RAW, "suffix", ""), (RAW, "suffix", None), (CHAT, "user", "someone"), (CHAT, "store", False),
])  # fmt: skip
def test_known_fields_that_ask_for_nothing(path: str, name: str, value: Any) -> None:
    accept(path, {name: value})


# L09: model names


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["gpt-4", "", None, "Scripted", "scripted ", "../scripted", "x" * 10**6, "a\ud800"])
def test_l09_other_models_are_not_found(path: str, name: str | None) -> None:
    assert repr(MODEL) in refuse(path, {"model": name}, status=404, param="model", code="model_not_found")


@pytest.mark.parametrize("name", ["gpt-4", "Scripted", "", "scripted/", "..%2fscripted", "%2e%2e/scripted", "%ff"])
def test_l09_other_models_have_no_description(name: str) -> None:
    message = error_of(get(f"/v1/models/{name}"), 404, "model", "model_not_found")
    assert repr(MODEL) in message
    assert get(f"/v1/models/{MODEL}").json()["id"] == MODEL


@pytest.mark.parametrize("path", BODIES)
def test_l09_a_request_without_a_model(path: str) -> None:
    body = {key: value for key, value in BODIES[path].items() if key != "model"}
    assert repr(MODEL) in error_of(post(APP, path, body), 404, "model", "model_not_found")


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("stream", [False, True])
def test_l09_answers_name_the_model(path: str, stream: bool) -> None:
    response = post(APP, path, {**BODIES[path], "stream": stream})
    assert {part["model"] for part in (events(response) if stream else [response.json()])} == {MODEL}


# L13 and L03: token ids


@pytest.mark.parametrize("prompt", [
    [-1], [[-1]], [V], [[5], [V]], [1.0], [5, 1.5], [True], [None], [[5, None]], [5, "a"], ["a", 5], ["a", [5]], [[5], "a"],
    [[5], 5], [5, [5]], [10**30], [[[5]]], [{}], {}, 5, True, None, [], "", [[]], [""], ["a", ""], [[5], []], "a\ud800",
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_l13_prompts_that_are_none(prompt: Any, stream: bool) -> None:
    refuse(RAW, {"prompt": prompt, "stream": stream}, param="prompt")


@pytest.mark.parametrize(("prompts", "n"), [(MAX_OUTPUTS + 1, None), (MAX_OUTPUTS // 128 + 1, 128), (10**6, 1)])
def test_more_outputs_than_a_request_may_have(prompts: int, n: int | None) -> None:
    assert str(MAX_OUTPUTS) in refuse(RAW, {"prompt": ["Hi"] * prompts, "n": n}, param="prompt")


def test_l13_a_missing_prompt() -> None:
    error_of(post(APP, RAW, {"model": MODEL}), param="prompt")


def test_l13_the_text_of_a_number_is_text() -> None:
    accept(RAW, {"prompt": ["1"], "add_special_tokens": False})
    assert CLIENT.requests[0].prompt_ids == TOKENIZER.encode("1")


@pytest.mark.parametrize("tokens", [[-1], [V], [V + 3], [10**30], ["1"], [1.0], [True], [[1]], [None], None, "12", {}])
def test_l13_ids_to_detokenize(tokens: Any) -> None:
    message = error_of_detokenize(tokens)
    assert "tokens" in message


def error_of_detokenize(tokens: Any) -> str:
    response = post(APP, DETOKENIZE, {"model": MODEL, "tokens": tokens})
    assert response.json()["error"]["param"].startswith("tokens")  # or the entry, tokens.0
    return error_of(response, param=response.json()["error"]["param"])


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("bias", [
    {"129280": 1}, {str(V): 1}, {str(V + 3): 1}, {"-1": 1}, {str(10**12): 1}, {"1" * 40: 1}, {"abc": 1}, {"1.5": 1},
    {"": 1}, {" 5": 1}, {"5 ": 1}, {"+5": 1}, {"05": 1}, {"5_0": 1}, {"٥": 1}, {"5": 101}, {"5": -100.5},
    {str(i): 1 for i in range(5000)}, {str(i): 1 for i in range(MAX_LOGIT_BIAS + 1)},
])  # fmt: skip
def test_l03_bad_biases(path: str, bias: dict[str, float]) -> None:
    """Also ids between the tokenizer's and the model's vocabulary, which padding makes larger."""
    assert V + 3 < CLIENT.info.model_vocab_size
    refuse(path, {"logit_bias": bias}, param="logit_bias")


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("value", ["NaN", "1", None, True, [], {}, 10**400])
def test_l03_values_that_are_no_numbers(path: str, value: Any) -> None:
    refuse(path, {"logit_bias": {"5": value}}, param="logit_bias.5")


@pytest.mark.parametrize("bias", [[], "x", 5, [[5, 1]]])
def test_l03_biases_that_are_no_object(bias: Any) -> None:
    refuse(CHAT, {"logit_bias": bias}, param="logit_bias")


def test_l03_good_biases_reach_the_engine() -> None:
    bias = {i: -100 + i % 200 for i in range(MAX_LOGIT_BIAS - 1)} | {V - 1: 0.5}
    assert accept(CHAT, {"logit_bias": {str(k): v for k, v in bias.items()}}).logit_bias == bias


# L23: every number at its limits and just outside

RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 0.0, 5e-324, 2, 1e300], [-1e-9, -1]),
    "top_p": ([5e-324, 0.5, 1], [0, -0.1, 1.0000001]),
    "min_p": ([0, 1], [-1e-9, 1.0000001]),
    "top_k": ([-1, 0, 1, V, 2**31 - 1], [-2, 2**31, 10**30]),
    "presence_penalty": ([-2, 0, 2], [-2.0001, 2.0001]),
    "frequency_penalty": ([-2, 0, 2], [-2.0001, 2.0001]),
    "repetition_penalty": ([5e-324, 1, 1e300], [0, -1]),
    "seed": ([-(2**63), 0, 2**63 - 1], [-(2**63) - 1, 2**63]),
    "min_tokens": ([0, 5], [-1, MAX_MODEL_LEN, 10**30]),
    "max_tokens": ([1, MAX_MODEL_LEN * 2, 2**31 - 1], [0, -1, 2**31]),
    "max_completion_tokens": ([1, MAX_MODEL_LEN * 2, 2**31 - 1], [0, -1, 2**31]),
    "n": ([1], [0, -1, 129, 10**30]),
}
INTEGERS = {"top_k", "seed", "min_tokens", "max_tokens", "max_completion_tokens", "n"}


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("name", RANGES)
def test_l23_numbers_inside_are_served(path: str, name: str) -> None:
    for value in RANGES[name][0]:
        CLIENT.requests.clear()
        given = accept(path, {name: value})
        field = "max_tokens" if name == "max_completion_tokens" else name
        assert getattr(given, field) == (0 if (name, value) == ("top_k", -1) else value)
    CLIENT.requests.clear()
    defaults = SamplingParams()
    assert getattr(accept(path, {name: None}), field) == getattr(defaults, field)


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("name", RANGES)
def test_l23_numbers_outside_are_refused(path: str, name: str) -> None:
    other = [1.5, 1e300] if name in INTEGERS else []
    for value in [*RANGES[name][1], *other, "1", "NaN", "", True, [], {}, [1]]:
        for stream in (False, True):
            assert name in refuse(path, {name: value, "stream": stream}, param=name)


@pytest.mark.parametrize("name", [name for name in RANGES if name not in INTEGERS])
@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_l23_numbers_that_are_not_finite(name: str, text: str) -> None:
    body = f'{{"model": "{MODEL}", "prompt": "Hi", "{name}": {text}}}'.encode()
    param = name if text == "1e999" else None
    error_of(post(APP, RAW, body), param=param)
    assert math.isinf(float("1e999"))


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("name", ["stream", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"])
def test_l23_switches_are_true_or_false(path: str, name: str) -> None:
    for value in (1, 0, "true", "", [], {}):
        refuse(path, {name: value}, param=name)


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    "stop", [5, {}, [5], [None], "", [""], ["a", ""], ["a"] * (MAX_STOP_STRINGS + 1), "x" * 1025, "\udc00", [["a"]]]
)
def test_l23_stop_strings(path: str, stop: Any) -> None:
    refuse(path, {"stop": stop}, param="stop")


@pytest.mark.parametrize("ids", [[V], [-1], [V + 3], [0] * 1025])
def test_l23_stop_ids(ids: list[int]) -> None:
    refuse(CHAT, {"stop_token_ids": ids}, param="stop_token_ids")


def test_l23_log_probabilities_asked_for() -> None:
    for value in (-1, 21, 10**30, 1.5, "5", True):
        refuse(RAW, {"logprobs": value}, param="logprobs")
        refuse(CHAT, {"logprobs": True, "top_logprobs": value}, param="top_logprobs")
    refuse(CHAT, {"top_logprobs": 2}, param="top_logprobs")
    refuse(CHAT, {"logprobs": False, "top_logprobs": 2}, param="top_logprobs")
    refuse(CHAT, {"logprobs": 2}, param="logprobs")


def test_l23_values_that_contradict_each_other() -> None:
    refuse(RAW, {"min_tokens": 5, "max_tokens": 4}, param="min_tokens")
    refuse(RAW, {"best_of": 2}, param="best_of")
    refuse(RAW, {"best_of": 1, "n": 2}, param="best_of")
    refuse(CHAT, {"stream_options": {"include_usage": True}}, param="stream_options")
    refuse(CHAT, {"stream": False, "stream_options": {}}, param="stream_options")


# L25: all of it before a stream opens

LONG = [5] * MAX_MODEL_LEN
STREAM_ERRORS: list[tuple[str, dict[str, Any], str, str | None]] = [
    (RAW, {"n": 0}, "n", None), (CHAT, {"n": 0}, "n", None), (CHAT, {"stop": ["a", 5]}, "stop", None),
    (CHAT, {"messages": [{"role": "root", "content": "U"}]}, "messages[0].role", None),
    (CHAT, {"messages": []}, "messages", None), (CHAT, {"messages": None}, "messages", None),
    (CHAT, {"reasoning_effort": "extreme"}, "reasoning_effort", None),
    (CHAT, {"reasoning_effort": "max"}, "reasoning_effort", None),
    (RAW, {"prompt": LONG}, "prompt", "context_length_exceeded"),
    (RAW, {"prompt": [[5], LONG]}, "prompt", "context_length_exceeded"),
    (CHAT, {"messages": [{"role": "user", "content": "1 " * MAX_MODEL_LEN}]}, "messages", "context_length_exceeded"),
    (RAW, {"prompt": [5] * (MAX_MODEL_LEN - 5), "min_tokens": 6}, "min_tokens", None),
]  # fmt: skip


@pytest.mark.parametrize(("path", "change", "param", "code"), STREAM_ERRORS)
@pytest.mark.parametrize("stream", [True, False])
def test_l25_errors_come_before_a_stream_opens(
    path: str, change: dict[str, Any], param: str, code: str | None, stream: bool
) -> None:
    """The same plain error, streaming or not; the whole of it arrives, so the connection is not left open."""
    refuse(path, {**change, "stream": stream}, param=param, code=code)


@pytest.mark.parametrize("stream", [True, False])
def test_l11_prompts_around_the_limit(stream: bool) -> None:
    """One token under the limit leaves room for one; at the limit and over it is an error. Caps above the room are clamped."""
    client = ScriptedClient(echo)
    app = app_of(client)
    body = {"model": MODEL, "stream": stream, "add_special_tokens": False, "max_tokens": 7}
    for length, tokens in ((MAX_MODEL_LEN - 8, 7), (MAX_MODEL_LEN - 7, 7), (MAX_MODEL_LEN - 6, 6), (MAX_MODEL_LEN - 1, 1)):
        options = {"stream_options": {"include_usage": True}} if stream else {}
        response = post(app, RAW, {**body, **options, "prompt": [5] * length})
        usage = (events(response)[-1] if stream else response.json())["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (length, tokens)
    for length in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1):
        message = error_of(post(app, RAW, {**body, "prompt": [5] * length}), param="prompt", code="context_length_exceeded")
        assert str(length) in message and str(MAX_MODEL_LEN) in message


@pytest.mark.parametrize("path", GENERATING)
def test_l11_which_cap_counts(path: str) -> None:
    """The newer field wins; without one, and with null, the room left is the cap."""
    app = app_of(ScriptedClient(echo, max_model_len=64))
    for change, expected in (
        ({"max_tokens": 3}, 3), ({"max_completion_tokens": 4}, 4), ({"max_tokens": 3, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 3}, 3), ({}, None), ({"max_tokens": None}, None),
        ({"max_completion_tokens": None, "max_tokens": 2}, 2), ({"max_tokens": 10**9}, None),
    ):  # fmt: skip
        answer = post(app, path, {**BODIES[path], **change, "ignore_eos": True, "temperature": 0}).json()
        usage = answer["usage"]
        assert usage["completion_tokens"] == (64 - usage["prompt_tokens"] if expected is None else expected)
        assert answer["choices"][0]["finish_reason"] == "length"


# Tokenize


def test_tokenize_takes_one_of_prompt_and_messages() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    refuse(TOKENIZE, {"prompt": None}, param="prompt")
    refuse(TOKENIZE, {"messages": messages}, param="prompt")
    refuse(TOKENIZE, {"prompt": None, "messages": messages, "add_special_tokens": True}, param="add_special_tokens")
    refuse(TOKENIZE, {"prompt": "a\ud800"}, param="prompt")
    refuse(TOKENIZE, {"prompt": ["a"]}, param="prompt")


def test_a_model_without_a_tokenizer_says_so() -> None:
    client = ScriptedClient(lambda _: [5, 6, 1])
    app = app_of(client, tokenizer=None)
    for path in (RAW, CHAT, TOKENIZE, DETOKENIZE):
        response = post(app, path, BODIES[path])
        assert response.status_code == 400 and "no tokenizer" in response.json()["error"]["message"]
    assert post(app, RAW, {**BODIES[RAW], "prompt": [5], "stop": "a"}).status_code == 400
    answer = post(app, RAW, {**BODIES[RAW], "prompt": [5], "logprobs": 0}).json()
    assert answer["choices"][0]["text"] == "" and answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["logprobs"]["tokens"] == ["token_id:5", "token_id:6", "token_id:1"]


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/v1/nothing", 404), ("GET", "/docs", 404), ("GET", "/openapi.json", 404), ("POST", "/v1/completions/", 404),
])  # fmt: skip
def test_unknown_routes(method: str, path: str, status: int) -> None:
    assert path in error_of(post(APP, path, b"{}") if method == "POST" else get(path), status, code="not_found")


def test_an_unknown_route_is_told_the_one_that_is_meant_or_all() -> None:
    paths = {route.path for route in APP.routes}
    for path in paths:
        other = path.removeprefix("/v1") if path.startswith("/v1") else f"/v1{path}"
        assert error_of(get(other), 404, code="not_found").endswith(f"; did you mean {path}?")
    for path in ("/nothing", "/version", "/generate", "/v1", "/"):
        told = error_of(get(path), 404, code="not_found")
        assert set(told.partition("; known: ")[2].split(", ")) == paths
    assert len(error_of(get("/" + "x" * 5000), 404, code="not_found")) < 500


def test_methods_that_a_route_does_not_have() -> None:
    response = get(RAW)
    error_of(response, 405, code="method_not_allowed")
    assert response.headers["allow"] == "POST"
