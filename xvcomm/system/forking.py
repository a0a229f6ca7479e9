"""Fork: the child has no part in its parent's job.

What holds a piece of the job registers here. After a fork its `after_fork` runs in the child, before any other code of it.
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
"""Why the child cannot take part, for errors."""


class Holder(Protocol):
    """Something that a forked child must not use as its parent does."""

    def after_fork(self) -> None:
        """Called in the child, where no other thread runs: let go without a trace that the parent or other ranks see."""


_memory: WeakSet[Holder] = WeakSet()
_holders: WeakSet[Holder] = WeakSet()
_inherited: list[Holder] = []
_forks = 0


def register(holder: Holder, *, memory: bool = False) -> None:
    """Call `after_fork` of this object in every child that this process forks, as long as the object lives.

    Args:
        memory: whether it is shared memory, which comes first: what others write is then the child's alone.
    """
    (_memory if memory else _holders).add(holder)


def leave_to_parent(descriptor: int) -> None:
    """Let go of a socket in the child; the number stays taken, for objects of the parent's that will close it."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


def forks() -> int:
    """How many forks lie between this process and the one that was started: threads of a smaller number are not here."""
    return _forks


class ProcessFuture(Future[T]):
    """What a thread of this process will end. In a forked child, which has no such thread, it has failed by ClosedError.

    That comes about when the child first asks: at the fork its callbacks could meet locks that nobody would release.

    Attributes:
        help: does the thread's work in the thread that waits, for at most so many seconds; False if that cannot be.
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
        self._condition = threading.Condition()  # a thread that the child does not have may hold the parent's
        if not super().done():
            self.set_exception(ClosedError(FORKED))


def _after_fork() -> None:
    global _forks
    _forks += 1
    holders = [*_memory, *_holders]
    _memory.clear()
    _holders.clear()
    _inherited.extend(holders)  # their finalizers are the parent's business
    for holder in holders:
        holder.after_fork()


os.register_at_fork(after_in_child=_after_fork)
