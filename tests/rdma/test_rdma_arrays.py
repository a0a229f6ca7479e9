"""Messages from and into registered arrays, between two networks of this process over the fake provider."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest
from fabric import REFUSE, STATUS
from fake_hosts import Hosts, carry, close, get, put, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xvcomm.abc.device import RingStalled
from xvcomm.backends.rdma.queues import STATUSES
from xvcomm.errors import ResourceError
from xvcomm.memory.readers import view
from xvcomm.memory.ring import DIRECT, RingLayout
from xvcomm.wire import arrays as arrays_module

LAYOUT = RingLayout(2, 4, 64 << 10, wired=True)
SHORT, LONG = 200_001, 1_300_003
"""A message that fits the ring, and one that does not."""
FREE = 0xEE
"""What owners of arrays write into them once they have them back."""


@pytest.fixture
def make(fake_verbs, fresh):
    """A function that makes hosts, whose rails are up."""
    with contextlib.ExitStack() as stack:

        def made(**how):
            hosts = Hosts(stack, fake_verbs, fresh(), **how)
            ends = hosts.rings(layout=LAYOUT)
            hosts.meet()
            carry(hosts, ends, sizes=(10,))
            return hosts, *ends

        yield made


def array(nbytes, seed=None):
    """Random bytes, or zeros."""
    return (
        np.zeros(nbytes, np.uint8) if seed is None else np.random.default_rng(seed).integers(1, 256, nbytes, np.uint8)
    )


def slots(end):
    """The slots of an end's half."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * LAYOUT.capacity).from_address(end.address + end.layout.data))


def advertised(producer):
    """Number of the newest message, from 1 on, for which the consumer has advertised its array."""
    return ctypes.c_int64.from_address(producer.direct + DIRECT.fields["message"][1]).value


