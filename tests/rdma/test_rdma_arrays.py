"""Messages from and into registered arrays, between two networks of this process over the fake provider."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from fabric import REFUSE, STATUS
from fake_hosts import HOST, carry, close, get, put, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from registered import FREE, LAYOUT, LONG, SHORT, Moving, array, awaited, pairs, posted, slots, transfer

from xvcomm.abc.cards import Keys
from xvcomm.backends.rdma.queues import STATUSES
from xvcomm.errors import ResourceError
from xvcomm.types.route import RDMA
from xvcomm.wire import arrays as arrays_module
from xvcomm.wire.carrier import Carrier
from xvcomm.wire.regions import registered_address


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("nbytes", [SHORT, LONG])
def test_no_byte_passes_through_a_ring(make, nbytes, delay):
    hosts, producer, consumer = make(delay=delay)
    sent, received = array(nbytes, 1), array(nbytes)
    with hosts.register(0, sent), hosts.register(1, received):
        receiving = awaited(hosts, producer, consumer, received)
        for end in (producer, consumer):
            slots(end)[:] = 0
        put(hosts.devices[0], producer, sent, 1)
        assert receiving.result() is None
        np.testing.assert_array_equal(sent, received)
        assert not slots(producer).any() and not slots(consumer).any()
    close(producer, consumer)


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("nbytes", [SHORT, LONG])
def test_one_end_is_registered(make, nbytes, here):
    """The other one's array is copied to or from its ring."""
    hosts, producer, consumer = make()
    sent, received = array(nbytes, 1), array(nbytes)
    for end in (producer, consumer):
        slots(end)[:] = 0
    registered = hosts.register(0, sent) if here else hosts.register(1, received)
    with registered:
        if here:
            transfer(hosts, producer, consumer, sent, received)
        else:
            receiving = awaited(hosts, producer, consumer, received)
            put(hosts.devices[0], producer, sent, 1)
            assert receiving.result() is None
            np.testing.assert_array_equal(sent, received)
    assert slots(consumer).any() == here
    assert slots(producer).any() == (not here or nbytes == SHORT)
    close(producer, consumer)


