"""Ranges in AMD's profilers: ROCTx, a library of ROCm."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

from xvcomm.abc.ranges import Ranges
from xvcomm.errors import BackendUnavailable

_LIBRARIES = ("librocprofiler-sdk-roctx.so", "librocprofiler-sdk-roctx.so.1", "libroctx64.so", "libroctx64.so.4")
"""That of rocprofv3 first, then that of the profilers before it."""


def roctx(folder: Path) -> Ranges:
    """ROCTx's functions.

    Args:
        folder: where ROCm's libraries are; those that the system finds elsewhere come last.

    Raises:
        BackendUnavailable: there is no such library.
    """
    for name in (*(str(folder / name) for name in _LIBRARIES), *_LIBRARIES):
        with contextlib.suppress(OSError):
            return _bound(ctypes.PyDLL(name))
    raise BackendUnavailable(
        f"XVCOMM_RANGES=1: there is no {_LIBRARIES[0]} in {folder}; install ROCm's profiler (rocprofiler-sdk), or unset the "
        "variable"
    )


def _bound(library: ctypes.PyDLL) -> Ranges:
    begin = library.roctxRangePushA
    begin.argtypes = [ctypes.c_char_p]
    return Ranges(lambda text: begin(text.encode()), library.roctxRangePop)
