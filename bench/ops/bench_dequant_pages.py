"""Records to a bf16 workspace, whole pages and lists of entries.

`python -m bench.ops.bench_dequant_pages [--json FILE]`, from the root of the repository, on a GPU.
"""

from __future__ import annotations

import torch

import abyssal.ops.dequant_pages.triton as kernels
from abyssal.kv import layouts
from abyssal.ops.dequant_pages import dequant_pages as reference
from bench.ops import write_path as wp

ENTRIES = 64


def main() -> None:
    args = wp.arguments(__doc__ or "")
    table = wp.Table("dequant_pages; tokens = entries", not args.no_compile)
    for name in ("v4", "v41", "v41_fp4", "index_fp8"):
        layout = layouts.get(name)
        for entries in (64, 4096, 65536):
            moved = entries * (layout.bytes_per_entry + 2 * layout.dim + 4)
            inputs = []
            for _ in range(wp.copies(entries, moved)):
                data, slots = wp.pool(layout, entries, ENTRIES)
                data.random_(0, 120)
                pages = (slots[::ENTRIES] // ENTRIES).int()
                inputs.append(
                    (data, slots.int(), pages, torch.empty(entries, layout.dim, dtype=torch.bfloat16, device=wp.DEVICE))
                )
            for rows in sorted({max(1, lanes * 32 // layout.dim) for lanes in (16, 64)}):
                config = kernels.DequantConfig(rows)
                for whole in (True, False):
                    table.time(
                        name, entries, f"{'pages' if whole else 'entries'} x{rows}",
                        lambda data, slots, pages, out, whole=whole, config=config, layout=layout: kernels.dequant_pages(
                            data, layout, ENTRIES, pages if whole else slots, whole_pages=whole,
                            out=out.view(-1, ENTRIES, layout.dim) if whole else out, config=config,
                        ),
                        inputs, moved,
                    )  # fmt: skip
            table.time_chain(
                name, entries,
                lambda data, slots, pages, out, layout=layout: reference(data, layout, ENTRIES, pages, whole_pages=True), inputs, moved,
            )  # fmt: skip
            del inputs
    table.print()
    table.save(args.json)


if __name__ == "__main__":
    main()
