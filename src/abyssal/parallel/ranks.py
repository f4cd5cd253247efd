"""Several ranks over torch.distributed: gloo between processes and for tensors on the CPU, NCCL for tensors on GPUs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from abyssal.parallel.comm import Comm, LocalExperts, Shape
from abyssal.parallel.mesh import Mesh

FOREVER = timedelta(days=365)  # an idle rank waits for the next request as long as it takes; one that ends closes its connections
HEADER = 4096  # bytes of `share` that travel with the length
NO_SHAPE: Shape = (-1, -1)
ANY_SHAPE: Shape = (0, 0)


class RankComm(Comm):
    """One of several ranks. All of a group call the same methods in the same order."""

    def __init__(self, mesh: Mesh, store: Path, cuda: bool) -> None:
        """
        Args:
            mesh: this rank's place.
            store: file, not there yet, in which the ranks of this machine find each other.
            cuda: whether tensors are on GPUs.
        """
        self.mesh = mesh
        self.num_requests = 0  # handed out in all, as far as this rank knows: see `idle`
        self.stopping = False  # this rank was told to end
        self.all_stopping = False  # as of the latest step, all ranks that share experts were
        self._counts: list[int] = []  # tokens that each rank of the expert group gives away in this step
        os.putenv("GLOO_SOCKET_IFNAME", _loopback())  # read by gloo itself: nothing listens to other machines
        file_store = dist.FileStore(str(store), mesh.size)
        dist.init_process_group("gloo", store=file_store, rank=mesh.rank, world_size=mesh.size, timeout=FOREVER)

        def group(members: list[list[int]], *, data: bool) -> dist.ProcessGroup:
            """This rank's of a partition; every rank makes every group."""
            kinds = {"backend": "nccl"} if data and cuda else {"backend": "gloo", "timeout": FOREVER}
            made = [dist.new_group(ranks, **kinds) for ranks in members]
            return next(g for g, ranks in zip(made, members, strict=True) if mesh.rank in ranks)

        self._tp_control = group(mesh.tp_groups(), data=False)
        self._ep_control = group(mesh.ep_groups(), data=False)
        self._tp_data = group(mesh.tp_groups(), data=True)
        self._ep_data = group(mesh.ep_groups(), data=True)

    def close(self) -> None:
        dist.destroy_process_group()

    # Tensors of a replica

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        local = token_ids - self.mesh.tp_rank * len(table)
        elsewhere = (local < 0) | (local >= len(table))
        rows = F.embedding(local.masked_fill(elsewhere, 0), table)
        return self.sum(rows.masked_fill_(elsewhere.unsqueeze(1), 0))

    def sum(self, x: Tensor) -> Tensor:
        if self.mesh.tp > 1:
            dist.all_reduce(x, group=self._tp_data)
        return x

    def gather(self, x: Tensor) -> Tensor:
        if self.mesh.tp == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.mesh.tp)]
        dist.all_gather(parts, x.contiguous(), group=self._tp_data)
        return torch.cat(parts, dim=1)

    # Experts

    def experts(self, x: Tensor, experts: Tensor, weights: Tensor, num_experts: int, local: LocalExperts) -> Tensor:
        first = self.mesh.part("experts", num_experts).start

        if not self.mesh.in_step:
            return local(x, experts, weights, first)
        rows = self._rows(len(x), self.mesh.tp_rank)
        given = exchange(
            x[rows],
            experts[rows],
            weights[rows],
            self._counts,
            self._ep_data,
            lambda x, ids, scales: local(x, ids, scales, first),
        )
        if self.mesh.tp == 1:
            return given
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        out[rows] = given
        return out

    def _rows(self, num_tokens: int, tp_rank: int) -> slice:
        """Of a replica's tokens those that one of its ranks gives to the experts."""
        tp = self.mesh.tp
        return slice(num_tokens * tp_rank // tp, num_tokens * (tp_rank + 1) // tp)

    # Steps

    def enter(self, num_tokens: int, shape: Shape | None = None) -> Shape | None:
        if not self.mesh.in_step:
            return shape
        common, _ = self._meet(num_tokens, shape or NO_SHAPE)
        return common

    def idle(self, take_part: Callable[[Shape | None], None]) -> bool:
        if not self.mesh.in_step:
            self.all_stopping = self.stopping
            return True
        common, known = self._meet(0, ANY_SHAPE)
        if any(self._counts):
            take_part(common)
            return False
        return len(known) == 1

    def _meet(self, num_tokens: int, shape: Shape) -> tuple[Shape | None, set[int]]:
        """Exchange what each replica computes in this step: the shape common to all, if there is one; what each knows of requests."""
        mine = torch.tensor([num_tokens, *shape, self.num_requests, self.stopping])
        parts = [torch.empty_like(mine) for _ in range(self.mesh.ep)]
        dist.all_gather(parts, mine, group=self._ep_control)
        tokens, rows, capacities, requests, stops = zip(*(part.tolist() for part in parts), strict=True)
        common = (max(rows), max(capacities)) if NO_SHAPE[0] not in rows else None
        given = tokens if common is None else [common[0]] * self.mesh.ep
        slices = [self._rows(count, rank % self.mesh.tp) for rank, count in enumerate(given)]
        self._counts = [part.stop - part.start for part in slices]
        self.all_stopping = all(stops)
        return common, set(requests)

    # Facts of a replica

    def share(self, data: bytes) -> bytes:
        if self.mesh.tp == 1:
            return data
        first = self.mesh.dp_rank * self.mesh.tp
        header = torch.zeros(8 + HEADER, dtype=torch.uint8)
        if self.mesh.leads:
            header[:8] = _bytes(len(data).to_bytes(8, "little"))
            header[8 : 8 + len(data)] = _bytes(data[:HEADER])
        dist.broadcast(header, first, group=self._tp_control)
        length = int.from_bytes(bytes(header[:8].tolist()), "little")
        body = header[8 : 8 + length]
        if length > HEADER:
            rest = _bytes(data[HEADER:]) if self.mesh.leads else torch.empty(length - HEADER, dtype=torch.uint8)
            dist.broadcast(rest, first, group=self._tp_control)
            body = torch.cat([body, rest])
        return body.numpy().tobytes()

    def smallest(self, number: int) -> int:
        value = torch.tensor([number])
        dist.all_reduce(value, dist.ReduceOp.MIN)
        return int(value)


def _loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def exchange(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    counts: list[int],
    group: dist.ProcessGroup,
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Give every rank this one's rows, compute all ranks' rows with the experts that are here, and add up what comes back.

    Every rank gets every row: with 6 of 256 experts per token and up to 4 ranks nearly all rows would go nearly everywhere anyway, and
    so all sizes are known before the step, and nothing waits for the device.

    Args:
        x: [n, D]; experts int [n, k]; weights fp32 [n, k].
        counts: rows of every rank of `group`; n for this one.

    Returns:
        [n, ...] of what `compute` gives for rows, summed in the order of ranks.
    """
    ranks, total, mine = len(counts), sum(counts), len(x)
    parts = [part.contiguous().view(torch.uint8) for part in (x, experts.int(), weights)]
    packed = torch.cat(parts, dim=1)  # [n, bytes], one message per rank
    received = packed.new_empty(total, packed.shape[1])
    dist.all_to_all_single(received, packed.repeat(ranks, 1), counts, [mine] * ranks, group=group)
    rows, ids, scales = received.split([part.shape[1] for part in parts], dim=1)
    rows, ids, scales = (
        rows.contiguous().view(x.dtype),
        ids.contiguous().view(torch.int32),
        scales.contiguous().view(torch.float32),
    )
    out = compute(rows, ids, scales)  # [total, ...]
    returned = out.new_empty(ranks * mine, *out.shape[1:])
    dist.all_to_all_single(returned, out, [mine] * ranks, counts, group=group)
    return returned.view(ranks, mine, *out.shape[1:]).sum(0)
