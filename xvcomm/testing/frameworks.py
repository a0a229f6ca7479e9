"""Creates and reads arrays of each framework for the suites.

Frameworks are imported when a check runs: xvcomm itself needs none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from xvcomm.comm.communicator import Communicator
from xvcomm.testing.arrays import Array
from xvcomm.types.dtype import BY_NAME, DTYPES

ON_HOST = ("numpy", "torch", "jax", "interface")
"""`interface` represents libraries whose arrays have only `__array_interface__`."""

ON_GPUS = ("torch", "cupy", "jax")


@dataclass(frozen=True, slots=True)
class Framework:
    """Creates an array from a numpy array (always a copy), reads one, and lists supported dtypes.

    Attributes:
        mutable: whether operations fill its arrays in place.
        strided: creates a noncontiguous array from a matrix; None if the framework has none.
    """

    make: Callable[[Array], Any]
    read: Callable[[Any], Array]
    dtypes: tuple[str, ...]
    mutable: bool = True
    strided: Callable[[Array], Any] | None = None


class Interface:
    """A minimal array."""

    def __init__(self, data: Array) -> None:
        self.data = data

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.data.__array_interface__


def missing(comm: Communicator, name: str) -> str:
    """Why a framework cannot create arrays for this rank, or an empty text."""
    try:
        framework(comm, name).make(np.zeros(1, np.float32))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def framework(comm: Communicator, name: str) -> Framework:
    """The Framework with this name, for the memory of this rank's device.

    Args:
        comm: the communicator.
        name: one of ON_HOST and ON_GPUS; or `"package.module:function"`, a function that returns a Framework for a
            communicator.

    Raises:
        ImportError: it is not installed.
    """
    module, colon, attribute = name.partition(":")
    if colon:
        made: Framework = getattr(importlib.import_module(module), attribute)(comm)
        return made
    names = tuple(d.name for d in DTYPES)
    if name == "torch":
        return _torch(names, "cpu" if comm.device == "host" else f"cuda:{comm.device_index}")
    if name == "cupy":
        return _cupy(comm.device_index)
    if name == "jax":
        return _jax(comm.device, comm.device_index)
    if name == "interface":
        return Framework(
            lambda x: Interface(x.copy()), lambda y: np.asarray(y).copy(), ("float32", "int64", "complex128"),
            strided=lambda x: Interface(x.copy().T),
        )  # fmt: skip
    return Framework(np.copy, np.asarray, names, strided=lambda x: x.copy().T)


def _torch(names: tuple[str, ...], device: str) -> Framework:
    torch = importlib.import_module("torch")

    def make(x: Array) -> Any:
        if not x.size:
            return torch.empty(x.shape, dtype=getattr(torch, x.dtype.name), device=device)
        bits = torch.from_numpy(np.ascontiguousarray(x).reshape(-1).view(np.uint8).copy())
        return bits.to(device).view(getattr(torch, x.dtype.name)).reshape(x.shape)

    def read(y: Any) -> Array:
        kind = BY_NAME[str(y.dtype).removeprefix("torch.")].numpy
        flat: Array = y.reshape(-1).view(torch.uint8).cpu().numpy().view(kind)
        return flat.reshape(tuple(y.shape))

    return Framework(make, read, names, strided=lambda x: make(x).t())


def _jax(kind: str, index: int) -> Framework:
    jax, kept = importlib.import_module("jax"), importlib.import_module("jax.dtypes").canonicalize_dtype
    devices = jax.local_devices(backend="cpu" if kind == "host" else "gpu")
    home = devices[0] if kind == "host" else next(d for d in devices if d.local_hardware_id == index)
    # By default JAX has no 64-bit dtypes.
    names = tuple(d.name for d in DTYPES if kept(d.numpy) == d.numpy)
    # jax.numpy.array would compile two programs for each shape and dtype
    return Framework(lambda x: jax.device_put(x.copy(), home), np.asarray, names, False)


def _cupy(index: int) -> Framework:
    cupy = importlib.import_module("cupy")
    cupy.cuda.Device(index).use()
    names = tuple(d.name for d in DTYPES if d.numpy.isbuiltin == 1)  # not those of ml_dtypes
    return Framework(cupy.array, cupy.asnumpy, names, strided=lambda x: cupy.array(x).T)
