"""The movers of one GPU: packing of launch arguments, compilation on first use, disk cache.

`mover.cu` contains the kernels; the layouts below mirror its structs, whose sizes it checks.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import struct
import threading
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xvcomm.backends.gpu.vendor import Runtime, VendorError
from xvcomm.errors import BackendUnavailable
from xvcomm.jit.atomics import load, store
from xvcomm.jit.cache import KernelCache
from xvcomm.jit.ccall import call_11, let_go, take_back
from xvcomm.jit.compile import brief, compiling
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, compiled_at, python_type
from xvcomm.memory import ring
from xvcomm.memory.ring import MAX_LANES, Message
from xvcomm.types.dtype import DTYPES, DType, ReduceOp

STATE_BYTES = 128 + 16 * MAX_LANES
"""Device memory per ring end, zeroed before its first transfer and aligned to 128 bytes."""

ROWS = 30
"""Maximum number of transfers per launch."""

MOST_TERMS = 256
"""Maximum number of operands of a reduction."""

THREADS = 512
WARPS = 15
"""Warps of a block that copy; another one watches the abort word. With wider warps there are fewer, and all of them copy."""

HOST_PUT_WARPS = 2
"""Number of these that write a large message to host memory: they saturate PCIe, and more would delay reads."""

MOST_BLOCKS = 64
"""Blocks of one launch of movers: all must run at the same time, beside the native library's and the user's kernels."""

LOCAL_BLOCKS = 512
NAMES = ("xv::move", "xv::reduce", "xv::scale")

ROW = np.dtype(
    [(name, "i8") for name in ["ring", "slots_at", "state", "data", "apart"]]
    + [(name, "i8") for name in ["nbytes", "part", "op", "dtype", "tag", "detail"]]
    + [
        (name, "u4")
        for name in ["peer", "producer", "reduction", "remote_first", "slots", "slot_bytes", "ledger", "put_warps"]
    ]
    + [(name, "u4") for name in ["chunk", "lanes", "block", "blocks"]]
)
_ROW = struct.Struct("=11q12I")  # packs a whole ROW in half the time of a `ctypes.Structure`

TERMS = np.dtype(
    [(name, "i8") for name in ["dst", "count", "ways", "head", "code", "divisor"]] + [("srcs", "i8", MOST_TERMS)]
)
SCALING = np.dtype([
    ("dst", "i8"), ("src", "i8"), ("count", "i8"), ("factor", "f8"), ("divisor", "i8"), ("head", "i8"), ("dtype", "i8"),
])  # fmt: skip
_ALIGN = 16
_LOG_LINES = 12


PREPARED = np.dtype([
    ("ask", "i8"),  # the first three: the vendor's functions, see `Runtime.addresses`
    ("launch", "i8"),
    ("record", "i8"),
    ("kernel", "i8"),
    ("blocks", "i8"),
    ("arguments", "i8"),  # address of the kernel argument: ROW records, TERMS or SCALING
    ("params", "i8"),  # address of the launch's parameters
    ("status", "i8"),  # whether the stream is being captured
])  # fmt: skip

prepared_at, terms_at, scaling_at = compiled_at(PREPARED), compiled_at(TERMS), compiled_at(SCALING)
_row_at, _PreparedRecord, _Terms, _Scaling = compiled_at(ROW), *map(python_type, (PREPARED, TERMS, SCALING))

CAPTURING = -1
"""Result of `start`: nothing was launched, because the stream is being captured."""

DEFAULT_STREAMS = (0, 1)


class Transfer(NamedTuple):
    """One message through one ring end, as a kernel needs it; addresses are those of the device.

    Attributes:
        slots: memory of its slots if they are in a GPU; 0 if they follow the ledger.
        state: STATE_BYTES of this end.
        geometry: as in `RingEnd.geometry`.
        producer: whether this end is the producer.
        message: what both ends say of it.
        peer: the rank at the other end, for the abort word of a mismatch.
        op: reduce into the array instead of copying.
        remote_first: `remote op own` instead of `own op remote`.
        apart: bytes from the array to the own elements that are reduced with those that come.
    """

    ring: int
    slots: int
    state: int
    geometry: tuple[int, int, int, int, int, int]
    producer: bool
    data: int
    message: Message
    peer: int
    op: ReduceOp | None = None
    remote_first: bool = False
    apart: int = 0


@register_jitable
def is_capturing(ask: int, status: int, stream: int) -> int:
    """0 or CAPTURING, or the error code of the vendor's function `ask`, which writes its answer to `status`."""
    store(status, 0)
    if stream in DEFAULT_STREAMS:  # asking these would end a capture elsewhere
        return 0
    code = call_11(ask, stream, status, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    return CAPTURING if load(status) != 0 else code


@register_jitable
def asked_capturing(prepared: Any, stream: int) -> int:
    """Like `is_capturing`, for a `PREPARED` launch."""
    return is_capturing(prepared.ask, address_of(prepared, "status"), stream)


@register_jitable
def fill(prepared: Any, number: int, data: int, apart: int, tag: int) -> None:
    """Set the array, `Transfer.apart` and the tag of one of a `PREPARED` launch's transfers."""
    row = _row_at(prepared.arguments, number)
    row.data, row.apart, row.tag = data, apart, tag


@register_jitable
def launched(prepared: Any, stream: int) -> int:
    """Launch a `PREPARED` launch whose arrays are filled in; returns the vendor's code."""
    return call_11(
        prepared.launch, prepared.kernel, prepared.blocks, 1, 1, THREADS, 1, 1, 0, stream, prepared.params, 0
    )


@register_jitable
def recorded(prepared: Any, stream: int, event: int) -> int:
    """Record an event on a stream; returns the vendor's code."""
    return call_11(prepared.record, event, stream, 0, 0, 0, 0, 0, 0, 0, 0, 0)


@register_jitable
def first_aligned(count: int, itemsize: int, dst: int, skew: int) -> int:
    """Number of the `count` elements before the first that is aligned to a word in all operands; `count` if there is none.

    Args:
        count, itemsize: of the elements.
        dst: address of the output.
        skew: the bits in which the operands' addresses differ.
    """
    gap = -dst & (_ALIGN - 1)
    if skew & (_ALIGN - 1) != 0 or gap % itemsize != 0:
        return count
    return min(gap // itemsize, count)


def _start(address: int, data: int, apart: int, tag: int, stream: int, event: int) -> int:
    """Launch a single `PREPARED` transfer without the interpreter lock, unless the stream is being captured.

    Returns:
        0, CAPTURING, or an error code of the vendor.
    """
    prepared, thread = prepared_at(address), let_go()
    code = asked_capturing(prepared, stream)
    if code == 0:
        fill(prepared, 0, data, apart, tag)
        code = launched(prepared, stream)
    if code == 0:
        code = recorded(prepared, stream, event)
    take_back(thread)
    return code


with compiling():
    start = brief("int64(int64, int64, int64, int64, int64, int64)")(_start)


class Prepared:
    """A launch of fixed shape, of transfers through one ring end each or of a local kernel: only arrays and tags vary.

    Attributes:
        address: argument of `start`, for a single transfer.
    """

    __slots__ = ("_arguments", "_record", "address", "blocks")

    def __init__(self, arguments: _Arguments, kernel: int, blocks: int, calls: Sequence[int]) -> None:
        self._arguments, self.blocks = arguments, blocks
        self._record = _PreparedRecord(*calls, kernel, blocks, ctypes.addressof(arguments.buffer), arguments.params)
        self.address = ctypes.addressof(self._record)


class Kernels:
    """The movers of one device. Thread-safe; the device must be current on the calling thread, see `Runtime.use`."""

    def __init__(self, runtime: Runtime, index: int, cache: KernelCache) -> None:
        """Load all kernels. Loading one later would wait for running kernels, which may wait for it.

        Raises:
            BackendUnavailable: they cannot be compiled.
        """
        self._runtime = runtime
        self._move, self._reduce, self._scale = _load(runtime, runtime.architecture(index), cache)
        self._local = threading.local()
        addresses = runtime.addresses()
        self._calls, self._where = addresses[:3], addresses.current

    def place(self) -> tuple[int, int]:
        """The vendor's function that gives a thread's current device or context, and its value on this thread; both as words."""
        here = ctypes.c_int64()
        code = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._where)(ctypes.addressof(here))
        if code:
            raise self._runtime.failure(code)
        return self._where, here.value

    def prepare(self, transfers: Sequence[Transfer], most: int) -> Prepared:
        """The launch of `move`, for compiled code; `start` accepts a single transfer."""
        arguments = _Arguments()
        return Prepared(arguments, self._move, _pack(arguments.buffer, transfers, most), self._calls)

    def prepare_reduce(self, ways: int, count: int, dtype: DType, op: ReduceOp, divisor: int) -> Prepared:
        """The launch of `reduce` of so many operands, of one for a copy; addresses and alignment are filled in later."""
        arguments = _Arguments()
        arguments.terms.__init__(0, count, ways, 0, _code(dtype.code, op), divisor)
        return Prepared(arguments, self._reduce, _blocks(count * dtype.itemsize), self._calls)

    def prepare_scale(self, count: int, dtype: DType, factor: float, divisor: int) -> Prepared:
        """The launch of `scale`; addresses and alignment are filled in later."""
        arguments = _Arguments()
        arguments.scaling.__init__(0, 0, count, factor, divisor, 0, dtype.code)
        return Prepared(arguments, self._scale, _blocks(count * dtype.itemsize), self._calls)

    def move(self, transfers: Sequence[Transfer], stream: int, most: int = MOST_BLOCKS) -> int:
        """Start up to ROWS transfers together, at most one per ring end, with at most `most` blocks but at least one per
        transfer.

        Returns:
            The number of blocks.
        """
        assert 0 < len(transfers) <= ROWS
        arguments = self._arguments(len(transfers) * ROW.itemsize)
        blocks = _pack(arguments.buffer, transfers, most)
        self._runtime.launch(self._move, blocks, THREADS, arguments.params, stream)
        return blocks

    def reduce(
        self, dst: int, srcs: Sequence[int], count: int, dtype: DType, op: ReduceOp, stream: int, divisor: int = 0
    ) -> None:
        """See `Device.reduce`."""
        assert 0 < len(srcs) <= MOST_TERMS
        skew = 0
        for src in srcs:
            skew |= src ^ dst
        head = first_aligned(count, dtype.itemsize, dst, skew)
        arguments = self._arguments(_Terms.srcs.offset + 8 * len(srcs))
        arguments.terms.__init__(dst, count, len(srcs), head, _code(dtype.code, op), divisor)
        arguments.terms.srcs[: len(srcs)] = srcs
        self._launch_local(self._reduce, dtype, count, arguments.params, stream)

    def scale(self, dst: int, src: int, count: int, dtype: DType, factor: float, divisor: int, stream: int) -> None:
        """See `Device.scale`."""
        head, arguments = first_aligned(count, dtype.itemsize, dst, src ^ dst), self._arguments(SCALING.itemsize)
        arguments.scaling.__init__(dst, src, count, factor, divisor, head, dtype.code)
        self._launch_local(self._scale, dtype, count, arguments.params, stream)

    def _launch_local(self, function: int, dtype: DType, count: int, params: int, stream: int) -> None:
        if count:
            self._runtime.launch(function, _blocks(count * dtype.itemsize), THREADS, params, stream)

    def _arguments(self, nbytes: int) -> _Arguments:
        """This thread's memory for arguments, of which `nbytes` bytes will be written.

        The rest is cleared, so that a search for addresses that no kernel may read finds none of an earlier launch.
        """
        try:
            found: _Arguments = self._local.arguments
        except AttributeError:
            found = self._local.arguments = _Arguments()
        found.clear_behind(nbytes)
        return found


def _pack(buffer: ctypes.Array[ctypes.c_char], transfers: Sequence[Transfer], most: int) -> int:
    """Write the rows of a launch, and return its number of blocks: `most`, shared by the transfers, or one per transfer."""
    share = most // len(transfers) or 1
    block = 0
    for number, transfer in enumerate(transfers):
        message, (all_lanes, slots, slot_bytes, ledger, data, least) = transfer.message, transfer.geometry
        chunk, lanes, part = _cut(message.nbytes, all_lanes, slot_bytes, least)
        blocks = lanes if lanes < share else share
        reduction = 0 if transfer.op is None else _code(message.dtype, transfer.op)
        _ROW.pack_into(
            buffer, number * ROW.itemsize,
            transfer.ring, transfer.slots or transfer.ring + data, transfer.state, transfer.data, transfer.apart,
            message.nbytes, part, message.op, message.dtype, message.tag, message.detail,
            transfer.peer, transfer.producer, reduction, transfer.remote_first,
            slots, slot_bytes, ledger, WARPS if transfer.slots else HOST_PUT_WARPS, chunk, lanes, block, blocks,
        )  # fmt: skip
        block += blocks
    return block


def _blocks(nbytes: int) -> int:
    """Blocks of a local kernel: 16 bytes per thread, spread over the device."""
    return min(LOCAL_BLOCKS, 1 + nbytes // (_ALIGN * THREADS))


def _code(dtype: int, op: int) -> int:
    """Same as `code_of` in the kernels' source."""
    return dtype * 16 + op


def _load(runtime: Runtime, architecture: str, images: KernelCache) -> list[int]:
    """Handles of the kernels: loaded from disk, or compiled."""
    try:
        image, lowered = _image(runtime, architecture, images)
        module = runtime.load(image)
        return [runtime.function(module, lowered[name]) for name in NAMES]
    except VendorError as error:
        log = "\n".join(str(error).splitlines()[:_LOG_LINES])
        raise BackendUnavailable(
            f"the kernels cannot be compiled for {architecture}: {log}\n"
            f"update the {runtime.kind} toolkit and driver to matching versions, or use XVCOMM_DEVICE=host"
        ) from error


def _image(runtime: Runtime, architecture: str, images: KernelCache) -> tuple[bytes, dict[str, str]]:
    """The compiled kernels and their lowered names, from the disk cache, which has one file per architecture, or compiled."""
    text = runtime.source + source()
    # The key includes the source of `Runtime.compile`, which determines the compiler's options.
    calls = Path(inspect.getfile(runtime.compile)).read_text()
    file = hashlib.sha256("\0".join((text, architecture, calls)).encode()).hexdigest()
    content = images.read(file)
    if content is not None:
        *names, image = content.split(b"\0", len(NAMES))
        return image, {name: lower.decode() for name, lower in zip(NAMES, names, strict=True)}
    image, lowered = runtime.compile(text, NAMES, architecture)
    images.write(file, b"\0".join([*(lowered[name].encode() for name in NAMES), image]))
    return image, lowered


class _Arguments:
    """Memory for one launch's argument, and the array of its address that a launch needs."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(max(ROWS * ROW.itemsize, TERMS.itemsize))
        self.terms, self.scaling = _Terms.from_buffer(self.buffer), _Scaling.from_buffer(self.buffer)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.params = ctypes.addressof(self._pointers)

    def clear_behind(self, nbytes: int) -> None:
        """Zero all but the first `nbytes` bytes."""
        ctypes.memset(ctypes.addressof(self.buffer) + nbytes, 0, len(self.buffer) - nbytes)


@lru_cache(maxsize=4096)
def _cut(nbytes: int, lanes: int, slot_bytes: int, least: int) -> tuple[int, int, int]:
    """Division of a message: bytes per slot, lanes, bytes per lane."""
    chunk = ring.chunk_bytes(nbytes, lanes, slot_bytes, least)
    used = ring.lanes_used(nbytes, lanes, chunk)
    return chunk, used, ring.part_bytes(nbytes, used)


@cache
def source() -> str:
    """The kernels' source with its constants; a runtime's own lines precede it."""
    sizes = {
        "ROWS": ROWS, "ROW_BYTES": ROW.itemsize, "STATE_BYTES": STATE_BYTES, "MAX_LANES": MAX_LANES, "TERMS": MOST_TERMS,
        "THREADS": THREADS,
    }  # fmt: skip
    codes = {d.name: d.code for d in DTYPES} | {op.name: int(op) for op in ReduceOp}
    constants = "".join(f"constexpr int XV_{name} = {value};\n" for name, value in (sizes | codes).items())
    return ring.header() + constants + Path(__file__).with_name("mover.cu").read_text()
