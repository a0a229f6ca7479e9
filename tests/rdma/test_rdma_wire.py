"""Ranks of two hosts whose rings go over RDMA: the suites of collectives and messages, and 10,000 random messages."""

from __future__ import annotations

import job
import numpy as np
import pytest

import xvcomm
from xvcomm.testing import collectives, pointtopoint, wires
from xvcomm.testing.cases import reductions
from xvcomm.types.dtype import DTYPES

pytestmark = pytest.mark.rdma

PORT = 7100


@pytest.fixture(scope="module")
def comm():
    """A communicator of one rank on each host, whose rails are all up."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in job.settings(PORT).items():
            patch.setenv(name, value)
        made = xvcomm.init()
    job.meet(made)
    yield made
    made.close()


def test_data_goes_by_rdma(comm):
    before = job.by_scheme(comm, "tcp"), job.by_scheme(comm, "rdma")
    x = np.ones(1 << 20, np.uint8)
    for _ in range(4):
        comm.all_reduce(x, op="max")
    tcp, rdma = job.by_scheme(comm, "tcp") - before[0], job.by_scheme(comm, "rdma") - before[1]
    assert rdma >= 4 << 20 and tcp < 1 << 16


@pytest.mark.parametrize("count", wires.COUNTS)
def test_reducing(comm, count):
    collectives.check_all_reduce(comm, "float32", "sum", count)
    collectives.check_reduce(comm, "float32", "sum", count)
    collectives.check_reduce_scatter(comm, "float32", "sum", count // 2)


@pytest.mark.parametrize("rows", wires.ROWS)
def test_moving(comm, rows):
    for check in wires.MOVING:
        check(comm, "float32", rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_types(comm, dtype):
    """Messages, and all reductions."""
    pointtopoint.check_blocking(comm, dtype.name, 1000)
    collectives.check_reductions(comm, dtype.name, [str(op) for op in reductions(dtype)])


@pytest.mark.parametrize("check", wires.OTHERS)
def test_others(comm, check):
    check(comm)


@pytest.mark.parametrize("check", wires.MESSAGES)
def test_messages(comm, check):
    check(comm)


@pytest.mark.parametrize("count", wires.MESSAGE_COUNTS)
def test_sizes_of_messages(comm, count):
    pointtopoint.check_blocking(comm, "float32", count)
    pointtopoint.check_exchange(comm, "float32", count)


def test_asynchronous(comm):
    collectives.check_async(comm, 40)
    pointtopoint.check_group_beyond_rings(comm, 3_000_001, 3)


def test_communicators_one_after_the_other(comm):
    """Each is closed as soon as this rank is done, while messages for the other one are on their way."""
    for _ in range(50):
        with comm.split(0) as group:
            group.barrier()
    assert not comm.refused()


def test_order(comm):
    pointtopoint.check_order(comm, 200)
    pointtopoint.check_many_in_flight(comm, 100)


def test_10_000_messages(comm):
    before = job.by_scheme(comm, "tcp")
    nbytes = job.exchange(comm, 10_000, 300_000, seed=1)
    assert job.by_scheme(comm, "tcp") - before < nbytes // 10  # also if a busy machine has made a queue pair anew
