"""Where a checkpoint comes from: the embedded one, a local folder, or a Hugging Face repository."""

from __future__ import annotations

import re
from pathlib import Path

from abyssal.errors import CheckpointError

TINY = "tiny"
_ASSETS = Path(__file__).resolve().parent.parent / "assets"
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Data only. The encoding file is Python text, but its literals are parsed, never run; modelling code is not even fetched.
_WANTED_FILES = ["*.json", "*.safetensors", "encoding/*"]


def resolve_model(name: str) -> Path:
    """The folder of checkpoint `name`: "tiny" (the embedded tiny-v4), a local folder, or a Hugging Face `owner/name`.

    A local folder wins over a repository of the same name. A repository is downloaded once, into Hugging Face's cache.

    Raises:
        CheckpointError: `name` is none of these, or the download failed.
    """
    if name == TINY:
        return _ASSETS / "tiny-v4"
    folder = Path(name).expanduser()
    if not name:
        raise CheckpointError(f"model '' is empty; give a folder, a Hugging Face id such as owner/name, or {TINY!r}")
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"model {name!r} is a file; give the folder that holds config.json and the *.safetensors files")
    if not _REPO_ID.fullmatch(name):
        raise CheckpointError(
            f"model {name!r} is not a folder on this machine; give a folder, a Hugging Face id such as owner/name, or {TINY!r}"
        )
    return _download(name)


def _download(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo_id, allow_patterns=_WANTED_FILES))
    except GatedRepoError as error:
        raise CheckpointError(f"model {repo_id!r} is gated: accept its terms on Hugging Face and run `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"model {repo_id!r} is neither a folder here nor a repository on Hugging Face; private ones need `hf auth login`"
        ) from error
    except (OSError, ValueError) as error:  # network, disk and name errors of the library are all one of these two
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"model {repo_id!r} could not be downloaded ({reason[0]}); check the connection, or give a local folder"
        ) from error
