"""Moves single messages of one ring end, the common case of point-to-point, with one or two compiled calls each.

The first call holds the interpreter lock: no other thread can interfere with the start of a message, and a small message that
need not wait is complete before the lock could change hands. Waiting and large copies happen in a second call without the lock.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from xvcomm.abc.device import RingStalled, RingStopped
from xvcomm.abc.message_mover import MessageMover
from xvcomm.backends.host.mover import DONE, NEW, ROW, Kind, drive_all, take, try_row
from xvcomm.backends.host.rendezvous import join
from xvcomm.jit.atomics import BUDGET, PENDING, READY, STOPPED, budget_of_more, first_budget, load_acquire
from xvcomm.jit.compile import brief, compiling, kernel
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, compiled_at, python_type
from xvcomm.memory.ring import RingEnd
from xvcomm.trace.format import DONE as ENDED
from xvcomm.trace.recorder import note, note_end
from xvcomm.types.deadline import Deadline
from xvcomm.types.opcode import OpCode

HELD_BYTES = 128 << 10
"""Messages up to this size may be copied with the interpreter lock held, which takes about as long as handing the lock over."""


MESSAGE_MOVER = np.dtype([
    ("recorder", "i8"),
    ("communicator", "i8"),
    ("stop", "i8"),  # address of the communicator's abort word
    ("counter", "i8"),  # address of the ring end's next sequence number
    ("op", "i8"),  # for the flight recorder
    ("spins", "i8"),
    ("record", "i8"),  # number of the newest record, inverted once it is complete
    ("row", ROW),
])  # fmt: skip
_Record, _mover_at = python_type(MESSAGE_MOVER), compiled_at(MESSAGE_MOVER)


@register_jitable
def _end(mover: Any) -> None:
    """Record that the message is complete."""
    note_end(mover.recorder, mover.record, ENDED)
    mover.record = ~mover.record


def _begin(address: int, collective: int, data: int, dtype: int, nbytes: int, tag: int, call_site: int) -> int:
    """See `MessageMover.begin`; READY, PENDING, STOPPED or MISMATCH."""
    mover = _mover_at(address)
    row = mover.row
    mover.record = note(
        mover.recorder, mover.communicator, collective, mover.op, dtype, nbytes, row.peer, tag, call_site
    )
    row.phase = NEW
    if load_acquire(mover.stop) != 0:
        return STOPPED
    row.data, row.sequence = data, take(mover.counter)
    said = row.message
    said.dtype, said.nbytes, said.tag = dtype, nbytes, tag
    result = try_row(address_of(mover, "row")) if nbytes <= HELD_BYTES and row.carrier == 0 else PENDING
    if result == READY:
        _end(mover)
    return result


def _advance(address: int, budget: int) -> int:
    """Progress the message; see `mover.drive_all`."""
    mover = _mover_at(address)
    result = drive_all(address_of(mover, "row"), 1, 0, 0, mover.spins, budget)
    if result == READY:
        _end(mover)
    return result


with compiling():
    _begin_kernel = brief("int64(int64, int64, int64, int64, int64, int64, int64)")(_begin)
    _advance_kernel = kernel("int64(int64, int64)")(_advance)


class HostMessageMover(MessageMover):
    """A row of the mover that is kept from message to message."""

    def __init__(
        self, end: RingEnd, op: int, recorder: int, communicator: int, stop: int, spins: int, process_memory: bool
    ) -> None:  # fmt: skip
        """`process_memory`: as in `Batch`."""
        self.end = end
        self._record = _Record(recorder, communicator, stop, end.counter, op, spins, -1)
        row = self._record.row
        row.kind, row.message.op, row.phase, row.itemsize = Kind.PUT if end.producer else Kind.GET, OpCode.SEND, DONE, 1
        row.ring, row.turn, row.geometry, row.peer = end.address, end.turn, end.geometry, end.peer
        row.state, row.carrier, row.direct = join(end, process_memory), end.carrier, end.direct
        self._address = ctypes.addressof(self._record)

    @property
    def record(self) -> int:
        number: int = self._record.record
        return max(number, ~number)

    def begin(self, collective: int, data: int, dtype: int, nbytes: int, tag: int, call_site: int) -> bool:
        code = _begin_kernel(self._address, collective, data, dtype, nbytes, tag, call_site)
        if code > PENDING:
            raise self._stopped()
        return bool(code == READY)

    def finish(self, deadline: Deadline) -> None:
        budget = first_budget(deadline)
        while not self.advance(budget):
            if deadline.expired():
                raise RingStalled([self.end])
            budget = budget_of_more(deadline)

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
        return RingStopped(self.end, self.end.abort_word(), self._record.row.sequence)

    def discard(self) -> bool:
        if self._record.record < 0:
            return False
        self.end.give_up()
        return True
