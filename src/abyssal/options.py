"""Options as dataclass fields: one declaration gives the Python field, the command line's `--name` and `ABYSSAL_NAME`.

A config class declares each field with `option` and calls `check_options` when built; `option_specs` lists the fields for a
command line, and `build` makes the object from given values and the environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from abyssal.elsewhere import ABSENT, HERE
from abyssal.errors import ConfigError, show

ENV_PREFIX = "ABYSSAL_"
# Variables that are no options: where tests find reference data.
OTHER_VARIABLES = ("ABYSSAL_GOLDENS",)

_BYTES = (
    {"": 1, "B": 1} | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)} | {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}
)
_FLAGS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

_MAX_INTEGER, _BELOW = 2**63 - 1, "below 2**63"
_MAX_CHARS = 100  # of a number, in a text

C = TypeVar("C")


@dataclasses.dataclass(frozen=True, slots=True)
class OptionSpec:
    """One option of a config class."""

    name: str
    type: type[str | int | float | bool]
    default: Any
    help: str
    optional: bool  # None is a value of its own: the engine decides
    choices: tuple[str, ...] | None = None
    low: float | None = None
    high: float | None = None
    above: float | None = None
    in_bytes: bool = False
    secret: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    def parse(self, text: str, source: str) -> str | int | float | bool:
        """The value that `text` means on a command line or in the environment; `source` names it in errors."""
        if self.type is str:
            return text
        if self.type is bool and text.lower() in _FLAGS:
            return _FLAGS[text.lower()]
        if len(text) > _MAX_CHARS:
            raise ConfigError(f"{source}={show(text)} has {len(text)} characters; it must be {self.wanted}")
        if self.type is int and (number := _parse_integer(text, self.in_bytes)) is not None:
            if abs(number) > _MAX_INTEGER:
                raise ConfigError(f"{source}={show(text)} must be {self.wanted}, {_BELOW}")
            return number
        if self.type is float and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text):
            return float(text)
        suffixed = self.type is int and not self.in_bytes and re.fullmatch(r"[\d.]+[kKmM]", text)  # 1000 or 1024 times?
        raise ConfigError(f"{source}={show(text)} must be {self.wanted}{', in digits only, such as 32768' if suffixed else ''}")

    @property
    def wanted(self) -> str:
        """What a value must be, for messages."""
        if self.choices is not None:
            return "one of " + ", ".join(self.choices)
        if self.in_bytes:
            return f"a number of bytes of at least {self.low}, such as 4GiB"
        kind = {str: "a non-empty string", int: "an integer", float: "a number", bool: "true or false"}[self.type]
        if self.low is not None and self.low == self.high:
            return f"{self.low}"
        limits = (("above", self.above), ("at least", self.low), ("at most", self.high))
        bounds = " and ".join(f"{word} {bound}" for word, bound in limits if bound is not None)
        return f"{kind} {bounds}".strip()

    def allows(self, value: Any) -> bool:
        """Whether a field may hold `value`."""
        if value is None:
            return self.optional
        if self.type is float:
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
                return False
        elif type(value) is not self.type:
            return False
        if self.type is str:
            return value in self.choices if self.choices is not None else bool(value.strip())
        return not (
            (self.type is int and abs(value) > _MAX_INTEGER)
            or (self.low is not None and value < self.low)
            or (self.high is not None and value > self.high)
            or (self.above is not None and value <= self.above)
        )


def option(
    default: Any,
    help: str,
    *,
    choices: Iterable[str] | None = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    in_bytes: bool = False,
    secret: bool = False,
) -> Any:
    """A dataclass field that is an option. `secret` values stay out of `repr` and messages."""
    metadata = {
        "help": help,
        "choices": None if choices is None else tuple(choices),
        "low": low,
        "high": high,
        "above": above,
        "in_bytes": in_bytes,
        "secret": secret,
    }
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


def option_specs(cls: type) -> list[OptionSpec]:
    """The options of a config class, in the order of its fields."""
    hints = typing.get_type_hints(cls)
    specs = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        (kind,) = (member for member in members if member is not type(None))
        specs.append(OptionSpec(field.name, kind, field.default, optional=type(None) in members, **field.metadata))
    return specs


def check_options(config: Any) -> None:
    """Raises `ConfigError` for the first field whose value its declaration does not allow."""
    for spec in option_specs(type(config)):
        value = getattr(config, spec.name)
        if not spec.allows(value):
            shown = "(hidden)" if spec.secret else show(value)
            limit = f", {_BELOW}" if type(value) is int and value > _MAX_INTEGER else ""
            raise ConfigError(f"{spec.name}={shown} must be {spec.wanted}{limit}" + (", or None" if spec.optional else ""))


def build(cls: type[C], given: Mapping[str, Any], env: Mapping[str, str]) -> C:
    """An object of a config class: given values first, then the environment, then the declared defaults.

    Args:
        cls: the config class.
        given: values by field name, from a command line or from Python. Text is parsed; None counts as not given.
        env: the environment. Variables of other programs are not looked at.

    Raises:
        ConfigError: a name in `given` is unknown, or a value is not allowed.
    """
    specs = {spec.name: spec for spec in option_specs(cls)}
    for name in given:
        if name not in specs:
            raise ConfigError(f"unknown option {name!r}{hint(name, specs)}")
    values = {}
    for name, spec in specs.items():
        if (value := given.get(name)) is not None:
            values[name] = spec.parse(value, name) if isinstance(value, str) else value
        elif spec.env in env:
            values[name] = spec.parse(env[spec.env], spec.env)
    return cls(**values)


def check_environment(env: Mapping[str, str], classes: Iterable[type]) -> None:
    """Raises `ConfigError` for an `ABYSSAL_` variable that is neither an option of `classes` nor otherwise known."""
    known = {spec.env for cls in classes for spec in option_specs(cls)} | set(OTHER_VARIABLES)
    for name in env:
        if name.startswith(ENV_PREFIX) and name not in known:
            raise ConfigError(f"unknown environment variable {name}{hint(name, known)}")


def hint(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """The end of a message about the unknown `name`: what it says to other engines, the closest of the `known` ones, otherwise what else
    to do, or all of them."""
    known = sorted(known)
    word, words = _word(name), {_word(other): other for other in known}
    here = HERE.get(word, word)
    if here in words:
        return f"; here it is {words[here]!r}"
    if (switch := here.removeprefix("no_")) in words:
        return f"; here it is {words[switch]}=False"
    if word in ABSENT:
        return f"; leave it out: {ABSENT[word]}"
    shown = {other.removeprefix(ENV_PREFIX): other for other in known}  # what all share says nothing
    close = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), shown, n=1)
    return f"; did you mean {shown[close[0]]!r}?" if close else f"; {otherwise or 'known: ' + ', '.join(known)}"


def _word(name: str) -> str:
    """A field's, flag's or variable's name as a field's."""
    return name.removeprefix(ENV_PREFIX).strip("-").replace("-", "_").lower()


def _parse_integer(text: str, in_bytes: bool) -> int | None:
    if in_bytes and (size := _parse_bytes(text)) is not None:
        return size
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else None


def _parse_bytes(text: str) -> int | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in _BYTES:
        return None
    if "." in match[1] and _BYTES[match[2]] == 1:
        return None  # there is no part of a byte: most likely a unit was forgotten
    return int(float(match[1]) * _BYTES[match[2]]) if "." in match[1] else int(match[1]) * _BYTES[match[2]]
