"""Predicts the time of schedules: an alpha-beta model of their steps, with lanes overlapping as `after` permits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xvcomm.errors import ScheduleError
from xvcomm.schedule import build
from xvcomm.schedule.steps import (
    Buf,
    Copy,
    Exchange,
    Get,
    GetReduce,
    Lane,
    Native,
    NativeOp,
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

    The defaults describe a data-centre GPU: NVLink within the island, PCIe 5 x16 through host memory between islands.

    Attributes:
        native_latency, native_bandwidth: of the native library, per rank and direction.
        border_latency, border_bandwidth: of one rank's link to other islands, per direction.
        local_latency, local_bandwidth: of copies and reductions within a rank, counting bytes read and written.
    """

    native_latency: float = 20e-6
    native_bandwidth: float = 300e9
    border_latency: float = 12e-6
    border_bandwidth: float = 50e9
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


def predict(schedules: Mapping[int, Schedule], itemsize: int, links: Links) -> Prediction:
    """Predict the time of the slowest of these ranks, assuming that its peers are never late."""
    return max((_predict(rank, s, itemsize, links) for rank, s in schedules.items()), key=lambda p: p.seconds)


def representatives(topology: Topology) -> tuple[int, ...]:
    """First and last rank of each island. Shares within an island differ by at most 16 bytes, so these represent all ranks."""
    return tuple(sorted({rank for island in topology.islands for rank in (island.ranks[0], island.ranks[-1])}))


def estimate(
    request: Request, topology: Topology, segment: int, links: Links, exchange: Exchange = Exchange.SUMS
) -> Prediction:
    """Predict the time of a collective with the same `request` on all ranks, from representative ranks."""
    schedules = {rank: build(request, topology, rank, segment, exchange) for rank in representatives(topology)}
    return predict(schedules, request.itemsize, links)


def _predict(rank: int, schedule: Schedule, itemsize: int, links: Links) -> Prediction:
    free = dict.fromkeys(Lane, 0.0)
    busy = dict.fromkeys(Lane, 0.0)
    ends: list[float] = []
    for step in schedule.steps:
        duration = _duration(step, itemsize, links)
        start = max([free[step.lane], *(ends[wait] for wait in step.after)])
        free[step.lane] = start + duration
        busy[step.lane] += duration
        ends.append(start + duration)
    return Prediction(max(ends, default=0.0), rank, busy)


def _duration(step: Step, itemsize: int, links: Links) -> float:
    match step:
        case Native():
            return links.native_latency + _moved(step) * _size(step.src, itemsize) / links.native_bandwidth
        case Put(src=span) | Get(dst=span) | GetReduce(dst=span):
            return links.border_latency + _nbytes(span, itemsize) / links.border_bandwidth
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
    if call.op is NativeOp.ALL_REDUCE:
        return 2 * larger
    if call.op in (NativeOp.REDUCE_SCATTER, NativeOp.ALL_GATHER, NativeOp.GATHER, NativeOp.SCATTER):
        return larger - smaller  # a member's own part is not transferred
    return larger
