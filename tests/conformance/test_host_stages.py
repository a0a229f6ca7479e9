"""The staging buffers of the host's ranks: no call finds data of an earlier or later call there."""

from __future__ import annotations

import numpy as np
import pytest

from xvcomm.testing.world import World


@pytest.fixture(scope="module", params=(2, 3))
def ranks(request):
    """Two and three ranks on host memory."""
    with World(request.param) as world:
        yield world


def many(comm, sizes, rounds):
    """All-reduce arrays of several sizes repeatedly, with one rank occasionally late; returns the number of wrong results."""
    wrong = 0
    for i in range(rounds):
        n = sizes[i % len(sizes)]
        if i % 7 == comm.rank:
            np.zeros(1 << 16).sum()  # late by some microseconds
        x = comm.all_reduce(np.arange(n, dtype=np.float64) + i * (comm.rank + 1))
        wrong += not np.array_equal(x, comm.size * np.arange(n) + i * comm.size * (comm.size + 1) / 2)
    return wrong


@pytest.mark.parametrize("sizes", [(1,), (8192,), (2049, 16384), (1, 5000, 40_000, 100)])
def test_repeated_all_reduces(ranks, sizes):
    assert ranks.run(many, sizes, 150) == [0] * ranks.size
