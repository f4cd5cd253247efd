"""The kernel's integers are the reference's; what these mean is tested against the facts of ordinary steps in `tests/kv/test_decode.py`."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from abyssal.kv.decode import DecodeFacts, DecodeInputs, DecodeTables
from abyssal.kv.specs import ROLL_BACK, plan_caches
from abyssal.ops.decode_facts import PROGRAM, Array, Plan, Table, Task, What, decode_facts
from abyssal.ops.decode_facts import triton as kernels
from tests.kv.test_decode import CAPACITY, LAYOUTS, MODELS, World, lengths
from tests.support.records import DEVICE


def both(positions: Tensor, rows: Tensor, folded: Tensor, pages: Tensor, plan: Plan) -> Tensor:
    """The kernel's memory; every array of it is the reference's."""
    expected = decode_facts(positions, rows, folded, pages, plan)
    inputs = (part.to(DEVICE) for part in (positions, rows, folded, pages))
    got = kernels.decode_facts(*inputs, replace(plan, device=torch.device(DEVICE))).cpu()
    live = rows != plan.table_rows - 1
    for task in plan.tasks:
        one, other = (task.array.of(memory)[:, task.part * plan.count :][:, : plan.count] for memory in (expected, got))
        if task.what == What.ALL:
            seen = ((positions + 1) // task.ratio * live).unsqueeze(1) > torch.arange(task.array.shape[2])
            one, other = one[:, seen], other[:, seen]
        assert torch.equal(one, other), (task, one, other)
    return got


@settings(max_examples=3, deadline=None)
@given(
    model=st.sampled_from(sorted(MODELS)), layouts=st.sampled_from(LAYOUTS), starts=st.lists(lengths, min_size=1, max_size=3),
    spare=st.integers(0, 3), seed=st.integers(0, 1000),
)  # fmt: skip
def test_kernel_equals_the_reference_in_steps(model, layouts, starts, spare, seed) -> None:
    """Steps of `World`, which compares them with ordinary ones, some of them after tokens were taken back."""
    rng = random.Random(seed)
    world = World(MODELS[model], layouts, len(starts), prefix=False)
    world.facts = [DecodeFacts(MODELS[model], world.tables, True, both)]
    seqs = []
    for n in starts:
        ids = [rng.randrange(5, 90) for _ in range(n)]
        seqs.append((world.sequence(ids), ids))
    for back in (0, ROLL_BACK):
        world.compare(seqs, len(seqs) + spare, CAPACITY)
        for seq, ids in seqs:
            back = min(back, seq.num_tokens - seq.final)
            world.cache.roll_back(seq, back)
            del ids[len(ids) - back :]
            ids.append(5)


@pytest.mark.parametrize("as_lists", [False, True])
@pytest.mark.parametrize("model", sorted(MODELS))
def test_kernel_equals_the_reference_for_any_numbers(model, as_lists) -> None:
    """Pages, positions and sums at random, every task of a model, more sequences than one program takes of some."""
    config, count, capacity = MODELS[model], 37, 4096
    specs = plan_caches(config, "v4", "v4", "index_fp8").specs
    tables = DecodeTables(specs, count, capacity, torch.device("cpu"))
    torch.manual_seed(0)
    tables.all_pages.copy_(torch.randint(0, 1 << 20, tables.all_pages.shape, dtype=torch.int32))
    tables.all_pages[torch.rand(tables.all_pages.shape) < 0.2] = 0
    for pages in tables.pages.values():
        pages[:, -1] = 0
    plans = []

    def keep(positions: Tensor, rows: Tensor, folded: Tensor, pages: Tensor, plan: Plan) -> Tensor:
        plans.append(plan)
        return decode_facts(positions, rows, folded, pages, plan)

    positions = torch.randint(0, capacity, (count,))
    positions[:12] = torch.tensor([0, 1, 2, 3, 4, 7, 126, 127, 128, 129, 255, capacity - 1])
    folded = (positions - torch.randint(0, ROLL_BACK + 1, (count,))).clamp_(min=0)
    rows = torch.randperm(count + 1)[:count]
    positions[rows == count] = folded[rows == count] = 0
    DecodeFacts(config, tables, as_lists, keep).batch(DecodeInputs(positions, positions, rows, folded), capacity)
    both(positions, rows, folded, tables.all_pages, plans[0])
    assert {What.SOURCES, What.SOURCES_OPEN} & {task.what for task in plans[0].tasks}


def test_a_plan_refuses_what_the_kernel_cannot_address() -> None:
    with pytest.raises(AssertionError, match="no powers of two"):
        Table(0, 1, 4, 48, 0)
    plan = Plan(1, 2, ROLL_BACK, torch.device("cpu"))
    plan.array(torch.int64, 1 << 10, 1, 1 << 20)
    with pytest.raises(AssertionError, match="GiB of slots"):
        plan.launch  # noqa: B018


def test_arrays_do_not_meet() -> None:
    """Arrays of odd sizes and both types, each filled by several programs, hold what belongs there."""
    plan = Plan(3, 4, ROLL_BACK, torch.device("cpu"))
    width = PROGRAM // 2 + 1
    arrays: list[Array] = []
    for number, dtype in enumerate((torch.int32, torch.int64, torch.int32, torch.int64)):
        arrays.append(plan.array(dtype, 1, 3, width + number))
        plan.tasks.append(Task(What.SOURCES, arrays[-1]))
    positions = torch.tensor([0, 5, 5000])
    memory = both(positions, torch.arange(3), torch.zeros(3, dtype=torch.int64), torch.zeros(0, dtype=torch.int32), plan)
    for array in arrays:
        before = array.shape[2] - 1
        assert array.of(memory)[0, :, -1].tolist() == [3 * before, 3 * before + 1, 3 * before + 2]
        assert (array.of(memory)[0, 0, :-1] == 3 * before + 3).all()
