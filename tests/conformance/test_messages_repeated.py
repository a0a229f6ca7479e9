"""Later messages between two ranks, which use a shorter path: their records, errors and aborts."""

import signal
import threading
import time

import numpy as np
import pytest

from xvcomm.errors import Aborted, ClosedError, DeadlineExceeded, MismatchError, PeerLost
from xvcomm.testing.inside import context
from xvcomm.testing.world import World
from xvcomm.trace import recorder
from xvcomm.trace.format import State
from xvcomm.types.opcode import OpCode

LIMIT = 20
SIZES = [0, 10, 64 << 10, 2 << 20]


@pytest.fixture(params=["a:2", "a,b"])
def pair(request):
    with World(islands=request.param, timeout=LIMIT) as world:
        world.run(warm)
        yield world


def warm(comm):
    """Open the rings of both directions, twice."""
    x = np.zeros(4, np.uint8)
    for _ in range(2):
        exchange(comm, x, x.copy())


def exchange(comm, x, y):
    if comm.rank == 0:
        comm.send(x, 1)
        comm.recv(y, 1)
    else:
        comm.recv(y, 0)
        comm.send(x, 0)


def call(comm, kind, x, **how):
    """A message between this rank and rank 1."""
    return comm.recv(x, 1, **how) if kind == "recv" else comm.send(x, 1, **how)


def noted(comm, nbytes):
    """What hooks receive for one message each way, and what the flight recorder keeps."""
    seen = []
    recorder.hooks.append(seen.append)
    try:
        exchange(comm, np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8))
    finally:
        recorder.hooks.clear()
    assert all(r.ended >= r.posted > 0 for r in seen)
    return [(r.op, r.nbytes, r.peer, r.tag, r.state, r.call_site.partition(":")[0]) for r in seen]


@pytest.mark.parametrize("nbytes", SIZES)
def test_records(pair, nbytes):
    here = "test_messages_repeated.py"
    ways = [(OpCode.SEND, nbytes, 1, 0, State.DONE, here), (OpCode.RECV, nbytes, 1, 0, State.DONE, here)]
    other = [(op, n, 0, tag, state, call_site) for op, n, _, tag, state, call_site in reversed(ways)]
    assert pair.run(noted, nbytes) == [ways, other]


def call_sites(comm):
    """Call sites of operations that run on other threads or at the end of a group."""
    seen = []
    recorder.hooks.append(seen.append)
    x, y = np.zeros(8), np.zeros(8)
    try:
        comm.all_reduce(x, async_op=True).wait()
        with comm.group():
            comm.send(x, 1 - comm.rank)
            work = comm.irecv(y, 1 - comm.rank)
        work.wait()
        sent = comm.isend(x, 1 - comm.rank)
        comm.irecv(y, 1 - comm.rank).wait()
        sent.wait()
        comm.sendrecv(x, 1 - comm.rank, y, 1 - comm.rank)
        comm.barrier()
    finally:
        recorder.hooks.clear()
    return [r.call_site for r in seen]


def test_call_sites(pair):
    for found in pair.run(call_sites):
        assert len(found) == 8
        assert {call_site.partition(":")[0] for call_site in found} == {"test_messages_repeated.py"}, found
        assert len(set(found)) == 7, "only the two halves of sendrecv are called at one place"


def late(comm, kind, nbytes):
    x = np.zeros(nbytes, np.uint8)
    if comm.rank == 0:
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=f"{kind} with rank 1") as error:
            call(comm, kind, x, timeout=0.2)
        assert 0.2 <= time.monotonic() - begin < 60
        return error.value.peer
    time.sleep(1)
    return None


@pytest.mark.parametrize(("kind", "nbytes"), [("recv", 0), ("recv", 1 << 20), ("send", 8 << 20)])
def test_deadline(pair, kind, nbytes):
    assert pair.run(late, kind, nbytes)[0] == 1


def disputed(comm, change):
    count, dtype, tag = {"count": (9, "f4", 0), "dtype": (8, "i4", 0), "tag": (8, "f4", 3)}[change]
    try:
        if comm.rank == 0:
            comm.send(np.zeros(8, "f4"), 1)
            comm.recv(np.zeros(8, "f4"), 1)
        else:
            comm.recv(np.zeros(count, dtype), 0, tag)
    except MismatchError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("change", "words"), [("count", "9 x float32"), ("dtype", "8 x int32"), ("tag", "tag 3")])
def test_mismatch(pair, change, words):
    for text in pair.run(disputed, change):
        assert text is not None and words in text and "8 x float32, tag 0" in text


def waiting(comm, kind):
    x = np.zeros(8 << 20, np.uint8)
    try:
        call(comm, kind, x)
    except KeyboardInterrupt:
        record = comm.history()[-1]
        return record.op, record.state
    return None


def sleep(comm):
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        return None


def barrier(comm):
    comm.barrier()


@pytest.mark.parametrize(("kind", "op"), [("recv", OpCode.RECV), ("send", OpCode.SEND)])
def test_interrupt(pair, kind, op):
    pair.submit(0, waiting, kind)
    pair.submit(1, sleep)
    time.sleep(0.3)
    for rank in range(2):
        pair.kill(rank, signal.SIGINT)
    assert pair.collect()[0] == (op, State.FAILED)
    again = pair.outcomes(barrier)
    assert all(isinstance(o, Aborted) and o.peer == 0 for o in again), again
    assert "KeyboardInterrupt" in str(again[1])


def until_error(comm, kind, x):
    while True:
        call(comm, kind, x)


@pytest.mark.parametrize("kind", ["recv", "send"])
def test_death(pair, kind):
    pair.submit(0, until_error, kind, np.zeros(100_000))
    pair.submit(1, sleep)
    time.sleep(0.3)
    pair.kill(1)
    outcome = pair.collect()[0]
    assert isinstance(outcome, PeerLost) and outcome.peer == 1 and f"{kind} with rank 1" in str(outcome)


def closed(comm, by):
    """Rank `by` closes while rank 0 receives."""
    if comm.rank == 1:
        comm.send(np.full(4, 7, np.uint8), 0)
        time.sleep(0.3)
        if by == 1:
            comm.close()
        time.sleep(0.5)
        return None
    x = np.zeros(4, np.uint8)
    comm.recv(x, 1)
    assert (x == 7).all()
    if by == 0:
        threading.Timer(0.3, comm.close).start()
    with pytest.raises(PeerLost if by == 1 else ClosedError) as error:
        comm.recv(x, 1)
    if by == 0:
        with pytest.raises(ClosedError, match="was closed; make a new one"):
            comm.send(x, 1)
    return str(error.value)


@pytest.mark.parametrize(("by", "words"), [(0, "closed while it was under way"), (1, "rank 1")])
def test_close(pair, by, words):
    assert words in pair.run(closed, by)[0]


def aborted(comm):
    """A message begun on an aborted communicator raises the first reason, and is recorded as failed."""
    if comm.rank == 1:
        with pytest.raises(MismatchError):
            comm.all_reduce(np.zeros(3))
    else:
        with pytest.raises(MismatchError):
            comm.all_reduce(np.zeros(4))
        time.sleep(0.2)
    for message in (comm.send, comm.recv):
        with pytest.raises(MismatchError):
            message(np.zeros(4, np.uint8), 1 - comm.rank)
        record = comm.history()[-1]
        assert record.state == State.FAILED and record.nbytes == 4
    return len(context(comm).lifecycle.users)


def test_abort(pair):
    assert pair.run(aborted) == [0, 0]
