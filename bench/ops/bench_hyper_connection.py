"""Times of one hyper-connection site (expand, coefficients, Sinkhorn, collapse, norm), against the roof and the reference's steps.

Cold: inputs and weights rotate through more than twice the L2; warm: one set of them. Every launch shape listed in `VARIANTS` is
timed; `*` marks the one that `launch_config` chooses. Compiles in parallel processes first.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import astuple, replace
from typing import Any

import torch
import triton
from timing import COPY_BANDWIDTH, compile_in_processes, median_us

from abyssal.ops import hyper_connection as hc
from abyssal.ops.hyper_connection import gluon
from abyssal.ops.hyper_connection import triton as kernel

HIDDEN = (5120, 7168, 4096)
TOKENS = (1, 8, 64, 512, 4096)
# tokens -> one launch, block_tokens, block_hidden, warps, stages, registers
VARIANTS: dict[int, list[tuple[int, ...]]] = {
    1: [(True, 1, 32, 2, 2, 255), (True, 8, 128, 4, 2, 255)],
    8: [(True, 8, 128, 4, 2, 255)],
    64: [(True, 16, 128, 4, 2, 255), (True, 16, 128, 4, 2, 200)],
    512: [(False, 32, 64, 4, 2, 168)],
    4096: [(False, 64, 32, 4, 3, 255), (False, 64, 32, 8, 3, 128), (False, 32, 64, 4, 2, 168)],
}
PARAMETERS = {"rms_eps": 1e-6, "eps": 1e-6, "iterations": 20}


def config_of(tokens: int, hidden: int, variant: tuple[int, ...], num_sms: int) -> kernel.LaunchConfig:
    one_launch, block_tokens, block_hidden, *rest = variant
    if one_launch:
        return kernel.LaunchConfig(block_tokens, block_hidden, hidden // block_hidden, 1, *rest, True)
    return kernel.two_launches(tokens, hidden, num_sms, block_tokens, block_hidden, *rest)


def make_inputs(tokens: int, hidden: int, own: bool, cold: bool) -> tuple[list[dict[str, Any]], list[hc.MixWeights]]:
    bytes_per_set = tokens * hidden * 2 * 10 + 24 * 4 * hidden * 4
    sets = max(1, math.ceil(140e6 / bytes_per_set)) if cold else 1
    arguments, weights = [], []
    norm_weight = torch.rand(hidden, device="cuda") + 0.5
    for _ in range(sets):
        one = {
            "source": torch.randn(tokens, 4, hidden, device="cuda").bfloat16(),
            "out": torch.randn(tokens, hidden, device="cuda").bfloat16(),
            "post": torch.rand(tokens, 4, device="cuda") * 2,
            "comb": torch.rand(tokens, 4, 4, device="cuda") / 4,
            "norm_weight": norm_weight,
        }
        if not own:
            one["pre"] = torch.rand(tokens, 4, device="cuda")
        arguments.append(one | PARAMETERS)
        fn = torch.randn(24, 4 * hidden, device="cuda") / math.sqrt(4 * hidden)
        weights.append(hc.MixWeights(fn, torch.randn(24, device="cuda"), torch.ones(24, device="cuda")))
    return arguments, weights


def roof_us(tokens: int, hidden: int) -> float:
    """Every value once: streams and output read, streams and x written, weights and small things read."""
    small = tokens * 4 * (4 + 16) * 2 + hidden * 4
    return (tokens * hidden * 2 * 10 + 24 * 4 * hidden * 4 + small) / COPY_BANDWIDTH * 1e6


Config = kernel.LaunchConfig | gluon.TileConfig


def cases(hidden_sizes: list[int], tokens: list[int], num_sms: int) -> list[tuple[int, int, bool, Config]]:
    found = []
    for hidden in hidden_sizes:
        for count in tokens:
            for own in (True, False):
                chosen = gluon.launch_config(count, hidden, num_sms, own)
                variants: list[Config] = []
                if hidden == HIDDEN[0]:
                    variants += [config_of(count, hidden, v, num_sms) for v in VARIANTS[count]]
                found += [(hidden, count, own, c) for c in (chosen, *(v for v in variants if v != chosen))]
    return found


def state_of(config: Config, tokens: int, hidden: int) -> gluon.HandoverState:
    """Memory for any launch of `tokens` tokens."""
    state = gluon.HandoverState.allocate(64, hidden, "cuda")
    if isinstance(config, gluon.TileConfig):
        return state
    few = kernel.HandoverState.of_size(config.partial_rows(tokens), triton.cdiv(tokens, config.block_tokens), "cuda")
    return replace(state, few=few)


def time_kernel(hidden: int, tokens: int, own: bool, config: Config, cold: bool) -> float:
    arguments, weights = make_inputs(tokens, hidden, own, cold)
    state, prepared = state_of(config, tokens, hidden), [kernel.KernelWeights.prepare(w) for w in weights]
    inputs = list(zip(arguments, prepared, strict=True))
    return median_us(
        lambda a, w: gluon.site(weights=w, state=state, config=config, **a), inputs, calls=20 if tokens < 2048 else 5
    )


def kernel_times(hidden: int, tokens: int, own: bool) -> dict[str, float]:
    """Microseconds of each kernel of the chosen launch, cold, by the profiler."""
    arguments, weights = make_inputs(tokens, hidden, own, cold=True)
    state = gluon.HandoverState.allocate(tokens, hidden, "cuda")
    prepared = [kernel.KernelWeights.prepare(w) for w in weights]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            for a, w in zip(arguments, prepared, strict=True):
                gluon.site(weights=w, state=state, **a)
        torch.cuda.synchronize()
    return {e.key: e.device_time for e in profile.key_averages() if e.key.startswith("hyper_connection")}


def time_reference(hidden: int, tokens: int, own: bool, compiled: bool) -> float:
    arguments, weights = make_inputs(tokens, hidden, own, cold=False)
    site = torch.compile(hc.site, dynamic=False) if compiled else hc.site
    return median_us(lambda a, w: site(weights=w, **a), list(zip(arguments, weights, strict=True)), calls=5)


def compile_share(hidden_sizes: list[int], tokens: list[int], share: int, shares: int) -> None:
    """Compile some of the kernels into Triton's cache; an error shows again, by name, when the variant is timed."""
    num_sms = kernel.sm_count(torch.device("cuda", 0))
    for hidden, _, own, config in cases(hidden_sizes, tokens, num_sms)[share::shares]:
        arguments, weights = make_inputs(1, hidden, own, cold=False)  # the token count is no compile-time constant
        state, prepared = state_of(config, 1, hidden), kernel.KernelWeights.prepare(weights[0])
        try:
            gluon.site(weights=prepared, state=state, config=config, **arguments[0])
        except Exception as error:  # noqa: BLE001
            print(f"{config}: {type(error).__name__}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=list(HIDDEN))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--processes", type=int, default=12, help="processes that compile")
    parser.add_argument("--no-reference", action="store_true", help="leave the reference and torch.compile out")
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.share is not None:
        compile_share(args.hidden, args.tokens, args.share, args.processes)
        return
    begin = time.monotonic()
    command = [sys.executable, __file__, "--hidden", *map(str, args.hidden), "--tokens", *map(str, args.tokens)]
    compile_in_processes(command, args.processes)
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)

    num_sms, rows = kernel.sm_count(torch.device("cuda", 0)), []
    for hidden, tokens, own, config in cases(args.hidden, args.tokens, num_sms):
        row: dict[str, Any] = {"hidden": hidden, "tokens": tokens, "order": "v4" if own else "v41"}
        row |= {"roof": roof_us(tokens, hidden), "chosen": config == gluon.launch_config(tokens, hidden, num_sms, own)}
        row["launch"] = " ".join([type(config).__name__.removesuffix("Config").lower(), *map(str, astuple(config))])
        try:
            row["cold"], row["warm"] = (time_kernel(hidden, tokens, own, config, cold) for cold in (True, False))
        except Exception as error:  # noqa: BLE001
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[-1][:60]}"
        rows.append(row)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; us, median of graph replays; roof at 4.23 TB/s")
    launch = "launch block_tokens block_hidden splits steps warps stages registers one_launch | tile groups finishers lag ahead"
    print(f"hidden tokens order  {launch}: cold, warm, roof, share")
    for row in rows:
        start = f"{row['hidden']:>6} {row['tokens']:>6} {row['order']:>5}  {row['launch']:<32}{' *' if row['chosen'] else '  '}"
        times = (
            f"{row['cold']:>7.2f}{row['warm']:>7.2f}{row['roof']:>7.2f}{row['roof'] / row['cold']:>6.0%}"
            if "cold" in row
            else row["error"]
        )
        print(f"{start}{times}", flush=True)
    for tokens, own in [(t, own) for t in args.tokens if t >= 64 for own in (True, False)]:
        try:
            times = kernel_times(args.hidden[0], tokens, own)
        except Exception as error:  # noqa: BLE001
            times = {type(error).__name__: math.nan}
        text = "  ".join(f"{name} {us:.1f}" for name, us in times.items())
        print(f"profiled, cold: hidden {args.hidden[0]} tokens {tokens} {'v4' if own else 'v41'}: {text}")
    references = []
    for tokens in [] if args.no_reference else [t for t in args.tokens if t in (1, 64, 512)]:
        reference: dict[str, Any] = {"hidden": args.hidden[0], "tokens": tokens, "order": "v4"}
        for name, compiled in (("eager", False), ("compiled", True)):
            try:
                reference[name] = time_reference(args.hidden[0], tokens, True, compiled)
            except Exception as error:  # noqa: BLE001
                reference[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:40]}"
        references.append(reference)
    for reference in references:
        values = "  ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in reference.items())
        print(f"reference, warm: {values}")
    print(f"{time.monotonic() - begin:.0f} s in all")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "rows": rows, "references": references}, file, indent=1)


if __name__ == "__main__":
    main()
