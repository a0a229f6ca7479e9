"""The flight recorder: what each rank did last, in memory that the host's other ranks can read even when it is dead.

A record is one struct write; hooks cost nothing while there are none.
"""

from __future__ import annotations

import enum
import itertools
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from xvcomm.dtype import BY_CODE
from xvcomm.opcode import OpCode

RECORD = 128
HEADER = 128
_FORMAT = struct.Struct("<10q48s")
_STATE, _END = 7, 9
_HERE = str(Path(__file__).parent)
_sites: dict[tuple[str, int], bytes] = {}
_internal: dict[str, bool] = {}

hooks: list[Callable[[Record], None]] = []
"""Called with each finished operation's record, on the thread that ran it. Append to it; keep it quick."""


class State(enum.IntEnum):
    """How far an operation got."""

    POSTED = 1
    DONE = 2
    FAILED = 3


_POSTED = int(State.POSTED)  # packing an enum's member takes twice as long


class Life(enum.IntEnum):
    """How far a rank got; word 0 of its region."""

    JOINING = 0
    RUNNING = 1
    CLOSED = 2


@dataclass(frozen=True, slots=True)
class Record:
    """One operation. Times are nanoseconds since the epoch; `peer` and `tag` are -1 where there is none."""

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
    site: str

    def describe(self) -> str:
        """`all_reduce #12 of 4096 x float32 at train.py:120 (in progress)`."""
        dtype = BY_CODE.get(self.dtype)
        what = f"{self.nbytes // dtype.itemsize} x {dtype}" if dtype else f"{self.nbytes} bytes"
        peer = f" with rank {self.peer}" if self.peer >= 0 else ""
        state = {State.POSTED: "in progress", State.DONE: "done", State.FAILED: "failed"}[State(self.state)]
        return f"{OpCode(self.op)} #{self.sequence}{peer} of {what} at {self.site} ({state})"


def region_bytes(records: int) -> int:
    """Bytes a rank needs."""
    return HEADER + records * RECORD


class Recorder:
    """Writes one rank's region."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._words = memory.cast("q")
        self._capacity = (len(memory) - HEADER) // RECORD
        self._numbers = itertools.count()

    def live(self, state: Life) -> None:
        """Say how far this rank got."""
        self._words[0] = state

    def begin(self, communicator: int, sequence: int, op: int, dtype: int, nbytes: int, peer: int = -1, tag: int = -1) -> int:
        """Note an operation that starts; gives the number to `end` it with."""
        number = next(self._numbers)  # one step, so that threads need no lock
        _FORMAT.pack_into(
            self._memory, HEADER + number % self._capacity * RECORD,
            sequence, communicator, op, dtype, nbytes, peer, tag, _POSTED, time.time_ns(), 0, call_site(),
        )  # fmt: skip
        self._words[1] = number + 1
        return number

    def end(self, number: int, state: State = State.DONE) -> None:
        """Note that it ended."""
        if self._words[1] - number > self._capacity:
            return  # overwritten since
        base = (HEADER + number % self._capacity * RECORD) // 8
        self._words[base + _END] = time.time_ns()
        self._words[base + _STATE] = state
        if hooks:
            record = read(self._memory, number)
            for hook in list(hooks):
                hook(record)

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self._words.release()
        self._memory.release()


def call_site() -> bytes:
    """`file.py:line` of the nearest caller outside xvcomm, at most 48 bytes."""
    frame = sys._getframe(2)
    while True:
        file = frame.f_code.co_filename
        internal = _internal.get(file)
        if internal is None:
            internal = _internal[file] = file.startswith(_HERE)
        if not internal or frame.f_back is None:
            break
        frame = frame.f_back
    # Keyed by file name: hashing a code object walks through all of it.
    key = (file, frame.f_lineno)
    found = _sites.get(key)
    if found is None:
        if len(_sites) > 4096:
            _sites.clear()
        found = _sites[key] = f"{Path(file).name}:{frame.f_lineno}".encode()[-48:]
    return found


def read(memory: memoryview, number: int) -> Record:
    """One record of a rank's region."""
    capacity = (len(memory) - HEADER) // RECORD
    *numbers, site = _FORMAT.unpack_from(memory, HEADER + number % capacity * RECORD)
    sequence, communicator, op, dtype, nbytes, peer, tag, state, posted, ended = numbers
    text = site.rstrip(b"\0").decode(errors="replace")
    return Record(sequence, communicator, op, dtype, nbytes, peer, tag, state, posted, ended, text)


def life(memory: memoryview) -> Life:
    """How far the rank of a region got."""
    return Life(memory.cast("q")[0])


def last(memory: memoryview) -> Record | None:
    """The newest record of a region, or None if the rank did nothing yet."""
    count = memory.cast("q")[1]
    return read(memory, count - 1) if count else None


def history(memory: memoryview) -> list[Record]:
    """All records kept in a region, oldest first."""
    count = memory.cast("q")[1]
    capacity = (len(memory) - HEADER) // RECORD
    return [read(memory, n) for n in range(max(0, count - capacity), count)]
