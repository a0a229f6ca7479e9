"""Checks of channels, whose messages are not ordered with each other, and of probes, on every rank of two or more."""

from __future__ import annotations

import contextlib
import random

import numpy as np

from xvcomm.comm.communicator import Communicator
from xvcomm.engine.probe import Probe
from xvcomm.engine.session.rings import CHANNELS
from xvcomm.testing.arrays import Array, arrays
from xvcomm.testing.cases import assert_same_bits, distinct
from xvcomm.testing.signals import Signals
from xvcomm.types.dtype import BY_NAME

_LARGE = 3_000_001
"""Bytes of a message that does not fit the ring of a channel other than 0."""


def check_channels_pass(comm: Communicator) -> None:
    """A message that is not received yet, or not sent yet, blocks no other channel, also in groups."""
    a = arrays(comm)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sizes = [(1, _LARGE), (2, 10), (1, _LARGE), (2, 100_000), (2, 0)]
    for grouped in (False, True):
        together = comm.group if grouped else contextlib.nullcontext
        going = [a.put(_message(comm.rank, after, i, n)) for i, (_, n) in enumerate(sizes)]
        coming = [a.put(np.zeros(n, np.uint8)) for _, n in sizes]
        last = a.put(np.zeros(7))
        waiting = comm.irecv(last, before, channel=3)
        received = {}
        with together():
            works = [comm.isend(x, after, i, channel=sizes[i][0]) for i, x in enumerate(going)]
            for i in (1, 3, 4):
                received[i] = comm.irecv(coming[i], before, i, channel=2)
        for channel in (2, 1):  # in the opposite order of sending
            for i, (c, n) in enumerate(sizes):
                if c == channel:
                    want = _message(before, comm.rank, i, n)
                    assert_same_bits(a.get(received[i].wait()), want, f"message {i} on channel {channel}")
            if channel == 2:
                with together():
                    for i in (0, 2):
                        received[i] = comm.irecv(coming[i], before, i, channel=1)
            x, y = a.put(np.full(3, comm.rank)), a.put(np.zeros(3, int))
            for other in (0, 4):
                assert comm.sendrecv(x, after, y, before, channel=other) is y
                assert_same_bits(a.get(y), np.full(3, before), f"a message on channel {other}")
        comm.send(a.put(np.full(7, float(comm.rank))), after, channel=3)
        assert_same_bits(a.get(waiting.wait()), np.full(7, float(before)), "what was waited for all the time")
        for sent in works:
            sent.wait()


def check_channels_pass_in_blocking_groups(comm: Communicator) -> None:
    """A blocking group in which messages of one channel must arrive before those of the other can."""
    a = arrays(comm)
    order = [(channel, number) for number in range(3) for channel in (1, 2)]
    size = {1: _LARGE, 2: 1000}
    for source in range(0, comm.size - 1, 2):
        target = source + 1
        if comm.rank == source:
            data = [a.put(_message(source, target, 10 * c + n, size[c])) for c, n in order]
            with comm.group():
                for x, (channel, number) in zip(data, order, strict=True):
                    comm.send(x, target, number, channel=channel)
            a.synchronize()
        elif comm.rank == target:
            for channel, number in sorted(order, reverse=True, key=lambda place: (place[0], -place[1])):
                got = comm.recv(a.put(np.zeros(size[channel], np.uint8)), source, number, channel=channel)
                want = _message(source, target, 10 * channel + number, size[channel])
                assert_same_bits(a.get(got), want, f"message {number} on channel {channel}")


