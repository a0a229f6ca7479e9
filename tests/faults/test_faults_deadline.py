"""A missing rank causes DeadlineExceeded at the deadline, on all ranks, with its name.

Each case runs on a communicator of its own, split off the processes' communicator, which remains usable.
"""

import os
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from xvcomm.errors import DeadlineExceeded
from xvcomm.memory.segment import Segment
from xvcomm.testing.world import World

TIMEOUT = 0.8
SOON = 30.0


@pytest.fixture(
    scope="module",
    params=[("a:3", None), ("a:2,b:2", None), ("a,b,c", None), (None, "a:2,b:1")],
    ids=lambda p: p[0] or p[1],
)
def world(request):
    """Ranks of several islands, or on several hosts."""
    islands, hosts = request.param
    with World(islands=islands, hosts=hosts, timeout=100) as world:
        world.run(call_all)
        yield world


@pytest.fixture(scope="module", params=[None, "a,b,a,b"], ids=["one host", "two hosts"])
def four(request):
    """Four ranks, on one host or on two."""
    with World(4, hosts=request.param, timeout=100) as world:
        world.run(call_all)
        yield world


def fresh(comm):
    """A communicator of all ranks on which every rank has completed an operation."""
    sub = comm.split(0)
    sub.timeout = TIMEOUT
    sub.barrier(timeout=100)
    return sub


def timed(comm, call, folder, after=()):
    """Error and duration of a call, which starts after these ranks have given up.

    They announce that through files, because a message would be the last operation that errors name.
    """
    for rank in after:
        wait_until((folder / str(rank)).exists)
    started, error = time.monotonic(), None
    try:
        call()
    except DeadlineExceeded as caught:
        error = caught
    finally:
        seconds = time.monotonic() - started
        (folder / str(comm.rank)).touch()
        comm.close()
    return error, seconds


def repeated(call):
    """Let a late rank call until it fails: a call may finish by what ranks of other hosts sent before they gave up."""

    def calls():
        until = time.monotonic() + SOON
        while time.monotonic() < until:
            call()

    return calls


def wait_until(true):
    until = time.monotonic() + 30
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def operations(comm, root):
    x = np.ones(4 * comm.size, np.float32)
    return {
        "all_reduce": lambda: comm.all_reduce(x),
        "large_all_reduce": lambda: comm.all_reduce(np.ones(1 << 19)),
        "broadcast": lambda: comm.broadcast(x, root=root),
        "all_gather": lambda: comm.all_gather(x),
        "reduce_scatter": lambda: comm.reduce_scatter(x),
        "all_to_all": lambda: comm.all_to_all(x),
        "barrier": comm.barrier,
        "asynchronous": lambda: comm.all_reduce(x, async_op=True).wait(),
        "split": lambda: comm.split(0, timeout=comm.timeout),
        "all_gather_object": lambda: comm.all_gather_object("x"),
    }


def call_all(comm):
    """Call every operation once: on a new machine that compiles kernels, which takes longer than TIMEOUT."""
    for call in operations(comm, 0).values():
        call()


def collective(comm, name, absent, folder):
    sub = fresh(comm)
    calls = operations(sub, absent[0])
    if comm.rank not in absent:
        return timed(sub, calls[name], folder)
    return timed(sub, repeated(calls[name]), folder, after=[rank for rank in range(comm.size) if rank not in absent])


def check(outcomes, absent):
    for rank, (error, seconds) in enumerate(outcomes):
        assert isinstance(error, DeadlineExceeded), (rank, error)
        assert error.rank == rank
        if rank in absent:
            assert seconds < SOON
            assert "waited for this rank until its deadline" in str(error) or rank != error.peer
        else:
            assert TIMEOUT / 2 < seconds < TIMEOUT + SOON
            waited = str(error).split("waiting for ")[1].split(";")[0]
            named = {int(part.split()[1]) for part in waited.split(", ")}
            assert named == set(absent), error
            assert error.peer in absent
            assert f"rank {error.peer}: its last operation: barrier #0" in str(error)
            assert "test_faults_deadline.py" in str(error)


@pytest.mark.parametrize("name", ["all_reduce", "large_all_reduce", "broadcast", "barrier", "asynchronous", "split"])
def test_a_rank_that_never_calls_a_collective(world, name, tmp_path):
    absent = [world.size - 1]
    check(world.run(collective, name, absent, tmp_path), absent)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all", "all_gather_object"])
def test_a_rank_that_never_calls_another_collective(four, name, tmp_path):
    check(four.run(collective, name, [3], tmp_path), [3])


@pytest.mark.parametrize("absent", [[0], [1, 2]])
def test_several_absent_ranks(world, absent, tmp_path):
    check(world.run(collective, "all_reduce", absent, tmp_path), absent)


