"""Arrays that CuPy must not free yet."""

from __future__ import annotations

from collections import deque
from importlib import import_module
from typing import Any

from xvcomm.memory import array


class Kept:
    """Arrays that operations on other streams than CuPy's current one still use."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._in_use: deque[tuple[Any, tuple[Any, ...]]] = deque()

    def add(self, stream: Any, *arrays: Any) -> None:
        """Keep arrays until a stream has passed this point; the user must keep those of captured graphs."""
        while self._in_use and self._in_use[0][0].done:
            self._in_use.popleft()
        if stream is None or not self._on_gpu:
            return
        cupy = import_module("cupy")
        user = external(stream)
        if user.ptr == cupy.cuda.get_current_stream().ptr or user.is_capturing():
            return
        self._in_use.append((user.record(cupy.cuda.Event(disable_timing=True)), arrays))


def external(stream: Any) -> Any:
    """A stream of any library as CuPy's."""
    cupy = import_module("cupy")
    return stream if isinstance(stream, cupy.cuda.Stream) else cupy.cuda.ExternalStream(array.stream_handle(stream))
