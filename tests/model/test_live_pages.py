"""A long prompt in every layout: the pools take what was planned, and hold exactly what the model wrote."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from abyssal import LLM, SamplingParams
from abyssal.config import ALLOWED_KV
from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest
from abyssal.kv import codec
from abyssal.kv.pool import NO_PAGE, KVCache, RecordView, SequenceCache, entry_slots
from abyssal.kv.report import sequence_totals

LAYOUTS = [
    {"kv_layout": kv, "compressed_kv_layout": compressed, "index_layout": index}
    for kv, compressed in sorted(ALLOWED_KV)
    for index in ("fp32", "bf16", "fp8", "fp4")
]


class Shadow:
    """The rows last written to every page, unencoded, by cache kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pages: dict[tuple[str, int], Tensor] = {}
        write = RecordView.write

        def spied(view: RecordView, slots: Tensor, values: Tensor) -> None:
            write(view, slots, values)
            pages, rows = slots // view.spec.entries_per_page, slots % view.spec.entries_per_page
            for page in pages.unique().tolist():
                here = pages == page
                shadow = self.pages.setdefault(
                    (view.spec.name, page), torch.full((view.spec.entries_per_page, view.spec.layout.dim), torch.nan)
                )
                shadow[rows[here]] = values[here].float()

        monkeypatch.setattr(RecordView, "write", spied)

    def check(self, cache: KVCache, seq: SequenceCache, tokens: int) -> None:
        """Every entry that a sequence of `tokens` tokens keeps, in the raw pages, is the encoded row."""
        for name, spec in cache.specs.items():
            entries = np.arange(spec.first_kept(tokens) // spec.ratio, tokens // spec.ratio)
            if spec.lifetime == "record":
                entries = np.arange(spec.record_entries)
            slots = torch.from_numpy(entry_slots(spec, seq.tables[name], entries)).flatten().long()  # [layers * n]
            assert len(slots) and (slots >= spec.entries_per_page * (NO_PAGE + 1)).all(), name
            pages, rows = slots // spec.entries_per_page, slots % spec.entries_per_page
            written = torch.stack([self.pages[name, page][row] for page, row in zip(pages.tolist(), rows.tolist(), strict=True)])
            data, scales = codec.encode(spec.layout, written)
            raw, layout = cache.pools[spec.bucket].data[pages], spec.layout  # [n, page bytes]
            for column, stored in ((0, data), (spec.entries_per_page * layout.data_bytes, scales)):
                width = stored.shape[1]
                where = column + rows[:, None] * width + torch.arange(width)
                assert torch.equal(raw.gather(1, where), stored), f"{name}: {'scales' if column else 'data'}"
            assert torch.equal(torch.isnan(written).any(), torch.tensor(False)), name


def prefill(engine: Engine, ids: list[int]) -> SequenceCache:
    """Steps until the prompt `ids` is computed; its sequence goes on after that."""
    engine.add(EngineRequest("prompt", ids, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)))
    while not engine.step():
        pass
    (seq,) = engine.scheduler.running
    assert seq.num_computed == len(ids)
    return seq.cache


def flip(cache: KVCache, seq: SequenceCache, tokens: int) -> None:
    """Change one byte of the window's newest record: of its scales, where it has some."""
    spec = cache.specs["window"]
    slot = int(entry_slots(spec, seq.tables["window"], np.array([tokens - 1]))[0, 0])
    page, row = divmod(slot, spec.entries_per_page)
    layout, entries = spec.layout, spec.entries_per_page
    offset = (
        layout.scale_offset(row, entries) if layout.scale_bytes else layout.data_offset(row, entries) + layout.dtype.itemsize - 1
    )
    cache.pools[spec.bucket].data[page, offset] ^= 4


def check_live_pages(options: dict[str, str], tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(2, 4000, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    shadow = Shadow(monkeypatch)
    with LLM("tiny", device="cpu", dtype="float32", kv_cache_bytes=256 << 20, max_model_len=tokens + 64, **options) as llm:
        engine = llm.engine
        seq = prefill(engine, ids)
        used = sum((pool.num_pages - pool.num_available) * pool.page_bytes for pool in engine.cache.pools.values())
        assert used == pytest.approx(sequence_totals(engine.runner.plan, tokens)["pages"] * 2**30, rel=0.01)
        assert used == sum(engine.stats().bytes_by_kind.values())
        shadow.check(engine.cache, seq, tokens)
        assert engine.cache.allocate(seq, tokens, tokens + 1)
        step = [engine.runner.chunk([*ids, 5], tokens, tokens + 1, seq)]
        before = engine.runner(step, [0]).clone()
        assert torch.equal(engine.runner(step, [0]), before)
        flip(engine.cache, seq, tokens)
        assert not torch.equal(engine.runner(step, [0]), before), "a stored byte was not read"


@pytest.mark.parametrize("options", [LAYOUTS[10], LAYOUTS[15]], ids=lambda options: "-".join(options.values()))
def test_pages_of_a_live_sequence(options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    check_live_pages(options, 960, monkeypatch)  # the last page of the window is full


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: "-".join(options.values()))
def test_pages_of_a_live_sequence_of_20000_tokens(options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    check_live_pages(options, 20000, monkeypatch)
