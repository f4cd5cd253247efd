# mypy: allow-untyped-defs, no-check-untyped-defs, disable-error-code="assignment, misc"
"""A mixing site in one or two launches: expand of the site before, coefficients, Sinkhorn, collapse and RMSNorm of this one.

One launch, for few tokens: a program owns `block_tokens` tokens and one slice of the hidden dimension, of all four streams. The
programs of one token block form a group: each writes its part of the sums over the hidden dimension, they wait for each other, and
each finishes its own slice, whose streams it still holds; beside them some programs compute the coefficients. One hand-over is
enough, because with G[j, k] = sum_d h[j] h[k] the norm of the collapsed vector is known from the same sums: sum_d (sum_j pre[j]
h[j])^2 = sum_jk pre[j] pre[k] G[j, k]. Where `pre` comes from the site before (V4.1) the sum of squares is taken directly.

Two launches, for many tokens: the first expands and projects, the second has one program per token, that collapses and normalises,
and beside them some that compute the coefficients of a block of tokens.

Coefficients are at least as exact as fp32 weights times bf16 streams in TF32, at the same traffic: a weight is kept as the sum
of two bf16 numbers (16 bits of mantissa, TF32 has 11), and bf16 streams are exact operands of the tensor cores.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from abyssal.ops._aot import BLACKWELL, HOPPER, AotCase
from abyssal.ops._records import INTERPRETED, multiprocessors, reciprocal
from abyssal.ops.hyper_connection import MixWeights, Site

STREAMS = 4
# One token's row of partial sums: comb at 0, post at 16, pre at 20; from 24 with the site's own pre G 00, 11, 22, 33, 01, 02, 03,
# 12, 13, 23 and zeros, with a given pre sum z^2, sum x^2; in two launches sum z^2 only.
ROW = tl.constexpr(40)


@dataclass(frozen=True, slots=True)
class KernelWeights:
    """`MixWeights` as the kernel reads them."""

    fn: Tensor  # bf16 [2, 24 or 4, 4 D]: fn is the sum of both; rows in the order comb, post, pre
    base: Tensor  # fp32 [24 or 4]
    scale: Tensor  # fp32 [24 or 4]

    @classmethod
    def prepare(cls, weights: MixWeights) -> KernelWeights:
        rows = weights.fn.shape[0]
        if rows not in (24, 4):
            raise ValueError(f"a site with 4 streams has 24 or 4 coefficients, not {rows}: hc_mult other than 4 is not supported")
        order = torch.arange(rows, device=weights.fn.device)
        if rows == 24:
            order = torch.cat([order[8:], order[4:8], order[:4]])
        fn = weights.fn[order].float()
        high = fn.bfloat16()
        return cls(
            torch.stack([high, (fn - high.float()).bfloat16()]).contiguous(),
            weights.base[order].float().contiguous(),
            weights.scale[order].float().contiguous(),
        )


# Whether a site collapses with its own pre (V4) or a given one (V4.1) -> up to so many tokens: one launch, block_tokens,
# block_hidden, warps, stages, registers per thread. 1 to 8 tokens have one launch shape, so that a token's bits are the same alone.
FEW = (8, True, 8, 64, 4, 2, 255)
MANY = ((1024, False, 64, 32, 4, 3, 255), (1 << 31, False, 32, 64, 4, 2, 168))
LAUNCHES = {own_pre: (FEW, (64, True, 16, 128, 4, 2, registers), *MANY) for own_pre, registers in ((True, 200), (False, 255))}
INVARIANT = (64, 32, 4, 3, 255)  # block_tokens, block_hidden, warps, stages, registers in batch-invariant mode
INVARIANT_TOKENS = 512  # whose splits every number of tokens takes there: few steps, and few sums to read again


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """`splits * steps * block_hidden` is the hidden size; a group is `splits` programs. One launch has one step, and programs of its own
    for the coefficients."""

    block_tokens: int
    block_hidden: int
    splits: int
    steps: int
    num_warps: int
    num_stages: int
    registers: int  # per thread at most
    one_launch: bool

    @property
    def owned(self) -> int:
        """Tokens whose coefficients a program of the one launch computes: few, as one token's partial sums are many."""
        return max(1, self.block_tokens // 8)

    def programs(self, tokens: int, coefficients: bool = True) -> int:
        """Of a site with or without `coefficients`."""
        finishers = triton.cdiv(tokens, self.owned) if self.one_launch and coefficients else 0
        return triton.cdiv(tokens, self.block_tokens) * self.splits + finishers

    def resident(self, num_sms: int) -> int:
        """Programs that run at the same time on `num_sms` multiprocessors of 65536 registers."""
        return num_sms * (65536 // (32 * self.num_warps * -(-self.registers // 8) * 8))

    def partial_rows(self, tokens: int) -> int:
        """Rows of partial sums that a launch needs in the hand-over state."""
        return triton.cdiv(tokens, self.block_tokens) * self.splits * self.block_tokens


def launch_config(tokens: int, hidden: int, num_sms: int, own_pre: bool, one_launch: bool = True) -> LaunchConfig:
    """One launch where it may and all its programs run at the same time, as they wait for each other; otherwise two."""
    _check_hidden(hidden)
    for limit, single, block_tokens, block_hidden, num_warps, num_stages, registers in LAUNCHES[own_pre]:
        block_hidden = min(block_hidden, hidden & -hidden)
        if single and one_launch and tokens <= limit:
            splits = hidden // block_hidden
            config = LaunchConfig(block_tokens, block_hidden, splits, 1, num_warps, num_stages, registers, True)
            if config.programs(tokens) <= config.resident(num_sms):
                return config
        if not single and tokens <= limit:
            block_tokens = min(block_tokens, triton.next_power_of_2(tokens))
            return two_launches(tokens, hidden, num_sms, block_tokens, block_hidden, num_warps, num_stages, registers)
    raise AssertionError("the last row covers every token count")


def invariant_config(hidden: int, num_sms: int) -> LaunchConfig:
    """Two launches of one shape for every number of tokens, so that the sums of a token have one order."""
    _check_hidden(hidden)
    block_tokens, block_hidden, num_warps, num_stages, registers = INVARIANT
    return two_launches(
        INVARIANT_TOKENS, hidden, num_sms, block_tokens, min(block_hidden, hidden & -hidden), num_warps, num_stages, registers
    )


def _check_hidden(hidden: int) -> None:
    if hidden % 16:
        raise ValueError(f"hidden size {hidden} is no multiple of 16: this kernel does not support it; use the reference backend")


def two_launches(
    tokens: int, hidden: int, num_sms: int, block_tokens: int, block_hidden: int, num_warps: int, num_stages: int, registers: int
) -> LaunchConfig:
    """The splits that take the least time, where a program's start and end cost about as much as two steps; of equals the most."""
    slices = hidden // block_hidden
    configs = [
        LaunchConfig(block_tokens, block_hidden, splits, slices // splits, num_warps, num_stages, registers, False)
        for splits in range(min(slices, 64), 0, -1)
        if slices % splits == 0
    ]
    return min(configs, key=lambda c: triton.cdiv(c.programs(tokens), c.resident(num_sms)) * (c.steps + 2))


@dataclass(frozen=True, slots=True)
class HandoverState:
    """Memory through which the programs of a launch hand their sums over. One per stream of launches, allocated before capture.

    Launches that share it must run one after the other. Every launch leaves the counters as the next one needs them.
    """

    partials: Tensor  # fp32 [rows, ROW]
    arrivals: Tensor  # int32 [groups]: bit 31 flips when all programs of a group have arrived, the lower bits return to 0

    @classmethod
    def allocate(
        cls,
        max_tokens: int,
        hidden: int,
        device: torch.device | str,
        num_sms: int | None = None,
        *,
        batch_invariant: bool = False,
    ) -> HandoverState:
        """For launches of up to `max_tokens` tokens with the configs of `launch_config`, or with `invariant_config`."""
        num_sms = num_sms or sm_count(torch.device(device))
        if batch_invariant:
            return cls.of_size(invariant_config(hidden, num_sms).partial_rows(max_tokens), max_tokens, device)
        sizes = {min(size, max_tokens) for size in (*range(1, 65), *range(64, max_tokens + 32, 32))}  # beyond 64 in whole blocks
        kinds = itertools.product(sizes, (True, False), (True, False))
        rows = max(launch_config(n, hidden, num_sms, own, one).partial_rows(n) for n, own, one in kinds)
        return cls.of_size(rows, max_tokens, device)

    @classmethod
    def of_size(cls, rows: int, groups: int, device: torch.device | str) -> HandoverState:
        partials = torch.empty(rows, ROW.value, dtype=torch.float32, device=device)
        return cls(partials, torch.zeros(groups, dtype=torch.int32, device=device))


sm_count = partial(multiprocessors, interpreted=4)


@lru_cache(maxsize=8)
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER // 10


def site(
    source: Tensor,
    norm_weight: Tensor,
    weights: KernelWeights | None,
    state: HandoverState,
    *,
    out: Tensor | None = None,
    post: Tensor | None = None,
    comb: Tensor | None = None,
    pre: Tensor | None = None,
    with_mean: bool = False,
    rms_eps: float,
    eps: float,
    iterations: int,
    batch_invariant: bool = False,
    config: LaunchConfig | None = None,
) -> Site:
    """`abyssal.ops.hyper_connection.site` for bf16 streams; norm_weight fp32 [D].

    At most as many launches may run at the same time (on several streams, each with a state of its own) as fit on the device
    together.

    Args:
        batch_invariant: a token's results do not depend, bit for bit, on the number of tokens.
    """
    tokens, hidden = source.shape[0], source.shape[-1]
    check(source, norm_weight, weights, out, post, comb, pre)
    expanded = out is not None
    streams = source if source.dim() == 3 and not expanded else source.new_empty(tokens, STREAMS, hidden)
    x = source.new_empty(tokens, hidden)
    rows = 0 if weights is None else weights.fn.shape[1]
    new_pre = source.new_empty(tokens, STREAMS, dtype=torch.float32) if rows else None
    new_post = source.new_empty(tokens, STREAMS, dtype=torch.float32) if rows == 24 else None
    new_comb = source.new_empty(tokens, STREAMS, STREAMS, dtype=torch.float32) if rows == 24 else None
    mean = torch.empty_like(x) if with_mean else None
    result = Site(streams, x, new_pre, new_post, new_comb, mean)
    if tokens == 0:
        return result
    if config is None:
        sms = sm_count(source.device)
        if batch_invariant:
            config = invariant_config(hidden, sms)
        else:
            config = launch_config(tokens, hidden, sms, pre is None, one_launch=source.is_cuda)
    rows_needed, groups = config.partial_rows(tokens), triton.cdiv(tokens, config.block_tokens)
    if state.partials.shape[0] < rows_needed or state.arrivals.shape[0] < groups:
        raise ValueError(
            f"the hand-over state holds {state.partials.shape[0]} rows and {state.arrivals.shape[0]} counters, {tokens} tokens need "
            f"{rows_needed} and {groups}: allocate it for more tokens"
        )
    kind = "expand" if expanded else "streams" if source.dim() == 3 else "embedding"
    fn, base, scale = (weights.fn, weights.base, weights.scale) if weights is not None else (None, None, None)
    launch = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "maxnreg": config.registers,
        "launch_pdl": config.one_launch,
    }
    constants = {
        "D": hidden,
        "SOURCE": kind,
        "ROWS": rows,
        "OWN_PRE": pre is None,
        "MEAN": with_mean,
    }
    if config.one_launch:
        site_constants = _site_constants(config, rows)
        hyper_connection_site[(config.programs(tokens, rows > 0),)](
            source, out, post, comb, pre, fn, base, scale, norm_weight, streams, x, new_pre, new_post, new_comb, mean,
            state.partials, state.arrivals, tokens, rms_eps, eps,
            ITERATIONS=iterations, **constants, **site_constants, **launch,
        )  # fmt: skip
        return result
    hyper_connection_project[(config.programs(tokens),)](
        source, out, post, comb, pre, fn, streams, x, mean, state.partials, tokens,
        HOLD=is_hopper(source.device), **constants, **_project_constants(config), **launch,
    )  # fmt: skip
    finish = _finish_constants(config, hidden)
    coefficient_programs = triton.cdiv(tokens, finish["OWNED"]) if rows else 0
    hyper_connection_finish[(coefficient_programs + tokens,)](
        state.partials, base, scale, norm_weight, streams, x, new_pre, new_post, new_comb, tokens, rms_eps, eps,
        D=hidden, ROWS=rows, OWN_PRE=pre is None, ITERATIONS=iterations, **finish, num_warps=4,
    )  # fmt: skip
    return result


def expand(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`abyssal.ops.hyper_connection.expand` for bf16: where the streams change before the next site (V4.1's Engram)."""
    tokens, hidden = streams.shape[0], streams.shape[-1]
    check(streams, None, None, out, post, comb, None)
    new = torch.empty_like(streams)
    if tokens == 0:
        return new
    block_hidden = 1024 if tokens * hidden > 1 << 20 else 256  # few tokens: more programs
    while hidden % block_hidden:
        block_hidden //= 2
    hyper_connection_expand[(tokens * (hidden // block_hidden),)](
        streams, out, post, comb, new, D=hidden, BD=block_hidden, num_warps=max(1, block_hidden // 256)
    )
    return new


def _site_constants(config: LaunchConfig, rows: int) -> dict[str, Any]:
    return {
        "BT": config.block_tokens,
        "BD": config.block_hidden,
        "SPLITS": config.splits,
        "FINISHERS": config.block_tokens // config.owned if rows else 0,
        "OWNED": config.owned,
        "CHUNK": max(1, min(triton.next_power_of_2(config.splits), 32 * config.num_warps // config.block_tokens)),
        "CHUNK_OWNED": min(triton.next_power_of_2(config.splits), 64),
    }


def _project_constants(config: LaunchConfig) -> dict[str, Any]:
    names = {"BT": config.block_tokens, "BD": config.block_hidden, "SPLITS": config.splits, "STEPS": config.steps}
    return names | {"STAGES": config.num_stages}


def _finish_constants(config: LaunchConfig, hidden: int) -> dict[str, Any]:
    chunk = triton.next_power_of_2(config.splits)
    return {
        "BT": config.block_tokens,
        "BD": min(1024, triton.next_power_of_2(hidden)),
        "SPLITS": config.splits,
        "OWNED": max(1, min(config.block_tokens, 32, 128 // chunk)),  # so that reading the partial sums takes little time
        "CHUNK": chunk,
        "CHUNK_OWNED": chunk,
    }


def check(
    source: Tensor,
    norm_weight: Tensor | None,
    weights: KernelWeights | None,
    out: Tensor | None,
    post: Tensor | None,
    comb: Tensor | None,
    pre: Tensor | None,
) -> None:
    """Shapes, dtypes and memory order, each with the value found."""
    tokens, hidden = source.shape[0], source.shape[-1]
    if source.dtype != torch.bfloat16:
        raise TypeError(f"streams are {source.dtype}: this kernel takes torch.bfloat16; use the reference backend")
    if source.dim() == 3 and source.shape[1] != STREAMS:
        raise ValueError(f"{source.shape[1]} streams: this kernel takes hc_mult 4; use the reference backend")
    if source.dim() not in (2, 3) or (out is not None and source.dim() != 3):
        raise ValueError(f"source has shape {tuple(source.shape)}: streams are [T, 4, D], embeddings [T, D] and are not expanded")
    if (out is None) != (post is None) or (out is None) != (comb is None):
        raise ValueError("out, post and comb are given together")
    if norm_weight is not None and weights is None and pre is None:
        raise ValueError("without weights the site collapses with a given `pre`")
    if weights is not None and weights.fn.shape[2] != STREAMS * hidden:
        raise ValueError(f"fn is for streams of {weights.fn.shape[2] // STREAMS} values, these have {hidden}")
    shapes = [
        ("source", source, tuple(source.shape), torch.bfloat16),
        ("norm_weight", norm_weight, (hidden,), torch.float32),
        ("out", out, (tokens, hidden), torch.bfloat16),
        ("post", post, (tokens, STREAMS), torch.float32),
        ("comb", comb, (tokens, STREAMS, STREAMS), torch.float32),
        ("pre", pre, (tokens, STREAMS), torch.float32),
    ]
    for name, tensor, shape, dtype in shapes:
        if tensor is not None:
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}")
            if not tensor.is_contiguous():
                raise ValueError(f"{name} has strides {tensor.stride()}: it must be contiguous")


@triton.jit
def _load4(base, at, stride, mask):
    """Four tensors `stride` apart."""
    values = ()
    for k in tl.static_range(4):
        values = values + (tl.load(base + at + k * stride, mask=mask, other=None if mask is None else 0.0),)
    return values


@triton.jit
def _store_each(to, values, stride, mask):
    for k in tl.static_range(len(values)):
        tl.store(to + k * stride, values[k], mask=mask)


@triton.jit
def _begin():
    """Let the next kernel start beside this one, up to its own `_wait_for_inputs`."""
    if not INTERPRETED:
        gdc_launch_dependents()


@triton.jit
def _wait_for_inputs():
    """Until the kernel before has finished: what precedes reads parameters only."""
    if not INTERPRETED:
        gdc_wait()


@triton.jit
def _load_old(post, comb, local, mask):
    """post and comb, row-major, of the site before: 4 and 16 tensors [BT, 1]."""
    values = ()
    for j in tl.static_range(4):
        values = values + _load4(comb, local[:, None] * 16 + 4 * j, 1, mask)
    return _load4(post, local[:, None] * 4, 1, mask), values


@triton.jit
def _add_squares(n, total):
    f = _floats(n)
    for k in tl.static_range(4):
        total = tl.fma(f[k], f[k], total)
    return total


@triton.jit
def _mean(n):
    f = _floats(n)
    return (((f[0] + f[1]) + (f[2] + f[3])) * 0.25).to(tl.bfloat16)


@triton.jit
def _floats(values):
    floats = ()
    for k in tl.static_range(len(values)):
        floats = floats + (_float(values[k]),)
    return floats


@triton.jit
def _float(value):
    """bf16 -> fp32, one instruction each: the compiler takes two for the upper one of a pair."""
    if INTERPRETED or value.numel < 1024:
        return value.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [value], dtype=tl.float32, is_pure=True, pack=2
        )


@triton.jit
def _expand(h, out, post, comb, HOLD: tl.constexpr):
    """new[k] = post[k] out + sum_j comb[j, k] h[j], rounded to bf16 (V4 spec 2.3)."""
    h, out, new = _floats(h), _float(out), ()
    for k in tl.static_range(4):
        value = post[k] * out
        for j in tl.static_range(4):
            value = tl.fma(comb[4 * j + k], h[j], value)
        new = new + (_hold(value.to(tl.bfloat16), HOLD),)
    return new


@triton.jit
def _hold(value, HOLD: tl.constexpr):
    """The value, in a form that the compiler does not compute again in every layout in which it is used, as it does on Hopper."""
    if HOLD and not INTERPRETED:
        value = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=tl.bfloat16, is_pure=False, pack=2)
    return value


@triton.jit
def _collapse(n, pre):
    """x = sum_k pre[k] n[k], rounded to bf16 (V4 spec 2.2, step 8)."""
    n = _floats(n)
    x = pre[0] * n[0]
    for k in tl.static_range(1, 4):
        x = tl.fma(pre[k], n[k], x)
    return x.to(tl.bfloat16)


@triton.jit
def _load_weights(fn, d, D: tl.constexpr, ROWS: tl.constexpr):
    """Four tensors [BD, 64], one per stream: the high halves of the weights in columns 0 to 31, the low ones in 32 to 63."""
    column = tl.arange(0, 64) % 32
    first: tl.constexpr = 24 - ROWS
    has = (column >= first) & (column < 24)
    row = tl.arange(0, 64) // 32 * ROWS + column - first
    return _load4(fn, row[None, :] * (4 * D) + d[:, None], D, has[None, :])


@triton.jit
def _project(products, n, weights):
    """products [BT, 64] += n fn^T over the columns at hand."""
    for k in tl.static_range(4):
        products = tl.dot(n[k], weights[k], products)
    return products


@triton.jit
def _project_apart(n, high, low):
    """The same of few tokens, high and low halves added, [BT, 32]: a sum per stream, because a chain of small products waits on itself."""
    products = ()
    none = tl.zeros((n[0].shape[0], 32), tl.float32)
    for k in tl.static_range(4):
        products = products + (tl.dot(n[k], low[k], tl.dot(n[k], high[k], none)),)
    return (products[0] + products[1]) + (products[2] + products[3])


@triton.jit
def _add_halves(products):
    return tl.sum(tl.reshape(products, (products.shape[0], 2, 32)), axis=1)


@triton.jit
def _gram(n):
    """G 00, 11, 22, 33, 01, 02, 03, 12, 13, 23 and zeros: [BT, 16]."""
    n = _floats(n)
    g00, g11, g22, g33 = (
        tl.sum(n[0] * n[0], axis=1),
        tl.sum(n[1] * n[1], axis=1),
        tl.sum(n[2] * n[2], axis=1),
        tl.sum(n[3] * n[3], axis=1),
    )
    g01, g02, g03 = tl.sum(n[0] * n[1], axis=1), tl.sum(n[0] * n[2], axis=1), tl.sum(n[0] * n[3], axis=1)
    g12, g13, g23 = tl.sum(n[1] * n[2], axis=1), tl.sum(n[1] * n[3], axis=1), tl.sum(n[2] * n[3], axis=1)
    zero = tl.zeros_like(g00)
    return _pack((g00, g11, g22, g33, g01, g02, g03, g12, g13, g23, zero, zero, zero, zero, zero, zero))


@triton.jit
def _pack(values):
    """2^k tensors [n] -> [n, 2^k]."""
    if len(values) == 1:
        return tl.reshape(values[0], (values[0].shape[0], values[0].numel // values[0].shape[0]))
    else:
        half: tl.constexpr = len(values) // 2
        joined = ()
        for i in tl.static_range(half):
            joined = joined + (tl.join(values[i], values[i + half]),)
        return _pack(joined)


@triton.jit
def _unpack(tiles, COLUMNS: tl.constexpr):
    """Tiles [n, COLUMNS] -> their columns, tensors [n], those of one tile far apart: column 0 of each, column 1 of each, ..."""
    if COLUMNS == 1:
        columns = ()
        for i in tl.static_range(len(tiles)):
            columns = columns + (tl.reshape(tiles[i], (tiles[i].shape[0],)),)
        return columns
    else:
        even, odd = (), ()
        for i in tl.static_range(len(tiles)):
            first, second = tl.split(tl.reshape(tiles[i], (tiles[i].shape[0], COLUMNS // 2, 2)))
            even, odd = even + (first,), odd + (second,)
        return _unpack(even + odd, COLUMNS // 2)


@triton.jit
def _reciprocals(values):
    results = ()
    for k in tl.static_range(4):
        results = results + (reciprocal(values[k]),)
    return results


@triton.jit
def _sigmoid(value):
    return reciprocal(1.0 + tl.exp(-value))


@triton.jit
def _denominators(m, stride: tl.constexpr, step: tl.constexpr, factors, before, eps):
    """Per row (stride 4, step 1) or column (stride 1, step 4) of m: its sum under the other side's factors + eps times its own."""
    results = ()
    for i in tl.static_range(4):
        low = m[i * stride] * factors[0] + m[i * stride + step] * factors[1]
        high = m[i * stride + 2 * step] * factors[2] + m[i * stride + 3 * step] * factors[3]
        results = results + (low + high + eps * before[i],)
    return results


@triton.jit
def _sinkhorn(logits, eps, ITERATIONS: tl.constexpr):
    """16 logits or more, [n] each, row-major -> comb, 16 x [n] (V4 spec 2.2, step 7).

    Every matrix on the way is r[j] m[j, k] c[k]; only the factors change. Dividing row j by its sum + eps turns 1 / r[j] into
    sum_k m[j, k] c[k] + eps / r[j]: the denominators R = 1 / r and C = 1 / c are what is carried.
    """
    m = ()
    for j in tl.static_range(4):
        a, b, c, d = logits[4 * j], logits[4 * j + 1], logits[4 * j + 2], logits[4 * j + 3]
        top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
        a, b, c, d = tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top)
        total = (a + b) + (c + d)
        m = m + (a / total + eps, b / total + eps, c / total + eps, d / total + eps)
    one = m[0] * 0.0 + 1.0
    R = (one, one, one, one)
    r = R
    C = _denominators(m, 1, 4, r, R, eps)
    c = _reciprocals(C)
    for _ in range(ITERATIONS - 1):
        R = _denominators(m, 4, 1, c, R, eps)
        r = _reciprocals(R)
        C = _denominators(m, 1, 4, r, C, eps)
        c = _reciprocals(C)
    comb = ()
    for j in tl.static_range(4):
        for k in tl.static_range(4):
            comb = comb + (r[j] * m[4 * j + k] * c[k],)
    return comb


@triton.jit
def _gather(
    partials, first_row, rows, first_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Partial sums of a group, of tokens first_row.. and columns first_column.., added up as far as one thread holds them."""
    element = tl.arange(0, ROWS * COLUMNS)
    row = first_row + element // COLUMNS
    at = row * ROW + first_column + element % COLUMNS
    tile = tl.zeros((CHUNK, ROWS * COLUMNS), tl.float32)
    for first in tl.static_range(0, SPLITS, CHUNK):
        split = first + tl.arange(0, CHUNK)
        mask = (row < rows)[None, :] & (split < SPLITS)[:, None]
        tile += tl.load(partials + split[:, None] * (STRIDE * ROW) + at[None, :], mask=mask, other=0.0)
    return tile


@triton.jit
def _sum_gathered(tile, COLUMNS: tl.constexpr):
    """Sum over the programs of a group, always in the same order -> [rows, COLUMNS]."""
    return tl.reshape(tl.sum(tile, axis=0), (tile.shape[1] // COLUMNS, COLUMNS))


@triton.jit
def _load_affine(base, scale, ROWS: tl.constexpr):
    """Base and scale of every coefficient, [32] each, to be loaded before they are needed."""
    column = tl.arange(0, 32)
    first: tl.constexpr = 24 - ROWS
    has = (column >= first) & (column < 24)
    return tl.load(base + column - first, mask=has, other=0.0), tl.load(scale + column - first, mask=has, other=0.0)


@triton.jit
def _load_pre_affine(base, scale, ROWS: tl.constexpr):
    """The same of pre alone, four scalars each."""
    return _load4(base + (ROWS - 4), 0, 1, None), _load4(scale + (ROWS - 4), 0, 1, None)


@triton.jit
def _read_counter(counter):
    if INTERPRETED:
        return tl.load(counter)
    else:
        return tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _arrive(counter, is_first, programs):
    """One of `programs` arrivals, after all that this program has stored; returns the counter as it was.

    The first program adds 2^31 - (programs - 1), every other 1: together they flip bit 31 and leave the rest as it was, so that
    nobody resets the counter and launches with other splits can follow.
    """
    tl.debug_barrier()
    return tl.atomic_add(counter, tl.where(is_first, 2147483647 - (programs - 2), 1), sem="acq_rel", scope="gpu")


@triton.jit
def _await(counter, before):
    """Wait until all have arrived since the counter was `before`. What they stored is visible after.

    The interpreter runs programs one after the other and does not wait: there the same launch again finds what the first one left.
    """
    if not INTERPRETED:
        now = before
        while (before ^ now) >= 0:
            now = _read_counter(counter)
    tl.debug_barrier()


@triton.jit
def _coefficients(
    sums, base, scale, pre_out, post_out, comb_out, first_row, rows, rms_eps, eps,
    D: tl.constexpr, ROWS: tl.constexpr, SQUARES: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """sums [OWNED, 32] of the tokens that this program owns -> their pre, post and comb (V4 spec 2.2, steps 2 to 7)."""
    column = tl.arange(0, 32)
    local = first_row + tl.arange(0, sums.shape[0])
    valid = local < rows
    squares = tl.sum(tl.where(((column >= 24) & (column < 24 + SQUARES))[None, :], sums, 0.0), axis=1)
    rstd = tl.rsqrt(squares / (4 * D) + rms_eps)
    raw = sums * rstd[:, None] * scale[None, :] + base[None, :]
    gates = _sigmoid(raw)
    at = local[:, None] * 4 + column[None, :]
    tl.store(pre_out + at - 20, gates + eps, mask=valid[:, None] & ((column >= 20) & (column < 24))[None, :])
    if ROWS == 24:
        tl.store(post_out + at - 16, gates * 2.0, mask=valid[:, None] & ((column >= 16) & (column < 20))[None, :])
        _store_each(comb_out + local * 16, _sinkhorn(_unpack((raw,), 32), eps, ITERATIONS), 1, valid)


@triton.jit
def _own_gates(row, base, scale, rms_eps, eps, D: tl.constexpr, BT: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr):
    """One token's rows of partial sums -> its pre, 4 scalars."""
    split, pre = tl.arange(0, CHUNK), ()
    column = _load4(row + 20, split * (BT * ROW), 1, split < SPLITS)
    squares = tl.sum(tl.load(row + 24 + split * (BT * ROW), mask=split < SPLITS, other=0.0))
    rstd = tl.rsqrt(squares / (4 * D) + rms_eps)
    for k in tl.static_range(4):
        pre = pre + (_sigmoid(tl.sum(column[k]) * rstd * scale[k] + base[k]) + eps,)
    return pre


@triton.jit
def _own_pre(v, base, scale, rms_eps, eps, D: tl.constexpr):
    """Sums, [BT] each: raw pre, then G -> pre and 1 / rms of the collapsed vector, [BT] each."""
    pre = ()
    rstd = tl.rsqrt(((v[4] + v[5]) + (v[6] + v[7])) / (4 * D) + rms_eps)
    for k in tl.static_range(4):
        pre = pre + (_sigmoid(v[k] * rstd * scale[k] + base[k]) + eps,)
    mixed = pre[0] * (pre[1] * v[8] + pre[2] * v[9] + pre[3] * v[10])
    mixed += pre[1] * (pre[2] * v[11] + pre[3] * v[12]) + pre[2] * pre[3] * v[13]
    squares = 2.0 * mixed
    for k in tl.static_range(4):
        squares += pre[k] * pre[k] * v[4 + k]
    return pre, tl.rsqrt(tl.maximum(squares, 0.0) / D + rms_eps)


@triton.jit
def hyper_connection_expand(source, out, post, comb, streams, D: tl.constexpr, BD: tl.constexpr):
    """Grid: tokens x slices of the hidden dimension."""
    token = (tl.program_id(0) // (D // BD)).to(tl.int64)
    d = tl.program_id(0) % (D // BD) * BD + tl.arange(0, BD)
    h = _load4(source, token * (4 * D) + d, D, None)
    old_post, old_comb = _load4(post, token * 4, 1, None), ()
    for j in tl.static_range(4):
        old_comb = old_comb + _load4(comb, token * 16 + 4 * j, 1, None)
    new = _expand(h, tl.load(out + token * D + d), old_post, old_comb, False)
    _store_each(streams + token * (4 * D) + d, new, D, None)


@triton.jit(do_not_specialize=["tokens"])
def hyper_connection_site(
    source, out, post, comb, pre, fn, base, scale, norm_weight,
    streams, x, pre_out, post_out, comb_out, mean, partials, arrivals, tokens, rms_eps, eps,
    D: tl.constexpr, SOURCE: tl.constexpr, ROWS: tl.constexpr, OWN_PRE: tl.constexpr, MEAN: tl.constexpr,
    ITERATIONS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr, FINISHERS: tl.constexpr,
    OWNED: tl.constexpr, CHUNK: tl.constexpr, CHUNK_OWNED: tl.constexpr,
):  # fmt: skip
    """The whole site. Grid: token blocks x (SPLITS slices + FINISHERS of OWNED tokens' coefficients), a block's programs side by side;
    the last block has finishers only for tokens that there are.

    Sinkhorn takes as long as all that a slice does after the hand-over: in programs of its own it runs beside that.
    """
    _begin()
    PROGRAMS: tl.constexpr = SPLITS + FINISHERS
    group, program = tl.program_id(0) // PROGRAMS, tl.program_id(0) % PROGRAMS
    start = (group * BT).to(tl.int64)  # offsets within the block stay 32 bit
    left = tokens - group * BT
    arriving = SPLITS + (tl.cdiv(tl.minimum(left, BT), OWNED) if FINISHERS > 0 else 0)
    partials += start * (SPLITS * ROW)
    if program < SPLITS:
        _slice(
            source, out, post, comb, pre, fn, base, scale, norm_weight, streams, x, mean, partials, arrivals + group,
            start, left, program, arriving, rms_eps, eps, D, SOURCE, ROWS, OWN_PRE, MEAN, BT, BD, SPLITS, PROGRAMS > 1, CHUNK,
        )  # fmt: skip
    elif FINISHERS > 0:
        all_base, all_scale = _load_affine(base, scale, ROWS)
        _wait_for_inputs()
        if ROWS == 24:
            post_out += start * 4
            comb_out += start * 16
        first_owned, rows = (program - SPLITS) * OWNED, tl.minimum(left, BT)
        _await(arrivals + group, _arrive(arrivals + group, False, arriving))
        sums = _sum_gathered(_gather(partials, first_owned, rows, 0, OWNED, 32, BT, SPLITS, CHUNK_OWNED), 32)
        squares: tl.constexpr = 4 if OWN_PRE else 1
        _coefficients(
            sums, all_base, all_scale, pre_out + start * 4, post_out, comb_out, first_owned, rows, rms_eps, eps,
            D, ROWS, squares, ITERATIONS,
        )  # fmt: skip


@triton.jit
def _slice(
    source, out, post, comb, pre, fn, base, scale, norm_weight, streams, x, mean, partials, arrivals,
    start, left, split, arriving, rms_eps, eps,
    D: tl.constexpr, SOURCE: tl.constexpr, ROWS: tl.constexpr, OWN_PRE: tl.constexpr, MEAN: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr, WAIT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Streams, partial sums and x of one slice of a token block."""
    local = tl.arange(0, BT)
    valid = local < left
    mask = valid[:, None]
    d = split * BD + tl.arange(0, BD)
    at = local[:, None] * (4 * D) + d[None, :]
    x_at = local[:, None] * D + d[None, :]
    x += start * D

    coefficient = tl.arange(0, 32)
    first: tl.constexpr = 24 - ROWS
    if ROWS > 0:
        has = ((coefficient >= first) & (coefficient < 24))[None, :]
        weight_at = (coefficient - first)[None, :] * (4 * D) + d[:, None]
        high = _load4(fn, weight_at, D, has)
        low = _load4(fn + ROWS * 4 * D, weight_at, D, has)
        pre_base, pre_scale = _load_pre_affine(base, scale, ROWS)
    norm = tl.load(norm_weight + d)[None, :]
    _wait_for_inputs()
    if SOURCE == "embedding":
        e = tl.load(source + start * D + x_at, mask=mask, other=0.0)
        n = (e, e, e, e)
    else:
        n = _load4(source + start * (4 * D), at, D, mask)
    if SOURCE == "expand":
        old_post, old_comb = _load_old(post + start * 4, comb + start * 16, local, mask)
        n = _expand(n, tl.load(out + start * D + x_at, mask=mask, other=0.0), old_post, old_comb, True)
    row = partials + (split * BT + local)[:, None] * ROW
    if ROWS > 0:
        tl.store(row + coefficient[None, :], _project_apart(n, high, low), mask=mask & (coefficient < 24)[None, :])
    if OWN_PRE:
        sums = _gram(n)
    else:
        y = _collapse(n, _load4(pre + start * 4, local[:, None] * 4, 1, mask))
        f = y.to(tl.float32)
        sums = tl.join(tl.sum(_add_squares(n, tl.zeros((BT, BD), tl.float32)), axis=1), tl.sum(f * f, axis=1))
    tl.store(row + 24 + tl.arange(0, 16 if OWN_PRE else 2)[None, :], sums, mask=mask)
    before = 0
    if WAIT:
        before = _arrive(arrivals, split == 0, arriving)
    if SOURCE != "streams":  # after the arrival, which waits for all that was stored before it
        _store_each(streams + start * (4 * D) + at, n, D, mask)
    if MEAN:
        tl.store(mean + start * D + x_at, _mean(n), mask=mask)
    if WAIT:
        _await(arrivals, before)
    else:
        tl.debug_barrier()
    if OWN_PRE:
        totals = _sum_gathered(_gather(partials, 0, left, 20, BT, 16, BT, SPLITS, CHUNK), 16)
        own, factor = _own_pre(_unpack((totals,), 16), pre_base, pre_scale, rms_eps, eps, D)
        y = _collapse(n, (own[0][:, None], own[1][:, None], own[2][:, None], own[3][:, None]))
    else:
        totals = tl.sum(_gather(partials, 0, left, 25, BT, 1, BT, SPLITS, CHUNK), axis=0)
        factor = tl.rsqrt(totals / D + rms_eps)
    normed = y.to(tl.float32) * factor[:, None] * norm
    tl.store(x + x_at, normed.to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def hyper_connection_project(
    source, out, post, comb, pre, fn, streams, x, mean, partials, tokens,
    D: tl.constexpr, SOURCE: tl.constexpr, ROWS: tl.constexpr, OWN_PRE: tl.constexpr, MEAN: tl.constexpr,
    HOLD: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """First of two launches: streams, partial sums of the raw coefficients and of z^2, and with a given pre the collapsed vector.

    Grid: token blocks x SPLITS, the programs of a token block side by side; STEPS slices of BD columns each.
    """
    group, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    start = (group * BT).to(tl.int64)
    local = tl.arange(0, BT)
    valid = local < tokens - group * BT
    mask = valid[:, None]
    source += start * (D if SOURCE == "embedding" else 4 * D)
    streams += start * (4 * D)
    x += start * D
    partials += start * (SPLITS * ROW)
    if SOURCE == "expand":
        out += start * D
        old_post, old_comb = _load_old(post + start * 4, comb + start * 16, local, mask)
    if not OWN_PRE:
        given = _load4(pre + start * 4, local[:, None] * 4, 1, mask)
    products = tl.zeros((BT, 64), tl.float32)
    squares = tl.zeros((BT, BD), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        d = (step * SPLITS + split) * BD + tl.arange(0, BD)  # programs side by side read side by side
        at = local[:, None] * (4 * D) + d[None, :]
        x_at = local[:, None] * D + d[None, :]
        if SOURCE == "embedding":
            e = tl.load(source + x_at, mask=mask, other=0.0)
            n = (e, e, e, e)
        else:
            n = _load4(source, at, D, mask)
        if SOURCE == "expand":
            n = _expand(n, tl.load(out + x_at, mask=mask, other=0.0), old_post, old_comb, HOLD)
        if SOURCE != "streams":
            _store_each(streams + at, n, D, mask)
        if ROWS > 0:
            products = _project(products, n, _load_weights(fn, d, D, ROWS))
            squares = _add_squares(n, squares)
        if not OWN_PRE:
            tl.store(x + x_at, _collapse(n, given), mask=mask)
        if MEAN:
            tl.store(mean + start * D + x_at, _mean(n), mask=mask)
    if ROWS > 0:
        row = partials + (split * BT + local) * ROW
        coefficient = tl.arange(0, 32)
        tl.store(row[:, None] + coefficient[None, :], _add_halves(products), mask=mask & (coefficient < 24)[None, :])
        tl.store(row + 24, tl.sum(squares, axis=1), mask=valid)


@triton.jit
def _finish_token(
    partials, base, scale, norm_weight, streams, x, token, rms_eps, eps,
    D: tl.constexpr, ROWS: tl.constexpr, OWN_PRE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Collapse, or with a given pre what the first launch collapsed, and norm (V4 spec 2.2, step 8)."""
    steps: tl.constexpr = (D + BD - 1) // BD
    d, y, norm = tl.arange(0, BD), (), ()
    x += token.to(tl.int64) * D
    for step in tl.static_range(steps):
        norm = norm + (tl.load(norm_weight + step * BD + d, mask=step * BD + d < D, other=0.0),)
    if OWN_PRE:
        streams += token.to(tl.int64) * (4 * D)
        n = ()
        for step in tl.static_range(steps):
            n = n + (_load4(streams, step * BD + d, D, step * BD + d < D),)
        row = ((token // BT * BT).to(tl.int64) * SPLITS + token % BT) * ROW
        pre_base, pre_scale = _load_pre_affine(base, scale, ROWS)
        pre = _own_gates(partials + row, pre_base, pre_scale, rms_eps, eps, D, BT, SPLITS, CHUNK)
        for step in tl.static_range(steps):
            y = y + (_float(_collapse(n[step], pre)),)
    else:
        for step in tl.static_range(steps):
            y = y + (tl.load(x + step * BD + d, mask=step * BD + d < D, other=0.0).to(tl.float32),)
    squares = tl.zeros((BD,), tl.float32)
    for step in tl.static_range(steps):
        squares = tl.fma(y[step], y[step], squares)
    factor = tl.rsqrt(tl.sum(squares) / D + rms_eps)
    for step in tl.static_range(steps):
        tl.store(x + step * BD + d, (y[step] * factor * norm[step]).to(tl.bfloat16), mask=step * BD + d < D)


@triton.jit(do_not_specialize=["tokens"])
def hyper_connection_finish(
    partials, base, scale, norm_weight, streams, x, pre_out, post_out, comb_out, tokens, rms_eps, eps,
    D: tl.constexpr, ROWS: tl.constexpr, OWN_PRE: tl.constexpr, ITERATIONS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    SPLITS: tl.constexpr, OWNED: tl.constexpr, CHUNK: tl.constexpr, CHUNK_OWNED: tl.constexpr,
):  # fmt: skip
    """Second of two launches. Grid: with weights one program per OWNED tokens for their coefficients; then one per token for its x.

    The last tokens come first: the L2 still holds their streams.
    """
    blocks = tl.cdiv(tokens, OWNED) if ROWS > 0 else 0
    token = tokens - 1 - (tl.program_id(0) - blocks)
    if token < tokens:
        _finish_token(
            partials, base, scale, norm_weight, streams, x, token, rms_eps, eps, D, ROWS, OWN_PRE, BT, BD, SPLITS, CHUNK
        )
    elif ROWS > 0:
        first = tl.program_id(0) * OWNED
        block = first // BT * BT
        start = block.to(tl.int64)
        if ROWS == 24:
            post_out += start * 4
            comb_out += start * 16
        rows = tl.minimum(tokens - block, BT)
        all_base, all_scale = _load_affine(base, scale, ROWS)
        tile = _gather(partials + start * (SPLITS * ROW), first - block, rows, 0, OWNED, 32, BT, SPLITS, CHUNK_OWNED)
        _coefficients(
            _sum_gathered(tile, 32), all_base, all_scale, pre_out + start * 4, post_out, comb_out,
            first - block, rows, rms_eps, eps, D, ROWS, 1, ITERATIONS,
        )  # fmt: skip


SPILLS = {
    "project expand 24 given pre D5120 T512": "at most 32 bytes, once per program, where the sums of all columns are live",
}


def aot_cases() -> list[AotCase]:
    """Both orders at the released hidden sizes and every launch shape; the other kinds of site at one size."""
    types = {name: "*fp32" for name in ("post", "comb", "pre", "base", "scale", "norm_weight", "partials")}
    types |= {name: "*fp32" for name in ("pre_out", "post_out", "comb_out")}
    types |= {name: "*bf16" for name in ("source", "out", "fn", "streams", "x", "mean")}
    types |= {"arrivals": "*i32", "tokens": "i32", "rms_eps": "fp32", "eps": "fp32"}
    both, hopper = (HOPPER, BLACKWELL), (HOPPER,)
    sites = [("expand", 24, own, 5120, tokens, both) for own in (True, False) for tokens in (8, 512)]
    sites += [("expand", 24, True, hidden, tokens, hopper) for hidden, tokens in ((4096, 512), (7168, 8), (7168, 512))]
    sites += [("expand", 24, own, 5120, tokens, hopper) for own in (True, False) for tokens in (64, 4096)]
    forms = [("embedding", 24, True), ("embedding", 24, False), ("streams", 24, False), ("expand", 4, True), ("expand", 0, False)]
    sites += [(*form, 4096, tokens, hopper) for form in forms for tokens in (8, 300)]
    cases = []
    for source, rows, own, hidden, tokens, archs in sites:
        config = launch_config(tokens, hidden, 132, own)
        constants = {"D": hidden, "SOURCE": source, "ROWS": rows, "OWN_PRE": own, "MEAN": not own, "ITERATIONS": 20}
        kernels = [(hyper_connection_site, _site_constants(config, rows), config.num_warps)]
        if not config.one_launch:
            kernels = [(hyper_connection_project, _project_constants(config), config.num_warps)]
            kernels += [(hyper_connection_finish, _finish_constants(config, hidden), 4)]
        for (function, more, num_warps), arch in itertools.product(kernels, archs):
            absent: set[str] = {"pre", "mean"} if own else set()
            absent |= {"out", "post", "comb"} if source != "expand" else set()
            absent |= {"post_out", "comb_out"} if rows < 24 else set()
            absent |= {"fn", "base", "scale", "pre_out"} if rows == 0 else set()
            names = set(function.arg_names)
            values = constants | more | {"HOLD": arch == HOPPER} | dict.fromkeys(absent)
            case = f"{function.__name__[17:]} {source} {rows} {'own' if own else 'given'} pre D{hidden} T{tokens}"
            cases.append(
                AotCase(
                    case,
                    function,
                    {name: kind for name, kind in types.items() if name in names - absent},
                    {name: value for name, value in values.items() if name in names},
                    num_warps=num_warps,
                    num_stages=config.num_stages,
                    aligned=tuple(name for name, kind in types.items() if name in names - absent and kind.startswith("*")),
                    archs=(arch,),
                    spill_reason=SPILLS.get(case),
                )
            )
    pointers = ("source", "out", "post", "comb", "streams")
    for block in (256, 1024):
        signature = {name: types[name] for name in pointers}
        constants = {"D": 5120, "BD": block}
        cases.append(AotCase(f"expand {block}", hyper_connection_expand, signature, constants, block // 256, aligned=pointers))
    return cases
