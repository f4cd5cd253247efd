# mypy: allow-untyped-defs
"""Index scores read straight from pages: one launch over all sequences, work split by the lengths that the GPU holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from abyssal.kv import layouts
from abyssal.kv.layouts import Layout
from abyssal.ops._aot import AotCase
from abyssal.ops._records import multiprocessors, next_power_of_2
from abyssal.ops.index_score._paged import GROUP, KEYS_PER_TILE, QUERY_DTYPES, check, check_blocks


@dataclass(frozen=True)
class ScoreConfig:
    """How one launch is cut."""

    programs: int  # persistent programs, each takes an equal share of all tiles
    queries: int  # consecutive queries of a sequence that share the keys of a tile
    warps: int
    stages: int  # tiles in flight per program


def score_config(layout: str, n: int, b: int, heads: int, multiprocessors: int, batch_invariant: bool = False) -> ScoreConfig:
    """Decode: a query per tile and four programs per multiprocessor, whose copies together hide the latency of memory.

    Tiles of several queries may add up heads in another order than those of one, which is what `batch_invariant` keeps to.
    """
    queries = 1 if batch_invariant else max(1, min(4, next_power_of_2(b), 128 // heads))
    return ScoreConfig(programs=multiprocessors * (4 if queries == 1 else 2), queries=queries, warps=4, stages=8)


@triton.jit
def _dots(data, scales, q_even, q_odd, LAYOUT: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr):
    """Dot products fp32 [KEYS, columns] of keys with queries [columns, DIM], without the fp32 factor [KEYS] that follows.

    data, scales: where each key's values and scales begin [KEYS].

    q_even holds all dimensions, but for e2m1 keys: a byte holds two, so that even and odd ones meet their halves of the queries.
    """
    if LAYOUT == "index_mxfp4":
        half: tl.constexpr = DIM // 2
        packed = tl.load(data[:, None] + tl.arange(0, half)[None, :])
        exponents = tl.load(scales[:, None] + tl.arange(0, half)[None, :] // 16)
        dots = tl.dot(_e2m1_times_power(packed & 15, exponents), q_even.T)
        return tl.dot(_e2m1_times_power(packed >> 4, exponents), q_odd.T, dots), tl.full([KEYS], 1.0, tl.float32)
    elif LAYOUT == "index_fp8":
        codes = tl.load(data[:, None] + tl.arange(0, DIM)[None, :])
        scale = tl.load(scales.to(tl.pointer_type(tl.float32)))
        # The fp8 tensor cores keep 13 bits of a sum; fp16 holds every e4m3 value and its products add in fp32.
        return tl.dot(codes.to(tl.float8e4nv, bitcast=True).to(tl.float16), q_even.T), scale
    else:
        rows = tl.load(data.to(tl.pointer_type(tl.bfloat16))[:, None] + tl.arange(0, DIM)[None, :])
        return tl.dot(rows, q_even.T), tl.full([KEYS], 1.0, tl.float32)


@triton.jit
def _load_queries(rows, live, LAYOUT: tl.constexpr, DIM: tl.constexpr):
    """The two operands of `_dots` from pointers [columns] to queries."""
    if LAYOUT == "index_mxfp4":
        even = rows[:, None] + 2 * tl.arange(0, DIM // 2)[None, :]
        q_even = tl.load(even, mask=live[:, None], other=0)
        q_odd = tl.load(even + 1, mask=live[:, None], other=0)
    else:
        q_even = tl.load(rows[:, None] + tl.arange(0, DIM)[None, :], mask=live[:, None], other=0)
        if LAYOUT == "index_fp8":
            q_even = q_even.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        q_odd = q_even
    return q_even, q_odd


@triton.jit
def _e2m1_times_power(code, exponent):
    """e2m1 codes times 2^(exponent - 127), as bf16: exact for results that bf16 holds. Exponent 255 (NaN) must not occur."""
    code = code.to(tl.int32)
    # The three low bits, put at the top of an fp32 mantissa and the bottom of its exponent, are the value times 2^-126.
    magnitude = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    bits = exponent.to(tl.int32)
    # Exponent byte 0 is 2^-127, below fp32's normal range.
    power = tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)
    value = magnitude * power
    return tl.where((code & 8) != 0, -value, value).to(tl.bfloat16)


@triton.jit
def _index_score_kernel(
    q,  # [n, b, HEADS, DIM]: bytes of e4m3 for index_fp8, otherwise bf16
    weights,  # fp32 [n, b, HEADS]
    pool,  # uint8, pages of page_bytes
    page_table,  # int32 [n, table_stride]
    visible,  # int32 [n, b]
    out,  # fp32 [n, b, out_stride]
    maxima,  # fp32 [n, b, maxima_stride], unless MAXIMA is False
    page_bytes,
    table_stride,
    out_stride,
    maxima_stride,
    num_rows,  # n * ceil(b / QUERIES)
    b,
    num_entries,
    LAYOUT: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,  # num_rows, rounded up to a power of two
    KEYS: tl.constexpr,
    TILES: tl.constexpr,  # per page
    GROUP: tl.constexpr,
    MAXIMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A row of work is QUERIES queries of a sequence against its pages; programs take equal shares of all rows' tiles."""
    rows = tl.arange(0, ROWS)
    blocks = tl.cdiv(b, QUERIES)
    seen = tl.zeros([ROWS], tl.int32)
    for j in tl.static_range(QUERIES):
        of_row = rows % blocks * QUERIES + j
        inside = (rows < num_rows) & (of_row < b)
        seen = tl.maximum(seen, tl.load(visible + rows // blocks * b + of_row, mask=inside, other=0))
    tiles = tl.cdiv(tl.minimum(seen, num_entries), KEYS)
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    share = total // tl.num_programs(0)
    rest = total % tl.num_programs(0)
    begin = tl.program_id(0) * share + tl.minimum(tl.program_id(0), rest)
    end = begin + share + (tl.program_id(0) < rest).to(tl.int32)
    column = tl.arange(0, QUERIES * HEADS)
    while begin < end:
        row = tl.sum((ends <= begin).to(tl.int32), 0)
        row_end = tl.sum(tl.where(rows == row, ends, 0), 0)
        row_begin = row_end - tl.sum(tl.where(rows == row, tiles, 0), 0)
        sequence = row // blocks
        query = row % blocks * QUERIES
        live = query + column // HEADS < b
        head = (sequence * b + query).to(tl.int64) * HEADS + column
        q_even, q_odd = _load_queries(q + head * DIM, live, LAYOUT, DIM)
        w = tl.load(weights + head, mask=live, other=0.0)
        first_query = sequence * b + query
        reach = tl.load(visible + first_query + tl.arange(0, QUERIES), mask=query + tl.arange(0, QUERIES) < b, other=0)
        reach = tl.minimum(reach, num_entries)
        out_row = out + (first_query + tl.arange(0, QUERIES)).to(tl.int64) * out_stride
        pages = page_table + sequence.to(tl.int64) * table_stride
        stop = tl.minimum(end, row_end)
        for tile in tl.range(begin - row_begin, stop - row_begin, num_stages=STAGES):
            page = pool + tl.load(pages + tile // TILES).to(tl.int64) * page_bytes
            key = tile % TILES * KEYS + tl.arange(0, KEYS)
            data, scales = page + key * DATA_BYTES, page + TILES * KEYS * DATA_BYTES + key * SCALE_BYTES
            dots, scale = _dots(data, scales, q_even, q_odd, LAYOUT, KEYS, DIM)  # [KEYS, QUERIES * HEADS]
            terms = tl.maximum(dots, 0.0) * w[None, :]
            scores = tl.sum(terms.reshape(KEYS, QUERIES, HEADS), 2) * scale[:, None]  # a positive scale passes the relu
            entry = tile * KEYS + tl.arange(0, KEYS)
            hidden = entry[:, None] >= reach[None, :]
            tl.store(out_row[None, :] + entry[:, None], scores, mask=~hidden)
            if MAXIMA:
                best = tl.max(tl.where(hidden, -float("inf"), scores).reshape(KEYS // GROUP, GROUP, QUERIES), 1)
                group = tile * (KEYS // GROUP) + tl.arange(0, KEYS // GROUP)
                best_row = maxima + (first_query + tl.arange(0, QUERIES)).to(tl.int64) * maxima_stride
                tl.store(best_row[None, :] + group[:, None], best, mask=group[:, None] * GROUP < reach[None, :])
        begin = stop


@triton.jit
def _index_score_blocks_kernel(
    q,  # [n * b, HEADS, DIM]
    weights,  # fp32 [n * b, HEADS]
    pool,  # uint8, pages of page_bytes
    page_table,  # int32 [n, table_stride]
    blocks,  # int32 [n * b, num_blocks]
    visible,  # int32 [n * b]: of the row's candidates
    out,  # fp32 [n * b, num_blocks * BLOCK]
    page_bytes,
    table_stride,
    b,
    num_blocks,
    LAYOUT: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    ENTRIES: tl.constexpr,  # per page
    BLOCK: tl.constexpr,
):
    """KEYS candidates of a query: the entries of KEYS / BLOCK blocks, wherever their pages are."""
    row = tl.program_id(1).to(tl.int64)
    candidate = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    seen = tl.load(visible + row)
    if tl.program_id(0) * KEYS >= seen:
        return
    live = candidate < seen
    block = tl.load(blocks + row * num_blocks + candidate // BLOCK, mask=live, other=0)
    entry = block * BLOCK + candidate % BLOCK
    page = tl.load(page_table + row // b * table_stride + entry // ENTRIES, mask=live, other=0)
    base = pool + page.to(tl.int64) * page_bytes
    column = tl.arange(0, HEADS)
    q_even, q_odd = _load_queries(q + (row * HEADS + column) * DIM, column < HEADS, LAYOUT, DIM)
    data = base + entry % ENTRIES * DATA_BYTES
    scales = base + ENTRIES * DATA_BYTES + entry % ENTRIES * SCALE_BYTES
    dots, scale = _dots(data, scales, q_even, q_odd, LAYOUT, KEYS, DIM)
    w = tl.load(weights + row * HEADS + column)
    tl.store(out + row * (num_blocks * BLOCK) + candidate, tl.sum(tl.maximum(dots, 0.0) * w[None, :], 1) * scale, mask=live)


def index_score(
    q: Tensor,
    weights: Tensor,
    pool: Tensor,
    page_table: Tensor,
    visible: Tensor,
    *,
    layout: Layout,
    entries_per_page: int,
    num_entries: int,
    out: Tensor | None = None,
    maxima: Tensor | None = None,
    batch_invariant: bool = False,
    config: ScoreConfig | None = None,
) -> Tensor:
    """Scores of every query against its sequence's paged keys (V4 spec 2.10), fp32 sums.

    Args:
        q: [n, b, Hi, 128], float8_e4m3fn for index_fp8 keys, bfloat16 otherwise (exact for queries on the e2m1 grid).
        weights: fp32 [n, b, Hi].
        pool: uint8 [pages, page bytes of the bucket].
        page_table: int32 [n, P], pages of each sequence; rows may be strided.
        visible: int32 [n, b], leading entries that each query sees, at most `num_entries`. Read on the GPU: a captured graph follows it.
        layout: of the keys.
        entries_per_page: 64 or 128.
        num_entries: capacity N of a row of scores.
        out: fp32 [n, b, N].
        maxima: fp32 [n, b, >= N / 16], receives the largest visible score of every 16 entries, as `select_topk` takes them.
        batch_invariant: scores have the bits of `index_score_blocks`, however many queries there are.

    Returns:
        fp32 [n, b, N]; entries at and beyond `visible` are not written.
    """
    check(q, weights, pool, page_table, visible, layout, entries_per_page, num_entries, maxima)
    n, b, heads, dim = q.shape
    if out is None:
        out = torch.empty(n, b, num_entries, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    assert out.is_contiguous() and out.shape == (n, b, num_entries)
    config = config or score_config(layout.name, n, b, heads, multiprocessors(q.device, interpreted=2), batch_invariant)
    rows = n * -(-b // config.queries)
    _index_score_kernel[(config.programs,)](
        q.view(torch.uint8) if q.dtype == torch.float8_e4m3fn else q,
        weights,
        pool,
        page_table,
        visible,
        out,
        maxima if maxima is not None else out,
        pool.shape[1],
        page_table.stride(0),
        out.shape[-1],
        maxima.shape[-1] if maxima is not None else 0,
        rows,
        b,
        num_entries,
        LAYOUT=layout.name,
        DATA_BYTES=layout.data_bytes,
        SCALE_BYTES=layout.scale_bytes,
        HEADS=heads,
        DIM=dim,
        QUERIES=config.queries,
        ROWS=next_power_of_2(rows),
        KEYS=KEYS_PER_TILE,
        TILES=entries_per_page // KEYS_PER_TILE,
        GROUP=GROUP,
        MAXIMA=maxima is not None,
        STAGES=config.stages,
        num_warps=config.warps,
    )
    return out


def index_score_blocks(
    q: Tensor,
    weights: Tensor,
    pool: Tensor,
    page_table: Tensor,
    blocks: Tensor,
    visible: Tensor,
    *,
    layout: Layout,
    entries_per_page: int,
    block_size: int,
    out: Tensor | None = None,
) -> Tensor:
    """Scores of candidates only (V4.1 spec 3.6), in the order of their blocks.

    Args:
        q, weights, pool, page_table, layout, entries_per_page: as of `index_score`.
        blocks: int32 [n, b, K], ascending, as `candidate_blocks` returns them.
        visible: int32 [n, b], how many entries of these blocks each query sees, from the first on.
        block_size: entries of a block, a power of two up to 64.
        out: fp32 [n, b, K * block_size].

    Returns:
        fp32 [n, b, K * block_size]; entries at and beyond `visible` are not written.
    """
    n, b, heads, dim = q.shape
    check_blocks(q, weights, pool, page_table, blocks, visible, layout, entries_per_page, block_size)
    count = blocks.shape[2] * block_size
    if out is None:
        out = torch.empty(n, b, count, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    assert out.is_contiguous() and out.shape == (n, b, count)
    _index_score_blocks_kernel[(-(-count // KEYS_PER_TILE), n * b)](
        q.view(torch.uint8) if q.dtype == torch.float8_e4m3fn else q,
        weights,
        pool,
        page_table,
        blocks,
        visible,
        out,
        pool.shape[1],
        page_table.stride(0),
        b,
        blocks.shape[2],
        LAYOUT=layout.name,
        DATA_BYTES=layout.data_bytes,
        SCALE_BYTES=layout.scale_bytes,
        HEADS=heads,
        DIM=dim,
        KEYS=KEYS_PER_TILE,
        ENTRIES=entries_per_page,
        BLOCK=block_size,
        num_warps=4,
    )
    return out


def aot_cases() -> list[AotCase]:
    """Every layout, decode and prefill."""
    pointers = {"weights": "*fp32", "pool": "*u8", "page_table": "*i32", "visible": "*i32", "out": "*fp32", "maxima": "*fp32"}
    scalars = ("page_bytes", "table_stride", "out_stride", "maxima_stride", "num_rows", "b", "num_entries")
    cases = []
    for layout in QUERY_DTYPES:
        for heads, b, rows in ((64, 1, 128), (32, 1, 1), (8, 1, 1), (64, 64, 128), (32, 64, 128)):
            config = score_config(layout, 1, b, heads, 132)
            cases.append(
                AotCase(
                    name=f"index_score[{layout},heads={heads},queries={config.queries},rows={rows}]",
                    kernel=_index_score_kernel,
                    signature={"q": "*u8" if layout == "index_fp8" else "*bf16", **pointers, **dict.fromkeys(scalars, "i32")},
                    constants={
                        "LAYOUT": layout,
                        "DATA_BYTES": layouts.get(layout).data_bytes,
                        "SCALE_BYTES": layouts.get(layout).scale_bytes,
                        "HEADS": heads,
                        "DIM": 128,
                        "QUERIES": config.queries,
                        "ROWS": rows,
                        "KEYS": KEYS_PER_TILE,
                        "TILES": 1,
                        "GROUP": GROUP,
                        "MAXIMA": True,
                        "STAGES": config.stages,
                    },
                    num_warps=config.warps,
                    aligned=("q", *pointers, "page_bytes", "out_stride", "maxima_stride"),
                )
            )
    for layout in QUERY_DTYPES:
        cases.append(
            AotCase(
                name=f"index_score_blocks[{layout},heads=32]",
                kernel=_index_score_blocks_kernel,
                signature={"q": "*u8" if layout == "index_fp8" else "*bf16"}
                | {name: kind for name, kind in pointers.items() if name != "maxima"}
                | {"blocks": "*i32", **dict.fromkeys(("page_bytes", "table_stride", "b", "num_blocks"), "i32")},
                constants={
                    "LAYOUT": layout,
                    "DATA_BYTES": layouts.get(layout).data_bytes,
                    "SCALE_BYTES": layouts.get(layout).scale_bytes,
                    "HEADS": 32,
                    "DIM": 128,
                    "KEYS": KEYS_PER_TILE,
                    "ENTRIES": 128,
                    "BLOCK": 8,
                },
                aligned=("q", "weights", "pool", "blocks", "out", "page_bytes", "num_blocks"),
            )
        )
    return cases
