"""Bytes from one engine process to another: NCCL between GPUs of a machine, gloo on the CPU."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from abyssal.errors import EngineDeadError

PATIENCE = timedelta(minutes=30)  # a peer may be loading a model


class Link:
    """One engine's end. Messages of a pair arrive in the order in which they were sent; sending and receiving go on beside the engine.

    Who receives is told elsewhere that a message is under way and how long it is: a receive that nobody sends to would never end.
    """

    def __init__(self, rank: int, world_size: int, store: str, device: torch.device) -> None:
        """
        Args:
            rank: of this engine, 0 .. world_size - 1.
            store: path of a file, the same for all and new, by which they find each other.
        """
        self.rank, self.device = rank, device
        backend = "nccl" if device.type == "cuda" else "gloo"
        files = dist.FileStore(store, world_size)
        dist.init_process_group(backend, store=files, rank=rank, world_size=world_size, timeout=PATIENCE)
        self.bytes_sent = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._senders = ThreadPoolExecutor(1, "link-send")
        self._receivers = ThreadPoolExecutor(1, "link-receive")

    def connect(self, senders: int) -> None:
        """Open every way from ranks below `senders` to the others, in one order for all: NCCL opens one when both ends ask for it."""
        probe = torch.zeros(1, dtype=torch.uint8, device=self.device)
        for sender in range(senders):
            for receiver in range(senders, dist.get_world_size()):
                if self.rank == sender:
                    dist.send(probe, receiver)
                elif self.rank == receiver:
                    dist.recv(probe, sender)

    def send(self, raw: Tensor, receiver: int) -> None:
        """Send `raw`, uint8 [bytes], as kernels launched so far write it; it must not be written to afterwards.

        Raises:
            EngineDeadError: the receiver is gone.
        """
        self.bytes_sent += raw.numel()
        try:
            work = dist.isend(raw, receiver)
        except RuntimeError as error:
            raise EngineDeadError(f"the link to engine {receiver} broke: {error}") from error
        assert work is not None
        self._senders.submit(self._wait, work, raw)

    def receive(self, raw: Tensor, sender: int) -> Future[None]:
        """Let `raw`, uint8 [bytes], be the next message of `sender`. The future is done when it is; it fails when the sender is gone."""
        work = dist.irecv(raw, sender)
        assert work is not None
        return self._receivers.submit(self._wait, work, raw)

    def _wait(self, work: dist.Work, raw: Tensor) -> None:
        """Until `work` is done on the device; `raw` lives until then."""
        if self._stream is None:
            work.wait()
        else:
            with torch.cuda.stream(self._stream):
                work.wait()
                self._stream.synchronize()
