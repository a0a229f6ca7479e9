"""Ctrl-C is delivered at once wherever a rank waits, reported to other ranks, and ends a job within seconds."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from xvcomm.errors import Aborted
from xvcomm.testing.world import World

SOON = 60.0
AT_ONCE = 30.0
"""Seconds; 20 ms are usual on an idle machine."""


def interrupted(comm, kind):
    """Wait indefinitely; returns the time of the interrupt, on a clock shared by all processes."""
    x = np.zeros(1 << 21, np.uint8)
    peer = (comm.rank + 1) % comm.size
    calls = {
        "all_reduce": lambda: comm.all_reduce(x),
        "recv": lambda: comm.recv(x, peer),
        "send": lambda: comm.send(x, peer),
        "group": lambda: group(comm, x, peer),
        "work": lambda: comm.irecv(x, peer).wait(),
        "asynchronous": lambda: comm.all_reduce(x, async_op=True).wait(),
        "split": lambda: comm.split(0),
    }
    try:
        calls[kind]()
    except KeyboardInterrupt:
        return time.monotonic()
    return None


def group(comm, x, peer):
    with comm.group():
        comm.send(x, peer)
        comm.recv(x.copy(), peer)


def sleep(comm):
    try:
        time.sleep(300)
    except KeyboardInterrupt:
        return time.monotonic()


def barrier(comm):
    comm.barrier()


NATIVE = ["all_reduce", "recv", "send", "group", "work", "asynchronous", "split"]
BORDER = ["all_reduce", "asynchronous", "split"]


@pytest.mark.parametrize(("topology", "kind"), [("a:2", k) for k in NATIVE] + [("a,b", k) for k in BORDER])
def test_an_interrupt_is_delivered_at_once(topology, kind):
    """Rank 1 sleeps meanwhile, so that only the interrupt can end the wait."""
    with World(islands=topology) as world:
        world.run(barrier)
        world.submit(0, interrupted, kind)
        world.submit(1, sleep)
        time.sleep(0.2)
        sent = time.monotonic()
        world.kill(0, signal.SIGINT)
        world.kill(1, signal.SIGINT)
        outcomes = world.collect()
        assert outcomes[0] is not None and outcomes[0] - sent < AT_ONCE
        if kind not in ("work", "asynchronous"):
            # What waited is gone with the interrupt, and the communicator with it: the others are told why.
            again = world.outcomes(barrier)
            assert all(isinstance(o, Aborted) and o.peer == 0 for o in again), again
            assert "KeyboardInterrupt" in str(again[1])


def test_other_ranks_raise_aborted():
    with World(3) as world:
        world.run(barrier)
        for rank in range(3):
            world.submit(rank, interrupted, "recv")
        time.sleep(0.2)
        world.kill(1, signal.SIGINT)
        outcomes = world.collect()
        assert isinstance(outcomes[1], float)
        for rank in (0, 2):
            assert isinstance(outcomes[rank], Aborted) and outcomes[rank].peer == 1
            assert "rank 1 on" in str(outcomes[rank]) and "KeyboardInterrupt" in str(outcomes[rank])


def test_all_are_interrupted():
    """As by a terminal."""
    with World(4) as world:
        world.run(barrier)
        for rank in range(4):
            world.submit(rank, interrupted, "all_reduce" if rank < 3 else "recv")
        time.sleep(0.2)
        sent = time.monotonic()
        for rank in range(4):
            world.kill(rank, signal.SIGINT)
        for outcome in world.collect():
            assert isinstance(outcome, (float, Aborted))
        assert time.monotonic() - sent < SOON


SCRIPT = """
import os, sys
import numpy as np
import xvcomm
with xvcomm.init() as comm:
    x = np.ones(100_000)
    comm.all_reduce(x)
    with open(f"{sys.argv[1]}/ready.{comm.rank}", "w") as file:  # closed by its destructor, it might lose the interrupt
        file.write(str(os.getpid()))
    if sys.argv[2] == "busy":
        while True:
            comm.all_reduce(x)
    elif sys.argv[2] == "waiting":
        comm.recv(x, (comm.rank + 1) % comm.size)
    else:
        works = [comm.irecv(x, (comm.rank + 1) % comm.size), comm.all_reduce(x, async_op=True)]
        works[0].wait()
"""


@contextlib.contextmanager
def running(python, tmp_path, how):
    """A job under the launcher, in its own process group, and the pids of its ranks once they run."""
    script = tmp_path / "rank.py"
    script.write_text(SCRIPT)
    command = [python, "-m", "xvcomm", "run", "--islands", "a:2,b:1", "--", str(script), str(tmp_path), how]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XVCOMM_")}
    job = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
        # Tests that run in the background of a shell ignore interrupts, and what they start would, too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        until = time.monotonic() + 60
        while len(ready := list(tmp_path.glob("ready.*"))) < 3 or not all(p.read_text() for p in ready):
            assert time.monotonic() < until and job.poll() is None
            time.sleep(0.02)
        time.sleep(0.2)
        yield job, [int(path.read_text()) for path in ready]
    finally:
        job.terminate()
        job.wait()


@pytest.mark.parametrize("how", ["busy", "waiting", "asynchronous"])
def test_ctrl_c_ends_the_job(python, tmp_path, how):
    """A terminal signals the launcher's process group; the ranks have their own, so the launcher forwards the signal."""
    with running(python, tmp_path, how) as (job, pids):
        sent = time.monotonic()
        os.killpg(job.pid, signal.SIGINT)
        code = job.wait(timeout=100)
        assert time.monotonic() - sent < SOON
    assert code == 128 + signal.SIGINT
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_ctrl_c_for_one_rank_ends_the_job(python, tmp_path):
    with running(python, tmp_path, "busy") as (job, pids):
        sent = time.monotonic()
        os.kill(pids[0], signal.SIGINT)
        assert job.wait(timeout=100) != 0
        assert time.monotonic() - sent < SOON
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_killed_rank_ends_the_job(python, tmp_path):
    with running(python, tmp_path, "busy") as (job, pids):
        sent = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        assert job.wait(timeout=100) == 128 + signal.SIGKILL
        assert time.monotonic() - sent < SOON
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
