"""abort() and close(): early, twice, with pending operations, from other threads, and at interpreter exit."""

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
from unittest import mock

import numpy as np
import pytest

import xvcomm
from xvcomm.engine.failures import Failures
from xvcomm.errors import Aborted, ClosedError, DeadlineExceeded, PeerLost, XvcommError
from xvcomm.memory.ring import Reason
from xvcomm.testing.inside import context
from xvcomm.testing.world import World

SOON = 60.0
TOPOLOGIES = ["a:2", "a:2,b:2", "a,b,c"]


@pytest.fixture(scope="module", params=TOPOLOGIES)
def world(request):
    with World(islands=request.param, timeout=100) as world:
        yield world


@pytest.fixture(scope="module")
def four():
    with World(4, timeout=100) as world:
        yield world


def raised(call):
    """What a call raises, or None."""
    try:
        call()
    except XvcommError as error:
        return error
    return None


def wait_in(comm, kind):
    """Call an operation that only ends with the communicator."""
    x = np.zeros(1 << 21, np.uint8)
    before = (comm.rank - 1) % comm.size
    calls = {
        "all_reduce": lambda: comm.all_reduce(x),
        "recv": lambda: comm.recv(x, before),
        "irecv": lambda: comm.irecv(x, before).wait(),
        "send": lambda: comm.send(x, before),
        "asynchronous": lambda: comm.all_reduce(x, async_op=True).wait(),
        "split": lambda: comm.split(0),
    }
    return raised(calls[kind])


def aborted(comm, kind):
    sub = comm.split(0)
    if comm.rank == comm.size - 1:
        time.sleep(0.2)
        sub.abort("the loss is not a number")
        error = raised(sub.barrier)
    else:
        error = wait_in(sub, kind)
    again = raised(lambda: sub.recv(np.zeros(1), (comm.rank + 1) % comm.size))
    sub.close()
    return [error, again]


@pytest.mark.parametrize("kind", ["all_reduce", "recv", "irecv", "send", "asynchronous", "split"])
def test_abort_reaches_all_with_its_reason(world, kind):
    started = time.monotonic()
    last = world.size - 1
    for rank, errors in enumerate(world.run(aborted, kind)):
        for error in errors:
            assert isinstance(error, Aborted) and error.rank == rank and error.peer == last
            assert f"rank {last} on " in str(error)
            assert "aborted the communicator: the loss is not a number; close it" in str(error)
    assert time.monotonic() - started < SOON


def abort_from_a_thread(comm):
    sub = comm.split(0)
    timer = threading.Timer(0.2, sub.abort, ("too slow",))
    if comm.rank == 0:
        timer.start()
    error = wait_in(sub, "recv")
    if comm.rank == 0:
        timer.join()
    sub.close()
    return [error]


def test_abort_from_another_thread(world):
    for errors in world.run(abort_from_a_thread):
        assert isinstance(errors[0], Aborted) and errors[0].peer == 0 and "too slow" in str(errors[0])


def aborted_and_left(comm):
    """The last rank aborts and closes at once: a rank that probes for its message gets the reason too."""
    comm.barrier()
    last = comm.size - 1
    if comm.rank == last:
        comm.abort("no more data")
        comm.close()
        return []

    def ask():
        until = time.monotonic() + 10
        while time.monotonic() < until:
            comm.iprobe(last)

    return [raised(ask), raised(lambda: comm.recv(np.zeros(1), last))]


def test_abort_by_a_rank_that_closes_at_once():
    with World(4) as world:
        for error in [error for errors in world.run(aborted_and_left) for error in errors]:
            assert isinstance(error, Aborted) and error.peer == 3 and "no more data" in str(error), error


def late_for_no_rank(comm):
    """Rank 1 reports a deadline that no rank caused, for instance of a store that does not answer."""
    sub = comm.split(0)
    sub.barrier()
    if comm.rank == 1:
        context(sub).lifecycle.abort(Reason.DEADLINE.word(1, 1), "the store did not answer")
    comm.barrier()
    error = raised(sub.barrier)
    sub.close()
    return [error]


def test_a_deadline_without_a_late_rank(four):
    for (error,) in four.run(late_for_no_rank):
        assert isinstance(error, DeadlineExceeded) and error.peer is None, error
        assert "the store did not answer" in str(error) and "waited for" not in str(error)


def use_after_close(comm):
    sub = comm.split(0)
    sub.barrier()
    sub.close()
    sub.close()
    x = np.zeros(4)
    peer = (comm.rank + 1) % comm.size
    calls = [
        lambda: sub.all_reduce(x), lambda: sub.send(x, peer), lambda: sub.irecv(x, peer),
        lambda: sub.all_reduce(x, async_op=True), lambda: sub.split(0), sub.barrier,
    ]  # fmt: skip
    sub.abort("nobody is listening")
    return [raised(call) for call in calls]


def test_use_after_close(world):
    for errors in world.run(use_after_close):
        assert all(isinstance(error, ClosedError) and "closed" in str(error) for error in errors), errors


