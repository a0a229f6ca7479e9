"""MPI's messages over a Communicator: any tag in any order, from any source, of any length, without deadlock."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from xvcomm.adapters.mpi import MPI, Comm
from xvcomm.comm.communicator import Communicator
from xvcomm.errors import ArgumentError, ArrayError, DeadlineExceeded, DTypeError, PeerLost
from xvcomm.testing import World

LARGE = 1 << 19
"""Number of float64 elements that exceed any ring."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Two ranks of one island and one of another."""
    with World(islands="a:2,b:1", env={"XVCOMM_DEVICE": "host"}) as ranks:
        ranks.run(anybody)  # opens rings that no sender may ever use, whose names stay as long as the ranks
        yield ranks


def around(comm: Comm) -> tuple[int, int]:
    """The next and the previous rank."""
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def any_order(communicator: Communicator) -> None:
    comm = Comm(communicator)
    after, before = around(comm)
    tags = [7, 3, 38, 0, 31, 69, 7, MPI.TAG_UB, 3]  # 7, 38 and 69 share a channel, and 0 and 31
    sent = [np.full(5, 100 * comm.rank + i) for i in range(len(tags))]
    requests = [comm.Isend(x, after, tag) for x, tag in zip(sent, tags, strict=True)]
    status = MPI.Status()
    for wanted in sorted(set(tags), reverse=True):
        for place in (i for i, tag in enumerate(tags) if tag == wanted):  # of one tag in the order of sending
            y = np.zeros(9, int)
            comm.Recv(y, before, wanted, status)
            assert (y[:5] == 100 * before + place).all() and not y[5:].any(), (wanted, y)
            assert (status.source, status.tag, status.Get_count(MPI.LONG)) == (before, wanted, 5)
    MPI.Request.Waitall(requests)


def anybody(communicator: Communicator) -> None:
    """Messages of any tag from one source arrive in the order of sending, although they use many channels."""
    comm, many = Comm(communicator), 60
    rng = np.random.default_rng(comm.rank)
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    works = [
        comm.Isend(np.full(int(rng.integers(1, 4000)), i), peer, int(rng.integers(0, 100)))
        for i in range(many) for peer in others
    ]  # fmt: skip
    seen: dict[int, list[int]] = {peer: [] for peer in others}
    status, y = MPI.Status(), np.zeros(4000, int)
    for _ in range(many * len(others)):
        comm.Recv(y, status=status)
        seen[status.source].append(int(y[0]))
        assert (y[: status.Get_count(MPI.LONG)] == y[0]).all()
    assert all(found == list(range(many)) for found in seen.values()), seen
    MPI.Request.Waitall(works)


def random_receives(communicator: Communicator, seed: int) -> None:
    """Receives by tag, by source, by neither, blocking or posted; each gets the first message that matches."""
    comm, many = Comm(communicator).Dup(), 40
    plans = [np.random.default_rng((seed, rank)).integers(0, 70, (comm.size, many)) for rank in range(comm.size)]
    works = [
        comm.Isend(np.array([comm.rank, i, plans[comm.rank][peer, i]]), peer, int(plans[comm.rank][peer, i]))
        for i in range(many) for peer in range(comm.size)
    ]  # fmt: skip
    waiting = {source: [(int(tag), i) for i, tag in enumerate(plans[source][comm.rank])] for source in range(comm.size)}
    rng = np.random.default_rng((seed, 99, comm.rank))
    while any(waiting.values()):
        source = int(rng.choice([s for s in waiting if waiting[s]]))
        tag = int(rng.choice([t for t, _ in waiting[source]])) if rng.random() < 0.6 else MPI.ANY_TAG
        if tag == MPI.ANY_TAG and rng.random() < 0.4:
            source = MPI.ANY_SOURCE
        y, status = np.zeros(3, int), MPI.Status()
        if rng.random() < 0.5:
            comm.Recv(y, source, tag, status)
        else:
            request = comm.Irecv(y, source, tag)
            while not request.Test(status):
                pass
        mine = waiting[status.source]
        expected = next(entry for entry in mine if tag in (MPI.ANY_TAG, entry[0]))
        assert (y == [status.source, expected[1], expected[0]]).all() and status.tag == expected[0], (y, expected)
        mine.remove(expected)
    MPI.Request.Waitall(works)
    comm.Free()


