"""The flight recorder's memory format, and how to read it: without numba, so also from a file of a process that has died.

A region belongs to one rank: a header of 128 bytes (`Life`; number of records written so far; when the rank's stack was asked for
last; when the clock of rank 0's host was compared with this one's, and how far it is ahead), then PLACES for RDMA devices (see
`grades`) and its communicators (see `groups`), each as long as a record, then records in
a circle: `Record`'s fields in order, words of 64 bits and the text of the call site.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, fields
from typing import NamedTuple

from xvcomm.types.dtype import BY_CODE
from xvcomm.types.opcode import OpCode

HEADER_BYTES = 128
NICS = 8
"""Most RDMA devices of a rank whose grades other processes can read."""
GROUPS = 120
"""Most communicators of a rank whose names and ranks other processes can read."""
PLACES = NICS + GROUPS
CALL_SITE_BYTES = 48


class State(enum.IntEnum):
    """How far an operation got."""

    POSTED = 1
    DONE = 2
    FAILED = 3

    @property
    def words(self) -> str:
        """For a person."""
        return "in progress" if self is State.POSTED else self.name.lower()


class Stage(enum.IntEnum):
    """What is known of an operation that has not ended; a watchdog notes it, so it may be some tenths of a second old."""

    UNKNOWN = 0
    HELD = 1
    CALLED = 2
    WORKER = 3
    ENQUEUED = 4
    RUNNING = 5
    TOGETHER = 6
    OVER = 7
    UNANSWERED = 8

    @property
    def words(self) -> str:
        """For a person; empty if nothing is known."""
        return _STAGES[self]


_STAGES = {
    Stage.UNKNOWN: "",
    Stage.HELD: "held back by the host (deferred queue)",
    Stage.CALLED: "not yet enqueued by the host",
    Stage.WORKER: "run by the host's worker thread",
    Stage.ENQUEUED: "enqueued behind earlier work of its stream",
    Stage.RUNNING: "running: all earlier operations of its stream are over",
    Stage.TOGETHER: "running, or enqueued together with one that runs",
    Stage.OVER: "done, not reported yet",
    Stage.UNANSWERED: "enqueued on a device whose driver does not answer",
}

# As plain integers: of an enumeration's member, arithmetic and compiled code first look up the value.
POSTED, DONE, FAILED = (int(state) for state in State)
STATE, STAGE_BITS = 0xFF, 8
"""The word of an operation's state has its `State` in the lowest bits, and above them its `Stage`."""


class Life(enum.IntEnum):
    """How far a rank got."""

    JOINING = 0
    RUNNING = 1
    CLOSED = 2


class Share(NamedTuple):
    """The bytes of an operation that one connection to another host has carried, those that it has carried again among them.

    Attributes:
        connection: both addresses, this host's first, and the scheme: `10.0.0.1 to 10.0.0.2 (tcp)`.
        sent: also what is still under way.
    """

    connection: str
    sent: int
    received: int

    def __str__(self) -> str:
        return f"{self.connection} {self.sent} bytes out, {self.received} in"


@dataclass(frozen=True, slots=True)
class Record:
    """One operation.

    Times are nanoseconds since the epoch; `tag` is -1 where there is none, `peer` as in `Operation`. `way` and `shares`
    are not recorded, and empty where the reader does not know it: `way` is what carries the operation, the native library, the
    transport, or both, `nccl + tcp`; `shares` is what connections to other hosts have carried of it.
    """

    sequence: int
    communicator: int
    op: int
    dtype: int
    nbytes: int
    peer: int
    tag: int
    state: int
    posted: int
    ended: int
    call_site: str
    way: str = ""
    shares: tuple[Share, ...] = ()
    stage: Stage = Stage.UNKNOWN

    @property
    def contents(self) -> str:
        """`4096 x float32`."""
        dtype = BY_CODE.get(self.dtype)
        return f"{self.nbytes // dtype.itemsize} x {dtype}" if dtype else f"{self.nbytes} bytes"

    def describe(self) -> str:
        """`all_reduce #12 by nccl of 4096 x float32 at train.py:120 (in progress)`, and behind it `shares`."""
        peer = f" with rank {self.peer}" if self.peer >= 0 else ""
        state = State(self.state).words + (f": {self.stage.words}" if self.stage else "")
        over = f" over {'; '.join(map(str, self.shares))}" if self.shares else ""
        of = "" if self.op == OpCode.PROBE else f" of {self.contents}"
        way = f" by {self.way}" if self.way else ""
        return f"{OpCode(self.op)} #{self.sequence}{peer}{way}{of} at {self.call_site} ({state}){over}"