def receive(comm, kind, folder):
    """Rank 0 waits for rank 1, which comes too late."""
    sub = fresh(comm)
    buffer = np.zeros(1 << 21)
    calls = {
        "recv": lambda: sub.recv(buffer, 1),
        "send": lambda: sub.send(buffer, 1),
        "irecv": lambda: sub.irecv(buffer, 1).wait(),
        "isend": lambda: sub.isend(buffer, 1).wait(),
        "sendrecv": lambda: sub.sendrecv(buffer, 1, buffer.copy(), 1),
        "recv_object": lambda: sub.recv_object(1),
    }
    if comm.rank == 0:
        return timed(sub, calls[kind], folder)
    if comm.rank == 1:
        return timed(sub, lambda: sub.recv(buffer, 0), folder, after=[0])
    return timed(sub, sub.barrier, folder, after=[0])


@pytest.mark.parametrize("kind", ["recv", "send", "irecv", "isend", "sendrecv", "recv_object"])
def test_point_to_point(four, kind, tmp_path):
    outcomes = four.run(receive, kind, tmp_path)
    error, seconds = outcomes[0]
    assert error.peer == 1 and TIMEOUT / 2 < seconds < TIMEOUT + SOON
    assert "waiting for rank 1 on" in str(error) and "rank 1: its last operation: barrier #0" in str(error)
    assert "rank 0 on" in str(outcomes[1][0]) and "waited for this rank until its deadline" in str(outcomes[1][0])
    for error, _ in outcomes[1:]:
        assert error.peer == 1 and "was waiting for rank 1 on" in str(error)


def chain(comm, folder):
    """Rank 0 waits for 1, which waits for 2, which waits for 3, which calls nothing."""
    sub = fresh(comm)
    if comm.rank == 3:
        return timed(sub, lambda: None, folder, after=[0, 1, 2])
    return timed(sub, lambda: sub.recv(np.zeros(1), comm.rank + 1), folder)


def test_the_end_of_a_chain_is_named(four, tmp_path):
    for error, _ in four.run(chain, tmp_path)[:3]:
        assert error.peer == 3
        assert "waiting for rank 3 on" in str(error) and "rank 3: its last operation: barrier #0" in str(error)


def behind_who_waits(comm, folder):
    """Rank 2 comes too late; rank 0 waits for it, and therefore does not call the barrier that rank 1 is in."""
    sub = fresh(comm)
    if comm.rank == 2:
        return timed(sub, sub.barrier, folder, after=[1])
    if comm.rank == 0:
        return timed(sub, lambda: sub.recv(np.zeros(1), 2, timeout=100), folder)
    return timed(sub, sub.barrier, folder)


def test_a_rank_that_waits_itself_is_not_named_as_late(tmp_path):
    with World(3, timeout=100) as world:
        outcomes = world.run(behind_who_waits, tmp_path)
    for error, _ in outcomes:
        assert error.peer == 2 and "waiting for rank 2 on" in str(error), error


def circle(comm, folder):
    sub = fresh(comm)
    return timed(sub, lambda: sub.recv(np.zeros(1), (comm.rank + 1) % comm.size), folder)


def test_ranks_that_wait_for_each_other(four, tmp_path):
    for rank, (error, _) in enumerate(four.run(circle, tmp_path)):
        assert isinstance(error, DeadlineExceeded)
        assert error.rank == rank and "its last operation: recv #" in str(error)


def message_against_collective(comm, folder):
    """Rank 0 sends a large message to rank 1, which waits for it in a collective: a deadlock."""
    sub = fresh(comm)
    if comm.rank == 0:
        return timed(sub, lambda: sub.send(np.zeros(1 << 21), 1), folder)
    return timed(sub, sub.barrier, folder)


def test_a_message_against_a_collective(four, tmp_path):
    for rank, (error, _) in enumerate(four.run(message_against_collective, tmp_path)):
        assert isinstance(error, DeadlineExceeded)
        if rank:
            assert "rank 0" in str(error)


def soft(comm):
    """A timeout of Work.wait ends the wait, not the operation."""
    sub = comm.split(0)
    result = None
    if comm.rank == 0:
        work = sub.irecv(np.zeros(1), 1)
        with pytest.raises(DeadlineExceeded, match="was not done after"):
            work.wait(0.1)
        assert not work.done()
        sub.barrier()
        result = float(work.wait()[0])
    else:
        time.sleep(0.3)
        sub.barrier()
        if comm.rank == 1:
            sub.send(np.full(1, 5.0), 0)
    sub.barrier()
    sub.close()
    return result


def test_a_timeout_of_wait_does_not_end_the_operation(four):
    assert four.run(soft)[0] == 5.0


def nothing_reaches_the_parent(comm):
    return float(comm.all_reduce(np.ones(1))[0])


def test_the_parent_communicator_still_works(world):
    assert world.run(nothing_reaches_the_parent) == [world.size] * world.size


