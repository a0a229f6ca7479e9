"""The flight recorder: what each rank did last, in memory that the host's other ranks can read even when it is dead.

A record is written by compiled code in one call; hooks cost nothing while there are none.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from array import array
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numba import types

from xvcomm.jit.atomics import clock, compare_and_swap, copy_bytes, load, load_acquire, store, store_release
from xvcomm.jit.compile import brief, compiling
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, compiled_at, python_type
from xvcomm.system.stacks import SIGNAL, StackFile
from xvcomm.trace import grades, groups
from xvcomm.trace.counters import Counters, count_begin, count_end
from xvcomm.trace.format import (
    CALL_SITE_BYTES,
    DONE,
    HEAD_WORDS,
    HEADER_BYTES,
    ITSELF,
    NICS,
    PLACES,
    POSTED,
    RECORD_BYTES,
    RECORDS_AT,
    STACK_NANOSECONDS,
    STAGE_BITS,
    STATE,
    WORDS,
    Life,
    Record,
    Stage,
    Topic,
    capacity,
    read_history,
    read_record,
)
from xvcomm.trace.snapshot import Grades, Group

hooks: list[Callable[[Record], None]] = []
"""Called with each finished operation's record, on the thread that ran it. Append to it; keep it quick."""

_WRITER = np.dtype([
    ("region", "i8"),  # its address; 0 once closed
    ("capacity", "i8"),  # records that it keeps
    ("number", "i8"),  # of the next record
    ("regions", "i8"),  # address of those of the host's ranks, their number, bytes of each
    ("ranks", "i8"),
    ("region_bytes", "i8"),
    ("stacks", "i8"),  # file of this process's stacks, or -1, and the signal by which it writes them
    ("signal", "i8"),
    ("process", "i8"),
    ("counters", "i8"),  # `Counters.address`; 0 while nothing is counted
])  # fmt: skip
_HEADER = np.dtype([("life", "i8"), ("written", "i8"), ("asked", "i8")])  # see `format`
_RECORD = np.dtype([(name, "i8") for name in WORDS] + [("call_site", f"S{CALL_SITE_BYTES}")])
_Writer, _writer_at = python_type(_WRITER), compiled_at(_WRITER)
_header_at, _record_at = compiled_at(_HEADER), compiled_at(_RECORD)

_SCANNED = 8192
"""Newest records among which an answer looks for those that have not ended: it keeps a rail from its work meanwhile."""
_TAKE_STACK, _STACK = int(Topic.TAKE_STACK), int(Topic.STACK)
_OF_RECORDS, _OF_GROUPS = int(Topic.RECORDS), int(Topic.GROUPS)

_tgkill = types.ExternalFunction("tgkill", types.int32(types.int32, types.int32, types.int32))
_ftruncate = types.ExternalFunction("ftruncate", types.int32(types.int32, types.int64))
_lseek = types.ExternalFunction("lseek", types.int64(types.int32, types.int64, types.int32))
_pread = types.ExternalFunction("pread", types.int64(types.int32, types.intp, types.int64, types.int64))
_nanoseconds = clock(time.CLOCK_REALTIME)  # as `time.time_ns()` has them


@register_jitable
def note(handle, communicator, sequence, op, dtype, nbytes, peer, tag, call_site):  # type: ignore[no-untyped-def]
    """Write the record of an operation that starts, with a `Recorder.handle`; gives its number."""
    writer = _writer_at(handle)
    region, number = writer.region, writer.number
    if region != 0:
        record = _record_at(region + RECORDS_AT, number % writer.capacity)
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
def note_newest(handle, newest, sequence):  # type: ignore[no-untyped-def]
    """Note the number of a communicator's newest collective at its place, `Recorder.newest_at`."""
    region = _writer_at(handle).region
    if region != 0 and newest != 0:
        store(region + newest, sequence)


