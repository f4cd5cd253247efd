"""Kernels in the engine beside the PyTorch ops, on the CPU through Triton's interpreter: bf16, packed records, released widths."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from abyssal.engine import runner
from abyssal.errors import ConfigError
from abyssal.kv.specs import plan_caches
from abyssal.ops._kernels import KernelOps, check_model
from abyssal.ops._reference import ReferenceOps
from abyssal.ops.linear import triton as products
from tests.checkpoint.build import random_v4_checkpoint
from tests.support.small_model import config_dict, small_config
from tests.support.stepping import Side
from tests.support.v41_model import write_v41

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.skipif(torch.cuda.is_available(), reason="see test_gpu.py")]
WIDTHS = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 8, "num_attention_heads": 2}
WIDTHS |= {"o_lora_rank": 16}
Sides = Callable[[Callable[[Path], None], str], tuple[Side, Side]]


def v4(folder: Path) -> None:
    """All experts by hash: a router's choice between near equals would hide small faults behind large differences."""
    scaling = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
    config = config_dict([0, 4, 128], sliding_window=128, num_hash_layers=3, rope_scaling=scaling, **WIDTHS)
    random_v4_checkpoint(folder, config, seed=5, quantised=False)


def v41(folder: Path) -> None:
    write_v41(folder, 5, n_routed_experts=2, **WIDTHS)  # each token takes both: see v4


def few_tokens(x: products.Input, groups: Sequence[products.Group], *, num_groups: int = 1) -> list[torch.Tensor]:
    """Plain products in place of the kernel: interpreted, it takes most of this test's time, and it has its own."""
    outs = []
    for group in groups:
        values = products._values(x, group.tile).float().unflatten(1, (num_groups, -1))  # [T, G, K]
        matrix = group.data.float().unflatten(1, (group.parts, -1)).sum(1)[:, : group.columns]
        out = torch.einsum("tgk,grk->tgr", values, matrix.view(num_groups, -1, group.columns))
        outs.append(out.flatten(1).to(group.out_dtype))
    return outs


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sides]:
    """`sides(write, layout)` -> the engine with the reference's ops, and with kernels."""
    made: list[Side] = []
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 150, (140,), generator=generator).tolist() for _ in range(2)]

    def make(write: Callable[[Path], None], layout: str) -> tuple[Side, Side]:
        write(tmp_path)
        options = {"device": "cpu", "dtype": "bfloat16", "kv_layout": layout, "kv_cache_bytes": 16 << 20, "max_model_len": 1024}
        made.append(Side(tmp_path, prompts, **options))
        monkeypatch.setattr(products, "few_tokens", few_tokens)
        monkeypatch.setattr(runner, "select_ops", lambda _, model, caches, device: KernelOps("triton", model, caches, 64, device))
        made.append(Side(tmp_path, prompts, **options))
        return made[0], made[1]

    yield make
    for side in made:
        side.llm.close()


@pytest.mark.parametrize(("write", "layout"), [pytest.param(v4, "v4", marks=pytest.mark.long), (v41, "v41")], ids=["v4", "v41"])
def test_steps_after_a_prefill_by_the_reference(write: Callable[[Path], None], layout: str, sides: Sides) -> None:
    """A chunk over the end of a group of 128 beside a decoding sequence, then both decoding: what one side stored, the other reads."""
    reference, kernels = sides(write, layout)
    assert isinstance(reference.runner.ops, ReferenceOps) and isinstance(kernels.runner.ops, KernelOps)
    reference.step([126, 61])
    kernels.take_over(reference)
    there, here = reference.record_choices(), kernels.record_choices()
    for counts in ([4, 1], [1, 1]):
        expected, logits = reference.step(counts), kernels.step(counts)
        assert expected.keys() == logits.keys()
        a, b = torch.stack(list(expected.values())), torch.stack(list(logits.values()))
        assert b.isfinite().all()
        rows = (a - b).abs().amax(1) / a.std()  # bf16: up to 0.06 in V4, 0.14 in V4.1, where routers choose
        assert rows.median() < 0.1 and rows.max() < 0.25, rows
    assert len(there) == len(here) > 0 and [len(a) for a in there] == [len(b) for b in here]
    assert max(map(len, here)) == reference.runner.model_config.index_topk
    assert sum(len(a & b) for a, b in zip(there, here, strict=True)) >= 0.9 * sum(map(len, there))


@pytest.mark.parametrize(
    "change",
    [{"hidden_size": 40}, {"o_lora_rank": 8}, {"o_lora_rank": 24}, {"index_n_heads": 4}, {"index_topk": 4096}, {"hc_mult": 2}],
)
def test_sizes_that_kernels_do_not_take_are_refused_by_name(change: dict[str, int]) -> None:
    """When the engine is built, not by an assertion within a step."""
    for changes, refused in (({}, False), (change, True)):
        model = small_config([0, 4, 128], **(WIDTHS | changes))
        caches = plan_caches(model, "v4", "v4", "index_fp8")
        if refused:
            ((name, value),) = change.items()
            with pytest.raises(ConfigError, match=f"^{name}={value}: the kernels take .*; use backend=reference"):
                check_model(model, caches)
        else:
            check_model(model, caches)


def test_a_step_larger_than_planned_keeps_the_memory_that_graphs_have_captured() -> None:
    model = small_config([0, 4, 128], **WIDTHS)
    ops = KernelOps("triton", model, plan_caches(model, "v4", "v4", "index_fp8"), 1, torch.device("cpu"))
    hidden = model.hidden_size
    captured = weakref.ref(ops._handovers[-1].partials)
    ops.site(
        torch.zeros(3, 4, hidden, dtype=torch.bfloat16), torch.ones(hidden), None,
        out=None, post=None, comb=None, pre=torch.ones(3, 4), rms_eps=1e-6, eps=1e-6, iterations=1,
    )  # fmt: skip
    assert len(ops._handovers) == 2 and captured() is not None
