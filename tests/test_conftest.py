"""The shared fixtures do what other tests rely on."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import DATA, POISON_LIMIT, _filled, poison_

# Code that counts as the package's own: the poison looks at the caller's module name.
INSIDE = {"__name__": "abyssal.probe", "torch": torch}


def inside(expression: str) -> torch.Tensor:
    return eval(expression, dict(INSIDE))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "float8_e4m3fn"])
def test_fresh_floats_of_the_package_are_nan(dtype: str) -> None:
    for call in ("torch.empty(3, 5, dtype=torch.{})", "torch.empty_like(torch.zeros(7, dtype=torch.{}))",
                 "torch.zeros(1, dtype=torch.{}).new_empty(4)"):  # fmt: skip
        assert inside(call.format(dtype)).float().isnan().all(), call


def test_fresh_integers_of_the_package_are_far_out_of_range() -> None:
    assert (inside("torch.empty(9, dtype=torch.int32)") == 1 << 30).all()
    assert (inside("torch.empty(9, dtype=torch.int64)") == 1 << 62).all()
    assert (inside("torch.empty(9, dtype=torch.uint8)") == 0xFF).all()


def test_large_pools_are_poisoned_where_pages_are_handed_out_first() -> None:
    pool = inside(f"torch.empty({POISON_LIMIT} + 4096, dtype=torch.uint8)")
    assert (pool[: POISON_LIMIT : 1 << 16] == 0xFF).all()


def test_allocations_of_others_are_left_alone() -> None:
    """Libraries and tests may fill their own buffers piecemeal; only a caller inside the package is handed poison."""
    zeros = _filled(torch.zeros, poison_)
    assert (zeros(5) == 0).all()
    assert (eval("zeros(5)", {"__name__": "abyssal_plugin", "zeros": zeros}) == 0).all()
    assert eval("zeros(5)", {"__name__": "abyssal.probe", "zeros": zeros}).isnan().all()


def test_recall_documents_are_complete(recall) -> None:
    for tokens in (512, 2048):
        documents = recall(tokens)
        assert len(documents) == 10
        for document in documents:
            assert tokens - 2 <= len(document["input_ids"]) <= tokens
            rows = document["answer_at"].long()
            for offset in range(5):  # the document holds the right answers: row r predicts token r + 1
                assert torch.equal(document["input_ids"][rows + offset + 1], document["digits"][:, offset])


def test_reference_data_in_the_repository_stays_small() -> None:
    total = sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file())
    assert total < 20 * 1024 * 1024, f"tests/data holds {total} bytes"


def test_a_missing_reference_model_is_skipped_by_name(goldens) -> None:
    with pytest.raises(pytest.skip.Exception, match="no_such_model"):
        goldens("no_such_model")
