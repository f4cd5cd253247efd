"""Linear: weight formats, scale rules and rounding against vectors and slow independent formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from abyssal.ops import linear as ops
from abyssal.ops.linear import LinearWeight, dequantize, linear, linear_grouped, quantize_e4m3_tiles

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3_value(byte: int) -> float:
    """The value of an e4m3fn byte, from the definition of the format."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def slow_fp8(data: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Element by element in Python floats; `data` [N, K] e4m3, `scale` uint8 e8m0 or fp32."""
    data = data.view(torch.uint8)
    out = torch.empty(data.shape, dtype=torch.float64)
    for n in range(data.shape[0]):
        for k in range(data.shape[1]):
            s = scale[n // block[0], k // block[1]].item()
            out[n, k] = e4m3_value(int(data[n, k])) * (2.0 ** (s - 127) if scale.dtype == torch.uint8 else s)
    return out


def slow_fp4(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    out = torch.empty(data.shape[0], data.shape[1] * 2, dtype=torch.float64)
    for n in range(out.shape[0]):
        for k in range(out.shape[1]):
            code = int(data[n, k // 2]) >> 4 if k % 2 else int(data[n, k // 2]) & 15
            out[n, k] = (-1 if code & 8 else 1) * E2M1[code & 7] * 2.0 ** (int(scale[n, k // 32]) - 127)
    return out


def random_e4m3(*shape: int, seed: int = 0) -> torch.Tensor:
    """Every finite byte, so that subnormals and both zeros occur."""
    raw = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return torch.where((raw & 127) == 127, 0, raw).to(torch.uint8).view(torch.float8_e4m3fn)


def test_fp8_tile_vector():
    """V4 spec 8: the e4m3 rounding of one tile, scale 2^-7."""
    x = torch.zeros(64, dtype=torch.bfloat16)
    x[:6] = torch.tensor([1.0, -0.3, 0.017, 0.0033, 0.5, -2.2])
    want = torch.zeros(64)
    want[:6] = torch.tensor([1.0, -0.3125, 0.017578125, 0.00341796875, 0.5, -2.25])
    got = quantize_e4m3_tiles(x, 64)
    assert got.dtype == torch.bfloat16 and torch.equal(got.float(), want)
    assert ops.ceil_log2(torch.tensor(2.2) / 448) == -7
    assert (x.float() * 128).to(torch.float8_e4m3fn).view(torch.uint8)[:6].tolist() == [112, 226, 65, 46, 104, 249]


@pytest.mark.parametrize(
    ("amax", "exponent"),
    [(0, -22), (0.5, -9), (1, -8), (1.75, -8), (3.5, -7), (3.52, -6), (448, 0), (449, 1), (1000, 2)],
)
def test_fp8_scale_exponents(amax: float, exponent: int):
    """V4 spec 8: seen through the grid, whose smallest step (2^-9 of the scale) tells the scale apart."""
    x = torch.tensor([amax, 0.0])
    scale = 2.0**exponent
    x[1] = scale * 2.0**-9 * 1.4
    assert quantize_e4m3_tiles(x, 2)[1] == scale * 2.0**-9
    x[1] = scale * 2.0**-9 * 0.4
    assert quantize_e4m3_tiles(x, 2)[1] == 0


@pytest.mark.parametrize(
    ("amax", "exponent"),
    [(0, -126), (0.1, -5), (0.75, -3), (1, -2), (1.5, -2), (1.51, -1), (6, 0), (6.1, 1), (12, 1)],
)
def test_fp4_scale_exponents(amax: float, exponent: int):
    """V4 spec 8, for `ceil_log2` down to the smallest normal number."""
    a = torch.tensor(amax, dtype=torch.float32).clamp(min=6 * 2.0**-126)
    assert ops.ceil_log2(a * torch.tensor(1 / 6)) == exponent
    assert ops.exp2(torch.tensor(exponent, dtype=torch.int32)) == 2.0**exponent


def test_fp4_block_vector():
    """V4 spec 8: packed codes; the low nibble is the even index."""
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, :5] = torch.tensor([0x20, 0x42, 0x64, 0x76, 0xE8], dtype=torch.uint8)
    weight = LinearWeight(packed, torch.tensor([[127]], dtype=torch.uint8), "fp4", (1, 32), 128)
    got = dequantize(weight, torch.float32)[0]
    assert got[:10].tolist() == [0, 1, 1, 2, 2, 4, 4, 6, -0.0, -4] and torch.signbit(got[8])
    assert not got[10:].any()


def test_every_e4m3_byte_and_e8m0_byte():
    """All 254 finite bytes and all 255 scales, one at a time: no scale is read as a number (J01)."""
    data = torch.arange(256, dtype=torch.uint8)
    data = data[(data & 127) != 127].view(torch.float8_e4m3fn)[:, None]
    weight = LinearWeight(data, torch.full((254, 1), 127, dtype=torch.uint8), "fp8", (1, 1), None)
    want = [[e4m3_value(b)] for b in range(256) if b & 127 != 127]
    assert dequantize(weight, torch.float32).tolist() == want
    bytes_ = torch.arange(255, dtype=torch.uint8)
    assert ops.e8m0_to_float(bytes_).tolist() == [2.0 ** (b - 127) for b in range(255)]


@pytest.mark.parametrize("rows,columns,block", [(1, 1, (128, 128)), (130, 257, (128, 128)), (33, 64, (32, 32)), (5, 7, (2, 3))])
@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float32])
def test_fp8_dequantisation_equals_slow_formula(rows, columns, block, scale_dtype):
    """Odd sizes: the last block of rows and columns is shorter."""
    data = random_e4m3(rows, columns)
    scale = torch.randint(110, 140, (-(-rows // block[0]), -(-columns // block[1])), dtype=torch.uint8)
    if scale_dtype == torch.float32:
        scale = torch.rand(scale.shape) + 0.01  # base checkpoints: not powers of two
    weight = LinearWeight(data, scale, "fp8", block, 128)
    want = slow_fp8(data, scale, block)
    assert torch.equal(dequantize(weight, torch.float32), want.float())
    if scale_dtype == torch.uint8:  # exact in bf16 too: 4 significant bits
        assert torch.equal(dequantize(weight, torch.bfloat16).double(), want)


@pytest.mark.parametrize("rows,columns", [(1, 32), (3, 96), (17, 64)])
def test_fp4_dequantisation_equals_slow_formula(rows, columns):
    data = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scale = torch.randint(0, 148, (rows, columns // 32), dtype=torch.uint8)
    weight = LinearWeight(data, scale, "fp4", (1, 32), 128)
    want = slow_fp4(data, scale)
    assert weight.shape == (rows, columns)
    assert torch.equal(dequantize(weight, torch.float32).double(), want)
    large = scale.repeat_interleave(32, -1) > 2  # below, half a unit is under bf16's subnormals
    assert torch.equal(dequantize(weight, torch.bfloat16).double()[large], want[large])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=70), st.integers(1, 40))
def test_e4m3_tiles_property(values, tile):
    """Any width and magnitude: error within half a step of the tile's grid, and the result is on the grid already."""
    x = torch.tensor(values, dtype=torch.float32)
    got = quantize_e4m3_tiles(x, tile)
    assert got.shape == x.shape and got.isfinite().all()
    for part, out in zip(x.split(tile), got.split(tile), strict=True):
        amax = max(part.abs().max().item(), 1e-4)
        half_step = 2 * amax / 448 * 16  # the scale is below 2 amax / 448; the widest grid step is 32 scales
        assert (part - out).abs().max().item() <= half_step
    assert torch.equal(quantize_e4m3_tiles(got, tile), got)


def test_poison_stays_in_its_tile_and_row():
    """A NaN or infinity must not leak into other tiles or rows."""
    x = torch.randn(3, 256)
    clean = quantize_e4m3_tiles(x, 128)
    for poison in (math.nan, math.inf, -math.inf):
        bad = x.clone()
        bad[1, 130] = poison
        got = quantize_e4m3_tiles(bad, 128)
        assert got[1, 130].isnan()
        assert torch.equal(got[[0, 2]], clean[[0, 2]]) and torch.equal(got[1, :128], clean[1, :128])


def test_linear_fp32_is_plain_mathematics():
    """float32 runs never quantise the input."""
    data, scale = random_e4m3(40, 256), torch.randint(118, 122, (1, 2), dtype=torch.uint8)
    weight = LinearWeight(data, scale, "fp8", (128, 128), 128)
    x = torch.randn(5, 256)
    want = x.double() @ slow_fp8(data, scale, (128, 128)).T
    torch.testing.assert_close(linear(x, weight).double(), want, rtol=1e-5, atol=1e-5)


def test_linear_bf16_quantises_the_input():
    """bf16 runs round the input in tiles of 128, unless the weight says not to."""
    data, scale = random_e4m3(40, 256), torch.randint(118, 122, (1, 2), dtype=torch.uint8)
    x = torch.randn(5, 256).bfloat16()
    exact = slow_fp8(data, scale, (128, 128)).T
    for tile, source in ((128, quantize_e4m3_tiles(x, 128)), (None, x)):
        got = linear(x, LinearWeight(data, scale, "fp8", (128, 128), tile))
        want = source.double() @ exact
        bound = source.double().abs() @ exact.abs() * 2**-16 + want.abs() * 2**-8
        assert got.dtype == torch.bfloat16 and ((got.double() - want).abs() <= bound).all()
    assert not torch.equal(quantize_e4m3_tiles(x, 128), x)


def test_linear_prepared_copy_equals_stored_weight():
    """A dequantised copy with the same `quantize_input` gives the same bits as the stored weight, in both dtypes."""
    data, scale = random_e4m3(40, 256), torch.randint(118, 122, (1, 2), dtype=torch.uint8)
    stored = LinearWeight(data, scale, "fp8", (128, 128), 128)
    for dtype in (torch.float32, torch.bfloat16):
        plain = LinearWeight(dequantize(stored, dtype), None, "plain", None, 128)
        x = torch.randn(5, 256).to(dtype)
        assert torch.equal(linear(x, plain), linear(x, stored))


def test_linear_shapes_and_out_dtype():
    weight = LinearWeight(torch.randn(3, 8), None, "plain", None, None)
    assert linear(torch.empty(0, 8), weight).shape == (0, 3)
    assert linear(torch.randn(16, 2).T[:, ::2], weight).shape == (2, 3)  # non-contiguous
    assert linear(torch.randn(2, 8).bfloat16(), weight, torch.float32).dtype == torch.float32
    with pytest.raises(AssertionError, match="input has 7 columns, the weight 8"):
        linear(torch.randn(2, 7), weight)


def test_expert_is_a_view():
    """Stacked experts: `expert(e)` shares memory and dequantises as the slice of the stack."""
    data = torch.randint(0, 256, (3, 4, 32), dtype=torch.uint8)
    scale = torch.randint(120, 130, (3, 4, 2), dtype=torch.uint8)
    stack = LinearWeight(data, scale, "fp4", (1, 32), 128)
    assert stack.shape == (3, 4, 64)
    for e in range(3):
        one = stack.expert(e)
        assert one.data.data_ptr() == data[e].data_ptr() and one.shape == (4, 64) and one.quantize_input == 128
        assert torch.equal(dequantize(one, torch.float32), dequantize(stack, torch.float32)[e])
    plain = LinearWeight(torch.randn(3, 4, 5), None, "plain", None, None)
    assert plain.expert(2).scale is None


def test_grouped_linear_uses_each_groups_own_rows():
    """Group g of the input meets rows g R .. g R + R - 1 only (V4 spec 2.8), also non-contiguous and empty."""
    data, scale = random_e4m3(3 * 5, 64), torch.randint(118, 122, (1, 1), dtype=torch.uint8)
    weight = LinearWeight(data, scale, "fp8", (128, 128), None)
    rows = slow_fp8(data, scale, (128, 128))
    x = torch.randn(3, 4, 64).transpose(0, 1)  # [T 4, G 3, K 64]
    got = linear_grouped(x, weight)
    assert got.shape == (4, 3, 5)
    for group in range(3):
        want = x[:, group].double() @ rows[group * 5 : group * 5 + 5].T
        torch.testing.assert_close(got[:, group].double(), want, rtol=1e-5, atol=1e-5)
    assert linear_grouped(x[:0], weight).shape == (0, 3, 5)
