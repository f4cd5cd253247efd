"""Abyssal: an inference engine for DeepSeek V4 and V4.1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from abyssal.engine.output import RequestOutput
    from abyssal.engine.request import SamplingParams
    from abyssal.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]

_HOME = {"LLM": "abyssal.llm", "RequestOutput": "abyssal.engine.output", "SamplingParams": "abyssal.engine.request"}


def __getattr__(name: str) -> Any:
    """Import the public classes when first used: `import abyssal` alone loads neither torch nor the server."""
    if name not in _HOME:
        raise AttributeError(f"module 'abyssal' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
