"""Which JSON schemas structured output can hold to. The grammar library leaves out what it does not know; here it is refused by path.

A schema that passes gives answers that validate: what the grammar allows is at most what the schema allows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NoReturn
from urllib.parse import unquote

from abyssal.errors import RequestError, shorten, show
from abyssal.serve.json_pattern import PatternError, grammar_regex

MAX_DEPTH = 64  # schemas within schemas
MAX_SCHEMAS = 5_000
MAX_VALUES = 5_000  # of all enums together
MAX_VALUE_CHARS = 500_000  # of all enums and constants together, as JSON: those of a oneOf are compared with each other
MAX_ONE_OF = 64  # alternatives of a oneOf: each is compared with each
MAX_COUNT = 10_000  # of minLength and its like: the grammar counts in states
MAX_PATTERNS = 10_000  # characters of all patterns together
MAX_NAME = 256  # characters of properties that others must differ from
MAX_INTEGER = 2**63 - 1  # of bounds
MAX_MULTIPLE = 100  # of multipleOf: the grammar has a state for each remainder
NUMBER_DIGITS = 6  # behind the point, of numbers within bounds

TYPES = {"string": str, "integer": int, "number": int | float, "boolean": bool, "null": type(None), "object": dict, "array": list}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_KEYWORDS = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": BOUNDS,
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties", "propertyNames", "minProperties", "maxProperties"),
}
_FORMATS = (  # that the grammar knows
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference", "uri-template", "uuid",
    "json-pointer", "relative-json-pointer",
)  # fmt: skip
_UNSUPPORTED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies",
    "patternProperties", "unevaluatedItems", "additionalItems", "$dynamicRef", "$recursiveRef", "$anchor",
)  # fmt: skip
_CONSTRAINTS = frozenset((
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "properties", "required", "additionalProperties", "propertyNames",
    "items", "prefixItems", "uniqueItems", "pattern", "multipleOf", "unevaluatedProperties", *BOUNDS, *_COUNTS, *_UNSUPPORTED,
))  # fmt: skip

Schema = dict[str, Any] | bool


def check_schema(schema: Schema, where: str) -> None:
    """Refuse what the grammar cannot hold to.

    Args:
        where: the request's field that holds the schema.

    Raises:
        RequestError: its `param` is the path in the schema.
    """
    todo: list[tuple[Any, str, int]] = [(schema, where, 1)]
    passed: list[tuple[dict[str, Any], str]] = []
    num_schemas = num_values = num_value_chars = num_chars = 0
    references: set[str] = set()
    while todo:
        node, path, depth = todo.pop()
        num_schemas += 1
        if depth > MAX_DEPTH:
            _refuse(path, f"schemas may be nested {MAX_DEPTH} deep")
        if num_schemas > MAX_SCHEMAS:
            _refuse(where, f"a schema may hold at most {MAX_SCHEMAS} schemas")
        if node is True:
            continue
        if not isinstance(node, dict):
            _refuse(path, f"{show(node)} is no schema that a value can follow")
        num_values += len(node["enum"]) if isinstance(node.get("enum"), list) else 0
        num_chars += len(node["pattern"]) if isinstance(node.get("pattern"), str) else 0
        if num_chars > MAX_PATTERNS:
            _refuse(f"{path}.pattern", f"the patterns of a schema may have {MAX_PATTERNS} characters together")
        inner = [(child, child_path, depth + 1) for child, child_path in children(node, path)]
        if num_values <= MAX_VALUES:
            num_value_chars += _check_node(node, path, schema)
            num_values += len(multiples(node))
            passed.append((node, path))
        if num_values > MAX_VALUES:
            _refuse(path, f"a schema may list at most {MAX_VALUES} values")
        if num_value_chars > MAX_VALUE_CHARS:
            _refuse(path, f"the values that a schema lists may have {MAX_VALUE_CHARS} characters together, as JSON")
        todo += inner
        if "$ref" in node and node["$ref"] not in references:
            references.add(node["$ref"])
            todo.append((deref(node, schema), f"{path}.$ref", 1))
    for node, path in passed:
        _check_relations(node, path, schema)


def children(node: dict[str, Any], path: str) -> Iterator[tuple[Any, str]]:
    """Schemas directly within a schema, with their paths.

    Raises:
        RequestError: a place for schemas holds something else.
    """
    for key in ("properties", "$defs", "definitions"):
        table = node.get(key)
        if not isinstance(table, dict | None):
            _refuse(f"{path}.{key}", "must be an object of schemas")
        for name, child in (table or {}).items():
            yield child, f"{path}.{key}.{name}"
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        entries = node.get(key)
        if entries is None:
            continue
        if not isinstance(entries, list) or not entries:
            _refuse(f"{path}.{key}", "must be a non-empty list of schemas")
        for i, child in enumerate(entries):
            yield child, f"{path}.{key}[{i}]"
    for key in ("items", "additionalProperties", "propertyNames"):
        if node.get(key) not in (None, False):
            yield node[key], f"{path}.{key}"


def types_of(schemas: Sequence[Schema], root: Schema) -> set[str]:
    """JSON types that values of these checked schemas can have, as far as they say so; all of them otherwise.

    Alternatives may lead to the same ones again and again: each is looked at once.
    """
    types: set[str] = set()
    seen: set[int] = set()
    todo = list(schemas)
    while todo:
        node = deref(todo.pop(), root)
        if id(node) in seen:
            continue
        seen.add(id(node))
        if not isinstance(node, dict):
            return set(TYPES)
        if "type" in node:
            named = node["type"]
            types |= {named} if isinstance(named, str) else set(named)
        elif "const" in node or "enum" in node:
            values = [node["const"]] if "const" in node else node["enum"]
            types |= {name for name in TYPES for value in values if _is_of(value, name)}
        elif alternatives := [child for key in ("anyOf", "oneOf", "allOf") for child in node.get(key) or ()]:
            todo += alternatives
        else:
            return set(TYPES)
    return types


def deref(node: Any, root: Schema) -> Any:
    """The schema that `$ref` leads to; None where it leads nowhere, or by way of more than MAX_DEPTH others."""
    seen: set[str] = set()
    while isinstance(node, dict) and "$ref" in node:
        reference = node["$ref"]
        if not isinstance(reference, str) or len(seen) > MAX_DEPTH or reference in seen or not re.match(r"#(/|$)", reference):
            return None
        seen.add(reference)
        node = root
        for step in unquote(reference)[2:].split("/") if len(reference) > 1 else []:
            step = step.replace("~1", "/").replace("~0", "~")
            node = node.get(step) if isinstance(node, dict) else None
    return node


def types_named(node: dict[str, Any]) -> list[str]:
    """Types of a schema's own `type`, else those that its keywords speak of; none where neither says anything."""
    named = node.get("type") or []
    types = [named] if isinstance(named, str) else named
    if not types and not any(key in node for key in ("enum", "const", "anyOf", "oneOf", "allOf", "$ref")):
        types = [name for name, keywords in _KEYWORDS.items() if any(keyword in node for keyword in keywords)]
    return [name for name in types if name != "integer" or "number" not in types]


