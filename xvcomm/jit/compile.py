"""Compiles host kernels with numba: once per machine, cached on disk by their source files, one process at a time."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from numba import njit
from numba.core.caching import NullCache
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.event import Event, Listener, install_listener
from numba.core.runtime import rtsys
from numba.core.serialize import dumps
from numba.core.sigutils import normalize_signature

from xvcomm import config
from xvcomm.jit.cache import KernelCache, kernel_cache
from xvcomm.jit.progress import Progress
from xvcomm.jit.sources import digest
from xvcomm.system.interrupts import held_back
from xvcomm.system.notice import notice
from xvcomm.system.private import taken
from xvcomm.types.deadline import Deadline, poll

TURN_SECONDS = 120.0
"""Seconds to wait for another process that compiles. After that this process compiles too, and never waits again."""

_threads = threading.RLock()
_turn: _Turn | None = None
_patient = True
progress = Progress()


class _Missing(Exception):
    """A kernel is not in the disk cache, and this process has not taken its turn to compile."""


class _Turn(Listener):  # type: ignore[misc]
    """Takes the turn to compile. numba calls `on_start` before each compiler pass, but not when it loads from the cache."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._mine = False
        self._lock: int | None = None

    def on_start(self, event: Event) -> None:
        """Raise `_Missing` if the turn has not been taken, because another process may be compiling the same kernel."""
        if threading.get_ident() != self._thread:
            return
        if not self._mine:
            raise _Missing
        self._say()

    def on_end(self, event: Event) -> None:
        """Required by numba; does nothing."""

    def take(self) -> None:
        """Wait until no other process compiles, for at most `TURN_SECONDS`."""
        global _patient
        self._mine = True
        self._say()
        if not _patient:
            return
        self._lock = lock = _kept().turn()
        if lock is None:
            return
        try:
            _patient = poll(partial(self._look, lock), Deadline.after(TURN_SECONDS)) is not None
        except OSError:  # the file system does not support locks
            return
        if not _patient:
            notice(
                f"another process has been compiling kernels for {TURN_SECONDS:g} s, or is stopped: compiling them here too; "
                f"end it if it should not run (`fuser {_kept()}/lock` names it)"
            )

    def _look(self, lock: int) -> bool | None:
        self._say()
        return taken(lock)

    def _say(self) -> None:
        progress.say(_kept().writable)

    def give_back(self) -> None:
        """Let the next process compile."""
        progress.rest()
        if self._lock is not None:
            os.close(self._lock)


@contextmanager
def compiling() -> Iterator[None]:
    """Let one of several ranks compile the kernels that are missing on disk, while the others wait and then load them.

    A process that finds all kernels on disk does not wait.
    """
    global _turn
    with _threads:
        if _turn is not None:
            yield
            return
        _turn = turn = _Turn()
        try:
            with install_listener("numba:run_pass", turn):
                yield
        finally:
            _turn = None
            turn.give_back()


def kernel(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function that compiled code can call, and Python too; it runs without the interpreter lock."""
    return lambda function: _obtain(_function, function, signature, nogil=True)


def brief(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function of a few instructions for positional calls from Python; it keeps the interpreter lock.

    Releasing and retaking the lock would take longer than the function. No other Python thread of this process runs meanwhile.
    """
    return lambda function: _entry(_obtain(_function, function, signature))


def native(signature: str, function: Callable[..., Any]) -> int:
    """Compile a function that kernels call by address, and return the address; the code is never freed."""
    compiled = _obtain(_callback, function, signature)
    _alive.append(compiled)
    return int(compiled.address)


def _entry(compiled: Any) -> Any:
    """The C entry point of the only overload. Calling it skips numba's selection of an overload."""
    _alive.append(compiled)
    (found,) = compiled.overloads.values()
    return found.entry_point


def _obtain(build: Callable[..., Any], function: Callable[..., Any], signature: str, **options: bool) -> Any:
    """Load a compiled function from the disk cache, or take the turn and compile it."""
    made = None
    # an interrupt in LLVM's finalizers and callbacks is swallowed or makes them fail
    with suppress(_Missing), held_back():
        made = build(function, signature, **options)
    if made is None:  # outside the handler of _Missing, so that a traceback from here does not show it as context
        assert _turn is not None
        _turn.take()
        with held_back():
            made = build(function, signature, **options)
    progress.ready += 1
    return made


def _function(function: Callable[..., Any], signature: str, **options: bool) -> Any:
    """Like `njit(signature, cache=True)`, with xvcomm's disk cache."""
    compiled = njit(error_model="numpy", **options)(function)
    compiled._cache = _cache(function, compiled.targetoptions)
    compiled.compile(signature)
    compiled.disable_compile()
    return compiled


def _callback(function: Callable[..., Any], signature: str) -> Any:
    """Like `cfunc(signature, cache=True)`, with xvcomm's disk cache."""
    options = {"error_model": "numpy"}
    compiled = CFunc(function, normalize_signature(signature), locals={}, options=options)
    compiled._cache = _cache(function, options, "C")
    compiled.compile()
    return compiled


def _cache(function: Callable[..., Any], *options: object) -> NullCache:
    try:
        return _Cache(function, *options)
    except OSError as error:
        _tell_sources_missing(str(error))
        return NullCache()


def _tell_sources_missing(reason: str) -> None:
    """Say once that nothing is kept: no file's name would tell an old version of a function from a new one."""
    if not _told:
        _told.append(reason)
        notice(f"compiled kernels are not kept, because xvcomm's source files cannot be read: {reason}")


class _Cache(NullCache):  # type: ignore[misc]
    """A function's files in the `KernelCache`; their names contain the `digest` of its sources.

    numba's own cache notices changes of the file that defines the function, but not of files whose functions are inlined into
    it. It also raises if no folder is writable, and loads files of any owner.
    """

    def __init__(self, function: Callable[..., Any], *options: object) -> None:
        python = f"py{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}"
        self._name = f"{function.__module__}.{function.__qualname__}-{python}".replace("<", "").replace(">", "")
        self._code = digest(function, *options)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load without initializing numba's typing registries, which takes longer than loading all kernels of a process."""
        rtsys.initialize(target_context)
        kept = _kept().read(self._file(sig, target_context.codegen()))
        return None if kept is None else CompileResult._rebuild(target_context, *pickle.loads(kept))

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store a compiled function, unless it contains addresses of this process."""
        if not data.lifted and not data.library.has_dynamic_globals:
            _kept().write(self._file(sig, data.codegen), dumps(data._reduce()))

    def _file(self, sig: Any, codegen: Any) -> str:
        """Name of the file for this function, signature and CPU."""
        parts = (self._name, self._code, sig, codegen.magic_tuple())
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()
        return f"{self._name[-150:]}-{digest[:40]}"


def _kept() -> KernelCache:
    return kernel_cache(config.kernel_cache())


_alive: list[Any] = []
_told: list[str] = []
