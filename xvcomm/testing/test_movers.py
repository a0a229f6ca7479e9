"""The movers of every registered backend: `put`, `get` and `get_reduce`, with both ends of a ring in one process."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from xvcomm.abc.device import RingStopped
from xvcomm.memory.ring import Reason, RingEnd, RingLayout
from xvcomm.testing.benches import LAYOUTS, SIZES, Bench, address, get, message, put, streams
from xvcomm.testing.cases import assert_equal, assert_same_bits, distinct, expected, reductions, sample
from xvcomm.types.dtype import BY_NAME, DTYPES, UINT8, DType, ReduceOp


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
                ctypes.c_int64.from_address(producer.address + place).value
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
    """Reduced as it comes out of the ring, whatever the cut; the order of operands does not change exact results.

    The own operand is the target, or lies elsewhere: aligned as the target, or one element further.
    """
    op = [o for o in reductions(dtype) if o not in (ReduceOp.AVG, ReduceOp.PREMUL_SUM)][dtype.code % 3 % 2]
    x, y = sample(dtype, 30_001, seed=1), sample(dtype, 30_001, seed=2)
    want = expected(op, dtype, [x, y], [])
    for shift, remote_first in ((None, False), (None, True), (0, True), (1, False)):
        with bench.ring(layout) as (producer, consumer):
            before = x[: shift or 0]
            own = put(bench.right, np.concatenate([before, x]))
            target = own if shift is None else put(bench.right, np.zeros_like(x))
            place = None if shift is None else address(own) + before.nbytes

            def reduce(
                end: RingEnd = consumer, dst: Any = target, place: int | None = place, first: bool = remote_first
            ) -> None:
                stream = streams(bench.right)[0]
                bench.right.get(end, address(dst), message(x.nbytes, dtype), stream, op, own=place, remote_first=first)
                stream.synchronize()

            assert bench.both(lambda end=producer: bench.send(end, y, dtype=dtype), reduce) == (None, None)  # type: ignore[misc]
            assert_equal(get(bench.right, target), want, f"{op} of {dtype}")
            if shift is not None:
                assert_equal(get(bench.right, own), np.concatenate([before, x]), "the own operand is only read")


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


def test_different_descriptions_stop_both(bench: Bench) -> None:
    """The rank that posts second raises; nothing is delivered."""
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


def test_what_was_published_before_an_abort_is_delivered(bench: Bench) -> None:
    """A producer that leaves after its message is through takes nothing back."""
    data = distinct(UINT8, 5000, seed=4)
    with bench.ring(LAYOUTS[0]) as (producer, consumer):
        bench.send(producer, data)
        producer.abort(Reason.LEFT.word(0))
        (got,) = bench.receive(consumer, data.size)
        assert_same_bits(got, data, "what lay in the ring")