def never_joined(comm, timeout):
    """A communicator split off while one of its ranks never calls split."""
    comm.timeout = timeout
    time.sleep(0 if comm.rank else timeout + 0.4)
    return comm.split(0)


def test_split_on_a_communicator_with_an_absent_rank():
    with World(3) as world:
        outcomes = world.outcomes(never_joined, TIMEOUT)
        assert all(isinstance(o, DeadlineExceeded) for o in outcomes)
        assert "waiting for rank 0 on" in str(outcomes[1]) and "waiting for rank 0 on" in str(outcomes[2])


def open_what_rank_0_makes(comm, what):
    """Rank 0 stops before it creates the shared memory that the others wait for."""
    if comm.rank == 0:
        Segment.create = lambda *args: os.kill(os.getpid(), signal.SIGSTOP)
    x = np.ones(8)
    calls = {
        "native library": lambda: comm.all_reduce(x, timeout=2.0),
        "ring": lambda: comm.sendrecv(x, 1 - comm.rank, x.copy(), 1 - comm.rank, timeout=2.0),
    }
    calls[what]()


def split_where_rank_0_stops(comm):
    comm.barrier()
    if comm.rank == 0:
        Segment.create = lambda *args: os.kill(os.getpid(), signal.SIGSTOP)
    comm.split(0, timeout=2.0)


def wait_until_stopped(pid):
    stat = Path(f"/proc/{pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


@pytest.mark.parametrize("what", ["native library", "ring"])
def test_a_rank_that_stops_before_it_creates_shared_memory(what):
    with World(3 if what == "native library" else 2) as world:
        world.submit(0, open_what_rank_0_makes, what)
        wait_until_stopped(world.pids()[0])
        others = range(1, world.size)
        for rank in others:
            world.submit(rank, open_what_rank_0_makes, what)
        outcomes = world.collect(*others)
        world.kill(0, signal.SIGCONT)
        world.collect(0)
    for error in outcomes:
        assert isinstance(error, DeadlineExceeded) and error.peer == 0, error
        assert "waiting for rank 0 on" in str(error) and "was not set" not in str(error), error


def test_a_rank_that_stops_inside_a_split():
    with World(2) as world:
        world.submit(0, split_where_rank_0_stops)
        world.submit(1, split_where_rank_0_stops)
        (error,) = world.collect(1)
        world.kill(0, signal.SIGCONT)
        world.collect(0)
    assert isinstance(error, DeadlineExceeded) and error.peer == 0, error
    assert "rank 0 on" in str(error) and "its last operation" in str(error) and "was not set" not in str(error), error


def around(comm, how):
    """Every rank waits for a message of the one before it, and rank 0 is stopped; the last rank's deadline passes first."""
    x, before, after = np.zeros(1000), (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    comm.sendrecv(x, after, x.copy(), before)
    comm.timeout = 2.0 if comm.rank == comm.size - 1 else 30.0
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "blocking":
        comm.recv(x, before)
    else:
        work = comm.irecv(x, before)
        comm.isend(x, after, channel=1).wait()
        work.wait()
    comm.send(x, after)


@pytest.mark.parametrize("how", ["blocking", "asynchronous"])
@pytest.mark.parametrize("hosts", [None, "a:2,b,c", "a:3,b"])
def test_a_chain_of_ranks_that_wait_leads_to_the_one_that_is_stopped(how, hosts):
    """Also where what a rank did last is not what it waits for."""
    with World(4, hosts=hosts, timeout=100) as world:
        for rank in range(4):
            world.submit(rank, around, how)
        outcomes = world.collect(1, 2, 3)
        world.kill(0, signal.SIGCONT)
        world.collect(0)
    for error in outcomes:
        assert isinstance(error, DeadlineExceeded) and error.peer == 0, outcomes
    text = str(outcomes[2])
    elsewhere = "rank 0: it does not answer, but its host a does: it is stopped, or very slow"
    assert "rank 0: its process is stopped" in text or elsewhere in text


def subgroup_without_store(comm, first):
    """Rank 0, of pid `first`, serves the store and stops; then the others create a subgroup."""
    comm.barrier()
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    wait_until_stopped(first)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded) as raised:
        comm.subgroup([1, 2], "without store", timeout=1.0)
    return str(raised.value), time.monotonic() - started


def test_a_subgroup_where_the_store_is_stopped():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        store = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with World(3, env={"XVCOMM_STORE": store}, timeout=100) as world:
        for rank in range(3):
            world.submit(rank, subgroup_without_store, world.pids()[0])
        outcomes = world.collect(1, 2)
        world.kill(0, signal.SIGCONT)
        world.collect(0)
    for text, seconds in outcomes:
        assert "did not answer" in text and "rank 0" in text and seconds < 15, outcomes
