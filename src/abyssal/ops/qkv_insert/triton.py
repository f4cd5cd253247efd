"""One launch for query norm and RoPE, KV RoPE and the window record; and the window store alone (V4 spec 2.5, V4.1 spec 3.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from abyssal.kv import layouts
from abyssal.kv.layouts import Layout
from abyssal.ops._aot import AotCase
from abyssal.ops._records import (
    early,
    finish_row,
    load_finish,
    load_rope,
    rms_scale,
    rotate,
    round_like,
    store_like,
    to_fp32,
    wait_for_inputs,
)


@dataclass(frozen=True, slots=True)
class QkvInsertConfig:
    """Both fix the order of the norm's sum."""

    heads_per_program: int  # of one token
    num_warps: int


def qkv_insert_config(tokens: int, heads: int, norm: bool) -> QkvInsertConfig:
    """With norm four heads for every batch, so that a row's bits do not depend on it: 96 % of the copy bandwidth at 4,096 tokens (H200).

    Without norm only 64 values of a head move and the launch of programs is the limit: up to 32 heads where there are many.
    """
    per_program, num_warps = (4, 4) if norm else (8, 1) if tokens <= 8 else (16, 2) if tokens <= 64 else (32, 4)
    while heads % per_program:
        per_program //= 2
    return QkvInsertConfig(per_program, num_warps)


@dataclass(frozen=True, slots=True)
class WindowStoreConfig:
    num_warps: int  # of one row; the same for every batch, since it fixes the order of the norm's sum


