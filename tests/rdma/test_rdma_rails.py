"""Rails of RDMA between two networks of this process, over the fake provider: rings stay equal, whatever fails."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cards import FakeCards
from fabric import DROP, REFUSE, STATUS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xvcomm.abc.device import RingStalled, RingStopped
from xvcomm.backends.host.device import HostDevice
from xvcomm.backends.rdma.queues import STATUSES
from xvcomm.config import Config
from xvcomm.memory.ring import Message, Reason, RingLayout
from xvcomm.memory.segment import Segment
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import UINT8
from xvcomm.types.opcode import OpCode
from xvcomm.types.route import RDMA, Route
from xvcomm.wire.network import Network

SECONDS, HOST = 30, "127.0.0.1"
LAYOUT = RingLayout(2, 4, 8 << 10, wired=True)
SIZES = (1, 8, 700, 1024, 1025, 5000, 16 << 10, 100_000, 65_536, 0, 300_001)
_names = itertools.count(1)


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

    def __init__(self, stack, library, shared, pairs=2, **how):
        listeners = [socket.create_server((HOST, 0)) for _ in range(2)]
        ports = [listener.getsockname()[1] for listener in listeners]
        self.cards = [FakeCards(library, shared, seed=7 * index, **how) for index in range(2)]
        self.numbers = [0, *range(RDMA, RDMA + pairs)]
        self.lost, self.networks = [[], []], []
        for index, card in enumerate(self.cards):
            stack.callback(card.close)
            routes = [Route(HOST, HOST, ports[1 - index], ("lo", "lo"), number) for number in self.numbers]
            network = Network(
                index, 2, b"key", [listeners[index]], lambda _, routes=routes: routes, 5.0, 0, 1, None,
                lambda rank, why, index=index: self.lost[index].append(why), lambda rank: None, cards=card,
            )  # fmt: skip
            self.networks.append(network)
            stack.callback(network.close)
        self.devices = [HostDevice(Config()) for _ in range(2)]

    def rings(self, source=0, layout=LAYOUT):
        """A producer's and a consumer's end of a new ring."""
        name = next(_names)
        return [
            self.networks[index].open_ring(1 - index, name, layout, group=1, peer=1 - index, producer=index == source)
            for index in (source, 1 - source)
        ]

    def rails(self, index=0):
        """Numbers of the rails that are up."""
        return sorted(rail.number for rail in self.networks[index].rails())

    def meet(self):
        """Wait until all rails are up at both ends."""
        until(lambda: self.rails(0) == self.rails(1) == self.numbers)

    def bytes_by_rdma(self):
        """How many bytes have gone over rails of RDMA from the first network to the second."""
        return sum(rail.sent for rail in self.networks[0].rails() if rail.number >= RDMA)


@pytest.fixture
def make(fake_verbs, fresh):
    """A function that makes hosts."""
    with contextlib.ExitStack() as stack:
        yield lambda **how: Hosts(stack, fake_verbs, fresh(), **how)


def put(device, end, data, number):
    """Send a message."""
    (stream,) = device.streams(1)
    stream.deadline = Deadline.after(SECONDS)
    device.put(end, data.ctypes.data, Message(int(OpCode.SEND), UINT8.code, data.nbytes, number), stream)
    stream.synchronize()


def get(device, end, data, number):
    """Receive one."""
    (stream,) = device.streams(1)
    stream.deadline = Deadline.after(SECONDS)
    device.get(end, data.ctypes.data, Message(int(OpCode.SEND), UINT8.code, data.nbytes, number), stream)
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


@contextlib.contextmanager
def mapped(nbytes):
    """An array whose memory is unmapped at the end."""
    memory = Segment.anonymous(nbytes)
    yield np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(memory.address))
    memory.close()


def close(*ends):
    """Close the ends of rings, as a communicator that is left does."""
    for end in ends:
        end.abort(Reason.LEFT.word(0))
        end.close()


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("inline", [0, 200])
def test_messages_go_by_rdma(make, delay, inline):
    hosts = make(delay=delay, inline=inline)
    ends = hosts.rings()
    hosts.meet()
    before = hosts.bytes_by_rdma()
    for seed in range(5):
        carry(hosts, ends, seed=seed)
    assert hosts.bytes_by_rdma() - before > 5 * sum(SIZES)
    close(*ends)


FAULTS = {"status": STATUS, "drop": DROP, "refuse": REFUSE}


def break_pair(hosts, victim, fault, ahead, late, status=0):
    """Let one queue pair of a host fail at the request that is so far ahead."""
    pair = next(pair for pair in hosts.cards[victim].pairs if not pair.closed)
    if late:
        pair.fake.be_late()
    if fault == "cut":
        pair.fake.cut()
    elif fault == "event":
        hosts.cards[victim].report("PORT_ERR", [pair])
    else:
        pair.fake.fault(FAULTS[fault], int(pair.fake.record.posted) + 1 + ahead, status)


@given(
    fault=st.sampled_from(["status", "refuse", "cut", "event"]), victim=st.integers(0, 1), ahead=st.integers(0, 30),
    late=st.booleans(), delay=st.integers(0, 3), seed=st.integers(0, 999), status=st.integers(1, len(STATUSES) - 1),
    again=st.booleans(),
)  # fmt: skip
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_fault(make, fault, victim, ahead, late, delay, seed, status, again):
    """A queue pair fails in the middle of messages: all bytes arrive right, and the pair is made anew."""
    hosts = make(delay=delay)
    ends = hosts.rings()
    hosts.meet()
    carry(hosts, ends, seed=seed, halfway=lambda: break_pair(hosts, victim, fault, ahead, late, status))
    carry(hosts, ends, seed=seed + 1)
    if again:
        hosts.meet()
        carry(hosts, ends, seed=seed + 2)
    assert hosts.lost == [[], []]
    close(*ends)


def test_late_writes_find_slots_of_their_own(make):
    """Until the other side has given a failed queue pair up, no rail sends to the slots that it may still write to."""
    hosts = make(pairs=1)
    producer, consumer = hosts.rings()
    hosts.meet()
    sent = [np.full(LAYOUT.capacity - 1, value, np.uint8) for value in (1, 2)]
    received = [np.zeros_like(data) for data in sent]
    come, late, go = threading.Event(), threading.Event(), threading.Event()
    (here,), (there,) = (cards.pairs for cards in hosts.cards)

    def fail_here(real=here.fail):
        here.fake.be_late()
        here.answer()
        real()
        late.wait(SECONDS)
        here.fake.let_pass(500)  # what was under way arrives
        go.set()

    def fail_there(real=there.fail):
        go.wait(SECONDS)
        real()

    def receive():
        get(hosts.devices[1], consumer, received[0], 0)
        come.set()
        go.wait(SECONDS)
        get(hosts.devices[1], consumer, received[1], 1)

    here.fail, there.fail = fail_here, fail_there
    here.hang()
    before = here.fake.record.posted
    with ThreadPoolExecutor(2) as pool:
        receiver = pool.submit(receive)
        sender = pool.submit(lambda: [put(hosts.devices[0], producer, data, n) for n, data in enumerate(sent)])
        until(lambda: here.fake.record.posted - before >= 8)  # the first message's WRITEs are under way
        hosts.cards[0].report("PORT_ERR", [here])
        early = come.wait(0.5)
        late.set()
        sender.result(), receiver.result()
    assert not early, "the first message went to slots to which a WRITE is under way"
    for a, b in zip(sent, received, strict=True):
        np.testing.assert_array_equal(a, b)
    close(producer, consumer)


def test_a_completion_is_lost(make):
    """The rail counts as stalled after a while, and another one carries what it had."""
    hosts = make()
    ends = hosts.rings()
    hosts.meet()
    carry(hosts, ends, halfway=lambda: break_pair(hosts, 0, "drop", 3, late=False))
    carry(hosts, ends, seed=1)
    close(*ends)


def test_without_devices_there(make):
    """A host whose device refuses goes by TCP, and says why."""
    hosts = make()
    hosts.cards[1].refusal = "no more queue pairs"
    ends = hosts.rings()
    until(lambda: hosts.rails(0) == hosts.rails(1) == [0])
    carry(hosts, ends)
    assert hosts.rails() == [0]
    close(*ends)


def test_a_device_that_answers_nothing(make):
    """Once the other side has given the queue pair up, the slots go by TCP, although no request ends."""
    hosts = make(pairs=1)
    ends = hosts.rings()
    hosts.meet()
    carry(hosts, ends)
    (pair,) = hosts.cards[0].pairs
    hosts.cards[1].refusal = "one queue pair was enough"
    pair.hang()
    carry(hosts, ends, sizes=(60_000,) * 3, seed=1)
    assert not pair.closed
    pair.answer()
    until(lambda: pair.closed)
    close(*ends)


def test_an_array_that_was_given_up_is_not_read_again(make, monkeypatch):
    """A message that nobody receives fails; then its array is unmapped, and the rail is lost that had its slots."""
    hosts = make(pairs=1)
    producer, consumer = hosts.rings(layout=RingLayout(2, 4, 64 << 10, wired=True))
    hosts.meet()
    carry(hosts, (producer, consumer), sizes=(10,))
    with mapped(1 << 20) as data:
        monkeypatch.setattr(sys.modules[__name__], "SECONDS", 0.5)
        with pytest.raises(RingStalled):
            put(hosts.devices[0], producer, data, 1)
        monkeypatch.undo()
    break_pair(hosts, 0, "event", 0, late=False)
    until(lambda: hosts.rails() != hosts.numbers)
    hosts.meet()
    close(producer, consumer)


def test_stopped_rings_leave_rails_alone(make):
    """Both ends stop in the middle of a message, and the consumer's memory is given back: no WRITE comes afterwards."""
    hosts, chance = make(delay=20), random.Random(1)
    hosts.rings()
    hosts.meet()
    for _ in range(40):
        producer, consumer = hosts.rings()
        carry(hosts, (producer, consumer), sizes=(3000,))
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(put, hosts.devices[0], producer, np.ones(300_000, np.uint8), 99)
            time.sleep(chance.random() * 0.003)
            for end in (producer, consumer):
                end.abort(Reason.ABORTED.word(0))
            consumer.close()
            assert isinstance(done.exception(), RingStopped | None)
        producer.close()
    assert [pair.failure() for cards in hosts.cards for pair in cards.pairs] == [""] * 4


