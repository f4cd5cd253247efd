"""Compression against V4 spec 2.9 and V4.1 spec 3.6 written out entry by entry, for any cut of the sequence (cases B01, C03)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import abyssal.ops.compress.triton as kernels
from abyssal.config import RopeConfig
from abyssal.kv import layouts
from abyssal.kv.batch import Chunk, CompressFacts, StoreFacts, build_batch
from abyssal.kv.pool import KVCache
from abyssal.kv.specs import plan_caches
from abyssal.model_config import parse_model_config
from abyssal.ops.compress import accumulate, compress, pool
from abyssal.ops.hadamard import hadamard
from abyssal.ops.norm import rms_norm
from abyssal.ops.norm.triton import rms_norm as normed
from abyssal.ops.rope import rope_table, rotate
from tests.support.records import DEVICE, ENTRIES, POISON, new_pool, written
from tests.support.small_model import small_config, v41_config_dict

CPU = torch.device("cpu")
DIM = 32


def slow_entry(rows: torch.Tensor, w: int, ratio: int) -> torch.Tensor:
    """Pooled entry w, double: per channel, a softmax over the slots of V4 spec 2.9 steps 2 to 4; ratio 1: the token itself."""
    if ratio == 1:
        return rows[w].double()
    values, scores = rows.double().chunk(2, dim=1)
    own = range(w * ratio, (w + 1) * ratio)
    if ratio == 4:
        before = range(w * ratio - ratio, w * ratio)
        slots = [(values[t, :DIM], scores[t, :DIM]) for t in before if t >= 0]
        slots += [(values[t, DIM:], scores[t, DIM:]) for t in own]
    else:
        slots = [(values[t], scores[t]) for t in own]
    v, s = torch.stack([v for v, _ in slots]), torch.stack([s for _, s in slots])
    return (v * s.softmax(0)).sum(0)


def run_cuts(ratio: int, cuts: list[int], index_keys: bool) -> None:
    torch.manual_seed(0)
    total = sum(cuts)
    config = small_config([ratio]) if ratio > 2 else parse_model_config(v41_config_dict([ratio], [0], [0]))
    kind = f"c{ratio}_index" if index_keys else f"c{ratio}"
    cache = KVCache(plan_caches(config, "fp32", "fp32", "index_fp32"), {"main": 80, "index": 40, "small": 20}, CPU)
    entries, state, sums = (cache.views.get(name) for name in (kind, f"{kind}_state", f"{kind}_sums"))
    width = DIM if state is None else state.spec.layout.dim
    rows, norm = torch.randn(total, width) * 3, torch.rand(DIM) + 0.5
    bias = torch.randn(ratio, width // 2) if ratio > 2 else None
    given, rows = rows, rows.clone()
    if bias is not None:
        rows[:, width // 2 :] += bias[torch.arange(total) % ratio]
    seq, start, slots, latents = cache.new_sequence(), 0, [], []
    for count in cuts:
        assert cache.allocate(seq, start, start + count)
        batch = build_batch(config, cache, [Chunk([0] * count, start, seq)], [], CPU)
        facts, store = batch.compress[ratio], None if state is None else batch.stores[state.spec.name]
        latent = compress(
            given[start : start + count], bias, norm, facts, store, state, sums, entries, 0,
            overlap=ratio == 4, rotate_keys=index_keys, eps=1e-6, dtype=torch.float32,
        )  # fmt: skip
        assert facts.num_entries == (start + count) // ratio - start // ratio
        slots.append(facts.entry_slots[kind][0])
        latents.append(latent)
        start += count
        cache.commit(seq, [], start)
        cache.release_unneeded(seq, start)
    got = entries.read(torch.cat(slots))
    for w in range(total // ratio):
        pooled = rms_norm(slow_entry(rows, w, ratio).float()[None], norm, 1e-6)
        torch.testing.assert_close(torch.cat(latents)[w : w + 1], pooled, rtol=1e-4, atol=2e-5)
        expected = rotate(pooled, rope_table(torch.tensor([w * ratio]), config.rope_compress))
        expected = hadamard(expected) if index_keys else expected
        torch.testing.assert_close(got[w : w + 1], expected, rtol=1e-4, atol=2e-5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 13), min_size=1, max_size=8), st.booleans())
def test_ratio_4_any_cuts(cuts, index_keys):
    run_cuts(4, cuts, index_keys)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 60, 127, 128, 129, 200]), min_size=1, max_size=5))
def test_ratio_128_any_cuts(cuts):
    run_cuts(128, cuts, index_keys=False)


@pytest.mark.parametrize("ratio", [1, 2])
@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(1, 7), min_size=1, max_size=8))
def test_v41_ratios_any_cuts(ratio, cuts):
    run_cuts(ratio, cuts, index_keys=False)


@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
def test_token_by_token(ratio):
    run_cuts(ratio, [1] * (ratio * 2 + 3), index_keys=False)


def test_ratio_128_across_steps_that_fold_less_than_a_group():
    """Every place of a group's end among the rows that are kept raw."""
    for first in range(120, 137):
        run_cuts(128, [first, 1, 1, 7, 1, 120, 3], index_keys=False)


