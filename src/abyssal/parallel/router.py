"""Which of several engines gets a request: the one that holds the longest prefix of it, load permitting."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

MAX_BLOCKS = 1 << 16  # remembered per target: 16.8 million tokens in blocks of 256, about 10 MB

# A target may have this many requests more than the least loaded one, or this part of that one's, before its prefix stops counting.
SLACK_REQUESTS = 4
SLACK_PART = 0.5


class Router:
    """Remembers which prefixes went where. Targets are told nothing and asked nothing, so a memory may outlive the pages."""

    def __init__(self, num_targets: int, block_size: int, max_blocks: int = MAX_BLOCKS) -> None:
        """
        Args:
            num_targets: targets are 0 .. num_targets - 1.
            block_size: tokens per block of the targets' prefix caches.
            max_blocks: most blocks remembered per target; the ones sent longest ago go first, ends of chains before their beginnings.
        """
        assert min(num_targets, block_size, max_blocks) > 0, (
            f"{num_targets} targets, blocks of {block_size}, {max_blocks} of them"
        )
        self.block_size, self.max_blocks = block_size, max_blocks
        self._known: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_targets)]
        self._last_sent = [0] * num_targets  # in `_num_sent` counts
        self._num_sent = 0

    def choose(self, token_ids: Sequence[int], loads: Sequence[float], salt: str | None = None) -> int:
        """The target for a request.

        Args:
            token_ids: its prompt.
            loads: requests that each target has at the moment; infinity: it takes none.
            salt: requests share a prefix only where their salts are equal.

        Returns:
            Of the targets that are not loaded too much more than the least loaded one that with the longest known prefix; among
            equals the least loaded, then the one that was sent nothing for longest.
        """
        assert len(loads) == len(self._known), f"{len(loads)} loads for {len(self._known)} targets"
        lightest = min(loads)
        limit = lightest + max(SLACK_REQUESTS, SLACK_PART * lightest)
        open_targets = [target for target, load in enumerate(loads) if load <= limit]
        hits = self._hits(token_ids, open_targets, salt)
        return min(open_targets, key=lambda target: (-hits[target], loads[target], self._last_sent[target]))

    def sent(self, target: int, token_ids: Sequence[int], salt: str | None = None) -> None:
        """`target` computes `token_ids`: a prompt when it is sent, prompt and answer when it has ended."""
        known = self._known[target]
        for key in reversed(list(self._keys(token_ids, salt))):
            known[key] = None
            known.move_to_end(key)
        while len(known) > self.max_blocks:
            known.popitem(last=False)
        self._num_sent += 1
        self._last_sent[target] = self._num_sent

    def forget(self, target: int) -> None:
        """`target` lost its caches."""
        self._known[target].clear()

    def _hits(self, token_ids: Sequence[int], targets: list[int], salt: str | None) -> dict[int, int]:
        """Leading blocks of `token_ids` that each target knows."""
        hits = dict.fromkeys(targets, 0)
        still = targets
        for key in self._keys(token_ids, salt):
            still = [target for target in still if key in self._known[target]]
            if not still:
                break
            for target in still:
                hits[target] += 1
        return hits

    def _keys(self, token_ids: Sequence[int], salt: str | None) -> Iterator[bytes]:
        """Hashes of the complete blocks, each chained over everything before it."""
        key = hashlib.sha256(repr(salt).encode()).digest()
        ids = iter(token_ids)
        for _ in range(len(token_ids) // self.block_size):
            key = hashlib.sha256(key + array("q", islice(ids, self.block_size)).tobytes()).digest()
            yield key
