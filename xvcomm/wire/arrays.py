"""Arrays that the user has registered, so that RDMA devices send from them and receive into them without a copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

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
        address, nbytes: where it lies.
        kept: what keeps the array alive, and its memory if it takes another; empty once it is closed.
        index, iova: its place in the carrier's table, and the address by which devices find it.
        registered: for the devices; None if the array is not registered any more.
        lock: held while it is put into the table or deregistered. Reentrant, as all locks here, because a signal handler may come
            at any point.
        closing: held until it is closed.
    """

    index = iova = 0

    def __init__(self, view: ArrayView) -> None:
        self.address, self.nbytes = view.address, view.nbytes
        self.kept: tuple[Any, ...] = view, owner(view)
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
        self._open: set[_Array] = set()
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
        try:
            with held_back():  # at whose end handlers may raise
                self._reserve(array)
                registered = self._cards.register(array.address, array.nbytes, array.iova)
                with array.lock:  # another thread may revoke it from then on
                    self._carrier.put_region(array.index, array.address, array.nbytes, registered)
                    array.registered = registered
        except BaseException:
            self._close(array)  # the caller has no handle to close it
            raise
        return partial(self._close, array)

    def _reserve(self, array: _Array) -> None:
        """Give an array a place in the table, and the address by which devices find it.

        No address is given twice. A WRITE under way to an array that was given up, however late, so finds no memory, though
        devices give keys again: mlx5 first the one that was given back last.
        """
        with self._lock:
            taken = {each.index for each in list(self._open)}
            index = next((i for i in range(REGIONS) if i not in taken), None)
            if index is None:
                raise ResourceError(
                    f"at most {REGIONS} arrays are registered at a time: close some, or register larger ones"
                )
            array.index, array.iova = index, self._iova + array.address % _IOVA_STEP
            self._iova = (array.iova + array.nbytes + _IOVA_STEP) // _IOVA_STEP * _IOVA_STEP
            self._open.add(array)

    def _close(self, array: _Array) -> None:
        """Deregister an array once no message under way uses it. Idempotent; all callers return when it is deregistered."""
        if array not in self._open:
            return  # also in a forked child, where nobody unlocks what was locked
        with array.closing:
            until = time.monotonic() + _CLOSE_SECONDS
            try:
                while array in self._open and self._uses(array) and time.monotonic() < until:
                    time.sleep(_PAUSE_SECONDS)
            finally:
                with held_back():
                    self._forget(array)

    def _uses(self, array: _Array) -> bool:
        """Let no new slot of a message use an array; whether devices still do."""
        with array.lock:
            return array.registered is not None and not self._carrier.release_region(array.index)

    def revoke(self, address: int) -> None:
        """Deregister what has the array of a message that was given up, now: devices that still use it fail, and their slots
        of other messages are sent again.
        """
        for array in list(self._open):
            if array.address <= address < array.address + array.nbytes:
                self._deregister(array)

    def _deregister(self, array: _Array) -> None:
        with array.lock:
            if (registered := array.registered) is not None:
                self._carrier.drop_region(array.index)
                registered.close()
                array.registered = None

    def _forget(self, array: _Array) -> None:
        """Deregister an array, and let another one have its place."""
        self._deregister(array)
        self._open.discard(array)
        array.kept = ()

    def after_fork(self) -> None:
        """Leave all to the parent."""
        self._open = set()

    def close(self) -> None:
        """Deregister all. No ring is left."""
        for array in list(self._open):
            self._forget(array)
