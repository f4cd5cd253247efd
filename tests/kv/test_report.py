"""The figures that the specifications publish, to three digits, and the plan against a pool that is really filled."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from abyssal.config import ALLOWED_KV, EngineConfig, ModelConfig, resolve
from abyssal.kv.planner import divide_budget, fitting_sequences, sequence_cost
from abyssal.kv.pool import KVCache
from abyssal.kv.report import KV_STACKS, capacity_report, memory_report, sequence_totals
from abyssal.kv.specs import BLOCK_TOKENS, plan_caches
from abyssal.model_config import load_model_config, parse_model_config
from abyssal.model_config.presets import PRESETS, load_preset
from tests import published_configs
from tests.support.small_model import small_config

MILLION = 1 << 20  # tokens
CPU = torch.device("cpu")
TINY = small_config([0, 0, 4, 128, 4, 128, 4], head_dim=512, qk_rope_head_dim=64, index_head_dim=128, sliding_window=128)
EVERY_LAYOUT = [
    {"kv_layout": kv, "compressed_kv_layout": compressed, "index_layout": index}
    for kv, compressed in sorted(ALLOWED_KV)
    for index in ("fp32", "bf16", "fp8", "fp4")
]


def config_for(model: ModelConfig, **options: Any) -> EngineConfig:
    return resolve(EngineConfig(**options), model, device_available=True)


def report_for(preset: str, context: int = MILLION, **options: str) -> dict[str, Any]:
    model = load_preset(preset)
    return memory_report(model, config_for(model, **options), context)


def three_digits(value: float) -> str:
    return f"{value:.3g}"


@pytest.mark.parametrize(
    ("preset", "released"), list(zip(PRESETS, ("v4_flash", "v4_pro", "v41_flash"), strict=True)), ids=lambda name: name
)
def test_presets_are_the_published_configs(preset: str, released: str) -> None:
    assert load_preset(preset) == parse_model_config(getattr(published_configs, released)())


def test_pro_in_bf16_against_a_v32_style_stack() -> None:
    """V4 spec 6.2: 9.62 GiB where the older stack would take 83.9 GiB, 8.7 times as much."""
    report = report_for("v4-pro", kv_layout="bf16")
    assert three_digits(report["payload"]) == "9.62" and f"{report['payload']:.4f}" == "9.6246"
    assert three_digits(report["v32_style"]) == "83.9" and three_digits(report["ratio"]) == "8.71"
    assert report["payload"] == report["growing"] + report["windows"]


@pytest.mark.parametrize(
    ("preset", "options", "payload", "per_token"),
    [
        ("v4-flash", {"kv_layout": "bf16"}, "6.7240", 6880),
        ("v4-pro", {"kv_layout": "v4", "index_layout": "fp8"}, "5.3865", 5511.4375),
        ("v4-pro", {"kv_layout": "v4", "index_layout": "fp4"}, "4.9178", 5031.4375),
        ("v4-flash", {"kv_layout": "v4", "index_layout": "fp8"}, "3.7630", 3850.25),
        ("v4-flash", {"kv_layout": "v4", "index_layout": "fp4"}, "3.4349", 3514.25),
        ("v4-pro", {"kv_layout": "bf16"}, "9.6246", 9848),
    ],
)
def test_figures_of_v4(preset: str, options: dict[str, str], payload: str, per_token: float) -> None:
    """V4 spec 6.2: payload of 1,048,576 tokens, growth per token."""
    report = report_for(preset, **options)
    assert f"{report['payload']:.4f}" == payload and report["bytes_per_token"] == per_token


@pytest.mark.parametrize(
    ("kv", "compressed", "index", "per_token", "growing"),
    [
        ("bf16", "same", "bf16", 3200, "3.125"),
        ("bf16", "same", "fp4", 2730, "2.666"),
        ("v4", "same", "fp8", 1790, "1.748"),
        ("v4", "same", "fp4", 1630, "1.592"),
        ("v41", "same", "fp8", 1650, "1.611"),
        ("v41", "same", "fp4", 1490, "1.455"),
        ("v41", "fp4", "fp8", 1050, "1.025"),
        ("v41", "fp4", "fp4", 890, "0.869"),
        ("auto", "auto", "auto", 890, "0.869"),
    ],
)
def test_figures_of_v41(kv: str, compressed: str, index: str, per_token: float, growing: str) -> None:
    """V4.1 spec 8.1."""
    report = report_for("v4.1-flash", kv_layout=kv, compressed_kv_layout=compressed, index_layout=index)
    assert f"{report['growing']:.3f}" == growing and report["bytes_per_token"] == per_token


@pytest.mark.parametrize(
    ("kv", "compressed", "window_bytes"), [("v41", "fp4", 2703360), ("v4", "same", 2990080), ("bf16", "same", 5242880)]
)
def test_windows_of_v41(kv: str, compressed: str, window_bytes: int) -> None:
    """V4.1 spec 8.2: window records of 40 layers, and the open pair of three sources (two rows in its window)."""
    report = report_for("v4.1-flash", kv_layout=kv, compressed_kv_layout=compressed)
    assert report["windows"] * 2**30 == window_bytes and report["state"] * 2**30 == 2 * 12288


def test_v41_costs_a_quarter_of_flash_and_a_sixth_of_pro() -> None:
    """V4.1 spec 8.3: 25.3 % and 17.7 % of V4's best layouts."""
    flash, pro = (report_for(name, kv_layout="v4", index_layout="fp4")["bytes_per_token"] for name in ("v4-flash", "v4-pro"))
    v41 = report_for("v4.1-flash")["bytes_per_token"]
    assert f"{v41 / flash:.1%}" == "25.3%" and f"{v41 / pro:.1%}" == "17.7%"


