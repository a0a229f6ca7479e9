"""The current stream of a device, whichever vendor's it is; for GPUs of CUDA and ROCm in a fraction of the usual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_CUDA = 1
"""Torch's number of the device type `cuda`, which ROCm's GPUs have too."""


def device_types() -> list[str]:
    """Types of torch's devices whose tensors are served."""
    found = torch.accelerator.current_accelerator()
    return list(dict.fromkeys(["cpu", "cuda", *([] if found is None else [found.type])]))


def handle_of(stream: Any) -> int:
    """The vendor's handle of a stream of torch."""
    return int(stream.cuda_stream if stream.device_type == _CUDA else stream.native_handle)


def current_handle(device: torch.device) -> Callable[[int], int]:
    """What gives the handle of the current stream of a device of this type, by its index."""
    if device.type == "cuda":
        found: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        return found
    current = torch.get_device_module(device).current_stream
    return lambda index: handle_of(current(index))


def on(stream: Any) -> Any:
    """A context manager that changes the current stream."""
    return _On(stream) if stream.device_type == _CUDA else torch.get_device_module(stream.device).stream(stream)


class _On:
    """Like `torch.cuda.stream` in a sixth of the time."""

    __slots__ = ("_before", "_device", "_stream")

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream, self._device = self._stream, torch._C._cuda_getDevice()
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)
        _set(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *exc: object) -> None:
        _set(*self._before)
        if self._before[1] != self._device:
            torch._C._cuda_setDevice(self._device)


def _set(number: int, index: int, kind: int) -> None:
    torch._C._cuda_setStream(stream_id=number, device_index=index, device_type=kind)
