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
from collections.abc import Mapping, Sequence
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
NAMES = ("xv::move", "xv::reduce", "xv::scale")
_ROW = struct.Struct("=3Q6q12I")
_TERMS = struct.Struct("=Q4q")
_SCALE = struct.Struct("=2Qqd3q")
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
        """Load the kernels, all of them: loading one later would wait for those that run, and they may wait for it.

        Raises:
            BackendUnavailable: they do not compile.
        """
        self._runtime = runtime
        self._move, self._reduce, self._scale = _load(runtime, runtime.architecture(index), ImageCache(cache))
        self._local = threading.local()

    def move(self, transfers: Sequence[Transfer], stream: int) -> None:
        """Start up to ROWS transfers together, at most one of each ring end."""
        count = len(transfers)
        assert 0 < count <= ROWS
        arguments = self._arguments()
        buffer, share = arguments.buffer, MOST_BLOCKS // count or 1
        block = 0
        for number, transfer in enumerate(transfers):
            message, (_, slots, slot_bytes, ledger, data) = transfer.message, transfer.geometry
            chunk, lanes, part = _cut(message.nbytes, transfer.geometry[0], slot_bytes)
            blocks = lanes if lanes < share else share
            reduction = 0 if transfer.op is None else _code(message.dtype, transfer.op)
            _ROW.pack_into(
                buffer, number * _ROW.size,
                transfer.ring, transfer.state, transfer.data,
                message.nbytes, part, message.op, message.dtype, message.tag, message.detail,
                transfer.blame, transfer.producer, reduction, transfer.remote_first,
                slots, slot_bytes, ledger, data, chunk, lanes, block, blocks,
            )  # fmt: skip
            block += blocks
        self._runtime.launch(self._move, block, THREADS, 0, arguments.params, stream)

    def reduce(self, dst: int, srcs: Sequence[int], count: int, dtype: DType, op: ReduceOp, stream: int) -> None:
        """See `Device.reduce`."""
        assert 0 < len(srcs) <= TERMS
        aligned = not any(address % _ALIGN for address in (dst, *srcs))
        arguments = self._arguments()
        _TERMS.pack_into(arguments.buffer, 0, dst, count, len(srcs), aligned, _code(dtype.code, op))
        struct.pack_into(f"={len(srcs)}Q", arguments.buffer, _TERMS.size, *srcs)
        self._launch_local(self._reduce, dtype, count, arguments.params, stream)

    def scale(self, dst: int, src: int, count: int, dtype: DType, factor: float, divisor: int, stream: int) -> None:
        """See `Device.scale`."""
        arguments, aligned = self._arguments(), not (dst % _ALIGN or src % _ALIGN)
        _SCALE.pack_into(arguments.buffer, 0, dst, src, count, factor, divisor, aligned, dtype.code)
        self._launch_local(self._scale, dtype, count, arguments.params, stream)

    def _launch_local(self, function: int, dtype: DType, count: int, params: int, stream: int) -> None:
        """Spread `count` elements over the device, 16 bytes a thread."""
        if count:
            blocks = min(LOCAL_BLOCKS, 1 + count * dtype.itemsize // (_ALIGN * THREADS))
            self._runtime.launch(function, blocks, THREADS, 0, params, stream)

    def _arguments(self) -> _Arguments:
        """This thread's memory for arguments."""
        try:
            return self._local.arguments  # type: ignore[no-any-return]
        except AttributeError:
            self._local.arguments = _Arguments()
            return self._local.arguments  # type: ignore[no-any-return]


def _code(dtype: int, op: int) -> int:
    """As `code_of` in the kernels' source."""
    return dtype * 16 + op


def _load(runtime: Runtime, architecture: str, images: ImageCache) -> list[int]:
    """The kernels' handles: loaded from disk, or compiled."""
    try:
        image, lowered = images.obtain(runtime, architecture)
        module = runtime.load(image)
        return [runtime.function(module, lowered[name], 0) for name in NAMES]
    except VendorError as error:
        log = "\n".join(str(error).splitlines()[:_LOG_LINES])
        raise BackendUnavailable(
            f"the kernels cannot be made for {architecture}: {log}\n"
            f"update the {runtime.kind} toolkit and driver to matching versions, or use XVCOMM_DEVICE=host"
        ) from error


class ImageCache:
    """Compiled kernels in a folder, a file for each architecture, shared by all processes of the user.

    A file holds a digest of what follows, the lowered names, and the image. It is written beside its place and renamed,
    so a reader sees all of it or nothing; one that is damaged all the same is compiled anew. A folder that cannot be
    written costs time, nothing else.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def obtain(self, runtime: Runtime, architecture: str) -> tuple[bytes, dict[str, str]]:
        """Image and lowered names of the kernels; compiles them if the folder has them not.

        Raises:
            VendorError: they do not compile.
        """
        text = runtime.source + source()
        # The runtime's own source says how it calls the compiler.
        calls = Path(inspect.getfile(type(runtime))).read_text()
        file = self._folder / hashlib.sha256("\0".join((text, architecture, calls)).encode()).hexdigest()
        kept = self._read(file)
        if kept is None:
            kept = runtime.compile(text, NAMES, architecture)
            self._write(file, *kept)
        return kept

    def _read(self, file: Path) -> tuple[bytes, dict[str, str]] | None:
        """What a file holds, if it is there and whole."""
        try:
            kept = file.read_bytes()
        except OSError:
            return None
        digest, content = kept[:_DIGEST], kept[_DIGEST:]
        if hashlib.sha256(content).digest() != digest:
            return None
        *lowered, image = content.split(b"\0", len(NAMES))
        return image, {name: lower.decode() for name, lower in zip(NAMES, lowered, strict=True)}

    def _write(self, file: Path, image: bytes, lowered: Mapping[str, str]) -> None:
        """Keep an image, if the folder takes it."""
        content = b"\0".join([*(lowered[name].encode() for name in NAMES), image])
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
