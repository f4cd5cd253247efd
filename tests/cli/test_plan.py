"""`abyssal plan`: its JSON, its table, its drawing, and what it refuses."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from abyssal.cli.plot import HEIGHT, WIDTH, Line, draw

Call = Any  # the fixture `call` of tests/cli/conftest.py


def planned(call: Call, *args: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    done = call("plan", *args, "--json", env=env)
    assert done.code == 0 and not done.err, done.err
    report: dict[str, Any] = json.loads(done.out)
    return report


PRO = ("--preset", "v4-pro", "--context", "1048576")


def test_json_has_the_published_figures(call: Call) -> None:
    report = planned(call, *PRO, "--kv-layout", "bf16")
    shown = {name: f"{report[name]:.3g}" for name in ("payload", "v32_style", "ratio")}
    assert shown == {"payload": "9.62", "v32_style": "83.9", "ratio": "8.71"}
    for name in ("growing", "windows", "payload", "state", "pages", "v32_style", "ratio"):
        assert isinstance(report[name], float)
    assert report["model"] == "v4-pro" and report["context"] == 1048576 and "sequences" not in report


def test_auto_is_what_it_is_on_a_gpu(call: Call) -> None:
    report = planned(call, *PRO)
    assert [report[name] for name in ("kv_layout", "compressed_kv_layout", "index_layout")] == ["v4", "same", "fp8"]
    assert [bucket["page_bytes"] for bucket in report["buckets"].values()] == [37440, 8640, 1728]
    assert planned(call, "--device", "cpu")["kv_layout"] == "fp32"


LAYOUTS = {"kv_layout": "v41", "compressed_kv_layout": "fp4", "index_layout": "fp4"}


def test_layouts_as_flags_and_as_variables(call: Call) -> None:
    flags = [part for name, value in LAYOUTS.items() for part in (f"--{name.replace('_', '-')}", value)]
    by_flag = planned(call, *PRO, *flags)
    by_variable = planned(call, *PRO, env={f"ABYSSAL_{name.upper()}": value for name, value in LAYOUTS.items()})
    assert by_flag == by_variable and by_flag.items() >= LAYOUTS.items() and by_flag["bytes_per_token"] == 2739.75
    assert by_flag != planned(call, *PRO)


def test_a_checkpoint_and_the_embedded_model(call: Call, tmp_path: Path) -> None:
    tiny = planned(call, "--context", "20000")
    assert tiny["model"] == "tiny" and tiny["context"] == 20000 and tiny == planned(call, "tiny", "--context", "20000")
    assert planned(call)["context"] == 1 << 20 and planned(call, "--max-model-len", "4096")["context"] == 4096


def test_sequences_that_fit_beside_the_weights(call: Call) -> None:
    flash = ("--preset", "v4-flash", "--context", "131072", "--gpu-memory", "141GiB")
    one, four, eight = (planned(call, *flash, "--gpus", str(gpus)) for gpus in (1, 4, 8))
    assert one["sequences"] == 0 and one["least_gpus"] == 2
    assert planned(call, *flash[:-1], "70GiB")["least_gpus"] == 4, "three would hold it, but do not divide 256 experts"
    assert 0 < four["sequences_per_gpu"] < eight["sequences_per_gpu"]
    assert four["sequences"] == 4 * four["sequences_per_gpu"]
    assert one["weights"]["total"] == four["weights"]["total"] > 2 * four["weights"]["per_gpu"] > four["cache_per_gpu"]
    room = 0.9 * 141 - 4 - four["weights"]["per_gpu"]
    assert four["cache_per_gpu"] == pytest.approx(room)
    least = room / (four["sequences_per_gpu"] + 1)
    assert least < four["lengths"][-1]["pages"] and least < 2 * next(n["pages"] for n in four["lengths"] if n["tokens"] == 131072)


def test_v41_keeps_its_tables_on_disk(call: Call) -> None:
    report = planned(call, "--preset", "v4.1-flash", "--gpu-memory", "141GiB", "--gpus", "4")
    assert f"{report['growing']:.3f}" == "0.869" and report["sequences"] > 0 and report["context"] == 1 << 20
    assert f"{report['weights']['on_disk']:.1f}" == "188.8" and report["weights"]["total"] < 280
    assert [bucket["page_bytes"] for bucket in report["buckets"].values()] == [36864, 8704]
    assert "188.8 GiB, on disk" in " ".join(call("plan", "--preset", "v4.1-flash").out.split())


def test_a_stated_cache_size_wins(call: Call) -> None:
    flash = ("--preset", "v4-flash", "--context", "4096", "--kv-cache-bytes", "8GiB")
    report = planned(call, *flash)
    assert report["cache_per_gpu"] == 8 and report["sequences"] > 0 and "least_gpus" not in report
    small = planned(call, *flash, "--gpu-memory", "80GiB", "--gpus", "8")
    assert small["sequences_per_gpu"] == report["sequences_per_gpu"]
    assert planned(call, *flash, "--gpu-memory", "80GiB")["sequences"] == 0  # the weights alone do not fit


def test_the_table_says_what_the_json_says(call: Call) -> None:
    args = (*PRO, "--kv-layout", "bf16", "--gpu-memory", "180GiB", "--gpus", "8")
    text, report = " ".join(call("plan", *args).out.split()), planned(call, *args)
    for words in ("9.625 GiB", "83.88 GiB, 8.71 times", "9848 bytes per token", "c4_index", "65536", "9.6%", "50.7%", "32768"):
        assert words in text, words
    for length in report["lengths"]:
        shown = [
            f"{length[name]:.4g} GiB" if length[name] >= 1 else f"{length[name] * 1024:.4g} MiB"
            for name in ("state", "payload", "pages")
        ]
        assert f"{length['tokens']} {' '.join(shown)}" in text
    assert f"hold {report['sequences_per_gpu']} such sequences, {report['sequences']} on all GPUs" in text
    assert "needs 4 such GPUs" in " ".join(call("plan", "--preset", "v4-flash", "--gpu-memory", "60GiB").out.split())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--preset", "v4-max"], ["preset='v4-max'", "v4-flash, v4-pro, v4.1-flash"]),
        (["tiny", "--preset", "v4-pro"], ["'tiny'", "'v4-pro'", "leave one out"]),
        (["--context", "0"], ["context=0", "at least 1"]),
        (["--context", "1048577"], ["context=1048577", "1048576"]),
        (["--context", "1M"], ["context='1M'", "integer"]),
        (["--max-model-len", "10", "--context", "100"], ["context=100", "max_model_len=10"]),
        (["--context", "9" * 5000], ["context='999", "5000 characters", "integer"]),
        (["--preset", "v4-flash", "--gpu-memory", "9" * 400 + ".5GiB"], ["gpu_memory='999", "405 characters"]),
        (["--preset", "v4-flash", "--gpu-memory", "9" * 40 + "GiB"], ["gpu_memory='999", "below 2**63"]),
        (["--kv-cache-bytes", "9" * 40 + ".5TiB"], ["kv_cache_bytes='999", "below 2**63"]),
        (["--gpu-memory", "141"], ["gpu_memory=141", "141GiB"]),
        (["--gpu-memory", "much"], ["gpu_memory='much'", "4GiB"]),
        (["--gpus", "0"], ["gpus=0"]),
        (["--preset", "v4-pro", "--gpus", "5"], ["gpus=5", "384 experts", "[1, 2, 3, 4, 6, 8, 12, "]),
        (["--dp", "4", "--tp", "2", "--ep", "8"], ["no dp=4, tp=2, ep=8", "share out the experts", "--gpus"]),
        (["--plot", "memory.jpg"], ["'memory.jpg'", ".svg"]),
        (["--plot", "/no/such/x.svg"], ["'/no/such/x.svg'", "folder that exists"]),
        (["/no/model", "--plot", "/no/such/x.svg"], ["'/no/such/x.svg'"]),  # looked at first
        (["--kv-layout", "v4", "--compressed-kv-layout", "fp4"], ["'fp4'", "kv_layout='v4'", "allowed with it: same"]),
        (["--kv-layout", "v41", "--compressed-kv-layout", "fp8"], ["'fp8'", "kv_layout='v41'", "allowed with it: fp4, same"]),
    ],
)
def test_what_is_refused(call: Call, args: list[str], words: list[str]) -> None:
    done = call("plan", *args)
    assert done.code == 2 and not done.out
    (line,) = done.err.splitlines()
    assert all(word in line for word in words), line


def test_plot(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "memory.svg"
    assert call("plan", "--preset", "v4-pro", "--plot", str(file)).code == 0
    root = ET.fromstring(file.read_text())
    lines = root.findall("{*}polyline")
    labels = [text.text for text in root.findall("{*}text")]
    assert len(lines) == 10 and {"V3.2-style, bf16", "bf16, bf16 keys", "v41+fp4, fp4 keys"} <= set(labels)
    for line in lines:
        pixels = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        assert len(pixels) == 11 and all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in pixels)
        assert all(b[0] > a[0] and b[1] < a[1] for a, b in itertools.pairwise(pixels)), "more tokens, more memory"
    v32 = lines[-1].attrib["points"].split()[-1]
    others = [line.attrib["points"].split()[-1] for line in lines[:-1]]
    assert all(float(v32.split(",")[1]) < float(other.split(",")[1]) for other in others), "the older stack is the highest"


def test_drawing_places_points_by_their_logarithms() -> None:
    text = draw("a < b", [Line("one", [(1024, 2.0**20), (4096, 2.0**22), (16384, 2.0**24)])])
    assert "a &lt; b" in text
    (points,) = re.findall(r'points="([^"]+)"', text)
    (x0, y0), (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in points.split())
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert {"1k", "16k", "1MiB", "16MiB"} <= set(re.findall(r">([^<]+)</text>", text))