@pytest.mark.parametrize("shift", [-1e4, 0.0, 1e4])
def test_sums_added_row_by_row_are_the_softmax_over_all_rows(shift):
    rows = torch.randn(128, 2 * DIM, generator=torch.Generator().manual_seed(1)) * 4
    rows[:, DIM:] += shift
    once = pool(rows, torch.arange(128)[None], overlap=False)
    sums = torch.stack([torch.full((DIM,), -torch.inf), torch.zeros(DIM), torch.zeros(DIM)])[None]
    for row in torch.arange(128).split(3):
        sums = accumulate(rows, row[None], sums)
    torch.testing.assert_close(sums[:, 2] / sums[:, 1], once, rtol=2e-6, atol=2e-6)


def test_sums_of_nothing_take_no_part_and_padding_neither():
    rows = torch.tensor([[5.0, -(2.0**100)], [0.0, -torch.inf]])  # a score below any that a maximum could start from
    before = torch.tensor([[[-torch.inf], [0.0], [0.0]]])
    assert accumulate(rows, torch.tensor([[0, 1, 1]]), before).tolist() == [[[-(2.0**100)], [1.0], [5.0]]]


def test_absent_tokens_have_weight_zero_whatever_the_scores():
    rows = torch.cat([torch.tensor([[7.0, 7.0, -1e4, -1e4]]), torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf]])])
    pooled = pool(rows, torch.tensor([[1, 0]]), overlap=True)
    assert pooled.tolist() == [[7.0]]


# Kernel


def pages_of(cache: KVCache, kind: str) -> kernels.Pages:
    spec = cache.specs[kind]
    return kernels.Pages(kind, cache.pools[spec.bucket].data, spec.layout, spec.entries_per_page)


