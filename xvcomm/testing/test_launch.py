"""What compiled code enqueues, on every registered backend whose device supports it: events, messages, local operations."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from xvcomm.abc.launch import (
    ITEM,
    EnqueuedCall,
    MessageForm,
    SupportsEnqueuedEvents,
    SupportsEnqueuedLocal,
    SupportsEnqueuedMessages,
)
from xvcomm.jit.record import python_type
from xvcomm.testing.arrays import Array
from xvcomm.testing.benches import LAYOUTS, Bench, address, get, message, put, streams
from xvcomm.testing.cases import assert_same_bits, distinct
from xvcomm.types.dtype import BY_NAME, UINT8, ReduceOp

_Item = python_type(ITEM)
_WITHOUT = "compiled code enqueues no {} on this device"


def _function(place: int, words: int) -> Callable[..., int]:
    return ctypes.PYFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * words)(place)


def test_events_order_streams_from_compiled_code(bench: Bench) -> None:
    """One stream branches from another, and a third follows its event: all work comes after a message that is late."""
    device, data = bench.right, distinct(UINT8, 100_000, seed=6)
    if not isinstance(device, SupportsEnqueuedEvents):
        pytest.skip(_WITHOUT.format("events"))
    with bench.ring(LAYOUTS[0]) as (producer, consumer):
        first, middle, last = streams(device, 3)
        x, y, z = [put(device, np.zeros_like(data)) for _ in range(3)]
        calls = device.enqueued_events(middle)
        branch, record, follow = [_function(place, 3) for place in (calls.branch, calls.record, calls.follow)]
        event = calls.take()
        device.get(consumer, address(x), message(data.size), first)
        if branch(calls.argument, first.handle, middle.handle):  # another device may be current
            middle.wait(first.record_event())
        device.copy(address(y), address(x), data.size, middle)
        assert record(calls.argument, event.handle, middle.handle) == 0
        if follow(calls.argument, event.handle, last.handle):
            last.wait(event)
        device.copy(address(z), address(y), data.size, last)
        assert not middle.reached(event)
        bench.send(producer, data)
        last.synchronize()
        assert middle.reached(event)
        assert_same_bits(get(device, z), data, "what two streams passed on")


def test_messages_from_compiled_code_follow_others(bench: Bench) -> None:
    """Where compiled code may not launch a message `put` does, and every message arrives in order."""
    device, data = bench.left, [distinct(UINT8, 5000, seed) for seed in range(6)]
    if not isinstance(device, SupportsEnqueuedMessages):
        pytest.skip(_WITHOUT.format("messages"))
    with bench.ring(LAYOUTS[1]) as (producer, consumer):
        forms = [MessageForm(producer, message(5000))]
        assert device.enqueued_messages(forms) is None, "the ring was never used"
        (on,), arrays = streams(device), [put(device, x) for x in data]
        device.put(producer, address(arrays[0]), message(5000, UINT8, 0), on)
        found = device.enqueued_messages(forms)
        assert found is not None
        ready, launch = _function(found.ready, 3), _function(found.function, 5)
        for tag, x in enumerate(arrays[1:], 1):
            if ready(found.argument, on.handle, 0):
                item = _Item(address(x), 0, tag)
                assert launch(found.argument, ctypes.addressof(item), 0, on.handle, 0) == 0
            else:
                device.put(producer, address(x), message(5000, UINT8, tag), on)
            assert producer.sequence == tag + 1
        for want, came in zip(data, bench.receive(consumer, *[5000] * len(data)), strict=True):
            assert_same_bits(came, want, "a message")


def _check_call(bench: Bench, call: EnqueuedCall, at: tuple[int, int], x: Array, y: Array, want: Array) -> None:
    """Let compiled code make a call on arrays that begin some elements behind `x`, and behind `y`, which becomes `want`."""
    (on,), launch, width = streams(bench.left), _function(call.function, 5), x.itemsize
    source, target = put(bench.left, x), put(bench.left, y)
    places = address(source) + width * at[0], address(target) + width * at[1]
    assert launch(call.argument, *places, on.handle, 0) == 0
    on.synchronize()
    assert_same_bits(get(bench.left, target), want, f"from {at[0]} to {at[1]}")


@pytest.mark.parametrize("factor", [1, 3])
def test_copies_and_scaling_from_compiled_code_suit_any_addresses(bench: Bench, factor: int) -> None:
    """They move whole arrays, and touch nothing else."""
    device, count, x = bench.left, 5000, np.arange(5008, dtype=np.float32)
    if not isinstance(device, SupportsEnqueuedLocal):
        pytest.skip(_WITHOUT.format("local operations"))
    copies = factor == 1
    call = device.enqueued_copy(4 * count) if copies else device.enqueued_scale(count, BY_NAME["float32"], factor, 0)
    for src, dst in itertools.product(range(5), repeat=2):
        want = -x
        want[dst : dst + count] = factor * x[src : src + count]
        _check_call(bench, call, (src, dst), x, -x, want)


@pytest.mark.parametrize("ways", [1, 2, 3, 5])
def test_averages_from_compiled_code_round_once(bench: Bench, ways: int) -> None:
    """Of several arrays in float16, one of which may be the output too: a seventh of their sum."""
    device, count, half = bench.left, 5000, BY_NAME["float16"]
    if not isinstance(device, SupportsEnqueuedLocal):
        pytest.skip(_WITHOUT.format("local operations"))
    call = device.enqueued_reduce(ways, count, half, ReduceOp.SUM, 7)
    assert call is not None
    (on,), launch = streams(device), _function(call.function, 5)
    contents = [(np.arange(5008) % (way + 2)).astype(np.float16) for way in range(ways)]
    for skew, output in itertools.product(range(3), range(-1, ways)):
        arrays = [put(device, content) for content in contents]
        target = put(device, np.zeros(5008, np.float16)) if output < 0 else arrays[output]
        begins = [skew * (way % 2) for way in range(ways)]
        operands = (ctypes.c_int64 * ways)(*[address(x) + 2 * at for x, at in zip(arrays, begins, strict=True)])
        at = begins[output] if output >= 0 else skew
        assert launch(call.argument, ctypes.addressof(operands), address(target) + 2 * at, on.handle, 0) == 0
        on.synchronize()
        added = sum(x[a : a + count].astype(np.float32) for x, a in zip(contents, begins, strict=True))
        want = np.zeros(5008, np.float16) if output < 0 else contents[output].copy()
        want[at : at + count] = (added / np.float32(7 if ways > 1 else 1)).astype(np.float16)
        assert_same_bits(get(device, target), want, f"skew {skew}, output {output}")
