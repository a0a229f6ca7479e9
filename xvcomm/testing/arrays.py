"""Arrays in the memory of the device under test: numpy's on the host, elsewhere `DeviceArray`, defined here.

No framework is needed to test a backend: an array is memory of `Device.empty`, written and read with `Device.copy`.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xvcomm.abc.device import Allocation, Device, Stream
from xvcomm.comm.communicator import Communicator
from xvcomm.memory.dlpack import Managed, capsule, describe, row_major
from xvcomm.testing.inside import context
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import UINT8, DType, from_numpy

Array = NDArray[Any]

SECONDS = 100.0
"""Timeout of waits for a stream."""

_GUARD = 64
_CANARY = 0xA5


class Arrays(ABC):
    """Copies numpy arrays to a device's memory, and back.

    Attributes:
        asynchronous: whether operations on them run asynchronously to the host.
    """

    asynchronous: bool

    @abstractmethod
    def put(self, x: Array) -> Any:
        """Create an array with the contents of `x`."""

    @abstractmethod
    def get(self, x: Any) -> Array:
        """The contents of an array, after the work on its stream."""

    @abstractmethod
    def fill(self, x: Any, values: Array) -> None:
        """Overwrite an array."""

    @abstractmethod
    def copy(self, dst: Any, src: Any) -> None:
        """Copy between two arrays on the device; the host does not wait."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all earlier work."""


class HostArrays(Arrays):
    """numpy arrays."""

    asynchronous = False

    def put(self, x: Array) -> Array:
        return x.copy()

    def get(self, x: Any) -> Array:
        return np.asarray(x)

    def fill(self, x: Any, values: Array) -> None:
        x[...] = values

    def copy(self, dst: Any, src: Any) -> None:
        dst[...] = src

    def synchronize(self) -> None:
        """See `Arrays.synchronize`; nothing to wait for."""


