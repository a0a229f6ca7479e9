"""Errors during joining: every rank gets a clear error, mostly at once, and nothing is left behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import xvcomm
from xvcomm.errors import (
    Aborted,
    ArrayError,
    AuthenticationError,
    ConfigError,
    DeadlineExceeded,
    DTypeError,
    PeerLost,
    ResourceError,
    StoreError,
    XvcommError,
)
from xvcomm.memory.segment import Segment
from xvcomm.testing.world import World

SOON = 60.0
RING = 96 * 16384


@pytest.fixture(scope="module")
def processes():
    """Three processes for all tests of this file; each joins jobs with the environment that it is given."""
    with World(3) as world:
        yield world


def join(comm, env, use="barrier"):
    """Join another job than the process's own, and use it."""
    with xvcomm.init(env=env) as other:
        return globals()[use](other)


def barrier(comm):
    comm.barrier()
    return comm.size


def all_reduce(comm):
    return float(comm.all_reduce(np.ones(1))[0])


def send_ring(comm):
    x = np.zeros(1)
    if comm.rank == 0:
        comm.send(x, 1)
        comm.recv(x, 1)
    elif comm.rank == 1:
        time.sleep(0.2)
        comm.recv(x, 0)


def split(comm):
    comm.barrier()
    comm.split(0)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environments(port, count, **more):
    return [
        {
            "XVCOMM_RANK": str(rank), "XVCOMM_SIZE": str(count), "XVCOMM_STORE": f"tcp://127.0.0.1:{port}",
            "XVCOMM_SECRET": "of this test", "XVCOMM_TIMEOUT": "100", **more,
        }
        for rank in range(count)
    ]  # fmt: skip


def run(processes, envs, use="barrier"):
    """Result or error of each process, and the longest duration."""
    started = time.monotonic()
    for rank in range(processes.size):
        if rank < len(envs):
            processes.submit(rank, join, envs[rank], use)
        else:
            processes.submit(rank, idle)
    outcomes = processes.collect()
    return outcomes[: len(envs)], time.monotonic() - started


def idle(comm):
    pass


def test_joining_without_a_fault(processes):
    outcomes, _ = run(processes, environments(free_port(), 3))
    assert outcomes == [3, 3, 3]


def test_a_rank_that_never_comes(processes):
    envs = environments(free_port(), 3, XVCOMM_TIMEOUT="1.5")[:2]
    outcomes, seconds = run(processes, envs)
    for outcome in outcomes:
        assert isinstance(outcome, DeadlineExceeded) and "rank 2 of 3 did not join" in str(outcome)
    assert seconds < 1.5 + SOON


def test_rank_0_never_comes(processes):
    envs = environments(free_port(), 3, XVCOMM_TIMEOUT="1.5")[1:]
    outcomes, _ = run(processes, envs)
    assert all(isinstance(o, DeadlineExceeded) and "rank 0" in str(o) for o in outcomes), outcomes


def test_two_processes_with_the_same_rank(processes):
    envs = environments(free_port(), 3)
    envs[2]["XVCOMM_RANK"] = "1"
    outcomes, seconds = run(processes, envs)
    pids = processes.pids()
    for outcome in outcomes:
        assert isinstance(outcome, ConfigError) and "two processes are rank 1" in str(outcome)
        assert str(pids[1]) in str(outcome) and str(pids[2]) in str(outcome) and "XVCOMM_RANK" in str(outcome)
    assert seconds < SOON + 3  # rank 0 serves the store a little longer, for those that come late


@pytest.mark.parametrize("sizes", [(3, 2, 3), (2, 2, 3)])
def test_ranks_with_different_sizes(processes, sizes):
    envs = environments(free_port(), 3)
    for env, size in zip(envs, sizes, strict=True):
        env["XVCOMM_SIZE"] = str(size)
    outcomes, seconds = run(processes, envs)
    for outcome in outcomes:
        if outcome == 2 and sizes == (2, 2, 3):
            continue  # complete before the third one came
        assert isinstance(outcome, ConfigError) and "XVCOMM_SIZE" in str(outcome), outcomes
        assert "as the number of ranks" in str(outcome)
    assert seconds < SOON + 3


