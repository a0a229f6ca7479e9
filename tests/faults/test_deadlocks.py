"""Deadlocks that users have made: each has a verdict that names who holds the job up, and on which line."""

import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from xvcomm.errors import DeadlineExceeded, MismatchError, PeerLost, XvcommError
from xvcomm.testing.arrays import arrays
from xvcomm.testing.cases import SMALL_GPU_RINGS
from xvcomm.testing.world import World

TIMEOUT = 1.0
AMPLE = 20.0  # seconds in which all ranks that wait have their error
LARGE = 1 << 21  # elements: more than a ring holds


@pytest.fixture(scope="module")
def one_host():
    with World(4, timeout=100) as world:
        yield world


@pytest.fixture(scope="module")
def two_hosts():
    with World(4, hosts="a,b,a,b", timeout=100) as world:
        yield world


class Job:
    """What the ranks of a case have: communicators on which every rank has completed an operation, and arrays.

    A rank that waits for nothing more, or in vain, has a file of its number in a folder: others keep it waiting until then.
    """

    def __init__(self, comm, folder):
        self.world, self.rank, self.folder = comm, comm.rank, folder
        self.a, self.b, self.c = (comm.split(0) for _ in range(3))
        self.arrays = arrays(comm)
        self.x, self.large = self.arrays.put(np.ones(16)), self.arrays.put(np.zeros(LARGE))
        self.over = comm.split(0)
        for each in (self.a, self.b, self.c):
            each.barrier()
            each.timeout = TIMEOUT
        self.next, self.previous = (comm.rank + 1) % 4, (comm.rank - 1) % 4

    def compute(self, seconds=AMPLE, pause=0.01):
        self.waits_no_more()
        until = time.monotonic() + seconds
        while time.monotonic() < until and len(os.listdir(self.folder)) < self.world.size:
            if pause:
                time.sleep(pause)

    def await_others(self):
        until = time.monotonic() + AMPLE
        while time.monotonic() < until and len(os.listdir(self.folder)) < self.world.size:
            time.sleep(0.05)

    def afterwards(self, function, *args):
        """Call a function in a thread when no rank waits any more."""

        def await_all():
            self.await_others()
            function(*args)

        self.waits_no_more()
        threading.Thread(target=await_all).start()

    def waits_no_more(self):
        Path(self.folder, str(self.rank)).touch()

    def close(self):
        for each in (self.a, self.b, self.c, self.over):
            each.close()


def call_often(comm):
    """More operations than flight recorders tell of."""
    for _ in range(100):
        comm.barrier()


def never_called(job):
    if job.rank == 2:
        job.compute(pause=0)  # without a system call that a signal could end
    else:
        job.a.all_reduce(job.x)


def never_called_in_a_new_communicator(job):
    """All have called many operations of another one before."""
    call_often(job.over)
    with job.over.split(0) as new:
        if job.rank == 2:
            job.compute()
        else:
            new.barrier(timeout=TIMEOUT)


def never_called_after_many_of_another_communicator(job):
    """Its flight recorder tells nothing more of the one that the others wait in."""
    with job.over.split(job.rank) as own:
        if job.rank == 2:
            call_often(own)
            job.compute()
        else:
            job.a.all_reduce(job.x)


def two_never_called(job):
    if job.rank in (1, 3):
        job.compute()
    else:
        job.a.all_gather(job.x)


def blocked_in_a_system_call(job):
    if job.rank == 1:
        reader, writer = os.pipe()
        job.afterwards(os.write, writer, b"x")
        os.read(reader, 1)
        os.close(reader)
        os.close(writer)
    else:
        job.a.barrier()


def holds_the_interpreter_lock(job):
    if job.rank == 3:
        libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        # Waits in vain, with the interpreter's lock, and goes on after signals.
        libc.pthread_mutex_timedlock(mutex, (ctypes.c_long * 2)(int(time.time() + 4 * TIMEOUT), 0))
    else:
        job.a.all_reduce(job.x)


