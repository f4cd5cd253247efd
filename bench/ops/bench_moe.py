"""The expert layer: routing, routed experts, shared expert and sum, beside the bytes of the experts touched and the flops.

`python -m bench.ops.bench_moe [--model v4-flash v4.1-flash] [--tokens N ..] [--json FILE]`, from the root of the repository, on a GPU.
Random weights in the released formats, random routing; four inputs in turn, so that experts come from memory, not from L2.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from abyssal.ops.linear import LinearWeight
from abyssal.ops.moe import ExpertLayer
from abyssal.ops.moe import triton as kernels
from abyssal.ops.moe.gluon import with_products
from abyssal.ops.moe.triton import MoeConfig, ProductConfig, TileConfig
from bench.ops.timing import COPY_BANDWIDTH, compile_in_processes, median_us

FP8_FLOPS = 1414e12  # flop/s, twice the measured bf16 rate
TOKENS = (1, 8, 64, 128, 512, 2048, 4096)
FAILURES = (RuntimeError, AssertionError, ValueError, TypeError, triton.TritonError)
DEVICE = "cuda"


@dataclass(frozen=True, slots=True)
class Shape:
    dim: int
    inner: int
    experts: int
    tile: int
    shared_block: int


SHAPES = {
    "v4-flash": Shape(4096, 2048, 256, 128, 128),
    "v4.1-flash": Shape(5120, 2304, 384, 32, 32),
    "v4-pro": Shape(7168, 3072, 384, 128, 128),
}
K = 6
# block_tokens, block_rows, chunks or stages, warps of the first product and the second, by the largest token count
VARIANTS: dict[int, tuple[tuple[tuple[int, int, int, int], tuple[int, int, int, int]], ...]] = {
    8: (((8, 16, 2, 1), (8, 16, 2, 1)), ((8, 16, 2, 1), (8, 16, 4, 1)), ((8, 16, 2, 1), (8, 32, 2, 1)), ((8, 32, 2, 1), (8, 32, 2, 1))),
    64: (((8, 32, 2, 1), (8, 32, 2, 1)), ((8, 16, 2, 1), (8, 16, 2, 1)), ((8, 32, 4, 1), (8, 32, 4, 1))),
    512: (((16, 128, 3, 4), (16, 128, 3, 4)), ((16, 128, 4, 4), (16, 128, 4, 4)), ((8, 32, 2, 1), (8, 32, 2, 1)), ((32, 128, 3, 4), (32, 128, 3, 4))),
    4096: (((128, 256, 3, 8), (128, 256, 3, 8)), ((128, 64, 3, 4), (128, 64, 3, 4)), ((128, 64, 2, 4), (128, 64, 2, 4)), ((128, 128, 2, 4), (128, 128, 2, 4)), ((64, 128, 3, 4), (64, 128, 3, 4))),
}  # fmt: skip
BLOCKS = {512: (16, 32), 4096: (32, 64, 128)}  # of tokens, of the products in Gluon, by the largest token count


def configs(tokens: int) -> list[MoeConfig | TileConfig]:
    limit = next(limit for limit in VARIANTS if tokens <= limit)
    portable = [MoeConfig(ProductConfig(*up), ProductConfig(*down)) for up, down in VARIANTS[limit]]
    return [*portable, *(TileConfig.of(block) for block in BLOCKS.get(limit, ()))]


def name_of(config: MoeConfig | TileConfig) -> str:
    if isinstance(config, TileConfig):
        return f"tiles of {config.block_tokens}.{config.stages}"
    return " ".join(f"{c.block_tokens}x{c.block_rows}.{c.chunks}w{c.warps}" for c in (config.up, config.down))


def make_layer(shape: Shape) -> ExpertLayer:
    dim, inner = shape.dim, shape.inner

    def fp4(rows: int, columns: int) -> LinearWeight:
        data = torch.empty(shape.experts, rows, columns // 2, dtype=torch.uint8, device=DEVICE).random_(0, 256)
        scale = torch.empty(shape.experts, rows, columns // 32, dtype=torch.uint8, device=DEVICE).random_(118, 122)
        return LinearWeight(data, scale, "fp4", (1, 32), shape.tile)

    def fp8(rows: int, columns: int) -> LinearWeight:
        block = shape.shared_block
        data = torch.randn(rows, columns, device=DEVICE).mul(60).clamp(-448, 448).to(torch.float8_e4m3fn)
        scale = torch.empty(-(-rows // block), -(-columns // block), dtype=torch.uint8, device=DEVICE).random_(110, 114)
        return LinearWeight(data, scale, "fp8", (block, block), shape.tile)

    gate = torch.randn(shape.experts, dim, device=DEVICE).bfloat16().float()
    return ExpertLayer(
        gate=gate, bias=torch.zeros(shape.experts, device=DEVICE), tid2eid=None, w13=fp4(2 * inner, dim), w2=fp4(dim, inner),
        shared_w1=fp8(inner, dim), shared_w3=fp8(inner, dim), shared_w2=fp8(dim, inner), k=K, scale=1.5, temperature=1.0, limit=10.0,
    )  # fmt: skip


def make_inputs(shape: Shape, tokens: int) -> list[tuple[Tensor, Tensor]]:
    sets = 8 if tokens <= 8 else 4 if tokens <= 128 else 2
    ids = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
    return [(torch.randn(tokens, shape.dim, device=DEVICE).bfloat16(), ids) for _ in range(sets)]


def expert_bytes(layer: kernels.KernelExperts) -> int:
    """Of one routed expert, scales included."""
    parts = (layer.w13.data, layer.w13.scale, layer.w2.data, layer.w2.scale)
    return sum(part[0].numel() * part.element_size() for part in parts if part is not None)


def roofs(layer: kernels.KernelExperts, shape: Shape, inputs: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """us to read the touched experts, a mean over the inputs, and us for the products' flops in fp8."""
    config = configs(len(inputs[0][0]))[0]
    touched = [len(kernels.route(x, ids, layer, config).experts.unique()) for x, ids in inputs]
    tokens = len(inputs[0][0])
    flops = 2 * tokens * K * 3 * shape.dim * shape.inner
    return sum(touched) / len(touched) * expert_bytes(layer) / COPY_BANDWIDTH * 1e6, flops / FP8_FLOPS * 1e6


