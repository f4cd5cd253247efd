"""`abyssal bench`: what a model's decode steps and prefills take on this machine, by op, and beside what they cannot avoid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from abyssal.cli.console import log_to_stderr
from abyssal.cli.options import config_options, model_argument, split_config
from abyssal.config import EngineConfig
from abyssal.engine.engine import Engine
from abyssal.errors import AbyssalError, ConfigError
from abyssal.measure.ceilings import Ceilings, measure_ceilings
from abyssal.measure.steps import Decode, Failed, Prefill, Row, as_dict, decode_rows, measure_prefill
from abyssal.options import build, check_options, option, option_specs

# On a CPU so little that the embedded model takes seconds.
DEFAULTS = {
    "cpu": {"batches": "1,4", "contexts": "512,2048", "prefills": "1024"},
    "cuda": {"batches": "1,8,32,64", "contexts": "8192,65536", "prefills": "8192,65536"},
}
NOTE = (
    "Decode: the caches hold random records, no computed context; tokens are drawn greedily. Roof: bytes of weights and records that a step "
    "needs, at the copy bandwidth measured here. A prefill of many chunks is sampled and interpolated."
)
SHOWN_OPS = 6  # of a row; the JSON has all of them
WIDTH = 120


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What `abyssal bench` is asked, beside the engine's options."""

    batches: str | None = option(None, "sequences that decode together, such as 1,8,32; default: 1,4 on a CPU, else 1,8,32,64")
    contexts: str | None = option(None, "tokens that each has computed; default: 512,2048 on a CPU, else 8192,65536")
    prefills: str | None = option(None, "prompt lengths, 0 for none; default: 1024 on a CPU, else 8192,65536")
    steps: int = option(16, "decode steps that are timed for each row", low=2)

    def __post_init__(self) -> None:
        check_options(self)

    def lengths(self, name: str, device: str) -> list[int]:
        """The numbers of an option that is a list.

        Raises:
            ConfigError: it is no list of numbers.
        """
        text = getattr(self, name) or DEFAULTS[device][name]
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdecimal() and len(part) < 10 for part in parts) or (name != "prefills" and "0" in parts):
            raise ConfigError(
                f"{name}={text!r} must be whole numbers above 0, separated by commas, such as {DEFAULTS[device][name]}"
            )
        return sorted({int(part) for part in parts} - {0})


@click.command("bench")
@model_argument
@click.option("--json", "as_json", is_flag=True, help="print one JSON object, with every op of every row")
@config_options(BenchConfig)
@config_options(EngineConfig)
def command(as_json: bool, **given: Any) -> None:
    asked = build(BenchConfig, {spec.name: given.pop(spec.name) for spec in option_specs(BenchConfig)}, {})
    config = split_config(given)
    log_to_stderr()
    cuda = torch.cuda.is_available() if config.device == "auto" else config.device == "cuda"
    lists = {name: asked.lengths(name, "cuda" if cuda else "cpu") for name in ("batches", "contexts", "prefills")}
    most = max(config.max_num_seqs, *lists["batches"])
    engine = Engine(replace(config, max_num_seqs=most, enable_prefix_caching=False))
    ceilings = measure_ceilings(engine.runner.device, engine.runner.dtype)
    rows = []
    for row in measured(engine, lists, asked.steps, ceilings):
        rows.append(row)
        if not as_json:
            click.echo(f"{describe(row)}: {result(row)}", err=True)
    if as_json:
        facts = {"model": engine.info.model_name, "options": engine.info.options, "ceilings": asdict(ceilings), "note": NOTE}
        click.echo(json.dumps({**facts, "rows": [as_dict(row) for row in rows]}, indent=1))
    else:
        print_table(engine, ceilings, rows)
    if failed := sum(isinstance(row, Failed) for row in rows):
        raise AbyssalError(f"{failed} of {len(rows)} rows could not be measured; they say why")


def measured(engine: Engine, lists: dict[str, list[int]], steps: int, ceilings: Ceilings) -> Iterator[Row]:
    longest = engine.info.max_model_len
    for context in lists["contexts"]:
        if context < longest - 2 * steps:
            yield from decode_rows(engine, lists["batches"], context, steps, ceilings, with_breakdown=True)
        else:
            yield Failed(f"decode at {context}", f"max_model_len is {longest}")
    for tokens in lists["prefills"]:
        if tokens < longest:
            yield measure_prefill(engine, tokens, ceilings)
        else:
            yield Failed(f"prefill of {tokens}", f"max_model_len is {longest}")


def describe(row: Row) -> str:
    if isinstance(row, Decode):
        return f"decode, {row.batch} x {row.context}"
    if isinstance(row, Prefill):
        return f"prefill, {row.tokens} by {row.chunk}" + ("" if row.sampled is None else f", {row.sampled} chunks measured")
    return row.what


def result(row: Row) -> str:
    if isinstance(row, Decode):
        return f"{row.median_ms:.2f} ms"
    return f"{row.seconds:.2f} s" if isinstance(row, Prefill) else row.error


def print_table(engine: Engine, ceilings: Ceilings, rows: list[Row]) -> None:
    console = Console(soft_wrap=True)
    console.width = max(console.width, WIDTH)
    title = f"{engine.info.model_name}: " + ", ".join(f"{name}={value}" for name, value in engine.info.options.items())
    console.print(title, style="bold")
    fp8 = "" if ceilings.fp8_matmul is None else f", {ceilings.fp8_matmul / 1e12:.4g} in FP8"
    console.print(
        f"Measured here: copy {ceilings.copy / 1e9:.4g} GB/s, products {ceilings.matmul / 1e12:.4g} TFLOP/s{fp8}. {NOTE}"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("measurement", "time", "tokens/s", "of the roof", "by op, ms"):
        table.add_column(name, justify="left" if name in ("measurement", "by op, ms") else "right")
    for row in rows:
        table.add_row(describe(row), result(row), *_figures(row))
    console.print(table)


def _figures(row: Row) -> tuple[str, str, str]:
    if isinstance(row, Failed):
        return "", "", ""
    ops = ", ".join(f"{op} {ms:.3g}" for op, ms in list((row.breakdown_ms or {}).items())[:SHOWN_OPS])
    if isinstance(row, Decode):
        return f"{row.tokens_per_second:.4g}", f"{row.share:.1%}", ops
    shares = ", ".join(f"{op} {row.share[op]:.0%}" for op in ("sparse_attention", "moe") if op in row.share)
    return f"{row.tokens_per_second:.4g}", shares, f"{ops} (one chunk)"
