"""The two views of a step's queries: lists of slots for kernels name what groups show to the reference."""

from __future__ import annotations

import torch

from abyssal.config import ModelConfig
from abyssal.kv import batch as batch_module
from abyssal.kv.batch import Batch, Chunk, build_batch
from abyssal.kv.pool import KVCache
from abyssal.kv.specs import plan_caches
from tests.support.small_model import small_config

CPU = torch.device("cpu")
STEPS = (
    [(0, 1)],
    [(300, 301), (0, 1), (127, 128)],
    [(0, 700)],
    [(5, 200)],
    [(299, 300), (17, 18), (0, 150), (126, 131), (640, 641 + 70)],
)


def views(config: ModelConfig, step: list[tuple[int, int]]) -> tuple[KVCache, Batch, Batch]:
    plan = plan_caches(config, "fp32", "fp32", "index_fp32")
    cache = KVCache(plan, dict.fromkeys(plan.page_bytes, 400), CPU)
    chunks = []
    for i, (start, end) in enumerate(step):
        seq = cache.new_sequence()
        if start:
            assert cache.allocate(seq, 0, start)
            cache.commit(seq, [i] * start, start)
            cache.release_unneeded(seq, start)
        assert cache.allocate(seq, start, end)
        chunks.append(Chunk([i] * (end - start), start, seq))
    return cache, build_batch(config, cache, chunks, [], CPU), build_batch(config, cache, chunks, [], CPU, as_lists=True)


def test_lists_name_what_groups_show() -> None:
    config = small_config([0, 4, 128, 4], sliding_window=128, index_topk=1024)
    for step in STEPS:
        cache, grouped, listed = views(config, step)
        lists = listed.lists
        assert lists is not None and grouped.lists is None and not listed.groups
        token = 0
        for group in grouped.groups:
            n, b = group.shape
            for i in range(n):
                for j in range(b):
                    seen = ~group.window_hidden[i, j]
                    length = int(lists.window_lengths[token])
                    assert torch.equal(lists.window_slots[:, token, :length], group.window_slots[:, i][:, seen]), (step, token)
                    for ratio, layers in ((4, (1, 3)), (128, (2,))):
                        count = int(group.visible[ratio][i, j])
                        assert int(lists.visible[ratio][token]) == count
                        spec = cache.specs[f"c{ratio}"]
                        for layer in layers:
                            expected = grouped.entry_slots(spec, layer, group)[i, :count]
                            assert torch.equal(lists.all_entries(spec.name, spec.row(layer))[token, :count], expected), (
                                step,
                                token,
                            )
                    token += 1
        assert token == len(listed.token_ids)


def test_a_group_sees_all_if_nothing_is_hidden() -> None:
    config = small_config([0, 4, 128, 4], sliding_window=128, index_topk=1024)
    found = []
    for step in (*STEPS, [(126, 127)], [(127, 128)], [(300, 301), (301, 302)], [(300, 301), (303, 304)]):
        for group in views(config, step)[1].groups:
            hides = group.window_hidden.any() or any((group.visible[r] < group.max_visible[r]).any() for r in (4, 128))
            assert group.sees_all == (not hides)
            found.append(group.sees_all)
    assert any(found) and not all(found)


def test_every_token_is_in_one_span(monkeypatch) -> None:
    """Also where scores are cut to a size: each span knows its sequences, its shape and what its queries see at most."""
    config = small_config([0, 4, 128, 4], sliding_window=128)
    for score_bytes in (batch_module.SCORE_BYTES, 100):
        monkeypatch.setattr(batch_module, "SCORE_BYTES", score_bytes)
        for step in STEPS:
            _, _, batch = views(config, step)
            assert batch.lists is not None
            covered, owner = [], [i for i, (start, end) in enumerate(step) for _ in range(end - start)]
            for span in batch.lists.spans:
                rows = range(span.rows.start, span.rows.stop)
                n, b = span.shape
                assert n * b == len(rows) and (n == 1 or b == 1)
                assert [owner[row] for row in rows] == [
                    s for s in range(span.sequences.start, span.sequences.stop) for _ in range(b)
                ]
                for ratio, visible in batch.lists.visible.items():
                    assert span.max_visible[ratio] == int(visible[span.rows].max())
                covered += rows
            assert covered == list(range(len(owner)))
            assert score_bytes > 100 or max(s.shape[1] for s in batch.lists.spans) <= batch_module.QUERY_TILE


def test_facts_are_contiguous() -> None:
    """Kernels step over rows by their length."""
    _, _, batch = views(small_config([0, 4, 128, 4], sliding_window=128), STEPS[-1])
    assert batch.lists is not None
    tensors = [
        batch.token_ids,
        batch.positions,
        *batch.tables.values(),
        *batch.lists.visible.values(),
        batch.lists.window_lengths,
    ]
    tensors += [t for store in batch.stores.values() for t in (store.rows, store.slots)]
    for facts in batch.compress.values():
        tensors += [facts.sources, facts.rope, *facts.carried.values(), *facts.carried_sums.values()]
        tensors += [*facts.sum_slots.values(), *facts.entry_slots.values()]
    assert all(tensor.is_contiguous() for tensor in tensors)
