"""Abyssal against transformers on this CPU, with tiny-v4: prefill and decode speed, measured in turns in one run.

Both compute in fp32: transformers on an exact fp32 copy of the weights, with its cache, eager attention and the same threads;
Abyssal through its engine, scheduling and sampling included. Nothing is timed unless both give the same logits first.

    python bench/cpu_vs_transformers.py --repeats 3

Writes bench/results/cpu_vs_transformers.json and .md. Run it on an otherwise idle machine; the load at the start is recorded.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers_model import load_transformers

from abyssal import LLM, SamplingParams
from abyssal.checkpoint.source import resolve_model
from abyssal.engine.request import EngineRequest

RESULTS = Path(__file__).parent / "results"
DECODE_PROMPT = 256  # tokens before the decoded ones: every kind of layer has compressed entries
FIRST_TOKEN = 512  # prompts avoid control tokens and single bytes
TOLERANCE = 1e-3  # on logits of up to 30


@dataclasses.dataclass(frozen=True)
class Case:
    """`requests` prompts of `prompt` tokens each; the rate counts prompt tokens, or else the `new` tokens of every request."""

    name: str
    prompt: int
    new: int
    requests: int

    @property
    def tokens(self) -> int:
        return self.requests * (self.new or self.prompt)

    def prompts(self, vocab_size: int, repeat: int) -> list[list[int]]:
        """Those of one repeat: no two share a block, so that nothing is taken from the prefix index."""
        generator = torch.Generator().manual_seed(1000 * (self.prompt + self.requests) + repeat)
        return torch.randint(FIRST_TOKEN, vocab_size, (self.requests, self.prompt), generator=generator).tolist()


class AbyssalEngine:
    def __init__(self, folder: Path) -> None:
        self.llm = LLM(folder, device="cpu", dtype="float32", kv_layout="fp32", kv_cache_bytes=1 << 30)

    def seconds(self, case: Case, prompts: list[list[int]]) -> float:
        """Prefill: until the first token. Decode: from the first token of the last request on."""
        engine = self.llm.engine
        params = SamplingParams(temperature=0, max_tokens=case.new + 1, ignore_eos=True)
        start = time.perf_counter()
        for i, ids in enumerate(prompts):
            engine.add(EngineRequest(str(i), ids, params))
        produced = 0
        while engine.scheduler.waiting or any(seq.num_output == 0 for seq in engine.scheduler.running):
            produced += sum(len(update.token_ids) for update in engine.step())
        if case.new == 0:
            return time.perf_counter() - start
        already = produced - case.requests  # decoded while other requests were still prefilled
        start = time.perf_counter()
        while engine.has_unfinished():
            engine.step()
        return (time.perf_counter() - start) * case.tokens / (case.tokens - already)

    def logits(self, ids: list[int]) -> torch.Tensor:
        return self.llm.logits(ids, positions=[len(ids) - 1])[0]


class TransformersModel:
    def __init__(self, folder: Path) -> None:
        self.model = load_transformers(folder)

    @torch.inference_mode()
    def seconds(self, case: Case, prompts: list[list[int]]) -> float:
        """Prompts of equal length make one static batch without padding, which suits it best."""
        start = time.perf_counter()
        out = self.model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        tokens = out.logits.argmax(-1)
        if case.new:
            start = time.perf_counter()
        for _ in range(case.new):
            out = self.model(tokens, cache=out.cache, use_cache=True, logits_to_keep=1)
            tokens = out.logits.argmax(-1)
        return time.perf_counter() - start

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1]


def measure(cases: list[Case], repeats: int, folder: Path) -> list[dict[str, Any]]:
    """Median tokens per second of both for each case; the two take turns, a warm-up of the smallest shapes comes first."""
    contenders = {"abyssal": AbyssalEngine(folder), "transformers": TransformersModel(folder)}
    vocab_size = contenders["abyssal"].llm.engine.info.vocab_size
    warm = Case("warm-up", DECODE_PROMPT, 2, 2)
    ids = warm.prompts(vocab_size, 0)
    error = (contenders["abyssal"].logits(ids[0]) - contenders["transformers"].logits(ids[0])).abs().max().item()
    if error > TOLERANCE:
        raise SystemExit(f"nothing is measured: logits differ by {error:.2e}, more than {TOLERANCE}")
    for contender in contenders.values():
        contender.seconds(warm, ids)
    results = []
    for case in cases:
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for repeat in range(repeats):
            prompts = case.prompts(vocab_size, repeat)
            for name, contender in contenders.items():
                rates[name].append(case.tokens / contender.seconds(case, prompts))
        print(case.name, {name: [round(rate, 1) for rate in values] for name, values in rates.items()}, flush=True)
        medians = {name: statistics.median(values) for name, values in rates.items()}
        results.append({**dataclasses.asdict(case), "rates": rates, **medians})
    return results


def add_ratios(results: list[dict[str, Any]], goals: dict[str, float]) -> None:
    """Ratio of medians. For concurrent requests also against transformers with one request at a time, which is how it serves."""
    alone = next(result["transformers"] for result in results if result["name"] == "decode, 1 request")
    for result in results:
        result["ratio"] = result["abyssal"] / result["transformers"]
        result["goal"] = goals[result["name"]]
        if result["requests"] > 1:
            result["ratio_one_at_a_time"] = result["abyssal"] / alone


def machine(threads: int) -> dict[str, Any]:
    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=RESULTS.parent, capture_output=True, text=True, check=True).stdout.strip()

    info = Path("/proc/cpuinfo")
    models = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain", "-uno") else ""),
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def table(where: dict[str, Any], results: list[dict[str, Any]], repeats: int) -> str:
    lines = [
        "# tiny-v4 on the CPU: Abyssal and transformers",
        "",
        (
            f"{where['date']}, commit {where['commit']}; {where['cpu']}, {where['cores']} cores, {where['threads']} threads, "
            f"load {where['load']:.1f} at the start; torch {where['torch']}, transformers {where['transformers']}."
        ),
        f"fp32, tokens per second, median of {repeats} runs in turns (least to most). Written by `bench/cpu_vs_transformers.py`.",
        "",
        "| | Abyssal | transformers | ratio | wanted |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for result in results:
        cells = [
            f"{result[name]:.0f} ({min(result['rates'][name]):.0f} to {max(result['rates'][name]):.0f})"
            for name in ("abyssal", "transformers")
        ]
        lines.append(f"| {result['name']} | {cells[0]} | {cells[1]} | {result['ratio']:.1f} | {result['goal']:.0f} |")
        if "ratio_one_at_a_time" in result:
            against = f"{result['abyssal'] / result['ratio_one_at_a_time']:.0f}"
            ratio = f"{result['ratio_one_at_a_time']:.1f}"
            lines.append(
                f"| the same, transformers one at a time | {result['abyssal']:.0f} | {against} | {ratio} | {result['goal']:.0f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turns")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of both")
    parser.add_argument("--new", type=int, default=64, help="tokens that each request decodes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    wanted = {
        Case("prefill, 2,048 tokens", 2048, 0, 1): 2.0,
        Case("prefill, 8,192 tokens", 8192, 0, 1): 5.0,
        Case("decode, 1 request", DECODE_PROMPT, args.new, 1): 2.0,
        Case("decode, 16 requests", DECODE_PROMPT, args.new, 16): 8.0,
    }
    where = machine(args.threads)
    results = measure(list(wanted), args.repeats, resolve_model("tiny"))
    add_ratios(results, {case.name: goal for case, goal in wanted.items()})
    text = table(where, results, args.repeats)
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / "cpu_vs_transformers"
    stem.with_suffix(".json").write_text(json.dumps({**where, "repeats": args.repeats, "results": results}, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
