"""Random index keys in pages, queries and tables on the GPU, for the benchmarks of the indexer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from abyssal.kv import layouts

PAGE = 64
BUCKET_BYTES = {"index_fp8": 8640, "index_mxfp4": 4608}  # a bucket's page holds more than the kind needs


@dataclass(frozen=True)
class Paged:
    q: Tensor
    weights: Tensor
    pool: Tensor
    table: Tensor
    visible: Tensor

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        return self.q, self.weights, self.pool, self.table, self.visible


def random_paged(
    name: str, n: int, b: int, heads: int, entries: int, *, page_bytes: int | None = None, exponents: int = 3
) -> Paged:
    """n sequences of `entries` keys, all visible to b queries each.

    A key's four scales of mxfp4 have at most so many different exponents; with keys of a normal distribution one in a million has more
    than 3.
    """
    layout, pages = layouts.get(name), n * entries // PAGE
    pool = torch.zeros(pages + 1, page_bytes or BUCKET_BYTES[name], dtype=torch.uint8, device="cuda")
    data = PAGE * layout.data_bytes
    for part in range(1, pages + 1, 4096):  # in parts: random fp32 values take four times the room
        size = len(pool[part : part + 4096])
        if name == "index_fp8":
            pool[part : part + size, :data] = torch.randn(size, data, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            pool[part : part + size, :data] = torch.randint(0, 256, (size, data), dtype=torch.uint8, device="cuda")
    if name == "index_fp8":
        scales = torch.exp2(torch.randint(-2, 3, (pages, PAGE), device="cuda").float()).view(torch.uint8)
    else:
        scales = torch.randint(124, 124 + exponents, (pages, PAGE * 4), dtype=torch.uint8, device="cuda")
    pool[1:, data : data + PAGE * layout.scale_bytes] = scales
    q = torch.randn(n, b, heads, 128, device="cuda")
    q = q.to(torch.float8_e4m3fn) if name == "index_fp8" else (q.mul(2).round().clamp(-4, 4) / 2).bfloat16()
    return Paged(
        q=q,
        weights=torch.randn(n, b, heads, device="cuda"),
        pool=pool,
        table=(1 + torch.randperm(pages, device="cuda")).int().view(n, -1),
        visible=torch.full((n, b), entries, dtype=torch.int32, device="cuda"),
    )
