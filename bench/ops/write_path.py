"""What the benchmarks of the write-path kernels share: model shapes, pools, the launch floor, tables."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from abyssal.config import RopeConfig
from abyssal.kv import codec
from abyssal.kv.layouts import Layout
from abyssal.kv.pool import RecordView
from abyssal.ops.rope import rope_table
from bench.ops.timing import COPY_BANDWIDTH, median_us

Chain = Callable[..., Any]  # an op's reference
TOKENS = (1, 8, 64, 512, 4096)
L2_BYTES = 60 << 20
ROPE = RopeConfig(64, 160000.0, None)
DEVICE = "cuda"
FAILURES = (RuntimeError, AssertionError, ValueError, TypeError, AttributeError, triton.TritonError)


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    heads: int
    eps: float | None  # of the query norm
    index_heads: int
    hadamard: bool
    tile: int  # of the output's quantisation
    groups: int
    layout: str  # of window records
    compressed: str
    index: str


SHAPES = (
    Shape("v4-flash", 64, 1e-6, 64, True, 128, 8, "v4", "v4", "index_fp8"),
    Shape("v4-pro", 128, 1e-6, 64, True, 128, 16, "v4", "v4", "index_fp8"),
    Shape("v4.1-flash", 64, None, 32, False, 32, 8, "v41", "v41_fp4", "index_mxfp4"),
)


@triton.jit
def empty_kernel():
    pass


@triton.jit
def copy_kernel(source, target, n, BLOCK: tl.constexpr):
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + column, tl.load(source + column, mask=column < n), mask=column < n)


@triton.jit
def copy_pieces_kernel(data, pieces, PIECE: tl.constexpr, STRIDE: tl.constexpr, PER_PROGRAM: tl.constexpr):
    """Each word is read and written back: the first PIECE of every STRIDE."""
    piece = tl.program_id(0) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)[:, None]
    here = data + piece.to(tl.int64) * STRIDE + tl.arange(0, PIECE)[None, :]
    tl.store(here, tl.load(here, mask=piece < pieces), mask=piece < pieces)


def copy_us(bytes_moved: int, sets: int) -> float:
    """Median replay time of a plain copy that reads and writes `bytes_moved` together, in turn over as many inputs."""
    words, block = max(1, bytes_moved // 8), 2048
    pairs = [tuple(torch.zeros(2, words, dtype=torch.int32, device=DEVICE)) for _ in range(sets)]
    grid = (triton.cdiv(words, block),)
    return median_us(lambda a, b: copy_kernel[grid](a, b, words, BLOCK=block, num_warps=4), pairs, repeats=7)


def copy_pieces_us(bytes_moved: int, sets: int, piece: int, stride: int) -> float:
    """The same of a copy in place of `piece` bytes of every `stride`: what is left of the bandwidth where an op must leave out the others."""
    pieces, per_program = bytes_moved // (2 * piece), 64
    inputs = [(torch.zeros(pieces * stride // 4, dtype=torch.int32, device=DEVICE),) for _ in range(sets)]
    grid = (triton.cdiv(pieces, per_program),)
    return median_us(
        lambda x: copy_pieces_kernel[grid](x, pieces, PIECE=piece // 4, STRIDE=stride // 4, PER_PROGRAM=per_program, num_warps=4),
        inputs, repeats=7,
    )  # fmt: skip


def launch_floor() -> float:
    """Median replay time of a kernel that does nothing, us."""
    return median_us(lambda: empty_kernel[(1,)](num_warps=1), [()], repeats=9, calls=100)


def copies(tokens: int, bytes_touched: int) -> int:
    """Input sets to rotate: decode reads what the product before just wrote (warm L2), prefill does not."""
    return 1 if tokens <= 64 else -(-3 * L2_BYTES // (2 * bytes_touched))


def table(tokens: int) -> Tensor:
    return rope_table(torch.arange(tokens, device=DEVICE) + 1000, ROPE)


def pool(layout: Layout, records: int, entries: int) -> tuple[Tensor, Tensor]:
    """A pool of pages with room for `records`, and their slots int64 in random pages."""
    pages = -(-records // entries) + 1
    stride = -(-layout.page_bytes(entries) // 16) * 16
    data = torch.zeros(pages, stride, dtype=torch.uint8, device=DEVICE)
    order = torch.randperm(pages - 1, device=DEVICE) + 1
    index = torch.arange(records, device=DEVICE)
    return data, order[index // entries] * entries + index % entries


class WholeView(RecordView):
    """Writes every row: to leave out those of slot -1 the device would have to be asked, which no graph can hold.

    Through views of the type that `read` takes: inductor refuses memory that a graph changes and reads as two types.
    """

    def write(self, slots: Tensor, values: Tensor) -> None:
        layout, where = self.spec.layout, self._split(slots)
        if layout.grid is None:
            self._rows[where] = values.to(layout.dtype)
        else:
            self._data[where], self._scales[where] = codec.encode(layout, values)


def view(name: str, data: Tensor, layout: Layout, entries: int) -> RecordView:
    """The reference's view of a pool."""
    return WholeView(data, SimpleNamespace(layout=layout, entries_per_page=entries, name=name))  # type: ignore[arg-type]


