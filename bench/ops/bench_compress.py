"""The compressor after its projections: one launch against the reference's chain of launches.

`python -m bench.ops.bench_compress [--json FILE]`, from the root of the repository, on a GPU. Up to 64 tokens: as many sequences, each of
which completes an entry with its one token (ratio 128: adds a row to its sums); more: one sequence's chunk.
"""

from __future__ import annotations

import torch

import abyssal.ops.compress.triton as kernels
from abyssal.kv import layouts
from abyssal.kv.batch import CompressFacts, StoreFacts
from abyssal.ops.compress import compress as reference
from bench.ops import write_path as wp

ENTRIES, STATE_ENTRIES = 64, 4
CASES = (("v4 main", 4, "v4"), ("v4 keys", 4, "index_fp8"), ("v4.1 main", 2, "v41_fp4"))


def step(
    sources: torch.Tensor, carried: torch.Tensor, entry_slots: torch.Tensor, rope: torch.Tensor,
    carried_sums: torch.Tensor | None = None, sum_slots: torch.Tensor | None = None, token_each: bool = False,
) -> CompressFacts:  # fmt: skip
    """Facts of one layer, of kinds `entries`, `state` and `sums`."""
    none = sources.new_empty(1, 0)
    return CompressFacts(
        phases=none[0],
        sources=sources,
        carried={"state": carried.unsqueeze(0)},
        carried_sums={"sums": none if carried_sums is None else carried_sums.unsqueeze(0)},
        sum_slots={"sums": none if sum_slots is None else sum_slots.unsqueeze(0)},
        entry_slots={"entries": entry_slots.unsqueeze(0)},
        rope=rope,
        token_each=token_each,
    )


