"""Arrays that the user has registered, so that RDMA devices send from them and receive into them without a copy."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial

from xvcomm.abc.cards import Cards, Registered
from xvcomm.errors import ResourceError, XvcommError
from xvcomm.memory.array_view import ArrayView
from xvcomm.system import forking
from xvcomm.system.notice import notice
from xvcomm.wire.carrier import Carrier
from xvcomm.wire.records import REGIONS

_CLOSE_SECONDS, _PAUSE_SECONDS = 10.0, 0.001
"""How long messages under way may still use an array that is closed; then they go on through the ring."""


class _Array:
    """One of them.

    Attributes:
        view: keeps the array alive.
        registered: for the devices; closed once none uses the array any more.
    """

    def __init__(self, view: ArrayView, registered: Registered) -> None:
        self.view, self.registered = view, registered

    def overlaps(self, address: int, nbytes: int) -> bool:
        """Whether they have bytes in common."""
        return self.view.address < address + nbytes and address < self.view.address + self.view.nbytes


class Arrays:
    """All of a process. Thread-safe.

    Args:
        cards: None without RDMA: then nothing is registered.
    """

    def __init__(self, carrier: Carrier, cards: Cards | None) -> None:
        self._carrier, self._cards = carrier, cards
        self._lock = threading.RLock()  # reentrant, because a signal handler may give messages up at any point
        self._open: dict[int, _Array] = {}  # by index in the carrier's table
        forking.register(self)

    def add(self, view: ArrayView) -> contextlib.ExitStack:
        """Register an array of host memory, until what this returns is closed.

        Raises:
            ResourceError: a device or a limit refuses, or there are too many arrays.
        """
        handle = contextlib.ExitStack()
        cards = self._cards
        if cards is None or view.nbytes == 0:
            return handle
        with self._lock:
            index = next((i for i in range(REGIONS) if i not in self._open), None)
            if index is None:
                raise ResourceError(
                    f"at most {REGIONS} arrays are registered at a time: close some, or register larger ones"
                )
            array = self._open[index] = _Array(view, cards.register(view.address, view.nbytes))
            self._carrier.put_region(index, view.address, view.nbytes, array.registered.keys)
        handle.callback(partial(self._close, index, array))
        return handle

    def _close(self, index: int, array: _Array) -> None:
        """Register an array no more, once what is under way has ended. Messages that go on do so through the ring."""
        until = time.monotonic() + _CLOSE_SECONDS
        with self._lock:
            if self._open.get(index) is not array:
                return
            self._carrier.drop_region(index)
        while self._carrier.uses(array.view.address, array.view.nbytes) and time.monotonic() < until:
            time.sleep(_PAUSE_SECONDS)
        with self._lock:
            if self._open.get(index) is array:
                array.registered.close()
                del self._open[index]

    def revoke(self, address: int, nbytes: int) -> None:
        """Let devices that use an array on behalf of a message that was given up do so no more.

        What has it is registered anew, by other keys. WRITEs by the old ones fail, and so do their queue pairs; slots of other
        messages among these are sent again.
        """
        with self._lock:
            for index, array in list(self._open.items()):
                if array.overlaps(address, nbytes):
                    self._renew(index, array)

    def _renew(self, index: int, array: _Array) -> None:
        assert self._cards is not None
        view, closing = array.view, not self._carrier.drop_region(index)
        array.registered.close()
        if closing:
            return
        try:
            array.registered = self._cards.register(view.address, view.nbytes)
        except XvcommError as error:
            notice(f"a registered array is registered no more after a failure, and its messages are copied: {error}")
        else:
            self._carrier.put_region(index, view.address, view.nbytes, array.registered.keys)

    def after_fork(self) -> None:
        """Leave all to the parent."""
        self._lock = threading.RLock()  # the copied lock may be held by a thread that the child does not have
        self._open = {}

    def close(self) -> None:
        """Register nothing any more. No ring is left."""
        with self._lock:
            for array in self._open.values():
                array.registered.close()
            self._open = {}
