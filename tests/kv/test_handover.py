"""Hand-over of a sequence between caches: nothing is lost, nothing is foreign, and a damaged object changes nothing."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from abyssal.errors import HandOverError
from abyssal.kv import handover
from abyssal.kv.handover import HandOver, Part, PartReader, _digest, _read, complete, export, restore, stored_entries, write_part
from abyssal.kv.planner import layer_bytes, sequence_cost
from abyssal.kv.pool import KVCache, SequenceCache, entry_slots
from abyssal.kv.prefix import PrefixIndex
from abyssal.kv.specs import CachePlan, plan_caches
from abyssal.model_config import parse_model_config
from tests.support.small_model import small_config, v41_config_dict

CPU = torch.device("cpu")
RELEASED = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "sliding_window": 128}
PACKED = ("v4", "v4", "index_fp8"), ("v41", "v41_fp4", "index_mxfp4"), ("bf16", "bf16", "index_bf16")
PLAN = plan_caches(small_config([0, 4, 128, 4]), "fp32", "bf16", "index_bf16")
PAGES = {"main": 120, "index": 60, "small": 20}
IDS = random.Random(2).choices(range(160), k=1000)


def cache_of(plan=PLAN, pages=PAGES, prefix: bool = False, identity: str = "model") -> KVCache:
    """Pools full of noise: what a page held before must never count."""
    cache = KVCache(plan, pages, CPU, PrefixIndex(identity) if prefix else None, identity)
    for pool in cache.pools.values():
        pool.data[1:] = torch.randint(256, pool.data[1:].shape, dtype=torch.uint8)
    return cache


def computed(cache: KVCache, tokens: int, step: int = 10**9, rejected: int = 0) -> SequenceCache:
    seq = cache.new_sequence()
    while seq.num_tokens < tokens:
        end = min(seq.num_tokens + step, tokens)
        drafts = rejected if end == tokens else 0
        assert cache.allocate(seq, seq.num_tokens, end + drafts)
        cache.commit(seq, IDS, end, rejected=drafts)
        cache.release_unneeded(seq, end)
    return seq


def state(cache: KVCache) -> tuple[object, ...]:
    pools = cache.pools.values()
    return [p.data.clone() for p in pools], [sorted(p._free) for p in pools], dict(cache.used_by_kind)


def assert_equal(one: HandOver, other: HandOver) -> None:
    fields = ("identity", "token_ids", "num_tokens", "folded", "kinds")
    assert all(getattr(one, f) == getattr(other, f) for f in fields) and one.records.keys() == other.records.keys()
    assert all(torch.equal(records, other.records[name]) for name, records in one.records.items())


@pytest.mark.parametrize("rejected", [0, 3, 8])
@pytest.mark.parametrize("tokens", [1, 3, 7, 8, 9, 100, 127, 128, 129, 140, 255, 256, 257, 600])
def test_a_sequence_arrives_as_it_left(tokens: int, rejected: int) -> None:
    one, other = cache_of(), cache_of(pages={"main": 90, "index": 70, "small": 33})
    sent = export(one, computed(one, tokens, step=50, rejected=rejected), IDS)
    arrived = HandOver.from_bytes(sent.to_bytes())
    assert_equal(sent, arrived)
    seq = other.new_sequence()
    assert restore(other, seq, arrived)
    assert_equal(sent, export(other, seq, IDS))
    assert other.allocate(seq, tokens, tokens + 1)
    other.commit(seq, IDS, tokens + 1)
    other.free(seq)
    assert not any(other.used_by_kind.values()) and all(p.num_free == p.num_pages for p in other.pools.values())


@pytest.mark.parametrize("most", [1, 300, 5000])
def test_a_long_sequence_is_copied_in_pieces(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside its pools a GPU has little memory: what is copied at once does not grow with the sequence."""
    one, other = cache_of(), cache_of()
    source = computed(one, 600, step=50)
    whole = export(one, source, IDS)
    sizes = []
    for view in (*one.views.values(), *other.views.values()):
        for name in ("read_bytes", "write_bytes"):
            copy, width = getattr(view, name), view.spec.layout.bytes_per_entry

            def noted(slots: torch.Tensor, *records: torch.Tensor, copy: Any = copy, width: int = width) -> Any:
                sizes.append((len(slots) * width, width))
                return copy(slots, *records)

            monkeypatch.setattr(view, name, noted)
    monkeypatch.setattr(handover, "COPIED_AT_ONCE", most)
    assert_equal(whole, export(one, source, IDS))
    seq = other.new_sequence()
    assert restore(other, seq, whole)
    assert sizes and all(size <= max(most, width) for size, width in sizes)
    assert sum(size for size, _ in sizes) == 2 * whole.payload_bytes
    monkeypatch.undo()
    assert_equal(whole, export(other, seq, IDS))