def progress(communicator: Communicator) -> None:
    """Posted receives let every kind of blocking call on both sides complete."""
    comm = Comm(communicator)
    after, before = around(comm)
    x, y = np.full(LARGE, float(comm.rank)), np.zeros(LARGE)
    incoming = comm.Irecv(y, before, 5)
    comm.Send(x, after, 5)  # all ranks are in Send
    incoming.Wait()
    assert (y == before).all()

    y[:] = 0
    incoming = comm.Irecv(y, before, 5)
    if comm.rank == 0:
        comm.Send(x, after, 5)
        comm.Barrier()
    else:
        comm.Barrier()  # rank 0 comes only when its message is received
        comm.Send(x, after, 5)
    incoming.Wait()
    assert (y == before).all()

    small = [np.zeros(2000) for _ in range(150)]  # together many times what a ring takes
    requests = [comm.Irecv(part, before, 40 + i % 3) for i, part in enumerate(small)]
    for i in range(len(small)):
        comm.Send(np.full(2000, float(i)), after, 40 + i % 3)
    MPI.Request.Waitall(requests)
    assert all((part == i).all() for i, part in enumerate(small))


def lengths_and_types(communicator: Communicator) -> None:
    comm = Comm(communicator)
    after, before = around(comm)
    x, status = np.arange(10, dtype="i"), MPI.Status()

    for wrong, error in ((np.zeros(9, "i"), ArrayError), (np.zeros(10, "f"), DTypeError)):
        request = comm.Isend(x, after, 1)
        with pytest.raises(error, match=f"rank {before} sent"):
            comm.Recv(wrong, before, 1)
        request.Wait()
    raw, typed = bytearray(80), np.zeros(20, "i")
    for target in ([raw, MPI.BYTE], [typed, (10, 5), MPI.INT]):
        request = comm.Isend(x, after, 1)
        comm.Recv(target, before, 1, status)
        request.Wait()
        assert status.Get_count() == 40 and status.Get_count(MPI.INT) == 10 and status.Get_count(MPI.DOUBLE) == 5
    assert (np.frombuffer(raw, "i")[:10] == x).all() and (typed[5:15] == x).all() and not typed[:5].any()
    request = comm.Isend([x.astype("g"), 3, MPI.LONG_DOUBLE], after, 1)  # a type that xvcomm does not carry
    long = np.zeros(3, "g")
    comm.Recv(long, before, 1)
    assert (long == [0, 1, 2]).all()
    request.Wait()
    comm.Sendrecv(None, after, 2, None, before, 2, status)
    assert (status.source, status.Get_count()) == (before, 0)
    with pytest.raises(ArgumentError, match="room for 10"):
        comm.Send([x, 11, MPI.INT], after)
    with pytest.raises(ArrayError, match="read-only"):
        comm.Recv(b"1234", before)
    for bad in ({"dest": comm.size}, {"dest": after, "tag": -1}, {"dest": after, "tag": MPI.TAG_UB + 1}):
        with pytest.raises(ArgumentError):
            comm.Send(x, **bad)


def nobody_and_itself(communicator: Communicator) -> None:
    comm, status, x, y = Comm(communicator), MPI.Status(), np.arange(4.0), np.zeros(4)
    comm.Send(x, MPI.PROC_NULL)
    comm.Recv(y, MPI.PROC_NULL, status=status)
    assert not y.any() and (status.source, status.tag, status.Get_count()) == (MPI.PROC_NULL, MPI.ANY_TAG, 0)
    assert comm.recv(source=MPI.PROC_NULL) is None and comm.Mprobe(MPI.PROC_NULL).recv() is None
    comm.Send(x, comm.rank, 3)
    x[:] = -1
    comm.Send(x, comm.rank, 2)
    comm.Recv(y, comm.rank, 3)
    assert (y == [0, 1, 2, 3]).all()
    comm.Recv(y, comm.rank)
    assert (y == -1).all()
    request = comm.irecv(source=comm.rank, tag=9)
    comm.send({"a": comm.rank}, comm.rank, 9)
    assert request.wait() == {"a": comm.rank}


