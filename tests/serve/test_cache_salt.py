"""Who shares a cached prefix with whom: `cache_salt` of both of OpenAI's older routes (case N13)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.live import CHAT, COMPLETIONS, MODEL, LiveServer
from tests.serve.scripted import ScriptedClient, app_of, post, says

LONG = "It was a quiet harbor and nobody said a word. " * 30


def cached(server: LiveServer, path: str, salt: str | None) -> int:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": LONG}]} if path == CHAT else {"prompt": LONG}
    usage = server.post(path, {"model": MODEL, "max_tokens": 2, "cache_salt": salt, **prompt}).json()["usage"]
    assert usage["prompt_tokens"] > 300
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_n13_no_prefix_is_shared_across_salts() -> None:
    with LiveServer(enable_prefix_caching=True) as server:
        for path in (CHAT, COMPLETIONS):
            for salt in (None, "a", "b", "ä"):
                assert cached(server, path, salt) == 0, f"{salt!r} got what another one left"
                assert cached(server, path, salt) >= 256, f"{salt!r} does not get what it left itself"


@pytest.mark.parametrize("salt", ["", "x" * 257, 7, ["a"], "a\udfff"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_bad_salts_are_refused(path: str, stream: bool, salt: Any) -> None:
    body = (
        {"model": "scripted", "messages": [{"role": "user", "content": "U"}]}
        if path == CHAT
        else {"model": "scripted", "prompt": "U"}
    )
    response = post(app_of(ScriptedClient(says("Hi"))), path, {**body, "cache_salt": salt, "stream": stream})
    assert response.status_code == 400 and response.json()["error"]["param"] == "cache_salt"
