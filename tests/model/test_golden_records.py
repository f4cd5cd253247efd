"""The stored V4.1 models with packed records, against the logits of the model's own quantisation.

Widths other than 512 and 128 have no released record. For them the same grids are laid out over the width at hand.

The stored logits depend on the code of every value, also of one that fp32 noise takes over a boundary of its grid: in the prompts of
257 to 300 tokens that happens to 7 to 19 of 1.2 to 2.7 million values, and one of them can move later logits by 0.1 or more. The order
of operations that wrote the files does not help: on another processor it misses two prompts. So the engine has to reach the stored
logits in double precision, where the codes are decided; and in fp32 it has to decide as in double precision, but for values at a
boundary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from abyssal import LLM
from abyssal.kv import codec, layouts
from abyssal.kv.batch import Batch
from abyssal.kv.layouts import Grid, Layout
from abyssal.model.indexer import Indexer, Selection
from tests.support.cuts import random_cuts
from tests.support.double import double_precision
from tests.support.streams import record_streams

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = {
    "v41_csa2_w16": (1, 3, 5, 40, 128, 300),
    "v41_engram_w16": (1, 4, 40, 129, 257),
    "v41_h512": (1, 5, 127, 300),
}
STREAMS = {"v41_csa2_w16": 40, "v41_engram_w16": 40, "v41_h512": 127}  # the prompt whose streams and mixes are stored
CASES = [(name, length) for name, lengths in PROMPTS.items() for length in lengths]
CUT_CASES = [
    pytest.param(name, length, cut, marks=pytest.mark.long if cut == "tokens" and length > 5 else ())
    for cut in ("tokens", "cuts")
    for name, length in CASES
    if cut == "cuts" or length <= 130
]
released_layout = layouts.get

# Between fp32 and double precision, relative to the largest value of the row; 2^-24 is half an ulp of it.
NOISE = 160 * 2.0**-24  # of any value that is quantised; measured: 90, root mean square 6
AT_BOUNDARY = 32 * 2.0**-24  # of a value with another code: it is at most so far from a boundary; measured: 16
OTHER_CODES = 20e-6  # tiles with another code, per value; measured: 7 per million values


def layout_of_any_width(name: str, dim: int | None = None) -> Layout:
    layout = released_layout(name)
    if dim is None or dim == layout.dim or layout.grid is None:
        return released_layout(name, dim)
    data = dim // 2 if layout.grid.kind == "e2m1" else dim
    return replace(layout, dim=dim, data_bytes=data, scale_bytes=dim // layout.grid.tile, grid=replace(layout.grid, values=dim))


Packed = Callable[[str], LLM]


def loader(goldens: Callable[[str], Path], double: bool) -> Iterator[Packed]:
    """`packed(name)` -> the model with the default records of V4.1: v41, v41_fp4 and index_mxfp4."""
    loaded: dict[str, LLM] = {}

    def load(name: str) -> LLM:
        if name not in loaded:
            with pytest.MonkeyPatch.context() as patch, double_precision() if double else nullcontext():
                patch.setattr("abyssal.kv.layouts.get", layout_of_any_width)
                loaded[name] = LLM(
                    goldens(name),
                    device="cpu",
                    dtype="float32",
                    kv_layout="v41",
                    kv_cache_bytes=256 << 20,
                    enable_prefix_caching=False,
                )
            assert loaded[name].engine.config.record_layouts == ("v41", "v41_fp4", "index_mxfp4")
        return loaded[name]

    yield load
    for llm in loaded.values():
        llm.close()


@pytest.fixture(scope="module")
def packed(goldens: Callable[[str], Path]) -> Iterator[Packed]:
    yield from loader(goldens, double=False)


@pytest.fixture(scope="module")
def packed_double(goldens: Callable[[str], Path]) -> Iterator[Packed]:
    """To be run within `double_precision`."""
    yield from loader(goldens, double=True)


class Stored:
    """What is stored of one prompt."""

    def __init__(self, folder: Path, length: int) -> None:
        entry = json.loads((folder / "tolerances.json").read_text())[f"p{length}"]["qat"]
        self.tolerance = entry["max_abs_tolerance"]
        assert entry["usable_as_tight_check"]
        with safe_open(folder / "golden.safetensors", "pt") as file:
            own = {key.removeprefix(f"p{length}."): key for key in file.keys() if key.startswith(f"p{length}.")}  # noqa: SIM118
            self.ids = file.get_tensor(own["input_ids"]).tolist()
            self.logits = file.get_tensor(own["logits_qat"])
            self.streams, self.mixes = (file.get_tensor(own[k]) if k in own else None for k in ("hidden_qat", "pre_mix_qat"))
            self.chosen, self.candidates = (
                {int(key.rpartition("layer")[2]): file.get_tensor(own[key]) for key in own if key.startswith(kind)}
                for kind in ("topk_qat.", "candidates_qat.")
            )

    def check_logits(self, logits: Tensor) -> None:
        torch.testing.assert_close(logits, self.logits, rtol=0, atol=self.tolerance, check_dtype=False)

    def check_choices(self, chosen: Sets, masks: Sets) -> None:
        for layer, rows in self.chosen.items():
            assert [chosen[layer][p] for p in range(len(self.ids))] == [set(row.tolist()) - {-1} for row in rows]
        for layer, rows in self.candidates.items():
            # stored masks name whole blocks; the source's ratio is 1
            assert [masks[layer][p] for p in range(len(self.ids))] == [
                set(row[: p + 1].nonzero().flatten().tolist()) for p, row in enumerate(rows)
            ]


@pytest.mark.parametrize(("name", "length"), CASES)
def test_double_precision_gives_the_stored_logits(
    name: str, length: int, goldens: Callable[[str], Path], packed_double: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row within the prompt's own tolerance, and the stored choices."""
    stored, llm = Stored(goldens(name), length), packed_double(name)
    chosen, masks = record_choices(monkeypatch)
    with double_precision():
        logits = llm.logits(stored.ids)
    assert logits.dtype == torch.float64
    stored.check_logits(logits)
    stored.check_choices(chosen, masks)


