"""The libraries that join the ranks: one at the border, where the pipeline passes, and one inside, among a stage's replicas."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import xvcomm
from xvcomm.errors import ArgumentError

PATIENCE = timedelta(minutes=3)
STAGED_ELEMENTS = 1 << 25
"""Elements that cross host memory in one call of Gloo."""


@dataclass(frozen=True, slots=True)
class Comm:
    """A choice of libraries.

    Attributes:
        border: between the stages: nccl, gloo or xvcomm.
        inside: among the replicas of a stage.
        rails: connections between two hosts, by which the islands are labelled; 0: they are on one host.
        text: what it stands for.
    """

    border: str
    inside: str
    text: str
    rails: int = 0


COMMS = {
    "nccl": Comm("nccl", "nccl", "all NCCL: GPUs of one vendor"),
    "xvcomm": Comm("xvcomm", "xvcomm", "islands; rings in host memory at the border (CPU-Forwarding), NCCL inside"),
    "gloo": Comm("gloo", "gloo", "all Gloo: everything crosses host memory"),
    "staged": Comm("gloo", "nccl", "Gloo at the border, NCCL inside"),
    "rails-1": Comm("xvcomm", "xvcomm", "xvcomm, two hosts by label, one TCP connection", rails=1),
    "rails-4": Comm("xvcomm", "xvcomm", "xvcomm, two hosts by label, four TCP connections", rails=4),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank is in the grid of stages and replicas, and how its computations are done.

    Attributes:
        stage, replica: its position.
        stages, replicas: size of the grid; ranks are numbered stage by stage.
        labels: name of each stage's island; None where xvcomm finds the islands itself.
        control: group of Gloo of all ranks, for numbers of the host.
    """

    stage: int
    replica: int
    stages: int
    replicas: int
    labels: tuple[str, ...] | None
    device: torch.device
    control: Any

    @property
    def last(self) -> bool:
        """Whether this is a rank of the last stage."""
        return self.stage == self.stages - 1


class Links(Protocol):
    """What a rank uses of a choice of libraries.

    Attributes:
        peers: communicator of this replica's stages, see `xvcomm.pipeline.step.Peers`.
        backends: what carries: at the border, inside.
    """

    peers: Any
    backends: tuple[str, str]

    def add_up(self, x: Tensor) -> None:
        """Sum an array over the replicas of this stage, in place."""

    def close(self) -> None:
        """End the use of the libraries."""


def connect(name: str, place: Place) -> Links:
    """Join all ranks by the libraries that `name` chooses; all ranks must call this."""
    chosen = COMMS[name]
    return OverXvcomm(chosen, place) if chosen.border == "xvcomm" else OverGroups(chosen, place)


class OverXvcomm:
    """Communicators of xvcomm, one over both islands and of it those of pipelines and stages."""

    def __init__(self, chosen: Comm, place: Place) -> None:
        if chosen.rails and place.labels is None:
            raise ArgumentError("variants with rails label hosts: name the islands by --islands")
        env = dict(os.environ)
        env.pop("XVCOMM_ISLAND", None)
        if place.labels is not None:
            env["XVCOMM_ISLAND"] = place.labels[place.stage]
        if chosen.rails:
            env |= {
                "XVCOMM_HOST": place.labels[place.stage],
                "XVCOMM_NICS": "lo",
                "XVCOMM_WIRE_THREADS": str(chosen.rails),
            }
        vendor = "rocm" if torch.version.hip else "cuda"
        self._world = xvcomm.init(
            env=env, device="host" if place.device.type == "cpu" else f"{vendor}:{place.device.index}"
        )
        self.peers = self._world.split(f"replica {place.replica}", key=place.stage)
        self._inside = self._world.split(f"stage {place.stage}", key=place.replica)
        inside = {"host": "shared memory", "cuda": "nccl", "rocm": "rccl"}[self._world.device]
        self.backends = ("xvcomm over TCP" if chosen.rails else "xvcomm", f"xvcomm: {inside}")

    def add_up(self, x: Tensor) -> None:
        """See `Links.add_up`."""
        if self._inside.size > 1:
            self._inside.all_reduce(x)

    def close(self) -> None:
        """See `Links.close`."""
        for comm in (self.peers, self._inside, self._world):
            comm.close()