def test_a_wrong_secret(processes):
    envs = environments(free_port(), 2, XVCOMM_TIMEOUT="1.5")
    envs[1]["XVCOMM_SECRET"] = "another"
    outcomes, _ = run(processes, envs)
    assert isinstance(outcomes[1], AuthenticationError) and "XVCOMM_SECRET" in str(outcomes[1])
    assert isinstance(outcomes[0], XvcommError) and "rank 1" in str(outcomes[0])


def test_the_port_is_taken(processes):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        outcomes, _ = run(processes, environments(port, 2, XVCOMM_TIMEOUT="1.5"))
    assert isinstance(outcomes[0], StoreError) and f"port {port} of 127.0.0.1 is in use" in str(outcomes[0])
    assert isinstance(outcomes[1], (StoreError, DeadlineExceeded)), outcomes


def test_a_device_that_is_not_there(processes):
    """The rank reports it before it joins, so that the others need not wait."""
    envs = environments(free_port(), 3)
    envs[1]["XVCOMM_DEVICE"] = "cuda"
    outcomes, seconds = run(processes, envs)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], Aborted) and "rank 1 (process" in str(outcomes[rank])
        assert "cannot join: BackendUnavailable" in str(outcomes[rank])
    assert type(outcomes[1]).__name__ == "BackendUnavailable"
    assert seconds < SOON


def full(outcomes, folder):
    """Check that one rank raised ResourceError with the remedy, and the others Aborted with its text."""
    broken = [o for o in outcomes if isinstance(o, ResourceError)]
    assert broken, outcomes
    for outcome in outcomes:
        if outcome not in broken:
            assert isinstance(outcome, Aborted), outcome
        assert f"{folder} is full" in str(outcome) and "XVCOMM_RING_SLOTS" in str(outcome)


@pytest.mark.parametrize(
    ("kilobytes", "use"), [(4, "barrier"), (20, "barrier"), (100, "all_reduce"), (100, "send_ring"), (64, "split")]
)
def test_shared_memory_is_full(processes, small_folder, kilobytes, use):
    """When allocating the journal, the contract check, the library's arena, a ring, or another
    communicator's contract check.
    """
    folder = str(small_folder(kilobytes))
    stage = "4096" if use == "split" else "262144"
    env = {"XVCOMM_SHM_DIR": folder, "XVCOMM_TRACE_RECORDS": "16", "XVCOMM_STAGE_BYTES": stage}
    outcomes, seconds = run(processes, environments(free_port(), 2, **env), use)
    full(outcomes, folder)
    assert seconds < SOON


def exchange_with_all(comm):
    """Rings of every pair for messages, on two channels, and across the border for collectives."""
    mine = np.arange(1 << 17) + comm.rank
    for channel in (0, 1):
        for shift in range(1, comm.size):
            source, theirs = (comm.rank - shift) % comm.size, np.zeros_like(mine)
            comm.sendrecv(mine, (comm.rank + shift) % comm.size, theirs, source, channel=channel)
            assert np.array_equal(theirs, mine - comm.rank + source)
    assert np.array_equal(comm.all_gather(mine[:100]).reshape(comm.size, -1)[:, 0], np.arange(comm.size))
    assert comm.all_reduce(np.ones(1 << 16))[-1] == comm.size


def test_rings_are_smaller_if_shared_memory_is_small(small_folder):
    """In full size the rings of messages alone took 25 MiB."""
    env = {"XVCOMM_SHM_DIR": str(small_folder(5 << 10)), "XVCOMM_TRACE_RECORDS": "16", "XVCOMM_STAGE_BYTES": "4096"}
    with World(4, "a:2,b:2", env={**env, "XVCOMM_PROCESS_MEMORY": "0"}) as world:
        world.run(exchange_with_all)


