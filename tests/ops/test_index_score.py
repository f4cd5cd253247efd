"""Index scores against a loop; hidden entries may hold anything."""

from collections import defaultdict
from itertools import product

import pytest
import torch

from abyssal.kv import codec, layouts
from abyssal.ops.index_score import gluon, gluon_blocks, index_score, triton
from abyssal.ops.select_topk.triton import select_topk


@pytest.mark.parametrize(("n", "b", "heads", "entries"), [(1, 1, 8, 1), (3, 1, 8, 17), (1, 5, 16, 40), (2, 3, 64, 7)])
def test_matches_loop(n, b, heads, entries):
    torch.manual_seed(0)
    q, weights, keys = torch.randn(n, b, heads, 32), torch.randn(n, b, heads), torch.randn(n, entries, 32)
    visible = torch.randint(0, entries + 1, (n, b))
    scores = index_score(q, weights, keys, visible)
    for i in range(n):
        for j in range(b):
            for e in range(entries):
                if e >= visible[i, j]:
                    assert scores[i, j, e] == -torch.inf
                    continue
                terms = (q[i, j].double() @ keys[i, e].double()).relu() * weights[i, j].double()
                assert abs(scores[i, j, e].item() - terms.sum().item()) <= 1e-5 * terms.abs().sum().item() + 1e-7


def test_relu_is_per_head_before_the_weight():
    q = torch.tensor([[[[1.0], [-1.0]]]])
    weights = torch.tensor([[[-2.0, 5.0]]])
    assert index_score(q, weights, torch.tensor([[[3.0]]]), torch.tensor([[1]])).item() == -6.0


def test_hidden_nan_does_not_leak():
    keys = torch.ones(1, 3, 4)
    keys[0, 2] = torch.nan
    scores = index_score(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2), keys, torch.tensor([[2]]))
    assert scores[0, 0].tolist() == [8.0, 8.0, -torch.inf]


