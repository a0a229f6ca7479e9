"""Links that lose packets, delay them, are slow, or carry nothing in one direction: two ranks on two hosts."""

import os
import random
import time

import numpy as np
import pytest
from emulated import EmulatedHosts
from ranks import find_congestion

from xvcomm.errors import PeerLost, ResourceError
from xvcomm.testing import World
from xvcomm.testing.hosts import NAMES
from xvcomm.testing.inside import network
from xvcomm.testing.signals import await_that

FAR = {"loss": 0.01, "delay": 0.05}
SIZES = (0, 1, 100, 4096, 70_001, 1 << 20)
PEER_SECONDS = 3
RATE = 4e6


@pytest.fixture
def hosts(request):
    """Two hosts with two links that a test changes; with a parameter as the arguments of `EmulatedHosts`."""
    try:
        made = EmulatedHosts(**getattr(request, "param", {}))
    except ResourceError as error:
        pytest.skip(str(error))
    with made:
        yield made


@pytest.fixture
def world(hosts):
    """A rank on each of them, and their store on the first."""
    with ranks(hosts) as made:
        yield made


def ranks(hosts, **env):
    """A rank on each host, and their store on the first."""
    variables = {
        "XVCOMM_DEVICE": "host", "XVCOMM_STORE": "tcp://10.77.0.1:29711", "XVCOMM_PEER_TIMEOUT": str(PEER_SECONDS), **env,
    }  # fmt: skip
    namespaces = {name: hosts.namespace(side) for side, name in enumerate(NAMES)}
    return World(hosts=",".join(NAMES), namespaces=namespaces, env=variables, timeout=60)


def contents(count, seed):
    """Bytes that both ranks know."""
    return np.random.default_rng(seed).integers(0, 127, count, np.uint8)


def talk(comm, sizes=SIZES):
    """Messages both ways and collectives of these sizes: how often a connection was lost."""
    other = 1 - comm.rank
    for size in sizes:
        got, mine, theirs = np.zeros(size, np.uint8), contents(size, comm.rank), contents(size, other)
        comm.sendrecv(mine, other, got, other)
        assert (got == theirs).all()
        comm.all_reduce(got)
        assert (got == mine + theirs).all()
        assert (comm.all_gather(mine) == np.concatenate([contents(size, rank) for rank in range(2)])).all()
        for work in (comm.isend(mine, other), comm.irecv(got, other)):
            work.wait()
        assert (got == theirs).all()
    comm.barrier()
    return sum(path.losses for path in network(comm).paths())


def pass_message(comm, got, number):
    """A message from rank 0 to rank 1, which puts it into `got`."""
    if comm.rank == 0:
        comm.send(contents(got.size, number), 1)
    else:
        comm.recv(got, 0)
        assert (got == contents(got.size, number)).all()


def send(comm, size, count=1):
    """Messages from rank 0 to rank 1: what each link has carried of them."""
    before, got = carried(comm), np.zeros(size, np.uint8)
    for number in range(count):
        pass_message(comm, got, number)
    comm.barrier()
    return [after - earlier for earlier, after in zip(before, carried(comm), strict=True)]


def carried(comm):
    """Bytes that this rank has sent over each link so far, once there is a connection over each."""
    comm.barrier()
    await_that(lambda: len(comm.rails()) == 2)
    return [path.sent for path in sorted(network(comm).paths(), key=lambda path: path.local)]


def send_on(comm, size, file):
    """Messages from rank 0 to rank 1 until a file is there: how many, at least one."""
    got, number = np.zeros(size, np.uint8), 0
    while comm.broadcast_object(number == 0 or not os.path.exists(file)):
        pass_message(comm, got, number)
        number += 1
    return number


def send_until_over(comm, link, size):
    """Messages from rank 0 to rank 1 until one link carries nearly all bytes of fifty."""
    over = False
    while not over:
        shares = send(comm, size, 50)
        over = comm.broadcast_object(shares[link] > 10 * shares[1 - link])


def send_until_one_is_left(comm, size):
    """Messages from rank 0 to rank 1 until each has connections over one link alone: their addresses."""
    got, number = np.zeros(size, np.uint8), 0
    while comm.all_gather(np.array([len(comm.rails())])).tolist() != [1, 1]:
        pass_message(comm, got, number)
        number += 1
    return [rail.local for rail in comm.rails()]


def test_far_hosts(hosts):
    """A job whose packets take 50 ms, and of which 1 % is lost, from its beginning: slower, but no connection is given up."""
    for link in range(2):
        hosts.change(link, **FAR)
    with ranks(hosts) as world:
        assert world.run(talk) == [0, 0]


