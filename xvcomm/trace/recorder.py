"""The flight recorder: what each rank did last, in memory that the host's other ranks can read even when it is dead.

A record is written by compiled code in one call; hooks cost nothing while there are none.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from xvcomm.jit.atomics import clock, copy_bytes, load, load_acquire, store, store_release
from xvcomm.jit.compile import brief, compiling
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, compiled_at, python_type
from xvcomm.trace.counters import Counters, count_begin, count_end
from xvcomm.trace.format import (
    CALL_SITE_BYTES,
    DONE,
    HEADER_BYTES,
    POSTED,
    RECORD_BYTES,
    WORDS,
    Life,
    Record,
    capacity,
    read_history,
    read_record,
)

hooks: list[Callable[[Record], None]] = []
"""Called with each finished operation's record, on the thread that ran it. Append to it; keep it quick."""

_WRITER = np.dtype([
    ("region", "i8"),  # its address; 0 once closed
    ("capacity", "i8"),  # records that it keeps
    ("number", "i8"),  # of the next record
    ("counters", "i8"),  # `Counters.address`; 0 while nothing is counted
])  # fmt: skip
_HEADER = np.dtype([("life", "i8"), ("written", "i8")])  # see `format`
_RECORD = np.dtype([(name, "i8") for name in WORDS] + [("call_site", f"S{CALL_SITE_BYTES}")])
_Writer, _writer_at = python_type(_WRITER), compiled_at(_WRITER)
_header_at, _record_at = compiled_at(_HEADER), compiled_at(_RECORD)

_nanoseconds = clock(time.CLOCK_REALTIME)  # as `time.time_ns()` has them


@register_jitable
def note(handle, communicator, sequence, op, dtype, nbytes, peer, tag, call_site):  # type: ignore[no-untyped-def]
    """Write the record of an operation that starts, with a `Recorder.handle`; gives its number."""
    writer = _writer_at(handle)
    region, number = writer.region, writer.number
    if region != 0:
        record = _record_at(region + HEADER_BYTES, number % writer.capacity)
        record.sequence, record.communicator, record.op, record.dtype = sequence, communicator, op, dtype
        record.nbytes, record.peer, record.tag, record.state = nbytes, peer, tag, POSTED
        record.posted, record.ended = _nanoseconds(), 0
        copy_bytes(address_of(record, "call_site"), call_site, CALL_SITE_BYTES)
        if writer.counters != 0:
            count_begin(writer.counters, communicator, op, peer, nbytes)
        writer.number = number + 1
        store_release(address_of(_header_at(region), "written"), number + 1)
    return number


@register_jitable
def note_end(handle, number, state):  # type: ignore[no-untyped-def]
    """Note the end of an operation, unless its record was overwritten since."""
    writer = _writer_at(handle)
    region = writer.region
    if region != 0 and writer.number - number <= writer.capacity:
        record = _record_at(region + HEADER_BYTES, number % writer.capacity)
        record.ended = _nanoseconds()
        if writer.counters != 0:
            length = record.ended - record.posted
            count_end(writer.counters, record.communicator, record.op, record.peer, length, state)
        store_release(address_of(record, "state"), state)


@register_jitable
def written(handle):  # type: ignore[no-untyped-def]
    """How many records were written so far, by the handle of a recorder that is not closed."""
    return load_acquire(address_of(_header_at(_writer_at(handle).region), "written"))


@register_jitable
def oldest(handle, count):  # type: ignore[no-untyped-def]
    """Number of the oldest of the `count` newest records, or of the oldest that is kept."""
    return max(0, written(handle) - min(count, _writer_at(handle).capacity))


@register_jitable
def quote(handle, number, target):  # type: ignore[no-untyped-def]
    """Write the rank's `Life` and a record, if there is one of this number, to `target`; how many words."""
    writer = _writer_at(handle)
    store(target, _header_at(writer.region).life)
    if number >= written(handle):
        return 1
    record = _record_at(writer.region + HEADER_BYTES, number % writer.capacity)
    copy_bytes(target + 8, address_of(record, "sequence"), RECORD_BYTES)
    return 1 + RECORD_BYTES // 8


def _note_ends(handle: int, numbers: int, count: int, state: int) -> None:
    """`note_end` of several operations."""
    for i in range(count):
        note_end(handle, load(numbers + 8 * i), state)


with compiling():
    _ends_kernel = brief("void(int64, int64, int64, int64)")(_note_ends)
    _note_kernel = brief("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64)")(note)
    _end_kernel = brief("void(int64, int64, int64)")(note_end)


class Recorder:
    """Writes one rank's region.

    Attributes:
        handle: address of a `_WRITER`, by which compiled code writes. No lock guards it but the interpreter's.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._words = memory.cast("q")
        region = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._writer = _Writer(region, capacity(memory), 0, 0)
        self._counters: list[Counters] = []  # kept: compiled code of other threads may be about to add to one
        self.handle = ctypes.addressof(self._writer)

    def count(self, counters: Counters | None) -> None:
        """Add all operations to these counters from now on; None ends that."""
        if counters is not None:
            self._counters.append(counters)
        self._writer.counters = 0 if counters is None else counters.address

    def live(self, state: Life) -> None:
        """Say how far this rank got."""
        self._words[0] = state

    def begin(
        self, communicator: int, sequence: int, op: int, dtype: int, nbytes: int, peer: int, tag: int, call_site: int
    ) -> int:
        """Note an operation that starts; gives the number to `end` it with. `call_site` is from `find_call_site`."""
        number: int = _note_kernel(self.handle, communicator, sequence, op, dtype, nbytes, peer, tag, call_site)
        return number

    def end(self, number: int, state: int = DONE) -> None:
        """Note that it ended."""
        _end_kernel(self.handle, number, +state)
        if hooks:
            self.tell(number)

    def end_all(self, numbers: Sequence[int], state: int = DONE) -> None:
        """Note that several ended, in that order."""
        words = array("q", numbers)  # ctypes would make a type for each length
        _ends_kernel(self.handle, words.buffer_info()[0], len(words), +state)
        if hooks:
            for number in numbers:
                self.tell(number)

    def tell(self, number: int) -> None:
        """Call the hooks with the record of an operation that ended."""
        try:
            record = read_record(self._memory, number)
        except ValueError:  # closed, maybe by another thread just now
            return
        for hook in list(hooks):
            hook(record)

    def history(self) -> list[Record]:
        """All records kept, oldest first; none once closed."""
        try:
            kept = bytes(self._memory)  # at once: others write, and may close
        except ValueError:
            return []
        return read_history(memoryview(kept))

    def close(self) -> None:
        """Let go of the memory; what begins or ends later is not noted. Idempotent."""
        self._writer.region = 0
        self._words.release()
        self._memory.release()
