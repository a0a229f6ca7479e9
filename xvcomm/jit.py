"""How host kernels are compiled: once a machine, cached on disk by all that they reach, one process at a time."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.core.event import Event, Listener, install_listener
from numba.core.runtime import rtsys
from numba.core.sigutils import normalize_signature

from xvcomm.fingerprint import fingerprint

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

    Who finds all of them on disk waits for nobody.
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
    return lambda function: _obtain(_function, function, signature, nogil=True)


def brief(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function of a few instructions for calls from Python, by position, that keep the interpreter lock.

    Giving the lock up and taking it again would take longer than the function, and of this process no other thread
    of Python does anything meanwhile.
    """
    return lambda function: _entry(_obtain(_function, function, signature))


def native(signature: str, function: Callable[..., Any]) -> int:
    """Compile a function for calls from kernels, through its address; the code stays for the process's life."""
    compiled = _obtain(_callback, function, signature)
    _alive.append(compiled)
    return int(compiled.address)


def _entry(compiled: Any) -> Any:
    """The function of C that numba calls once it has looked which of several fits the arguments: there is only one."""
    _alive.append(compiled)
    (found,) = compiled.overloads.values()
    return found.entry_point


def _obtain(build: Callable[..., Any], function: Callable[..., Any], signature: str, **options: bool) -> Any:
    """Load what numba makes of a function, or wait for the turn and compile it."""
    try:
        return build(function, signature, **options)
    except _Missing:
        assert _turn is not None
        _turn.take()
        return build(function, signature, **options)


def _function(function: Callable[..., Any], signature: str, **options: bool) -> Any:
    """What `njit(signature, cache=True)` gives, with a cache of ours."""
    compiled = njit(error_model="numpy", **options)(function)
    compiled._cache = _Cache(function, compiled.targetoptions)
    compiled.compile(signature)
    compiled.disable_compile()
    return compiled


def _callback(function: Callable[..., Any], signature: str) -> Any:
    """What `cfunc(signature, cache=True)` gives, with a cache of ours."""
    options = {"error_model": "numpy"}
    compiled = CFunc(function, normalize_signature(signature), locals={}, options=options)
    compiled._cache = _Cache(function, options, "C")
    compiled.compile()
    return compiled


class _Cache(FunctionCache):  # type: ignore[misc]
    """A function's files on disk, where numba puts them, with its `fingerprint` in their names.

    numba itself would look at the file that holds the function, and not at those of what is inlined into it. With names
    of its own no version ever reads what another one is writing.
    """

    def __init__(self, function: Callable[..., Any], *options: object) -> None:
        super().__init__(function)
        self._cache_file = IndexDataCacheFile(
            cache_path=self._cache_path,
            filename_base=f"{self._impl.filename_base}-{fingerprint(function, *options)}",
            source_stamp=self._impl.locator.get_source_stamp(),
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load without numba's tables of all that it can compile, which take longer than all kernels of a process."""
        rtsys.initialize(target_context)
        return self._load_overload(sig, target_context)


_alive: list[Any] = []
