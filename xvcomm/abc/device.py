"""Contract of a device: memory, streams and the movers of one vendor.

A rank has one device. Everything is enqueued on a stream and nothing blocks the host, except where it says so. On
GPUs each call is one launch, and the stream goes on by itself. On host memory, which has no hardware queue, a stream
collects border transfers and moves them all together when it is waited for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

from xvcomm.memory.ring import Message, RingEnd
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import DType, ReduceOp


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """What decides whether a device and one of another process reach each other's memory; see `transport.peer_refusal`.

    Attributes:
        runtime: whose handles for memory it takes: `cuda`, `rocm`.
        processes: equal for processes that may pass such handles to each other.
        device: the device's name on the host's bus.
        reaches: names of the devices whose memory it reads and writes, itself included.
        refused: why this rank shares no memory; empty if it does.
    """

    runtime: str
    processes: str
    device: str
    reaches: tuple[str, ...]
    refused: str = ""


@dataclass(frozen=True, slots=True)
class DeviceCapabilities:
    """What a device can do that not all can.

    Attributes:
        kind: `host`, `cuda`, `rocm`.
        architecture: for instance `x86_64`, `sm_90`, `gfx90a`.
        island: label of what its native library can join, unless the user gives another.
        index: number of the device in this process, as DLPack has it.
        asynchronous: whether streams go on behind the host, so that operations return when they are enqueued.
        dmabuf: whether its memory can be registered with a NIC.
        peers: with whom it shares memory, if it is of a kind that can.
    """

    kind: str
    architecture: str
    island: str
    index: int = 0
    asynchronous: bool = False
    dmabuf: bool = False
    peers: PeerMemory | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory of a device: its address there, and what must stay alive for it."""

    address: int
    nbytes: int
    owner: Any


@dataclass(frozen=True, slots=True)
class ExportedMemory:
    """Memory of a device that other processes can import by its handle."""

    address: int
    nbytes: int
    handle: bytes


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


class Courier(ABC):
    """Moves single messages of one ring end for a caller that waits: one at a time, in fewer steps than a stream.

    Attributes:
        end: the ring end.
    """

    end: RingEnd

    @property
    @abstractmethod
    def record(self) -> int:
        """Number of the newest message's record in the flight recorder."""

    @abstractmethod
    def begin(self, collective: int, data: int, dtype: int, nbytes: int, tag: int, call_site: int) -> bool:
        """Note a message in the flight recorder, put it behind the ring end's others, and move what need not wait.

        Args:
            collective: number of the communicator's next collective, for the record.
            data: address of the array.
            dtype, nbytes, tag: as in `ring.Message`.
            call_site: where the user called, from `trace.callsite`.

        Returns:
            Whether the message is through and the end of the record noted; else comes `finish`.

        Raises:
            RingStopped: see `Stream.synchronize`; also if the communicator's abort word is set.
        """

    @abstractmethod
    def finish(self, deadline: Deadline) -> None:
        """Block until the message is through, and note the end of its record.

        Raises:
            RingStopped, RingStalled: see `Stream.synchronize`.
        """

    @abstractmethod
    def discard(self) -> bool:
        """Give up the message after an error or an interrupt; False if there is none or it is through after all.

        Whoever gives one up must stop its ring and note the end of its record.
        """


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
    """

    function: int
    argument: int
    keep: object
    failed: Callable[[int], NoReturn]


class MessageForm(NamedTuple):
    """A message but for its array and its tag, which is 0 here.

    Attributes:
        op, remote_first: as of `Device.get`.
    """

    end: RingEnd
    message: Message
    op: ReduceOp | None = None
    remote_first: bool = False


class EnqueuedMessages(NamedTuple):
    """Messages of fixed form, each through a ring end of its own, that compiled code enqueues together on a device's stream.

    One call at a time, and none at the same time as another transfer through a ring end. The functions are called
    with the interpreter lock, and let it go where they may wait.

    Attributes:
        ready: address of a C function of three words: `argument`, the stream's handle, and one that means nothing. It
            gives 0 where the device has to look at more: then `Device.put` or `get` serve, after which it may be ready.
        function: address of a C function of five words, to be called where the other one has just given another number:
            `argument`, the address of three words for each message, which are its array, its tag and one that means
            nothing, again one such, the stream's handle, and one such. Gives 0 if the messages are enqueued, which are
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


