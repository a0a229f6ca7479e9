"""Position of a request's data in the caller's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xvcomm.errors import ArgumentError
from xvcomm.schedule.partition import Cut
from xvcomm.schedule.steps import Collective, Request
from xvcomm.types.topology import Topology

WHOLE = frozenset((Collective.ALL_REDUCE, Collective.REDUCE, Collective.BROADCAST))
ROOTED = frozenset((Collective.REDUCE, Collective.BROADCAST, Collective.GATHER, Collective.SCATTER))
"""Collectives of one array that all ranks describe by its elements, and those with a root."""


@dataclass(frozen=True, slots=True)
class Run:
    """`count` elements that are contiguous in the packed blocks (from `packed`) and in the caller's array (from `place`)."""

    packed: int
    place: int
    count: int


def runs(ranks: Sequence[int], blocks: Cut) -> list[Run]:
    """Map the blocks of `ranks`, packed without gaps, to the caller's array; empty blocks are left out.

    Args:
        ranks: in ascending order.
        blocks: division of the caller's array into one block per rank.
    """
    found: list[Run] = []
    packed = 0
    for rank in ranks:
        start, stop = blocks.part(rank)
        if start == stop:
            continue
        last = found[-1] if found else None
        if last is not None and last.place + last.count == start:
            found[-1] = Run(last.packed, last.place, last.count + stop - start)
        else:
            found.append(Run(packed, start, stop - start))
        packed += stop - start
    return found


def in_count(request: Request, rank: int) -> int:
    """Elements of IN on `rank`; 0 if the operation reads none there."""
    op = request.op
    if op in WHOLE:
        return request.count if op is not Collective.BROADCAST or rank == request.root else 0
    if op in (Collective.ALL_GATHER, Collective.GATHER):
        return request.counts[rank]
    return sum(request.counts) if op is not Collective.SCATTER or rank == request.root else 0


def out_count(request: Request, rank: int) -> int:
    """Elements of OUT on `rank`; 0 if the operation writes none there."""
    op = request.op
    if op in WHOLE:
        return request.count if op is not Collective.REDUCE or rank == request.root else 0
    if op in (Collective.REDUCE_SCATTER, Collective.SCATTER):
        return request.counts[rank]
    if op is Collective.ALL_TO_ALL:
        return sum(request.recv_counts)
    return sum(request.counts) if op is not Collective.GATHER or rank == request.root else 0


def in_place(request: Request, rank: int) -> tuple[int, int]:
    """Start of IN and OUT within one array, for a caller that passes the same memory for both.

    An all_to_all cannot run in place: its two arrays are placed one after the other.
    """
    op = request.op
    if op in WHOLE:
        return 0, 0
    if op is Collective.ALL_TO_ALL:
        return 0, in_count(request, rank)
    start = sum(request.counts[:rank])
    if op in (Collective.ALL_GATHER, Collective.GATHER):
        return start, 0
    return 0, start


def check(request: Request, topology: Topology, rank: int) -> None:
    """Check that a request fits the topology.

    Raises:
        ArgumentError: names the invalid field.
    """
    size = topology.size
    if not 0 <= rank < size:
        raise ArgumentError(f"rank {rank} is not in 0..{size - 1}; pass a rank of this topology")
    if request.op in ROOTED and not 0 <= request.root < size:
        raise ArgumentError(f"{request.op.value}: root {request.root} is not in 0..{size - 1}; pass a rank")
    if request.op in WHOLE:
        return
    lengths = (len(request.counts), len(request.recv_counts) if request.op is Collective.ALL_TO_ALL else size)
    if lengths != (size, size):
        raise ArgumentError(f"{request.op.value}: counts must have {size} entries, one per rank")
