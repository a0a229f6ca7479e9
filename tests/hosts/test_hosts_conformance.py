"""The suites of collectives and messages, with each rank on a host of its own by label."""

import ctypes
import os
import time

import numpy as np
import psutil
import pytest

from xvcomm.memory.ring import FROM_ARRAY_BYTES
from xvcomm.testing import World, collectives, pointtopoint, wires
from xvcomm.testing.cases import reductions
from xvcomm.testing.inside import context
from xvcomm.types.dtype import DTYPES
from xvcomm.types.opcode import OpCode

PLACES = [("a,b", None, 3), ("a:2,b:1", None, 5), ("a,b,a,b", "x:2,y:2", 2)]


@pytest.fixture(scope="module", params=PLACES, ids=lambda place: "-".join(map(str, place)))
def world(request):
    """Ranks on several hosts, of which each label is an island; each with so many threads that carry, and connections."""
    hosts, islands, threads = request.param
    with World(
        hosts=hosts, islands=islands, env={"XVCOMM_DEVICE": "host", "XVCOMM_WIRE_THREADS": str(threads)}
    ) as ranks:
        yield ranks


@pytest.mark.parametrize("count", wires.COUNTS)
@pytest.mark.parametrize("check", [collectives.check_all_reduce, collectives.check_reduce])
def test_reducing(world, check, count):
    world.run(check, "float32", "sum", count)


