"""The flight recorders of this host's ranks, in one segment of shared memory: also those of ranks that have died are read."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from xvcomm.memory.segment import Segment
from xvcomm.system.stacks import StackFile
from xvcomm.trace import journal
from xvcomm.trace.format import STACK_NANOSECONDS, Life, Record, read_history, read_life, read_record
from xvcomm.trace.recorder import Recorder
from xvcomm.trace.snapshot import RankState

T = TypeVar("T")


class Journal:
    """This host's flight recorders. Nothing is known of any rank before `open` and after `close`.

    Attributes:
        recorder: writes this rank's; there from `open` on.
    """

    recorder: Recorder

    def __init__(self) -> None:
        self._regions: dict[int, memoryview] = {}
        self._left_elsewhere: set[int] = set()

    def __bool__(self) -> bool:
        """Whether it was opened."""
        return bool(self._regions)

    def open(self, segment: Segment, rank: int, stacks: StackFile | None) -> None:
        """Start to write this rank's flight recorder.

        Args:
            segment: has its roster; stays mapped until `close`.
            stacks: where this process writes the stacks of its threads; None if it cannot.
        """
        self._rank = rank
        roster = journal.roster(segment.view)
        assert roster is not None
        regions = journal.regions(segment.view, roster)
        self.recorder = Recorder(regions[rank], list(regions.values()), stacks)
        self.recorder.live(Life.RUNNING)
        self._regions = regions

    def newest(self, rank: int, wanted: int) -> list[Record]:
        """The newest operations of a rank of this host, so many, oldest first."""
        return self._read(rank, partial(read_history, wanted=wanted), [])

    def state(self, rank: int, wanted: int | None = None) -> RankState:
        """What a rank of this host does, to its communicators and so many of its newest records, or all that are kept."""
        return self._read(rank, partial(journal.state, wanted=wanted), RankState(answered=False))

    def ask_for_stack(self, rank: int, request: Callable[[], bool]) -> bool:
        """Let a rank of this host write its stack, unless it was asked for it just now; False if it does not do that.

        Args:
            request: asks it, and first empties its file; so a rank that sees the note reads no older stack.
        """
        words = self._read(rank, lambda region: region.cast("q"), None)
        if words is None or time.time_ns() - words[2] < STACK_NANOSECONDS:
            return True
        asked = request()
        if asked:
            words[2] = time.time_ns()
        return asked

    def note_clock(self, ahead: int) -> None:
        """Let this host's ranks know by how many nanoseconds the clock of rank 0's host is ahead, as was measured just now."""
        with contextlib.suppress(ValueError):  # released
            self._regions[self._rank].cast("q")[3:5] = memoryview(struct.pack("=qq", time.time_ns(), ahead)).cast("q")

    def clock(self) -> int:
        """What one of them has noted last; 0 if none has."""
        with contextlib.suppress(ValueError):  # released
            return journal.clock(self._regions.values())
        return 0

    def record(self, number: int) -> Record | None:
        """An operation of this rank, by its number in the flight recorder; None after `close`."""
        return self._read(self._rank, partial(read_record, number=number), None)

    def note_left(self, rank: int) -> None:
        """Remember that a rank of another host has closed its communicators regularly."""
        self._left_elsewhere.add(rank)

    def left(self, rank: int) -> bool:
        """Whether a rank has closed its communicators regularly, as far as this rank knows."""
        return rank in self._left_elsewhere or self._read(rank, read_life, None) is Life.CLOSED

    def _read(self, rank: int, read: Callable[[memoryview], T], otherwise: T) -> T:
        """What a rank's flight recorder tells, if it is of this host and not released yet."""
        region = self._regions.get(rank)
        try:
            return otherwise if region is None else read(region)
        except ValueError:  # released
            return otherwise

    def close(self) -> None:
        """Close the recorder and let go of the segment. Idempotent."""
        with contextlib.ExitStack() as steps:  # every step is taken, even if an interrupt ends one of them
            for region in self._regions.values():
                steps.callback(region.release)
            steps.callback(self.recorder.close)