@pytest.mark.parametrize(("name", "length", "cut"), CUT_CASES)
def test_double_precision_gives_them_for_every_cut(
    name: str, length: int, cut: str, goldens: Callable[[str], Path], packed_double: Packed
) -> None:
    stored, llm = Stored(goldens(name), length), packed_double(name)
    sizes = [1] * length if cut == "tokens" else random_cuts(length, seed=length, count=1)[0]
    with double_precision():
        stored.check_logits(llm.logits(stored.ids, sizes))


@pytest.mark.parametrize("name", STREAMS)
def test_double_precision_gives_the_stored_streams_and_mixes(
    name: str, goldens: Callable[[str], Path], packed_double: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, llm = Stored(goldens(name), STREAMS[name]), packed_double(name)
    outputs = record_streams(monkeypatch)
    with double_precision():
        llm.logits(stored.ids)
    # tolerances.json records 9e-5 and 4e-7 between two implementations
    for got, expected, limit in zip(zip(*outputs, strict=True), (stored.streams, stored.mixes), (2e-4, 2e-5), strict=True):
        torch.testing.assert_close(torch.stack(got), expected, rtol=0, atol=limit, check_dtype=False)


@dataclass(frozen=True, slots=True)
class Quantised:
    """One call of `codec.quantize`."""

    grid: Grid
    x: Tensor  # [n, values]
    codes: Tensor
    scales: Tensor


@pytest.mark.parametrize(("name", "length"), CASES)
def test_fp32_takes_other_codes_at_boundaries_only(
    name: str, length: int, goldens: Callable[[str], Path], packed: Packed, packed_double: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the codes of the double-precision run behind it, every value of the fp32 run is near that run's, and so are its logits."""
    stored, llm, double = Stored(goldens(name), length), packed(name), packed_double(name)
    with double_precision(), pytest.MonkeyPatch.context() as patch:
        decided = record_codes(patch)
        expected = double.logits(stored.ids)
    found = record_codes(monkeypatch, instead=decided)
    chosen, masks = record_choices(monkeypatch)
    logits = llm.logits(stored.ids)

    assert len(found) == len(decided) > 0
    tiles, values = 0, 0
    for here, there in zip(found, decided, strict=True):
        distance = (here.x - there.x).abs() / there.x.abs().amax(1, keepdim=True)
        assert distance.max() < NOISE
        other = codec.dequantize(here.grid, here.codes, here.scales) != codec.dequantize(here.grid, there.codes, there.scales)
        assert not other.any() or distance[other].max() < AT_BOUNDARY
        tiles += int(other.unflatten(1, (-1, here.grid.tile)).any(-1).sum())
        values += other.numel()
    assert tiles <= 1 + OTHER_CODES * values
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=1e-4)
    stored.check_logits(logits)
    stored.check_choices(chosen, masks)


def record_codes(patch: pytest.MonkeyPatch, instead: list[Quantised] | None = None) -> list[Quantised]:
    """What is quantised from here on. With `instead` the model goes on with those codes, call by call, not with its own."""
    quantised: list[Quantised] = []
    quantize = codec.quantize

    def record(grid: Grid, x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = quantize(grid, x)
        if not len(x):
            return codes, scales
        quantised.append(Quantised(grid, x.clone(), codes, scales))
        if instead is None:
            return codes, scales
        other = instead[len(quantised) - 1]
        assert (other.grid, other.x.shape) == (grid, x.shape)
        return other.codes, other.scales

    patch.setattr(codec, "quantize", record)
    return quantised


Sets = dict[int, dict[int, set[int]]]  # layer -> position -> entries


def record_choices(monkeypatch: pytest.MonkeyPatch) -> tuple[Sets, Sets]:
    """Chosen entries and published candidates of the last forward of a whole prompt."""
    chosen: Sets = {}
    masks: Sets = {}
    choose = Indexer.__call__

    def record(self: Indexer, *args: object) -> None:
        choose(self, *args)
        *_, batch, _, selection = args
        assert isinstance(batch, Batch) and isinstance(selection, Selection)
        layer, ratio = self.plan.layer, self.plan.ratio
        for group, entries, mask in zip(batch.groups, selection.entries, selection.candidates, strict=True):
            for i, position in enumerate(group.positions[0].tolist()):
                visible = set(range(int(group.visible[ratio][0, i])))
                chosen.setdefault(layer, {})[position] = visible if entries is None else set(entries[0, i].tolist()) - {-1}
                masks.setdefault(layer, {})[position] = visible if mask is None else set(mask[0, i].nonzero().flatten().tolist())

    monkeypatch.setattr(Indexer, "__call__", record)
    return chosen, masks


@pytest.mark.parametrize("name", PROMPTS)
def test_other_cuts_stay_close(name: str, goldens: Callable[[str], Path], packed: Packed) -> None:
    """Cut otherwise, products round differently and a few stored codes with them: the mean KL stays under 0.005."""
    length = PROMPTS[name][-1]
    ids, llm = Stored(goldens(name), length).ids, packed(name)
    whole = llm.logits(ids).log_softmax(-1)
    for sizes in random_cuts(length, seed=length, count=2):
        other = llm.logits(ids, sizes).log_softmax(-1)
        assert (whole.exp() * (whole - other)).sum(-1).mean() < 0.005


def test_other_records_are_another_model(goldens: Callable[[str], Path]) -> None:
    """v4 records, and v41 for compressed KV, run but do not reach the trained grid; bf16 is near the logits without grids."""
    folder = goldens("v41_h512")
    stored = Stored(folder, 127)
    for kv, compressed in (("v4", "same"), ("v41", "same"), ("bf16", "same")):
        options = {"kv_layout": kv, "compressed_kv_layout": compressed}
        with LLM(folder, device="cpu", dtype="float32", kv_cache_bytes=256 << 20, **options) as llm:
            error = (llm.logits(stored.ids) - stored.logits).abs().amax(1)
        assert 1e-3 < error.median() < 0.5, options
