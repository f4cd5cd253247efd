"""Top-k as an exact set: ties to the lowest position, fewer entries than k, infinities (cases G01, B03)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from abyssal.ops.select_topk import candidate_mask, select_topk
from abyssal.ops.select_topk.triton import SelectConfig, candidate_blocks, select_config
from abyssal.ops.select_topk.triton import select_topk as select_topk_kernel


def slow(scores: list[float], visible: int, k: int) -> list[int]:
    order = sorted(range(visible), key=lambda i: (-scores[i], i))
    return sorted(order[:k])


def check(scores: torch.Tensor, visible: torch.Tensor, k: int) -> None:
    got = select_topk(scores, visible, k)
    assert got.dtype == torch.int32 and got.shape == (*scores.shape[:-1], min(k, scores.shape[-1]))
    for row, seen, chosen in zip(scores.tolist(), visible.tolist(), got.tolist(), strict=True):
        expected = slow(row, seen, k)
        real = [c for c in chosen if c >= 0]
        assert real == expected, (row, seen, k)
        assert sorted(chosen, key=lambda c: c < 0) == chosen, "fillers come last"


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 40).flatmap(
        lambda n: st.tuples(
            st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, 1e30, -1e30, -torch.inf]), min_size=n, max_size=n),
            st.integers(0, n),
            st.integers(1, 45),
        )
    )
)
def test_any_ties(case):
    scores, visible, k = case
    check(torch.tensor([scores]), torch.tensor([visible]), k)


@pytest.mark.parametrize("valid", [0, 1, 7, 8, 9])
@pytest.mark.parametrize("fill", [0.0, -torch.inf, 3.5])
def test_g01_all_equal_scores(valid, fill):
    scores = torch.full((2, 12), fill)
    check(scores, torch.tensor([valid, 12]), 8)
    assert torch.equal(select_topk(scores, torch.tensor([valid, 12]), 8), select_topk(scores, torch.tensor([valid, 12]), 8))


def test_invisible_nan_is_ignored():
    scores = torch.tensor([[1.0, 2.0, 3.0, torch.nan, torch.nan]])
    assert select_topk(scores, torch.tensor([3]), 2).tolist() == [[1, 2]]


def test_large_rows():
    torch.manual_seed(0)
    scores = torch.randint(0, 50, (3, 4000)).float()
    check(scores, torch.tensor([4000, 511, 2100]), 512)


SCORES = [0.0, -0.0, 1.0, -1.0, 2.5, 1e30, -1e30]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 30).flatmap(
        lambda n: st.tuples(
            st.lists(st.sampled_from(SCORES), min_size=n, max_size=n),
            st.lists(st.booleans(), min_size=n, max_size=n),
            st.integers(0, n),
            st.integers(1, 35),
        )
    )
)
def test_only_candidates_are_chosen(case):
    """Fewer of them than k leave slots unused; nothing outside fills up."""
    scores, candidates, visible, k = case
    got = select_topk(torch.tensor([scores]), torch.tensor([visible]), k, torch.tensor([candidates]))[0].tolist()
    allowed = [i for i in range(visible) if candidates[i]]
    expected = sorted(sorted(allowed, key=lambda i: (-scores[i], i))[:k])
    assert got == expected + [-1] * (min(k, len(scores)) - len(expected))


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 40).flatmap(
        lambda n: st.tuples(
            st.lists(st.sampled_from(SCORES), min_size=n, max_size=n), st.integers(0, n), st.integers(1, 8), st.integers(1, 9)
        )
    )
)
def test_candidate_blocks(case):
    """The best blocks by their best visible entry, the newest always, ties to the first (V4.1 spec 3.6)."""
    scores, visible, blocks, size = case
    ranks = [(max(scores[b : min(b + size, visible)]), -b) for b in range(0, visible, size)]
    newest = (visible - 1) // size
    order = sorted(range(len(ranks)), key=lambda i: (i != newest, -ranks[i][0], i))
    kept = set(order[:blocks])
    expected = [i < visible and i // size in kept for i in range(len(scores))]
    # what lies beyond the visible entries must not matter
    poisoned = torch.tensor([scores[:visible] + [torch.nan] * (len(scores) - visible)])
    assert candidate_mask(poisoned, torch.tensor([visible]), blocks, size)[0].tolist() == expected


def test_candidate_blocks_per_query():
    scores = torch.arange(24.0).flip(0).view(1, 1, 24).expand(1, 3, 24)
    mask = candidate_mask(scores, torch.tensor([[0, 9, 24]]), blocks=2, block_size=4)
    assert [row.nonzero().flatten().tolist() for row in mask[0]] == [[], [0, 1, 2, 3, 8], [0, 1, 2, 3, 20, 21, 22, 23]]


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check_kernel(scores: torch.Tensor, visible: torch.Tensor, k: int, **options) -> None:
    """scores [n, b, N]; what is not visible becomes NaN."""
    hidden = torch.arange(scores.shape[-1]) >= visible.unsqueeze(-1)
    scores = scores.masked_fill(hidden, torch.nan).to(DEVICE)
    got = select_topk_kernel(scores, visible.int().to(DEVICE), k, **options).cpu()
    expected = torch.full((*visible.shape, k), -1, dtype=torch.int32)
    chosen = select_topk(scores.cpu(), visible, k)
    expected[..., : chosen.shape[-1]] = chosen
    assert torch.equal(got, expected)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 40),
    st.lists(st.integers(0, 300), min_size=3, max_size=3),
    st.integers(0, 4),
    st.sampled_from([(1, 0), (2, 0), (3, 0), (2, 32), (2, 128), (3, 64)]),
)
def test_kernel_any_ties(n, k, lengths, kind, cut):
    generator = torch.Generator().manual_seed(n)
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.5, 1e30, -1e30, 1e-45, -1e-45, -torch.inf, torch.inf])
    scores = [
        values[torch.randint(len(values), (3, 1, n), generator=generator)],
        torch.randn(3, 1, n, generator=generator),
        torch.randint(-2, 3, (3, 1, n), generator=generator).float(),
        1000 + torch.rand(3, 1, n, generator=generator) / 100,
        torch.arange(n).float().expand(3, 1, n).contiguous(),
    ][kind]
    visible = torch.tensor(lengths).clamp(max=n).unsqueeze(1)
    levels, chunk = cut
    check_kernel(scores, visible, k, config=SelectConfig(levels, warps=4, chunk=chunk))


@pytest.mark.parametrize(("levels", "chunk"), [(1, 0), (2, 0), (3, 0), (2, 64), (3, 32)])
@pytest.mark.parametrize("fill", [0.0, -0.0, -torch.inf, 3.5, -7.0])
def test_g01_kernel_all_equal_scores(levels, chunk, fill):
    """Lengths 0, 1, k - 1, k, k + 1 and more (case G01)."""
    k = 9
    visible = torch.tensor([0, 1, k - 1, k, k + 1, 16, 17, 300]).unsqueeze(1)
    check_kernel(torch.full((8, 1, 300), fill), visible, k, config=SelectConfig(levels, warps=4, chunk=chunk))


@pytest.mark.parametrize("k", [1, 16, 24, 512, 1024, 2048])
def test_kernel_any_width(k):
    """k follows the argument (case G03)."""
    torch.manual_seed(k)
    check_kernel(torch.randn(1, 2, 3000), torch.tensor([[3000, 2047]]), k)


@pytest.mark.parametrize(("levels", "chunk"), [(2, 0), (3, 0), (2, 64), (3, 128)])
def test_kernel_with_the_best_in_one_place(levels, chunk):
    """Groups that hold several of the best, others that hold none; ties across the edges of groups."""
    scores = torch.zeros(1, 3, 600)
    scores[0, 0, 250:300] = 5.0
    scores[0, 1, 15:17], scores[0, 1, 590:] = 1.0, 1.0
    scores[0, 2] = -torch.arange(600.0)
    for k in (3, 20, 49, 50, 51):
        check_kernel(scores, torch.tensor([[600, 595, 600]]), k, config=SelectConfig(levels, warps=4, chunk=chunk))


@pytest.mark.parametrize("chunk", [0, 64])
def test_kernel_returns_slots_and_takes_maxima(chunk):
    torch.manual_seed(0)
    scores, visible, k = torch.randn(2, 2, 200), torch.tensor([[3, 10], [199, 200]]), 12
    table = torch.randperm(8).int().view(2, 4) + 30_000_000
    maxima = torch.full((2, 2, 13), torch.nan)
    for i in range(2):
        for j in range(2):
            parts = [part.max() for part in scores[i, j, : visible[i, j]].split(16)]
            maxima[i, j, : len(parts)] = torch.stack(parts)
    options = {"maxima": maxima.to(DEVICE), "page_table": table.to(DEVICE), "config": SelectConfig(2, warps=4, chunk=chunk)}
    arrivals = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    for _ in range(2):  # what a call leaves behind must not disturb the next
        got = select_topk_kernel(scores.to(DEVICE), visible.int().to(DEVICE), k, arrivals=arrivals, **options).cpu()
        assert not arrivals.any()
    positions = select_topk(scores, visible, k)
    slots = torch.gather(table.unsqueeze(1).expand(2, 2, 4), 2, positions.clamp(min=0) // 64) * 64 + positions % 64
    assert torch.equal(got, torch.where(positions >= 0, slots, -1).int())


@pytest.mark.parametrize("kept", [1, 5, 40])
def test_kernel_candidate_blocks(kept):
    """The blocks and the choice among them are those of the mask; what is not visible is NaN (V4.1 spec 3.6)."""
    torch.manual_seed(kept)
    visible = torch.tensor([[0, 1, 7, 8], [9, 100, 196, 197]])
    scores = torch.randint(0, 9, (2, 4, 197)).float()
    scores[torch.arange(197) >= visible.unsqueeze(-1)] = torch.nan
    mask = candidate_mask(scores, visible, kept, 8)
    blocks, count = candidate_blocks(scores.to(DEVICE), visible.int().to(DEVICE), kept, 8)
    entries = (blocks.cpu().unsqueeze(-1) * 8 + torch.arange(8)).flatten(2)
    assert torch.equal(count.cpu(), mask.sum(-1).int())
    for row_entries, row_count, row_mask in zip(entries.view(8, -1), count.flatten(), mask.view(8, -1), strict=True):
        assert row_entries[:row_count].tolist() == row_mask.nonzero().flatten().tolist()
    compact = torch.gather(torch.nn.functional.pad(scores, (0, 8), value=torch.nan), 2, entries.long().clamp(min=0)).to(DEVICE)
    chosen = select_topk_kernel(compact, count, 12, blocks=blocks).cpu()
    assert torch.equal(chosen, select_topk(scores, visible, 12, mask))


def test_config_searches_few_values_first():
    for n, levels in ((1, 1), (16384, 1), (16385, 2), (262144, 2), (262145, 3), (1 << 20, 3)):
        assert select_config(1, n, 512).levels == levels
    assert select_config(1, 262144, 512).chunk == 2048 and select_config(1, 262145, 512).chunk == 4096
    assert select_config(4, 262144, 512).chunk == 4096 and select_config(256, 262144, 512).chunk == 0
    assert select_config(32, 32768, 512).chunk == 0 and select_config(32, 32768, 1024).chunk == 4096


def test_kernel_bad_input_is_named():
    with pytest.raises(ValueError, match="2049"):
        select_topk_kernel(torch.zeros(1, 1, 4), torch.ones(1, 1, dtype=torch.int32), 2049)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "shifted", "few values", "zeros"])
@pytest.mark.parametrize(
    ("n", "k"), [(8191, 512), (8193, 512), (262144, 512), (262145, 512), (262144, 1024), (1 << 20, 512), (1 << 20, 2048)]
)
def test_g07_kernel_at_real_sizes(n, k, kind):
    """Up to 2^20 entries (case G07)."""
    generator = torch.Generator().manual_seed(0)
    scores = {
        "normal": torch.randn(1, 6, n, generator=generator),
        "shifted": 100 + torch.randn(1, 6, n, generator=generator),
        "few values": torch.randint(0, 50, (1, 6, n), generator=generator).float(),
        "zeros": torch.zeros(1, 6, n),
    }[kind]
    check_kernel(scores, torch.tensor([[n, n - 1, n // 2 + 1, k, 1, 0]]), k)


@pytest.mark.gpu
def test_kernel_in_a_graph_follows_lengths():
    scores = torch.randn(3, 1, 40000, device="cuda")
    visible = torch.full((3, 1), 40000, dtype=torch.int32, device="cuda")
    out = torch.empty(3, 1, 512, dtype=torch.int32, device="cuda")
    select_topk_kernel(scores, visible, 512, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select_topk_kernel(scores, visible, 512, out=out)
    for lengths in ([0, 0, 0], [1, 0, 40000], [511, 512, 513], [40000, 1, 0]):
        visible.copy_(torch.tensor(lengths).unsqueeze(1))
        out.fill_(7)
        graph.replay()
        assert torch.equal(out.cpu(), select_topk(scores.cpu(), torch.tensor(lengths).unsqueeze(1), 512))
