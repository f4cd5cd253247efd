"""Work on a second CUDA stream beside the current one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def forked(stream: torch.cuda.Stream | None) -> Iterator[Callable[[], None]]:
    """Launches inside go to `stream`, behind what was launched before, until the function that it gives is called: what is launched after
    that waits for them. None: they go to the current stream."""
    if stream is None:
        yield lambda: None
        return
    here = torch.cuda.current_stream(stream.device)
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        yield lambda: here.wait_stream(stream)
