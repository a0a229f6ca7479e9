"""The calls that CUDA and HIP, NCCL and RCCL have in common: two tables, which each vendor fills in.

Handles (streams, events, functions, communicators) and addresses are plain integers. Nothing here blocks the host or
waits for the device unless it says so. Calls act on the calling thread's current device: see `Runtime.use`.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from xvcomm.types.dtype import ReduceOp

SUCCESS = 0
IN_PROGRESS = 7
"""Result of a library's call that goes on behind the caller: NCCL's and RCCL's ncclInProgress."""


class VendorError(Exception):
    """A vendor's call failed.

    Attributes:
        call: its name, as the vendor's manual has it.
        code: what it returned.
        name: the code's name.
    """

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{call}: {name} ({code}): {text}")
        self.call, self.code, self.name = call, code, name


def unknown_code(error: ValueError) -> int:
    """The code in `99 is not a valid ncclResult_t`: a package for Python that is older than the library; -1 if there is none."""
    number = str(error).partition(" ")[0]
    return int(number) if number.isdigit() else -1


class Addresses(NamedTuple):
    """Where the vendor's functions lie that compiled code calls.

    Attributes:
        capturing: is a stream capturing.
        launch: launch a kernel.
        record: record an event on a stream.
        wait: let a stream wait for an event.
        current: what is current on the thread, a word that is written where the only argument says.
    """

    capturing: int
    launch: int
    record: int
    wait: int
    current: int


class Runtime(ABC):
    """CUDA's runtime, or HIP's. Every call raises VendorError.

    Attributes:
        kind: `cuda` or `rocm`.
        invalid_streams: handles that are no streams here: DLPack's rules differ between the two.
        source: lines of C++ that the kernels' source begins with.
    """

    kind: ClassVar[str]
    invalid_streams: ClassVar[frozenset[int]]
    source: ClassVar[str] = ""

    @abstractmethod
    def count(self) -> int:
        """Number of devices."""

    @abstractmethod
    def current(self) -> int:
        """The calling thread's device."""

    @abstractmethod
    def use(self, index: int) -> None:
        """Make a device the calling thread's."""

    @abstractmethod
    def architecture(self, index: int) -> str:
        """`sm_90`, `gfx90a`: what kernels are compiled for."""

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Device memory, aligned to 256 bytes. May wait for the device."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Give it back. May wait for the device."""

    @abstractmethod
    def shareable(self, nbytes: int) -> int:
        """The same, of which a peer sees at once what a running kernel writes."""

    @abstractmethod
    def export(self, address: int) -> bytes:
        """A handle of shareable memory, for `open` in another process."""

    @abstractmethod
    def open(self, handle: bytes) -> int:
        """Map another process's memory on the current device. Does not wait for kernels."""

    @abstractmethod
    def close(self, address: int) -> None:
        """Unmap it. May wait for the device, with the interpreter lock let go."""

    @abstractmethod
    def reaches(self, index: int, other: int) -> bool:
        """Whether kernels of a device can read and write another one's memory."""

    @abstractmethod
    def bus(self, index: int) -> str:
        """PCI address of a device, by which all processes of the host know it."""

    @abstractmethod
    def register(self, address: int, nbytes: int) -> int:
        """Pin host memory for all devices and give the address by which the current device sees it. Takes milliseconds."""

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Unpin what was registered at this host address."""

    @abstractmethod
    def locate(self, address: int) -> int | None:
        """On which device memory lies; None if it is not device memory, or was freed."""

    @abstractmethod
    def stream(self) -> int:
        """A stream of the highest priority that does not wait for the default stream."""

    @abstractmethod
    def capture(self, stream: int) -> int:
        """Number of the capture of a graph that a stream takes part in; 0 if of none."""

    @abstractmethod
    def event(self) -> int:
        """An event without timing."""

    @abstractmethod
    def record(self, event: int, stream: int) -> None:
        """Record an event after what is on a stream now."""

    @abstractmethod
    def wait(self, stream: int, event: int) -> None:
        """Let what comes next on a stream wait for an event."""

    @abstractmethod
    def reached(self, event: int) -> bool:
        """Whether an event is through."""

    @abstractmethod
    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Copy in any direction. Host memory that is not pinned: may block until the bytes are read."""

    @abstractmethod
    def zero(self, address: int, nbytes: int, stream: int) -> None:
        """Fill with zero bytes."""

    @abstractmethod
    def compile(self, source: str, names: Sequence[str], architecture: str) -> tuple[bytes, dict[str, str]]:
        """Compile C++ and give a loadable image and each name expression's lowered name. Takes seconds.

        Raises:
            VendorError: with the compiler's log.
        """

    @abstractmethod
    def load(self, image: bytes) -> int:
        """Load an image on the current device."""

    @abstractmethod
    def function(self, module: int, name: str) -> int:
        """A kernel of a loaded image, by its lowered name."""

    @abstractmethod
    def launch(self, function: int, blocks: int, threads: int, params: int, stream: int) -> None:
        """Enqueue a kernel; `params` is the address of an array of pointers to its arguments, read before this returns."""

    @abstractmethod
    def addresses(self) -> Addresses:
        """Where the vendor's functions lie."""

    @abstractmethod
    def failure(self, code: int) -> VendorError:
        """The error that one of these gave."""

    @abstractmethod
    def recorded(self, event: int, stream: int) -> None:
        """Take note that compiled code will record an event on a stream."""


