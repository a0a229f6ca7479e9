"""The flight recorder: what each rank did last, in memory that the host's other ranks can read even when it is dead.

A record is written by compiled code in one call; hooks cost nothing while there are none.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import struct
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

from numba.extending import register_jitable

from xvcomm.jit.atomics import clock, copy_bytes, load, store, store_release
from xvcomm.jit.compile import brief, compiling
from xvcomm.types.dtype import BY_CODE
from xvcomm.types.opcode import OpCode

RECORD = 128
HEADER = 128
_SITE_BYTES = 48
_FORMAT = struct.Struct(f"<10q{_SITE_BYTES}s")
_STATE, _ENDED, _SITE = 7, 9, 10  # words of a record; see Record for the others
_HERE = str(Path(__file__).parents[1])
_inner: tuple[str, ...] = (_HERE,)
_SITES = 4096
_internal: dict[str, bool] = {}
_depths: dict[tuple[int, int], int] = {}
_callers: dict[int, int] = {}

hooks: list[Callable[[Record], None]] = []
"""Called with each finished operation's record, on the thread that ran it. Append to it; keep it quick."""


class State(enum.IntEnum):
    """How far an operation got."""

    POSTED = 1
    DONE = 2
    FAILED = 3


# As plain integers: of an enumeration's member, arithmetic and compiled code first look up the value.
_POSTED, DONE, FAILED = (int(state) for state in State)


class Life(enum.IntEnum):
    """How far a rank got; word 0 of its region."""

    JOINING = 0
    RUNNING = 1
    CLOSED = 2


@dataclass(frozen=True, slots=True)
class Record:
    """One operation. Times are nanoseconds since the epoch; `tag` is -1 where there is none, `peer` as in `Operation`."""

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
        of = "" if self.op == OpCode.PROBE else f" of {what}"
        return f"{OpCode(self.op)} #{self.sequence}{peer}{of} at {self.site} ({state})"


def region_bytes(records: int) -> int:
    """Bytes a rank needs."""
    return HEADER + records * RECORD


_nanoseconds = clock(time.CLOCK_REALTIME)  # as `time.time_ns()` has them


@register_jitable
def note(handle, communicator, sequence, op, dtype, nbytes, peer, tag, site):  # type: ignore[no-untyped-def]
    """Write the record of an operation that starts, with a `Recorder.handle`; gives its number."""
    region, capacity, number = load(handle), load(handle + 8), load(handle + 16)
    if region != 0:
        record = region + HEADER + number % capacity * RECORD
        words = (sequence, communicator, op, dtype, nbytes, peer, tag, _POSTED, _nanoseconds(), 0)
        for i, value in enumerate(words):
            store(record + 8 * i, value)
        copy_bytes(record + 8 * _SITE, site, _SITE_BYTES)
        store(handle + 16, number + 1)
        store_release(region + 8, number + 1)
    return number


