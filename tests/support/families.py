"""One small random checkpoint per model family, for tests that hold for both."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint.build import random_v4_checkpoint
from tests.support.small_model import config_dict
from tests.support.v41_model import write_v41

FAMILIES = ("v4", "v41")


def write_small(family: str, folder: Path, seed: int) -> Path:
    """Every layer kind of the family, plain weights; V4.1's with n-gram tables. Token ids 2 to 159 are ordinary in both."""
    if family == "v4":
        random_v4_checkpoint(folder, config_dict([0, 4, 128, 4]), seed=seed, quantised=False)
    else:
        write_v41(folder, seed)
    return folder
