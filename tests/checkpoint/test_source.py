"""A model's name finds its folder, or says why not in one line."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from abyssal.checkpoint.source import resolve_model
from abyssal.errors import CheckpointError


def test_the_embedded_checkpoint_is_whole() -> None:
    folder = resolve_model("tiny")
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "abyssal.json", "MODEL_CARD.md"} <= names


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("downloaded although the folder exists")
    )
    assert resolve_model("owner/name") == Path("owner/name")
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name", ["", "nothing-here", "/no/such/folder", "./x", "../x/y", "a/b/c", "owner/", "/name", "https://x.org/a"]
)
def test_names_that_are_neither_folder_nor_repository(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """n09: no name leads anywhere but to a folder the operator gave or to a repository id."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        resolve_model(name)
    assert repr(name) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_only_data_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """n07: code shipped with a checkpoint stays where it is."""
    asked = {}

    def download(repo_id: str, allow_patterns: list[str]) -> str:
        asked.update(repo=repo_id, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/name") == tmp_path
    assert asked["repo"] == "owner/name"
    assert list(huggingface_hub.utils.filter_repo_objects(
        ["config.json", "model-00001-of-00002.safetensors", "encoding/encoding_dsv4.py", "modeling_x.py", "pytorch_model.bin"],
        allow_patterns=asked["patterns"],
    )) == ["config.json", "model-00001-of-00002.safetensors", "encoding/encoding_dsv4.py"]  # fmt: skip


@pytest.mark.parametrize(
    "error",
    [OfflineModeIsEnabled("offline"), LocalEntryNotFoundError("no snapshot\nmore lines"), OSError(""), ValueError("bad id")],
)
def test_a_failed_download_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def download(repo_id: str, allow_patterns: list[str]) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match="'owner/name' could not be downloaded .* local folder") as caught:
        resolve_model("owner/name")
    assert "\n" not in str(caught.value)
