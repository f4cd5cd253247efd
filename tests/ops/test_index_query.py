"""Index queries: rotation changes no dot product when keys are rotated alike; constants are folded into the weights."""

import pytest
import torch

import abyssal.ops.index_query.triton as kernels
from abyssal.config import RopeConfig
from abyssal.kv import codec, layouts
from abyssal.ops.hadamard import hadamard
from abyssal.ops.index_query import index_query
from abyssal.ops.rope import rope_table, rotate
from tests.support.records import DEVICE

ROPE = RopeConfig(64, 160000.0, None)


def test_weights_and_rotation():
    torch.manual_seed(0)
    q, weights = torch.randn(6, 16, 128), torch.randn(6, 16)
    table = rope_table(torch.arange(6) * 1000, ROPE)
    plain, folded = index_query(q.clone(), weights, table, rotate_query=False, grid=None)
    turned, _ = index_query(q.clone(), weights, table, rotate_query=True, grid=None)
    torch.testing.assert_close(folded, weights * 128**-0.5 * 16**-0.5)
    torch.testing.assert_close(plain, rotate(q.clone(), table.unsqueeze(1)))
    key = torch.randn(128)
    torch.testing.assert_close(turned @ hadamard(key), plain @ key, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(turned @ key, plain @ key, atol=0.5)


@pytest.mark.parametrize("layout", ["index_fp8", "index_mxfp4"])
def test_queries_follow_the_grid_of_the_keys(layout):
    """Scores of the outputs equal those of queries encoded and decoded as keys are, weights as they were."""
    torch.manual_seed(0)
    q, weights = torch.randn(5, 8, 128) * torch.logspace(-3, 3, 8)[:, None], torch.randn(5, 8)
    table = rope_table(torch.arange(5) * 100, ROPE)
    exact, plain_weights = index_query(q.clone(), weights, table, rotate_query=True, grid=None)
    got, folded = index_query(q.clone(), weights, table, rotate_query=True, grid=layouts.get(layout).grid)
    rows = codec.decode(layout, *codec.encode(layout, exact.flatten(0, 1))).view_as(exact)
    key = torch.randn(128)
    torch.testing.assert_close((got @ key).relu() * folded, (rows @ key).relu() * plain_weights, rtol=1e-5, atol=1e-6)
    assert not torch.equal(rows, exact)


# Kernel


def queries(tokens: int, heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q = torch.randn(tokens, heads, 256, device=DEVICE) * torch.logspace(-3, 3, heads, device=DEVICE)[:, None]
    q[0, 0] = 0
    weights = torch.randn(tokens, 2 * heads, device=DEVICE).to(dtype)[:, heads:]
    return q.to(dtype)[..., 128:], weights, rope_table(torch.arange(tokens) * 999, ROPE).to(DEVICE)


@pytest.mark.parametrize("rotate_query", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_rotates_as_the_reference_does(dtype, rotate_query):
    q, weights, table = queries(3, 8, dtype)
    expected, folded = index_query(q.clone(), weights, table, rotate_query=rotate_query, grid=None)
    got, got_weights = kernels.index_query(q, weights, table, rotate_query=rotate_query, grid=None)
    size = expected.abs().amax(-1, keepdim=True)
    assert ((got.float() - expected).abs() <= size * (2**-8 if dtype == torch.bfloat16 else 1e-6)).all()
    torch.testing.assert_close(got_weights, folded, rtol=1e-6, atol=0)
    if (
        dtype == torch.bfloat16
    ):  # a rotated value that rounds to its neighbour moves every value of the Hadamard rotation a little
        assert (got.float() != expected).float().mean() < 0.02


@pytest.mark.parametrize(("per_program", "num_warps", "parts"), [(1, 1, 2), (4, 1, 4), (8, 1, 2), (8, 4, 4)])
@pytest.mark.parametrize("layout", ["index_fp8", "index_mxfp4"])
def test_kernel_quantises_its_own_rows_exactly(layout, per_program, num_warps, parts):
    """And these rows have the same bits whatever the launch config."""
    q, weights, table = queries(2, 8, torch.bfloat16)
    grid, config = layouts.get(layout).grid, kernels.IndexQueryConfig(per_program, num_warps, parts)
    rows, plain = kernels.index_query(q, weights, table, rotate_query=True, grid=None, config=config)
    got, folded = kernels.index_query(q, weights, table, rotate_query=True, grid=grid, config=config)
    other, _ = kernels.index_query(
        q, weights, table, rotate_query=True, grid=None, config=kernels.IndexQueryConfig(8, 4, 6 - parts)
    )
    assert torch.equal(rows, other)
    codes, scales = codec.quantize(grid, rows.flatten(0, 1).float().cpu())
    if layout == "index_fp8":
        assert got.dtype == torch.float8_e4m3fn and torch.equal(got.view(torch.uint8).cpu().flatten(0, 1), codes)
        assert torch.equal(folded.cpu(), plain.cpu() * scales.view(torch.float32).view(2, 8))
    else:
        assert got.dtype == torch.bfloat16 and torch.equal(folded, plain)
        expected = codec.dequantize(grid, codes, scales).view(2, 8, 128)
        assert torch.equal(got.float().cpu().view(torch.int32), expected.view(torch.int32))


def test_kernel_of_an_empty_batch():
    q, weights, table = queries(1, 8, torch.bfloat16)
    grid = layouts.get("index_fp8").grid
    got, folded = kernels.index_query(q[:0], weights[:0], table[:0], rotate_query=True, grid=grid)
    assert got.shape == (0, 8, 128) and folded.shape == (0, 8)
