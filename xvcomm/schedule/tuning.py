"""Chooses segment size and algorithm of a collective from the operation, its size and the topology."""

from __future__ import annotations

from dataclasses import dataclass

from xvcomm.schedule import SEGMENTED
from xvcomm.schedule.steps import Collective
from xvcomm.types.topology import Topology


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a collective is carried out.

    Attributes:
        segment_bytes: bytes of the array per segment; 0 for one segment.
        short: see `schedule.build`.
    """

    segment_bytes: int
    short: bool = False


SHORT_BYTES = 256 << 10
"""Up to this size, sending the whole array instead of a share costs less time than the two native calls that it saves."""


def tune(op: Collective, nbytes: int, topology: Topology, link_bytes: int, at_once: int) -> Tuning:
    """Choose the tuning of a collective; the same on all ranks.

    Args:
        link_bytes: bytes of a segment on each link between two equal islands: enough to hide the cost of a call, few enough for
            the stages to overlap. A segment is divided among all ranks, so its size grows with their number.
        at_once: bytes of a message that an empty ring can buffer whole.
    """
    if topology.homogeneous or op not in SEGMENTED:
        return Tuning(0)
    if op is Collective.ALL_REDUCE and nbytes <= min(SHORT_BYTES, at_once):
        return Tuning(0, short=True)
    segment = link_bytes * topology.size // 2
    return Tuning(segment if nbytes > segment // 2 else 0)
