"""Several ranks: each loads its part, reads nothing of the others', and the parts together are the whole, however it is stored."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from abyssal.checkpoint import load_weights, loader
from abyssal.checkpoint.expected import expected_tensors
from abyssal.checkpoint.files import CheckpointFiles, StoredTensor
from abyssal.checkpoint.loader import local_shape
from abyssal.model_config import load_model_config
from abyssal.model_config.presets import load_preset
from abyssal.ops.linear import LinearWeight, dequantize
from abyssal.parallel.mesh import Mesh
from tests.checkpoint.build import Names, random_v4_checkpoint, t4_config

CPU = torch.device("cpu")
MESHES = [(1, 2, 2), (2, 2, 4), (4, 1, 4), (1, 4, 4), (2, 2, 2)]  # dp, tp, ep
SMALL = t4_config(num_hidden_layers=3, compress_ratios=[0, 4, 128, 0], n_routed_experts=4, o_groups=4)
# Parts of 80 and 40 rows or columns begin inside blocks of 128, and blocks of w1 and w3 straddle their seam.
ODD = SMALL | {"expert_dtype": "fp8", "moe_intermediate_size": 160}


def load(folder: Path, mesh: Mesh) -> dict[str, Any]:
    return load_weights(folder, load_model_config(folder), CPU, torch.float32, progress=False, mesh=mesh)


def values(weight: Tensor | LinearWeight) -> Tensor:
    return dequantize(weight, torch.float32) if isinstance(weight, LinearWeight) else weight


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "dequantised"])
@pytest.mark.parametrize(
    ("config", "quantised", "names"),
    [
        (SMALL, True, "released"),
        (ODD, True, "released"),
        (SMALL | {"expert_dtype": "fp8", "moe_intermediate_size": 128}, True, "transformers"),
        (SMALL, False, "transformers"),
    ],
    ids=["fp4", "fp8", "fp8-stacked", "plain-stacked"],
)
def test_parts_make_up_the_whole(
    config: dict[str, Any], quantised: bool, names: Names, stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_v4_checkpoint(tmp_path, config, 3, names, quantised)
    if stored:
        monkeypatch.setattr(loader, "physical_memory", lambda: 0)
    whole = load(tmp_path, Mesh())
    table = expected_tensors(load_model_config(tmp_path))
    kept = {type(weight) for weight in whole.values()} | {getattr(weight, "format", None) for weight in whole.values()}
    assert ("fp8" in kept) == (stored and quantised)
    for dp, tp, ep in MESHES:
        parts = [load(tmp_path, Mesh(dp, tp, ep, rank)) for rank in range(dp * tp)]
        for name, spec in table.items():
            for rank, part in enumerate(parts):
                assert tuple(part[name].shape) == local_shape(spec, Mesh(dp, tp, ep, rank)), name
            group = parts[:ep] if spec.split == "experts" else parts[:tp]
            cuts = [values(part[name]) for part in (group if spec.split else parts[:1])]
            assert torch.equal(torch.cat(cuts, dim=int(spec.split == "columns")), values(whole[name])), name
        for rank in range(max(tp, ep), dp * tp):
            assert torch.equal(
                values(parts[rank]["layers.1.ffn.experts.w13"]), values(parts[rank % ep]["layers.1.ffn.experts.w13"])
            )


@pytest.mark.parametrize("names", ["released", "transformers"])
def test_a_rank_reads_its_part_only(names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_v4_checkpoint(tmp_path, SMALL, 3, names)
    read: dict[str, int] = {}
    original = CheckpointFiles.read

    def counted(self: CheckpointFiles, tensor: StoredTensor, part: Any = ()) -> Tensor:
        out = original(self, tensor, part)
        read[tensor.name] = read.get(tensor.name, 0) + out.numel() * out.element_size()
        return out

    monkeypatch.setattr(CheckpointFiles, "read", counted)
    load(tmp_path, Mesh())
    whole = dict(read)
    assert sum(whole.values()) > 500_000
    for dp, tp, ep in MESHES:
        for rank in range(dp * tp):
            read.clear()
            load(tmp_path, Mesh(dp, tp, ep, rank))
            shares = dict.fromkeys(read, 1)
            for name in read:
                if ".experts." in name:
                    shares[name] = ep if names == "transformers" else 1  # experts of their own name are read whole, or not at all
                elif any(part in name for part in SPLIT):
                    shares[name] = tp
            for name, size in read.items():
                if "scale" not in name:  # of a scale every block that a part touches is needed
                    assert size * shares[name] == whole[name], name
            absent = {name for name in whole if name not in read}
            assert all(".experts." in name for name in absent)
            if names == "released":
                experts = [name for name in whole if ".experts." in name]
                assert len(absent) == len(experts) - len(experts) // ep


SPLIT = (
    "embed", "head.weight", "attn_sink", "sinks", "attn.wq_b", "wo_a", "wo_b", "shared_experts",
    "attn.q_b_proj", "o_a_proj", "o_b_proj",
)  # fmt: skip


def test_parts_share_out_the_bytes_of_the_released_model() -> None:
    """V4-Flash on 4 ranks: experts, embedding, head, and the attention's largest matrices."""
    table = expected_tensors(load_preset("v4-flash"))
    for dp, tp, ep in ((4, 1, 4), (1, 4, 4), (2, 2, 4)):
        for name, spec in table.items():
            share = {None: 1, "experts": ep}.get(spec.split, tp)
            assert math.prod(local_shape(spec, Mesh(dp, tp, ep, 1))) * share == math.prod(spec.shape), name
    assert {spec.split for spec in table.values()} == {None, "rows", "columns", "experts"}
