"""Updates of several ranks on their way to who waits for them."""

from __future__ import annotations

import queue

import pytest

from abyssal.engine.request import RequestUpdate
from abyssal.errors import EngineDeadError
from abyssal.parallel.engine import RankedEngine


def test_an_error_of_one_request_takes_no_update_of_another() -> None:
    engine = object.__new__(RankedEngine)
    last, error = RequestUpdate("a", [1], None, None, "stop"), EngineDeadError("a rank is gone")
    engine._updates, engine._tasks = queue.Queue(), dict.fromkeys(("a", "b"))  # type: ignore[assignment]
    engine._updates.put(last)
    engine._updates.put(error)
    assert engine.step() == [last] and engine._tasks.keys() == {"b"}
    with pytest.raises(EngineDeadError):
        engine.step()
