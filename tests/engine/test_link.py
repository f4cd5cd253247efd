"""Both links: messages arrive whole, in order, side by side for several peers, and none is lost when the receiver is slow."""

from __future__ import annotations

import importlib.util
import multiprocessing
import multiprocessing.connection
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from abyssal.config import ServerConfig
from abyssal.engine.link import open_link
from abyssal.errors import ConfigError, EngineDeadError

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="NIXL is not installed: pip install -e '.[nixl]'"
)
BACKENDS = ["auto", pytest.param("nixl", marks=needs_nixl)]
CPU = torch.device("cpu")
PATIENCE = 120.0
SLOT, SLOTS = 4 << 20, 8  # of the NIXL link
SIZES = [1, 3 * SLOT + 5, 1000, SLOT, (SLOTS + 1) * SLOT, 7]  # more than all slots of a ring, whole slots, single bytes


def message(sender: int, receiver: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * sender + 10 * receiver + index)
    return torch.randint(256, (SIZES[index],), dtype=torch.uint8, generator=generator)


def sender_process(backend: str, rank: int, world_size: int, store: str, pipe: multiprocessing.connection.Connection) -> None:
    """Two ranks send; each sends all messages to every receiver, and then what it is asked to until None."""
    torch.set_num_threads(1)
    link = open_link(backend, rank, world_size, store, CPU)
    link.connect(senders=2)
    for index in range(len(SIZES)):
        for receiver in range(2, world_size):
            link.send(message(rank, receiver, index), receiver)
    pipe.send(link.bytes_sent)
    pipe.recv()
    link.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_messages_of_two_senders_arrive_whole_and_in_order(backend: str, tmp_path: Path) -> None:
    store, context = str(tmp_path / "store"), multiprocessing.get_context("spawn")
    here, there = zip(*(multiprocessing.Pipe() for _ in range(2)), strict=True)
    processes = [
        context.Process(target=sender_process, args=(backend, rank, 3, store, there[rank]), daemon=True) for rank in range(2)
    ]
    for process in processes:
        process.start()
    link = open_link(backend, 2, 3, store, CPU)
    try:
        link.connect(senders=2)
        arrived = []
        for index, size in enumerate(SIZES):
            for sender in range(2):
                raw = torch.zeros(size, dtype=torch.uint8)
                arrived.append((sender, index, raw, link.receive(raw, sender)))
        for sender, index, raw, future in arrived:
            future.result(PATIENCE)
            assert torch.equal(raw, message(sender, 2, index)), (sender, index)
        assert [pipe.recv() for pipe in here] == [sum(SIZES)] * 2
    finally:
        for pipe in here:
            pipe.send(None)
        for process in processes:
            process.join(PATIENCE)
            process.kill()
        link.close()


def receiver_process(store: str) -> None:
    link = open_link("nixl", 1, 2, store, CPU)
    link.connect(senders=1)
    link.receive(torch.zeros(5, dtype=torch.uint8), 0).result(PATIENCE)


@needs_nixl
def test_a_sender_learns_that_its_receiver_is_gone(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=receiver_process, args=(str(tmp_path / "store"),), daemon=True)
    process.start()
    link = open_link("nixl", 0, 2, str(tmp_path / "store"), CPU)
    link.connect(senders=1)
    link.send(torch.zeros(5, dtype=torch.uint8), 1)
    process.join(PATIENCE)
    assert process.exitcode is not None
    with pytest.raises(EngineDeadError, match="the link to engine 1 broke"):
        for _ in range(int(PATIENCE * 20)):
            link.send(torch.zeros(5, dtype=torch.uint8), 1)
            link._worker.join(0.05)  # type: ignore[attr-defined]
    link.close()


def test_nixl_that_is_not_installed_is_asked_for_by_name() -> None:
    hidden = "import sys; import importlib.util as u; find = u.find_spec\n"
    hidden += "u.find_spec = lambda name, *a: None if name == 'nixl' else find(name, *a)\n"
    hidden += "sys.argv = ['abyssal', 'serve', '--prefill-engines', '1', '--transfer-backend', 'nixl', '--port', '0']\n"
    hidden += "from abyssal.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "pip install -e '.[nixl]'" in done.stderr, done.stderr


def test_a_transfer_backend_needs_prefill_engines() -> None:
    with pytest.raises(ConfigError, match="transfer_backend=nixl needs prefill_engines"):
        ServerConfig(transfer_backend="nixl")
