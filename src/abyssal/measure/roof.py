"""What a step cannot avoid: bytes that a decode step moves, and operations of a prefill, from sizes alone.

A step is compared with the time that these bytes take at the device's copy bandwidth, or these operations at the rate of its
matrix products. Activations are left out: they are small, and could stay on the chip.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from abyssal.checkpoint.expected import TensorSpec, expected_tensors
from abyssal.checkpoint.sizes import tensor_bytes
from abyssal.config import LayerPlan, ModelConfig
from abyssal.kv.specs import ROLL_BACK, CachePlan, CacheSpec
from abyssal.ops._select import decides, publishes

# Part of the model by what a weight's name contains; the first that matches.
_PARTS = (
    ("ffn.experts", "experts"),
    ("ffn.shared_experts", "shared experts"),
    ("ffn.gate", "router"),
    ("hc_", "hyper-connections"),
    ("indexer.compressor", "compressors"),
    ("compressor", "compressors"),
    ("indexer", "indexers"),
    ("engram", "engram"),
    ("attn.", "attention linears"),
    ("head.weight", "head"),
    ("embed.weight", "embedding"),
    ("", "norms"),
)
# Used in fp32, stored as bf16 (V4 spec 4.1), which kernels read as it is.
_NARROW = ("head.weight", "gate.weight", "compressor.wkv.weight", "compressor.wgate.weight")
_UNREAD = "gate.bias_vl"  # chooses experts for positions of images


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that one decode step moves between the device's memory and its processors."""

    weights: dict[str, float]  # read, by part of the model; experts by how many of them are expected to be chosen
    cache_read: dict[str, float]  # by cache kind
    cache_written: dict[str, float]

    @property
    def weight_total(self) -> float:
        return sum(self.weights.values())

    @property
    def cache_total(self) -> float:
        return sum(self.cache_read.values()) + sum(self.cache_written.values())

    @property
    def total(self) -> float:
        return self.weight_total + self.cache_total


def decode_bytes(config: ModelConfig, caches: CachePlan, dtype: torch.dtype, contexts: Sequence[int]) -> StepBytes:
    """Bytes of a step that computes one token of each of several sequences.

    Rows that several layers read count for each of them: between two layers more passes through a GPU's cache than it holds.

    Args:
        config: with `quant` None where quantised weights were dequantised.
        dtype: of weights that are stored plain.
        contexts: tokens that each sequence has computed before the step.
    """
    tokens = np.asarray(contexts, np.int64)
    return StepBytes(_weights(config, dtype, tokens), *_cache(config, caches, tokens))


def mean_decode_bytes(
    config: ModelConfig, caches: CachePlan, dtype: torch.dtype, contexts: Sequence[int], steps: int
) -> StepBytes:
    """The mean over `steps` steps that follow one another, the first of them at `contexts`."""
    each = [decode_bytes(config, caches, dtype, [n + step for n in contexts]) for step in range(steps)]
    return StepBytes(
        *({name: sum(getattr(one, field)[name] for one in each) / steps for name in getattr(each[0], field)}
          for field in ("weights", "cache_read", "cache_written"))
    )  # fmt: skip


def expected_experts(config: ModelConfig, tokens: int) -> float:
    """Distinct experts of one layer that `tokens` tokens choose, if every choice is as likely as any other."""
    missed = 1 - config.num_experts_per_token / config.num_experts
    return config.num_experts * (1 - missed**tokens)


def _weights(config: ModelConfig, dtype: torch.dtype, tokens: np.ndarray) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    scoring = {plan.layer for plan, count in _scored(config, tokens) if count is not None}
    for name, spec in expected_tensors(config).items():
        if spec.kind == "rows" or name.endswith(_UNREAD):
            continue
        if _is_query_weight(name) and _layer(name) not in scoring:
            continue
        narrow = spec.kind == "fp32" and name.endswith(_NARROW)
        size = math.prod(spec.shape) * dtype.itemsize if narrow else tensor_bytes(spec, config, dtype)
        sums[part_of(name)] += size * _share_read(spec, config, len(tokens))
    return dict(sums)


def part_of(name: str) -> str:
    """Which part of the model a weight belongs to."""
    return next(part for piece, part in _PARTS if piece in name)


def _share_read(spec: TensorSpec, config: ModelConfig, tokens: int) -> float:
    """Part of a weight that a step of `tokens` tokens reads."""
    if spec.pieces:
        return expected_experts(config, tokens) / config.num_experts
    return min(1.0, tokens / spec.shape[0]) if spec.kind in ("embedding", "expert_ids") else 1.0


def _is_query_weight(name: str) -> bool:
    """Weights that make index queries, which a step without a choice to make does not need."""
    return name.endswith(("indexer.wq_b", "indexer.weights_proj"))


def _layer(name: str) -> int:
    return int(name.split(".")[1])