@register_jitable
def note_end(handle, number, state):  # type: ignore[no-untyped-def]
    """Note the end of an operation, unless its record was overwritten since."""
    writer = _writer_at(handle)
    region = writer.region
    if region != 0 and writer.number - number <= writer.capacity:
        record = _record_at(region + RECORDS_AT, number % writer.capacity)
        record.ended = _nanoseconds()
        if writer.counters != 0:
            length = record.ended - record.posted
            count_end(writer.counters, record.communicator, record.op, record.peer, length, state)
        store_release(address_of(record, "state"), state)


@register_jitable
def _is_posted(records, index):  # type: ignore[no-untyped-def]
    return _record_at(records, index).state & STATE == POSTED


@register_jitable
def _region(writer, index):  # type: ignore[no-untyped-def]
    """The region of a rank of this host, by its index among them, or ITSELF."""
    return writer.region if index < 0 else writer.regions + index * writer.region_bytes


@register_jitable
def may_ask(handle, topic, index):  # type: ignore[no-untyped-def]
    """Whether a question of this process makes sense: stacks are told by their own process."""
    writer = _writer_at(handle)
    return 0 <= topic <= _STACK and ITSELF <= index < (writer.ranks if topic <= _OF_GROUPS else 0)


@register_jitable
def _take_stack(writer):  # type: ignore[no-untyped-def]
    """Let the process write its stack, which takes a moment, unless it has just done so."""
    header, now = _header_at(writer.region), _nanoseconds()
    if writer.stacks >= 0 and now - header.asked > STACK_NANOSECONDS:
        _ftruncate(writer.stacks, 0)
        header.asked = now
        for _ in range(2):  # the head of the second one shows that the first one is complete
            _tgkill(writer.process, writer.process, writer.signal)


@register_jitable
def extent(handle, topic, index, count):  # type: ignore[no-untyped-def]
    """Number of the first part of an answer, and the number behind the last one, see `Question`; more follow by `following`."""
    writer = _writer_at(handle)
    if topic == _OF_GROUPS:
        last, first = min(PLACES, count), _region(writer, index) + HEADER_BYTES
        while last > NICS and load(first + (last - 1) * RECORD_BYTES) == 0:  # a free place
            last -= 1
        return 0, last
    if topic == _TAKE_STACK:
        _take_stack(writer)
        return 0, 0
    if topic == _STACK:
        last = (_lseek(writer.stacks, 0, os.SEEK_END) + RECORD_BYTES - 1) // RECORD_BYTES if writer.stacks >= 0 else 0
        return 0, min(last, count)  # the newest calls
    region = _region(writer, index)
    written = load_acquire(address_of(_header_at(region), "written"))
    first = number = max(0, written - min(count, writer.capacity))
    oldest = max(0, written - min(_SCANNED, writer.capacity))
    while number > oldest and count > 0:
        number -= 1
        if _is_posted(region + RECORDS_AT, number % writer.capacity):
            first, count = number, count - 1
    return first, written


@register_jitable
def following(handle, topic, index, number, last, count):  # type: ignore[no-untyped-def]
    """Number of the part of an answer behind `number`; `last` or more if there is none."""
    number += 1
    if topic == _OF_RECORDS:
        writer = _writer_at(handle)
        records = _region(writer, index) + RECORDS_AT
        while number < last - count and not _is_posted(records, number % writer.capacity):
            number += 1
    return number


@register_jitable
def quote(handle, topic, index, number, last, target):  # type: ignore[no-untyped-def]
    """Write HEAD_WORDS and a part of an answer, if there is one of this number, to `target`; how many words."""
    writer = _writer_at(handle)
    region = _region(writer, index)
    store(target, _header_at(region).life)
    store(target + 8, _nanoseconds())
    if number >= last:
        return HEAD_WORDS
    part = target + 8 * HEAD_WORDS
    if topic == _STACK:
        for offset in range(0, RECORD_BYTES, 8):
            store(part + offset, 0)
        _pread(writer.stacks, part, RECORD_BYTES, number * RECORD_BYTES)
        return HEAD_WORDS + RECORD_BYTES // 8
    if topic == _OF_GROUPS:
        source = region + HEADER_BYTES + number * RECORD_BYTES
    else:
        source = address_of(_record_at(region + RECORDS_AT, number % writer.capacity), "sequence")
    copy_bytes(part, source, RECORD_BYTES)
    return HEAD_WORDS + RECORD_BYTES // 8