def launch_us(layer: kernels.KernelExperts, inputs: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Time of each kernel of a layer, us per call, by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            for x, ids in inputs:
                kernels.moe(x, ids, layer)
        torch.cuda.synchronize()
    calls = 3 * len(inputs)
    return {e.key: e.self_device_time_total / calls for e in profile.key_averages() if e.self_device_time_total > 0}


def measure(name: str, tokens: int, layer: kernels.KernelExperts, rows: list[dict[str, Any]]) -> None:
    shape = SHAPES[name]
    inputs = make_inputs(shape, tokens)
    memory, compute = roofs(layer, shape, inputs)
    calls = 16 if tokens <= 512 else 4

    def row(variant: str, fn: Any, args: list[Any], roof: float | None) -> None:
        line: dict[str, Any] = {"model": name, "tokens": tokens, "variant": variant}
        try:
            line["us"] = median_us(fn, args, calls=calls)
            share = "" if roof is None else f"{roof:9.1f} {100 * roof / line['us']:6.0f}"
            line["roof_us"] = roof
            print(f"{name:12} {tokens:>6} {variant:52} {line['us']:9.1f} {share}", flush=True)
        except FAILURES as error:
            torch.cuda.synchronize()
            line["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
            print(f"{name:12} {tokens:>6} {variant:52} {line['error']}", flush=True)
        rows.append(line)

    roof = max(memory, compute)
    for config in configs(tokens):
        choices = [(kernels.route(x, ids, layer, config),) for x, ids in inputs]
        row(
            f"experts {name_of(config)}",
            lambda choice, config=config: kernels.routed_experts(choice, layer, config),
            choices,
            roof,
        )
    default = kernels.moe_config(tokens * K, shape.experts, tiles=layer.products is not None)
    row("route", lambda x, ids: kernels.route(x, ids, layer, default), inputs, None)
    shared_bytes = 3 * shape.dim * shape.inner
    shared_roof = max(shared_bytes / COPY_BANDWIDTH, 6 * tokens * shape.dim * shape.inner / FP8_FLOPS) * 1e6
    row("shared", lambda x, _: kernels.shared_expert(x, layer), inputs, shared_roof)
    beside = torch.cuda.Stream()
    row("whole layer, shared beside", lambda x, ids: kernels.moe(x, ids, layer, beside=beside), inputs, roof + shared_roof)
    row("whole layer", lambda x, ids: kernels.moe(x, ids, layer), inputs, roof + shared_roof)
    print("    " + "  ".join(f"{key} {us:.1f}" for key, us in launch_us(layer, inputs).items()), flush=True)


def compile_share(models: list[str], tokens: list[int], share: int, shares: int) -> None:
    """Compile some of the variants into Triton's cache; what fails, fails again where it is timed."""
    jobs = [(name, count, index) for name in models for count in tokens for index in range(len(configs(count)))]
    for name, count, index in jobs[share::shares]:
        shape = SHAPES[name]
        small = Shape(shape.dim, shape.inner, 8, shape.tile, shape.shared_block)
        layer = with_products(kernels.prepare_experts(make_layer(small)))
        x, ids = make_inputs(shape, 2)[0]
        try:
            kernels.moe(x, ids, layer, config=configs(count)[index])
            kernels.shared_expert(x, layer)
        except FAILURES as error:
            print(f"{configs(count)[index]}: {type(error).__name__}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", choices=list(SHAPES), default=["v4-flash", "v4.1-flash"])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--processes", type=int, default=12, help="processes that compile")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.share is not None:
        compile_share(args.model, args.tokens, args.share, args.processes)
        return
    begin = time.monotonic()
    command = [sys.executable, "-m", "bench.ops.bench_moe", "--model", *args.model, "--tokens", *map(str, args.tokens)]
    compile_in_processes(command, args.processes)
    print(
        f"compiled in {time.monotonic() - begin:.0f} s; {torch.cuda.get_device_name()}, torch {torch.__version__}, {triton.__version__}"
    )
    print(
        f"{'model':12} {'tokens':>6} {'variant: block tokens x rows . chunks w warps':52} {'us':>9} {'roof us':>9} {'% roof':>6}"
    )
    rows: list[dict[str, Any]] = []
    for name in args.model:
        layer = with_products(kernels.prepare_experts(make_layer(SHAPES[name])))
        for tokens in args.tokens:
            measure(name, tokens, layer, rows)
        del layer
    print(f"\n{'model':12} {'tokens':>6} {'fastest experts':40} {'us':>9} {'% roof':>6} {'whole layer':>11}")
    for name, tokens in dict.fromkeys((row["model"], row["tokens"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["tokens"]) == (name, tokens) and "us" in row]
        best = min((row for row in mine if row["variant"].startswith("experts")), key=lambda row: row["us"], default=None)
        whole = next((row["us"] for row in mine if row["variant"] == "whole layer"), float("nan"))
        if best is not None:
            print(
                f"{name:12} {tokens:>6} {best['variant']:40} {best['us']:9.1f} {100 * best['roof_us'] / best['us']:6.0f} {whole:11.1f}"
            )
    print(f"{time.monotonic() - begin:.0f} s in all")
    if args.json is not None:
        args.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