def check_every_channel(comm: Communicator) -> None:
    """All channels of two neighbours at once, with several messages each: ordered within a channel only."""
    a, order = arrays(comm), random.Random(comm.rank)
    many = [(channel, number) for number in range(3) for channel in range(CHANNELS)]
    size = {key: random.Random(31 * key[0] + key[1]).choice((0, 8, 5000, 150_000)) for key in many}
    for peer in {(comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size}:
        channels = list(range(CHANNELS))
        order.shuffle(channels)
        sent = [
            comm.isend(a.put(_message(comm.rank, peer, 100 * c + n, size[c, n])), peer, n, channel=c)
            for n in range(3) for c in channels
        ]  # fmt: skip
        order.shuffle(channels)
        received = {
            (c, n): comm.irecv(a.put(np.zeros(size[c, n], np.uint8)), peer, n, channel=c)
            for n in range(3) for c in channels
        }  # fmt: skip
        for (c, n), work in received.items():
            want = _message(peer, comm.rank, 100 * c + n, size[c, n])
            assert_same_bits(a.get(work.wait()), want, f"message {n} on channel {c}")
        for work in sent:
            work.synchronize()


def check_probe(comm: Communicator) -> None:
    """A probe returns the properties of a message, repeatedly, from one rank and from any; a receive takes it."""
    a = arrays(comm)
    cases = [("float32", 1000, 7), ("uint8", 0, 0), ("bfloat16", 3, (1 << 62) - 1), ("complex128", 150_001, 1)]
    for source in range(comm.size):
        for channel, (dtype, count, tag) in zip((0, 5, 5, CHANNELS - 1), cases, strict=True):
            kind = BY_NAME[dtype]
            signals = Signals(comm)
            for target in range(comm.size):
                if target == source:
                    continue
                want = distinct(kind, count, seed=source + 10 * target)
                if comm.rank == source:
                    signals.hear(f"nothing at {target}", [target])
                    comm.isend(a.put(want), target, tag, channel=channel)
                elif comm.rank == target:
                    assert comm.iprobe(channel=channel) is comm.iprobe(source, channel=channel) is None
                    signals.tell(f"nothing at {target}")
                    found = Probe(source, tag, count * kind.itemsize, kind)
                    assert comm.probe(None if tag else source, channel=channel) == found
                    assert comm.iprobe(channel=channel) == comm.iprobe(source, channel=channel) == found
                    assert comm.probe(channel=channel) == found
                    got = comm.recv(a.put(np.zeros(count, kind.numpy)), source, tag, channel=channel)
                    assert_same_bits(a.get(got), want, f"{count} x {dtype} after a probe")
                    assert comm.iprobe(channel=channel) is comm.iprobe(source, channel=channel) is None


def check_probe_in_turns(comm: Communicator) -> None:
    """Probes of several senders alternate between them, and each one's messages come in order."""
    a, rounds = arrays(comm), 2  # as many as fit any ring
    for target in range(comm.size):
        if comm.rank != target:
            for number in range(rounds):
                comm.send(a.put(np.array([comm.rank, number])), target, number, channel=2)
            a.synchronize()
        comm.all_gather_object("all is sent")
        if comm.rank == target:
            found = []
            others = [rank for rank in range(comm.size) if rank != target]
            for source in others:  # between hosts, what was sent may come later than the collective
                comm.probe(source, channel=2)
            for _ in range(rounds * len(others)):
                probe = comm.probe(channel=2)
                got = a.get(comm.recv(a.put(np.zeros(2, int)), probe.src, probe.tag, channel=2))
                assert_same_bits(got, np.array([probe.src, probe.tag]), "a message from any rank")
                found.append((probe.tag, probe.src))
            for number in range(rounds):
                turn = found[number * len(others) : (number + 1) * len(others)]
                assert sorted(turn) == [(number, rank) for rank in others], f"round {number}: {turn}"
    comm.barrier()


def check_probe_behind_receives(comm: Communicator) -> None:
    """A probe does not report messages that posted receives will take, whether they have arrived or not."""
    a = arrays(comm)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    works = [comm.irecv(a.put(np.zeros(n, np.uint8)), before, i, channel=6) for i, n in enumerate((10, _LARGE))]
    signals = Signals(comm)
    signals.tell("posted")
    signals.hear("posted", [after])
    going = [
        comm.isend(a.put(_message(comm.rank, after, i, n)), after, i, channel=6) for i, n in enumerate((10, _LARGE, 20))
    ]
    found = Probe(before, 2, 20, BY_NAME["uint8"])
    assert comm.probe(before, channel=6) == found
    assert comm.probe(channel=6) == found
    for i, work in enumerate(works):
        assert_same_bits(a.get(work.wait()), _message(before, comm.rank, i, (10, _LARGE)[i]), f"message {i}")
    assert comm.iprobe(before, channel=6) == found
    got = comm.recv(a.put(np.zeros(20, np.uint8)), before, 2, channel=6)
    assert_same_bits(a.get(got), _message(before, comm.rank, 2, 20), "message 2")
    assert comm.iprobe(channel=6) is None
    for work in going:
        work.synchronize()


def check_probe_round_the_ledger(comm: Communicator) -> None:
    """Many more messages than ledger entries, each probed from any rank, some received without a probe."""
    a = arrays(comm)
    for number in range(200):
        size = number * 37 % 1000
        if comm.rank == 0:
            comm.send(a.put(_message(0, 1, number, size)), 1, number, channel=number % 2)
        elif comm.rank == 1:
            if number % 3:
                assert comm.probe(channel=number % 2) == Probe(0, number, size, BY_NAME["uint8"])
            got = comm.recv(a.put(np.zeros(size, np.uint8)), 0, number, channel=number % 2)
            assert_same_bits(a.get(got), _message(0, 1, number, size), f"message {number}")
    comm.barrier()


CHECKS = (
    check_channels_pass, check_channels_pass_in_blocking_groups, check_every_channel, check_probe, check_probe_in_turns,
    check_probe_behind_receives, check_probe_round_the_ledger,
)  # fmt: skip


def _message(source: int, target: int, number: int, nbytes: int) -> Array:
    """Bytes that are unique to a message."""
    return np.random.default_rng((source, target, number)).integers(0, 256, nbytes, dtype=np.uint8)