def _note_ends(handle: int, numbers: int, count: int, state: int) -> None:
    """`note_end` of several operations."""
    for i in range(count):
        note_end(handle, load(numbers + 8 * i), state)


def _note_stages(handle: int, numbers: int, count: int, stage: int) -> None:
    """Note the stage of operations, of those that have not ended."""
    writer = _writer_at(handle)
    for i in range(count):
        number = load(numbers + 8 * i)
        if writer.region != 0 and 0 < writer.number - number <= writer.capacity:
            record = _record_at(writer.region + RECORDS_AT, number % writer.capacity)
            before = record.state
            if before & STATE == POSTED:  # what ends it now without the interpreter comes first
                compare_and_swap(address_of(record, "state"), before, POSTED | stage << STAGE_BITS)


with compiling():
    _stages_kernel = brief("void(int64, int64, int64, int64)")(_note_stages)
    _ends_kernel = brief("void(int64, int64, int64, int64)")(_note_ends)
    _note_kernel = brief("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64)")(note)
    _end_kernel = brief("void(int64, int64, int64)")(note_end)


class Recorder:
    """Writes one rank's region.

    Attributes:
        handle: address of a `_WRITER`, by which compiled code writes. No lock guards it but the interpreter's.
    """

    def __init__(
        self, memory: memoryview, neighbours: Sequence[memoryview] = (), stacks: StackFile | None = None
    ) -> None:
        """Write to a region.

        Args:
            neighbours: those of all ranks of the host, one behind the other, which this process tells other hosts of.
            stacks: where this process writes the stacks of its threads.
        """
        self._memory = memory
        self._words = memory.cast("q")
        region = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        first = ctypes.addressof(ctypes.c_char.from_buffer(neighbours[0])) if neighbours else region
        self._writer = _Writer(
            region=region, capacity=capacity(memory), regions=first, ranks=len(neighbours), region_bytes=len(memory),
            stacks=stacks.fd if stacks is not None else -1, signal=SIGNAL, process=os.getpid(),
        )  # fmt: skip
        self._counters: list[Counters] = []  # kept: compiled code of other threads may be about to add to one
        self.handle = ctypes.addressof(self._writer)

    def note_group(self, group: Group) -> None:
        """Let other processes know a communicator, as far as there is room."""
        with contextlib.suppress(ValueError):  # closed
            groups.write(self._memory, group)

    def newest_at(self, ident: int) -> int:
        """Where `note_newest` notes a communicator's collectives; 0 if there was no room for the communicator."""
        try:
            return groups.newest_at(self._memory, ident)
        except ValueError:  # closed
            return 0

    def erase_group(self, ident: int) -> None:
        """A communicator is closed."""
        with contextlib.suppress(ValueError):  # closed
            groups.erase(self._memory, ident)

    def note_grades(self, found: Sequence[Grades]) -> None:
        """Let other processes know how far RDMA devices came with this rank's GPU, as far as there is room. Called once."""
        with contextlib.suppress(ValueError):  # closed
            grades.write(self._memory, found)

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

    @property
    def following(self) -> int:
        """Number of the next operation."""
        number: int = self._writer.number
        return number

    def note_stages(self, stages: Mapping[int, Stage]) -> None:
        """Note how far operations are, by their numbers; those that have ended keep their state."""
        for stage in set(stages.values()):
            words = array("q", [number for number, of_it in stages.items() if of_it is stage])
            _stages_kernel(self.handle, words.buffer_info()[0], len(words), +stage)

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
        self._writer.region, self._writer.stacks = 0, -1
        self._words.release()
        self._memory.release()
