"""Ranks or whole hosts are lost, and the ranks that are left go on: between network namespaces."""

import json
import signal

import pytest

SOON = 60.0
"""Seconds in which a shrink must end on a busy machine; on a quiet one some tenths, or XVCOMM_PEER_TIMEOUT and a second."""
SIDES = (0, 1, 0, 1)


def left(process):
    """The seconds of a rank's next shrink, and the ranks that are left."""
    line = process.stdout.readline()
    assert line.startswith("["), line + process.stdout.read()
    seconds, ranks = json.loads(line)
    print(f"{seconds:.3f} s")
    assert seconds < SOON
    return ranks


def killed(processes, *ranks):
    """Kill ranks, all at once; the others."""
    for rank in ranks:
        processes[rank].send_signal(signal.SIGKILL)
    for rank in ranks:
        processes[rank].wait(30)
    return [process for process in processes if process.returncode is None]


@pytest.mark.parametrize("victims", [(3,), (1, 3), (0,), (0, 2)], ids=["a rank", "a host", "the store", "its host"])
def test_killed(two_hosts, victims):
    """One rank, or all of a host; also with the store, which rank 0 serves."""
    processes = two_hosts.await_begun(two_hosts.start("survive", sides=SIDES))
    others = killed(processes, *victims)
    for process in others:
        assert left(process) == [rank for rank in range(4) if rank not in victims]
    two_hosts.outputs(others)


def test_killed_in_turn(two_hosts):
    """The ranks that serve the store, one after the other."""
    processes = two_hosts.await_begun(two_hosts.start("survive", "2", sides=SIDES))
    others = killed(processes, 0)
    for process in others:
        assert left(process) == [1, 2, 3]
    two_hosts.await_begun(others)
    others = killed(processes, 1)
    for process in others:
        assert left(process) == [2, 3]
    two_hosts.outputs(others)


def test_a_host_out_of_reach(two_hosts):
    """The ranks of the other host go on without it, and without the store that it has."""
    env = {"XVCOMM_PEER_TIMEOUT": "2"}
    processes = two_hosts.await_begun(two_hosts.start("survive", sides=SIDES, env=env))
    for link in range(2):
        two_hosts.link(link, "down")
    others = [processes[1], processes[3]]
    for process in others:
        assert left(process) == [1, 3]
    two_hosts.outputs(others)
