"""`abyssal serve`."""

from __future__ import annotations

from typing import Any

import click

from abyssal.cli.console import log_to_stderr
from abyssal.cli.options import config_options, model_argument, split_config, split_server_config
from abyssal.config import EngineConfig, ServerConfig


@click.command("serve")
@model_argument
@config_options(ServerConfig)
@config_options(EngineConfig)
def command(**given: Any) -> None:
    server = split_server_config(given)
    engine = split_config(given)
    log_to_stderr()
    from abyssal.serve.run import run_server

    run_server(engine, server)
