"""What the runner decides about a step."""

from __future__ import annotations

import pytest
import torch

from abyssal.config import EngineConfig
from abyssal.engine.engine import Engine
from abyssal.engine.pieces import padded
from abyssal.engine.runner import ONE_THREAD_VALUES, cpu_threads


def test_small_steps_run_on_one_thread(monkeypatch):
    engine = Engine(EngineConfig(device="cpu", kv_cache_bytes=1 << 28, max_model_len=1024))
    model, seen = engine.runner.model, []

    def recorded(batch, *arguments):
        seen.append((len(batch.token_ids), torch.get_num_threads()))
        return model(batch, *arguments)

    monkeypatch.setattr(engine.runner, "model", recorded)
    most = ONE_THREAD_VALUES // engine.runner.model_config.hidden_size
    with cpu_threads(2):
        engine.score(list(range(600, 601 + 2 * most)), [1, most, most], [0])
        engine.score(list(range(600, 601 + most)), [most + 1], [0])
        assert torch.get_num_threads() == 2
    assert seen == [(1, 1), (most, 1), (most, 1), (most + 1, 2)]


def test_threads_return_after_an_error():
    with cpu_threads(2):
        with pytest.raises(ValueError), cpu_threads(1):
            assert torch.get_num_threads() == 1
            raise ValueError
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("count", "size"), [(1, 16), (17, 32), (129, 160), (447, 448), (513, 640), (1025, 1280), (1999, 2000)])
def test_sizes_of_steps(count: int, size: int) -> None:
    assert padded(count, 2000) == size
