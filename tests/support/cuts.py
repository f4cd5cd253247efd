"""Ways to cut a prefill into chunks."""

from __future__ import annotations

import itertools
import random

BOUNDARIES = (4, 8, 128, 256, 384, 512)  # ends of ratio-4 groups, ratio-128 groups, windows and cache blocks


def random_cuts(length: int, seed: int, count: int = 20) -> list[list[int]]:
    """`count` lists of chunk sizes that sum to `length`.

    Together they cut at every token from one before to one after each boundary inside the prompt; the rest is drawn.
    """
    if length == 1:
        return [[1]]
    rng = random.Random(seed)
    near = [b + off for b in BOUNDARIES for off in (-1, 0, 1) if 0 < b + off < length]
    cuts = []
    for i in range(count):
        points = set(near[i::count]) | set(rng.sample(near, min(len(near), rng.randint(0, 3))))
        points |= set(rng.sample(range(1, length), min(length - 1, rng.randint(1, 6))))
        edges = [0, *sorted(points), length]
        cuts.append([b - a for a, b in itertools.pairwise(edges)])
    return cuts