def step_facts(
    sources, carried, entry_slots, rope, carried_sums=None, sum_slots=None, token_each=False, phases=None
) -> CompressFacts:
    """Facts of a step of one layer, kinds `entries`, `state` and `sums`."""
    none = torch.empty(1, 0, dtype=torch.int64, device=DEVICE)
    return CompressFacts(
        phases=none[0] if phases is None else phases,
        sources=sources,
        carried={"state": carried.unsqueeze(0)},
        carried_sums={"sums": none if carried_sums is None else carried_sums.unsqueeze(0)},
        sum_slots={"sums": none if sum_slots is None else sum_slots.unsqueeze(0)},
        entry_slots={"entries": entry_slots.unsqueeze(0)},
        rope=rope,
        token_each=token_each,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("c4", "bf16"),
        ("c4", "v4"),
        ("c4", "v41"),
        ("c4_index", "index_bf16"),
        ("c4_index", "index_fp8"),
        ("c4_index", "index_mxfp4"),
    ],
)
def test_kernel_stores_entries_and_state_of_a_mixed_batch(kind, layout, dtype):
    """Two sequences at different phases, in chunks of 1 to 9 tokens: pages byte for byte, rows close to the reference."""
    torch.manual_seed(0)
    main = layout if kind == "c4" else "bf16"
    config = small_config([4], head_dim=512, qk_rope_head_dim=64, index_head_dim=128)
    plan = plan_caches(config, main, main, layout if kind != "c4" else "index_bf16")
    dim = 512 if kind == "c4" else 128
    caches = [KVCache(plan, {"main": 30, "index": 20, "small": 4}, torch.device(DEVICE)) for _ in range(2)]
    for cache in caches:
        for pages in cache.pools.values():
            pages.data.fill_(POISON)
    norm, bias = torch.rand(dim, device=DEVICE) + 0.5, torch.randn(4, 2 * dim, device=DEVICE) * 3
    sequences = [[cache.new_sequence() for _ in range(2)] for cache in caches]
    starts = [0, 0]
    for cuts in ([1, 6], [1, 3], [1, 1], [1, 9], [5, 2]):
        given = torch.randn(sum(cuts), 4 * dim, device=DEVICE) * 3
        rows = given.clone()
        for reference, cache, seqs in ((True, caches[0], sequences[0]), (False, caches[1], sequences[1])):
            chunks = [Chunk([0] * n, start, seq) for n, start, seq in zip(cuts, starts, seqs, strict=True)]
            assert all(cache.allocate(c.cache, c.start, c.end) for c in chunks)
            batch = build_batch(config, cache, chunks, [], torch.device(DEVICE))
            facts, store = batch.compress[4], batch.stores[f"{kind}_state"]
            options = {"overlap": True, "rotate_keys": kind == "c4_index", "eps": 1e-6, "dtype": dtype}
            if reference:
                compress(rows, bias, norm, facts, store, cache.views[f"{kind}_state"], None, cache.views[kind], 0, **options)
            else:
                stored = torch.full((facts.num_entries, dim), torch.nan, device=DEVICE)
                before = cache.pools[cache.specs[kind].bucket].data.clone()
                pages, state_pages = pages_of(cache, kind), pages_of(cache, f"{kind}_state")
                many = (
                    kernels.compress_config(dim, False, 256, False) if dtype == torch.bfloat16 and facts.num_entries > 1 else None
                )
                kernels.compress(
                    given, bias, norm, facts, store, state_pages, None, pages, 0, stored=stored, config=many, **options
                )
                slots, spec = facts.entry_slots[kind][0], cache.specs[kind]

                got_state = cache.views[f"{kind}_state"].read(store.slots[0])
                assert torch.equal(got_state, rows[store.rows])
                before = written(before, spec.layout, slots, stored, spec.entries_per_page)
                state = cache.specs[f"{kind}_state"]
                before = written(before, state.layout, store.slots[0], rows[store.rows], state.entries_per_page)
                assert torch.equal(cache.pools[spec.bucket].data.cpu(), before)
        starts = [start + n for start, n in zip(starts, cuts, strict=True)]
        if facts.num_entries:
            # Compare what was packed with the reference's rows, recomputed without a record's rounding.
            carried = caches[0].views[f"{kind}_state"].read(facts.carried[f"{kind}_state"][0])
            empty = torch.cat([rows.new_zeros(1, 2 * dim), rows.new_full((1, 2 * dim), -torch.inf)], 1)
            pooled = pool(torch.cat([carried, rows, empty]), facts.sources, True).to(dtype)
            expected = rotate(rms_norm(pooled, norm, 1e-6).float(), facts.rope).to(dtype)
            expected = (hadamard(expected) if kind == "c4_index" else expected).float()
            size = expected.abs().amax(-1, keepdim=True)
            assert ((stored - expected).abs() <= size * (2**-7 if dtype == torch.bfloat16 else 1e-5)).all()
    assert starts == [9, 21]


