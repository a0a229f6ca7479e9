"""Arrays of a rank's device for `xvcomm bench`. Frameworks are imported only for GPUs."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xvcomm.errors import ArrayError, BackendUnavailable
from xvcomm.memory import vendors
from xvcomm.types.dtype import UINT8, DType

if TYPE_CHECKING:  # importing it compiles kernels, which only the ranks of `bench` need
    from xvcomm.comm.communicator import Communicator


class Memory(Protocol):
    """Creates, fills and compares one-dimensional arrays.

    Attributes:
        kind: `host`, `cuda` or `rocm`.
        name: name of the device, for reports.
        asynchronous: whether operations return before they are complete.
    """

    kind: str
    name: str
    asynchronous: bool

    def zeros(self, count: int, dtype: DType) -> Any:
        """Create an array of zeros whose pages are all mapped."""

    def tile(self, array: Any, values: NDArray[Any]) -> None:
        """Fill an array by repeating `values`."""

    def differ(self, array: Any, values: NDArray[Any]) -> int:
        """Number of elements that differ from the repeated `values`. Waits for the device."""

    def synchronize(self) -> None:
        """Block until the device has completed all enqueued work."""


class HostMemory:
    """Arrays of numpy."""

    kind = "host"
    asynchronous = False

    def __init__(self) -> None:
        self.name = platform.machine()

    def zeros(self, count: int, dtype: DType) -> Any:
        """See `Memory.zeros`."""
        made = np.empty(count, dtype.numpy)
        made[...] = 0
        return made

    def tile(self, array: Any, values: NDArray[Any]) -> None:
        """See `Memory.tile`."""
        array[...] = self._repeat(values, array.size)

    def differ(self, array: Any, values: NDArray[Any]) -> int:
        """See `Memory.differ`."""
        return int(np.count_nonzero(array != self._repeat(values, array.size)))

    def _repeat(self, values: NDArray[Any], count: int) -> NDArray[Any]:
        return np.tile(values, -(-count // values.size))[:count]  # np.resize would join as many arrays

    def synchronize(self) -> None:
        """No-op."""


class TorchMemory:
    """Arrays of torch for CUDA or ROCm, handled as bytes, because torch does not support every dtype."""

    asynchronous = True

    def __init__(self, kind: str, index: int) -> None:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("it sees no GPU")
        self._torch, self.kind, self.index = torch, kind, index
        torch.cuda.set_device(index)
        self.device = torch.device(vendors.of(kind).torch_device, index)
        self.name = torch.cuda.get_device_name(index)

    def zeros(self, count: int, dtype: DType) -> Any:
        """See `Memory.zeros`."""
        made = self._torch.zeros(count * dtype.itemsize, dtype=self._torch.uint8, device=self.device)
        return made.view(getattr(self._torch, dtype.name))

    def tile(self, array: Any, values: NDArray[Any]) -> None:
        """See `Memory.tile`."""
        array.view(self._torch.uint8).copy_(self._bytes(values, array.nbytes))

    def differ(self, array: Any, values: NDArray[Any]) -> int:
        """See `Memory.differ`."""
        unlike = array.view(self._torch.uint8) != self._bytes(values, array.nbytes)
        return int(unlike.view(-1, array.itemsize).any(1).sum())

    def _bytes(self, values: NDArray[Any], nbytes: int) -> Any:
        once = self._torch.from_numpy(values.view(np.uint8)).to(self.device)
        return once.repeat(-(-nbytes // once.numel()))[:nbytes]

    def synchronize(self) -> None:
        """See `Memory.synchronize`."""
        self._torch.cuda.synchronize()


class CupyMemory:
    """Arrays of CuPy, used if torch is not available."""

    asynchronous = True

    def __init__(self, kind: str, index: int) -> None:
        import cupy

        self._cupy, self.kind = cupy, kind
        device = cupy.cuda.Device(index)
        device.use()
        self.name = cupy.cuda.runtime.getDeviceProperties(index)["name"].decode()

    def zeros(self, count: int, dtype: DType) -> Any:
        """See `Memory.zeros`."""
        return self._cupy.zeros(count, dtype.numpy)

    def tile(self, array: Any, values: NDArray[Any]) -> None:
        """See `Memory.tile`."""
        array[...] = self._repeat(values, array.size)

    def differ(self, array: Any, values: NDArray[Any]) -> int:
        """See `Memory.differ`."""
        return int((array != self._repeat(values, array.size)).sum())

    def _repeat(self, values: NDArray[Any], count: int) -> Any:
        return self._cupy.tile(self._cupy.asarray(values), -(-count // values.size))[:count]

    def synchronize(self) -> None:
        """See `Memory.synchronize`."""
        self._cupy.cuda.Device().synchronize()


def memory_of(comm: Communicator) -> Memory:
    """The Memory of this rank's device.

    Raises:
        BackendUnavailable: the device is a GPU, and neither torch nor CuPy supports it.
    """
    from xvcomm.memory.array import view  # brings a compiler, which the command has no use for, and so does the next
    from xvcomm.testing.inside import context

    able = context(comm).device.capabilities()
    if able.kind == "host":
        return HostMemory()
    reasons = []
    for make in (TorchMemory, CupyMemory):
        try:
            memory: Memory = make(able.kind, able.index)
            kind = view(memory.zeros(1, UINT8)).device
            if kind == able.kind:
                return memory
            refusal = f"it is built for {kind}"
        except (
            ArrayError,
            ImportError,
            RuntimeError,
            AssertionError,
        ) as error:  # torch without CUDA raises the last two
            refusal = str(error)
        reasons.append(f"{make.__name__.removesuffix('Memory').lower()}: {refusal}")
    raise BackendUnavailable(f"no arrays for {able.kind}: {'; '.join(reasons)}; install torch or CuPy for this GPU")
