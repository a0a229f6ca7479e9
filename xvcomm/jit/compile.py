"""How host kernels are compiled: once a machine, cached on disk by all that they reach, one process at a time."""

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
from xvcomm.jit.fingerprint import fingerprint
from xvcomm.jit.progress import Progress
from xvcomm.system.interrupts import held_back
from xvcomm.system.notice import notice
from xvcomm.system.private import taken
from xvcomm.types.deadline import Deadline, poll

TURN_SECONDS = 120.0
"""How long a process waits for another one that compiles; then it compiles for itself, and waits no more."""

_threads = threading.RLock()
_turn: _Turn | None = None
_patient = True
progress = Progress()


class _Missing(Exception):
    """A kernel is not on disk, and compiling it was not this process's turn."""


class _Turn(Listener):  # type: ignore[misc]
    """This process's part in `compiling`; numba tells it before each step of compiling, and nothing when it loads."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._mine = False
        self._lock: int | None = None

    def on_start(self, event: Event) -> None:
        """Stop numba from compiling what another process may be compiling too."""
        if threading.get_ident() != self._thread:
            return
        if not self._mine:
            raise _Missing
        self._say()

    def on_end(self, event: Event) -> None:
        """Nothing."""

    def take(self) -> None:
        """Wait until no other process compiles, or for as long as one may."""
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
        except OSError:  # a file system that has no locks
            return
        if not _patient:
            notice(
                f"another process has compiled kernels for {TURN_SECONDS:g} s, or is stopped: compiling them here too; end "
                f"it if it should not run (`fuser {_kept()}/lock` names it)"
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
    """Let one of several ranks compile kernels that are not on disk, while the others wait and then load its results.

    Who finds all of them on disk waits for nobody.
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
    made = None
    with suppress(_Missing), held_back():  # LLVM's finalizers and callbacks swallow an interrupt, or fail by it
        made = build(function, signature, **options)
    if made is None:  # compiled here, so that what interrupts it is not told to come from handling another error
        assert _turn is not None
        _turn.take()
        with held_back():
            made = build(function, signature, **options)
    progress.ready += 1
    return made


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


class _Cache(NullCache):  # type: ignore[misc]
    """A function's files in the `KernelCache`, with its `fingerprint` in their names.

    numba's own cache would look at the file that holds the function, and not at those of what is inlined into it; it
    raises where it finds no folder that it can write, and loads from one whoever owns it.
    """

    def __init__(self, function: Callable[..., Any], *options: object) -> None:
        python = f"py{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}"
        self._name = f"{function.__module__}.{function.__qualname__}-{python}".replace("<", "").replace(">", "")
        self._code = fingerprint(function, *options)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load without numba's tables of all that it can compile, which take longer than all kernels of a process."""
        rtsys.initialize(target_context)
        kept = _kept().read(self._file(sig, target_context.codegen()))
        return None if kept is None else CompileResult._rebuild(target_context, *pickle.loads(kept))

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled, unless it holds addresses of this process."""
        if not data.lifted and not data.library.has_dynamic_globals:
            _kept().write(self._file(sig, data.codegen), dumps(data._reduce()))

    def _file(self, sig: Any, codegen: Any) -> str:
        """The file's name, which says for which function, and of which signature and processor."""
        parts = (self._name, self._code, sig, codegen.magic_tuple())
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()
        return f"{self._name[-150:]}-{digest[:40]}"


def _kept() -> KernelCache:
    return kernel_cache(config.kernel_cache())


_alive: list[Any] = []
