"""Wraps entry points of the GPU code: makes the device current meanwhile, and converts the vendor's errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from xvcomm.backends.gpu.vendor import Runtime, VendorError
from xvcomm.errors import ArgumentError, BackendUnavailable, ResourceError, XvcommError

OUT_OF_MEMORY = 2
CAPTURE_ERRORS = range(900, 910)
_ARGUMENT_ERRORS = (1, 17, 400, 709)  # invalid value, device pointer and handle; a context that was destroyed
_MISSING = (-1, 34, 35, 36, 500)  # a library or function that is missing, or too old


class OnDevice(Protocol):
    """An object that belongs to one device."""

    runtime: Runtime
    index: int


_Self = TypeVar("_Self", bound=OnDevice)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def on_device(
    method: Callable[Concatenate[_Self, _Arguments], _Result],
) -> Callable[Concatenate[_Self, _Arguments], _Result]:
    """Decorator: run a method with its device as the thread's current one, and restore the previous one afterwards."""

    @wraps(method)
    def entered(self: _Self, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        runtime, index = self.runtime, self.index
        try:
            before = runtime.current()
            if before == index:
                return method(self, *args, **kwargs)
            runtime.use(index)
            try:
                return method(self, *args, **kwargs)
            finally:
                runtime.use(before)
        except VendorError as error:
            raise told(error, runtime.kind, index) from error

    return entered


def told(error: VendorError, kind: str, index: int) -> XvcommError:
    """Convert a vendor's error to the one for the user."""
    text = f"{kind} device {index}: {error}"
    if error.code == OUT_OF_MEMORY:
        return ResourceError(f"{text}; free memory in the framework, or use smaller arrays")
    if error.code in CAPTURE_ERRORS:
        return ArgumentError(
            f"{text}; it cannot be captured in a graph: call it once before the capture, and outside of it"
        )
    if error.code in _ARGUMENT_ERRORS:
        return ArgumentError(f"{text}; an array or a stream belongs to another device, or was freed")
    if error.code in _MISSING:
        return BackendUnavailable(f"{text}; install a newer driver and runtime (`xvcomm doctor`)")
    return ResourceError(
        f"{text}; an earlier kernel of this process may have failed, after which the device is unusable"
    )
