"""Masks for structured output: which token may come next, by a compiled grammar. Needs xgrammar, which nothing else of the engine does.

The DSML token stands in the grammars' token table as bytes that no UTF-8 text holds, so that a grammar can ask for it by id while
free text can never contain it. Other control tokens have no bytes, and no place in any grammar.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
import xgrammar
from torch import Tensor

from abyssal.engine.request import Grammar
from abyssal.errors import RequestError
from abyssal.tokenizer import DSML, Tokenizer

MAX_GRAMMARS = 64  # kept ready per engine

_DSML_BYTES = b"\xff\xff"


def token_table(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> xgrammar.TokenizerInfo:
    """The tokens as grammars see them; compiler and engine must use the same table.

    Args:
        vocab_size: of the model, which may exceed the tokenizer's.
    """
    control = set(tokenizer.control_ids())
    table = [b"" if i in control or i >= tokenizer.vocab_size else tokenizer.token_bytes(i) for i in range(vocab_size)]
    if (dsml := tokenizer.find_special(DSML)) is not None:
        table[dsml] = _DSML_BYTES
    return xgrammar.TokenizerInfo(
        table, vocab_type=xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids)
    )


class GrammarMasks:
    """The grammars of one engine."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._table = token_table(tokenizer, vocab_size, eos_token_ids)
        self._vocab_size = vocab_size
        self._free = torch.ones(vocab_size, dtype=torch.bool)  # tokens of free text
        self._free[tokenizer.vocab_size :] = False
        self._free[[*tokenizer.control_ids(), *eos_token_ids]] = False
        self._compiled: OrderedDict[str, xgrammar.CompiledGrammar] = OrderedDict()

    def mask(self, grammar: Grammar) -> GrammarMask:
        """The mask of a new sequence.

        Raises:
            RequestError: the grammar was compiled for another token table.
        """
        self._compiled[grammar.key] = compiled = self._compiled.pop(grammar.key, None) or self._read(grammar.compiled)
        if len(self._compiled) > MAX_GRAMMARS:
            self._compiled.popitem(last=False)
        before = None
        if grammar.after is not None:
            before = self._free.clone()
            before[grammar.after] = True
        return GrammarMask(xgrammar.GrammarMatcher(compiled), self._vocab_size, grammar.after, before)

    def _read(self, data: bytes) -> xgrammar.CompiledGrammar:
        try:
            return xgrammar.CompiledGrammar.deserialize_json(data.decode(), self._table)
        except (RuntimeError, ValueError) as error:
            raise RequestError(f"the compiled grammar cannot be used: {error}") from error


class GrammarMask:
    """Where one sequence stands in its grammar.

    Args:
        before: bool [V], what may come until the token `after` has, which the grammar does not see.
    """

    def __init__(self, matcher: xgrammar.GrammarMatcher, vocab_size: int, after: int | None, before: Tensor | None) -> None:
        self._matcher, self._after, self._before = matcher, after, before
        self._bits = xgrammar.allocate_token_bitmask(1, vocab_size)

    def apply(self, logits: Tensor) -> None:
        """Set one row fp32 [V] to -inf, in place, where the grammar allows no token."""
        logits.masked_fill_(~self._allowed(logits.shape[-1]).to(logits.device), -torch.inf)

    def append(self, token_id: int) -> None:
        """Take note of a generated token, which the mask has allowed."""
        if self._before is not None:
            if token_id == self._after:
                self._before = None
        else:
            accepted = self._matcher.accept_token(token_id)
            assert accepted, f"token {token_id} is not what the grammar allows"

    def _allowed(self, vocab_size: int) -> Tensor:
        """bool [V]"""
        if self._before is not None:
            return self._before
        self._matcher.fill_next_token_bitmask(self._bits)
        bits = np.unpackbits(self._bits[0].numpy().view(np.uint8), bitorder="little")
        return torch.from_numpy(bits[:vocab_size]).bool()
