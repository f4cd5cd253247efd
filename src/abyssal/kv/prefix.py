"""Prefix index: blocks of 256 tokens that sequences computed, kept for later ones that begin with the same tokens.

A block is found by a hash chained over everything before it. Whole-context kinds have their pages in every block. Kinds of limited
life are needed just before the first token that is computed, so a block that ends a hit must also have `windows`: the pages of the
last tokens before its end. They are several times larger than the block, and the first to go when memory is short.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from abyssal.kv.specs import BLOCK_TOKENS

Pages = dict[str, np.ndarray]  # cache kind -> int32 [layers, pages]


@dataclass(slots=True, eq=False)
class Block:
    """One block of tokens after a given prefix."""

    key: bytes
    parent: Block | None
    pages: Pages  # whole-context kinds
    windows: Pages | None = None  # window kinds: pages of the last tokens of the block
    num_children: int = 0
    num_users: int = 0  # sequences that hold the block's pages
    queue: OrderedDict[Block, None] | None = field(default=None, repr=False)


def next_key(key: bytes, token_ids: list[int]) -> bytes:
    """Key of the block of `token_ids` that follows the block `key`."""
    return hashlib.sha256(key + np.array(token_ids, np.int32).tobytes()).digest()


class PrefixIndex:
    """Blocks by key, and the order in which memory is taken from them.

    First go windows in the middle of a chain, since most hits end at a later block; then whole blocks that nothing follows and
    nobody uses; last the windows where chains part or where a sequence is at work. Within each, the longest unused goes first.
    """

    def __init__(self, identity: str) -> None:
        """`identity` says what made the records: model and layouts."""
        self._identity = identity
        self._blocks: dict[bytes, Block] = {}
        self._inner: OrderedDict[Block, None] = OrderedDict()
        self._leaves: OrderedDict[Block, None] = OrderedDict()
        self._others: OrderedDict[Block, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def root(self, salt: str | None) -> bytes:
        """Start of a hash chain. Sequences share blocks only where their salts are equal."""
        return hashlib.sha256(repr((self._identity, salt)).encode()).digest()

    def get(self, key: bytes) -> Block | None:
        return self._blocks.get(key)

    def known(self, keys: list[bytes]) -> list[Block]:
        """The longest known chain that begins with `keys[0]`."""
        chain: list[Block] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            chain.append(block)
        return chain

    def match(self, keys: list[bytes]) -> list[Block]:
        """The longest known chain that begins with `keys[0]` and ends with a block that has windows."""
        chain = self.known(keys)
        while chain and chain[-1].windows is None:
            chain.pop()
        return chain

    def add(self, block: Block) -> None:
        assert block.key not in self._blocks
        self._blocks[block.key] = block
        if block.parent is not None:
            block.parent.num_children += 1
            self.touch(block.parent)
        self.touch(block)

    def use(self, block: Block) -> None:
        block.num_users += 1
        self.touch(block)

    def leave(self, block: Block) -> None:
        block.num_users -= 1
        self.touch(block)

    def refile(self, block: Block) -> None:
        """`block` lost its windows."""
        if block.queue is not self._queue(block):
            self.touch(block)

    def touch(self, block: Block, first: bool = False) -> None:
        """File `block` under what it is now, as the one used last, or to go `first`."""
        if block.queue is not None:
            del block.queue[block]
        block.queue = self._queue(block)
        if block.queue is not None:
            block.queue[block] = None
            block.queue.move_to_end(block, last=not first)

    def remove(self, block: Block) -> None:
        """Forget a leaf."""
        assert block.num_children == 0 and block.num_users == 0
        del self._blocks[block.key]
        if block.queue is not None:
            del block.queue[block]
        if (parent := block.parent) is not None:
            parent.num_children -= 1
            self.touch(parent, first=True)  # it was used no later than what followed it

    def windows_to_spare(self) -> list[Block]:
        return list(self._inner)

    def next_leaf(self) -> Block | None:
        return next(iter(self._leaves), None)

    def windows_left(self) -> list[Block]:
        return [*self._inner, *self._others]  # a fork that lost its other side is now inside a chain

    def _queue(self, block: Block) -> OrderedDict[Block, None] | None:
        if block.num_children == 0 and block.num_users == 0:
            return self._leaves
        if block.windows is None:
            return None
        return self._inner if block.num_children == 1 else self._others


def block_keys(keys: list[bytes], root: bytes, token_ids: list[int]) -> None:
    """Append to `keys` the keys of the complete blocks of `token_ids` that it lacks."""
    for index in range(len(keys), len(token_ids) // BLOCK_TOKENS):
        previous = keys[-1] if keys else root
        keys.append(next_key(previous, token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]))
