"""Rings within one process, and a Gate made of one, which blocks a device's stream as long as a test needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from xvcomm.config import Config
from xvcomm.engine.session import plugins
from xvcomm.memory.ring import Message, RingEnd, RingLayout
from xvcomm.memory.segment import Segment
from xvcomm.testing.arrays import SECONDS, Array, DeviceArray, DeviceArrays
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import UINT8
from xvcomm.types.opcode import OpCode

_LAYOUT = RingLayout(1, 2, 4096)


@contextlib.contextmanager
def ring(config: Config, layout: RingLayout) -> Iterator[tuple[RingEnd, RingEnd]]:
    """Both ends of a ring, with its memory mapped twice: (producer, consumer)."""
    made = Segment.create(config.shm_dir, "conformance", layout.size)
    producer = RingEnd.create(made, layout, peer=1, producer=True)
    consumer = RingEnd.open(Segment.attach(config.shm_dir, made.name), peer=0, producer=False)
    made.unlink()
    try:
        yield producer, consumer
    finally:
        producer.close()
        consumer.close()


class Gate:
    """Blocks the stream of arrays until the host opens it.

    It enqueues a receive from a ring that the host fills, so that opening it needs no stream of the device: the vendor may
    queue a stream behind work of another one that cannot start yet.
    """

    def __init__(self, a: DeviceArrays, producer: RingEnd, consumer: RingEnd) -> None:
        self._arrays, self._producer, self._consumer = a, producer, consumer
        self._host = plugins.backend("host").device(Config())

    @classmethod
    @contextlib.contextmanager
    def on(cls, a: DeviceArrays) -> Iterator[Gate]:
        """A gate that has been used once, so that its first real use needs no initialization."""
        with ring(Config(), _LAYOUT) as (producer, consumer):
            gate = cls(a, producer, consumer)
            x, values = a.put(np.zeros(1, np.uint8)), np.ones(1, np.uint8)
            gate.close(x)
            gate.open(values)
            assert (a.get(x) == values).all()
            yield gate
            a.synchronize()

    def close(self, x: DeviceArray) -> None:
        """Block later work on the stream until `open` fills `x`."""
        stream = self._arrays.stream
        stream.deadline = Deadline.after(SECONDS)
        self._arrays.device.get(self._consumer, x.address, _message(x.nbytes), stream)

    def open(self, values: Array) -> None:
        """Fill the array that the gate was closed with, which unblocks the stream."""
        (stream,) = self._host.streams(1)
        stream.deadline = Deadline.after(SECONDS)
        source = np.ascontiguousarray(values)
        self._host.put(self._producer, source.ctypes.data, _message(source.nbytes), stream)
        stream.synchronize()


def _message(nbytes: int) -> Message:
    return Message(OpCode.SEND, UINT8.code, nbytes, 0)
