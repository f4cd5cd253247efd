"""Which rows of V4.1's n-gram tables a token reads: a function of its id and the ids before it (V4.1 spec 3.8)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from tokenizers import Regex, normalizers

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
    """Constants of the hash. L engram layers, N the largest n-gram, Hd heads per n-gram size."""

    token_map: np.ndarray  # int64 [vocabulary], token id -> compressed id
    pad: int  # compressed id in place of ids before the sequence
    multipliers: np.ndarray  # int64 [L, N]
    primes: np.ndarray  # int64 [L, N - 1, Hd]
    offsets: np.ndarray  # int64 [L, N - 1, Hd], first table row of each bucket

    @property
    def history(self) -> int:
        """Ids before a token that its rows depend on."""
        return self.multipliers.shape[1] - 1

    def rows(self, before: list[int], token_ids: list[int]) -> np.ndarray:
        """Table rows int64 [L, T, (N - 1) Hd] of `token_ids` [T], sizes outside, heads inside.

        `before` holds the last `history` ids in front of them, fewer only where the sequence begins.
        """
        reach, count = self.history, len(token_ids)
        mapped = self.token_map[np.array([*before, *token_ids], np.int64)]
        mapped = np.concatenate([np.full(reach - len(before), self.pad), mapped])
        rows = np.empty((len(self.multipliers), count, *self.primes.shape[1:]), np.int64)
        for layer, multipliers in enumerate(self.multipliers):
            mixed = mapped[reach:] * multipliers[0]  # [T]; below 2^63, so nothing overflows
            for back in range(1, reach + 1):
                mixed = mixed ^ (mapped[reach - back : reach - back + count] * multipliers[back])
                rows[layer, :, back - 1] = mixed[:, None] % self.primes[layer, back - 1] + self.offsets[layer, back - 1]
        return rows.reshape(*rows.shape[:2], -1)


def ngram_hash(config: EngramConfig, tokens: Iterable[tuple[str, str]]) -> NgramHash:
    """The hash of a model.

    Args:
        tokens: per token id, from 0 on, its decoded text and its entry in the vocabulary.

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
    return NgramHash(ids, int(ids[config.pad_token_id]), hash_multipliers(config), primes, offsets)


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