def probes(communicator: Communicator) -> None:
    comm, status = Comm(communicator), MPI.Status()
    after, before = around(comm)
    assert not comm.Iprobe(before, 4) and comm.Improbe() is None
    comm.Barrier()
    sent = [comm.Isend(np.full(n, n), after, 4) for n in (3, 6)]
    assert comm.Probe(before, 4, status)
    assert (status.source, status.tag, status.Get_count(MPI.LONG)) == (before, 4, 3)
    message = comm.Mprobe(before, MPI.ANY_TAG, status)
    assert status.Get_count(MPI.LONG) == 3
    y = np.zeros(6, int)
    comm.Recv(y, before, 4)
    assert (y == 6).all()
    message.Recv(y)
    assert (y[:3] == 3).all() and (y[3:] == 6).all() and not message
    with pytest.raises(ArgumentError, match="already been received"):
        message.Recv(y)
    MPI.Request.Waitall(sent)


def requests(communicator: Communicator) -> None:
    comm = Comm(communicator)
    after, before = around(comm)
    ys = [np.zeros(1, int) for _ in range(4)]
    pending = [comm.Irecv(y, before, 10 + i) for i, y in enumerate(ys)]
    comm.Barrier()
    assert not MPI.Request.Testall(pending) and MPI.Request.Testany(pending) == (MPI.UNDEFINED, False)
    comm.Barrier()
    comm.Send(np.array([2]), after, 12)
    assert MPI.Request.Waitany(pending) == 2 and ys[2][0] == 2 and not pending[2]
    comm.Barrier()
    for i in (3, 0):
        comm.Send(np.array([i]), after, 10 + i)
    found: list[int] = []
    while len(found) < 2:
        found += MPI.Request.Waitsome(pending) or []
    assert sorted(found) == [0, 3]
    pending[1].Cancel()
    status = MPI.Status()
    pending[1].Wait(status)
    assert status.Is_cancelled() and not ys[1].any()
    assert MPI.Request.Waitany(pending) == MPI.UNDEFINED and MPI.Request.Waitsome(pending) is None
    assert all(request == MPI.REQUEST_NULL for request in pending)

    x, y = np.zeros(3), np.zeros(3)
    both = [comm.Send_init(x, after, 1), comm.Recv_init(y, before, 1)]
    for turn in range(3):
        x[:] = 10 * turn + comm.rank
        MPI.Prequest.Startall(both)
        MPI.Request.Waitall(both)
        assert (y == 10 * turn + before).all()
    for request in both:
        assert request != MPI.REQUEST_NULL
        request.Free()
        assert request == MPI.REQUEST_NULL


def synchronous(communicator: Communicator) -> None:
    """A synchronous send completes when it is received, and not before."""
    comm = Comm(communicator)
    after, before = around(comm)
    request = comm.Issend(np.arange(3), after, 6)
    comm.Barrier()
    assert not request.Test()
    comm.Barrier()
    y = np.zeros(3, int)
    comm.Recv(y, before, 6)
    request.Wait()
    incoming = comm.Irecv(y, before, 6)
    comm.Ssend(np.arange(3) + 1, after, 6)
    incoming.Wait()
    assert (y == [1, 2, 3]).all()


def buffered(communicator: Communicator) -> None:
    """A `Bsend` of any length returns before it is received, and its buffer may be changed."""
    comm = Comm(communicator)
    after, before = around(comm)
    x, y = np.full(LARGE, float(comm.rank)), np.zeros(LARGE)
    comm.Bsend(x, after)
    x[:] = -1
    comm.Recv(y, before)
    assert (y == before).all()


def lives_on(communicator: Communicator) -> None:
    """A pending send keeps its array, but not after it has completed."""
    comm = Comm(communicator)
    after, before = around(comm)
    x = np.full(LARGE, float(comm.rank))
    watched = weakref.ref(x)
    comm.Isend(x, after, 8)
    del x
    assert watched() is not None
    comm.Barrier()
    y = np.zeros(LARGE)
    comm.Recv(y, before, 8)
    assert (y == before).all()
    comm.Barrier()
    for _ in range(200):
        gc.collect()
        if watched() is None:
            return
        comm.Barrier()
    raise AssertionError("the array of a message that is over lives on")


def departed(communicator: Communicator) -> None:
    """Messages that a rank sent before it closed are received, by tag or by any tag; further receives raise."""
    comm = Comm(communicator).Dup()
    if comm.rank == 0:
        for tag in (11, 0, 5):
            comm.Send(np.array([tag]), 1, tag)
        comm.Free()
        Comm(communicator).Barrier()
        return
    Comm(communicator).Barrier()
    if comm.rank == 1:
        y = np.zeros(1, int)
        assert comm.Iprobe(MPI.ANY_SOURCE, 5)
        for source, tag, want in ((0, MPI.ANY_TAG, 11), (0, 5, 5), (MPI.ANY_SOURCE, MPI.ANY_TAG, 0)):
            comm.Recv(y, source, tag)
            assert y[0] == want
        for _ in range(2):
            with pytest.raises(PeerLost, match="rank 0 on"):
                comm.Recv(y, 0)
    comm.Free()