def window_store_config(layout: Layout, norm: bool, rope: bool) -> WindowStoreConfig:
    """A bare store is shortest in one warp. Else 4 values per lane: a row is one chain, of 2 cycles per instruction of a warp."""
    plain = not norm and not rope and layout.grid is not None and layout.grid.kind == "e4m3"
    return WindowStoreConfig(1 if plain else max(1, layout.dim // 128))


@triton.jit(do_not_specialize=["tokens"])
def qkv_insert_kernel(
    q, q_stride_t, q_stride_h, kv, kv_stride, rope, pages, page_bytes, slots, stored, eps, tokens,
    HEADS: tl.constexpr, PER_PROGRAM: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
    layout: tl.constexpr, ENTRIES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs 0..tokens - 1: kv rows. The others: PER_PROGRAM heads of one token, in place.

    Without norm only the rotated tail of a query is read and written.
    """
    D: tl.constexpr = layout.dim
    BF16: tl.constexpr = q.dtype.element_ty == tl.bfloat16
    program = tl.program_id(0)
    wait_for_inputs(EARLY)
    if program < tokens:
        slot = tl.load(slots + program + tl.arange(0, 1))
        row = to_fp32(tl.load(kv + program.to(tl.int64) * kv_stride + tl.arange(0, D)[None, :]))
        _, kv_cos, kv_sin = load_finish(None, rope, program, D, ROPE)
        finish_row(
            row, 0.0, kv_cos, kv_sin, eps, program, pages, page_bytes, slot, None, stored, False, ROPE, False, BF16, layout, ENTRIES
        )  # fmt: skip
    else:
        WIDTH: tl.constexpr = D if NORM else ROPE
        tile = program - tokens
        token = tile // (HEADS // PER_PROGRAM)
        head = tile % (HEADS // PER_PROGRAM) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)[:, None]
        here = q + token.to(tl.int64) * q_stride_t + head * q_stride_h + (D - WIDTH) + tl.arange(0, WIDTH)[None, :]
        x = to_fp32(tl.load(here))
        cos, sin = load_rope(rope, token, PER_PROGRAM, WIDTH, ROPE)
        if NORM:
            x = round_like(x * rms_scale(x, D, eps), BF16)
        store_like(here, rotate(x, cos, sin, PER_PROGRAM, WIDTH, ROPE))


@triton.jit
def window_store_kernel(
    kv, kv_stride, norm, rope, pages, page_bytes, slots, latent, stored, eps,
    ROPE: tl.constexpr, layout: tl.constexpr, ENTRIES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    wait_for_inputs(EARLY)
    slot = tl.load(slots + program + tl.arange(0, 1))
    x = to_fp32(tl.load(kv + program.to(tl.int64) * kv_stride + tl.arange(0, layout.dim)[None, :]))
    BF16: tl.constexpr = kv.dtype.element_ty == tl.bfloat16
    weight, cos, sin = load_finish(norm, rope, program, layout.dim, ROPE)
    finish_row(
        x, weight, cos, sin, eps, program, pages, page_bytes, slot, latent, stored, norm is not None, ROPE, False, BF16, layout,
        ENTRIES,
    )  # fmt: skip


def qkv_insert(
    q: Tensor,
    kv: Tensor,
    rope: Tensor,
    pages: Tensor,
    layout: Layout,
    entries_per_page: int,
    slots: Tensor,
    eps: float | None,
    *,
    stored: Tensor | None = None,
    config: QkvInsertConfig | None = None,
) -> Tensor:
    """Norm and rotate q in place, rotate kv and store it in the window pages.

    Args:
        q: bf16 or fp32 [T, H, D], contiguous in D; overwritten. With `eps` each head is first normalised without weight.
        kv: [T, D] in q's dtype, contiguous in D.
        rope: complex64 [T, rope_dim / 2] of the layer's table.
        pages: uint8 [pages, page bytes], the pool of the window's bucket.
        slots: int [T], this layer's slot of every token; -1 stores nothing.
        stored: fp32 [T, D], filled with the rows that were packed.

    Returns:
        q.
    """
    tokens, heads, dim = q.shape
    check_rows(kv, tokens, dim, layout, rope, pages, slots, stored)
    assert q.dtype == kv.dtype and q.stride(2) == 1, f"q is {q.dtype} with strides {q.stride()}, kv {kv.dtype}"
    if tokens == 0:
        return q
    config = config or qkv_insert_config(tokens, heads, eps is not None)
    assert heads % config.heads_per_program == 0, f"{heads} heads are no multiple of {config}"
    programs = tokens + tokens * heads // config.heads_per_program
    qkv_insert_kernel[(programs,)](
        q, q.stride(0), q.stride(1), kv, kv.stride(0), torch.view_as_real(rope), pages, pages.stride(0), slots, stored, eps or 0.0,
        tokens, HEADS=heads, PER_PROGRAM=config.heads_per_program, NORM=eps is not None, ROPE=2 * rope.shape[1], layout=layout,
        ENTRIES=entries_per_page, num_warps=config.num_warps, **early(programs, q),
    )  # fmt: skip
    return q


def window_store(
    kv: Tensor,
    rope: Tensor | None,
    pages: Tensor,
    layout: Layout,
    entries_per_page: int,
    slots: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    latent: Tensor | None = None,
    stored: Tensor | None = None,
    config: WindowStoreConfig | None = None,
) -> None:
    """Store rows kv [T, D]: normalised with weight `norm` fp32 [D] if given, rotated if `rope` is given. Arguments as `qkv_insert`.

    Rows of any cache kind: window records, ratio-1 latents and V4.1's index keys (V4.1 spec 3.6). `latent` [T, D], in kv's dtype,
    receives the rows before RoPE.
    """
    tokens, dim = kv.shape
    check_rows(kv, tokens, dim, layout, rope, pages, slots, stored)
    assert norm is None or norm.shape == (dim,), f"norm is {tuple(norm.shape)} for rows of {dim}"
    if tokens == 0:
        return
    config = config or window_store_config(layout, norm is not None, rope is not None)
    window_store_kernel[(tokens,)](
        kv, kv.stride(0), norm, None if rope is None else torch.view_as_real(rope), pages, pages.stride(0), slots, latent,
        stored, eps, ROPE=0 if rope is None else 2 * rope.shape[1], layout=layout, ENTRIES=entries_per_page,
        num_warps=config.num_warps, **early(tokens, kv),
    )  # fmt: skip


def check_rows(
    kv: Tensor, tokens: int, dim: int, layout: Layout, rope: Tensor | None, pages: Tensor, slots: Tensor, stored: Tensor | None
) -> None:
    assert kv.shape == (tokens, dim) and kv.stride(1) == 1, f"kv is {tuple(kv.shape)} with strides {kv.stride()}, q has {tokens}"
    assert dim == layout.dim and dim & (dim - 1) == 0, (
        f"the kernels store rows of {layout.dim} values, a power of two, not {dim}; use backend=reference"
    )
    assert pages.dtype == torch.uint8 and pages.stride(1) == 1, f"pages are {pages.dtype} with strides {pages.stride()}"
    assert slots.shape == (tokens,) and slots.is_contiguous(), f"{tuple(slots.shape)} slots for {tokens} tokens"
    assert rope is None or (len(rope) == tokens and rope.is_contiguous()), f"rope is {tuple(rope.shape)} for {tokens} tokens"
    assert stored is None or (stored.shape == kv.shape and stored.is_contiguous()), "stored must be contiguous, of kv's shape"


def aot_cases() -> list[AotCase]:
    cases = []
    rows = {
        "kv": "*bf16", "kv_stride": "i32", "rope": "*fp32", "pages": "*u8", "page_bytes": "i32", "slots": "*i64", "eps": "fp32",
    }  # fmt: skip
    aligned = ("kv", "kv_stride", "rope", "pages", "page_bytes", "slots")
    for name in ("bf16", "v4", "v41"):
        layout = layouts.get(name)
        common: dict[str, Any] = {"layout": layout, "ENTRIES": 64, "ROPE": 64, "stored": None, "EARLY": True}
        for heads, norm in ((64, True), (128, True), (64, False)):
            for per_program, num_warps in ((4, 4),) if norm else ((8, 1), (16, 2), (32, 4)):
                cases.append(
                    AotCase(
                        f"qkv_insert {name} h{heads} norm={norm} x{per_program}", qkv_insert_kernel,
                        rows | {"q": "*bf16", "q_stride_t": "i32", "q_stride_h": "i32", "tokens": "i32"},
                        common | {"HEADS": heads, "PER_PROGRAM": per_program, "NORM": norm}, num_warps=num_warps,
                        aligned=(*aligned, "q", "q_stride_t", "q_stride_h"),
                    )
                )  # fmt: skip
    for name in ("bf16", "v4", "v41", "v41_fp4", "index_bf16", "index_fp8", "index_mxfp4"):
        constants: dict[str, Any] = {"layout": layouts.get(name), "ENTRIES": 64, "latent": None, "stored": None, "EARLY": True}
        for norm, rope in ((False, 0), (False, 64), (True, 64)):
            weight: dict[str, Any] = {} if norm else {"norm": None}
            cases.append(
                AotCase(
                    f"window_store {name} norm={norm} rope={rope}", window_store_kernel,
                    rows | ({"norm": "*fp32"} if norm else {}), constants | weight | {"ROPE": rope},
                    num_warps=window_store_config(layouts.get(name), norm, rope > 0).num_warps,
                    aligned=(*aligned, "norm") if norm else aligned,
                )
            )  # fmt: skip
    return cases
