"""The largest logit of every row: greedy sampling, and whether a row is usable at all."""

from __future__ import annotations

import torch
from torch import Tensor


def argmax(logits: Tensor) -> Tensor:
    """fp32 [S, V] -> int64 [2, S]: the first id of the largest logit, and 1 where that logit is finite.

    A NaN or +inf surfaces as a largest logit that is not finite, and a row without any candidate has only -inf; the id is some valid one
    then.
    """
    best, ids = logits.max(-1)  # the first of equal values, as max is documented
    return torch.stack((ids, best.isfinite()))