def close_with_pending(comm, kind):
    """Close while Works are in progress; returns how each ended."""
    sub = comm.split(0)
    sub.all_reduce(np.ones(1))
    x = np.zeros(1 << 21, np.uint8)
    peer = (comm.rank + 1) % comm.size
    works = []
    if comm.rank == 0:
        start = {
            "irecv": lambda: sub.irecv(x, peer),
            "isend": lambda: sub.isend(x, peer),
            "collective": lambda: sub.all_reduce(x.copy(), async_op=True),
        }[kind]
        with contextlib.suppress(PeerLost):  # the others may be quicker to leave than this rank is to start
            for _ in range(4):
                works.append(start())
        time.sleep(0.05)
    started = time.monotonic()
    sub.close()
    seconds = time.monotonic() - started
    return [raised(lambda work=work: work.wait(5)) for work in works], seconds


@pytest.mark.parametrize("kind", ["irecv", "isend", "collective"])
def test_close_with_pending_works(world, kind):
    for errors, seconds in world.run(close_with_pending, kind):
        assert seconds < SOON
        for error in errors:
            # Another rank may have been quicker to leave than this one.
            assert isinstance(error, (ClosedError, PeerLost)), error


def test_close_with_pending_works_does_not_crash(world):
    """Repeatedly, to detect accesses to unmapped memory."""
    for _ in range(5):
        world.run(close_with_pending, "irecv")
        world.run(close_with_pending, "isend")


def close_under_a_thread(comm):
    """Close while another thread is in a blocking operation, in one of several communicators."""
    subs = [comm.split(0) for _ in range(3)]
    errors = []
    peer = (comm.rank + 1) % comm.size
    threads = [
        threading.Thread(target=lambda sub=sub: errors.append(raised(lambda: sub.recv(np.zeros(8), peer))))
        for sub in subs
    ] + [threading.Thread(target=lambda sub=sub: errors.append(raised(sub.barrier))) for sub in subs if comm.rank == 0]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    for sub in subs:
        sub.close()
    for thread in threads:
        thread.join(5)
    return errors, [thread.is_alive() for thread in threads]


@pytest.mark.parametrize("topology", ["a:2", "a:2,b:2"])
def test_close_under_other_threads(topology):
    with World(islands=topology) as world:
        for errors, alive in world.run(close_under_a_thread):
            assert not any(alive)
            assert errors and all(isinstance(error, (ClosedError, PeerLost)) for error in errors), errors


def leave_at_once(comm, name):
    """Close right after the last collective, while others may still be in it."""
    for _ in range(15):
        sub = comm.split(0)
        x = np.ones(sub.size * 50_000, np.float32)
        calls = {
            "all_reduce": lambda: sub.all_reduce(x),
            "small_all_reduce": lambda: sub.all_reduce(np.ones(1)),
            "broadcast": lambda: sub.broadcast(x),
            "reduce": lambda: sub.reduce(x),
            "all_gather": lambda: sub.all_gather(x[:1000]),
            "reduce_scatter": lambda: sub.reduce_scatter(x),
            "scatter": lambda: sub.scatter(x),
            "gather": lambda: sub.gather(x[:1000]),
            "all_to_all": lambda: sub.all_to_all(x),
            "barrier": sub.barrier,
            "send": lambda: sub.send(x[:1000], (sub.rank + 1) % sub.size),
        }
        calls[name]()
        if name == "send":
            sub.recv(np.zeros(1000, np.float32), (sub.rank - 1) % sub.size)
        sub.close()


@pytest.mark.parametrize(
    "name",
    [
        "all_reduce", "small_all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "scatter", "gather",
        "all_to_all", "barrier", "send",
    ],
)  # fmt: skip
def test_a_rank_may_close_after_its_last_operation(world, name):
    world.run(leave_at_once, name)


def leave_early(comm):
    """Rank 3 sends and closes: other ranks continue, receive its messages, and get PeerLost if they wait for more."""
    sub = comm.split(0)
    x = np.zeros(64)
    if comm.rank == 3:
        sub.send(np.full(64, 3.0), 2)
        sub.send(np.full(64, 4.0), 2, tag=1)
        sub.close()
        comm.barrier()
        return "left"
    time.sleep(0.3)
    if comm.rank == 2:
        got = [float(sub.recv(x, 3)[0]), float(sub.recv(x, 3, tag=1)[0])]
        comm.barrier()
        error = raised(lambda: sub.recv(x, 3))
        sub.close()
        return got, error
    for _ in range(50):
        if comm.rank == 0:
            sub.send(x, 1)
            sub.recv(x, 1)
        else:
            sub.recv(x, 0)
            sub.send(x, 0)
    comm.barrier()
    sub.close()
    return "undisturbed"


def test_a_rank_that_leaves_early(four):
    outcomes = four.run(leave_early)
    assert outcomes[:2] == ["undisturbed"] * 2 and outcomes[3] == "left"
    got, error = outcomes[2]
    assert got == [3.0, 4.0]
    assert isinstance(error, PeerLost) and error.peer == 3 and "rank 3 on" in str(error) and " left; " in str(error)


