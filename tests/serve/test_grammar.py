"""The grammar process: results, errors, time limits, and that nothing of it holds up anybody else (case N11)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
from typing import Any

import httpx
import pytest

from abyssal.errors import RequestError
from abyssal.serve import grammar
from abyssal.serve.grammar import GrammarCompiler, write_message
from abyssal.serve.structure import json_value
from tests.serve.live import CHAT, MODEL, PATIENCE, LiveServer
from tests.serve.sampling import SamplingClient, stubborn
from tests.serve.scripted import GRAMMARS, app_of, engine_info, post
from tests.serve.scripted import MODEL as SCRIPTED
from tests.support.grammars import json_grammar


def compile_in(compiler: GrammarCompiler, schema: Any) -> tuple[str, bytes]:
    return asyncio.run(compiler.compile({**json_value(True), "json_schema": schema}, "where"))


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


BOMB = {"enum": [f"v{i}" for i in range(2**15)]}  # the check of schemas refuses it; here it is given to the process itself


def test_grammars_come_back_and_are_kept() -> None:
    first = compile_in(GRAMMARS, {"type": "integer"})
    process = GRAMMARS._process
    assert compile_in(GRAMMARS, {"type": "integer"}) == first and GRAMMARS._process is process
    assert compile_in(GRAMMARS, {"type": "null"})[0] != first[0]
    assert json.loads(first[1]).keys() == json.loads(json_grammar({"type": "integer"}).compiled).keys()


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"type": "strin"}, "strin"),
        ({"type": "string", "pattern": "("}, "parenthesis"),
        ({"type": "number", "minimum": 1e-7, "maximum": 2e-7}, "no value follows it"),
        (BOMB, "MiB"),
        (nested(10_000), "where is nested too deeply"),
    ],
)
def test_what_cannot_be_compiled_is_told(schema: Any, what: str) -> None:
    for _ in range(2):  # the second time from the cache
        with pytest.raises(RequestError, match=what) as caught:
            compile_in(GRAMMARS, schema)
        assert caught.value.param == "where" and "/project" not in str(caught.value)
    assert compile_in(GRAMMARS, {"type": "null"})[1]


def test_a_process_that_takes_too_long_is_replaced() -> None:
    compiler = GrammarCompiler(engine_info(), seconds=0.005)
    try:
        with pytest.raises(RequestError, match=r"longer than 0\.005 s"):
            compile_in(compiler, BOMB)
        assert compiler._process is None
        compiler._seconds = 60
        assert compile_in(compiler, {"type": "null"})[1]
        process = compiler._process
        assert process is not None
        process.kill()
        process.wait()
        assert compile_in(compiler, {"type": "boolean"})[1], "one that died is replaced too"
    finally:
        compiler.close()
    assert process.poll() is not None


def test_what_the_process_did_not_finish_is_tried_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time-out is the schema's fault (400) and the end of the process is not (503); neither sticks to the schema."""
    compiler = GrammarCompiler(engine_info(), seconds=60)
    app = app_of(SamplingClient(stubborn("No.")), grammars=compiler)
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}}
    asked = {"messages": [{"role": "user", "content": "U"}], "model": SCRIPTED, "max_tokens": 99}
    chat: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"schema": form["schema"]}}}
    messages: dict[str, Any] = {"output_config": {"format": form}}

    def ask(path: str, more: dict[str, Any], status: int, words: str) -> None:
        answer = post(app, path, {**asked, **more})
        assert answer.status_code == status and words in answer.text, answer.text

    def pause() -> None:
        os.kill(compiler._thread.submit(compiler._running).result().pid, signal.SIGSTOP)

    def write_and_kill(sink: Any, data: bytes) -> None:
        write_message(sink, data)
        assert compiler._process is not None
        compiler._process.kill()

    try:
        pause()
        compiler._seconds = 0.05
        ask(CHAT, chat, 400, "longer than 0.05 s; simplify it, or try again later")
        compiler._seconds = 60
        pause()
        with monkeypatch.context() as patch:
            patch.setattr(grammar, "write_message", write_and_kill)
            ask(CHAT, chat, 503, "try again, and simplify the schema if that does not help")
            patch.setattr(GrammarCompiler, "_running", lambda _: compiler._process)
            compiler._process = subprocess.Popen(["true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            ask("/v1/messages", messages, 503, "api_error")
        ask(CHAT, chat, 200, "true")
    finally:
        compiler.close()


def post_schema(server: LiveServer, body: bytes) -> httpx.Response:
    return httpx.post(server.url + CHAT, content=body, headers={"content-type": "application/json"}, timeout=PATIENCE)


def asking(schema: Any) -> bytes:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "U"}], "max_tokens": 3, "response_format": form}
    ).encode()


def test_n11_schemas_that_would_stall_others_do_not() -> None:
    """Nesting of 20, 200 and 20,000 and 2^15 alternatives, while four others stream: compiled or 400, and the streams go on."""
    deep = asking("S").replace(b'"S"', b'{"items":' * 20_000 + b"{}" + b"}" * 20_000)
    bodies = {
        "20": (asking(nested(20)), 200), "200": (asking(nested(200)), 400), "20,000": (deep, 400),
        "alternatives": (asking({"anyOf": [{"const": f"v{i}"} for i in range(2**15)]}), 400),
    }  # fmt: skip
    with LiveServer() as server:
        assert post_schema(server, asking({"type": "null"})).status_code == 200, "the process has started"
        counts = [0] * 4
        done = threading.Event()

        def stream(index: int) -> None:
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": "U"}],
                "ignore_eos": True,
                "max_tokens": 8000,
                "stream": True,
            }
            with httpx.stream("POST", server.url + CHAT, json=body, timeout=PATIENCE) as answer:
                for _ in answer.iter_lines():
                    counts[index] += 1
                    if done.is_set():
                        return

        threads = [threading.Thread(target=stream, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        try:
            for name, (body, status) in bodies.items():
                answer: list[httpx.Response] = []
                asker = threading.Thread(target=lambda body=body, answer=answer: answer.append(post_schema(server, body)))
                before = list(counts)
                asker.start()
                asker.join(PATIENCE)
                assert answer and answer[0].status_code == status, f"{name}: {answer[0].text[:300] if answer else 'no answer'}"
                end = time.monotonic() + PATIENCE
                while min(now - then for now, then in zip(counts, before, strict=True)) < 3:
                    assert time.monotonic() < end, f"{name}: a stream stands still"
                    time.sleep(0.01)
        finally:
            done.set()
            for thread in threads:
                thread.join(PATIENCE)