def test_slow_link(hosts, world):
    """A link that becomes ten times as slow carries a tenth of what the other one does at most, and nothing is lost."""
    for link in range(2):
        hosts.change(link, rate=RATE)
    first, second = world.run(send, 4 << 20)[0]
    assert 0.5 * first < second < 2 * first
    hosts.change(1, rate=RATE / 10)
    fast, slow = world.run(send, 4 << 20, 2)[0]
    assert slow < 0.35 * fast


@pytest.mark.parametrize("size", [100, 20_000])
def test_short_messages_avoid_a_far_link(hosts, world, size):
    """Short messages go over the link whose packets take less time, whichever that is at the moment."""
    for far in (0, 1, 0):
        hosts.change(far, delay=0.05)
        hosts.change(1 - far, delay=0)
        world.run(send_until_over, 1 - far, size)


def test_credits_avoid_a_far_link(hosts, world):
    """A sender that waits for one would wait as long as the packets of that link take."""
    for far in (0, 1):
        hosts.change(far, delay=0.05)
        hosts.change(1 - far, delay=0)
        world.run(send_until_over, 1 - far, 100)
        told = world.run(send, 100, 1000)[1]
        assert told[far] < told[1 - far] / 3


def test_messages_avoid_a_narrow_link(hosts, world):
    """Messages of some slots go over the faster one of two links, once both have been full."""
    for narrow in (0, 1):
        hosts.change(narrow, rate=RATE / 20)
        hosts.change(1 - narrow, rate=RATE)
        world.run(send, 4 << 20)
        world.run(send_until_over, 1 - narrow, 50_000)


def test_faster_link_is_lost(hosts, world):
    """Messages that go over one link alone, since it is faster, go over the other one when it is dead."""
    hosts.change(1, delay=0.05)
    world.run(send_until_over, 0, 100)
    for rank in range(2):
        world.submit(rank, send_until_one_is_left, 100)
    hosts.change(0, loss=1)
    assert world.collect() == [["10.77.1.1"], ["10.77.1.2"]]
    hosts.change(0, loss=0)
    world.run(send_until_over, 0, 100)


def test_loss_in_a_message(hosts, world):
    """Packets begin to be lost, and to take longer, in the middle of a message."""
    world.run(send, 100)
    for link in range(2):
        hosts.change(link, rate=RATE)
    for rank in range(2):
        world.submit(rank, send, 8 << 20)
    begun = hosts.sent(0, 0)
    await_that(lambda: hosts.sent(0, 0) > begun + (1 << 20))
    for link in range(2):
        hosts.change(link, loss=0.03, delay=0.02, rate=0)
    assert sum(world.collect()[0]) > 8 << 20


@pytest.mark.parametrize("side", [0, 1])
def test_one_direction(hosts, world, side):
    """A link over which a host hears nothing any more, and is heard, is left out until it carries again."""
    for link in range(2):
        hosts.change(link, delay=0.01)
    world.run(carried)
    for rank in range(2):
        world.submit(rank, send_until_one_is_left, 100_000)
    hosts.change(1, side, loss=1)
    assert world.collect() == [["10.77.0.1"], ["10.77.0.2"]]
    hosts.change(1, side, loss=0)
    world.run(carried)


@pytest.mark.parametrize("side", [0, 1])
def test_one_direction_of_all_links(hosts, world, side, tmp_path):
    """Where one host hears nothing, and is heard, each loses the other after XVCOMM_PEER_TIMEOUT, however long packets take."""
    for link in range(2):
        hosts.change(link, delay=0.05)
    world.run(carried)
    for rank in range(2):
        world.submit(rank, send_on, 100_000, tmp_path / "never")
    for link in range(2):
        hosts.change(link, side, loss=1)
    begun = time.monotonic()
    for rank, error in enumerate(world.collect()):
        assert isinstance(error, PeerLost) and error.peer == 1 - rank, error
    assert time.monotonic() - begun < 10 * PEER_SECONDS


def test_links_that_come_and_go(hosts, world, tmp_path):
    """Now one link is dead and then the other one, in one direction or both, but never both links."""
    world.run(carried)
    for rank in range(2):
        world.submit(rank, send_on, 500_000, tmp_path / "over")
    draw = random.Random(3)
    for _ in range(8):
        link, sides = draw.randrange(2), draw.choice(((0,), (1,), (0, 1)))
        hosts.change(link, *sides, loss=1)
        time.sleep(draw.uniform(0.1, 0.9))
        hosts.change(link, *sides, loss=0)
        time.sleep(draw.uniform(0.1, 0.9))
    (tmp_path / "over").touch()
    sent, received = world.collect()
    assert sent == received > 8


@pytest.mark.parametrize("hosts", [{"congestion": "bbr"}], indirect=True, ids=["bbr"])
def test_congestion_control_of_far_hosts(hosts):
    """It is the system's, also if that makes pauses between packets."""
    for link in range(2):
        hosts.change(link, delay=0.01)
    with ranks(hosts) as world:
        assert world.run(find_congestion) == [["bbr"], ["bbr"]]
