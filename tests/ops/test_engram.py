"""The gate of the n-gram memory against V4.1 spec 3.8, written out per stream in double; rows of a table by the kernel."""

from __future__ import annotations

import math
import mmap

import numpy as np
import pytest
import torch
from torch import Tensor

from abyssal.errors import ConfigError
from abyssal.ops.engram import engram, row_values
from abyssal.ops.engram import triton as kernels
from tests.support.records import DEVICE


def slow(streams: Tensor, key: Tensor, value: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = streams.double().clone()
    for t in range(streams.shape[0]):
        for i in range(streams.shape[1]):
            h, k = streams[t, i].double(), key[t, i].double()
            rstd = ((h @ h / len(h) + eps) * (k @ k / len(k) + eps)) ** -0.5
            dot = float((h * weight[i].double() * k).sum() * rstd * len(h) ** -0.5)
            gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)))
            out[t, i] += gate * value[t].double()
    return out


def draw(tokens: int, dim: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens)
    return torch.randn(tokens, 4, dim) * 3, torch.randn(tokens, 4, dim), torch.randn(tokens, dim), 1 + torch.randn(4, dim) / 2


def test_against_the_formula() -> None:
    for tokens in (1, 7):
        streams, key, value, weight = draw(tokens)
        expected = slow(streams, key, value, weight, 1e-20)
        torch.testing.assert_close(engram(streams, key, value, weight, 1e-20).double(), expected, rtol=0, atol=3e-6)
        # opposite keys: gates on the other side of one half
        expected = slow(streams, -key, value, weight, 1e-20)
        torch.testing.assert_close(engram(streams, -key, value, weight, 1e-20).double(), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("dim", [96, 5120])
def test_the_kernel_against_the_formula(dim: int) -> None:
    """Of bf16 values, rounded once; each token alone has the same bits."""
    *rows, weight = draw(3, dim)
    streams, key, value = (x.bfloat16() for x in rows)
    kv = torch.cat([key.flatten(1), value], dim=1).to(DEVICE)  # as one product gives them
    arrays = streams.to(DEVICE), kv[:, : 4 * dim].unflatten(1, (4, dim)), kv[:, 4 * dim :], weight.to(DEVICE)
    got = kernels.engram(*arrays, 1e-20).cpu()
    expected = slow(streams, key, value, weight, 1e-20)
    assert ((got.double() - expected).abs() <= expected.abs() * 2**-8 + 1e-6).all()
    for i in range(3):
        assert torch.equal(kernels.engram(*(x[i : i + 1] for x in arrays[:3]), arrays[3], 1e-20)[0].cpu(), got[i])
    assert kernels.engram(*(x[:0] for x in arrays[:3]), arrays[3], 1e-20).shape == (0, 4, dim)


def test_small_products_keep_a_floor_and_their_sign() -> None:
    """sqrt of the product is at least 1e-3, so a gate is never within 2.5e-4 of one half."""
    streams, key = torch.zeros(2, 1, 4), torch.zeros(2, 1, 4)
    streams[:, 0, 0], key[:, 0, 1] = 1, 1
    key[0, 0, 0], key[1, 0, 0] = 1e-9, -1e-9
    gates = engram(streams, key, torch.ones(2, 4), torch.ones(1, 4), 1e-20)[:, 0, 1]
    torch.testing.assert_close(gates, torch.sigmoid(torch.tensor([1e-3, -1e-3])), rtol=0, atol=1e-7)


def test_empty_streams_and_keys_are_finite() -> None:
    out = engram(torch.zeros(1, 4, 8), torch.zeros(1, 4, 8), torch.ones(1, 8), torch.ones(4, 8), 1e-20)
    torch.testing.assert_close(out, torch.full_like(out, float(torch.sigmoid(torch.tensor(1e-3)))))


def test_no_tokens_and_dtype() -> None:
    streams, key, value, weight = draw(5)
    assert engram(streams[:0], key[:0], value[:0], weight, 1e-20).shape == (0, 4, 64)
    rounded = engram(streams.bfloat16(), key.bfloat16(), value.bfloat16(), weight, 1e-20)
    exact = engram(streams.bfloat16().float(), key.bfloat16().float(), value.bfloat16().float(), weight, 1e-20)
    assert rounded.dtype == torch.bfloat16 and torch.equal(rounded, exact.bfloat16())


def pages(rows: int, columns: int) -> np.ndarray:
    """uint8 [rows, columns] in pages of memory of its own, as a driver locks them."""
    return np.frombuffer(mmap.mmap(-1, rows * columns), np.uint8).reshape(rows, columns)


@pytest.mark.parametrize(("tokens", "columns"), [(0, 24), (1, 24), (5, 7), (kernels.FEW_ROWS // 24 + 1, 24)])
def test_the_kernel_reads_the_rows_of_a_table_in_host_memory(tokens: int, columns: int) -> None:
    """Any code and any scale but NaN, first and last rows among them, bit for bit."""
    rng = np.random.default_rng(0)
    codes, scales = (pages(300, width) for width in (64, 2))
    for part in (codes, scales):
        part[...] = rng.integers(0, 255, part.shape, np.uint8)
    codes[codes & 0x7F == 0x7F] = 0x7E
    rows = torch.from_numpy(rng.integers(0, 300, (tokens, columns)))
    rows[:1, :2] = torch.tensor([0, 299])
    table = kernels.share_table(codes, scales, torch.device(DEVICE))
    got = kernels.table_rows(table, rows.to(DEVICE), torch.bfloat16)
    index = rows.flatten()
    expected = row_values(
        torch.from_numpy(codes)[index].view(torch.float8_e4m3fn), torch.from_numpy(scales)[index], torch.bfloat16
    )
    assert got.shape == (tokens, columns * 64) and torch.equal(got.cpu(), expected.view(got.shape))


def test_rows_that_the_kernel_does_not_take() -> None:
    with pytest.raises(
        ConfigError, match=r"engram_head_dim=96: the kernels take powers of two from 32 on; use backend=reference"
    ):
        kernels.share_table(np.zeros((2, 96), np.uint8), np.zeros((2, 3), np.uint8), torch.device(DEVICE))