@pytest.mark.parametrize("layouts", PACKED, ids="-".join)
@pytest.mark.parametrize("tokens", [1, 100, 129, 1000])
def test_size_is_what_the_planner_says(layouts: tuple[str, str, str], tokens: int) -> None:
    plan = plan_caches(small_config([0, 4, 128], **RELEASED), *layouts)
    cache = cache_of(plan, {"main": 120, "index": 40, "small": 20})
    handed = export(cache, computed(cache, tokens), IDS)
    assert {n: r.numel() for n, r in handed.records.items()} == {c.spec.name: c.payload for c in sequence_cost(plan, tokens)}
    assert handed.payload_bytes == sum(cost.payload for cost in sequence_cost(plan, tokens))
    assert len(handed.to_bytes()) - handed.payload_bytes < 4 * len(IDS) + 4096


V41 = plan_caches(
    parse_model_config(v41_config_dict([2, 2, 1, 1, 1], kv_sources=[0, 2], index_sources=[0, 2])),
    "fp32", "bf16", "index_bf16",
)  # fmt: skip


@pytest.mark.parametrize("plan", [PLAN, V41], ids=["v4", "v41"])
@pytest.mark.parametrize("ends", [[1], [140], [256, 257], [100, 101, 355, 600], [300, 512]], ids=str)
def test_parts_read_layer_by_layer_are_what_one_copy_has(plan: CachePlan, ends: list[int]) -> None:
    """Each part is announced before its step, and a layer is read once the step has been through it: only then are its records there."""
    pages = {"main": 200, "index": 90, "small": 33}
    one, other = cache_of(plan, pages), cache_of(plan, pages)
    there, here = one.new_sequence(), other.new_sequence()
    assert other.allocate_restored(here, IDS, ends[-1]) == 0
    moved, start = 0, 0
    for end in ends:
        assert one.allocate(there, start, end)
        part = Part(start, end, last=end == ends[-1])
        sizes = layer_bytes(plan, start, end, part.last)
        reader = PartReader(one, there, part, sizes)
        for layer in range(len(sizes)):
            _write_layer(one, there, layer, start, end)
            assert len(reader.read(layer)) == sizes[layer]
        one.commit(there, IDS, end)
        one.release_unneeded(there, end)
        write_part(other, here, part, [message.clone() for message in reader.messages])
        moved, start = moved + sum(sizes), end
    complete(other, here, IDS, start, there.folded)
    assert_equal(export(one, there, IDS), export(other, here, IDS))
    assert moved == sum(cost.payload for cost in sequence_cost(plan, start))


