"""`/v1/chat/completions`: the official client's view, reasoning apart from content, and streams equal to whole answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.scripted import MODEL, TOKENIZER, ScriptedClient, app_of, events, openai_client, post, says

PATH = "/v1/chat/completions"
USER: list[Any] = [{"role": "user", "content": "Define harbor."}]
BOS_ID, USER_ID, ASSISTANT_ID, THINK_ID, END_THINK_ID = 0, 3, 4, 6, 7  # tiny-v4's control tokens
SPOKEN = "a 🦀 naïve 漢字"
REASONED = f"first 🦀{chr(10)}then</think>{SPOKEN}"


def whole(app: FastAPI, **body: Any) -> dict[str, Any]:
    response = post(app, PATH, {"model": MODEL, "messages": USER, **body})
    assert response.status_code == 200, response.text
    return json.loads(response.text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def deltas(app: FastAPI, **body: Any) -> list[dict[str, Any]]:
    """The choices of a stream's events, in order."""
    parts = events(post(app, PATH, {"model": MODEL, "messages": USER, **body, "stream": True}))
    assert {part["object"] for part in parts} == {"chat.completion.chunk"} and len({part["id"] for part in parts}) == 1
    return [choice for part in parts for choice in part["choices"]]


def streamed(app: FastAPI, **body: Any) -> list[dict[str, Any]]:
    """A stream's choices put together, in the form of a whole answer's."""
    found: dict[int, dict[str, Any]] = {}
    for choice in deltas(app, **body):
        delta = choice["delta"]
        if choice["index"] not in found:
            assert delta == {"role": "assistant", "content": ""}, "a choice begins with its role"
            message = {"role": "assistant", "content": "", "reasoning_content": "", "refusal": None}
            found[choice["index"]] = {"index": choice["index"], "message": message, "logprobs": None}
            continue
        mine = found[choice["index"]]
        assert mine.get("finish_reason") is None, "an event after the end"
        assert delta.keys() <= {"content", "reasoning_content"} and all(delta.values())
        for name, text in delta.items():
            mine["message"][name] += text
        if choice["logprobs"] is not None:
            mine["logprobs"] = mine["logprobs"] or {"content": [], "refusal": None}
            mine["logprobs"]["content"] += choice["logprobs"]["content"]
        mine |= {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    return [found[i] for i in sorted(found)]


def same_streamed(app: FastAPI, **body: Any) -> list[dict[str, Any]]:
    choices = whole(app, **body)["choices"]
    for mine, other in zip(streamed(app, **body), choices, strict=True):
        other["message"]["reasoning_content"] = other["message"]["reasoning_content"] or ""  # null where there was no thinking
        if other["logprobs"] is not None and not other["logprobs"]["content"]:
            other["logprobs"] = None  # a stream never mentions them then
        assert mine == other
    return choices


# As the official client reads them


@pytest.mark.parametrize("n", [1, 3])
def test_l01_usage_comes_last_and_alone(n: int) -> None:
    async def main() -> None:
        async with openai_client(app_of(ScriptedClient(says("Hello world")))) as client:
            answer = await client.chat.completions.create(model=MODEL, messages=USER, n=n)
            stream = await client.chat.completions.create(
                model=MODEL, messages=USER, n=n, stream=True, stream_options={"include_usage": True}
            )
            *others, last = [chunk async for chunk in stream]
        assert last.choices == [] and last.usage == answer.usage
        assert all(chunk.usage is None and "usage" in chunk.model_fields_set and len(chunk.choices) == 1 for chunk in others)
        assert {chunk.choices[0].index for chunk in others} == set(range(n))
        assert answer.usage is not None
        prompt, output = len(TOKENIZER.encode("Define harbor.")) + 4, n * (len(TOKENIZER.encode("Hello world")) + 1)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, output)
        assert answer.usage.total_tokens == prompt + output
        assert [choice.message.content for choice in answer.choices] == ["Hello world"] * n

    asyncio.run(main())


def test_log_probabilities_as_the_official_client_reads_them() -> None:
    async def main() -> None:
        async with openai_client(app_of(ScriptedClient(says("Hi 🦀")))) as client:
            answer = await client.chat.completions.create(model=MODEL, messages=USER, logprobs=True, top_logprobs=5)
            (scored,) = [choice.logprobs for choice in answer.choices]
        assert scored is not None and scored.content is not None and scored.refusal is None
        assert b"".join(bytes(position.bytes or []) for position in scored.content[:-1]).decode() == "Hi 🦀"
        for position in scored.content:
            assert len(position.top_logprobs) == 5 and position.top_logprobs[0].logprob == position.logprob
            assert position.top_logprobs[0].token == position.token
            assert position.top_logprobs[-1].logprob == -9999.0, "case L17: minus infinity is a number"

    asyncio.run(main())


