"""`abyssal plan`: what a model and its caches need, before anything is loaded."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from abyssal.checkpoint.sizes import weight_bytes
from abyssal.cli.options import config_options, model_argument, split_config
from abyssal.cli.plot import Line, draw
from abyssal.config import EngineConfig, ModelConfig, divisors, resolve
from abyssal.errors import ConfigError
from abyssal.kv.layouts import V32_TOKEN_BYTES
from abyssal.kv.report import GIB, capacity_report, memory_report, sequence_totals, stacks
from abyssal.kv.specs import plan_caches
from abyssal.model_config import load_model_config
from abyssal.model_config.presets import PRESETS, load_preset
from abyssal.options import build, check_options, option, option_specs

STEP_WORKSPACE = 4 << 30  # bytes assumed for a step's activations; the engine measures them when it starts
WIDTH = 120  # columns of text that the widest table needs
SIZES = ("state", "growing", "payload", "pages")  # columns in GiB
LAYOUTS = ("kv_layout", "compressed_kv_layout", "index_layout")


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """What `abyssal plan` is asked, beside the engine's options."""

    preset: str | None = option(None, "a released model instead of MODEL; no files are needed", choices=PRESETS)
    context: int | None = option(None, "tokens of the sequence to plan for; default: the model's longest", low=1)
    gpu_memory: int | None = option(
        None, "memory of one GPU, such as 141GiB; left out, only the cost is shown", low=1, in_bytes=True
    )
    gpus: int = option(1, "GPUs that share out the experts; attention runs on each for its own requests", low=1)

    def __post_init__(self) -> None:
        check_options(self)
        if self.gpu_memory is not None and self.gpu_memory < GIB:
            raise ConfigError(f"gpu_memory={self.gpu_memory} is less than 1 GiB; give a unit, such as 141GiB")


@click.command("plan")
@model_argument
@click.option("--json", "as_json", is_flag=True, help="print one JSON object; sizes in GiB, those named bytes in bytes")
@click.option("--plot", metavar="FILE", default=None, help="also draw memory against context length; FILE ends in .svg")
@config_options(PlanConfig)
@config_options(EngineConfig)
def command(as_json: bool, plot: str | None, **given: Any) -> None:
    asked = build(PlanConfig, {spec.name: given.pop(spec.name) for spec in option_specs(PlanConfig)}, {})
    if plot is not None:
        _check_plot(plot)
    chosen, options = given["model"], split_config(given)
    _check_ranks(options)
    if asked.preset is not None and chosen is not None:
        raise ConfigError(f"both MODEL {chosen!r} and preset={asked.preset!r} are given; leave one out")
    name, model = (
        (options.model, _checkpoint(options.model)) if asked.preset is None else (asked.preset, load_preset(asked.preset))
    )
    if model.num_experts % asked.gpus:
        raise ConfigError(
            f"gpus={asked.gpus} does not divide this model's {model.num_experts} experts, which the GPUs share out; choose one of "
            f"{divisors(model.num_experts)}"
        )
    config = resolve(options, model, device_available=True)  # auto is what it would be on a GPU, wherever this runs
    if asked.context is not None and asked.context > (config.max_model_len or asked.context):
        raise ConfigError(
            f"context={asked.context} exceeds max_model_len={config.max_model_len}; lower it or raise max_model_len"
        )
    context = asked.context or config.max_model_len or model.max_position
    if context > model.max_position:
        raise ConfigError(f"context={context} exceeds the model's max_position_embeddings={model.max_position}; lower it")
    report = {"model": name, **memory_report(model, config, context), **_machine(asked, model, config, context)}
    if plot is not None:
        Path(plot).write_text(_plot(name, model, config))
    if as_json:
        click.echo(json.dumps(report, indent=1))
    else:
        _print(report)


def _check_plot(plot: str) -> None:
    """Before anything is computed: whether the drawing can be written."""
    file = Path(plot)
    if file.suffix != ".svg":
        raise ConfigError(f"--plot {plot!r} must end in .svg, the one format that is drawn")
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK) or file.is_dir():
        raise ConfigError(f"--plot {plot!r} cannot be written; name a file in a folder that exists and is writable")


def _check_ranks(options: EngineConfig) -> None:
    """Ranks are not what is planned for."""
    ranks = {"dp": options.dp, "tp": options.tp, "ep": options.ep}
    if given := [f"{name}={size}" for name, size in ranks.items() if size not in (1, None)]:
        raise ConfigError(
            f"plan takes no {', '.join(given)}: it counts GPUs that each run attention for their own requests and share out the "
            "experts; give their number by --gpus"
        )


def _checkpoint(name: str) -> ModelConfig:
    from abyssal.checkpoint.source import resolve_model

    return load_model_config(resolve_model(name))


