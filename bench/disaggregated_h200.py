"""One prefill and one decode engine on two GPUs: same tokens as one engine, bytes moved, and how soon the decode engine goes on.

    python -m bench.disaggregated_h200 [--model tiny] [--contexts 1024 8192] [--running 0 16]
        [--transfer-backend nixl] [--json FILE]

Each row is one prompt of `context` tokens while `running` other sequences decode. `gap` is the time from the end of the last prefill
chunk, when its token is known, to the first token of the decode engine; `step` a decoding step of that engine with the same sequences.
The tokens are compared with those of one engine that computes the request alone, for `running` 0; others run in another batch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from abyssal.config import EngineConfig
from abyssal.engine.disaggregation import DecodeEngine, PrefillEngine, RequestPart, Sending
from abyssal.engine.engine import Engine
from abyssal.engine.link import open_link
from abyssal.engine.request import EngineRequest, RequestUpdate, SamplingParams
from abyssal.kv.planner import layer_bytes, sequence_cost
from bench.gpus import require_gpus

PREFILL, DECODE = 0, 1
TOKENS = 24  # generated per measured request


class TimedPrefillEngine(PrefillEngine):
    first_token: dict[str, float]

    def _take(self, *arguments: Any) -> RequestUpdate:
        update = super()._take(*arguments)
        self.first_token[update.request_id] = time.monotonic()
        return update


def place(device: str, rank: int) -> torch.device:
    if device == "cuda":
        torch.cuda.set_device(rank)
    return torch.device(device, rank if device == "cuda" else None)


def prefill_process(config: EngineConfig, backend: str, store: str, pipe: multiprocessing.connection.Connection) -> None:
    link = open_link(backend, PREFILL, 2, store, place(config.device, PREFILL))
    engine = TimedPrefillEngine(config, link, pipe.send)
    engine.first_token = {}
    link.connect(senders=1)
    reported = 0
    while True:
        wait = engine.poll_ms()
        while pipe.poll(None if wait is None else wait / 1e3):
            if (command := pipe.recv()) is None:
                engine.close()
                return
            method, arguments = command
            getattr(engine, method)(*arguments)
            wait = 0
        updates = engine.step()
        if updates or link.bytes_sent > reported:  # a short prompt may be computed before its receiver has asked for it
            reported = link.bytes_sent
            pipe.send((updates, {u.request_id: engine.first_token[u.request_id] for u in updates}, reported))


class Pair:
    """The decode engine of this process, and a pipe to the prefill engine."""

    def __init__(self, config: EngineConfig, pipe: multiprocessing.connection.Connection, backend: str, store: str) -> None:
        link = open_link(backend, DECODE, 2, store, place(config.device, DECODE))
        self.decode = DecodeEngine(config, link, lambda note: pipe.send(("take_note", (note,))))
        self.pipe = pipe
        link.connect(senders=1)
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.computed_at: dict[str, float] = {}
        self.decoded_at: dict[str, float] = {}
        self.parts: list[RequestPart] = []
        self.bytes_sent = 0

    def add(self, request: EngineRequest) -> None:
        self.tokens[request.request_id] = []
        self.decode.expect(request)
        self.pipe.send(("add_for", (DECODE, request)))

    def step(self) -> float:
        """Carry what has come, and step; seconds of the decode engine's step, or 0 when it had nothing to compute.

        Waits as the engine's process does: a loop that never waits keeps the threads that receive from running.
        """
        wait = self.decode.poll_ms()
        while self.pipe.poll(None if wait is None else wait / 1e3):
            wait = 0
            message = self.pipe.recv()
            if isinstance(message, tuple):
                updates, times, self.bytes_sent = message
                self.computed_at |= times
                self._take(updates, first=True)
            else:
                self.parts += message.parts if isinstance(message, Sending) else []
                self.decode.take_note(message)
        start = time.monotonic()
        updates = self.decode.step()
        seconds = time.monotonic() - start
        for update in updates:
            self.decoded_at.setdefault(update.request_id, start + seconds)
        self._take(updates)
        return seconds if updates else 0.0

    def _take(self, updates: list[RequestUpdate], first: bool = False) -> None:
        """`first`: of the prefill engine, whose token may be reported after those of the decode engine."""
        for update in updates:
            assert update.error is None, update.error
            tokens = self.tokens[update.request_id]
            self.tokens[update.request_id] = update.token_ids + tokens if first else tokens + update.token_ids
            if update.finish_reason is not None:
                self.ended.add(update.request_id)


def request(name: str, context: int, vocab: int, tokens: int) -> EngineRequest:
    ids = torch.randint(3, vocab, (context,), generator=torch.Generator().manual_seed(hash(name) % 2**31)).tolist()
    return EngineRequest(name, ids, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))


def alone(config: EngineConfig, requests: list[EngineRequest]) -> dict[str, list[int]]:
    """Tokens of one engine, one request after another."""
    engine, tokens = Engine(config), {}
    for each in requests:
        engine.add(each)
        tokens[each.request_id] = [t for _ in iter(engine.has_unfinished, False) for u in engine.step() for t in u.token_ids]
    return tokens


def measure(pair: Pair, measured: EngineRequest, running: int) -> dict[str, Any]:
    vocab, context, name = pair.decode.info.vocab_size, len(measured.prompt_ids), measured.request_id
    others = [request(f"{name} beside {i}", 512, vocab, 4000) for i in range(running)]
    for other in others:
        pair.add(other)
    while any(len(pair.tokens[other.request_id]) < 8 for other in others):
        pair.step()
    steps = [pair.step() for _ in range(20)] if others else []
    first_part, sent_before = len(pair.parts), pair.bytes_sent
    pair.add(measured)
    while name not in pair.ended:
        seconds = pair.step()
        if name in pair.decoded_at and seconds:
            steps.append(seconds)
    for other in others:
        pair.decode.abort(other.request_id)
        pair.pipe.send(("abort", (other.request_id,)))
    parts = [part for part in pair.parts[first_part:] if part.request_id == name]
    plan = pair.decode.runner.plan
    planned = sum(cost.payload for cost in sequence_cost(plan, context))
    sizes = [layer_bytes(plan, part.start, part.end, part.last) for part in parts]
    assert sum(map(sum, sizes)) == planned == pair.bytes_sent - sent_before
    early = sum(map(sum, sizes[:-1]))
    gap = pair.decoded_at[name] - pair.computed_at[name]
    return {
        "context": context, "running": running, "gap_ms": gap * 1e3, "step_ms": statistics.median(steps[-TOKENS:]) * 1e3,
        "bytes": planned, "sent_before_the_last_chunk": early / planned, "parts": len(parts),
        "sent_before_the_last_layer": 1 - sizes[-1][-1] / planned,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--transfer-backend", choices=("auto", "nixl"), default="auto")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--running", type=int, nargs="+", default=[0, 16])
    parser.add_argument("--repeats", type=int, default=5, help="the first one warms up and is not counted")
    parser.add_argument("--kv-cache-bytes", type=int, default=8 << 30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.device == "cuda":
        require_gpus(2, "--device cpu runs on any machine")
    config = EngineConfig(
        model=args.model, device=args.device, kv_cache_bytes=args.kv_cache_bytes, max_num_seqs=64, enable_prefix_caching=False
    )
    folder = tempfile.TemporaryDirectory()
    store = str(Path(folder.name) / "ranks")
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=prefill_process, args=(config, args.transfer_backend, store, there), daemon=True
    )
    process.start()
    pair = Pair(config, here, args.transfer_backend, store)
    vocab, rows, checked = pair.decode.info.vocab_size, [], []
    print(f"{'context':>8} {'running':>8} {'gap ms':>8} {'worst':>8} {'step ms':>8} {'MB':>8} {'sent early':>10}", flush=True)
    for context in args.contexts:
        for running in args.running:
            requests = [request(f"{context} {running} {i}", context, vocab, TOKENS) for i in range(args.repeats)]
            figures = [measure(pair, each, running) for each in requests][1:]
            checked += requests[1:] if running == 0 else []
            gaps = [each["gap_ms"] for each in figures]
            row = figures[0] | {"gap_ms": statistics.median(gaps), "worst_gap_ms": max(gaps)}
            rows.append(row | {"step_ms": statistics.median(each["step_ms"] for each in figures)})
            print(
                f"{context:>8} {running:>8} {rows[-1]['gap_ms']:>8.2f} {row['worst_gap_ms']:>8.2f} {rows[-1]['step_ms']:>8.2f} "
                f"{row['bytes'] / 1e6:>8.2f} {row['sent_before_the_last_chunk']:>10.0%}", flush=True,
            )  # fmt: skip
    here.send(None)
    expected = alone(config, checked)
    same = sum(pair.tokens[each.request_id] == expected[each.request_id] for each in checked)
    print(f"{same} of {len(checked)} requests have the tokens of one engine; bytes moved as planned in every row")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "same_tokens": same, "compared": len(checked)}, indent=1))
    process.join(30)
    pair.decode.close()
    assert same == len(checked), "tokens differ"


if __name__ == "__main__":
    main()