def bounds(node: dict[str, Any], scale: int = 1) -> tuple[int | None, int | None]:
    """Least and greatest multiple of 1 / `scale`, in such units, that a schema's bounds allow; None = 64 bits are no bound to it."""

    def given(name: str) -> list[Fraction]:
        return [Fraction(str(node[name])) * scale] if name in node else []

    lows = [*map(math.ceil, given("minimum")), *(math.floor(value) + 1 for value in given("exclusiveMinimum"))]
    highs = [*map(math.floor, given("maximum")), *(math.ceil(value) - 1 for value in given("exclusiveMaximum"))]
    most = MAX_INTEGER * scale
    return max(-most, *lows) if lows else None, min(most, *highs) if highs else None


def multiples(node: dict[str, Any]) -> range:
    """Values of an integer schema with both bounds and multipleOf; none of another."""
    low, high = bounds(node) if "multipleOf" in node else (None, None)
    if low is None or high is None:
        return range(0)
    step = int(node["multipleOf"])
    return range(-(-low // step) * step, high + 1, step)


def _check_node(node: dict[str, Any], path: str, root: Schema) -> int:
    """One schema by itself; how many characters the values that it lists have as JSON."""
    for name in _UNSUPPORTED:
        if name in node:
            _refuse(f"{path}.{name}", "structured output cannot hold to it; leave it out")
    if node.get("uniqueItems"):
        _refuse(f"{path}.uniqueItems", "structured output cannot hold to it; leave it out")
    _check_type(node, path)
    _check_counts(node, path)
    _check_numbers(node, path)
    _check_string(node, path)
    num_chars = _check_values(node, path)
    _check_siblings(node, path, root)
    _check_object(node, path)
    _check_array(node, path)
    return num_chars


def _check_type(node: dict[str, Any], path: str) -> None:
    named = node.get("type")
    names = [named] if isinstance(named, str) else named
    if named is not None and (not isinstance(names, list) or not names or any(name not in list(TYPES) for name in names)):
        _refuse(f"{path}.type", f"{show(named)} is not one of {', '.join(TYPES)}, or a list of these")


def _check_counts(node: dict[str, Any], path: str) -> None:
    for name in _COUNTS:
        if name in node and (type(node[name]) is not int or not 0 <= node[name] <= MAX_COUNT):
            _refuse(f"{path}.{name}", f"{show(node[name])} must be an integer from 0 to {MAX_COUNT}")
    for what in ("Length", "Items", "Properties"):
        if node.get(f"min{what}", 0) > node.get(f"max{what}", MAX_COUNT):
            _refuse(f"{path}.min{what}", f"is above max{what}")


def _check_numbers(node: dict[str, Any], path: str) -> None:
    for name in BOUNDS:
        value = node.get(name, 0)
        if type(value) is not int and not (type(value) is float and math.isfinite(value)):
            _refuse(f"{path}.{name}", f"{show(node[name])} must be a number")
    types = types_named(node)
    what, scale = (
        ("integer", 1) if "integer" in types else (f"number of {NUMBER_DIGITS} digits behind the point", 10**NUMBER_DIGITS)
    )
    low, high = bounds(node, scale)
    lower = "exclusiveMinimum" if "minimum" not in node else "minimum"
    upper = "exclusiveMaximum" if "maximum" not in node else "maximum"
    if low is not None and low > MAX_INTEGER * scale:
        _refuse(f"{path}.{lower}", f"{show(node[lower])} is above {MAX_INTEGER}, the most that a bound can be")
    if high is not None and high < -MAX_INTEGER * scale:
        _refuse(f"{path}.{upper}", f"{show(node[upper])} is below {-MAX_INTEGER}, the least that a bound can be")
    if low is not None and high is not None and low > high:
        _refuse(
            f"{path}.{lower}",
            f"{show(node[lower])} leaves no {what} up to {upper}; widen the range or choose another unit",
        )
    if "multipleOf" not in node:
        return
    where, step = f"{path}.multipleOf", node["multipleOf"]
    if types != ["integer"]:
        _refuse(where, "structured output holds to it with type integer only")
    if type(step) is not int or not 1 <= step <= MAX_MULTIPLE:
        _refuse(where, f"{show(step)} must be an integer from 1 to {MAX_MULTIPLE}")
    if low is None and high is None:
        return
    if low is None or high is None:
        _refuse(where, "structured output holds to it with a minimum and a maximum, or neither; give both")
    if (high - low) // step >= MAX_VALUES or not multiples(node):
        _refuse(where, f"there must be from 1 to {MAX_VALUES} multiples within minimum and maximum; change the range")


def _check_string(node: dict[str, Any], path: str) -> None:
    has_length = "minLength" in node or "maxLength" in node
    if "pattern" not in node:
        if has_length and node.get("format") in _FORMATS:
            _refuse(f"{path}.format", "structured output cannot hold to it together with a length; write both as a pattern")
        return
    pattern = node["pattern"]
    if not isinstance(pattern, str):
        _refuse(f"{path}.pattern", "must be a regular expression")
    try:
        grammar_regex(pattern, in_json=True)
    except PatternError as error:
        _refuse(f"{path}.pattern", f"{show(pattern)}: {error}")
    if has_length or "format" in node:
        _refuse(
            f"{path}.pattern",
            "structured output cannot hold to a pattern together with a length or format; write it all as a pattern",
        )


def _check_values(node: dict[str, Any], path: str) -> int:
    num_chars = 0
    if "enum" in node and (not isinstance(node["enum"], list) or not node["enum"]):
        _refuse(f"{path}.enum", "must be a non-empty list")
    for key in ("enum", "const"):
        if key not in node:
            continue
        _refuse_siblings(node, path, key, {"type"})
        values = [node["const"]] if key == "const" else node["enum"]
        names = [node["type"]] if isinstance(node.get("type"), str) else node.get("type") or TYPES
        if any(not any(_is_of(value, name) for name in names) for value in values):
            _refuse(f"{path}.{key}", "holds a value that is not of the schema's type")
        try:
            num_chars += len(json.dumps(values, allow_nan=False))
        except (ValueError, RecursionError):
            _refuse(f"{path}.{key}", "holds a number beyond 64-bit floats, or a value nested too deeply")
    return num_chars


def _check_siblings(node: dict[str, Any], path: str, root: Schema) -> None:
    if "$ref" in node:
        _refuse_siblings(node, path, "$ref", set())
        if not isinstance(deref(node, root), dict | bool):
            _refuse(f"{path}.$ref", f"{show(node['$ref'])} leads to no schema within this one")
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(node.get(key), list):
            _refuse_siblings(node, path, key, {"type"})
    if len(node.get("allOf") or ()) > 1:
        _refuse(f"{path}.allOf", "structured output cannot hold to several schemas at once; write them as one")
    if len(node.get("oneOf") or ()) > MAX_ONE_OF:
        _refuse(f"{path}.oneOf", f"may have at most {MAX_ONE_OF} alternatives; use anyOf")


def _check_relations(node: dict[str, Any], path: str, root: Schema) -> None:
    """One schema beside those within it, which have passed by themselves."""
    for key in ("anyOf", "oneOf", "allOf"):
        entries = node.get(key) or []
        if "type" in node and entries and not types_of(entries, root) <= types_of([{"type": node["type"]}], root):
            _refuse(f"{path}.type", f"structured output cannot hold to it beside {key}; give each alternative its type")
    entries = node.get("oneOf") or []
    types = [types_of([entry], root) for entry in entries]
    for i, one in enumerate(entries):
        if not all(_are_apart(one, entries[j], types[i], types[j], root) for j in range(i)):
            _refuse(
                f"{path}.oneOf[{i}]",
                "may hold together with an earlier alternative; use anyOf, or give each a type or const of its own",
            )
    if not _is_text(node.get("propertyNames", True), root):
        _refuse(f"{path}.propertyNames", "must be a schema of strings; give it type string")


def _are_apart(one: Schema, other: Schema, types: set[str], others: set[str], root: Schema) -> bool:
    """Whether no value can follow both, as far as their types and required constants tell."""
    common = types & others
    one, other = deref(one, root), deref(other, root)
    if (mine := _constants(one)) is not None and (theirs := _constants(other)) is not None:
        return not mine & theirs
    if ("integer" in types and "number" in others) or ("number" in types and "integer" in others):
        return False
    if not common:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    if common != {"object"}:
        return False
    shared = set(one.get("required") or ()) & set(other.get("required") or ())
    tables = (one.get("properties") or {}, other.get("properties") or {})
    for name in shared:
        mine, theirs = (_constants(deref(table.get(name), root)) for table in tables)
        if mine is not None and theirs is not None and not mine & theirs:
            return True
    return False


def _constants(node: Any) -> set[Any] | None:
    """The values that a schema lists, so that equal ones are equal: 1 is 1.0, and not true."""
    if not isinstance(node, dict) or not ("const" in node or isinstance(node.get("enum"), list)):
        return None
    values = [node["const"]] if "const" in node else node["enum"]
    return {(v if type(v) in (int, float) else json.dumps(v, sort_keys=True)) for v in values}


def _check_object(node: dict[str, Any], path: str) -> None:
    required = node.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        _refuse(f"{path}.required", "must be a list of names")
    for name in required:
        if name not in (node.get("properties") or {}):
            _refuse(f"{path}.required", f"names {show(name)}, which is not in properties")
    if node.get("unevaluatedProperties") not in (None, False):
        _refuse(f"{path}.unevaluatedProperties", "must be false, or left out")
    named, least = node.get("properties") or {}, len(set(required))
    if node.get("maxProperties", MAX_COUNT) < least:
        _refuse(f"{path}.maxProperties", f"is less than the {least} properties that are required")
    if node.get("additionalProperties", "properties" not in node) is False:
        if node.get("minProperties", 0) > len(named):
            _refuse(f"{path}.minProperties", f"is more than the {len(named)} properties that there may be")
    elif named and max(map(len, named)) > MAX_NAME:
        _refuse(f"{path}.properties", f"names may have {MAX_NAME} characters at most where there may be other properties")
    elif node.get("minProperties", 0) > least + 1:  # what comes beside them may be one property, written several times
        _refuse(
            f"{path}.minProperties",
            f"structured output cannot keep names from repeating, so it may be {least + 1} at most; "
            "or name the properties in properties, with additionalProperties false",
        )
    if (names := node.get("propertyNames", True)) is not True:
        if named:
            _refuse(f"{path}.propertyNames", "structured output cannot hold to it beside properties; leave it or them out")
        if not isinstance(names, dict):
            _refuse(f"{path}.propertyNames", "must be a schema of strings; give it type string")


def _is_text(names: Schema, root: Schema) -> bool:
    """Whether a schema says that its values are strings, or nothing about them."""
    node = deref(names, root)
    if not isinstance(node, dict) or not node.keys() & {*_CONSTRAINTS, "format"}:
        return True
    return types_named(node) == ["string"] or types_of([node], root) == {"string"}


def _check_array(node: dict[str, Any], path: str) -> None:
    if isinstance(node.get("items"), list):
        _refuse(f"{path}.items", "must be one schema; use prefixItems for a list of them")
    most = len(node.get("prefixItems") or ())
    if node.get("items", "prefixItems" not in node) is False and node.get("minItems", 0) > most:
        _refuse(f"{path}.minItems", f"is more than the {most} items that there may be; give the others a schema in items")


def _refuse_siblings(node: dict[str, Any], path: str, key: str, allowed: set[str]) -> None:
    for other in node.keys() & _CONSTRAINTS - {key} - allowed:
        _refuse(
            f"{path}.{other}", f"structured output cannot hold to it beside {key}; put it into the schemas that {key} leads to"
        )


def _is_of(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES[name])


def _refuse(path: str, why: str) -> NoReturn:
    raise RequestError(f"{shorten(path)}: {why}", param=path)