def test_kernel_in_batch_invariant_mode_gives_the_same_bits_for_any_cut():
    """Ratio 128: records of two groups from one step, from steps that end anywhere, and token by token over the end of a group."""
    torch.manual_seed(0)
    config = small_config([128], head_dim=512, qk_rope_head_dim=64, index_head_dim=128)
    plan = plan_caches(config, "v4", "v4", "index_bf16")
    rows, norm = torch.randn(260, 1024, device=DEVICE) * 3, torch.rand(512, device=DEVICE) + 0.5
    bias = torch.randn(128, 512, device=DEVICE)
    results = []
    for cuts in ([260], [126, *[1] * 12, 122], [3, 97, 60, 40, 60]):
        cache = KVCache(plan, {"main": 30, "index": 20, "small": 4}, torch.device(DEVICE))
        seq, start, latents = cache.new_sequence(), 0, []
        for count in cuts:
            assert cache.allocate(seq, start, start + count)
            batch = build_batch(config, cache, [Chunk([0] * count, start, seq)], [], torch.device(DEVICE))
            facts, store = batch.compress[128], batch.stores["c128_state"]
            state, sums, entries = (pages_of(cache, kind) for kind in ("c128_state", "c128_sums", "c128"))
            latents.append(kernels.compress(
                rows[start : start + count], bias, norm, facts, store, state, sums, entries, 0, overlap=False, rotate_keys=False, eps=1e-6,
                dtype=torch.float32, with_latent=True, batch_invariant=True,
            ))  # fmt: skip
            start += count
            cache.commit(seq, [], start)
            cache.release_unneeded(seq, start)
        results.append(torch.cat(latents))
    pooled = (
        (rows[:256, :512].double() * (rows[:256, 512:].double().unflatten(0, (2, 128)) + bias).softmax(1).flatten(0, 1))
        .unflatten(0, (2, 128))
        .sum(1)
    )
    torch.testing.assert_close(results[0], rms_norm(pooled.float(), norm, 1e-6), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(result, results[0]) for result in results[1:])


def test_kernel_skips_groups_and_rows_of_slot_minus_one():
    layout, state = layouts.get("v4"), layouts.state_rows(2048)
    pages = kernels.Pages("entries", new_pool(layout, 2), layout, ENTRIES)
    states = kernels.Pages("state", new_pool(state, 2), state, ENTRIES)
    rows, norm = torch.randn(4, 2048, device=DEVICE), torch.ones(512, device=DEVICE)
    sources = torch.tensor([[4, 4, 4, 4, 0, 1, 2, 3]] * 2, device=DEVICE)
    rope = rope_table(torch.tensor([0, 0]), RopeConfig(64, 160000.0, None)).to(DEVICE)
    none = torch.full((2,), -1, device=DEVICE)
    for n in (2, 0):
        facts = step_facts(sources[:n], none[:0], none[:n], rope[:n])
        store = StoreFacts(torch.arange(n, device=DEVICE), none[None, :n])
        kernels.compress(
            rows, None, norm, facts, store, states, None, pages, 0, overlap=True, rotate_keys=False, eps=1e-6, dtype=torch.bfloat16
        )  # fmt: skip
        assert (pages.data == POISON).all() and (states.data == POISON).all()


