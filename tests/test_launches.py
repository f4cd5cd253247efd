"""Kernels that start before the one ahead of them ends: results do not depend on when, and a kernel that does not wait is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from abyssal.ops.argmax.triton import argmax
from abyssal.ops.hyper_connection import gluon as site_tiles
from abyssal.ops.hyper_connection import triton as sites
from abyssal.ops.index_score import gluon as scores
from abyssal.ops.index_score import gluon_blocks as block_scores
from abyssal.ops.linear import triton as products
from abyssal.ops.moe import gluon as expert_tiles
from abyssal.ops.moe import triton as experts
from abyssal.ops.norm.triton import rms_norm
from abyssal.ops.select_topk.triton import candidate_blocks, select_topk
from abyssal.ops.sparse_attention import gluon as attention
from abyssal.ops.sparse_attention.arguments import Splits
from tests.ops.test_hyper_connection import make_site
from tests.ops.test_index_score import Paged
from tests.ops.test_linear import fp8_weight, fp32_weight, plain_weight, tokens_of
from tests.ops.test_moe import REAL, random_input, random_layer
from tests.ops.test_sparse_attention import make_case
from tests.ops.test_sparse_attention import run as attend
from tests.support.late import all_at_once, assert_same_at_once, late_fill, late_poison

pytestmark = pytest.mark.gpu
THREES = 0x40  # bytes that make fp32 3.0


@triton.jit
def double_kernel(x, out, WAIT: tl.constexpr):
    at = tl.arange(0, 1024)
    if WAIT:
        gdc_wait()
    tl.store(out + at, tl.load(x + at) * 2)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("late", ["input", "output", "of the package"])
def test_a_kernel_that_does_not_wait_is_found(late: str, waits: bool) -> None:
    """In one of ten attempts, should the host be held up for longer than the GPU is; one that waits is right in each."""
    three = late_fill(torch.empty(1, device="cuda"), THREES).item()
    x, out = torch.full((1024,), three, device="cuda"), torch.empty(1024, device="cuda")
    inside = {"__name__": "abyssal.probe", "torch": torch, "x": x}
    double_kernel[(1,)](x, out, WAIT=waits, launch_pdl=True)  # compiles it
    right = []
    for _ in range(10):
        if late == "input":
            x.fill_(float("nan"))
        with all_at_once(), late_poison():
            if late == "of the package":
                out = eval("torch.empty_like(x)", inside)
            else:
                late_fill(*((x, THREES) if late == "input" else (out, 0xFF)), nanoseconds=20_000_000)
            double_kernel[(1,)](x, out, WAIT=waits, launch_pdl=True)
        right.append(torch.equal(out, torch.full_like(out, 2 * three)))
        if not right[-1]:
            break
    assert all(right) == waits


Run = Callable[[], Sequence[Tensor]]


def moe_case(name: str, tokens: int) -> Run:
    dim, inner, tile, shared = REAL[name]
    layer = expert_tiles.with_products(experts.prepare_experts(random_layer(dim, inner, 32, 6, "fp4", tile, shared)))
    x, ids = random_input(tokens, dim)
    return lambda: [experts.moe(x, ids, layer)]


def product_case(block: int, tokens: int) -> Run:
    """A norm that rounds for a product, that, and two products of its result, one with a weight of fp32."""
    first = products.prepare_linear([fp8_weight(1024, 4096, block)])
    second = products.prepare_linear([fp8_weight(768, 1024, block), plain_weight(64, 1024), fp32_weight(256, 1024)])
    x, norm = tokens_of(tokens, 4096), torch.rand(4096, device="cuda") + 0.5

    def run() -> Sequence[Tensor]:
        codes = products.takes_codes(tokens, first)
        (normed,) = rms_norm((x, norm), eps=1e-6, tile=block if codes else None)
        (y,) = products.linear(normed, first)
        results = products.linear(y, second)
        return [y, *results, argmax(results[2])]

    return run


def site_case(own: bool, tokens: int) -> Run:
    """Sites behind each other, which share what their programs hand over by."""
    arguments, weights = make_site(tokens, 5120, own=own, seed=tokens, iterations=20)
    state, prepared = site_tiles.HandoverState.allocate(tokens, 5120, "cuda"), sites.KernelWeights.prepare(weights)

    def run() -> Sequence[Tensor]:
        first = site_tiles.site(weights=prepared, state=state, **arguments)
        more = arguments | {"source": first.streams, "out": first.x, "post": first.post, "comb": first.comb}
        if not own:
            more["pre"] = first.pre
        second = site_tiles.site(weights=prepared, state=state, **more)
        return [first.streams, first.x, second.streams, second.x, second.pre, second.post, second.comb]

    return run


def attention_case(heads: int, splits: int | None) -> Run:
    case = make_case(("v4", "v4"), heads, [(1, 0), (64, 65), (128, 512), (128, 200)])
    config = None if splits is None else attention.LaunchConfig(Splits(splits, None))
    return lambda: attend(case, attention, config=config)


def choice_case(name: str, n: int, b: int, octaves: int) -> Run:
    """A layer that publishes candidate blocks, and one that chooses among them."""
    paged = Paged(name, n, b, 32, 4096, octaves=octaves)
    arrays = [tensor.cuda() for tensor in (paged.q, paged.weights, paged.pool, paged.table)]
    visible = torch.full((n, b), 4096, dtype=torch.int32, device="cuda")
    options = {"layout": paged.layout, "entries_per_page": 64}

    def run() -> Sequence[Tensor]:
        every = scores.index_score(*arrays, visible, num_entries=4096, **options)
        blocks, count = candidate_blocks(every, visible, 200, 8)
        some = block_scores.index_score_blocks(*arrays, blocks, count, block_size=8, **options)
        return [every, blocks, some, select_topk(some, count, 64, blocks=blocks)]

    return run


CASES = {
    **{f"experts-{name}-{n}": (moe_case, name, n) for name in REAL for n in (1, 8, 60, 500)},
    **{f"products-{block}-{n}": (product_case, block, n) for block in (128, 32) for n in (1, 24, 60, 300)},
    **{f"sites-{'v4' if own else 'v41'}-{n}": (site_case, own, n) for own in (True, False) for n in (1, 40, 300)},
    **{f"attention-{heads}-{splits}": (attention_case, heads, splits) for heads, splits in ((64, None), (64, 7), (4, None))},
    **{f"choice-{name}-{n}-{b}-{octaves}": (choice_case, name, n, b, octaves)
       for name in ("index_fp8", "index_mxfp4") for n, b, octaves in ((1, 1, 0), (3, 40, 0), (2, 5, 1))},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_when_kernels_start(name: str) -> None:
    make, *sizes = CASES[name]
    assert_same_at_once(make(*sizes))
