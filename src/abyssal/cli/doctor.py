"""`abyssal doctor`: what this machine can run, and why not more."""

from __future__ import annotations

import os
import platform
import shutil
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import abyssal
from abyssal.cli.options import config_options, model_argument, split_config
from abyssal.config import ALLOWED_KV, GLUON_RELEASES, EngineConfig, Gpu, ModelConfig, resolve
from abyssal.model_config import load_model_config
from abyssal.options import option_specs

Rows = list[tuple[str, str]]


@click.command("doctor")
@model_argument
@config_options(EngineConfig)
def command(**given: Any) -> None:
    checked = given["model"] is not None
    config = split_config(given)
    console = Console(soft_wrap=True)
    _print(console, "Machine", _machine())
    _print(console, "Implementations", _implementations())
    if checked:
        _print(console, f"Model {config.model}", _model(config))


def _print(console: Console, title: str, rows: Rows) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    console.print()


def _machine() -> Rows:
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rows = [
        ("abyssal", abyssal.__version__),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("PyTorch", f"{torch.__version__}, {torch.get_num_threads()} CPU threads"),
        ("Triton", _installed("triton")),
        ("memory", f"{memory / 2**30:.1f} GiB, {shutil.disk_usage(Path.cwd()).free / 2**30:.1f} GiB free on this disk"),
    ]
    if not torch.cuda.is_available():
        why = "this PyTorch is built without CUDA" if torch.version.cuda is None else "PyTorch sees no CUDA device"
        return [*rows, ("GPU", f"none: {why}")]
    for index in range(torch.cuda.device_count()):
        props = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        sizes = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        rows.append((f"GPU {index}", f"{props.name}, compute capability {props.major}.{props.minor}, {sizes}"))
    return rows


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed (CUDA builds of PyTorch bring it)"


def _implementations() -> Rows:
    """Every option that chooses an implementation or a record format: which of its values exist here."""
    from abyssal.ops._select import find_gpu

    gpu = find_gpu()
    absent = {"auto"}
    if gpu is None or gpu.why_no_kernels is not None:
        absent |= {"triton", "hopper"}
    elif gpu.why_not_hopper is not None:
        absent.add("hopper")
    rows = []
    for spec in option_specs(EngineConfig):
        if spec.name in ("kv_layout", "index_layout", "backend"):
            rows.append((spec.name, ", ".join(value for value in spec.choices or () if value not in absent)))
    kinds: dict[str, list[str]] = {}
    for kv, compressed in sorted(ALLOWED_KV):
        kinds.setdefault(compressed, []).append(kv)
    rows.append(("compressed_kv_layout", "; ".join(f"{compressed} with {', '.join(kv)}" for compressed, kv in kinds.items())))
    return [*rows, ("kernels", _kernels(gpu))]


def _kernels(gpu: Gpu | None) -> str:
    """Which backend auto takes on this machine for a model of the released widths in bfloat16, and why not a faster one."""
    if gpu is None:
        return "reference only: no CUDA device"
    if gpu.why_no_kernels is not None:
        return f"reference only: {gpu.why_no_kernels}"
    if gpu.why_not_hopper is not None:
        return f"triton; not hopper: {gpu.why_not_hopper}"
    return f"hopper, with Gluon of triton {', '.join(GLUON_RELEASES)}"


def _model(config: EngineConfig) -> Rows:
    """Check everything that can be checked without reading weights."""
    import torch

    from abyssal.checkpoint import preflight
    from abyssal.checkpoint.source import resolve_model
    from abyssal.ops._select import find_gpu

    folder = resolve_model(config.model)
    model = load_model_config(folder)
    resolved = resolve(config, model, torch.cuda.is_available(), find_gpu())
    summary = preflight(folder)
    types = ", ".join(f"{count} {name}" for name, count in sorted(summary.dtypes.items()))
    options = ("device", "dtype", "kv_layout", "compressed_kv_layout", "index_layout", "backend")
    return [
        ("folder", str(folder)),
        ("family", model.family),
        ("layers", _layers(model)),
        ("longest context", f"{model.max_position} tokens"),
        ("files", f"{summary.files} holding {summary.tensors} tensors, {summary.nbytes / 2**30:.2f} GiB ({types})"),
        ("tokenizer", "yes" if (folder / "tokenizer.json").is_file() else "none: token ids only"),
        ("would run with", ", ".join(f"{name}={getattr(resolved, name)}" for name in options)),
    ]


def _layers(model: ModelConfig) -> str:
    ratios = Counter(plan.ratio for plan in model.layers)
    kinds = [f"{count} window only" if ratio == 0 else f"{count} of ratio {ratio}" for ratio, count in sorted(ratios.items())]
    return f"{model.num_layers}: " + ", ".join(kinds)
