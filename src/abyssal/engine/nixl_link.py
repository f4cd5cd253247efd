"""A `Link` over NIXL: RDMA, TCP or shared memory, whatever UCX finds between the two; the engines may stand on different machines.

Each pair of engines has a ring of slots, once on either side. The sender copies a piece of a message into its next slot and writes that into
the receiver's slot of the same number; the receiver copies it out and says that the slot is free. Pieces count through all messages
of the pair, so that both sides know where each lies.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from nixl import nixl_agent, nixl_agent_config
from torch import Tensor

from abyssal.engine.link import open_store
from abyssal.errors import EngineDeadError

log = logging.getLogger("abyssal")

SLOTS = 8
SLOT_BYTES = 4 << 20
NAP_SECONDS = 2e-4  # while something is under way


class _Address(msgspec.Struct, array_like=True):
    """What an engine tells its peers."""

    metadata: bytes  # of its agent
    slots: int  # address of the first ring
    device: int


@dataclass(slots=True)
class _Piece:
    data: Tensor  # uint8 [at most SLOT_BYTES]
    ready: torch.cuda.Event | None  # before it, `data` must not be touched
    last: Future[None] | None  # of its message


@dataclass(slots=True)
class _Ring:
    """One pair's, as seen from one side."""

    peer: str  # name of its agent
    slots: Tensor  # uint8 [SLOTS, SLOT_BYTES]
    remote: int  # address of the peer's
    device: int  # of the peer
    pieces: deque[_Piece] = field(default_factory=deque)  # to send, or to receive, in order
    begun: int = 0  # pieces sent, or taken out
    freed: int = 0  # at the sender: those that the receiver has taken out
    arrived: set[int] = field(default_factory=set)  # at the receiver: pieces that lie in their slots
    writes: list[Any] = field(default_factory=list)  # handles of writes under way

    @property
    def is_quiet(self) -> bool:
        return not (self.pieces or self.writes)


