"""The host's own small arrays in the device's memory, for operations that carry no array of the user's."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from xvcomm.abc.device import Allocation, Device
from xvcomm.memory import array
from xvcomm.memory.array_view import ArrayView
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import DType, from_numpy


class _Room(NamedTuple):
    """What operations give back for the views made here."""

    address: int
    shape: tuple[int, ...]
    dtype: DType
    memory: Allocation


class Staging:
    """Brings arrays to one device and back. Blocks the host; not for hot paths."""

    def __init__(self, device: Device) -> None:
        self._device = device
        able = device.capabilities()
        self._kind, self._index, self._remote = able.kind, able.index, able.kind != "host"
        self._stream = device.streams(1)[0]

    def up(self, x: np.ndarray[Any, Any]) -> Any:
        """The array itself on host memory, else a copy on the device."""
        if not self._remote:
            return x
        room = self.empty(x.shape, from_numpy(x.dtype))
        if x.nbytes:
            self._device.copy(room.address, array.view(np.ascontiguousarray(x)).address, x.nbytes, self._stream)
            self._finish()
        return room

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Any:
        """Room for an array on the device."""
        if not self._remote:
            return np.empty(shape, dtype.numpy)
        count = math.prod(shape)
        memory = self._device.empty(max(1, count * dtype.itemsize))
        room = _Room(memory.address, shape, dtype, memory)
        return ArrayView(memory.address, shape, dtype, count, count * dtype.itemsize, room, self._kind, self._index)

    def down(self, x: Any) -> np.ndarray[Any, Any]:
        """What `up` or `empty` gave, or an operation for it, as a host array again."""
        if not self._remote:
            found: np.ndarray[Any, Any] = x
            return found
        host = np.empty(x.shape, x.dtype.numpy)
        if host.nbytes:
            self._device.copy(array.view(host).address, x.address, host.nbytes, self._stream)
            self._finish()
        return host

    def _finish(self) -> None:
        self._stream.deadline = Deadline.after(None)
        self._stream.synchronize()
