"""`abyssal bench`: its rows, its JSON, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import write_small

Call = Any  # the fixture `call` of tests/cli/conftest.py
SMALL = ("--device", "cpu", "--kv-cache-bytes", "32MiB", "--max-num-batched-tokens", "64", "--steps", "2")


@pytest.mark.parametrize("family", ["v4", pytest.param("v41", marks=pytest.mark.long)])
def test_rows_of_every_size_with_their_ops_and_roofs(call: Call, family: str, tmp_path: Path) -> None:
    folder = write_small(family, tmp_path, seed=1)
    done = call(
        "bench", str(folder), *SMALL, "--batches", "2, 1,2", "--contexts", "40,999999", "--prefills", "100,999999", "--json"
    )
    assert done.code == 1 and done.err.endswith("error: 2 of 5 rows could not be measured; they say why\n"), done.err
    report = json.loads(done.out)
    assert report["options"]["device"] == "cpu" and "random records" in report["note"] and report["ceilings"]["copy"] > 0
    kinds = [(row["kind"], row.get("batch"), row.get("context", row.get("tokens"))) for row in report["rows"]]
    too_long = ("failed", None, None)
    assert kinds == [("decode", 2, 40), ("decode", 1, 40), too_long, ("prefill", None, 100), too_long]
    for row in report["rows"][:2]:
        assert row["share"] == pytest.approx(row["roof_ms"] / row["median_ms"]) and row["share"] > 0
        assert {"moe", "linear", "sparse_attention"} <= row["breakdown_ms"].keys()
        assert (
            row["tokens_per_second"] > 0 and row["bytes"]["weights"]["experts"] > 0 and row["bytes"]["cache_read"]["window"] > 0
        )
    prefill = report["rows"][-2]
    assert prefill["sampled"] is None and prefill["chunk"] == 64 and {"sparse_attention", "moe"} <= prefill["share"].keys()
    assert "max_model_len" in report["rows"][-1]["error"]


def test_a_batch_that_has_no_room_says_how_many_have(call: Call, tmp_path: Path) -> None:
    folder = write_small("v4", tmp_path, seed=1)
    small = ("--device", "cpu", "--kv-cache-bytes", "8MiB", "--steps", "2", "--contexts", "3000", "--prefills", "0", "--json")
    done = call("bench", str(folder), *small, "--batches", "1,64")
    refused, measured = json.loads(done.out)["rows"]
    assert done.code == 1 and measured["kind"] == "decode"
    assert re.fullmatch("no room for more than [1-9][0-9]?; raise kv_cache_bytes or, .*", refused["error"]), refused


def test_the_table_names_every_row_and_says_what_was_measured(call: Call, tmp_path: Path) -> None:
    done = call(
        "bench", str(write_small("v4", tmp_path, seed=1)), *SMALL, "--batches", "1", "--contexts", "30", "--prefills", "0"
    )
    assert done.code == 0, done.err
    assert "random records" in " ".join(done.out.split()) and "decode, 1 x 30" in done.out and "prefill," not in done.out
    assert "GB/s" in done.out and "ms" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batches", "0"), "batches='0' must be whole numbers above 0"),
        (("--contexts", "8k"), "contexts='8k' must be whole numbers"),
        (("--prefills", "-5"), "prefills='-5' must be whole numbers"),
        (("--steps", "1"), "steps=1 must be an integer at least 2"),
    ],
)
def test_bad_lists_are_refused_before_anything_is_loaded(call: Call, arguments: tuple[str, str], message: str) -> None:
    done = call("bench", "--device", "cpu", *arguments)
    assert done.code == 2 and message in done.err and "KV cache" not in done.err
