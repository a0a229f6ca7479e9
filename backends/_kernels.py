"""The movers of one GPU: what a launch needs is packed here, compiled at first use, and kept on disk.

`_mover.cu` holds the kernels; the layouts below mirror its structs, whose sizes it checks.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import os
import struct
import tempfile
import threading
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from xvcomm import ring
from xvcomm.backends._vendor import Runtime, VendorError
from xvcomm.dtype import DTYPES, DType, ReduceOp
from xvcomm.errors import BackendUnavailable
from xvcomm.ring import Message

MAX_LANES = 64
STATE_BYTES = 128 + 16 * MAX_LANES
"""Device memory that one ring end needs, zeroed before its first transfer and aligned to 128 bytes."""

ROWS = 32
"""Most transfers of one launch."""

TERMS = 256
"""Most operands of one reduction."""

THREADS = 512
PUT_WARPS = 2
"""Warps of a block that write a large message to a ring: they keep PCIe full, more would hold up those that read."""

MOST_BLOCKS = 64
"""Blocks of one launch of movers: all must run at the same time, beside the native library's and the user's kernels."""

LOCAL_BLOCKS = 512
_ROW = struct.Struct("=3Q6q12I")
_TERMS = struct.Struct("=Q3q")
_SCALE = struct.Struct("=2Qqd2q")
_ALIGN = 16
_LOG_LINES = 12
_DIGEST = 32


class Transfer(NamedTuple):
    """One message through one ring end, as a kernel needs it; addresses are the device's.

    Attributes:
        ring: the ring's memory.
        state: STATE_BYTES of this end.
        geometry: as in `RingEnd.geometry`.
        producer: whether this end fills the ring.
        data: the array.
        message: what both ends say of it.
        blame: rank to name if they say different things: the peer.
        op: reduce into the array instead of copying.
        remote_first: `remote op array` instead of `array op remote`.
    """

    ring: int
    state: int
    geometry: tuple[int, int, int, int, int]
    producer: bool
    data: int
    message: Message
    blame: int
    op: ReduceOp | None = None
    remote_first: bool = False


class Kernels:
    """The movers of one device. Any thread; the device must be the calling thread's, see `Runtime.use`."""

    def __init__(self, runtime: Runtime, index: int, cache: Path) -> None:
        self._runtime = runtime
        self._index = index
        self._images = ImageCache(cache)
        self._functions: dict[tuple[str, int, int], int] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    def move(self, transfers: Sequence[Transfer], stream: int) -> None:
        """Start up to ROWS transfers together, at most one of each ring end; those that reduce do it alike.

        Raises:
            BackendUnavailable: the kernels do not compile.
        """
        count = len(transfers)
        assert 0 < count <= ROWS
        arguments = self._arguments()
        buffer, share = arguments.buffer, MOST_BLOCKS // count or 1
        block = dtype = op = 0
        for number, transfer in enumerate(transfers):
            message, (_, slots, slot_bytes, ledger, data) = transfer.message, transfer.geometry
            chunk, lanes, part = _cut(message.nbytes, transfer.geometry[0], slot_bytes)
            blocks = lanes if lanes < share else share
            reduces = transfer.op is not None
            if transfer.op is not None:
                assert op in (0, transfer.op) and dtype in (0, message.dtype)
                dtype, op = message.dtype, int(transfer.op)
            _ROW.pack_into(
                buffer, number * _ROW.size,
                transfer.ring, transfer.state, transfer.data,
                message.nbytes, part, message.op, message.dtype, message.tag, message.detail,
                transfer.blame, transfer.producer, reduces, transfer.remote_first,
                slots, slot_bytes, ledger, data, chunk, lanes, block, blocks,
            )  # fmt: skip
            block += blocks
        function = self._functions.get(("move", dtype, op)) or self._function("move", dtype, op)
        self._runtime.launch(function, block, THREADS, 0, arguments.params, stream)

    def reduce(self, dst: int, srcs: Sequence[int], count: int, dtype: DType, op: ReduceOp, stream: int) -> None:
        """See `Device.reduce`.

        Raises:
            BackendUnavailable: the kernels do not compile.
        """
        assert 0 < len(srcs) <= TERMS
        aligned = not any(address % _ALIGN for address in (dst, *srcs))
        arguments = self._arguments()
        _TERMS.pack_into(arguments.buffer, 0, dst, count, len(srcs), aligned)
        struct.pack_into(f"={len(srcs)}Q", arguments.buffer, _TERMS.size, *srcs)
        self._launch_local("reduce", dtype, int(op), count, arguments.params, stream)

    def scale(self, dst: int, src: int, count: int, dtype: DType, factor: float, divisor: int, stream: int) -> None:
        """See `Device.scale`.

        Raises:
            BackendUnavailable: the kernels do not compile.
        """
        arguments = self._arguments()
        _SCALE.pack_into(arguments.buffer, 0, dst, src, count, factor, divisor, not (dst % _ALIGN or src % _ALIGN))
        self._launch_local("scale", dtype, 0, count, arguments.params, stream)

    def _launch_local(self, kernel: str, dtype: DType, op: int, count: int, params: int, stream: int) -> None:
        """Spread `count` elements over the device, 16 bytes a thread."""
        if count:
            function = self._functions.get((kernel, dtype.code, op)) or self._function(kernel, dtype.code, op)
            blocks = min(LOCAL_BLOCKS, 1 + count * dtype.itemsize // (_ALIGN * THREADS))
            self._runtime.launch(function, blocks, THREADS, 0, params, stream)

    def _arguments(self) -> _Arguments:
        """This thread's memory for arguments."""
        try:
            return self._local.arguments  # type: ignore[no-any-return]
        except AttributeError:
            self._local.arguments = _Arguments()
            return self._local.arguments  # type: ignore[no-any-return]

    def _function(self, kernel: str, dtype: int, op: int) -> int:
        """A kernel's handle: loaded from disk, or compiled."""
        with self._lock:
            found = self._functions.get((kernel, dtype, op))
            if found is None:
                name = f"xv::{kernel}<{dtype}>" if kernel == "scale" else f"xv::{kernel}<{dtype}, {op}>"
                found = self._functions[kernel, dtype, op] = self._load(name)
            return found

    def _load(self, name: str) -> int:
        runtime = self._runtime
        architecture = runtime.architecture(self._index)
        try:
            image, lowered = self._images.obtain(runtime, name, architecture)
            return runtime.function(runtime.load(image), lowered, 0)
        except VendorError as error:
            log = "\n".join(str(error).splitlines()[:_LOG_LINES])
            raise BackendUnavailable(
                f"kernel {name} cannot be made for {architecture}: {log}\n"
                f"update the {runtime.kind} toolkit and driver to matching versions, or use XVCOMM_DEVICE=host"
            ) from error


class ImageCache:
    """Compiled kernels in a folder, one file for each, shared by all processes of the user.

    A file holds a digest of what follows, the lowered name, and the image. It is written beside its place and renamed,
    so a reader sees all of it or nothing; one that is damaged all the same is compiled anew. A folder that cannot be
    written costs time, nothing else.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def obtain(self, runtime: Runtime, name: str, architecture: str) -> tuple[bytes, str]:
        """Image and lowered name of one kernel; compiles it if the folder has it not.

        Raises:
            VendorError: it does not compile.
        """
        text = runtime.source + source()
        # The runtime's own source says how it calls the compiler.
        calls = Path(inspect.getfile(type(runtime))).read_text()
        file = self._folder / hashlib.sha256("\0".join((text, name, architecture, calls)).encode()).hexdigest()
        kept = self._read(file)
        if kept is None:
            image, lowered = runtime.compile(text, [name], architecture)
            kept = image, lowered[name]
            self._write(file, *kept)
        return kept

    def _read(self, file: Path) -> tuple[bytes, str] | None:
        """What a file holds, if it is there and whole."""
        try:
            kept = file.read_bytes()
        except OSError:
            return None
        digest, content = kept[:_DIGEST], kept[_DIGEST:]
        if hashlib.sha256(content).digest() != digest:
            return None
        lowered, _, image = content.partition(b"\0")
        return image, lowered.decode()

    def _write(self, file: Path, image: bytes, lowered: str) -> None:
        """Keep an image, if the folder takes it."""
        content = lowered.encode() + b"\0" + image
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".", delete=False) as scratch:
                scratch.write(hashlib.sha256(content).digest() + content)
            os.replace(scratch.name, file)
        except OSError:
            pass


class _Arguments:
    """Memory for one launch's argument, and the array of its address that a launch takes."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(max(ROWS * _ROW.size, _TERMS.size + 8 * TERMS, _SCALE.size))
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.params = ctypes.addressof(self._pointers)


@lru_cache(maxsize=4096)
def _cut(nbytes: int, lanes: int, slot_bytes: int) -> tuple[int, int, int]:
    """How a message is cut: bytes a slot, lanes, bytes a lane."""
    chunk = ring.chunk_bytes(nbytes, lanes, slot_bytes)
    used = ring.lanes_used(nbytes, lanes, chunk)
    return chunk, used, ring.part_bytes(nbytes, used)


@cache
def source() -> str:
    """The kernels' source with the constants it is written for; a runtime's own lines go before it."""
    sizes = {
        "ROWS": ROWS, "ROW_BYTES": _ROW.size, "STATE_BYTES": STATE_BYTES, "MAX_LANES": MAX_LANES, "TERMS": TERMS,
        "THREADS": THREADS, "PUT_WARPS": PUT_WARPS,
    }  # fmt: skip
    codes = {d.name: d.code for d in DTYPES} | {op.name: int(op) for op in ReduceOp}
    constants = "".join(f"constexpr int XV_{name} = {value};\n" for name, value in (sizes | codes).items())
    return ring.header() + constants + Path(__file__).with_name("_mover.cu").read_text()
