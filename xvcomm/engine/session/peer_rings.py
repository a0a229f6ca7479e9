"""Rings with slots in GPU memory: the rank that creates the ring exports memory of its GPU, and the other rank imports it.

As with rings in host memory, neither rank waits for the other to open its end. Either GPU's memory is suitable, since GPUs
write to each other's memory as fast as they read it. The ring's counters and ledger are in shared memory, with a word for the
process that has imported the slots: 0 if none has yet, else its pid, and `_OVER` once no process has them imported or will.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from xvcomm.abc.device import RingStopped
from xvcomm.abc.peer_memory import ExportedMemory, SupportsPeerMemory
from xvcomm.abc.store import Store
from xvcomm.errors import XvcommError
from xvcomm.jit.atomics import compare_and_swap
from xvcomm.jit.compile import compiling, kernel
from xvcomm.memory.ring import ABORT, CONSUMED, IMPORTER, TURNS, Reason, RingEnd
from xvcomm.memory.segment import Segment
from xvcomm.types.deadline import Deadline

_OVER = -1
_LINGER_SECONDS = 10.0
_PAUSE_SECONDS = 0.0005


def _exchange(word: Any, expected: Any, value: Any) -> Any:
    return compare_and_swap(word, expected, value)


with compiling():
    _exchange = kernel("int64(int64, int64, int64)")(_exchange)


class PeerRings:
    """The GPU memory that a process exports and imports for the rings of all its communicators.

    Args:
        memory: of this rank's device, if that shares memory.
        gone: whether a rank of the job has died or left.
    """

    def __init__(self, memory: SupportsPeerMemory | None, gone: Callable[[int], bool]) -> None:
        self._memory, self._gone = memory, gone
        self._left: list[_ExportedSlots] = []

    def furnish(self, end: RingEnd, peer: int, store: Store, name: str, deadline: Deadline) -> None:
        """Allocate or import the slots of a ring end whose layout has them in GPU memory.

        Args:
            peer: the other end's rank in the whole job.
            store: through which the memory handle is sent.
            name: key of the ring in the store.
            deadline: for the other side to complete what it has begun.

        Raises:
            ResourceError: the memory cannot be allocated or mapped.
            RingStopped: the other end has closed the ring.
            StoreError, DeadlineExceeded: the other end has not published the handle.
        """
        memory = self._memory
        assert memory is not None, "both ranks of the ring have said that they share memory"
        if end.made:
            exported = memory.export_memory(end.layout.capacity)
            end.slots = exported.address
            end.dispose = partial(self._reclaim, memory, end, exported, partial(self._gone, peer))
            store.set(name + "/slots", exported.handle, deadline)
            return
        handle = store.get(name + "/slots", deadline)
        if _exchange(end.address + IMPORTER, 0, os.getpid()):
            raise RingStopped(end, end.abort_word(), 0)
        end.closing.append(partial(self._release, memory, end))
        end.slots = memory.import_memory(handle)

    @staticmethod
    def _release(memory: SupportsPeerMemory, end: RingEnd) -> None:
        if end.stuck:
            return
        with contextlib.suppress(XvcommError):  # a device that has failed has no mappings
            if end.slots:
                memory.release_import(end.slots)
        ctypes.c_int64.from_address(end.address + IMPORTER).value = _OVER

    def _reclaim(
        self,
        memory: SupportsPeerMemory,
        end: RingEnd,
        exported: ExportedMemory,
        gone: Callable[[], bool],
        segment: Segment,
    ) -> None:
        slots = _ExportedSlots(segment, end.producer, gone)
        if slots.unread():
            self._left = [*(other for other in self._left if other.unread()), slots]
        if not end.stuck:
            memory.reclaim(exported, slots.returned)

    def linger(self) -> None:
        """Wait, but not for long, until the others have received what lies in this rank's GPU memory, which is freed at exit."""
        deadline = Deadline.after(_LINGER_SECONDS)
        while any(slots.unread() for slots in self._left) and not deadline.expired():
            time.sleep(_PAUSE_SECONDS)


class _ExportedSlots:
    """Exported slots of a ring whose end here is closed, while the other end may still use them.

    Args:
        segment: the ring's shared memory; unmapped when the slots are returned.
        gone: whether the other end's rank has died or left.
    """

    def __init__(self, segment: Segment, producer: bool, gone: Callable[[], bool]) -> None:
        self._segment, self._producer, self._gone = segment, producer, gone

    def unread(self) -> bool:
        """Whether messages were sent that the other end has not received but still may."""
        if not self._producer or not self._segment.address or self._gone() or Reason.bad(self._word(ABORT)):
            return False
        turn, importer = self._word(TURNS), self._word(IMPORTER)
        sent = turn if turn >= 0 else -1 - turn
        return self._word(CONSUMED) < sent and (importer == 0 or _lives(importer))

    def returned(self) -> bool:
        """Whether no process has the slots mapped, or will."""
        if not self._segment.address:
            return True
        importer = self._word(IMPORTER)
        if importer == 0 and not self.unread():
            importer = _exchange(self._segment.address + IMPORTER, 0, _OVER) or _OVER
        if importer == 0 or _lives(importer):
            return False
        self._segment.close()
        return True

    def _word(self, offset: int) -> int:
        return ctypes.c_int64.from_address(self._segment.address + offset).value


def _lives(process: int) -> bool:
    """Whether the process that imported the slots still exists and has not released them."""
    if process == _OVER:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