def test_part_of_a_region(make):
    """Regions may overlap; an array must lie in one of them. A message of an array that does not is copied."""
    hosts, producer, consumer = make()
    whole, target = array(3 * LONG, 1), array(3 * LONG)
    with contextlib.ExitStack() as stack:
        for begin, end in ((0, 2 * LONG), (LONG, 3 * LONG)):
            stack.enter_context(hosts.register(0, whole[begin:end]))
            stack.enter_context(hosts.register(1, target[begin:end]))
        for number, begin in enumerate((0, LONG // 2, LONG, 2 * LONG), 1):
            transfer(hosts, producer, consumer, whole[begin : begin + LONG], target[begin : begin + LONG], number)
        transfer(hosts, producer, consumer, whole[7:], target[7:], 5)
    close(producer, consumer)


def test_slots_that_overtake_those_of_the_message_before(make):
    """Those of the next message come first, over another queue pair."""
    hosts, producer, consumer = make()
    sent, received = array(LAYOUT.slot_bytes, 1), array(LAYOUT.slot_bytes)
    after, received_after = array(LAYOUT.slot_bytes, 2), array(LAYOUT.slot_bytes)
    go_on, rails = {}, [(HOST, HOST, number) for number in hosts.rails() if number >= RDMA]
    with hosts.register(1, received):
        receiving = awaited(hosts, producer, consumer, received)
        for pair in pairs(hosts, 0):
            pair.hang()
        for number, (data, rail) in enumerate(zip((sent, after), rails, strict=True), 1):
            hosts.networks[0].restrict(1, [rail])
            before = {pair: int(pair.fake.record.posted) for pair in pairs(hosts, 0)}
            put(hosts.devices[0], producer, data, number)
            until(lambda before=before: any(int(p.fake.record.posted) > n + 1 for p, n in before.items()))
            go_on[number] = next(p for p, n in before.items() if int(p.fake.record.posted) > n + 1)
        slots(consumer)[:] = 0
        go_on[2].answer()
        until(lambda: slots(consumer).any())
        go_on[1].answer()
        assert receiving.result() is None
        get(hosts.devices[1], consumer, received_after, 2)
    np.testing.assert_array_equal(sent, received)
    np.testing.assert_array_equal(after, received_after)
    assert [network.refused for network in hosts.networks] == [0, 0]
    assert hosts.rails(0) == hosts.numbers
    close(producer, consumer)


FAULTS = {"status": STATUS, "refuse": REFUSE}


def break_pair(hosts, victim, fault, ahead, late, status):
    """Let one queue pair of a host fail at the request that is so far ahead."""
    pair = pairs(hosts, victim)[0]
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
    late=st.booleans(), delay=st.integers(0, 5), seed=st.integers(0, 999), status=st.integers(1, len(STATUSES) - 1),
    sides=st.sampled_from([(True, True), (True, False), (False, True)]),
    sizes=st.lists(st.integers(1, LONG), min_size=4, max_size=8),
)  # fmt: skip
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_fault(make, fault, victim, ahead, late, delay, seed, status, sides, sizes):
    """A queue pair fails in the middle of messages: all bytes arrive right, and none once their array's owner has it back."""
    hosts, producer, consumer = make(delay=delay)
    sent = [array(size, seed + n) for n, size in enumerate(sizes)]
    expected = [data.copy() for data in sent]
    received = [array(size) for size in sizes]

    def send():
        for number, data in enumerate(sent):
            put(hosts.devices[0], producer, data, number + 1)
            data[:] = FREE
            if number == len(sent) // 2:
                break_pair(hosts, victim, fault, ahead, late, status)

    def receive():
        for number, data in enumerate(received):
            get(hosts.devices[1], consumer, data, number + 1)
            np.testing.assert_array_equal(expected[number], data, err_msg=f"message {number} of {len(data)} bytes")
            data[:] = FREE

    with contextlib.ExitStack() as stack:
        for network, data, chosen in ((0, sent, sides[0]), (1, received, sides[1])):
            for each in data if chosen else ():
                stack.enter_context(hosts.register(network, each))
        for moving in (Moving(send), Moving(receive)):
            assert moving.result() is None
        carry(hosts, (producer, consumer), sizes=(100_000,), seed=seed)
        for data in received:
            assert (data == FREE).all()
    assert hosts.lost == [[], []]
    close(producer, consumer)


def test_a_late_write_finds_its_message_unfinished(make, monkeypatch):
    """Until the other side has given a failed queue pair up, nothing that it had is sent by another rail."""
    monkeypatch.setattr("xvcomm.wire.rails.STALL_SECONDS", 120)
    hosts, producer, consumer = make(pairs=1)
    sent, received = array(LONG, 1), array(LONG)
    (here,), (there,) = pairs(hosts, 0), pairs(hosts, 1)
    late, arrived = threading.Event(), threading.Event()

    def fail_here(real=here.fail):
        here.fake.be_late()
        here.answer()
        real()
        late.wait(120)
        here.fake.let_pass(500)  # what was under way arrives
        arrived.set()

    def fail_there(real=there.fail):
        arrived.wait(120)
        real()

    here.fail, there.fail = fail_here, fail_there
    with hosts.register(0, sent), hosts.register(1, received):
        receiving = awaited(hosts, producer, consumer, received)
        here.hang()
        before = posted(hosts)
        sending = Moving(put, hosts.devices[0], producer, sent, 1)
        until(lambda: posted(hosts) > before + 2)
        hosts.cards[0].report("PORT_ERR", [here])
        early = receiving.ended(0.5)
        late.set()
        assert receiving.result() is None and sending.result() is None
        assert not early, "the message was completed while WRITEs into its array were under way"
        np.testing.assert_array_equal(sent, received)
    close(producer, consumer)


def refuse(address, nbytes, iova):
    raise ResourceError("fake0 does not register 9 bytes: ulimit -l")


def test_a_device_refuses(make, monkeypatch):
    hosts, producer, consumer = make()
    monkeypatch.setattr(hosts.cards[0], "register", refuse)
    with pytest.raises(ResourceError, match="does not register"):
        hosts.register(0, array(9))
    close(producer, consumer)


def test_too_many(make, monkeypatch):
    monkeypatch.setattr(arrays_module, "REGIONS", 2)
    hosts, producer, consumer = make()
    with hosts.register(0, array(9)), hosts.register(0, array(9)) as second:
        with pytest.raises(ResourceError, match="at most 2 arrays"):
            hosts.register(0, array(9))
        second.close()
        hosts.register(0, array(9)).close()
    hosts.register(0, array(0)).close()
    close(producer, consumer)


def test_threads_register_at_the_same_time():
    """Devices use all that they have registered."""
    finds = ctypes.CFUNCTYPE(*4 * [ctypes.c_int64])(registered_address)
    interval, count = sys.getswitchinterval(), 16
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(60):
            carrier, begin = Carrier(0, 1), threading.Barrier(count)

            def put_region(index, carrier=carrier, begin=begin):
                begin.wait()
                carrier.put_region(index, (1 + index) << 12, 9, SimpleNamespace(address=1 << 60, keys=[Keys(1, 1)]))

            for each in [Moving(put_region, index) for index in reversed(range(count))]:
                assert each.result() is None
            found = [finds(carrier.address, (1 + index) << 12, 9) for index in range(count)]
            carrier.close()
            assert found == count * [1]
    finally:
        sys.setswitchinterval(interval)
