"""Conversations as every API gives them: messages, tools, and what the answer must look like. Needs no server package."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from abyssal.errors import RequestError, show

ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
TASKS = ("action", "query", "authority", "domain", "title", "read_url")
MAX_TOOLS = 1024
MAX_NAME_CHARS = 256  # of a tool
MAX_KEY_CHARS = 1024  # of an argument
MAX_LEVELS = 500  # of objects and lists; half of what can be read, so that all of it can be written again wherever an answer goes
SPARE_LEVELS = 20  # that may lie around a value of an answer in the body that brings it back

# Message keys that ask for nothing when empty: the openai client sends them back with an answer of the assistant.
_EMPTY_KEYS = ("name", "refusal", "audio", "annotations", "function_call")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of the assistant. `arguments` is JSON text, as the client keeps it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a user turn: the user's text, or what a tool gave back for the call of that id."""

    text: str
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    function: dict[str, Any]  # name, description, parameters, ... as the client sent it
    strict: bool = False  # arguments must follow `parameters`

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of its arguments."""
        return self.function.get("parameters") or {"type": "object"}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. The public role `developer` has become `system`: the model's own developer role is internal (V4 spec 5.3)."""

    role: str
    content: str = ""
    reasoning: str = ""  # of the assistant
    task: str | None = None  # one of TASKS
    tool_calls: tuple[ToolCall, ...] = ()  # of the assistant
    tool_call_id: str = ""  # of a tool's result
    blocks: tuple[Block, ...] = ()  # of a user turn after merging, in place of `content`
    tools: tuple[Tool, ...] = ()  # with a system or developer message
    response_schema: dict[str, Any] | bool | None = None  # likewise


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which calls an answer may or must make."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None  # with required: this tool, once
    parallel: bool = True  # several calls in one answer


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """JSON as the content of an answer. `schema` None: any object."""

    schema: dict[str, Any] | bool | None = None
    where: str = "response_format.json_schema.schema"  # the request's field that holds the schema


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is asked of the model, whichever API it came through."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    response_format: ResponseFormat | None = None
    thinking: bool = False
    effort: str | None = None  # reasoning effort; None = the checkpoint's default

    @property
    def calls_allowed(self) -> bool:
        return bool(self.tools) and self.tool_choice.mode != "none"

    def prompt_messages(self) -> tuple[Message, ...]:
        """The messages, tools and response schema attached to the first system message; an empty one is put first if needed."""
        schema = None if self.response_format is None else self.response_format.schema
        if not self.tools and schema is None:
            return self.messages
        messages = list(self.messages)
        place = next((i for i, message in enumerate(messages) if message.role == "system"), None)
        if place is None:
            place = 0
            messages.insert(0, Message("system"))
        messages[place] = replace(messages[place], tools=self.tools, response_schema=schema)
        return tuple(messages)


def check_last(messages: Sequence[Message]) -> None:
    """Refuse a conversation that leaves nothing to answer."""
    if messages[-1].role not in ("user", "system", "tool") and messages[-1].task is None:
        raise RequestError(
            f"the last message is of role {messages[-1].role!r}, which leaves nothing to answer; end with a user message",
            param=f"messages[{len(messages) - 1}].role",
        )


def parse_messages(raw: Any) -> list[Message]:
    """Check a list of OpenAI's messages.

    Raises:
        RequestError: naming the message and key at fault.
    """
    if not isinstance(raw, list) or not raw:
        raise RequestError("messages must be a non-empty list", param="messages")
    messages = [_parse_message(message, f"messages[{i}]") for i, message in enumerate(raw)]
    check_last(messages)
    return messages


def _parse_message(raw: Any, where: str) -> Message:
    if not isinstance(raw, dict):
        raise RequestError(f"{where} must be an object with role and content, not {type(raw).__name__}", param=where)
    role = raw.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role={show(role)} is unknown; use {', '.join(ROLES)}", param=f"{where}.role")
    for key, value in raw.items():
        if key == "name" and role == "tool":
            continue  # the tool's name: the call's id says more
        if key in _EMPTY_KEYS and value not in (None, [], ""):
            raise RequestError(f"{where}.{key} is not supported; leave it out", param=f"{where}.{key}")
        if key not in ("role", "content", "reasoning_content", "reasoning", "task", "tool_calls", "tool_call_id", *_EMPTY_KEYS):
            raise RequestError(f"{where} has the unknown key {show(key)}", param=f"{where}.{key}")
    reasoning = _reasoning(raw, where)
    if reasoning and role != "assistant":
        raise RequestError(f"{where}: reasoning belongs to messages of the assistant only", param=f"{where}.reasoning_content")
    calls = _tool_calls(raw.get("tool_calls"), role, f"{where}.tool_calls")
    tool_call_id = _tool_call_id(raw.get("tool_call_id"), role, f"{where}.tool_call_id")
    if raw.get("content") is None and not reasoning and not calls:
        raise RequestError(f"{where}.content is missing", param=f"{where}.content")
    content = "" if raw.get("content") is None else _content(raw["content"], role, f"{where}.content")
    task = _task(raw.get("task"), f"{where}.task")
    return Message("system" if role == "developer" else role, content, reasoning, task, calls, tool_call_id)