@register_jitable
def note_end(handle, number, state):  # type: ignore[no-untyped-def]
    """Note the end of an operation, unless its record was overwritten since."""
    region, capacity = load(handle), load(handle + 8)
    if region != 0 and load(handle + 16) - number <= capacity:
        record = region + HEADER + number % capacity * RECORD
        store(record + 8 * _ENDED, _nanoseconds())
        store_release(record + 8 * _STATE, state)


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
        handle: address of what compiled code needs to write: where the region lies (0 once closed), records that it
            holds, number of the next one. No lock guards it but the interpreter's.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._words = memory.cast("q")
        region = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._writer = (ctypes.c_int64 * 3)(region, (len(memory) - HEADER) // RECORD, 0)
        self.handle = ctypes.addressof(self._writer)

    def live(self, state: Life) -> None:
        """Say how far this rank got."""
        self._words[0] = state

    def begin(
        self, communicator: int, sequence: int, op: int, dtype: int, nbytes: int, peer: int, tag: int, site: int
    ) -> int:
        """Note an operation that starts; gives the number to `end` it with. `site` is from `call_site`."""
        number: int = _note_kernel(self.handle, communicator, sequence, op, dtype, nbytes, peer, tag, site)
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
            record = read(self._memory, number)
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
        return history(memoryview(kept))

    def close(self) -> None:
        """Let go of the memory; what begins or ends later is not noted. Idempotent."""
        self._writer[0] = 0
        self._words.release()
        self._memory.release()


# Text of call sites, each at an address of its own that stays valid: compiled code copies from it.
_texts = (ctypes.c_char * _SITE_BYTES * _SITES)()
_places = itertools.count()  # one step, so that threads need no lock
# By the code object's address and the place in it, which are quicker to ask for than file and line. The code object is
# kept, so that no other one gets the address.
_sites: dict[tuple[int, int], tuple[int, CodeType]] = {}


def pass_over(folder: str) -> None:
    """Let files of a folder count as xvcomm's in `call_site`: a framework's, whose callers are the users."""
    global _inner
    if folder not in _inner:
        _inner = (*_inner, folder)
        _internal.clear()
        _sites.clear()
        _depths.clear()


def called_at(site: int, call: Callable[[], Any]) -> Any:
    """Run a call that another thread has asked for: until it is over, `call_site` gives this thread the other one's.

    Args:
        site: from the other thread's `call_site`; 0 where nobody knows.
    """
    thread = get_ident()
    before = _callers.get(thread, 0)
    _callers[thread] = site
    try:
        return call()
    finally:
        if before:
            _callers[thread] = before
        else:
            del _callers[thread]


def call_site(inside: int) -> int:
    """Address of `file.py:line`, at most 48 bytes, of the nearest caller outside xvcomm.

    Where C++ called xvcomm, in a thread without a line of Python's, it is the function that was called.

    Args:
        inside: callers of this function, counted from the nearest, that lie in xvcomm for certain; looking at each
            would take time.
    """
    if _callers:
        site = _callers.get(get_ident(), 0)
        if site:
            return site
    frame = sys._getframe(inside + 1)
    key = id(frame.f_code), frame.f_lasti
    found = _sites.get(key)
    if found is not None:
        return found[0]
    depth = _depths.get(key, 0)
    if depth:
        # Behind one place in xvcomm the user is nearly always as many callers away as the last time.
        try:
            outer = sys._getframe(inside + 1 + depth)
        except ValueError:
            return _outer_site(frame, key)
        found = _sites.get((id(outer.f_code), outer.f_lasti))
        if found is not None:
            return found[0]
    return _outer_site(frame, key)


def own_site(text: str) -> ctypes.Array[ctypes.c_char]:
    """A call site that its owner keeps: use its address, as `call_site` gives one, as long as the array lives."""
    return ctypes.create_string_buffer(text.encode()[-_SITE_BYTES:], _SITE_BYTES)


def _outer_site(frame: FrameType, key: tuple[int, int]) -> int:
    """The same, looking at each caller from a frame on; remembers under `key` how far it was."""
    depth = 0
    while True:
        file = frame.f_code.co_filename
        internal = _internal.get(file)
        if internal is None:
            internal = _internal[file] = file.startswith(_inner)
        if not internal or frame.f_back is None:
            break
        frame = frame.f_back
        depth += 1
    if len(_depths) >= _SITES:
        _depths.clear()
    _depths[key] = depth
    found = _sites.get((id(frame.f_code), frame.f_lasti))
    return found[0] if found is not None else _add_site(frame)


def _add_site(frame: FrameType) -> int:
    if len(_sites) >= _SITES:
        _sites.clear()
    text = _texts[next(_places) % _SITES]
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    if _internal.get(frame.f_code.co_filename):
        place = f"{frame.f_code.co_name}(), called by C++"
    text.raw = place.encode()[-_SITE_BYTES:].ljust(_SITE_BYTES, b"\0")
    address = ctypes.addressof(text)
    _sites[id(frame.f_code), frame.f_lasti] = address, frame.f_code
    return address


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
