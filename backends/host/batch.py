"""Transfers that progress together: the rows for the compiled mover, and Python's information about them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from xvcomm.abc.device import RingStalled, RingStopped
from xvcomm.backends.host.mover import DONE, MAX_STREAMS, MISMATCH, NEW, ROW, drive, next_number
from xvcomm.backends.host.rendezvous import join
from xvcomm.jit.atomics import BUDGET, READY, STOPPED, budget_of_more, first_budget
from xvcomm.jit.record import python_type
from xvcomm.memory.ring import Message, RingEnd
from xvcomm.system.interrupts import held_back
from xvcomm.types.deadline import Deadline

_Row = python_type(ROW)
_REST = struct.Struct(f"<{(_Row.starts.offset - _Row.turn.offset) // 8}q")
_ROW = struct.Struct(f"<{_Row.turn.offset // 8}q{_REST.size}s")

NO_GATES = (0,) * MAX_STREAMS

AT_ONCE = -1
"""Budget of a caller that does not wait."""


class Batch:
    """Transfers that progress together; those of one ring end keep their order, also relative to other batches.

    Attributes:
        ends: the ring end of each transfer.
        generation: increases whenever the batch is emptied, so that older events are known to be complete.
    """

    def __init__(self, spins: int, process_memory: bool = False) -> None:
        """Create an empty batch.

        Args:
            spins: tries before yielding the core.
            process_memory: whether large messages may be copied directly between processes' arrays.
        """
        self._spins = spins
        self._process_memory = process_memory
        self._allot(np.zeros(8, ROW))
        self.ends: list[RingEnd] = []
        # Fields per ring end that are the same for all transfers without reduction or gates, which saves half the time of a row.
        self._rests: dict[RingEnd, bytes] = {}
        self.generation = 0

    @property
    def nbytes(self) -> int:
        """Total bytes of all transfers."""
        return int(self._rows["message"]["nbytes"][: len(self.ends)].sum())

    def add(
        self, kind: int, end: RingEnd, data: int, message: Message,
        itemsize: int = 1, combine: int = 0, remote_first: bool = False, apart: int = 0,
        lane: int = 0, gates: tuple[int, ...] = NO_GATES,
    ) -> None:  # fmt: skip
        """Append a transfer; it takes the ring end's next sequence number, see `_number`.

        Args:
            apart: bytes from the array to the own elements that are reduced with those that come.
            lane: index of its stream.
            gates: for each stream n, the number of first transfers of which those on that stream must be complete before.
        """
        index = len(self.ends)
        if index == len(self._rows):
            self._grow()
        self.ends.append(end)
        plain = combine == lane == 0 and gates is NO_GATES
        rest = self._rests.get(end) if plain else None
        if rest is None:
            state = join(end, self._process_memory)
            rest = _REST.pack(
                end.turn,
                *end.geometry,
                itemsize,
                combine,
                remote_first,
                apart,
                end.peer,
                state,
                end.carrier,
                end.direct,
                lane,
                *gates,
            )
            if plain:
                self._rests[end] = rest
        op, dtype, nbytes, tag, detail = message
        _ROW.pack_into(
            self._memory, index * ROW.itemsize,
            kind, end.address, data, self._number(end), op, dtype, nbytes, tag, detail, NEW, rest,
        )  # fmt: skip

    def drive(self, wake: int = 0, seen: int = 0, budget: int = BUDGET) -> int:
        """Progress the transfers; see `mover.drive_all`. Can be resumed.

        Raises:
            RingStopped: an abort word is set, or two descriptions differ.
        """
        code = drive(self._address, len(self.ends), wake, seen, self._spins, budget)
        if code & 0xFF in (STOPPED, MISMATCH):
            end = self.ends[code >> 8]
            raise RingStopped(end, end.abort_word(), int(self._rows["sequence"][code >> 8]))
        return int(code)

    def move_ready(self) -> bool:
        """Progress what needs no waiting; returns whether the batch is complete and empty. Errors are left to `drive`."""
        done = drive(self._address, len(self.ends), 0, 0, 0, AT_ONCE) == READY
        if done:
            self._clear()
        return done

    def finish(self, deadline: Deadline) -> None:
        """Complete all transfers; the batch is empty afterwards, also after errors, which give up the remaining ones.

        Raises:
            RingStopped: see `drive`.
            RingStalled: the deadline has passed.
        """
        budget = first_budget(deadline)
        try:
            while self.ends and self.drive(budget=budget) != READY:
                if deadline.expired():
                    raise RingStalled([self.ends[i] for i in self.open_rows()])
                budget = budget_of_more(deadline)
        except BaseException:
            self.discard()
            raise
        self._clear()

    def discard(self) -> None:
        """Give up all transfers; the caller must stop their rings."""
        with held_back():  # an exception of a signal's handler would leave some of their arrays in use
            for i in self.open_rows():
                self.ends[i].give_up()
            self._clear()

    def open_rows(self) -> list[int]:
        """Indices of transfers that are not complete."""
        return np.flatnonzero(self._phases[: len(self.ends)] != DONE).tolist()

    def done(self, index: int) -> bool:
        """Whether a transfer is complete."""
        return bool(self._phases[index] == DONE)

    def take(self, other: Batch) -> range:
        """Append all transfers of `other`, which is then empty; returns their indices."""
        first, count = len(self.ends), len(other.ends)
        while first + count > len(self._rows):
            self._grow()
        self._rows[first : first + count] = other._rows[:count]
        # Only executors use gates, and they complete their batch themselves.
        self._rows["gates"][first : first + count] = 0
        self.ends += other.ends
        other._clear()
        return range(first, first + count)

    def keep(self, indices: Sequence[int]) -> None:
        """Keep only these transfers, in order; others that are not complete are given up."""
        for i in set(self.open_rows()).difference(indices):
            self.ends[i].give_up()
        self._rows[: len(indices)] = self._rows[list(indices)]
        self.ends = [self.ends[i] for i in indices]

    def _number(self, end: RingEnd) -> int:
        """The sequence number of a new transfer."""
        return next_number(end.counter)

    def _clear(self) -> None:
        self.generation += 1
        self.ends.clear()

    def _grow(self) -> None:
        self._allot(np.concatenate([self._rows, np.zeros_like(self._rows)]))

    def _allot(self, rows: np.ndarray[Any, Any]) -> None:
        self._rows = rows
        self._phases = rows["phase"]
        self._memory = rows.view(np.uint8).data
        self._address = int(rows.ctypes.data)
