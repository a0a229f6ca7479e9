"""Fork handling: a forked child must not act as a member of its parent's job.

Objects that hold a resource of the job register here. After a fork their `after_fork` runs in the child, before any other code.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar
from weakref import WeakSet

from xvcomm.errors import ClosedError

T = TypeVar("T")

FORKED = "in a forked child: the communicator is its parent's; join with xvcomm.init() in a process started by spawn"
"""Error text for calls in a forked child."""


class Holder(Protocol):
    """An object that a forked child must not use."""

    def after_fork(self) -> None:
        """Release the child's copy without affecting the parent or other ranks. Called in the child, which has one thread."""


_memory: WeakSet[Holder] = WeakSet()
_holders: WeakSet[Holder] = WeakSet()
_inherited: list[Holder] = []
_forks = 0


def register(holder: Holder, *, memory: bool = False) -> None:
    """Call `holder.after_fork` in every child that this process forks, as long as the object lives.

    Args:
        memory: whether it maps shared memory. Such holders come first, so that later ones no longer write to the parent's
            memory.
    """
    (_memory if memory else _holders).add(holder)


def leave_to_parent(descriptor: int) -> None:
    """Replace a socket by /dev/null in the child. Its descriptor stays valid, because copied objects will close it."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


def forks() -> int:
    """Forks between this process and the one that was started. A thread started at a lower number does not exist here."""
    return _forks


class ProcessFuture(Future[T]):
    """A Future that a thread of this process completes. In a forked child, which lacks that thread, it fails with ClosedError.

    The child fails it on first use, not at the fork, because callbacks could block there on locks whose owner does not exist.

    Attributes:
        help: called by `result` to do that thread's work in the waiting thread, for at most the given seconds; returns False if
            it cannot.
    """

    def __init__(self, help: Callable[[float | None], bool] | None = None) -> None:
        super().__init__()
        self._forks = _forks
        self.help = help

    def result(self, timeout: float | None = None) -> T:
        """See `Future.result`."""
        self._inherit()
        if self.help is not None and not super().done() and self.help(timeout):
            timeout = 0
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `Future.exception`."""
        self._inherit()
        return super().exception(timeout)

    def done(self) -> bool:
        """See `Future.done`."""
        self._inherit()
        return super().done()

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """See `Future.add_done_callback`."""
        self._inherit()
        super().add_done_callback(fn)

    def _inherit(self) -> None:
        if self._forks == _forks:
            return
        self._forks = _forks
        self._condition = threading.Condition()  # the copied lock may be held by a thread that the child does not have
        if not super().done():
            self.set_exception(ClosedError(FORKED))


def _after_fork() -> None:
    global _forks
    _forks += 1
    holders = [*_memory, *_holders]
    _memory.clear()
    _holders.clear()
    _inherited.extend(holders)  # kept alive, so that their finalizers do not release the parent's resources
    for holder in holders:
        holder.after_fork()


os.register_at_fork(after_in_child=_after_fork)
