"""What the checks of failures share: communicators that may fail, and calls that must raise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from xvcomm.comm.communicator import Communicator
from xvcomm.engine.inflight.work import Work
from xvcomm.errors import XvcommError
from xvcomm.testing.arrays import arrays, on_device
from xvcomm.testing.signals import await_that

_warming = 0
"""Number of collectives that `may_fail` runs in the shapes that are to fail; after a few, compiled code starts them on GPUs."""


@contextlib.contextmanager
def may_fail(comm: Communicator) -> Iterator[Communicator]:
    """A communicator of all ranks that may fail in the block; `comm` must work afterwards."""
    group = comm.split(0)
    assert group is not None
    a = arrays(comm)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for each in (group, comm):
        each.all_reduce(a.put(np.ones(3)))
        each.sendrecv(a.put(np.ones(3)), after, a.put(np.ones(3)), before)
    for number in range(_warming):
        group.all_reduce(a.put(np.zeros(1000, (np.float32, np.float64)[number % 2])))
    comm.barrier()  # otherwise the failure may affect another rank's warm-up
    try:
        yield group
    finally:
        group.close()
    assert (a.get(comm.all_reduce(a.put(np.ones(3)))) == comm.size).all()
    assert (a.get(comm.sendrecv(a.put(np.ones(3)), after, a.put(np.zeros(3)), before)) == 1).all()


@contextlib.contextmanager
def warmed_up(comm: Communicator) -> Iterator[None]:
    """Warm up the collectives that fail, with the rank's device current on the thread, which compiled code requires."""
    global _warming
    _warming = 8
    try:
        with on_device(comm):
            yield
    finally:
        _warming = 0


def finish(start: Callable[..., Work], *args: Any, **kwargs: Any) -> None:
    """Start an asynchronous operation and wait for it."""
    start(*args, **kwargs).synchronize()


def error_of(error: type[XvcommError], call: Callable[..., Any], *args: Any, **kwargs: Any) -> XvcommError:
    """The error that a call raises."""
    try:
        call(*args, **kwargs)
    except error as raised:
        return raised
    raise AssertionError(f"no {error.__name__}")


def error_soon(error: type[XvcommError], call: Callable[..., Any], *args: Any, **kwargs: Any) -> XvcommError:
    """The error of a call, or of a later one, because an asynchronous call returns before its error is known."""
    raised: list[XvcommError] = []

    def has_raised() -> bool:
        try:
            call(*args, **kwargs)
        except error as caught:
            raised.append(caught)
        return bool(raised)

    await_that(has_raised)
    return raised[0]
