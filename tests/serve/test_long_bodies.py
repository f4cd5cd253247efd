"""Bodies of very many parts: work that grows with their number and no faster, away from the event loop, and not for who has left."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from abyssal.errors import RequestError
from abyssal.serve import body, generation
from abyssal.serve.body import MAX_PARTS, parse_object
from abyssal.serve.conversation import Message
from abyssal.serve.protocol import merge_turns
from abyssal.serve.responses import _messages
from abyssal.serve.schemas import ResponsesBody
from abyssal.serve.streams import ClientLeft, in_thread
from abyssal.tokenizer import Tokenizer
from tests.serve.scripted import MODEL, ScriptedClient, app_of, post, says

CHAT, MESSAGES, RESPONSES, RAW = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"
USER = {"role": "user", "content": "u"}
SMALL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]}, MESSAGES: {"max_tokens": 1, "messages": [USER]}, RESPONSES: {"input": [USER]}, RAW: {"prompt": "u"},
    "/tokenize": {"messages": [USER]}, "/detokenize": {"tokens": [48]},
}  # fmt: skip


def join_results(n: int) -> Callable[[], Any]:
    messages = [Message("tool", "r", tool_call_id="a")] * n
    return lambda: merge_turns(messages)


def join_items(n: int) -> Callable[[], Any]:
    item = {"role": "assistant", "content": "c" * 100}
    request = ResponsesBody(input=[*[item] * n, USER])
    return lambda: _messages(request)


def ask(path: str, content_of: Callable[[int], dict[str, Any]]) -> Callable[[int], Callable[[], Any]]:
    app = app_of(ScriptedClient(says("Hi"), max_model_len=10**7, capacity_tokens=10**7))

    def work(n: int) -> Callable[[], Any]:
        raw = json.dumps({"model": MODEL, **content_of(n)}).encode()
        return lambda: post(app, path, raw).raise_for_status()

    return work


@pytest.mark.parametrize("work_of", [
    join_results, join_items,
    ask(CHAT, lambda n: {"messages": [USER] * n}), ask(RESPONSES, lambda n: {"input": [USER] * n}),
    ask(MESSAGES, lambda n: {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": "u"}] * n}]}),
], ids=["results", "items of the assistant", "messages", "items", "blocks"])  # fmt: skip
def test_work_grows_with_the_number_of_parts_and_no_faster(work_of: Callable[[int], Callable[[], Any]]) -> None:
    """Processor time of 64 times the parts: about 64 times as much, and hundreds of times if each part copied those before it."""

    def seconds(n: int) -> float:
        work = work_of(n)
        gc.disable()  # its time depends on what other tests have left
        try:
            start = time.process_time()
            work()
            return time.process_time() - start
        finally:
            gc.enable()

    seconds(500)
    few, many = min(seconds(500) for _ in range(5)), seconds(32_000)
    assert many < 120 * few


@pytest.mark.parametrize("path", SMALL)
def test_others_are_answered_while_a_body_is_read(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may take seconds never runs where the event loop does."""
    seen: dict[str, bool] = {}

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen[name] = seen.get(name, False) or asyncio._get_running_loop() is not None
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(body, "parse_object")
    watch(generation, "check_request")
    watch(Message, "__init__")
    for name in ("encode", "decode"):
        watch(Tokenizer, name)
    assert post(app_of(ScriptedClient(lambda _: [48, 1])), path, {"model": MODEL, **SMALL[path]}).status_code == 200
    assert seen.keys() > {"parse_object"} and not any(seen.values()), seen


def test_work_for_who_has_left_is_not_begun() -> None:
    gate, begun = threading.Event(), []

    async def left() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        busy = asyncio.create_task(asyncio.to_thread(gate.wait))
        for _ in range(3):
            with pytest.raises(ClientLeft):
                await in_thread(left, begun.append, 1)
        gate.set()
        await busy
        await asyncio.to_thread(lambda: None)

    asyncio.run(run())
    assert begun == []


@pytest.mark.parametrize("part", [b"1,", b"[],", b'"",', b"{},"])
def test_more_values_than_any_request_needs_are_refused_before_they_are_parsed(
    part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parts(count: int) -> bytes:
        return b'{"prompt":[' + part * count + b"1]}"

    per_part = sum(map(part.count, (b",", b"[", b"{")))
    assert len(parse_object(parts(1000))["prompt"]) == 1001
    monkeypatch.setattr(body.json, "loads", lambda *_, **__: pytest.fail("it is parsed"))
    with pytest.raises(RequestError, match=f"at most {MAX_PARTS} are allowed"):
        parse_object(parts(MAX_PARTS // per_part))