def _task(value: Any, where: str) -> str | None:
    if value is not None and value not in TASKS:
        raise RequestError(f"{where}={show(value)} is unknown; use {', '.join(TASKS)}", param=where)
    return value


def _reasoning(raw: dict[str, Any], where: str) -> str:
    """Both spellings are in use; an answer may come back with both, the same."""
    given = {
        check_text(value, f"{where}.{key}") for key in ("reasoning_content", "reasoning") if (value := raw.get(key)) is not None
    } - {""}
    if len(given) > 1:
        raise RequestError(
            f"{where}: reasoning_content and reasoning differ; give one of them", param=f"{where}.reasoning_content"
        )
    return given.pop() if given else ""


def _tool_call_id(value: Any, role: str, where: str) -> str:
    if role != "tool":
        if value not in (None, ""):
            raise RequestError(f"{where} goes with messages of the role tool only", param=where)
        return ""
    if not isinstance(value, str) or not value:
        raise RequestError(f"{where} is missing: a tool's result names the call that it answers", param=where)
    return check_text(value, where)


def _tool_calls(raw: Any, role: str, where: str) -> tuple[ToolCall, ...]:
    if raw in (None, []):
        return ()
    if role != "assistant":
        raise RequestError(f"{where}: only the assistant calls tools", param=where)
    if not isinstance(raw, list):
        raise RequestError(f"{where} must be a list of calls", param=where)
    return tuple(_tool_call(call, f"{where}[{i}]") for i, call in enumerate(raw))


def _tool_call(raw: Any, where: str) -> ToolCall:
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(function, dict) or raw.get("type", "function") != "function":
        raise RequestError(f"{where} must be {{id, type: 'function', function: {{name, arguments}}}}", param=where)
    check_keys(raw, {"id", "type", "function", "index"}, where)
    check_keys(function, {"name", "arguments"}, where)
    arguments = function.get("arguments")
    if isinstance(arguments, dict):  # some proxies send the object itself
        arguments = dump_json(arguments, f"{where}.function.arguments")
    return make_call(raw.get("id"), function.get("name"), "{}" if arguments is None else arguments, where)


def make_call(call_id: Any, name: Any, arguments: Any, where: str) -> ToolCall:
    """A call of the history, checked.

    Raises:
        RequestError: it cannot be written in the model's format.
    """
    call = ToolCall(
        check_text(call_id or "", f"{where}.id"),
        check_name(name, f"{where}.function.name"),
        check_text(arguments, f"{where}.function.arguments"),
    )
    for key, value in (parse_arguments(call.arguments) or {}).items():
        check_key(key, f"{where}.function.arguments")
        check_text(value if isinstance(value, str) else dump_json(value, where), f"{where}.function.arguments")
    return call


def parse_arguments(text: str) -> dict[str, Any] | None:
    """Arguments as an object; nothing at all counts as none. None: the text is not a JSON object."""
    if not text.strip():
        return {}
    value = parse_json(text)
    return value if isinstance(value, dict) else None


