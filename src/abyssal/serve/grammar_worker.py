"""The grammar process: compiles what `abyssal.serve.grammar` sends it, and is killed when that takes too long."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

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


def compile_tag(compiler: xgrammar.GrammarCompiler, tag: str) -> xgrammar.CompiledGrammar:
    """The grammar of a structural tag, whose schemas are `grammar_schema`'s.

    Raises:
        RuntimeError, ValueError: it has none, or one that only the empty text follows.
    """
    tree = json.loads(tag)
    compiled = compiler.compile_structural_tag({**tree, "format": _with_grammars(tree["format"])})
    bits = xgrammar.allocate_token_bitmask(1, compiled.tokenizer_info.vocab_size)
    matcher = xgrammar.GrammarMatcher(compiled)
    matcher.fill_next_token_bitmask(bits)
    for token in compiled.tokenizer_info.stop_token_ids:
        bits[0, token // 32] &= ~(1 << token % 32)
    if not bits.any():
        raise ValueError("no value follows it")
    return compiled


def _with_grammars(part: Any) -> Any:
    """A structural tag's part with grammars in place of schemas."""
    if isinstance(part, list):
        return [_with_grammars(entry) for entry in part]
    if not isinstance(part, dict):
        return part
    if part["type"] == "json_schema":
        return {"type": "grammar", "grammar": _schema_grammar(part["json_schema"], part["max_whitespace_cnt"])}
    return {key: _with_grammars(value) for key, value in part.items()}


def _schema_grammar(schema: Any, max_whitespace: int) -> str:
    """The library's grammar of a schema, but patterns are taken as they stand, and no control character counts towards a length.

    Neither of the replaced texts can occur within the grammar's literals: in these, JSON's quotes and escapes have backslashes.
    """
    text = str(xgrammar.Grammar.from_json_schema(json.dumps(schema), max_whitespace_cnt=max_whitespace))
    text = re.sub(r'(?m)^(\w+ ::= Regex\(".*"), json_string=true\)$', r"\1)", text)
    return text.replace(r"[^\"\\\r\n]", r"[^\0-\x1f\"\\]")


def _compile(compiler: xgrammar.GrammarCompiler, tag: str) -> Compiled:
    try:
        compiled = compile_tag(compiler, tag)
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
