"""Which rows of V4.1's n-gram tables a token reads: a function of its id and the ids before it (V4.1 spec 3.8)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Regex, normalizers
from torch import Tensor

from abyssal.config import EngramConfig
from abyssal.errors import ConfigError

_LONE_SPACE = "\ue000"  # stands for a text that is one space while spaces are trimmed
_NORMAL_FORM = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex("[ \\t\\r\\n]+"), " "),
        normalizers.Replace(Regex("^ $"), _LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(_LONE_SPACE, " "),
    ]
)


@dataclass(frozen=True, slots=True)
class NgramHash:
    """Constants of the hash, int64. L engram layers, N the largest n-gram, Hd heads per n-gram size."""

    token_map: Tensor  # [vocabulary of the model], token id -> compressed id
    pad: int  # compressed id in place of ids before the sequence
    multipliers: Tensor  # [L, N]
    primes: Tensor  # [L, N - 1, Hd]
    offsets: Tensor  # [L, N - 1, Hd], first table row of each bucket

    @property
    def history(self) -> int:
        """Ids before a token that its rows depend on."""
        return self.multipliers.shape[1] - 1

    @property
    def device(self) -> torch.device:
        return self.token_map.device

    def to(self, device: torch.device) -> NgramHash:
        token_map, multipliers, primes, offsets = (
            part.to(device) for part in (self.token_map, self.multipliers, self.primes, self.offsets)
        )
        return NgramHash(token_map, self.pad, multipliers, primes, offsets)

    def rows(self, recent: Tensor) -> Tensor:
        """Table rows int64 [L, T, (N - 1) Hd] of T tokens, sizes outside, heads inside.

        Args:
            recent: int64 [T, N], a token's id and those before it, the latest first; -1 in front of the sequence.
        """
        mapped = self.token_map[recent.clamp(min=0)].masked_fill(recent < 0, self.pad)
        mixed, *products = (mapped * self.multipliers.unsqueeze(1)).unbind(-1)  # [L, T]; below 2^63, so nothing overflows
        hashes = []
        for product in products:
            mixed = mixed ^ product
            hashes.append(mixed)
        buckets = torch.stack(hashes, dim=-1).unsqueeze(-1) % self.primes.unsqueeze(1)  # [L, T, N - 1, Hd]
        return (buckets + self.offsets.unsqueeze(1)).flatten(2)


def ngram_hash(config: EngramConfig, tokens: Iterable[tuple[str, str]], vocab_size: int) -> NgramHash:
    """The hash of a model.

    Args:
        tokens: per token id, from 0 on, its decoded text and its entry in the vocabulary.
        vocab_size: of the model, whose last ids may have no text: they count as padding, should one be drawn.

    Raises:
        ConfigError: the tokenizer's or the tables' sizes are not those of the config.
    """
    ids = token_map(tokens)
    found = int(ids.max()) + 1
    if found != config.compressed_vocab_size:
        raise ConfigError(
            f"config.json: engram_compressed_vocab_size is {config.compressed_vocab_size}, but the tokenizer's texts have {found} "
            "normal forms; tokenizer.json and config.json are not of the same checkpoint"
        )
    primes = bucket_primes(config)
    for layer, rows, sizes in zip(config.layer_ids, config.num_embeddings, primes, strict=True):
        if rows != sizes.sum():
            raise ConfigError(
                f"config.json: engram_num_embeddings gives layer {layer} {rows} rows, but the primes from engram_vocab_size="
                f"{config.vocab_size} on need {sizes.sum()}"
            )
    ends = primes.reshape(len(primes), -1).cumsum(1)
    offsets = (ends - primes.reshape(len(primes), -1)).reshape(primes.shape)
    constants = map(torch.from_numpy, (hash_multipliers(config), primes, offsets))
    pad = int(ids[config.pad_token_id])
    mapped = np.pad(ids, (0, max(0, vocab_size - len(ids))), constant_values=pad)
    return NgramHash(torch.from_numpy(mapped), pad, *constants)


def token_map(tokens: Iterable[tuple[str, str]]) -> np.ndarray:
    """Compressed ids int64 [vocabulary]: tokens of the same normal form share one, numbered by first appearance.

    The normal form has no accents, no capitals, single spaces inside and none around. A token that is only a part of a character
    goes by its vocabulary entry, one whose normal form is empty by its text.
    """
    numbers: dict[str, int] = {}
    keys = (entry if "\ufffd" in text else _NORMAL_FORM.normalize_str(text) or text for text, entry in tokens)
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def hash_multipliers(config: EngramConfig) -> np.ndarray:
    """Odd int64 [L, N], drawn from NumPy's generator seeded by the layer; a product with a compressed id stays below 2^63."""
    bound = (2**63 - 1) // config.compressed_vocab_size // 2
    draws = [np.random.default_rng(10007 * layer).integers(0, bound, config.max_ngram_size) for layer in config.layer_ids]
    return 2 * np.stack(draws) + 1


def bucket_primes(config: EngramConfig) -> np.ndarray:
    """Bucket sizes int64 [L, N - 1, Hd]: each the next prime from `vocab_size` on that no other bucket of any layer has."""
    primes = _primes_from(config.vocab_size)
    count = len(config.layer_ids) * config.columns
    taken = np.array(list(itertools.islice(primes, count)), np.int64)
    return taken.reshape(len(config.layer_ids), -1, config.n_heads)


def _primes_from(start: int) -> Iterator[int]:
    for candidate in itertools.count(max(2, start)):
        if all(candidate % divisor for divisor in range(2, int(candidate**0.5) + 1)):
            yield candidate
