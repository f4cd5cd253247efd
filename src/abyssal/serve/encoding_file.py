"""Reads the long texts of a checkpoint's encoding file. The file is parsed, never run (V4 spec 5.1, V4.1 spec 7.3)."""

from __future__ import annotations

import ast
import hashlib
import logging
import re
from pathlib import Path
from typing import Any

from abyssal.errors import CheckpointError
from abyssal.serve.protocol import Texts, fill

log = logging.getLogger("abyssal")

FILES = ("encoding/encoding_dsv4.py", "encoding/encoding.py")
MAX_BYTES = 1 << 20

# SHA-256 of the published texts of V4, first 16 hex digits (V4 spec 5.1).
PUBLISHED = {
    "TOOLS_TEMPLATE": "09b7269daaddbeaf",
    "response_format_template": "012f31fcc1338bdf",
    "REASONING_EFFORT_MAX": "f7a24f3b3050d4a8",
    "REASONING_EFFORT_PROMPTS.high": "f7a24f3b3050d4a8",
    "REASONING_EFFORT_PROMPTS.max": "53fb31b8392ec5b4",
    "tool_call_template": "5ac61621bab70767",
    "tool_calls_template": "36b7f768e761ff16",
    "tool_output_template": "90de9fa543f23770",
}


def find_encoding_file(folder: Path) -> Path | None:
    return next((path for name in FILES if (path := folder / name).is_file()), None)


def load_texts(path: Path, family: str) -> Texts:
    """The texts of one release; which one it is shows in its effort table.

    Raises:
        CheckpointError: the file cannot be parsed, or a text is missing or not a literal.
    """
    literals = read_literals(path)
    if family == "v4":
        for name in differing(literals):
            log.warning("%s: %s is not the text that was published with V4; it is used as it is", path, name)
    efforts, default = _efforts(literals, path)
    texts = Texts(_text(literals, "TOOLS_TEMPLATE", path), _text(literals, "response_format_template", path), efforts, default)
    marks = ("dsml_token", "thinking_start_token", "thinking_end_token")
    fill(texts.tools, dict.fromkeys((*marks, "tool_schemas"), ""))  # unknown placeholders show here, not in a request
    fill(texts.response_format, {"schema": ""})
    return texts


def read_literals(path: Path) -> dict[str, Any]:
    """Module-level assignments of a Python file whose right side is a literal. Nothing of the file is run.

    Raises:
        CheckpointError: it is too large or not Python.
    """
    if path.stat().st_size > MAX_BYTES:
        raise CheckpointError(f"{path} is larger than {MAX_BYTES >> 10} KiB; that is no encoding file")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path} cannot be parsed as Python: {error}") from error
    found: dict[str, Any] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                try:
                    found[target.id] = ast.literal_eval(node.value)
                except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                    found.pop(target.id, None)  # computed, so not for us
    return found


def differing(literals: dict[str, Any]) -> list[str]:
    """Names of texts that differ from the published ones."""
    flat = {**literals}
    for name, value in literals.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": text for key, text in value.items()}
    texts = {name: value for name, value in flat.items() if name in PUBLISHED and isinstance(value, str)}
    return [name for name, text in texts.items() if hashlib.sha256(text.encode()).hexdigest()[:16] != PUBLISHED[name]]


def _efforts(literals: dict[str, Any], path: Path) -> tuple[dict[str, str], str | None]:
    """Effort -> text, and the default effort: April's one text, 0731's table, or V4.1's numbers in one template."""
    default = literals.get("DEFAULT_REASONING_EFFORT")
    if not isinstance(default, str | None):
        raise CheckpointError(f"{path}: DEFAULT_REASONING_EFFORT must be a string, not {default!r}")
    if "REASONING_EFFORT_TEMPLATE" in literals:
        template = _text(literals, "REASONING_EFFORT_TEMPLATE", path)
        names = set(re.findall(r"(?<!\{)\{(\w+)\}(?!\})", template))
        if len(names) != 1:
            raise CheckpointError(f"{path}: REASONING_EFFORT_TEMPLATE must have one placeholder, not {sorted(names)}")
        place = f"{{{names.pop()}}}"
        numbers = _table(literals, "REASONING_EFFORT_MAPPINGS", int, path)
        return {effort: template.replace(place, str(number)) for effort, number in numbers.items()}, default or "high"
    if "REASONING_EFFORT_PROMPTS" in literals:
        return _table(literals, "REASONING_EFFORT_PROMPTS", str, path), default or "low"
    return {"max": _text(literals, "REASONING_EFFORT_MAX", path)}, default


def _table(literals: dict[str, Any], name: str, kind: type, path: Path) -> dict[str, Any]:
    table = literals.get(name)
    if not isinstance(table, dict) or not all(isinstance(k, str) and isinstance(v, kind) for k, v in table.items()):
        raise CheckpointError(f"{path}: {name} must be a literal table of names to {kind.__name__} values")
    return table


def _text(literals: dict[str, Any], name: str, path: Path) -> str:
    if not isinstance(literals.get(name), str):
        raise CheckpointError(f"{path}: {name} is missing or not a literal text")
    return str(literals[name])
