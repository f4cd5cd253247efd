"""Configs of the released models, packaged: planning needs no checkpoint (V4 spec 1.2, V4.1 spec 1)."""

from __future__ import annotations

from pathlib import Path

from abyssal.config import ModelConfig
from abyssal.model_config import load_model_config

PRESETS = ("v4-flash", "v4-pro", "v4.1-flash")
_FOLDER = Path(__file__).resolve().parent.parent / "assets" / "presets"


def load_preset(name: str) -> ModelConfig:
    """The config of a released model; `name` is one of `PRESETS`."""
    return load_model_config(_FOLDER / f"{name}.json")
