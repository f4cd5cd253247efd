"""The whole engine on one GPU: decode and prefill of slices of V4-Flash and V4.1-Flash, beside the roof.

    python -m bench.engine_h200 [--quick] [--models v4-flash v4.1-flash] [--layers N] [--set NAME=VALUE ...]
        [--variants NAME=VALUE mhc=separate streams=one ...] [--json FILE]

A slice has the released sizes and random weights in the released formats, made on the GPU (`bench/slices.py`). A decode row resumes
sequences whose caches hold random records; its roof is what the step's weights and records take at the copy bandwidth measured here. A
prefill of many chunks is sampled at several positions, behind random records, and interpolated. A variant is an engine option, or
`mhc=separate`: hyper-connections in three launches (expand, project, finish) instead of one; or `streams=one`: nothing runs beside
anything else. `--quick` takes two to three minutes.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from abyssal.checkpoint.loader import Weights
from abyssal.cli.console import log_to_stderr
from abyssal.config import EngineConfig, from_sources
from abyssal.engine.engine import Engine
from abyssal.measure.ceilings import Ceilings, measure_ceilings, synchronised
from abyssal.measure.steps import Decode, Failed, Row, as_dict, decode_rows, measure_prefill
from bench.gpus import require_gpus
from bench.slices import SLICES, random_weights, slice_config, write_slice

LONG = 1 << 20
BATCHES, CONTEXTS, PREFILLS, STEPS = [1, 8, 32, 64, 128], [8192, 65536], [8192, 65536, LONG], 32
QUICK_BATCHES, QUICK_CONTEXTS, QUICK_PREFILLS, QUICK_STEPS = [1, 64], [8192], [8192, LONG], 16
VARIANT_BATCHES, VARIANT_CONTEXT = [1, 32, 64], 8192


def default_variants() -> list[str]:
    """Every switch of the engine's speed turned off, one at a time, and what has no switch."""
    switches = [f.name for f in fields(EngineConfig) if f.name.startswith("enable_") and f.name != "enable_prefix_caching"]
    return [f"{name}=false" for name in switches] + list(UNSWITCHED)


@contextmanager
def separate_launches() -> Iterator[None]:
    """Engines built inside run a mixing site as expand, projection, and Sinkhorn with collapse and norm."""
    from abyssal.ops._kernels import KernelOps
    from abyssal.ops.hyper_connection import triton as hc

    one_site, config = KernelOps.site, hc.launch_config

    def two(tokens: int, hidden: int, num_sms: int, own_pre: bool, one_launch: bool = True) -> hc.LaunchConfig:
        return config(tokens, hidden, num_sms, own_pre, one_launch=False)

    def separate(self: KernelOps, source: Any, norm: Any, weights: Any, *, out: Any, post: Any, comb: Any, **rest: Any) -> Any:
        if out is not None:
            source = hc.expand(source, out, post, comb)
        return one_site(self, source, norm, weights, out=None, post=None, comb=None, **rest)

    with mock.patch.object(hc, "launch_config", two), mock.patch.object(KernelOps, "site", separate):
        yield


@contextmanager
def one_stream() -> Iterator[None]:
    """Engines built inside run all ops of a step one after another."""
    from abyssal.ops._kernels import KernelOps

    init = KernelOps.__init__

    def alone(self: KernelOps, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self._beside = self._shared = None

    with mock.patch.object(KernelOps, "__init__", alone):
        yield


UNSWITCHED = {"mhc=separate": separate_launches, "streams=one": one_stream}  # variants that are no options


def build(folder: Path, options: dict[str, str], batch: int) -> Engine:
    """An engine with random weights."""
    start = time.perf_counter()

    def load(*args: Any) -> Weights:
        weights = random_weights(*args)
        synchronised(args[2])
        print(f"# weights made after {time.perf_counter() - start:.1f} s", flush=True)
        return weights

    defaults = {"device": "cuda", "gpu_memory_utilization": "0.95", "enable_prefix_caching": "false", "max_num_seqs": str(batch)}
    engine = Engine(from_sources({"model": str(folder), **defaults, **options}, {}), load)
    print(
        f"# built after {time.perf_counter() - start:.1f} s: {engine.runner.sizes.total_bytes / 2**30:.1f} GiB of cache, "
        f"max_model_len {engine.info.max_model_len}, backend {engine.config.backend}", flush=True,
    )  # fmt: skip
    return engine


class Report:
    """Rows as they come: printed, and written to a file each time, so that an ended run leaves what it has."""

    def __init__(self, file: Path | None, ceilings: Ceilings) -> None:
        self.file, self.lines = file, []
        self.content: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "torch": torch.__version__, "ceilings": asdict(ceilings), "rows": [],
        }  # fmt: skip

    def add(self, model: str, variant: str, row: Row) -> None:
        self.content["rows"].append({"model": model, "variant": variant, **as_dict(row)})
        self.lines.append(f"{model:11} {variant:26} {_line(row)}")
        print(self.lines[-1], flush=True)
        if not isinstance(row, Failed) and row.breakdown_ms is not None:
            for op, ms in row.breakdown_ms.items():
                if ms >= 0.001:
                    print(f"    {op:20} {ms:9.3f} ms", flush=True)
        if self.file is not None:
            self.file.write_text(json.dumps(self.content, indent=1))

    def print_table(self) -> None:
        print(f"\n{self.content['device']}, ceilings {self.content['ceilings']}")
        print(f"{'model':11} {'variant':26} measurement")
        for line in self.lines:
            print(line)


