r"""Patterns of JSON schemas as regular expressions for the grammar library: over a string's characters, or over its JSON text.

A schema's pattern describes characters, and an answer spells some of them as escapes: `^"$` stands as `\"` between the quotes. Where
ECMA-262 (the schema's dialect) and Python's `re` differ, what both match is allowed, and what only one of them knows is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from functools import cache, lru_cache

Ranges = list[tuple[int, int]]  # of code points, both ends included

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_ESCAPES = {code: json.dumps(chr(code))[1:-1] for code in (*range(0x20), ord('"'), ord("\\"))}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_LINE_ENDS: Ranges = [(10, 10), (13, 13), (0x2028, 0x2029)]
_CHAR = r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\?."
_QUANTIFIER = r"[*+?]\??|\{\d+(?:,\d*)?\}\??"
_TOKEN = re.compile(rf"\(\?:|{_QUANTIFIER}|\{{,\d*\}}|\[\^?+(?!\])(?:\\.|[^\]\\])+\]|{_CHAR}", re.DOTALL)


class PatternError(ValueError):
    """Why a pattern cannot be held to."""


def grammar_regex(pattern: str, in_json: bool) -> str:
    """The grammar library's regular expression for strings that `pattern` matches from end to end.

    Args:
        in_json: match the JSON text between a string's quotes, not its characters.

    Raises:
        PatternError: it is no pattern, or one that a grammar cannot hold to.
    """
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternError(f"it is no regular expression: {error}") from error
    tokens = ["(" if token == "(?:" else token for token in _TOKEN.findall(pattern)]
    _check_anchors(tokens)
    out = []
    for before, token in zip(["", *tokens], tokens, strict=False):
        if token in ("(", ")", "|"):
            out.append("(?:" if token == "(" else token)
        elif _is_quantifier(token):
            if before == "(" or _is_quantifier(before):
                raise PatternError("structured output knows no lookaround, named group, flag or possessive quantifier")
            out.append(token[:-1] if len(token) > 1 and token[-1] == "?" else token)
        elif token not in ("^", "$"):
            out.append(_spelled(token, in_json))
    return "".join(out)


def other_names(names: Collection[str]) -> str:
    """What the grammar library must match for the JSON text of a name without escapes that is none of `names`."""
    heads: dict[str, list[str]] = {}
    for name in names:
        if name and ord(name[0]) not in _ESCAPES:
            heads.setdefault(name[0], []).append(name[1:])
    reserved = [*((code, code) for code in _ESCAPES), _SURROGATES]
    first = _class(_without([*reserved, *((ord(char),) * 2 for char in heads)]))
    parts = [
        f"{first}{_class(_without(reserved))}*",
        *(_class([(ord(char),) * 2]) + other_names(rest) for char, rest in heads.items()),
    ]
    return f"(?:{'|'.join(parts)}){'' if '' in names else '?'}"


def _is_quantifier(token: str) -> bool:
    return re.fullmatch(_QUANTIFIER, token) is not None


def _check_anchors(tokens: list[str]) -> None:
    """Refuse `^` and `$` where the string cannot begin or end, and in groups that repeat."""
    for anchor, opening, closing, order in (("^", "(", ")", tokens), ("$", ")", "(", tokens[::-1])):
        at_edge, num_anchors = True, 0
        groups = [(True, 0)]  # of open groups: whether they begin at the edge; anchors before them
        for token, after in zip(order, [*order[1:], ""], strict=False):
            if token == anchor:
                num_anchors += 1
                if not at_edge:
                    raise PatternError(f"structured output knows {anchor} only where the string begins or ends")
            elif token == opening:
                groups.append((at_edge, num_anchors))
            elif token == "|":
                at_edge = groups[-1][0]
            else:
                at_edge = False
                if token == closing and groups.pop()[1] < num_anchors and closing == ")" and _is_quantifier(after):
                    raise PatternError("structured output knows no anchor in a group that repeats")


@lru_cache(4096)
def _spelled(token: str, in_json: bool) -> str:
    """A regular expression for the characters that a token of a pattern stands for."""
    others = _without(_characters(token))
    escaped = [(code, code) for code in _ESCAPES] if in_json else []
    parts = []
    if plain := _without([*others, *escaped, _SURROGATES]):
        parts.append(_class(plain))
    no_escapes = {code for low, high in others for code in range(low, min(high, max(_ESCAPES)) + 1)}
    escapes = [_ESCAPES[code] for code, _ in escaped if code not in no_escapes]
    if short := [(ord(escape[1]),) * 2 for escape in escapes if len(escape) == 2]:
        parts.append(r"\\" + _class(short))
    # control characters without a short escape stand only where nothing else can: with them, repeated classes compile ten times slower
    if not parts and (long := [escape[2:] for escape in escapes if len(escape) > 2]):
        parts.append(rf"\\u(?:{'|'.join(long)})")
    if not parts:
        raise PatternError(f"{token!r} stands for no character")
    return parts[0] if parts[0][0] == "[" and len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _class(chars: Ranges) -> str:
    return "[" + "".join(rf"\u{{{low:x}}}-\u{{{high:x}}}" for low, high in chars) + "]"


def _characters(token: str) -> Ranges:
    if token == ".":
        return _without(_LINE_ENDS)
    if token == "[":
        raise PatternError("an empty class, or one that begins with ], differs between dialects; write \\] instead")
    if token[0] != "[":
        return _named(token[1])[0] if _is_named(token) else [(_code(token, in_class=False),) * 2]
    is_negated = token[1] == "^"
    chars: Ranges = []
    for first, last in re.findall(rf"({_CHAR})(?:-({_CHAR}))?", token[1 + is_negated : -1], re.DOTALL):
        chars += _named(first[1])[is_negated] if _is_named(first) else [(_code(first), _code(last or first))]
    return _without(chars) if is_negated else chars


def _is_named(char: str) -> bool:
    return re.fullmatch(r"\\[dDsSwW]", char) is not None


@cache
def _named(letter: str) -> tuple[Ranges, Ranges]:
    """What `\\d` and its like surely match, and what they may match: all of Unicode in one dialect, ASCII in the other."""
    if letter.isupper():
        surely, maybe = _named(letter.lower())
        return _without(maybe), _without(surely)
    if letter == "w":  # of other characters too many to list
        surely = [(ord("0"), ord("9")), (ord("A"), ord("Z")), (ord("_"), ord("_")), (ord("a"), ord("z"))]
        return surely, [*surely, (0x80, _LAST)]
    everything = "".join(map(chr, range(_LAST + 1)))
    surely, maybe = (
        [(found.start(), found.end() - 1) for found in re.finditer(rf"\{letter}+", everything, flags)] for flags in (re.ASCII, 0)
    )
    return surely, [*maybe, (0xFEFF, 0xFEFF)] if letter == "s" else maybe


def _code(char: str, in_class: bool = True) -> int:
    if len(char) == 1:
        return ord(char)
    if char == r"\b" and in_class:
        return 8
    if char[1:] in _CONTROLS:
        return _CONTROLS[char[1:]]
    escape = char[2:]
    if char[0] == "\\" and escape:
        return int(escape, 16)
    if char[0] == "\\" and not char[1].isalnum():
        return ord(char[1])
    raise PatternError(f"structured output does not know {char!r} in a pattern")


def _without(gone: Ranges) -> Ranges:
    """All other code points, in order."""
    rest, start = [], 0
    for low, high in sorted(gone):
        if low > start:
            rest.append((start, low - 1))
        start = max(start, high + 1)
    return [*rest, (start, _LAST)] if start <= _LAST else rest