@pytest.mark.parametrize("layout", ["bf16", "v41", "v41_fp4"])
def test_kernel_pools_pairs(layout):
    """Ratio 2 (V4.1 spec 3.6): one carried row, a pair within the step, and the latents before RoPE."""
    torch.manual_seed(0)
    layout, state = layouts.get(layout), layouts.state_rows(1024)
    pages = kernels.Pages("entries", new_pool(layout, 2), layout, ENTRIES)
    states = kernels.Pages("state", new_pool(state, 2), state, ENTRIES)
    old = torch.randn(1, 1024, device=DEVICE)
    states.data[1, 4096 : 2 * 4096] = old.view(torch.uint8)
    rows, norm = torch.randn(4, 1024, device=DEVICE), torch.rand(512, device=DEVICE) + 0.5
    sources = torch.tensor([[0, 1], [2, 3]], device=DEVICE)
    slots, rope = (
        torch.tensor([6, 1], device=DEVICE),
        rope_table(torch.tensor([10, 500]), RopeConfig(64, 160000.0, None)).to(DEVICE),
    )
    stored = torch.empty(2, 512, device=DEVICE)
    before, state_before = pages.data.clone(), states.data.clone()
    kept = torch.tensor([3], device=DEVICE)
    latent = kernels.compress(
        rows, None, norm, step_facts(sources, torch.tensor([5], device=DEVICE), slots, rope), StoreFacts(kept, kept[None]), states, None,
        pages, 0, overlap=False, rotate_keys=False, eps=1e-6, dtype=torch.bfloat16, with_latent=True, stored=stored,
        config=kernels.compress_config(512, True, 256, False),
    )  # fmt: skip
    expected = rms_norm(pool(torch.cat([old, rows]), sources, False).bfloat16(), norm, 1e-6)
    assert ((latent.float() - expected.float()).abs() <= 2**-7 * expected.float().abs()).all()
    turned = rotate(latent.float(), rope)
    assert ((stored - turned).abs() <= 2**-8 * turned.abs().amax(-1, keepdim=True)).all()
    assert torch.equal(pages.data.cpu(), written(before, layout, slots, stored))
    assert torch.equal(states.data.cpu(), written(state_before, state, kept, rows[3:]))


@pytest.mark.parametrize("layout", ["bf16", "v41_fp4"])
def test_kernel_of_ratio_1_norms_rotates_and_stores(layout):
    torch.manual_seed(0)
    layout = layouts.get(layout)
    pages = kernels.Pages("entries", new_pool(layout, 2), layout, ENTRIES)
    rows, norm = torch.randn(3, 512, device=DEVICE), torch.rand(512, device=DEVICE) + 0.5
    slots, stored, before = torch.tensor([6, -1, 1], device=DEVICE), torch.empty(3, 512, device=DEVICE), pages.data.clone()
    rope = rope_table(torch.tensor([10, 500, 9]), RopeConfig(64, 160000.0, None)).to(DEVICE)
    latent = kernels.compress(
        rows, None, norm, step_facts(slots[:, None], slots[:0], slots, rope), None, None, None, pages, 0, overlap=False, rotate_keys=False,
        eps=1e-6, dtype=torch.bfloat16, with_latent=True, stored=stored,
    )  # fmt: skip
    expected = rms_norm(rows.bfloat16(), norm, 1e-6)
    assert ((latent.float() - expected.float()).abs() <= 2**-7 * expected.float().abs()).all()
    turned = rotate(latent.float(), rope)
    assert ((stored - turned).abs() <= 2**-8 * turned.abs().amax(-1, keepdim=True)).all()
    assert torch.equal(pages.data.cpu(), written(before, layout, slots, stored))


