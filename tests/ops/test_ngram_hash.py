"""Rows of the n-gram tables: the published constants of V4.1-Flash, and the hash written out token by token (V4.1 spec 3.8)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from abyssal.errors import ConfigError
from abyssal.kv.batch import Chunk, engram_rows
from abyssal.kv.pool import SequenceCache
from abyssal.model_config import parse_model_config
from abyssal.ops.ngram_hash import NgramHash, bucket_primes, hash_multipliers, ngram_hash, token_map
from tests.published_configs import v41_flash

FLASH = parse_model_config(v41_flash()).engram
assert FLASH is not None
SMALL = replace(
    FLASH, layer_ids=(0, 3), num_embeddings=(420, 508), max_ngram_size=3, vocab_size=100, n_heads=2, compressed_vocab_size=3
)
CACHE = SequenceCache({}, b"")
TOKENS = [("a", "a"), (" b", "Ġb"), ("<pad>", "<pad>"), ("A", "A")]


def test_multipliers_of_flash() -> None:
    assert hash_multipliers(FLASH).tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]


def test_primes_of_flash() -> None:
    primes = bucket_primes(FLASH)
    assert primes.shape == (2, 3, 8)
    assert primes[0, 0].tolist() == [16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183]
    assert primes[0, 2, -1] == 16000463
    assert primes[1, 0, 0] == 16000477
    assert primes[1, 2].tolist() == [16000781, 16000799, 16000813, 16000819, 16000841, 16000877, 16000879, 16000889]
    assert tuple(primes.sum((1, 2))) == FLASH.num_embeddings


def test_products_with_the_largest_id_do_not_overflow() -> None:
    largest = (FLASH.compressed_vocab_size - 1) * int(2 * ((2**63 - 1) // FLASH.compressed_vocab_size // 2) + 1)
    assert int(hash_multipliers(FLASH).max()) * (FLASH.compressed_vocab_size - 1) <= largest < 2**63


def test_token_map() -> None:
    """Forms that only differ in case, accents or spaces are one; parts of characters and empty forms keep themselves."""
    texts = ["The", " the", "THE\t", "thé", " ", "  ", "\n", "\ufffd", "\ufffd", "́", "ﬁ", "fi", "a  b", "A\r\nB", "", ""]
    entries = [f"e{i}" for i in range(len(texts))]
    #         the x4         space x3   two parts  accent  fi x2   a b x2  empty x2
    expected = [0, 0, 0, 0, 1, 1, 1, 2, 3, 4, 5, 5, 6, 6, 7, 7]
    assert token_map(zip(texts, entries, strict=True)).tolist() == expected


def slow_rows(hashing: NgramHash, ids: list[int], position: int, layer: int) -> list[int]:
    rows, mixed = [], 0
    for back in range(hashing.history + 1):
        mapped = int(hashing.token_map[ids[position - back]]) if position >= back else hashing.pad
        mixed ^= mapped * int(hashing.multipliers[layer, back])
        if back:
            first = sum(int(p) for p in hashing.primes[layer, : back - 1].ravel())
            for prime in hashing.primes[layer, back - 1].tolist():
                rows.append(mixed % prime + first)
                first += prime
    return rows


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(0, 11))
def test_rows_of_any_cut(ids: list[int], cut: int) -> None:
    hashing = ngram_hash(SMALL, TOKENS, 6)
    assert hashing.history == 2 and hashing.pad == 2
    cut = min(cut, len(ids) - 1)
    chunks = [Chunk(ids[:cut], 0, CACHE)] if cut else []
    rows = engram_rows(hashing, [*chunks, Chunk(ids[cut:], cut, CACHE, ids[max(0, cut - 2) : cut])])
    assert rows.tolist() == [[slow_rows(hashing, ids, p, layer) for p in range(len(ids))] for layer in range(2)]
    assert (rows >= 0).all() and (rows.amax((1, 2)) < torch.tensor(SMALL.num_embeddings)).all()


def test_ids_without_a_text_are_padding() -> None:
    """The model's vocabulary may be longer than the tokenizer's, and a step may draw any of it."""
    hashing = ngram_hash(SMALL, TOKENS, 6)
    recent = torch.tensor([[5, 0, 4], [2, 0, 2]])
    assert torch.equal(*hashing.rows(recent).unbind(1))


def test_sizes_of_another_checkpoint_are_named() -> None:
    with pytest.raises(ConfigError, match=r"engram_compressed_vocab_size is 4, but the tokenizer's texts have 3 normal forms"):
        ngram_hash(replace(SMALL, compressed_vocab_size=4), TOKENS, 4)
    with pytest.raises(ConfigError, match=r"engram_num_embeddings gives layer 3 507 rows, but .* need 508"):
        ngram_hash(replace(SMALL, num_embeddings=(420, 507)), TOKENS, 4)
