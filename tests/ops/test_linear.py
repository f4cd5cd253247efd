"""Linear: weight formats, scale rules and rounding against vectors and slow independent formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import abyssal.ops.linear.triton as kernels
from abyssal.ops import linear as ops
from abyssal.ops.linear import LinearWeight, dequantize, linear, linear_grouped, quantize_e4m3_tiles
from tests.support.records import DEVICE

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


def test_linear_shapes():
    weight = LinearWeight(torch.randn(3, 8), None, "plain", None, None)
    assert linear(torch.empty(0, 8), weight).shape == (0, 3)
    assert linear(torch.randn(16, 2).T[:, ::2], weight).shape == (2, 3)  # non-contiguous
    with pytest.raises(RuntimeError, match="2x7 and 8x3"):
        linear(torch.randn(2, 7), weight)


def test_one_expert_of_a_stack():
    """It dequantises as the slice of the stack; a plain one is a view."""
    data = torch.randint(0, 256, (3, 4, 32), dtype=torch.uint8)
    scale = torch.randint(120, 130, (3, 4, 2), dtype=torch.uint8)
    stack = LinearWeight(data, scale, "fp4", (1, 32), 128)
    assert stack.shape == (3, 4, 64)
    for e in range(3):
        one = dequantize(stack, torch.float32, e)
        assert torch.equal(one, dequantize(stack, torch.float32)[e])
        x = torch.randn(2, 64)
        assert torch.equal(linear(x, stack, e), x @ one.T)
    plain = LinearWeight(torch.randn(3, 4, 5), None, "plain", None, None)
    assert dequantize(plain, torch.float32, 2).data_ptr() == plain.data[2].data_ptr()


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


# Kernels


def fp8_weight(
    rows: int, columns: int, block: int, seed: int = 0, tile: int | None = None, fp32_scales: bool = False
) -> LinearWeight:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randint(112, 124, (-(-rows // block), -(-columns // block)), generator=generator, dtype=torch.uint8)
    if fp32_scales:
        scale = torch.rand(scale.shape, generator=generator) * 0.02 + 1e-4
    data = random_e4m3(rows, columns, seed=seed)
    return LinearWeight(data.to(DEVICE), scale.to(DEVICE), "fp8", (block, block), tile or block)


def plain_weight(rows: int, columns: int, seed: int = 0, tile: int | None = None) -> LinearWeight:
    generator = torch.Generator().manual_seed(seed)
    return LinearWeight(torch.randn(rows, columns, generator=generator).bfloat16().to(DEVICE), None, "plain", None, tile)


def fp32_weight(rows: int, columns: int, seed: int = 0, from_bf16: bool = False) -> torch.Tensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return weight.bfloat16().float() if from_bf16 else weight


def tokens_of(count: int, columns: int, seed: int = 0) -> torch.Tensor:
    """bf16 rows of many magnitudes: with zeros, a row of zeros, and tiles below the floor of the scale."""
    x = torch.randn(count, columns, generator=torch.Generator().manual_seed(seed))
    x *= torch.logspace(-6, 3, columns)[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]
    x[:, ::7] = 0
    x[2::3] = 0
    return x.bfloat16().to(DEVICE)


def sum_error(columns: int) -> float:
    """Error over the sum of sizes: tensor cores cut, not round, after each 16 products, up to one step of fp32 each."""
    return max(2**-17, columns / 16 * 2**-23)


def assert_product(got: torch.Tensor, x: torch.Tensor, weight: LinearWeight | torch.Tensor) -> None:
    """Within one rounding of the exact product of the reference's operands, and fp32 sums."""
    if isinstance(weight, LinearWeight):
        exact = weight.format != "plain" and weight.scale.dtype == torch.uint8
        matrix = dequantize(weight, torch.float32 if exact else torch.bfloat16).double()
        if weight.quantize_input is not None:
            x = quantize_e4m3_tiles(x, weight.quantize_input)
    else:
        matrix = weight.double()
    want = x.double() @ matrix.T
    rounding = want.abs() * 2**-8 if got.dtype == torch.bfloat16 else 0
    bound = rounding + x.double().abs() @ matrix.abs().T * sum_error(
        matrix.shape[1] * (3 if isinstance(weight, torch.Tensor) else 1)
    )
    assert got.shape == want.shape and got.dtype == (torch.float32 if isinstance(weight, torch.Tensor) else torch.bfloat16)
    assert not got.isnan().any()
    worst = ((got.double() - want).abs() - bound).max()
    assert worst <= 0, f"{tuple(x.shape)} by {tuple(want.shape)}: {worst} beyond the bound"


