"""Jobs over several hosts whose bytes are encrypted."""

import asyncio
import ctypes
import signal
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import relay

from xvcomm.errors import AuthenticationError
from xvcomm.testing import World, collectives, failures, pointtopoint
from xvcomm.wire.records import Tls as Functions
from xvcomm.wire.tls import Tls

ENV = {"XVCOMM_DEVICE": "host", "XVCOMM_TLS": "1"}
SECRET = np.frombuffer(b"nobody else may read this text. " * 4096, np.uint8)


@pytest.fixture(scope="module")
def world():
    with World(hosts="a:2,b:1", env={**ENV, "XVCOMM_WIRE_THREADS": "2"}) as ranks:
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
    two_hosts.cut_and_mend(env={"XVCOMM_TLS": "1", "XVCOMM_WIRE_THREADS": "2"})


async def secured(tls, accepting, connecting):
    """Both ends of a connection on which TLS begins with these keys, each with its channel, or why there is none."""

    async def end(connection, key, accepting):
        connection.setblocking(False)
        return await tls.secure(connection, key, accepting=accepting)

    ours, theirs = socket.socketpair()
    ends = end(ours, accepting, True), end(theirs, connecting, False)
    return list(zip((ours, theirs), await asyncio.gather(*ends, return_exceptions=True), strict=True))


def test_keys():
    """Only processes with the same key can talk."""
    for theirs, due in ((b"k" * 32, False), (b"q" * 32, True)):
        for connection, end in asyncio.run(secured(Tls(), b"k" * 32, theirs)):
            connection.close()
            assert isinstance(end, AuthenticationError) == due


def test_end_in_the_handshake():
    """A side that closes the connection, since it needs no other, is no stranger."""

    async def end():
        ours, theirs = socket.socketpair()
        theirs.close()
        with ours:
            ours.setblocking(False)
            await Tls().secure(ours, b"k" * 32, accepting=True)

    with pytest.raises(ConnectionError, match="closed during the TLS handshake"):
        asyncio.run(end())


def write_to_nobody(comm):
    """A rank whose program lets SIGPIPE end it writes to a connection that the other side has closed."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    tls = Tls()
    (ours, channel), (theirs, _) = asyncio.run(secured(tls, b"k" * 32, b"k" * 32))
    theirs.close()
    write = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int)(
        Functions.from_address(tls.functions).write
    )
    assert write(channel.address, b"x", 1) < 0
    assert signal.SIGPIPE not in signal.sigpending() | signal.pthread_sigmask(signal.SIG_BLOCK, ())
    ours.close()
    signal.signal(signal.SIGPIPE, before)
    for thread in threading.enumerate():
        if thread.name in ("xvcomm-network", "xvcomm-carrier"):
            status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
            assert int(status.partition("SigBlk:")[2].split()[0], 16) >> (signal.SIGPIPE - 1) & 1


def test_broken_pipe(world):
    """A lost connection ends no process, whatever its program makes of SIGPIPE."""
    world.run(write_to_nobody)
