"""Triton device functions shared by the write-path kernels: rounding, RMS norm, RoPE, Hadamard rotation, and records.

Tiles are fp32 [ROWS, D], one record per row. A `Layout` of `kv/layouts.py` is a compile-time constant of a kernel, so that a kernel
reads `layout.grid.tile` as the codec does. Bytes equal `kv/codec.py` (V4 spec 3.1, 3.2; V4.1 spec 4).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

EARLY_PROGRAMS = 2200

# Casts of the interpreter of Triton 3.6 to fewer bits drop the carry into the exponent. There, rounding is integer arithmetic; the
# hardware instruction does the same at a tenth of the cost.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def starts_early(programs: int, x: Tensor) -> bool:
    """Whether a launch may start while the one before ends: 0.5 us less, but a program then takes 1.2 ns to start (H200)."""
    return x.is_cuda and programs <= EARLY_PROGRAMS


def early(programs: int, x: Tensor) -> dict[str, bool]:
    """Options of a launch whose kernel waits by `wait_for_inputs` or `wait_before_product`."""
    is_early = starts_early(programs, x)
    return {"EARLY": is_early, "launch_pdl": is_early}


def next_power_of_2(n: int) -> int:
    """The least one that is not below `n`. Triton's function takes 2 us outside of kernels, and so does its `cdiv`."""
    return 1 << (n - 1).bit_length()


@lru_cache(maxsize=32)
def multiprocessors(device: torch.device, interpreted: int = 1) -> int:
    """Of a GPU; `interpreted` of a CPU, on which kernels run in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else interpreted


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """In a kernel that may be launched `early`, and so may the one after it, before anything is written.

    The next kernel starts when all programs have waited here. So before its own wait it may read what kernels before this one wrote.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def wait_before_product(EARLY: tl.constexpr):
    """`wait_for_inputs` of a kernel before a product: that may start at once, for it reads nothing but weights before its own wait.

    Where another kernel follows, it must not read what the kernel before this one wrote before it has waited.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def loads_in_flight():
    """Keeps the loads above where they stand; the compiler moves them down, behind arithmetic that waits for others, to save registers."""
    tl.debug_barrier()


@triton.jit
def zero_behind_loads():
    """0 as int32, which no one knows before the loads above are on their way: arithmetic that needs it cannot be moved in front of them."""
    if INTERPRETED:
        return 0
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred never; setp.ne.u32 never, 0, 0; bar.red.popc.u32 $0, 0, never; }", "=r", [], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@triton.jit
def to_bf16(x):
    """fp32 -> bf16, ties to even."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
        return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def to_fp32(x):
    """bf16 or fp32 -> fp32."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def round_like(x, BF16: tl.constexpr):
    """The rounding point of a bf16 run; exact in an fp32 run."""
    if not BF16:
        return x
    elif INTERPRETED:
        return to_fp32(to_bf16(x))
    else:  # two values per conversion
        return tl.inline_asm_elementwise(
            "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }",
            "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def exp2(x):
    """2^x for x <= 0 as fp32, 0 below 2^-126."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x):
    """1 / x within one ulp, for x and results in fp32's normal range: a division's guards against others cost more than the quotient."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def store_like(pointers, x, mask=None):
    """Store fp32 values as the pointers' type, bf16 or fp32."""
    tl.store(pointers, to_bf16(x) if pointers.dtype.element_ty == tl.bfloat16 else x, mask=mask)


@triton.jit
def rms_scale(x, D: tl.constexpr, eps):
    """x [ROWS, D] -> [ROWS, 1], rsqrt of the mean square."""
    return tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) * (1.0 / D) + eps)


