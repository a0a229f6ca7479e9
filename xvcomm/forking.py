"""Fork: the child has no part in its parent's job.

What holds a piece of the job registers here. After a fork its `after_fork` runs in the child, before any other code of it.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

FORKED = "in a forked child: the communicator is its parent's; join with xvcomm.init() in a process started by spawn"
"""Why the child cannot take part, for errors."""


class Holder(Protocol):
    """Something that a forked child must not use as its parent does."""

    def after_fork(self) -> None:
        """Called in the child, where no other thread runs: let go without a trace that the parent or other ranks see."""


_memory: WeakSet[Holder] = WeakSet()
_holders: WeakSet[Holder] = WeakSet()
_inherited: list[Holder] = []


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


def _after_fork() -> None:
    holders = [*_memory, *_holders]
    _memory.clear()
    _holders.clear()
    _inherited.extend(holders)  # their finalizers are the parent's business
    for holder in holders:
        holder.after_fork()


os.register_at_fork(after_in_child=_after_fork)
