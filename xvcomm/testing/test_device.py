"""The contract of `Device` on every registered backend: both ends of rings in one process, a thread each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from xvcomm.abc.device import Device, RingStalled, RingStopped, Stream
from xvcomm.config import Config
from xvcomm.engine.session import plugins
from xvcomm.memory import array
from xvcomm.memory.ring import Message, Reason, RingEnd, RingLayout
from xvcomm.testing.arrays import Array, arrays_on
from xvcomm.testing.cases import assert_equal, assert_same_bits, distinct, expected, kinds, reductions, sample
from xvcomm.testing.gate import ring
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import BY_NAME, DTYPES, UINT8, DType, ReduceOp, Reduction
from xvcomm.types.opcode import OpCode

SECONDS = 20.0
LAYOUTS = [RingLayout(lanes, slots, 4096) for lanes in (1, 3, 8) for slots in (2, 5)]
SIZES = (0, 1, 15, 16, 17, 4095, 4096, 4097, 8192, 12_289, 100_003, 1_000_003)


@dataclass(frozen=True)
class Bench:
    """Two devices of one backend, as two ranks would have them, and threads to run them."""

    config: Config
    left: Device
    right: Device
    threads: ThreadPoolExecutor

    def ring(self, layout: RingLayout) -> contextlib.AbstractContextManager[tuple[RingEnd, RingEnd]]:
        """Both ends of a ring: (producer, consumer)."""
        return ring(self.config, layout)

    def both(self, one: Callable[[], Any], other: Callable[[], Any]) -> tuple[Any, Any]:
        """Run the two sides at the same time; an exception becomes its side's result."""

        def outcome(side: Callable[[], Any]) -> Any:
            try:
                return side()
            except Exception as error:
                return error

        first, second = self.threads.submit(outcome, one), self.threads.submit(outcome, other)
        return first.result(60), second.result(60)

    def send(self, end: RingEnd, *data: Array, dtype: DType = UINT8) -> None:
        """Send arrays from the left device."""
        stream = streams(self.left)[0]
        kept = [put(self.left, x) for x in data]
        for number, x in enumerate(kept):
            self.left.put(end, address(x), message(array.view(x).nbytes, dtype, number), stream)
        stream.synchronize()

    def receive(self, end: RingEnd, *sizes: int) -> list[Array]:
        """Receive bytes on the right device."""
        stream = streams(self.right)[0]
        kept = [put(self.right, np.zeros(size, np.uint8)) for size in sizes]
        for number, x in enumerate(kept):
            self.right.get(end, address(x), message(sizes[number], UINT8, number), stream)
        stream.synchronize()
        return [get(self.right, x) for x in kept]


def streams(device: Device, count: int = 1) -> tuple[Stream, ...]:
    """Streams whose waiting ends before the test's patience does."""
    made = device.streams(count)
    for stream in made:
        stream.deadline = Deadline.after(SECONDS)
    return made


def put(device: Device, x: Array) -> Any:
    """A new array with the contents of `x`, for any stream."""
    made = arrays_on(device).put(x)
    arrays_on(device).synchronize()
    return made


def get(device: Device, x: Any) -> Array:
    """The contents of an array that no stream uses any more."""
    return arrays_on(device).get(x)


def address(x: Any) -> int:
    """Where an array lies on its device."""
    return array.view(x).address


def message(nbytes: int, dtype: DType = UINT8, tag: int = 0) -> Message:
    """What both ends say of a transfer."""
    return Message(OpCode.SEND, dtype.code, nbytes, tag)


@pytest.fixture(scope="module", params=kinds())
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """The devices of one backend."""
    backend, config = plugins.backend(request.param), Config()
    with ThreadPoolExecutor(2) as threads:
        yield Bench(config, backend.device(config), backend.device(config), threads)


def test_capabilities_name_the_device(bench: Bench, request: pytest.FixtureRequest) -> None:
    """Kind as registered; ranks with equal islands can join."""
    able = bench.left.capabilities()
    assert able.kind in {found.name for found in plugins.backends()}
    assert able.island and able.architecture
    assert able == bench.right.capabilities()


