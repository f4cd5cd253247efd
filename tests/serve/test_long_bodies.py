"""Bodies of very many parts: work that grows with their number and no faster, away from the event loop, and not for who has left."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import pytest

from abyssal.serve.body import MAX_PARTS
from tests.serve.scripted import MODEL, TOKENIZER, ScriptedClient, app_of, http_client, post, says

CHAT, MESSAGES, RESPONSES, RAW = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"
FUNCTION = {"name": "f", "arguments": "{}"}
CALL = {"id": "a", "type": "function", "function": FUNCTION}
ANSWER = {"role": "tool", "tool_call_id": "a", "content": "r"}
USER = {"role": "user", "content": "u"}
ITEM = {"type": "function_call", "call_id": "a", **FUNCTION}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "r"}
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]}

MANY: dict[str, tuple[str, Any]] = {
    "messages of the user": (CHAT, lambda n: {"messages": [USER] * n}),
    "messages of all roles": (CHAT, lambda n: {"messages": [{"role": "system", "content": "s"}, USER, {"role": "assistant", "content": "c"}] * (n // 3) + [USER]}),
    "parts of a message": (CHAT, lambda n: {"messages": [{"role": "user", "content": [{"type": "text", "text": "u"}] * n}]}),
    "calls and results": (CHAT, lambda n: {"messages": [{"role": "assistant", "tool_calls": [CALL] * (n // 2)}, *[ANSWER] * (n // 2)]}),
    "blocks": (MESSAGES, lambda n: {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": "u"}] * n}]}),
    "items of the user": (RESPONSES, lambda n: {"input": [USER] * n}),
    "items of the assistant": (RESPONSES, lambda n: {"input": [*[ITEM, THOUGHT, {"role": "assistant", "content": "c"}] * (n // 3), OUTPUT]}),
    "token ids": (RAW, lambda n: {"prompt": [5] * (8 * n)}),
}  # fmt: skip


@pytest.mark.parametrize("kind", MANY)
def test_the_work_grows_with_the_number_of_parts_and_no_faster(kind: str) -> None:
    """Thirty-two times the parts cost about 32 times as much; were each part to copy those before it, several hundred times."""
    path, body_of = MANY[kind]
    app = app_of(ScriptedClient(says("Hi"), max_model_len=10**7, capacity_tokens=10**7))

    def seconds(n: int) -> float:
        raw = json.dumps({"model": MODEL, **body_of(n)}).encode()
        start = time.process_time()
        response = post(app, path, raw)
        assert response.status_code == 200, response.text
        return time.process_time() - start

    seconds(1000)
    assert seconds(32_000) < 100 * min(seconds(1000) for _ in range(3))
