"""Contract of a device: memory, streams and the movers of one vendor.

A rank has one device. Everything is enqueued on a stream and nothing blocks the host, except where it says so. On
GPUs each call is one launch, and the stream goes on by itself. On host memory, which has no hardware queue, a stream
collects border transfers and moves them all together when it is waited for.

What only some devices can do are contracts of their own, which a device class also derives from; callers ask with
`isinstance`: `SupportsEnqueuedEvents`, `SupportsEnqueuedMessages` and `SupportsEnqueuedLocal` in `launch`,
`SupportsPeerMemory` in `peer_memory`, `SupportsNicMemory` in `nic_memory`, `SupportsMessageMovers` in `message_mover`,
`SupportsConversion` in `partial_sums`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from xvcomm.memory.ring import Message, RingEnd
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import DType, ReduceOp


@dataclass(frozen=True, slots=True)
class DeviceCapabilities:
    """What a device is.

    Attributes:
        kind: `host`, `cuda`, `rocm`.
        architecture: for instance `x86_64`, `sm_90`, `gfx90a`.
        island: label of what its native library can join, unless the user gives another.
        index: number of the device in this process, as DLPack has it.
        asynchronous: whether streams go on behind the host, so that operations return when they are enqueued.
    """

    kind: str
    architecture: str
    island: str
    index: int = 0
    asynchronous: bool = False


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory of a device: its address there, and what must stay alive for it."""

    address: int
    nbytes: int
    owner: Any


class Event(Protocol):
    """An event on a stream of a device that is asynchronous.

    Attributes:
        captured: not 0 if it was recorded in a graph's capture, so that it cannot be queried.
        handle: by which compiled code knows it.
    """

    captured: int
    handle: int


Queue = tuple[int, int]
"""A stream's handle and, where the vendor has one such stream in each thread, which thread; else 0."""


class Stream(ABC):
    """A queue of work of one device; made by `Device.streams` and `Device.adopt`."""

    deadline: Deadline
    """Until when the host may wait for what is on it; set by whoever enqueues."""

    queue: Queue = (0, 0)
    """Equal for streams of the vendor's on which one thing is done after the other."""

    lasting: bool = True
    """Whether any thread may use it as long as the device; others may be gone as soon as what is on them is over."""

    @property
    def handle(self) -> int:
        """The vendor's handle, for whoever enqueues something now; 0 where streams have none."""
        return 0

    @abstractmethod
    def record_event(self) -> object:
        """Record an event after all work that is on the stream now, for `wait`."""

    @abstractmethod
    def wait(self, event: object) -> None:
        """Let later work of this stream wait for an event of another one."""

    @abstractmethod
    def reached(self, event: object) -> bool:
        """Whether the device has reached an event, of any of its streams. Never blocks."""

    @abstractmethod
    def capturing(self) -> bool:
        """Whether what is enqueued now goes into a graph, to be run later and perhaps often."""

    @abstractmethod
    def together(self) -> None:
        """Let the transfers enqueued from now until the next event start together, so that none waits for another."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the stream is empty.

        Raises:
            RingStopped: a ring's abort word was set, or both ends described a message differently.
            RingStalled: the stream's deadline passed.
        """

    @abstractmethod
    def flush(self) -> Future[None]:
        """Let go on, without the host waiting, what the stream holds; it is empty for the caller afterwards.

        The future ends with what `synchronize` would raise; who waits for a `ProcessFuture` may do the work itself.
        """

    @abstractmethod
    def discard(self) -> None:
        """Forget what was enqueued and neither synchronised nor flushed; its rings are finished by it."""


class Device(ABC):
    """One vendor's memory, streams and movers, seen from one rank. Any thread.

    Addresses are plain integers, lengths are bytes where they are called `nbytes` and elements of `dtype` where they are called
    `count`. Arrays are contiguous. `src` and `dst` are the same array or do not overlap.
    """

    @abstractmethod
    def capabilities(self) -> DeviceCapabilities:
        """What this device is. Never blocks."""

    @abstractmethod
    def empty(self, nbytes: int) -> Allocation:
        """Uninitialised memory, aligned to 64 bytes or more; may come from a pool. May wait for the device.

        Raises:
            ResourceError: there is not enough.
        """

    @abstractmethod
    def streams(self, count: int) -> tuple[Stream, ...]:
        """New streams, of which waiting on one lets the others go on."""

    @abstractmethod
    def adopt(self, handle: int | None, *addresses: int) -> Stream:
        """A stream of somebody else's, by the vendor's handle; None is the default stream, where there is one.

        Args:
            addresses: arrays that are to be used on it, to be looked at where the vendor can tell what memory is.

        Raises:
            ArgumentError: the handle is of no stream of this device, or a graph is captured from it in a way that
                cannot work.
            ArrayError: an array is not in this device's memory: freed, or another's.
        """

    @abstractmethod
    def copy(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        """Enqueue a copy within the device, or between it and host memory; that may block until the bytes are read."""

    @abstractmethod
    def put(self, end: RingEnd, src: int, message: Message, stream: Stream) -> None:
        """Enqueue a send of `message.nbytes` from `src` through the ring.

        Raises:
            ResourceError: the ring's memory cannot be pinned.
            ArgumentError: the stream is capturing, and the ring was never used before.
        """

    @abstractmethod
    def get(
        self, end: RingEnd, dst: int, message: Message, stream: Stream, op: ReduceOp | None = None,
        *, own: int | None = None, remote_first: bool = False,
    ) -> None:  # fmt: skip
        """Enqueue a receive into `dst`; with `op`, reduce: `dst = remote op own` if `remote_first`, else `dst = own op remote`.

        Args:
            own: address of the own operand; `dst` itself if omitted. Else they do not overlap.

        Raises:
            ResourceError, ArgumentError: see `put`.
        """

    @abstractmethod
    def reduce(
        self, dst: int, srcs: Sequence[int], count: int, dtype: DType, op: ReduceOp, stream: Stream, *, divisor: int = 0
    ) -> None:
        """Enqueue a reduction of `srcs`, in order, into `dst`; low precision accumulates in float32 and rounds once.

        Args:
            divisor: what a sum of two or more is divided by before it is rounded; 0 for none.
        """

    @abstractmethod
    def scale(self, dst: int, src: int, count: int, dtype: DType, factor: float, divisor: int, stream: Stream) -> None:
        """Enqueue `dst = src / divisor`, or `src * factor` where `divisor` is 0."""


class RingStopped(Exception):
    """A transfer left its loop: the ring's abort word is set. The communicator turns it into the user's error."""

    def __init__(self, end: RingEnd, word: int, sequence: int) -> None:
        super().__init__(f"ring to rank {end.peer} stopped")
        self.end = end
        self.word = word
        self.sequence = sequence


class RingStalled(Exception):
    """Transfers did not finish by their deadline; `ends` are those that still wait."""

    def __init__(self, ends: Sequence[RingEnd]) -> None:
        super().__init__("transfers did not finish in time")
        self.ends = tuple(ends)
