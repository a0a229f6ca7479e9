"""The common functions of CUDA and HIP, NCCL and RCCL: two tables that each vendor fills in.

Handles (streams, events, functions, communicators) and addresses are plain integers. No function blocks the host or waits for
the device unless its docstring says so. Functions act on the calling thread's current device: see `Runtime.use`.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, NamedTuple

from xvcomm.abc.ranges import Ranges
from xvcomm.types.dtype import ReduceOp

SUCCESS = 0
IN_PROGRESS = 7
"""Result of a library call that continues asynchronously: ncclInProgress of NCCL and RCCL."""


class VendorError(Exception):
    """A vendor's function failed.

    Attributes:
        call: its name in the vendor's manual.
        code: its result.
        name: name of the code.
    """

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{call}: {name} ({code}): {text}")
        self.call, self.code, self.name = call, code, name


def unknown_code(error: ValueError) -> int:
    """The code in `99 is not a valid ncclResult_t`, raised by bindings older than the library; -1 if there is none."""
    number = str(error).partition(" ")[0]
    return int(number) if number.isdigit() else -1


class Addresses(NamedTuple):
    """Addresses of the vendor's functions that compiled code calls.

    Attributes:
        current: the thread's current device or context, written to the address in its only argument.
    """

    capturing: int
    launch: int
    record: int
    wait: int
    current: int


class Runtime(ABC):
    """CUDA's runtime, or HIP's. Every method may raise VendorError.

    Attributes:
        kind: of device, as the backend has it.
        visible: environment variable that selects the devices a process sees.
        invalid_streams: handles that are not streams here: DLPack's rules differ between the two.
        source: lines of C++ that precede the kernels' source.
        needs_write: see `SupportsNicMemory`.
    """

    kind: ClassVar[str]
    visible: ClassVar[str]
    invalid_streams: ClassVar[frozenset[int]]
    source: ClassVar[str] = ""
    needs_write: ClassVar[bool] = False

    def ranges(self) -> Ranges | None:
        """See `SupportsRanges`."""
        return None

    @abstractmethod
    def count(self) -> int:
        """Number of devices."""

    @abstractmethod
    def current(self) -> int:
        """The calling thread's current device."""

    @abstractmethod
    def use(self, index: int) -> None:
        """Make a device current on the calling thread."""

    @abstractmethod
    def architecture(self, index: int) -> str:
        """Architecture that kernels are compiled for: `sm_90`, `gfx90a`."""

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Allocate device memory, aligned to 256 bytes. May wait for the device."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Free device memory. May wait for the device."""

    @abstractmethod
    def shareable(self, nbytes: int) -> int:
        """Allocate memory in which a peer sees writes of a running kernel at once."""

    @abstractmethod
    def export(self, address: int) -> bytes:
        """A handle of shareable memory, for `open` in another process."""

    @abstractmethod
    def open(self, handle: bytes) -> int:
        """Map another process's memory on the current device. Does not wait for kernels."""

    @abstractmethod
    def close(self, address: int) -> None:
        """Unmap it. May wait for the device, without the interpreter lock."""

    @abstractmethod
    def dma_buf(self, address: int, nbytes: int) -> int:
        """A descriptor of a dma-buf of device memory, on whole pages of the host."""

    @abstractmethod
    def during_captures(self) -> AbstractContextManager[None]:
        """Permit the calling thread meanwhile to allocate memory, although another thread captures a graph."""

    @abstractmethod
    def reaches(self, index: int, other: int) -> bool:
        """Whether kernels of a device can access another device's memory."""

    @abstractmethod
    def bus(self, index: int) -> str:
        """PCI address of a device, which identifies it in all processes of the host."""

    @abstractmethod
    def register(self, address: int, nbytes: int) -> int:
        """Pin host memory for all devices and return its address for the current device. Takes milliseconds."""

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Unpin memory that was registered at this host address."""

    @abstractmethod
    def locate(self, address: int) -> int | None:
        """Index of the device that contains an address; None if it is not device memory, or was freed."""

    @abstractmethod
    def stream(self) -> int:
        """Create a stream of the highest priority that does not synchronize with the default stream."""

    @abstractmethod
    def capture(self, stream: int) -> int:
        """Number of the graph capture that a stream takes part in; 0 if it is not being captured."""

    @abstractmethod
    def event(self) -> int:
        """Create an event without timing."""

    @abstractmethod
    def record(self, event: int, stream: int) -> None:
        """Record an event on a stream."""

    @abstractmethod
    def wait(self, stream: int, event: int) -> None:
        """Make a stream wait for an event."""

    @abstractmethod
    def reached(self, event: int) -> bool:
        """Whether the work before an event is complete."""

    @abstractmethod
    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Copy in any direction. With pageable host memory it may block until the bytes are read."""

    @abstractmethod
    def zero(self, address: int, nbytes: int, stream: int) -> None:
        """Fill with zero bytes."""

    @abstractmethod
    def compile(self, source: str, names: Sequence[str], architecture: str) -> tuple[bytes, dict[str, str]]:
        """Compile C++ to a loadable image; returns it with each name expression's lowered name. Takes seconds.

        Raises:
            VendorError: with the compiler's log.
        """

    @abstractmethod
    def load(self, image: bytes) -> int:
        """Load an image on the current device; returns its handle."""

    @abstractmethod
    def function(self, module: int, name: str) -> int:
        """A kernel of a loaded image, by its lowered name."""

    @abstractmethod
    def launch(self, function: int, blocks: int, threads: int, params: int, stream: int) -> None:
        """Enqueue a kernel; `params` is the address of an array of pointers to its arguments, read before this returns."""

    @abstractmethod
    def addresses(self) -> Addresses:
        """Addresses of the vendor's functions for compiled code."""

    @abstractmethod
    def failure(self, code: int) -> VendorError:
        """The error for a code that one of these functions returned."""

    @abstractmethod
    def recorded(self, event: int, stream: int) -> None:
        """Note that compiled code will record an event on a stream."""


