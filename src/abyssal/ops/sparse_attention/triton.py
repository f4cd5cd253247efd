"""Sparse attention over packed records in Triton: decoding and prefill, any layout, Hopper and later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from abyssal.kv import layouts
from abyssal.ops._aot import AotCase
from abyssal.ops._records import multiprocessors, next_power_of_2, wait_for_inputs
from abyssal.ops.sparse_attention.arguments import HEAD_DIM, PAIRS, KeyList, Splits, check, empty_keys, splits_alike, traits

LOG2_E = 1.4426950408889634
FIXED_SPLIT_BLOCKS = 4  # in batch-invariant mode: 256 keys, so that 640 keys of one sequence still run on three SMs
BLOCK_KEYS = 64
# Fitted to 30 measured launches on an H200, 11 to 229 us, with an error of 12 % at most; the unit is 3.2 us.
START_COST = 1.9  # of one program (launch, queries, result), in units of one block of keys
COMBINE_COST = 0.5  # of the second launch, in the same unit
PART_COST = 0.016  # of writing and reading one part, in the same unit
COMBINE_BLOCK = 16  # parts read at once


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Tile sizes and splits of one launch."""

    block_heads: int
    block_keys: int
    splits: Splits
    num_warps: int
    num_stages: int


class Partial(NamedTuple):
    """Where programs that see a part of a token's keys leave their results."""

    out: Tensor  # fp16 [T, count, H, 512], relative to a row's largest magnitude
    lse: Tensor  # fp32 [T, count, H], base 2
    scale: Tensor  # fp32 [T, count, H]; times `out` it is the mean over the part


