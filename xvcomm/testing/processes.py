"""Rank processes in which tests call functions; they persist between calls, so that a call takes milliseconds."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.util
import inspect
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from types import ModuleType
from typing import Any, Self
from weakref import WeakSet

START_SECONDS, RUN_SECONDS = 200.0, 200.0
"""When ranks count as hanging: long, because other processes may take nearly all of the machine's time."""
_END_SECONDS, _BROKEN_SECONDS, _DUMP_SECONDS = 60.0, 1.0, 1.0


class RankFailure(AssertionError):
    """At least one rank raised or died; its text begins with the one that failed first, and has every rank's traceback.

    Attributes:
        outcomes: each rank's result, or its exception; EOFError if the process died.
    """

    def __init__(self, message: str, outcomes: list[Any]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


class Ranks:
    """The ranks of one job on this machine, each in its own process, and another process that serves the rendezvous.

    Functions called on them must be at the top level of a module or test file; arguments and results must be picklable.

    Args:
        process: creates a process, like `multiprocessing.Process`.
        grace: seconds that the other ranks have once one has failed; None for the whole time of the call.

    Attributes:
        size: number of ranks.
        broken: whether a call failed, so that the state of the ranks is unknown.
    """

    def __init__(self, process: Callable[..., Any], grace: float | None = None) -> None:
        self._process, self._grace = process, grace
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: tuple[Any, Connection] | None = None
        self.size, self.broken = 0, False
        _in_use.add(self)

    def descriptors(self) -> list[int]:
        """Those by which this process talks to the ranks and to the rendezvous."""
        pipes = self._pipes if self._store is None else [*self._pipes, self._store[1]]
        return [pipe.fileno() for pipe in pipes]

    def _serve(self, main: Callable[[Connection], None]) -> Any:
        """Start the rendezvous process, which ends when its pipe closes; returns its first message."""
        self._store = self._launch(main)
        return self._store[1].recv()

    def _start(self, main: Callable[..., None], each: Iterable[Sequence[Any]]) -> None:
        """Start a rank for each element of `each`, the arguments of `main`, which passes its pipe to `obey`; wait until all
        have joined.
        """
        for arguments in each:
            process, pipe = self._launch(main, *arguments)
            self._processes.append(process)
            self._pipes.append(pipe)
        self.size, self.broken = len(self._pipes), False
        try:
            self._collect(range(self.size), START_SECONDS)
        except BaseException:
            self.close()
            raise

    def _launch(self, main: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
        ours, theirs = Pipe()
        process = self._process(target=main, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _replace(self, rank: int, main: Callable[..., None], *arguments: Any) -> None:
        """Start a process in the place of one that has ended, without waiting."""
        _end(self._processes[rank], _END_SECONDS)
        self._pipes[rank].close()
        self._processes[rank], self._pipes[rank] = self._launch(main, *arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = RUN_SECONDS) -> list[Any]:
        """Call a function on all ranks; returns the results in rank order.

        Raises:
            RankFailure: a rank raised, died, or did not answer in time; the text contains all tracebacks.
        """
        for rank in range(self.size):
            self.submit(rank, function, *args)
        return self._collect(range(self.size), timeout)

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout: float = RUN_SECONDS) -> list[Any]:
        """Like `run`, but returns exceptions in place of results."""
        for rank in range(self.size):
            self.submit(rank, function, *args)
        return self.collect(timeout=timeout)

    def submit(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        """Call a function on one rank without waiting; `collect` returns its result."""
        with contextlib.suppress(BrokenPipeError):
            file = inspect.getfile(inspect.unwrap(function))
            self._pipes[rank].send((file, function.__module__, function.__qualname__, args))

    def collect(self, *ranks: int, timeout: float = RUN_SECONDS) -> list[Any]:
        """Results or exceptions of the calls submitted to these ranks, or to all; EOFError for a rank that died."""
        wanted = ranks or range(self.size)
        try:
            outcomes = self._collect(wanted, timeout)
        except RankFailure as failure:
            outcomes = failure.outcomes
        return [outcomes[rank] for rank in wanted]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank's process."""
        os.kill(self._processes[rank].pid, number)

    def pids(self) -> list[int]:
        """Process ids, in rank order."""
        return [process.pid for process in self._processes]

    def _collect(self, ranks: Iterable[int], timeout: float) -> list[Any]:
        outcomes: list[Any] = [None] * self.size
        texts: dict[int, str] = {}
        waiting: dict[Any, int] = {self._pipes[rank]: rank for rank in ranks}
        end = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                self._show_stacks(waiting.values())
                for rank in waiting.values():
                    outcomes[rank], texts[rank] = TimeoutError("no answer in time"), "no answer in time"
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    outcomes[rank], text = self._pipes[rank].recv()
                except (EOFError, ConnectionError):
                    outcomes[rank], text = EOFError(f"rank {rank} died"), "the process died"
                if text:
                    texts[rank] = text
                    if self._grace is not None:
                        end = min(end, time.monotonic() + self._grace)
        if texts:
            self.broken = True
            raise RankFailure(_report(texts), outcomes)
        return outcomes

    def _show_stacks(self, ranks: Iterable[int]) -> None:
        """Make ranks that hang write their stacks to stderr."""
        for rank in ranks:
            self.kill(rank, signal.SIGUSR1)
        time.sleep(_DUMP_SECONDS)

    def close(self) -> None:
        """End all ranks, killing those that do not respond. Idempotent."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            _end(process, _BROKEN_SECONDS if self.broken else _END_SECONDS)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._store is not None:
            process, pipe = self._store
            self._store = None
            pipe.close()
            _end(process, _END_SECONDS)


_in_use: WeakSet[Ranks] = WeakSet()


def descriptors_in_use() -> set[int]:
    """Those of all ranks that this process has: ranks that several tests share may be started again during one of them."""
    return {descriptor for ranks in _in_use for descriptor in ranks.descriptors()}


def _end(process: Any, seconds: float) -> None:
    """Wait for a process that was asked to end; kill it after a timeout."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


def _report(texts: dict[int, str]) -> str:
    """What ranks have failed with, in the order in which they have failed: others often fail because of the first."""
    first, cause = next((rank, text.splitlines()[-1]) for rank, text in texts.items())
    return "\n".join([f"rank {first}: {cause}", *(f"--- rank {rank}\n{text}" for rank, text in texts.items())])


def prepare(variables: dict[str, str], path: list[str]) -> None:
    """Initialize a rank's process: variables, import paths, interrupts that raise, and stack dumps on request.

    Its garbage collections leave out what the server has loaded before the fork.
    """
    gc.freeze()
    sys.path[:] = path
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1)


def obey(pipe: Connection, join: Callable[[], Sequence[Any]]) -> Sequence[Any] | None:
    """Join, then run the functions received through the pipe until it closes.

    Args:
        pipe: connection to the test.
        join: returns the first arguments of the functions.

    Returns:
        The same; None if joining failed.
    """
    try:
        given = join()
    except BaseException as error:
        _answer(pipe, error)
        return None
    _answer(pipe, None)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while (call := pipe.recv()) is not None:
            *name, args = call
            try:
                _answer(pipe, _find(*name)(*given, *args))
            except BaseException as error:
                _answer(pipe, error)
    return given


_modules: dict[str, ModuleType] = {}


def _find(file: str, module: str, qualname: str) -> Callable[..., Any]:
    """Look up the function; a test file that cannot be imported by name is loaded from its path."""
    found = _modules.get(file)
    if found is None:
        try:
            found = importlib.import_module(module)
        except ImportError:
            spec = importlib.util.spec_from_file_location(module, file)
            assert spec is not None and spec.loader is not None
            found = importlib.util.module_from_spec(spec)
            sys.modules[module] = found
            spec.loader.exec_module(found)
        _modules[file] = found
    target: Any = found
    for part in qualname.split("."):
        target = getattr(target, part)
    function: Callable[..., Any] = target
    return function


def _answer(pipe: Connection, outcome: Any) -> None:
    text = ""
    if isinstance(outcome, BaseException):
        text = "".join(traceback.format_exception(outcome))
        outcome.__traceback__ = None
    try:
        pipe.send((outcome, text))
    except Exception:  # not picklable, for any reason
        pipe.send((RuntimeError(repr(outcome)), text or f"result {outcome!r} cannot be pickled"))