def test_no_such_folder_for_shared_memory(processes):
    envs = environments(free_port(), 2)
    envs[1]["XVCOMM_SHM_DIR"] = "/no/such/folder"
    outcomes, seconds = run(processes, envs)
    assert isinstance(outcomes[1], ConfigError) and "XVCOMM_SHM_DIR='/no/such/folder'" in str(outcomes[1])
    assert isinstance(outcomes[0], Aborted) and "/no/such/folder" in str(outcomes[0])
    assert seconds < SOON


def test_a_read_only_folder_for_shared_memory():
    """In a separate mount namespace, as in a container."""
    code = "import xvcomm; xvcomm.init()"
    script = 'mount -t tmpfs -o ro tmpfs /dev/shm || exit 77; exec "$@"'
    env = {name: value for name, value in os.environ.items() if not name.startswith("XVCOMM_")}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-c", code],
        capture_output=True, text=True, env=env, timeout=60,
    )  # fmt: skip
    if "ResourceError" not in done.stderr and (done.returncode == 77 or "unshare" in done.stderr):
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    last = done.stderr.strip().splitlines()[-1]
    assert "ResourceError: /dev/shm, where ranks of one host share memory: it is mounted read-only" in last
    assert "mount a tmpfs there" in last and "or set XVCOMM_SHM_DIR to a folder" in last


def refused(comm):
    """Invalid arrays: no data is sent, and the communicator remains usable."""
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    calls = [
        (ArrayError, lambda: comm.all_reduce(np.zeros((4, 4)).T[1:])),
        (ArrayError, lambda: comm.send(np.zeros((4, 4))[:, 1], 1 - comm.rank)),
        (ArrayError, lambda: comm.recv(frozen, 1 - comm.rank)),
        (ArrayError, lambda: comm.all_reduce(frozen)),
        (DTypeError, lambda: comm.all_reduce(np.zeros(4, "U3"))),
        (DTypeError, lambda: comm.send(np.zeros(4, "datetime64[s]"), 1 - comm.rank)),
    ]
    messages = []
    for kind, call in calls:
        with pytest.raises(kind) as caught:
            call()
        messages.append(str(caught.value))
    assert comm.all_reduce(np.ones(1))[0] == 2
    return messages


def test_arrays_that_cannot_be_used(processes):
    outcomes, _ = run(processes, environments(free_port(), 2), "refused")
    strided, strided_too, read_only, read_only_too, unknown, unknown_too = outcomes[0]
    assert "contiguous" in strided and "contiguous" in strided_too
    assert "read-only" in read_only and "read-only" in read_only_too
    assert "dtype" in unknown and "dtype" in unknown_too


def open_rings(comm):
    """Rank 0, which serves the store, dies while the others open rings and create subgroups without it."""
    comm.barrier()
    if comm.rank == 0:
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    for turn in range(10_000):
        peer = 3 - comm.rank
        comm.sendrecv(np.zeros(1), peer, np.zeros(1), peer, channel=turn % 32)
        comm.subgroup([1, 2], "pair").close()


def use_a_subgroup(comm):
    """Rank 0, which serves the store, dies while the others open resources of a communicator without it."""
    comm.barrier()
    if comm.rank == 0:
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    pair = comm.subgroup([1, 2], "pair")
    for channel in range(32):
        pair.sendrecv(np.zeros(1), 1 - pair.rank, np.zeros(1), 1 - pair.rank, channel=channel)
    while True:
        pair.split(0).close()


@pytest.mark.parametrize("use", ["open_rings", "use_a_subgroup"])
def test_killed_while_others_use_the_store_that_it_serves(use):
    with World(3) as world:
        for rank, env in enumerate(environments(free_port(), 3)):
            world.submit(rank, join, env, use)
        outcomes = world.collect()
    for outcome in outcomes[1:]:
        assert isinstance(outcome, PeerLost), outcomes
        assert ("rank 0 of the job on" in str(outcome) and "served the job's store" in str(outcome)) or (
            outcome.peer == 0 and "rank 0 on" in str(outcome)
        ), outcomes