def parse_json(text: str) -> Any:
    """A JSON value as RFC 8259 has it; None also for what is not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def is_json(text: str) -> bool:
    """Whether `text` is a JSON value that can be written again wherever an answer goes, and comes back with the next request.

    It holds no lone surrogate and no number beyond floats, and leaves room for what lies around it.
    """
    value = parse_json(text)
    if value is None:
        return text.strip() == "null"
    if is_deeper(value, MAX_LEVELS - SPARE_LEVELS):
        return False
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True


def is_deeper(value: Any, levels: int) -> bool:
    """Whether a JSON value has more than `levels` objects and lists within each other."""
    level = [value] if type(value) in (dict, list) else []
    for _ in range(levels):
        parts = (node.values() if type(node) is dict else node for node in level)
        level = [part for each in parts for part in each if type(part) in (dict, list)]
        if not level:
            return False
    return bool(level)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


# Tools


def tool_entries(raw: Any, where: str = "tools") -> list[Any]:
    """The unchecked entries of a list of tools; none where it is missing."""
    if raw is None:
        return []
    if not isinstance(raw, list):
        raise RequestError(f"{where} must be a list of tools", param=where)
    return raw


def parse_tools(raw: Any, where: str = "tools") -> tuple[Tool, ...]:
    """Check OpenAI's list of tools.

    Raises:
        RequestError: naming the tool and key at fault.
    """
    tools = []
    for i, entry in enumerate(tool_entries(raw, where)):
        kind = entry.get("type") if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or kind != "function" or not isinstance(entry.get("function"), dict):
            raise RequestError(
                f"{where}[{i}] of type {show(kind)} is not supported; use {{type: 'function', function: {{name, ...}}}}",
                param=f"{where}[{i}]",
            )
        check_keys(entry, {"type", "function"}, f"{where}[{i}]")
        tools.append(make_tool(entry["function"], f"{where}[{i}].function"))
    return check_tools(tools, where)


def make_tool(function: dict[str, Any], where: str, schema_key: str = "parameters") -> Tool:
    """A tool from its function object.

    Args:
        schema_key: how the request spells `parameters`, for messages.

    Raises:
        RequestError: a name cannot be written in the model's format, or a value is of the wrong type.
    """
    check_keys(function, {"name", "description", "parameters", "strict"}, where)
    name = check_name(function.get("name"), f"{where}.name")
    if function.get("description") is not None:
        check_text(function["description"], f"{where}.description")
    if not isinstance(function.get("strict"), bool | None):
        raise RequestError(f"{where}.strict must be true or false", param=f"{where}.strict")
    parameters = function.get("parameters")
    if parameters is not None:
        path = f"{where}.{schema_key}"
        if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
            raise RequestError(f"{path} must be a JSON schema of type object", param=path)
        check_text(dump_json(parameters, path), path)
        properties = parameters.get("properties")
        if not isinstance(properties, dict | None):
            raise RequestError(f"{path}.properties must be an object", param=f"{path}.properties")
        for key in properties or ():
            check_key(key, f"{path}.properties")
    return Tool(name, {key: value for key, value in function.items() if value is not None}, bool(function.get("strict")))


def check_tools(tools: Sequence[Tool], where: str = "tools") -> tuple[Tool, ...]:
    """Refuse too many tools, and two of one name."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"{where} has {len(tools)} entries; at most {MAX_TOOLS} are allowed", param=where)
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise RequestError(f"{where}: two tools are named {twice[:80]!r}; a call could not tell them apart", param=where)
    return tuple(tools)


def parse_tool_choice(raw: Any, parallel: bool | None, tools: Sequence[Tool]) -> ToolChoice:
    """OpenAI's `tool_choice` and `parallel_tool_calls`.

    Raises:
        RequestError: an unknown choice, or one that needs tools which are not there.
    """
    choice = ToolChoice(parallel=parallel is not False)
    if raw in (None, "auto", "none"):
        return replace(choice, mode="none" if raw == "none" else "auto")
    if raw == "required":
        return choose_required(choice, None, tools)
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or raw.get("type") != "function" or not isinstance(function, dict):
        raise RequestError(
            f"tool_choice={show(raw)} is not supported; use auto, none, required or {{type: 'function', function: {{name}}}}",
            param="tool_choice",
        )
    check_keys(raw, {"type", "function"}, "tool_choice")
    check_keys(function, {"name"}, "tool_choice.function")
    return choose_required(choice, check_text(function.get("name"), "tool_choice.function.name"), tools)


def choose_required(choice: ToolChoice, name: str | None, tools: Sequence[Tool]) -> ToolChoice:
    """`choice`, made to require a call: of the tool `name`, or of any."""
    known = [tool.name for tool in tools]
    if not known:
        raise RequestError("tool_choice asks for a call, but the request has no tools; send tools", param="tool_choice")
    if name is not None and name not in known:
        message = f"tool_choice names {show(name)}, which is not one of the tools: {show(known)}"
        raise RequestError(message, param="tool_choice")
    return replace(choice, mode="required", name=name)


def parse_response_format(raw: Any) -> ResponseFormat | None:
    """OpenAI's `response_format`.

    Raises:
        RequestError: an unknown type, or a schema that is none.
    """
    if raw is None:
        return None
    kind = raw.get("type") if isinstance(raw, dict) else None
    if kind in ("text", "json_object"):
        check_keys(raw, {"type"}, "response_format")
        return ResponseFormat() if kind == "json_object" else None
    if kind != "json_schema":
        raise RequestError(
            f"response_format={show(raw)} is not supported; use {{type: text}}, {{type: json_object}} or {{type: json_schema, "
            "json_schema: {name, schema}}",
            param="response_format",
        )
    check_keys(raw, {"type", "json_schema"}, "response_format")
    return schema_format(raw.get("json_schema"), "response_format.json_schema", {"name", "description", "strict"})


