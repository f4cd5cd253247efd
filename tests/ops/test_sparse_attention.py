"""Sparse attention: the reference against a per-query loop in double precision, kernels against the reference."""

import itertools
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from abyssal.errors import ConfigError
from abyssal.kv import codec, layouts
from abyssal.ops.sparse_attention import gluon as wgmma
from abyssal.ops.sparse_attention import sparse_attention
from abyssal.ops.sparse_attention import triton as portable
from abyssal.ops.sparse_attention.arguments import PAIRS, KeyList, Records, Splits, check_layouts, check_slots

DIM = 24
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 512**-0.5
ENTRIES = 8  # records per page


def slow(q, keys, sink, scale):
    """q [H, D], keys [K, D] double -> [H, D]: softmax over keys with one more term exp(sink) in the denominator."""
    scores = q @ keys.T * scale
    largest = torch.maximum(scores.amax(-1), sink) if scores.shape[1] else sink
    weights = (scores - largest[:, None]).exp()
    return (weights @ keys) / (weights.sum(-1) + (sink - largest).exp())[:, None]


@pytest.mark.parametrize(("n", "b", "heads"), [(1, 1, 1), (4, 1, 4), (1, 7, 4), (2, 3, 64)])
@pytest.mark.parametrize("kind", ["none", "shared", "chosen"])
def test_matches_loop(n, b, heads, kind):
    torch.manual_seed(0)
    q, sink = torch.randn(n, b, heads, DIM) * 3, torch.randn(heads) * 4
    window, window_mask = torch.randn(n, 9, DIM), torch.rand(n, b, 9) < 0.6
    window_mask[..., 0] = True
    entries = {"none": None, "shared": torch.randn(n, 5, DIM), "chosen": torch.randn(n, b, 6, DIM)}[kind]
    mask = None if entries is None else torch.rand(n, b, entries.shape[-2]) < 0.5
    out = sparse_attention(q, window, ~window_mask, entries, None if mask is None else ~mask, sink, 0.3)
    for i, j in itertools.product(range(n), range(b)):
        keys = [window[i][window_mask[i, j]]]
        if entries is not None:
            keys.append((entries[i] if kind == "shared" else entries[i, j])[mask[i, j]])
        expected = slow(q[i, j].double(), torch.cat(keys).double(), sink.double(), 0.3)
        torch.testing.assert_close(out[i, j].double(), expected, rtol=1e-4, atol=1e-5)


def test_masked_rows_have_no_weight_at_all():
    torch.manual_seed(0)
    q, window, sink = torch.randn(1, 2, 4, DIM), torch.randn(1, 8, DIM), torch.zeros(4)
    mask = torch.zeros(1, 2, 8, dtype=torch.bool)
    mask[..., 2] = True
    out = sparse_attention(q, window, ~mask, None, None, sink, 1.0)
    window[:, 3:] = 1e30
    assert torch.equal(out, sparse_attention(q, window, ~mask, None, None, sink, 1.0))


def test_no_mask_is_one_that_hides_nothing():
    q, window, entries, sink = torch.randn(2, 1, 4, DIM), torch.randn(2, 8, DIM), torch.randn(2, 5, DIM), torch.randn(4)
    window_mask, mask = torch.zeros(2, 1, 8, dtype=torch.bool), torch.zeros(2, 1, 5, dtype=torch.bool)
    out = sparse_attention(q, window, None, entries, None, sink, 1.0)
    assert torch.equal(out, sparse_attention(q, window, window_mask, entries, mask, sink, 1.0))


def test_sink_takes_weight_and_extreme_logits_stay_finite():
    q, window = torch.full((1, 1, 2, DIM), 1e3), torch.full((1, 1, DIM), 1e3)
    mask = torch.ones(1, 1, 1, dtype=torch.bool)
    out = sparse_attention(q, window, ~mask, None, None, torch.tensor([-1e30, 3e38]), 1.0)
    assert torch.equal(out[0, 0, 0], window[0, 0]) and out[0, 0, 1].abs().max() == 0


