"""Snapshots made by hand."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

from xvcomm.trace.format import Record, Share, State
from xvcomm.trace.snapshot import Group, RankState, Snapshot
from xvcomm.types.dtype import BY_CODE
from xvcomm.types.opcode import OpCode
from xvcomm.types.topology import RankInfo

WORLD = zlib.crc32(b"0") & 0x7FFFFFFF
FLOAT32 = next(code for code, dtype in BY_CODE.items() if str(dtype) == "float32")


def record(
    op: OpCode, begin: int, end: int | None, sequence: int = 0, *, nbytes: int = 4096, peer: int = -1, tag: int = -1,
    communicator: int = WORLD, state: State | None = None, way: str = "shm", shares: Iterable[Share] = (),
) -> Record:  # fmt: skip
    """One operation; without an end it is in progress."""
    state = state or (State.POSTED if end is None else State.DONE)
    return Record(
        sequence, communicator, op, FLOAT32, nbytes, peer, tag, state, begin, end or 0, "train.py:7", way, tuple(shares)
    )


def snapshot(
    records: Mapping[int, Iterable[Record]], taken: int = 1000, size: int | None = None, hosts: str = "",
    ahead: Mapping[int, int] | None = None, dropped: Iterable[int] = (), groups: Mapping[int, tuple[Group, ...]] | None = None,
) -> Snapshot:  # fmt: skip
    """A job.

    Args:
        hosts: a letter for each rank; by default all are on one.
        dropped: ranks whose flight recorders have overwritten records.
    """
    size = size or max(records) + 1
    hosts = hosts or "a" * size
    infos = tuple(
        RankInfo(rank, hosts[rank], f"node-{hosts[rank]}", 100 + rank, "host", "host") for rank in range(size)
    )
    states = {
        rank: RankState(
            records=tuple(kept), ahead=(ahead or {}).get(rank, 0), dropped=5 if rank in dropped else 0,
            groups=(groups or {}).get(rank, ()),
        )
        for rank, kept in records.items()
    }  # fmt: skip
    return Snapshot("job-1", taken, infos, states)
