"""Names of other engines: each is answered with the name here, or with the reason why there is none, wherever it may be given."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from abyssal.config import EngineConfig, ServerConfig, from_sources
from abyssal.elsewhere import ABSENT, HERE
from abyssal.engine.request import SamplingParams
from abyssal.errors import ConfigError, RequestError
from abyssal.options import hint, option_specs
from abyssal.serve.schemas import ChatBody

Call = Callable[..., Any]  # the fixture `call`

OPTIONS = {spec.name: spec for cls in (EngineConfig, ServerConfig) for spec in option_specs(cls)}
PARAMETERS = {*SamplingParams.__dataclass_fields__, *ChatBody.model_fields}
OF_OPTIONS = {there: here for there, here in HERE.items() if here.removeprefix("no_") in OPTIONS}
DEPLOY = Path(__file__).parents[2] / "docs" / "deploy.md"


def test_every_name_leads_to_one_that_exists_and_is_none_itself() -> None:
    for there, here in HERE.items():
        assert here.removeprefix("no_") in OPTIONS.keys() | PARAMETERS, there
    assert not (HERE.keys() | ABSENT.keys()) & (OPTIONS.keys() | PARAMETERS)


def rows() -> list[tuple[list[str], str]]:
    """The table of docs/deploy.md: options of the others in a row, and its last cell."""
    found = []
    for line in DEPLOY.read_text().partition("Coming from another server")[2].splitlines()[4:]:
        if line.startswith("|"):
            *there, here = (cell.strip() for cell in line.strip("|").split("|"))
            found.append((re.findall(r"--([a-z-]+)", " ".join(there)), here))
    return found


def test_the_table_of_the_docs_says_what_the_messages_say() -> None:
    flags = ["MODEL", *(spec.flag for spec in OPTIONS.values()), "--no-enable-prefix-caching", "--no-enable-cuda-graphs"]
    for others, here in rows():
        for other in others:
            message = hint(f"--{other}", flags)
            if here.startswith("none: "):
                assert other.replace("-", "_") in ABSENT and message.startswith("; leave it out: "), other
            elif other not in here:
                assert re.search("here it is '(.+)'", message)[1] in here, other  # type: ignore[index]
    assert len(rows()) > 20


@pytest.mark.parametrize("there", OF_OPTIONS)
def test_an_option_is_answered_on_the_command_line_in_python_and_in_the_environment(call: Call, there: str) -> None:
    here = OF_OPTIONS[there]
    name = here.removeprefix("no_")
    done = call("serve", "tiny", f"--{there.replace('_', '-')}", "1")
    shown = "MODEL" if name == "model" else f"--{here.replace('_', '-')}"
    assert done.code == 2 and done.err == f"error: unknown option '--{there.replace('_', '-')}'; here it is '{shown}'\n"
    done = call("doctor", env={f"ABYSSAL_{there.upper()}": "1"})
    assert done.code == 2 and f"here it is {'' if here != name else chr(39)}{OPTIONS[name].env}" in done.err
    if name in EngineConfig.__dataclass_fields__:
        with pytest.raises(ConfigError, match=f"unknown option '{there}'; here it is '?{name}"):
            from_sources({there: 1}, {})


def test_parameters_of_requests_are_answered_too(call: Call) -> None:
    with pytest.raises(RequestError, match="unknown parameter 'max_new_tokens'; here it is 'max_tokens'"):
        SamplingParams(max_new_tokens=1)  # type: ignore[call-arg]
    for name in ("guided_decoding", "regex"):
        with pytest.raises(RequestError, match=f"unknown parameter '{name}'; leave it out: structured output is response_format"):
            SamplingParams(**{name: None})
    assert hint("enable_thinking", ChatBody.model_fields) == "; here it is 'chat_template_kwargs'"
    assert hint("regex", ChatBody.model_fields) == "; here it is 'response_format'"


def test_unknown_commands_and_options_are_one_line(call: Call) -> None:
    for args, words in (
        (["launch_server"], "unknown command 'launch_server'; known: bench, chat, "),
        (["plann"], "unknown command 'plann'; did you mean 'plan'?"),
        (["serve", "--max-num-seq", "4"], "unknown option '--max-num-seq'; did you mean '--max-num-seqs'?"),
        (["serve", "-tp", "2"], "unknown option '-t'; did you mean '--tp'?"),
        (["plan", "--zzz"], "unknown option '--zzz'; abyssal plan --help shows all"),
        (["serve", "--trust-remote-code"], "unknown option '--trust-remote-code'; leave it out: no code of a checkpoint is run"),
    ):
        done = call(*args)
        (line,) = done.err.splitlines()
        assert done.code == 2 and words in line, line
