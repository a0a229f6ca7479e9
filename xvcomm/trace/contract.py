"""The contract check: shared memory in which a communicator's ranks of one host describe each collective before it starts.

The rank that posts second compares the two descriptions, and no rank waits. So both ranks learn of a mismatch, even where
their calls would exchange no message. Each rank also tells here that it has left, and why it aborted the communicator.

    page 0   line 1: abort word; line 2: number of ranks that have mapped it; line 3: number of ranks that have left
    then     for each rank: LEDGER entries of its collectives; one page: whether it left, length of a text, the text
"""

from __future__ import annotations

import ctypes

import numpy as np

from xvcomm.jit.atomics import compare_and_swap, fetch_add, full_fence, load_acquire, store_release
from xvcomm.jit.compile import brief, compiling, kernel
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, compiled_at, python_type
from xvcomm.memory.ring import ABORT, ENTRY, LEDGER, LEDGER_ENTRY, LINE, Message, Reason, ledger_at
from xvcomm.memory.segment import PAGE, Segment
from xvcomm.trace.format import DONE
from xvcomm.trace.recorder import Recorder, note, note_end, note_newest

_ATTACHED, _DEPARTURES = 2 * LINE, 3 * LINE
_NOTES = LEDGER * ENTRY
_ROW = _NOTES + PAGE
_LEFT, _LENGTH, _TEXT = _NOTES, _NOTES + 8, _NOTES + 16
_TEXT_BYTES = 2048
_MISMATCH = int(Reason.MISMATCH)
_ROWS = 1 << 62
"""Bit of an abort word that names two rows and an entry instead of one rank."""
_entry_at = compiled_at(LEDGER_ENTRY)


@register_jitable
def agree(a, b):  # type: ignore[no-untyped-def]
    """Whether two `MESSAGE` records say the same."""
    return a.op == b.op and a.dtype == b.dtype and a.nbytes == b.nbytes and a.tag == b.tag and a.detail == b.detail


@register_jitable
def _compare(contract, ranks, me, sequence, op, dtype, nbytes, tag, detail):  # type: ignore[no-untyped-def]
    """Publish a description and compare it with the other ranks'; False if the communicator is aborted or becomes so."""
    if load_acquire(contract + ABORT) != 0:
        return False
    mine = _entry_at(contract + PAGE + me * _ROW, sequence % LEDGER)
    said = mine.message
    said.op, said.dtype, said.nbytes, said.tag, said.detail = op, dtype, nbytes, tag, detail
    store_release(address_of(mine, "number"), sequence + 1)
    full_fence()
    for other in range(ranks):
        entry = _entry_at(contract + PAGE + other * _ROW, sequence % LEDGER)
        if other != me and load_acquire(address_of(entry, "number")) == sequence + 1 and not agree(entry.message, said):
            rows = (me << 8) | (other << 24) | ((sequence % LEDGER) << 40)
            compare_and_swap(contract + ABORT, 0, _MISMATCH | rows | _ROWS)
            return False
    return True


_PLACE = np.dtype([
    ("contract", "i8"),  # address of the segment
    ("ranks", "i8"),
    ("me", "i8"),  # this rank's row
    ("recorder", "i8"),  # `Recorder.handle`
    ("communicator", "i8"),  # its number there
    ("newest", "i8"),  # `Recorder.newest_at` of it
])  # fmt: skip
_Place, _place_at = python_type(_PLACE), compiled_at(_PLACE)


@register_jitable
def post(place, sequence, op, dtype, nbytes, tag, detail, call_site):  # type: ignore[no-untyped-def]
    """Record a collective in the flight recorder and post it; the record's number, inverted if the communicator is aborted."""
    here = _place_at(place)
    number = note(here.recorder, here.communicator, sequence, op, dtype, nbytes, -1, tag, call_site)
    agreed = _compare(here.contract, here.ranks, here.me, sequence, op, dtype, nbytes, tag, detail)
    if not agreed:
        return ~number
    note_newest(here.recorder, here.newest, sequence)
    return number


@register_jitable
def end(place: int, number: int) -> None:
    """Record the end of a collective that was posted."""
    note_end(_place_at(place).recorder, number, DONE)


@register_jitable
def note_message(place, sequence, name, dtype, nbytes, peer, tag, call_site):  # type: ignore[no-untyped-def]
    """Record a message in the flight recorder; the record's number."""
    here = _place_at(place)
    return note(here.recorder, here.communicator, sequence, name, dtype, nbytes, peer, tag, call_site)


@register_jitable
def aborted(place: int) -> bool:
    """Whether the communicator is aborted."""
    return load_acquire(_place_at(place).contract + ABORT) != 0


def _count(counter: int) -> int:
    return fetch_add(counter, 1)


