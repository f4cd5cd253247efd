"""The prompt as part of a completion's answer (`echo`)."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from abyssal.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt's text, and where in it each token begins: one offset per token, in characters."""

    text: str
    offsets: list[int]


def echo_prompt(tokenizer: Tokenizer | None, ids: Sequence[int], added_bos: bool, skip_special_tokens: bool) -> Echo:
    """Text of the prompt `ids`. A character that the end cuts off is left out: if the answer goes on with it, it is the answer's.

    Args:
        added_bos: the first token is not the client's, so it has no text.
        skip_special_tokens: leave out the text of control tokens.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets: list[int] = []
    parts: list[str] = []
    length = 0
    for i, token in enumerate(ids):
        offsets.append(length)
        hidden = tokenizer is None or (added_bos and i == 0)
        raw = b"" if hidden or tokenizer is None else tokenizer.token_bytes(token, skip_special_tokens)
        parts.append(decoder.decode(raw))
        length += len(parts[-1])
    return Echo("".join(parts), offsets)
