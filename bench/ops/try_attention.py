"""Variants of the Hopper attention kernel in one run: correct first, then times beside FlashMLA's."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import pathlib
import subprocess
import sys
import time
from types import ModuleType

import torch
from bench_sparse_attention import DECODE, L2_BYTES, PREFILL, Row, flash_call, make_inputs, pool
from timing import median_us

from abyssal.ops.sparse_attention import gluon as wgmma
from abyssal.ops.sparse_attention import triton as portable
from abyssal.ops.sparse_attention.arguments import Splits

FOLDER = "/tmp/attention_variants"
EIGHT = [
    ("BRING_REGISTERS = 160, 152", "BRING_REGISTERS = 160, 80"),
    ("WARPS = [[4, 0, 0], [8, 0, 0]]", "WARPS = [[4, 0, 0], [8, 0, 0], [16, 0, 0]]"),
    ("[[0, 0, 1], [0, 0, 2], [16, 0, 0], [32, 0, 0]]", "[[0, 0, 1], [0, 0, 2], [32, 0, 0]]"),
    ("[[0, 0, 1], [16, 0, 0], [32, 0, 0]]", "[[0, 0, 1], [32, 0, 0]]"),
    (
        "COPY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1]",
        "COPY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1]",
    ),
    ("        [4, 4],\n", "        [4, 8],\n"),
]
BASES = {"main": pathlib.Path(str(wgmma.__file__)), "halves": pathlib.Path(__file__).with_name("attention_halves.py")}
WRITER = [
    (
        "            mbarrier.arrive(k_full.index(half))\n",
        "            fence_async_shared()\n            mbarrier.arrive(k_full.index(half))\n",
    )
]
VARIANTS = {
    "main4": ("main", []),
    "main8": ("main", EIGHT),
    "halves4": ("halves", []),
    "halves8": ("halves", EIGHT),
    "fence8": ("main", EIGHT + WRITER),  # in case that fences of the readers alone are not enough
}


def variant(name: str, folder: str) -> ModuleType:
    base, edits = VARIANTS[name]
    text = BASES[base].read_text()
    for old, new in edits:
        assert old in text, (name, old)
        text = text.replace(old, new)
    path = pathlib.Path(folder, f"attention_{name}.py")
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def check(name: str) -> bool:
    """Beside the portable kernel, three times the same; prints as it goes."""
    module = variant(name, FOLDER)
    pools = {layout: pool(layout, 64) for layout in ("v4", "v41", "v41_fp4", "bf16")}
    good = True
    for pair in (("v4", "v4"), ("v41", "v41_fp4"), ("bf16", "bf16")):
        for row in (Row(5, 64, 300), Row(130, 128, 512)):
            (arguments,) = make_inputs(row, pair, pools, 1)
            arguments[1].lengths[0], arguments[2].lengths[1] = 1, 0
            arguments[2].slots[2, 3] = -1
            expected = portable.sparse_attention(*arguments)[0].float()
            for count in (1, 3):
                config = module.LaunchConfig(Splits(count, None))
                results = [module.sparse_attention(*arguments, config=config)[0].float() for _ in range(5)]
                torch.cuda.synchronize()
                gap = ((results[0] - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-20)).max().item()
                same = all(torch.equal(r, results[0]) for r in results)
                good &= gap < 6e-3 and same
                print(
                    f"{name:8} {'+'.join(pair):13} {row.tokens:4} x {row.heads:3} /{count} row gap {gap:.2e} repeatable {same}",
                    flush=True,
                )
    return good


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--check")
    parser.add_argument("--profile")
    args = parser.parse_args()
    begin = time.time()
    torch.manual_seed(0)
    if args.profile:
        os.makedirs(FOLDER, exist_ok=True)
        module = variant(args.profile, FOLDER)
        (arguments,) = make_inputs(Row(64, 128, 1024), ("v4", "v4"), {"v4": pool("v4", 2048)}, 1)
        for _ in range(3):
            module.sparse_attention(*arguments, config=module.LaunchConfig(Splits(1, None)))
        torch.cuda.synchronize()
        return
    if args.check:
        sys.exit(0 if check(args.check) else 1)
    os.makedirs(FOLDER, exist_ok=True)
    checks = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--check", name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name in args.variants
    }
    pools = {name: pool(name, 2048) for name in ("v4", "v41", "v41_fp4", "bf16")}
    library = importlib.import_module("flash_mla") if importlib.util.find_spec("flash_mla") else None
    modules = {}
    for name, process in checks.items():
        try:
            text, _ = process.communicate(timeout=100)
        except subprocess.TimeoutExpired:  # a kernel that waits for ever
            process.kill()
            text, _ = process.communicate()
            text += "HANGS"
        print(text[-2500:], f"{name} rc {process.returncode} {time.time() - begin:.0f} s", flush=True)
        if process.returncode == 0:
            modules[name] = variant(name, FOLDER)
    bad = set(args.variants) - set(modules)
    rows = [(row, ("v4", "v4")) for row in DECODE]
    rows += [(PREFILL[0], ("v4", "v4")), (PREFILL[0], ("bf16", "bf16"))]
    rows += [
        (row, ("v41", "v41_fp4"))
        for row in DECODE
        if row in (Row(1, 64, 512), Row(64, 64, 512), Row(128, 64, 512), Row(64, 128, 512), Row(64, 64, 8192))
    ]
    for row, pair in rows:
        moved = row.tokens * (128 + row.extra) * 584
        inputs = make_inputs(row, pair, pools, max(1, min(8, math.ceil(L2_BYTES / moved))) if row.tokens <= 256 else 1)
        blocks, programs = 2 + -(-row.extra // 64), row.tokens * -(-row.heads // 64)
        chosen = portable.best_split(programs, blocks, 132)
        counts = sorted(
            {chosen}
            | (
                {c for c in (1, 2, 4, 5, 8, 10, 16, 33, 65) if c <= blocks and 100 <= programs * c <= 270}
                if pair[0] == "v4" and row.tokens <= 256
                else set()
            )
        )
        cells = []
        for name, module in modules.items():
            for count in counts:
                if time.time() - begin > args.seconds:
                    cells.append("time is up")
                    break
                try:
                    us = median_us(
                        lambda *a, m=module, c=module.LaunchConfig(Splits(count, None)): m.sparse_attention(*a, config=c), inputs
                    )
                    cells.append(f"{name} /{count}{'*' if count == chosen else ''} {us:.1f}")
                except Exception as error:
                    cells.append(f"{name} /{count} {type(error).__name__}")
        if library is not None and pair == ("v4", "v4") and row.tokens <= 256:
            try:
                cells.append(f"flash {median_us(lambda call: call(), [(flash_call(library, *a),) for a in inputs]):.1f}")
            except Exception as error:
                cells.append(f"flash {type(error).__name__}")
        print(
            f"{'+'.join(pair):13} {row.tokens:4} x {row.heads:3} {row.extra:5} roof {row.roof_us:5.1f}: " + ", ".join(cells),
            flush=True,
        )
    print(f"done in {time.time() - begin:.0f} s; bad {bad}")


if __name__ == "__main__":
    main()
