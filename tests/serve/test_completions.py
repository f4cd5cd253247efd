"""`/v1/completions`: streamed and whole answers are one, and what they hold is what clients expect."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from abyssal.config import EngineConfig
from abyssal.serve.engine_client import EngineClient
from tests.serve.scripted import (
    MODEL,
    TOKENIZER,
    ScriptedClient,
    app_of,
    events,
    http_client,
    openai_client,
    post,
    says,
)

PATH = "/v1/completions"
CRAB = "a 🦀 naïve 漢字 e\u0301 👩‍👩‍👧 end"


def whole(app: FastAPI, **body: Any) -> dict[str, Any]:
    response = post(app, PATH, {"model": MODEL, "prompt": "Hi", **body})
    assert response.status_code == 200, response.text
    return json.loads(response.text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def streamed(app: FastAPI, **body: Any) -> dict[str, Any]:
    """A stream's events put together, in the form of a whole answer."""
    parts = events(post(app, PATH, {"model": MODEL, "prompt": "Hi", **body, "stream": True}))
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for part in parts for choice in part["choices"]):
        mine = choices.setdefault(choice["index"], {"index": choice["index"], "text": "", "logprobs": None})
        assert mine.get("finish_reason") is None, "an event after the end"
        mine["text"] += choice["text"]
        if choice["logprobs"] is not None:
            mine["logprobs"] = mine["logprobs"] or {name: [] for name in choice["logprobs"]}
            for name, values in choice["logprobs"].items():
                mine["logprobs"][name] += values
        mine |= {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    return {"choices": [choices[i] for i in sorted(choices)]}


def same_streamed(app: FastAPI, **body: Any) -> list[dict[str, Any]]:
    answer = whole(app, **body)
    assert streamed(app, **body)["choices"] == answer["choices"]
    return answer["choices"]


# Usage


@pytest.mark.parametrize("n", [1, 3])
def test_l01_usage_comes_last_and_alone(n: int) -> None:
    """As the official client reads it: null in every chunk but one, which comes last and has no choices."""

    async def main() -> None:
        async with openai_client(app_of(ScriptedClient(says("Hello world")))) as client:
            whole = await client.completions.create(model=MODEL, prompt=["Hi there", "Ho"], n=n)
            stream = await client.completions.create(
                model=MODEL, prompt=["Hi there", "Ho"], n=n, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
        *others, last = chunks
        assert last.choices == [] and last.usage == whole.usage
        assert all(chunk.usage is None and "usage" in chunk.model_fields_set and len(chunk.choices) == 1 for chunk in others)
        assert {chunk.choices[0].index for chunk in others} == set(range(2 * n))
        assert {chunk.id for chunk in chunks} == {last.id} and {chunk.object for chunk in chunks} == {"text_completion"}
        assert whole.usage is not None
        prompt = len(TOKENIZER.encode("Hi there")) + len(TOKENIZER.encode("Ho")) + 2  # each counts once, with its BOS
        output = 2 * n * (len(TOKENIZER.encode("Hello world")) + 1)
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (prompt, output)
        assert whole.usage.total_tokens == prompt + output

    asyncio.run(main())


@pytest.mark.parametrize("options", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}])
def test_l01_no_usage_unless_asked_for(options: dict[str, Any]) -> None:
    parts = events(
        post(app_of(ScriptedClient()), PATH, {"model": MODEL, "prompt": "Hi", "max_tokens": 3, "stream": True, **options})
    )
    assert parts and all("usage" not in part and part["choices"] for part in parts)


# Text


@pytest.mark.parametrize("step", [1, 2, 3, 50])
def test_k13_characters_split_over_tokens(step: int) -> None:
    """However many tokens come at once, no event holds a broken character."""
    app = app_of(ScriptedClient(says(CRAB), step=step))
    assert same_streamed(app)[0]["text"] == CRAB
    texts = [part["choices"][0]["text"] for part in events(post(app, PATH, {"model": MODEL, "prompt": "Hi", "stream": True}))]
    assert "".join(texts) == CRAB and not any("\ufffd" in text for text in texts)