@pytest.mark.parametrize("rows", wires.ROWS)
@pytest.mark.parametrize("check", wires.MOVING)
def test_moving(world, check, rows):
    world.run(check, "float32", rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions(world, dtype):
    world.run(collectives.check_reductions, dtype.name, [str(op) for op in reductions(dtype)])


def copied(comm, nbytes):
    """Bytes of its rings that a rank has filled to reduce an array of so many bytes; the sum."""
    x = np.ones(nbytes, np.uint8)
    comm.all_reduce(x)
    ends = [end for end in context(comm).rings.ends() if end.producer]
    rings = [
        np.ctypeslib.as_array((ctypes.c_uint8 * e.layout.capacity).from_address(e.address + e.layout.data))
        for e in ends
    ]
    return sum(int(np.count_nonzero(ring)) for ring in rings), int(x.min())


def test_long_messages_of_collectives_go_from_the_array():
    with World(hosts="a,b", env={"XVCOMM_DEVICE": "host"}) as ranks:
        assert ranks.run(copied, FROM_ARRAY_BYTES - 1) == [(FROM_ARRAY_BYTES - 1, 2)] * 2
    with World(hosts="a,b", env={"XVCOMM_DEVICE": "host"}) as ranks:
        assert ranks.run(copied, 2 * FROM_ARRAY_BYTES) == [(0, 2)] * 2  # each sends a half


def send_first(comm, nbytes):
    """Both send before they receive."""
    x, y, other = np.full(nbytes, comm.rank + 1, np.uint8), np.zeros(nbytes, np.uint8), 1 - comm.rank
    comm.send(x, other)
    comm.recv(y, other)
    return int(y.min()), int(y.max())


def test_a_message_that_fits_the_ring_is_sent_without_its_receiver():
    with World(hosts="a,b", env={"XVCOMM_DEVICE": "host"}) as ranks:
        for nbytes in (FROM_ARRAY_BYTES, 8 * FROM_ARRAY_BYTES, 4 << 20):  # the last one fills it
            assert ranks.run(send_first, nbytes) == [(2, 2), (1, 1)]


def communicators_one_after_the_other(comm):
    """Each is closed as soon as this rank is done, while messages for the others are on their way."""
    for _ in range(200):
        with comm.split(0) as group:
            group.barrier()
    return comm.refused()


def test_communicators_one_after_the_other(world):
    """No rank misses what another one sent before it left, and no connection is lost."""
    assert not any(world.run(communicators_one_after_the_other))


@pytest.mark.parametrize("check", wires.OTHERS)
def test_others(world, check):
    world.run(check)


@pytest.mark.parametrize("check", wires.MESSAGES)
def test_messages(world, check):
    world.run(check)


def send_early(comm):
    """A large message of which a part has arrived before the receiver offers its array; and one that waits for its sender."""
    x = np.arange(2_500_000) + comm.rank
    comm.barrier()
    for late in (0, 1):
        if comm.rank == 0:
            time.sleep(0.1 * (1 - late))
            comm.send(x, 1)
        elif comm.rank == 1:
            got = np.zeros_like(x)
            time.sleep(0.1 * late)
            comm.recv(got, 0)
            assert (got == np.arange(2_500_000)).all()
    comm.barrier()


def test_early_senders(world):
    world.run(send_early)


@pytest.mark.parametrize("count", [*wires.MESSAGE_COUNTS, 2_000_003])
def test_sizes_of_messages(world, count):
    world.run(pointtopoint.check_blocking, "float32", count)
    world.run(pointtopoint.check_exchange, "float32", count)


def test_order(world):
    """More messages under way than the ledger has entries."""
    world.run(pointtopoint.check_order, 200)
    world.run(pointtopoint.check_many_in_flight, 100)


def send_little(comm):
    """Bytes of the rings to other hosts, and of the memory that they take, after small messages."""
    x = np.zeros(1000)
    for _ in range(100):
        comm.all_reduce(x)
        comm.sendrecv(x, (comm.rank + 1) % comm.size, x.copy(), (comm.rank - 1) % comm.size)
    rings = [m for m in psutil.Process().memory_maps(grouped=False) if "/memfd:xvcomm" in m.path]
    taken = (os.stat(f"/proc/self/map_files/{m.addr}").st_blocks * 512 for m in rings)
    return sum(m.size for m in rings), sum(taken)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may look at a mapping's file")
def test_memory():
    """A ring takes memory only as far as messages fill it."""
    with World(hosts="a,b,a,b", islands="x:2,y:2", env={"XVCOMM_DEVICE": "host"}) as ranks:
        for size, resident in ranks.run(send_little):
            assert resident < 1 << 20 < size


def carry(comm, count):
    """Send large messages until all connections are there; what each has carried."""
    x = np.ones((2, 1 << 20), np.uint8)
    until = time.monotonic() + 30
    while not all(comm.all_gather_object(len(comm.rails()) == count)):
        assert time.monotonic() < until, comm.rails()
        comm.all_to_all(x)
    return [(rail.rank, rail.number, rail.sent, rail.received) for rail in comm.rails()]


def test_rails():
    """Each connection counts its bytes, which together are those of the messages at least."""
    with World(hosts="a,b", env={"XVCOMM_DEVICE": "host", "XVCOMM_WIRE_THREADS": "3"}) as ranks:
        for me, rails in enumerate(ranks.run(carry, 3)):
            peers, numbers, sent, received = zip(*rails, strict=True)
            assert set(peers) == {1 - me} and sorted(numbers) == [0, 1, 2]
            assert sum(sent) > 1 << 20 and sum(received) > 1 << 20


def exchange(comm):
    """A reduction, and messages one way and both ways; what each connection has carried of them, for the other rank."""
    x, little, other = np.ones(1 << 20), np.ones(3), 1 - comm.rank
    comm.all_reduce(x)
    for _ in range(100):  # more than are remembered
        comm.sendrecv(little, other, little.copy(), other, send_tag=5, recv_tag=5)
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        comm.recv(x, 0)
    comm.barrier()
    return [
        (str(OpCode(r.op)), r.nbytes, sum(s.sent for s in r.shares), sum(s.received for s in r.shares))
        for r in comm.history()
    ]


def test_carried():
    """Records have the bytes that went and came, each of them once, as far as they are remembered."""
    with World(hosts="a,b", env={"XVCOMM_DEVICE": "host", "XVCOMM_WIRE_THREADS": "3"}) as ranks:
        first, second = ranks.run(exchange)
    large = 8 << 20
    assert first[0] == second[0] == ("all_reduce", large, large, large)
    assert [r[0] for r in first[-2:]] == ["send", "barrier"] and [r[0] for r in second[-2:]] == ["recv", "barrier"]
    assert first[-2][1:] == (large, large, 0) and second[-2][1:] == (large, 0, large)
    for records in (first, second):
        messages = records[1:-2]
        sent = [r[1:] for r in messages if r[0] == "send"]
        received = [r[1:] for r in messages if r[0] == "recv"]
        assert len(sent) == len(received) == 100
        assert sent[-60:] == [(24, 24, 0)] * 60 and received[-60:] == [(24, 0, 24)] * 60
        assert sent[0] == received[0] == (24, 0, 0)


def train(comm):
    """Data parallel in each island, pipeline parallel between them; how each operation went."""
    data, pipeline = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
    x = np.ones(1000)
    data.all_reduce(x)
    if pipeline.rank == 0:
        pipeline.send(x, 1)
    else:
        pipeline.recv(x, 0)
    comm.all_reduce(x)
    comm.sendrecv(x, comm.rank, x.copy(), comm.rank)
    return [(str(OpCode(record.op)), record.way) for record in comm.history()]


def test_ways():
    """The flight recorder shows what carries each operation: the native library in an island, the wire between hosts."""
    with World(hosts="a:2,b:2", env={"XVCOMM_DEVICE": "host"}) as ranks:
        for rank, ways in enumerate(ranks.run(train)):
            message = ("send" if rank < 2 else "recv", "tcp")
            assert ways[-5:-2] == [("all_reduce", "host"), message, ("all_reduce", "host + tcp")]
            assert {way for _, way in ways[-2:]} == {""}  # to itself
