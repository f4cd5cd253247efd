"""Compiles grammars in a process of its own, so that no schema can hold up the server or the engine, with a time limit and a cache."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from abyssal.engine.engine import EngineInfo
from abyssal.errors import AbyssalError, RequestError
from abyssal.serve.conversation import dump_json

COMPILE_SECONDS = 2.0
START_SECONDS = 120.0  # the process imports much, which takes a while on a busy machine
CACHE_BYTES = 64 << 20
CACHE_ENTRIES = 1024


class Setup(msgspec.Struct):
    """First message to the process: the tokens that grammars are compiled for."""

    model_folder: str
    vocab_size: int  # of the model
    eos_token_ids: list[int]


class Compiled(msgspec.Struct):
    """What became of a structural tag: a compiled grammar, or why there is none. Both empty: the process is ready."""

    grammar: bytes = b""
    error: str = ""


class GrammarProcessError(AbyssalError):
    """The grammar process does not start, or ended while it compiled: no fault of the request that can be named."""


class GrammarCompiler:
    """Grammars for one model. The process starts with the first one, or with `start`; after a time-out the next one starts it anew.

    Args:
        seconds: limit of one compilation.
    """

    def __init__(self, info: EngineInfo, seconds: float = COMPILE_SECONDS) -> None:
        self._setup = Setup(info.model_folder, info.model_vocab_size, info.eos_token_ids)
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, "grammar")  # one message is under way at a time; others wait here
        self._cache: OrderedDict[str, Compiled] = OrderedDict()

    async def compile(self, tag: dict[str, Any], where: str) -> tuple[str, bytes]:
        """(key, compiled grammar) of the structural-tag format `tag`.

        Args:
            where: the request's field that asks for it.

        Raises:
            RequestError: it cannot be compiled, or not in time; what took too long is tried anew when asked for again.
            GrammarProcessError: the process ended; likewise.
        """
        text = dump_json({"type": "structural_tag", "format": tag}, where)
        key = hashlib.sha256(text.encode()).hexdigest()
        found = self._cache.get(key)
        if found is None:
            try:
                found = await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, text)
            except TimeoutError as error:
                message = f"{where} cannot be compiled: it takes longer than {self._seconds:g} s; simplify it, or try again later"
                raise RequestError(message, param=where) from error
            self._cache[key] = found
            while sum(len(entry.grammar) for entry in self._cache.values()) > CACHE_BYTES or len(self._cache) > CACHE_ENTRIES:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(key)
        if found.error:
            raise RequestError(f"{where} cannot be compiled: {found.error[:300]}", param=where)
        return key, found.grammar

    def start(self) -> None:
        """Have the process started, so that the first request does not wait for it; returns at once."""
        self._thread.submit(self._running)

    def close(self) -> None:
        """End the process; what it compiles is given up."""
        if self._process is not None:
            self._process.kill()
        self._thread.shutdown(cancel_futures=True)
        self._stop()

    # In the thread

    def _compile(self, text: str) -> Compiled:
        process = self._running()
        try:
            return _ask(process, text.encode(), self._seconds)
        except TimeoutError:
            self._stop()
            raise
        except OSError as error:
            self._stop()
            message = (
                "the grammar compiler ended while it worked on this; try again, and simplify the schema if that does not help"
            )
            raise GrammarProcessError(message) from error

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, ready for a grammar."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        command = (sys.executable, "-m", "abyssal.serve.grammar_worker")
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        try:
            _ask(self._process, msgspec.msgpack.encode(self._setup), START_SECONDS)
        except OSError as error:
            self._stop()
            raise GrammarProcessError(f"the grammar process does not start: {error!r}; try again later") from error
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _ask(process: subprocess.Popen[bytes], data: bytes, seconds: float) -> Compiled:
    """Send one message and wait for its answer.

    Raises:
        TimeoutError: there is none in time; the process is killed.
        OSError: the process has ended.
    """
    assert process.stdin is not None and process.stdout is not None
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        process.kill()

    killer = threading.Timer(seconds, give_up)
    killer.start()
    try:
        write_message(process.stdin, data)
        answer = read_message(process.stdout)
    except BrokenPipeError:
        answer = b""
    finally:
        killer.cancel()
    if not answer:
        raise TimeoutError if is_late.is_set() else ConnectionResetError("the grammar process ended")
    return msgspec.msgpack.decode(answer, type=Compiled)


def read_message(source: Any) -> bytes:
    """The next message, four bytes of length and that many of content; empty at the end."""
    size = int.from_bytes(source.read(4), "little")
    data: bytes = source.read(size)
    return data if len(data) == size else b""


def write_message(sink: Any, data: bytes) -> None:
    sink.write(len(data).to_bytes(4, "little") + data)
    sink.flush()
