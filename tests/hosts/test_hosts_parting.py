"""A host goes while ranks shrink or grow: all links between two network namespaces are cut, and each side goes on by itself."""

import json
import signal
from pathlib import Path

import pytest

PARTING = Path(__file__).with_name("parting.py")
SIDES = (0, 1, 0, 1)
ENV = {"XVCOMM_PEER_TIMEOUT": "2"}


def cases(*usual, requests, ranks):
    """Where the cut comes: at a request of a rank, before or after it; those but the usual ones only in `make test-slow`."""
    every = [(rank, number, when) for rank in ranks for number in requests for when in ("before", "after")]
    return [*usual, *(pytest.param(*case, marks=pytest.mark.slow) for case in every if case not in usual)]


def left(process):
    """The ranks of a communicator at the end."""
    line, said = process.stdout.readline(), []
    while not line.startswith("["):  # but warnings of links that carry nothing
        said.append(line)
        assert line, said
        line = process.stdout.readline()
    seconds, ranks = json.loads(line)
    print(f"{seconds:.3f} s")
    return ranks


def begin(hosts, *arguments):
    """Start four ranks of `parting.py`."""
    return [
        hosts.fork(side, *arguments, env={**ENV, **variables}, program=PARTING)
        for side, variables in zip(SIDES, hosts.ranks(4), strict=True)
    ]


def cut(hosts, processes, where):
    """Cut all links once a rank is there where it waits for that."""
    hosts.await_begun([processes[where]])
    for link in range(2):
        hosts.link(link, "down")


@pytest.mark.parametrize(
    "where, request_number, when",
    cases((0, 1, "before"), (1, 1, "after"), requests=range(6), ranks=(0, 1)),
)
def test_shrink(two_hosts, where, request_number, when):
    processes = begin(two_hosts, "shrink", where, request_number, when)
    cut(two_hosts, processes, where)
    assert [left(process) for process in processes] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    two_hosts.outputs(processes)


@pytest.mark.parametrize(
    "where, request_number, when",
    cases((0, 2, "before"), (1, 1, "after"), (1, 3, "after"), requests=range(8), ranks=(0, 1)),
)
def test_grow(two_hosts, where, request_number, when):
    """Of the host without the store, the rank that was about to come back may be left out.

    Such a rank may know that all have made the grown job while the other rank of its host does not: then each ends with an error.
    """
    arguments = "grow", where, request_number, when
    processes = two_hosts.await_begun(begin(two_hosts, *arguments))
    processes[3].send_signal(signal.SIGKILL)
    processes[3].wait(30)
    job = {**ENV, **two_hosts.ranks(4)[3], "XVCOMM_REJOIN": "1"}
    processes[3] = two_hosts.fork(1, *arguments, env=job, program=PARTING)
    cut(two_hosts, processes, where)
    found = [left(process) for process in processes]
    assert found[0] == found[2] == [0, 2]
    assert [found[1], found[3]] in ([[1, 3], [1, 3]], [[1], []], [[1], [3]]), found
    two_hosts.outputs(processes)