class DeviceArrays(Arrays):
    """Arrays of one device, all on one stream.

    No method waits for more than the bytes that the host must read or write, so that `get` detects operations in the wrong
    order.
    """

    def __init__(self, device: Device) -> None:
        able = device.capabilities()
        self.device, self.kind, self.index = device, able.kind, able.index
        self.asynchronous = able.asynchronous
        self.stream: Stream = device.streams(1)[0]
        self._bridge = device.empty(1)

    @property
    def handle(self) -> int | None:
        """Handle of the stream; reading it means that others use the stream."""
        handle: int | None = getattr(self.stream, "handle", None)
        return handle

    def empty(self, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        """Create an uninitialized array."""
        memory = self.device.empty(max(1, math.prod(shape) * dtype.itemsize))
        return DeviceArray(self, memory, memory.address, shape, row_major(shape), dtype)

    def put(self, x: Array) -> DeviceArray:
        made = self.empty(x.shape, from_numpy(x.dtype))
        self.fill(made, x)
        return made

    def get(self, x: DeviceArray) -> Array:
        assert x.contiguous
        host = np.empty(x.shape, x.dtype.numpy)
        if host.nbytes:
            self.device.copy(host.ctypes.data, x.address, host.nbytes, self.stream)
        self.synchronize()
        return host

    def fill(self, x: DeviceArray, values: Array) -> None:
        """See `Arrays.fill`.

        A copy from the host may block until all work is complete. So it writes to other memory, from which a copy within the
        device, which does not block, fills the array: a premature read finds the old contents.
        """
        assert x.contiguous and (x.shape, x.dtype.numpy) == (values.shape, values.dtype)
        if not values.nbytes:
            return
        if self._bridge.nbytes < values.nbytes:
            self.synchronize()
            self._bridge = self.device.empty(values.nbytes)
        source = np.ascontiguousarray(values)
        self.device.copy(self._bridge.address, source.ctypes.data, source.nbytes, self.stream)
        self.device.copy(x.address, self._bridge.address, source.nbytes, self.stream)

    def copy(self, dst: DeviceArray, src: DeviceArray) -> None:
        assert dst.contiguous and src.contiguous and dst.nbytes == src.nbytes
        self.device.copy(dst.address, src.address, src.nbytes, self.stream)

    def synchronize(self) -> None:
        _ = self.handle
        self.stream.deadline = Deadline.after(SECONDS)
        self.stream.synchronize()


class DeviceArray:
    """A minimal array in a device's memory: DLPack, a stream, slices, `new_empty`.

    Attributes:
        tensor: its DLPack structure, which tests of refusals modify.
        handle: the stream of `__cuda_array_interface__`, which they modify too.
    """

    def __init__(
        self, owner: DeviceArrays, memory: Allocation, address: int, shape: tuple[int, ...], strides: tuple[int, ...],
        dtype: DType,
    ) -> None:  # fmt: skip
        self.address, self.shape, self.strides, self.dtype = address, shape, strides, dtype
        self._owner, self._memory = owner, memory
        self.handle = owner.handle
        self._managed, self._extents = Managed(), (ctypes.c_int64 * (2 * len(shape)))()
        self.tensor = self._managed.tensor
        describe(self.tensor, address, shape, strides, dtype, owner.kind, owner.index, self._extents)

    @property
    def nbytes(self) -> int:
        """Total bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the elements are contiguous."""
        return self.strides == row_major(self.shape)

    @property
    def T(self) -> DeviceArray:
        """The same elements with the axes in reverse."""
        return self._part(self.address, self.shape[::-1], self.strides[::-1], self.dtype)

    def __getitem__(self, rows: slice) -> DeviceArray:
        first, end, step = rows.indices(self.shape[0])
        address = self.address + first * self.strides[0] * self.dtype.itemsize
        shape = (len(range(first, end, step)), *self.shape[1:])
        return self._part(address, shape, (step * self.strides[0], *self.strides[1:]), self.dtype)

    def reshape(self, shape: int | tuple[int, ...]) -> DeviceArray:
        """The same elements in another shape."""
        shape = (shape,) if isinstance(shape, int) else shape
        assert self.contiguous and math.prod(shape) == math.prod(self.shape)
        return self._part(self.address, shape, row_major(shape), self.dtype)

    def view(self, dtype: Any) -> DeviceArray:
        """The bytes of a vector as elements of another dtype."""
        assert self.contiguous and len(self.shape) == 1
        count = self.nbytes // dtype.itemsize
        return self._part(self.address, (count,), (1,), from_numpy(dtype))

    def new_empty(self, shape: tuple[int, ...]) -> DeviceArray:
        """Create an array of the same dtype on the same stream, like torch's method."""
        return self._owner.empty(tuple(shape), self.dtype)

    def _part(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType) -> DeviceArray:
        return DeviceArray(self._owner, self._memory, address, shape, strides, dtype)

    def __dlpack__(self, **_: Any) -> Any:
        return capsule(self._managed)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.device_type, self.tensor.device_id

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        strides = None if self.contiguous else tuple(n * self.dtype.itemsize for n in self.strides)
        return {
            "version": 3, "shape": self.shape, "typestr": self.dtype.numpy.str, "data": (self.address, False),
            "strides": strides, "stream": self.handle,
        }  # fmt: skip


class _Made(threading.local):
    """This thread's Arrays, because a stream is used by one thread at a time."""

    def __init__(self) -> None:
        self.by_device: dict[Device, Arrays] = {}


_made = _Made()


def arrays_on(device: Device) -> Arrays:
    """The Arrays of a device for the calling thread."""
    found = _made.by_device.get(device)
    if found is None:
        host = device.capabilities().kind == "host"
        found = _made.by_device[device] = HostArrays() if host else DeviceArrays(device)
    return found


def arrays(comm: Communicator) -> Arrays:
    """The Arrays of this rank's device."""
    return arrays_on(context(comm).device)


class Room:
    """An array to receive into, at an arbitrarily aligned address, between guard bytes."""

    def __init__(self, a: Arrays, dtype: DType, shape: int | tuple[int, ...]) -> None:
        size = int(np.prod(shape)) * dtype.itemsize
        self._arrays = a
        self._first = _GUARD + dtype.itemsize
        self._last = self._first + size
        self._bytes = a.put(np.full(self._last + _GUARD, _CANARY, UINT8.numpy))
        self.array: Any = self._bytes[self._first : self._last].view(dtype.numpy).reshape(shape)

    def fill(self, values: Array) -> None:
        """Overwrite the array."""
        self._arrays.fill(self.array, values)

    def check(self) -> None:
        """Raise AssertionError if a guard byte was written."""
        found = self._arrays.get(self._bytes)
        around = np.concatenate([found[: self._first], found[self._last :]])
        assert (around == _CANARY).all(), "bytes around the output were written"


@contextlib.contextmanager
def on_device(comm: Communicator) -> Iterator[None]:
    """Make the rank's GPU current on the thread, as users of frameworks do."""
    runtime = getattr(context(comm).device, "runtime", None)
    if runtime is None:
        yield
        return
    before = runtime.current()
    runtime.use(comm.device_index)
    try:
        yield
    finally:
        runtime.use(before)
