"""Grammars for tiny-v4, compiled in this process."""

from __future__ import annotations

import json
from typing import Any

import torch
import xgrammar

from abyssal.engine.grammar import GrammarMasks, token_table
from abyssal.engine.request import Grammar
from abyssal.serve.structure import json_value
from tests.serve.scripted import TOKENIZER

VOCAB = 4096  # of tiny-v4
EOS = 1
COMPILER = xgrammar.GrammarCompiler(token_table(TOKENIZER, VOCAB, [EOS]), max_threads=1, cache_enabled=False)
MASKS = GrammarMasks(TOKENIZER, VOCAB, [EOS])


def compiled(tag: dict[str, Any], after: int | None = None) -> Grammar:
    """The grammar of a structural-tag format."""
    text = json.dumps({"type": "structural_tag", "format": tag})
    return Grammar(text, COMPILER.compile_structural_tag(text).serialize_json().encode(), after)


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