def _write_layer(cache: KVCache, seq: SequenceCache, layer: int, start: int, end: int) -> None:
    """Noise where a step of tokens [start, end) stores its records of one layer."""
    for name, spec in cache.specs.items():
        if layer not in spec.layers:
            continue
        first, stop = (0, spec.record_entries) if spec.lifetime == "record" else (start // spec.ratio, end // spec.ratio)
        slots = entry_slots(spec, seq.tables[name], np.arange(first, stop))[spec.row(layer)]
        slots = torch.from_numpy(slots[slots >= 0]).long()
        records = torch.randint(256, (len(slots), spec.layout.bytes_per_entry), dtype=torch.uint8)
        cache.views[name].write_bytes(slots, records)


def test_only_rows_of_the_record_that_mean_something_leave() -> None:
    """Of 3 tokens the other 5 rows of the ring, and sums over nothing, hold what earlier owners of the page left."""
    cache = cache_of()
    handed = export(cache, computed(cache, 3), IDS)
    assert handed.records["c128_state"][:, :3].any(-1).all() and not handed.records["c128_state"][:, 3:].any()
    assert not handed.records["c128_sums"].any()
    handed = export(cache, computed(cache, 140), IDS)
    assert handed.records["c128_state"].any(-1).all() and handed.records["c128_sums"].any()
    assert not export(cache, computed(cache, 136), IDS).records["c128_sums"].any()  # sums up to 128: the group is complete


def test_damage_anywhere_is_refused_and_touches_nothing() -> None:
    cache = cache_of()
    raw = export(cache, computed(cache, 200), IDS).to_bytes()
    rng = random.Random(3)
    for position in [0, 7, 8, 9, 50, 200, len(raw) - 1, *(rng.randrange(len(raw)) for _ in range(60))]:
        damaged = bytearray(raw)
        damaged[position] ^= 1 << rng.randrange(8)
        with pytest.raises(HandOverError):
            HandOver.from_bytes(bytes(damaged))
    for cut in (0, 1, 8, 100, len(raw) // 2, len(raw) - 1):
        with pytest.raises(HandOverError):
            HandOver.from_bytes(raw[:cut])
    with pytest.raises(HandOverError, match="12 bytes are no hand-over"):
        HandOver.from_bytes(b"not a cache!")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"version": 2}', "has format 2, this engine reads 1"),
        (b"[]", "lacks what this engine looks for"),
        (b"{", "lacks what this engine looks for"),
        (b'{"version": 1, "identity": "model"}', "lacks what this engine looks for: KeyError"),
        (b'{"version": 1, "identity": "model", "num_tokens": "many"}', "lacks what this engine looks for: ValueError"),
        (b'{"version": 1, "identity": "model", "num_tokens": Infinity}', "lacks what this engine looks for: OverflowError"),
    ],
)
def test_sound_files_of_other_content_are_refused(header: bytes, message: str) -> None:
    parts = {"header": torch.frombuffer(bytearray(header), dtype=torch.uint8), "token_ids": torch.zeros(3, dtype=torch.int32)}
    with pytest.raises(HandOverError, match=message):
        HandOver.from_bytes(save(parts | {"digest": _digest(parts)}))
    with pytest.raises(HandOverError, match="digest"):
        HandOver.from_bytes(save(parts))


@pytest.mark.parametrize(
    ("token_ids", "others", "message"),
    [
        (torch.zeros(3), {}, "token ids .*float32"),
        (torch.zeros(1, 3, dtype=torch.int32), {}, "token ids .*int32"),
        (torch.zeros(3, dtype=torch.int32), {"z": torch.tensor(1)}, "'z'"),
        (torch.zeros(3, dtype=torch.int32), {"z": torch.zeros(2)}, "'z'"),
    ],
)
def test_sound_files_of_other_tensors_are_refused(token_ids: torch.Tensor, others: dict[str, torch.Tensor], message: str) -> None:
    header = b'{"version": 1, "identity": "model", "num_tokens": 3, "folded": 0, "kinds": {}}'
    parts = {"header": torch.frombuffer(bytearray(header), dtype=torch.uint8), "token_ids": token_ids} | others
    with pytest.raises(HandOverError, match=message):
        HandOver.from_bytes(save(parts | {"digest": _digest(parts)}))


def test_what_comes_from_elsewhere_is_refused_by_name_and_touches_nothing() -> None:
    home = cache_of()
    handed = export(home, computed(home, 200), IDS)
    others = {
        "another model": cache_of(identity="other"),
        "'c4' is .*bf16.* here": cache_of(plan_caches(small_config([0, 4, 128, 4]), "fp32", "fp32", "index_bf16")),
        "'c4_index' is .* and .*index_fp32": cache_of(plan_caches(small_config([0, 4, 128, 4]), "fp32", "bf16", "index_fp32")),
        "'window' is .*'window': 16.*'window': 32": cache_of(
            plan_caches(small_config([0, 4, 128, 4], sliding_window=32), "fp32", "bf16", "index_bf16")
        ),
        "'c128' is .* and None here": cache_of(plan_caches(small_config([0, 4, 0, 4]), "fp32", "bf16", "index_bf16")),
    }
    for message, cache in others.items():
        before = state(cache)
        with pytest.raises(HandOverError, match=message):
            restore(cache, cache.new_sequence(), handed)
        assert all(torch.equal(a, b) for a, b in zip(before[0], state(cache)[0], strict=True))
        assert before[1:] == state(cache)[1:]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 0}, {"num_tokens": 201}, {"num_tokens": -1}, {"num_tokens": 1001}, {"folded": 191}, {"folded": 201},
        {"token_ids": IDS[:199]}, {"records": {}}, {"kinds": {}},
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(changes: dict[str, object]) -> None:
    cache = cache_of()
    handed = dataclasses.replace(export(cache, computed(cache, 200), IDS), **changes)
    before = state(cache)
    with pytest.raises(HandOverError):
        restore(cache, cache.new_sequence(), HandOver.from_bytes(handed.to_bytes()))
    assert before[1:] == state(cache)[1:]


