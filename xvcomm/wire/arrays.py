"""Arrays that the user has registered, so that RDMA devices send from them and receive into them without a copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from xvcomm.abc.cards import Cards, Registered
from xvcomm.errors import ResourceError
from xvcomm.memory.array_view import ArrayView
from xvcomm.memory.readers import owner
from xvcomm.system import forking
from xvcomm.system.interrupts import held_back
from xvcomm.wire.carrier import Carrier
from xvcomm.wire.records import REGIONS

_CLOSE_SECONDS, _PAUSE_SECONDS = 10.0, 0.001
"""How long messages under way may still use an array that is closed; then they go on through the ring."""
_FIRST_IOVA, _IOVA_STEP = 1 << 60, 1 << 30
"""Devices find arrays from this address on, where no memory is. The step is a multiple of all sizes of pages."""


class _Array:
    """One of them.

    Attributes:
        view, owner: keep the array alive, and its memory if it takes another.
        registered: for the devices; None if the array is not registered any more.
        lock: held while it is deregistered. Reentrant, as all locks here, because a signal handler may come at any point.
        closing: held until it is closed.
    """

    def __init__(self, view: ArrayView) -> None:
        self.view, self.owner = view, owner(view)
        self.registered: Registered | None = None
        self.lock, self.closing = threading.RLock(), threading.RLock()


class Arrays:
    """All of a process. Thread-safe.

    Args:
        cards: None without RDMA: then nothing is registered.
    """

    def __init__(self, carrier: Carrier, cards: Cards | None) -> None:
        self._carrier, self._cards = carrier, cards
        self._lock = threading.RLock()  # held for no call of a device, which takes seconds for much memory
        self._open: dict[int, _Array] = {}  # by index in the carrier's table
        self._iova = _FIRST_IOVA
        forking.register(self)

    def add(self, view: ArrayView) -> Callable[[], None]:
        """Register an array of host memory; what deregisters it, see `Transport.register`.

        Raises:
            ResourceError: a device or a limit refuses, or there are too many arrays.
        """
        if self._cards is None or view.nbytes == 0:
            return lambda: None
        array = _Array(view)
        with held_back():  # so that nothing stays registered of which nobody knows
            index, iova = self._reserve(array)
            try:
                array.registered = self._cards.register(view.address, view.nbytes, iova)
            except BaseException:
                del self._open[index]
                raise
            self._carrier.put_region(index, view.address, view.nbytes, array.registered)
        return partial(self._close, index, array)

    def _reserve(self, array: _Array) -> tuple[int, int]:
        """A place in the table, and the address by which devices find the array.

        No address is given twice. A WRITE under way to an array that was given up, however late, so finds no memory, though
        devices give keys again: mlx5 first the one that was given back last.
        """
        with self._lock:
            index = next((i for i in range(REGIONS) if i not in self._open), None)
            if index is None:
                raise ResourceError(
                    f"at most {REGIONS} arrays are registered at a time: close some, or register larger ones"
                )
            self._open[index] = array
            iova = self._iova + array.view.address % _IOVA_STEP
            self._iova = (iova + array.view.nbytes + _IOVA_STEP) // _IOVA_STEP * _IOVA_STEP
            return index, iova

    def _close(self, index: int, array: _Array) -> None:
        """Deregister an array once nothing under way uses it. Idempotent, and returns when that is so, whoever has begun it."""
        if self._open.get(index) is not array:
            return  # also in a forked child, where nobody unlocks what was locked
        with array.closing:
            if self._open.get(index) is not array:
                return
            until = time.monotonic() + _CLOSE_SECONDS
            try:
                while not self._carrier.release_region(index) and time.monotonic() < until:
                    time.sleep(_PAUSE_SECONDS)
            finally:
                with held_back():
                    self._deregister(index, array)
                    self._open.pop(index, None)

    def revoke(self, address: int) -> None:
        """Deregister what has the array of a message that was given up, now: devices that still use it fail, and their slots
        of other messages are sent again.
        """
        for index, array in list(self._open.items()):
            if array.view.address <= address < array.view.address + array.view.nbytes:
                self._deregister(index, array)

    def _deregister(self, index: int, array: _Array) -> None:
        with array.lock:
            if array.registered is not None:
                self._carrier.drop_region(index)
                array.registered.close()
                array.registered = None

    def after_fork(self) -> None:
        """Leave all to the parent."""
        self._open = {}

    def close(self) -> None:
        """Deregister all. No ring is left."""
        for index, array in list(self._open.items()):
            self._deregister(index, array)
        self._open = {}