# The kernels: on the GPU where there is one, otherwise through Triton's interpreter, which knows no Gluon.

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
KERNELS = [
    pytest.param(triton, id="triton"),
    pytest.param(gluon, id="gluon", marks=[pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]),
]
BLOCK_KERNELS = [
    pytest.param(triton, id="triton"),
    pytest.param(gluon_blocks, id="gluon", marks=[pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE_BYTES = {"index_fp8": 8640, "index_mxfp4": 4608, "index_bf16": 16384}  # of the bucket that holds such pages


def skip_unread(kernel, name: str) -> None:
    if kernel in (gluon, gluon_blocks) and name == "index_bf16":
        pytest.skip("the portable kernel reads these")


def cut(kernel, programs: int, queries: int):
    if kernel is gluon:
        return gluon.ScoreConfig(programs, queries, stages=2, registers=128)
    return triton.ScoreConfig(programs, queries, warps=4, stages=4)


class Paged:
    """n sequences of random keys in scattered pages; everything that no query may read is poison."""

    def __init__(
        self,
        name: str,
        n: int,
        b: int,
        heads: int,
        entries: int,
        *,
        page: int = 64,
        first_page: int = 1,
        seed: int = 0,
        octaves: int = 6,  # between a key's four groups, up and down
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layout, self.entries, self.page = layouts.get(name), entries, page
        pages = -(-entries // page)
        keys = torch.randn(n, pages * page, 128, generator=generator)
        keys *= torch.exp2(torch.randint(-octaves, octaves + 1, (n, pages * page, 4), generator=generator)).repeat_interleave(
            32, 2
        )
        packed = codec.pack_pages(self.layout, keys.view(n * pages, page, 128))
        self.keys = codec.unpack_pages(self.layout, packed, page).view(n, pages * page, 128)[:, :entries]
        self.table = (first_page + torch.randperm(n * pages, generator=generator)).int().view(n, pages)
        self.pool = torch.full((first_page + n * pages, PAGE_BYTES[name] * page // 64), 0xFF, dtype=torch.uint8)
        self.pool[self.table.flatten().long(), : packed.shape[1]] = packed
        q = torch.randn(n * b * heads, 128, generator=generator)
        grid = self.layout.grid
        if name == "index_fp8":
            self.q = codec.quantize(grid, q)[0].view(torch.float8_e4m3fn)
        else:
            self.q = (q if grid is None else codec.dequantize(grid, *codec.quantize(grid, q))).bfloat16()
        self.q = self.q.view(n, b, heads, 128)
        self.weights = torch.randn(n, b, heads, generator=generator)

    def score(self, kernel, visible: torch.Tensor, **options) -> torch.Tensor:
        arrays = (self.q, self.weights, self.pool, self.table, visible.int())
        options = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        return kernel.index_score(
            *(x.to(DEVICE) for x in arrays), layout=self.layout, entries_per_page=self.page, num_entries=self.entries, **options
        ).cpu()

    def check(self, scores: torch.Tensor, visible: torch.Tensor) -> None:
        terms = torch.einsum("nbhd,ned->nbeh", self.q.double(), self.keys.double()).relu() * self.weights.double().unsqueeze(2)
        error = (scores.double() - terms.sum(-1)).abs()
        seen = torch.arange(self.entries) < visible.unsqueeze(-1)
        assert (error <= 1e-5 * terms.abs().sum(-1))[seen].all(), (error / terms.abs().sum(-1))[seen].max()
        assert (~scores[~seen].isfinite()).all(), "an entry that its query does not see was written"

    def score_blocks(self, kernel, blocks: torch.Tensor, visible: torch.Tensor, block_size: int = 8) -> torch.Tensor:
        arrays = (self.q, self.weights, self.pool, self.table, blocks.int(), visible.int())
        out = torch.full((*blocks.shape[:2], blocks.shape[2] * block_size), torch.nan, device=DEVICE)
        return kernel.index_score_blocks(
            *(x.to(DEVICE) for x in arrays), layout=self.layout, entries_per_page=self.page, block_size=block_size, out=out
        ).cpu()

    def check_blocks(self, scores: torch.Tensor, blocks: torch.Tensor, visible: torch.Tensor, block_size: int = 8) -> None:
        entries = (blocks.clamp(min=0).unsqueeze(-1) * block_size + torch.arange(block_size)).flatten(2)
        for i, j in product(*map(range, visible.shape)):
            seen = int(visible[i, j])
            keys = self.keys[i, entries[i, j, :seen]].double()
            terms = (keys @ self.q[i, j].double().T).relu() * self.weights[i, j].double()
            assert ((scores[i, j, :seen].double() - terms.sum(-1)).abs() <= 1e-5 * terms.abs().sum(-1)).all()
            assert scores[i, j, seen:].isnan().all(), "a candidate that its query does not see was written"


@pytest.mark.parametrize("name", PAGE_BYTES)
@pytest.mark.parametrize(
    ("n", "b", "heads", "entries"), [(1, 1, 8, 1), (3, 1, 16, 193), (2, 3, 8, 130), (1, 5, 32, 70), (2, 2, 64, 64)]
)
@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_matches_fp64(kernel, page, name, n, b, heads, entries):
    skip_unread(kernel, name)
    paged = Paged(name, n, b, heads, entries, page=page)
    visible = torch.randint(0, entries + 1, (n, b), generator=torch.Generator().manual_seed(1))
    visible[-1, -1] = entries
    paged.check(paged.score(kernel, visible, out=torch.full((n, b, entries), torch.nan)), visible)


@pytest.mark.parametrize("name", PAGE_BYTES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_f01_kernel_with_zero_lengths(kernel, name):
    """No sequence has an entry, or only the last of them, or one in the middle (case F01)."""
    skip_unread(kernel, name)
    paged = Paged(name, 4, 1, 8, 66)
    for lengths in ([0, 0, 0, 0], [0, 0, 0, 66], [0, 1, 0, 0], [64, 0, 0, 65]):
        visible = torch.tensor(lengths).unsqueeze(1)
        paged.check(paged.score(kernel, visible, out=torch.full((4, 1, 66), torch.nan)), visible)


@pytest.mark.parametrize("name", PAGE_BYTES)
@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("kernel", BLOCK_KERNELS)
def test_kernel_scores_candidate_blocks(kernel, name, page):
    """Only the entries of the blocks that are listed, in their order; a row without blocks (V4.1 spec 3.6)."""
    skip_unread(kernel, name)
    paged = Paged(name, 2, 2, 8, 200, page=page)
    blocks = torch.tensor(
        [[[0, 3, 7, 8, 9, 16, 17, 24, 20], [-1] * 9], [[8, 9, 23, 24, -1, -1, -1, -1, -1], [1, -1, -1, -1, -1, -1, -1, -1, -1]]]
    )
    visible = torch.tensor([[72, 0], [29, 3]])
    paged.check_blocks(paged.score_blocks(kernel, blocks, visible), blocks, visible)


@pytest.mark.parametrize("name", ["index_fp8", "index_mxfp4"])
@pytest.mark.parametrize("size", [1, 2, 4, 16, 32, 64])
@pytest.mark.parametrize("kernel", BLOCK_KERNELS)
def test_kernel_scores_blocks_of_any_size(kernel, size, name):
    """In any order, lengths that end within a block, a tile, a pair of tiles."""
    paged = Paged(name, 2, 3, 16, 300, page=128)
    generator = torch.Generator().manual_seed(size)
    count = min(-(-300 // size), 150)
    blocks = torch.stack([torch.randperm(300 // size, generator=generator) for _ in range(6)])[:, :count].reshape(2, 3, -1)
    whole = blocks.shape[2] * size
    visible = torch.tensor([[whole, 1, 0], [min(whole, n) for n in (64, 129, 255)]])
    paged.check_blocks(paged.score_blocks(kernel, blocks, visible, size), blocks, visible, size)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["index_fp8", "index_mxfp4"])
@pytest.mark.parametrize(("n", "b", "heads", "octaves"), [(1, 1, 64, 0), (3, 2, 16, 6), (1, 40, 32, 0), (2, 8, 32, 1)])
@pytest.mark.parametrize("kernel", BLOCK_KERNELS)
def test_kernel_scores_as_many_blocks_as_models_choose(kernel, name, n, b, heads, octaves):
    """2,048 blocks of 8, shared by several programs; scales that are near, far apart, and both."""
    paged = Paged(name, n, b, heads, 20_000, octaves=octaves)
    generator = torch.Generator().manual_seed(b)
    blocks = torch.stack([torch.randperm(2500, generator=generator)[:2048].sort().values for _ in range(n * b)]).view(n, b, -1)
    visible = torch.randint(0, 2048 * 8 + 1, (n, b), generator=generator)
    visible[0, 0] = 2048 * 8
    paged.check_blocks(paged.score_blocks(kernel, blocks, visible), blocks, visible)


@pytest.mark.parametrize("kernel", BLOCK_KERNELS)
def test_kernel_scores_blocks_with_scales_near_and_far_apart(kernel):
    """mxfp4 keys within a factor of four but for one in two pairs of tiles; then a query off the grid."""
    paged = Paged("index_mxfp4", 2, 2, 32, 500, octaves=0)
    blocks, visible = torch.arange(62).expand(2, 2, 62).contiguous(), torch.full((2, 2), 496)
    near = paged.score_blocks(kernel, blocks, visible)
    others = torch.ones(2, 2, 496, dtype=torch.bool)
    for index, key in ((1, 17), (5, 40)):
        paged.pool[paged.table[0, index].long(), 4096:4352].view(64, 4)[key, 1] -= 5
        others[0, :, index * 64 + key] = False
    paged.keys = codec.unpack_pages(paged.layout, paged.pool[paged.table.flatten().long()], 64).view(2, 512, 128)[:, :500]
    scores = paged.score_blocks(kernel, blocks, visible)
    paged.check_blocks(scores, blocks, visible)
    assert torch.equal(scores[others], near[others])
    paged.q[1] *= 1 + torch.rand(paged.q[1].shape, generator=torch.Generator().manual_seed(1))
    paged.check_blocks(paged.score_blocks(kernel, blocks, visible), blocks, visible)


@pytest.mark.parametrize("name", PAGE_BYTES)
@pytest.mark.parametrize(("b", "heads"), [(1, 32), (5, 8), pytest.param(64, 64, marks=pytest.mark.gpu)])
def test_batch_invariant_scores_have_the_bits_of_candidate_scores(name, b, heads):
    """However many queries there are, and however many entries others see."""
    paged = Paged(name, 2, b, heads, 200)
    visible = torch.full((2, b), 200)
    every = paged.score(triton, visible, batch_invariant=True)
    blocks = paged.score_blocks(triton, torch.arange(25).expand(2, b, 25).contiguous(), visible)
    assert torch.equal(every, blocks)
    paged.q, paged.weights = paged.q[:, -1:].contiguous(), paged.weights[:, -1:].contiguous()
    visible[0] = 3
    assert torch.equal(paged.score(triton, visible[:, -1:], batch_invariant=True)[1], every[1, -1:])


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize("name", ["index_fp8", "index_mxfp4"])
@pytest.mark.parametrize("octaves", [0, 1, 6])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("b", [1, 7])
def test_hopper_scores_have_the_bits_of_candidate_scores(name, octaves, heads, b):
    """Of one query and of several that share keys, of near scales and far ones, in one order of blocks and in another."""
    paged = Paged(name, 2, b, heads, 1000, octaves=octaves)
    visible = torch.full((2, b), 1000)
    every = paged.score(gluon, visible)
    order = torch.randperm(125, generator=torch.Generator().manual_seed(0))
    for blocks in (torch.arange(125), order):
        scores = paged.score_blocks(gluon_blocks, blocks.expand(2, b, 125).contiguous(), visible)
        expected = every.view(2, b, 125, 8)[:, :, blocks].view(2, b, 1000)
        assert torch.equal(scores, expected)
    paged.q, paged.weights = paged.q[:, -1:].contiguous(), paged.weights[:, -1:].contiguous()
    assert torch.equal(paged.score(gluon, visible[:, -1:]), every[:, -1:])


@pytest.mark.parametrize("kernel", BLOCK_KERNELS)
def test_kernel_needs_whole_blocks_in_a_page(kernel):
    paged = Paged("index_fp8", 1, 1, 8, 64)
    with pytest.raises(ValueError, match="blocks of 48"):
        paged.score_blocks(kernel, torch.zeros(1, 1, 1), torch.ones(1, 1), 48)


@pytest.mark.parametrize("programs", [1, 3, 7, 40])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_work_split_covers_everything_once(kernel, programs):
    paged = Paged("index_fp8", 5, 2, 8, 200)
    visible = torch.tensor([[1, 2], [200, 200], [0, 1], [63, 64], [128, 129]])
    config = cut(kernel, programs, 1)
    paged.check(paged.score(kernel, visible, out=torch.full((5, 2, 200), torch.nan), config=config), visible)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize("programs", [3, 40])
@pytest.mark.parametrize(("b", "queries"), [(1, 1), (3, 1), (5, 4)])
def test_hopper_work_split_over_more_rows_than_are_looked_at_together(programs, b, queries):
    paged = Paged("index_fp8", 400, b, 8, 130)
    generator = torch.Generator().manual_seed(1)
    visible = torch.randint(0, 131, (400, b), generator=generator) * (torch.rand(400, 1, generator=generator) < 0.2)
    visible[:140], visible[270:399], visible[-1] = 0, 0, 130
    out = torch.full((400, b, 130), torch.nan)
    paged.check(paged.score(gluon, visible, out=out, config=cut(gluon, programs, queries)), visible)


@pytest.mark.parametrize("queries", [1, 2, 4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_maxima_of_groups(kernel, queries):
    paged = Paged("index_fp8", 2, 3, 8, 150)
    visible = torch.tensor([[5, 16, 17], [148, 149, 150]])
    config = cut(kernel, 3, queries)
    maxima = torch.full((2, 3, 10), torch.nan, device=DEVICE)
    scores = paged.score(kernel, visible, maxima=maxima, config=config)
    for i in range(2):
        for j in range(3):
            seen = scores[i, j, : visible[i, j]]
            expected = [part.max().item() for part in seen.split(16)]
            assert maxima[i, j, : len(expected)].tolist() == expected
            assert maxima[i, j, len(expected) :].isnan().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_reads_any_scale_byte_of_mxfp4(kernel):
    """Group scales 2^-40 to 2^40 in one key stay exact, and byte 0 is 2^-127."""
    paged = Paged("index_mxfp4", 1, 1, 8, 64)
    scales = paged.pool[paged.table[0, 0].long(), 4096:4352].view(64, 4)
    scales[:, 0], scales[:, 1], scales[3, 2] = 87, 167, 0
    pages = paged.pool[paged.table[0].long()]
    paged.keys = codec.unpack_pages(paged.layout, pages, 64)
    visible = torch.tensor([[64]])
    paged.check(paged.score(kernel, visible), visible)


@pytest.mark.parametrize(("b", "heads", "page"), [(1, 64, 64), (1, 8, 128), (3, 32, 64)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_reads_scales_near_and_far_apart(kernel, b, heads, page):
    """mxfp4 tiles whose keys all have scales within a factor of four, two where one key has not, and a query off the grid."""
    paged = Paged("index_mxfp4", 2, b, heads, 500, page=page, octaves=0)
    visible = torch.full((2, b), 500)
    near = paged.score(kernel, visible)
    others = torch.ones(2, b, 500, dtype=torch.bool)
    for index, key in ((1, 17), (3, 40)):
        paged.pool[paged.table[0, index].long(), 64 * page : 68 * page].view(page, 4)[key, 1] -= 5
        others[0, :, index * page + key] = False
    paged.keys = codec.unpack_pages(paged.layout, paged.pool[paged.table.flatten().long()], page).view(2, 512, 128)[:, :500]
    scores = paged.score(kernel, visible)
    paged.check(scores, visible)
    assert torch.equal(scores[others], near[others])
    paged.q[1] *= 1 + torch.rand(paged.q[1].shape, generator=torch.Generator().manual_seed(1))
    paged.check(paged.score(kernel, visible), visible)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_reads_every_mxfp4_code_at_every_place(kernel):
    """All 256 bytes, so both zeros, at each of a key's 64; scales down to a quarter of its largest, then to an eighth; heads 2^-40 to 2^40."""
    paged = Paged("index_mxfp4", 1, 1, 16, 256)
    generator = torch.Generator().manual_seed(2)
    paged.q *= torch.exp2(torch.randint(-40, 41, (16, 1), generator=generator)).bfloat16()
    codes = torch.arange(256).unsqueeze(1) + 37 * torch.arange(64)
    for page, steps in enumerate((3, 3, 4, 4)):
        place = paged.table[0, page].long()
        paged.pool[place, :4096] = (codes[64 * page : 64 * page + 64] % 256).flatten().to(torch.uint8)
        paged.pool[place, 4096:4352] = 127 - torch.randint(0, steps, (256,), generator=generator).to(torch.uint8)
    paged.keys = codec.unpack_pages(paged.layout, paged.pool[paged.table[0].long()], 64).view(1, 256, 128)
    visible = torch.tensor([[256]])
    paged.check(paged.score(kernel, visible), visible)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_zero_weights_and_zero_keys(kernel):
    paged = Paged("index_fp8", 1, 1, 8, 64)
    paged.weights.zero_()
    assert paged.score(kernel, torch.tensor([[64]])).eq(0).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_bad_input_is_named(kernel):
    paged = Paged("index_fp8", 1, 1, 8, 64)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        paged.q = paged.q.float()
        paged.score(kernel, torch.tensor([[1]]))
    with pytest.raises(ValueError, match="12"):
        paged.q, paged.weights = torch.zeros(1, 1, 12, 128).to(torch.float8_e4m3fn), torch.zeros(1, 1, 12)
        paged.score(kernel, torch.tensor([[1]]))


def record_binaries(monkeypatch, module, name: str) -> set:
    """Triton compiles one for every set of constants and of what it specialises: integers that are 1 or multiples of 16, pointers too."""
    kernel, binaries = getattr(module, name), set()

    def launch(*arguments, **constants):
        kinds = []
        for parameter, value in zip(kernel.params, arguments, strict=False):
            number = value.data_ptr() if isinstance(value, torch.Tensor) else value
            kinds.append(isinstance(number, int) and not parameter.do_not_specialize and (number == 1, number % 16 == 0))
        binaries.add((*kinds, *constants.items()))

    monkeypatch.setattr(module, name, defaultdict(lambda: launch))
    return binaries


def test_hopper_launches_of_all_sizes_share_few_binaries(monkeypatch):
    binaries = record_binaries(monkeypatch, gluon, "_index_score_kernel_sm90")
    pool, layout = torch.zeros(2, 8640, dtype=torch.uint8), layouts.get("index_fp8")
    for n, b in ((1, 1), (3, 1), (16, 1), (1, 2), (2, 3), (1, 4), (1, 77), (1, 512), (2, 700), (1, 2048)):
        for first, entries in ((0, 64), (1, 960), (2, 1000), (3, 4096)):
            q = torch.zeros(first + n, b, 64, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)[first:]
            weights, visible = torch.zeros(first + n, b, 64)[first:], torch.zeros(first + n, b, dtype=torch.int32)[first:]
            table, maxima = torch.zeros(first + n, 65, dtype=torch.int32)[first:], torch.zeros(n, b, entries)
            gluon.index_score(
                q, weights, pool, table, visible, layout=layout, entries_per_page=64, num_entries=entries, maxima=maxima
            )
    assert len(binaries) == 3, "for 1, 2 and 4 queries that share keys"


def test_hopper_launches_over_blocks_share_a_binary(monkeypatch):
    binaries = record_binaries(monkeypatch, gluon_blocks, "_index_score_blocks_kernel_sm90")
    pool, layout = torch.zeros(2, 8640, dtype=torch.uint8), layouts.get("index_fp8")
    for n, b in ((1, 1), (3, 1), (1, 77), (2, 700), (1, 2048)):
        for first, count in ((0, 2048), (1, 2048), (2, 16), (3, 1)):
            q = torch.zeros(first + n, b, 32, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)[first:]
            weights, visible = torch.zeros(first + n, b, 32)[first:], torch.zeros(first + n, b, dtype=torch.int32)[first:]
            table, blocks = torch.zeros(first + n, 65, dtype=torch.int32)[first:], torch.zeros(n, b, count, dtype=torch.int32)
            gluon_blocks.index_score_blocks(
                q, weights, pool, table, blocks, visible, layout=layout, entries_per_page=64, block_size=8
            )
    assert len(binaries) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["index_fp8", "index_mxfp4"])
@pytest.mark.parametrize(("n", "b", "heads"), [(1, 1, 64), (4, 2, 64), (2, 64, 32)])
@pytest.mark.parametrize("entries", [8191, 8193, 40000])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_at_real_sizes(kernel, name, n, b, heads, entries):
    paged = Paged(name, n, b, heads, entries)
    visible = torch.randint(0, entries + 1, (n, b)).sort(1).values
    visible[0, -1] = entries
    paged.check(paged.score(kernel, visible, out=torch.full((n, b, entries), torch.nan)), visible)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize("name", ["index_fp8", "index_mxfp4"])
@pytest.mark.parametrize("heads", [32, 64])
def test_hopper_scores_near_scales_alone_with_the_same_bits(name, heads):
    """A query with others of its sequence, and by itself."""
    paged = Paged(name, 2, 3, heads, 300, octaves=0)
    visible = torch.full((2, 3), 300)
    every = paged.score(gluon, visible)
    paged.q, paged.weights = paged.q[:, -1:].contiguous(), paged.weights[:, -1:].contiguous()
    assert torch.equal(paged.score(gluon, visible[:, -1:]), every[:, -1:])


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize("name", ["index_fp8", "index_mxfp4"])
@pytest.mark.parametrize(("heads", "b"), [(8, 2048), (64, 2048), (64, 1)])
def test_hopper_launches_behind_each_other_have_the_bits_of_one_alone(name, heads, b):
    """Spans of a long prefill, each followed by its choice: scores, and what is chosen by their maxima."""
    entries, spans = 32768, 4
    paged = Paged(name, 1, min(b, 8), heads, 4096, octaves=1)
    generator = torch.Generator("cuda").manual_seed(0)
    pool, q = paged.pool.cuda(), paged.q.cuda().repeat(1, b // paged.q.shape[1], 1, 1)
    table = torch.randint(1, len(pool), (1, entries // 64), device="cuda", dtype=torch.int32, generator=generator)
    weights = torch.randn(1, b, heads, device="cuda", generator=generator)
    visible = [
        torch.arange(end - b, end, device="cuda").view(1, b).int() // 4 + 1 for end in (4 * entries - b * i for i in range(spans))
    ]

    def run(alone: bool) -> list[torch.Tensor]:
        fresh = [[torch.full((1, b, size), torch.nan, device="cuda") for size in (entries, entries // 16)] for _ in visible]
        chosen = []
        for seen, (out, maxima) in zip(visible, fresh, strict=True):
            options = {"layout": paged.layout, "entries_per_page": 64, "num_entries": entries}
            gluon.index_score(q, weights, pool, table, seen, out=out, maxima=maxima, **options)
            if alone:
                torch.cuda.synchronize()
            chosen.append(select_topk(out, seen, 128, maxima=maxima))
            if alone:
                torch.cuda.synchronize()
        return [*chosen, *(out for out, _ in fresh)]

    expected = run(True)
    for _ in range(3):
        assert all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(run(False), expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_h01_kernel_with_pages_beyond_4_gib(kernel):
    """Pages whose byte offsets need 33 bits (case H01)."""
    paged = Paged("index_fp8", 1, 1, 64, 200, first_page=1)
    low = paged.score(kernel, torch.tensor([[200]]))
    first = 2**32 // 8640
    pool = torch.full((first + 5, 8640), 0xFF, dtype=torch.uint8, device="cuda")
    pool[first : first + len(paged.pool)] = paged.pool.cuda()
    paged.pool, paged.table = pool, paged.table + first
    assert torch.equal(paged.score(kernel, torch.tensor([[200]])), low)
    by_blocks = gluon_blocks if kernel is gluon else kernel
    near = paged.score_blocks(by_blocks, torch.arange(25).view(1, 1, 25), torch.tensor([[200]]))
    paged.check_blocks(near, torch.arange(25).view(1, 1, 25), torch.tensor([[200]]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["index_fp8", "index_mxfp4"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_in_a_graph_follows_lengths(kernel, name):
    """Lengths change between replays, zero and one included (case F01)."""
    paged = Paged(name, 3, 1, 64, 5000)
    visible = torch.full((3, 1), 5000, dtype=torch.int32, device="cuda")
    arrays = [x.cuda() for x in (paged.q, paged.weights, paged.pool, paged.table)]
    out = torch.empty(3, 1, 5000, device="cuda")
    options = {"layout": paged.layout, "entries_per_page": 64, "num_entries": 5000, "out": out}
    kernel.index_score(*arrays, visible, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.index_score(*arrays, visible, **options)
    for lengths in ([0, 0, 0], [1, 0, 5000], [64, 65, 4999], [5000, 1, 0]):
        visible.copy_(torch.tensor(lengths).unsqueeze(1))
        out.fill_(torch.nan)
        graph.replay()
        paged.check(out.cpu(), torch.tensor(lengths).unsqueeze(1))
