"""Ranks with GPU memory over several hosts: the ROCm backend over its stand-in, with each rank's host by label."""

import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from xvcomm.errors import MismatchError, PeerLost
from xvcomm.testing import World, failures
from xvcomm.testing.arrays import arrays
from xvcomm.testing.cases import SMALL_GPU_RINGS
from xvcomm.testing.gate import Gate
from xvcomm.testing.inside import context
from xvcomm.testing.signals import Signals, await_that

pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install hip-python")
sys.path.append(str(Path(__file__).parent.parent / "conformance"))
import between_hosts

PLACES = {
    "two islands on two hosts": {"devices": "rocm:2", "hosts": "a,b", "islands": "x,y"},
    "an island over two hosts": {"devices": "rocm:2", "hosts": "a,b"},
    "islands in turns": {"devices": "rocm:2,host:2", "hosts": "a,b,a,b"},
}
THREE = {"devices": "rocm:3", "hosts": "a:2,b:1"}
"""One island, of which two ranks see in shared memory what the other does."""
BESIDE = {"devices": "rocm:3", "hosts": "a,b,a", "islands": "x,x,y"}
"""An island over two hosts, and one on one of them."""
DEADLINE = 1.5


@pytest.fixture(scope="module")
def environment(rocm_path):
    """Variables with which ranks find the stand-in."""
    return {"ROCM_PATH": str(rocm_path), "HIPHOST_DEVICES": "3", **SMALL_GPU_RINGS}


@pytest.fixture(scope="module", params=PLACES)
def world(request, environment):
    """Ranks on GPUs of the stand-in, some with ranks on host memory beside them."""
    with World(**PLACES[request.param], env=environment) as ranks:
        ranks.graphs = "host" not in PLACES[request.param]["devices"]
        yield ranks


@pytest.mark.parametrize("case", between_hosts.CHECKS, ids=between_hosts.name)
def test_between_hosts(world, case):
    """Everything that crosses, also from graphs at every replay."""
    check, *args = case
    if check in between_hosts.GRAPHS and not world.graphs:
        pytest.skip("ranks on host memory have no graphs")
    world.run(check, *args)


@pytest.fixture(scope="module")
def three(environment):
    """Ranks of an island over two hosts; long deadlines, so that what waits for one shows."""
    with World(**THREE, env=environment, timeout=100) as ranks:
        yield ranks


@pytest.mark.parametrize("check", failures.CHECKS)
def test_faults(three, check):
    """In an island over hosts ranks learn of failures and departures as on one host; of a mismatch at the deadline."""
    mismatch = check in (failures.check_mismatch, failures.check_mismatch_repeated)
    three.run(check, *([DEADLINE] if mismatch else []))


def test_faults_beside_another_island(environment):
    """A rank that stops or leaves may be in another island than those that wait over hosts."""
    with World(**BESIDE, env=environment, timeout=100) as ranks:
        for check in (failures.check_abort, failures.check_departure, failures.check_departure_repeated):
            ranks.run(check)


def finish_after_a_departure(comm):
    """The last rank broadcasts and leaves; on the others the broadcast begins only then. Whom the next call misses."""
    a, group, signals, last = arrays(comm), comm.split(0), Signals(comm), comm.size - 1
    x, values = a.put(np.zeros(100)), np.arange(100.0)
    y = a.put(np.zeros(3))
    group.all_reduce(y)
    if comm.rank == last:
        signals.hear("waiting", range(last))
        a.fill(x, values)
        a.get(group.broadcast(x, last))
        group.close()
        return None
    inside, gate_bytes = context(group), a.put(np.zeros(1, np.uint8))
    with Gate.on(a) as gate:
        gate.close(gate_bytes)
        work = group.broadcast(x, last, async_op=True)
        signals.tell("waiting")
        await_that(lambda: last in inside.lifecycle.departed)
        assert not work.done()  # this looks at the device, and for ranks that have left
        with pytest.raises(PeerLost):
            group.all_reduce(y)
        gate.open(np.ones(1, np.uint8))
    work.synchronize()
    assert (a.get(x) == values).all()
    with pytest.raises(PeerLost) as caught:
        group.barrier()
    group.close()
    return caught.value.peer


def test_a_departure_behind_the_last_collective(three):
    """A rank that has left after it had called a collective does not make others fail who still finish that."""
    assert three.run(finish_after_a_departure) == [2, 2, None]


def leave_before_joining(comm, whole):
    """The last rank closes a communicator, or its whole session, in which no collective was called; the others' error."""
    group = comm if whole else comm.split(0)
    if comm.rank == comm.size - 1:
        group.close()
        return None
    begun = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        group.barrier()
    group.close()
    return caught.value.peer, str(caught.value), time.monotonic() - begun


@pytest.mark.parametrize("whole", [False, True], ids=["communicator", "session"])
def test_a_departure_before_the_island_is_joined(environment, whole):
    """Ranks that wait for the island's other ranks learn that one has left."""
    with World(**THREE, env=environment, timeout=100) as ranks:
        for peer, text, seconds in ranks.run(leave_before_joining, whole)[:-1]:
            assert peer == 2 and "rank 2 on b left" in text and seconds < 30, text


def call_differently(comm):
    """The last rank takes part in a collective by another call, and the ranks go on; all errors."""
    a, group = arrays(comm), comm.split(0)
    x, y = a.put(np.zeros(1000)), a.put(np.zeros(10))
    group.all_reduce(y)
    odd = comm.rank == comm.size - 1
    first = group.all_reduce(y if odd else x, async_op=True, timeout=DEADLINE)
    second = group.all_reduce(y, async_op=True, timeout=DEADLINE)
    errors = []
    for work in (first, second):
        with pytest.raises(MismatchError) as caught:
            work.synchronize()
        errors.append((caught.value.peer, str(caught.value)))
    group.close()
    return errors


def test_what_a_mismatch_tells(three):
    """It names the first two calls that differ, with their lines, and the other rank where this one is concerned."""
    for rank, errors in enumerate(three.run(call_differently)):
        for peer, text in errors:
            assert peer in {0: {2, None}, 1: {2, None}, 2: {0, 1}}[rank], text
            for who, count in ((r"[01] on a", 1000), ("2 on b", 10)):
                assert re.search(
                    rf"rank {who} called all_reduce #1 of {count} x float64 at test_hosts_rocm.py:\d+ ", text
                ), text
