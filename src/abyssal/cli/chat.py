"""`abyssal chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from abyssal.cli.console import fail, log_to_stderr, reading_input
from abyssal.cli.options import config_options, model_argument, sampling_options, split_config, split_sampling
from abyssal.config import EngineConfig
from abyssal.engine.request import SamplingParams
from abyssal.errors import RequestError

if TYPE_CHECKING:
    from abyssal.llm import LLM

Messages = list[dict[str, Any]]

HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C ends an answer"


@click.command("chat")
@model_argument
@click.option("--system", default=None, help="system message")
@click.option("--thinking/--no-thinking", default=None, help="let the model think first; default: what the checkpoint says")
@sampling_options
@config_options(EngineConfig)
def command(system: str | None, thinking: bool | None, **given: Any) -> None:
    params = split_sampling(given)
    config = split_config(given)
    log_to_stderr()
    from abyssal.llm import LLM

    with LLM(**asdict(config)) as llm:
        converse(llm, [] if system is None else [{"role": "system", "content": system}], params, thinking)


def converse(llm: LLM, start: Messages, params: SamplingParams, thinking: bool | None) -> None:
    """Answer line after line until /exit or the end of the input. `start` is what /reset goes back to."""
    messages = list(start)
    for line in _lines():
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(start)
        elif line == "/help":
            click.echo(HELP, err=True)
        elif line.startswith("/"):
            fail(f"unknown command {line.split()[0]!r}: {HELP}; begin with a space to send it as text")
        elif line.strip():
            _turn(llm, messages, line.removeprefix(" "), params, thinking)


def _turn(llm: LLM, messages: Messages, text: str, params: SamplingParams, thinking: bool | None) -> None:
    """Ask, stream the answer, and remember both. A turn that fails is not remembered; Ctrl-C keeps what was said so far."""
    asked = [*messages, {"role": "user", "content": text}]
    answer: list[str] = []
    try:
        for delta in llm.stream_chat(asked, params, thinking):
            if delta.reasoning:  # shown, not remembered: the model does not see earlier reasoning again (V4 spec 5.4)
                click.secho(delta.reasoning, dim=True, nl=False, err=True)
            click.echo(delta.text, nl=False)
            answer.append(delta.text)
            if delta.error is not None:
                raise RequestError(delta.error)
    except RequestError as error:
        fail(str(error))
        return
    except KeyboardInterrupt:
        pass
    click.echo()
    messages[:] = [*asked, {"role": "assistant", "content": "".join(answer)}]


def _lines() -> Iterator[str]:
    """Lines of standard input; with a prompt and line editing when a person types them."""
    if not sys.stdin.isatty():
        with reading_input():
            yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import readline  # noqa: F401  importing it gives input() its editing keys and history

    click.echo(HELP, err=True)
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        except KeyboardInterrupt:  # of what was typed so far, as in a shell
            click.echo(f"\n{HELP}", err=True)
            continue
        yield line
