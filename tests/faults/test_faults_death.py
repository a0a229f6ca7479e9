"""A rank is killed, or closes: ranks that need it raise PeerLost in time, with its name and its last operation."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import xvcomm
from xvcomm.errors import PeerLost
from xvcomm.rendezvous.store.guarded import GuardedStore
from xvcomm.testing.world import World

SOON = 60.0
"""Seconds; two are expected on an idle machine."""
BIG = 1 << 22
TOPOLOGIES = ["a:2", "a:2,b:2", "a,b,c"]


def collective(comm, name):
    """Call a collective repeatedly: a root, or a sender of little data, may complete the first one."""
    x = np.ones(8 * comm.size, np.float32)
    part = x[:8].copy()
    calls = {
        "all_reduce": lambda: comm.all_reduce(x),
        "large_all_reduce": lambda: comm.all_reduce(np.ones(1 << 20)),
        "broadcast": lambda: comm.broadcast(x),
        "reduce": lambda: comm.reduce(x),
        "reduce_scatter": lambda: comm.reduce_scatter(x),
        "all_gather": lambda: comm.all_gather(part),
        "gather": lambda: comm.gather(part),
        "scatter": lambda: comm.scatter(x, out=part),
        "all_to_all": lambda: comm.all_to_all(x),
        "barrier": lambda: comm.barrier(),
        "asynchronous": lambda: comm.all_reduce(x, async_op=True).wait(),
        "split": lambda: comm.split(0).close(),
        "all_gather_object": lambda: comm.all_gather_object({"rank": comm.rank}),
        "broadcast_object": lambda: comm.broadcast_object("text"),
    }
    while True:
        calls[name]()


def exchange(comm, name):
    """Call a point-to-point operation with the last rank."""
    peer, little, much = comm.size - 1, np.zeros(4), np.zeros(BIG, np.uint8)
    if name == "recv":
        comm.recv(little, peer)
    elif name == "large_recv":
        comm.recv(much, peer)
    elif name == "send":
        comm.send(much, peer)
    elif name == "small_sends":
        while True:
            comm.send(little, peer)
    elif name == "sendrecv":
        comm.sendrecv(much, peer, np.empty_like(much), peer)
    elif name == "irecv":
        comm.irecv(little, peer).wait()
    elif name == "isend":
        works = [comm.isend(much, peer) for _ in range(3)]
        for work in works:
            work.wait()
    elif name == "group":
        with comm.group():
            comm.send(much, peer)
            comm.recv(np.empty_like(much), peer)
    elif name == "recv_object":
        comm.recv_object(peer)
    else:
        comm.send_object(much, peer)


def sleep(comm):
    time.sleep(300)


def barrier(comm):
    comm.barrier()


def nothing(comm):
    pass


def lost(world, victim, outcomes):
    """Check that all ranks but the victim raised PeerLost that names it."""
    assert isinstance(outcomes[victim], EOFError)
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert isinstance(outcome, PeerLost), outcome
            assert outcome.peer == victim and outcome.rank == rank
            assert f"rank {victim} on " in str(outcome) and "was lost" in str(outcome)
    return [str(o) for rank, o in enumerate(outcomes) if rank != victim]


def kill_while(world, victim, function, *args):
    """Kill the victim, which only called a barrier, while the others are in `function`; returns their errors."""
    world.run(barrier)
    for rank in range(world.size):
        if rank == victim:
            world.submit(rank, sleep)
        else:
            world.submit(rank, function, *args)
    time.sleep(0.2)
    killed = time.monotonic()
    world.kill(victim)
    messages = lost(world, victim, world.collect())
    assert time.monotonic() - killed < SOON
    return messages


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(
    "name",
    [
        "all_reduce", "large_all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather", "gather", "scatter",
        "all_to_all", "barrier", "asynchronous", "split", "all_gather_object", "broadcast_object",
    ],
)  # fmt: skip
def test_killed_while_others_are_in_a_collective(topology, name):
    with World(islands=topology) as world:
        for message in kill_while(world, world.size - 1, collective, name):
            assert "its last operation: barrier #0 of" in message and "test_faults_death.py" in message


@pytest.mark.parametrize("name", ["all_reduce", "large_all_reduce", "broadcast", "split"])
def test_killed_while_many_are_in_a_collective(name):
    with World(4) as world:
        kill_while(world, 0, collective, name)


@pytest.mark.parametrize(
    "name",
    ["recv", "large_recv", "send", "small_sends", "sendrecv", "irecv", "isend", "group", "recv_object", "send_object"],
)
def test_killed_while_others_are_in_point_to_point(name):
    with World(2) as world:
        for message in kill_while(world, 1, exchange, name):
            assert "its last operation: barrier #0 of" in message


def all_reduce_for_ever(comm):
    x = np.ones(100_000, np.float32)
    while True:
        comm.all_reduce(x)


def ping_pong_for_ever(comm):
    x = np.zeros(100_000)
    peer = comm.rank ^ 1
    while True:
        comm.sendrecv(x, peer, np.empty_like(x), peer)


@pytest.mark.parametrize("topology", ["a:2", "a:2,b:2", "a,b,c"])
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_in_the_middle_of_traffic(topology, victim):
    with World(islands=topology) as world:
        world.run(barrier)
        for rank in range(world.size):
            world.submit(rank, all_reduce_for_ever)
        time.sleep(0.3)
        killed = time.monotonic()
        world.kill(victim)
        messages = lost(world, victim, world.collect())
        assert time.monotonic() - killed < SOON
        assert all("its last operation: all_reduce #" in m for m in messages)


def test_killed_in_the_middle_of_point_to_point_traffic():
    with World(2) as world:
        world.run(barrier)
        for rank in range(2):
            world.submit(rank, ping_pong_for_ever)
        time.sleep(0.2)
        world.kill(0)
        assert "with rank 1" in lost(world, 0, world.collect())[0]


def recv_from(comm, peer):
    return float(comm.recv(np.zeros(1), peer)[0])


def test_ranks_that_wait_for_other_ranks_raise_too():
    """Ranks 0, 1 and 2 wait for each other or are idle; the communicator fails on each of them."""
    with World(4) as world:
        world.run(nothing)
        world.submit(0, recv_from, 1)
        world.submit(1, recv_from, 0)
        world.submit(2, nothing)
        world.submit(3, sleep)
        time.sleep(0.2)
        world.kill(3)
        outcomes = world.collect()
        assert outcomes[2] is None
        for rank, outcome in enumerate(world.outcomes(barrier)):
            if rank == 2:
                assert isinstance(outcome, PeerLost) and outcome.peer == 3
        for rank in (0, 1):
            assert isinstance(outcomes[rank], PeerLost) and outcomes[rank].peer == 3
            assert "had not called any operation" in str(outcomes[rank])


@pytest.mark.parametrize("function", [barrier, recv_from])
def test_killed_while_no_operation_is_in_progress(function):
    """The next call raises, whatever it is."""
    with World(3) as world:
        world.run(barrier)
        world.kill(2)
        time.sleep(0.4)
        args = [(1,), (0,), (0,)] if function is recv_from else [()] * 3
        started = time.monotonic()
        for rank in range(3):
            world.submit(rank, function, *args[rank])
        messages = lost(world, 2, world.collect())
        assert time.monotonic() - started < SOON
        assert all("its last operation: barrier #0" in m for m in messages)


def split_in_pairs(comm):
    comm.pair = comm.split(comm.rank // 2)


def in_pair(comm):
    for _ in range(1000):
        comm.pair.all_reduce(np.ones(1000))
    return comm.pair.rank


def in_world(comm):
    comm.barrier()


def test_communicators_without_the_dead_rank_go_on():
    with World(4) as world:
        world.run(split_in_pairs)
        world.kill(3)
        time.sleep(0.3)
        for rank in range(4):
            world.submit(rank, in_pair)
        outcomes = world.collect()
        assert outcomes[:2] == [0, 1]
        assert isinstance(outcomes[2], PeerLost) and outcomes[2].peer == 1
        assert "rank 1 (rank 3 of the job) on " in str(outcomes[2])
        for rank, outcome in enumerate(world.outcomes(in_world)):
            assert isinstance(outcome, EOFError if rank == 3 else PeerLost)


def test_two_ranks_killed_at_once():
    with World(4) as world:
        world.run(barrier)
        for rank in range(4):
            world.submit(rank, all_reduce_for_ever)
        time.sleep(0.2)
        world.kill(1)
        world.kill(2)
        for rank, outcome in enumerate(world.collect()):
            if rank in (0, 3):
                assert isinstance(outcome, PeerLost) and outcome.peer in (1, 2)


def test_a_stopped_rank_is_not_lost():
    """SIGSTOP is not an exit: the others wait, and continue when the rank does."""
    with World(2) as world:
        world.kill(1, signal.SIGSTOP)
        for rank in range(2):
            world.submit(rank, barrier)
        time.sleep(0.5)
        world.kill(1, signal.SIGCONT)
        assert world.collect() == [None, None]


def join_without_descriptors(comm, folder):
    """Join another job in a process in which pidfd_open is forbidden, as by an old seccomp filter."""

    def forbid(pid):
        raise PermissionError(1, "Operation not permitted")

    os.pidfd_open = forbid
    env = {"XVCOMM_STORE": f"file://{folder}", "XVCOMM_RANK": str(comm.rank), "XVCOMM_SIZE": str(comm.size)}
    comm.other = xvcomm.init(env=env | {"XVCOMM_SECRET": "of this test", "XVCOMM_TIMEOUT": "60"})
    comm.other.barrier()


def other_all_reduce_for_ever(comm):
    with comm.other:
        all_reduce_for_ever(comm.other)


def other_recv(comm, peer):
    with comm.other:
        return recv_from(comm.other, peer)


@pytest.mark.parametrize("function", [other_all_reduce_for_ever, other_recv])
def test_killed_where_pidfd_open_is_forbidden(tmp_path, function):
    with World(3) as world:
        world.run(join_without_descriptors, tmp_path / "store")
        for rank in range(3):
            world.submit(rank, sleep) if rank == 2 else world.submit(rank, function, *[2][: function is other_recv])
        time.sleep(0.2)
        killed = time.monotonic()
        world.kill(2)
        lost(world, 2, world.collect())
        assert time.monotonic() - killed < SOON


IN_NAMESPACE = """
import os, sys
import numpy as np
import xvcomm