@pytest.mark.parametrize("nbytes", [0, 1, 64, 1_000_001])
def test_memory_is_aligned(bench: Bench, nbytes: int) -> None:
    """Allocations begin at 64-byte multiples and do not overlap."""
    made = sorted((bench.left.empty(nbytes) for _ in range(4)), key=lambda m: m.address)
    for one, following in pairwise(made):
        assert one.address % 64 == 0 and one.nbytes >= nbytes
        assert one.address + nbytes <= following.address


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.lanes}x{layout.slots}")
def test_every_byte_arrives(bench: Bench, layout: RingLayout) -> None:
    """Sizes around slots and alignment, one after the other, from nothing to many times the ring."""
    data = [distinct(UINT8, size, seed) for seed, size in enumerate(SIZES)]
    with bench.ring(layout) as (producer, consumer):
        sent, got = bench.both(lambda: bench.send(producer, *data), lambda: bench.receive(consumer, *SIZES))
        assert sent is None
        assert isinstance(got, list), got
        for want, x in zip(data, got, strict=True):
            assert_same_bits(x, want, f"{want.size} bytes")
        assert (producer.sequence, consumer.sequence) == (len(SIZES), len(SIZES))
        for lane in range(layout.lanes):
            filled, drained = (
                int.from_bytes(producer._segment.view[place : place + 8], "little")
                for place in (layout.head(lane), layout.tail(lane))
            )
            assert filled == drained, f"lane {lane} has {filled} slots filled, {drained} drained"


@pytest.mark.parametrize("op", [None, ReduceOp.SUM], ids=str)
def test_arrays_begin_anywhere(bench: Bench, op: ReduceOp | None) -> None:
    """At every offset from 16 bytes, in sizes about words and about what a GPU's warps take; nothing beside them is touched."""
    sizes = (1, 15, 16, 33, 200, 4096, 9001, 100_003)
    with bench.ring(RingLayout(2, 2, 16_384)) as (producer, consumer):
        for offset in range(16):
            sent = [np.random.default_rng(size).integers(0, 100, size + 16, np.uint8) for size in sizes]
            kept, begins = distinct(UINT8, max(sizes) + 32, offset), [(5 * offset + size) % 16 for size in sizes]
            sources, targets = [put(bench.left, x) for x in sent], [put(bench.right, kept) for _ in sizes]

            def send(at: int = offset, arrays: list[Any] = sources) -> None:
                stream = streams(bench.left)[0]
                for tag, (x, size) in enumerate(zip(arrays, sizes, strict=True)):
                    bench.left.put(producer, address(x) + at, message(size, UINT8, tag), stream)
                stream.synchronize()

            def receive(arrays: list[Any] = targets, places: list[int] = begins) -> None:
                stream = streams(bench.right)[0]
                for tag, (x, size) in enumerate(zip(arrays, sizes, strict=True)):
                    bench.right.get(consumer, address(x) + places[tag], message(size, UINT8, tag), stream, op)
                stream.synchronize()

            assert bench.both(send, receive) == (None, None)
            for x, y, begin, size in zip(sent, targets, begins, sizes, strict=True):
                want = kept.copy()
                came = x[offset : offset + size]
                want[begin : begin + size] = came if op is None else came + want[begin : begin + size]
                assert_same_bits(get(bench.right, y), want, f"{size} bytes from offset {offset} to {begin}")


def test_more_messages_than_the_ledger_holds(bench: Bench) -> None:
    """The ledger goes round; the producer waits for the consumer."""
    data = [distinct(UINT8, 1 + seed % 7, seed) for seed in range(200)]
    with bench.ring(RingLayout(2, 2, 4096)) as (producer, consumer):
        _, got = bench.both(
            lambda: bench.send(producer, *data), lambda: bench.receive(consumer, *[x.size for x in data])
        )
        assert [x.tolist() for x in got] == [x.tolist() for x in data]


