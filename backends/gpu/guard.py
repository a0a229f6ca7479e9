"""What every entry into the GPU code does: its device is the thread's for so long, and the vendor's errors become ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from xvcomm.backends.gpu.vendor import Runtime, VendorError
from xvcomm.errors import ArgumentError, BackendUnavailable, ResourceError, XvcommError

OUT_OF_MEMORY = 2
CAPTURE_ERRORS = range(900, 910)
_ARGUMENT_ERRORS = (1, 17, 400, 709)  # invalid value, device pointer and handle; a context that was destroyed
_MISSING = (-1, 34, 35, 36, 500)  # a library or a function that is not there, or too old for the other


class OnDevice(Protocol):
    """What belongs to one device.

    Attributes:
        runtime: the vendor's calls.
        index: number of the device.
    """

    runtime: Runtime
    index: int


_Self = TypeVar("_Self", bound=OnDevice)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def on_device(
    method: Callable[Concatenate[_Self, _Arguments], _Result],
) -> Callable[Concatenate[_Self, _Arguments], _Result]:
    """Let a method run with its device as the thread's current one; what was current before is so afterwards."""

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
    """A vendor's error as the user gets it."""
    text = f"{kind} device {index}: {error}"
    if error.code == OUT_OF_MEMORY:
        return ResourceError(f"{text}; free memory of the framework, or use smaller arrays")
    if error.code in CAPTURE_ERRORS:
        return ArgumentError(f"{text}; it cannot be captured in a graph: call it once before, and again outside")
    if error.code in _ARGUMENT_ERRORS:
        return ArgumentError(f"{text}; an array or a stream is not this device's, or is gone")
    if error.code in _MISSING:
        return BackendUnavailable(f"{text}; install a newer driver and runtime (`xvcomm doctor`)")
    return ResourceError(f"{text}; an earlier kernel of this process may have failed, and the device serves no more")
