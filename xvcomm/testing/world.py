"""Real rank processes that tests call functions on; they stay between calls, so that a call costs milliseconds."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from types import MappingProxyType, ModuleType
from typing import Any

from xvcomm.store.server import TcpServer
from xvcomm.topology import parse_islands

_PRELOAD = ["xvcomm.communicator", "xvcomm.bootstrap", "xvcomm.backends.host.collective", "xvcomm.backends.host.device"]
_SECRET = "world"
_START_SECONDS = 60.0


class RankFailure(AssertionError):
    """At least one rank raised or died; holds every rank's outcome.

    Attributes:
        outcomes: a rank's result, or the exception it raised; EOFError if the process died.
    """

    def __init__(self, message: str, outcomes: list[Any]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


class World:
    """Ranks of one job on this machine, each in its own process with a communicator.

    Functions run on the ranks as `function(comm, *args)`; they must lie at the top level of a module or test file,
    and arguments and results must be picklable.

        with World(islands="cuda:2,rocm:2") as world:
            world.run(check_all_reduce, "float32")

    Args:
        size: number of ranks; from `islands` or `devices` if left out.
        islands: labels, `"cuda:2,rocm:2"`: a rehearsal.
        devices: kinds of device, `"cuda:2,host:2"`; the ranks of each kind take its devices one after the other.
        env: further variables of the ranks; one for all, or one a rank.
        timeout: of the communicators, in seconds.
    """

    def __init__(
        self, size: int | None = None, islands: str | None = None, *, devices: str | None = None,
        env: Mapping[str, str] | Sequence[Mapping[str, str]] = MappingProxyType({}), timeout: float = 20.0,
    ) -> None:  # fmt: skip
        kinds = parse_islands(devices) if devices else ()
        labels: Sequence[str | None] = parse_islands(islands) if islands else [None] * (size or len(kinds) or 1)
        self.size = len(labels)
        further = [env] * self.size if isinstance(env, Mapping) else env
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._processes = []
        self._pipes: list[Connection] = []
        self._closing, theirs = context.Pipe()
        self._server = context.Process(target=_serve_store, args=(theirs,), daemon=True)
        self._server.start()
        theirs.close()
        address = self._closing.recv()
        for rank, label in enumerate(labels):
            variables = {
                "XVCOMM_RANK": str(rank), "XVCOMM_SIZE": str(self.size), "XVCOMM_STORE": address,
                "XVCOMM_LOCAL_RANK": str(rank), "XVCOMM_LOCAL_SIZE": str(self.size),
                "XVCOMM_SECRET": _SECRET, "XVCOMM_TIMEOUT": str(timeout), "XVCOMM_ISLAND": label or "",
                **(_device_variables(kinds, rank) if kinds else {}), **further[rank],
            }  # fmt: skip
            ours, theirs = context.Pipe()
            path = [*filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
            process = context.Process(target=_rank_main, args=(theirs, variables, path), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        try:
            self._collect(_START_SECONDS)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call `function(comm, *args)` on all ranks; gives the results in rank order.

        Raises:
            RankFailure: a rank raised, died, or did not answer in time; the text holds every traceback.
        """
        for rank in range(self.size):
            self.submit(rank, function, *args)
        return self._collect(timeout)

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """As `run`, but gives exceptions in place of results and raises nothing for them."""
        try:
            return self.run(function, *args, timeout=timeout)
        except RankFailure as failure:
            return failure.outcomes

    def submit(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        """Call a function on one rank and do not wait; `collect` gives what comes back."""
        with contextlib.suppress(BrokenPipeError):
            file = inspect.getfile(inspect.unwrap(function))
            self._pipes[rank].send((file, function.__module__, function.__qualname__, args))

    def collect(self, timeout: float = 60.0) -> list[Any]:
        """Results or exceptions of the calls submitted, one a rank that is alive or died meanwhile."""
        try:
            return self._collect(timeout)
        except RankFailure as failure:
            return failure.outcomes

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank's process."""
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def pids(self) -> list[int]:
        """Process numbers, in rank order."""
        return [p.pid or 0 for p in self._processes]

    def _collect(self, timeout: float) -> list[Any]:
        outcomes: list[Any] = [TimeoutError("no answer in time")] * self.size
        texts: dict[int, str] = {}
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = wait(list(waiting), timeout)
            if not ready:
                texts.update(dict.fromkeys(waiting.values(), "no answer in time"))
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    outcome, text = self._pipes[rank].recv()
                except (EOFError, ConnectionError):
                    outcome, text = EOFError(f"rank {rank} died"), "the process died"
                outcomes[rank] = outcome
                if text:
                    texts[rank] = text
        if texts:
            report = "\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(texts.items()))
            raise RankFailure(report, outcomes)
        return outcomes

    def close(self) -> None:
        """End all ranks, those that do not answer by force. Idempotent."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            _end(process)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if not self._closing.closed:
            self._closing.close()
            _end(self._server)


def _end(process: ForkServerProcess) -> None:
    """Wait for a process that was asked to end; not for ever."""
    process.join(5.0)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


def _serve_store(pipe: Connection) -> None:
    """Where the ranks meet, until the pipe closes. A process of its own: ranks come and go, and connections with them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the ranks
    server = TcpServer("127.0.0.1", 0, _SECRET)
    pipe.send(server.address)
    with contextlib.suppress(EOFError):
        pipe.recv()
    server.close()


def _device_variables(kinds: Sequence[str], rank: int) -> dict[str, str]:
    kind = kinds[rank]
    index = {} if kind == "host" else {"XVCOMM_DEVICE_INDEX": str(kinds[:rank].count(kind))}
    return {"XVCOMM_DEVICE": kind, **index}


_modules: dict[str, ModuleType] = {}


def _find(file: str, module: str, qualname: str) -> Callable[..., Any]:
    """The function; a test file that cannot be imported by name is loaded from where it lies."""
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


def _rank_main(pipe: Connection, variables: dict[str, str], path: list[str]) -> None:
    """A rank's process: join, then call what comes down the pipe until it closes."""
    import xvcomm

    sys.path[:] = path
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        comm = xvcomm.init()
    except BaseException as error:
        _answer(pipe, error)
        return
    _answer(pipe, None)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while (call := pipe.recv()) is not None:
            *name, args = call
            try:
                _answer(pipe, _find(*name)(comm, *args))
            except BaseException as error:
                _answer(pipe, error)
    comm.close()


def _answer(pipe: Connection, outcome: Any) -> None:
    text = ""
    if isinstance(outcome, BaseException):
        text = "".join(traceback.format_exception(outcome))
        outcome.__traceback__ = None
    try:
        pipe.send((outcome, text))
    except (TypeError, AttributeError, ValueError):  # cannot be pickled
        pipe.send((RuntimeError(repr(outcome)), text or f"result {outcome!r} cannot be pickled"))
