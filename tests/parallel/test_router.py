"""The router: prefixes are found where they went, load is respected, memory is bounded."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import pytest

from abyssal.parallel.router import SLACK_REQUESTS, Router

BLOCK = 4
A, B, C = ([letter] * BLOCK for letter in (1, 2, 3))


def test_longest_prefix_wins_over_load_within_the_slack() -> None:
    router = Router(3, BLOCK)
    router.sent(0, A)
    router.sent(1, A + B)
    router.sent(2, C)
    assert router.choose(A + B + [9], [0, SLACK_REQUESTS, 0]) == 1
    assert router.choose(A + B + [9], [0, SLACK_REQUESTS + 1, 0]) == 0, "the second longest, when the holder is loaded too much"
    assert router.choose(A + C, [1, 0, 0]) == 1, "both know one block: the lighter one"
    assert router.choose(C + A, [3, 0, 3]) == 2


def test_slack_grows_with_the_load() -> None:
    router = Router(2, BLOCK)
    router.sent(0, A)
    assert router.choose(A, [150, 100]) == 0 and router.choose(A, [151, 100]) == 1


def test_a_block_counts_only_after_the_blocks_before_it() -> None:
    router = Router(2, BLOCK)
    router.sent(0, A + B)
    router.sent(1, C)
    for prompt in (B, C[:-1], B + A, A[:-1] + [9] + B):
        assert router.choose(prompt, [1, 0]) == 1, "no complete block is shared: the lighter target"


def test_incomplete_blocks_are_not_remembered() -> None:
    router = Router(2, BLOCK)
    router.sent(0, A + B[:-1])
    router.sent(1, A)
    assert router.choose(A + B, [1, 0]) == 1
    router.sent(0, A + B)  # it ended: the answer filled the block
    assert router.choose(A + B, [1, 0]) == 0


def test_salts_share_nothing() -> None:
    router = Router(2, BLOCK)
    router.sent(0, A, "tenant")
    router.sent(1, B)
    assert router.choose(A, [1, 0]) == 1 and router.choose(A, [1, 0], "other") == 1
    assert router.choose(A, [1, 0], "tenant") == 0


def test_strangers_go_round() -> None:
    """Sequential requests of nothing in common use the caches of all targets."""
    router = Router(3, BLOCK)
    chosen = []
    for i in range(9):
        target = router.choose([i] * BLOCK, [0, 0, 0])
        router.sent(target, [i] * BLOCK)
        chosen.append(target)
    assert all(sorted(chosen[i : i + 3]) == [0, 1, 2] for i in (0, 3, 6))


def test_forgotten_and_closed_targets() -> None:
    router = Router(2, BLOCK)
    router.sent(0, A)
    router.sent(1, B)
    assert router.choose(A, [math.inf, 7]) == 1
    router.forget(0)
    assert router.choose(A, [1, 0]) == 1 and router.choose(B, [0, 1]) == 1, "the other's memory is kept"


@pytest.mark.parametrize("limit", [1, 3])
def test_memory_is_bounded_and_beginnings_stay(limit: int) -> None:
    router = Router(2, BLOCK, max_blocks=limit)
    for i in range(50):
        router.sent(0, [i] * BLOCK)
        assert len(router._known[0]) <= limit
    router.sent(0, A + B + C + A + B)
    assert len(router._known[0]) == limit
    router.sent(1, A[:1])
    assert router.choose(A, [1, 0]) == 0, "the first block of the chain outlives the last ones"


def test_conversations_stay_where_they_began() -> None:
    """Turns of many conversations in random order, each with everything before it: all but the first find their caches."""
    rng = random.Random(0)
    router = Router(4, BLOCK)
    homes: dict[int, int] = {}
    history = {i: [1000 + i] * BLOCK for i in range(40)}
    for _ in range(400):
        who = rng.randrange(40)
        target = router.choose(history[who], [rng.randrange(SLACK_REQUESTS + 1) for _ in range(4)])
        assert homes.setdefault(who, target) == target
        history[who] += [rng.randrange(100) for _ in range(rng.randrange(1, 20))]
        router.sent(target, history[who])
    assert len(set(homes.values())) == 4


def test_a_front_needs_no_torch() -> None:
    code = "import sys, abyssal.parallel.router; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
