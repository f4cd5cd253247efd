"""Variants of the Hopper attention kernel in one run: correct first, then times beside FlashMLA's."""

from __future__ import annotations

import argparse
import importlib.util
import math
import pathlib
import sys
import tempfile
import time
from types import ModuleType

import torch
from bench_sparse_attention import DECODE, L2_BYTES, PREFILL, Row, flash_call, make_inputs, pool
from timing import median_us

from abyssal.ops.sparse_attention import gluon as wgmma
from abyssal.ops.sparse_attention import triton as portable
from abyssal.ops.sparse_attention.arguments import Splits

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
WRITER = [
    (
        "            slots = block_slots(block + 2, lists)\n            mbarrier.arrive(k_full.index(half))",
        "            slots = block_slots(block + 2, lists)\n            fence_async_shared()\n            mbarrier.arrive(k_full.index(half))",
    )
]
VARIANTS = {"w4": [], "w8": EIGHT, "w8fence": EIGHT + WRITER}


def variant(name: str, folder: str) -> ModuleType:
    text = pathlib.Path(str(wgmma.__file__)).read_text()
    for old, new in VARIANTS[name]:
        assert old in text, (name, old)
        text = text.replace(old, new)
    path = pathlib.Path(folder, f"attention_{name}.py")
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--seconds", type=float, default=100)
    args = parser.parse_args()
    begin = time.time()
    torch.manual_seed(0)
    pools = {name: pool(name, 2048) for name in ("v4", "v41", "v41_fp4", "bf16")}
    library = importlib.import_module("flash_mla") if importlib.util.find_spec("flash_mla") else None
    folder = tempfile.mkdtemp()
    modules = {name: variant(name, folder) for name in args.variants}
    bad = set()
    for pair in (("v4", "v4"), ("v41", "v41_fp4"), ("bf16", "bf16")):
        for row in (Row(5, 64, 300), Row(130, 128, 512)):
            (arguments,) = make_inputs(row, pair, pools, 1)
            arguments[1].lengths[0], arguments[2].lengths[1] = 1, 0
            expected = portable.sparse_attention(*arguments)[0].float()
            for name, module in modules.items():
                for count in (1, 3):
                    if name in bad:
                        continue
                    results = []
                    try:
                        for _ in range(3):
                            results.append(
                                module.sparse_attention(*arguments, config=module.LaunchConfig(Splits(count, None)))[0].float()
                            )
                        torch.cuda.synchronize()
                    except Exception as error:  # a variant that does not compile
                        print("FAILED", name, pair, type(error).__name__, str(error)[:300], flush=True)
                        bad.add(name)
                        continue
                    gap = ((results[0] - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-20)).max().item()
                    same = all(torch.equal(r, results[0]) for r in results)
                    print(
                        f"{'+'.join(pair):13} {row.tokens:4} x {row.heads:3} /{count} {name:8} row gap {gap:.2e} repeatable {same} {time.time() - begin:.0f} s",
                        flush=True,
                    )
                    if not (gap < 6e-3 and same):
                        bad.add(name)
    modules = {name: module for name, module in modules.items() if name not in bad}
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
