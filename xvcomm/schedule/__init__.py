"""Collectives as data: the steps of each rank for a collective over any number and size of islands.

`build` is a pure function of request, topology and rank. Its run time grows with the number of steps of that rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from xvcomm.schedule import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather_scatter,
    homogeneous,
    reduce,
    reduce_scatter,
)
from xvcomm.schedule.builder import Builder
from xvcomm.schedule.layout import check
from xvcomm.schedule.partition import grain
from xvcomm.schedule.steps import Collective, Exchange, Request, Schedule
from xvcomm.types.topology import Topology

__all__ = ["SEGMENTED", "build"]

SEGMENTED = frozenset((Collective.ALL_REDUCE, Collective.REDUCE, Collective.BROADCAST))
"""Collectives that can be split into segments; the others ignore `segment`."""

_WRITERS: Mapping[Collective, Callable[[Builder], None]] = {
    Collective.ALL_REDUCE: all_reduce.write,
    Collective.REDUCE: reduce.write,
    Collective.BROADCAST: broadcast.write,
    Collective.ALL_GATHER: all_gather.write,
    Collective.REDUCE_SCATTER: reduce_scatter.write,
    Collective.GATHER: gather_scatter.write_gather,
    Collective.SCATTER: gather_scatter.write_scatter,
    Collective.ALL_TO_ALL: all_to_all.write,
}


def build(
    request: Request,
    topology: Topology,
    rank: int,
    segment: int = 0,
    exchange: Exchange = Exchange.SUMS,
    wide: bool = True,
) -> Schedule:
    """Build the schedule of one rank.

    Args:
        request: the collective; the same on all ranks, except for the counts of an all_to_all.
        segment: elements per segment, rounded up to 16 bytes; 0 for one segment.
        exchange: how an all-reduce is carried out; the others ignore it.
        wide: whether partial results of low-precision dtypes may be stored and sent as float32 until they are rounded.

    Raises:
        ArgumentError: the request does not fit the topology.
    """
    check(request, topology, rank)
    unit = grain(request.itemsize)
    builder = Builder(request, topology, rank, -(-segment // unit) * unit, exchange, wide)
    write = homogeneous.write if topology.homogeneous else _WRITERS[request.op]
    write(builder)
    return builder.schedule()