def threads(communicator: Communicator) -> None:
    """Each thread has its own tag, and the same two ranks."""
    comm, failures = Comm(communicator), []
    after, before = around(comm)

    def exchange(tag: int) -> None:
        try:
            for i in range(30):
                x, y = np.full(3000, 1000 * tag + i), np.zeros(3000, int)
                incoming = comm.Irecv(y, before, tag)
                comm.Send(x, after, tag)
                incoming.Wait()
                assert (y == 1000 * tag + i).all()
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=exchange, args=(tag,)) for tag in (1, 2, 33)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not failures, failures


def too_late(communicator: Communicator) -> None:
    """A receive without a matching send raises with the source, also for messages to oneself."""
    own, pair = Comm(communicator.split(communicator.rank)), Comm(communicator.split(0))
    own.communicator.timeout = pair.communicator.timeout = 0.5
    with pytest.raises(DeadlineExceeded, match="itself"):
        own.Recv(np.zeros(1), 0, 3)
    if communicator.rank == 0:
        with pytest.raises(DeadlineExceeded, match="rank 1 on"):
            pair.Recv(np.zeros(1), 1, 3)
    communicator.barrier()


CHECKS: tuple[Callable[..., Any], ...] = (
    any_order, anybody, progress, lengths_and_types, nobody_and_itself, probes, requests, synchronous, buffered, lives_on,
    departed, threads,
)  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_messages(world: World, check: Callable[..., Any]) -> None:
    """Each on all ranks, of two islands."""
    world.run(check)


@pytest.mark.parametrize("seed", range(3))
def test_random_receives(world: World, seed: int) -> None:
    """Any source and tag, in any order."""
    world.run(random_receives, seed)


def test_deadlines() -> None:
    """On separate ranks, because a deadline aborts the communicator."""
    with World(2, env={"XVCOMM_DEVICE": "host"}) as ranks:
        ranks.run(too_late)


def derived(communicator: Communicator) -> None:
    """Receives unpack on completion, however they complete; invalid combinations raise before any communication."""
    comm = Comm(communicator)
    after, before = around(comm)
    odd = MPI.LONG.Create_vector(5, 1, 2)
    x = np.arange(10) + 100 * comm.rank
    want = np.where(np.arange(10) % 2, -1, np.arange(10) + 100 * before)
    comm.Isend([x, 1, odd], after, 3).Wait()
    message, y = comm.Mprobe(before, 3), np.full(10, -1)
    message.Recv([y, 1, odd])
    assert (y == want).all()
    again, y = comm.Send_init([x, 1, odd], after, 4), np.full(10, -1)
    room = comm.Recv_init([y, 1, odd], before, 4)
    for _ in range(2):
        MPI.Prequest.Startall([again, room])
        MPI.Request.Waitall([again, room])
        assert (y == want).all()
        y[:] = -1
    status, y = MPI.Status(), np.full(10, -1)
    comm.Sendrecv(x[:3].copy(), after, 5, [y, 1, odd], before, 5, status)  # fewer than there is room for
    assert y.tolist() == [100 * before, -1, 100 * before + 1, -1, 100 * before + 2, -1, -1, -1, -1, -1]
    assert (status.Get_count(MPI.LONG), status.Get_count(odd)) == (3, MPI.UNDEFINED)
    fixed = np.zeros(10, int)
    fixed.flags.writeable = False
    for error, call in (
        (ArgumentError, lambda: comm.Send([x, 2, odd], after)),
        (ArgumentError, lambda: comm.Send([x, odd], after)),
        (ArgumentError, lambda: MPI.LONG.Create_vector(2, 1, -1)),
        (ArgumentError, lambda: MPI.LONG.Create_subarray([4, 4], [2, 2], [3, 0])),
        (ArgumentError, lambda: MPI.LONG.Create_indexed([1, 2], [0])),
        (ArrayError, lambda: comm.Recv([fixed, 1, odd], before)),
        (DTypeError, lambda: comm.Bcast([x, 1, odd])),
    ):
        with pytest.raises(error):
            call()


def test_derived_datatypes(world: World) -> None:
    world.run(derived)
