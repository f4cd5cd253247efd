"""Temporary: variants of one decode step in one engine."""
import argparse, contextlib, dataclasses, gc, json, os, statistics, sys, tempfile, time
from pathlib import Path
from unittest import mock
import numpy as np
import torch
from dataclasses import replace
from abyssal.measure.ceilings import measure_ceilings
from abyssal.measure.records import add_running
from abyssal.measure import steps as S
from bench.slices import SLICES, slice_config, write_slice
from bench.engine_h200 import build
import abyssal.ops.linear.triton as L
import abyssal.ops.moe.triton as M
import abyssal.ops._kernels as KO

few_config = L.few_config
rows_per_tile = L.rows_per_tile
moe_config = M.moe_config
beside = KO.KernelOps.beside


@contextlib.contextmanager
def no_beside(self, tokens):
    yield lambda: None


def try_(**kw):
    def on():
        old = dict(L.TRY); L.TRY.update(kw); return lambda: L.TRY.update(old)
    return on


def patch(target, name, value):
    def on():
        old = getattr(target, name); setattr(target, name, value); return lambda: setattr(target, name, old)
    return on


def few(**kw):
    return patch(L, "few_config", lambda *a, **k: replace(few_config(*a, **k), **kw))


def experts(up, down):
    def config(choices, *rest, **k):
        if choices > 16:
            return moe_config(choices, *rest, **k)
        return M.MoeConfig(M.ProductConfig(*up), M.ProductConfig(*down))
    return patch(M, "moe_config", config)


VARIANTS = {
    "base": [],
    "attention on one stream": [patch(KO.KernelOps, "beside", no_beside)],
    "compress with the queries": [try_(apart=1)],
    "all on one stream": [patch(KO.KernelOps, "beside", no_beside), patch(KO, "BESIDE_TOKENS", 0)],
    "linear: no prefetch": [few(prefetched=False)],
    "linear: no prefetch, one tile": [few(prefetched=False, tiles=1)],
    "linear: trigger first": [try_(few_trigger=1)],
    "linear: 32 rows from 4096": [patch(L, "rows_per_tile", lambda n: 32 if n >= 4096 else 16)],
    "linear: 16 rows": [patch(L, "rows_per_tile", lambda n: 16)],
    "linear: less shared": [patch(L, "SHARED_BYTES", 48 << 10)],
    "experts 16.4": [experts((8, 16, 4, 1), (8, 16, 4, 1))],
    "experts 16.4 down 16.2": [experts((8, 16, 4, 1), (8, 16, 2, 1))],
    "experts 32.2": [experts((8, 32, 2, 1), (8, 32, 2, 1))],
    "experts 32.2 down 16.2": [experts((8, 32, 2, 1), (8, 16, 2, 1))],
    "experts bring none": [try_(bring=0)],
    "experts bring up": [try_(bring=1)],
    "experts bring down": [try_(bring=2)],
    "experts trigger first": [try_(up_trigger=1)],
    "experts with plan": [patch(M, "PLANLESS_CHOICES", 0)],
    "sum early": [try_(sum=1)],
    "base again": [],
}
KEPT = []
MANY = ("base", "compress with the queries", "attention on one stream", "all on one stream", "linear: no prefetch")


def time_steps(engine, steps):
    for _ in range(3):
        engine.step()
    gc.collect()
    ends = [time.perf_counter()]
    for _ in range(steps):
        engine.step()
        ends.append(time.perf_counter())
    return statistics.median(np.diff(ends).tolist()) * 1e3


def timeline(engine, file):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        engine.step(); engine.step()
        torch.cuda.synchronize()
    trace = file + ".json"
    recorded.export_chrome_trace(trace)
    events = [e for e in json.load(open(trace))["traceEvents"] if e.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")]
    os.remove(trace)
    events.sort(key=lambda e: e["ts"])
    first = events[0]["ts"]
    with open(file, "w") as out:
        for e in events:
            out.write(f"{e['ts'] - first:10.2f} {e['dur']:8.2f} {e['args'].get('stream', '')!s:>4} {str(e['args'].get('grid')):>16} {e['name'][:90]}\n")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--layers", type=int, default=20)
    p.add_argument("--batches", type=int, nargs="+", default=[64, 8, 1])
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--seconds", type=float, default=1e9)
    p.add_argument("--only", nargs="*")
    p.add_argument("--compile", action="store_true")
    args = p.parse_args()
    logs, begun = os.environ["LOGS"], time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_slice(Path(temporary), slice_config(replace(SLICES["v4-flash"], layers=args.layers)))
        engine = build(folder, {"kv_cache_bytes": str(6 << 30)}, max(args.batches))
        print(f"built {time.perf_counter() - begun:.1f}", flush=True)
        names = add_running(engine, max(args.batches), 8192)
        print(f"running {time.perf_counter() - begun:.1f}", flush=True)
        for batch in sorted(args.batches, reverse=True):
            for name in names[batch:]:
                engine.abort(name)
            names = names[:batch]
            for variant, patches in VARIANTS.items():
                if (args.only and variant not in args.only) or (batch > 1 and variant not in MANY):
                    continue
                if time.perf_counter() - begun > args.seconds:
                    break
                undo = [on() for on in patches]
                try:
                    torch.cuda.synchronize()
                    decoder = engine.runner.decoder
                    KEPT.append(decoder._graphs)
                    decoder._graphs, decoder._memory = {}, torch.cuda.graph_pool_handle()
                    print(f"{batch:>3} {variant:32} {time_steps(engine, args.steps):7.3f} ms   at {time.perf_counter() - begun:.1f} s", flush=True)
                    if variant == "base":
                        timeline(engine, f"{logs}/timeline_{batch}.txt")
                    if variant == "attention on one stream" and batch == 1:
                        timeline(engine, f"{logs}/timeline_{batch}_one_stream.txt")
                except Exception as error:
                    print(f"{batch:>3} {variant:32} {type(error).__name__}: {error}", flush=True)
                finally:
                    for back in undo:
                        back()


main()
