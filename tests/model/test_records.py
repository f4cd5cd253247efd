"""Packed KV records and index keys in the running engine: what is stored is what the codec says, and recall survives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from abyssal import LLM
from abyssal.kv import codec
from abyssal.kv.batch import Chunk
from abyssal.kv.pool import RecordView
from tests.model.test_recall import recalled

Documents = Callable[[int], list[dict[str, Tensor]]]
LAYOUTS = [
    {"kv_layout": kv, "compressed_kv_layout": compressed, "index_layout": index}
    for kv, compressed in (("bf16", "same"), ("v4", "same"), ("v41", "same"), ("v41", "fp4"))
    for index in ("bf16", "fp8", "fp4")
]


def load(options: dict[str, str]) -> LLM:
    return LLM("tiny", device="cpu", dtype="float32", kv_cache_bytes=256 << 20, max_model_len=16384, **options)


def check_recall(options: dict[str, str], documents: list[dict[str, Tensor]]) -> None:
    """At most 2 of 80 answers fewer than with fp32 records."""
    with load(options) as llm:
        hits = sum(int(recalled(llm, document).sum()) for document in documents)
    stored = sum(int(document["fp32_hits"].sum()) for document in documents)
    assert hits >= stored - 2 * len(documents) // 10, f"{hits} right, {stored} with fp32 records"


@pytest.mark.parametrize("options", [LAYOUTS[4], LAYOUTS[11]], ids=lambda o: "-".join(o.values()))
def test_recall_with_packed_records(options: dict[str, str], recall: Documents) -> None:
    check_recall(options, recall(512))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tokens", [2048, 8192])
@pytest.mark.parametrize("options", LAYOUTS, ids=lambda o: "-".join(o.values()))
def test_recall_with_every_layout(options: dict[str, str], tokens: int, recall: Documents) -> None:
    check_recall(options, recall(tokens))


@pytest.mark.parametrize("options", [LAYOUTS[4], LAYOUTS[11]], ids=lambda o: "-".join(o.values()))
def test_live_pages_hold_the_encoded_rows_and_are_what_is_read(
    options: dict[str, str], recall: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = recall(512)[0]["input_ids"].tolist()[:400]
    written: dict[tuple[str, int], Tensor] = {}
    write = RecordView.write

    def record(self: RecordView, slots: Tensor, values: Tensor) -> None:
        write(self, slots, values)
        written.update({(self.spec.name, slot): value.clone() for slot, value in zip(slots.tolist(), values, strict=True)})

    monkeypatch.setattr(RecordView, "write", record)
    with load(options) as llm:
        runner, cache = llm.engine.runner, llm.engine.cache
        seq = cache.new_sequence()
        assert cache.allocate(seq, 0, 399)
        runner([Chunk(ids[:399], 0, seq)], [398])
        assert {name for name, _ in written} == set(cache.specs)
        for (name, slot), value in written.items():
            spec = cache.specs[name]
            page, row = divmod(slot, spec.entries_per_page)
            raw = cache.pools[spec.bucket].data[page]
            data, scales = codec.encode(spec.layout, value[None].float())
            first, second = (
                spec.layout.data_offset(row, spec.entries_per_page),
                spec.layout.scale_offset(row, spec.entries_per_page),
            )
            assert torch.equal(raw[first : first + spec.layout.data_bytes], data[0]), name
            assert torch.equal(raw[second : second + spec.layout.scale_bytes], scales[0]), name
        cache.commit(seq, ids, 399)
        assert cache.allocate(seq, 399, 400)
        before = runner([Chunk(ids[399:400], 399, seq)], [0]).clone()
        spec = cache.specs["window"]
        page, row = int(seq.tables["window"].pages[0, -1]), 398 % spec.entries_per_page
        cache.pools[spec.bucket].data[page, spec.layout.scale_offset(row, spec.entries_per_page)] ^= 4
        after = runner([Chunk(ids[399:400], 399, seq)], [0])
        assert not torch.equal(before, after), "a scale byte was not read"
        cache.free(seq)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_recall_in_a_document_of_131072_tokens(recall: Documents) -> None:
    """v4 records and FP4 index keys: at most one of the first document's 8 answers fewer than with fp32 records."""
    document = recall(131072)[0]
    options = {"kv_layout": "v4", "index_layout": "fp4", "kv_cache_bytes": 512 << 20, "max_model_len": 131200}
    with LLM("tiny", device="cpu", dtype="float32", **options) as llm:
        hits = int(recalled(llm, document).sum())
    assert hits >= int(document["fp32_hits"].sum()) - 1, f"{hits} right"