def test_a_rail_that_fails_again_and_again(make, monkeypatch):
    """It is made anew less and less often, and all bytes arrive."""
    hosts = make(pairs=1)
    (breaking, _), begun = hosts.cards, time.monotonic()
    real = breaking.pair

    def pair(address):
        made = real(address)
        made.fake.fault(STATUS, 4, STATUSES.index("RETRY_EXC_ERR"))
        return made

    monkeypatch.setattr(breaking, "pair", pair)
    ends, seed = hosts.rings(), 0
    while time.monotonic() - begun < 5 or len(breaking.pairs) < 2:
        carry(hosts, ends, seed=(seed := seed + 1))
    assert len(breaking.pairs) <= 5
    close(*ends)


def test_rings_close_while_others_carry(make):
    """A ring's memory is given back although the rails always have something under way."""
    hosts = make(delay=2)
    lasting = hosts.rings()
    hosts.meet()
    for number in range(20):
        ends = hosts.rings(number % 2)
        carry(hosts, ends, sizes=(1, 20_000, 3), source=number % 2, seed=number)
        carry(hosts, lasting, sizes=(50_000,), seed=number)
        close(*ends)
    close(*lasting)


def test_many_rings(make):
    """Messages of many rings share the rails."""
    hosts = make(delay=1, pairs=3)
    rings = [hosts.rings(number % 2) for number in range(12)]
    hosts.meet()
    with ThreadPoolExecutor(len(rings)) as pool:
        done = [pool.submit(carry, hosts, ends, SIZES, n % 2, n) for n, ends in enumerate(rings)]
        for future in done:
            future.result()
    for ends in rings:
        close(*ends)