def test_order_of_entries_does_not_matter():
    torch.manual_seed(0)
    q, window, sink = torch.randn(1, 1, 4, DIM), torch.randn(1, 3, DIM), torch.randn(4)
    ones = torch.ones(1, 1, 3, dtype=torch.bool)
    entries, perm = torch.randn(1, 1, 10, DIM), torch.randperm(10)
    seen = torch.rand(1, 1, 10) < 0.7
    a = sparse_attention(q, window, ~ones, entries, ~seen, sink, 0.2)
    b = sparse_attention(q, window, ~ones, entries[:, :, perm], ~seen[..., perm], sink, 0.2)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# Kernels


@dataclass
class Case:
    """Random queries and records, and which of them each query lists."""

    q: Tensor
    window: KeyList
    entries: KeyList
    sink: Tensor
    values: tuple[Tensor, Tensor]  # decoded records of both kinds, fp32 [records, 512]

    def reference(self) -> tuple[Tensor, Tensor]:
        """The fp32 reference on decoded records -> out fp32 [T, H, 512], lse fp32 [T, H]."""
        rows, hidden = [], []
        for keys, values in zip((self.window, self.entries), self.values, strict=True):
            slots = keys.slots.long()
            rows.append(values[slots.clamp(min=0)])  # [T, K, 512]
            hidden.append((torch.arange(slots.shape[1], device=DEVICE) >= keys.lengths[:, None]) | (slots < 0))
        q = self.q.float()
        out = sparse_attention(q[:, None], rows[0], hidden[0][:, None], rows[1], hidden[1][:, None], self.sink, SCALE)[:, 0]
        none = torch.cat(hidden, 1).all(1)
        scores = torch.einsum("thd,tkd->thk", q, torch.cat(rows, 1)) * SCALE
        lse = scores.masked_fill(torch.cat(hidden, 1)[:, None], -torch.inf).logsumexp(-1)
        return out.masked_fill(none[:, None, None], 0), lse

    def permuted(self, order: Tensor) -> "Case":
        def keys(k: KeyList) -> KeyList:
            return KeyList(k.records, k.slots[order].contiguous(), k.lengths[order])

        return replace(self, q=self.q[order].contiguous(), window=keys(self.window), entries=keys(self.entries))


def make_keys(layout: str, lengths: list[int], width: int, holes: float, generator: torch.Generator) -> tuple[KeyList, Tensor]:
    """Lists into a pool whose unlisted records, scales and padding are all NaN; some pages are further apart than they are long."""
    pages = -(-max(width, 1) * 2 // ENTRIES)
    x = torch.randn(pages, ENTRIES, 512, generator=generator) * torch.rand(pages, ENTRIES, 1, generator=generator) * 2
    record = layouts.get(layout)
    packed = codec.pack_pages(record, x)
    values = codec.unpack_pages(record, packed, ENTRIES).flatten(0, 1)
    slots = torch.randint(pages * ENTRIES, (len(lengths), width), generator=generator, dtype=torch.int32)  # with duplicates
    slots[torch.rand(slots.shape, generator=generator) < holes] = -1
    listed = torch.zeros(pages * ENTRIES, dtype=torch.bool)
    for row, length in zip(slots, lengths, strict=True):
        listed[row[:length][row[:length] >= 0].long()] = True
        row[length:] = 2**31 - 1  # beyond the length: never followed
    pool = torch.full((pages, record.page_bytes(ENTRIES) + 576 * 16), 0xFF, dtype=torch.uint8)
    for slot in listed.nonzero()[:, 0].tolist():
        page, row = divmod(slot, ENTRIES)
        for first, size in (
            (record.data_offset(row, ENTRIES), record.data_bytes),
            (record.scale_offset(row, ENTRIES), record.scale_bytes),
        ):
            pool[page, first : first + size] = packed[page, first : first + size]
    keys = KeyList(
        Records(pool.to(DEVICE), record, ENTRIES), slots.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    )
    return keys._replace(slots=keys.slots.masked_fill(keys.slots == 2**31 - 1, -7)), torch.where(listed[:, None], values, 0).to(
        DEVICE
    )


def make_case(
    pair: tuple[str, str], heads: int, lengths: list[tuple[int, int]], *, holes: float = 0.1, spread: float = 3.0, seed: int = 0
) -> Case:
    """`lengths`: listed window and selected records per token."""
    generator = torch.Generator().manual_seed(seed)
    widths = [max(column) + 3 for column in zip(*lengths, strict=True)]
    built = [
        make_keys(name, list(n), w, holes, generator) for name, n, w in zip(pair, zip(*lengths, strict=True), widths, strict=True)
    ]
    q = (torch.randn(len(lengths), heads, 512, generator=generator) * spread).bfloat16().to(DEVICE)
    sink = torch.randn(heads, generator=generator).to(DEVICE)
    return Case(q, built[0][0], built[1][0], sink, (built[0][1], built[1][1]))


def assert_close(out: Tensor, lse: Tensor, case: Case) -> None:
    """Weights are rounded to bf16 for the product with the values, the result once more: each about 0.0012 of a row's norm."""
    expected, expected_lse = case.reference()
    error = (out.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-20)
    assert error.max() < 5e-3 and error.median() < 2.5e-3, (error.max(), error.median())
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-4)


