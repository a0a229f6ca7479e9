"""Arrays of any framework: seen as address, shape and dtype, made for results, and given back to the user."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from xvcomm.errors import ArgumentError, ArrayError
from xvcomm.memory.array_view import ArrayView
from xvcomm.memory.dlpack import Exporter
from xvcomm.memory.readers import view as view


class Memory(Protocol):
    """Memory of a device."""

    @property
    def address(self) -> int:
        """Where it begins."""


def empty_like(x: ArrayView, shape: tuple[int, ...], allocate: Callable[[int], Memory]) -> ArrayView:
    """A new array of the same framework, dtype and device, staged where the framework gives no way to fill one.

    Of frameworks that cannot make arrays (those with the array interface alone) it is a numpy array.

    Args:
        allocate: gives memory of the array's device, of so many bytes.

    Raises:
        ArrayError: nobody knows how to make one on the array's device.
    """
    array = x.array
    if hasattr(array, "new_empty"):
        return view(array.new_empty(shape))
    if x.device != "host":
        return _staged(x, shape, allocate) if x.immutable else view(_empty_on_device(x, shape))
    fresh = view(np.empty(shape, x.dtype.numpy))
    if hasattr(array, "__array_namespace__") and not isinstance(array, np.ndarray | np.generic):
        fresh.immutable = fresh.staged = True
        fresh.array = array
    return fresh


def _staged(x: ArrayView, shape: tuple[int, ...], allocate: Callable[[int], Memory]) -> ArrayView:
    """Memory on the device of an array of a framework whose arrays never change."""
    count = math.prod(shape)
    nbytes = count * x.dtype.itemsize
    memory = allocate(max(1, nbytes))
    shown = Exporter(memory, memory.address, shape, x.dtype, x.device, x.index)
    return ArrayView(
        memory.address, shape, x.dtype, count, nbytes, x.array, x.device, x.index, True, shown, True, trusted=True
    )


def _empty_on_device(x: ArrayView, shape: tuple[int, ...]) -> Any:
    if hasattr(x.array, "__array_namespace__"):
        return x.array.__array_namespace__().empty(shape, dtype=x.array.dtype, device=x.array.device)
    if hasattr(x.array, "__array_function__"):
        return np.empty_like(x.array, order="C", shape=shape)  # the framework's own, as CuPy has it
    raise ArrayError(
        f"cannot make a new {type(x.array).__name__} on {x.device}:{x.index}; pass out=, an array that can be written"
    )


def finish(x: ArrayView) -> Any:
    """The user's array: the one behind the view, or a new one of its kind with the contents of a staged view."""
    if not x.staged:
        return x.array
    array = x.array
    if x.device != "host":
        library = array.__array_namespace__()
        made = library.asarray(library.from_dlpack(x.keep), copy=True)
        return made.block_until_ready()  # then nobody reads the staged memory any more
    # As JAX does it, what comes out is bound to a device only if what went in was; else it goes where arrays go.
    # JAX's `asarray` with a device would run two programs, which it compiles for each shape.
    made = array.__array_namespace__().asarray(x.keep)
    return made.to_device(array.device) if getattr(array, "committed", True) else made


def stream_now(x: ArrayView | None, given: int | None) -> int | None:
    """Handle of the stream that the array's framework works on at this moment; `given` where it does not say, nor did before."""
    now = None if x is None or x.stream is None else view(x.array).stream
    return given if now is None else now


def untrusted(*views: ArrayView | None) -> list[int]:
    """Addresses of those arrays whose memory the device must check."""
    return [v.address for v in views if v is not None and v.count and not v.trusted]


def stream_handle(stream: Any) -> int:
    """The vendor's handle of a stream: an integer, or a stream object of torch, CuPy, or with `__cuda_stream__`.

    Raises:
        ArgumentError: it is none of these.
    """
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for name in ("cuda_stream", "ptr", "handle"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    raise ArgumentError(f"stream={stream!r}: pass a stream of torch or CuPy, or its handle as an integer")
