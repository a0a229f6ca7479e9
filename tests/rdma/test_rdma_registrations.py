"""Registrations that signals interrupt, that other threads or handlers change meanwhile, or that outlive what they are of."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from fake_hosts import carry, close, get, put, until
from registered import FREE, LAYOUT, LONG, SHORT, Moving, array, awaited, failures, pairs, slots, stall, transfer

from xvcomm.abc.device import RingStalled
from xvcomm.comm.registration import Registration
from xvcomm.memory.readers import view
from xvcomm.memory.ring import LEDGER, Message
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import UINT8
from xvcomm.types.opcode import OpCode


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Devices that are stalled are not given up."""
    monkeypatch.setattr("xvcomm.wire.rails.SILENT_SECONDS", 200)
    monkeypatch.setattr("xvcomm.wire.rails.STALL_SECONDS", 200)


def mapped(address):
    """Whether this process has memory there."""
    areas = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in areas)


def note_registered(hosts, monkeypatch, index=1):
    """What a host's devices register from now on."""
    known, register = [], hosts.cards[index].register

    def noting(*how):
        known.append(register(*how))
        return known[-1]

    monkeypatch.setattr(hosts.cards[index], "register", noting)
    return known


@pytest.mark.parametrize("ends", ["registration", "job"])
def test_the_memory_is_freed_once_it_is_not_registered(make, ends):
    """Though the program keeps the registration."""
    hosts, producer, consumer = make()
    memory = array(LONG)
    freed, held = weakref.ref(memory), Registration([hosts.networks[1].register(view(memory))])
    del memory
    gc.collect()
    assert freed() is not None
    close(producer, consumer)
    held.close() if ends == "registration" else hosts.networks[1].close()
    gc.collect()
    assert freed() is None
    held.close()


def test_interrupted_while_it_is_registered(make, monkeypatch):
    """Nothing stays registered of which the program does not know."""
    hosts, producer, consumer = make()
    known = note_registered(hosts, monkeypatch)
    register = hosts.cards[1].register

    def interrupted(*how):
        signal.raise_signal(signal.SIGINT)
        return register(*how)

    monkeypatch.setattr(hosts.cards[1], "register", interrupted)
    memory = array(LONG)
    freed = weakref.ref(memory)
    with pytest.raises(KeyboardInterrupt):
        hosts.networks[1].register(view(memory))
    assert known[0].closed
    del memory
    gc.collect()
    assert freed() is None
    close(producer, consumer)


def test_a_handler_closes_it_meanwhile_and_registers_another(make, monkeypatch):
    """The other one takes its place, and stays registered until it is closed."""
    hosts, producer, consumer = make()
    known = note_registered(hosts, monkeypatch)
    sent, received, other, others = array(LONG, 1), array(LONG), array(LONG), []
    end = hosts.networks[1].register(view(received))
    receiving = awaited(hosts, producer, consumer, received)
    go_on = stall(hosts, 0)

    def handle(*_):
        go_on()
        end()
        others.append(hosts.networks[1].register(view(other)))

    before = signal.signal(signal.SIGUSR1, handle)
    timer = threading.Timer(0.3, signal.raise_signal, (signal.SIGUSR1,))
    timer.start()
    end()
    timer.join()
    signal.signal(signal.SIGUSR1, before)
    assert [each.closed for each in known] == [True, False]
    put(hosts.devices[0], producer, sent, 1)
    assert receiving.result() is None
    slots(consumer)[:] = 0
    with hosts.register(0, sent):
        receiving = awaited(hosts, producer, consumer, other, 2)
        put(hosts.devices[0], producer, sent, 2)
        assert receiving.result() is None
    assert not slots(consumer).any()
    np.testing.assert_array_equal(sent, other)
    others[0]()
    assert known[1].closed
    close(producer, consumer)


def test_interrupted_again_while_receives_are_given_up(make, monkeypatch):
    """Their arrays are deregistered all the same before they are the caller's again."""
    hosts, producer, consumer = make()
    others = hosts.rings(layout=LAYOUT)
    known, arrays = note_registered(hosts, monkeypatch), (array(LONG), array(LONG))
    with hosts.register(1, arrays[0]), hosts.register(1, arrays[1]):

        def interrupted(finish=known[0].close):
            known[0].close = finish
            signal.raise_signal(signal.SIGINT)
            finish()

        known[0].close = interrupted
        (stream,) = hosts.devices[1].streams(1)
        stream.deadline = Deadline.after(0.5)
        for end, data, number in zip((consumer, others[1]), arrays, (1, 0), strict=True):
            message = Message(int(OpCode.SEND), UINT8.code, LONG, number)
            hosts.devices[1].get(end, data.ctypes.data, message, stream)
        with pytest.raises(KeyboardInterrupt):
            stream.synchronize()
        assert [each.closed for each in known] == [True, True]
    close(producer, consumer, *others)


