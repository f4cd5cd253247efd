"""What a model's caches cost, as one dictionary: the content of `abyssal plan`. Figures in GiB unless their name says bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from abyssal.config import PACKED_DIMS, EngineConfig, ModelConfig
from abyssal.kv import layouts
from abyssal.kv.layouts import V32_TOKEN_BYTES
from abyssal.kv.planner import KindCost, block_bytes, block_pages, fitting_sequences, sequence_cost, sequence_pages, token_bytes
from abyssal.kv.specs import CachePlan, plan_caches

GIB = 1 << 30
LENGTHS = (1024, 4096, 32768)  # tokens of the sequences whose cost is shown, beside the model's longest
KV_STACKS = (("bf16", "same"), ("v4", "same"), ("v41", "same"), ("v41", "fp4"))  # window and compressed KV; fp32 is for tests


def memory_report(model: ModelConfig, config: EngineConfig, context: int) -> dict[str, Any]:
    """Costs of one sequence of `context` tokens, and of others, under the layouts of a resolved `config`."""
    plan = plan_caches(model, *config.record_layouts)
    v32 = V32_TOKEN_BYTES * model.num_layers * context
    totals = sequence_totals(plan, context)
    return {
        "family": model.family,
        "context": context,
        "kv_layout": config.kv_layout,
        "compressed_kv_layout": config.compressed_kv_layout,
        "index_layout": config.index_layout,
        **totals,
        "v32_style": v32 / GIB,
        "ratio": v32 / GIB / totals["payload"],
        "bytes_per_token": sum(token_bytes(plan).values()),
        "block_bytes": block_bytes(plan),
        "kinds": [_kind(cost, token_bytes(plan)) for cost in sequence_cost(plan, context)],
        "buckets": {
            bucket: {
                "page_bytes": size,
                "pages_per_block": block_pages(plan)[bucket],
                "pages_per_sequence": sequence_pages(plan)[bucket],
            }
            for bucket, size in plan.page_bytes.items()
        },
        "lengths": [{"tokens": n, **sequence_totals(plan, n)} for n in sorted({*LENGTHS, context, model.max_position})],
        "records": _records(model),
        "stacks": [_stack(model, stack, context, totals["payload"]) for stack in stacks(model, config)],
    }


def sequence_totals(plan: CachePlan, tokens: int) -> dict[str, float]:
    """GiB of a sequence of `tokens` tokens, by how long entries live; `payload` = growing + windows, `pages` = all, in pages."""
    costs = sequence_cost(plan, tokens)
    groups = {group: sum(c.payload for c in costs if c.group == group) / GIB for group in ("growing", "windows", "state")}
    pages = {f"{group}_pages": sum(c.pages for c in costs if c.group == group) / GIB for group in groups}
    return {**groups, "payload": groups["growing"] + groups["windows"], **pages, "pages": sum(pages.values())}


def stacks(model: ModelConfig, config: EngineConfig) -> list[EngineConfig]:
    """The layouts worth comparing: `config`'s own, then every KV layout with index keys like it, in FP8 and in FP4."""
    packed = (model.head_dim, model.index_head_dim) == PACKED_DIMS
    pairs = [(kv, other, index) for kv, other in KV_STACKS for index in (("bf16",) if kv == "bf16" else ()) + ("fp8", "fp4")]
    pairs = pairs if packed else [("bf16", "same", "bf16")]
    others = [replace(config, kv_layout=kv, compressed_kv_layout=other, index_layout=index) for kv, other, index in pairs]
    return [config, *(other for other in others if other != config)]


def capacity_report(model: ModelConfig, config: EngineConfig, context: int, budget: int, gpus: int) -> dict[str, Any]:
    """What `budget` bytes of cache on each of `gpus` GPUs hold; each computes attention for requests of its own."""
    plan = plan_caches(model, *config.record_layouts)
    fit = fitting_sequences(plan, budget, context, config.max_num_batched_tokens)
    return {"cache_per_gpu": budget / GIB, "sequences_per_gpu": fit, "sequences": fit * gpus}


def _kind(cost: KindCost, per_token: dict[str, float]) -> dict[str, Any]:
    spec = cost.spec
    return {
        "kind": spec.name,
        "group": cost.group,
        "layout": spec.layout.name,
        "layers": len(spec.layers),
        "tokens_per_entry": spec.ratio,
        "bytes_per_entry": spec.layout.bytes_per_entry,
        "bucket": spec.bucket,
        "entries_per_page": spec.entries_per_page,
        "bytes_per_token": per_token.get(spec.name, 0.0),
        "payload_bytes": cost.payload,
        "pages_bytes": cost.pages,
    }


def _records(model: ModelConfig) -> list[dict[str, Any]]:
    """Bytes of an entry of compressed KV under each layout, and the share that it saves against a `v4` record."""
    names = ("bf16", "v4", "v41", "v41_fp4") if (model.head_dim, model.index_head_dim) == PACKED_DIMS else ()
    sizes = {name: layouts.get(name).bytes_per_entry for name in names}
    return [{"layout": name, "bytes_per_entry": size, "saving": 1 - size / sizes["v4"]} for name, size in sizes.items()]


def _stack(model: ModelConfig, config: EngineConfig, context: int, chosen: float) -> dict[str, Any]:
    plan = plan_caches(model, *config.record_layouts)
    totals = sequence_totals(plan, context)
    return {
        **{name: getattr(config, name) for name in ("kv_layout", "compressed_kv_layout", "index_layout")},
        **{name: totals[name] for name in ("growing", "payload", "pages")},
        "bytes_per_token": sum(token_bytes(plan).values()),
        "saving": 1 - totals["payload"] / chosen,
    }
