"""Encoding files of checkpoints: their texts are read as literals, nothing is run, and each release is told by its efforts.

The files here are stand-ins with the published names and texts of our own.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest

from abyssal.errors import CheckpointError
from abyssal.serve import encoding_file
from abyssal.serve.chat import load_chat_format
from abyssal.serve.conversation import Conversation, Message, Tool
from abyssal.serve.encoding_file import PUBLISHED, differing, load_texts, read_literals
from abyssal.serve.protocol import V4, V41, render
from abyssal.tokenizer import SpecialToken

COMMON = '''
import os
raise SystemExit("this file was run")
eos = "<｜end▁of▁sentence｜>"
assistant_msg_template = "{content}" + eos
TOOLS_TEMPLATE: str = """## Tools {{as JSON}} in <{dsml_token}tool_calls>, between {thinking_start_token} and {thinking_end_token}:
{tool_schemas}
"""
response_format_template: str = "Follow {schema}"
tool_output_template = "<tool_result>{content}</tool_result>"
'''
APRIL = COMMON + 'REASONING_EFFORT_MAX = ("Think " "hard.\\n\\n")\n'
JULY = (
    COMMON
    + 'REASONING_EFFORT_PROMPTS: dict[str, str] = {"low": "", "high": "Hard.\\n\\n", "max": "Harder.\\n\\n"}\nDEFAULT_REASONING_EFFORT = "low"\n'
)
V41_FILE = COMMON + (
    'REASONING_EFFORT_TEMPLATE = "Effort {n} of 100.\\n"\nREASONING_EFFORT_MAPPINGS = {"low": 50, "high": 75, "max": 100}\n'
    'DEFAULT_REASONING_EFFORT = "high"\n'
)
CONVERSATION = (Message("system", "S", tools=(Tool("f", {"name": "f"}),)), Message("user", "U"))
TOOLS = '## Tools {as JSON} in <｜DSML｜tool_calls>, between <think> and </think>:\n{"name": "f"}\n'


def write(folder: Path, text: str, name: str = "encoding_dsv4.py") -> Path:
    (folder / "encoding").mkdir(exist_ok=True)
    path = folder / "encoding" / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("text", "name", "family", "efforts"), [
    (APRIL, "encoding_dsv4.py", "v4", {None: "", "low": "", "high": "", "max": "Think hard.\n\n"}),
    (JULY, "encoding_dsv4.py", "v4", {None: "", "low": "", "high": "Hard.\n\n", "max": "Harder.\n\n"}),
    (V41_FILE, "encoding.py", "v41", {None: "Effort 75 of 100.\n", "low": "Effort 50 of 100.\n", "max": "Effort 100 of 100.\n"}),
], ids=["april", "0731", "v4.1"])  # fmt: skip
def test_k07_every_release_speaks_with_its_own_file(
    tmp_path: Path, text: str, name: str, family: str, efforts: dict[str | None, str]
) -> None:
    write(tmp_path, text, name)
    chat = load_chat_format(tmp_path, family)
    assert chat.release is {"v4": V4, "v41": V41}[family] and chat.thinking and chat.template is None
    for effort, words in efforts.items():
        segments = render(CONVERSATION, chat.release, chat.texts, True, effort=effort)
        system = "<｜System｜>" if family == "v41" else ""
        shown = "".join(s.text if isinstance(s, SpecialToken) else s for s in segments)
        assert shown == f"<｜begin▁of▁sentence｜>{system}{words}S\n\n{TOOLS}<｜User｜>U<｜Assistant｜><think>"
        assert SpecialToken("｜DSML｜") in segments, "the template's own control tokens are control tokens"
    assert Conversation(CONVERSATION).effort is None


def test_nothing_is_run_and_computed_values_are_left_out(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    path = write(
        tmp_path,
        f"open({str(marker)!r}, 'w')\nA = 'a'\nB = A + 'b'\nC = open({str(marker)!r}, 'w')\nD = 1\nD = A\nE: str\nF = G = ('x',)\n",
    )
    assert read_literals(path) == {"A": "a", "F": ("x",), "G": ("x",)}
    assert not marker.exists(), "a checkpoint's code was run"


@pytest.mark.parametrize(("text", "what"), [
    ("x = (", "cannot be parsed"), ("A = 1\n", "REASONING_EFFORT_MAX"), (APRIL.replace("TOOLS_TEMPLATE", "X"), "TOOLS_TEMPLATE"),
    (APRIL.replace("{schema}", "{oops}"), "oops"), (APRIL.replace("{tool_schemas}", "{__class__}"), "__class__"),
    (JULY.replace('"low": ""', '"low": 0'), "REASONING_EFFORT_PROMPTS"), (JULY.replace('= "low"', "= 1"), "DEFAULT_REASONING_EFFORT"),
    (V41_FILE.replace("{n}", "n"), "placeholder"), (V41_FILE.replace("{n}", "{a} {b}"), "placeholder"),
    (V41_FILE.replace("50", '"50"'), "REASONING_EFFORT_MAPPINGS"), ("A = " + "[" * 5000 + "]" * 5000, "parsed"), ("\x00", "parsed"),
    (APRIL.replace('"Follow {schema}"', '"Follow" + x'), "response_format_template"), ("#" * (1 << 20) + "\n", "larger"),
])  # fmt: skip
def test_files_that_cannot_be_used_stop_the_start(tmp_path: Path, text: str, what: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(CheckpointError, match=what):
        load_texts(path, "v4")


def test_texts_that_differ_from_the_published_ones_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, JULY)
    names = [
        "TOOLS_TEMPLATE",
        "response_format_template",
        "tool_output_template",
        "REASONING_EFFORT_PROMPTS.high",
        "REASONING_EFFORT_PROMPTS.max",
    ]
    assert sorted(differing(read_literals(path))) == sorted(set(names) - {"tool_output_template"})
    with caplog.at_level(logging.WARNING, "abyssal"):
        load_texts(path, "v4")
    assert all(name in caplog.text for name in differing(read_literals(path)))
    own = {
        name: hashlib.sha256(text.encode()).hexdigest()[:16]
        for name, text in read_literals(path).items()
        if isinstance(text, str)
    }
    monkeypatch.setattr(encoding_file, "PUBLISHED", {**own, "REASONING_EFFORT_PROMPTS.high": "0" * 16})
    assert differing(read_literals(path)) == ["REASONING_EFFORT_PROMPTS.high"]


def test_the_published_result_template_is_the_one_that_is_written() -> None:
    """Its text is known from its length and hash, so the hashes are those of these texts."""
    text = "<tool_result>{content}</tool_result>"
    assert len(text) == 36 and hashlib.sha256(text.encode()).hexdigest()[:16] == PUBLISHED["tool_output_template"]
