"""What an answer may look like, as a structural tag of the grammar library: JSON, or a block of tool calls.

Tool calls follow V4 spec 5.6 in the release's dialect: DSML tokens by id, text arguments as text, all others as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from abyssal.errors import RequestError, shorten
from abyssal.serve.conversation import Conversation, ResponseFormat, Tool
from abyssal.serve.grammar_schema import grammar_schema
from abyssal.serve.json_pattern import grammar_regex
from abyssal.serve.json_schema import Schema, check_schema, children, deref
from abyssal.serve.protocol import Release

MAX_WHITESPACE = 32  # characters in a row between the parts of JSON: enough to indent, and no room to idle
MAX_DEFINITION_CHARS = 2_000_000  # of the definitions that a tool's arguments lead to, as JSON: each argument has its own copy
KEY_PATTERN = r'[^"<>\x00-\x1f\x7f]{1,64}'

Format = dict[str, Any]

_ANY_TEXT: Format = {"type": "any_text"}


def answer_format(conversation: Conversation, release: Release, dsml_id: int | None) -> Format | None:
    """What the answer must follow once it has thought; None = nothing.

    Free calls of tools that are not strict, amid free text, are not constrained.

    Raises:
        RequestError: a schema that has to hold cannot be held to, or the tokenizer has no DSML token for calls that have to be made.
    """
    choice, wanted = conversation.tool_choice, conversation.response_format
    if not conversation.calls_allowed:
        return None if wanted is None else _json_answer(wanted)
    is_forced = choice.mode == "required"
    if not is_forced and wanted is None and not any(tool.strict for tool in conversation.tools):
        return None
    if dsml_id is None:
        raise RequestError("the model's tokenizer has no token for tool calls, so none can be made", param="tools")
    tools = [tool for tool in conversation.tools if choice.name in (None, tool.name)]
    writer = _CallWriter(release, dsml_id, follows_schema=lambda tool: is_forced or tool.strict)
    block = writer.block(conversation.tools, tools, one=choice.name is not None or not choice.parallel)
    if is_forced:
        return _sequence(_optional(_text("\n\n")), block)
    if wanted is not None:
        return _either(_json_answer(wanted), _sequence(_optional(_text("\n\n")), block))
    return _sequence(_ANY_TEXT, _optional(block))


def _json_answer(wanted: ResponseFormat) -> Format:
    if wanted.schema is None:
        return json_value({"type": "object"})
    check_schema(wanted.schema, wanted.where)
    return json_value(wanted.schema)


class _CallWriter:
    """Formats of calls.

    Args:
        follows_schema: whether a tool's arguments must follow its schema.
    """

    def __init__(self, release: Release, dsml_id: int, follows_schema: Any) -> None:
        self._release, self._dsml, self._follows_schema = release, {"type": "token", "token": dsml_id}, follows_schema

    def block(self, all_tools: Sequence[Tool], tools: Sequence[Tool], one: bool) -> Format:
        """`<tool_calls>`, calls of `tools`, `</tool_calls>`; `all_tools` are those of the request, for the paths of errors."""
        release = self._release
        calls = _either(*(self._invoke(tool, f"tools[{all_tools.index(tool)}].function.parameters") for tool in tools))
        more = [] if one else [{"type": "star", "content": _sequence(_text("\n"), calls)}]
        return _sequence(*self._tag("<", f"{release.block}>\n"), calls, *more, *self._tag("\n</", f"{release.block}>"))

    def _invoke(self, tool: Tool, where: str) -> Format:
        release = self._release
        arguments = self._arguments(tool.parameters, where) if self._follows_schema(tool) else self._free_arguments()
        opening = self._tag("<", f'{release.invoke} name="{tool.name}">\n')
        return _sequence(*opening, *arguments, *self._tag("</", f"{release.invoke}>"))

    def _arguments(self, schema: dict[str, Any], where: str) -> list[Format]:
        """The tool's arguments in the order of its schema, each with the newline after it; a lone newline if there are none."""
        check_schema(schema, where)
        for key in ("anyOf", "oneOf", "allOf", "$ref", "enum", "const", "propertyNames", "minProperties", "maxProperties"):
            if key in schema:
                raise RequestError(
                    f"{where}.{key}: calls cannot hold to it here; describe the arguments in properties", param=f"{where}.{key}"
                )
        properties = schema.get("properties") or {}
        if not properties:
            return self._free_arguments() if schema.get("additionalProperties", True) else [_text("\n")]
        required = set(schema.get("required") or ())
        parts, left = [], MAX_DEFINITION_CHARS
        sizes = {table: {n: len(json.dumps(d)) for n, d in (schema.get(table) or {}).items()} for table in _DEFINITIONS}
        for name, argument in properties.items():
            definitions = _definitions(argument, schema, f"{where}.properties.{name}")
            left -= sum(sizes[table][n] for table, found in definitions.items() for n in found)
            if left < 0:
                message = f"the definitions that each argument leads to may have {MAX_DEFINITION_CHARS} characters in all"
                raise RequestError(f"{where}.properties: {message}", param=f"{where}.properties")
            part = _sequence(self._parameter(_text(name), _values(argument, schema, definitions)), _text("\n"))
            parts.append(part if name in required else _optional(part))
        return parts

    def _free_arguments(self) -> list[Format]:
        parameter = self._parameter({"type": "regex", "pattern": KEY_PATTERN}, _values(True, True, {}))
        return [_either(_text("\n"), {"type": "plus", "content": _sequence(parameter, _text("\n"))})]

    def _parameter(self, key: Format, values: Format) -> Format:
        name = self._release.parameter
        return _sequence(*self._tag("<", f'{name} name="'), key, _text('" string="'), values, *self._tag("</", f"{name}>"))

    def _tag(self, opening: str, rest: str) -> list[Format]:
        return [_text(opening), self._dsml, _text(rest)]


