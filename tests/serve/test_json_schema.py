"""Schemas that structured output can hold to, those that are refused by their path, and that nothing between slips through."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from abyssal.errors import RequestError
from abyssal.serve.json_schema import MAX_DEPTH, MAX_SCHEMAS, MAX_VALUES, check_schema
from tests.serve.scripted import TOKENIZER
from tests.support.grammars import accepts, json_grammar, walk


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "boolean"}
    for _ in range(depth - 1):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


def doubling(levels: int) -> dict[str, Any]:
    """Definitions of which each leads twice to the next: as many ways to the last as two to the power of `levels`."""
    ways = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return {**ways, f"d{levels}": {"type": "string"}}


def chain(length: int) -> dict[str, Any]:
    """Definitions of which each is the next."""
    return {**{f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}, f"d{length}": {"type": "string"}}


FIRST: dict[str, Any] = {"$ref": "#/$defs/d0"}
STRING = {"type": "string"}
DOT = {"type": "object", "properties": {"type": {"const": "dot"}}, "required": ["type"]}
LINE = {"type": "object", "properties": {"type": {"const": "line"}}, "required": ["type"]}

GOOD: list[Any] = [
    True, {}, {"type": "object"}, {"type": ["string", "null"], "maxLength": 3}, {"enum": [1, "a", None, {"b": [1]}]}, {"type": "string", "enum": ["a"]},
    {"type": "string", "pattern": "^a[0-9]{2}(?:b|c)$"}, {"type": "string", "format": "date"}, {"type": "string", "minLength": 1, "maxLength": 4},
    {"type": "integer", "multipleOf": 3}, {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5}, {"anyOf": [STRING, {"type": "integer"}]},
    {"type": ["string", "integer"], "anyOf": [STRING, {"type": "integer"}]}, {"oneOf": [DOT, LINE]}, {"oneOf": [STRING, {"type": "integer"}]},
    {"oneOf": [{"const": 1}, {"enum": [2, 3]}]}, {"oneOf": [{"const": True}, {"const": 1}, {"const": "true"}]}, {"allOf": [DOT]}, {"$ref": "#/$defs/a", "$defs": {"a": STRING}, "title": "T", "x-y": 1},
    {"type": "array", "prefixItems": [STRING], "items": False}, {"type": "array", "items": STRING, "minItems": 1, "maxItems": 2},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2}, {"type": "object", "propertyNames": {"pattern": "^a$"}},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}, {"type": "object", "properties": {"a/b~c": STRING, "x": {"$ref": "#/properties/a~1b~0c"}}},
    {"$defs": {"n": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}}, "$ref": "#/$defs/n"},
    {"$defs": doubling(60), "type": "string", "anyOf": [FIRST]}, {"$defs": doubling(60), "oneOf": [FIRST, {"type": "integer"}]},
    {"$defs": doubling(60), "propertyNames": FIRST}, {"$defs": {"d0": {"anyOf": [FIRST, STRING]}}, "type": "string", "anyOf": [FIRST]}, {"$defs": chain(60), "anyOf": [FIRST]},
    nested(MAX_DEPTH),
]  # fmt: skip

BAD: list[tuple[str, Any]] = [
    ("", False), ("", None), ("", "string"), (".type", {"type": "strin"}), (".type", {"type": []}), (".type", {"type": [["string"]]}),
    (".not", {"not": {}}), (".if", {"if": STRING, "then": STRING}), (".contains", {"type": "array", "contains": STRING}),
    (".uniqueItems", {"type": "array", "uniqueItems": True}), (".patternProperties", {"patternProperties": {"^a": STRING}}),
    (".dependentRequired", {"dependentRequired": {"a": ["b"]}}), (".items", {"items": [STRING]}), (".allOf", {"allOf": [DOT, LINE]}),
    (".multipleOf", {"type": "number", "multipleOf": 0.1}), (".enum", {"enum": []}), (".enum", {"type": "string", "enum": ["a", 1]}),
    (".const", {"type": "integer", "const": True}), (".maxLength", {"enum": ["a"], "maxLength": 1}), (".pattern", {"pattern": "("}),
    (".pattern", {"pattern": "(?=a)"}), (".pattern", {"pattern": r"\bword"}), (".pattern", {"pattern": "a", "maxLength": 3}), (".pattern", {"pattern": 7}),
    (".minLength", {"minLength": -1}), (".maxItems", {"maxItems": 10**9}), (".minLength", {"minLength": 5, "maxLength": 4}), (".maximum", {"maximum": "9"}),
    (".$ref", {"$ref": "http://127.0.0.1/x"}), (".$ref", {"$ref": "#/nope"}), (".$ref", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    (".maxLength", {"$ref": "#/$defs/a", "maxLength": 1, "$defs": {"a": STRING}}), (".oneOf[1]", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    (".oneOf[1]", {"oneOf": [DOT, {"type": "object"}]}), (".oneOf[1]", {"oneOf": [{"const": 1}, {"enum": [1, 2]}]}), (".anyOf", {"anyOf": []}),
    (".type", {"type": "string", "anyOf": [{"maxLength": 1}]}), (".required", {"type": "object", "required": ["a"]}), (".required", {"required": "a"}),
    (".properties", {"properties": []}), (".properties.a", {"properties": {"a": 7}}), (".properties.a.items.not", {"properties": {"a": {"items": {"not": {}}}}}),
    (".$defs.x.anyOf[1].type", {"$defs": {"x": {"anyOf": [STRING, {"type": "x"}]}}}), (".unevaluatedProperties", {"unevaluatedProperties": STRING}),
    (".properties.a" * MAX_DEPTH, nested(MAX_DEPTH + 1)), ("", {"anyOf": [{"const": i} for i in range(MAX_SCHEMAS)]}), ("", {"enum": list(range(MAX_VALUES + 1))}),
    ("", {"anyOf": [{"const": f"v{i}"} for i in range(2**15)]}), (".oneOf", {"oneOf": [{"const": i} for i in range(4000)]}),
    (".oneOf[1]", {"oneOf": [{"enum": ["a", 1]}, {"const": 1.0}]}), (".$ref.not", {"$ref": "#/x/y", "x": {"y": {"not": {}}}}), (".$ref", {"$ref": "#/$defs/a%20b", "$defs": {"a%20b": STRING}}),
    (".minimum", {"type": "number", "minimum": 1e-7, "maximum": 2e-7}), (".minimum", {"minimum": 0.1234567, "maximum": 0.1234568}), (".properties.a.minimum", {"properties": {"a": {"type": "number", "minimum": 5, "maximum": 4}}}),
    (".exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-6}), (".exclusiveMinimum", {"type": "integer", "exclusiveMinimum": 1, "maximum": 1.5}),
    (".minimum", {"type": "integer", "minimum": 10**30}), (".maximum", {"type": "number", "maximum": -1e30}), (".minimum", {"type": "number", "minimum": float("inf")}),
    (".multipleOf", {"type": "integer", "multipleOf": 3, "minimum": 0}), (".multipleOf", {"type": "integer", "multipleOf": 7, "minimum": 8, "maximum": 13}), (".multipleOf", {"type": "integer", "multipleOf": 2.5}),
    (".multipleOf", {"type": "integer", "multipleOf": 1, "minimum": -(2**70), "maximum": 2**70}), (".multipleOf", {"type": "integer", "multipleOf": 0}), (".multipleOf", {"type": "integer", "multipleOf": 10**6}),
    (".anyOf[0]", {"anyOf": [{"type": "integer", "multipleOf": 1, "minimum": i, "maximum": i + MAX_VALUES // 2} for i in range(2)]}), (".format", {"type": "string", "format": "email", "maxLength": 99}),
    (".propertyNames", {"properties": {"a": {"const": 1}}, "propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": STRING}), (".propertyNames", {"propertyNames": {"enum": ["a", 1]}}),
    (".propertyNames", {"propertyNames": False}), (".const", {"const": {"a": float("inf")}}), (".propertyNames", {"propertyNames": {"anyOf": [{"type": "integer"}, STRING]}}), (".minProperties", {"additionalProperties": {"const": 1}, "minProperties": 2}),
    (".minProperties", {"propertyNames": {"pattern": "^x$"}, "minProperties": 2}), (".minProperties", {"properties": {"a": STRING, "b": STRING}, "required": ["a"], "additionalProperties": True, "minProperties": 3}),
    (".minProperties", {"properties": {"a": STRING}, "minProperties": 2}), (".minProperties", {"properties": {}, "minProperties": 1}), (".maxProperties", {"properties": {"a": STRING}, "required": ["a"], "maxProperties": 0}),
    (".properties", {"properties": {"a" * 257: STRING}, "additionalProperties": True}), (".minItems", {"items": False, "minItems": 1}), (".minItems", {"prefixItems": [STRING], "minItems": 2}),
    (".anyOf[0].type", {"type": "string", "anyOf": [{"type": 5}]}), (".oneOf[1].type", {"oneOf": [{"type": [[]]}, {"type": [[]]}]}), (".oneOf[0]", {"oneOf": [7, STRING]}),
    (".oneOf[1].required", {"oneOf": [DOT, {"type": "object", "required": 7}]}), (".oneOf[1].enum", {"oneOf": [{"const": 1}, {"enum": "a"}]}), (".propertyNames.type", {"propertyNames": {"type": {}}}),
    (".propertyNames", {"propertyNames": None}), (".oneOf[1].$ref", {"$defs": {"d0": FIRST}, "oneOf": [STRING, FIRST]}), (".$ref", {"$defs": chain(MAX_DEPTH + 9), **FIRST}),
    (".oneOf[1]", {"oneOf": [{"const": f"{i:08000}"} for i in range(64)]}),
    *((".pattern", {"pattern": pattern}) for pattern in (r"[^\s\S]", "a^b", "a$|b$c", "(?:^a)*", "(a$)+", "[]a]", "[^]a]", r"\1(a)", "(a)\\1", "a*+", "a{,3}", r"\0", r"\a", r"[\0]", r"\Aa", "(?i)a", "(?P<n>a)", "\ud800", "a" * 10_001)),
]  # fmt: skip


@pytest.mark.parametrize("schema", GOOD, ids=lambda schema: json.dumps(schema)[:60])
def test_good_schemas_pass_and_compile(schema: Any) -> None:
    check_schema(schema, "s")
    assert json_grammar(schema).compiled


@pytest.mark.parametrize(("path", "schema"), BAD, ids=lambda value: json.dumps(value)[:60])
def test_bad_schemas_are_named_by_path(path: str, schema: Any) -> None:
    with pytest.raises(RequestError) as caught:
        check_schema(schema, "s")
    assert caught.value.param == f"s{path}" and len(str(caught.value)) < 500


LEAVES = st.sampled_from([
    {"type": "string"}, {"type": "string", "maxLength": 2}, {"type": "string", "pattern": "^a+$"}, {"type": "integer", "minimum": 2}, {"type": "number"},
    {"type": "boolean"}, {"type": "null"}, {"enum": ["a", 1]}, {"const": {"a": 1}}, {"type": ["string", "null"]}, {"type": "integer", "multipleOf": 2},
])  # fmt: skip


def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    tables = st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3)
    return st.one_of(
        tables.map(lambda t: {"type": "object", "properties": t, "required": sorted(t)[:1], "additionalProperties": False}),
        inner.map(lambda i: {"type": "array", "items": i, "maxItems": 2}),
        st.lists(inner, min_size=1, max_size=2).map(lambda entries: {"anyOf": entries}),
        st.lists(inner, min_size=1, max_size=2).map(lambda entries: {"oneOf": entries}),
        inner.map(lambda i: {"type": "object", "additionalProperties": i, "maxProperties": 2}),
    )


SCHEMAS = st.recursive(LEAVES, grown, max_leaves=4)
VALUES = st.recursive(
    st.sampled_from([None, True, 0, 1, 2, 3.5, "", "a", "aa", "aaa", "b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=80, deadline=None)
@given(SCHEMAS, st.lists(VALUES, max_size=6))
def test_what_a_grammar_allows_validates(schema: Any, values: list[Any]) -> None:
    """Whatever passes the check: the grammar never takes a value that the schema refuses."""
    try:
        check_schema(schema, "s")
    except RequestError:
        return
    grammar = json_grammar(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert (answer := walk(grammar, 0, 60)) is None or validator.is_valid(json.loads(answer))
    for value in values:
        if accepts(grammar, TOKENIZER.encode(json.dumps(value))):
            assert validator.is_valid(value)
