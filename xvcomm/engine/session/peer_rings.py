"""Rings with slots in a GPU's memory: the rank that makes the ring lends memory of its GPU, the other one maps it.

So neither waits for the other, as with rings in host memory. Whose GPU it is makes no difference to speed: GPUs write
to each other's memory as fast as they read it. The ring's other parts stay in shared memory. A word there says who has
mapped the slots: 0 as long as nobody has, then a process's number, and `_OVER` once nobody has, nor ever will.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from xvcomm.abc.device import Device, Loan, RingStopped
from xvcomm.abc.store import Store
from xvcomm.errors import XvcommError
from xvcomm.jit.atomics import compare_and_swap
from xvcomm.jit.compile import compiling, kernel
from xvcomm.memory.ring import ABORT, BORROWER, CONSUMED, TURNS, Reason, RingEnd
from xvcomm.memory.segment import Segment
from xvcomm.types.deadline import Deadline

_OVER = -1
_LINGER_SECONDS = 10.0
_PAUSE_SECONDS = 0.0005


def _exchange(word: Any, expected: Any, value: Any) -> Any:
    return compare_and_swap(word, expected, value)


with compiling():
    _exchange = kernel("int64(int64, int64, int64)")(_exchange)


class Lending:
    """What a process lends and borrows for the rings of all its communicators.

    Args:
        gone: whether a rank of the job has died or left.
    """

    def __init__(self, device: Device, gone: Callable[[int], bool]) -> None:
        self._device, self._gone = device, gone
        self._left: list[_Lent] = []

    def furnish(self, end: RingEnd, peer: int, store: Store, name: str, deadline: Deadline) -> None:
        """Give a ring end the slots that its layout says are apart.

        Args:
            peer: the other end's rank in the whole job.
            name: of the ring, in the store.
            deadline: for what was begun on the other side to be finished.

        Raises:
            ResourceError: there is no memory, or it cannot be mapped.
            RingStopped: the other end has closed the ring.
            StoreError, DeadlineExceeded: the other end does not say where the slots are.
        """
        if end.made:
            loan = self._device.lend(end.layout.capacity)
            end.slots = loan.address
            end.dispose = partial(self._take_back, end, loan, partial(self._gone, peer))
            store.set(name + "/slots", loan.handle, deadline)
            return
        handle = store.get(name + "/slots", deadline)
        if _exchange(end.address + BORROWER, 0, os.getpid()):
            raise RingStopped(end, end.abort_word(), 0)
        end.closing.append(partial(self._give_back, end))
        end.slots = self._device.borrow(handle)

    def _give_back(self, end: RingEnd) -> None:
        if end.stuck:
            return
        with contextlib.suppress(XvcommError):  # if the device is gone, so is all that it had mapped
            if end.slots:
                self._device.give_back(end.slots)
        ctypes.c_int64.from_address(end.address + BORROWER).value = _OVER

    def _take_back(self, end: RingEnd, loan: Loan, gone: Callable[[], bool], segment: Segment) -> None:
        lent = _Lent(segment, end.producer, gone)
        if lent.unread():
            self._left = [*(other for other in self._left if other.unread()), lent]
        if not end.stuck:
            self._device.take_back(loan, lent.returned)

    def linger(self) -> None:
        """Wait a while until others have received what lies in this rank's GPU memory for them; it ends with the process."""
        deadline = Deadline.after(_LINGER_SECONDS)
        while any(lent.unread() for lent in self._left) and not deadline.expired():
            time.sleep(_PAUSE_SECONDS)


class _Lent:
    """The slots of a ring whose end here is closed, and whose other end may still use them.

    Args:
        segment: the ring's shared memory; unmapped when the slots are returned.
        producer: whether the end here filled the ring.
        gone: whether the other end's rank has died or left.
    """

    def __init__(self, segment: Segment, producer: bool, gone: Callable[[], bool]) -> None:
        self._segment, self._producer, self._gone = segment, producer, gone

    def unread(self) -> bool:
        """Whether something was sent that the other end has not received, and still may."""
        if not self._producer or not self._segment.address or self._gone() or Reason.bad(self._word(ABORT)):
            return False
        turn, borrower = self._word(TURNS), self._word(BORROWER)
        sent = turn if turn >= 0 else -1 - turn
        return self._word(CONSUMED) < sent and (borrower == 0 or _lives(borrower))

    def returned(self) -> bool:
        """Whether nobody has the slots mapped, nor will."""
        if not self._segment.address:
            return True
        borrower = self._word(BORROWER)
        if borrower == 0 and not self.unread():
            borrower = _exchange(self._segment.address + BORROWER, 0, _OVER) or _OVER
        if borrower == 0 or _lives(borrower):
            return False
        self._segment.close()
        return True

    def _word(self, offset: int) -> int:
        return ctypes.c_int64.from_address(self._segment.address + offset).value


def _lives(process: int) -> bool:
    """Whether a process that had the slots mapped is there, and has them mapped still."""
    if process == _OVER:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
