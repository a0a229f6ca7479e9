"""Communicators in programs: their names in compiled code, and the default communicator."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import xvcomm
from xvcomm.comm.communicator import Communicator
from xvcomm.errors import ArgumentError

_lock = threading.Lock()
_jobs: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
_default: Communicator | None = None


def init(**arguments: Any) -> Communicator:
    """Join the job like `xvcomm.init`, with the same arguments, and make it the default communicator.

    If `jax.distributed` is initialized and no other launcher is found, the ranks are its processes, and its service is the
    store.
    """
    comm = xvcomm.init(**arguments)
    use(comm)
    return comm


def use(comm: Communicator | None) -> None:
    """Set the default communicator of operations without `comm=`; None for no default."""
    global _default
    _default = comm


def chosen(comm: Communicator | None) -> Communicator:
    """The communicator of an operation.

    Raises:
        ArgumentError: none is given and there is no default, or it is not a communicator.
    """
    found = _default if comm is None else comm
    if isinstance(found, Communicator):
        return found
    if found is None:
        raise ArgumentError("no communicator: pass comm=, or call xvcomm.adapters.jax.init() or use(comm) before")
    raise ArgumentError(
        f"comm={type(found).__name__}: expected a communicator; if it is an argument of a jitted function, name it in "
        "static_argnames"
    )


def name_of(comm: Communicator) -> str:
    """Name of a communicator in compiled programs: the job's number in this process, and its path in the job.

    The same on all ranks, and from run to run if a process joins its jobs in the same order.
    """
    session, path = comm.identity
    with _lock:
        job = _jobs.get(session)
        if job is None:
            job = _jobs[session] = next(_numbers)
    return f"{job}:{path}"
