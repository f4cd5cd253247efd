"""Cache kinds: every cached thing of a model, described by one `CacheSpec` each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from abyssal.config import ModelConfig
from abyssal.kv import layouts
from abyssal.kv.layouts import Layout

BLOCK_TOKENS = 256  # native positions in a logical block of the whole-context kinds
ROLL_BACK = 8  # tokens that a rejected draft may take back: windows keep so many more
WINDOW_PAGE_ENTRIES = 64

Bucket = Literal["main", "index", "small"]
Lifetime = Literal["context", "window", "record"]


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One kind of cache: which layers have it, how an entry is stored, how long it lives."""

    name: str
    layers: tuple[int, ...]
    layout: Layout
    ratio: int  # tokens per entry
    lifetime: Lifetime  # for the whole context; for the last `window` + ROLL_BACK tokens; or as a fixed record per sequence
    window: int  # tokens that later steps read; 0 for the other lifetimes
    record_entries: int  # of a record, a ring: token p at p % record_entries; 0 for the other lifetimes
    tail_only: bool  # of a chunk only the last `window` + ROLL_BACK tokens are stored: later steps read no others
    bucket: Bucket
    entries_per_page: int

    def row(self, layer: int) -> int:
        """Index of `layer` in this kind's tables."""
        return self.layers.index(layer)

    def first_kept(self, end: int) -> int:
        """First token position whose entry a sequence of `end` tokens still needs."""
        return 0 if self.lifetime == "context" else max(0, end - self.window - ROLL_BACK)

    @property
    def most_blocks(self) -> int:
        """Most blocks of a window kind that a sequence needs for a step of one token."""
        return (self.window + ROLL_BACK - 1) // self.entries_per_page + 2

    def blocks(self, tokens: int) -> range:
        """Blocks, of `entries_per_page` entries each, that a sequence of `tokens` tokens needs between steps."""
        if self.lifetime == "record":
            return range(-(-self.record_entries // self.entries_per_page) if tokens else 0)
        end = tokens // self.ratio  # an entry is stored when its group is complete
        return range(self.first_block(tokens), -(-end // self.entries_per_page))

    def first_block(self, tokens: int) -> int:
        """The first of `blocks`, of a kind whose lifetime is no record."""
        return self.first_kept(tokens) // self.ratio // self.entries_per_page


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The cache kinds of one model and the page size of every bucket."""

    specs: dict[str, CacheSpec]
    page_bytes: dict[Bucket, int]


def plan_caches(config: ModelConfig, kv_layout: str, compressed_layout: str, index_layout: str) -> CachePlan:
    """Cache kinds of `config`: window, and per ratio the compressed KV, index keys and compressor state of the layers that own them.

    The layouts are names of record layouts, of window KV, compressed KV and index keys.
    """
    window, compressed = (layouts.get(name, config.head_dim) for name in (kv_layout, compressed_layout))
    every_layer = tuple(range(config.num_layers))
    specs = [CacheSpec("window", every_layer, window, 1, "window", config.sliding_window, 0, False, "main", WINDOW_PAGE_ENTRIES)]
    # As many compressed records as take about the room of a page of window records; a block may take several pages.
    most_entries = WINDOW_PAGE_ENTRIES << round(math.log2(window.bytes_per_entry / compressed.bytes_per_entry))
    for ratio in sorted({plan.ratio for plan in config.layers if plan.owns_compressor}):
        owners = tuple(p.layer for p in config.layers if p.owns_compressor and p.ratio == ratio)
        indexed = tuple(layer for layer in owners if config.layers[layer].selection == "topk")
        entries = min(BLOCK_TOKENS // ratio, most_entries)
        bucket: Bucket = "small" if ratio == 128 else "main"
        specs.append(CacheSpec(f"c{ratio}", owners, compressed, ratio, "context", 0, 0, False, bucket, entries))
        if ratio > 1:
            specs += _state(f"c{ratio}", owners, config.head_dim, ratio, "main")
        if indexed:
            keys = layouts.get(index_layout, config.index_head_dim)
            specs.append(CacheSpec(f"c{ratio}_index", indexed, keys, ratio, "context", 0, 0, False, "index", entries))
            if config.layers[indexed[0]].index_keys == "pooled":
                specs += _state(f"c{ratio}_index", indexed, config.index_head_dim, ratio, "index")
    return _size_pages(specs, compressed.page_align)


def _state(kind: str, layers: tuple[int, ...], dim: int, ratio: int, bucket: Bucket) -> list[CacheSpec]:
    """Compressor state: a row of projections and one of scores per token, for one group, or with overlap (ratio 4) for two.

    128 rows would cost more than the window. Of ratio 128 there are the last ROLL_BACK rows only, and sums over the group's rows
    before them: per channel the largest score m, s = sum of exp(score - m), and v = sum of exp(score - m) value.
    """
    groups = 2 if ratio == 4 else 1
    rows = layouts.state_rows(2 * groups * dim)
    if ratio < 128:
        return [CacheSpec(f"{kind}_state", layers, rows, 1, "window", groups * ratio, 0, True, bucket, WINDOW_PAGE_ENTRIES)]
    sums = layouts.state_rows(3 * dim)
    return [
        CacheSpec(f"{kind}_state", layers, rows, 1, "record", 0, ROLL_BACK, True, bucket, ROLL_BACK),
        CacheSpec(f"{kind}_sums", layers, sums, ratio, "record", 0, 1, True, bucket, 1),
    ]


def _size_pages(specs: list[CacheSpec], min_align: int) -> CachePlan:
    """Fix page sizes: a bucket's page is that of its largest whole-context kind and holds at least one row of state.

    Windows and states then get as many entries per page as a power of two allows. Sizes are multiples of `min_align`, of every KV
    layout's own alignment in the bucket, and of a 16-byte access.
    """
    sizes: dict[Bucket, int] = {}
    aligns: dict[Bucket, int] = {}
    lasting = {spec.bucket for spec in specs if spec.lifetime == "context"}
    for spec in specs:
        free = spec.tail_only or (spec.lifetime != "context" and spec.bucket in lasting)
        size = spec.layout.page_bytes(1 if free else spec.entries_per_page)
        sizes[spec.bucket] = max(sizes.get(spec.bucket, 0), size)
        aligns[spec.bucket] = max(aligns.get(spec.bucket, 16), min_align, spec.layout.page_align)
    page_bytes = {bucket: -(-size // aligns[bucket]) * aligns[bucket] for bucket, size in sizes.items()}
    fitted = {}
    for spec in specs:
        fit = spec.entries_per_page
        while spec.lifetime != "context" and spec.layout.page_bytes(fit) > page_bytes[spec.bucket]:
            fit //= 2
        fitted[spec.name] = replace(spec, entries_per_page=fit)
    return CachePlan(fitted, page_bytes)
