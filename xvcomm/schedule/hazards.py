"""Dependencies between steps, derived from the memory that each of them reads and writes."""

from __future__ import annotations

from bisect import bisect_left

_UNTOUCHED = (-1, -1, -1, -1)


class Hazards:
    """For each element of a memory: the step that wrote it last, and the last step of each lane that has read it since.

    Adjacent elements with equal history share a cell; the last cell is unbounded.
    """

    def __init__(self) -> None:
        self._starts = [0]
        self._cells = [_UNTOUCHED]

    def read(self, start: int, stop: int, step: int, lane: int) -> set[int]:
        """Record that `step` reads; return the steps that wrote the data (including -1 for data that no step wrote)."""
        first, last = self._split(start), self._split(stop)
        waits = set()
        for i in range(first, last):
            cell = list(self._cells[i])
            waits.add(cell[0])
            cell[1 + lane] = step
            self._cells[i] = (cell[0], cell[1], cell[2], cell[3])
        return waits

    def write(self, start: int, stop: int, step: int) -> set[int]:
        """Record that `step` writes; return the steps that must have written or read before it (including -1 for none)."""
        first, last = self._split(start), self._split(stop)
        waits = {step for cell in self._cells[first:last] for step in cell}
        self._starts[first:last] = [start]
        self._cells[first:last] = [(step, -1, -1, -1)]
        return waits

    def _split(self, at: int) -> int:
        """Make a cell begin at `at`; return its index."""
        i = bisect_left(self._starts, at)
        if i == len(self._starts) or self._starts[i] != at:
            self._starts.insert(i, at)
            self._cells.insert(i, self._cells[i - 1])
        return i