@pytest.mark.parametrize(
    ("preset", "options", "pages", "block"),
    [
        ("v4-pro", {"index_layout": "fp8"}, [37440, 8640, 1728], 1435968),
        ("v4-flash", {"index_layout": "fp8"}, [37440, 8640, 1728], 1002240),
        ("v4-pro", {"index_layout": "fp4"}, [37440, 4608, 1728], 1315008),
        ("v4.1-flash", {}, [36864, 8704], 5 * (36864 + 8704)),
    ],
)
def test_page_sizes_and_blocks(preset: str, options: dict[str, str], pages: list[int], block: int) -> None:
    """V4 spec 6.3, and V4.1's default: three buckets or two; 256 tokens over all layers."""
    report = report_for(preset, **options)
    assert [bucket["page_bytes"] for bucket in report["buckets"].values()] == pages and report["block_bytes"] == block
    assert report["growing_pages"] * 2**30 == MILLION // BLOCK_TOKENS * block


def test_a_million_tokens_in_pages() -> None:
    """With FP8 records and FP4 keys: 5.02 GiB of pages for 4.92 GiB of payload with Pro, 3.50 GiB with Flash."""
    pro, flash = (report_for(name, kv_layout="v4", index_layout="fp4") for name in ("v4-pro", "v4-flash"))
    assert [three_digits(pro[name]) for name in ("growing_pages", "payload")] == ["5.02", "4.92"]
    assert f"{flash['growing_pages']:.2f}" == "3.50"
    for report in (pro, flash):
        assert report["pages"] == pytest.approx(sum(report[f"{g}_pages"] for g in ("growing", "windows", "state")))
        assert report["growing"] < report["growing_pages"] < 1.03 * report["growing"]


def test_savings_between_records() -> None:
    savings = {record["layout"]: f"{record['saving']:.1%}" for record in report_for("v4-pro")["records"]}
    assert savings["v41"] == "9.6%" and savings["v41_fp4"] == "50.7%" and savings["v4"] == "0.0%"


def test_stacks_that_are_compared_are_the_allowed_ones() -> None:
    assert set(KV_STACKS) == ALLOWED_KV - {("fp32", "same")}
    report = report_for("v4-pro", kv_layout="v41")
    assert len({tuple(stack[name] for name in stack if name.endswith("_layout")) for stack in report["stacks"]}) == 9
    assert report["stacks"][0]["payload"] == report["payload"] and report["stacks"][0]["saving"] == 0
    for stack in report["stacks"]:
        options = {name: value for name, value in stack.items() if name.endswith("_layout")}
        assert stack["payload"] == report_for("v4-pro", **options)["payload"]


def test_a_model_of_other_sizes_has_plain_records_only() -> None:
    model = small_config([0, 4, 128], head_dim=96)
    report = memory_report(model, config_for(model), 1024)
    assert [stack["kv_layout"] for stack in report["stacks"]] == ["bf16"] and report["records"] == []


def test_state_of_a_sequence() -> None:
    """8 rows of ratio-4 state (V4 spec 6.1), 38,912 bytes of ratio 128."""
    report = report_for("v4-pro")
    assert report["state"] * 2**30 == 30 * (65536 + 16384) + 31 * 38912
    assert report_for("v4-flash")["state"] * 2**30 == 21 * (65536 + 16384) + 20 * 38912


def test_cost_by_length() -> None:
    report = report_for("v4-pro", context=5000)
    assert [entry["tokens"] for entry in report["lengths"]] == [1024, 4096, 5000, 32768, MILLION]
    for smaller, larger in itertools.pairwise(report["lengths"]):
        assert smaller["payload"] < larger["payload"] and smaller["pages"] < larger["pages"]
        assert smaller["state"] == larger["state"] and smaller["windows"] == larger["windows"]


