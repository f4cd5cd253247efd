"""The command line: `abyssal serve | generate | chat | plan | bench | doctor`."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

import abyssal
from abyssal.cli.console import fail
from abyssal.cli.options import EPILOG
from abyssal.errors import AbyssalError, ConfigError, show
from abyssal.options import hint

# Command -> first line of its help. Each lives in the module of its name, imported when it is used: `abyssal --help` is quick.
COMMANDS = {
    "serve": "Serve the OpenAI API over HTTP.",
    "generate": "Complete one prompt.",
    "chat": "Talk to the model in the terminal.",
    "plan": "Show what a model and its KV cache need.",
    "bench": "Measure decode steps and prefills on this machine.",
    "doctor": "Show what this machine can run, and why not more.",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"abyssal.cli.{cmd_name}").command
        command.help, command.epilog = COMMANDS[cmd_name], EPILOG
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            raise ConfigError(f"unknown command {show(args[0])}{hint(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise ConfigError(f"unknown option {show(error.option_name)}{_option_hint(error)}") from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _option_hint(error: click.NoSuchOption) -> str:
    assert error.ctx is not None
    known: list[str] = []
    for param in error.ctx.command.get_params(error.ctx):
        known += [param.human_readable_name] if isinstance(param, click.Argument) else [*param.opts, *param.secondary_opts]
    return hint(error.option_name, known, f"{error.ctx.command_path} --help shows all")


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(abyssal.__version__, prog_name="abyssal")
def cli() -> None:
    """Abyssal: an inference engine for DeepSeek V4 and V4.1.

    MODEL is a checkpoint folder or a Hugging Face id; without it, the embedded tiny-v4.
    """


def main() -> None:
    """Entry point of the `abyssal` script. Deliberate errors are one line: exit code 2 for options, 1 for anything else."""
    try:
        cli(prog_name="abyssal")
    except AbyssalError as error:
        fail(str(error))
        sys.exit(2 if isinstance(error, ConfigError) else 1)
