"""Two networks of this process whose rails of RDMA go over the fake provider, and messages through their rings."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time

import numpy as np
from cards import FakeCards

from xvcomm.backends.host.device import HostDevice
from xvcomm.config import Config
from xvcomm.memory.readers import view
from xvcomm.memory.ring import Message, Reason, RingLayout
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import UINT8
from xvcomm.types.opcode import OpCode
from xvcomm.types.route import RDMA, Route
from xvcomm.wire.network import Network

SECONDS, HOST = 120, "127.0.0.1"
LAYOUT = RingLayout(2, 4, 8 << 10, wired=True)
SIZES = (1, 8, 700, 1024, 1025, 5000, 16 << 10, 100_000, 65_536, 0, 300_001)
_names, _GROUP = itertools.count(1), 1


def until(condition):
    """Wait for a condition."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.002)


class Hosts:
    """Two networks, joined by one connection and some queue pairs.

    Attributes:
        lost: what each was told of the other's loss.
    """

    def __init__(self, stack, library, shared, pairs=2, devices=None, each=({}, {}), asynchronous=False, **how):
        """Make them.

        Args:
            pairs: queue pairs.
            devices: what moves their messages; host memory if None.
            asynchronous: see `Network`.
            each, how: of each one's FakeCards, and of both's.
        """
        listeners = [socket.create_server((HOST, 0)) for _ in range(2)]
        ports = [listener.getsockname()[1] for listener in listeners]
        self.cards = [FakeCards(library, shared, seed=7 * index, **each[index], **how) for index in range(2)]
        self.numbers = [0, *range(RDMA, RDMA + pairs)]
        self.lost, self.networks = [[], []], []
        for index, card in enumerate(self.cards):
            stack.callback(card.close)
            routes = [Route(HOST, HOST, ports[1 - index], ("lo", "lo"), number) for number in self.numbers]
            network = Network(
                index, 2, b"key", [listeners[index]], lambda _, routes=routes: routes, 5.0, 0, 1, None,
                lambda rank, why, index=index: self.lost[index].append(why), lambda rank: None, cards=card,
                asynchronous=asynchronous,
            )  # fmt: skip
            self.networks.append(network)
            stack.callback(network.close)
        self.devices = devices or [HostDevice(Config()) for _ in range(2)]

    def rings(self, source=0, layout=LAYOUT):
        """A producer's and a consumer's end of a new ring."""
        name = next(_names)
        for network in self.networks:
            network.enter(_GROUP)
        return [
            self.networks[index].open_ring(
                1 - index, name, layout, Deadline.after(SECONDS), group=_GROUP, peer=1 - index, producer=index == source
            )
            for index in (source, 1 - source)
        ]

    def register(self, index, array):
        """Register an array at one end; leaving the block, or closing it, ends that."""
        held = contextlib.ExitStack()
        held.callback(self.networks[index].register(view(array)))
        return held

    def rails(self, index=0):
        """Numbers of the rails that are up."""
        return sorted(rail.number for rail in self.networks[index].rails())

    def meet(self):
        """Wait until all rails are up at both ends."""
        until(lambda: self.rails(0) == self.rails(1) == self.numbers)

    def bytes_by_rdma(self):
        """How many bytes have gone over rails of RDMA from the first network to the second."""
        return sum(rail.sent for rail in self.networks[0].rails() if rail.number >= RDMA)


def put(device, end, data, number):
    """Send a message."""
    _move(device, end, data, number, received=False)


def get(device, end, data, number):
    """Receive one."""
    _move(device, end, data, number, received=True)


def _move(device, end, data, number, *, received):
    (stream,) = device.streams(1)
    stream.deadline = Deadline.after(SECONDS)
    there = device.empty(max(1, data.nbytes)) if device.capabilities().asynchronous else None
    address = there.address if there else data.ctypes.data
    if there and not received:
        device.copy(address, data.ctypes.data, data.nbytes, stream)
    call = device.get if received else device.put
    call(end, address, Message(int(OpCode.SEND), UINT8.code, data.nbytes, number), stream)
    stream.synchronize()
    if there and received:
        device.copy(data.ctypes.data, address, data.nbytes, stream)
        stream.synchronize()


def carry(hosts, ends, sizes=SIZES, source=0, seed=0, halfway=None):
    """Send messages of these sizes, and compare what arrives."""
    chance = np.random.default_rng(seed)
    sent = [chance.integers(0, 256, size, np.uint8) for size in sizes]
    received = [np.zeros(size, np.uint8) for size in sizes]
    failures = []

    def move(call, end, arrays, device):
        try:
            for number, data in enumerate(arrays):
                call(device, end, data, number)
                if call is put and halfway and number == len(arrays) // 2:
                    halfway()
        except BaseException as error:
            failures.append(error)

    producer, consumer = ends
    threads = [
        threading.Thread(target=move, args=(put, producer, sent, hosts.devices[source])),
        threading.Thread(target=move, args=(get, consumer, received, hosts.devices[1 - source])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
    for number, (a, b) in enumerate(zip(sent, received, strict=True)):
        np.testing.assert_array_equal(a, b, err_msg=f"message {number} of {len(a)} bytes")


def close(*ends):
    """Close the ends of rings, as a communicator that is left does."""
    for end in ends:
        end.abort(Reason.LEFT.word(0))
        end.close()
