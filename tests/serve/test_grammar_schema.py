"""Whatever a grammar lets through is JSON that its schema accepts: random answers to schemas that pass the check."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from abyssal.errors import RequestError
from abyssal.serve.json_pattern import grammar_regex
from abyssal.serve.json_schema import check_schema
from tests.support.grammars import compiled, json_grammar, walk

ONE: dict[str, Any] = {"const": 1}
AB = {"a": ONE, "ab": ONE, "é": ONE, 'q"': ONE, "\n": ONE, "": ONE}
DEFS = {"a/b~c d": ONE, "a/b~c%20d": {"const": 2}}


def table(**more: Any) -> dict[str, Any]:
    return {"type": "object", **more}


SCHEMAS: list[Any] = [
    {"type": "number", "minimum": 0.12345649, "maximum": 0.5}, {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1.5e-6},
    {"type": "number", "minimum": -1e-9, "maximum": 1e-9}, {"type": "number", "minimum": 1e18}, {"type": "number", "maximum": 1e300},
    {"type": "number", "exclusiveMinimum": -0.0000015, "maximum": -0.0000005}, {"type": ["number", "integer"], "minimum": 1.2, "maximum": 1.3},
    {"type": "integer", "minimum": 1.2, "maximum": 3.7}, {"type": "integer", "exclusiveMinimum": 1.0, "exclusiveMaximum": 3}, {"type": "integer", "minimum": 2**63 - 1},
    {"type": "integer", "minimum": -(10**30), "maximum": 10**30}, {"type": ["integer", "null"], "minimum": -0.5, "maximum": 0.5}, {"type": "integer", "maximum": -(2**63) + 1},
    {"type": "integer", "multipleOf": 7, "minimum": 8, "maximum": 30_000}, {"type": "integer", "multipleOf": 100}, {"minimum": 3}, {"maxLength": 2}, {"pattern": "^b$"},
    {"minItems": 1, "items": ONE}, {"minProperties": 1}, {"minimum": 3, "maxLength": 1}, {"format": "date"}, {"type": "string", "format": "password", "maxLength": 2},
    {"type": "string", "minLength": 1, "maxLength": 3}, {"type": "array", "items": {"type": "string", "minLength": 2, "maxLength": 2}, "minItems": 5, "maxItems": 5},
    {"enum": ['"', "\\", "\n\t\x00\x1f\x7f", "é😀\u2028", '", json_string=true)', 'x ::= Regex("a", json_string=true)', r'[^\"\\\r\n]']},
    table(properties=AB), table(properties=AB, additionalProperties={"const": 2}), table(properties=AB, additionalProperties=True, required=["ab"], minProperties=2),
    table(properties={"a": ONE, "b": ONE}, additionalProperties={"type": "string", "pattern": '^"$'}, maxProperties=2, minProperties=1),
    table(properties={"a": ONE, "b": ONE}, additionalProperties=False, minProperties=2), table(additionalProperties=ONE, minProperties=1, maxProperties=2),
    table(propertyNames={"pattern": '^["\\\\\n]$'}, additionalProperties=ONE), table(propertyNames={"enum": ["x", 'y"\n']}, minProperties=1, additionalProperties=ONE),
    table(propertyNames={"maxLength": 2}, minProperties=1, additionalProperties=ONE), table(propertyNames=True, minProperties=1, additionalProperties=ONE),
    table(propertyNames={"$ref": "#/$defs/n"}, **{"$defs": {"n": {"pattern": '^"+$'}}}, minProperties=1, additionalProperties=ONE), table(maxProperties=0), table(maxProperties=2),
    table(propertyNames={"pattern": "^a$"}, additionalProperties=False), {"type": "array", "minItems": 1, "maxItems": 2}, {"prefixItems": [True, ONE], "minItems": 1},
    {"prefixItems": [ONE, ONE], "maxItems": 1}, {"prefixItems": [ONE], "maxItems": 0}, {"$ref": "#/$defs/a~1b~0c%20d", "$defs": DEFS}, {"$ref": "#/$defs/a~1b~0c%2520d", "$defs": DEFS}, {"$ref": "#/x/y", "x": {"y": {"pattern": '^"$'}}},
]  # fmt: skip


def check_answers(schema: Any, count: int, max_tokens: int) -> int:
    """Ask for answers and validate those that come to their end. How many do."""
    check_schema(schema, "s")
    grammar = json_grammar(schema)
    answers = [answer for seed in range(count) if (answer := walk(grammar, seed, max_tokens)) is not None]
    for answer in answers:
        jsonschema.Draft202012Validator(schema).validate(json.loads(answer))
    return len(answers)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_answers_validate(schema: Any) -> None:
    assert check_answers(schema, 12, 300)


NUMBERS = st.sampled_from(
    [0, 1, -1, 1.5, -2.25, 1e-7, 3e-6, 0.1234567, 10**6, 99.999999, -0.0000004, 123456789.123, 1e17, 12345678901234.56]
)
COUNTS = st.integers(0, 3)
TYPES = st.sampled_from(
    ["string", "number", "integer", "object", "array", ["integer", "null"], ["number", "string"], ["boolean", "array"]]
)


def soup(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas of a few keywords each, whatever they belong to."""
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": TYPES, "enum": st.just([1, 'a"', None, {"q": [1]}]), "pattern": st.sampled_from(['^"$', '[^"]', r"\s"]), "minItems": COUNTS, "maxItems": COUNTS, "minLength": COUNTS,
        "maxLength": COUNTS, "minProperties": COUNTS, "maxProperties": COUNTS, "minimum": NUMBERS, "maximum": NUMBERS, "exclusiveMinimum": NUMBERS, "exclusiveMaximum": NUMBERS,
        "multipleOf": st.sampled_from([1, 3, 50]), "items": inner | st.just(False), "prefixItems": st.lists(inner, min_size=1, max_size=2), "additionalProperties": inner | st.just(False),
        "properties": st.dictionaries(st.sampled_from(list(AB)), inner, max_size=3), "propertyNames": st.sampled_from([True, {"pattern": '["]'}, {"maxLength": 1}, {"enum": ["a", "\n"]}]),
    }  # fmt: skip
    return st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: keywords[name] for name in names})
    )


