"""How many pages of each bucket a memory budget buys, and how many tokens they hold."""

from __future__ import annotations

from dataclasses import dataclass

from abyssal.errors import ConfigError
from abyssal.kv.specs import BLOCK_TOKENS, ROLL_BACK, Bucket, CachePlan, CacheSpec

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Outcome of dividing a budget."""

    num_pages: dict[Bucket, int]
    num_blocks: int | None  # blocks of BLOCK_TOKENS that whole-context kinds can hold in all; None: no such kind
    num_sequences: int  # sequences whose windows and states are provided for
    total_bytes: int

    @property
    def capacity_tokens(self) -> int | None:
        """Tokens that one sequence alone can hold; None: no limit but the model's."""
        return None if self.num_blocks is None else self.num_blocks * BLOCK_TOKENS


def block_pages(plan: CachePlan) -> dict[Bucket, int]:
    """Pages that one block of 256 tokens takes over all layers."""
    pages = dict.fromkeys(plan.page_bytes, 0)
    for spec in plan.specs.values():
        if spec.lifetime == "context":
            pages[spec.bucket] += len(spec.layers) * -(-(BLOCK_TOKENS // spec.ratio) // spec.entries_per_page)
    return pages


def sequence_pages(plan: CachePlan) -> dict[Bucket, int]:
    """Most pages that the windows and states of one sequence take between steps."""
    pages = dict.fromkeys(plan.page_bytes, 0)
    for spec in plan.specs.values():
        if spec.lifetime != "context":
            blocks = len(spec.blocks(1)) if spec.lifetime == "record" else window_blocks(spec)
            pages[spec.bucket] += len(spec.layers) * blocks
    return pages


def window_blocks(spec: CacheSpec) -> int:
    """Most blocks that `window` + ROLL_BACK consecutive tokens and the next one touch, wherever they start."""
    return (spec.window + ROLL_BACK) // spec.entries_per_page + 2


def step_pages(plan: CachePlan, step_tokens: int) -> dict[Bucket, int]:
    """Extra pages while a step computes `step_tokens`, beside those of the tokens before, which it reads.

    A tail-only kind stores the last `window` + ROLL_BACK of them; these may begin in the middle of a block of their own.
    """
    pages = dict.fromkeys(plan.page_bytes, 0)
    for spec in plan.specs.values():
        if spec.lifetime == "window":
            tail = spec.window + ROLL_BACK + spec.entries_per_page
            stored = min(step_tokens, tail) if spec.tail_only else step_tokens
            pages[spec.bucket] += len(spec.layers) * -(-stored // spec.entries_per_page)
    return pages


def divide_budget(plan: CachePlan, budget: int, max_num_seqs: int, step_tokens: int, max_model_len: int) -> PoolSizes:
    """Windows and states for up to `max_num_seqs` sequences (at most half the budget), blocks for the rest.

    Args:
        budget: bytes for all pools.
        max_model_len: tokens; no more blocks are made than `max_num_seqs` sequences of this length could use.

    Raises:
        ConfigError: not even one sequence and one block fit.
    """

    def size(pages: dict[Bucket, int]) -> int:
        return sum(plan.page_bytes[bucket] * count for bucket, count in pages.items())

    step, per_sequence, per_block = step_pages(plan, step_tokens), sequence_pages(plan), block_pages(plan)
    sequences = max(1, min(max_num_seqs, (budget // 2 - size(step)) // size(per_sequence)))
    left = budget - size(step) - sequences * size(per_sequence)
    block_bytes = size(per_block)
    if left < block_bytes:
        needed = size(step) + size(per_sequence) + block_bytes
        raise ConfigError(
            f"kv_cache_bytes={budget} ({budget / MIB:.1f} MiB) cannot hold one sequence: windows and states take "
            f"{size(per_sequence) / MIB:.1f} MiB, a step of max_num_batched_tokens={step_tokens} {size(step) / MIB:.1f} MiB, a block of "
            f"{BLOCK_TOKENS} tokens {block_bytes / MIB:.2f} MiB; give at least {needed} bytes or lower max_num_batched_tokens"
        )
    blocks = None
    if block_bytes:
        blocks = min(left // block_bytes, max_num_seqs * -(-max_model_len // BLOCK_TOKENS))
    pages = {b: step[b] + sequences * per_sequence[b] + (blocks or 0) * per_block[b] for b in plan.page_bytes}
    return PoolSizes(pages, blocks, sequences, size(pages))