class Table:
    """Rows of results, printed as they come; a variant that fails is a row that says why. `print` sums up."""

    def __init__(self, title: str, compiles: bool = True) -> None:
        self.floor, self.compiles = launch_floor(), compiles
        self.title = title
        self.rows: list[dict[str, Any]] = []
        self.copies: dict[tuple[int, ...], float] = {}
        print(f"{title}; empty kernel F = {self.floor:.2f} us; roof = bytes / {COPY_BANDWIDTH / 1e12} TB/s; {device_line()}")
        print(
            f"{'shape':12} {'tokens':>6} {'variant':34} {'us':>8} {'us - F':>8} {'roof us':>8} {'% of roof':>9} {'copy us':>8} {'pieces us':>9}",
            flush=True,
        )

    def time(
        self,
        shape: str,
        tokens: int,
        variant: str,
        fn: Callable[..., Any],
        inputs: Sequence[tuple[Any, ...]],
        bytes_moved: int,
        pieces: tuple[int, int] | None = None,
    ) -> float | None:
        """`pieces`: what the op reads and writes in place, bytes of a piece and from one to the next, where most of its bytes are such."""
        roof = bytes_moved / COPY_BANDWIDTH * 1e6
        row: dict[str, Any] = {"shape": shape, "tokens": tokens, "variant": variant, "bytes": bytes_moved, "roof_us": roof}
        head = f"{shape:12} {tokens:>6} {variant:34}"
        try:
            us = row["us"] = median_us(fn, inputs, repeats=7)
            row["copy_us"] = self._once(copy_us, bytes_moved, len(inputs))
            of_pieces = ""
            if pieces is not None:
                row["pieces_us"] = self._once(copy_pieces_us, bytes_moved, len(inputs), *pieces)
                of_pieces = f"{row['pieces_us']:9.2f}"
            print(
                f"{head} {us:8.2f} {us - self.floor:8.2f} {roof:8.2f} {100 * roof / us:9.0f} {row['copy_us']:8.2f} {of_pieces}",
                flush=True,
            )
        except FAILURES as error:  # the other variants are still worth their time
            torch.cuda.synchronize()
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
            print(head, row["error"], flush=True)
        self.rows.append(row)
        return row.get("us")

    def _once(self, copy: Callable[..., float], *key: int) -> float:
        if key not in self.copies:
            self.copies[key] = copy(*key)
        return self.copies[key]

    def time_chain(
        self, shape: str, tokens: int, chain: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], bytes_moved: int
    ) -> None:
        """The op's reference as it is and through torch.compile, for the few tokens of a decode step."""
        if tokens <= 64:
            self.time(shape, tokens, "eager", chain, inputs, bytes_moved)
            if self.compiles:
                self.time(shape, tokens, "compile", compiled(chain), inputs, bytes_moved)

    def print(self) -> None:
        """The fastest variant of each shape, its share of the roof, with F and without, of a copy of as many bytes and of one of such
        pieces; how many times longer the unfused chains take."""
        print(
            f"\n{self.title}\n{'shape':12} {'tokens':>6} {'fastest':34} {'us':>8} {'us - F':>8} {'% of roof':>9} {'without F':>9} "
            f"{'% of copy':>9} {'% pieces':>9} {'eager':>6} {'compile':>7}"
        )
        for shape, tokens in dict.fromkeys((row["shape"], row["tokens"]) for row in self.rows):
            cell = {row["variant"]: row for row in self.rows if (row["shape"], row["tokens"]) == (shape, tokens) and "us" in row}
            chains = {name: cell.pop(name)["us"] for name in ("eager", "compile") if name in cell}
            if cell:
                best = min(cell.values(), key=lambda row: row["us"])
                times = [f"{chains[name] / best['us']:.1f}" if name in chains else "" for name in ("eager", "compile")]
                us, roof = best["us"], best["roof_us"]
                of_pieces = f"{100 * best['pieces_us'] / us:9.0f}" if "pieces_us" in best else ""
                print(
                    f"{shape:12} {tokens:>6} {best['variant']:34} {us:8.2f} {us - self.floor:8.2f} {100 * roof / us:9.0f} "
                    f"{100 * roof / max(us - self.floor, 0.01):9.0f} {100 * best['copy_us'] / us:9.0f} {of_pieces:>9} {times[0]:>6} "
                    f"{times[1]:>7}"
                )

    def save(self, path: Path | None) -> None:
        if path is not None:
            path.write_text(json.dumps({"title": self.title, "floor_us": self.floor, "rows": self.rows}, indent=1))


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, dynamic=False)


def device_line() -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True).stdout.strip()
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, {commit or 'no commit'}"


def kernel_us(fn: Callable[[], Any], calls: int = 50) -> float:
    """Median time of the kernels of one call as the profiler sees them, without launch gaps, us."""
    fn()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            fn()
        torch.cuda.synchronize()
    times = [e.device_time for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.device_time > 0]
    assert times and len(times) % calls == 0, f"{len(times)} kernels in {calls} calls"
    return statistics.median(times) * (len(times) // calls)


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="file for the full results")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    return parser.parse_args()
