"""Command-line options derived from the config classes: names, choices and help are written once, there."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from abyssal.config import EngineConfig, ServerConfig, from_sources, server_from_sources
from abyssal.engine.request import SamplingParams
from abyssal.options import OptionSpec, option_specs

F = TypeVar("F", bound=Callable[..., Any])

EPILOG = "Options of the engine and the server are environment variables too: --max-model-len is ABYSSAL_MAX_MODEL_LEN."

_SAMPLING = {
    "temperature": (float, "0 = greedy"),
    "top_p": (float, "keep the most likely tokens that hold this probability together"),
    "top_k": (int, "keep this many of the most likely tokens; 0 = all"),
    "min_p": (float, "drop tokens below this part of the most likely one's probability"),
    "max_tokens": (int, "end after this many tokens; default: 256 in generate, in chat the room left"),
    "stop": (str, "end before this text; may be repeated"),
}


def model_argument(command: F) -> F:
    """Add the optional positional MODEL."""
    return click.argument("model", required=False)(command)


def config_options(cls: type) -> Callable[[F], F]:
    """Add one option per field of a config class, without defaults: what is not given stays None, for `build` to fill."""

    def add(command: F) -> F:
        for spec in reversed([spec for spec in option_specs(cls) if spec.name != "model"]):
            command = _option(spec)(command)
        return command

    return add


def _option(spec: OptionSpec) -> Callable[[F], F]:
    shown = spec.help + ("" if spec.default is None else f"  [default: {str(spec.default).lower()}]")
    if spec.type is bool:
        return click.option(f"{spec.flag}/--no-{spec.flag[2:]}", spec.name, default=None, help=shown)
    metavar = f"[{'|'.join(spec.choices)}]" if spec.choices else spec.name.rsplit("_", 1)[-1].upper()
    return click.option(spec.flag, spec.name, default=None, metavar=metavar, help=shown)


def sampling_options(command: F) -> F:
    """Add the sampling options of `generate` and `chat`."""
    for name, (kind, text) in reversed(_SAMPLING.items()):
        flag = "--" + name.replace("_", "-")
        command = click.option(flag, name, type=kind, default=None, multiple=name == "stop", help=text)(command)
    return command


def split_config(given: dict[str, Any]) -> EngineConfig:
    """Take the engine's options out of `given` and build the config with them.

    Raises:
        ConfigError: an option or an ABYSSAL_ variable is unknown or has a bad value.
    """
    return from_sources(_take(EngineConfig, given), os.environ)


def split_server_config(given: dict[str, Any]) -> ServerConfig:
    """The server's part of `given`, as `split_config`."""
    return server_from_sources(_take(ServerConfig, given), os.environ)


def split_sampling(given: dict[str, Any]) -> SamplingParams:
    """Take the sampling options out of `given`; what was not given keeps the default of `SamplingParams`."""
    values = {name: given.pop(name) for name in _SAMPLING}
    values["stop"] = list(values["stop"]) or None
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


def _take(cls: type, given: dict[str, Any]) -> dict[str, Any]:
    return {spec.name: given.pop(spec.name) for spec in option_specs(cls) if spec.name in given}
