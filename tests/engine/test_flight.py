"""Where tokens of steps land on the host."""

from __future__ import annotations

import pytest
import torch

from abyssal.engine.flight import Strips


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_results_are_under_way_at_a_time(device: str) -> None:
    """What a step leaves is overwritten as soon as the next is launched; one that nobody waits for takes its turn."""
    strips = Strips(5, torch.device(device))
    result = torch.empty(2, 5, dtype=torch.int64, device=device)
    landed = []
    for step in range(6):
        if device == "cuda":
            torch.cuda._sleep(20_000_000)  # ten milliseconds: the host is ahead
        part = result[:, : 1 + step % 5].fill_(step)
        landed.append((step, *strips.receive(part.contiguous())))
        part.fill_(-1)
        if step % 3:
            number, tokens, done = landed[-2]  # the step before, as the engine waits for it
            if done is not None:
                done.synchronize()
            assert tokens.shape == (2, 1 + number % 5) and (tokens == number).all()