def test_log_probabilities_without_alternatives() -> None:
    (choice,) = same_streamed(app_of(ScriptedClient(says("Hi"))), logprobs=True)
    assert [position["top_logprobs"] for position in choice["logprobs"]["content"]] == [[]] * 3
    for options in ({}, {"logprobs": False}, {"logprobs": None, "top_logprobs": None}):
        assert same_streamed(app_of(ScriptedClient(says("Hi"))), **options)[0]["logprobs"] is None


def test_a_token_without_text_has_its_log_probability_in_a_stream_too() -> None:
    """Control tokens amid the content are not shown, but they were chosen."""
    app = app_of(ScriptedClient(says("Hi<｜▁pad▁｜><｜▁pad▁｜> there")))
    (choice,) = same_streamed(app, logprobs=True)
    assert choice["message"]["content"] == "Hi there"
    assert [position["token"] for position in choice["logprobs"]["content"]].count("<｜▁pad▁｜>") == 2


def test_reasoning_reaches_the_official_client() -> None:
    async def main() -> None:
        async with openai_client(app_of(ScriptedClient(says(REASONED)), checkpoint_thinks=True)) as client:
            answer = await client.chat.completions.create(model=MODEL, messages=USER)
            message = answer.choices[0].message
            stream = await client.chat.completions.create(model=MODEL, messages=USER, stream=True)
            parts = [chunk.choices[0].delta async for chunk in stream]
            again = [*USER, message.model_dump(), {"role": "user", "content": "Go on."}]
            assert (await client.chat.completions.create(model=MODEL, messages=again)).choices, "it can be sent back"
        assert message.content == SPOKEN
        assert message.reasoning_content == "first 🦀\nthen"  # type: ignore[attr-defined]
        thoughts = [getattr(part, "reasoning_content", None) for part in parts]
        assert "".join(thought for thought in thoughts if thought) == "first 🦀\nthen"
        assert "".join(part.content for part in parts if part.content) == SPOKEN
        last_thought = max(i for i, thought in enumerate(thoughts) if thought)
        assert not any(part.content for part in parts[:last_thought]), "reasoning comes first"

    asyncio.run(main())


# Reasoning


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_reasoning_is_counted_and_kept_apart(step: int) -> None:
    app = app_of(ScriptedClient(says(REASONED), step=step), checkpoint_thinks=True)
    (choice,) = same_streamed(app, logprobs=True)
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("first 🦀\nthen", SPOKEN)
    told = choice["logprobs"]["content"]
    assert bytes(byte for position in told[:-1] for byte in position["bytes"]).decode() == SPOKEN, "of the content only"
    details = whole(app)["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len(TOKENIZER.encode("first 🦀\nthen")) + 1}  # with its mark


@pytest.mark.parametrize(("options", "server", "checkpoint", "expected"), [
    ({}, "auto", True, True), ({}, "auto", False, False), ({}, "on", False, True), ({}, "off", True, False),
    ({"reasoning_effort": "none"}, "on", True, False), ({"reasoning_effort": "low"}, "off", False, True),
    ({"chat_template_kwargs": {"thinking": True}}, "off", False, True),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "off", False, True),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "on", True, False),
])  # fmt: skip
def test_who_decides_on_thinking(options: dict[str, Any], server: str, checkpoint: bool, expected: bool) -> None:
    """The request, else the server's option, else the checkpoint."""
    client = ScriptedClient(says("Hi"))
    whole(app_of(client, checkpoint_thinks=checkpoint, thinking=server), **options)
    assert client.requests[0].prompt_ids[-1] == (THINK_ID if expected else END_THINK_ID)


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize("stop", [None, "never"])
def test_k05_an_answer_that_never_stops_thinking(step: int, stop: str | None) -> None:
    app = app_of(ScriptedClient(says("thought 🦀 ne"), step=step), checkpoint_thinks=True)
    for limit, reason in ((None, "stop"), (3, "length")):
        (choice,) = same_streamed(app, max_tokens=limit, stop=stop, logprobs=True)
        assert choice["message"]["content"] == "" and choice["finish_reason"] == reason
        assert "thought 🦀 ne".startswith(choice["message"]["reasoning_content"]) and choice["message"]["reasoning_content"]
    assert same_streamed(app)[0]["message"]["reasoning_content"] == "thought 🦀 ne"


