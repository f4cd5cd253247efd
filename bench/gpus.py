"""What a measurement needs of the machine."""

from __future__ import annotations

import torch


def require_gpus(count: int, otherwise: str = "") -> None:
    """End with one line where there are fewer than `count`; `otherwise` says what can be done without."""
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if present < count:
        raise SystemExit(f"error: this needs {count} CUDA GPU(s), and PyTorch sees {present}{otherwise and '; ' + otherwise}")