def _values(schema: Schema, root: Schema, definitions: dict[str, Any]) -> Format:
    """From within the quotes of `string="` on: `true">` and text, or `false">` and JSON, with the `definitions` that it leads to."""
    texts, others = _split(schema, root)
    formats = [_sequence(_text('true">'), _text_value(node)) for node in texts]
    if others:
        values = others[0] if len(others) == 1 else {"anyOf": others}
        formats.append(_sequence(_text('false">'), json_value({**values, **definitions})))
    return _either(*formats)


def _split(schema: Schema, root: Schema) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(schemas of text values, schemas of all others). Alternatives that lead to the same schema lead to it once."""
    texts, others = [], []
    seen: set[int] = set()
    todo = [schema]
    while todo:
        node = deref(todo.pop(), root)
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node is True or node == {}:
            texts.append({"type": "string"})
            others.append({"type": ["integer", "number", "boolean", "null", "object", "array"]})
        elif alternatives := node.get("anyOf") or node.get("oneOf"):
            todo += reversed(alternatives)
        elif isinstance(node.get("type"), list):
            for name in node["type"]:
                (texts if _is_text(alone := {**node, "type": name}) else others).append(alone)
        else:
            (texts if _is_text(node) else others).append(node)
    return texts, others


def _is_text(node: dict[str, Any]) -> bool:
    """Whether all values of a schema without alternatives are texts."""
    values = [node["const"]] if "const" in node else node.get("enum")
    return node.get("type") == "string" if values is None else all(isinstance(value, str) for value in values)


def _text_value(node: dict[str, Any]) -> Format:
    values = [node["const"]] if "const" in node else node.get("enum")
    if values is not None:
        return _either(*map(_text, values))
    if "pattern" in node:
        return {"type": "regex", "pattern": grammar_regex(node["pattern"], in_json=False)}
    if "minLength" in node or "maxLength" in node:
        return {"type": "regex", "pattern": rf"[\s\S]{{{node.get('minLength', 0)},{node.get('maxLength', '')}}}"}
    return _ANY_TEXT


_DEFINITIONS = ("$defs", "definitions")


def _definitions(argument: Schema, root: dict[str, Any], path: str) -> dict[str, dict[str, Any]]:
    """The tables of definitions of `root`, as far as `argument` leads to them. It is a grammar of its own: it can refer to nothing else."""
    found: dict[str, dict[str, Any]] = {}
    todo = [(argument, path)]
    while todo:
        node, path = todo.pop()
        if not isinstance(node, dict):
            continue
        todo += children(node, path)
        if "$ref" not in node:
            continue
        if not node["$ref"].startswith(("#/$defs/", "#/definitions/")):
            raise RequestError(f"{shorten(path)}.$ref: an argument can refer to $defs only", param=f"{path}.$ref")
        _, table, step, *_ = unquote(node["$ref"]).split("/")
        name = step.replace("~1", "/").replace("~0", "~")
        if name not in found.setdefault(table, {}):
            found[table][name] = root[table][name]
            todo.append((root[table][name], f"{path}.$ref"))
    return found


def json_value(schema: Schema) -> Format:
    """JSON of a schema that `check_schema` has passed."""
    return {"type": "json_schema", "json_schema": grammar_schema(schema), "max_whitespace_cnt": MAX_WHITESPACE}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _either(*elements: Format) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def _optional(content: Format) -> Format:
    return {"type": "optional", "content": content}
