"""What sequences cost in pages and bytes, how many pages of each bucket a memory budget buys, and how many tokens they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from abyssal.errors import ConfigError
from abyssal.kv.specs import BLOCK_TOKENS, ROLL_BACK, Bucket, CachePlan, CacheSpec

MIB = 1 << 20

Group = Literal["growing", "windows", "state"]


@dataclass(frozen=True, slots=True)
class KindCost:
    """What one cache kind costs for one sequence between two steps, over all layers. Sizes in bytes."""

    spec: CacheSpec
    payload: int  # entries that later tokens read: all that a copy of the sequence needs
    pages: int  # whole pages that hold them, those kept for a roll-back included

    @property
    def group(self) -> Group:
        if self.spec.lifetime == "context":
            return "growing"
        return "state" if self.spec.tail_only else "windows"


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


def sequence_cost(plan: CachePlan, tokens: int) -> list[KindCost]:
    """What a sequence of `tokens` computed tokens costs, by kind."""
    costs = []
    for spec in plan.specs.values():
        payload = _entries_read(spec, tokens) * spec.layout.bytes_per_entry
        pages = len(spec.blocks(tokens)) * plan.page_bytes[spec.bucket]
        costs.append(KindCost(spec, payload * len(spec.layers), pages * len(spec.layers)))
    return costs


def _entries_read(spec: CacheSpec, tokens: int) -> int:
    """Entries of one layer that later tokens of a sequence of `tokens` tokens may read, roll-backs aside."""
    if spec.lifetime == "context":
        return tokens // spec.ratio
    return min(tokens, spec.window) if spec.lifetime == "window" else spec.record_entries * min(tokens, 1)


def layer_bytes(plan: CachePlan, start: int, end: int, last: bool) -> list[int]:
    """Payload of every layer of the model in one part of a hand-over (`kv.handover.Part`): tokens [start, end) of a prompt."""
    sizes = [0] * len(plan.specs["window"].layers)  # every layer has a window
    for spec in plan.specs.values():
        if spec.lifetime == "context":
            entries = _entries_read(spec, end) - _entries_read(spec, start)
        else:
            entries = _entries_read(spec, end) if last else 0
        for layer in spec.layers:
            sizes[layer] += entries * spec.layout.bytes_per_entry
    return sizes


def token_bytes(plan: CachePlan) -> dict[str, float]:
    """Payload that every further token adds over all layers, by kind; a fraction, since an entry may stand for many tokens."""
    lasting = [spec for spec in plan.specs.values() if spec.lifetime == "context"]
    return {spec.name: len(spec.layers) * spec.layout.bytes_per_entry / spec.ratio for spec in lasting}


def block_bytes(plan: CachePlan) -> int:
    """Bytes of the pages that one block of 256 tokens takes over all layers."""
    return _size(plan, block_pages(plan))


def fitting_sequences(plan: CachePlan, budget: int, tokens: int, step_tokens: int) -> int:
    """How many sequences of `tokens` tokens fit into `budget` bytes at once, beside a step of `step_tokens`."""
    each = fixed_bytes(plan) + -(-tokens // BLOCK_TOKENS) * block_bytes(plan)
    return max(0, (budget - _size(plan, step_pages(plan, step_tokens))) // each)


def fixed_bytes(plan: CachePlan) -> int:
    """Most bytes of pages that the windows and states of one sequence take between steps."""
    return _size(plan, sequence_pages(plan))


def _size(plan: CachePlan, pages: dict[Bucket, int]) -> int:
    return sum(plan.page_bytes[bucket] * count for bucket, count in pages.items())


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


def divide_budget(
    plan: CachePlan, budget: int, max_num_seqs: int, step_tokens: int, max_model_len: int, must_fit: int = 0
) -> PoolSizes:
    """Windows and states for up to `max_num_seqs` sequences (at most half the budget), blocks for the rest.

    Args:
        budget: bytes for all pools.
        max_model_len: tokens; no more blocks are made than `max_num_seqs` sequences of this length could use.
        must_fit: tokens of one sequence whose blocks come before the windows of others.

    Raises:
        ConfigError: not even one sequence and one block fit.
    """
    step, per_sequence, per_block = step_pages(plan, step_tokens), sequence_pages(plan), block_pages(plan)
    step_bytes, sequence_bytes, block_size = (_size(plan, pages) for pages in (step, per_sequence, per_block))
    beside = (budget - step_bytes - -(-must_fit // BLOCK_TOKENS) * block_size) // sequence_bytes
    sequences = max(1, min(max_num_seqs, (budget // 2 - step_bytes) // sequence_bytes, beside))
    left = budget - step_bytes - sequences * sequence_bytes
    if left < block_size:
        needed = step_bytes + sequence_bytes + block_size
        raise ConfigError(
            f"kv_cache_bytes={budget} ({budget / MIB:.1f} MiB) cannot hold one sequence: windows and states take "
            f"{sequence_bytes / MIB:.1f} MiB, a step of max_num_batched_tokens={step_tokens} {step_bytes / MIB:.1f} MiB, a block of "
            f"{BLOCK_TOKENS} tokens {block_size / MIB:.2f} MiB; give at least {needed} bytes or lower max_num_batched_tokens"
        )
    blocks = None
    if block_size:
        blocks = min(left // block_size, max_num_seqs * -(-max_model_len // BLOCK_TOKENS))
    pages = {b: step[b] + sequences * per_sequence[b] + (blocks or 0) * per_block[b] for b in plan.page_bytes}
    return PoolSizes(pages, blocks, sequences, _size(plan, pages))
