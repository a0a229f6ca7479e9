"""Sums over all operations of a rank, for metrics: compiled code adds to them when it writes the flight recorder.

A row belongs to one operation of one communicator with one peer, and is found by a hash of these; there may be two where others
were given back. What finds no room is added to a row of its operation alone, so that nothing is lost.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from xvcomm.jit.atomics import compare_and_swap, fetch_add, load_acquire
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, compiled_at
from xvcomm.trace.format import FAILED
from xvcomm.trace.operation import ANY_PEER

BOUNDS = tuple(1024 * 4**i for i in range(14))
"""Nanoseconds, from a microsecond to a minute: an operation counts in the first of these that it does not exceed."""
NO_COMMUNICATOR = -1

_ROW = np.dtype([
    ("key", "i8"),  # 0: free
    ("begun", "i8"),
    ("nbytes", "i8"),  # of what has begun
    ("failed", "i8"),
    ("nanoseconds", "i8"),  # of what has ended
    ("lengths", "i8", (len(BOUNDS) + 1,)),  # how many have ended, by their length, the longest last
])  # fmt: skip
_ROWS, _STEPS, _OPERATIONS = 4096, 16, 32
_SHORTEST, _LAST = BOUNDS[0], len(BOUNDS)
_OP_BITS, _PEER_BITS = 5, 27
_FIRST_PEER = -ANY_PEER  # added to a peer, to make a key that is not negative
_MIX = 0x2545F4914F6CDD1D
_row_at = compiled_at(_ROW)


@register_jitable
def _find(table, communicator, op, peer):  # type: ignore[no-untyped-def]
    """The row of an operation."""
    key = (((communicator << _OP_BITS) | op) << _PEER_BITS) | (peer + _FIRST_PEER)
    place = (key * _MIX) >> 40
    for step in range(_STEPS):
        row = _row_at(table, (place + step) & (_ROWS - 1))
        found = load_acquire(address_of(row, "key"))
        if found == 0:
            found = compare_and_swap(address_of(row, "key"), 0, key)
        if found == key or found == 0:
            return row
    return _row_at(table, _ROWS + op)


@register_jitable
def count_begin(table, communicator, op, peer, nbytes):  # type: ignore[no-untyped-def]
    """Count an operation that begins, by the address of a table."""
    row = _find(table, communicator, op, peer)
    fetch_add(address_of(row, "begun"), 1)
    fetch_add(address_of(row, "nbytes"), nbytes)


@register_jitable
def count_end(table, communicator, op, peer, nanoseconds, state):  # type: ignore[no-untyped-def]
    """Count the same when it ends."""
    row = _find(table, communicator, op, peer)
    if state == FAILED:
        fetch_add(address_of(row, "failed"), 1)
        return
    bound, place = _SHORTEST, 0
    while nanoseconds > bound and place < _LAST:
        bound, place = bound * 4, place + 1
    fetch_add(address_of(row, "nanoseconds"), nanoseconds)
    fetch_add(address_of(row, "lengths") + 8 * place, 1)


class Count(NamedTuple):
    """What is counted of one operation of one communicator with one peer, since the start.

    Attributes:
        communicator: its number in records; NO_COMMUNICATOR, and no peer, of operations for which there was no room.
        begun, nbytes: how many have begun, and their bytes.
        failed: how many have ended by an error.
        nanoseconds, lengths: of the others that have ended: their length in sum, and how many there are for each of BOUNDS and
            of greater length. Without those during which so many others began that the flight recorder has dropped them.
    """

    communicator: int
    op: int
    peer: int
    begun: int
    nbytes: int
    failed: int
    nanoseconds: int
    lengths: tuple[int, ...]


class Counters:
    """A table, to which a recorder adds; see `Recorder.count`.

    Attributes:
        address: as compiled code takes it.
    """

    def __init__(self) -> None:
        self._table = np.zeros(_ROWS + _OPERATIONS, _ROW)
        self.address: int = self._table.ctypes.data

    def read(self) -> list[Count]:
        """All that has been counted; operations of other threads may be counted in parts."""
        return self._of(np.flatnonzero((self._table["key"] != 0) | (self._table["begun"] != 0)))

    def take(self, communicators: Collection[int]) -> list[Count]:
        """What has been counted of communicators on which no operation is under way; their rows are free afterwards."""
        keys = self._table["key"][:_ROWS]
        numbers = np.flatnonzero((keys != 0) & np.isin(keys >> (_PEER_BITS + _OP_BITS), list(communicators)))
        found = self._of(numbers)
        for name in reversed(_ROW.names or ()):  # last the key: then the row may be another one's
            self._table[name][numbers] = 0
        return found

    def _of(self, numbers: np.ndarray[Any, Any]) -> list[Count]:
        rows = self._table[numbers]
        words = np.stack([rows[name] for name in ("begun", "nbytes", "failed", "nanoseconds")], axis=1).tolist()
        found = zip(numbers.tolist(), rows["key"].tolist(), words, rows["lengths"].tolist(), strict=True)
        return [
            Count(*_parse(number, key), begun, nbytes, failed, nanoseconds, tuple(lengths))
            for number, key, (begun, nbytes, failed, nanoseconds), lengths in found
        ]


def _parse(row: int, key: int) -> tuple[int, int, int]:
    """Communicator, operation and peer."""
    if row >= _ROWS:
        return NO_COMMUNICATOR, row - _ROWS, ANY_PEER
    rest, peer = key >> _PEER_BITS, (key & ((1 << _PEER_BITS) - 1)) - _FIRST_PEER
    return rest >> _OP_BITS, rest & (_OPERATIONS - 1), peer
