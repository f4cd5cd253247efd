"""RoPE frequencies, tables and rotation (V4 spec 2.6 and 8)."""

import math

import pytest
import torch

from abyssal.config import RopeConfig, YarnConfig
from abyssal.ops.rope import rope_frequencies, rope_table, rotate

YARN = RopeConfig(64, 160000.0, YarnConfig(16.0, 65536, 32.0, 1.0))
PLAIN = RopeConfig(64, 10000.0, None)
RELEASED = {
    0: 1.0, 1: 6.8765604e-1, 8: 5.0e-2, 15: 3.6355385e-3, 16: 2.2656249e-3, 17: 1.3968013e-3, 18: 8.4968971e-4, 19: 5.0808198e-4,
    20: 2.9697779e-4, 21: 1.6817998e-4, 22: 9.0867841e-5, 23: 4.5444231e-5, 24: 1.9531253e-5, 25: 5.3723124e-6, 31: 5.6805294e-7,
}  # fmt: skip


def test_released_yarn_table():
    freqs = rope_frequencies(YARN)
    for index, value in RELEASED.items():
        assert freqs[index].item() == pytest.approx(value, rel=2e-7)


def test_yarn_shares_are_rounded_like_the_models():
    """Here 1 - (1 - ramp) is not the ramp: with the ramp itself, frequencies 2 and 4 would be an ulp more."""
    freqs = rope_frequencies(RopeConfig(64, 160000.0, YarnConfig(8.0, 128, 32.0, 1.0)))
    stored = ("0x1p+0", "0x1.3dd992p-1", "0x1.8610dcp-2", "0x1.d7b78p-3", "0x1.17db38p-3", "0x1.43a846p-4")  # transformers 5.24
    assert freqs[:6].tolist() == [float.fromhex(value) for value in stored]


def test_plain_table_has_no_yarn():
    expected = torch.tensor([10000 ** (-2 * i / 64) for i in range(32)])
    torch.testing.assert_close(rope_frequencies(PLAIN), expected, rtol=2e-7, atol=0)


def test_equal_ramp_ends_do_not_divide_by_zero():
    narrow = RopeConfig(8, 10.0, YarnConfig(4.0, 64, 2.0, 2.0 - 1e-9))
    assert rope_frequencies(narrow).isfinite().all()


@pytest.mark.parametrize("dim", [64, 96])
def test_rotate_matches_the_formula_and_leaves_the_rest(dim):
    torch.manual_seed(0)
    x = torch.randn(5, 3, dim)
    before = x.clone()
    positions = torch.tensor([0, 1, 127, 65536, 1048575])
    table = rope_table(positions, YARN)
    rotate(x, table.unsqueeze(1))
    assert torch.equal(x[..., : dim - 64], before[..., : dim - 64])
    freqs = rope_frequencies(YARN)
    for t, position in enumerate(positions.tolist()):
        for i in range(32):
            angle = (torch.tensor(float(position)) * freqs[i]).item()  # fp32 product
            even, odd = before[t, :, dim - 64 + 2 * i].double(), before[t, :, dim - 64 + 2 * i + 1].double()
            expected = torch.stack(
                [even * math.cos(angle) - odd * math.sin(angle), odd * math.cos(angle) + even * math.sin(angle)], -1
            )
            torch.testing.assert_close(x[t, :, dim - 64 + 2 * i : dim - 64 + 2 * i + 2].double(), expected, rtol=0, atol=2e-6)


def test_inverse_undoes_rotation():
    torch.manual_seed(0)
    x = torch.randn(4, 2, 80)
    table = rope_table(torch.tensor([3, 10, 500, 99999]), PLAIN).unsqueeze(1)
    torch.testing.assert_close(rotate(rotate(x.clone(), table), table.conj()), x, rtol=0, atol=1e-6)
