"""The contract of `Stream` on every registered backend: order, events, deadlines, aborts, and giving up."""

from __future__ import annotations

import time

import numpy as np
import pytest

from xvcomm.abc.device import Device, RingStalled, RingStopped
from xvcomm.memory.ring import Reason, RingEnd, RingLayout
from xvcomm.testing.arrays import Array
from xvcomm.testing.benches import LAYOUTS, SECONDS, Bench, address, get, message, put, streams
from xvcomm.testing.cases import assert_same_bits, distinct
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import UINT8


def test_streams_pass_each_other(bench: Bench) -> None:
    """A get that waits on one stream holds up no put on another, nor the other way round."""
    big = distinct(UINT8, 500_000, seed=3)
    with bench.ring(LAYOUTS[0]) as there, bench.ring(LAYOUTS[0]) as back:

        def exchange(device: Device, outgoing: RingEnd, incoming: RingEnd) -> Array:
            receiving, sending = streams(device, 2)
            x, y = put(device, big), put(device, np.zeros_like(big))
            device.get(incoming, address(y), message(big.size), receiving)
            device.put(outgoing, address(x), message(big.size), sending)
            receiving.synchronize()
            sending.synchronize()
            return get(device, y)

        got = bench.both(
            lambda: exchange(bench.left, there[0], back[1]), lambda: exchange(bench.right, back[0], there[1])
        )
        for y in got:
            assert_same_bits(y, big, "what came through")


@pytest.mark.parametrize("late", [0, 1])
def test_events_order_streams(bench: Bench, late: int) -> None:
    """What two streams receive a third sends on, once both events are reached, whichever is reached last."""
    size, layout = 300_001, RingLayout(2, 2, 4096)
    data = [distinct(UINT8, size, seed) for seed in (1, 2)]
    with bench.ring(layout) as one, bench.ring(layout) as two, bench.ring(layout) as out:

        def relay() -> None:
            *receiving, sending = streams(bench.right, 3)
            x = put(bench.right, np.zeros(2 * size, np.uint8))
            events = []
            for number, (_, end) in enumerate((one, two)):
                bench.right.get(end, address(x) + number * size, message(size), receiving[number])
                events.append(receiving[number].record_event())
            for event in events:
                sending.wait(event)
            bench.right.put(out[0], address(x), message(2 * size), sending)
            sending.synchronize()
            for stream in receiving:
                stream.synchronize()

        def feed() -> Array:
            order = [(one[0], data[0]), (two[0], data[1])]
            bench.send(order[1 - late][0], order[1 - late][1])
            time.sleep(0.05)  # let a put that does not wait begin
            bench.send(order[late][0], order[late][1])
            return bench.receive(out[1], 2 * size)[0]

        relayed, got = bench.both(relay, feed)
        assert relayed is None
        assert_same_bits(got, np.concatenate(data), "what a stream sent on that waits for two events")


def test_events_that_were_reached_bind_nothing(bench: Bench) -> None:
    """A stream that waited for another one is free again once that one is empty."""
    data = [distinct(UINT8, 1000, seed) for seed in (1, 2, 3)]
    with bench.ring(LAYOUTS[0]) as there, bench.ring(LAYOUTS[0]) as back:

        def answer() -> list[Array]:
            got = bench.receive(back[1], 1000)
            bench.send(there[0], data[2])
            return got

        receiving, sending = streams(bench.right, 2)
        targets = [put(bench.right, np.zeros(1000, np.uint8)) for _ in data]
        bench.send(there[0], *data[:2])
        for number in (0, 1):
            bench.right.get(there[1], address(targets[number]), message(1000, UINT8, number), receiving)
        sending.wait(receiving.record_event())
        receiving.synchronize()

        def ask() -> None:
            bench.right.put(back[0], address(targets[0]), message(1000), sending)
            bench.right.get(there[1], address(targets[2]), message(1000), receiving)
            sending.synchronize()
            receiving.synchronize()

        answered, asked = bench.both(answer, ask)
        assert asked is None
        assert_same_bits(answered[0], data[0], "what was asked")
        assert_same_bits(get(bench.right, targets[2]), data[2], "the answer")


def test_flush_goes_on_without_the_host(bench: Bench) -> None:
    """A stream that was flushed is empty; its future ends when the data has arrived."""
    data = distinct(UINT8, 400_000, seed=9)
    with bench.ring(LAYOUTS[0]) as (producer, consumer):
        stream = streams(bench.right)[0]
        target = put(bench.right, np.zeros_like(data))
        bench.right.get(consumer, address(target), message(data.size), stream)
        future = stream.flush()
        stream.synchronize()
        assert not future.done()
        bench.send(producer, data)
        assert future.result(SECONDS) is None
        assert_same_bits(get(bench.right, target), data, "what was received behind")


@pytest.mark.parametrize("receiving", [False, True])
def test_abort_stops_who_waits(bench: Bench, receiving: bool) -> None:
    """The abort word makes transfers leave, synchronised or flushed."""
    word = Reason.ABORTED.word(1)
    for flushed in (False, True):
        with bench.ring(LAYOUTS[0]) as (producer, consumer):
            stream = streams(bench.left)[0]
            x = put(bench.left, np.zeros(100_000, np.uint8))
            end = consumer if receiving else producer
            (bench.left.get if receiving else bench.left.put)(end, address(x), message(100_000), stream)
            wait = stream.flush().result if flushed else stream.synchronize
            stopped, _ = bench.both(wait, lambda other=producer if receiving else consumer: other.abort(word))  # type: ignore[misc]
            assert isinstance(stopped, RingStopped)
            assert (stopped.word, stopped.end) == (word, end)


@pytest.mark.parametrize("flushed", [False, True])
def test_deadline_ends_waiting(bench: Bench, flushed: bool) -> None:
    """Nobody comes: RingStalled names the end."""
    with bench.ring(LAYOUTS[0]) as (_, consumer):
        stream = bench.left.streams(1)[0]
        stream.deadline = Deadline.after(0.1)
        x = put(bench.left, np.zeros(10, np.uint8))
        bench.left.get(consumer, address(x), message(10), stream)
        with pytest.raises(RingStalled) as stalled:
            stream.flush().result(SECONDS) if flushed else stream.synchronize()
        assert stalled.value.ends == (consumer,)


def test_discard_forgets(bench: Bench) -> None:
    """What was enqueued is never moved, and the stream can be used for other rings."""
    data = distinct(UINT8, 1000, seed=5)
    with bench.ring(LAYOUTS[0]) as (_, given_up), bench.ring(LAYOUTS[0]) as (producer, consumer):
        stream = streams(bench.right)[0]
        target = put(bench.right, np.zeros_like(data))
        bench.right.get(given_up, address(target), message(1000), stream)
        stream.discard()
        stream.synchronize()
        bench.send(producer, data)
        bench.right.get(consumer, address(target), message(1000), stream)
        stream.synchronize()
        assert_same_bits(get(bench.right, target), data, "what came by another ring")
