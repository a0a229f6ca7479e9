"""Forks Python programs for `client.py`, with modules imported once: `server.py SOCKET MODULE...`. Ends with its standard input.

It prints a line when it is ready. A connection carries one program: what to run, then its process ID and at its end its exit
code. If the client ends first, the program is killed.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import marshal
import multiprocessing.spawn  # noqa: F401 - it keeps the interpreter's own path, also where programs have a client's
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable
from typing import NamedTuple, TextIO

_MAX_PASSED = 16
"""Descriptors that a client passes at most."""
_libc = ctypes.CDLL(None, use_errno=True)


class Program(NamedTuple):
    """What a client asks for: arguments as Python has them, beginning with the program, `-m` or `-c`."""

    client: str
    arguments: list[str]
    options: list[str]
    folder: str
    variables: dict[str, str]
    limits: dict[int, tuple[int, int]]

    def run(self) -> None:
        """Be this program, in a process forked for it; returns at the end of the program."""
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.variables)
        for number, limit in self.limits.items():
            resource.setrlimit(number, limit)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if "-u" in self.options or "PYTHONUNBUFFERED" in self.variables:
            sys.stdout, sys.stderr = _unbuffered(sys.stdout), _unbuffered(sys.stderr)
        sys.executable = self.client  # what this program starts is forked too
        first, *rest = self.arguments
        added = filter(None, self.variables.get("PYTHONPATH", "").split(os.pathsep))
        place = os.path.dirname(os.path.abspath(first)) if first[0] != "-" else ""
        sys.path[:0] = [*([place] if "-P" not in self.options else []), *added]
        if first == "-m":
            sys.argv = rest
            sys.modules.pop(rest[0], None)  # else runpy warns
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = self.arguments
            runpy.run_path(first, run_name="__main__")


class Server:
    """Runs until its standard input ends; in a process that it has forked, until that has become a program."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._running: dict[int, tuple[socket.socket, int]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._start)
        self._selector.register(sys.stdin, selectors.EVENT_READ, self._stop)
        self._over = False

    def run(self) -> Program | None:
        """The program to be run by this process; None where it is the server, at its end."""
        while not self._over:
            for key, _ in self._selector.select():
                program = key.data()
                if program is not None:
                    return program
        return None

    def _start(self) -> Program | None:
        connection, _ = self._listener.accept()
        try:
            program, streams, namespaces = _receive(connection)
        except (OSError, ValueError, EOFError, TypeError):  # the client was killed
            connection.close()
            return None
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            _enter(namespaces)
        for descriptor in streams + namespaces:
            os.close(descriptor)
        if child == 0:
            connection.close()
            self._let_go()
            return program
        with contextlib.suppress(OSError):  # it may have done so itself, and have ended
            os.setpgid(child, child)
        ended = os.pidfd_open(child)
        self._running[child] = connection, ended
        self._selector.register(ended, selectors.EVENT_READ, lambda: self._end(child))
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._abandon(child))
        _send(connection, child)
        return None

    def _end(self, child: int) -> None:
        connection, ended = self._running.pop(child)
        _send(connection, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        with contextlib.suppress(KeyError):  # the client had ended before
            self._selector.unregister(connection)
        self._selector.unregister(ended)
        connection.close()
        os.close(ended)

    def _abandon(self, child: int) -> None:
        if child in self._running:
            self._selector.unregister(self._running[child][0])
            os.killpg(child, signal.SIGKILL)

    def _stop(self) -> None:
        self._over = True
        for child in self._running:
            os.killpg(child, signal.SIGKILL)

    def _let_go(self) -> None:
        self._selector.close()
        self._listener.close()
        for connection, ended in self._running.values():
            connection.close()
            os.close(ended)


def _unbuffered(stream: TextIO) -> TextIO:
    """A stream as the interpreter makes it for `-u`; a program that forks would otherwise write twice what is in the buffer."""
    raw = io.FileIO(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, write_through=True)  # type: ignore[arg-type]


def _receive(connection: socket.socket) -> tuple[Program, list[int], list[int]]:
    """What to run, its three streams, and its namespaces."""
    length, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(_MAX_PASSED * array.array("i").itemsize))
    ((_, _, data),) = ancillary
    passed = array.array("i", data).tolist()
    try:
        program = Program(*marshal.loads(connection.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)))
    except Exception:
        for descriptor in passed:
            os.close(descriptor)
        raise
    return program, passed[:3], passed[3:]


def _enter(namespaces: list[int]) -> None:
    """Join those that differ from this process's own, which may need root."""
    own = {os.stat(f"/proc/self/ns/{name}").st_ino for name in os.listdir("/proc/self/ns")}
    for namespace in namespaces:
        if os.fstat(namespace).st_ino not in own and _libc.setns(namespace, 0):
            number = ctypes.get_errno()
            raise OSError(number, f"cannot join a namespace of the caller: {os.strerror(number)}")


def _send(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the client was killed
        connection.sendall(number.to_bytes(4, "big", signed=True))


def _end_with(run: Callable[[], None]) -> None:
    """End this process as the interpreter does after a program, but without taking apart all modules, which takes long."""
    code: int | None = 0
    try:
        run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int | None) else 1
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException as error:
        sys.last_value, code = error, 1
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            atexit.register(lambda: signal.raise_signal(signal.SIGINT))
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    del sys.path[0]  # this folder
    path, *modules = sys.argv[1:]
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    server = Server(path)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    forked = server.run()
    if forked is not None:
        _end_with(forked.run)
