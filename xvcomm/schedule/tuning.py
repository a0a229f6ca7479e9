"""Chooses how a collective is carried out, from the operation, its size and the topology."""

from __future__ import annotations

from dataclasses import dataclass

from xvcomm.schedule import SEGMENTED
from xvcomm.schedule.steps import Collective
from xvcomm.types.topology import Topology


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a collective is carried out.

    Attributes:
        segment_bytes: the array is worked on in segments of this size; 0 for one segment.
        short: see `schedule.build`.
    """

    segment_bytes: int
    short: bool = False


SHORT_BYTES = 256 << 10
"""Up to here two calls less take less time than what all of an array takes more than a share of it, over the border."""


def tune(op: Collective, nbytes: int, topology: Topology, link_bytes: int, at_once: int) -> Tuning:
    """The tuning of one collective; equal on all ranks.

    Args:
        op: the collective.
        nbytes: size of the whole array.
        topology: the ranks and their islands.
        link_bytes: what each border link between two equal islands should carry of one segment: enough to hide what a
            call costs, little enough for the stages to overlap. Segments grow with the number of ranks, because a
            segment is divided among all of them.
        at_once: bytes of a message that an empty ring takes before any of it is received.
    """
    if topology.homogeneous or op not in SEGMENTED:
        return Tuning(0)
    if op is Collective.ALL_REDUCE and nbytes <= min(SHORT_BYTES, at_once):
        return Tuning(0, short=True)
    segment = link_bytes * topology.size // 2
    return Tuning(segment if nbytes > segment // 2 else 0)