class Device(ABC):
    """One vendor's memory, streams and movers, seen from one rank. Addresses are plain integers."""

    @abstractmethod
    def capabilities(self) -> DeviceCapabilities:
        """What this device is. Never blocks."""

    @abstractmethod
    def empty(self, nbytes: int) -> Allocation:
        """Uninitialised memory, aligned to 64 bytes or more; may come from a pool.

        Raises:
            ResourceError: there is not enough.
        """

    @abstractmethod
    def streams(self, count: int) -> tuple[Stream, ...]:
        """Streams of which waiting on one lets the others go on."""

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
        """Copy within the device, or between it and the host's memory, which may block until the bytes are read."""

    @abstractmethod
    def put(self, end: RingEnd, src: int, message: Message, stream: Stream) -> None:
        """Send `message.nbytes` from `src` through the ring."""

    @abstractmethod
    def get(
        self, end: RingEnd, dst: int, message: Message, stream: Stream, op: ReduceOp | None = None,
        *, remote_first: bool = False,
    ) -> None:  # fmt: skip
        """Receive into `dst`; with `op`, reduce into it: `remote op dst` if `remote_first`, else `dst op remote`."""

    def courier(self, end: RingEnd, op: int, recorder: int, communicator: int, stop: int) -> Courier:
        """What moves single messages of a ring end; only devices have it that do not go on behind the host.

        Args:
            op: `OpCode.SEND` or `OpCode.RECV`, for the record.
            recorder, communicator: `Recorder.handle`, and the communicator's number in the records.
            stop: address of the communicator's abort word.
        """
        raise NotImplementedError

    def enqueued(self, forms: Sequence[MessageForm]) -> EnqueuedMessages | None:
        """Messages for compiled code, which start together if they are several.

        None if the device has none, or not before `put` or `get` was called for each of the ring ends.
        """
        return None

    def enqueued_copy(self, nbytes: int) -> EnqueuedCall | None:
        """What `copy` does, for compiled code that knows the stream not to be capturing; None if the device has none."""
        return None

    def enqueued_scale(self, count: int, dtype: DType, factor: float, divisor: int) -> EnqueuedCall | None:
        """The same of `scale`."""
        return None

    def enqueued_reduce(
        self, count: int, dtype: DType, op: ReduceOp, divisor: int, *, src_first: bool
    ) -> EnqueuedCall | None:
        """The same of `reduce` of an input and the output; which of them comes first is `src_first`."""
        return None

    def enqueued_events(self, stream: Stream) -> EnqueuedEvents:
        """Events on a stream, for compiled code; only devices have them that go on behind the host."""
        raise NotImplementedError

    def export_memory(self, nbytes: int) -> ExportedMemory:
        """Memory for the slots of a ring, which other processes can import. Only for devices whose capabilities name `peers`,
        as the next three methods.

        Raises:
            ResourceError: there is not enough.
        """
        raise NotImplementedError

    def reclaim(self, exported: ExportedMemory, returned: Callable[[], bool]) -> None:
        """Reuse exported memory as soon as `returned` tells that no process has imported it any more."""
        raise NotImplementedError

    def import_memory(self, handle: bytes) -> int:
        """Map memory that another process has exported; its address here. Does not wait for running kernels.

        Raises:
            ResourceError: it cannot be mapped.
        """
        raise NotImplementedError

    def release_import(self, address: int) -> None:
        """Unmap imported memory. May wait for running kernels."""
        raise NotImplementedError

    @abstractmethod
    def reduce(
        self, dst: int, srcs: Sequence[int], count: int, dtype: DType, op: ReduceOp, stream: Stream, *, divisor: int = 0
    ) -> None:
        """`dst` becomes the reduction of `srcs` in order; low precision accumulates in float32 and rounds once.

        Args:
            divisor: what a sum of two or more is divided by before it is rounded; 0 for none.
        """

    @abstractmethod
    def scale(self, dst: int, src: int, count: int, dtype: DType, factor: float, divisor: int, stream: Stream) -> None:
        """`dst = src / divisor`, or `src * factor` where `divisor` is 0."""

    def convert(
        self, dst: int, src: int, count: int, dtype: DType, factor: float, divisor: int, stream: Stream, *, widens: bool
    ) -> None:
        """The same from a low-precision dtype to float32 if `widens`, else back; asked for on host memory only."""
        raise NotImplementedError


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