def groups_of(tokens: int, ratio: int) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Sources [E, slots], carried rows, and the tokens whose state is kept."""
    slots = 8 if ratio == 4 else ratio
    if tokens <= 64:  # decoding: all but the last row of an entry are carried
        old = torch.arange(tokens * (slots - 1), device=wp.DEVICE).view(tokens, slots - 1)
        new = tokens * (slots - 1) + torch.arange(tokens, device=wp.DEVICE).unsqueeze(1)
        return torch.cat([old, new], 1), tokens * (slots - 1), torch.arange(tokens, device=wp.DEVICE)
    first = torch.arange(0, tokens, ratio, device=wp.DEVICE).unsqueeze(1)
    sources = first + torch.arange(ratio - slots, ratio, device=wp.DEVICE)
    kept = torch.arange(tokens - 16, tokens, device=wp.DEVICE)
    return torch.where(sources < 0, tokens, sources), 0, kept


def main() -> None:
    args = wp.arguments(__doc__ or "")
    table = wp.Table("compress", not args.no_compile)
    for name, ratio, layout_name in CASES:
        layout = layouts.get(layout_name)
        dim, overlap, keys = layout.dim, ratio == 4, layout.dim == 128
        width = (4 if overlap else 2) * dim
        state = layouts.state_rows(width)
        for tokens in args.tokens:
            sources, num_carried, kept = groups_of(tokens, ratio)
            count, slots = sources.shape
            # With overlap an entry reads half of each row.
            moved = (
                count * slots * 2 * dim * 4 + count * (layout.bytes_per_entry + 64 * 4 + slots * 8) + len(kept) * width * 4 * 2
            )
            inputs = []
            for _ in range(wp.copies(tokens, moved)):
                rows = torch.randn(tokens, width, device=wp.DEVICE)
                data, entry_slots = wp.pool(layout, count, ENTRIES)
                states, state_slots = wp.pool(state, num_carried + len(kept), STATE_ENTRIES)
                states.view(torch.float32).normal_()
                norm = torch.rand(dim, device=wp.DEVICE) + 0.5
                inputs.append(
                    (
                        rows,
                        norm,
                        data,
                        entry_slots,
                        states,
                        state_slots[:num_carried].int(),
                        state_slots[num_carried:],
                        wp.table(count),
                    )
                )
            base = kernels.compress_config(dim, slots)
            for num_warps in (base.num_warps, 2 * base.num_warps):
                config = kernels.CompressConfig(num_warps)

                def fused(
                    rows, norm, data, entry_slots, states, carried, state_slots, rope, config=config, sources=sources, kept=kept,
                    layout=layout, state=state, overlap=overlap, keys=keys, each=tokens <= 64,
                ):  # fmt: skip
                    kernels.compress(
                        rows, norm, step(sources, carried, entry_slots, rope, token_each=each),
                        StoreFacts(kept, state_slots.unsqueeze(0)),
                        kernels.Pages("state", states, state, STATE_ENTRIES), None, kernels.Pages("entries", data, layout, ENTRIES), 0,
                        overlap=overlap, rotate_keys=keys, eps=1e-6, dtype=torch.bfloat16, config=config,
                    )  # fmt: skip

                table.time(name, tokens, f"warps {num_warps}", fused, inputs, moved)

            def chain(
                rows, norm, data, entry_slots, states, carried, state_slots, rope,
                sources=sources, kept=kept, layout=layout, state=state, overlap=overlap, keys=keys,
            ):  # fmt: skip
                views = wp.view("state", states, state, STATE_ENTRIES), None, wp.view("entries", data, layout, ENTRIES)
                reference(
                    rows, norm, step(sources, carried, entry_slots, rope), StoreFacts(kept, state_slots.unsqueeze(0)), *views, 0,
                    overlap=overlap, rotate_keys=keys, eps=1e-6, dtype=torch.bfloat16,
                )  # fmt: skip

            table.time_chain(name, tokens, chain, inputs, moved)
            del inputs
    for tokens in args.tokens:
        time_ratio_128(table, tokens)
    table.print()
    table.save(args.json)


def time_ratio_128(table: wp.Table, tokens: int) -> None:
    """Decoding: every sequence adds one row to its sums, no entry completes. A chunk: an entry per 128 tokens, from its own rows."""
    layout, ring, record = layouts.get("v4"), layouts.state_rows(1024), layouts.state_rows(1536)
    rows, norm = torch.randn(tokens, 1024, device=wp.DEVICE), torch.rand(512, device=wp.DEVICE) + 0.5
    each = tokens <= 64
    sequences, count = (tokens, tokens) if each else (1, tokens // 128)
    rings, records = wp.pool(ring, 8 * sequences, 8)[0], wp.pool(record, sequences, 1)[0]
    rings.view(torch.float32).normal_()
    data, entry_slots = wp.pool(layout, count, 2)
    pages = torch.arange(1, sequences + 1, device=wp.DEVICE)
    none = pages[:0]
    if each:
        entry_slots = torch.full_like(entry_slots, -1)
        carried = (pages.unsqueeze(1) * 8 + torch.arange(8, device=wp.DEVICE)).flatten()
        sources = torch.full((2 * tokens, 9), 9 * tokens, device=wp.DEVICE)
        sources[tokens:, 0] = torch.arange(0, 8 * tokens, 8, device=wp.DEVICE)
        before, after = pages.repeat(2), pages
        kept, ring_slots = torch.arange(sequences, device=wp.DEVICE), pages * 8
        moved = sequences * (4096 + 2 * 6144 + 2 * 4096)
    else:
        sources, carried = torch.arange(count * 128, device=wp.DEVICE).view(count, 128), none
        before, after = torch.full((count,), -1, device=wp.DEVICE), none
        kept, ring_slots = torch.arange(tokens - 8, tokens, device=wp.DEVICE), 8 + torch.arange(8, device=wp.DEVICE)
        moved = tokens * 4096 + count * layout.bytes_per_entry
    facts = step(sources, carried, entry_slots, wp.table(count), before, after, each)
    store = StoreFacts(kept, ring_slots.unsqueeze(0))
    ring_pages, sums = kernels.Pages("state", rings, ring, 8), kernels.Pages("sums", records, record, 1)
    options = {"overlap": False, "rotate_keys": False, "eps": 1e-6, "dtype": torch.bfloat16}
    for num_warps, part in ((4, 8),) if each else ((4, 8), (4, 16)):
        config = kernels.CompressConfig(num_warps, part)
        table.time(
            "v4 ratio 128", tokens, f"warps {num_warps}" + f", parts of {part}" * (not each),
            lambda config: kernels.compress(
                rows, norm, facts, store, ring_pages, sums, kernels.Pages("entries", data, layout, 2), 0, config=config, **options
            ),
            [(config,)], moved,
        )  # fmt: skip
    views = wp.view("state", rings, ring, 8), wp.view("sums", records, record, 1), wp.view("entries", data, layout, 2)

    def chain(rows):
        reference(rows, norm, facts, store, *views, 0, **options)

    table.time_chain("v4 ratio 128", tokens, chain, [(rows,)], moved)


if __name__ == "__main__":
    main()
