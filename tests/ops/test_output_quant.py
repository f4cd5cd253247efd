"""Inverse RoPE of the output, and its quantisation in bf16 runs."""

import pytest
import torch

import abyssal.ops.output_quant.triton as kernels
from abyssal.config import RopeConfig
from abyssal.kv import codec
from abyssal.kv.layouts import Grid
from abyssal.ops.linear import e8m0_to_float, quantize_e4m3_tiles
from abyssal.ops.output_quant import output_quant
from abyssal.ops.rope import rope_table, rotate
from tests.support.records import DEVICE

ROPE = RopeConfig(16, 10000.0, None)


def test_undoes_the_rotation_at_the_query_position():
    torch.manual_seed(0)
    out, table = torch.randn(5, 3, 48), rope_table(torch.tensor([0, 1, 77, 4095, 1_000_000]), ROPE)
    rotated = rotate(out.clone(), table.unsqueeze(1))
    torch.testing.assert_close(output_quant(rotated, table, 32, torch.float32), out, rtol=0, atol=2e-6)


def test_bf16_runs_quantise_in_tiles_and_fp32_runs_do_not():
    torch.manual_seed(0)
    out, table = torch.randn(4, 2, 64), rope_table(torch.arange(4), ROPE)
    rounded = output_quant(out.clone(), table, None, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    quantised = output_quant(out.clone(), table, 32, torch.bfloat16)
    assert torch.equal(quantised, quantize_e4m3_tiles(rounded, 32)) and not torch.equal(quantised, rounded)
    exact = output_quant(out.clone(), table, 32, torch.float32)
    torch.testing.assert_close(exact.bfloat16(), rounded)


# Kernel


def attention_output(tokens: int, heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    out = torch.randn(tokens, heads, 640, device=DEVICE) * torch.logspace(-6, 2, tokens * heads, device=DEVICE).view(
        tokens, heads, 1
    )
    out[0, 0] = 0
    return out.to(dtype)[..., 64:576], rope_table(torch.arange(tokens) * 4099, RopeConfig(64, 160000.0, None)).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_undoes_the_rotation(dtype):
    out, table = attention_output(3, 4, dtype)
    expected = output_quant(out.float().clone(), table, None, dtype).float()
    got = kernels.output_quant(out, table, None, dtype).float()
    pair = expected.unflatten(-1, (-1, 2)).abs().amax(-1, keepdim=True).expand(-1, -1, -1, 2).flatten(-2)
    assert ((got - expected).abs() <= pair * (2**-8 if dtype == torch.bfloat16 else 1e-6)).all()
    assert torch.equal(got[..., :448], expected[..., :448])


@pytest.mark.parametrize("per_program", [1, 2, 4])
@pytest.mark.parametrize("tile", [32, 128])
def test_kernel_quantises_its_own_rows_exactly(tile, per_program):
    out, table = attention_output(3, 4, torch.bfloat16)
    config = kernels.OutputQuantConfig(per_program, 1)
    rows = kernels.output_quant(out, table, None, torch.bfloat16, config=config)
    values = kernels.output_quant(out, table, tile, torch.bfloat16, config=config)
    assert torch.equal(values.view(torch.int16), quantize_e4m3_tiles(rows, tile).view(torch.int16))
    quantised = kernels.output_quant_e4m3(out, table, tile, groups=2, config=config)
    codes, scales = quantised.codes, quantised.scales
    assert codes.shape == (3, 2, 1024) and scales.shape == (3, 2 * 1024 // tile)
    expected = codec.quantize(Grid(1024, "e4m3", tile, "ue8m0"), rows.view(6, 1024).float().cpu())
    assert torch.equal(codes.reshape(6, 1024).view(torch.uint8).cpu(), expected[0])
    assert torch.equal(scales.reshape(6, -1).cpu(), e8m0_to_float(expected[1]))


def test_kernel_of_an_empty_batch():
    out, table = torch.empty(0, 4, 512, device=DEVICE), rope_table(torch.arange(0), RopeConfig(64, 160000.0, None)).to(DEVICE)
    assert kernels.output_quant(out, table, 32, torch.bfloat16).shape == (0, 4, 512)
    assert kernels.output_quant_e4m3(out, table, 32, 2).codes.shape == (0, 2, 1024)
