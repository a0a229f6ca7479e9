"""A rank runs out of file descriptors: it raises ResourceError with the remedy, and the others learn which rank failed."""

import gc
import os
import resource
import socket
import time

import numpy as np
import pytest

import xvcomm
from xvcomm.errors import Aborted, PeerLost, ResourceError
from xvcomm.testing.world import World


def few(comm, env, victim, spare):
    """Join another job and use it, while the victim may open only `spare` more files."""
    if comm.rank != victim:
        return use(env)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()
    before = os.listdir("/proc/self/fd")
    filled = [os.dup(0)]
    while filled[-1] < max(map(int, before)):
        filled.append(os.dup(0))  # no number below is free
    resource.setrlimit(resource.RLIMIT_NOFILE, (filled[-1] + 1 + spare, hard))
    try:
        outcome = use(env)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in filled:
            os.close(fd)
    until = time.monotonic() + 5  # threads close theirs soon
    while len(left := os.listdir("/proc/self/fd")) > len(before) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert len(left) <= len(before), [os.readlink(f"/proc/self/fd/{fd}") for fd in set(left) - set(before)]
    return outcome


def use(env):
    """Messages, collectives and groups of another job; returns the error."""
    try:
        with xvcomm.init(env=env) as comm:
            comm.all_reduce(np.ones(10))
            after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            comm.sendrecv(np.ones(3), after, np.zeros(3), before)
            comm.irecv(np.ones(3), before, channel=3)
            comm.isend(np.ones(3), after, channel=3).wait()
            with comm.split(0) as part:
                part.barrier()
            comm.all_gather_object([1])
    except OSError as error:
        return type(error)(str(error))
    except xvcomm.XvcommError as error:
        return type(error)(str(error), peer=error.peer)
    return "all done"


def place(kind, folder):
    if kind == "file":
        return f"file://{folder}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(scope="module")
def processes():
    with World(3, timeout=100) as world:
        world.run(warm)
        yield world


def warm(comm):
    """Load what is loaded once per process, and open what stays open."""
    store = f"tcp://127.0.0.1:{comm.broadcast_object(place('tcp', None).rpartition(':')[2])}"
    assert use(environment(comm.rank, store)) == "all done"


def environment(rank, store):
    """Variables of a job that uses all three ways to move data: two ranks of one island, one of another."""
    return {
        "XVCOMM_RANK": str(rank), "XVCOMM_SIZE": "3", "XVCOMM_STORE": store, "XVCOMM_SECRET": "of this test",
        "XVCOMM_ISLAND": "aab"[rank], "XVCOMM_TIMEOUT": "100",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "victim", "spares"),
    [("tcp", 1, range(1, 20)), ("tcp", 0, range(9, 24)), ("file", 2, range(3, 16))],
    ids=["client", "server", "file"],
)
def test_out_of_descriptors(processes, tmp_path, kind, victim, spares):
    done = 0
    for spare in spares:
        store = place(kind, tmp_path / str(spare))
        for rank in range(3):
            processes.submit(rank, few, environment(rank, store), victim, spare)
        for rank, outcome in enumerate(processes.collect()):
            if outcome == "all done":
                done += 1
            elif rank == victim:
                assert isinstance(outcome, ResourceError) and "ulimit -n" in str(outcome), (spare, outcome)
            else:
                assert isinstance(outcome, Aborted | PeerLost), (spare, rank, outcome)
                assert f"rank {victim} " in str(outcome), (spare, rank, outcome)
    assert done < 3 * len(spares)