class Blind:
    """A watchdog that has not reported any death when the session ends."""

    def __init__(self, *args):
        pass

    def close(self):
        pass


def leave_while_rank_0_dies(comm, env, pid):
    """Rank 0 dies while joining its native library; the others close before the death is reported."""
    xvcomm.engine.session.session.Watchdog = Blind
    with xvcomm.init(env=env) as other:
        if other.rank == 0:
            create = Segment.create

            def create_and_die(*args):
                create(*args)
                os.kill(os.getpid(), signal.SIGKILL)

            Segment.create = create_and_die
            other.barrier()
        until = time.monotonic() + 30
        while time.monotonic() < until and running(pid):
            time.sleep(0.01)


def states(pid):
    """The states of a process's threads, as /proc names them."""
    while True:
        with contextlib.suppress(OSError):  # one has ended meanwhile
            return [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]


def running(pid):
    """Whether a process has a live thread, which keeps its locks."""
    return any(state not in "ZX" for state in states(pid))


def test_killed_while_joining_the_native_library():
    """The check after each test detects files left in /dev/shm."""
    with World(3) as world:
        for rank, env in enumerate(environments(free_port(), 3, XVCOMM_JOB=os.environ["XVCOMM_JOB"])):
            world.submit(rank, leave_while_rank_0_dies, env, world.pids()[0])
        outcomes = world.collect()
    assert isinstance(outcomes[0], EOFError) and outcomes[1:] == [None, None]


def open_what_is_swept(comm, what, first):
    """Rank 0, of pid `first`, has published names, and dies when the other rank opens them: their files go first."""
    if comm.rank == 0:
        Segment.named = stop_at_the_end
    else:
        attach = Segment.attach

        def attach_late(folder, name, *size):
            os.kill(first, signal.SIGKILL)
            until = time.monotonic() + 30
            while time.monotonic() < until and os.path.exists(f"{folder}/{name}"):
                time.sleep(0.0001)
            return attach(folder, name, *size)

        Segment.attach = attach_late
    if what == "native library":
        comm.all_reduce(np.ones(1))
    elif comm.rank == 0:
        comm.send(np.ones(1), 1)
    else:
        until = time.monotonic() + 30
        while time.monotonic() < until and set(states(first)) != {"T"}:
            time.sleep(0.01)
        comm.recv(np.ones(1), 0)


@contextlib.contextmanager
def stop_at_the_end(self):
    yield
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("what", ["native library", "ring"])
def test_killed_after_publishing_names_in_the_store(what):
    with World(2) as world:
        _, error = world.outcomes(open_what_is_swept, what, world.pids()[0])
    assert isinstance(error, PeerLost) and error.peer == 0 and "rank 0 on" in str(error), error


def split_where_rank_2_fails(comm):
    """Rank 1 reads the failure in the store, and rank 0 learns of it from rank 1."""
    comm.barrier()
    if comm.rank == 2:
        Segment.attach = no_room
    part = comm.split(0)
    if comm.rank == 1:
        part.all_reduce(np.ones(1))
    until = time.monotonic() + 30
    while time.monotonic() < until:
        part.check()
        time.sleep(0.01)


def no_room(*args):
    raise ResourceError("no room")


def test_a_failure_in_a_split_names_the_failed_rank_not_the_reporter():
    with World(3) as world:
        *others, failed = world.outcomes(split_where_rank_2_fails)
    assert isinstance(failed, ResourceError)
    for outcome in others:
        assert isinstance(outcome, Aborted) and outcome.peer == 2, outcome
        assert "rank 2 on" in str(outcome) and "ResourceError: no room" in str(outcome), outcome
        assert "rank 1 on" not in str(outcome).partition(":")[2], outcome
