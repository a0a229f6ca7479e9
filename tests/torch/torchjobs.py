"""Torch jobs for tests: real rank processes that joined one default group and stay between calls.

As `xvcomm.testing.world.World`, but plain torch programs: ranks find each other as under torchrun, and the functions called
on them use `torch.distributed` alone. The variable TORCH_BACKEND runs the same tests on another backend, for instance gloo.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import inspect
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from multiprocessing import context, forkserver, popen_forkserver
from multiprocessing.connection import Connection, Pipe, wait
from types import MappingProxyType, ModuleType
from typing import Any

from xvcomm.testing.world import RankFailure
from xvcomm.topology import parse_islands

BACKEND = os.environ.get("TORCH_BACKEND", "xvcomm")
TIMEOUT = 30.0
_START_SECONDS = 60.0
_GRACE_SECONDS = 5.0
_PRELOAD = [
    "pytest", "torch", "torch.distributed", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining", "torch.distributed.checkpoint", "torch.distributed.optim", "torch.nn.parallel",
    "torch.distributed.nn.functional", "xvcomm.communicator", "xvcomm.bootstrap", "xvcomm.backends.host",
    "xvcomm.backends.host.collective", "xvcomm.backends.host.device", "torchjobs", "torchchecks",
]  # fmt: skip

# A server of its own: the one of multiprocessing forks ranks without torch, and what it preloads is settled by who comes first.
_server = forkserver.ForkServer()
_server.set_forkserver_preload(_PRELOAD)


class _Popen(popen_forkserver.Popen):
    def _launch(self, process_obj: Any) -> None:
        theirs = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = _server.connect_to_new_process
        try:
            super()._launch(process_obj)
        finally:
            forkserver.connect_to_new_process = theirs


class _Process(context.ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:
        return _Popen(process_obj)


class Job:
    """Ranks of one torch job on this machine, each in its own process with the default group made.

    Functions run on the ranks as `function(*args)`; they must lie at the top level of a test file, and arguments and
    results must be picklable.

    Args:
        islands: labels of the ranks, `"cuda:2,rocm:2"`: a rehearsal.
        backend: what `init_process_group` gets; the default group is not made if it is None.
        env: further variables of the ranks; or a sequence of them, one for each rank.
        timeout: of the default group, in seconds.

    Attributes:
        broken: whether a call failed, so that nobody knows what the ranks are doing.
    """

    def __init__(
        self, islands: str, backend: str | None = BACKEND, *,
        env: Mapping[str, str] | Sequence[Mapping[str, str]] = MappingProxyType({}), timeout: float = TIMEOUT,
    ) -> None:  # fmt: skip
        labels = parse_islands(islands)
        each = [env] * len(labels) if isinstance(env, Mapping) else env
        self.size = len(labels)
        self.broken = False
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store, theirs = Pipe()
        self._store_process = _Process(target=_serve_store, args=(theirs,), daemon=True)
        self._store_process.start()
        theirs.close()
        port = self._store.recv()
        for rank, label in enumerate(labels):
            variables = {
                "RANK": str(rank), "WORLD_SIZE": str(self.size), "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(self.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1", "XVCOMM_DEVICE": "host",
                "XVCOMM_ISLAND": label, **each[rank],
            }  # fmt: skip
            ours, theirs = Pipe()
            arguments = (theirs, variables, list(sys.path), backend, timeout)
            process = _Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        try:
            self._collect(range(self.size), _START_SECONDS)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call `function(*args)` on all ranks; gives the results in rank order.

        Raises:
            RankFailure: a rank raised, died, or did not answer in time; the text holds every traceback.
        """
        for rank in range(self.size):
            self.submit(rank, function, *args)
        return self._collect(range(self.size), timeout)

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """As `run`, but gives exceptions in place of results and raises nothing for them."""
        try:
            return self.run(function, *args, timeout=timeout)
        except RankFailure as failure:
            return failure.outcomes

    def submit(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        """Call a function on one rank and do not wait; `collect` gives what comes back."""
        with contextlib.suppress(BrokenPipeError):
            self._pipes[rank].send((inspect.getfile(function), function.__module__, function.__qualname__, args))

    def collect(self, *ranks: int, timeout: float = 60.0) -> list[Any]:
        """Results or exceptions of the calls submitted to these ranks."""
        try:
            outcomes = self._collect(ranks, timeout)
        except RankFailure as failure:
            outcomes = failure.outcomes
        return [outcomes[rank] for rank in ranks]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank's process."""
        os.kill(self._processes[rank].pid, number)

    def _collect(self, ranks: Any, timeout: float) -> list[Any]:
        """What the ranks answer; once one has failed, the others have a short time left."""
        outcomes: list[Any] = [None] * self.size
        texts: dict[int, str] = {}
        waiting: dict[Any, int] = {self._pipes[rank]: rank for rank in ranks}
        end = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                self._show_stacks(waiting.values())
                texts.update(dict.fromkeys(waiting.values(), "no answer in time"))
                outcomes = [TimeoutError("no answer") if r in waiting.values() else o for r, o in enumerate(outcomes)]
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    outcomes[rank], text = self._pipes[rank].recv()
                except (EOFError, ConnectionError):
                    outcomes[rank], text = EOFError(f"rank {rank} died"), "the process died"
                if text:
                    texts[rank] = text
                    end = min(end, time.monotonic() + _GRACE_SECONDS)
        if texts:
            self.broken = True
            report = "\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(texts.items()))
            raise RankFailure(report, outcomes)
        return outcomes

    def _show_stacks(self, ranks: Iterable[int]) -> None:
        """Let ranks that hang write to stderr where they are."""
        for rank in ranks:
            self.kill(rank, signal.SIGUSR1)
        time.sleep(0.2)

    def close(self) -> None:
        """End all ranks, those that do not answer by force. Idempotent."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            _end(process, 1.0 if self.broken else 10.0)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if not self._store.closed:
            self._store.close()
            _end(self._store_process, 5.0)


def _end(process: Any, seconds: float) -> None:
    """Wait for a process that was asked to end; not for ever."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


def _serve_store(pipe: Connection) -> None:
    """The job's store, as torchrun's agent has it: in a process of its own, which survives every rank."""
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    with contextlib.suppress(EOFError):
        pipe.recv()


_modules: dict[str, ModuleType] = {}


def _find(file: str, module: str, qualname: str) -> Callable[..., Any]:
    """The function, from its file: test folders are not packages."""
    if file not in _modules:
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None and spec.loader is not None
        _modules[file] = sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(_modules[file])
    target: Any = _modules[file]
    for part in qualname.split("."):
        target = getattr(target, part)
    found: Callable[..., Any] = target
    return found


def _rank_main(
    pipe: Connection, variables: dict[str, str], path: list[str], backend: str | None, timeout: float
) -> None:
    """A rank's process: join, then call what comes down the pipe until it closes."""
    import torch
    import torch.distributed as dist

    sys.path[:] = path
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.set_debug_level_from_env()
    try:
        if backend is not None:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except BaseException as error:
        _answer(pipe, error)
        return
    _answer(pipe, None)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while (call := pipe.recv()) is not None:
            *name, args = call
            try:
                _answer(pipe, _find(*name)(*args))
            except BaseException as error:
                _answer(pipe, error)
    if dist.is_initialized():
        dist.destroy_process_group()


def _answer(pipe: Connection, outcome: Any) -> None:
    text = ""
    if isinstance(outcome, BaseException):
        text = "".join(traceback.format_exception(outcome))
        outcome.__traceback__ = None
    try:
        pipe.send((outcome, text))
    except Exception:  # cannot be pickled
        pipe.send((RuntimeError(repr(outcome)), text or f"result {outcome!r} cannot be pickled"))


def launch(*command: str, env: Mapping[str, str] = MappingProxyType({}), timeout: float = 100.0) -> str:
    """Output of a program in a session of its own, all of which ends if it hangs; it must succeed.

    Args:
        env: further variables; those of xvcomm and of launchers are taken away first.
    """
    foreign = ("XVCOMM_", "OMPI_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    variables |= {"XVCOMM_DEVICE": "host", "OMP_NUM_THREADS": "1", **env}
    process = subprocess.Popen(
        command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        out, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        raise AssertionError(f"{' '.join(command)} hangs:\n{out}") from None
    assert process.returncode == 0, out
    return out