class OverGroups:
    """Groups of torch.distributed. On host memory Gloo takes NCCL's place."""

    def __init__(self, chosen: Comm, place: Place) -> None:
        gpu, grid = place.device.type == "cuda", [
            [stage * place.replicas + replica for replica in range(place.replicas)] for stage in range(place.stages)
        ]  # fmt: skip
        border, inside = (name if gpu else "gloo" for name in (chosen.border, chosen.inside))
        self.backends = (border, inside)
        pipelines = [dist.new_group(list(ranks), PATIENCE, border) for ranks in zip(*grid, strict=True)]
        stages = [dist.new_group(ranks, PATIENCE, inside) for ranks in grid]
        self._groups = [pipelines[place.replica], stages[place.stage]]
        self._inside, self._replicas = stages[place.stage], place.replicas
        self._staged = gpu and inside == "gloo"
        ranks = [row[place.replica] for row in grid]
        self.peers = GroupPeers(pipelines[place.replica], place.control, ranks, staged=gpu and border == "gloo")

    def add_up(self, x: Tensor) -> None:
        """See `Links.add_up`."""
        if self._replicas == 1:
            return
        if self._staged:
            add_up_on_host(x, self._inside)
        else:
            dist.all_reduce(x, group=self._inside)

    def close(self) -> None:
        """See `Links.close`."""
        for group in self._groups:
            dist.destroy_process_group(group)


class GroupPeers:
    """A group of torch.distributed as `xvcomm.pipeline` uses a communicator.

    Args:
        group: carries arrays.
        control: a group of Gloo of all ranks, which carries objects.
        ranks: those of `group`, as numbers in the job.
        staged: whether arrays on GPUs go through host memory, because the group takes no others.
    """

    def __init__(self, group: Any, control: Any, ranks: list[int], *, staged: bool) -> None:
        self._group, self._control, self._ranks, self._staged = group, control, ranks, staged
        self._open: list[tuple[Any, Transfer]] | None = None

    @property
    def rank(self) -> int:
        """This rank."""
        return dist.get_rank(self._group)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._ranks)

    def isend(self, x: Tensor, dst: int, tag: int = 0) -> Transfer:
        """Start a send."""
        carried = to_host(x) if self._staged else x
        return self._start(dist.isend, Transfer(x, carried), dst, tag)

    def irecv(self, buf: Tensor, src: int, tag: int = 0) -> Transfer:
        """Start a receive."""
        carried = host_room(buf) if self._staged else buf
        return self._start(dist.irecv, Transfer(buf, carried, arrives=True), src, tag)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Start all messages of the block together at its end."""
        self._open = []
        yield
        opened, self._open = self._open, None
        batch = Batch([operation for operation, _ in opened])
        for _, transfer in opened:
            transfer.batch = batch

    def send_object(self, obj: Any, dst: int) -> None:
        """Send a picklable object."""
        dist.send_object_list([obj], self._ranks[dst], group=self._control)

    def recv_object(self, src: int) -> Any:
        """Receive an object."""
        found: list[Any] = [None]
        dist.recv_object_list(found, self._ranks[src], group=self._control)
        return found[0]

    def abort(self, reason: str) -> None:
        """Nothing: the exception that follows ends this process, and the launcher ends the others."""

    def _start(self, function: Any, transfer: Transfer, peer: int, tag: int) -> Transfer:
        operation = dist.P2POp(function, transfer.carried, group=self._group, group_peer=peer, tag=tag)
        if self._open is not None:
            self._open.append((operation, transfer))
        else:
            transfer.batch = Batch([operation])
        return transfer


class Batch:
    """Messages that were started together, and are waited for together, once: Gloo waits for ever a second time."""

    def __init__(self, operations: list[Any]) -> None:
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> None:
        """Order later work after all of them."""
        while self._works:
            self._works.pop().wait()

    def done(self) -> bool:
        """Whether all of them are complete."""
        return all(work.is_completed() for work in self._works)


class Transfer:
    """A message on its way.

    Args:
        array: the caller's.
        carried: what the library takes: the array itself, or host memory in its place.
        arrives: whether it is received.
    """

    def __init__(self, array: Tensor, carried: Tensor, *, arrives: bool = False) -> None:
        self._array, self._arrives = array, arrives
        self.carried = carried
        self.batch: Batch | None = None

    def wait(self) -> Tensor:
        """Order later work after the message; with host memory the host waits."""
        assert self.batch is not None, "wait outside of the group"
        self.batch.wait()
        if self._arrives and self.carried is not self._array:
            self._array.copy_(self.carried, non_blocking=True)
        return self._array

    def done(self) -> bool:
        """Whether the message is complete."""
        return self.batch is not None and self.batch.done()


def add_up_on_host(x: Tensor, group: Any) -> None:
    """Sum an array over a group, piece by piece in host memory, in place."""
    for piece in x.split(STAGED_ELEMENTS):
        host = to_host(piece)
        dist.all_reduce(host, group=group)
        piece.copy_(host)


def to_host(x: Tensor) -> Tensor:
    """A copy in host memory; the host waits until it is there."""
    host = host_room(x)
    host.copy_(x, non_blocking=True)
    if x.is_cuda:
        torch.cuda.current_stream().synchronize()
    return host


def host_room(x: Tensor) -> Tensor:
    """Host memory for an array of a GPU, which is pinned then."""
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
