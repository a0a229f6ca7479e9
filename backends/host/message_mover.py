"""Moves single messages of one ring end, the common case of point-to-point, with one or two compiled calls each.

The first call holds the interpreter lock: no other thread can interfere with the start of a message, and a small message that
need not wait is complete before the lock could change hands. Waiting and large copies happen in a second call without the lock.
"""

from __future__ import annotations

import enum

import numpy as np
from numba.extending import register_jitable

from xvcomm.abc.device import RingStalled, RingStopped
from xvcomm.abc.message_mover import MessageMover
from xvcomm.backends.host import mover
from xvcomm.backends.host.batch import BUDGET
from xvcomm.backends.host.mover import WIDTH, Kind, drive_all, take, try_row
from xvcomm.backends.host.rendezvous import join
from xvcomm.jit.atomics import PENDING, READY, STOPPED, load, load_acquire, store
from xvcomm.jit.compile import brief, compiling, kernel
from xvcomm.memory.ring import RingEnd
from xvcomm.trace.format import DONE as ENDED
from xvcomm.trace.recorder import note, note_end
from xvcomm.types.deadline import Deadline
from xvcomm.types.opcode import OpCode

HELD_BYTES = 128 << 10
"""Messages up to this size may be copied with the interpreter lock held, which takes about as long as handing the lock over."""


class Word(enum.IntEnum):
    """Offsets of the words in a message mover's memory."""

    RECORDER = 0
    COMMUNICATOR = 1
    STOP = 2  # address of the communicator's abort word
    COUNTER = 3  # address of the ring end's next sequence number
    OP = 4  # for the flight recorder
    SPINS = 5
    RECORD = 6  # number of the newest record, inverted once it is complete
    ROW = 7  # of the mover


_RECORDER, _COMMUNICATOR, _STOP, _COUNTER, _OP, _SPINS, _RECORD, _ROW = (8 * word for word in Word)
_DATA, _NBYTES, _SEQUENCE, _DTYPE, _LENGTH, _TAG, _PHASE, _PEER = (
    8 * (Word.ROW + word)
    for word in (
        mover.Word.DATA, mover.Word.NBYTES, mover.Word.SEQUENCE, mover.Word.DTYPE, mover.Word.LENGTH, mover.Word.TAG,
        mover.Word.PHASE, mover.Word.PEER,
    )
)  # fmt: skip


@register_jitable
def _end(state: int) -> None:
    """Record that the message is complete."""
    number = load(state + _RECORD)
    note_end(load(state + _RECORDER), number, ENDED)
    store(state + _RECORD, ~number)


def _begin(state: int, collective: int, data: int, dtype: int, nbytes: int, tag: int, call_site: int) -> int:
    """See `MessageMover.begin`; READY, PENDING, STOPPED or MISMATCH."""
    recorder, communicator, peer = load(state + _RECORDER), load(state + _COMMUNICATOR), load(state + _PEER)
    number = note(recorder, communicator, collective, load(state + _OP), dtype, nbytes, peer, tag, call_site)
    store(state + _RECORD, number)
    store(state + _PHASE, mover.NEW)
    if load_acquire(load(state + _STOP)) != 0:
        return STOPPED
    store(state + _DATA, data)
    store(state + _NBYTES, nbytes)
    store(state + _SEQUENCE, take(load(state + _COUNTER)))
    store(state + _DTYPE, dtype)
    store(state + _LENGTH, nbytes)
    store(state + _TAG, tag)
    result = try_row(state + _ROW) if nbytes <= HELD_BYTES else PENDING
    if result == READY:
        _end(state)
    return result


def _advance(state: int, budget: int) -> int:
    """Progress the message; see `mover.drive_all`."""
    result = drive_all(state + _ROW, 1, 0, 0, load(state + _SPINS), budget)
    if result == READY:
        _end(state)
    return result


with compiling():
    _begin_kernel = brief("int64(int64, int64, int64, int64, int64, int64, int64)")(_begin)
    _advance_kernel = kernel("int64(int64, int64)")(_advance)


class HostMessageMover(MessageMover):
    """A row of the mover whose words are kept from message to message."""

    def __init__(
        self, end: RingEnd, op: int, recorder: int, communicator: int, stop: int, spins: int, process_memory: bool
    ) -> None:  # fmt: skip
        """`process_memory`: as in `Batch`."""
        self.end = end
        self._words = np.zeros(Word.ROW + WIDTH, np.int64)
        self._words[: Word.ROW] = (recorder, communicator, stop, end.counter, op, spins, -1)
        row = self._words[Word.ROW :]
        row[mover.Word.KIND] = Kind.PUT if end.producer else Kind.GET
        row[mover.Word.RING] = end.address
        row[mover.Word.OP] = OpCode.SEND
        row[mover.Word.TURN] = end.turn
        row[mover.Word.LANES : mover.Word.ITEMSIZE] = end.geometry
        row[mover.Word.ITEMSIZE] = 1
        row[mover.Word.PEER] = end.peer
        row[mover.Word.STATE] = join(end, process_memory)
        row[mover.Word.PHASE] = mover.DONE
        self._address = int(self._words.ctypes.data)

    @property
    def record(self) -> int:
        """See `MessageMover.record`."""
        number = int(self._words[Word.RECORD])
        return number if number >= 0 else ~number

    def begin(self, collective: int, data: int, dtype: int, nbytes: int, tag: int, call_site: int) -> bool:
        """See `MessageMover.begin`."""
        code = _begin_kernel(self._address, collective, data, dtype, nbytes, tag, call_site)
        if code > PENDING:
            raise self._stopped()
        return bool(code == READY)

    def finish(self, deadline: Deadline) -> None:
        """See `MessageMover.finish`."""
        while not self.advance():
            if deadline.expired():
                raise RingStalled([self.end])

    def advance(self, budget: int = BUDGET) -> bool:
        """Progress the message, sleeping at most `budget` nanoseconds in total; returns whether it is complete. Can be resumed.

        Raises:
            RingStopped: see `begin`.
        """
        code = _advance_kernel(self._address, budget)
        if code > PENDING:
            raise self._stopped()
        return bool(code == READY)

    def _stopped(self) -> RingStopped:
        return RingStopped(self.end, self.end.abort_word(), int(self._words[Word.ROW + mover.Word.SEQUENCE]))

    def discard(self) -> bool:
        """See `MessageMover.discard`."""
        if self._words[Word.RECORD] < 0:
            return False
        self.end.give_up()
        return True
