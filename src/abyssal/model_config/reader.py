"""A strict reader of JSON objects: typed access, bounds, and an error for every key that nothing reads."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

from abyssal.errors import ConfigError
from abyssal.options import hint

# Bounds of every number that states no closer one. Sizes, counts and positions are int32 on the device. What multiplies or divides
# activations is far beyond any model there, and still finite in fp32 when squared beside it.
MAX_INTEGER = 2**31 - 1
MIN_NUMBER, MAX_NUMBER = 1e-30, 1e12


class Section:
    """One JSON object of a model's config.

    Every getter marks its key as read; `finish` refuses what is left. JSON `null` counts as not given.

    Args:
        values: the object.
        where: how messages call it, such as "config.json" or "config.json: rope_scaling".
    """

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise ConfigError(f"{where} must be a JSON object, found {reprlib.repr(values)}")
        self._values = values
        self._read: set[str] = set()
        self.where = where

    def given(self, name: str) -> bool:
        """Whether `name` is present and not null."""
        self._read.add(name)
        return self._values.get(name) is not None

    def says_null(self, name: str) -> bool:
        self._read.add(name)
        return name in self._values and self._values[name] is None

    def values(self) -> dict[str, Any]:
        return self._values

    def raw(self, name: str) -> Any:
        """The value of a required key, unchecked."""
        if not self.given(name):
            state = "null" if name in self._values else "missing"
            raise ConfigError(f"{self.where}: required key {name!r} is {state}; nothing is assumed in its place")
        return self._values[name]

    def fail(self, name: str, problem: str) -> ConfigError:
        """The error to raise about `name`: says where, which key, which value and what is wrong."""
        return ConfigError(f"{self.where}: {name}={reprlib.repr(self._values.get(name))} {problem}")

    def integer(self, name: str, low: int = 1, high: int = MAX_INTEGER) -> int:
        value = self.raw(name)
        if not _is_integer(value, low, high):
            raise self.fail(name, f"must be an integer from {low} to {high}")
        return value

    def number(self, name: str, above: float = 0.0, high: float = MAX_NUMBER, or_equal: bool = False) -> float:
        value = self.raw(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value < math.inf:
            raise self.fail(name, "must be a finite number")
        if not (above < value <= high or (or_equal and value == above)):
            raise self.fail(name, f"must be {'at least' if or_equal else 'above'} {above:g} and at most {high:g}")
        if 0 < value < MIN_NUMBER:
            raise self.fail(name, f"is too near to 0: it must be at least {MIN_NUMBER:g}")
        return float(value)

    def integers(self, name: str, low: int = 0, high: int = MAX_INTEGER) -> tuple[int, ...]:
        value = self.raw(name)
        if not isinstance(value, list | tuple) or not all(_is_integer(item, low, high) for item in value):
            raise self.fail(name, f"must be a list of integers, each from {low} to {high}")
        return tuple(value)

    def text(self, name: str, choices: Iterable[str]) -> str:
        value, choices = self.raw(name), tuple(choices)
        if not isinstance(value, str) or value not in choices:
            raise self.fail(name, f"is not supported; supported: {', '.join(choices)}")
        return value

    def texts(self, name: str, choices: Iterable[str]) -> tuple[str, ...]:
        value, choices = self.raw(name), tuple(choices)
        bad = [item for item in value if item not in choices] if isinstance(value, list | tuple) else [value]
        if bad:
            raise ConfigError(f"{self.where}: {name} holds {bad[0]!r}; each entry must be one of {', '.join(choices)}")
        return tuple(value)

    def section(self, name: str) -> Section:
        return Section(self.raw(name), f"{self.where}: {name}")

    def require(self, name: str, allowed: Sequence[Any]) -> None:
        """Refuses a key whose value is not one of `allowed`; an absent key means the first of them."""
        if self.given(name) and not any(_same(self._values[name], value) for value in allowed):
            raise self.fail(name, f"is not supported; only {' or '.join(repr(value) for value in allowed)} is")

    def ignore(self, names: Iterable[str]) -> None:
        """Accepts keys that do not change what the model computes."""
        self._read.update(names)

    def finish(self, known: Iterable[str] = ()) -> None:
        """Raises for keys that nothing read, with the closest known name."""
        unread = [name for name in self._values if name not in self._read]
        if not unread:
            return
        remedy = hint(unread[0], self._read | set(known), "remove it if it does not change the model")
        others = f" (also unknown: {', '.join(unread[1:5])})" if len(unread) > 1 else ""
        raise ConfigError(f"{self.where}: unknown key {unread[0]!r}{remedy}{others}")


def rename(values: Any, aliases: dict[str, str], where: str) -> dict[str, Any]:
    """The same object under one spelling; null gives way to a value, two different values are refused."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must be a JSON object, found {reprlib.repr(values)}")
    renamed: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for name, value in values.items():
        target = aliases.get(str(name), str(name))
        if renamed.get(target) is not None and value is None:
            continue
        if renamed.get(target) is not None and not _same(renamed[target], value):
            earlier = f"{spelled[target]}={reprlib.repr(renamed[target])}"
            raise ConfigError(f"{where}: {earlier} and {name}={reprlib.repr(value)} contradict each other; keep one of them")
        renamed[target], spelled[target] = value, name
    return renamed


def merge(outer: dict[str, Any], inner: dict[str, Any], where: str) -> dict[str, Any]:
    """One object of both; null gives way to a value, two different values are refused."""
    merged = dict(outer)
    for name, value in inner.items():
        if value is None and merged.get(name) is not None:
            continue
        if merged.get(name) is not None and not _same(merged[name], value):
            values = f"{reprlib.repr(merged[name])} and {reprlib.repr(value)}"
            raise ConfigError(f"{where}: {name} is given twice, as {values}; keep one of them")
        merged[name] = value
    return merged


def _is_integer(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _same(left: Any, right: Any) -> bool:
    # True == 1 in Python; a flag is no number here.
    return left == right and isinstance(left, bool) == isinstance(right, bool)
