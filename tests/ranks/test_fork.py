"""A forked child has no part in its parent's job: its calls raise ClosedError, and its end is noticed by nobody."""

import os
import signal
import subprocess
import sys
import traceback

import numpy as np
import pytest

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
    with World(islands=request.param, timeout=20) as world:
        yield world


def warm(comm):
    """Call everything that the child will, so that compiled paths are there."""
    for _ in range(3):
        comm.all_reduce(np.ones(4))
        if comm.rank == 0:
            comm.send(np.ones(4), 1)
            comm.recv(np.ones(4), 1)
        else:
            comm.recv(np.ones(4), 0)
            comm.send(np.ones(4), 0)


def goes_on(comm):
    """The parents' job is whole."""
    warm(comm)
    x = np.full(5, comm.rank + 1.0)
    assert (comm.all_reduce(x) == 3).all()


def child_of(function):
    """Run a function in a forked child; the exit code, 3 if it raised."""
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


def test_every_call_is_refused(world):
    world.run(refused)


def leaves_block(comm):
    warm(comm)

    def leave():
        with comm:
            pass

    assert child_of(leave) == 0
    goes_on(comm)


def test_a_child_that_leaves_the_block(world):
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
def test_how_a_child_ends(ending, tmp_path):
    """Also by the interpreter's own end, which runs what is registered for it, and as a daemon."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(ending=ending))
    command = [sys.executable, "-m", "xvcomm", "run", "-n", "2", "--islands", "a,b", "--", sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