def run(case: Case, kernels=portable, **options) -> tuple[Tensor, Tensor]:
    return kernels.sparse_attention(case.q, case.window, case.entries, case.sink, SCALE, **options)


hopper = pytest.mark.gpu
EDGES = [(0, 0), (1, 0), (0, 1), (63, 64), (64, 65), (128, 63), (65, 128)]
REAL = [*EDGES, (128, 512), (128, 640), (128, 8192), (127, 8191)]


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
@pytest.mark.parametrize("heads", [4])
def test_kernel_matches_reference_on_decoded_records(pair, heads):
    case = make_case(pair, heads, EDGES)
    assert_close(*run(case), case)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_splits_give_the_same_result(count):
    case = make_case(("v4", "v4"), 4, [(128, 200), (1, 0), (0, 0), (0, 129)], seed=count)
    config = portable.launch_config(4, 4, (128, 200), 132)
    assert_close(*run(case, config=replace(config, splits=Splits(count, None))), case)


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
@pytest.mark.parametrize("heads", [1, 64, 128])
@pytest.mark.parametrize("invariant", [False, True])
def test_kernel_at_real_sizes(pair, heads, invariant):
    case = make_case(pair, heads, REAL)
    assert_close(*run(case, batch_invariant=invariant), case)


# Hopper


@hopper
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
@pytest.mark.parametrize("heads", [1, 8, 64, 65, 128])
@pytest.mark.parametrize("count", [1, 2, 7, 10])
def test_hopper_kernel_matches_reference(pair, heads, count):
    case = make_case(pair, heads, [*EDGES, (128, 512)], seed=heads + count)
    assert_close(*run(case, wgmma, config=wgmma.LaunchConfig(Splits(count, None))), case)


@hopper
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
@pytest.mark.parametrize("heads", [64, 128])
def test_hopper_kernel_at_real_sizes(pair, heads):
    case = make_case(pair, heads, REAL, seed=heads)
    assert_close(*run(case, wgmma), case)


@hopper
@pytest.mark.parametrize("count", [1, 3])
def test_hopper_kernel_with_scores_far_apart(count):
    """Maxima that rise by much from block to block, by little, and not at all."""
    case = make_case(("v4", "v4"), 64, [*EDGES, (128, 512)], spread=20.0)
    assert_close(*run(case, wgmma, config=wgmma.LaunchConfig(Splits(count, None))), case)


@hopper
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
@pytest.mark.parametrize("block_keys", [64, 32])
@pytest.mark.parametrize(("heads", "count"), [(64, 1), (64, 3), (128, 1)])
def test_hopper_programs_take_many_tiles(pair, block_keys, heads, count):
    """More tiles than multiprocessors, of full lists, short ones and none: what a tile leaves in a program changes no other tile."""
    case = make_case(pair, heads, [(128, 200), (0, 0), (128, 200), (65, 3), (0, 70), (128, 200), (1, 0)] * 44)
    case.window = case.window._replace(slots=case.window.slots[:, :128])
    case.entries = case.entries._replace(slots=case.entries.slots[:, :200])
    assert_close(*run(case, wgmma, config=wgmma.LaunchConfig(Splits(count, None), block_keys)), case)


