"""Checks of operations that are captured in a graph of the vendor's and run from it, as often as the test likes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from xvcomm.communicator import Communicator
from xvcomm.testing.arrays import DeviceArrays, arrays
from xvcomm.testing.cases import assert_same_bits
from xvcomm.testing.trials import Trial, warm

Capture = Callable[[int, Callable[[], None]], Callable[[], None]]
"""Given a stream's handle and what to enqueue: captures it, and gives what launches the graph on that stream."""


def check_graphs(comm: Communicator, capture: Capture) -> None:
    """Every operation, captured once by all ranks and launched several times, with the same called in between."""
    a = arrays(comm)
    assert isinstance(a, DeviceArrays) and a.handle is not None

    def check(trial: Trial, run: Callable[[], None], what: str) -> None:
        a.fill(trial.target, np.zeros_like(trial.want))
        a.fill(trial.source, trial.values)
        run()
        assert_same_bits(a.get(trial.target), trial.want, f"{trial.name}, {what}")

    for trial in warm(comm, a):
        a.synchronize()
        replay = capture(a.handle, trial.run)
        for number in range(3):
            check(trial, replay, f"launch {number}")
        check(trial, trial.run, "called after the graph ran")
        check(trial, replay, "launched after it was called")


def check_graph_of_many(comm: Communicator, capture: Capture, many: int) -> None:
    """A graph of many operations in a row, each on what the one before gave."""
    a = arrays(comm)
    assert isinstance(a, DeviceArrays) and a.handle is not None
    x, y, ones = a.put(np.ones(1000)), a.put(np.ones(1000)), np.ones(1000)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def several() -> None:
        for _ in range(many):
            comm.all_reduce(x, "avg")
            if comm.size > 1:
                comm.sendrecv(x, after, y, before)
                a.copy(x, y)

    several()
    a.synchronize()
    replay = capture(a.handle, several)
    for number in range(3):
        a.fill(x, (comm.rank + number) * ones)
        replay()
        assert_same_bits(a.get(x), ((comm.size - 1) / 2 + number) * ones, f"launch {number} of many operations")
