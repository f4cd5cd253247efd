"""Text to token ids and back, for byte-level BPE tokenizers (`tokenizer.json`).

Control tokens (BOS, turn marks, `<think>` and so on) are never read out of a message's text: `encode` treats their spelling as
ordinary text unless told otherwise, and `encode_segments` takes the places where they belong from the caller.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from abyssal.errors import CheckpointError, RequestError, show


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A control token by its spelling; its id is the tokenizer's business."""

    text: str


# V4 spec 5.2. The bars are U+FF5C, the low blocks U+2581.
BOS = SpecialToken("<｜begin▁of▁sentence｜>")
EOS = SpecialToken("<｜end▁of▁sentence｜>")
THINK = SpecialToken("<think>")
END_THINK = SpecialToken("</think>")
DSML = SpecialToken("｜DSML｜")
SYSTEM = SpecialToken("<｜System｜>")  # V4.1
USER = SpecialToken("<｜User｜>")
ASSISTANT = SpecialToken("<｜Assistant｜>")
LATEST_REMINDER = SpecialToken("<｜latest_reminder｜>")


def with_bos(ids: list[int], bos: int | None) -> list[int]:
    """`ids` with BOS in front exactly once; as they are where there is no BOS."""
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


class Tokenizer:
    """One checkpoint's tokenizer. Nothing in it changes after loading, so any number of threads may use it.

    Args:
        raw: the content of `tokenizer.json`.
        bos_text, eos_text: spellings from `tokenizer_config.json`; V4's own without.

    Attributes:
        vocab_size: one more than the highest token id.
        bos_token_id, eos_token_id: None where the tokenizer has none.

    Raises:
        CheckpointError: not a byte-level BPE tokenizer, or contradictory.
    """

    def __init__(self, raw: dict[str, Any], bos_text: str | None = None, eos_text: str | None = None) -> None:
        decoder = raw.get("decoder")
        if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
            shown = show(decoder)
            raise CheckpointError(f"tokenizer.json has the decoder {shown}; only byte-level BPE (type ByteLevel) is supported")
        self._control = _build(raw)
        # The library can switch off only the added tokens marked special; V4's turn marks need not be. So text has its own.
        self._text = _build({**raw, "added_tokens": []})
        added = self._control.get_added_tokens_decoder()
        self._special_ids = {entry.content: token for token, entry in added.items()}
        self._skipped_ids = frozenset(token for token, entry in added.items() if entry.special)
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = max(self._control.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_token_id = self._named(bos_text, BOS, "bos_token")
        self.eos_token_id = self._named(eos_text, EOS, "eos_token")
        for text, token in self._special_ids.items():
            if token in self._text.encode(text, add_special_tokens=False).ids:
                raise CheckpointError(f"tokenizer.json: the plain text {text!r} itself encodes to control token {token}")

    @classmethod
    def load(cls, folder: Path, model_vocab_size: int) -> Tokenizer | None:
        """Read `tokenizer.json` of a checkpoint; None when it has none. Code that a checkpoint names or brings is never run.

        Raises:
            CheckpointError: a file cannot be read, or the tokenizer has ids that the model of `model_vocab_size` has not.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            return None
        options_path = folder / "tokenizer_config.json"
        options = read_object(options_path) if options_path.exists() else {}
        tokenizer = cls(read_object(path), _spelling(options, "bos_token"), _spelling(options, "eos_token"))
        if tokenizer.vocab_size > model_vocab_size:
            raise CheckpointError(
                f"{path}: token ids go up to {tokenizer.vocab_size - 1}, but the model's vocab_size is {model_vocab_size}; "
                "they are not of the same checkpoint"
            )
        return tokenizer

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of `text`; none is added.

        Args:
            special: read spelled-out control tokens as such: for raw prompts written by hand, never for a message.

        Raises:
            RequestError: the text holds a lone surrogate.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}; remove it",
                param="prompt",
            ) from error
        # As a batch of one: unlike `encode`, `encode_batch` lets other threads run meanwhile.
        return (self._control if special else self._text).encode_batch([text], add_special_tokens=False)[0].ids

    def encode_prompt(self, text: str, add_bos: bool = True) -> list[int]:
        """Token ids of a raw prompt: control tokens written by hand count, and BOS comes first exactly once."""
        ids = self.encode(text, special=True)
        return with_bos(ids, self.bos_token_id) if add_bos else ids

    def encode_segments(self, segments: Iterable[str | SpecialToken]) -> list[int]:
        """Token ids of a prompt in which only the given `SpecialToken`s are control tokens.

        Neighbouring strings are joined first, so that it does not matter how ordinary text is cut.

        Raises:
            RequestError: the tokenizer lacks a control token.
        """
        ids: list[int] = []
        text: list[str] = []
        for segment in segments:
            if isinstance(segment, str):
                text.append(segment)
                continue
            ids += self.encode("".join(text))
            ids.append(self.special_id(segment))
            text.clear()
        return ids + self.encode("".join(text))

    def special_id(self, token: SpecialToken) -> int:
        """The id of a control token.

        Raises:
            RequestError: this tokenizer has no such token.
        """
        if token.text not in self._special_ids:
            raise RequestError(f"the model's tokenizer has no control token {token.text!r}, which the request needs")
        return self._special_ids[token.text]

    def find_special(self, token: SpecialToken) -> int | None:
        """The id of a control token; None if this tokenizer has no such token."""
        return self._special_ids.get(token.text)

    def control_ids(self) -> list[int]:
        """Ids of all control tokens."""
        return list(self._special_ids.values())

    def control_texts(self) -> list[str]:
        """Spellings of all control tokens."""
        return list(self._special_ids)

    def control_text(self, token_id: int | None) -> str:
        """The spelling of one token; empty for None."""
        return "" if token_id is None else self.token_bytes(token_id).decode()

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that are not UTF-8 become U+FFFD; ids beyond the vocabulary have no text."""
        return b"".join(self.token_bytes(i, skip_special_tokens) for i in ids).decode(errors="replace")

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """UTF-8 bytes that one token stands for: often only a part of a character."""
        if skip_special_tokens and token_id in self._skipped_ids:
            return b""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = _token_bytes(self._control.id_to_token(token_id) or "")
        return found

    def token_text(self, token_id: int) -> str:
        """A token by itself, readable: a part of a character in OpenAI's form `bytes:\\xe2\\x80`."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def vocabulary(self) -> Iterator[tuple[str, str]]:
        """Per id, from 0 on: the text that the library decodes it to, control tokens included, and its vocabulary entry."""
        for token in range(self.vocab_size):
            yield self._control.decode([token], skip_special_tokens=False), self._control.id_to_token(token) or ""

    def eos_token_ids(self, config_ids: Iterable[int]) -> list[int]:
        """Every id that ends a text: those of the model's config files and the tokenizer's own, ascending."""
        own = () if self.eos_token_id is None else (self.eos_token_id,)
        return sorted({*config_ids, *own})

    def _named(self, text: str | None, default: SpecialToken, option: str) -> int | None:
        found = self._control.token_to_id(default.text if text is None else text)
        if found is None and text is not None:
            raise CheckpointError(f"tokenizer_config.json: {option} {text!r} is not a token of tokenizer.json")
        return found


def _build(raw: dict[str, Any]) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(raw))
    except Exception as error:  # the library raises Exception itself
        raise CheckpointError(f"tokenizer.json cannot be used: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint.

    Raises:
        CheckpointError: it cannot be read, or holds something else.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not {type(raw).__name__}")
    return raw


def _spelling(options: dict[str, Any], name: str) -> str | None:
    """A token of `tokenizer_config.json`: a string, or an object with its `content`."""
    value = options.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and (not isinstance(value, str) or re.search("[\ud800-\udfff]", value)):
        raise CheckpointError(f"tokenizer_config.json: {name} must be a string of text or an object with one, not {value!r}")
    return value


def _alphabet() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary: printable Latin-1 itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES_OF = _alphabet()


def _token_bytes(token: str) -> bytes:
    """A vocabulary entry's bytes; one with a character outside the alphabet, as V4's control tokens have, is its own text."""
    if all(char in _BYTES_OF for char in token):
        return bytes(_BYTES_OF[char] for char in token)
    return token.encode()