def _abort(cell: int, word: int) -> None:
    compare_and_swap(cell, 0, word)


with compiling():
    _post_kernel = brief("int64(int64, int64, int64, int64, int64, int64, int64, int64)")(post)
    _count_kernel = kernel("int64(int64)")(_count)
    _abort_kernel = kernel("void(int64, int64)")(_abort)


class ContractCheck:
    """One communicator's contract check on this host, as one rank maps it. After `close` no method may be called.

    Attributes:
        ranks: the communicator's ranks on this host, in the order of their rows.
        stop: address of the abort word.
        place: address of what compiled code needs for `post` and `end`.
    """

    def __init__(
        self, segment: Segment, ranks: tuple[int, ...], rank: int, recorder: Recorder, communicator: int
    ) -> None:
        """Take part; the last rank to come unlinks the segment.

        Args:
            communicator: its number there.
        """
        self._segment, self._recorder = segment, recorder  # compiled code knows them by address
        self.ranks = ranks
        self._me = ranks.index(rank)
        self._address = segment.address
        self.stop = segment.address + ABORT
        newest = recorder.newest_at(communicator)
        self._place = _Place(segment.address, len(ranks), self._me, recorder.handle, communicator, newest)
        self.place = ctypes.addressof(self._place)
        self._word = ctypes.c_int64.from_address(self.stop)
        self._departures = ctypes.c_int64.from_address(segment.address + _DEPARTURES)
        if _count_kernel(self._address + _ATTACHED) == len(ranks) - 1:
            segment.unlink()

    @staticmethod
    def size(ranks: int) -> int:
        """Bytes of the segment for so many ranks."""
        return PAGE + ranks * _ROW

    def post(self, sequence: int, message: Message, call_site: int) -> int:
        """Record collective number `sequence` in the flight recorder and publish its description.

        Returns:
            The record's number; inverted, and so negative, if the communicator is aborted, also by a mismatch found here.
        """
        number: int = _post_kernel(self.place, sequence, *message, call_site)
        return number

    def abort(self, word: int) -> None:
        """Stop the communicator on this host; the first reason stays."""
        _abort_kernel(self.stop, word)

    def abort_word(self) -> int:
        """0, or the reason."""
        return self._word.value

    def explain(self, text: str) -> None:
        """Publish the reason for which this rank is about to abort, as text."""
        data = text.encode()[:_TEXT_BYTES]
        row = self._row(self._me)
        ctypes.memmove(row + _TEXT, data, len(data))
        ctypes.c_int64.from_address(row + _LENGTH).value = len(data)

    def explanation(self, rank: int) -> str:
        """The text that a rank has published; empty if none."""
        if rank not in self.ranks:
            return ""
        row = self._row(self.ranks.index(rank))
        length = ctypes.c_int64.from_address(row + _LENGTH).value
        return ctypes.string_at(row + _TEXT, length).decode(errors="ignore")

    def leave(self) -> None:
        """Tell the others that this rank closes the communicator."""
        self._place.newest = 0  # the place in the recorder is another communicator's soon
        ctypes.c_int64.from_address(self._row(self._me) + _LEFT).value = 1
        _count_kernel(self._address + _DEPARTURES)

    def departures(self) -> int:
        """How many ranks have closed the communicator; cheaper than `departed`."""
        return self._departures.value

    def departed(self) -> list[int]:
        """The ranks that have closed the communicator."""
        return [r for i, r in enumerate(self.ranks) if ctypes.c_int64.from_address(self._row(i) + _LEFT).value]

    def absent(self, sequence: int) -> list[int]:
        """The ranks of this host that have not come to collective number `sequence`."""
        index = sequence % LEDGER
        return [rank for i, rank in enumerate(self.ranks) if ledger_at(self._row(i))["number"][index] <= sequence]

    def newest(self) -> tuple[int, Message]:
        """Number and description of the collective that this rank posted last."""
        posted, message, *_ = max(ledger_at(self._row(self._me)).tolist())
        return posted - 1, Message(*message)

    def mismatch(self) -> tuple[tuple[int, Message], tuple[int, Message]] | None:
        """After a mismatch of collectives: the two ranks that differ and what each wrote."""
        word = self.abort_word()
        if not word & _ROWS:
            return None
        index = (word >> 40) & 0xFFFF
        found = []
        for row in ((word >> 8) & 0xFFFF, (word >> 24) & 0xFFFF):
            message = ledger_at(self._row(row))["message"][index].tolist()
            found.append((self.ranks[row], Message(*message)))
        return found[0], found[1]

    def close(self) -> None:
        """Unmap. Idempotent."""
        self._segment.close()

    def _row(self, index: int) -> int:
        return self._address + PAGE + index * _ROW
