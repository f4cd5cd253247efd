"""RMS norms of the query latent and the KV row in one launch, against two eager norms.

`python -m bench.ops.bench_norm [--json FILE]`, from the root of the repository, on a GPU.
"""

from __future__ import annotations

import torch

from abyssal.ops.norm import rms_norm as reference
from abyssal.ops.norm.triton import rms_norm
from bench.ops import write_path as wp

WIDTHS = {"v4-flash": (1024, 512), "v4-pro": (1536, 512), "v4.1-flash": (1280, 512)}


def main() -> None:
    args = wp.arguments(__doc__ or "")
    table = wp.Table("norm")
    for name, widths in WIDTHS.items():
        for tokens in args.tokens:
            moved = 2 * 2 * tokens * sum(widths)
            inputs = [
                tuple((torch.randn(tokens, n, device=wp.DEVICE).bfloat16(), torch.rand(n, device=wp.DEVICE)) for n in widths)
                for _ in range(wp.copies(tokens, moved))
            ]
            table.time(name, tokens, "one launch", lambda *pairs: rms_norm(*pairs, eps=1e-6), inputs, moved)
            table.time(name, tokens, "eager", lambda *pairs: [reference(x, w, 1e-6) for x, w in pairs], inputs, moved)
    table.print()
    table.save(args.json)


if __name__ == "__main__":
    main()