def launch_config(tokens: int, heads: int, max_keys: tuple[int, int], sms: int, batch_invariant: bool = False) -> LaunchConfig:
    """Config for `tokens` queries of `heads` heads that list at most `max_keys` window and selected records, on `sms` SMs.

    Programs hold one SM each (queries and keys fill its shared memory), so the number of splits is the one with the least
    waves x blocks per program. In batch-invariant mode a split is a fixed number of blocks whatever else is in the batch.
    """
    block_heads = min(64, max(16, next_power_of_2(heads)))
    blocks = sum(-(-keys // BLOCK_KEYS) for keys in max_keys)
    if batch_invariant:
        splits = fixed_splits(blocks)
    elif splits_alike(tokens, heads, blocks):
        splits = Splits(blocks, None)
    else:
        splits = Splits(best_split(tokens * -(-heads // block_heads), blocks, sms), None)
    return LaunchConfig(block_heads, BLOCK_KEYS, splits, num_warps=8 if block_heads == 64 else 4, num_stages=2)


def fixed_splits(blocks: int) -> Splits:
    """Splits of lists of up to `blocks` blocks of keys; two at least, as what is not combined is rounded another way."""
    return Splits(max(2, -(-blocks // FIXED_SPLIT_BLOCKS)), FIXED_SPLIT_BLOCKS)


def best_split(programs: int, blocks: int, sms: int) -> int:
    """Splits of `blocks` blocks of keys for each of `programs` so that waves over `sms` take the least time."""

    def cost(count: int) -> float:
        waves = -(-programs * count // sms)
        return waves * (-(-blocks // count) + START_COST) + (COMBINE_COST + PART_COST * programs * count if count > 1 else 0)

    return min(range(1, max(blocks, 1) + 1), key=cost)


def sparse_attention(
    q: Tensor,
    window: KeyList,
    entries: KeyList | None,
    sink: Tensor,
    scale: float,
    *,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """One softmax over a window and selected entries, read from packed records (V4 spec 2.7); keys and values are the same vectors.

    Args:
        q: bf16 [T, H, 512]; T queries, of one sequence or of many.
        window: records that T queries see, with their slots [T, Kw].
        entries: selected compressed records, slots [T, K]; None in layers without compression.
        sink: fp32 [H], logit of the sink, not scaled; it only adds to the denominator. Infinities are allowed.
        scale: factor of q k.
        batch_invariant: a query's result does not depend, bit for bit, on the other queries or on the widths of the lists.
        out: bf16 or fp32 [T, H, 512] to fill; None: a new bf16 tensor.
        config: launch config in place of the chosen one.

    Returns:
        out, and the natural log-sum-exp of the scaled scores without the sink, fp32 [T, H]. A query without keys gets zeros and -inf.

    Raises:
        ConfigError, ValueError: see `arguments.check`.
    """
    check(q, window, entries, sink)
    tokens, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device) if out is None else out
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if tokens == 0:
        return out, lse
    entries = empty_keys(tokens, window) if entries is None else entries
    if config is None:
        widths = (window.slots.shape[1], entries.slots.shape[1])
        config = launch_config(tokens, heads, widths, multiprocessors(q.device), batch_invariant)
    splits = config.splits
    partial = new_partial(q, splits.count)
    head_blocks = -(-heads // config.block_heads)
    attend_kernel[(tokens * splits.count * head_blocks,)](
        q,
        q.stride(0),
        q.stride(1),
        *_key_arguments(window),
        *_key_arguments(entries),
        sink,
        scale * LOG2_E,
        out,
        out.stride(0),
        out.stride(1),
        lse,
        partial.out,
        partial.lse,
        partial.scale,
        heads,
        splits.count,
        splits.blocks or 0,
        D=HEAD_DIM,
        WINDOW=_constants(window),
        ENTRIES=_constants(entries),
        PARTIAL=splits.count > 1,
        BLOCK_H=config.block_heads,
        BLOCK_K=config.block_keys,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if splits.count > 1:
        combine(partial, splits, sink, out, lse)
    return out, lse


def new_partial(q: Tensor, count: int) -> Partial:
    """Room for partial results; with one split there are none."""
    tokens, heads, dim = q.shape if count > 1 else (0, 0, HEAD_DIM)
    out = torch.empty(tokens, count, heads, dim, dtype=torch.float16, device=q.device)
    of_rows = torch.empty(2, tokens, count, heads, dtype=torch.float32, device=q.device)
    return Partial(out, of_rows[0], of_rows[1])


def combine(partial: Partial, splits: Splits, sink: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge the parts of every query and add the sink; with splits of a fixed size the order does not depend on their number."""
    tokens, count, heads, dim = partial.out.shape
    block = COMBINE_BLOCK if splits.blocks else min(COMBINE_BLOCK, next_power_of_2(count))
    combine_kernel[(tokens * heads,)](
        partial.out, partial.lse, partial.scale, sink, out, out.stride(0), out.stride(1), lse,
        H=heads, D=dim, count=count, BLOCK=block, EARLY=out.is_cuda, num_warps=max(1, block // 4), launch_pdl=out.is_cuda,
    )  # fmt: skip


def _key_arguments(keys: KeyList) -> tuple[Tensor, int, Tensor, int, Tensor]:
    return keys.records.pages, keys.records.pages.stride(0), keys.slots, keys.slots.stride(0), keys.lengths


def _constants(keys: KeyList) -> tuple[int, ...]:
    return keys.records.entries_per_page, *traits(keys.records.layout).values()


@triton.jit(do_not_specialize=["count", "split_blocks"])
def attend_kernel(
    q,
    q_stride_t,
    q_stride_h,
    window_pages,
    window_page_stride,
    window_slots,
    window_slots_stride,
    window_lengths,
    entry_pages,
    entry_page_stride,
    entry_slots,
    entry_slots_stride,
    entry_lengths,
    sink,
    scale_log2,
    out,
    out_stride_t,
    out_stride_h,
    lse,
    partial_out,
    partial_lse,
    partial_scale,
    H,
    count,
    split_blocks,
    D: tl.constexpr,
    WINDOW: tl.constexpr,  # entries per page, then the layout's traits
    ENTRIES: tl.constexpr,
    PARTIAL: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One block of heads of one token over one split of its key blocks: those of the window first, then the selected ones."""
    head_blocks = (H + BLOCK_H - 1) // BLOCK_H
    program = tl.program_id(0)
    heads = program % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    split = program // head_blocks % count
    token = program // (head_blocks * count)

    window_length = tl.load(window_lengths + token)
    entry_length = tl.load(entry_lengths + token)
    window_blocks = (window_length + BLOCK_K - 1) // BLOCK_K
    blocks = window_blocks + (entry_length + BLOCK_K - 1) // BLOCK_K
    first = blocks * split // count
    last = blocks * (split + 1) // count
    if split_blocks > 0:
        first = split * split_blocks
        last = tl.minimum(first + split_blocks, blocks)

    d = tl.arange(0, D)
    q_rows = q + token.to(tl.int64) * q_stride_t + heads.to(tl.int64) * q_stride_h
    b_q = tl.load(q_rows[:, None] + d, mask=(heads < H)[:, None], other=0.0)  # [BLOCK_H, D]
    acc = tl.zeros([BLOCK_H, D], tl.float32)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)  # running maximum of the scores, base 2
    total = tl.zeros([BLOCK_H], tl.float32)  # running sum of exp2(score - top)

    window_row = window_slots + token.to(tl.int64) * window_slots_stride
    for block in range(first, tl.minimum(last, window_blocks)):
        b_k, seen = load_keys(window_row, block, window_length, window_pages, window_page_stride, WINDOW, D, BLOCK_K)
        acc, top, total = attend_block(acc, top, total, b_q, b_k, seen, scale_log2)
    entry_row = entry_slots + token.to(tl.int64) * entry_slots_stride
    for block in range(tl.maximum(first - window_blocks, 0), last - window_blocks):
        b_k, seen = load_keys(entry_row, block, entry_length, entry_pages, entry_page_stride, ENTRIES, D, BLOCK_K)
        acc, top, total = attend_block(acc, top, total, b_q, b_k, seen, scale_log2)

    b_lse = top + tl.log2(total)  # -inf without keys
    b_out = acc / tl.where(total > 0, total, 1.0)[:, None]
    in_range = heads < H
    if not PARTIAL:
        b_out *= sink_share(b_lse, tl.load(sink + heads, mask=in_range, other=0.0))[:, None]
        out_rows = out + token.to(tl.int64) * out_stride_t + heads.to(tl.int64) * out_stride_h
        tl.store(out_rows[:, None] + d, b_out.to(out.dtype.element_ty), mask=in_range[:, None])
        tl.store(lse + token.to(tl.int64) * H + heads, b_lse * 0.6931471805599453, mask=in_range)
    else:
        rows = (token.to(tl.int64) * count + split) * H + heads
        tl.store(partial_lse + rows, b_lse, mask=in_range)
        largest = tl.maximum(tl.max(tl.abs(b_out), axis=1), 1e-30)
        tl.store(partial_scale + rows, largest, mask=in_range)
        if last > first:  # `combine_kernel` does not read parts without keys
            tl.store(partial_out + rows[:, None] * D + d, (b_out / largest[:, None]).to(tl.float16), mask=in_range[:, None])


@triton.jit(do_not_specialize=["count"])
def combine_kernel(
    partial_out, partial_lse, partial_scale, sink, out, out_stride_t, out_stride_h, lse, H: tl.constexpr, D: tl.constexpr, count,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Weighted mean of the parts of one head of one token, BLOCK at a time: parts without keys, or beyond `count`, change no bit."""
    wait_for_inputs(EARLY)  # launched while the parts are still being written
    token, head = tl.program_id(0) // H, tl.program_id(0) % H
    first = token.to(tl.int64) * count * H + head
    n = tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    rows = partial_out + (first + n * H)[:, None] * D + d
    b_out = tl.load(rows, mask=(n < count)[:, None], other=0.0)  # before the weights are known; parts without keys hold anything
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, count, BLOCK):
        b_lse = tl.load(partial_lse + first + (start + n) * H, mask=start + n < count, other=float("-inf"))
        tops = tl.maximum(tops, b_lse)
    top = tl.max(tops, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    acc, totals = tl.zeros([D], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        parts = start + n
        weight = tl.exp2(tl.load(partial_lse + first + parts * H, mask=parts < count, other=float("-inf")) - base)
        factor = weight * tl.load(partial_scale + first + parts * H, mask=parts < count, other=0.0)
        acc += tl.sum(tl.where((weight > 0)[:, None], b_out.to(tl.float32) * factor[:, None], 0.0), axis=0)
        totals += weight
        rows += BLOCK * H * D
        b_out = tl.load(rows, mask=(parts + BLOCK < count)[:, None], other=0.0)
    total = tl.sum(totals, axis=0)
    b_lse = base + tl.log2(total)
    share = sink_share(b_lse, tl.load(sink + head)) / tl.where(total > 0, total, 1.0)
    out_row = out + token.to(tl.int64) * out_stride_t + head.to(tl.int64) * out_stride_h
    tl.store(out_row + d, (acc * share).to(out.dtype.element_ty))
    tl.store(lse + token.to(tl.int64) * H + head, b_lse * 0.6931471805599453)


@triton.jit
def sink_share(lse, sink):
    """Share of the keys in a denominator that also holds the sink: 1 / (1 + exp(sink - lse)); lse in base 2, sink natural."""
    gap = sink * 1.4426950408889634 - lse
    return tl.where(lse == float("-inf"), 0.0, 1.0 / (1.0 + tl.exp2(gap)))


@triton.jit
def attend_block(acc, top, total, b_q, b_k, seen, scale_log2):
    """Online softmax over one more block of keys: acc [H, D], top and total [H], keys [K, D], seen [K]."""
    scores = tl.dot(b_q, tl.trans(b_k)) * scale_log2  # [H, K]
    scores = tl.where(seen[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key yet: exp2(-inf - 0) = 0 rather than NaN
    weights = tl.exp2(scores - base[:, None])
    keep = tl.exp2(top - base)
    acc = acc * keep[:, None]
    acc = tl.dot(weights.to(tl.bfloat16), b_k, acc)
    return acc, new_top, total * keep + tl.sum(weights, axis=1)


@triton.jit
def load_keys(slots, block, length, pages, page_stride, LAYOUT: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr):
    """Keys of one block of a slot list: bf16 [BLOCK_K, D], zero where not seen, and seen [BLOCK_K]."""
    PER_PAGE: tl.constexpr = LAYOUT[0]
    DATA_BYTES: tl.constexpr = LAYOUT[1]
    SCALE_BYTES: tl.constexpr = LAYOUT[2]
    QUANTISED: tl.constexpr = LAYOUT[3]
    TILE: tl.constexpr = LAYOUT[4]
    FP4: tl.constexpr = LAYOUT[5]
    n = block * BLOCK_K + tl.arange(0, BLOCK_K)
    slot = tl.load(slots + n, mask=n < length, other=-1)
    seen = slot >= 0
    slot = tl.maximum(slot, 0)
    page = (slot // PER_PAGE).to(tl.int64) * page_stride
    data = pages + page + slot % PER_PAGE * DATA_BYTES
    if QUANTISED == 0:
        rows = data.to(tl.pointer_type(tl.bfloat16))
        return tl.load(rows[:, None] + tl.arange(0, D), mask=seen[:, None], other=0.0), seen

    TILES: tl.constexpr = D // TILE
    tile = tl.arange(0, TILES)
    scale = pages + page + (PER_PAGE * DATA_BYTES + slot % PER_PAGE * SCALE_BYTES)
    b_scale = tl.load(scale[:, None] + tile, mask=seen[:, None] & (tile < QUANTISED // TILE), other=0)  # [BLOCK_K, TILES]
    if FP4:
        b_code = tl.load(data[:, None] + tl.arange(0, D // 2), mask=seen[:, None], other=0)
        b_code = tl.reshape(tl.join(b_code & 15, b_code >> 4), [BLOCK_K, TILES, TILE])
        b_k = e2m1_to_float(b_code) * (e4m3_to_float(b_scale))[:, :, None]
    else:
        d = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]  # [TILES, TILE]
        b_code = tl.load(data[:, None, None] + d[None], mask=seen[:, None, None] & (d < QUANTISED)[None], other=0)
        b_k = e4m3_to_float(b_code) * e8m0_to_float(b_scale)[:, :, None]
    b_k = b_k.to(tl.bfloat16)
    if QUANTISED < D:
        rest = (data + QUANTISED).to(tl.pointer_type(tl.bfloat16))
        b_rest = tl.load(rest[:, None] + tl.arange(0, TILE), mask=seen[:, None], other=0.0)  # [BLOCK_K, TILE]
        b_k = tl.where((tile < QUANTISED // TILE)[None, :, None], b_k, b_rest[:, None, :])
    return tl.reshape(b_k, [BLOCK_K, D]), seen


@triton.jit
def e4m3_to_float(code):
    """uint8 e4m3 -> fp32, exact, through the bits: the exponent bias differs by 120. NaN codes, which no writer makes, become 480."""
    code = code.to(tl.int32)
    return (((code & 0x80) << 24) | ((code & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def e2m1_to_float(code):
    """uint8 0..15, e2m1 -> fp32, exact: the exponent bias differs by 126."""
    code = code.to(tl.int32)
    return (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def e8m0_to_float(code):
    """uint8 e8m0 -> fp32 2^(code - 127), exact; 255 is NaN."""
    bits = code.to(tl.int32) << 23
    bits = tl.where(code == 0, 0x00400000, tl.where(code == 255, 0x7FC00000, bits))
    return bits.to(tl.float32, bitcast=True)


def aot_cases() -> list[AotCase]:
    """Every layout pair at 64 heads, with splits and without; few heads; and the combining kernel."""
    pointers = dict.fromkeys(("q", "out"), "*bf16") | dict.fromkeys(("window_pages", "entry_pages"), "*u8")
    pointers |= dict.fromkeys(("window_slots", "window_lengths", "entry_slots", "entry_lengths"), "*i32")
    pointers |= dict.fromkeys(("sink", "lse", "partial_lse", "partial_scale"), "*fp32") | {"partial_out": "*fp16"}
    numbers = ("q_stride_t", "q_stride_h", "window_page_stride", "window_slots_stride", "entry_page_stride", "entry_slots_stride")
    aligned = (*pointers, *numbers, "out_stride_t", "out_stride_h", "H")
    signature = pointers | dict.fromkeys((*aligned[len(pointers) :], "count", "split_blocks"), "i32") | {"scale_log2": "fp32"}

    def attend(heads: int, pair: tuple[str, str], count: int) -> AotCase:
        records = [(64, *traits(layouts.get(name)).values()) for name in pair]
        config = launch_config(1, heads, (128, 512), 132)
        constants = {"D": HEAD_DIM, "WINDOW": records[0], "ENTRIES": records[1], "PARTIAL": count > 1}
        constants |= {"BLOCK_H": config.block_heads, "BLOCK_K": config.block_keys}
        name = f"sparse_attention {'+'.join(pair)} h{heads} splits {count}"
        reason = "the fp32 output of 64 heads takes 128 of 255 registers, codes in conversion and addresses the rest"
        return AotCase(
            name, attend_kernel, signature, constants, config.num_warps, config.num_stages, aligned, spill_reason=reason
        )

    parts = {n: t for n, t in signature.items() if n in combine_kernel.arg_names and n != "H"}
    merge = AotCase(
        "sparse_attention combine",
        combine_kernel,
        parts,
        {"H": 64, "D": HEAD_DIM, "BLOCK": COMBINE_BLOCK, "EARLY": True},
        4,
        aligned=tuple(n for n in parts if n != "count"),
    )
    cases = [attend(64, pair, count) for pair in PAIRS for count in (1, 2)]
    return [*cases, attend(4, PAIRS[1], 1), merge]
