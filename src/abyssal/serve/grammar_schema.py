"""JSON schemas as the grammar library reads them: what it would leave out or take otherwise, in words that it keeps."""

from __future__ import annotations

import json
from typing import Any

from abyssal.errors import RequestError
from abyssal.serve.json_pattern import grammar_regex, other_names
from abyssal.serve.json_schema import BOUNDS, Schema, bounds, children, deref, multiples, types_named


def grammar_schema(schema: Schema) -> Schema:
    """A copy of a schema that `check_schema` has passed, for the grammar library; its patterns describe the JSON text of strings.

    Raises:
        RequestError: what is no schema within it is nested too deeply.
    """
    try:
        root = json.loads(json.dumps(schema))
    except RecursionError as error:
        raise RequestError("a schema holds something that is nested too deeply") from error
    todo, seen = [root], set()
    while todo:
        node = todo.pop()
        if isinstance(node, dict) and id(node) not in seen:
            seen.add(id(node))
            todo += [deref(node, root), *(child for child, _ in children(node, ""))]
            _rewrite(node)
    return root


def _rewrite(node: dict[str, Any]) -> None:
    """Say all that the library does not infer itself."""
    types = types_named(node)
    if types:
        node["type"] = types[0] if len(types) == 1 else types
    if "integer" in types:
        low, high = bounds(node)
        if "multipleOf" in node and low is not None and high is not None:
            values = multiples(node)
            node.clear()
            node["enum"] = list(values)
        else:
            for name in BOUNDS:
                node.pop(name, None)
            node |= {name: bound for name, bound in (("minimum", low), ("maximum", high)) if bound is not None}
    if "pattern" in node:
        node["pattern"] = grammar_regex(node["pattern"], in_json=True)
    _rewrite_object(node)
    _rewrite_array(node)


def _rewrite_object(node: dict[str, Any]) -> None:
    others = node.get("additionalProperties", "properties" not in node)
    if others is False or node.get("propertyNames") is True:
        node.pop("propertyNames", None)
    if "properties" not in node and node.keys() & {"minProperties", "maxProperties"}:
        node["additionalProperties"] = others
    if node.get("properties") and others is not False:
        node["patternProperties"] = {other_names(node["properties"]): others}
        node["additionalProperties"] = False


def _rewrite_array(node: dict[str, Any]) -> None:
    first = [{} if entry is True else entry for entry in (node.pop("prefixItems", None) or [])[: node.get("maxItems")]]
    if first:
        node["prefixItems"] = first
    elif node.keys() & {"minItems", "maxItems"}:
        node.setdefault("items", True)