def test_the_documented_costs() -> None:
    """The tables of docs/kv-cache.md: MiB in pages by length, and blocks."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "kv-cache.md").read_text()
    rows = re.findall(r"^\| ([\d,]+) \| ([\d.,]+) \| ([\d.,]+) \| ([\d.,]+) \|$", text, re.MULTILINE)
    assert [int(row[0].replace(",", "")) for row in rows] == [1024, 4096, 32768, MILLION]
    for tokens, *shown in rows:
        for preset, figure in zip(("v4-flash", "v4-pro", "v4.1-flash"), shown, strict=True):
            cost = report_for(preset, context=int(tokens.replace(",", "")))["pages"] * 1024
            assert float(figure.replace(",", "")) == pytest.approx(cost, rel=0.005), (tokens, preset)
    for report in (report_for("v4-pro"), report_for("v4-pro", index_layout="fp4"), report_for("v4.1-flash")):
        sizes = " / ".join(f"{bucket['page_bytes']:,}" for bucket in report["buckets"].values())
        assert f"| {sizes} | {report['block_bytes']:,} |" in text
    state = (f"{report_for(name)['state'] * 1024:.1f}" for name in ("v4-pro", "v4-flash"))
    assert "the state of V4-Pro is {} of these, of V4-Flash {}.".format(*state) in text


def test_nothing_costs_nothing() -> None:
    plan = plan_caches(TINY, "v4", "v4", "index_fp8")
    assert all(cost.payload == cost.pages == 0 for cost in sequence_cost(plan, 0))


def test_m01_bytes_per_token_equal_a_hand_sum() -> None:
    """M01: with and without a drafter, in both spellings of the layer list, entries of each layer divided by its ratio."""
    flash = published_configs.v4_flash()
    hand = 21 * (1024 + 256) / 4 + 20 * 1024 / 128
    forms = [flash, published_configs.transformers_form(flash), published_configs.inference_form(flash)]
    for raw in (*forms, published_configs.v4_flash_0731()):
        model = parse_model_config(raw)
        report = memory_report(model, config_for(model, kv_layout="bf16"), MILLION)
        assert report["bytes_per_token"] == hand == 6880
        by_kind = {kind["kind"]: kind["bytes_per_token"] for kind in report["kinds"] if kind["group"] == "growing"}
        assert by_kind == {"c4": 21 * 256, "c4_index": 21 * 64, "c128": 160}


def in_use(cache: KVCache) -> int:
    return sum((pool.num_pages - pool.num_free) * pool.page_bytes for pool in cache.pools.values())


@pytest.mark.parametrize("options", EVERY_LAYOUT, ids=lambda options: "-".join(options.values()))
def test_pages_are_what_the_pool_takes(options: dict[str, str]) -> None:
    """A sequence of 20,000 tokens, prefilled in steps of 2,048 and then token by token, holds the planned pages at every rest."""
    config = config_for(TINY, **options)
    plan = plan_caches(TINY, *config.record_layouts)
    cache = KVCache(plan, divide_budget(plan, 200 << 20, 1, 2048, 20480).num_pages, CPU)
    seq, ends = cache.new_sequence(), [*range(2048, 20000, 2048), 20000, *range(20001, 20140)]
    for start, end in zip([0, *ends], ends, strict=False):
        assert cache.allocate(seq, start, end)
        cache.commit(seq, [], end)
        cache.release_unneeded(seq, end)
        assert in_use(cache) == pytest.approx(sequence_totals(plan, end)["pages"] * 2**30, rel=1e-9), end
        by_kind = {cost.spec.name: cost.pages // plan.page_bytes[cost.spec.bucket] for cost in sequence_cost(plan, end)}
        assert cache.used_by_kind == by_kind, end


def prefill(cache: KVCache, tokens: int, step: int) -> bool:
    """Whether another sequence of `tokens` tokens finds room."""
    seq = cache.new_sequence()
    for start in range(0, tokens, step):
        end = min(start + step, tokens)
        if not cache.allocate(seq, start, end):
            return False
        cache.commit(seq, [], end)
        cache.release_unneeded(seq, end)
    return True


@pytest.mark.parametrize("tokens", [1, 300, 4096])
@pytest.mark.parametrize("options", [EVERY_LAYOUT[2], EVERY_LAYOUT[-1]], ids=lambda options: "-".join(options.values()))
def test_as_many_sequences_fit_as_are_promised(tokens: int, options: dict[str, str]) -> None:
    config, budget, step = config_for(TINY, **options, max_num_batched_tokens=512), 200 << 20, 512
    plan = plan_caches(TINY, *config.record_layouts)
    promised = capacity_report(TINY, config, tokens, budget, gpus=3)
    count = promised["sequences_per_gpu"]
    assert count == fitting_sequences(plan, budget, tokens, step) > 3 and promised["sequences"] == 3 * count
    sizes = divide_budget(plan, 2 * budget, count, step, tokens)  # half of it may go to windows
    cache = KVCache(plan, sizes.num_pages, CPU)
    assert sizes.total_bytes <= budget and all(prefill(cache, tokens, step) for _ in range(count))


def test_a_checkpoint_is_planned_like_its_preset(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published_configs.v4_flash()))
    assert load_model_config(tmp_path) == load_preset("v4-flash")
