"""Contracts of a device on whose streams compiled code can enqueue, without Python: events, messages, and local operations.

All three are optional. What compiled code cannot enqueue, Python enqueues through `Device` and `Stream`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from xvcomm.abc.device import Event, Stream
from xvcomm.memory.ring import Message, RingEnd
from xvcomm.types.dtype import DType, ReduceOp

CAPTURED = -2
"""Beside the result codes of vendors, which are not negative: what was enqueued went into a graph, to run later."""


class EnqueuedCall(NamedTuple):
    """An operation of fixed shape that compiled code enqueues on a device's stream. One call at a time.

    Attributes:
        function: address of a C function: the word `argument`, input and output, the stream's handle, and the bits
            of the float `Deadline.at` until when it may be busy. It is called with the interpreter lock, lets it go
            where it may wait, and returns 0 if the operation is enqueued, CAPTURED if it went into a graph.
        argument: address of what must live as long: `keep`.
        failed: raises what another result means.
        reduces: whether it is a reduction of a device's own, which gets the address of its operands' addresses as its input, and
            no deadline.
    """

    function: int
    argument: int
    keep: object
    failed: Callable[[int], NoReturn]
    reduces: bool = False


class MessageForm(NamedTuple):
    """A message but for its array and its tag, which is 0 here.

    Attributes:
        op, remote_first: as of `Device.get`.
    """

    end: RingEnd
    message: Message
    op: ReduceOp | None = None
    remote_first: bool = False


ITEM = np.dtype([
    ("address", "i8"),  # of its array
    ("apart", "i8"),  # bytes from there to the own elements that are reduced with those that come
    ("tag", "i8"),
    ("call_site", "i8"),  # not read by the device
])  # fmt: skip
"""One of `EnqueuedMessages` for compiled code."""


class EnqueuedMessages(NamedTuple):
    """Messages of fixed form, each through a ring end of its own, that compiled code enqueues together on a device's stream.

    One call at a time, and none at the same time as another transfer through a ring end. The functions are called
    with the interpreter lock, and let it go where they may wait.

    Attributes:
        ready: address of a C function of three words: `argument`, the stream's handle, and one that means nothing. It
            gives 0 where the device has to look at more: then `Device.put` or `get` serve, after which it may be ready.
        function: address of a C function of five words, to be called where the other one has just given another number:
            `argument`, the address of an `ITEM` for each message, a word that means nothing, the stream's handle, and
            another such word. Gives 0 if the messages are enqueued, which are
            then counted by the ring ends.
        argument: address of what must live as long: `keep`.
        failed: raises what another result means.
    """

    ready: int
    function: int
    argument: int
    keep: object
    failed: Callable[[int], NoReturn]


class EnqueuedEvents(NamedTuple):
    """Order between a stream and others, for compiled code.

    Its functions are C's, by address, of three words each. They are called with the interpreter lock, let it go where they
    may wait, and return 0 if they did what they do.

    Attributes:
        branch: `argument`, and the handles of another stream and of this one, which is to go on behind what the other
            holds now. Else the device has to look at more, and `Stream.wait` serves. One call at a time.
        record: `argument`, an event's `handle`, and the handle of this stream, on which to record it.
        follow: the same with another stream, whose next work is to wait for the event; else `Stream.wait` serves.
        argument: address of what must live as long: `keep`.
        take: gives an event that is not recorded yet.
        failed: raises what another result of `record` means.
    """

    branch: int
    record: int
    follow: int
    argument: int
    keep: object
    take: Callable[[], Event]
    failed: Callable[[int], NoReturn]


class SupportsEnqueuedEvents(ABC):
    """What an asynchronous `Device` also implements if compiled code can record its events. Without it none enqueues anything."""

    @abstractmethod
    def enqueued_events(self, stream: Stream) -> EnqueuedEvents:
        """Functions that order a stream with others. Never blocks."""


class SupportsEnqueuedMessages(SupportsEnqueuedEvents):
    """What a `Device` also implements if compiled code can enqueue its messages."""

    @abstractmethod
    def enqueued_messages(self, forms: Sequence[MessageForm]) -> EnqueuedMessages | None:
        """Messages that start together if they are several; None before `put` or `get` was called for each ring end."""


class SupportsEnqueuedLocal(SupportsEnqueuedEvents):
    """What a `Device` also implements if compiled code can enqueue its local operations, on a stream that is not capturing."""

    @abstractmethod
    def enqueued_copy(self, nbytes: int) -> EnqueuedCall:
        """What `Device.copy` does, for so many bytes."""

    @abstractmethod
    def enqueued_scale(self, count: int, dtype: DType, factor: float, divisor: int) -> EnqueuedCall:
        """What `Device.scale` does, for so many elements."""

    @abstractmethod
    def enqueued_reduce(self, ways: int, count: int, dtype: DType, op: ReduceOp, divisor: int) -> EnqueuedCall | None:
        """What `Device.reduce` does with `ways` operands of so many elements; None if they are too many for one launch."""