@pytest.mark.parametrize("layout", LAYOUTS[::2], ids=lambda layout: f"{layout.lanes}x{layout.slots}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_get_reduces(bench: Bench, dtype: DType, layout: RingLayout) -> None:
    """Reduced as it comes out of the ring, whatever the cut; the order of operands does not change exact results."""
    op = [o for o in reductions(dtype) if o not in (ReduceOp.AVG, ReduceOp.PREMUL_SUM)][dtype.code % 3 % 2]
    x, y = sample(dtype, 30_001, seed=1), sample(dtype, 30_001, seed=2)
    want = expected(op, dtype, [x, y], [])
    for remote_first in (False, True):
        with bench.ring(layout) as (producer, consumer):
            target = put(bench.right, x)

            def reduce(end: RingEnd = consumer, dst: Any = target, first: bool = remote_first) -> None:
                stream = streams(bench.right)[0]
                bench.right.get(end, address(dst), message(x.nbytes, dtype), stream, op, remote_first=first)
                stream.synchronize()

            assert bench.both(lambda end=producer: bench.send(end, y, dtype=dtype), reduce) == (None, None)  # type: ignore[misc]
            assert_equal(get(bench.right, target), want, f"{op} of {dtype}")


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX], ids=str)
@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16"])
def test_both_ends_get_the_same_bits(bench: Bench, name: str, op: ReduceOp) -> None:
    """One end keeps its operand on the left, the other puts the remote one there: signed zeros and NaN agree."""
    dtype = BY_NAME[name]
    word = np.dtype(f"u{dtype.itemsize}")
    special = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, -np.nan]).astype(dtype.numpy)
    payload = (special[6:7].view(word) | word.type(5)).view(dtype.numpy)
    values = np.concatenate([special, payload])
    x, y = np.repeat(values, values.size), np.tile(values, values.size)
    results = []
    for mine, theirs, remote_first in ((x, y, False), (y, x, True)):
        with bench.ring(RingLayout(1, 2, 4096)) as (producer, consumer):
            target = put(bench.right, mine)
            stream = streams(bench.right)[0]
            bench.send(producer, theirs, dtype=dtype)
            bench.right.get(consumer, address(target), message(x.nbytes, dtype), stream, op, remote_first=remote_first)
            stream.synchronize()
            results.append(get(bench.right, target).copy())
    assert_same_bits(results[0], results[1], f"{op} of {name}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduce_many(bench: Bench, dtype: DType) -> None:
    """One to five operands, into memory of its own and onto one of them; low precision rounds once, also an average."""
    device = bench.left
    for op in (o for o in reductions(dtype) if o is not ReduceOp.PREMUL_SUM):
        averages = (2,) if dtype.kind == "c" else (2, 3, 5)  # numpy divides complex numbers in another way
        for ways in averages if op is ReduceOp.AVG else (1, 2, 3, 5):
            base, divisor = Reduction(op).base, ways if op is ReduceOp.AVG else 0
            values = [sample(dtype, 9001, seed=i, most=1) for i in range(ways)]
            want = expected(op, dtype, values, [])
            for place in (None, 0, ways - 1):
                terms = [put(device, v) for v in values]
                target = put(device, np.zeros_like(want)) if place is None else terms[place]
                stream = streams(device)[0]
                device.reduce(address(target), [address(t) for t in terms], 9001, dtype, base, stream, divisor=divisor)
                stream.synchronize()
                assert_equal(get(device, target), want, f"{op} of {ways} x {dtype} onto {place}")


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.kind != "b"], ids=str)
def test_scale_and_copy(bench: Bench, dtype: DType) -> None:
    """Multiply, divide, and move, in place too."""
    device, stream = bench.left, streams(bench.left)[0]
    x = sample(dtype, 5003, seed=1, unit=4)
    for factor, divisor, want in ((2.0, 0, x + x), (0.0, 4, sample(dtype, 5003, seed=1))):
        if dtype.kind == "c" and divisor:
            want = x / dtype.numpy.type(4)
        source, target = put(device, x), put(device, np.zeros_like(x))
        device.scale(address(target), address(source), x.size, dtype, factor, divisor, stream)
        device.scale(address(source), address(source), x.size, dtype, factor, divisor, stream)
        device.copy(address(target) + x.nbytes // 2, address(source), 0, stream)
        stream.synchronize()
        assert_equal(get(device, target), want, f"scaled {dtype}")
        assert_equal(get(device, source), want, f"{dtype} scaled in place")
    source, target = put(device, x), put(device, np.zeros_like(x))
    device.copy(address(target), address(source), x.nbytes, stream)
    stream.synchronize()
    assert_same_bits(get(device, target), x, f"copied {dtype}")


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


def test_different_descriptions_stop_both(bench: Bench) -> None:
    """Whoever posts second sees it; nothing is delivered."""
    with bench.ring(LAYOUTS[0]) as (producer, consumer):
        target = put(bench.right, np.zeros(50_000, np.uint8))

        def wrong() -> None:
            stream = streams(bench.right)[0]
            bench.right.get(consumer, address(target), message(50_000, UINT8, tag=7), stream)
            stream.synchronize()

        outcomes = bench.both(lambda: bench.send(producer, np.ones(50_000, np.uint8)), wrong)
        for outcome in outcomes:
            assert isinstance(outcome, RingStopped), outcome
            assert Reason.parse(outcome.word)[0] is Reason.MISMATCH
        assert not get(bench.right, target).any()


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


def test_what_was_published_before_an_abort_is_delivered(bench: Bench) -> None:
    """A producer that leaves after its message is through takes nothing back."""
    data = distinct(UINT8, 5000, seed=4)
    with bench.ring(LAYOUTS[0]) as (producer, consumer):
        bench.send(producer, data)
        producer.abort(Reason.LEFT.word(0))
        (got,) = bench.receive(consumer, data.size)
        assert_same_bits(got, data, "what lay in the ring")


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
