"""Files: what is refused before any weight is touched, in one line that names the culprit."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from abyssal.checkpoint import preflight
from abyssal.errors import CheckpointError

INDEX = "model.safetensors.index.json"


def sharded(folder: Path) -> dict[str, str]:
    """Two shards, tensors a and b in the first, c in the second; returns the index."""
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, folder / "one.safetensors")
    save_file({"c": torch.ones(5, dtype=torch.uint8)}, folder / "two.safetensors")
    index = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    write_index(folder, index)
    return index


def write_index(folder: Path, index: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": index}))


def refused(folder: Path) -> str:
    """The message of the refusal, which must be one line and name the folder or a file."""
    with pytest.raises(CheckpointError) as error:
        preflight(folder)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_summary(tmp_path):
    sharded(tmp_path)
    summary = preflight(tmp_path)
    assert (summary.files, summary.tensors, summary.nbytes) == (2, 3, 24 + 8 + 5)
    assert summary.dtypes == {"BF16": 1, "F32": 1, "U8": 1}


def test_other_safetensors_beside_a_single_file_are_not_read(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "recall.safetensors").write_bytes(b"not read")
    assert preflight(tmp_path).tensors == 1


def test_j13_no_folder(tmp_path):
    assert "nowhere is not a folder" in refused(tmp_path / "nowhere")
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2)}, file)
    assert "is not a folder" in refused(file)


def test_j13_no_shards(tmp_path):
    assert "holds neither model.safetensors nor model.safetensors.index.json" in refused(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    assert "found model-00001-of-00002.safetensors" in refused(tmp_path)


def test_j13_folder_named_like_a_shard(tmp_path):
    (tmp_path / "x.safetensors").mkdir()
    assert "x.safetensors is a folder" in refused(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert "x.safetensors is a folder" in refused(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "two.safetensors"])
def test_j13_zero_bytes(tmp_path, name):
    if name == "two.safetensors":
        sharded(tmp_path)
    (tmp_path / name).write_bytes(b"")
    assert f"{name} is empty (0 bytes)" in refused(tmp_path)


def test_j13_no_tensors(tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    assert "holds no tensors" in refused(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "no json", "\x00", "\xff\xfe", "[" * 100_000])
def test_j13_index_is_not_json(tmp_path, text):
    sharded(tmp_path)
    (tmp_path / INDEX).write_bytes(text.encode("latin-1"))
    assert f"{INDEX} is not readable JSON" in refused(tmp_path)


@pytest.mark.parametrize("raw", [[], 3, None, {}, {"weight_map": {}}, {"weight_map": ["a"]}, {"weight_map": None}])
def test_j13_index_without_weight_map(tmp_path, raw):
    sharded(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps(raw))
    assert f"{INDEX} has no weight_map" in refused(tmp_path)


@pytest.mark.parametrize("shard", ["../one.safetensors", "/etc/passwd", "one.bin", "", 3, None, "sub/one.safetensors", ".."])
def test_index_stays_in_its_folder(tmp_path, shard):
    index = sharded(tmp_path)
    write_index(tmp_path, index | {"b": shard})
    assert f"places 'b' in {shard!r}" in refused(tmp_path)


def test_missing_shard_names_itself(tmp_path):
    sharded(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    assert "missing shard" in refused(tmp_path) and "two.safetensors" in refused(tmp_path)


def test_listed_but_absent_tensor(tmp_path):
    index = sharded(tmp_path)
    write_index(tmp_path, index | {"d": "two.safetensors"})
    assert f"{INDEX} lists d, absent" in refused(tmp_path)


def test_present_but_unlisted_tensor(tmp_path):
    index = sharded(tmp_path)
    del index["b"]
    write_index(tmp_path, index)
    message = refused(tmp_path)
    assert "one.safetensors holds b, which" in message


def test_tensor_in_another_shard_than_listed(tmp_path):
    index = sharded(tmp_path)
    write_index(tmp_path, index | {"b": "two.safetensors"})
    assert "one.safetensors holds b, which" in refused(tmp_path)


def test_single_file_and_index(tmp_path):
    sharded(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert "holds both" in refused(tmp_path)


def test_truncated_anywhere(tmp_path):
    """Cut after the first byte, in the header's length, in the header, in the data, and one byte before the end."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2, 3), "b": torch.ones(64)}, path)
    whole = path.read_bytes()
    for cut in (1, 7, 8, 9, 40, len(whole) - 256, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert "model.safetensors is damaged or truncated" in refused(tmp_path)
    path.write_bytes(whole + b"\0")
    assert "model.safetensors is damaged or truncated" in refused(tmp_path)


def test_git_lfs_pointer(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "is a Git LFS pointer" in refused(tmp_path)


def test_unheard_of_type(tmp_path):
    save_file({"a": torch.ones(2, dtype=torch.float64)}, tmp_path / "model.safetensors")
    assert "tensor a in" in refused(tmp_path) and "stored as F64" in refused(tmp_path)


class _Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickle_is_never_read(tmp_path):
    """A pickled checkpoint is refused without being opened."""
    marker = tmp_path / "executed"
    payload = pickle.dumps(_Marker(marker))
    (tmp_path / "pytorch_model.bin").write_bytes(payload)
    assert "found pytorch_model.bin; only safetensors" in refused(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(payload)
    assert "damaged or truncated" in refused(tmp_path)
    assert not marker.exists()
