"""Tables read by rows: the file's bytes whatever the cache holds, and memory that does not grow with the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from abyssal.checkpoint.files import CheckpointFiles
from abyssal.checkpoint.rows import RowTable
from abyssal.errors import CheckpointError

ROWS, COLUMNS = 97, 64
ROW_BYTES = COLUMNS + COLUMNS // 32 + 8  # with the row's number in the cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    generator = torch.Generator().manual_seed(0)
    save_file(
        {
            "before": torch.zeros(3),
            "values": torch.randint(0, 127, (ROWS, COLUMNS), generator=generator).byte().view(torch.float8_e4m3fn),
            "scales": torch.randint(100, 140, (ROWS, 2), generator=generator).byte().view(torch.float8_e8m0fnu),
        },
        folder / "model.safetensors",
    )
    return folder


def table(folder: Path, cache_bytes: int) -> tuple[RowTable, torch.Tensor, torch.Tensor]:
    files = CheckpointFiles(folder)
    values, scales = files.tensors["values"], files.tensors["scales"]
    read = (files.read(tensor).view(torch.uint8).clone() for tensor in (values, scales))
    return RowTable(values, scales, cache_bytes), *read


@pytest.mark.parametrize("places", [0, 1, 7, 50, 1000])
@settings(max_examples=40, deadline=None)
@given(asked=st.lists(st.lists(st.integers(0, ROWS - 1), max_size=30), min_size=1, max_size=6))
def test_rows_are_those_of_the_file(folder: Path, places: int, asked: list[list[int]]) -> None:
    rows, values, scales = table(folder, places * ROW_BYTES)
    for wanted in asked:
        index = torch.tensor(wanted, dtype=torch.int64)
        codes, scale = rows.gather(index)
        assert codes.dtype == torch.float8_e4m3fn and torch.equal(codes.view(torch.uint8), values[index])
        assert torch.equal(scale, scales[index])


def test_a_table_that_fits_is_mapped(folder: Path) -> None:
    """One byte less of cache, and rows are read one by one."""
    size = ROWS * (COLUMNS + COLUMNS // 32)
    rows, values, scales = table(folder, size)
    assert rows.held is not None
    for held, stored in zip(rows.held, (values, scales), strict=True):
        assert (held == stored.numpy()).all() and not held.flags.writeable
    assert table(folder, size - 1)[0].held is None


def test_any_shape_of_row_numbers(folder: Path) -> None:
    rows, values, scales = table(folder, 10 * ROW_BYTES)
    index = torch.tensor([[5, 5, 96], [0, 96, 5]])
    codes, scale = rows.gather(index)
    assert torch.equal(codes.view(torch.uint8), values[index.flatten()]) and torch.equal(scale, scales[index.flatten()])


def test_a_kept_row_is_not_read_again_and_a_displaced_one_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _, _ = table(folder, 10 * ROW_BYTES)
    reads: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: (reads.append(offset), preadv(fd, buffers, offset))[1])
    for wanted, expected in (([3, 4, 3], 2), ([4, 3], 0), ([13], 1), ([3], 1), ([3, 13, 4], 1)):
        reads.clear()
        rows.gather(torch.tensor(wanted))
        assert len(reads) == 2 * expected, wanted  # a row is two reads, of values and of scales


@pytest.mark.parametrize("wanted", [[-1], [ROWS], [0, 2**40]])
def test_rows_outside_the_table(folder: Path, wanted: list[int]) -> None:
    with pytest.raises(IndexError, match="of a table of 97"):
        table(folder, 1000)[0].gather(torch.tensor(wanted))


def test_a_file_that_became_shorter_is_named(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model.safetensors"
    copy.write_bytes((folder / "model.safetensors").read_bytes())
    files = CheckpointFiles(tmp_path)
    rows = RowTable(files.tensors["values"], files.tensors["scales"], 1000)
    os.truncate(copy, copy.stat().st_size - 500)
    with pytest.raises(CheckpointError, match=r"model\.safetensors ends inside (values|scales)"):
        rows.gather(torch.arange(ROWS))
    with pytest.raises(CheckpointError, match=r"model\.safetensors ends inside (values|scales)"):
        RowTable(files.tensors["values"], files.tensors["scales"], 1 << 20)


def sparse_table(path: Path, rows: int, columns: int) -> None:
    """A safetensors file of zeros that takes no room on the disk."""
    values, scales = rows * columns, rows * columns // 32
    header = json.dumps(
        {
            "values": {"dtype": "F8_E4M3", "shape": [rows, columns], "data_offsets": [0, values]},
            "scales": {"dtype": "F8_E8M0", "shape": [rows, columns // 32], "data_offsets": [values, values + scales]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + values + scales)


GROWTH = """
import sys
import numpy as np, torch
from pathlib import Path
from abyssal.checkpoint.files import CheckpointFiles
from abyssal.checkpoint.rows import RowTable

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

files = CheckpointFiles(Path(sys.argv[1]))
generator = np.random.default_rng(0)
before = resident()
table = RowTable(files.tensors["values"], files.tensors["scales"], int(sys.argv[2]))
for _ in range(4):
    table.gather(torch.from_numpy(generator.integers(0, table.num_rows, (500, 24))))
print(resident() - before)
"""


def test_resident_memory_grows_by_no_more_than_the_cache(tmp_path: Path) -> None:
    """A table of 20 GB, 2,000 tokens of 24 random rows: through a memory map these would be 0.4 GB."""
    sparse_table(tmp_path / "model.safetensors", 76_000_000, 256)
    assert (tmp_path / "model.safetensors").stat().st_size > 20e9
    cache = 8 << 20
    run = subprocess.run([sys.executable, "-c", GROWTH, str(tmp_path), str(cache)], capture_output=True, text=True, check=True)
    assert cache // 2 < int(run.stdout) < cache + (64 << 20)
