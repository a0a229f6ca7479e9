"""`xvcomm certify` between two hosts by label: connections are compared bit by bit, and lost."""

import time

import numpy as np
import relay

from xvcomm.cli.certify.contract import FAILED, PASSED, PROVEN, SKIPPED, WRONG
from xvcomm.cli.certify.options import Options
from xvcomm.cli.certify.runner import certify_job
from xvcomm.cli.connections import Connections, ends_of
from xvcomm.testing import World
from xvcomm.testing.inside import network

HOST = {"XVCOMM_DEVICE": "host"}
LARGE = 16 << 10
"""Bytes that are read at once only where payload passes."""


def flip(data):
    """One bit in the middle of payload."""
    if len(data) > LARGE:
        data[len(data) // 2] ^= 4


def results(world, *sections):
    """The code of all ranks, and rank 0's results by section."""
    outcomes = world.run(certify_job, Options(sections=sections), timeout=110)
    (code,) = {code for code, _ in outcomes}
    return code, {result.name: result for result in outcomes[0][1].results}


def test_a_rail_that_flips_a_bit_is_named():
    """The finding names the direction, the connection, and what to do."""
    with World(hosts="a,b", env=HOST, timeout=100) as world, relay.relayed(world, flip):
        code, found = results(world, "rails")
    assert code == WRONG and found["rails"].state == FAILED
    wrong = [finding for finding in found["rails"].findings if finding.wrong]
    assert {finding.what.partition(":")[0] for finding in wrong} == {
        "messages, rank 0 to rank 1",
        "messages, rank 1 to rank 0",
    }
    assert all("wrong bytes" in each.what and "127.0.0.1 to 127.0.0.1, number 0" in each.what for each in wrong)
    assert all("XVCOMM_NICS" in each.remedy for each in wrong)


def test_a_connection_is_lost_and_comes_back():
    with World(hosts="a,b", env={**HOST, "XVCOMM_WIRE_THREADS": "2"}, timeout=100) as world:
        code, found = results(world, "rails", "failover")
    assert code == PROVEN
    assert [row[2] for row in found["failover"].tables[0].rows] == ["2", "2"]
    assert all("replaced after" in row[-1] for row in found["failover"].tables[0].rows)


def test_one_connection_alone_proves_no_failover():
    with World(hosts="a,b", env={**HOST, "XVCOMM_WIRE_THREADS": "1"}, timeout=100) as world:
        code, found = results(world, "rails", "failover")
    assert code == 2 and found["rails"].state == PASSED
    assert found["failover"].state == SKIPPED and "one connection" in found["failover"].reason


def exchange_and_lose(comm):
    """Exchange messages, before and after all connections are lost; the bytes that this rank had sent each time."""
    other, found = 1 - comm.rank, []
    connections = Connections(comm, other)
    for lose in (True, False):
        comm.sendrecv(np.ones(1 << 20, np.uint8), other, np.empty(1 << 20, np.uint8), other)
        comm.barrier()
        found.append(connections.by_scheme()["tcp"])
        if lose:
            for path in connections.up():
                network(comm).lose(other, ends_of(path))
            until = time.monotonic() + 60
            while not sum(connections.losses().values()) or not connections.up():
                assert time.monotonic() < until, connections.paths()
                time.sleep(0.01)
    return found


def test_bytes_of_a_lost_connection_count():
    """So that what one carries meanwhile is never negative, and no part of the whole is above 1."""
    with World(hosts="a,b", env={**HOST, "XVCOMM_WIRE_THREADS": "1"}, timeout=100) as world:
        for before, after in world.run(exchange_and_lose):
            assert after - before > 1 << 20
