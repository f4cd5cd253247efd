"""Sequences whose caches hold random records: decoding at a long context can be measured without computing the context."""

from __future__ import annotations

import torch
from torch import Tensor

from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest, SamplingParams
from abyssal.kv import codec
from abyssal.kv.handover import HandOver, describe, stored_entries
from abyssal.kv.pool import KVCache
from abyssal.kv.specs import ROLL_BACK, CacheSpec

ENCODED_AT_ONCE = 1 << 16  # records
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def random_hand_over(cache: KVCache, token_ids: list[int], tokens: int, generator: torch.Generator) -> HandOver:
    """What a sequence would hold after the first `tokens` of `token_ids`, with normally distributed values in every record.

    Records are made on the generator's device and are as a writer would store them: every code and scale is valid.
    """
    records = {name: _random_records(spec, tokens, generator) for name, spec in cache.specs.items()}
    kinds = {name: describe(spec) for name, spec in cache.specs.items()}
    return HandOver(cache.identity, token_ids, tokens, max(0, tokens - ROLL_BACK), kinds, records)


def _random_records(spec: CacheSpec, tokens: int, generator: torch.Generator) -> Tensor:
    """uint8 [layers, entries, bytes_per_entry]."""
    layers, entries = len(spec.layers), len(stored_entries(spec, tokens))
    out = torch.empty(layers * entries, spec.layout.bytes_per_entry, dtype=torch.uint8, device=generator.device)
    for first in range(0, len(out), ENCODED_AT_ONCE):
        rows = out[first : first + ENCODED_AT_ONCE]
        values = torch.randn(len(rows), spec.layout.dim, generator=generator, device=generator.device)
        if spec.lifetime == "record":
            values = values.abs_().add_(0.1)  # sums of exponentials are positive, and never near zero
        data, scales = codec.encode(spec.layout, values)
        rows[:, : spec.layout.data_bytes], rows[:, spec.layout.data_bytes :] = data, scales
    return out.view(layers, entries, spec.layout.bytes_per_entry)


def add_running(
    engine: Engine, count: int, context: int, more: int = 0, name: str = "r", params: SamplingParams = GREEDY
) -> list[str]:
    """Let `count` sequences of about `context` computed tokens run, each with `1 + more` prompt tokens left to compute.

    Tokens and records are each one's own, or all would choose the same experts. Their lengths differ by up to 127 tokens, so that
    groups of tokens are not completed by all of them in the same step.

    Returns:
        Their request ids.
    """
    generator = torch.Generator(engine.runner.device).manual_seed(context)
    host = torch.Generator().manual_seed(context)
    names = []
    for index in range(count):
        tokens = max(1, context - index * 37 % 128)
        ids = torch.randint(0, engine.info.vocab_size, (tokens + 1 + more,), generator=host).tolist()
        request = EngineRequest(f"{name}{index}", ids, params)
        engine.import_sequence(request, random_hand_over(engine.cache, ids, tokens, generator))
        names.append(request.request_id)
    return names