class NixlLink:
    """As `engine.link.Link`. A sender that is gone is not noticed here: whoever runs the engines ends the receiver."""

    def __init__(self, rank: int, world_size: int, store: str, device: torch.device) -> None:
        """Arguments as for `engine.link.TorchLink`."""
        self.rank, self.device = rank, device
        self.bytes_sent = 0
        self._world_size, self._store = world_size, open_store(store, world_size)
        self._memory = "DRAM" if device.type == "cpu" else "VRAM"
        # Before the agent, which needs a CUDA context.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._agent = nixl_agent(f"engine-{rank}", nixl_agent_config(backends=["UCX"]))
        self._rings: dict[int, _Ring] = {}  # by rank of the peer
        self._sends = False
        self._broken: Exception | None = None
        self._closing = False
        self._woken = threading.Event()
        self._worker = threading.Thread(target=self._work, name="link", daemon=True)  # only it uses the agent once it runs

    def connect(self, senders: int) -> None:
        """Tell the peers where the slots lie, and learn where theirs do."""
        self._sends = self.rank < senders
        peers = range(senders, self._world_size) if self._sends else range(senders)
        position = self.rank if self._sends else self.rank - senders  # among the peers of each peer
        slots = torch.empty(len(peers), SLOTS, SLOT_BYTES, dtype=torch.uint8, device=self.device)
        self._registered = self._agent.register_memory(slots)
        index = self.device.index or 0
        own = _Address(self._agent.get_agent_metadata(), slots.data_ptr(), index)
        self._store.set(f"nixl-{self.rank}", msgspec.json.encode(own).decode())
        for peer, ring in zip(peers, slots, strict=True):
            address = msgspec.json.decode(self._store.get(f"nixl-{peer}"), type=_Address)
            name = self._agent.add_remote_agent(address.metadata)
            name = name.decode() if isinstance(name, bytes) else name
            self._rings[peer] = _Ring(name, ring, address.slots + position * SLOTS * SLOT_BYTES, address.device)
        self._worker.start()

    def send(self, raw: Tensor, receiver: int) -> None:
        self.bytes_sent += raw.numel()
        if self._broken is not None:
            raise EngineDeadError(f"the link to engine {receiver} broke: {self._broken}") from self._broken
        self._put(raw, receiver)

    def receive(self, raw: Tensor, sender: int) -> Future[None]:
        future: Future[None] = Future()
        if self._broken is None:
            self._put(raw, sender, future)
        else:
            future.set_exception(RuntimeError(str(self._broken)))
        return future

    def close(self) -> None:
        self._closing = True
        self._woken.set()
        if self._worker.is_alive():
            self._worker.join()
            self._agent.deregister_memory(self._registered)

    def _put(self, raw: Tensor, peer: int, future: Future[None] | None = None) -> None:
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record()
        pieces = raw.split(SLOT_BYTES)
        queue = self._rings[peer].pieces
        queue.extend(_Piece(data, ready, future if data is pieces[-1] else None) for data in pieces)
        self._woken.set()

    def _work(self) -> None:
        try:
            while not self._closing:
                if all(ring.is_quiet for ring in self._rings.values()):
                    self._woken.wait()
                self._woken.clear()
                self._take_notes()
                moved = [self._push(ring) if self._sends else self._pull(ring) for ring in self._rings.values()]
                if not any(moved):
                    time.sleep(NAP_SECONDS)
        except Exception as error:  # whatever it is, nobody may wait for ever
            log.exception("the link broke")
            self._broken = error
            for piece in (piece for ring in self._rings.values() for piece in ring.pieces):
                if piece.last is not None:
                    piece.last.set_exception(RuntimeError(str(error)))

    def _take_notes(self) -> None:
        notes = self._agent.get_new_notifs()
        for ring in self._rings.values():
            for note in notes.get(ring.peer, []):
                if self._sends:
                    ring.freed += 1
                else:
                    ring.arrived.add(int(note))

    def _push(self, ring: _Ring) -> bool:
        """Write pieces as far as slots are free; whether there was any."""
        states = [(write, self._agent.check_xfer_state(write)) for write in ring.writes]
        if any(state == "ERR" for _, state in states):
            raise RuntimeError(f"a write to {ring.peer} failed")
        ring.writes = [write for write, state in states if state != "DONE"]
        before = ring.begun
        while ring.pieces and ring.begun - ring.freed < SLOTS:
            piece, number = ring.pieces[0], ring.begun % SLOTS
            slot = ring.slots[number, : len(piece.data)]
            self._copy(slot, piece.data, piece.ready)
            there = (ring.remote + number * SLOT_BYTES, len(slot), ring.device)
            here, remote = self._agent.get_xfer_descs([slot]), self._agent.get_xfer_descs([there], self._memory)
            write = self._agent.initialize_xfer("WRITE", here, remote, ring.peer, b"%d" % ring.begun)
            if self._agent.transfer(write) == "ERR":
                raise RuntimeError(f"a write to {ring.peer} failed")
            ring.writes.append(write)
            ring.begun += 1
            ring.pieces.popleft()
        return ring.begun > before

    def _pull(self, ring: _Ring) -> bool:
        """Take out pieces that have arrived and are waited for; whether there was any."""
        before = ring.begun
        while ring.pieces and ring.begun in ring.arrived:
            piece = ring.pieces[0]
            self._copy(piece.data, ring.slots[ring.begun % SLOTS, : len(piece.data)], piece.ready)
            ring.arrived.remove(ring.begun)
            ring.begun += 1
            self._agent.send_notif(ring.peer, b"free")
            ring.pieces.popleft()
            if piece.last is not None:
                piece.last.set_result(None)
        return ring.begun > before

    def _copy(self, target: Tensor, source: Tensor, ready: torch.cuda.Event | None) -> None:
        """Done when this returns."""
        if self._stream is None or ready is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            target.copy_(source)
            self._stream.synchronize()