@hopper
@pytest.mark.parametrize("heads", [24, 64, 65])
@pytest.mark.parametrize("count", [1, 3])
def test_hopper_kernel_writes_its_rows_only(heads, count):
    case = make_case(("v4", "v4"), heads, [(128, 200), (0, 0), (65, 3)] * 60)
    room = torch.full((len(case.q), heads + 2, 640), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    out = room[:, 1:-1, 64:576]
    _, lse = run(case, wgmma, config=wgmma.LaunchConfig(Splits(count, None)), out=out)
    assert_close(out, lse, case)
    out.fill_(torch.nan)
    assert room.isnan().all()


@hopper
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_hopper_kernel_is_batch_invariant(pair):
    case = make_case(pair, 64, REAL)
    out, lse = run(case, wgmma, batch_invariant=True)
    assert_close(out, lse, case)
    for order in (torch.randperm(len(REAL)), torch.tensor([3]), torch.tensor([8, 7, 1, 1, 0] * 30)):
        for _ in range(3):
            again, again_lse = run(case.permuted(order.to(DEVICE)), wgmma, batch_invariant=True)
            assert torch.equal(again.cpu(), out.cpu()[order]) and torch.equal(again_lse.cpu(), lse.cpu()[order])


@hopper
def test_hopper_kernel_reads_strided_queries_and_pages_of_two_sizes(monkeypatch):
    lengths = [(128, 200), (0, 0), (65, 3), (0, 70), (1, 0)] * 60
    case = make_case(("v41", "v41_fp4"), 64, lengths)
    monkeypatch.setattr(sys.modules[__name__], "ENTRIES", 32)
    other = make_case(("v41", "v41_fp4"), 64, lengths, seed=1)
    case = replace(case, entries=other.entries, values=(case.values[0], other.values[1]))
    for shape, turned in (((len(lengths), 66, 1536), False), ((66, len(lengths), 1536), True)):
        q = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)
        q = (q.transpose(0, 1) if turned else q)[:, 1:65, 512:1024]
        q.copy_(case.q)
        assert_close(*run(replace(case, q=q), wgmma, config=wgmma.LaunchConfig(Splits(1, None))), case)


@hopper
def test_hopper_kernel_edges():
    case = make_case(("v4", "v4"), 64, [(0, 0), (70, 9), (3, 130)], holes=1.0)
    for splits in (1, 3):
        out, lse = run(case, wgmma, config=wgmma.LaunchConfig(Splits(splits, None)))
        assert out.abs().max() == 0 and (lse == -torch.inf).all()
    case = make_case(("v41", "v41_fp4"), 4, [(70, 9), (0, 0), (3, 130)])
    case.sink = torch.tensor([-torch.inf, torch.inf, 0.0, 1e30], device=DEVICE)
    for splits in (1, 3):
        out, lse = run(case, wgmma, config=wgmma.LaunchConfig(Splits(splits, None)))
        assert out[:, [1, 3]].abs().max() == 0 and out[1].abs().max() == 0
        assert_close(out[:, :1], lse[:, :1], replace(case, q=case.q[:, :1], sink=case.sink[:1]))
    case = make_case(("v41", "v41"), 4, [(70, 9), (3, 130)], spread=300.0)
    out, lse = run(case, wgmma)
    assert out.isfinite().all() and lse.isfinite().all()


@hopper
@pytest.mark.parametrize("count", [1, 5])
def test_launches_in_a_row_wait_for_each_other(count):
    """Launches may begin before the kernel ahead of them ends: queries that it writes, and results that it reads, stay in order."""
    case = make_case(("v4", "v4"), 64, [(128, 512)] * 20)
    config = wgmma.LaunchConfig(Splits(count, None))
    queries = [case.q * (1 + i) for i in range(8)]
    alone = []
    for q in queries:
        alone.append(run(replace(case, q=q), wgmma, config=config)[0].clone())
        torch.cuda.synchronize()
    q, out = torch.empty_like(case.q), torch.empty_like(case.q)
    for _ in range(20):
        results = []
        for query in queries:
            q.copy_(query)
            run(replace(case, q=q), wgmma, config=config, out=out)
            results.append(out.clone())
        assert all(torch.equal(a, b) for a, b in zip(results, alone, strict=True))