@triton.jit
def load_rope(table, row, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    """Row of a table fp32 [T, ROPE] of (cos, sin) pairs -> cos and sin [ROWS, WIDTH / 2] for the last WIDTH values of vectors.

    Loaded in the shape of the vectors, so that each thread gets the pairs of its own values and none pass through shared memory.
    """
    column = tl.arange(0, WIDTH)[None, :] - (WIDTH - ROPE) + tl.zeros((ROWS, 1), tl.int32)
    pairs = tl.load(table + row.to(tl.int64) * ROPE + column, mask=column >= 0, other=0.0)
    return tl.split(tl.reshape(pairs, (ROWS, WIDTH // 2, 2)))


@triton.jit
def rotate(x, cos, sin, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    """Rotate the last ROPE of WIDTH values in interleaved pairs (V4 spec 2.6)."""
    even, odd = tl.split(tl.reshape(x, (ROWS, WIDTH // 2, 2)))
    turned_even, turned_odd = even * cos - odd * sin, odd * cos + even * sin
    if WIDTH > ROPE:
        inside = (tl.arange(0, WIDTH // 2) >= (WIDTH - ROPE) // 2)[None, :]
        turned_even, turned_odd = tl.where(inside, turned_even, even), tl.where(inside, turned_odd, odd)
    return tl.reshape(tl.join(turned_even, turned_odd), (ROWS, WIDTH))


@triton.jit
def hadamard(x, D: tl.constexpr):
    """x [ROWS, D] -> x H, of ones and minus ones in natural order: log2 D butterflies, the smallest distance first (V4 spec 2.10)."""
    for stage in tl.static_range(log2(D)):
        x = _butterfly(x, D >> (stage + 1), 1 << stage)
    return x


@triton.constexpr_function
def log2(size: int) -> int:
    assert size & (size - 1) == 0, f"not a power of two: {size}"
    return int(size).bit_length() - 1


@triton.jit
def _butterfly(x, OUTER: tl.constexpr, DISTANCE: tl.constexpr):
    """Sums and differences of the values that lie DISTANCE apart in blocks of 2 DISTANCE.

    The partner's bits come from an exclusive or over the pair, which is one shuffle where the two lie in different threads.
    """
    shape: tl.constexpr = x.shape
    pairs = tl.reshape(x, (shape[0], OUTER, 2, DISTANCE))
    bits = pairs.to(tl.int32, bitcast=True)
    partner = (bits ^ tl.xor_sum(bits, 2, keep_dims=True)).to(tl.float32, bitcast=True)
    sign = tl.where(tl.arange(0, 2) == 1, -1.0, 1.0)[None, None, :, None]
    return tl.reshape(tl.fma(pairs, tl.broadcast_to(sign, pairs.shape), partner), shape)


@triton.jit
def power_of_two(exponent):
    """2^exponent as fp32 for int32 exponents -126..127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_exponent(amax, kind: tl.constexpr):
    """ceil(log2(amax / top)), read from the bits: top is 1.75 * 2^8 (e4m3) or 1.5 * 2^2 (e2m1) (V4 spec 3.2)."""
    if kind == "e4m3":
        bits = tl.maximum(amax, 1e-4).to(tl.int32, bitcast=True)
        return (bits >> 23) - (127 + 8) + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    else:
        bits = tl.maximum(amax, 6 * 2.0**-126).to(tl.int32, bitcast=True)
        return (bits >> 23) - (127 + 2) + ((bits & 0x7FFFFF) > 0x400000).to(tl.int32)


@triton.jit
def _code_bits(a, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    """Codes of a >= 0 in a format of MANTISSA bits whose least normal exponent is LEAST, ties to even, by one float addition.

    2^(k + 23 - MANTISSA) has the spacing of the codes at exponent k; adding it rounds `a` and leaves the count of steps in the low bits.
    """
    binade = tl.maximum(a.to(tl.int32, bitcast=True) & 0x7F800000, (LEAST + 127) << 23)
    shifted = binade + ((23 - MANTISSA) << 23)
    steps = (a + shifted.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - shifted
    return (binade >> (23 - MANTISSA)) - ((LEAST + 127) << MANTISSA) + steps


@triton.jit
def e4m3_codes(x):
    """fp32, at most 448 in size -> uint8 e4m3 codes, ties to even, the sign kept."""
    if INTERPRETED:
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        return (_code_bits(tl.abs(x), 3, -6) | sign).to(tl.uint8)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def e4m3_values(codes):
    """uint8 e4m3 codes -> fp32; 0x7f and 0xff are NaN."""
    if INTERPRETED:
        bits = (codes.to(tl.int32) & 0x7F) << 20 | (codes.to(tl.int32) & 0x80) << 24
        return tl.where((codes & 0x7F) == 0x7F, float("nan"), bits.to(tl.float32, bitcast=True) * 2.0**120)
    else:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def e2m1_codes(x):
    """fp32 -> codes 0..15 as int32: clamped to 6, ties to even, the sign kept."""
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return _code_bits(tl.minimum(tl.abs(x), 6.0), 1, 0) | sign


@triton.jit
def e2m1_rounded(x):
    """fp32, at most 6 in size -> the nearest value of e2m1, ties to even codes, the sign kept; by float addition as `_code_bits`."""
    bits = x.to(tl.int32, bitcast=True)
    spacing = (tl.maximum(bits & 0x7F800000, 127 << 23) + (22 << 23)).to(tl.float32, bitcast=True)
    rounded = (tl.abs(x) + spacing) - spacing
    return (rounded.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def divide(x, scale):
    """x / scale, correctly rounded where an e2m1 tie decides, for scales of e4m3; |x| / scale beyond 8 becomes 8.

    The product with the rounded reciprocal is corrected by its exact remainder. The reciprocal after one Newton step errs by 2^-46 at most
    before its rounding, and those of 8..15, whose bits a scale has, are farther from where rounding changes.
    """
    limited = tl.minimum(tl.maximum(x, -8.0 * scale), 8.0 * scale)
    if INTERPRETED:  # has no fused multiply-add
        return tl.div_rn(limited, tl.broadcast_to(scale, x.shape))
    else:
        inverse = reciprocal(scale)
        inverse = tl.fma(tl.fma(-inverse, scale, 1.0), inverse, inverse)
        quotient = limited * inverse
        return tl.fma(tl.fma(-quotient, tl.broadcast_to(scale, x.shape), limited), tl.broadcast_to(inverse, x.shape), quotient)


@triton.jit
def _sixth(x):
    """x / 6, correctly rounded, for x whose sixth is a normal number."""
    if INTERPRETED:
        return tl.div_rn(x, tl.full(x.shape, 6.0, tl.float32))
    else:
        quotient = x * (1 / 6)
        return tl.fma(tl.fma(quotient, -6.0, x), 1 / 6, quotient)


@triton.jit
def scale_tiles(x, grid: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """x [ROWS, D] over the scales of its tiles, [ROWS, D]; stored scales and their values, [ROWS, D / tile], by the writer's rule."""
    tiles = tl.reshape(x, (ROWS, D // grid.tile, grid.tile))
    amax = tl.max(tl.abs(tiles), 2)
    if grid.scale == "e4m3":
        stored = e4m3_codes(tl.minimum(tl.maximum(_sixth(amax), 2.0**-9), 448.0))
        scale = e4m3_values(stored)
        scaled = divide(tiles, scale[:, :, None])
    else:
        kind: tl.constexpr = grid.kind
        exponent = scale_exponent(amax, kind)
        scale = power_of_two(exponent)
        stored = scale if grid.scale == "fp32" else (exponent + 127).to(tl.uint8)
        scaled = tiles * power_of_two(-exponent)[:, :, None]
    return tl.reshape(scaled, (ROWS, D)), stored, scale


@triton.jit
def e4m3_tiles(x, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """fp32 [WIDTH] -> uint8 e4m3 codes [WIDTH / TILE, TILE], and the exponents of their scales [WIDTH / TILE] (V4 spec 3.2)."""
    tiles = tl.reshape(x, (WIDTH // TILE, TILE))
    exponent = scale_exponent(tl.max(tl.abs(tiles), 1), "e4m3")
    return e4m3_codes(tiles * power_of_two(-exponent)[:, None]), exponent


@triton.jit
def quantize(x, layout: tl.constexpr, ROWS: tl.constexpr):
    """x [ROWS, D] -> codes uint8 [ROWS, D] (e2m1: [ROWS, D / 2], two per byte), stored scales [ROWS, D / tile].

    Tiles beyond `grid.values` are computed too; the caller does not store them.
    """
    D: tl.constexpr = layout.dim
    grid: tl.constexpr = layout.grid
    scaled, stored, _ = scale_tiles(x, grid, ROWS, D)
    if grid.kind == "e4m3":
        codes = e4m3_codes(scaled)
    else:
        low, high = tl.split(tl.reshape(e2m1_codes(scaled), (ROWS, D // 2, 2)))
        codes = (low | (high << 4)).to(tl.uint8)
    return codes, stored


@triton.jit
def store_records(pages, page_bytes, slots, x, layout: tl.constexpr, ENTRIES: tl.constexpr, ROWS: tl.constexpr):
    """Pack and store rows x fp32 [ROWS, layout.dim] at slots int [ROWS]; slot -1 writes nothing.

    A slot is page * ENTRIES + row; `pages` is the uint8 pool of pages of `page_bytes` bytes.
    """
    D: tl.constexpr = layout.dim
    kept = (slots >= 0)[:, None]
    slots = slots.to(tl.int32)
    page = pages + (slots // ENTRIES).to(tl.int64) * page_bytes
    data = (page + slots % ENTRIES * layout.data_bytes)[:, None]
    column = tl.arange(0, D)[None, :]
    if layout.grid is None:
        _store_plain(data, column, x, kept, layout.dtype.itemsize)
    else:
        codes, stored = quantize(x, layout, ROWS)
        if layout.grid.kind == "e4m3":
            tl.store(data + column, codes, mask=kept & (column < layout.grid.values))
        else:
            tl.store(data + tl.arange(0, D // 2)[None, :], codes, mask=kept)
        if layout.grid.values < D:
            outside = column >= layout.grid.values
            _store_plain(data + layout.grid.values, column - layout.grid.values, x, kept & outside, layout.dtype.itemsize)
            tile = tl.arange(0, D // layout.grid.tile)[None, :]
            stored = tl.where(tile < layout.grid.values // layout.grid.tile, stored, 0)
        scales = (page + ENTRIES * layout.data_bytes + slots % ENTRIES * layout.scale_bytes)[:, None]
        if layout.grid.scale == "fp32":
            scales = scales.to(tl.pointer_type(tl.float32))
        tl.store(scales + tl.arange(0, D // layout.grid.tile)[None, :], stored, mask=kept)


@triton.jit
def load_finish(norm, rope, row, D: tl.constexpr, ROPE: tl.constexpr):
    """Norm weight [1, D], cos and sin [1, D / 2] of `finish_row`; 0 for those that a kernel does without.

    Kernels call it before they use what they loaded earlier, so that all these loads are in flight together, and hold them there by
    `loads_in_flight`.
    """
    weight, cos, sin = 0.0, 0.0, 0.0
    if norm is not None:
        weight = tl.load(norm + tl.arange(0, D)[None, :])
    if ROPE > 0:
        cos, sin = load_rope(rope, row, 1, D, ROPE)
    return weight, cos, sin


@triton.jit
def finish_row(
    x, weight, cos, sin, eps, row, pages, page_bytes, slot, latent, stored,
    NORM: tl.constexpr, ROPE: tl.constexpr, HADAMARD: tl.constexpr, BF16: tl.constexpr, layout: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The way of one row x fp32 [1, D] into its record: norm with weight, RoPE, Hadamard, pack and store.

    `latent` and `stored`, where given, receive the row before RoPE and the row that was packed, at index `row`.
    """
    D: tl.constexpr = layout.dim
    here = row.to(tl.int64) * D + tl.arange(0, D)[None, :]
    if NORM:
        x = round_like(x * rms_scale(x, D, eps) * weight, BF16)
    if latent is not None:
        store_like(latent + here, x)
    if ROPE > 0:
        x = round_like(rotate(x, cos, sin, 1, D, ROPE), BF16)
    if HADAMARD:
        x = round_like(hadamard(x, D) * D**-0.5, BF16)
    if stored is not None:
        tl.store(stored + here, x)
    store_records(pages, page_bytes, slot, x, layout, ENTRIES, 1)


@triton.jit
def _store_plain(row, column, x, mask, ITEMSIZE: tl.constexpr):
    if ITEMSIZE == 4:
        tl.store(row.to(tl.pointer_type(tl.float32)) + column, x, mask=mask)
    else:
        tl.store(row.to(tl.pointer_type(tl.bfloat16)) + column, to_bf16(x), mask=mask)


@triton.jit
def load_records(pages, page_bytes, slots, layout: tl.constexpr, ENTRIES: tl.constexpr, ROWS: tl.constexpr):
    """Records at slots int [ROWS], decoded -> fp32 [ROWS, layout.dim]; slot -1 reads as zeros."""
    D: tl.constexpr = layout.dim
    kept = (slots >= 0)[:, None]
    slots = tl.maximum(slots, 0).to(tl.int32)
    page = pages + (slots // ENTRIES).to(tl.int64) * page_bytes
    data = (page + slots % ENTRIES * layout.data_bytes)[:, None]
    column = tl.arange(0, D)[None, :]
    if layout.grid is None:
        x = _load_plain(data, column, kept, layout.dtype.itemsize)
    else:
        tile = tl.arange(0, D // layout.grid.tile)[None, :]
        scales = (page + ENTRIES * layout.data_bytes + slots % ENTRIES * layout.scale_bytes)[:, None]
        if layout.grid.scale == "fp32":
            scale = tl.load(scales.to(tl.pointer_type(tl.float32)) + tile, mask=kept, other=0.0)
        else:
            byte = tl.load(scales + tile, mask=kept & (tile < layout.grid.values // layout.grid.tile), other=0)
            scale = e4m3_values(byte) if layout.grid.scale == "e4m3" else e8m0_values(byte)
        if layout.grid.kind == "e4m3":
            codes = tl.load(data + column, mask=kept & (column < layout.grid.values), other=0)
            values = e4m3_values(codes)
        else:
            pairs = tl.load(data + tl.arange(0, D // 2)[None, :], mask=kept, other=0)
            values = tl.reshape(tl.join(e2m1_values(pairs & 15), e2m1_values(pairs >> 4)), (ROWS, D))
        tiles = tl.reshape(values, (ROWS, D // layout.grid.tile, layout.grid.tile)) * scale[:, :, None]
        x = tl.reshape(tiles, (ROWS, D))
        if layout.grid.values < D:
            outside = column >= layout.grid.values
            rest = _load_plain(data + layout.grid.values, column - layout.grid.values, kept & outside, layout.dtype.itemsize)
            x = tl.where(outside, rest, x)
    return x


@triton.jit
def _load_plain(row, column, mask, ITEMSIZE: tl.constexpr):
    if ITEMSIZE == 4:
        return tl.load(row.to(tl.pointer_type(tl.float32)) + column, mask=mask, other=0.0)
    else:
        return to_fp32(tl.load(row.to(tl.pointer_type(tl.bfloat16)) + column, mask=mask, other=0.0))


@triton.jit
def e8m0_values(byte):
    """uint8 e8m0 -> fp32 2^(byte - 127); 0 is the subnormal 2^-127, 255 is NaN."""
    bits = byte.to(tl.int32) << 23
    bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, bits))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e2m1_values(codes):
    """uint8 e2m1 codes 0..15 -> fp32: the code's bits placed as an fp32 exponent and mantissa, scaled by 2^126."""
    codes = codes.to(tl.int32)
    return ((codes & 7) << 22 | (codes & 8) << 28).to(tl.float32, bitcast=True) * 2.0**126