def waits_for_a_lock(job):
    if job.rank == 0:
        lock = threading.Lock()
        lock.acquire()
        job.afterwards(lock.release)
        lock.acquire()
    else:
        job.a.broadcast(job.x, 1)


def stopped(job):
    if job.rank == 1:
        job.waits_no_more()
        others = f"[ -e {job.folder}/0 ] && [ -e {job.folder}/2 ] && [ -e {job.folder}/3 ]"
        with subprocess.Popen(["sh", "-c", f"until {others}; do sleep 0.1; done; kill -CONT {os.getpid()}"]):
            os.kill(os.getpid(), signal.SIGSTOP)
    else:
        job.a.all_reduce(job.x)


def in_a_receive_instead(job):
    if job.rank == 2:
        job.a.recv(job.x, 0)
    else:
        job.a.all_reduce(job.x)


def in_a_receive_of_another_communicator(job):
    if job.rank == 2:
        job.b.recv(job.x, 0)
    else:
        job.a.all_reduce(job.x)


def communicators_swapped(job):
    first, second = (job.a, job.b) if job.rank < 2 else (job.b, job.a)
    first.all_reduce(job.x)
    second.all_reduce(job.x)


def three_communicators_in_a_circle(job):
    order = [(job.a, job.b), (job.b, job.c), (job.c, job.a), (job.a, job.b)][job.rank]
    for each in order:
        each.barrier()


def collective_of_the_wrong_communicator(job):
    job.a.timeout = job.b.timeout = 2 * TIMEOUT
    (job.b if job.rank == 3 else job.a).all_reduce(job.x, async_op=True).wait()


def everyone_receives(job):
    job.a.recv(job.x, job.next)


def everyone_sends(job):
    job.a.send(job.large, job.next)


def two_send_to_each_other(job):
    if job.rank < 2:
        job.a.send(job.large, 1 - job.rank)


def receives_from_the_wrong_rank(job):
    if job.rank == 0:
        job.a.recv(job.x, 2)
    elif job.rank == 1:
        job.a.send(job.x, 0)
    else:
        job.compute()


def sends_to_the_wrong_rank(job):
    if job.rank == 0:
        job.a.send(job.large, 2)
    elif job.rank == 1:
        job.a.recv(job.large, 0)
    else:
        job.compute()


def chain(job):
    if job.rank < 3:
        job.a.recv(job.x, job.next)
    else:
        job.compute()


def chain_over_communicators(job):
    if job.rank < 3:
        (job.a, job.b, job.c)[job.rank].recv(job.x, job.next)
    else:
        job.compute()


def one_receive_too_many(job):
    if job.rank == 0:
        job.a.send(job.x, 1)
        job.compute()
    elif job.rank == 1:
        job.a.recv(job.x, 0)
        job.a.recv(job.x, 0)


def asynchronous_receive_and_a_loop(job):
    if job.rank == 1:
        work = job.a.irecv(job.x, 0)
        job.compute()
        work.wait()
    elif job.rank == 0:
        job.a.recv(job.x, 1)


def asynchronous_receive_before_many_other_operations(job):
    """Rank 1 waits in what it has called long ago, with more patience than rank 0."""
    with job.over.split(job.rank) as own:
        if job.rank == 1:
            job.a.timeout = AMPLE
            work = job.a.irecv(job.x, 2)
            call_often(own)
            work.wait()
        elif job.rank == 0:
            job.a.recv(job.x, 1)
        else:
            job.compute()


def asynchronous_sum_and_a_loop(job):
    if job.rank == 1:
        job.a.all_reduce(job.x, async_op=True)
        job.compute()
    else:
        job.a.all_reduce(job.x)
        job.a.barrier()


def uneven_loop(job):
    for _ in range(2 if job.rank == 3 else 3):
        job.a.all_reduce(job.x)
    if job.rank == 3:
        job.compute()


def uneven_loop_and_end(job):
    for _ in range(2 if job.rank == 3 else 3):
        job.a.all_reduce(job.x)


def collective_in_one_branch(job):
    if job.rank == 0:
        job.a.broadcast(job.x, 0)
    job.a.barrier()


def roots_differ(job):
    job.a.broadcast(job.x, 0 if job.rank < 2 else 1)