def test_fp32_output_and_strided_arguments():
    case = make_case(("v41", "v41_fp4"), 4, [(20, 5), (7, 33)])
    q = torch.full((2, 9, 3 * 512), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    q[:, 1:5, 512:1024] = case.q
    out = torch.full((2, 6, 512), torch.nan, device=DEVICE)
    run(replace(case, q=q[:, 1:5, 512:1024]), out=out[:, 1:5])
    expected, _ = case.reference()
    error = (out[:, 1:5] - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 4e-3 and out[:, [0, 5]].isnan().all()


def test_causal_window_as_overlapping_rows():
    """Prefill: query i of a chunk lists slots i .. i + W - 1 of its sequence through a view, without a copy."""
    case = make_case(("v4", "v4"), 4, [(16, 4)] * 6, holes=0)
    row = case.window.slots[:, :4].flatten()[:21]
    case.window = case.window._replace(slots=row.unfold(0, 16, 1))
    assert case.window.slots.stride() == (1, 1)
    assert_close(*run(case), case)


def test_no_entries_is_an_empty_list():
    case = make_case(("v41", "v41_fp4"), 4, [(20, 0), (65, 0)])
    out, lse = portable.sparse_attention(case.q, case.window, None, case.sink, SCALE)
    assert_close(out, lse, case)


def test_rows_without_keys_give_zeros_and_minus_infinity():
    case = make_case(("v4", "v4"), 4, [(0, 0), (70, 9), (3, 130)], holes=1.0)
    for splits in (1, 3):
        config = replace(portable.launch_config(3, 4, (70, 130), 132), splits=Splits(splits, None))
        out, lse = run(case, config=config)
        assert out.abs().max() == 0 and (lse == -torch.inf).all()


@pytest.mark.parametrize("splits", [1, 3])
def test_sinks_of_both_infinities(splits):
    case = make_case(("v4", "v4"), 4, [(70, 9), (0, 0), (3, 130)])
    case.sink = torch.tensor([-torch.inf, torch.inf, 0.0, 1e30], device=DEVICE)
    out, lse = run(case, config=replace(portable.launch_config(3, 4, (70, 130), 132), splits=Splits(splits, None)))
    assert out[:, [1, 3]].abs().max() == 0 and out[1].abs().max() == 0
    without = replace(case, q=case.q[:, :1], sink=case.sink[:1])
    assert_close(out[:, :1], lse[:, :1], without)


def test_large_scores_stay_finite():
    case = make_case(("v41", "v41"), 4, [(70, 9), (3, 130)], spread=300.0)
    out, lse = run(case)
    assert out.isfinite().all() and lse.isfinite().all()
    torch.testing.assert_close(lse, case.reference()[1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kernels", [portable, pytest.param(wgmma, marks=hopper)], ids=["triton", "gluon"])
def test_every_code_and_scale_is_read_exactly(kernels):
    """One listed record at a time is the output itself: all codes but NaN, and scales far beyond a writer's."""
    codes = torch.arange(512) % 256
    codes[(codes & 0x7F) == 0x7F] = 0
    for name, scales in (("v4", [10, 20, 100, 120, 127, 134, 135, 240]), ("v41", [10, 20, 100, 120, 127, 134, 135, 240] * 2)):
        record = layouts.get(name)
        data = codes.byte()[None]
        if name == "v4":
            data = torch.cat([data[:, :448], torch.randn(64).bfloat16().view(torch.uint8)[None]], dim=1)
        check_single(kernels, record, data, torch.tensor(scales, dtype=torch.uint8)[None])
    scales = (torch.arange(32) * 4 + 1) % 0x7F
    check_single(kernels, layouts.get("v41_fp4"), (torch.arange(256) % 256).byte()[None], scales.byte()[None])


def check_single(kernels, record, data, scales):
    page = torch.cat([data.flatten(), scales.flatten()])
    page = torch.nn.functional.pad(page, (0, -len(page) % 16))[None].to(DEVICE)
    slots, lengths = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), torch.ones(1, dtype=torch.int32, device=DEVICE)
    window = layouts.get("v41" if record.name == "v41_fp4" else record.name)
    none = KeyList(Records(torch.empty(1, 1024, dtype=torch.uint8, device=DEVICE), window, 1), slots[:, :0], lengths - 1)
    q = torch.zeros(1, 4, 512, dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty(1, 4, 512, device=DEVICE)
    sink = torch.full((4,), -torch.inf, device=DEVICE)
    kernels.sparse_attention(q, none, KeyList(Records(page, record, 1), slots, lengths), sink, SCALE, out=out)
    expected = codec.decode(record, data, scales).bfloat16().float()
    assert torch.equal(out[0, 0].cpu(), expected[0])
    kernels.sparse_attention(
        q, none, KeyList(Records(page, record, 1), slots, lengths), sink, SCALE, batch_invariant=True, out=out
    )
    error = (out[0, 0].cpu() - expected[0]).abs().max() / expected.abs().max()
    assert error < 2**-11, error  # results that are combined are fp16 relative to their row's largest


def test_batch_invariant_mode_is_bit_equal_in_any_batch():
    case = make_case(("v4", "v4"), 4, [(128, 200), (20, 64), (0, 0), (65, 257), (128, 1)])
    out, lse = run(case, batch_invariant=True)
    for order in (torch.tensor([3, 1, 4, 0, 2]), torch.tensor([3])):
        again, again_lse = run(case.permuted(order.to(DEVICE)), batch_invariant=True)
        assert torch.equal(again.cpu(), out.cpu()[order]) and torch.equal(again_lse.cpu(), lse.cpu()[order])
    pad = torch.full((5, 700), -1, dtype=torch.int32, device=DEVICE)
    wider = replace(case, entries=case.entries._replace(slots=torch.cat([case.entries.slots, pad], 1)))
    again, again_lse = run(wider, batch_invariant=True)
    assert torch.equal(again, out) and torch.equal(again_lse, lse)


@pytest.mark.parametrize("kernel", [portable, pytest.param(wgmma, marks=hopper)], ids=["triton", "gluon"])
def test_batch_invariant_mode_is_bit_equal_beside_longer_lists(kernel):
    """Lists that fit one split, alone and where another query's are longer: both are combined."""
    case = make_case(("v4", "v4"), 4, [(128, 128), (20, 64), (3, 0)])
    out, lse = run(case, kernel, batch_invariant=True)
    assert_close(out, lse, case)
    for width in (1, 200, 1500):
        pad = torch.full((3, width), -1, dtype=torch.int32, device=DEVICE)
        wider = replace(case, entries=case.entries._replace(slots=torch.cat([case.entries.slots, pad], 1)))
        again, again_lse = run(wider, kernel, batch_invariant=True)
        assert torch.equal(again, out) and torch.equal(again_lse, lse), width


def test_empty_step():
    case = make_case(("v4", "v4"), 4, [(3, 4)]).permuted(torch.tensor([], dtype=torch.int64, device=DEVICE))
    out, lse = run(case)
    assert out.shape == (0, 4, 512) and lse.shape == (0, 4)


@pytest.mark.parametrize(
    ("tokens", "heads", "keys", "count"),
    [(1, 64, 640, 10), (64, 64, 640, 2), (128, 64, 640, 1), (128, 128, 640, 1), (1, 4, 0, 1)],
)
def test_launch_config_fills_the_chip(tokens, heads, keys, count):
    config = portable.launch_config(tokens, heads, (min(keys, 128), max(keys - 128, 0)), 132)
    assert config.splits == Splits(count, None) and config == portable.launch_config(
        tokens, heads, (min(keys, 128), max(keys - 128, 0)), 132
    )


@pytest.mark.parametrize(
    ("tokens", "heads", "entries", "count", "block_keys"),
    [
        (1, 64, 512, 20, 32),
        (4, 64, 512, 10, 64),
        (16, 64, 512, 5, 64),
        (16, 128, 512, 4, 64),
        (64, 64, 512, 2, 64),
        (64, 128, 512, 1, 64),
        (1, 64, 8192, 65, 64),
        (1, 4, 0, 2, 64),
        (1, 8, 0, 4, 32),
    ],
)
def test_hopper_launch_config_takes_small_blocks_where_programs_are_few(tokens, heads, entries, count, block_keys):
    config = wgmma.launch_config(tokens, heads, (128, entries), 132)
    assert config == wgmma.LaunchConfig(Splits(count, None), block_keys)
    fixed = wgmma.launch_config(tokens, heads, (128, entries), 132, batch_invariant=True)
    assert fixed.block_keys == 64 and fixed.splits == portable.launch_config(tokens, heads, (128, entries), 132, True).splits


@pytest.mark.parametrize("entries", [0, 1, 64, 65, 128])
def test_sequences_of_few_heads_are_split_alike_alone_and_together(entries):
    """A block of keys is a part, however many sequences of however long lists a step has."""
    splits = Splits(2 + -(-entries // 64), None)
    for tokens in range(1, 65):
        assert wgmma.launch_config(tokens, 4, (128, entries), 132) == wgmma.LaunchConfig(splits, 64)
        assert portable.launch_config(tokens, 4, (128, entries), 132).splits == splits


@pytest.mark.parametrize("entries", [32, 128, 512])
def test_hopper_parts_of_few_heads_are_small(entries):
    """So a batch of them is no reason for fewer splits: a block of keys stays a part."""
    configs = {wgmma.launch_config(tokens, 8, (128, entries), 132) for tokens in (1, 2, 4, 6)}
    assert configs == {wgmma.LaunchConfig(Splits((128 + entries) // 32, None), 32)}


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [portable, pytest.param(wgmma, marks=hopper)], ids=["triton", "gluon"])
def test_few_heads_have_the_same_bits_alone_and_among_64(kernels):
    lengths = [(i % 9 * 15, i * 37 % 126) for i in range(63)] + [(125, 125)]
    case = make_case(("v4", "v4"), 4, lengths)
    out, lse = run(case, kernels)
    assert_close(out, lse, case)
    for i, (_, entries) in enumerate(lengths):
        one = case.permuted(torch.tensor([i], device=DEVICE))
        slots = one.entries.slots[:, : max(1, entries)].contiguous()  # as wide as it alone needs
        alone, alone_lse = run(replace(one, entries=one.entries._replace(slots=slots)), kernels)
        assert torch.equal(alone[0], out[i]) and torch.equal(alone_lse[0], lse[i]), i


def test_unsupported_arguments_are_named():
    with pytest.raises(ConfigError, match="'v4' with entries 'v41_fp4'"):
        check_layouts(layouts.get("v4"), layouts.get("v41_fp4"))
    with pytest.raises(ConfigError, match="of 64 values"):
        check_layouts(layouts.get("bf16", 64), None)
    case = make_case(("v4", "v4"), 4, [(3, 4)])
    with pytest.raises(ValueError, match="q must be bf16"):
        run(replace(case, q=case.q.float()))
    with pytest.raises(ValueError, match=r"sink must be fp32 \[4\]"):
        run(replace(case, sink=case.sink[:2]))
    with pytest.raises(ValueError, match="window: slots must be int32"):
        run(replace(case, window=case.window._replace(slots=case.window.slots.long())))
    with pytest.raises(ValueError, match="entries: lengths must be int32"):
        run(replace(case, entries=case.entries._replace(lengths=case.entries.lengths[:0])))
    with pytest.raises(ValueError, match="records of 'v4' do not fit"):
        run(replace(case, window=case.window._replace(records=case.window.records._replace(entries_per_page=99))))
    for scale in (-SCALE, 0.0, float("nan")):
        with pytest.raises(ValueError, match="scale must be positive"):
            wgmma.sparse_attention(case.q, case.window, case.entries, case.sink, scale)
    shifted = torch.zeros(1, 4, 520, dtype=torch.bfloat16, device=DEVICE)
    for q in (shifted[:, :, 4:516], shifted.reshape(1, -1)[:, : 4 * 516].view(1, 4, 516)[:, :, :512]):
        with pytest.raises(ValueError, match="rows of q must start at multiples of 16 bytes"):
            wgmma.sparse_attention(q, case.window, case.entries, case.sink, SCALE)
        with pytest.raises(ValueError, match="rows of out must start at multiples of 16 bytes"):
            wgmma.sparse_attention(case.q, case.window, case.entries, case.sink, SCALE, out=q)


def test_debug_check_names_slots_outside_of_the_pool():
    case = make_case(("v4", "v4"), 4, [(3, 4)], holes=0)
    check_slots(case.window)
    case.window.slots[0, 1] = 1000
    with pytest.raises(ValueError, match="token 0 lists slot 1000"):
        check_slots(case.window)
    with pytest.raises(ValueError, match="lists 9 slots; its row holds 6"):
        check_slots(case.window._replace(lengths=torch.tensor([9], dtype=torch.int32, device=DEVICE)))
