"""The shared memory of a host's flight recorders: who the ranks of the job are, then a region for each rank of the host.

Any process that may open the memory can read it, at any time, without the ranks' help.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable

import msgspec

from xvcomm.trace import grades, groups
from xvcomm.trace.format import read_history, read_life, read_written, region_bytes
from xvcomm.trace.snapshot import RankState, Snapshot
from xvcomm.types.topology import RankInfo

MAGIC = b"xvcomm journal 4"
_HEAD = struct.Struct(f"<{len(MAGIC)}sq")
_ALIGNED = 128


class Roster(msgspec.Struct, frozen=True):
    """The ranks of a job.

    Attributes:
        job: its name.
        infos: of all ranks, in rank order.
        here: those of this host, in the order of their regions.
        namespaces: their PID namespaces, in the same order.
        records: how many each region keeps.
    """

    job: str
    infos: tuple[RankInfo, ...]
    here: tuple[int, ...]
    namespaces: tuple[str, ...]
    records: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Roster).decode


def size(roster: Roster) -> int:
    """Bytes of the memory."""
    return _begin(len(_encode(roster))) + len(roster.here) * region_bytes(roster.records)


def write(memory: memoryview, roster: Roster) -> None:
    """Write the head, last the word by which readers know that all is there."""
    data = _encode(roster)
    memory[_HEAD.size : _HEAD.size + len(data)] = data
    _HEAD.pack_into(memory, 0, MAGIC, len(data))


def roster(memory: memoryview) -> Roster | None:
    """What was written; None if the memory is another kind of shared memory."""
    if len(memory) < _HEAD.size:
        return None
    magic, length = _HEAD.unpack_from(memory)
    try:
        return _decode(memory[_HEAD.size : _HEAD.size + length]) if magic == MAGIC else None
    except msgspec.DecodeError:  # of another version, or being written
        return None


def regions(memory: memoryview, roster: Roster) -> dict[int, memoryview]:
    """The region of each rank."""
    begin, each = _begin(len(_encode(roster))), region_bytes(roster.records)
    return {rank: memory[begin + i * each : begin + (i + 1) * each] for i, rank in enumerate(roster.here)}


def read(memory: memoryview) -> Snapshot | None:
    """What the host's ranks do; None if the memory is another kind of shared memory."""
    found = roster(memory)
    if found is None:
        return None
    states = {rank: state(region) for rank, region in regions(memory, found).items()}
    return Snapshot(found.job, time.time_ns(), found.infos, states)


def state(region: memoryview, wanted: int | None = None) -> RankState:
    """What a rank does, to all the records kept or those of `read_history`."""
    records = tuple(read_history(region, wanted))
    dropped = read_written(region) - len(records)
    return RankState(
        read_life(region), groups=groups.read(region), records=records, dropped=dropped, grades=grades.read(region)
    )


def clock(regions: Iterable[memoryview]) -> int:
    """By how many nanoseconds the clock of rank 0's host is ahead, as a rank of this host has noted last; 0 if none has."""
    return max(tuple(region.cast("q")[3:5]) for region in regions)[1]


def _begin(length: int) -> int:
    return -(-(_HEAD.size + length) // _ALIGNED) * _ALIGNED