def sizes_differ(job):
    job.a.all_reduce(np.ones(8 if job.rank == 1 else 16))


def a_subgroup_of_one_side(job):
    """Rank 3 makes a communicator that the others do not make."""
    if job.rank == 3:
        job.a.split(0)
    else:
        job.compute()


def receives_from_any(job):
    if job.rank == 0:
        job.a.probe()
    else:
        job.compute()


def stages_wait_for_each_other(job):
    """A pipeline: the first stage wants its gradient before it has sent the second half."""
    if job.rank == 0:
        job.a.send(job.x, 1)
        job.a.recv(job.x, 1)
    elif job.rank == 1:
        job.a.recv(job.x, 0)
        job.a.recv(job.x, 0)
    else:
        job.compute(0.1)


OUTSIDE = "rank {0} is outside xvcomm"
BUSY = OUTSIDE + r" in .*test_deadlocks\.py:\d+"
CASES = {
    never_called: r"Rank 2 never called all_reduce #1 .* ranks 0, 1 and 3 are in since .*test_deadlocks\.py:\d+.*: "
    + r"rank 2 is outside xvcomm in compute",
    never_called_in_a_new_communicator: r"Rank 2 never called barrier #0 .*: " + BUSY.format(2),
    never_called_after_many_of_another_communicator: r"Rank 2 never called all_reduce #1 .* ranks 0, 1 and 3 are in .*: "
    + OUTSIDE.format(2),
    two_never_called: r"Ranks 1 and 3 never called all_gather #1 .* ranks 0 and 2 are in",
    blocked_in_a_system_call: r"Rank 1 never called barrier #1 .*in blocked_in_a_system_call",
    holds_the_interpreter_lock: r"Rank 3 never called all_reduce #1 .*in holds_the_interpreter_lock",
    waits_for_a_lock: r"Rank 0 never called broadcast #1 .*in waits_for_a_lock",
    stopped: r"Rank 1 never called all_reduce #1 .*: rank 1 (is stopped|does not answer)",
    in_a_receive_instead: r"Rank 2 never called all_reduce #1 .* ranks 0, 1 and 3 are in .*: rank 2 is in recv from rank 0 .*"
    + r"test_deadlocks\.py:\d+, and waits for rank 0",
    in_a_receive_of_another_communicator: r"Rank 2 never called all_reduce #1 .*: rank 2 is in recv from rank 0 .* and waits "
    + "for rank 0",
    communicators_swapped: r"Ranks \d and \d call collectives of several communicators in different orders\. Rank",
    three_communicators_in_a_circle: r"Ranks \d.* call collectives of several communicators in different orders\. Rank",
    collective_of_the_wrong_communicator: r"Ranks \d and 3 call collectives of several communicators in different orders\. .*"
    + r"[Rr]ank 3 waits in all_reduce #1 .*test_deadlocks\.py:\d+; run by the host's worker thread\), which",
    everyone_receives: r"Ranks 0-3 wait in a cycle\. Rank .*which rank \d does not send",
    everyone_sends: r"Ranks 0-3 wait in a cycle\. Rank .*which rank \d does not receive",
    two_send_to_each_other: r"Ranks 0 and 1 wait for each other\. Rank",
    receives_from_the_wrong_rank: r"Rank 2 does not send in the recv from rank 2 .* rank 0 is in .*: " + BUSY.format(2),
    sends_to_the_wrong_rank: r"Rank 2 does not receive in the send to rank 2 .* rank 0 is in .*: " + OUTSIDE.format(2),
    chain: r"Rank 3 does not send in the recv from rank 3 .* rank 2 is in .*: " + BUSY.format(3),
    chain_over_communicators: r"Rank 3 does not send in the recv from rank 3 .* rank 2 is in .*: " + BUSY.format(3),
    one_receive_too_many: r"Rank 0 does not send in the recv from rank 0 .* rank 1 is in .*: " + BUSY.format(0),
    asynchronous_receive_and_a_loop: r"Rank 1 does not send in the recv from rank 1 .* rank 0 is in .*: " + BUSY.format(1),
    asynchronous_receive_before_many_other_operations: r"Rank 2 does not send in the recv from rank 2 .* rank 1 is in .*: "
    + OUTSIDE.format(2),
    asynchronous_sum_and_a_loop: r"Rank 1 never called barrier #2 .*: " + BUSY.format(1),
    uneven_loop: r"Rank 3 never called all_reduce #3 .* ranks 0-2 are in .*: " + BUSY.format(3),
    uneven_loop_and_end: r"rank 3 .*left",
    collective_in_one_branch: r"rank 0 on \w+ called broadcast.*called barrier|called barrier.*rank 0 on \w+ called broadcast",
    roots_differ: r"called broadcast of 16 x float64 with root [01].*called broadcast of 16 x float64 with root [01]",
    sizes_differ: r"rank 1 on \w+ called all_reduce\(sum\) of 8 x float64|called all_reduce\(sum\) of 8 x float64.*rank 1",
    a_subgroup_of_one_side: r"Ranks 0-2 never called all_gather #1 .* rank 3 is in .*: " + OUTSIDE.format(0),
    receives_from_any: r"Ranks 1-3 do not send in the probe with any rank",
    stages_wait_for_each_other: r"Ranks 0 and 1 wait for each other\. Rank",
}  # fmt: skip
ON_ONE_HOST = (
    never_called, never_called_in_a_new_communicator, never_called_after_many_of_another_communicator,
    asynchronous_receive_before_many_other_operations, holds_the_interpreter_lock, stopped, in_a_receive_instead,
    communicators_swapped, everyone_sends, chain_over_communicators, uneven_loop_and_end, sizes_differ,
)  # fmt: skip
ON_GPUS = (never_called, communicators_swapped, in_a_receive_instead, everyone_receives, uneven_loop, roots_differ)
DIFFER = (collective_in_one_branch, roots_differ, sizes_differ)
SIMPLE_ERRORS = {uneven_loop_and_end: PeerLost, **dict.fromkeys(DIFFER, MismatchError)}


