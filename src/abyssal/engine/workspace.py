"""How much memory a step needs beside weights and caches, found by computing the largest one before the caches exist."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from abyssal.kv.batch import Chunk
from abyssal.kv.pool import KVCache, PageTable, SequenceCache
from abyssal.kv.specs import ROLL_BACK, CachePlan, CacheSpec

# PyTorch's allocator takes small and middling tensors in segments of 2 and 20 MiB; a step that is like the largest may need one more of each.
MORE_SEGMENTS = (2 + 20) << 20  # bytes
ONLY_PAGE = 1  # of every bucket, which all tables name; page 0 is the one that is never written

Step = Callable[[list[Chunk], KVCache, list[int]], Tensor]


def measure_workspace(
    step: Step,
    plan: CachePlan,
    device: torch.device,
    max_num_seqs: int,
    max_tokens: int,
    longest: int,
    history: int,
    *,
    capture: Callable[[KVCache], object] | None,
) -> int:
    """Bytes on `device` (CUDA) that the largest steps take from PyTorch's allocator.

    Two steps count: `max_tokens` tokens, of which one sequence prefills as many as it can and all others decode; and one that
    only decodes, twice, since a CUDA graph holds memory of its own. All sequences are `longest` tokens long, and logits of every
    token are wanted. Where steps of prompts are captured, too, the graphs of the largest hold memory in which there is room for all others.

    Args:
        step: computes chunks -> logits of the given rows.
        history: tokens before a chunk that its n-gram hashes look back to.
        capture: captures such a step on some caches -> what holds its memory; None: none is captured.
    """
    sequences = min(max_num_seqs, max_tokens)

    mixed, decode = (
        _taken(step, stand_in_cache(plan, device), device, counts, longest, history)
        for counts in (token_counts(sequences, max_tokens, longest), [1] * sequences)
    )
    captured = 0 if capture is None else _held(capture, stand_in_cache(plan, device), device) + MORE_SEGMENTS
    torch.cuda.empty_cache()
    return mixed + captured + 2 * decode + MORE_SEGMENTS


def _held(capture: Callable[[KVCache], object], cache: KVCache, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    graphs = capture(cache)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # of what compiling took
    held = torch.cuda.memory_reserved(device) - before
    del graphs
    return held


def _taken(step: Step, cache: KVCache, device: torch.device, counts: list[int], longest: int, history: int) -> int:
    chunks = largest_chunks(cache, counts, longest, history)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    step(chunks, cache, list(range(sum(counts))))
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before


def token_counts(sequences: int, max_tokens: int, longest: int) -> list[int]:
    """Tokens of each sequence in a step of `max_tokens`, ascending: as many as possible of the last, then of the one before."""
    counts, left = [], max_tokens
    for others in range(sequences - 1, -1, -1):
        counts.append(min(longest, left - others))
        left -= counts[-1]
    return counts[::-1]


def stand_in_cache(plan: CachePlan, device: torch.device) -> KVCache:
    """Caches of one page per bucket, with zero records."""
    cache = KVCache(plan, dict.fromkeys(plan.page_bytes, 1), device)
    for pool in cache.pools.values():
        pool.data.zero_()
    return cache


def largest_chunks(cache: KVCache, counts: list[int], longest: int, history: int) -> list[Chunk]:
    """A chunk per entry of `counts`, each the last tokens of a sequence of `longest`, all of whose records lie in one page."""
    chunks = []
    for count in counts:
        start = longest - count
        tables = {name: PageTable(_pages(spec, longest)) for name, spec in cache.specs.items()}
        folded = max(0, start - ROLL_BACK)
        seq = SequenceCache(tables, b"", num_tokens=start, folded=folded, final=folded)
        chunks.append(Chunk([0] * count, start, seq, [0] * min(start, history)))
    return chunks


def _pages(spec: CacheSpec, tokens: int) -> np.ndarray:
    blocks = len(spec.blocks(1)) if spec.lifetime == "record" else -(-(tokens // spec.ratio) // spec.entries_per_page)
    return np.full((len(spec.layers), blocks), ONLY_PAGE, np.int32)
