"""Grammars for tiny-v4, compiled in this process."""

from __future__ import annotations

import json
import random
from typing import Any

import torch
import xgrammar

from abyssal.engine.grammar import GrammarMasks, token_table
from abyssal.engine.request import Grammar
from abyssal.serve.grammar_worker import compile_tag
from abyssal.serve.structure import json_value
from tests.serve.scripted import TOKENIZER

VOCAB = 4096  # of tiny-v4
EOS = 1
BYTES = {i for i in range(9, TOKENIZER.vocab_size) if len(TOKENIZER.token_bytes(i)) == 1}
ENDS = {i for i in BYTES if TOKENIZER.token_bytes(i) in (b'"', b"]", b"}", b"0", b"\\")}
COMPILER = xgrammar.GrammarCompiler(token_table(TOKENIZER, VOCAB, [EOS]), max_threads=1, cache_enabled=False)
MASKS = GrammarMasks(TOKENIZER, VOCAB, [EOS])


def compiled(tag: dict[str, Any], after: int | None = None) -> Grammar:
    """The grammar of a structural-tag format."""
    text = json.dumps({"type": "structural_tag", "format": tag})
    return Grammar(text, compile_tag(COMPILER, text).serialize_json().encode(), after)


def json_grammar(schema: Any, after: int | None = None) -> Grammar:
    return compiled(json_value(schema), after)


def accepts(grammar: Grammar, ids: list[int]) -> bool:
    """Whether the mask allows every token of `ids`, then the end."""
    mask = MASKS.mask(grammar)
    for token in [*ids, EOS]:
        row = torch.zeros(VOCAB)
        mask.apply(row)
        if row[token] != 0:
            return False
        mask.append(token)
    return True


def walk(grammar: Grammar, seed: int, max_tokens: int) -> str | None:
    """Text of random allowed tokens, mostly of one byte, up to the end; None if that is far."""
    choice, mask, ids = random.Random(seed), MASKS.mask(grammar), list[int]()
    for _ in range(max_tokens):
        row = torch.zeros(VOCAB)
        mask.apply(row)
        allowed = row.isfinite().nonzero().flatten().tolist()
        assert allowed, f"nothing can follow {TOKENIZER.decode(ids)!r}"
        if EOS in allowed:
            return TOKENIZER.decode(ids)
        few = [token for token in allowed if token in BYTES] if choice.random() < 0.8 else []
        ends = [token for token in few if token in ENDS] if choice.random() < 0.4 else []
        ids.append(choice.choice(ends or few or allowed))
        mask.append(ids[-1])
    return None