def schema_format(raw: Any, where: str, known: set[str]) -> ResponseFormat:
    """A format from the object that holds `schema`, and may hold the keys `known` beside it."""
    path = f"{where}.schema"
    if not isinstance(raw, dict) or not isinstance(raw.get("schema"), dict | bool):
        raise RequestError(f"{path} must be a JSON schema", param=path)
    check_keys(raw, {"schema", *known}, where)
    check_text(dump_json(raw["schema"], path), path)
    return ResponseFormat(raw["schema"], path)


def check_keys(raw: dict[str, Any], known: set[str], where: str) -> None:
    """Refuse what the object at `where` holds beside the keys `known`."""
    if unknown := raw.keys() - known:
        raise RequestError(f"{where} has the unknown key {show(min(unknown, key=show))}", param=where)


def parse_options(raw: Any, where: str, known: set[str]) -> dict[str, Any]:
    """An object of options, empty for None."""
    if raw is None:
        return {}
    if not isinstance(raw, dict) or raw.keys() - known:
        raise RequestError(f"{where}={show(raw)} must be an object of {', '.join(sorted(known))}", param=where)
    return raw


# Text


def check_text(value: Any, where: str) -> str:
    """`value`, a string that UTF-8 can hold.

    Raises:
        RequestError: it is not one.
    """
    if not isinstance(value, str):
        raise RequestError(f"{where} must be a string, not {type(value).__name__}", param=where)
    if surrogate := re.search("[\ud800-\udfff]", value):
        raise RequestError(
            f"{where} holds the lone surrogate U+{ord(surrogate[0]):04X}, which no text can; remove it", param=where
        )
    return value


def check_name(value: Any, where: str) -> str:
    """A tool's name, as the model's format can carry it between quotes (V4 spec 5.6)."""
    name = check_text(value, where)
    if not is_name(name):
        raise RequestError(
            f"{where}={show(name)} cannot be written in the model's format; use 1 to {MAX_NAME_CHARS} characters without "
            "quotes, angle brackets and control characters",
            param=where,
        )
    return name


def check_key(value: str, where: str) -> str:
    """An argument's name, likewise."""
    key = check_text(value, where)
    if not is_key(key):
        raise RequestError(
            f"{where}: the argument name {show(key)} cannot be written in the model's format; use at most {MAX_KEY_CHARS} "
            "characters without quotes, angle brackets and control characters",
            param=where,
        )
    return key


def is_name(text: str) -> bool:
    return 0 < len(text) <= MAX_NAME_CHARS and _is_carried(text)


def is_key(text: str) -> bool:
    return len(text) <= MAX_KEY_CHARS and _is_carried(text)


def _is_carried(text: str) -> bool:
    return not re.search(r"[\x00-\x1f\x7f\"<>]", text)


def dump_json(value: Any, where: str) -> str:
    """As the model's format writes JSON: separators with a space, nothing escaped that need not be.

    Raises:
        RequestError: it is nested too deeply, or holds a Python object that JSON does not have.
    """
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise RequestError(f"{where} is nested too deeply", param=where) from error
    except (TypeError, ValueError) as error:  # ValueError: an object holds itself
        raise RequestError(f"{where} is no JSON: {error}", param=where) from error


def _content(content: Any, role: str, where: str) -> str:
    """Text, or text parts joined by an empty line, as the model's format joins blocks."""
    if isinstance(content, str):
        return check_text(content, where)
    if not isinstance(content, list) or (not content and role != "tool"):
        raise RequestError(f"{where} must be a string or a non-empty list of text parts", param=where)
    return "\n\n".join(_part(part, role, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, role: str, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        return other_part(kind if isinstance(kind, str) else type(part).__name__, role, where)
    if part.keys() - {"cache_control"} != {"type", "text"}:
        raise RequestError(f"{where} must have type and text, and nothing else", param=where)
    return check_text(part["text"], f"{where}.text")


def other_part(kind: str, role: str, where: str) -> str:
    """What stands for a part that is not text: of a tool's result its kind, as the model knows it (V4 spec 5.5)."""
    shown = kind if re.fullmatch(r"\w{1,40}", kind) else "unknown"
    if role == "tool":
        return f"[Unsupported {shown}]"
    raise RequestError(
        f"{where}: parts of type {shown} are not supported, this model reads text only; nothing was fetched", param=where
    )
