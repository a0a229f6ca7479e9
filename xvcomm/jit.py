"""How host kernels are compiled: once a machine, cached on disk, one process at a time."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from numba import cfunc, njit
from numba.core.event import Event, Listener, install_listener

_threads = threading.RLock()
_turn: _Turn | None = None


class _Missing(Exception):
    """A kernel is not on disk, and compiling it was not this process's turn."""


class _Turn(Listener):  # type: ignore[misc]
    """This process's part in `compiling`; numba tells it before each step of compiling, and nothing when it loads."""

    def __init__(self, lock: IO[str]) -> None:
        self._lock, self._thread = lock, threading.get_ident()
        self._mine = False

    def on_start(self, event: Event) -> None:
        """Stop numba from compiling what another process may be compiling too."""
        if not self._mine and threading.get_ident() == self._thread:
            raise _Missing

    def on_end(self, event: Event) -> None:
        """Nothing."""

    def take(self) -> None:
        """Wait until no other process compiles."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._mine = True


@contextmanager
def compiling() -> Iterator[None]:
    """Let one of several ranks compile kernels that are not on disk, while the others wait and then load its results.

    Who finds all of them on disk waits for nobody: four ranks on two cores start in 2.0 instead of 2.9 s.
    """
    global _turn
    with _threads:
        if _turn is not None:
            yield
            return
        with open(os.path.join(tempfile.gettempdir(), f"xvcomm-jit-{os.getuid()}.lock"), "a") as lock:
            _turn = _Turn(lock)
            try:
                with install_listener("numba:run_pass", _turn):
                    yield
            finally:
                _turn = None


def kernel(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for calls from Python that run without the interpreter lock, and from other compiled functions."""
    return lambda function: _obtain(njit(signature, nogil=True, cache=True, error_model="numpy"), function)


def brief(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function of a few instructions for calls from Python, by position, that keep the interpreter lock.

    Giving the lock up and taking it again would take longer than the function, and of this process no other thread
    of Python does anything meanwhile.
    """
    return lambda function: _entry(_obtain(njit(signature, cache=True, error_model="numpy"), function))


def native(signature: str, function: Callable[..., Any]) -> int:
    """Compile a function for calls from kernels, through its address; the code stays for the process's life."""
    compiled = _obtain(cfunc(signature, cache=True, error_model="numpy"), function)
    _alive.append(compiled)
    return int(compiled.address)


def _entry(compiled: Any) -> Any:
    """The function of C that numba calls once it has looked which of several fits the arguments: there is only one."""
    _alive.append(compiled)
    (found,) = compiled.overloads.values()
    return found.entry_point


def _obtain(build: Callable[[Callable[..., Any]], Any], function: Callable[..., Any]) -> Any:
    """Load what a decorator of numba makes of a function, or wait for the turn and compile it."""
    try:
        return build(function)
    except _Missing:
        assert _turn is not None
        _turn.take()
        return build(function)


_alive: list[Any] = []
