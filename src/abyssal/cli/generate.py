"""`abyssal generate`."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import Any

import click

from abyssal.cli.console import log_to_stderr, reading_input
from abyssal.cli.options import config_options, model_argument, sampling_options, split_config, split_sampling
from abyssal.config import EngineConfig
from abyssal.errors import AbyssalError, ConfigError, show

MAX_TOKENS = 256  # a raw completion often has no end of its own


@click.command("generate")
@model_argument
@click.option("--prompt", default=None, help="text to complete, as it is; - reads standard input (required)")
@sampling_options
@config_options(EngineConfig)
def command(prompt: str | None, **given: Any) -> None:
    if prompt is None:
        taken = "" if given["model"] is None else f" ({show(given['model'])} was taken as MODEL)"
        raise ConfigError(f"there is no prompt{taken}; give it as --prompt TEXT, or --prompt - to read standard input")
    params = split_sampling(given)
    config = split_config(given)
    if params.max_tokens is None:
        params = replace(params, max_tokens=MAX_TOKENS)
    with reading_input():
        text = sys.stdin.read() if prompt == "-" else prompt
    log_to_stderr()
    from abyssal.llm import LLM

    with LLM(**asdict(config)) as llm:
        for delta in llm.stream(text, params):
            click.echo(delta.text, nl=False)
            if delta.error is not None:
                raise AbyssalError(delta.error)
    click.echo()
