"""What the ranks of a job were doing at one moment, to the reports and to files; a dump is the same of one rank that has ended.

Anything can make one: a rank of the job, another process of its host, or a reader of dumps. Nothing here needs numba.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from xvcomm.errors import ArgumentError
from xvcomm.trace.format import Life, Record
from xvcomm.types.topology import RankInfo

VERSION = 1
SUFFIX = ".xvdump"


class Group(msgspec.Struct, frozen=True):
    """A communicator.

    Attributes:
        ident: its number in records.
        name: its path, `0` for the one of all ranks.
        ranks: its ranks as numbers of the whole job, in the communicator's order; empty if they are not known.
        newest: number of the newest collective that the rank which tells of it has called, -1 if none; None if not known.
    """

    ident: int
    name: str
    ranks: tuple[int, ...]
    newest: int | None = None


class Grades(msgspec.Struct, frozen=True):
    """How far an RDMA device came with the memory of the rank's GPU, as `backends.rdma.trials` has tried it.

    Attributes:
        device: its name.
        writes, reads: the last grade that it reached in each direction; empty if none.
    """

    device: str
    writes: str
    reads: str


class RankState(msgspec.Struct, frozen=True):
    """One rank.

    Attributes:
        life: how far it got.
        ending: how it has ended, in words; empty while it runs, and if it closed in good order.
        stopped: whether a signal has stopped its process.
        answered: False if it does not answer; then its host may have told what it did last.
        groups: its open communicators.
        records: the newest of its flight recorder, oldest first, by its own clock.
        taken: when this was read, in nanoseconds since the epoch by its own clock; 0: when the snapshot was taken.
        grades: of the RDMA devices that were tried with its GPU; empty in dumps of before there were any.
        dropped: how many older records there were, which the flight recorder has overwritten.
        ahead: nanoseconds by which its host's clock is ahead of the reader's.
        stack: of its main thread, as `faulthandler` writes it, the newest call first; empty if it was not asked for.
    """

    life: Life = Life.RUNNING
    ending: str = ""
    stopped: bool = False
    answered: bool = True
    groups: tuple[Group, ...] = ()
    records: tuple[Record, ...] = ()
    taken: int = 0
    ahead: int = 0
    stack: str = ""
    dropped: int = 0
    grades: tuple[Grades, ...] = ()


class Snapshot(msgspec.Struct, frozen=True):
    """A job.

    Attributes:
        job: its name.
        taken: nanoseconds since the epoch by the reader's clock.
        infos: of all ranks, in rank order.
        ranks: by their numbers in the job; of some ranks there may be nothing.
    """

    job: str
    taken: int
    infos: tuple[RankInfo, ...]
    ranks: dict[int, RankState]
    version: int = VERSION

    def save(self, path: Path) -> None:
        """Write it to a file, which a reader sees whole or not at all.

        Raises:
            OSError: the folder cannot be written to.
        """
        made = path.with_name(f".{path.name}.{os.getpid()}.new")  # a rank and its launcher may write at the same time
        made.write_bytes(encode(self))
        made.replace(path)


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Snapshot).decode


def load(path: Path) -> Snapshot:
    """What a file holds.

    Raises:
        ArgumentError: it is not a dump, or one of another version.
        OSError: it cannot be read.
    """
    try:
        found = decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} is no dump of xvcomm, or is cut off: {error}") from error
    if found.version != VERSION:
        raise ArgumentError(f"{path} has version {found.version} of dumps, this xvcomm reads version {VERSION}")
    return found


def load_folder(folder: Path) -> Snapshot:
    """The dumps of a folder as one: of each rank the newest, of the job that wrote last.

    Raises:
        ArgumentError: there are none, or one is damaged.
    """
    found = [load(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    if not found:
        raise ArgumentError(f"{folder} has no dumps (*{SUFFIX}); ranks write them to the folder XVCOMM_TRACE_DIR")
    newest = max(found, key=lambda snapshot: snapshot.taken)
    whole = merge(snapshot for snapshot in found if snapshot.job == newest.job)
    missing = RankState(answered=False, ending="it has left no dump")
    ranks = {info.rank: whole.ranks.get(info.rank, missing) for info in whole.infos}
    return msgspec.structs.replace(whole, ranks=ranks)


def merge(snapshots: Iterable[Snapshot]) -> Snapshot:
    """One of several of the same job: of each rank what was taken last."""
    by_time = sorted(snapshots, key=lambda snapshot: snapshot.taken)
    ranks = {rank: state for snapshot in by_time for rank, state in snapshot.ranks.items()}
    newest = by_time[-1]
    return Snapshot(newest.job, newest.taken, newest.infos, dict(sorted(ranks.items())))
