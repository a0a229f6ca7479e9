"""Ranks or a whole host are lost, and come back: between network namespaces."""

import signal

import pytest

SIDES = (0, 1, 0, 1)


@pytest.mark.parametrize("victims", [(3,), (2,), (1, 3)], ids=["elsewhere", "beside the store", "a host"])
def test_come_back(two_hosts, victims):
    """The store ends with rank 0, which lives."""
    count = str(len(victims))
    processes = two_hosts.await_begun(two_hosts.start("regrow", count, sides=SIDES))
    for victim in victims:
        processes[victim].send_signal(signal.SIGKILL)
    for victim in victims:
        processes[victim].wait(30)
        job = {**two_hosts.ranks(4)[victim], "XVCOMM_REJOIN": "1"}
        processes[victim] = two_hosts.fork(SIDES[victim], "regrow", count, env=job)
    print(two_hosts.outputs(processes))