def leave_while(comm, kind):
    """Rank 0 closes while the others, which have never communicated with it, wait for it."""
    sub = comm.split(0)
    if comm.rank == 0:
        time.sleep(0.2)
        sub.close()
        return None
    x = np.zeros(1 << 21, np.uint8)
    calls = {
        "recv": lambda: sub.recv(x, 0), "send": lambda: sub.send(x, 0), "barrier": sub.barrier,
        "irecv": lambda: sub.irecv(x, 0).wait(), "late_barrier": sub.barrier,
    }  # fmt: skip
    time.sleep(0.5 if kind == "late_barrier" else 0)
    error = raised(calls[kind])
    sub.close()
    return [error]


@pytest.mark.parametrize("kind", ["recv", "send", "barrier", "irecv", "late_barrier"])
def test_waiting_for_a_rank_that_closes(world, kind):
    started = time.monotonic()
    for errors in world.run(leave_while, kind)[1:]:
        assert isinstance(errors[0], PeerLost) and errors[0].peer == 0 and " left; " in str(errors[0])
    assert time.monotonic() - started < SOON


def forget(comm):
    """Drop communicators without closing them, one of them with a Work in progress."""
    for _ in range(3):
        sub = comm.split(0)
        if comm.rank == 0:
            sub.isend(np.zeros(4), 1)
            sub.irecv(np.zeros(4), 1)
    del sub
    gc.collect()
    comm.barrier()


def test_communicators_that_are_not_closed():
    with World(2) as world:
        world.run(forget)


def fail(comm):
    comm.barrier()
    if comm.rank == 1:
        comm.close()  # what `with` does when the user's code raises
        raise KeyError("user")
    comm.barrier()


def test_a_rank_that_raises():
    with World(3) as world:
        outcomes = world.outcomes(fail)
        assert isinstance(outcomes[1], KeyError)
        for rank in (0, 2):
            assert (
                isinstance(outcomes[rank], PeerLost) and outcomes[rank].peer == 1 and " left; " in str(outcomes[rank])
            )


SCRIPTS = {
    "pending": (
        "if comm.rank == 0: works = [comm.irecv(np.zeros(4), 1), comm.isend(np.zeros(1 << 22), 1)]\ncomm.barrier()"
    ),
    "asynchronous": "comm.barrier()\nif comm.rank == 0: work = comm.all_reduce(np.ones(9), async_op=True)",
    "raising": "comm.barrier()\nif comm.rank == 1: raise KeyError('user')\ncomm.barrier()",
    "exiting": "comm.barrier()\nsub = comm.split(0)\nif comm.rank == 1: sys.exit(3)\nsub.recv(np.zeros(1), 1)",
    "thread": (
        "comm.barrier()\n"
        "threading.Thread(target=lambda: comm.recv(np.zeros(1), 1 - comm.rank), daemon=True).start()\ntime.sleep(0.1)"
    ),
}


def start_ranks(tmp_path, text, count=2):
    """Processes of a script that joins a job and does not close its communicator."""
    script = tmp_path / "rank.py"
    script.write_text("import sys, threading, time\nimport numpy as np\nimport xvcomm\ncomm = xvcomm.init()\n" + text)
    common = {k: v for k, v in os.environ.items() if not k.startswith("XVCOMM_")}
    common |= {"XVCOMM_STORE": f"file://{tmp_path}/store", "XVCOMM_SIZE": str(count), "XVCOMM_TIMEOUT": "100"}
    return [
        subprocess.Popen(
            [sys.executable, str(script)], env={**common, "XVCOMM_RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(count)
    ]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_interpreter_ends_without_close(tmp_path, name):
    """Quickly, without a crash or leftover files; the other rank gets PeerLost."""
    processes = start_ranks(tmp_path, SCRIPTS[name])
    errors = [process.communicate(timeout=100)[1] for process in processes]
    codes = [process.returncode for process in processes]
    expected = {"raising": (1, 1), "exiting": (1, 3)}.get(name, (0, 0))
    assert tuple(codes) == expected, errors
    if name in ("raising", "exiting"):
        assert "PeerLost" in errors[0] and "rank 1 on" in errors[0] and " left; " in errors[0]
    if name == "raising":
        assert "KeyError: 'user'" in errors[1]


def test_errors_are_what_the_documentation_says():
    """Each is an XvcommError and the documented built-in exception."""
    assert issubclass(xvcomm.PeerLost, ConnectionError) and issubclass(xvcomm.DeadlineExceeded, TimeoutError)
    assert all(issubclass(c, XvcommError) for c in (xvcomm.Aborted, xvcomm.ClosedError, xvcomm.MismatchError))


def closed_by_another_thread(comm):
    """An operation that a rank's departure ends, while this rank closes the communicator, says that."""
    group, real = comm.split(0), Failures._pass_on
    if comm.rank == 0:
        work = group.irecv(np.zeros(3), 1)

        def close_first(self, word):
            self._lifecycle.close()
            real(self, word)

        with mock.patch.object(Failures, "_pass_on", close_first):
            comm.barrier()
            with pytest.raises(ClosedError, match="under way"):
                work.wait()
    else:
        comm.barrier()
        group.close()


def test_closed_while_another_rank_leaves():
    with World(2) as world:
        world.run(closed_by_another_thread)