def test_short_of_pages_nothing_is_taken() -> None:
    home, small, enough = cache_of(), *(cache_of(pages={"main": n, "index": 60, "small": 20}) for n in (21, 22))
    handed = export(home, computed(home, 900, step=100), IDS)
    seq, before = small.new_sequence(), state(small)
    assert not restore(small, seq, handed)
    assert before[1:] == state(small)[1:] and seq.num_tokens == 0
    assert restore(enough, enough.new_sequence(), handed) and enough.pools["main"].num_free == 0


def test_restored_tokens_are_final() -> None:
    """Rows before the window stayed behind, so nothing from before can be computed again; what follows can."""
    home, cache = cache_of(), cache_of()
    seq = cache.new_sequence()
    assert restore(cache, seq, export(home, computed(home, 200), IDS))
    with pytest.raises(ValueError, match="1 of 200 tokens: 200 are final"):
        cache.roll_back(seq, 1)
    assert cache.allocate(seq, 200, 205)
    cache.commit(seq, IDS, 205)
    cache.roll_back(seq, 5)
    assert seq.num_tokens == 200


def test_a_sequence_returns_to_the_blocks_that_it_left() -> None:
    """They are still there, and however little room there is, they are not pushed out by the sequence's own return."""
    cache = cache_of(prefix=True)
    seq = computed(cache, 700, step=100)
    handed = export(cache, seq, IDS)
    blocks = list(seq.blocks)
    cache.free(seq)
    for bucket, rest in {"main": 12, "index": 6, "small": 1}.items():  # pages of the last block, windows and records
        cache.pools[bucket].take(cache.pools[bucket].num_free - rest)
    assert restore(cache, seq, handed)
    assert seq.blocks == blocks and len(blocks) == 2
    assert_equal(handed, export(cache, seq, IDS))


@pytest.mark.parametrize("layouts", [("fp32", "bf16", "index_bf16"), *PACKED], ids="-".join)
@pytest.mark.parametrize("beyond", range(17))
def test_a_hit_behind_restored_tokens_reads_what_was_written(layouts: tuple[str, str, str], beyond: int) -> None:
    """Of the window before the end of a block only the rows that the next token reads came along: the others are noise on its pages."""
    config = RELEASED if layouts in PACKED else {}
    plan = plan_caches(small_config([0, 4, 128, 4], **config), *layouts)
    home, cache = cache_of(plan), cache_of(plan, prefix=True)
    seq, tokens = cache.new_sequence(), 256 + beyond
    handed = export(home, computed(home, tokens), IDS)
    assert restore(cache, seq, handed)
    hit = cache.new_sequence()
    assert cache.reuse(hit, IDS[:300]) == (256 if beyond == 0 else 0)
    if beyond == 0:
        for name, spec in plan.specs.items():
            if spec.lifetime == "window":
                assert torch.equal(_read(cache, spec, hit, stored_entries(spec, 256)), handed.records[name])
    assert cache.allocate(seq, tokens, 600)
    cache.commit(seq, IDS, 600)
    later = cache.new_sequence()
    assert cache.reuse(later, IDS[:600]) == 512, "what is computed after them serves as ever"


def test_complete_blocks_join_the_prefix_index_and_are_held_once() -> None:
    home, cache = cache_of(), cache_of(prefix=True)
    handed = export(home, computed(home, 700), IDS)
    seqs = [cache.new_sequence() for _ in range(2)]
    free = [{name: pool.num_free for name, pool in cache.pools.items()}]
    for seq in seqs:
        assert restore(cache, seq, handed)
        free.append({name: pool.num_free for name, pool in cache.pools.items()})
    saved = {name: free[0][name] - 2 * free[1][name] + free[2][name] for name in free[0]}
    assert saved == {"main": 2 * 2, "index": 2 * 2, "small": 2}, "pages of two blocks: two layers of ratio 4, one of ratio 128"
    assert_equal(dataclasses.replace(handed, identity="model"), export(cache, seqs[1], IDS))
    assert [len(seq.blocks) for seq in seqs] == [2, 2] and seqs[0].blocks == seqs[1].blocks
    third = cache.new_sequence()
    assert cache.reuse(third, IDS[:700]) == 0, "windows at the ends of blocks did not come along"
    for seq in seqs:
        cache.free(seq)
    assert not any(cache.used_by_kind.values())
