"""A forked child is not a member of its parent's job: its calls raise ClosedError, and its exit has no effect on others."""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from functools import partial

import numpy as np
import pytest

from xvcomm.adapters.mpi import Comm
from xvcomm.errors import ClosedError
from xvcomm.testing.world import World

CALLS = {
    "all_reduce": lambda comm: comm.all_reduce(np.ones(4)),
    "asynchronous": lambda comm: comm.all_reduce(np.ones(4), async_op=True),
    "barrier": lambda comm: comm.barrier(),
    "send": lambda comm: comm.send(np.ones(4), 1 - comm.rank),
    "recv": lambda comm: comm.recv(np.ones(4), 1 - comm.rank),
    "irecv": lambda comm: comm.irecv(np.ones(4), 1 - comm.rank),
    "split": lambda comm: comm.split(0),
    "subgroup": lambda comm: comm.subgroup([0, 1], "of a child"),
}


@pytest.fixture(params=["a:2", "a,b"])
def world(request):
    with World(islands=request.param, timeout=100) as world:
        yield world


def warm(comm):
    """Call all operations that the child will call, so that compiled paths exist."""
    for _ in range(3):
        comm.all_reduce(np.ones(4))
        if comm.rank == 0:
            comm.send(np.ones(4), 1)
            comm.recv(np.ones(4), 1)
        else:
            comm.recv(np.ones(4), 0)
            comm.send(np.ones(4), 0)


def goes_on(comm):
    """Check that the parents' job still works."""
    warm(comm)
    x = np.full(5, comm.rank + 1.0)
    assert (comm.all_reduce(x) == 3).all()


def child_of(function):
    """Run a function in a forked child; returns its exit code, 3 if it raised."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            function()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def refused(comm):
    warm(comm)

    def tried():
        signal.alarm(20)
        for name, call in CALLS.items():
            with pytest.raises(ClosedError, match="forked child"):
                call(comm)
                raise AssertionError(name)
        comm.close()

    assert child_of(tried) == 0
    goes_on(comm)


def test_every_call_raises_closed_error(world):
    world.run(refused)


def fork_during_operations(comm):
    """The parent's threads are in operations whose locks and Works the child inherits."""
    warm(comm)
    peer = 1 - comm.rank
    if comm.rank == 0:
        received, summed = np.empty(4), np.ones(4)
        works = [comm.irecv(received, peer), comm.all_reduce(summed, async_op=True)]
        threads = [
            threading.Thread(target=comm.recv, args=(np.empty(4), peer), kwargs={"channel": 1}),
            threading.Thread(target=works[1].wait),
        ]
        for thread in threads:
            thread.start()

        def tried():
            signal.alarm(20)
            for work in works:
                with pytest.raises(ClosedError, match="forked child"):
                    work.wait()
                assert work.done()
            for call in CALLS.values():
                with pytest.raises(ClosedError, match="forked child"):
                    call(comm)

        assert child_of(tried) == 0
        comm.send(np.ones(1), peer, channel=2)
        for work in works:
            work.wait(20)
        for thread in threads:
            thread.join(20)
        assert (received == 5).all() and (summed == 2).all()
    else:
        comm.recv(np.empty(1), peer, channel=2)
        comm.send(np.full(4, 5.0), peer)
        comm.send(np.ones(4), peer, channel=1)
        comm.all_reduce(np.ones(4))
    goes_on(comm)


def test_works_in_a_forked_child(world):
    world.run(fork_during_operations)


def inherits_locks(comm):
    """A thread of the parent is in a collective and holds its lock."""
    if comm.rank == 0:
        thread = threading.Thread(target=comm.all_reduce, args=(np.ones(3, np.int16),))
        thread.start()
        while not any("of 3 x int16" in record.describe() for record in comm.history()):
            time.sleep(0.001)

        def tried():
            signal.alarm(20)
            with pytest.raises(ClosedError, match="forked child"):
                comm.all_reduce(np.ones(4))

        assert child_of(tried) == 0
        comm.send(np.ones(1), 1)
        thread.join(20)
    else:
        comm.recv(np.empty(1), 0)
        comm.all_reduce(np.ones(3, np.int16))
    goes_on(comm)


def test_locks_in_a_forked_child(world):
    world.run(inherits_locks)


def inherits_requests(communicator):
    """The same with the MPI interface: threads of the parent are in a collective and in started operations."""
    comm = Comm(communicator)
    peer = 1 - comm.rank
    comm.Barrier()
    if comm.rank == 0:
        thread = threading.Thread(target=comm.Allreduce, args=(np.ones(3, np.int16), np.ones(3, np.int16)))
        thread.start()
        while not any("of 3 x int16" in record.describe() for record in communicator.history()):
            time.sleep(0.001)
        requests = [comm.Irecv(np.empty(4), peer), comm.Ibarrier()]

        def tried():
            signal.alarm(20)
            for request in requests:
                with pytest.raises(ClosedError, match="forked child"):
                    request.Wait()
            for call in (
                comm.Barrier,
                comm.Ibarrier().Wait,
                partial(comm.Send, np.ones(4), peer),
                partial(comm.Probe, peer),
            ):
                with pytest.raises(ClosedError, match="forked child"):
                    call()

        assert child_of(tried) == 0
        communicator.send(np.ones(1), peer, channel=31)
        for request in requests:
            request.Wait()
        thread.join(20)
    else:
        communicator.recv(np.empty(1), peer, channel=31)
        comm.Allreduce(np.ones(3, np.int16), np.ones(3, np.int16))
        comm.Ibarrier().Wait()
        comm.Send(np.ones(4), peer)
    goes_on(communicator)


def test_mpi_requests_in_a_forked_child(world):
    world.run(inherits_requests)


def leaves_block(comm):
    warm(comm)

    def leave():
        with comm:
            pass

    assert child_of(leave) == 0
    goes_on(comm)


def test_a_forked_child_that_leaves_the_with_block(world):
    world.run(leaves_block)


PROGRAM = """
import os, sys
import numpy as np
import xvcomm

with xvcomm.init() as comm:
    x = np.ones(3)
    comm.all_reduce(x)
    if comm.rank == 0:
        child = os.fork()
        if child == 0:
            {ending}
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for _ in range(100):
        x = np.full(3, comm.rank + 1.0)
        assert (comm.all_reduce(x) == 3).all()
    comm.barrier()
"""


@pytest.mark.parametrize(
    "ending", ["sys.exit(0)", "os._exit(0)", "os.execv('/bin/true', ['true'])", "os.fork() or os.setsid(); sys.exit(0)"]
)
def test_exit_of_a_forked_child(ending, tmp_path):
    """Including interpreter shutdown, which runs exit handlers, and daemon processes."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(ending=ending))
    command = [sys.executable, "-m", "xvcomm", "run", "-n", "2", "--islands", "a,b", "--", sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
