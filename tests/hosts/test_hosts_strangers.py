"""Strangers who connect to the ranks of a job over several hosts: nothing but their own connection comes to harm."""

import asyncio
import contextlib
import gc
import random
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import psutil
import pytest
import relay

from xvcomm.errors import AuthenticationError
from xvcomm.testing import World, inside
from xvcomm.wire import acceptor, connections, handshake
from xvcomm.wire.frames import FRAME, Kind
from xvcomm.wire.records import UP

CROWD = 10_000
GROWTH = 12 << 20
SAID = []


def work(comm, rounds):
    """Collectives and messages of known results."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for number in range(rounds):
        x = np.full(70_000, comm.rank + number, np.int64)
        comm.all_reduce(x)
        assert (x == sum(range(comm.size)) + comm.size * number).all()
        sent, got = np.arange(5000) * (comm.rank + number), np.zeros(5000, int)
        comm.sendrecv(sent, after, got, before)
        assert (got == np.arange(5000) * (before + number)).all()


def prepare(comm):
    """Listen to what is said of strangers from now on; the job's key."""
    SAID.clear()
    acceptor.notice = SAID.append
    inside.network(comm)._acceptor._silent_until = 0.0
    return inside.network(comm)._process.key


def usage(comm):
    """Descriptors, bytes of memory, connections refused, what was said of them."""
    gc.collect()
    process = psutil.Process()
    return process.num_fds(), process.memory_info().rss, comm.refused(), list(SAID)


def wires_to(comm, rank):
    """The numbers of the wires whose other half is in a rank."""
    links = [link.number for link in inside.network(comm)._links.values() if link.rank == rank]
    return [half.record.number for half in inside.network(comm).carrier._wires._halves if half.link in links]


def lose_rails(comm):
    """Lose every connection to the others."""
    for index, rail in enumerate(inside.network(comm).carrier.rails):
        if rail.state == UP:
            inside.network(comm).carrier.drop(index)


def be_patient(comm, seconds):
    """Give each stranger so much time."""
    handshake.SECONDS = seconds


@pytest.fixture(scope="module")
def job():
    """A world of ranks, each on a host of its own by label, and the ports on which they listen."""
    # One connection between any two ranks, so that all are there before a test counts descriptors.
    variables = {"XVCOMM_DEVICE": "host", "XVCOMM_WIRE_THREADS": "1"}
    with World(hosts="a,b,c", env=variables, timeout=100) as world:
        world.run(work, 30)
        yield world, world.run(relay.port)


@contextlib.contextmanager
def unharmed(world, rank, refused, busy=True):
    """Strangers come to a rank in the block: the ranks work meanwhile and afterwards, and refuse so many connections."""
    key = world.run(prepare)[0]
    before = world.run(usage)
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(world.run, work, 60) if busy else None
        yield key
        if working is not None:
            working.result()
    end = time.monotonic() + 30
    while True:
        world.run(work, 1)
        after = world.run(usage)
        counted = after[rank][2] - before[rank][2]
        if all(now[0] <= then[0] for now, then in zip(after, before, strict=True)) and counted >= refused:
            break
        assert time.monotonic() < end, (before, after)
        time.sleep(0.1)
    assert all(now[1] - then[1] < GROWTH for now, then in zip(after, before, strict=True)), (before, after)
    assert counted == refused, after
    assert len(after[rank][3]) == min(1, refused), after


def stranger(port):
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def closed(connection):
    """Whether the rank closes a connection, whatever it sends before."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    return True


def test_random_bytes(job):
    world, ports = job
    draw = random.Random(0)
    with unharmed(world, 0, 40):
        for _ in range(40):
            with stranger(ports[0]) as connection:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(draw.randbytes(draw.randrange(2, 2000)))
                connections.hang_up(connection)
                assert closed(connection)


def test_replay():
    """What ranks said to each other proves nothing afterwards, to whomever it is said again."""
    with World(hosts="a,b", env={"XVCOMM_DEVICE": "host"}, timeout=100) as world:
        ports = world.run(relay.port)
        with relay.relayed(world) as relays:
            world.run(work, 30)
            every = [[bytes(part) for part in passed] for one in relays for passed in one.passed]
            recorded = [passed for passed in every if min(map(len, passed)) > 10_000]  # the others were not needed
            assert recorded
            with unharmed(world, 0, len(recorded)) as key:
                for said, answers in recorded:
                    with stranger(ports[0]) as connection:
                        with contextlib.suppress(ConnectionError):
                            connection.sendall(said)
                        assert closed(connection)
                    theirs, ours = socket.socketpair()
                    with theirs, ours, pytest.raises(AuthenticationError):
                        theirs.sendall(answers[:1000])
                        prove(ours, key, 0, 1)


def test_silence(job):
    """A connection that says nothing, or half of a word, is closed after a while."""
    world, ports = job
    world.run(be_patient, 0.5)
    with unharmed(world, 0, 2), stranger(ports[0]) as silent, stranger(ports[0]) as slow:
        slow.sendall(b"\x00")
        assert closed(silent) and closed(slow)
    world.run(be_patient, handshake.SECONDS)


def test_crowd(job):
    """Thousands of connections: the ranks can make new ones among them."""
    world, ports = job
    at_once = min(1000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200)
    with unharmed(world, 0, CROWD, busy=False):
        for begin in range(0, CROWD, at_once):
            with contextlib.ExitStack() as crowd:
                for _ in range(min(at_once, CROWD - begin)):
                    crowd.enter_context(stranger(ports[0]))
                if begin == 0:
                    world.run(lose_rails)
                    world.run(work, 5)


def frame(kind, wire=0, lane=0, slot=0, number=0, length=0, entry=(1, (0,) * 5)):
    return np.array((kind, wire, lane, 0, slot, number, length, entry), FRAME).tobytes()


def prove(connection, key, rank, peer, then=b""):
    """Prove the key as a rank, and send more before anybody can replace the connection."""
    send = handshake._send

    async def send_all(connection, message):
        await send(connection, message)
        await asyncio.get_running_loop().sock_sendall(connection, then)

    connection.setblocking(False)
    with mock.patch.object(handshake, "_send", send_all):
        asyncio.run(handshake.connect(connection, key, rank, peer, 0))
    connection.setblocking(True)


@pytest.mark.parametrize(
    ("sent", "refused"),
    [
        (frame(Kind.PING, length=513), 1),
        (frame(Kind.CREDIT, length=-8), 1),
        (frame(77), 1),
        (frame(Kind.SLOT, length=1 << 40), 1),
        (frame(Kind.SLOT, wire=1 << 40, length=8), 1),
        ("foreign", 1),
        (frame(Kind.PING, number=1)[:50], 0),
        (b"", 0),
    ],
    ids=["wrong length", "no length", "wrong kind", "huge", "no wire", "another's wire", "half a frame", "nothing"],
)
def test_broken_frames(job, sent, refused):
    """A connection that proves the key and then breaks the protocol is closed, although it had replaced a rank's own."""
    world, ports = job
    if sent == "foreign":
        sent = frame(Kind.STOPPED, world.run(wires_to, 1)[2][0])
    with unharmed(world, 2, refused) as key, stranger(ports[2]) as connection:
        prove(connection, key, 0, 2, sent)
        if not refused:
            connection.shutdown(socket.SHUT_WR)
        assert closed(connection)


def test_no_rank_of_the_job(job):
    """The key alone does not make a rank."""
    world, ports = job
    with unharmed(world, 2, 2) as key:
        for rank in (2, 3):
            with stranger(ports[2]) as connection, pytest.raises(ConnectionError):
                prove(connection, key, rank, 2)
