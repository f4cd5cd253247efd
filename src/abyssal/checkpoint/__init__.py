"""Strict loading of safetensors checkpoints: every tensor is expected, found, checked and used exactly once."""

from abyssal.checkpoint.files import Summary, preflight
from abyssal.checkpoint.loader import load_weights

__all__ = ["Summary", "load_weights", "preflight"]