class Library(ABC):
    """NCCL, or RCCL. Functions that enqueue return the library's result code; the others raise VendorError.

    Counts are elements of `dtype`; `dtype` and `op` are the library's own numbers.

    Attributes:
        name: for instance `NCCL`.
        debug_hint: how to get more details of an error.
        least_version: minimum supported version, in the format of `version`.
    """

    name: ClassVar[str]
    debug_hint: ClassVar[str] = "NCCL_DEBUG=INFO tells more"
    least_version: ClassVar[int] = 21800

    @abstractmethod
    def version(self) -> int:
        """Version number, for instance 22809 for 2.28.9."""

    @abstractmethod
    def dtypes(self) -> Mapping[str, int]:
        """The library's number for each dtype name that it can reduce."""

    @abstractmethod
    def ops(self) -> Mapping[ReduceOp, int]:
        """The library's number for each reduction without a factor."""

    @abstractmethod
    def explain(self, code: int, comm: int) -> str:
        """Text of a result code, with the library's last error message."""

    @abstractmethod
    def path(self) -> str:
        """Path of the loaded library."""

    def address(self, function: str) -> int:
        """Address of one of its functions, by its name in NCCL's manual."""
        return ctypes.cast(getattr(ctypes.CDLL(self.path()), function), ctypes.c_void_p).value or 0

    @abstractmethod
    def unique_id(self) -> bytes:
        """The id that all members of a new communicator need."""

    @abstractmethod
    def join(self, unique_id: bytes, members: int, me: int) -> int:
        """Join a communicator. Blocks until all members have called this, without the interpreter lock."""

    @abstractmethod
    def state(self, comm: int) -> int:
        """SUCCESS, IN_PROGRESS, or the asynchronous error of a communicator."""

    @abstractmethod
    def abort(self, comm: int) -> None:
        """Make its kernels return, and free it. Thread-safe."""

    @abstractmethod
    def destroy(self, comm: int) -> None:
        """Free it when its enqueued work is complete; blocks."""

    @abstractmethod
    def premul_sum(self, factor: float, dtype: int, comm: int) -> int:
        """Create an op for a sum of each member's array times its own factor."""

    @abstractmethod
    def free_op(self, op: int, comm: int) -> None:
        """Free such an op."""

    @abstractmethod
    def group_start(self) -> int:
        """Start to collect calls of this thread."""

    @abstractmethod
    def group_end(self) -> int:
        """Enqueue the collected calls as one group."""

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