def product(x: torch.Tensor, *weights: LinearWeight | torch.Tensor, **options: bool) -> tuple[torch.Tensor, ...]:
    return kernels.linear(x, kernels.prepare_linear(weights), **options)


@pytest.mark.parametrize("count", [2, 9])
@pytest.mark.parametrize(
    "weight",
    [
        lambda: fp8_weight(48, 128, 128),
        lambda: fp8_weight(16, 640, 128, seed=1),  # a step and a quarter
        lambda: fp8_weight(24, 128, 128, seed=2),  # rows that do not fill a tile
        lambda: fp8_weight(24, 64, 128, seed=2),  # narrower than a block: as bf16
        lambda: fp8_weight(64, 256, 128, seed=3, fp32_scales=True),  # no powers of two: as bf16
        lambda: fp8_weight(32, 256, 32, seed=4),
        lambda: fp8_weight(16, 640, 64, seed=5),
        lambda: fp8_weight(48, 160, 32, seed=5),
        lambda: fp8_weight(32, 256, 128, seed=6, tile=32),
        lambda: fp8_weight(32, 256, 32, seed=7, tile=128),
        lambda: fp8_weight(40, 64, 32, seed=8),  # rows that do not fill a panel: as bf16
        lambda: plain_weight(40, 192),
        lambda: plain_weight(16, 128, tile=128),
        lambda: plain_weight(24, 96, tile=32),
        lambda: fp32_weight(24, 96),
        lambda: fp32_weight(24, 640, from_bf16=True),
        lambda: fp8_weight(32, 1152, 32, seed=9),  # so few rows and so many columns that eight warps share them
        lambda: fp8_weight(24, 1024, 128, seed=10),
        lambda: plain_weight(24, 2304, seed=11),
        lambda: fp32_weight(8, 1024),
    ],
)
def test_kernel_equals_the_product_of_the_references_operands(weight: Callable[[], LinearWeight | torch.Tensor], count: int):
    weight = weight()
    x = tokens_of(count, weight.shape[-1])
    (got,) = product(x, weight, batch_invariant=True)  # the few-token kernel at any number
    assert_product(got, x, weight)


