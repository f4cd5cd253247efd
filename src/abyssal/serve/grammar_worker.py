"""The grammar process: compiles what `abyssal.serve.grammar` sends it, and is killed when that takes too long."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import msgspec
import xgrammar

from abyssal.engine.grammar import token_table
from abyssal.serve.grammar import Compiled, Setup, read_message, write_message
from abyssal.tokenizer import Tokenizer

MAX_COMPILED_BYTES = 8 << 20  # the engine reads them between two steps


def main() -> None:
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the library prints must not come between messages
    setup = msgspec.msgpack.decode(read_message(source), type=Setup)
    tokenizer = Tokenizer.load(Path(setup.model_folder), setup.vocab_size)
    assert tokenizer is not None
    table = token_table(tokenizer, setup.vocab_size, setup.eos_token_ids)
    compiler = xgrammar.GrammarCompiler(table, max_threads=1, cache_enabled=False)
    write_message(sink, msgspec.msgpack.encode(Compiled()))
    while data := read_message(source):
        write_message(sink, msgspec.msgpack.encode(_compile(compiler, data.decode())))


def _compile(compiler: xgrammar.GrammarCompiler, tag: str) -> Compiled:
    try:
        compiled = compiler.compile_structural_tag(tag)
    except (RuntimeError, ValueError) as error:
        return Compiled(error=re.sub(r"^\[[\d:]*\] \S+: ", "", str(error)).strip() or "it cannot be compiled")
    if compiled.memory_size_bytes > MAX_COMPILED_BYTES:
        return Compiled(error=_too_large(compiled.memory_size_bytes))
    data = compiled.serialize_json().encode()
    return Compiled(error=_too_large(len(data))) if len(data) > MAX_COMPILED_BYTES else Compiled(data)


def _too_large(size: int) -> str:
    return f"it takes {size >> 20} MiB when compiled; at most {MAX_COMPILED_BYTES >> 20} are allowed"


if __name__ == "__main__":
    main()
    sys.exit(0)
