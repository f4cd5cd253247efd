"""Bytes from one engine process to another: by NCCL between GPUs of a machine and by gloo on the CPU, or by NIXL."""

from __future__ import annotations

import importlib.util
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from abyssal.errors import ConfigError, EngineDeadError

PATIENCE = timedelta(minutes=30)  # a peer may be loading a model


class Link(Protocol):
    """One engine's end. Messages of a pair arrive in the order in which they were sent; sending and receiving go on beside the engine.

    Who receives is told elsewhere that a message is under way and how long it is: a receive that nobody sends to would never end.
    """

    rank: int  # of this engine
    bytes_sent: int

    def connect(self, senders: int) -> None:
        """Open every way from ranks below `senders` to the others; all ranks call it."""

    def send(self, raw: Tensor, receiver: int) -> None:
        """Send `raw`, uint8 [bytes], as kernels launched so far write it; it must not be written to afterwards.

        Raises:
            EngineDeadError: the receiver is gone.
        """

    def receive(self, raw: Tensor, sender: int) -> Future[None]:
        """Let `raw`, uint8 [bytes], be the next message of `sender`. The future is done when it is, or fails with a RuntimeError."""
        ...

    def close(self) -> None:
        """What is under way is lost."""


def open_link(backend: str, rank: int, world_size: int, store: str, device: torch.device) -> Link:
    """The end of engine `rank`; `backend` is one of `ServerConfig.transfer_backend`.

    Raises:
        ConfigError: NIXL is asked for and not installed.
    """
    if backend == "auto":
        return TorchLink(rank, world_size, store, device)
    require_nixl()
    from abyssal.engine.nixl_link import NixlLink

    return NixlLink(rank, world_size, store, device)


def require_nixl() -> None:
    if importlib.util.find_spec("nixl") is None:
        raise ConfigError(
            "transfer_backend=nixl needs NIXL, which is not installed: pip install -e '.[nixl]' in the clone of abyssal"
        )


def open_store(path: str, world_size: int) -> dist.Store:
    """What all ranks read and write; `path` is that of a file, new and the same for all, or tcp://HOST:PORT of a `dist.TCPStore`."""
    if path.startswith("tcp://"):
        host, _, port = path.removeprefix("tcp://").rpartition(":")
        return dist.TCPStore(host, int(port), is_master=False, timeout=PATIENCE)
    store = dist.FileStore(path, world_size)
    store.set_timeout(PATIENCE)
    return store


class TorchLink:
    """A `Link` over torch.distributed. The future of a receive fails when the sender is gone."""

    def __init__(self, rank: int, world_size: int, store: str, device: torch.device) -> None:
        """
        Args:
            rank: of this engine, 0 .. world_size - 1.
            store: of `open_store`, by which they find each other.
        """
        self.rank, self.device = rank, device
        backend = "nccl" if device.type == "cuda" else "gloo"
        files = open_store(store, world_size)
        dist.init_process_group(backend, store=files, rank=rank, world_size=world_size, timeout=PATIENCE)
        self.bytes_sent = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._senders = ThreadPoolExecutor(1, "link-send")
        self._receivers = ThreadPoolExecutor(1, "link-receive")

    def connect(self, senders: int) -> None:
        """In one order for all: NCCL opens a way when both ends ask for it."""
        probe = torch.zeros(1, dtype=torch.uint8, device=self.device)
        for sender in range(senders):
            for receiver in range(senders, dist.get_world_size()):
                if self.rank == sender:
                    dist.send(probe, receiver)
                elif self.rank == receiver:
                    dist.recv(probe, sender)

    def send(self, raw: Tensor, receiver: int) -> None:
        self.bytes_sent += raw.numel()
        try:
            work = dist.isend(raw, receiver)
        except RuntimeError as error:
            raise EngineDeadError(f"the link to engine {receiver} broke: {error}") from error
        assert work is not None
        self._senders.submit(self._wait, work, raw)

    def receive(self, raw: Tensor, sender: int) -> Future[None]:
        work = dist.irecv(raw, sender)
        assert work is not None
        return self._receivers.submit(self._wait, work, raw)

    def close(self) -> None:
        dist.destroy_process_group()

    def _wait(self, work: dist.Work, raw: Tensor) -> None:
        """Until `work` is done on the device; `raw` lives until then."""
        if self._stream is None:
            work.wait()
        else:
            with torch.cuda.stream(self._stream):
                work.wait()
                self._stream.synchronize()
