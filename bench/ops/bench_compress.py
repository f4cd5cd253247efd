"""The compressor after its projections: one launch against the reference's chain of launches.

`python -m bench.ops.bench_compress [--json FILE]`, from the root of the repository, on a GPU. Up to 64 tokens: as many sequences, each of
which completes an entry with its one token (ratio 128: adds a row to its sums); more: one sequence's chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import abyssal.ops.compress.triton as kernels
from abyssal.kv import layouts
from abyssal.kv.batch import CompressFacts, StoreFacts
from abyssal.kv.layouts import Layout
from abyssal.ops.compress import compress as reference
from bench.ops import write_path as wp

ENTRIES, STATE_ENTRIES = 64, 4
CONFIG = kernels.CompressConfig
CASES = (("v4 main", 4, "v4"), ("v4 keys", 4, "index_fp8"), ("v4.1 main", 2, "v41_fp4"))
CONFIGS = {"v4 main": (CONFIG(4), CONFIG(8)), "v4 keys": (CONFIG(1), CONFIG(2)), "v4.1 main": (CONFIG(4), CONFIG(4, 32))}
SUM_CONFIGS = (kernels.SumConfig(8, 8), kernels.SumConfig(16, 8, registers=128))


def step(
    sources: Tensor, carried: Tensor, entry_slots: Tensor, rope: Tensor, carried_sums: Tensor | None = None,
    sum_slots: Tensor | None = None, token_each: bool = False, phases: Tensor | None = None,
) -> CompressFacts:  # fmt: skip
    """Facts of one layer, of kinds `entries`, `state` and `sums`."""
    none = sources.new_empty(1, 0)
    return CompressFacts(
        phases=none[0] if phases is None else phases,
        sources=sources,
        carried={"state": carried.unsqueeze(0)},
        carried_sums={"sums": none if carried_sums is None else carried_sums.unsqueeze(0)},
        sum_slots={"sums": none if sum_slots is None else sum_slots.unsqueeze(0)},
        entry_slots={"entries": entry_slots.unsqueeze(0)},
        rope=rope,
        token_each=token_each,
    )


@dataclass(frozen=True)
class Inputs:
    rows: Tensor
    bias: Tensor | None
    norm: Tensor
    facts: CompressFacts
    store: StoreFacts
    state: kernels.Pages
    sums: kernels.Pages | None
    entries: kernels.Pages
    options: dict[str, Any]

    def fused(self, **config: Any) -> None:
        kernels.compress(
            self.rows, self.bias, self.norm, self.facts, self.store, self.state, self.sums, self.entries, 0, **self.options, **config
        )  # fmt: skip

    def chain(self) -> wp.Chain:
        """The reference on this step; its views are made outside, since inductor refuses to change one memory through views of two types."""
        kinds = (self.state, self.sums, self.entries)
        state, sums, entries = (None if k is None else wp.view(k.name, k.data, k.layout, k.entries_per_page) for k in kinds)
        bias, norm, facts, store, options = self.bias, self.norm, self.facts, self.store, self.options

        def run(rows: Tensor) -> Tensor:
            return reference(rows, bias, norm, facts, store, state, sums, entries, 0, **options)

        return run


def main() -> None:
    args = wp.arguments(__doc__ or "")
    table = wp.Table("compress", not args.no_compile)
    for name, ratio, layout_name in CASES:
        for tokens in args.tokens:
            inputs, moved = whole_groups(layouts.get(layout_name), ratio, tokens)
            for config in CONFIGS[name]:
                calls = [(one, {"config": config}) for one in inputs]
                variant = f"{config.num_warps} warps" + (f" of {config.registers} registers" if config.registers else "")
                table.time(name, tokens, variant, lambda one, config: one.fused(**config), calls, moved)
            table.time_chain(name, tokens, inputs[0].chain(), [(inputs[0].rows,)], moved)
            del inputs
    for tokens in args.tokens:
        inputs, moved = summed_groups(tokens)
        for config in SUM_CONFIGS[:1] if tokens <= 64 else SUM_CONFIGS:
            calls = [(one, {"sum_config": config}) for one in inputs]
            variant = "" if tokens <= 64 else f"parts of {config.rows}, {config.num_warps} warps"
            table.time("v4 ratio 128", tokens, variant, lambda one, config: one.fused(**config), calls, moved)
        table.time_chain("v4 ratio 128", tokens, inputs[0].chain(), [(inputs[0].rows,)], moved)
        del inputs
    table.print()
    table.save(args.json)


def whole_groups(layout: Layout, ratio: int, tokens: int) -> tuple[list[Inputs], int]:
    """Inputs and the bytes of one call, for ratios 2 and 4."""
    dim, overlap, each = layout.dim, ratio == 4, tokens <= 64
    slots, width = (8, 4 * dim) if overlap else (ratio, 2 * dim)
    state = layouts.state_rows(width)
    token = torch.arange(tokens, device=wp.DEVICE)
    if each:  # all but the last row of an entry are carried
        old = torch.arange(tokens * (slots - 1), device=wp.DEVICE).view(tokens, slots - 1)
        sources, num_carried, kept = torch.cat([old, old.numel() + token.unsqueeze(1)], 1), old.numel(), token
    else:
        sources = token[::ratio].unsqueeze(1) + torch.arange(ratio - slots, ratio, device=wp.DEVICE)
        sources, num_carried, kept = torch.where(sources < 0, tokens, sources), 0, token[-16:]
    count = len(sources)
    phases = torch.full_like(token, ratio - 1) if each else token % ratio
    bias = torch.randn(ratio, width // 2, device=wp.DEVICE) if overlap else None
    # With overlap an entry reads half of each row.
    moved = count * slots * 2 * dim * 4 + count * (layout.bytes_per_entry + 64 * 4 + slots * 8) + len(kept) * width * 4 * 2
    inputs = []
    for _ in range(wp.copies(tokens, moved)):
        data, entry_slots = wp.pool(layout, count, ENTRIES)
        states, state_slots = wp.pool(state, num_carried + len(kept), STATE_ENTRIES)
        states.view(torch.float32).normal_()
        facts = step(sources, state_slots[:num_carried].int(), entry_slots.int(), wp.table(count), token_each=each, phases=phases)
        inputs.append(Inputs(
            torch.randn(tokens, width, device=wp.DEVICE), bias, torch.rand(dim, device=wp.DEVICE) + 0.5, facts,
            StoreFacts(kept, state_slots[num_carried:].unsqueeze(0)), kernels.Pages("state", states, state, STATE_ENTRIES), None,
            kernels.Pages("entries", data, layout, ENTRIES),
            {"overlap": overlap, "rotate_keys": dim == 128, "eps": 1e-6, "dtype": torch.bfloat16},
        ))  # fmt: skip
    return inputs, moved


def summed_groups(tokens: int) -> tuple[list[Inputs], int]:
    """The same for ratio 128. Decoding: every sequence adds one row to its sums, no entry completes. A chunk: an entry per 128 tokens."""
    layout, ring, record = layouts.get("v4"), layouts.state_rows(1024), layouts.state_rows(1536)
    each = tokens <= 64
    sequences, count = (tokens, tokens) if each else (1, tokens // 128)
    token = torch.arange(tokens, device=wp.DEVICE)
    pages = torch.arange(1, sequences + 1, device=wp.DEVICE)
    if each:
        carried = (pages.unsqueeze(1) * 8 + torch.arange(8, device=wp.DEVICE)).flatten()
        sources = torch.full((2 * tokens, 9), 9 * tokens, device=wp.DEVICE)
        sources[tokens:, 0] = torch.arange(0, 8 * tokens, 8, device=wp.DEVICE)
        before, after, kept, ring_slots = pages.repeat(2), pages, token, pages * 8
        moved = sequences * (4096 + 2 * 6144 + 2 * 4096)
    else:
        sources, carried = token.view(count, 128), pages[:0]
        before, after, kept = torch.full((count,), -1, device=wp.DEVICE), pages[:0], token[-8:]
        ring_slots = 8 + torch.arange(8, device=wp.DEVICE)
        moved = tokens * 4096 + count * layout.bytes_per_entry
    bias = torch.randn(128, 512, device=wp.DEVICE)
    inputs = []
    for _ in range(wp.copies(tokens, moved)):
        data, entry_slots = wp.pool(layout, count, 2)
        rings, records = wp.pool(ring, 8 * sequences, 8)[0], wp.pool(record, sequences, 1)[0]
        rings.view(torch.float32).normal_()
        slots = torch.full_like(entry_slots, -1) if each else entry_slots
        facts = step(sources, carried.int(), slots.int(), wp.table(count), before, after, each, token % 128)
        inputs.append(Inputs(
            torch.randn(tokens, 1024, device=wp.DEVICE), bias, torch.rand(512, device=wp.DEVICE) + 0.5, facts,
            StoreFacts(kept, ring_slots.unsqueeze(0)), kernels.Pages("state", rings, ring, 8), kernels.Pages("sums", records, record, 1),
            kernels.Pages("entries", data, layout, 2),
            {"overlap": False, "rotate_keys": False, "eps": 1e-6, "dtype": torch.bfloat16},
        ))  # fmt: skip
    return inputs, moved


if __name__ == "__main__":
    main()
