"""Small launches of every kernel of the expert layer: `compute-sanitizer python -m bench.ops.sanitize_moe`.

From 9 tokens on there is a plan, so `moe_down` starts while `moe_up` ends and waits for its blocks' counters; some blocks stay empty.
"""

from __future__ import annotations

import torch

from abyssal.ops.linear import LinearWeight
from abyssal.ops.moe import ExpertLayer
from abyssal.ops.moe.gluon import with_products
from abyssal.ops.moe.triton import STAGES, MoeConfig, TileConfig, moe, prepare_experts

DIM, INNER, EXPERTS, K = 256, 256, 5, 2
CONFIGS = [MoeConfig.of(*c) for c in ((8, 16, 1, 1), (8, 32, 2, 1), (16, 32, 1, 1), (64, 128, 3, 4), (128, 128, 3, 8))]
TILES = [TileConfig.of(block) for block in STAGES]


def weight(rows: int, columns: int, format: str, experts: int | None = EXPERTS) -> LinearWeight:
    lead = () if experts is None else (experts,)
    if format == "plain":
        return LinearWeight(torch.randn(*lead, rows, columns, device="cuda").bfloat16(), None, "plain", None, 32)
    block = (1, 32) if format == "fp4" else (32, 32)
    width = columns // 2 if format == "fp4" else columns
    data = torch.empty(*lead, rows, width, dtype=torch.uint8, device="cuda").random_(0, 120)
    scale = torch.full((*lead, rows // block[0], columns // block[1]), 118, dtype=torch.uint8, device="cuda")
    stored = data if format == "fp4" else data.view(torch.float8_e4m3fn)
    return LinearWeight(stored, scale, "fp4" if format == "fp4" else "fp8", block, 32)


def main() -> None:
    for format, shared in (("fp4", "fp8"), ("fp8", "plain"), ("plain", "fp8")):
        for hashed in (False, True):
            ids = torch.randint(0, EXPERTS, (16, K), dtype=torch.int32, device="cuda")
            layer = prepare_experts(
                ExpertLayer(
                    gate=torch.randn(EXPERTS, DIM, device="cuda"), bias=None if hashed else torch.randn(EXPERTS, device="cuda"),
                    tid2eid=ids if hashed else None, w13=weight(2 * INNER, DIM, format), w2=weight(DIM, INNER, format),
                    shared_w1=weight(INNER, DIM, shared, None), shared_w3=weight(INNER, DIM, shared, None),
                    shared_w2=weight(DIM, INNER, shared, None), k=K, scale=1.5, temperature=1.0, limit=10.0,
                )
            )  # fmt: skip
            layer = with_products(layer)
            for config in (*CONFIGS, *(TILES if layer.products else [])):
                for tokens in (1, 9, 70):
                    x = torch.randn(tokens, DIM, device="cuda").bfloat16()
                    token_ids = torch.randint(-1, 16, (tokens,), device="cuda")
                    for beside in (None, torch.cuda.Stream()):
                        assert moe(x, token_ids, layer, beside=beside, config=config).isfinite().all()
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