# Text


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("thinking", [False, True])
def test_k13_no_event_holds_a_broken_character(step: int, thinking: bool) -> None:
    text = REASONED if thinking else SPOKEN
    app = app_of(ScriptedClient(says(text), step=step), checkpoint_thinks=thinking)
    (choice,) = same_streamed(app)
    assert choice["message"]["content"] == SPOKEN
    pieces = [piece for choice in deltas(app) for piece in choice["delta"].values()]
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("stop", ["llo w", "H", ["nothing", "orl"]])
@pytest.mark.parametrize("include", [False, True])
def test_k15_stop_strings_split_over_tokens(stop: str | list[str], include: bool) -> None:
    client = ScriptedClient(says("Hello world"))
    (choice,) = same_streamed(app_of(client), stop=stop, include_stop_str_in_output=include, logprobs=True)
    matched = stop if isinstance(stop, str) else stop[-1]
    assert choice["message"]["content"] == "Hello world".partition(matched)[0] + (matched if include else "")
    assert (choice["finish_reason"], choice["stop_reason"], len(client.aborted)) == ("stop", matched, 2)


PIECES = st.sampled_from(["a", "b ", "🦀", "é", "</think>", "<think>", "\n", "漢", "<", "think>"])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(PIECES, max_size=10),
    st.lists(st.sampled_from(["a", "ab ", "🦀é", "\n", "think"]), max_size=2),
    st.integers(1, 5),
    st.integers(1, 12),
    st.booleans(),
    st.booleans(),
)
def test_k13_k15_streams_equal_whole_answers(
    pieces: list[str], stop: list[str], step: int, max_tokens: int, thinking: bool, logprobs: bool
) -> None:
    app = app_of(ScriptedClient(says("".join(pieces)), step=step), checkpoint_thinks=thinking)
    (choice,) = same_streamed(app, stop=stop, max_tokens=max_tokens, logprobs=logprobs)
    for text in (choice["message"]["content"], choice["message"]["reasoning_content"]):
        assert "</think>" not in text and "\ufffd" not in text and not any(s in text for s in stop)


# Prompts


def test_k26_chat_prompts_have_one_bos() -> None:
    """Also where a message spells it out (case K23); usage and `/tokenize` agree with what the engine got."""
    for content in ("Hi", "<｜begin▁of▁sentence｜>Hi<｜Assistant｜></think>"):
        client = ScriptedClient(says("A"))
        app = app_of(client)
        messages = [{"role": "user", "content": content}]
        usage = whole(app, messages=messages)["usage"]
        ids = client.requests[0].prompt_ids
        assert ids == [BOS_ID, USER_ID, *TOKENIZER.encode(content), ASSISTANT_ID, END_THINK_ID]
        assert [i for i in ids if i < 9] == [BOS_ID, USER_ID, ASSISTANT_ID, END_THINK_ID]
        assert usage["prompt_tokens"] == len(ids)
        assert post(app, "/tokenize", {"model": MODEL, "messages": messages}).json()["tokens"] == ids


def test_tokenize_follows_the_thinking_of_a_request() -> None:
    body = {"model": MODEL, "messages": USER, "chat_template_kwargs": {"thinking": True}}
    ids = post(app_of(ScriptedClient()), "/tokenize", body).json()["tokens"]
    assert ids[-2:] == [ASSISTANT_ID, THINK_ID]


def test_several_outputs_have_seeds_of_their_own() -> None:
    """Case L19: output i of a request with a seed has seed + i; without one the engine chooses."""
    client = ScriptedClient(says("Hi"))
    choices = same_streamed(app_of(client), n=3, seed=5)
    assert [choice["message"]["content"] for choice in choices] == ["Hi"] * 3
    assert [request.params.seed for request in client.requests] == [5, 6, 7] * 2
    whole(app_of(client), n=2)
    assert [request.params.seed for request in client.requests[6:]] == [None] * 2


@pytest.mark.parametrize("name", [None, "ignored"])
def test_fields_for_the_clients_own_books_change_nothing(name: str | None) -> None:
    client = ScriptedClient(says("Hi"))
    fields = {"user": name, "safety_identifier": name, "prompt_cache_key": name, "metadata": name and {"k": name}}
    assert whole(app_of(client), **fields)["choices"][0]["message"]["content"] == "Hi"


def test_a_stream_that_fails_ends_with_the_error() -> None:
    parts = events(post(app_of(ScriptedClient(fail_after=3)), PATH, {"model": MODEL, "messages": USER, "stream": True}))
    assert parts[-1]["error"]["message"] == "scripted failure" and "error" not in parts[-2]
