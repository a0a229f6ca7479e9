"""Communicators that are freed, and predefined constants, which do not change."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from xvcomm.adapters.mpi import MPI, Comm
from xvcomm.comm.communicator import Communicator
from xvcomm.errors import ArgumentError, PeerLost
from xvcomm.testing import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Two ranks of one island and one of another."""
    with World(islands="a:2,b:1", env={"XVCOMM_DEVICE": "host"}) as ranks:
        yield ranks


def freed(communicator: Communicator) -> None:
    """Probes after all other ranks have freed the communicator: Iprobe for any source finds nothing; others raise PeerLost."""
    comm = Comm(communicator).Dup()
    if comm.rank:
        comm.Free()
    Comm(communicator).Barrier()
    if comm:
        for tag in (MPI.ANY_TAG, 3):
            assert not comm.Iprobe(tag=tag) and comm.Improbe(tag=tag) is None and not comm.iprobe(tag=tag)
            with pytest.raises(PeerLost, match="on"):
                comm.Probe(tag=tag)
        with pytest.raises(PeerLost, match="rank 1 on"):
            comm.Iprobe(1)
        comm.Free()
    Comm(communicator).Barrier()


def not_kept(communicator: Communicator) -> None:
    """Freed communicators are garbage collected: those of Split and of Dup, with and without messages."""
    comm, gone = Comm(communicator), []
    for turn in range(4):
        made = comm.Dup() if turn % 2 else comm.Split(0)
        made.sendrecv(turn, (made.rank + 1) % made.size)
        gone.append(weakref.ref(made.communicator))
        made.Free()
    del made
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def unused(communicator: Communicator) -> None:
    """Free also closes a communicator that was never used."""
    comm = Comm(communicator)
    made = comm.Dup()
    if comm.rank:
        made.Free()
        assert made == MPI.COMM_NULL
    comm.Barrier()
    if comm.rank == 0:
        with pytest.raises(PeerLost, match="on"):
            made.recv(tag=3)
        made.Free()
    comm.Barrier()


def not_kept_beside_a_view(communicator: Communicator) -> None:
    """A view does not keep a communicator that the program closes, nor its thread."""
    gone, before = [], threading.active_count()
    for _ in range(4):
        made = communicator.split(0)
        Comm(made).Ibarrier().Wait()
        gone.append(weakref.ref(made))
        made.close()
    del made
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)
    until = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before


def constants(communicator: Communicator) -> None:
    """PROC_NULL receives can be repeated; statuses may be a tuple, and fewer than the requests."""
    comm = Comm(communicator)
    for _ in range(2):
        assert MPI.MESSAGE_NO_PROC.recv() is None
        MPI.MESSAGE_NO_PROC.Recv(bytearray(1))
    with pytest.raises(ArgumentError):
        MPI.MESSAGE_NULL.recv()
    assert MPI.MESSAGE_NO_PROC
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in range(3):
        requests = [comm.isend(1, after, 4), comm.irecv(source=before, tag=4)]
        statuses = tuple(MPI.Status() for _ in range(count))
        MPI.Request.Waitall(requests, statuses)
        assert [status.source for status in statuses[1:]] == [before] * (count == 2)


@pytest.mark.parametrize(
    "check", (freed, not_kept, unused, not_kept_beside_a_view, constants), ids=lambda check: check.__name__
)
def test_freed(world: World, check: Callable[..., Any]) -> None:
    world.run(check)
