"""Two devices of one backend, as two ranks would have them, and threads that run both ends of a ring in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from xvcomm.abc.device import Device, Stream
from xvcomm.config import Config
from xvcomm.memory import array
from xvcomm.memory.ring import Message, RingEnd, RingLayout
from xvcomm.testing.arrays import Array, arrays_on
from xvcomm.testing.gate import ring
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import UINT8, DType
from xvcomm.types.opcode import OpCode

SECONDS = 100.0
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