def _scored(config: ModelConfig, tokens: np.ndarray) -> Iterator[tuple[LayerPlan, int | None]]:
    """Layers with an indexer, and the most keys of a sequence that it scores; None: every query takes all it sees.

    The step's queries are scored together, so that the longest sequence decides for all.
    """
    candidates = None
    for plan in config.layers:
        if not plan.owns_indexer:
            continue
        if plan.candidates != "use":
            candidates = None
        seen = int(tokens.max() + 1) // plan.ratio
        if not decides(plan, config, seen, candidates):
            yield plan, None
            continue
        yield plan, seen if candidates is None else candidates
        if publishes(plan, config, seen):
            assert config.candidate_topk_blocks is not None and config.candidate_block_size is not None
            candidates = config.candidate_topk_blocks * config.candidate_block_size


def _visible(plan: LayerPlan, tokens: np.ndarray, most: int | None) -> int:
    """Compressed entries that the queries at positions `tokens` see, at most so many each, added up."""
    visible = (tokens + 1) // plan.ratio
    return int((visible if most is None else np.minimum(visible, most)).sum())


def _attended(plan: LayerPlan, config: ModelConfig, tokens: np.ndarray) -> int:
    """Compressed entries that these queries attend to, added up."""
    return _visible(plan, tokens, config.index_topk if plan.selection == "topk" else None)


def _cache(config: ModelConfig, caches: CachePlan, tokens: np.ndarray) -> tuple[dict[str, float], dict[str, float]]:
    read: Counter[str] = Counter(dict.fromkeys(caches.specs, 0))
    written: Counter[str] = Counter(dict.fromkeys(caches.specs, 0))
    read["window"] += config.num_layers * int(np.minimum(tokens + 1, config.sliding_window).sum())
    for plan in config.layers:
        if plan.kv_source is not None:
            read[f"c{plan.ratio}"] += _attended(plan, config, tokens)
    for plan, most in _scored(config, tokens):
        if most is not None:
            read[f"c{plan.ratio}_index"] += _visible(plan, tokens, most)
    for name, spec in caches.specs.items():
        if spec.lifetime == "context":
            written[name] += len(spec.layers) * int(((tokens + 1) % spec.ratio == 0).sum())
        elif spec.ratio == 1:
            written[name] += len(spec.layers) * len(tokens)
        if spec.tail_only:
            rows, stored = _state_rows(spec, tokens)
            read[name] += len(spec.layers) * rows
            written[name] += len(spec.layers) * stored
    size = {name: spec.layout.bytes_per_entry for name, spec in caches.specs.items()}
    return {name: float(read[name] * size[name]) for name in size}, {name: float(written[name] * size[name]) for name in size}


def _state_rows(spec: CacheSpec, tokens: np.ndarray) -> tuple[int, int]:
    """Rows of compressor state of one layer that a step reads, and sums that it writes beside the tokens' own rows."""
    ratio = int(spec.name[1:].partition("_")[0])
    if spec.lifetime == "window":  # the earlier rows of a completed group, with overlap also those of the group before
        return int(np.where((tokens + 1) % ratio == 0, np.minimum(tokens, spec.window - 1), 0).sum()), 0
    folded = np.maximum(tokens - ROLL_BACK, 0)
    after = np.maximum(tokens + 1 - ROLL_BACK, 0)
    completes = (tokens + 1) % ratio == 0
    group = tokens // ratio * ratio
    opened = after // ratio * ratio
    is_open = after > np.maximum(folded, opened)
    if spec.ratio == 1:  # the ring of raw rows
        finished = np.where(completes, tokens - np.maximum(folded, group), 0)
        taken_up = np.where(is_open, after - np.maximum(folded, opened), 0)
        return int((finished + taken_up).sum()), 0
    sums_read = (completes & (folded > group)).astype(int) + (is_open & (folded > opened)).astype(int)
    return int(sums_read.sum()), int(is_open.sum())


def prefill_flops(config: ModelConfig, start: int, count: int) -> dict[str, float]:
    """Operations (a multiplication and an addition are two) of computing tokens [start, start + count) of one sequence.

    By op of `abyssal.ops`; the head's product is of the last token only.
    """
    flops: Counter[str] = Counter()
    for name, spec in expected_tensors(config).items():
        if spec.kind in ("rows", "expert_ids", "embedding") or len(spec.shape) < 2 or name.endswith(".ape"):
            continue
        if name.startswith("head"):
            flops["linear"] += 2 * math.prod(spec.shape)
        elif spec.pieces:
            flops["moe"] += 2 * count * config.num_experts_per_token * math.prod(spec.shape[1:])
        else:
            op = "hyper_connection" if "hc_" in name else "linear"
            flops[op] += 2 * count * math.prod(spec.shape)
    queries = np.arange(start, start + count)
    window = int(np.minimum(queries + 1, config.sliding_window).sum())
    for plan in config.layers:
        entries = 0 if plan.kv_source is None else _attended(plan, config, queries)
        flops["sparse_attention"] += 4 * config.num_heads * config.head_dim * (window + entries)
    for plan, most in _scored(config, queries):
        if most is not None:
            flops["index_score"] += 2 * config.index_heads * config.index_head_dim * _visible(plan, queries, most)
    return dict(flops)
