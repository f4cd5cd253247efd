"""Root-mean-square normalisation, computed in fp32 and rounded once to the input's dtype."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., d], weight fp32 [d] or None -> weight * x * rsqrt(mean(x^2) + eps), in x's dtype (V4 spec, notation)."""
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)
