"""Bytes from one engine process to another: NCCL between GPUs of a machine, gloo on the CPU."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

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
        """Send `raw`, uint8 [bytes], which must not be written to afterwards."""
        self.bytes_sent += raw.numel()
        work = dist.isend(raw, receiver)
        assert work is not None
        self._senders.submit(self._wait, work, raw)

    def receive(self, size: int, sender: int) -> Future[Tensor]:
        """The next message of `sender`, uint8 [size], once it has arrived. The future fails when the sender is gone."""
        raw = torch.empty(size, dtype=torch.uint8, device=self.device)
        work = dist.irecv(raw, sender)
        assert work is not None
        return self._receivers.submit(self._wait, work, raw)

    def _wait(self, work: dist.Work, raw: Tensor) -> Tensor:
        """Until `work` is done on the device; `raw` lives until then."""
        if self._stream is None:
            work.wait()
        else:
            with torch.cuda.stream(self._stream):
                work.wait()
                self._stream.synchronize()
        return raw
