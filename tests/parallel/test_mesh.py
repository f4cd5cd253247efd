"""Which ranks there may be, who holds what, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock as Mock

import pytest

from abyssal import LLM
from abyssal.config import EngineConfig, resolve_ranks
from abyssal.errors import ConfigError
from abyssal.model.moe import MoE
from abyssal.model_config.presets import PRESETS, load_preset
from abyssal.parallel.mesh import Mesh
from tests.support.small_model import small_config

SMALL = small_config(
    [0, 4], n_routed_experts=12, num_attention_heads=8, o_groups=4
)  # vocabulary of 160, shared expert of 16 columns


def ep_of(model: Any = SMALL, **ranks: Any) -> int:
    return resolve_ranks(EngineConfig(**ranks), model)


def test_experts_are_shared_out_by_a_replica_unless_told_otherwise() -> None:
    assert [ep_of(tp=tp) for tp in (1, 2, 4)] == [1, 2, 4]
    assert ep_of(dp=3, ep=3) == 3 and ep_of(dp=2, tp=2, ep=4) == 4 and ep_of(dp=2, tp=2, ep=2) == 2
    assert ep_of(dp=5) == 1, "replicas that share nothing may be any number"


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            {"tp": 3},
            r"tp=3 does not divide this model's 8 heads, 4 output groups, 160 tokens of vocabulary, 16 columns .*\[1, 2, 4\]",
        ),
        ({"tp": 8}, r"tp=8 does not divide this model's 4 output groups, 12 experts; choose one of \[1, 2, 4\]"),
        ({"dp": 4, "ep": 3}, r"ep=3 does not go with dp=4, tp=1 and 12 experts.*choose one of \[1, 2, 4\]"),
        ({"dp": 8, "ep": 8}, r"ep=8 .*choose one of \[1, 2, 4\]"),
        ({"dp": 2, "tp": 2, "ep": 1}, r"ep=1 .*multiple of tp.*choose one of \[2, 4\]"),
        ({"ep": 2}, r"ep=2 does not go with dp=1, tp=1 .*choose one of \[1\]"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_with_those_that_do(ranks: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ep_of(**ranks)


def test_refused_before_a_process_starts() -> None:
    with pytest.raises(ConfigError, match=r"tp=4 does not divide this model's 2 output groups.*; choose one of \[1, 2\]"):
        LLM("tiny", device="cpu", tp=4)
    with pytest.raises(ConfigError, match=r"ep=3 .*choose one of \[1, 2\]"):
        LLM("tiny", device="cpu", dp=2, ep=3)


@pytest.mark.parametrize("name", PRESETS)
def test_released_models_go_on_a_box(name: str) -> None:
    """Every preset runs on 8 cards, either way."""
    model = load_preset(name)
    assert ep_of(model, tp=8) == 8 and ep_of(model, dp=8, ep=8) == 8 and ep_of(model, dp=4, tp=2, ep=8) == 8


@pytest.mark.parametrize(("dp", "tp", "ep"), [(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2), (2, 2, 4), (4, 2, 4), (4, 1, 2)])
def test_parts_cover_everything_once(dp: int, tp: int, ep: int) -> None:
    meshes = [Mesh(dp, tp, ep, rank) for rank in range(dp * tp)]
    for replica in range(dp):
        own = [mesh for mesh in meshes if mesh.dp_rank == replica]
        assert [i for mesh in own for i in mesh.part("rows", 24)] == list(range(24))
        assert [mesh.leads for mesh in own] == [True] + [False] * (tp - 1)
    for group in meshes[0].ep_groups():
        assert [i for rank in group for i in meshes[rank].part("experts", 24)] == list(range(24))
        replicas = [meshes[rank].dp_rank for rank in group]
        assert all(replicas.count(replica) == tp for replica in replicas), "replicas are in a group whole"
    for groups in (meshes[0].tp_groups(), meshes[0].ep_groups()):
        assert sorted(rank for group in groups for rank in group) == list(range(dp * tp))
    assert meshes[0].in_step == (ep > tp)


def test_a_rank_computes_its_heads() -> None:
    local = Mesh(1, 4, 4, 2).local(SMALL)
    assert local == replace(SMALL, num_heads=2, o_groups=1)


@pytest.mark.parametrize(
    ("mesh", "whole"), [(Mesh(), True), (Mesh(dp=4), True), (Mesh(dp=2, ep=2), False), (Mesh(tp=2, ep=2), False)]
)
def test_a_rank_that_has_every_expert_computes_the_layer_by_one_op(mesh: Mesh, whole: bool) -> None:
    """Its parts do not know of batch-invariant mode, which replicas that share nothing may be in."""
    layer = MoE.__new__(MoE)
    ops = Mock()
    layer.ops, layer.comm, layer.config, layer.experts = ops, Mock(mesh=mesh), Mock(), Mock()
    ops.route.return_value = Mock(), Mock()
    layer(Mock(), Mock())
    assert (ops.moe.called, ops.route.called) == (whole, not whole)
