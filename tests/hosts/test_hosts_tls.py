"""Jobs over several hosts whose bytes are encrypted."""

import asyncio
import socket

import numpy as np
import pytest
import relay

from xvcomm.errors import AuthenticationError
from xvcomm.testing import World, collectives, failures, pointtopoint
from xvcomm.wire.tls import Tls

ENV = {"XVCOMM_DEVICE": "host", "XVCOMM_TLS": "1"}
SECRET = np.frombuffer(b"nobody else may read this text. " * 4096, np.uint8)


@pytest.fixture(scope="module")
def world():
    with World(hosts="a:2,b:1", env=ENV) as ranks:
        yield ranks


@pytest.mark.parametrize("count", [1, 1000, 1_000_003])
def test_sizes(world, count):
    world.run(collectives.check_all_reduce, "float32", "sum", count)
    world.run(pointtopoint.check_blocking, "float32", count)
    world.run(pointtopoint.check_exchange, "float32", count)


def test_order(world):
    world.run(pointtopoint.check_order, 200)


@pytest.mark.parametrize("check", failures.CHECKS)
def test_failures(world, check):
    world.run(check)


def tell(comm):
    """A text that goes both ways, through the ring and straight from the array."""
    got = np.zeros_like(SECRET)
    for part in (SECRET[:64], SECRET):
        comm.sendrecv(part, 1 - comm.rank, got[: part.size], 1 - comm.rank)
        assert (got[: part.size] == part).all()


@pytest.mark.parametrize("tls", ["0", "1"])
def test_what_others_see(tls):
    """The text stands in what a relay passes if there is no TLS, and does not if there is."""
    with World(hosts="a,b", env={**ENV, "XVCOMM_TLS": tls}) as ranks, relay.relayed(ranks) as relays:
        ranks.run(tell)
        parts = [bytes(part) for one in relays for passed in one.passed for part in passed]
    assert max(map(len, parts)) > SECRET.nbytes
    assert any(b"nobody" in part for part in parts) == (tls == "0")


def test_some_ranks_without():
    """Ranks that do not agree say so when they start."""
    with pytest.raises(AssertionError, match=r"tcp \(with TLS\).*tcp \(without TLS\).*XVCOMM_TLS must be the same"):
        World(hosts="a,b", env=[ENV, {**ENV, "XVCOMM_TLS": "0"}])


def test_link_cut(two_hosts):
    """A link is cut and comes back while messages are under way: nothing is lost."""
    two_hosts.cut_and_mend(env={"XVCOMM_TLS": "1"})


def shake(accepting, connecting):
    """What the two ends of a connection make of TLS with these keys."""

    async def end(connection, key, accepting):
        with connection:
            return await Tls().secure(connection, key, accepting=accepting)

    async def both():
        ours, theirs = socket.socketpair()
        for connection in (ours, theirs):
            connection.setblocking(False)
        ends = end(ours, accepting, True), end(theirs, connecting, False)
        return await asyncio.gather(*ends, return_exceptions=True)

    return asyncio.run(both())


def test_keys():
    """Only who has the same key can talk."""
    assert not any(isinstance(end, BaseException) for end in shake(b"k" * 32, b"k" * 32))
    assert all(isinstance(end, AuthenticationError) for end in shake(b"k" * 32, b"q" * 32))