def _machine(asked: PlanConfig, model: ModelConfig, config: EngineConfig, context: int) -> dict[str, Any]:
    """Weights, and how many sequences the memory beside them holds, where a size is given."""
    weights = weight_bytes(model, getattr(torch, config.dtype))
    report: dict[str, Any] = {
        "gpus": asked.gpus,
        "weights": {
            "total": weights.total / GIB,
            "experts": weights.experts / GIB,
            "per_gpu": weights.per_gpu(asked.gpus) / GIB,
            "on_disk": weights.on_disk / GIB,
        },
    }
    if asked.gpu_memory is None and config.kv_cache_bytes is None:
        return report
    if asked.gpu_memory is None:
        return report | capacity_report(model, config, context, config.kv_cache_bytes or 0, asked.gpus)
    usable = int(asked.gpu_memory * config.gpu_memory_utilization) - STEP_WORKSPACE

    def budget(gpus: int) -> int:
        return usable - weights.per_gpu(gpus) if config.kv_cache_bytes is None else config.kv_cache_bytes

    def fits(gpus: int) -> bool:
        beside = weights.per_gpu(gpus) + (config.kv_cache_bytes or 0) <= usable
        return beside and capacity_report(model, config, context, budget(gpus), gpus)["sequences"] > 0

    capacity = capacity_report(model, config, context, max(0, budget(asked.gpus)), asked.gpus)
    if not fits(asked.gpus):
        capacity |= {"sequences_per_gpu": 0, "sequences": 0}
    return report | {
        "gpu_memory": asked.gpu_memory / GIB,
        "least_gpus": next(filter(fits, divisors(model.num_experts)), None),
        **capacity,
    }


def _plot(name: str, model: ModelConfig, config: EngineConfig) -> str:
    lengths = [1 << n for n in range(10, model.max_position.bit_length())]
    lines = []
    for stack in stacks(model, config):
        plan = plan_caches(model, *stack.record_layouts)
        lines.append(Line(_layouts(stack), [(n, sequence_totals(plan, n)["payload"] * GIB) for n in lengths]))
    v32 = [(n, float(V32_TOKEN_BYTES * model.num_layers * n)) for n in lengths]
    return draw(f"{name}: KV memory of one sequence", [*lines, Line("V3.2-style, bf16", v32, dashed=True)])


def _layouts(config: EngineConfig) -> str:
    kv, compressed, index = (getattr(config, name) for name in LAYOUTS)
    return f"{kv}{'' if compressed == 'same' else '+' + compressed}, {index} keys"


def _print(report: dict[str, Any]) -> None:
    console = Console(soft_wrap=True)
    console.width = max(console.width, WIDTH)
    chosen = ", ".join(f"{name}={report[name]}" for name in LAYOUTS)
    console.print(f"{report['model']} ({report['family']}), one sequence of {report['context']} tokens, {chosen}", style="bold")
    console.print(
        f"{_size(report['payload'])} of records ({_size(report['growing'])} growing, {_size(report['windows'])} windows) and "
        f"{_size(report['state'])} of state; {_size(report['pages'])} in pages. {report['bytes_per_token']:g} bytes per token. "
        f"A V3.2-style stack: {_size(report['v32_style'])}, {report['ratio']:.3g} times as much.\n"
    )
    kinds = [{**kind, "payload": kind["payload_bytes"] / GIB, "pages": kind["pages_bytes"] / GIB} for kind in report["kinds"]]
    _table(
        console, "By kind", kinds, ["kind", "group", "layout", "layers", "bytes_per_entry", "bytes_per_token", "payload", "pages"]
    )
    buckets = [{"bucket": name, **bucket} for name, bucket in report["buckets"].items()]
    _table(console, f"Buckets: a block of 256 tokens takes {report['block_bytes']} bytes", buckets, list(buckets[0]))
    _table(console, "By length", report["lengths"], ["tokens", "state", "payload", "pages"])
    _table(console, "Records, saving against v4", report["records"], ["layout", "bytes_per_entry", "saving"])
    columns = [*LAYOUTS, "bytes_per_token", "growing", "payload", "pages", "saving"]
    _table(console, "Layouts, saving of payload against the first", report["stacks"], columns)
    weights = report["weights"]
    console.print(
        f"Weights: {_size(weights['total'])}, of which experts {_size(weights['experts'])}; {_size(weights['per_gpu'])} on each of "
        f"{report['gpus']} GPU(s)." + (f" N-gram tables: {_size(weights['on_disk'])}, on disk." if weights["on_disk"] else "")
    )
    if "sequences" in report:
        console.print(
            f"Cache: {_size(report['cache_per_gpu'])} per GPU hold {report['sequences_per_gpu']} such sequences, "
            f"{report['sequences']} on all GPUs."
        )
    if "least_gpus" in report and not report["sequences"]:
        least = report["least_gpus"]
        console.print(
            f"This does not fit: {'no number of such GPUs is enough' if least is None else f'it needs {least} such GPUs'}."
        )


def _table(console: Console, title: str, rows: list[dict[str, Any]], columns: list[str]) -> None:
    if not rows:
        return
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right" if isinstance(rows[0][name], int | float) else "left")
    for row in rows:
        table.add_row(*(_shown(name, row[name]) for name in columns))
    console.print(table)
    console.print()


def _shown(name: str, value: Any) -> str:
    if name == "saving":
        return f"{value:.1%}"
    if name in SIZES:
        return _size(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _size(gib: float) -> str:
    return f"{gib:.4g} GiB" if gib >= 1 else f"{gib * 1024:.4g} MiB"
