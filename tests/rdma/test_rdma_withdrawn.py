"""Registered arrays that are closed, or whose messages are given up, while devices use them; over the fake provider."""

from __future__ import annotations

import gc
import signal
import threading
import weakref

import numpy as np
import pytest
from fake_hosts import carry, close, get, put, until
from registered import (
    FREE,
    LAYOUT,
    LONG,
    Moving,
    array,
    awaited,
    failures,
    posted,
    slots,
    stall,
    transfer,
)

from xvcomm.abc.device import RingStalled
from xvcomm.memory.readers import view
from xvcomm.wire import arrays as arrays_module


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Devices that are stalled are not given up."""
    monkeypatch.setattr("xvcomm.wire.rails.SILENT_SECONDS", 200)
    monkeypatch.setattr("xvcomm.wire.rails.STALL_SECONDS", 200)


def give_up_under_writes(hosts, producer, consumer, sent, received, monkeypatch):
    """Let a receive fail at its deadline while WRITEs into its array are under way.

    Returns:
        The send, and what lets the devices go on.
    """
    monkeypatch.setattr("fake_hosts.SECONDS", 2)
    receiving = awaited(hosts, producer, consumer, received)
    monkeypatch.setattr("fake_hosts.SECONDS", 120)
    go_on, before = stall(hosts, 0), posted(hosts)
    sending = Moving(put, hosts.devices[0], producer, sent, 1)
    until(lambda: posted(hosts) > before + 2)
    assert isinstance(receiving.result(), RingStalled)
    received[:] = FREE
    return sending, go_on


def stop(hosts, producer, consumer, moving):
    """Stop the ring, as a communicator that has failed does."""
    for end in (producer, consumer):
        end.abort(4)
    assert moving.result() is not None


def test_a_receive_is_given_up(make, monkeypatch):
    """No byte arrives afterwards."""
    hosts, producer, consumer = make()
    sent, received = array(LONG, 1), array(LONG)
    with hosts.register(0, sent), hosts.register(1, received):
        sending, go_on = give_up_under_writes(hosts, producer, consumer, sent, received, monkeypatch)
        go_on()
        until(lambda: failures(hosts) or (received != FREE).any())
        stop(hosts, producer, consumer, sending)
        assert (received == FREE).all()
    close(producer, consumer)


def test_a_key_is_given_again(make, monkeypatch):
    """The array of a receive that was given up is registered anew while WRITEs into it are under way."""
    hosts, producer, consumer = make()
    sent, received = array(LONG, 1), array(LONG)
    keys, register = [], hosts.cards[1].register

    def noting(address, nbytes, iova):
        registered = register(address, nbytes, iova)
        keys.append(registered.keys[0])
        return registered

    monkeypatch.setattr(hosts.cards[1], "register", noting)
    with hosts.register(0, sent):
        with hosts.register(1, received):
            sending, go_on = give_up_under_writes(hosts, producer, consumer, sent, received, monkeypatch)
        with hosts.register(1, received):
            assert keys[0] == keys[1]
            go_on()
            until(lambda: failures(hosts) or (received != FREE).any())
            stop(hosts, producer, consumer, sending)
            assert (received == FREE).all()
    close(producer, consumer)


def test_a_send_is_given_up(make, monkeypatch):
    """Its array is changed while WRITEs from it are under way: the receiver does not take what is there then."""
    hosts, producer, consumer = make()
    sent, received = array(LONG, 1), array(LONG)
    expected = sent.copy()
    with hosts.register(0, sent):
        go_on = stall(hosts, 0)
        receiving = Moving(get, hosts.devices[1], consumer, received, 1)
        monkeypatch.setattr("fake_hosts.SECONDS", 2)
        with pytest.raises(RingStalled):
            put(hosts.devices[0], producer, sent, 1)
        monkeypatch.setattr("fake_hosts.SECONDS", 120)
        sent[:] = FREE
        with hosts.register(0, sent):
            go_on()
            until(lambda: failures(hosts) or received.any())
            stop(hosts, producer, consumer, receiving)
    come = received != 0
    np.testing.assert_array_equal(received[come], expected[come])
    assert (slots(consumer) == FREE).sum() < slots(consumer).size // 2
    close(producer, consumer)
    hosts.meet()


def test_other_messages_go_on_after_one_was_given_up(make, monkeypatch):
    """Its array is deregistered, which fails WRITEs of others into the same region; their slots are sent again, into the ring."""
    hosts, producer, consumer = make()
    others = hosts.rings()
    carry(hosts, others, sizes=(10,))
    sent, other, region = array(LONG, 1), array(LONG, 2), array(2 * LONG)
    with hosts.register(1, region):
        receiving = awaited(hosts, *others, region[LONG:])
        sending, go_on = give_up_under_writes(hosts, producer, consumer, sent, region[:LONG], monkeypatch)
        before = posted(hosts)
        also = Moving(put, hosts.devices[0], others[0], other, 1)
        until(lambda: posted(hosts) > before + 2)
        go_on()
        assert receiving.result() is None and also.result() is None
        np.testing.assert_array_equal(region[LONG:], other)
        stop(hosts, producer, consumer, sending)
        assert (region[:LONG] == FREE).all()
    close(producer, consumer, *others)


def test_a_message_after_one_that_was_given_up(make, monkeypatch):
    """The array is not registered any more."""
    hosts, producer, consumer = make()
    others = hosts.rings(layout=LAYOUT)
    sent, received = array(LONG, 1), array(LONG)
    with hosts.register(1, received):
        monkeypatch.setattr("fake_hosts.SECONDS", 1)
        with pytest.raises(RingStalled):
            get(hosts.devices[1], consumer, received, 1)
        monkeypatch.setattr("fake_hosts.SECONDS", 120)
        slots(others[1])[:] = 0
        transfer(hosts, *others, sent, received, 0)
        assert slots(others[1]).any()
    close(producer, consumer, *others)


@pytest.mark.parametrize("begun", [False, True])
def test_closed_during_a_message(make, begun):
    """The array is withdrawn, so that no WRITE fails; what is left of the message goes through the ring."""
    hosts, producer, consumer = make(delay=5)
    sent, received = array(20 * LONG, 1), array(20 * LONG)
    registered = hosts.register(0, sent), hosts.register(1, received)
    receiving = awaited(hosts, producer, consumer, received)
    slots(consumer)[:] = 0
    if begun:
        go_on, before = stall(hosts, 0), posted(hosts)
        sending = Moving(put, hosts.devices[0], producer, sent, 1)
        until(lambda: posted(hosts) > before + 2)
        closers = [Moving(each.close) for each in registered]
        early = closers[1].ended(0.3)
        go_on()
        assert [closer.result() for closer in closers] == [None, None]
        assert not early  # WRITEs into the array were under way
    else:
        for each in registered:
            each.close()
        sending = Moving(put, hosts.devices[0], producer, sent, 1)
    assert receiving.result() is None and sending.result() is None
    np.testing.assert_array_equal(sent, received)
    assert slots(consumer).any()
    assert not failures(hosts)
    close(producer, consumer)


def test_closed_while_the_other_end_does_not_answer(make, monkeypatch):
    """The array is deregistered after a while. One queue pair fails of each rail, and the message goes on through the ring."""
    monkeypatch.setattr(arrays_module, "_CLOSE_SECONDS", 0.2)
    hosts, producer, consumer = make()
    sent, received = array(20 * LONG, 1), array(20 * LONG)
    with hosts.register(1, received) as registered:
        receiving = awaited(hosts, producer, consumer, received)
        go_on, before = stall(hosts, 0), posted(hosts)
        sending = Moving(put, hosts.devices[0], producer, sent, 1)
        until(lambda: posted(hosts) > before + 2)
        registered.close()
        go_on()
        assert receiving.result() is None and sending.result() is None
    np.testing.assert_array_equal(sent, received)
    assert 1 <= len([pair for pair in hosts.cards[0].pairs if pair.failure()]) <= 2
    close(producer, consumer)


def test_a_second_closer_waits_for_the_first(make, monkeypatch):
    hosts, producer, consumer = make()
    deregistering, go_on, received = threading.Event(), threading.Event(), array(LONG)
    register = hosts.cards[1].register

    def slow(*how):
        registered = register(*how)

        def finish(close=registered.close):
            deregistering.set()
            go_on.wait(120)
            close()

        registered.close = finish
        return registered

    monkeypatch.setattr(hosts.cards[1], "register", slow)
    end = hosts.networks[1].register(view(received))
    closers = [Moving(end)]
    deregistering.wait(120)
    closers.append(Moving(end))
    early = closers[1].ended(0.3)
    go_on.set()
    assert [closer.result() for closer in closers] == [None, None]
    assert not early
    close(producer, consumer)


def test_interrupted_while_it_is_closed(make, monkeypatch):
    """Ctrl-C ends the wait; the memory is not registered any more."""
    hosts, producer, consumer = make()
    sent, received, known = array(LONG, 1), array(LONG), []
    registered = hosts.cards[1].register

    def noting(*how):
        known.append(registered(*how))
        return known[-1]

    monkeypatch.setattr(hosts.cards[1], "register", noting)
    held = hosts.register(1, received)
    receiving = awaited(hosts, producer, consumer, received)
    go_on = stall(hosts, 0)
    timer = threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        held.close()
    timer.join()
    assert known[0].closed
    go_on()
    put(hosts.devices[0], producer, sent, 1)
    assert receiving.result() is None
    np.testing.assert_array_equal(sent, received)
    close(producer, consumer)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_memory_of_a_tensor_that_takes_another_is_kept(make, requires_grad):
    """It is freed once the registration is closed."""
    torch = pytest.importorskip("torch")
    hosts, producer, consumer = make()
    memory = np.ones(LONG, np.float32)
    freed, tensor = weakref.ref(memory), torch.from_numpy(memory).requires_grad_(requires_grad)
    with hosts.register(1, tensor):
        tensor.data = torch.zeros(1)
        del memory
        gc.collect()
        assert freed() is not None
    gc.collect()
    assert freed() is None
    close(producer, consumer)


def test_giving_up_does_not_wait_for_what_another_thread_registers(make, monkeypatch):
    """Registering much memory takes long."""
    hosts, producer, consumer = make()
    received, registering, go_on = array(LONG), threading.Event(), threading.Event()
    register = hosts.cards[1].register

    def slow(*how):
        registering.set()
        go_on.wait(120)
        return register(*how)

    with hosts.register(1, received):
        monkeypatch.setattr("fake_hosts.SECONDS", 2)
        receiving = awaited(hosts, producer, consumer, received)
        monkeypatch.setattr(hosts.cards[1], "register", slow)
        other = Moving(lambda: hosts.register(1, array(9)).close())
        registering.wait(120)
        assert isinstance(receiving.result(), RingStalled)
        go_on.set()
        assert other.result() is None
    close(producer, consumer)