@pytest.mark.parametrize("tokens", range(1, 12))
def test_k13_a_character_cut_off_by_the_end_is_left_out(tokens: int) -> None:
    app = app_of(ScriptedClient(says("🦀🦀🦀")))
    (choice,) = same_streamed(app, max_tokens=tokens)
    assert choice["text"] == "🦀" * (tokens // 4) and choice["finish_reason"] == "length"


@pytest.mark.parametrize("stop", ["llo w", "wor", "Hello", "d", "H", "o", ["x", "world", "wor"]])
@pytest.mark.parametrize("include", [False, True])
def test_k15_stop_strings_split_over_tokens(stop: str | list[str], include: bool) -> None:
    client = ScriptedClient(says("Hello world, hello"))
    (choice,) = same_streamed(app_of(client), stop=stop, include_stop_str_in_output=include, logprobs=1)
    matched = "wor" if isinstance(stop, list) else stop
    expected = "Hello world, hello".partition(matched)[0] + (matched if include else "")
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", matched)
    assert len(client.aborted) == 2, "the engine is told to stop"


def test_k15_the_beginning_of_a_stop_string_is_text_after_all() -> None:
    (choice,) = same_streamed(app_of(ScriptedClient(says("Hello wor"))), stop=["world", "wor!"])
    assert (choice["text"], choice["stop_reason"]) == ("Hello wor", None)


@settings(max_examples=60, deadline=None)
@given(
    st.text(st.sampled_from("ab 🦀é漢\n<"), max_size=12),
    st.lists(st.text(st.sampled_from("ab 🦀é"), min_size=1, max_size=3), max_size=3),
    st.integers(1, 5),
    st.integers(1, 12),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)
def test_k13_k15_streams_equal_whole_answers(
    text: str, stop: list[str], step: int, max_tokens: int, logprobs: int | None, echoed: bool
) -> None:
    app = app_of(ScriptedClient(says(text), step=step))
    (choice,) = same_streamed(app, stop=stop, max_tokens=max_tokens, logprobs=logprobs, echo=echoed, prompt="🦀b")
    output = choice["text"].removeprefix("🦀b" if echoed else "")
    assert text.startswith(output) and not any(s in output for s in stop)


# Several outputs


def test_several_outputs_of_several_prompts() -> None:
    """Choice i * n + j is output j of prompt i; with a seed, output j has seed + j."""
    client = ScriptedClient()
    prompts = [[5, 10], [6, 11, 12]]
    choices = same_streamed(app_of(client), prompt=prompts, n=3, seed=7, max_tokens=4, best_of=3, add_special_tokens=False)
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [c["text"] for c in choices[:3]] == [choices[0]["text"]] * 3 and choices[3]["text"] != choices[0]["text"]
    asked = sorted(client.requests[:6], key=lambda request: int(request.request_id.rpartition("-")[2]))
    assert [request.prompt_ids for request in asked] == [prompts[0]] * 3 + [prompts[1]] * 3
    assert [request.params.seed for request in asked] == [7, 8, 9] * 2 and all(r.params.n == 1 for r in asked)


def test_each_output_echoes_its_own_prompt() -> None:
    choices = same_streamed(app_of(ScriptedClient(says("!"))), prompt=["Hi", "Ho there"], n=2, echo=True, logprobs=1)
    assert [choice["text"] for choice in choices] == ["Hi!", "Hi!", "Ho there!", "Ho there!"]


def test_an_output_that_a_stop_string_ends_is_dropped_while_others_run() -> None:
    client = ScriptedClient(lambda request: itertools.repeat(request.prompt_ids[-1]))
    stop = TOKENIZER.decode([20])
    choices = whole(app_of(client), prompt=[[20], [21]], stop=stop, max_tokens=1000)["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]
    assert len(client.aborted) == 1 and 1000 < client.counts["tokens"] < 1100


def test_l19_without_a_seed_the_engine_chooses_one() -> None:
    client = ScriptedClient()
    whole(app_of(client), n=3, max_tokens=1)
    assert [request.params.seed for request in client.requests] == [None] * 3


def test_one_output_that_fails_ends_its_request_only() -> None:
    """The error comes whole, or as the last event of a stream; the other outputs of that request are dropped."""
    script = {5: [20] * 50, 6: [20] * 50}
    client = ScriptedClient(lambda request: script[request.prompt_ids[-1]], fail_after=3)
    app = app_of(client)
    response = post(app, PATH, {"model": MODEL, "prompt": [5], "n": 2})
    assert response.status_code == 500 and response.json()["error"]["message"] == "scripted failure"
    parts = events(post(app, PATH, {"model": MODEL, "prompt": [5], "n": 2, "stream": True}))
    assert parts[-1] == {"error": {"message": "scripted failure", "type": "server_error", "param": None, "code": None}}
    assert all("error" not in part for part in parts[:-1]) and not client.open
    client.fail_after = None
    assert whole(app, prompt=[5], max_tokens=5)["usage"]["completion_tokens"] == 5


# Log-probabilities and echo


@pytest.mark.parametrize("prompt", [CRAB, "plain", TOKENIZER.encode("漢字🦀")[:-2], "<｜User｜>x<｜Assistant｜>"])
@pytest.mark.parametrize("step", [1, 4])
def test_l15_offsets_of_an_echoed_stream(prompt: str | list[int], step: int) -> None:
    """Offsets of streamed and whole answers agree, and each is where its token's text stands in the answer."""
    app = app_of(ScriptedClient(says(CRAB), step=step))
    (choice,) = same_streamed(app, prompt=prompt, echo=True, logprobs=2)
    told, text = choice["logprobs"], choice["text"]
    if isinstance(prompt, str):
        assert text == prompt + CRAB
    assert len({len(values) for values in told.values()}) == 1
    assert told["text_offset"] == sorted(told["text_offset"])
    for i, (token, offset) in enumerate(zip(told["tokens"], told["text_offset"], strict=True)):
        if not token.startswith("bytes:") and 0 < i < len(told["tokens"]) - 1 and not isinstance(prompt, list):
            assert text[offset : offset + len(token)] == token
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    assert None not in told["token_logprobs"][1:]


def test_echo_of_ids_hides_control_tokens_unless_asked() -> None:
    app = app_of(ScriptedClient(says("A")))
    ids = [0, 3, *TOKENIZER.encode("Hi"), 4]
    assert same_streamed(app, prompt=ids, echo=True)[0]["text"] == "HiA"
    shown = same_streamed(app, prompt=ids, echo=True, skip_special_tokens=False)[0]["text"]
    assert shown == "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>A"


def test_l15_an_output_that_completes_the_prompts_character() -> None:
    """The echo leaves the broken character to the output, so no text is lost or said twice."""
    crab = TOKENIZER.encode("🦀")
    for cut in range(1, 4):
        client = ScriptedClient(lambda _, cut=cut: [*crab[cut:], 1])
        (choice,) = same_streamed(app_of(client), prompt=crab[:cut], echo=True, logprobs=0)
        assert choice["text"] == "🦀"


def test_log_probabilities_as_the_official_client_reads_them() -> None:
    async def main() -> None:
        async with openai_client(app_of(ScriptedClient(says("Hello 🦀")))) as client:
            answer = await client.completions.create(model=MODEL, prompt="Hi", logprobs=2)
            scored = answer.choices[0].logprobs
        assert scored is not None and scored.tokens is not None
        crab = ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\xa6", "bytes:\\x80"]
        assert scored.tokens == ["H", "ell", "o", " ", *crab, "<｜end▁of▁sentence｜>"]
        assert scored.text_offset == [0, 1, 4, 5, 6, 6, 6, 6, 7]
        assert scored.token_logprobs is not None and scored.top_logprobs is not None
        for token, value, top in zip(scored.tokens, scored.token_logprobs, scored.top_logprobs, strict=True):
            assert top[token] == value and 1 <= len(top) <= 3

    asyncio.run(main())


def test_l17_minus_infinity_is_a_number() -> None:
    (choice,) = same_streamed(app_of(ScriptedClient(says("Hello"))), logprobs=5)
    assert all(min(top.values()) == -9999.0 for top in choice["logprobs"]["top_logprobs"])


# Ends


def test_l27_what_ends_an_answer() -> None:
    """Each of two end-of-text ids ends; `ignore_eos` holds off both, but not a stop id, even one that equals them."""
    app = app_of(ScriptedClient(lambda _: [20, 21, 2, 22, 1, 23] + [24] * 100, eos_token_ids=[1, 2]))
    (choice,) = same_streamed(app, logprobs=0)
    assert (choice["finish_reason"], choice["stop_reason"], len(choice["logprobs"]["tokens"])) == ("stop", None, 3)
    (choice,) = same_streamed(app, ignore_eos=True, max_tokens=50, logprobs=0)
    assert (choice["finish_reason"], len(choice["logprobs"]["tokens"])) == ("length", 50)
    for stop, count in ((1, 5), (2, 3), (22, 4)):
        (choice,) = same_streamed(app, ignore_eos=True, stop_token_ids=[stop], logprobs=0)
        assert (choice["finish_reason"], choice["stop_reason"], len(choice["logprobs"]["tokens"])) == ("stop", stop, count)


# BOS


@pytest.mark.parametrize("text", ["Hi", "<｜begin▁of▁sentence｜>Hi"])
def test_k26_completions_have_one_bos_as_documented(text: str) -> None:
    """One is added unless the prompt, as text or ids, begins with it or `add_special_tokens` says no; usage counts it."""
    hi = TOKENIZER.encode("Hi")
    for form in (text, TOKENIZER.encode(text, special=True)):
        for add in (None, True, False):
            client = ScriptedClient()
            app = app_of(client)
            answer = whole(app, prompt=form, add_special_tokens=add, max_tokens=1)
            expected = hi if text == "Hi" and add is False else [0, *hi]
            assert client.requests[0].prompt_ids == expected
            assert answer["usage"]["prompt_tokens"] == len(expected)
            if isinstance(form, str):
                told = post(app, "/tokenize", {"model": MODEL, "prompt": form, "add_special_tokens": add}).json()
                assert (told["tokens"], told["count"]) == (expected, len(expected))


def test_tokenize_and_back() -> None:
    app = app_of(ScriptedClient(max_model_len=77))
    told = post(app, "/tokenize", {"model": MODEL, "prompt": f"<｜User｜>{CRAB}"}).json()
    assert told["max_model_len"] == 77 and told["tokens"][:2] == [0, 3]
    back = post(app, "/detokenize", {"model": MODEL, "tokens": told["tokens"]}).json()
    assert back == {"prompt": f"<｜begin▁of▁sentence｜><｜User｜>{CRAB}"}
    assert post(app, "/detokenize", {"model": MODEL, "tokens": []}).json() == {"prompt": ""}
    assert post(app, "/tokenize", {"model": MODEL, "prompt": "", "add_special_tokens": False}).json()["tokens"] == []


def test_sampling_defaults_of_the_checkpoint_are_the_requests() -> None:
    client = ScriptedClient(sampling_defaults={"temperature": 0.25, "top_p": 0.5})
    whole(app_of(client), max_tokens=1, top_p=0.75)
    assert (client.requests[0].params.temperature, client.requests[0].params.top_p) == (0.25, 0.75)


# The real engine, in its process

CONFIG = EngineConfig(kv_cache_bytes=128 << 20, num_threads=1, max_model_len=2048, served_model_name=MODEL)


def test_l17_l19_l27_with_the_real_engine() -> None:
    """Without a seed answers differ; with one they are the same alone, among others, and after a restart."""

    async def ask(client: Any, **body: Any) -> dict[str, Any]:
        response = await client.post(PATH, json={"model": MODEL, "prompt": "In the", "max_tokens": 8, "ignore_eos": True, **body})
        assert response.status_code == 200, response.text
        return json.loads(response.text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    async def text(client: Any, **body: Any) -> str:
        return (await ask(client, **body))["choices"][0]["text"]

    async def first_run(client: Any) -> str:
        together = await asyncio.gather(*(text(client) for _ in range(20)))
        serial = [await text(client) for _ in range(5)]
        assert len({*together, *serial}) > 20
        alone = await text(client, seed=3)
        batch = await asyncio.gather(*(text(client, **({"seed": 3} if i == 4 else {})) for i in range(8)))
        assert batch[4] == alone
        outputs = await ask(client, seed=2, n=2)
        assert outputs["choices"][1]["text"] == alone, "output i has seed + i"
        for narrow in ({"top_p": 0.1}, {"top_k": 1}, {"temperature": 0}):
            scored = (await ask(client, logprobs=5, echo=True, **narrow))["choices"][0]["logprobs"]
            assert all(-9999 <= value <= 0 for value in scored["token_logprobs"][1:])
        usage = (await ask(client, max_tokens=50))["usage"]
        assert usage["completion_tokens"] == 50
        return alone

    async def served(test: Any) -> Any:
        engine = await EngineClient.start(CONFIG)
        try:
            async with http_client(app_of(engine)) as client:
                client.timeout = 120
                return await asyncio.wait_for(test(client), 200)
        finally:
            await engine.close()

    alone = asyncio.run(served(first_run))
    assert asyncio.run(served(lambda client: text(client, seed=3))) == alone
