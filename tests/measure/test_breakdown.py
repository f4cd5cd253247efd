"""Time by op: whose a kernel is, what overlapping kernels cover, and on a CPU where the time of library calls goes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from abyssal.measure import breakdown
from abyssal.measure.breakdown import _union, kernel_owners, op_of_kernel, profile
from abyssal.ops import norm
from tests.support.slices import slice_engine, small_slice

OPS = Path(breakdown.__file__).parent.parent / "ops"


def test_every_kernel_of_the_package_belongs_to_its_op() -> None:
    owners = kernel_owners()
    with_kernels = {path.parent.name for pattern in ("triton.py", "gluon.py") for path in OPS.glob(f"*/{pattern}")}
    assert set(owners.values()) == with_kernels and len(with_kernels) > 8
    assert op_of_kernel("hyper_connection_site") == "hyper_connection"


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("nvjet_tst_64x8_64x16_1x2_h_bz_TNT", "library products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "library products"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("ncclDevKernel_AllReduce_Sum", "communication"),
        ("void at::native::vectorized_elementwise_kernel<4>", "PyTorch other"),
    ],
)
def test_kernels_of_libraries_are_grouped(name: str, op: str) -> None:
    assert op_of_kernel(name) == op


def test_overlapping_kernels_count_once() -> None:
    assert _union([]) == 0
    assert _union([(5, 6), (0, 2), (1, 3), (1.5, 1.75)]) == 4


def test_on_a_cpu_library_calls_count_for_the_op_that_makes_them() -> None:
    x = torch.randn(400, 4096)

    def run() -> None:
        for _ in range(20):
            norm.rms_norm(x, None, 1e-6)
        time.sleep(0.05)  # called by no op

    found = profile(run, torch.device("cpu"))
    assert list(found.by_op) == ["norm"] and found.by_op["norm"] > 0
    assert found.total - found.busy > 0.04, "the sleep is nobody's"


@pytest.mark.parametrize("name", ["v4-flash"])
def test_a_step_is_explained_by_its_ops(name: str, tmp_path: Path) -> None:
    from abyssal.measure.records import add_running

    engine = slice_engine(name, small_slice(name, tmp_path))
    add_running(engine, 2, 300)
    engine.step()
    found = profile(engine.step, torch.device("cpu"))
    assert found.busy == pytest.approx(found.total, rel=0.05)
    expected = {
        "sparse_attention",
        "moe",
        "linear",
        "hyper_connection",
        "compress",
        "qkv_insert",
        "index_score",
        "select_topk",
        "norm",
    }
    assert expected <= found.by_op.keys() <= {path.stem for path in (*OPS.glob("*"), *OPS.parent.iterdir())}
