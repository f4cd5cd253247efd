"""Facts of a decode step: the kernel, all of `DecodeFacts.batch` with it, and with the reference's operations.

`python -m bench.ops.bench_decode_facts [--json FILE]`, from the root of the repository, on a GPU. The roof counts what is written.
"""

from __future__ import annotations

from typing import Any

import torch

import abyssal.ops.decode_facts.triton as kernels
from abyssal.kv.decode import DecodeFacts, DecodeInputs, DecodeTables
from abyssal.kv.specs import plan_caches
from abyssal.model_config import parse_model_config
from abyssal.ops.decode_facts import Plan, decode_facts
from bench.ops import write_path as wp
from tests.published_configs import v4_flash, v41_flash

MODELS = {"v4-flash": (v4_flash, ("v4", "v4", "index_fp8")), "v4.1-flash": (v41_flash, ("v41", "v41_fp4", "index_mxfp4"))}
SEQUENCES = (1, 64)
CAPACITIES = (8192, 131072)


def random_step(tables: DecodeTables, count: int, capacity: int) -> DecodeInputs:
    tables.all_pages.random_(1, 10000)
    for pages in tables.pages.values():
        pages[:, -1] = 0
    positions = torch.randint(capacity // 2, capacity, (count,), device=wp.DEVICE)
    return DecodeInputs(positions, positions, torch.arange(count, device=wp.DEVICE), positions - 8)


def check(facts: DecodeFacts, inputs: DecodeInputs, capacity: int) -> None:
    """Kernel and reference fill the same numbers; entries that nobody sees are set to 0 in both."""
    plans: list[Plan] = []

    def both(*args: Any) -> torch.Tensor:
        plans.append(args[-1])
        expected, got = decode_facts(*args), kernels.decode_facts(*args)
        for task in args[-1].tasks:
            one, other = (task.array.of(memory).clone() for memory in (expected, got))
            if task.what == task.what.ALL:
                hidden = (inputs.positions.unsqueeze(1) + 1) // task.ratio <= torch.arange(one.shape[2], device=wp.DEVICE)
                one, other = (part.masked_fill(hidden, 0) for part in (one, other))
            assert torch.equal(one, other), task
        return got

    DecodeFacts(facts.config, facts.tables, True, both).batch(inputs, capacity)
    assert plans


def time_step(table: wp.Table, shape: str, facts: DecodeFacts, inputs: DecodeInputs, capacity: int) -> None:
    plans: list[Plan] = []

    def keep(*args: Any) -> torch.Tensor:
        plans.append(args[-1])
        return kernels.decode_facts(*args)

    config, tables, count = facts.config, facts.tables, len(inputs.positions)
    DecodeFacts(config, tables, True, keep).batch(inputs, capacity)
    plan = plans[0]
    own = (inputs.positions, inputs.rows, inputs.folded, tables.all_pages, plan)
    moved = plan.words * 8
    table.time(shape, count, f"kernel, {len(plan.launch[1])} programs", kernels.decode_facts, [own], moved)
    table.time(shape, count, "whole batch", facts.batch, [(inputs, capacity)], moved)
    table.time(shape, count, "eager", DecodeFacts(config, tables, True, decode_facts).batch, [(inputs, capacity)], moved)


def main() -> None:
    args = wp.arguments(__doc__ or "")
    table = wp.Table("decode_facts; tokens = sequences")
    for name, (published, layouts) in MODELS.items():
        config = parse_model_config(published())
        specs = plan_caches(config, *layouts).specs
        for capacity in CAPACITIES:
            tables = DecodeTables(specs, max(SEQUENCES), capacity, torch.device(wp.DEVICE))
            facts = DecodeFacts(config, tables, True, kernels.decode_facts)
            for count in SEQUENCES:
                inputs = random_step(tables, count, capacity)
                check(facts, inputs, capacity)
                time_step(table, f"{name[:8]} {capacity // 1024}k", facts, inputs, capacity)
    table.print()
    table.save(args.json)


if __name__ == "__main__":
    main()
