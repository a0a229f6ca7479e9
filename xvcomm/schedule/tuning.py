"""Chooses segment size and algorithm of a collective from the operation, its size and the topology."""

from __future__ import annotations

from dataclasses import dataclass

from xvcomm.schedule import SEGMENTED
from xvcomm.schedule.steps import Collective, Exchange
from xvcomm.types.topology import Topology


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a collective is carried out.

    Attributes:
        segment_bytes: bytes of the array per segment; 0 for one segment.
        exchange: see `schedule.build`.
    """

    segment_bytes: int
    exchange: Exchange = Exchange.SUMS


RANKS_BYTES, MOST_RANKS = 64 << 10, 8
"""Up to this size and number of ranks, ranks of one host send their arrays to each other, which saves the native call. On four
H100 both ways cost the same time at 128 KiB; the number of ranks is an estimate."""
ARRAYS_BYTES = 256 << 10
"""Up to this size, sending the whole array instead of a share costs less time than the two native calls that it saves."""
PARTS_BYTES, WIRE_PARTS_BYTES = 4 << 20, 1 << 20
"""From this size on, between two islands of one host or of more, ranks in host memory save more by adding half of the elements
than the second exchange costs: a tenth to a third."""
PAIR_BYTES = 128 << 10
"""From this size on two ranks of two hosts each add half of the elements: 128 KiB took 57 µs instead of 84, 256 KiB 97 instead of
120. Below it each sends its whole array, if rings take it at once: 96 KiB took 47 µs instead of 82. Neither way copies to scratch
memory or needs Python, except for an average, which takes as long as before. Far hosts lose by the second exchange."""


def tune(
    op: Collective, nbytes: int, topology: Topology, link_bytes: int, at_once: int, *, gpus: bool = True
) -> Tuning:
    """Choose the tuning of a collective; the same on all ranks.

    Args:
        link_bytes: bytes of a segment on each link between two equal islands: enough to hide the cost of a call, few enough for
            the stages to overlap. A segment is divided among all ranks, so its size grows with their number.
        at_once: bytes of a message that an empty ring between islands can buffer whole; without GPUs, one between hosts.
        gpus: whether any rank has one.
    """
    if topology.homogeneous or op not in SEGMENTED:
        return Tuning(0)
    segment = link_bytes * topology.size // 2
    segment = segment if nbytes > segment // 2 else 0
    if op is not Collective.ALL_REDUCE:
        return Tuning(segment)
    if not gpus:
        wired = len(set(topology.hosts)) > 1
        pair = wired and len(topology.islands) == topology.size == 2
        if pair and nbytes <= min(PAIR_BYTES, at_once):
            return Tuning(0, Exchange.ARRAYS)
        # Processes of one host share its cores: less work counts for more than fewer calls.
        least = PAIR_BYTES if pair else WIRE_PARTS_BYTES if wired else PARTS_BYTES
        return Tuning(segment, Exchange.SUMS if nbytes < least else Exchange.PARTS)
    few = len(topology.islands) < topology.size <= MOST_RANKS and len(set(topology.hosts)) == 1
    if few and nbytes <= RANKS_BYTES:
        return Tuning(0, Exchange.RANKS)
    return Tuning(0, Exchange.ARRAYS) if nbytes <= min(ARRAYS_BYTES, at_once) else Tuning(segment)