@pytest.mark.parametrize("block,scale", [((1, 1), 127), ((2, 3), 120), ((128, 128), 125)])
def test_unusual_formats_become_bf16(block: tuple[int, int], scale: int):
    scales = torch.full((-(-24 // block[0]), -(-96 // block[1])), scale, dtype=torch.uint8, device=DEVICE)
    odd = LinearWeight(random_e4m3(24, 96).to(DEVICE), scales, "fp8", block, None if block == (128, 128) else 32)
    packed = torch.randint(0, 256, (24, 48), dtype=torch.uint8, device=DEVICE)
    fp4 = LinearWeight(packed, torch.full((24, 3), 125, dtype=torch.uint8, device=DEVICE), "fp4", (1, 32), 128)
    x = tokens_of(3, 96)
    for weight in (odd, fp4):
        assert kernels.prepare_linear([weight]).groups[0].data.dtype == torch.bfloat16
        assert_product(product(x, weight)[0], x, weight)


def test_several_weights_of_one_input():
    """Neighbours of any format; the results come in the order given."""
    weights = [
        fp32_weight(24, 256, seed=1), fp8_weight(128, 256, 128, seed=2), fp32_weight(40, 256, seed=3, from_bf16=True),
        fp8_weight(48, 256, 128, seed=4), plain_weight(8, 256, seed=5), fp32_weight(16, 256, seed=6), fp8_weight(64, 256, 32, seed=7),
        plain_weight(8, 256, seed=8, tile=128),
    ]  # fmt: skip
    prepared = kernels.prepare_linear(weights)
    assert sorted(group.rows for group in prepared.groups) == [(8,), (8,), (24, 16), (40,), (64,), (128, 48)]
    for count in (2, 9) if DEVICE == "cuda" else (9,):
        x = tokens_of(count, 256)
        for weight, got in zip(weights, kernels.linear(x, prepared), strict=True):
            assert got.stride(1) == 1
            assert_product(got, x, weight)
            if DEVICE == "cuda":  # the interpreter multiplies through BLAS, whose sums depend on where a matrix lies
                assert torch.equal(got, product(x, weight)[0])


def test_codes_serve_weights_of_any_tile():
    """Codes that one weight's tile made: a weight of that tile takes them, any other their values."""
    x = tokens_of(3, 256)
    codes = kernels.quantise(x, 128)
    values = codes.values()
    assert torch.equal(values, quantize_e4m3_tiles(x, 128))
    for weight in (fp8_weight(48, 256, 128), fp8_weight(32, 256, 32), plain_weight(24, 256), fp32_weight(16, 256)):
        assert_product(product(codes, weight)[0], values, weight)


def test_weights_join_only_where_no_block_lies_over_the_seam():
    prepared = kernels.prepare_linear([fp8_weight(48, 128, 32), fp8_weight(32, 128, 32, seed=1)])
    assert [group.rows for group in prepared.groups] == [(48,), (32,)]
    x = tokens_of(2, 128)
    for seed, got in enumerate(kernels.linear(x, prepared)):
        assert_product(got, x, fp8_weight((48, 32)[seed], 128, 32, seed=seed))


@pytest.mark.parametrize("block,rows", [(128, 88), (32, 80)])
def test_programs_take_several_tiles_of_rows(block: int, rows: int):
    """Fewer programs than tiles, which do not divide evenly: the bits are those of a program per tile."""
    group = kernels.prepare_linear([fp8_weight(rows, 640, block)]).groups[0]
    x = tokens_of(3, 640)
    (one,), (loop,) = (
        kernels.few_tokens(x, [group], config=kernels.FewConfig(8, (16,), (2,), 4, None, programs)) for programs in (0, 2)
    )
    assert torch.equal(one, loop)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [640, 2304])
@pytest.mark.parametrize("block", [128, 32])
def test_a_tokens_bits_do_not_depend_on_its_batch(block: int, columns: int):
    """1 to 40 tokens in any order, quantised inside the product or before it: three sizes of token tiles."""
    weights = [fp8_weight(32, columns, block), plain_weight(24, columns), fp32_weight(16, columns)]
    prepared = kernels.prepare_linear(weights)
    x = tokens_of(40, columns)
    alone = [torch.cat(rows) for rows in zip(*(kernels.linear(x[i : i + 1], prepared) for i in range(0, 40, 5)), strict=True)]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for part in (x[order], torch.cat([x[:10], x])):
        shift = 10 if len(part) == 50 else 0
        place = torch.arange(40, device=DEVICE) + shift if shift else order.argsort()
        for rows, together in zip(alone, kernels.linear(part, prepared, batch_invariant=True), strict=True):
            assert torch.equal(rows, together[place[::5]])
    for count in (7, 16):
        for rows, together in zip(alone, kernels.linear(x[:count], prepared), strict=True):
            assert torch.equal(rows[: -(-count // 5)], together[::5])


def test_kernel_of_strided_and_empty_input():
    weight = fp8_weight(32, 128, 128)
    wide = tokens_of(10, 256)
    for x in (wide[:, 128:], wide[::2, :128], wide[3:4, 128:].expand(3, -1)):
        assert_product(product(x, weight)[0], x, weight)
    assert product(wide[:0, :128], weight, fp32_weight(8, 128))[1].shape == (0, 8)
    with pytest.raises(AssertionError, match="input has 256 columns, the weight 128"):
        product(wide, weight)
    with pytest.raises(AssertionError, match="values of a row are 2 apart"):
        product(wide[:, ::2], weight)


def test_poison_stays_in_its_row_in_the_kernel():
    weights = fp8_weight(32, 256, 128), fp8_weight(32, 256, 32, seed=1), fp32_weight(16, 256)
    x = tokens_of(5, 256)
    clean = product(x, *weights)
    x[1, 200] = math.nan
    for want, got, weight in zip(clean, product(x, *weights), weights, strict=True):
        assert torch.equal(got[[0, 2, 3, 4]], want[[0, 2, 3, 4]])
        if isinstance(weight, torch.Tensor) or DEVICE == "cuda":  # the interpreter's rounding to e4m3 knows no NaN
            assert got[1].isnan().all()


@pytest.mark.parametrize("tile", [32, 64, 128])
def test_quantise_kernel_equals_the_reference(tile: int):
    x = tokens_of(5, 1312)[:, 16:]  # 1296 columns: the last tile is short
    quantised = kernels.quantise(x, tile)
    want = quantize_e4m3_tiles(x, tile)
    scales = quantised.scales.repeat_interleave(tile, 1)[:, :1296]
    assert torch.equal((quantised.codes.float() * scales).bfloat16(), want)
    amax = torch.nn.functional.pad(x.float(), (0, -1296 % tile)).unflatten(1, (-1, tile)).abs().amax(2).clamp(min=1e-4)
    exponent = ops.ceil_log2(amax * torch.tensor(1 / 448, dtype=torch.float32, device=DEVICE))
    assert torch.equal(quantised.scales, ops.exp2(exponent))
    assert torch.equal(kernels.quantised_values(x, tile), want)
    assert kernels.quantised_values(x[:0], tile).shape == (0, 1296)


@pytest.mark.parametrize("block", [128, 64, 32])
def test_dequantise_kernel_equals_the_reference(block: int):
    weight = fp8_weight(144, 640, block)
    (group,) = kernels.prepare_linear([weight]).groups
    assert torch.equal(kernels.dequantised(group), dequantize(weight, torch.bfloat16))


@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize(
    "weight", [lambda: fp8_weight(64, 512, 128), lambda: fp8_weight(64, 256, 32), lambda: plain_weight(64, 128, tile=128)]
)
def test_grouped_kernel_uses_each_groups_own_rows(weight: Callable[[], LinearWeight], count: int):
    """V4 spec 2.8, with the input that `output_quant` would hand over."""
    weight = weight()
    prepared, columns = kernels.prepare_linear([weight]), weight.shape[1]
    x = tokens_of(count, 2 * columns)
    values = quantize_e4m3_tiles(x, weight.quantize_input)
    source: torch.Tensor | kernels.QuantisedInput = values.view(count, 2, columns)
    if kernels.takes_codes(count, prepared, 2):
        flat = kernels.quantise(x, weight.quantize_input)
        source = kernels.QuantisedInput(flat.codes.view(-1, 2, columns), flat.scales, flat.tile)
    got = kernels.linear_grouped(source, prepared, 2)
    scales = None if weight.scale is None else weight.scale.repeat_interleave(weight.block[0], 0)[:64]
    for group in range(2):
        rows = slice(group * 32, group * 32 + 32)
        part = LinearWeight(
            weight.data[rows],
            None if scales is None else scales[rows],
            weight.format,
            weight.block and (1, weight.block[1]),
            None,
        )
        assert_product(got[:, group], values.view(count, 2, columns)[:, group], part)


@pytest.mark.parametrize("block", [128, 32])
@pytest.mark.parametrize("count,splits,columns", [(17, 1, 256), (3, 2, 128), (65, 2, 128)])
def test_tiled_kernel(block: int, count: int, splits: int, columns: int):
    """Rows that do not fill the last tile, K whole and in parts, tokens of one and of two tiles."""
    weight, x = fp8_weight(160, 256, block), tokens_of(count, 256)
    (group,) = kernels.prepare_linear([weight]).groups
    config = kernels.TiledConfig(64 if count > 32 else 32, splits, columns)
    assert_product(kernels.tiled(kernels.quantise(x, block), group, config=config), x, weight)


@pytest.mark.parametrize("block", [128, 32])
def test_tiled_kernel_in_groups(block: int):
    weight, x = fp8_weight(256, 128, block), tokens_of(5, 256)
    (group,) = kernels.prepare_linear([weight]).groups
    got = kernels.tiled(kernels.quantise(x, block), group, num_groups=2)
    for part in range(2):
        scale = weight.scale[part * (128 // block) : (part + 1) * (128 // block)]
        rows = LinearWeight(weight.data[part * 128 : part * 128 + 128], scale, "fp8", weight.block, block)
        assert_product(got[:, part * 128 : part * 128 + 128], x[:, part * 128 : part * 128 + 128], rows)


def test_routes_follow_from_shapes():
    wide, narrow, short, plain = (
        kernels.prepare_linear([weight]).groups[0]
        for weight in (fp8_weight(256, 512, 128), fp8_weight(128, 128, 32), fp8_weight(128, 64, 128), plain_weight(16, 128))
    )

    def routes(group: kernels.Group, num_groups: int = 1) -> list[str]:
        return [kernels.route(count, group, num_groups) for count in (1, 16, 17, 256, 257)]

    assert routes(wide) == routes(narrow) == routes(wide, 2) == ["few", "few", "tiled", "tiled", "library"]
    assert routes(wide, 4) == ["few"] * 4 + ["library"]
    assert routes(short) == routes(plain) == ["few", "few", *["library"] * 3]
    assert kernels.few_config(1, 1024, [(32768, 128, 1)]) == kernels.FewConfig(8, (16,), (2,), 4, 168, 396)
    assert kernels.few_config(1, 512, [(32768, 32, 1)]).programs == 0  # one chunk per warp
    assert kernels.few_config(1, 8192, [(5120, 32, 1)]) == kernels.FewConfig(8, (16,), (2,), 4, 168)
    assert kernels.few_config(8, 4096, [(1536, 128, 1), (64, None, 1)]) == kernels.FewConfig(8, (16, 16), (4, 2), 8)
    assert kernels.few_config(8, 4096, [(384, None, 1)]) == kernels.FewConfig(8, (8,), (4,), 8)
    assert "tokens=32" in str(kernels.few_config(300, 4096, [(1536, 128, 1), (64, None, 1)]))
    assert kernels.tiled_config(64, 4096, 8192) == kernels.TiledConfig(64, 4, 2048)
    assert kernels.tiled_config(20, 32768, 1024) == kernels.TiledConfig(32, 1, 1024)
    assert kernels.tiled_config(64, 1536, 4096) == kernels.TiledConfig(64, 8, 512)


# (name, rows, columns, format) of the released models' products
RELEASED = [
    ("v4-flash wq_a + wkv", 1536, 4096, 128), ("v4-flash wq_b", 32768, 1024, 128), ("v4-flash wo_b", 4096, 8192, 128),
    ("v4-flash w2", 4096, 2048, 128), ("v4-pro wq_b", 65536, 1536, 128), ("v4-pro wo_b", 7168, 16384, 128),
    ("v4-pro wq_a + wkv", 2048, 7168, 128), ("v4.1 wq_a + wkv", 1792, 5120, 32), ("v4.1 wq_b", 32768, 1280, 32),
    ("v4.1 wo_b", 5120, 8192, 32), ("v4.1 w2", 5120, 2304, 32), ("v4.1 engram wkv", 25600, 6144, 32),
]  # fmt: skip


@pytest.mark.parametrize("block", [128, 32])
def test_many_tokens_are_bit_equal_in_any_batch(block: int):
    """With fewer others, and on a GPU in another order; FP8, plain and fp32 weights of one input."""
    prepared = kernels.prepare_linear([fp8_weight(16, 128, block), plain_weight(16, 128), fp32_weight(16, 128)])
    count, fewer = (300, 1) if DEVICE == "cuda" else (33, 17)  # the interpreter's products depend on a row's place in a tile
    x = tokens_of(count, 128)
    together = kernels.linear(x, prepared, batch_invariant=True)
    order = (torch.randperm(count) if DEVICE == "cuda" else torch.arange(count)).to(DEVICE)
    for rows in (order, order[:fewer]):
        part = kernels.linear(x[rows], prepared, batch_invariant=True)
        for got, expected in zip(part, together, strict=True):
            assert torch.equal(got, expected[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("name,rows,columns,block", RELEASED, ids=[shape[0] for shape in RELEASED])
def test_released_shapes(name: str, rows: int, columns: int, block: int):
    weight = fp8_weight(rows, columns, block)
    prepared = kernels.prepare_linear([weight])
    x = tokens_of(300, columns)
    first = kernels.linear(x[:1], prepared)[0]
    for count in (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 200, 256, 300):
        (got,) = kernels.linear(x[:count], prepared)
        assert_product(got, x[:count], weight)
        if count <= kernels.FEW_TOKENS:
            assert torch.equal(got[:1], first), f"{count} tokens"
    (got,) = kernels.linear(x, prepared, batch_invariant=True)
    assert torch.equal(got[:1], first)
    assert_product(got, x, weight)
    assert torch.equal(kernels.linear(x[:40].flip(0), prepared, batch_invariant=True)[0].flip(0), got[:40])


@pytest.mark.gpu
@pytest.mark.parametrize("columns,rows", [(4096, 2048), (4096, 1024), (5120, 1024), (4096, 129280), (7168, 384)])
def test_released_fp32_projections(columns: int, rows: int):
    """Weights stored as bf16, results within fp32's own error; also beside FP8 weights of the same input."""
    weight, beside = fp32_weight(rows, columns, from_bf16=True), fp8_weight(256, columns, 128)
    prepared = kernels.prepare_linear([beside, weight, plain_weight(64, columns)])
    assert prepared.groups[1].data.dtype == torch.bfloat16
    for count in (1, 8, 16, 17, 64, 300):
        x = tokens_of(count, columns)
        got = kernels.linear(x, prepared)
        assert_product(got[1], x, weight)
        assert_product(got[0], x, beside)


@pytest.mark.gpu
@pytest.mark.parametrize("block,groups", [(128, 8), (128, 16), (32, 8)])
def test_released_grouped_products(block: int, groups: int):
    weight = fp8_weight(groups * 1024, 4096, block)
    prepared = kernels.prepare_linear([weight])
    matrix = dequantize(weight, torch.float32).double().view(groups, 1024, 4096)
    for count in (1, 8, 17, 64, 100, 300):
        x = tokens_of(count, groups * 4096)
        values = quantize_e4m3_tiles(x, block)
        source: torch.Tensor | kernels.QuantisedInput = values.view(count, groups, 4096)
        if kernels.takes_codes(count, prepared, groups):
            flat = kernels.quantise(x, block)
            source = kernels.QuantisedInput(flat.codes.view(-1, groups, 4096), flat.scales, flat.tile)
        got = kernels.linear_grouped(source, prepared, groups)
        parts = values.view(count, groups, 4096).double()
        want = torch.einsum("tgk,grk->tgr", parts, matrix)
        bound = want.abs() * 2**-8 + torch.einsum("tgk,grk->tgr", parts.abs(), matrix.abs()) * sum_error(4096)
        assert got.shape == want.shape and ((got.double() - want).abs() <= bound).all(), count


@pytest.mark.gpu
def test_captured_product_replays_on_new_input():
    """One graph per route; its input changes between replays."""
    prepared = kernels.prepare_linear([fp8_weight(1536, 4096, 128), fp32_weight(512, 4096, from_bf16=True)])
    for count in (8, 100, 300):
        x = tokens_of(count, 4096)
        kernels.linear(x, prepared)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = kernels.linear(x, prepared)
        for seed in (1, 2):
            x.copy_(tokens_of(count, 4096, seed))
            graph.replay()
            for got, want in zip(outs, kernels.linear(x, prepared), strict=True):
                assert torch.equal(got, want)


def test_weight_memory_keeps_every_matrix(monkeypatch):
    """Matrices of odd sizes, some larger than what is taken at once: equal after all were placed, rows or columns in order."""
    monkeypatch.setattr(ops, "ROOM_AT_ONCE", 100)
    memory = ops.WeightMemory()
    given = [torch.randn(shape) for shape in [(5, 3), (3, 5), (2, 7, 4), (1, 1), (0, 4), (33, 9), (4, 4)]]
    given += [torch.randn(6, 10)[:, ::2], torch.randn(9, 4).bfloat16()]
    laid = [memory.laid_out(matrix) for matrix in given]
    for matrix, copy in zip(given, laid, strict=True):
        assert torch.equal(matrix, copy) and matrix.dtype == copy.dtype
        assert (copy.mT if matrix.shape[-2] >= matrix.shape[-1] else copy).is_contiguous()
        assert copy.data_ptr() % 64 == 0 or copy.dtype != torch.float32