class Library(ABC):
    """NCCL, or RCCL. Functions that enqueue give the library's result code; the others raise VendorError.

    Counts are elements of `dtype`; `dtype` and `op` are the library's own numbers.

    Attributes:
        name: `NCCL` or `RCCL`.
        least_version: the oldest that serves, as `version` has it.
    """

    name: ClassVar[str]
    least_version: ClassVar[int]

    @abstractmethod
    def version(self) -> int:
        """For instance 22809 for 2.28.9."""

    @abstractmethod
    def dtypes(self) -> Mapping[str, int]:
        """The library's number for each of our dtype names that it can reduce."""

    @abstractmethod
    def ops(self) -> Mapping[ReduceOp, int]:
        """The library's number for each reduction that needs no factor."""

    @abstractmethod
    def explain(self, code: int, comm: int) -> str:
        """A result code in words, with the library's last error text."""

    @abstractmethod
    def path(self) -> str:
        """The file of the library that is loaded."""

    def address(self, function: str) -> int:
        """Where one of its functions lies, by its name in NCCL's manual."""
        return ctypes.cast(getattr(ctypes.CDLL(self.path()), function), ctypes.c_void_p).value or 0

    @abstractmethod
    def unique_id(self) -> bytes:
        """What the members of a new communicator must all have."""

    @abstractmethod
    def join(self, unique_id: bytes, members: int, me: int) -> int:
        """Join a communicator. Blocks until all members have come, with the interpreter lock let go."""

    @abstractmethod
    def state(self, comm: int) -> int:
        """SUCCESS, IN_PROGRESS, or the error that a communicator met behind the caller."""

    @abstractmethod
    def abort(self, comm: int) -> None:
        """Make its kernels leave and free it. Any thread."""

    @abstractmethod
    def destroy(self, comm: int) -> None:
        """Free it when what is enqueued is done; blocks."""

    @abstractmethod
    def premul_sum(self, factor: float, dtype: int, comm: int) -> int:
        """An op number for a sum of each member's array times its own factor."""

    @abstractmethod
    def free_op(self, op: int, comm: int) -> None:
        """Give such a number back."""

    @abstractmethod
    def group_start(self) -> int:
        """Begin to collect calls of this thread."""

    @abstractmethod
    def group_end(self) -> int:
        """Enqueue the collected calls as one."""

    @abstractmethod
    def all_reduce(self, src: int, dst: int, count: int, dtype: int, op: int, comm: int, stream: int) -> int:
        """ncclAllReduce."""

    @abstractmethod
    def reduce(self, src: int, dst: int, count: int, dtype: int, op: int, root: int, comm: int, stream: int) -> int:
        """ncclReduce."""

    @abstractmethod
    def reduce_scatter(self, src: int, dst: int, count: int, dtype: int, op: int, comm: int, stream: int) -> int:
        """ncclReduceScatter; `count` of the output."""

    @abstractmethod
    def all_gather(self, src: int, dst: int, count: int, dtype: int, comm: int, stream: int) -> int:
        """ncclAllGather; `count` of the input."""

    @abstractmethod
    def broadcast(self, src: int, dst: int, count: int, dtype: int, root: int, comm: int, stream: int) -> int:
        """ncclBroadcast."""

    @abstractmethod
    def send(self, src: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> int:
        """ncclSend."""

    @abstractmethod
    def recv(self, dst: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> int:
        """ncclRecv."""