@pytest.mark.parametrize("part", [8, 16])
def test_kernel_sums_open_groups_and_completes_them(part):
    """Ratio 128: an entry from carried sums, carried rows and the step's rows; then the sums of the open group; the ring last."""
    torch.manual_seed(0)
    layout, ring, record = layouts.get("v4"), layouts.state_rows(1024), layouts.state_rows(1536)
    pages = kernels.Pages("entries", new_pool(layout, 1), layout, ENTRIES)
    rings = kernels.Pages("state", new_pool(ring, 2, 8), ring, 8)
    sums = kernels.Pages("sums", new_pool(record, 3, 1), record, 1)
    sequence = (
        torch.randn(131, 1024, device=DEVICE) * 3
    )  # tokens 0 .. 130; the step starts at 126, rows before 118 are in the sums
    values, scores = sequence.double().chunk(2, 1)

    def summed(first, end):
        m = scores[first:end].amax(0)
        weight = (scores[first:end] - m).exp()
        return torch.cat([m, weight.sum(0), (weight * values[first:end]).sum(0)]).float()

    sums.data[2, : 1536 * 4] = summed(0, 118).view(torch.uint8)
    for p in range(118, 126):
        rings.data[1, p % 8 * 4096 : (p % 8 + 1) * 4096] = sequence[p].view(torch.uint8)
    empty = 8 + 5
    entry = [*range(10)] + [empty] * 6  # rows 118 .. 127
    opened = [*range(5)] + [empty] * 11  # rows 118 .. 122
    slots, ring_slots = torch.tensor([2], device=DEVICE), torch.tensor([8 + p % 8 for p in range(126, 131)], device=DEVICE)
    phases = torch.arange(126, 131, device=DEVICE) % 128
    facts = step_facts(
        torch.tensor([entry, opened], device=DEVICE),
        torch.tensor([8 + p % 8 for p in range(118, 126)], device=DEVICE),
        slots,
        rope_table(torch.tensor([0]), RopeConfig(64, 160000.0, None)).to(DEVICE),
        carried_sums=torch.tensor([2, 2], device=DEVICE),
        sum_slots=torch.tensor([1], device=DEVICE),
        phases=phases,
    )
    bias = torch.randn(128, 512, device=DEVICE) * 3
    rows = sequence[126:].clone()
    rows[:, 512:] -= bias[phases]
    norm, stored = torch.rand(512, device=DEVICE) + 0.5, torch.empty(1, 512, device=DEVICE)
    before, ring_before = pages.data.clone(), rings.data.clone()
    kernels.compress(
        rows, bias, norm, facts, StoreFacts(torch.arange(5, device=DEVICE), ring_slots[None]), rings, sums, pages, 0, overlap=False,
        rotate_keys=False, eps=1e-6, dtype=torch.bfloat16, stored=stored, sum_config=kernels.SumConfig(part, 8),
    )  # fmt: skip
    pooled = (values[:128] * scores[:128].softmax(0)).sum(0).float()[None].bfloat16()
    expected = rotate(rms_norm(pooled, norm, 1e-6).float(), facts.rope)
    assert ((stored - expected).abs() <= 2**-7 * expected.abs().amax()).all()
    assert torch.equal(pages.data.cpu(), written(before, layout, slots, stored))
    got = sums.data[1, : 1536 * 4].clone().view(torch.float32)
    torch.testing.assert_close(got, summed(0, 123), rtol=1e-5, atol=1e-5)
    kept = rows.clone()
    kept[:, 512:] += bias[phases]
    assert torch.equal(rings.data.cpu(), written(ring_before, ring, ring_slots, kept, 8))


