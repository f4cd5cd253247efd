"""The dense products of one layer at the released shapes: our routes, the library's bf16 product, and its e4m3 product.

`python -m bench.ops.bench_linear [--json FILE] [--models v4-flash ...] [--tokens 1 8 ...] [--sweep]`, from the root of the repository,
on a GPU. Weights rotate over more memory than the L2. The roof is the larger of weight, input and output bytes over the copy bandwidth
and operations over the rate of the weights' format. `--sweep` times launch configurations of the few-token kernel and where the routes
cross.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

import abyssal.ops.linear.triton as kernels
from abyssal.ops.linear import LinearWeight
from bench.ops.timing import BF16_FLOPS, COPY_BANDWIDTH, median_us

DEVICE = "cuda"
COLD_BYTES = 150 << 20  # of weights in turn: more than the L2's 60 MB
TOKENS = (1, 8, 64, 512, 4096)
FAILURES = (RuntimeError, AssertionError, ValueError, TypeError, triton.TritonError)


@dataclass(frozen=True, slots=True)
class Product:
    """Weights of one input: rows of FP8, of bf16, and of bf16 weights used as fp32."""

    name: str
    columns: int
    fp8: tuple[int, ...] = ()
    fp32: tuple[int, ...] = ()
    bf16: tuple[int, ...] = ()
    groups: int = 1

    @property
    def rows(self) -> int:
        return sum(self.fp8 + self.fp32 + self.bf16)

    def nbytes(self, tokens: int) -> int:
        weights = self.columns * (sum(self.fp8) + 2 * sum(self.fp32 + self.bf16))
        return weights + tokens * (2 * self.columns * self.groups + 2 * self.rows + 2 * sum(self.fp32))

    def roof_us(self, tokens: int) -> float:
        flops = 2 * tokens * self.columns * (sum(self.fp8) / 2 + sum(self.fp32 + self.bf16))  # FP8 at twice the rate
        return max(self.nbytes(tokens) / COPY_BANDWIDTH, flops / BF16_FLOPS) * 1e6


def layer(hidden: int, q: int, heads: int, groups: int, inner: int, index: int) -> list[Product]:
    """Ratio 4 in V4, a layer with compressor and indexer in V4.1."""
    pooled = (2048, 512) if hidden != 5120 else (1024,)
    return [
        Product("of_x: wq_a wkv", hidden, fp8=(q, 512)),
        Product("of_x: all", hidden, fp8=(q, 512), fp32=pooled, bf16=(64 if hidden != 5120 else 32,)),
        Product("wq_b", q, fp8=(heads * 512,)),
        Product("index wq_b", q, fp8=(index * 128,)),
        Product("wo_a", 4096, fp8=(groups * 1024,), groups=groups),
        Product("wo_b", groups * 1024, fp8=(hidden,)),
        Product("shared w1 w3", hidden, fp8=(inner, inner)),
        Product("shared w2", inner, fp8=(hidden,)),
        Product("router gate", hidden, fp32=(256 if hidden == 4096 else 384,)),
        Product("head", hidden, fp32=(129280,)),
    ]


MODELS = {
    "v4-flash": (128, layer(4096, 1024, 64, 8, 2048, 64)),
    "v4-pro": (128, layer(7168, 1536, 128, 16, 3072, 64)),
    "v4.1-flash": (32, [*layer(5120, 1280, 64, 8, 2304, 32), Product("engram wkv", 6144, fp8=(25600,))]),
}


def fp8(rows: int, columns: int, block: int) -> LinearWeight:
    data = torch.randn(rows, columns, device=DEVICE).to(torch.float8_e4m3fn)
    scale = torch.randint(114, 120, (-(-rows // block), -(-columns // block)), dtype=torch.uint8, device=DEVICE)
    return LinearWeight(data, scale, "fp8", (block, block), block)


def weights_of(product: Product, block: int) -> list[LinearWeight | Tensor]:
    bf16 = [
        LinearWeight(torch.randn(n, product.columns, device=DEVICE).bfloat16(), None, "plain", None, None) for n in product.bf16
    ]
    fp32 = [torch.randn(n, product.columns, device=DEVICE).bfloat16().float() for n in product.fp32]
    return [*(fp8(n, product.columns, block) for n in product.fp8), *fp32, *bf16]


def copies(nbytes: int) -> int:
    return max(1, min(24, -(-COLD_BYTES // nbytes)))


class Table:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def time(
        self,
        model: str,
        product: str,
        tokens: int,
        variant: str,
        roof: float,
        fn: Callable[..., Any],
        inputs: Sequence[tuple[Any, ...]],
    ) -> None:
        row: dict[str, Any] = {"model": model, "product": product, "tokens": tokens, "variant": variant, "roof_us": roof}
        try:
            row["us"] = median_us(fn, inputs, calls=10 if tokens < 512 else 4)
        except FAILURES as error:
            torch.cuda.synchronize()
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
            print(model, product, tokens, variant, row["error"], flush=True)
        self.rows.append(row)

    def print(self) -> None:
        variants = list(dict.fromkeys(row["variant"] for row in self.rows))
        cells: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
        for row in self.rows:
            cells.setdefault((row["model"], row["product"], row["tokens"]), {})[row["variant"]] = row
        print(f"{'model':10} {'product':15} {'tokens':>6} {'roof us':>8} " + " ".join(f"{name:>16}" for name in variants))
        for (model, product, tokens), found in cells.items():
            roof = next(iter(found.values()))["roof_us"]
            texts = []
            for name in variants:
                us = found.get(name, {}).get("us")
                texts.append(
                    "error" if "error" in found.get(name, {}) else "" if us is None else f"{us:8.1f} {100 * roof / us:5.0f} %"
                )
            print(f"{model:10} {product:15} {tokens:>6} {roof:8.1f} " + " ".join(f"{text:>16}" for text in texts))


def grouped_input(product: Product, block: int, tokens: int, prepared: kernels.PreparedLinear) -> Any:
    x = torch.randn(tokens, product.groups * product.columns, device=DEVICE).bfloat16()
    if kernels.takes_codes(tokens, prepared, product.groups):
        flat = kernels.quantise(x, block)
        return kernels.QuantisedInput(flat.codes.view(-1, product.groups, product.columns), flat.scales, flat.tile)
    return x.view(tokens, product.groups, product.columns)


def products(table: Table, model: str, tokens: Sequence[int]) -> None:
    block, listed = MODELS[model]
    for product in listed:
        sets = [weights_of(product, block) for _ in range(copies(product.nbytes(0)))]
        prepared = [kernels.prepare_linear(weights) for weights in sets]
        plain = [[torch.randn(product.rows // product.groups, product.columns, device=DEVICE).bfloat16()] for _ in sets]
        for count in tokens:
            roof = product.roof_us(count)
            x = torch.randn(count, product.columns, device=DEVICE).bfloat16()
            if product.groups > 1:
                groups, source = product.groups, grouped_input(product, block, count, prepared[0])
                ours = [(source, one) for one in prepared]
                table.time(
                    model,
                    product.name,
                    count,
                    "ours",
                    roof,
                    lambda x, w, groups=groups: kernels.linear_grouped(x, w, groups),
                    ours,
                )
                continue
            table.time(model, product.name, count, "ours", roof, kernels.linear, [(x, one) for one in prepared])
            table.time(model, product.name, count, "bf16 library", roof, F.linear, [(x, *one) for one in plain])
            group = prepared[0].groups[0]
            if block == 128 and len(prepared[0].groups) == 1 and group.block is not None and product.columns % 512 == 0:
                table.time(model, product.name, count, "quantise, e4m3", roof, scaled, [(x, one.groups[0]) for one in prepared])


def scaled(x: Tensor, group: kernels.Group) -> Tensor:
    """The library's e4m3 product, which adds in 14 bits; its scales have the tokens innermost, and 16 tokens are the least."""
    assert group.scale is not None
    q = kernels.quantise(x if len(x) % 16 == 0 else x.new_zeros(-(-len(x) // 16) * 16, x.shape[1]), 128)
    return torch._scaled_mm(
        q.codes, group.data.t(), scale_a=q.scales.t().contiguous().t(), scale_b=group.scale.t(), out_dtype=torch.bfloat16
    )


def sweep(table: Table) -> None:
    """Tiles of the few-token kernel, then the routes at the tokens where they may cross."""
    tiles = {1: ((8, 16, 2), (8, 16, 1), (8, 32, 1), (8, 32, 2))}
    parts = {64: ((64, 1, 4), (64, 2, 4), (64, 4, 4), (64, 8, 4), (64, 4, 3), (32, 4, 5))}
    for model, name in (("v4-flash", "wo_b"), ("v4.1-flash", "wo_b")):
        block, listed = MODELS[model]
        product = next(one for one in listed if one.name == name)
        groups = [kernels.prepare_linear(weights_of(product, block)).groups[0] for _ in range(copies(product.nbytes(0)))]
        for count, sizes in tiles.items():
            x = torch.randn(count, product.columns, device=DEVICE).bfloat16()
            for tokens, rows, chunks in sizes:
                config = kernels.FewConfig(tokens, (rows,), (chunks,), 4)
                table.time(
                    model, name, count, f"{tokens}x{rows}.{chunks}", product.roof_us(count),
                    lambda x, group, config=config: kernels.few_tokens(x, [group], config=config), [(x, one) for one in groups],
                )  # fmt: skip
        for count, choices in parts.items():
            x = kernels.quantise(torch.randn(count, product.columns, device=DEVICE).bfloat16(), block)
            for tokens, splits, stages in choices:
                shape = kernels.TiledConfig(tokens, splits, product.columns // splits, stages)
                table.time(
                    model, name, count, f"{tokens} in {splits}, {stages} st", product.roof_us(count),
                    lambda x, group, shape=shape: kernels.tiled(x, group, config=shape), [(x, one) for one in groups],
                )  # fmt: skip
        for count in (8, 16, 32, 64, 128, 256, 512):
            x = torch.randn(count, product.columns, device=DEVICE).bfloat16()
            inputs, roof = [(x, one) for one in groups], product.roof_us(count)
            table.time(model, name, count, "few", roof, lambda x, group: kernels.few_tokens(x, [group]), inputs)
            table.time(
                model, name, count, "tiled", roof, lambda x, group: kernels.tiled(kernels.quantise(x, group.tile), group), inputs
            )
            table.time(model, name, count, "library", roof, kernels._library, inputs)
            if block == 128:
                table.time(model, name, count, "quantise, e4m3", roof, scaled, inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the full results")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["v4-flash", "v4.1-flash"])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    table = Table()
    if args.sweep:
        sweep(table)
    else:
        for model in args.models:
            products(table, model, args.tokens)
    table.print()
    if args.json is not None:
        args.json.write_text(json.dumps(table.rows, indent=1))


if __name__ == "__main__":
    main()
