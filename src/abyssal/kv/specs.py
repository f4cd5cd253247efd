"""Cache kinds: every cached thing of a model, described by one `CacheSpec` each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from abyssal.config import ModelConfig
from abyssal.kv import layouts
from abyssal.kv.layouts import Layout

BLOCK_TOKENS = 256  # native positions in a logical block of the whole-context kinds
ROLL_BACK = 8  # tokens that a rejected draft may take back: windows keep so many more
WINDOW_PAGE_ENTRIES = 64

Bucket = Literal["main", "index", "small"]


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One kind of cache: which layers have it, how an entry is stored, how long it lives."""

    name: str
    layers: tuple[int, ...]
    layout: Layout
    ratio: int  # tokens per entry
    window: int | None  # None: kept for the whole context; else for the last `window` + ROLL_BACK tokens
    tail_only: bool  # of a chunk only the last `window` + ROLL_BACK tokens are stored: later steps read no others
    bucket: Bucket
    entries_per_page: int

    def row(self, layer: int) -> int:
        """Index of `layer` in this kind's tables."""
        return self.layers.index(layer)

    def first_kept(self, end: int) -> int:
        """First token position whose entry a sequence of `end` tokens still needs."""
        return 0 if self.window is None else max(0, end - self.window - ROLL_BACK)


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The cache kinds of one model and the page size of every bucket."""

    specs: dict[str, CacheSpec]
    page_bytes: dict[Bucket, int]


def plan_caches(config: ModelConfig, kv_layout: str, compressed_layout: str, index_layout: str) -> CachePlan:
    """Cache kinds of `config`: window, and per ratio the compressed KV, index keys and compressor state.

    The layouts are names of record layouts, of window KV, compressed KV and index keys.
    """
    window = layouts.get(kv_layout, config.head_dim)
    draft: list[tuple[str, tuple[int, ...], Layout, int, int | None, Bucket]] = [
        ("window", tuple(range(config.num_layers)), window, 1, config.sliding_window, "main")
    ]
    for ratio in sorted({plan.ratio for plan in config.layers if plan.owns_compressor}):
        owners = tuple(p.layer for p in config.layers if p.owns_compressor and p.ratio == ratio)
        indexed = tuple(layer for layer in owners if config.layers[layer].selection == "topk")
        overlap = 2 if ratio == 4 else 1
        bucket: Bucket = "small" if ratio == 128 else "main"
        compressed = layouts.get(compressed_layout, config.head_dim)
        draft.append((f"c{ratio}", owners, compressed, ratio, None, bucket))
        draft.append(state_kind(f"c{ratio}_state", owners, config.head_dim, ratio, overlap, "main"))
        if indexed:
            keys = layouts.get(index_layout, config.index_head_dim)
            draft.append((f"c{ratio}_index", indexed, keys, ratio, None, "index"))
            draft.append(state_kind(f"c{ratio}_index_state", indexed, config.index_head_dim, ratio, overlap, "index"))
    return _size_pages(draft)


def state_kind(
    name: str, layers: tuple[int, ...], dim: int, ratio: int, overlap: int, bucket: Bucket
) -> tuple[str, tuple[int, ...], Layout, int, int | None, Bucket]:
    """Compressor state: a row of projections and a row of scores per token, needed for `overlap` groups."""
    return name, layers, layouts.state_rows(2 * overlap * dim), 1, overlap * ratio, bucket


def _size_pages(draft: list[tuple[str, tuple[int, ...], Layout, int, int | None, Bucket]]) -> CachePlan:
    """Whole-context kinds fix a bucket's page size; windows and states fit as many entries into it as a power of two allows."""
    sizes: dict[Bucket, int] = {}
    for name, _, layout, ratio, lifetime, bucket in draft:
        entries = BLOCK_TOKENS // ratio if lifetime is None else 0
        if name == "window":
            entries = WINDOW_PAGE_ENTRIES
        sizes[bucket] = max(sizes.get(bucket, 0), layout.page_bytes(max(entries, 1)))
    specs = {}
    for name, layers, layout, ratio, lifetime, bucket in draft:
        fit = BLOCK_TOKENS // ratio
        while lifetime is not None and (fit > WINDOW_PAGE_ENTRIES or layout.page_bytes(fit) > sizes[bucket]):
            fit //= 2
        specs[name] = CacheSpec(name, layers, layout, ratio, lifetime, name.endswith("_state"), bucket, fit)
    alignment = max(16, specs["window"].layout.page_align)  # the KV records' own; at least that of a 16-byte access
    return CachePlan(specs, {bucket: -(-size // alignment) * alignment for bucket, size in sizes.items()})
