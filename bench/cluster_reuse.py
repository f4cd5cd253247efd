"""How much of the prompts of conversations the caches of several replicas reuse, by routing, against one engine. On the CPU; needs Ray.

    python bench/cluster_reuse.py [--replicas 3] [--sessions 9] [--turns 4] [--json FILE]

Every session begins with the same instructions and goes on by itself: a turn's prompt is the one before, its answer, and new tokens.
Sessions run side by side; each waits for its answer. `one` is one engine, `prefix` the replicas behind `PrefixRouter`, `random` the
same behind the router that Ray Serve has of its own, which draws two replicas at random and takes the less loaded one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from pathlib import Path
from typing import Any

import ray

from abyssal.config import EngineConfig
from abyssal.engine.request import EngineRequest, SamplingParams
from abyssal.serve.cluster import ClusterClient, PrefixRouter
from abyssal.serve.engine_client import EngineClient

SHARED, FIRST, LATER, ANSWER = 256, 300, 270, 8  # tokens: instructions, first question, later questions, answers
CONFIG = EngineConfig(device="cpu", kv_cache_bytes=1 << 30, num_threads=1, max_model_len=8192)


def words(name: str, count: int) -> list[int]:
    return random.Random(name).choices(range(5, 2000), k=count)


async def session(client: Any, number: int, turns: int) -> tuple[int, int]:
    """(tokens of all prompts, of these reused)"""
    prompt, total, reused = [0, *words("instructions", SHARED - 1)], 0, 0
    for turn in range(turns):
        prompt = prompt + words(f"{number} {turn}", LATER if turn else FIRST)
        request = EngineRequest(f"{number}-{turn}", prompt, SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True))
        updates = [update async for update in client.generate(request)]
        total, reused = total + len(prompt), reused + updates[0].num_cached_tokens
        prompt = prompt + [token for update in updates for token in update.token_ids]
    return total, reused


async def measure(routing: str, replicas: int, sessions: int, turns: int) -> dict[str, Any]:
    if routing == "one":
        client: Any = await EngineClient.start(CONFIG)
    else:
        client = await ClusterClient.start(CONFIG, replicas, PrefixRouter if routing == "prefix" else None)
    try:
        done = await asyncio.gather(*(session(client, number, turns) for number in range(sessions)))
    finally:
        await client.close()
    total, reused = (sum(column) for column in zip(*done, strict=True))
    return {"routing": routing, "prompt_tokens": total, "reused_tokens": reused, "reused": reused / total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=9)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for routing in ("one", "prefix", "random"):
        if routing != "one" and "RAY_ADDRESS" not in os.environ:  # a replica counts as one CPU, also where there are fewer
            cpus = args.replicas + 1
            ray.init(num_cpus=cpus, log_to_driver=False, include_dashboard=False, configure_logging=False)
        rows.append(asyncio.run(measure(routing, args.replicas, args.sessions, args.turns)))
        against = rows[-1]["reused_tokens"] / rows[0]["reused_tokens"]
        print(
            f"{routing:8} {rows[-1]['reused_tokens']:>7} of {rows[-1]['prompt_tokens']} tokens, {against:.1%} of one engine",
            flush=True,
        )
        rows[-1]["of_one_engine"] = against
    if args.json:
        facts = {"replicas": args.replicas, "sessions": args.sessions, "turns": args.turns}
        args.json.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
