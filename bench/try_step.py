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


def both(*c):
    return experts(c, c)


VARIANTS = {
    "base": [],
    "attention on one stream": [patch(KO.KernelOps, "beside", no_beside)],
    "experts on one stream": [patch(KO.KernelOps, "moe", lambda self, x, ids, e: M.moe(x, ids, e, batch_invariant=self.batch_invariant))],
    "all on one stream": [patch(KO, "BESIDE_TOKENS", 0)],
    "fork before the choice": [try_(fork=0)],
    "apart": [try_(apart=1)],
    "experts 8x64.6w4": [both(8, 64, 6, 4)],
    "experts 8x64.8w4": [both(8, 64, 8, 4)],
    "experts 8x128.4w4": [both(8, 128, 4, 4)],
    "experts 16x64.6w4": [both(16, 64, 6, 4)],
    "experts 16.4": [both(8, 16, 4, 1)],
    "experts ahead 2": [try_(ahead=2), both(8, 16, 2, 1)],
    "experts ahead 3": [try_(ahead=3), both(8, 16, 2, 1)],
    "experts 32.2": [both(8, 32, 2, 1)],
    "experts trigger first": [try_(up_trigger=1)],
    "experts with plan": [patch(M, "PLANLESS_CHOICES", 0)],
    "linear lines 1": [try_(lines=1)],
    "linear lines 3": [try_(lines=3)],
    "linear trigger first": [try_(few_trigger=1)],
    "linear deep": [try_(deep=1)],
    "linear 16 rows": [patch(L, "rows_per_program", lambda n: 16)],
    "linear less shared": [patch(L, "SHARED_BYTES", 48 << 10)],
    "sum early": [try_(sum=1)],
    "many": [try_(lines=1, deep=1, apart=1), both(8, 64, 8, 4)],
    "base again": [],
}
KEPT = []
MANY = ("base", "attention on one stream", "experts on one stream", "all on one stream", "fork before the choice")


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
    p.add_argument("--part", type=int, nargs=2)
    p.add_argument("--quiet", action="store_true")
    p.add_argument("--cache", type=int, default=6)
    args = p.parse_args()
    logs, begun = os.environ["LOGS"], time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_slice(Path(temporary), slice_config(replace(SLICES["v4-flash"], layers=args.layers)))
        engine = build(folder, {"kv_cache_bytes": str(args.cache << 30)}, max(args.batches))
        print(f"built {time.perf_counter() - begun:.1f}", flush=True)
        names = add_running(engine, max(args.batches), 8192)
        print(f"running {time.perf_counter() - begun:.1f}", flush=True)
        for batch in sorted(args.batches, reverse=True):
            for name in names[batch:]:
                engine.abort(name)
            names = names[:batch]
            for index, (variant, patches) in enumerate(VARIANTS.items()):
                if args.part and index % args.part[1] != args.part[0]:
                    continue
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
                    if args.quiet:
                        continue
                    if variant == "base" and batch in (1, 8):
                        timeline(engine, f"{logs}/timeline_{batch}.txt")
                    if variant == "many" and batch == 1:
                        timeline(engine, f"{logs}/timeline_{batch}_many.txt")
                except Exception as error:
                    print(f"{batch:>3} {variant:32} {type(error).__name__}: {error}", flush=True)
                finally:
                    for back in undo:
                        back()


if __name__ == "__main__":
    main()