def _line(row: Row) -> str:
    if isinstance(row, Failed):
        return f"{row.what}: FAILED: {row.error}"
    if isinstance(row, Decode):
        busy = "" if row.busy_ms is None else f", GPU busy {row.busy_ms:.2f}"
        busy += "" if row.host_ms is None else f", host {row.host_ms:.2f}"
        return (
            f"decode {row.batch:>3} x {row.context:>7}: {row.median_ms:8.2f} ms{busy}, {row.tokens_per_second:8.0f} tok/s, roof "
            f"{row.roof_ms:.2f} ms, {row.median_ms / row.roof_ms:.2f} times it"
        )
    shares = ", ".join(
        f"{op} {row.share[op]:.0%}" for op in ("sparse_attention", "index_score", "moe", "linear") if op in row.share
    )
    sampled = "" if row.sampled is None else f" ({row.sampled} chunks)"
    return (
        f"prefill {row.tokens} by {row.chunk}{sampled}: {row.seconds:.2f} s (first {row.first_seconds:.1f}), {row.tokens_per_second:.0f} "
        f"tok/s, peak {(row.peak_bytes or 0) / 2**30:.1f} GiB, GPU busy {row.busy_ms:.1f} of {row.profiled_ms:.1f} ms of a chunk; {shares}"
    )


def base_rows(engine: Engine, args: argparse.Namespace, ceilings: Ceilings) -> Iterator[Row]:
    for context in args.contexts:
        yield from decode_rows(engine, args.batches, context, args.steps, ceilings, with_breakdown=True)
    if args.long:
        yield from decode_rows(engine, [1], args.long, args.steps, ceilings, with_breakdown=True)
    for tokens in args.prefills:
        yield measure_prefill(engine, tokens, ceilings)


def variant_rows(engine: Engine, args: argparse.Namespace, ceilings: Ceilings) -> Iterator[Row]:
    batches = [n for n in VARIANT_BATCHES if n <= max(args.batches)]
    yield from decode_rows(engine, batches, VARIANT_CONTEXT, args.steps, ceilings, with_breakdown=False)


def measure(report: Report, folder: Path, model: str, variant: str, args: argparse.Namespace, ceilings: Ceilings) -> None:
    """All rows of one engine. Nothing of it is left behind."""
    options = dict(pair.split("=", 1) for pair in args.set)
    try:
        with UNSWITCHED.get(variant, nullcontext)():
            if variant != "base" and variant not in UNSWITCHED:
                options |= dict([variant.split("=", 1)])
            engine = build(folder, options, max(args.batches))
            for row in (base_rows if variant == "base" else variant_rows)(engine, args, ceilings):
                report.add(model, variant, row)
    except Exception as error:  # noqa: BLE001 the other rows are wanted all the same
        report.add(model, variant, Failed("engine", f"{type(error).__name__}: {error}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SLICES, default=list(SLICES))
    parser.add_argument("--quick", action="store_true", help="a subset of rows")
    parser.add_argument("--layers", type=int, help="of each slice; default: 20 and 16")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--contexts", type=int, nargs="*")
    parser.add_argument("--long", type=int, default=LONG, help="context of a single sequence; 0: leave it out")
    parser.add_argument("--prefills", type=int, nargs="*")
    parser.add_argument("--steps", type=int, help="decode steps that are timed")
    parser.add_argument("--set", metavar="NAME=VALUE", nargs="*", default=[], help="engine options of all rows")
    parser.add_argument(
        "--variants", metavar="NAME=VALUE", nargs="*", help="default: all switches off, one by one; none in --quick"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    log_to_stderr()
    quick = args.quick
    args.batches = args.batches or (QUICK_BATCHES if quick else BATCHES)
    args.contexts = args.contexts if args.contexts is not None else (QUICK_CONTEXTS if quick else CONTEXTS)
    args.prefills = args.prefills if args.prefills is not None else (QUICK_PREFILLS if quick else PREFILLS)
    args.steps = args.steps or (QUICK_STEPS if quick else STEPS)
    variants = args.variants if args.variants is not None else ([] if quick else default_variants())
    device = torch.device(dict(pair.split("=", 1) for pair in args.set).get("device", "cuda"))
    if device.type == "cuda":
        require_gpus(1)
    ceilings = measure_ceilings(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    report = Report(args.json, ceilings)
    for model in args.models:
        part = SLICES[model]
        if args.layers is not None:
            part = replace(part, layers=args.layers)
        with tempfile.TemporaryDirectory() as temporary:
            folder = write_slice(Path(temporary), slice_config(part))
            for variant in ("base", *variants):
                measure(report, folder, model, variant, args, ceilings)
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    report.print_table()


if __name__ == "__main__":
    main()
