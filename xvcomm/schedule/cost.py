"""Predicts the time of schedules: an alpha-beta model of their steps, with lanes overlapping as `after` permits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xvcomm.errors import ScheduleError
from xvcomm.schedule import build
from xvcomm.schedule.steps import (
    Buf,
    Collective,
    Copy,
    Exchange,
    Get,
    GetReduce,
    Lane,
    Native,
    Put,
    Reduce,
    Request,
    Scale,
    Schedule,
    Span,
    Step,
)
from xvcomm.types.dtype import FLOAT32
from xvcomm.types.topology import Topology


@dataclass(frozen=True, slots=True)
class Links:
    """Latency in seconds per call, and bandwidth in bytes per second, of everything that moves data.

    The defaults describe a data-centre GPU: NVLink within the island, PCIe 5 x16 through host memory between islands, TCP over
    two network interfaces of 100 Gbit/s between hosts.

    Attributes:
        native_latency, native_bandwidth: of the native library, per rank and direction.
        border_latency, border_bandwidth: of one rank's link to other islands of its host, per direction.
        wire_latency, wire_bandwidth: of a host's rails to other hosts together, per direction; its ranks share them.
        local_latency, local_bandwidth: of copies and reductions within a rank, counting bytes read and written.
    """

    native_latency: float = 20e-6
    native_bandwidth: float = 300e9
    border_latency: float = 12e-6
    border_bandwidth: float = 50e9
    wire_latency: float = 20e-6
    wire_bandwidth: float = 25e9
    local_latency: float = 4e-6
    local_bandwidth: float = 2.5e12


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time of one collective.

    Attributes:
        seconds: until the slowest rank has finished.
        busy: seconds for which each of its lanes works.
    """

    seconds: float
    rank: int
    busy: Mapping[Lane, float]


class _Wires:
    """Latency and bandwidth of a rank's messages, which depend on the hosts of both ranks."""

    def __init__(self, links: Links, hosts: Sequence[str]) -> None:
        self._links, self._hosts, self._sharing = links, hosts, Counter(hosts)

    def between(self, rank: int, peer: int) -> tuple[float, float]:
        """Seconds per message and bytes per second, from a rank to a peer and back."""
        links, hosts = self._links, self._hosts
        if not hosts or hosts[rank] == hosts[peer]:
            return links.border_latency, links.border_bandwidth
        ranks = max(self._sharing[hosts[rank]], self._sharing[hosts[peer]])
        return links.wire_latency, min(links.border_bandwidth, links.wire_bandwidth / ranks)


def predict(schedules: Mapping[int, Schedule], itemsize: int, links: Links, hosts: Sequence[str] = ()) -> Prediction:
    """Predict the time of the slowest of these ranks, assuming that its peers are never late.

    Args:
        hosts: a label for each rank of the job; one host if left out.
    """
    wires = _Wires(links, hosts)
    return max((_predict(rank, s, itemsize, links, wires) for rank, s in schedules.items()), key=lambda p: p.seconds)


def representatives(topology: Topology) -> tuple[int, ...]:
    """First and last rank of each island. Shares within an island differ by at most 16 bytes, so these represent all ranks."""
    return tuple(sorted({rank for island in topology.islands for rank in (island.ranks[0], island.ranks[-1])}))


def estimate(
    request: Request, topology: Topology, segment: int, links: Links, exchange: Exchange = Exchange.SUMS
) -> Prediction:
    """Predict the time of a collective with the same `request` on all ranks, from representative ranks."""
    schedules = {rank: build(request, topology, rank, segment, exchange) for rank in representatives(topology)}
    return predict(schedules, request.itemsize, links, topology.hosts)


def _predict(rank: int, schedule: Schedule, itemsize: int, links: Links, wires: _Wires) -> Prediction:
    free = dict.fromkeys(Lane, 0.0)
    busy = dict.fromkeys(Lane, 0.0)
    ends: list[float] = []
    for step in schedule.steps:
        duration = _duration(rank, step, itemsize, links, wires)
        start = max([free[step.lane], *(ends[wait] for wait in step.after)])
        free[step.lane] = start + duration
        busy[step.lane] += duration
        ends.append(start + duration)
    return Prediction(max(ends, default=0.0), rank, busy)


def _duration(rank: int, step: Step, itemsize: int, links: Links, wires: _Wires) -> float:
    match step:
        case Native():
            return links.native_latency + _moved(step) * _size(step.src, itemsize) / links.native_bandwidth
        case Put(peer=peer, src=span) | Get(peer=peer, dst=span) | GetReduce(peer=peer, dst=span):
            latency, bandwidth = wires.between(rank, peer)
            return latency + _nbytes(span, itemsize) / bandwidth
        case Copy(src=src, dst=dst) | Scale(src=src, dst=dst):
            touched = _nbytes(src, itemsize) + _nbytes(dst, itemsize)
        case Reduce(srcs=srcs, dst=dst):
            touched = (len(srcs) + 1) * _nbytes(dst, itemsize)
        case _:
            raise ScheduleError(f"{step!r} has no cost; a schedule consists of the steps of steps.py")
    return links.local_latency + touched / links.local_bandwidth


def _size(span: Span, itemsize: int) -> int:
    return max(itemsize, FLOAT32.itemsize) if span.buf is Buf.WIDE else itemsize


def _nbytes(span: Span, itemsize: int) -> int:
    return span.count * _size(span, itemsize)


def _moved(call: Native) -> int:
    """Elements that one member sends or receives, whichever is more, if the native library uses a ring algorithm."""
    larger, smaller = max(call.src.count, call.dst.count), min(call.src.count, call.dst.count)
    if call.op is Collective.ALL_REDUCE:
        return 2 * larger
    if call.op in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.GATHER, Collective.SCATTER):
        return larger - smaller  # a member's own part is not transferred
    return larger
