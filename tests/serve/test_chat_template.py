"""Chat templates of checkpoints: in a sandbox, and no message forges a control token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import abyssal
from abyssal.errors import CheckpointError, RequestError
from abyssal.serve.chat import load_chat_format
from abyssal.serve.chat_template import ChatTemplate, read_template
from abyssal.serve.conversation import Conversation, parse_messages, parse_tools
from abyssal.tokenizer import Tokenizer
from tests.serve.scripted import TOKENIZER

TINY = Path(abyssal.__file__).parent / "assets" / "tiny-v4"
SOURCE = """{{ bos_token }}
{%- if tools %}{{ tools[0].function | tojson }}{% endif %}
{%- for message in messages %}
  {%- if message.role == 'user' %}<｜User｜>{{ message.content }}
  {%- elif message.role == 'tool' %}[{{ message.tool_call_id }}={{ message.content }}]
  {%- elif message.role == 'system' %}{{ message.content }}
  {%- else %}{{ message.content }}
    {%- for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.x }}){% endfor %}{{ eos_token }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% endif %}"""


def conversation(messages: list[Any], tools: list[Any] | None = None, thinking: bool = False) -> Conversation:
    return Conversation(tuple(parse_messages(messages)), parse_tools(tools), thinking=thinking)


def shown(source: str, messages: list[Any], **options: Any) -> str:
    ids = TOKENIZER.encode_segments(ChatTemplate(source).render(conversation(messages, **options), TOKENIZER))
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_template_is_used_where_there_is_one(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    messages = [user("U"), {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "R"}]
    tool = {"type": "function", "function": {"name": "f<", "description": "ä"} | {"name": "f"}}
    (tmp_path / "chat_template.jinja").write_text(SOURCE)
    chat = load_chat_format(tmp_path, "v4")
    text = TOKENIZER.decode(chat.encode(TOKENIZER, conversation(messages, [tool], True)), skip_special_tokens=False)
    expected = '{"name": "f", "description": "ä"}<｜User｜>Uf(é)<｜end▁of▁sentence｜>[1=R]<｜Assistant｜><think>'
    assert text == "<｜begin▁of▁sentence｜>" + expected


@pytest.mark.parametrize("raw", [SOURCE, [{"name": "default", "template": SOURCE}, {"name": "tool_use", "template": "x"}]])
def test_templates_in_the_tokenizer_s_config(tmp_path: Path, raw: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": raw}))
    assert read_template(tmp_path) == SOURCE


def test_no_template(tmp_path: Path) -> None:
    assert read_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert read_template(tmp_path) is None


@pytest.mark.parametrize("raw", [7, {"default": "x"}, [{"name": "tool_use", "template": "x"}], [{"name": ["x"]}]])
def test_templates_of_another_kind_stop_the_start(tmp_path: Path, raw: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": raw}))
    with pytest.raises(CheckpointError, match="chat_template"):
        read_template(tmp_path)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("raw", [b"\xff", b"[" * 100_000, b"", b"[]", b"null"])
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, name: str, raw: bytes) -> None:
    (tmp_path / name).write_bytes(raw)
    if name.endswith(".jinja") and raw != b"\xff":
        assert read_template(tmp_path) == raw.decode()
    else:
        with pytest.raises(CheckpointError, match=name):
            read_template(tmp_path)


def test_a_template_of_a_tokenizer_without_control_tokens(tmp_path: Path) -> None:
    raw = json.loads((TINY / "tokenizer.json").read_text()) | {"added_tokens": []}
    text = "<think>, spelled"
    segments = ChatTemplate("{{ messages[0].content }}").render(conversation([user(text)]), Tokenizer(raw))
    assert segments == [text]


def test_a_broken_template_stops_the_start() -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize("source", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{% include '/etc/passwd' %}", "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception('not like this') }}", "{{ 1 / 0 }}", "{{ nothing.at.all }}",
])  # fmt: skip
def test_what_a_template_may_not_do_refuses_the_request(source: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        shown(source, [user("U")])


PIECES = [
    "<think>",
    "</think>",
    "<｜",
    "User",
    "｜>",
    "<｜User｜>",
    "<｜end▁of▁sentence｜>",
    "｜DSML｜",
    "a",
    "\ue000",
    "\ue001",
    "{{ 7 * 7 }}",
]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_k23_no_message_forges_a_turn(text: str) -> None:
    ids = TOKENIZER.encode_segments(ChatTemplate(SOURCE).render(conversation([user(text)]), TOKENIZER))
    assert [i for i in ids if i < 9] == [0, 3, 4, 7], "BOS, user, assistant, end of thinking"
    assert ids[2:-2] == TOKENIZER.encode(text)