def transfer(hosts, producer, consumer, sent, received, number=1):
    """Send a message that its receiver awaits."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(get, hosts.devices[1], consumer, received, number)
        until(lambda: consumer.described().keys() >= {number + 1})
        put(hosts.devices[0], producer, sent, number)
        done.result()
    np.testing.assert_array_equal(sent, received)


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("nbytes", [SHORT, LONG])
def test_no_byte_passes_through_a_ring(make, nbytes, delay):
    hosts, producer, consumer = make(delay=delay)
    sent, received = array(nbytes, 1), array(nbytes)
    with hosts.networks[0].register(view(sent)), hosts.networks[1].register(view(received)):
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(get, hosts.devices[1], consumer, received, 1)
            until(lambda: advertised(producer) == 2)
            for end in (producer, consumer):
                slots(end)[:] = 0
            put(hosts.devices[0], producer, sent, 1)
            done.result()
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
    registered = hosts.networks[0].register(view(sent)) if here else hosts.networks[1].register(view(received))
    with registered:
        if here:
            transfer(hosts, producer, consumer, sent, received)
        else:
            with ThreadPoolExecutor(1) as pool:
                done = pool.submit(get, hosts.devices[1], consumer, received, 1)
                until(lambda: advertised(producer) == 2)
                put(hosts.devices[0], producer, sent, 1)
                done.result()
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
            stack.enter_context(hosts.networks[0].register(view(whole[begin:end])))
            stack.enter_context(hosts.networks[1].register(view(target[begin:end])))
        for number, begin in enumerate((0, LONG // 2, LONG, 2 * LONG), 1):
            transfer(hosts, producer, consumer, whole[begin : begin + LONG], target[begin : begin + LONG], number)
        transfer(hosts, producer, consumer, whole[7:], target[7:], 5)
    close(producer, consumer)


FAULTS = {"status": STATUS, "refuse": REFUSE}


def break_pair(hosts, victim, fault, ahead, late, status):
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
                stack.enter_context(hosts.networks[network].register(view(each)))
        with ThreadPoolExecutor(2) as pool:
            for done in (pool.submit(send), pool.submit(receive)):
                done.result()
        carry(hosts, (producer, consumer), sizes=(100_000,), seed=seed)
        for data in received:
            assert (data == FREE).all()
    assert hosts.lost == [[], []]
    close(producer, consumer)


def stall(hosts, index):
    """Let the devices of a host do nothing from now on; what lets them go on."""
    pairs = [pair for pair in hosts.cards[index].pairs if not pair.closed]
    for pair in pairs:
        pair.hang()
    return lambda: [pair.answer() for pair in pairs]


def test_a_receive_that_is_given_up(make, monkeypatch):
    """It raises at its deadline, while WRITEs into its array are under way; none arrives afterwards."""
    monkeypatch.setattr("xvcomm.wire.rails.STALL_SECONDS", 120)
    hosts, producer, consumer = make()
    sent, received = array(LONG, 1), array(LONG)
    failures, advertising = [], threading.Event()

    def send():
        advertising.wait(120)
        go_on = stall(hosts, 0)
        posted = sum(int(pair.fake.record.posted) for pair in hosts.cards[0].pairs)
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(put, hosts.devices[0], producer, sent, 1)
            until(lambda: sum(int(pair.fake.record.posted) for pair in hosts.cards[0].pairs) > posted)
            failing.result()
            received[:] = FREE
            go_on()
            until(lambda: any(pair.failure() for pair in hosts.cards[0].pairs))
            for end in (producer, consumer):
                end.abort(4)
            failures.append(done.exception())

    def receive():
        with pytest.raises(RingStalled):
            get(hosts.devices[1], consumer, received, 1)

    with (
        hosts.networks[0].register(view(sent)),
        hosts.networks[1].register(view(received)),
        ThreadPoolExecutor(2) as pool,
    ):
        monkeypatch.setattr("fake_hosts.SECONDS", 3)
        failing = pool.submit(receive)
        until(lambda: advertised(producer) == 2)
        monkeypatch.setattr("fake_hosts.SECONDS", 120)
        advertising.set()
        pool.submit(send).result()
        assert (received == FREE).all()
    assert failures[0] is not None
    close(producer, consumer)


def test_a_send_that_is_given_up(make, monkeypatch):
    """Its array is changed while WRITEs from it are under way: the receiver does not take what is there then."""
    monkeypatch.setattr("xvcomm.wire.rails.STALL_SECONDS", 120)
    hosts, producer, consumer = make()
    sent, received = array(LONG, 1), array(LONG)
    expected = sent.copy()
    with hosts.networks[0].register(view(sent)), ThreadPoolExecutor(1) as pool:
        go_on = stall(hosts, 0)
        done = pool.submit(get, hosts.devices[1], consumer, received, 1)
        monkeypatch.setattr("fake_hosts.SECONDS", 2)
        with pytest.raises(RingStalled):
            put(hosts.devices[0], producer, sent, 1)
        monkeypatch.setattr("fake_hosts.SECONDS", 120)
        sent[:] = FREE
        go_on()
        until(lambda: any(pair.failure() for pair in hosts.cards[0].pairs))
        for end in (producer, consumer):
            end.abort(4)
        assert done.exception() is not None
    come = received != 0
    np.testing.assert_array_equal(received[come], expected[come])
    assert not (slots(consumer)[:] == FREE).sum() > slots(consumer).size // 2
    close(producer, consumer)
    hosts.meet()


def test_a_late_write_finds_its_message_unfinished(make, monkeypatch):
    """Until the other side has given a failed queue pair up, nothing that it had is sent by another rail."""
    monkeypatch.setattr("xvcomm.wire.rails.STALL_SECONDS", 120)
    hosts, producer, consumer = make(pairs=1)
    sent, received = array(LONG, 1), array(LONG)
    (here,), (there,) = ([pair for pair in cards.pairs if not pair.closed] for cards in hosts.cards)
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
    with (
        hosts.networks[0].register(view(sent)),
        hosts.networks[1].register(view(received)),
        ThreadPoolExecutor(2) as pool,
    ):
        done = pool.submit(get, hosts.devices[1], consumer, received, 1)
        until(lambda: advertised(producer) == 2)
        here.hang()
        before = int(here.fake.record.posted)
        sending = pool.submit(put, hosts.devices[0], producer, sent, 1)
        until(lambda: int(here.fake.record.posted) > before + 2)
        hosts.cards[0].report("PORT_ERR", [here])
        early = wait([done], 0.5).done
        late.set()
        done.result(), sending.result()
        assert not early, "the message was completed while WRITEs into its array were under way"
        np.testing.assert_array_equal(sent, received)
    close(producer, consumer)


def test_other_messages_go_on_after_one_was_given_up(make, monkeypatch):
    """Its array is registered anew, which fails the WRITEs of others into the same region; their slots are sent again."""
    hosts, producer, consumer = make()
    others = hosts.rings(layout=LAYOUT)
    sent, region = array(LONG, 2), array(2 * LONG)
    with hosts.networks[0].register(view(sent)), hosts.networks[1].register(view(region)):
        monkeypatch.setattr("fake_hosts.SECONDS", 1)
        with pytest.raises(RingStalled):
            get(hosts.devices[1], consumer, region[:LONG], 1)
        monkeypatch.setattr("fake_hosts.SECONDS", 120)
        region[:LONG] = FREE
        for number in range(3):
            region[LONG:] = 0
            transfer(hosts, *others, sent, region[LONG:], number)
        assert (region[:LONG] == FREE).all()
    close(producer, consumer, *others)


def test_closed_during_a_message(make):
    """Closing waits for what is under way; later messages go through the ring."""
    hosts, producer, consumer = make(delay=5)
    sent, received = array(20 * LONG, 1), array(20 * LONG)
    registered = hosts.networks[0].register(view(sent)), hosts.networks[1].register(view(received))
    with ThreadPoolExecutor(2) as pool:
        done = pool.submit(transfer, hosts, producer, consumer, sent, received)
        until(lambda: advertised(producer) == 2)
        for each in registered:
            each.close()
        assert not any(pair.failure() for cards in hosts.cards for pair in cards.pairs)
        done.result()
    slots(consumer)[:] = 0
    received[:] = 0
    transfer(hosts, producer, consumer, sent, received, 2)
    assert slots(consumer).any()
    for each in registered:
        each.close()
    close(producer, consumer)


def test_closed_under_a_message_that_does_not_end(make, monkeypatch):
    """Devices use the array no more after a while, and the message goes on through the ring."""
    monkeypatch.setattr(arrays_module, "_CLOSE_SECONDS", 0.1)
    hosts, producer, consumer = make()
    sent, received = array(LONG, 1), array(LONG)
    registered = hosts.networks[1].register(view(received))
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(get, hosts.devices[1], consumer, received, 1)
        until(lambda: advertised(producer) == 2)
        registered.close()
        put(hosts.devices[0], producer, sent, 1)
        done.result()
    np.testing.assert_array_equal(sent, received)
    close(producer, consumer)


def refuse(address, nbytes):
    raise ResourceError("fake0 does not register 9 bytes: ulimit -l")


def test_a_device_refuses(make, monkeypatch):
    hosts, producer, consumer = make()
    monkeypatch.setattr(hosts.cards[0], "register", refuse)
    with pytest.raises(ResourceError, match="does not register"):
        hosts.networks[0].register(view(array(9)))
    close(producer, consumer)


def test_a_device_refuses_to_register_anew(make, monkeypatch, caplog):
    """After a message was given up its array is safe, and is used through the ring."""
    monkeypatch.setattr("xvcomm.system.notice.speaks", lambda: True)
    hosts, producer, consumer = make()
    others = hosts.rings(layout=LAYOUT)
    sent, received = array(LONG, 1), array(LONG)
    with hosts.networks[1].register(view(received)):
        monkeypatch.setattr(hosts.cards[1], "register", refuse)
        monkeypatch.setattr("fake_hosts.SECONDS", 1)
        with pytest.raises(RingStalled):
            get(hosts.devices[1], consumer, received, 1)
        monkeypatch.setattr("fake_hosts.SECONDS", 120)
        assert "a registered array is registered no more" in caplog.text
        transfer(hosts, *others, sent, received, 0)
        assert advertised(others[0]) == 0
    close(producer, consumer, *others)


def test_too_many(make, monkeypatch):
    monkeypatch.setattr(arrays_module, "REGIONS", 2)
    hosts, producer, consumer = make()
    with hosts.networks[0].register(view(array(9))), hosts.networks[0].register(view(array(9))) as second:
        with pytest.raises(ResourceError, match="at most 2 arrays"):
            hosts.networks[0].register(view(array(9)))
        second.close()
        hosts.networks[0].register(view(array(9))).close()
    hosts.networks[0].register(view(array(0))).close()
    close(producer, consumer)