with xvcomm.init() as comm:
    comm.barrier()
    print("joined", flush=True)
    if comm.rank == 1:
        sys.stdin.read()
    try:
        comm.recv(np.zeros(1), 1)
    except xvcomm.PeerLost as error:
        print(error.peer, error)
"""
UNSHARE = ["unshare", "--pid", "--fork", "--kill-child"]


@pytest.mark.skipif(
    subprocess.run([*UNSHARE, "true"], capture_output=True).returncode != 0,
    reason="unshare --pid does not work here; it wants root",
)
@pytest.mark.parametrize("apart", [[1], [0, 1]])
def test_killed_in_another_pid_namespace(tmp_path, apart):
    """Ranks in separate containers that share /dev/shm, with equal pids."""
    variables = {"XVCOMM_STORE": f"file://{tmp_path}/store", "XVCOMM_SIZE": "2", "XVCOMM_SECRET": "of this test"}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(2):
            command = [*(UNSHARE if rank in apart else []), sys.executable, "-c", IN_NAMESPACE]
            env = os.environ | variables | {"XVCOMM_RANK": str(rank), "XVCOMM_TIMEOUT": "60"}
            ranks.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True))
            stack.enter_context(ranks[-1])
            stack.callback(ranks[-1].kill)
        for rank in ranks:
            assert rank.stdout.readline() == "joined\n"
        time.sleep(0.2)
        killed = time.monotonic()
        ranks[1].kill()
        said = ranks[0].stdout.read()
        assert said.startswith("1 ") and "rank 1 on" in said and "was lost" in said, said
        assert time.monotonic() - killed < SOON


def make_where_one_dies(comm, victim, how):
    """The victim dies while all make a communicator; its ranks, its parent's and the job's have different orders."""
    parent = comm.split(0, key=-comm.rank)
    if comm.rank == victim:
        GuardedStore.assemble = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    if how == "split":
        parent.split(0, key=(parent.rank + 1) % parent.size)
    else:
        parent.subgroup([2, 0, 1], "rotated")


@pytest.mark.parametrize("how", ["split", "subgroup"])
@pytest.mark.parametrize("hosts", [None, "a:2,b"])
def test_a_death_inside_a_split(how, hosts):
    """The error names the victim by its number in the communicator whose method was called."""
    with World(3, hosts=hosts) as world:
        for rank in range(3):
            world.submit(rank, make_where_one_dies, 2, how)
        first, second, victim = world.collect()
    assert isinstance(victim, EOFError)
    for rank, error in ((2, first), (1, second)):
        assert isinstance(error, PeerLost) and (error.rank, error.peer) == (rank, 0), error
        assert "(rank 2 of the job) on " in str(error) and "was lost" in str(error), error