@pytest.mark.parametrize(("ratio", "layout"), [(4, "v4"), (4, "index_fp8"), (2, "v41_fp4"), (128, "v4")])
def test_kernel_for_one_token_each_writes_what_the_general_one_writes(ratio, layout):
    """Three sequences: one at its start, one that completes nothing, one in the middle; pages, states and sums byte for byte."""
    torch.manual_seed(0)
    layout, slots = layouts.get(layout), {4: 8, 2: 2, 128: 9}[ratio]
    dim, old = layout.dim, slots - 1
    width = (4 if ratio == 4 else 2) * dim
    state, record = layouts.state_rows(width), layouts.state_rows(3 * dim)
    rows, norm = torch.randn(3, width, device=DEVICE) * 3, torch.rand(dim, device=DEVICE) + 0.5
    carried = torch.randperm(3 * old, device=DEVICE).int() + 3
    sources = torch.cat([torch.arange(3 * old).view(3, old), 3 * old + torch.arange(3)[:, None]], 1)
    empty, first = 3 * old + 3, max(0, old - 3)  # of the first sequence three earlier rows at most
    sources[0, :first], carried[:first] = empty, -1
    token = torch.arange(3, device=DEVICE)
    m = {4: 4, 2: 2, 128: 128}[ratio]
    bias, phases = torch.randn(m, width // 2, device=DEVICE) if m > 2 else None, torch.full_like(token, m - 1)
    entry_slots, sums, before, after = torch.tensor([2, -1, 5], device=DEVICE), None, None, None
    if ratio == 128:  # the oldest kept row joins the sums, but for the first sequence, and its place is taken
        opened = torch.full((3, slots), empty)
        opened[1:, 0] = sources[1:, 0]
        sources = torch.cat([sources, opened])
        kept_slots = torch.tensor([3 * old + 3, int(carried[old]), int(carried[2 * old])], device=DEVICE)
        before = torch.tensor([-1, 1, 2, -1, 1, 2], device=DEVICE)
        after = torch.tensor([-1, 1, 2], device=DEVICE)
    else:
        kept_slots = torch.tensor([0, -1, 2], device=DEVICE)
    rope = rope_table(torch.tensor([0, 500, 9]), RopeConfig(64, 160000.0, None)).to(DEVICE)
    pools = []
    for each in (True, False):
        pages = kernels.Pages("entries", new_pool(layout, 2), layout, ENTRIES)
        states = kernels.Pages("state", new_pool(state, 8), state, ENTRIES)
        torch.manual_seed(1)
        states.data.copy_(torch.randn(states.data.shape[0], states.data.shape[1] // 4, device=DEVICE).view(torch.uint8))
        if ratio == 128:
            sums = kernels.Pages("sums", new_pool(record, 3, 1), record, 1)
            for data in sums.data[1:]:
                data[: 12 * dim] = (torch.rand(3 * dim, device=DEVICE) + 0.5).view(torch.uint8)
        kernels.compress(
            rows, bias, norm, step_facts(sources.to(DEVICE), carried, entry_slots, rope, before, after, each, phases),
            StoreFacts(token, kept_slots[None]), states, sums, pages, 0, overlap=ratio == 4, rotate_keys=dim == 128, eps=1e-6,
            dtype=torch.bfloat16, batch_invariant=True,
        )  # fmt: skip
        pools.append([kind.data.cpu() for kind in (pages, states, sums) if kind is not None])
    assert all(torch.equal(*pair) for pair in zip(*pools, strict=True))
    assert not (pools[0][0] == POISON).all()


@pytest.mark.gpu
def test_tokens_of_one_graph_read_the_rows_that_the_launch_before_the_last_kept():
    """Sixteen steps of one token, whose rows the kernel just before makes: the pages of a graph's replays and of steps run one by one."""
    layout, state = layouts.get("v4"), layouts.state_rows(2048)
    torch.manual_seed(0)
    x, weight, norm = (
        torch.randn(16, 2048, device=DEVICE),
        torch.full((2048,), 3.0, device=DEVICE),
        torch.ones(512, device=DEVICE),
    )
    bias, kept = torch.randn(4, 1024, device=DEVICE), torch.arange(16, device=DEVICE) + 4
    table = rope_table(torch.arange(16), RopeConfig(64, 160000.0, None)).to(DEVICE)
    steps = []
    for t in range(16):
        carried = torch.tensor([4 + p if p >= 0 else -1 for p in range(t - 7, t)], device=DEVICE).int()
        slot = torch.tensor([t // 4 + 4 if t % 4 == 3 else -1], device=DEVICE)
        sources, phase = torch.arange(8, device=DEVICE)[None], torch.tensor([t % 4], device=DEVICE)
        facts = step_facts(sources, carried, slot, table[t : t + 1], token_each=True, phases=phase)
        steps.append((x[t : t + 1], facts, StoreFacts(phase * 0, kept[None, t : t + 1])))
    pages, states = new_pool(layout, 2), new_pool(state, 5)

    def run(between):
        for one, facts, store in steps:
            rows, *_ = normed((one, weight), eps=1e-6)
            kernels.compress(
                rows, bias, norm, facts, store, kernels.Pages("state", states, state, ENTRIES), None,
                kernels.Pages("entries", pages, layout, ENTRIES), 0, overlap=True, rotate_keys=False, eps=1e-6, dtype=torch.bfloat16,
            )  # fmt: skip
            between()

    run(torch.cuda.synchronize)
    expected = [data.clone() for data in (pages, states)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(lambda: None)
    for _ in range(20):
        for data in (pages, states):
            data.fill_(POISON)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(*pair) for pair in zip((pages, states), expected, strict=True))
    assert not (expected[0][1] == POISON).all()
