"""Inverse RoPE of the output, and its quantisation in bf16 runs."""

import torch

from abyssal.config import RopeConfig
from abyssal.ops.linear import quantize_e4m3_tiles
from abyssal.ops.output_quant import output_quant
from abyssal.ops.rope import rope_table, rotate

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
