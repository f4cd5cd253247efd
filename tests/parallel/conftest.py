"""Shared by the tests of several ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import Pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()
