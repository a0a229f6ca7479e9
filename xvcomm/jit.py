"""How host kernels are compiled: once a machine, cached on disk, one process at a time."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba import cfunc, njit

_threads = threading.RLock()
_depth = 0


@contextmanager
def compiling() -> Iterator[None]:
    """Hold the machine-wide compiler lock, so that of several ranks one compiles and the others load its result."""
    global _depth
    path = os.path.join(tempfile.gettempdir(), f"xvcomm-jit-{os.getuid()}.lock")
    with _threads, open(path, "a") as lock:
        if _depth == 0:
            fcntl.flock(lock, fcntl.LOCK_EX)
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1


def kernel(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for calls from Python that run without the interpreter lock."""
    return njit(signature, nogil=True, cache=True, error_model="numpy")


def native(signature: str, function: Callable[..., Any]) -> int:
    """Compile a function for calls from kernels, through its address; the code stays for the process's life."""
    compiled = cfunc(signature, cache=True, error_model="numpy")(function)
    _alive.append(compiled)
    return int(compiled.address)


_alive: list[Any] = []