@settings(max_examples=150, deadline=None)
@given(st.recursive(st.sampled_from([True, {}, ONE, {"type": "string"}]), soup, max_leaves=4))
def test_answers_to_any_keywords_validate(schema: Any) -> None:
    try:
        check_schema(schema, "s")
    except RequestError:
        return
    check_answers(schema, 3, 100)


LITERALS = st.sampled_from(
    ['"', r"\\", "\n", "\t", "\x00", r"\n", r"\x1f", r"\u0022", r"\x5c", "a", "é", "😀", r"\.", "/", r"\/", "{", "]"]
)
CLASSES = st.sampled_from([
    ".", r"\s", r"\S", r"\w", r"\W", r"\d", r"\D", '["]', r"[\\]", r'["\\\n]', '[^"]', r"[^\\]", r"[^\s\S\d]", r"[^\w]", r"[^\W]", r"[\D\s]", r"[^\S]", "[ -~]",
    r"[\x00-\x1f]", r"[\b\t]", r"[\s\S]", r'[a-c"-]', r"[^\n-\r]", "[é-😀]", r"[\]\[^]", "[^^]",
])  # fmt: skip
PATTERNS = st.recursive(
    LITERALS | CLASSES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{0,2}?", "*?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
        st.tuples(st.sampled_from(["^{}$", "^{}", "{}$", "^{0}$|^{0}", "(^{}$)"]), inner).map(
            lambda pair: pair[0].format(pair[1])
        ),
    ),
    max_leaves=5,
)


@settings(max_examples=80, deadline=None)
@given(PATTERNS)
def test_answers_match_patterns(pattern: str) -> None:
    """As a string, as a name, and, where calls take text, as the text itself."""
    names = {"type": "object", "propertyNames": {"pattern": pattern}, "additionalProperties": ONE, "minProperties": 1}
    try:
        check_schema({"anyOf": [{"pattern": pattern}, names]}, "s")
    except RequestError as error:
        assert error.param is not None and error.param.endswith(".pattern")
        return
    check_answers({"pattern": pattern}, 3, 60)
    check_answers(names, 3, 60)
    text = compiled({"type": "regex", "pattern": grammar_regex(pattern, in_json=False)})
    assert all(answer is None or re.search(pattern, answer) for answer in (walk(text, seed, 60) for seed in range(3)))
