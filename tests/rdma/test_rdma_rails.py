"""Rails of RDMA between two networks of this process, over the fake provider: rings stay equal, whatever fails."""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fabric import DROP, REFUSE, STATUS
from fake_hosts import HOST, LAYOUT, SECONDS, SIZES, Hosts, carry, close, get, put, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xvcomm.abc.device import RingStalled, RingStopped
from xvcomm.backends.rdma.queues import STATUSES
from xvcomm.memory.ring import Reason, RingLayout
from xvcomm.memory.segment import Segment


@pytest.fixture
def make(fake_verbs, fresh):
    """A function that makes hosts."""
    with contextlib.ExitStack() as stack:
        yield lambda **how: Hosts(stack, fake_verbs, fresh(), **how)


@contextlib.contextmanager
def mapped(nbytes):
    """An array whose memory is unmapped at the end."""
    memory = Segment.anonymous(nbytes)
    yield np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(memory.address))
    memory.close()


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


def sent_by(hosts):
    """Bytes of the rails from the first network, by their numbers."""
    return {rail.number: rail.sent for rail in hosts.networks[0].rails()}


def test_some_rails_carry_alone(make):
    """Whichever they are, also a socket beside RDMA, until they are lost, and then all carry."""
    hosts = make(delay=1)
    ends = hosts.rings()
    hosts.meet()
    carry(hosts, ends)
    for number in hosts.numbers:
        for index in range(2):
            hosts.networks[index].restrict(1 - index, [(HOST, HOST, number)])
        before = sent_by(hosts)
        carry(hosts, ends, seed=number)
        carried = {number: sent - before[number] for number, sent in sent_by(hosts).items()}
        assert carried.pop(number) > sum(SIZES) and max(carried.values()) < sum(SIZES) // 20
    hosts.networks[0].lose(1, (HOST, HOST, hosts.numbers[-1]))
    carry(hosts, ends, seed=1)
    hosts.networks[0].restrict(1, ())
    carry(hosts, ends, seed=2)
    close(*ends)


def test_a_ring_of_a_gpu_waits_for_its_link(make):
    """No thread needs the interpreter lock afterwards, which a driver may keep until the message has come."""
    hosts = make(asynchronous=True)
    before = sys.getswitchinterval()
    sys.setswitchinterval(SECONDS)  # no other thread runs in Python unless this one waits
    try:
        ends = hosts.rings()
        rails = hosts.rails(0)
    finally:
        sys.setswitchinterval(before)
    assert rails
    carry(hosts, ends)
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


def test_late_writes_find_slots_of_their_own(make, monkeypatch):
    """Until the other side has given a failed queue pair up, no rail sends to the slots that it may still write to."""
    # Else a busy machine loses the pair before it has sent.
    monkeypatch.setattr("xvcomm.wire.rails.STALL_SECONDS", SECONDS)
    hosts = make(pairs=1)
    producer, consumer = hosts.rings()
    hosts.meet()
    while not hosts.bytes_by_rdma():  # on a busy machine the first message may go over the socket
        carry(hosts, (producer, consumer), [1])
    sent = [np.full(LAYOUT.capacity - 1, value, np.uint8) for value in (1, 2)]
    received = [np.zeros_like(data) for data in sent]
    come, late, go = threading.Event(), threading.Event(), threading.Event()
    # On a busy machine the first pair may come too late, and be made anew.
    (here,), (there,) = ([pair for pair in cards.pairs if not pair.closed] for cards in hosts.cards)

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
    before = hosts.bytes_by_rdma()
    with ThreadPoolExecutor(2) as pool:
        receiver = pool.submit(receive)
        sender = pool.submit(lambda: [put(hosts.devices[0], producer, data, n) for n, data in enumerate(sent)])
        until(lambda: hosts.bytes_by_rdma() - before >= sent[0].nbytes // 2)  # its WRITEs are under way
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


def test_without_devices_there(make, monkeypatch, caplog):
    """A host whose device refuses goes by TCP, and both say why."""
    monkeypatch.setattr("xvcomm.system.notice.speaks", lambda: True)
    hosts = make()
    hosts.cards[1].refusal = "no more queue pairs"
    ends = hosts.rings()
    until(lambda: hosts.rails(0) == hosts.rails(1) == [0])
    carry(hosts, ends)
    assert hosts.rails() == [0]
    for rank, why in (1, "at the other end no more queue pairs"), (0, "no more queue pairs"):
        told = f"no RDMA from {HOST} to {HOST} of rank {rank}; it is tried again: {why}"
        until(lambda told=told: told in caplog.text)
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


@pytest.mark.parametrize("pairs", [1, 2])
def test_a_flush_does_not_hide_its_cause(make, monkeypatch, pairs):
    """A link goes down, and the device flushes: what it reports of a queue pair that has failed, or of another one, is told."""

    async def refuse(route):
        raise ConnectionRefusedError

    hosts = make(pairs=pairs)
    ends = hosts.rings()
    hosts.meet()
    monkeypatch.setattr("xvcomm.wire.links.connect", refuse)
    for index in range(2):
        hosts.networks[index].lose(1 - index, (HOST, HOST, 0))
    until(lambda: hosts.rails() == hosts.numbers[1:])
    first, last = hosts.cards[0].pairs[0], hosts.cards[0].pairs[-1]
    if pairs == 1:
        last.fake.fail()
        until(lambda: hosts.rails() == [])
    hosts.cards[0].report("PORT_ERR: the link is down", [first])
    if pairs == 2:
        until(lambda: len(hosts.rails()) == 1)
        last.fake.fail()
    until(lambda: hosts.lost[0])
    assert hosts.lost[0][0].endswith(f"; RDMA: {first.where}: PORT_ERR: the link is down"), hosts.lost
    close(*ends)


def test_an_array_that_was_given_up_is_not_read_again(make, monkeypatch):
    """A message that nobody receives fails; then its array is unmapped, and the rail is lost that had its slots."""
    hosts = make(pairs=1)
    producer, consumer = hosts.rings(layout=RingLayout(2, 4, 64 << 10, wired=True))
    hosts.meet()
    carry(hosts, (producer, consumer), sizes=(10,))
    with mapped(1 << 20) as data:
        monkeypatch.setattr("fake_hosts.SECONDS", 0.5)
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