def run(comm, case, folder, on_gpus=False):
    """The error of a rank in a case, as its type's name and text; None if it had none."""
    job = Job(comm, folder)
    try:
        globals()[case](job)
        if on_gpus:  # where operations are only enqueued
            job.arrays.get(job.x)
            for each in (job.a, job.b):
                each.check()
        found = None
    except XvcommError as error:
        found = type(error).__name__, str(error)
    job.waits_no_more()
    if case == "uneven_loop_and_end":
        job.a.close()
    job.await_others()  # a rank that goes on is no longer in the operation that others are to be told of
    job.over.barrier(timeout=30)
    job.close()
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_verdict(two_hosts, case, tmp_path):
    check(two_hosts, case, tmp_path)


@pytest.mark.parametrize("case", ON_ONE_HOST, ids=lambda case: case.__name__)
def test_the_verdict_on_one_host(one_host, case, tmp_path):
    check(one_host, case, tmp_path)


@pytest.fixture(scope="module", params=[{}, {"islands": "a:2,b:2"}], ids=["one island", "two islands"])
def gpus(request, rocm_path):
    """Ranks whose collectives go by RCCL; libraries that simulate AMD's on host memory stand in for it and for the GPUs."""
    pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install hip-python")
    environment = {"ROCM_PATH": str(rocm_path), "HIPHOST_DEVICES": "4", **SMALL_GPU_RINGS}
    with World(4, devices="rocm:4", env=environment, timeout=30, **request.param) as world:
        yield world


@pytest.mark.parametrize("case", ON_GPUS, ids=lambda case: case.__name__)
def test_the_verdict_on_gpus(gpus, case, tmp_path):
    check(gpus, case, tmp_path, on_gpus=True)


def check(world, case, folder, on_gpus=False):
    found = [error for error in world.run(run, case.__name__, str(folder), on_gpus) if error is not None]
    assert found
    for kind, text in found:
        assert kind == SIMPLE_ERRORS.get(case, DeadlineExceeded).__name__, text
        assert re.search(CASES[case], text), text
