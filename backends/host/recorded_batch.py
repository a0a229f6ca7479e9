"""Transfers of a collective that comes again and again: compiled code gives them arrays and numbers, and moves them."""

from __future__ import annotations

import ctypes

import numpy as np

from xvcomm.abc.collective import PreparedCollective
from xvcomm.abc.device import Stream
from xvcomm.abc.recording import INPUT, OUTPUT
from xvcomm.backends.host.batch import Batch
from xvcomm.backends.host.mover import NEW, ROW, drive_all, take
from xvcomm.jit.atomics import BUDGET, PENDING, STOPPED
from xvcomm.jit.compile import compiling, native
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import compiled_at, python_type
from xvcomm.memory.ring import RingEnd

_PLACES = np.dtype([
    ("counter", "i8"),  # address of the ring end's next sequence number
    ("data", "i8"),  # as `Recording` has it
    ("own", "i8"),  # the same of the elements that are reduced with those that come
])  # fmt: skip
_RECORD = np.dtype([
    ("rows", "i8"),  # address of the transfers
    ("places", "i8"),  # address of a `_PLACES` each
    ("count", "i8"),
    ("spins", "i8"),
])  # fmt: skip
_Record = python_type(_RECORD)
_record_at, _places_at, _row_at = map(compiled_at, (_RECORD, _PLACES, ROW))


@register_jitable
def _address(place: int, src: int, dst: int) -> int:
    return dst + (place - OUTPUT) if place >= OUTPUT else src + (place - INPUT)


def _run(argument: int, src: int, dst: int, number: int) -> int:
    """Begin the transfers on these arrays, in a collective of this number; see `PreparedCollective`."""
    record = _record_at(argument)
    for i in range(record.count):
        row, places = _row_at(record.rows, i), _places_at(record.places, i)
        row.data = _address(places.data, src, dst)
        row.apart = _address(places.own, src, dst) - row.data
        row.sequence, row.phase = take(places.counter), NEW
        said = row.message
        said.tag = number
    code = drive_all(record.rows, record.count, 0, 0, record.spins, BUDGET)
    return STOPPED if code > PENDING else code


with compiling():
    _run_address = native("int64(int64, int64, int64, int64)", _run)


class RecordedBatch(Batch):
    """Transfers that stay when they are complete. Each gets a sequence number whenever it begins."""

    def _number(self, end: RingEnd) -> int:
        return 0

    def _clear(self) -> None:
        """Keep them."""

    def prepared(self) -> PreparedCollective:
        """See `Recording.prepared`."""
        rows, self._places = self._rows[: len(self.ends)], np.zeros(len(self.ends), _PLACES)
        self._places["counter"] = [end.counter for end in self.ends]
        self._places["data"], self._places["own"] = rows["data"], rows["data"] + rows["apart"]
        self._record = _Record(self._address, self._places.ctypes.data, len(self.ends), self._spins)
        return PreparedCollective(_run_address, ctypes.addressof(self._record), self._resume)

    def _resume(self, src: int, dst: int, stream: Stream) -> None:
        self.finish(stream.deadline)