def test_arrays_of_earlier_messages_stay_registered(make, monkeypatch):
    """If a message is given up before it has begun."""
    hosts, producer, consumer = make()
    known, received, other = note_registered(hosts, monkeypatch), array(SHORT), array(SHORT)
    with hosts.register(1, received):
        for number in range(1, LEDGER + 1):
            transfer(hosts, producer, consumer, array(SHORT, number), received, number)
        (stream,) = hosts.devices[1].streams(1)
        message = Message(int(OpCode.SEND), UINT8.code, SHORT, LEDGER + 1)
        hosts.devices[1].get(consumer, other.ctypes.data, message, stream)
        stream.discard()
        assert not known[0].closed
    close(producer, consumer)


def test_registered_again_while_a_receive_is_given_up(make, monkeypatch):
    """What is deregistered at once is advertised no more: no WRITE fails of another message into it."""
    hosts, producer, consumer = make()
    others = hosts.rings(layout=LAYOUT)
    sent, received, carrier = array(LONG, 1), array(LONG), hosts.networks[1].carrier
    put_region, receiving = carrier.put_region, []

    def slow(*how):
        receiving[0].ended(2)
        put_region(*how)

    with hosts.register(1, received):
        monkeypatch.setattr("fake_hosts.SECONDS", 1)
        receiving.append(awaited(hosts, producer, consumer, received))
        monkeypatch.setattr("fake_hosts.SECONDS", 120)
        monkeypatch.setattr(carrier, "put_region", slow)
        with hosts.register(1, received):
            assert isinstance(receiving[0].result(), RingStalled)
            transfer(hosts, *others, sent, received, 0)
            assert not failures(hosts)
    close(producer, consumer, *others)


def test_closed_after_a_ring_was(make):
    """The ring's memory is unmapped, and is not looked at."""
    hosts, producer, consumer = make()
    with hosts.register(1, array(LONG)):
        address = consumer.address
        close(producer, consumer)
        until(lambda: not mapped(address))


MOST = 3 << 20


def churn(hosts, seed, arrays, over):
    """Register parts of arrays of hosts, and close them, until it is over."""
    chance, held = np.random.default_rng(seed), []
    while not over.wait(0.001):
        if held and chance.random() < 0.5:
            held.pop(int(chance.integers(len(held)))).close()
        else:
            index, data = arrays[int(chance.integers(len(arrays)))]
            begin = int(chance.integers(MOST // 2))
            held.append(hosts.register(index, data[begin : begin + MOST // 2]))
    for each in held:
        each.close()


@pytest.mark.parametrize("seed", range(6))
def test_arrays_and_rings_come_and_go(make, seed):
    """All bytes of other messages arrive right, and none once their array's owner has it back; a queue pair fails, too."""
    hosts, *ends = make(delay=seed % 4)
    rings, over, chance = (ends, hosts.rings(source=1, layout=LAYOUT)), threading.Event(), np.random.default_rng(seed)
    sources, targets = ([np.full(MOST, FREE, np.uint8) for _ in rings] for _ in range(2))
    sizes = chance.integers(1, LONG, (len(rings), 16))
    begins, there = (chance.integers(0, MOST - sizes) for _ in range(2))

    def send(ring):
        for number, (size, begin) in enumerate(zip(sizes[ring], begins[ring], strict=True)):
            data = sources[ring][begin : begin + size]
            data[:] = array(size, number)
            put(hosts.devices[ring], rings[ring][0], data, number + 1 - ring)
            data[:] = FREE
            if number == 8 and seed % 2 == ring:
                hosts.cards[ring].report("PORT_ERR", [pairs(hosts, ring)[0]])

    def receive(ring):
        for number, (size, begin) in enumerate(zip(sizes[ring], there[ring], strict=True)):
            data = targets[ring][begin : begin + size]
            get(hosts.devices[1 - ring], rings[ring][1], data, number + 1 - ring)
            np.testing.assert_array_equal(data, array(size, number), err_msg=f"message {number}")
            data[:] = FREE

    arrays = [*enumerate(sources), *enumerate(reversed(targets))]
    churning = [Moving(churn, hosts, 2 * seed + n, arrays, over) for n in range(2)]
    moving = [Moving(call, ring) for call in (send, receive) for ring in range(len(rings))]
    try:
        for _ in range(4):
            others = hosts.rings(layout=LAYOUT)
            carry(hosts, others, sizes=(100_000,))
            close(*others)
        assert [each.result() for each in moving] == 4 * [None]
    finally:
        over.set()
    assert [each.result() for each in churning] == 2 * [None]
    assert all((target == FREE).all() for target in targets)
    assert hosts.lost == [[], []]
    close(*rings[0], *rings[1])
