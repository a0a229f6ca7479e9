"""Checks of point-to-point messages, called on every rank of a communicator of two or more."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np

from xvcomm.comm.communicator import Communicator
from xvcomm.engine.inflight.work import Work
from xvcomm.testing.arrays import Array, Room, arrays
from xvcomm.testing.cases import assert_same_bits, distinct
from xvcomm.testing.inside import context
from xvcomm.types.dtype import BY_NAME


def check_blocking(comm: Communicator, dtype: str, count: int) -> None:
    """Every rank to every other, one pair after the other."""
    a, kind = arrays(comm), BY_NAME[dtype]
    for source in range(comm.size):
        for target in range(comm.size):
            want = distinct(kind, (count,), seed=source * comm.size + target)
            if source == target:
                continue
            if comm.rank == source:
                comm.send(a.put(want), target, tag=count)
            elif comm.rank == target:
                room = Room(a, kind, count)
                buffer = room.array
                assert comm.recv(buffer, source, tag=count) is buffer
                assert_same_bits(a.get(buffer), want, f"recv of {count} x {dtype} from rank {source}")
                room.check()


def rings_in_gpu_memory(comm: Communicator, count: int) -> list[int]:
    """Exchange with every other rank; returns the ranks with whom the slots of both rings are in GPU memory."""
    a, found = arrays(comm), []
    for peer in range(comm.size):
        if peer != comm.rank:
            sent, room = a.put(np.full(count, comm.rank, np.float32)), Room(a, BY_NAME["float32"], count)
            with comm.group():
                comm.send(sent, peer)
                comm.recv(room.array, peer)
            assert (a.get(room.array) == peer).all()
            room.check()
            ends = [end for end in context(comm).rings.ends() if end.peer == peer]
            assert len({end.layout.apart for end in ends}) == 1
            assert all(bool(end.slots) == end.layout.apart for end in ends)
            found += [peer] if ends[0].layout.apart else []
    return found


def check_exchange(comm: Communicator, dtype: str, count: int) -> None:
    """All ranks send to the next and receive from the previous one: with sendrecv, in the background, as a group."""
    a, kind = arrays(comm), BY_NAME[dtype]
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    mine, theirs = distinct(kind, count, comm.rank), distinct(kind, count, before)
    x = a.put(mine)
    for way in ("sendrecv", "background", "group", "blocking in a group"):
        room = Room(a, kind, count)
        buffer = room.array
        if way == "sendrecv":
            assert comm.sendrecv(x, after, buffer, before, send_tag=comm.rank, recv_tag=before) is buffer
        elif way == "background":
            sending, receiving = comm.isend(x, after), comm.irecv(buffer, before)
            assert receiving.wait() is buffer
            assert sending.wait() is x
        elif way == "group":
            with comm.group():
                sending, receiving = comm.isend(x, after), comm.irecv(buffer, before)
            assert receiving.result() is buffer and sending.synchronize() is x
        else:
            with comm.group():
                comm.send(x, after)
                assert comm.recv(buffer, before) is buffer
        assert_same_bits(a.get(buffer), theirs, f"{way} of {count} x {dtype}")
        room.check()
    assert_same_bits(a.get(x), mine, "what was sent")


def check_group_beyond_rings(comm: Communicator, nbytes: int, messages: int) -> None:
    """A group of messages to and from all ranks, each larger than a ring, in a different order on each rank."""
    a, order = arrays(comm), random.Random(comm.rank)
    peers = [r for r in range(comm.size) if r != comm.rank]
    calls = [(peer, sending) for peer in peers for sending in (True, False)] * messages
    order.shuffle(calls)
    numbers: dict[tuple[int, bool], int] = {}
    received: list[tuple[Any, Work, Array]] = []
    sent = []
    with comm.group():
        for peer, sending in calls:
            number = numbers[peer, sending] = numbers.get((peer, sending), -1) + 1
            source, target = (comm.rank, peer) if sending else (peer, comm.rank)
            data = _message(source, target, number, nbytes)
            if sending:
                sent.append(comm.isend(a.put(data), peer, number))
            else:
                buffer = a.put(np.zeros_like(data))
                received.append((buffer, comm.irecv(buffer, peer, number), data))
    for buffer, work, want in received:
        assert work.wait() is buffer
        assert_same_bits(a.get(buffer), want, "a message of a group")
    for work in sent:
        work.wait()


def check_many_in_flight(comm: Communicator, many: int) -> None:
    """Background messages of all sizes to and from two neighbours, waited for in any order."""
    a, order = arrays(comm), random.Random(7 + comm.rank)
    sizes = [random.Random(i).choice((0, 1, 8, 100, 4096, 70_000, 300_001)) for i in range(many)]
    works: list[tuple[Work, Any, Any]] = []
    neighbours = {(comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size}
    for i, size in enumerate(sizes):
        for peer in neighbours:
            works.append((comm.isend(a.put(_message(comm.rank, peer, i, size)), peer, tag=i), None, None))
            buffer = a.put(np.zeros(size, np.uint8))
            works.append((comm.irecv(buffer, peer, tag=i), buffer, _message(peer, comm.rank, i, size)))
    order.shuffle(works)
    for work, buffer, want in works:
        got = work.wait()
        if buffer is not None:
            assert got is buffer
            assert_same_bits(a.get(buffer), want, "a message among many")
    for work, _, _ in works:
        work.synchronize()
        assert work.done()


def check_crosswise_waits(comm: Communicator) -> None:
    """Each rank first waits for the last of many messages; those that other ranks wait for must progress meanwhile."""
    a, many, count = arrays(comm), 6, 300_001
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for blocking in ("nothing", "receives", "sends") * 3:
        going = [a.put(_message(comm.rank, after, i, count)) for i in range(many)]
        buffers = [a.put(np.zeros(count, np.uint8)) for _ in range(many)]
        works = [comm.isend(x, after, i) for i, x in enumerate(going) if blocking != "sends"]
        works += [comm.irecv(x, before, i) for i, x in enumerate(buffers) if blocking != "receives"]
        for i in range(many):
            if blocking == "sends":
                comm.send(going[i], after, i)
            elif blocking == "receives":
                comm.recv(buffers[i], before, i)
        for work in reversed(works):
            a.get(work.wait())
        for i, buffer in enumerate(buffers):
            assert_same_bits(a.get(buffer), _message(before, comm.rank, i, count), f"a message, blocking: {blocking}")


def check_behind_background(comm: Communicator) -> None:
    """Blocking messages follow background messages of the same pair."""
    a = arrays(comm)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sizes = (2_000_000, 10, 3_000_000, 0, 70_000)
    coming = [a.put(np.zeros(n, np.uint8)) for n in sizes]
    going = [a.put(_message(comm.rank, after, i, n)) for i, n in enumerate(sizes)]
    works = [comm.irecv(buffer, before, i) for i, buffer in enumerate(coming[:3])]
    works += [comm.isend(x, after, i) for i, x in enumerate(going[:3])]
    for i in (3, 4):
        comm.sendrecv(going[i], after, coming[i], before, i, i)
    for i in (4, 3, 2, 1, 0):  # all have arrived once the last has
        assert_same_bits(a.get(coming[i]), _message(before, comm.rank, i, sizes[i]), f"message {i}")
    for work in works:
        work.wait()


def check_receive_first(comm: Communicator) -> None:
    """Receives that are posted before the sends; they are not complete before."""
    a = arrays(comm)
    peers = [r for r in range(comm.size) if r != comm.rank]
    buffers = {peer: a.put(np.zeros(1000, np.int32)) for peer in peers}
    works = {peer: comm.irecv(buffers[peer], peer, tag=5) for peer in peers}
    comm.barrier()
    assert not any(work.done() for work in works.values())
    comm.barrier()
    for peer in peers:
        comm.isend(a.put(np.full(1000, comm.rank + peer, np.int32)), peer, tag=5)
    for peer in peers:
        want = np.full(1000, peer + comm.rank, np.int32)
        assert_same_bits(a.get(works[peer].wait()), want, f"message from rank {peer}")


def check_small_send_returns(comm: Communicator, messages: int = 5) -> None:
    """Small sends, as many as a ring has slots at most, do not wait for their receiver, and their array may be reused."""
    a = arrays(comm)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x = a.put(np.full(4, comm.rank))
    for tag in range(messages):
        comm.send(x, after, tag)
        a.fill(x, np.full(4, comm.rank + 100 * (tag + 1)))
    comm.barrier()
    for tag in range(messages):
        got = comm.recv(a.put(np.zeros(4, int)), before, tag)
        assert_same_bits(a.get(got), np.full(4, before + 100 * tag), f"message {tag}")


def check_order(comm: Communicator, many: int) -> None:
    """Messages of a pair arrive in the order of sending, whatever their tags and sizes."""
    a = arrays(comm)
    if comm.rank == 0:
        for i in range(many):
            comm.send(a.put(_message(0, 1, i, i % 50)), 1, tag=i * i % 11)
        time.sleep(0.02)
        comm.isend(a.put(np.arange(3)), 1, tag=(1 << 62) - 1).wait()
    elif comm.rank == 1:
        time.sleep(0.02)  # until the ring is full
        for i in range(many):
            got = comm.recv(a.put(np.zeros(i % 50, np.uint8)), 0, tag=i * i % 11)
            assert_same_bits(a.get(got), _message(0, 1, i, i % 50), f"message {i}")
        got = comm.recv(a.put(np.zeros(3, int)), 0, tag=(1 << 62) - 1)
        assert_same_bits(a.get(got), np.arange(3), "the last message")
    comm.barrier()


def check_beside_collectives(comm: Communicator) -> None:
    """Messages and collectives are independent: a waiting receive blocks no collective."""
    a = arrays(comm)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    buffer = a.put(np.zeros(400_000))
    comm.barrier()  # joins the native library, which loads kernels: behind a receive that waits, this would wait too
    work = comm.irecv(buffer, before)
    totals = [comm.all_reduce(a.put(np.full(50_000, float(i)))) for i in range(5)]
    for i, total in enumerate(totals):
        assert_same_bits(a.get(total), np.full(50_000, float(i * comm.size)), f"all_reduce {i} before")
    sending = comm.isend(a.put(np.full(400_000, float(comm.rank))), after)
    more = [comm.all_reduce(a.put(np.full(50_000, float(i))), async_op=True) for i in range(5)]
    assert_same_bits(a.get(work.wait()), np.full(400_000, float(before)), "the message")
    sending.wait()
    for i, later in enumerate(more):
        want = np.full(50_000, float(i * comm.size))
        assert_same_bits(a.get(later.wait()), want, f"all_reduce {i} behind")


def check_objects(comm: Communicator) -> None:
    """Objects from each rank to the next, on several channels."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for number, obj in enumerate((None, "text", {"rank": [1, 2]}, np.arange(5).tolist(), b"z" * 3_000_000)):
        if comm.rank == 0:
            comm.send_object(obj, after, tag=number, channel=number)
            assert comm.recv_object(before, tag=number, channel=number) == obj
        else:
            got = comm.recv_object(before, tag=number, channel=number)
            assert got == obj
            comm.send_object(got, after, tag=number, channel=number)


def _message(source: int, target: int, number: int, nbytes: int) -> Array:
    """Bytes that are unique to a message."""
    return np.random.default_rng((source, target, number)).integers(0, 256, nbytes, dtype=np.uint8)
