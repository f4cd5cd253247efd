"""One sequence on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from abyssal.engine.request import EngineRequest, TokenLogprobs
from abyssal.engine.sampler import SamplerState
from abyssal.kv.handover import HandOver
from abyssal.kv.pool import SequenceCache


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens [0, num_computed) are in the caches; what is left is computed next, and after the last one a token is sampled.

    Steps count as computed when they are launched: whatever touches the caches afterwards comes behind them on the device.
    """

    request: EngineRequest
    cache: SequenceCache
    sampler: SamplerState
    max_new_tokens: int
    token_ids: list[int]  # prompt, then output
    num_computed: int = 0
    num_cached: int = 0  # of the prompt, taken from the prefix index instead of being computed
    has_run: bool = False  # it has been admitted before
    saved: HandOver | None = None  # copy of its caches while it waits after a preemption
    num_shortages: int = 0  # how often it ran out of memory alone, with a single token
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def is_drawing(self) -> bool:
        """Whether its next token is under way: the host does not know it yet."""
        return self.num_computed == len(self.token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens that can be computed next; the one under way among them, unless it is the last."""
        known = len(self.token_ids) - self.num_computed
        return known or int(self.num_output + 1 < self.max_new_tokens)

    def draws(self, count: int) -> bool:
        """Whether a step of its next `count` tokens draws the one behind them."""
        return self.num_computed + count >= len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def may_reuse(self) -> bool:
        """Logprobs of the prompt need all of its logits, so that nothing may be skipped."""
        return self.request.params.prompt_logprobs is None or self.num_output > 0