class Topic(enum.IntEnum):
    """What a process asks another one for, which answers without its interpreter."""

    RECORDS = 0
    """The newest of a flight recorder, and as many of the older ones at the most that have not ended."""
    GROUPS = 1
    """The places of RDMA devices, and of a flight recorder's communicators behind them."""
    TAKE_STACK = 2
    """Nothing; the process writes the stacks of its Python threads to memory, soon afterwards."""
    STACK = 3
    """What it has written there."""


ITSELF = -1
"""In a question, in place of a rank's index among those of its host: the process that is asked."""
MOST_PARTS = 128
"""Most parts of an answer."""
HEAD_WORDS = 2
"""Words in front of each part of an answer: the rank's `Life`, and the time there."""


class Question(NamedTuple):
    """What a process is asked.

    Attributes:
        wanted: the most parts of the answer, 1 to MOST_PARTS; of records how many of the newest.
        about: index of a rank among those of the asked one's host, or ITSELF; of stacks always ITSELF.
    """

    topic: Topic
    wanted: int = MOST_PARTS
    about: int = ITSELF


class Answer(NamedTuple):
    """What a process has told.

    Attributes:
        life: of the rank that it tells of.
        ahead: nanoseconds by which its clock is ahead of this one, as far as half a round trip tells.
        round_trip: how long that took.
        parts: as long as a record each.
    """

    life: Life
    ahead: int
    round_trip: int
    parts: tuple[bytes, ...]

    def records(self) -> tuple[Record, ...]:
        """Of RECORDS: oldest first."""
        return tuple(map(parse_record, self.parts))

    def text(self) -> str:
        """Of STACK."""
        return b"".join(self.parts).partition(b"\0")[0].decode(errors="replace")


WORDS = tuple(field.name for field in fields(Record) if field.type == "int")
"""Names of a record's words, in their order."""
_STATE_AT = WORDS.index("state")
_RECORD = struct.Struct(f"<{len(WORDS)}q{CALL_SITE_BYTES}s")
RECORD_BYTES = _RECORD.size
STACK_NANOSECONDS = 500_000_000
"""For how long a stack is not asked for again: who reads it meanwhile must find it whole."""
GROUPS_AT = HEADER_BYTES + NICS * RECORD_BYTES
RECORDS_AT = GROUPS_AT + GROUPS * RECORD_BYTES
"""Where the places of communicators and the records begin in a region."""


def region_bytes(records: int) -> int:
    """Bytes a rank needs."""
    return RECORDS_AT + records * RECORD_BYTES


def capacity(memory: memoryview) -> int:
    """Number of records that a region keeps."""
    return (len(memory) - RECORDS_AT) // RECORD_BYTES


def read_record(memory: memoryview, number: int) -> Record:
    """One record of a rank's region."""
    return parse_record(memory, region_bytes(number % capacity(memory)))


def parse_record(memory: bytes | memoryview, offset: int = 0) -> Record:
    """The record at an offset."""
    *numbers, call_site = _RECORD.unpack_from(memory, offset)
    stage, numbers[_STATE_AT] = numbers[_STATE_AT] >> STAGE_BITS, numbers[_STATE_AT] & STATE
    where = call_site.rstrip(b"\0").decode(errors="replace")
    return Record(*(*numbers, where, "", (), Stage(stage)))


def read_life(memory: memoryview) -> Life:
    """How far the rank of a region got."""
    return Life(memory.cast("q")[0])


def read_written(memory: memoryview) -> int:
    """How many records were written to a region so far."""
    count: int = memory.cast("q")[1]
    return count


def read_history(memory: memoryview, wanted: int | None = None) -> list[Record]:
    """All records kept in a region, or so many of the newest and as many of the older ones at the most that have not ended,
    oldest first.
    """
    words, kept = memory.cast("q"), capacity(memory)
    count, most = words[1], wanted or kept
    states = words[RECORDS_AT // 8 + _STATE_AT :: RECORD_BYTES // 8]
    newest = max(0, count - min(kept, most))
    pending = [n for n in range(max(0, count - kept), newest) if states[n % kept] & STATE == POSTED]
    return [read_record(memory, n) for n in (*pending[-most:], *range(newest, count))]
